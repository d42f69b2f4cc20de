"""Whole calls of Megatron-Core's `save` and `load` on real gloo ranks, with this package installed and without.

Each rank has rows of as many tensors as asked, of 1 KB each, so that what is measured is planning, exchanges, checks
and `.metadata` and not bytes. One side's ranks end before the other's begin: those of Megatron-Core's take gigabytes.
A call's cost is the processor time of all ranks, their writer processes among them. What is loaded is compared bit by
bit.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.measure import cpu_s
from tests.support.standing_ranks import StandingRanks, standing_ranks

__all__ = ["CALLS", "OURS", "STOCK", "Call", "measure_calls"]

OURS: Final = "mcore_ckpt"
STOCK: Final = "Megatron-Core"
FIRST, LATER, LOAD, RESUMED, HALVED = CALLS = (
    "first save",
    "later save",
    "load",
    "first save after it",
    "load with half as many parts",
)
_SAVES = 2  # of `CALLS`, before the first load
_ROWS, _COLUMNS = 4, 64  # of float32: 1 KB
_PRELOAD = {
    OURS: ["tests.support.pretending_megatron", "mcore_ckpt.megatron.install"],
    STOCK: ["tests.support.pretending_megatron"],
}
_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Call:
    """What one call cost.

    Attributes:
        side: `OURS` or `STOCK`.
        call: one of `CALLS`.
        ranks: how many.
        items: tensors of which each rank has rows.
        cpu_s: processor seconds of all ranks and their children.
        seconds: of the slowest rank; the machine has fewer cores than there are ranks.
    """

    side: str
    call: str
    ranks: int
    items: int
    cpu_s: float
    seconds: float


class _Trainer:
    """What a rank of a training job keeps between its calls."""

    def __init__(self, side: str, rank: int) -> None:
        from megatron.core.dist_checkpointing import serialization

        if side == OURS:
            from mcore_ckpt.megatron.install import install

            install()
        self.rank = rank
        self._strategies = serialization
        self.restart()

    def restart(self) -> None:
        """Forget what the saves so far have laid out, as a job does that starts again."""
        self.strategy = self._strategies.get_default_save_sharded_strategy("torch_dist")
        self.strategy.use_cached_ckpt_structure = True

    def load(self, state: dict[str, Any], directory: str) -> Any:
        """Load, and hand on to the next save what Megatron does with `--ckpt-assume-constant-structure`."""
        from megatron.core.dist_checkpointing import load

        strategy = self._strategies.get_default_load_sharded_strategy(directory)
        loaded = load(state, directory, strategy)
        self.strategy.cached_global_metadata = strategy.cached_global_metadata
        return loaded


_trainers: dict[str, _Trainer] = {}


def measure_calls(side: str, ranks: int, items: int, load_items: int) -> list[Call]:
    """All of `CALLS` by one side: the first two with `items` tensors, the loads and the save between with `load_items`.

    Raises:
        RuntimeError: a rank failed, or has loaded other bits than were saved.
        AssertionError: a rank hangs.
    """
    found: dict[tuple[int, str], Call] = {}
    with (
        tempfile.TemporaryDirectory(prefix="whole-calls-") as scratch,
        standing_ranks(ranks, preload=_PRELOAD[side]) as group,
    ):
        # Once with one tensor: what is imported and connected at a first call.
        for count, calls in {1: CALLS, items: CALLS[:_SAVES], load_items: CALLS}.items():
            for call in calls:
                cost = _cost(group, _CALLS[call], side, f"{scratch}/{count}", count)
                found[count, call] = Call(side, call, ranks, count, *cost)
    return [found[items if call in CALLS[:_SAVES] else load_items, call] for call in CALLS]


def _cost(
    group: StandingRanks, function: Callable[..., tuple[float, float]], side: str, directory: str, items: int
) -> tuple[float, float]:
    outcomes = group.call(function, side, directory, items, within_s=_WITHIN_S)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise RuntimeError(f"{side}, rank {failed[0].rank}: {failed[0].error_text}")
    spent, took = zip(*(outcome.value for outcome in outcomes), strict=True)
    return sum(spent), max(took)


def _timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the calls before have freed: there are many ranks, and one machine's memory
    dist.barrier()
    spent, began = cpu_s(), time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    return result, (cpu_s() - spent, took)


def _trainer(side: str, rank: int) -> _Trainer:
    if side not in _trainers:
        _trainers[side] = _Trainer(side, rank)
    return _trainers[side]


def _state(part: int, parts: int, items: int, fill: bool) -> dict[str, Any]:
    """Rows `part` of `parts` of each tensor; of all ranks' tensors the same sizes, whoever has which."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rows = _ROWS * dist.get_world_size() // parts
    state: dict[str, Any] = {}
    for n in range(items):
        first = (part * rows * _COLUMNS + n) if fill else 0
        data = (
            torch.arange(first, first + rows * _COLUMNS, dtype=torch.float32) if fill else torch.zeros(rows * _COLUMNS)
        )
        key = f"model.layer{n:05}.weight"
        replica = 0 if parts == dist.get_world_size() else dist.get_rank() % 2
        state[key] = ShardedTensor.from_rank_offsets(
            key, data.view(rows, _COLUMNS), (0, part, parts), replica_id=replica
        )
    return state


