"""The certificate of real jobs: what Megatron once did wrong after a load is named; clean resumes raise no alarm."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.launch.pretrain import launch, megatron_lm

pytestmark = pytest.mark.slow

_DISTRIBUTED = ("--bf16", "--use-distributed-optimizer", "--train-iters", "4")
MUON = (*_DISTRIBUTED, "--optimizer", "muon")
OFFLOADED = (*_DISTRIBUTED, "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
EXPERTS = (
    *(*_DISTRIBUTED, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--num-experts", "4"),
    *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
)
# As a job with Transformer Engine saves its optimizer's class; here that is of the tests.
_WARN = {"MCORE_CKPT_CERTIFY": "warn", "MCORE_CKPT_ALLOWED_CLASSES": "launch_cpu_megatron.FusedAdam"}


@pytest.mark.parametrize(
    ("arguments", "ranks", "fault", "said"),
    [
        (EXPERTS, 4, None, ""),
        (MUON, 2, None, ""),
        (OFFLOADED, 2, "masters", r"master \S+\.weight\[element \d+\] on rank 1: expected "),
    ],
    ids=["experts", "muon", "offloaded"],
)
def test_a_resume_is_as_saved_or_what_differs_is_named(
    arguments: tuple[str, ...], ranks: int, fault: str | None, said: str, launches: Path, tmp_path: Path
) -> None:
    if "dist_muon" not in (megatron_lm() / "megatron/training/arguments.py").read_text():
        pytest.skip("this Megatron-LM is older than Muon's distributed optimizer")
    packages = [Path(folder) for folder in os.environ.get("MEGATRON_LM_PATH", "").split(":")]
    if arguments is MUON and not any((folder / "emerging_optimizers").is_dir() for folder in packages):
        pytest.skip("MEGATRON_LM_PATH names no folder with emerging_optimizers, of NVIDIA-NeMo/Emerging-Optimizers")
    place = tmp_path / "certified"
    run = launch("ours", ranks, [*arguments, "--save", f"{place}/saved", "--save-interval", "2"], place / "run")
    loading = [*arguments, "--load", f"{place}/saved", "--ckpt-step", "2"]
    later = {iteration: loss for iteration, loss in run.losses.items() if iteration > 2}
    for name in dict.fromkeys((None, fault)):
        environment = _WARN if name is None else {**_WARN, "LAUNCH_FAULT": name}
        on = launch("ours", ranks, loading, place / f"on-{name}", environment)
        (line,) = [line for line in on.log.splitlines() if "resumed from iter_0000002" in line]
        if arguments is OFFLOADED and name is None:
            # Megatron 0.19 counts the steps of this optimizer anew.
            assert re.search(r"\['step'\] on rank 0: expected 2, got 1", line), line
            assert "master " not in line
        elif name is None:
            assert "as saved: " in line
            assert "NOT" not in line
            assert on.losses == later
        else:
            assert re.search(f"NOT as saved: .*{said}", line), line
