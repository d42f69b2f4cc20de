"""Whole calls of Megatron-Core's `save` and `load` on real gloo ranks, with this package installed and without.

    python -m benchmarks.calls                       the tables of docs/scale.md; 25 minutes
    python -m benchmarks.calls --ranks 32 --load-items 500 --out build/32.json     four minutes

Each rank has rows of as many tensors as asked, of 1 KB each, so that planning, exchanges, checks and `.metadata` are
measured, not bytes. Behind the wrappers ranks are data parallel x tensor parallel: data-parallel ranks hold the same
shards, and an object for each ten of them, and the wrapper distributes saves among them. One side's ranks end before
the other's begin: those of Megatron-Core take gigabytes. A call's cost is the processor time of all ranks and their
writer processes. Loads are compared bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks import tables
from benchmarks.machine import describe_machine
from benchmarks.measure import cpu_s
from benchmarks.results import ROOT, add_busy, commit_of_code, wait_until_quiet
from tests.support.gloo_ranks import standing_ranks

__all__ = ["CALLS", "OURS", "SAVES", "STOCK"]

OURS, STOCK = SIDES = ("mcore_ckpt", "Megatron-Core")
FIRST, LATER, LOAD, RESUMED, HALVED = CALLS = (
    "first save",
    "later save",
    "load",
    "first save after it",
    "load with half as many parts",
)
SAVES: Final = CALLS[:2]
_ROWS, _COLUMNS = 4, 64  # of float32: 1 KB
# Ranks, replicas, sides, and tensors of the loads: what the machine's memory has room for.
_Job = tuple[int, int, tuple[str, ...], int]
_PUBLISHED: Final[tuple[_Job, ...]] = (
    *((16, replicas, SIDES, 1000) for replicas in (0, 16, 4)),
    (32, 0, SIDES, 500),
    (64, 0, (OURS,), 500),
)
_MEGATRON: Final = ("tests.support.pretend_main", "megatron.core.dist_checkpointing")
_PRELOAD = {
    OURS: [*_MEGATRON, "mcore_ckpt.megatron.install"],
    STOCK: [*_MEGATRON],
}
_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Call:
    """What one call cost."""

    side: str  # `OURS` or `STOCK`
    call: str  # one of `CALLS`
    ranks: int
    replicas: int  # data-parallel ranks behind the fully parallel wrappers; 0: without wrappers
    items: int  # tensors of which each rank has rows
    cpu_s: float  # of all ranks and their children
    seconds: float  # of the slowest rank; the machine has fewer cores than there are ranks


class _Trainer:
    """What a rank of a training job keeps between its calls."""

    def __init__(self, side: str, replicas: int) -> None:
        from megatron.core.dist_checkpointing import serialization

        if side == OURS:
            from mcore_ckpt.megatron.install import install

            install()
        self._strategies = serialization
        self.replicas = replicas
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.parts = self.world // replicas if replicas else self.world
        self._groups = [
            dist.new_group(list(range(part, self.world, self.parts))) for part in range(self.parts if replicas else 0)
        ]
        self.restart()

    def restart(self) -> None:
        """Forget what the saves so far have laid out, as a job does that starts again."""
        self._save = self._strategies.get_default_save_sharded_strategy("torch_dist")
        self._save.use_cached_ckpt_structure = not self.replicas
        if self.replicas:
            from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

            self._save = FullyParallelSaveStrategyWrapper(self._save, self._groups[self.rank % self.parts])

    def save(self, path: Path, items: int) -> tuple[float, float]:
        """Save; seconds of the processor, and of the call."""
        from megatron.core.dist_checkpointing import save

        path.mkdir(parents=True, exist_ok=True)
        replica = (0, 0, self.rank // self.parts) if self.replicas else 0
        state = _state(self.rank % self.parts, self.parts, _ROWS, replica, items, objects=bool(self.replicas))
        return _timed(lambda: save(state, str(path), self._save))[1]

    def load(self, path: Path, items: int, times: int) -> tuple[float, float]:
        """Load, `times` as many rows on each rank, and hand on to the next save what Megatron does with
        `--ckpt-assume-constant-structure`.
        """
        from megatron.core.dist_checkpointing import load

        where = self.rank // times, self.world // times, times * _ROWS, self.rank % times, items
        strategy = self._strategies.get_default_load_sharded_strategy(str(path))
        loaded, cost = _timed(lambda: load(_state(*where, fill=False), str(path), strategy))
        self._save.cached_global_metadata = strategy.cached_global_metadata
        for key, expected in _state(*where).items():
            if not torch.equal(loaded[key].view(torch.int32), expected.data.view(torch.int32)):
                raise AssertionError(f"{key}: other bits than were saved")
        return cost


def _state(
    part: int, parts: int, rows: int, replica: Any, items: int, *, fill: bool = True, objects: bool = False
) -> dict[str, Any]:
    """Rows `part` of `parts` of each tensor."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state: dict[str, Any] = {}
    for n in range(items):
        first, count = part * rows * _COLUMNS + n, rows * _COLUMNS
        data = torch.arange(first, first + count, dtype=torch.float32) if fill else torch.zeros(count)
        key = f"model.layer{n:05}.weight"
        shard = data.view(rows, _COLUMNS)
        state[key] = ShardedTensor.from_rank_offsets(key, shard, (0, part, parts), replica_id=replica)
    for n in range(items // 10 if objects else 0):
        key = f"model.layer{n:05}._extra_state"
        state[key] = ShardedObject(key, (part, n), (parts,), (part,), replica_id=replica)
    return state


def _timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the calls before have freed: there are many ranks, and one machine's memory
    dist.barrier()
    spent, began = cpu_s(), time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    dist.barrier()  # nobody's writer process is measured before it has ended
    return result, (cpu_s() - spent, took)


@cache
def _trainer(side: str, replicas: int) -> _Trainer:
    return _Trainer(side, replicas)


def _run(rank: int, call: str, side: str, replicas: int, directory: str, items: int) -> tuple[float, float]:
    trainer = _trainer(side, replicas)
    if call in (FIRST, LOAD):
        trainer.restart()
    if call in (LOAD, HALVED):
        return trainer.load(Path(directory, "2"), items, 2 if call == HALVED else 1)
    numbers = {FIRST: "0", LATER: "12", RESUMED: "3"}[call]  # the second save may still learn something
    return [trainer.save(Path(directory, number), items) for number in numbers][-1]


def measure_calls(side: str, ranks: int, replicas: int, items: int, load_items: int) -> list[Call]:
    """All of `CALLS` by one side: saves with `items` tensors, loads and the save between with `load_items`; behind the
    wrappers only saves.

    Raises:
        RuntimeError: a rank failed, or has loaded other bits than were saved.
    """
    found: dict[tuple[int, str], Call] = {}
    wanted = SAVES if replicas else CALLS
    with (
        tempfile.TemporaryDirectory(prefix="calls-") as scratch,
        standing_ranks(ranks, preload=_PRELOAD[side], is_measured=True) as group,
    ):
        # Once with one tensor: what is imported and connected at a first call.
        for count, calls in {1: wanted, load_items: wanted, items: SAVES if items != load_items else wanted}.items():
            for call in calls:
                directory = f"{scratch}/{count}"
                outcomes = group.call(_run, call, side, replicas, directory, count, within_s=_WITHIN_S)
                failed = next((outcome for outcome in outcomes if not outcome.ok), None)
                if failed is not None:
                    raise RuntimeError(f"{side}, rank {failed.rank}: {failed.error_text}")
                spent, took = zip(*(outcome.value for outcome in outcomes), strict=True)
                found[count, call] = Call(side, call, ranks, replicas, count, sum(spent), max(took))
    return [found[items if call in SAVES else load_items, call] for call in wanted]


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="*", help="how many, even numbers (default: as docs/scale.md has it)"
    )
    parser.add_argument("--items", type=int, default=1000, help="tensors of which each rank has rows (default: 1000)")
    parser.add_argument(
        "--load-items", type=int, help="the same in loads, which take more memory (default: as --items)"
    )
    parser.add_argument("--out", type=Path, default=tables.CALLS_FILE, help="results (default: docs/scale_calls.json)")
    parser.add_argument("--ours-only", action="store_true", help="nothing of Megatron-Core's own")
    add_busy(parser)
    arguments = parser.parse_args()
    measured: list[dict[str, Any]] = []
    jobs: list[_Job] = [
        (ranks, replicas, SIDES[: 1 if arguments.ours_only else 2], arguments.load_items or arguments.items)
        for ranks in arguments.ranks or ()
        for replicas in (0, ranks, *([ranks // 4] if ranks % 4 == 0 else []))
    ]
    about = {"commit": commit_of_code(), "machine": describe_machine(ROOT)}
    results = {**about, "busy": arguments.busy, "calls": measured}
    wait_until_quiet("whole calls", busy=arguments.busy)  # once: between the jobs, the load is that of their own ranks
    for ranks, replicas, sides, load_items in jobs or _PUBLISHED:
        for side in sides:
            measured += map(asdict, measure_calls(side, ranks, replicas, arguments.items, load_items))
            tables.put_results(arguments.out, results)
    sys.stdout.write(tables.of_calls(results) + tables.of_wrapped_calls(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
