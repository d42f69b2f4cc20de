"""Saves of one strategy that are begun before the one before is committed do not get in each other's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from tests.support.gloo_ranks import run_ranks

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")


def _state(rank: int, number: int) -> dict[str, Any]:
    """Every second save has another structure, of the same number of bytes."""
    from megatron.core.dist_checkpointing import ShardedTensor

    keys = ["a", "b"] if number % 2 else ["c", "d"]
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.arange(1000.0) + 100 * number + place, (0, rank, 2))
        for place, key in enumerate(keys)
    }


def _save_before_committing(rank: int, directory: str, in_flight: int) -> None:
    options = SaveOptions(max_in_flight=in_flight, progress=False)
    queue, strategy = AsyncCallsQueue(options=options), TorchDistSaveStrategy(options=options)
    for number in range(6):
        path = Path(directory) / str(number)
        path.mkdir(parents=True, exist_ok=True)
        state = _state(rank, number)
        queue.schedule_async_request(strategy.async_save(state, path))
        for shard in state.values():
            shard.data.zero_()
    assert queue.maybe_finalize_async_calls(blocking=True) == list(range(6))
    for number in range(6):
        wanted = _state(rank, number)
        for shard in wanted.values():
            shard.data.fill_(-1)
        loaded = TorchDistLoadStrategy().load(wanted, Path(directory) / str(number))
        for key, shard in _state(rank, number).items():
            assert torch.equal(loaded[key], shard.data), (number, key)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_six_saves_begun_before_the_first_is_committed(in_flight: int, tmp_path: Path) -> None:
    run_ranks(_save_before_committing, 2, str(tmp_path), in_flight)
