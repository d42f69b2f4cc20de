"""The certificate of real jobs: clean resumes raise no alarm."""

import os
from pathlib import Path

import pytest

from tests.launch.pretrain import launch, megatron_lm

pytestmark = pytest.mark.slow

_DISTRIBUTED = ("--bf16", "--use-distributed-optimizer", "--train-iters", "4")
MUON = (*_DISTRIBUTED, "--optimizer", "muon")
EXPERTS = (
    *(*_DISTRIBUTED, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--num-experts", "4"),
    *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
)


@pytest.mark.parametrize(("arguments", "ranks"), [(EXPERTS, 4), (MUON, 2)], ids=["experts", "muon"])
def test_a_resume_is_as_saved(arguments: tuple[str, ...], ranks: int, launches: Path, tmp_path: Path) -> None:
    if "dist_muon" not in (megatron_lm() / "megatron/training/arguments.py").read_text():
        pytest.skip("this Megatron-LM is older than Muon's distributed optimizer")
    packages = [Path(folder) for folder in os.environ.get("MEGATRON_LM_PATH", "").split(":")]
    if arguments is MUON and not any((folder / "emerging_optimizers").is_dir() for folder in packages):
        pytest.skip("MEGATRON_LM_PATH names no folder with emerging_optimizers, of NVIDIA-NeMo/Emerging-Optimizers")
    place = tmp_path / "certified"
    run = launch("ours", ranks, [*arguments, "--save", f"{place}/saved", "--save-interval", "2"], place / "run")
    loading = [*arguments, "--load", f"{place}/saved", "--ckpt-step", "2"]
    on = launch("ours", ranks, loading, place / "on", {"MCORE_CKPT_CERTIFY": "warn"})
    (line,) = [line for line in on.log.splitlines() if "resumed from iter_0000002" in line]
    assert "as saved: " in line
    assert "NOT" not in line
    assert on.losses == {iteration: loss for iteration, loss in run.losses.items() if iteration > 2}
