"""Flat buckets under another layout: the error names the command after which the checkpoint loads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mcore_ckpt.megatron.layout_advice import advise_on
from tests.support.gloo_ranks import run_pretending_ranks as run_ranks

_BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has notes since Python 3.11")
def test_the_line_below_megatrons_error_names_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM raises that before it loads the optimizer's state."""
    arguments = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(load="/runs/a b", ckpt_step=30))
    command = "'/runs/a b/iter_0000030' '/runs/a b-fully_reshardable/iter_0000030'"
    then = "--load '/runs/a b-fully_reshardable' --ckpt-step 30"
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", arguments)  # type: ignore[arg-type]
    error = RuntimeError(
        "(TP, PP) mismatch after resume ((1, 1) vs (2, 1) from checkpoint): not supported for DistributedOptimizer "
        "with sharding type dp_reshardable. Please use `--ckpt-fully-parallel-save` flag during checkpoint saving."
    )
    advise_on(error)
    assert f"mcore-ckpt reshard {command} --optimizer-layout fully_reshardable; then {then}" in error.__notes__[0]


def _load_larger(rank: int, run: Path) -> str:
    from megatron.core.dist_checkpointing import ShardedTensor, load, save

    from mcore_ckpt import TorchDistLoadStrategy, TorchDistSaveStrategy
    from mcore_ckpt.core.errors import LoadError

    def state(elements: int) -> dict[str, ShardedTensor]:
        return {"bucket": ShardedTensor.from_rank_offsets(_BUCKET, torch.ones(elements))}

    path = run / "iter_0000030"
    path.mkdir(parents=True)
    save(state(64), str(path), TorchDistSaveStrategy())
    with pytest.raises(LoadError) as refused:
        load(state(128), str(path), TorchDistLoadStrategy())
    return str(refused.value)


def test_a_load_of_buckets_of_another_size_names_the_conversion(tmp_path: Path) -> None:
    run = tmp_path / "run"
    [said] = run_ranks(_load_larger, 1, run)
    converted = f"{run}-fully_reshardable"
    command = f"mcore-ckpt reshard {run}/iter_0000030 {converted}/iter_0000030 --optimizer-layout fully_reshardable"
    assert said.endswith(f"Convert it, for any layout: {command}; then --load {converted} --ckpt-step 30")
