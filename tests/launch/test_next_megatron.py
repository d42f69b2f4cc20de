"""`pretrain_gpt.py` of a Megatron-LM that has no asynchronous saves of its own, without nvidia-resiliency-ext.

The tree is made of the checkout (`next_megatron.py`); what training computes is compared with the checkout itself.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch.next_megatron import without_own_async
from tests.launch.pretrain import Launched, launch, megatron_lm, tracked_iteration
from tests.launch.variants import ASYNC, Variant, assert_whole

pytestmark = pytest.mark.slow

_NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
_DISTRIBUTED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", *_NO_DROPOUT)
_PP2 = ("--pipeline-model-parallel-size", "2")
_EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none")
# Flags since 0.19: objects of each rank read by itself, and the group of the experts' data parallel ranks.
_IN_PARALLEL = (
    *("--ckpt-fully-parallel-load", "--ckpt-fully-parallel-load-per-rank-objects"),
    *("--ckpt-fully-parallel-save-process-group", "ep_dp", "--ckpt-fully-parallel-load-process-group", "ep_dp"),
)
VARIANTS = [
    Variant("synchronous", ("--tensor-model-parallel-size", "2")),
    Variant("async-distributed", (*ASYNC, *_DISTRIBUTED)),
    Variant("async-experts", (*ASYNC, *_DISTRIBUTED, *_EXPERTS, "--expert-model-parallel-size", "2", *_IN_PARALLEL)),
    Variant("async-muon", (*ASYNC, *_NO_DROPOUT, "--optimizer", "muon")),
]


@pytest.fixture(scope="module")
def next_megatron(launches: Path) -> Path:
    """The tree."""
    if "dist_checkpointing.strategies.nvrx" not in (megatron_lm() / "megatron/training/async_utils.py").read_text():
        pytest.skip("the next Megatron is made from 0.20")
    return without_own_async(megatron_lm(), launches / "next-megatron")


def _run(variant: Variant, checkpoints: Path, place: Path, tree: Path, *more: str, **how: object) -> Launched:
    saving = ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "1"]
    return launch("ours", 2, [*variant.arguments, *saving, *more], place, tree=tree, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_saves_is_killed_and_resumed_as_if_it_had_never_ended(
    variant: Variant, next_megatron: Path, launches: Path, tmp_path: Path
) -> None:
    if variant.name == "async-muon" and find_spec("emerging_optimizers") is None:
        pytest.skip("Megatron's Muon is in the package emerging-optimizers, which is not installed")
    never_ended = launch("stock", 2, [a for a in variant.arguments if a not in ASYNC], launches / variant.name)
    checkpoints, method = tmp_path / "checkpoints", "async_save" if variant.is_async else "save"
    kill = {"LAUNCH_KILL": f"1:TorchDistSaveStrategy.{method}:4"}
    killed = _run(variant, checkpoints, tmp_path / "killed", next_megatron, environment=kill, expected_exit=None)
    assert "SIGKILL" in killed.log
    tracked = tracked_iteration(checkpoints)
    assert tracked in (1, 2, 3)
    assert_whole(checkpoints / f"iter_{tracked:07d}")
    other_layout = _PP2 if variant.name == "async-distributed" else ()
    again = _run(variant, checkpoints, tmp_path / "again", next_megatron, *other_layout)
    assert again.strategies() == {f"mcore_ckpt.{method}", "mcore_ckpt.load"}
    later = {iteration: loss for iteration, loss in never_ended.losses.items() if iteration > tracked}
    # Another layout adds in another order.
    assert again.losses == (pytest.approx(later, rel=2e-6) if other_layout else later)
    assert_whole(checkpoints / "iter_0000006")
