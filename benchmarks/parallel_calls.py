"""Whole calls of Megatron-Core's `save` and `load` behind its fully parallel wrappers, on real gloo ranks.

Each rank holds as many shards as asked, of 1 KB each, and an object for each ten of them. Ranks are laid out as data
parallel x tensor parallel: a tensor is divided between the tensor-parallel ranks, and its shards are replicated on the
data-parallel ones, among which the wrappers distribute saves and loads. A call's cost is the processor time of all
ranks, their writer processes among them. What is loaded is compared bit by bit.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.measure import cpu_s
from tests.support.standing_ranks import StandingRanks, standing_ranks

__all__ = ["PARALLEL_CALLS", "PARALLEL_SIDES", "ParallelCall", "measure_parallel_calls"]

_OURS, _STOCK = PARALLEL_SIDES = ("mcore_ckpt", "Megatron-Core")
PARALLEL_CALLS: Final = ("first save", "later save", "later save, constant structure", "load")
_COLUMNS = 64  # of float32, in 4 rows: 1 KB
_PRELOAD = {
    _OURS: ["tests.support.pretending_megatron", "mcore_ckpt.megatron.install"],
    _STOCK: ["tests.support.pretending_megatron"],
}
_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class ParallelCall:
    """What one call cost.

    Attributes:
        side: one of `PARALLEL_SIDES`.
        call: one of `PARALLEL_CALLS`. A constant structure is one that Megatron-Core was promised
            (`--ckpt-assume-constant-structure`).
        data_parallel, tensor_parallel: how the ranks are laid out.
        items: shards that each rank holds.
        cpu_s: processor seconds of all ranks and their children.
        seconds: of the slowest rank; the machine has fewer cores than there are ranks.
    """

    side: str
    call: str
    data_parallel: int
    tensor_parallel: int
    items: int
    cpu_s: float
    seconds: float


def measure_parallel_calls(data_parallel: int, tensor_parallel: int, items: int) -> list[ParallelCall]:
    """All of `PARALLEL_CALLS` by all sides, a call of one side after the same call of another.

    Raises:
        RuntimeError: a rank failed, or has loaded other bits than were saved.
        AssertionError: a rank hangs.
    """
    found: list[ParallelCall] = []
    ranks = data_parallel * tensor_parallel
    with (
        tempfile.TemporaryDirectory(prefix="parallel-calls-") as scratch,
        standing_ranks(ranks, preload=_PRELOAD[_OURS]) as ours,
        standing_ranks(ranks, preload=_PRELOAD[_STOCK]) as stock,
    ):
        for count in (1, items):  # once with one tensor: what is imported and connected at a first call
            rounds = [
                ParallelCall(
                    side,
                    call,
                    data_parallel,
                    tensor_parallel,
                    count,
                    *_cost(stock if side == _STOCK else ours, call, side, scratch, tensor_parallel, count),
                )
                for call in PARALLEL_CALLS
                for side in PARALLEL_SIDES
            ]
            found = rounds if count == items else []
    return found


def _cost(
    group: StandingRanks, call: str, side: str, scratch: str, tensor_parallel: int, items: int
) -> tuple[float, float]:
    number = PARALLEL_SIDES.index(side)
    outcomes = group.call(_run, call, side, f"{scratch}/{number}-{items}", tensor_parallel, items, within_s=_WITHIN_S)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise RuntimeError(f"{side}, rank {failed[0].rank}: {failed[0].error_text}")
    spent, took = zip(*(outcome.value for outcome in outcomes), strict=True)
    return sum(spent), max(took)


# Of each rank: its strategies by side and number of shards, and the group of its replicas.
_strategies: dict[tuple[str, int, bool], Any] = {}
_groups: list[Any] = []


def _run(rank: int, call: str, side: str, directory: str, tensor_parallel: int, items: int) -> tuple[float, float]:
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    if side != _STOCK:
        from mcore_ckpt.megatron.install import install

        install()
    if not _groups:
        parts = [range(part, dist.get_world_size(), tensor_parallel) for part in range(tensor_parallel)]
        _groups.extend(dist.new_group(list(part)) for part in parts)
    group, constant = _groups[rank % tensor_parallel], call == PARALLEL_CALLS[2]
    if call == "load":
        wrapped = FullyParallelLoadStrategyWrapper(strategies.TorchDistLoadShardedStrategy(), group)
        state = _state(rank % tensor_parallel, rank // tensor_parallel, tensor_parallel, items, fill=False)
        loaded, cost = _timed(lambda: dc.load(state, f"{directory}/2", wrapped))
        _compare(loaded, rank % tensor_parallel, items)
        return cost
    for number in range(1 if call == PARALLEL_CALLS[0] else 3):  # the second may still learn something
        strategy = _saving(side, items, group, constant)
        state = _state(rank % tensor_parallel, rank // tensor_parallel, tensor_parallel, items, fill=True)
        path = Path(directory) / ("constant" if constant else "") / str(number)
        path.mkdir(parents=True, exist_ok=True)
        cost = _timed(lambda state=state, path=path, strategy=strategy: dc.save(state, str(path), strategy))[1]  # type: ignore[misc]
    return cost


def _saving(side: str, items: int, group: Any, constant: bool) -> Any:
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    known = _strategies.get((side, items, constant))
    if known is None:
        base = strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
        base.use_cached_ckpt_structure = constant
        known = _strategies[side, items, constant] = FullyParallelSaveStrategyWrapper(base, group, constant)
    return known


def _state(part: int, replica: int, parts: int, items: int, *, fill: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    state: dict[str, Any] = {}
    for number in range(items):
        key = f"model.layer{number:05}.weight"
        data = _rows(part, number) if fill else torch.zeros(4, _COLUMNS)
        state[key] = ShardedTensor.from_rank_offsets(key, data, (0, part, parts), replica_id=(0, 0, replica))
    for number in range(items // 10):
        key = f"model.layer{number:05}._extra_state"
        state[key] = ShardedObject(key, (part, number) if fill else None, (parts,), (part,), replica_id=(0, 0, replica))
    return state


def _rows(part: int, number: int) -> torch.Tensor:
    first = part * 4 * _COLUMNS + number
    return torch.arange(first, first + 4 * _COLUMNS, dtype=torch.float32).view(4, _COLUMNS)


def _compare(loaded: dict[str, Any], part: int, items: int) -> None:
    for number in range(items):
        if not torch.equal(loaded[f"model.layer{number:05}.weight"], _rows(part, number)):
            raise AssertionError(f"other bits than were saved: layer {number}")
    for number in range(items // 10):
        if loaded[f"model.layer{number:05}._extra_state"] != (part, number):
            raise AssertionError(f"another object than was saved: layer {number}")


def _timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    gc.collect()
    dist.barrier()
    spent, began = cpu_s(), time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    dist.barrier()  # nobody's writer process is measured before it has ended
    return result, (cpu_s() - spent, took)
