"""Asynchronous saves: how long the trainer is kept, what its next pass over its memory costs, when it is durable.

Figures of each save, seconds on the slowest rank:

    blocking s             the call that takes the snapshot
    extra pass s           how much longer the trainer's next pass over its memory takes than a normal one
    next pass / normal     the same as a ratio
    commit s               from the call to the published checkpoint, the trainer polling every few milliseconds
    finalize s             the poll that publishes it

`memcpy s` of the raw device is a plain copy of the same bytes by the same ranks into memory that was touched before;
its `commit s` is the device alone. Every checkpoint is loaded and compared with the state at the call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from benchmarks.adapters import Adapter
from benchmarks.measure import Cost, slowest, timed
from benchmarks.rounds import Samples, fresh, make_adapters, note, rotated, wipe
from benchmarks.state import Shard, build, check, fill, kinds

__all__ = ["async_saves", "first_async_save"]

_POLL_S = 0.002
_PASSES = 3
_STEADY_SAVES = 3


def async_saves(rank: int, base: Path, kind_name: str, size_bytes: int, names: Sequence[str], rounds: int) -> Samples:
    """Saves in the steady state, the adapters taking turns; the first save of each is left out."""
    kind = kinds(size_bytes)[kind_name]
    adapters = make_adapters([*names, "raw"])
    shards = build(kind, dist.get_world_size(), rank)
    samples: Samples = {}
    for seconds in _copy_times(shards, rounds):
        note(samples, "memcpy s", "raw", seconds)
    for turn in range(rounds + 1):
        for name, adapter in rotated(adapters, turn):
            path = fresh(base / name)
            if name == "raw":
                costs = {"commit s": timed(partial(adapter.save, shards, path))["s"]}
            else:
                costs = _save(adapter, shards, path, turn)
            for figure, value in costs.items() if turn else ():
                note(samples, figure, name, value)
    return samples


def first_async_save(
    rank: int, base: Path, kind_name: str, size_bytes: int, name: str, warm_up: bool = False
) -> Samples:
    """The first save of a process, and the median of those that follow, as one row each and as their ratio."""
    kind = kinds(size_bytes)[kind_name]
    adapter = make_adapters([name])[name]
    shards = build(kind, dist.get_world_size(), rank)
    label = f"{name} warmed up" if warm_up else name
    if warm_up:
        adapter.warm_up(adapter.prepare(shards))
    samples: Samples = {}
    blocking_s = [_save(adapter, shards, fresh(base / name), turn)["blocking s"] for turn in range(_STEADY_SAVES + 1)]
    steady_s = sorted(blocking_s[1:])[_STEADY_SAVES // 2]
    note(samples, "first blocking s", label, blocking_s[0])
    note(samples, "first / steady blocking", label, blocking_s[0] / steady_s)
    return samples


def _copy_times(shards: list[Shard], rounds: int) -> list[float]:
    """Plain copies into memory that was touched; freed again, since forks would have to map it, too."""
    copies = [shard.tensor.clone() for shard in shards]

    def copy() -> None:
        for target, shard in zip(copies, shards, strict=True):
            target.copy_(shard.tensor)

    timed(copy)
    return [timed(copy)["s"] for _ in range(max(rounds, _PASSES))]


def _save(adapter: Adapter, shards: list[Shard], path: Path, step: int) -> Cost:
    fill(shards, step)
    _touch(shards)
    normal_s = sorted(timed(lambda: _touch(shards))["s"] for _ in range(_PASSES))[_PASSES // 2]
    fill(shards, step)
    state = adapter.prepare(shards)
    dist.barrier()
    started = time.perf_counter()
    finalize = adapter.start(state, path)
    blocking_s = slowest(time.perf_counter() - started)
    touched_s = timed(lambda: _touch(shards))["s"]
    while True:
        polled = time.perf_counter()
        done = finalize(False)
        finalize_s = time.perf_counter() - polled
        if slowest(0.0 if done else 1.0) == 0.0:
            break
        time.sleep(_POLL_S)
    commit_s = slowest(time.perf_counter() - started)
    loaded = [shard._replace(tensor=shard.tensor.clone()) for shard in shards]
    wipe(loaded)
    adapter.load(adapter.prepare(loaded), path)
    check(loaded, step)  # the state at the call, whatever the trainer did to it afterwards
    return {
        "blocking s": blocking_s,
        "extra pass s": max(0.0, touched_s - normal_s),
        "next pass / normal": touched_s / normal_s,
        "commit s": commit_s,
        "finalize s": slowest(finalize_s),
    }


def _touch(shards: list[Shard]) -> None:
    """The trainer's next pass over its memory: writes to every page."""
    for shard in shards:
        shard.tensor.add_(1.0)
