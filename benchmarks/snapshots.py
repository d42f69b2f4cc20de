"""What the call of an asynchronous save costs at least: its parts, each alone, beside the whole.

Megatron's own walk    `dist_checkpointing.save` with a strategy that does nothing
torch copy_            every tensor copied to one of its own, touched before
os.fork                of this process, as it is then; the child ends at once
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.adapters import do_nothing_save
from benchmarks.measure import slowest
from benchmarks.rounds import Samples, fresh, make_adapters, note
from benchmarks.state import build, fill, kinds

__all__ = ["snapshot_parts"]

_OURS = ("mcore_ckpt", "mcore_ckpt replanned")


def snapshot_parts(rank: int, base: Path, kind_name: str, size_bytes: int, rounds: int) -> Samples:
    """Seconds on the slowest rank, the first of each left out."""
    adapters = make_adapters(_OURS)
    shards = build(kinds(size_bytes)[kind_name], dist.get_world_size(), rank)
    fill(shards)
    state = adapters["mcore_ckpt"].prepare(shards)
    samples: Samples = {}
    for _ in range(rounds):  # before there are copies, whose pages it would have to share, and map
        dist.barrier()
        note(samples, "blocking s", "os.fork", slowest(_fork_s()))
    copies = [torch.zeros_like(shard.tensor) for shard in shards]

    def copy() -> None:
        for target, shard in zip(copies, shards, strict=True):
            target.copy_(shard.tensor)

    for turn in range(rounds + 1):
        works: dict[str, Callable[[Path], Any]] = {name: _starting(adapters[name], state) for name in _OURS}
        works["Megatron's own walk"] = lambda path: do_nothing_save(state, path)
        works["torch copy_"] = lambda _: copy()
        for name, work in works.items():
            path = fresh(base / "snapshot")
            started = time.perf_counter()
            finalize = work(path)
            seconds = slowest(time.perf_counter() - started)
            while finalize is not None and not finalize(True):
                time.sleep(0.01)
            if turn:
                note(samples, "blocking s", name, seconds)
    return samples


def _starting(adapter: Any, state: Any) -> Callable[[Path], Any]:
    return lambda path: adapter.start(state, path)


def _fork_s() -> float:
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    took_s = time.perf_counter() - started
    os.waitpid(pid, 0)
    return took_s