def _save(rank: int, side: str, directory: str, items: int, name: str) -> tuple[float, float]:
    from megatron.core.dist_checkpointing import save

    trainer, path = _trainer(side, rank), Path(directory) / name
    path.mkdir(parents=True, exist_ok=True)
    state = _state(rank, dist.get_world_size(), items, fill=True)
    return _timed(lambda: save(state, str(path), trainer.strategy))[1]


def _first(rank: int, side: str, directory: str, items: int) -> tuple[float, float]:
    _trainer(side, rank).restart()
    return _save(rank, side, directory, items, "0")


def _later(rank: int, side: str, directory: str, items: int) -> tuple[float, float]:
    _save(rank, side, directory, items, "1")  # the second save of a structure may still learn something; the third not
    return _save(rank, side, directory, items, "2")


def _resumed(rank: int, side: str, directory: str, items: int) -> tuple[float, float]:
    return _save(rank, side, directory, items, "3")


def _load(rank: int, side: str, directory: str, items: int) -> tuple[float, float]:
    _trainer(side, rank).restart()  # and the next save is the first of the job that has loaded
    return _loaded(rank, rank, dist.get_world_size(), side, directory, items)


def _halved(rank: int, side: str, directory: str, items: int) -> tuple[float, float]:
    return _loaded(rank, rank // 2, dist.get_world_size() // 2, side, directory, items)


def _loaded(rank: int, part: int, parts: int, side: str, directory: str, items: int) -> tuple[float, float]:
    state = _state(part, parts, items, fill=False)
    loaded, cost = _timed(lambda: _trainer(side, rank).load(state, str(Path(directory) / "2")))
    expected = _expected(part, parts, items)
    wrong = [
        key for key, rows in expected.items() if not torch.equal(loaded[key].view(torch.int32), rows.view(torch.int32))
    ]
    if wrong or loaded.keys() < expected.keys():
        raise AssertionError(f"{side} has loaded other bits than were saved: {wrong[:3]}")
    return cost


def _expected(part: int, parts: int, items: int) -> dict[str, torch.Tensor]:
    """What was saved of the rows `part` of `parts`."""
    world = dist.get_world_size()
    each = world // parts  # parts of the save in one of the load
    numbers = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32)
    starts = [saved * _ROWS * _COLUMNS for saved in range(part * each, (part + 1) * each)]
    return {
        f"model.layer{n:05}.weight": torch.cat([numbers + (start + n) for start in starts]).view(-1, _COLUMNS)
        for n in range(items)
    }


_CALLS: Final[dict[str, Callable[..., tuple[float, float]]]] = {
    FIRST: _first,
    LATER: _later,
    LOAD: _load,
    RESUMED: _resumed,
    HALVED: _halved,
}


def per_call(found: Sequence[Call]) -> dict[str, tuple[Call, Call | None]]:
    """By call: ours, and stock's if it was measured."""
    by_side = {(one.side, one.call): one for one in found}
    return {name: (by_side[OURS, name], by_side.get((STOCK, name))) for name in CALLS}
