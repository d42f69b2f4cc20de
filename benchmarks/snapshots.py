"""What saves cost at least: their parts, each alone, beside this package's, in one run.

A *floor* is what the same bytes, or the same number of exchanges, take without any of a checkpoint's own work. Of an
asynchronous save's phases, as `SaveOptions.on_timings` tells them:

    walk        Megatron's own `dist_checkpointing.save` with a strategy that does nothing; it is part of the call only
    plan        one address and one shape of each tensor looked at, and two exchanges among the ranks
    stage       every tensor moved to shared memory that was touched before, by one call each
    hand-over   a message to another process; `os.fork` of this one is given beside it
    writer      the raw device: the same bytes by O_DIRECT from one buffer, and fsync
    commit      two exchanges, and a small file written, synced, renamed, its directory synced
    call        walk + plan + stage + hand-over

Of the first save of a process: `call` with memory that is new, written by system calls. Of a synchronous save: the CPU
seconds of a CRC-32, of a copy into the buffers that are written from, and of the raw device.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.adapters import Adapter, Ours, do_nothing_save
from benchmarks.measure import drop_page_cache, slowest, timed
from benchmarks.rounds import Samples, fresh, make_adapters, note, wipe
from benchmarks.state import Shard, build, check, fill, kinds
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.storage.direct_io import address, aligned_buffer, write_from
from mcore_ckpt.writing.stage_pool import Stage, estimate_saves_by

__all__ = ["async_phases", "first_loads", "first_phases", "save_cpu"]

_WINDOW_BYTES = 8 * 1024 * 1024
_METADATA_BYTES = 16 * 1024
_TRAINING_S = 5.0
_PHASES = ("plan", "stage", "hand-over", "writer", "commit")
_FLOOR = "floor"


class _Timed(Ours):
    """Keeps what each save tells of its phases."""

    def __init__(self) -> None:
        super().__init__()
        self.phases_s: dict[str, float] = {}

    def _strategy(self) -> Any:
        from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

        return TorchDistSaveStrategy(options=SaveOptions(on_timings=self._note))

    def _note(self, timings: dict[str, Any]) -> None:
        self.phases_s = timings["phases_s"]

    def call(self, state: Any, path: Path, *, anew: bool = False) -> dict[str, float]:
        """An asynchronous save, waited for: seconds of its phases and of the call, on the slowest rank."""
        if anew:
            self._save = self._strategy()
        dist.barrier()
        started = time.perf_counter()
        finalize = self.start(state, path)
        call_s = time.perf_counter() - started
        while not finalize(True):
            time.sleep(0.01)
        return {name: slowest(s) for name, s in {**self._of_mine(), "call": call_s}.items()}

    def train(self) -> None:
        """Poll the queue, as a trainer does between two steps, for as long as an idle process needs to take memory."""
        until_s = time.monotonic() + _TRAINING_S
        while time.monotonic() < until_s:
            self._queue.maybe_finalize_async_calls()
            time.sleep(0.1)

    def _of_mine(self) -> dict[str, float]:
        commit_s = self.phases_s["gather"] + self.phases_s["commit"]
        return {name: commit_s if name == "commit" else self.phases_s[name] for name in _PHASES}


class _Floors:
    """The bare parts, on one rank."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards
        self._pointers = [(shard.tensor.data_ptr(), shard.tensor.nbytes) for shard in shards]
        self.nbytes = sum(nbytes for _, nbytes in self._pointers)
        self._stage = Stage()
        self._target = address(self._stage.reserve(self.nbytes))
        self._ends = socket.socketpair()

    def plan(self) -> None:
        for shard in self._shards:
            _ = shard.tensor.data_ptr(), shard.tensor.shape
        _exchange()
        _exchange()

    def stage(self) -> None:
        at, memmove = self._target, ctypes.memmove
        for pointer, nbytes in self._pointers:
            memmove(at, pointer, nbytes)
            at += nbytes

    def new_stage(self) -> None:
        stage = Stage()
        stage.reserve(self.nbytes, touch=False)
        at = 0
        for pointer, nbytes in self._pointers:
            write_from(stage.fd, pointer, nbytes, at)
            at += nbytes
        stage.close()

    def hand_over(self) -> None:
        self._ends[0].send(bytes(1024))
        self._ends[1].recv(1024)

    def commit(self, directory: Path) -> None:
        _exchange()
        if dist.get_rank() == 0:
            pending = directory / "pending"
            with pending.open("wb") as file:
                file.write(bytes(_METADATA_BYTES))
                file.flush()
                os.fsync(file.fileno())
            pending.rename(directory / "published")
            fd = os.open(directory, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        _exchange()

    def summed(self) -> None:
        for pointer, nbytes in self._pointers:
            crc32((ctypes.c_char * nbytes).from_address(pointer))

    def copied(self, buffer: memoryview) -> None:
        target = address(buffer)
        for pointer, nbytes in self._pointers:
            for start in range(0, nbytes, _WINDOW_BYTES):
                ctypes.memmove(target, pointer + start, min(_WINDOW_BYTES, nbytes - start))

    def close(self) -> None:
        self._stage.close()
        for end in self._ends:
            end.close()


def _exchange() -> None:
    dist.all_gather_object([None] * dist.get_world_size(), 0)


def async_phases(rank: int, base: Path, kind_name: str, size_bytes: int, rounds: int) -> Samples:
    """Seconds of each phase on the slowest rank beside its floor, the first save left out."""
    shards = _filled(rank, kind_name, size_bytes)
    raw = make_adapters(["raw"])["raw"]
    ours = _Timed()
    state = ours.prepare(shards)
    samples: Samples = {}
    for _ in range(rounds):  # before there is a stage, whose pages it would have to share, and map
        note(samples, "hand-over s", "os.fork", slowest(_fork_s()))
    floors = _Floors(shards)
    for turn in range(rounds + 1):
        told = ours.call(state, fresh(base / "phases"))
        again = ours.call(state, fresh(base / "phases"), anew=True)
        bare = _bare(floors, state, shards, raw, base)
        for phase in (*_PHASES, "call") if turn else ():
            note(samples, f"{phase} s", _FLOOR, bare[phase])
            note(samples, f"{phase} s", "mcore_ckpt", told[phase])
            note(samples, f"{phase} s", "mcore_ckpt replanned", again[phase])
        if turn:
            note(samples, "walk s", _FLOOR, bare["walk"])
    floors.close()
    return samples


def first_phases(rank: int, base: Path, kind_name: str, size_bytes: int, shown_by: str) -> Samples:
    """The first asynchronous save of a process beside its floor, and beside those that follow.

    Args:
        rank: this rank.
        base: where to write.
        kind_name: family of the state.
        size_bytes: of the whole state.
        shown_by: how the process knows its size, and has polled its queue while it computed something else: `"a load"`
            of a checkpoint, or `"optimizers"`, which are stood in for here. It knows nothing if that is empty.
    """
    shards = _filled(rank, kind_name, size_bytes)
    raw = make_adapters(["raw"])["raw"]
    ours = _Timed()
    state = ours.prepare(shards)
    label = f"mcore_ckpt, shown by {shown_by}" if shown_by else "mcore_ckpt"
    if shown_by == "a load":
        ours.load(state, base / "mcore_ckpt")
    elif shown_by == "optimizers":
        estimate_saves_by(lambda: sum(shard.tensor.nbytes for shard in shards))
    if shown_by:
        ours.train()
    first = ours.call(state, fresh(base / "first"))
    later = sorted(ours.call(state, fresh(base / "first"))["call"] for _ in range(3))[1]
    floors = _Floors(shards)
    bare = _bare(floors, state, shards, raw, base)
    new_s = timed(floors.new_stage)["s"]
    floors.close()
    samples: Samples = {}
    note(samples, "first call s", _FLOOR, bare["call"] - bare["stage"] + new_s)
    note(samples, "first call s", label, first["call"])
    for phase in ("plan", "stage", "hand-over"):
        note(samples, f"first {phase} s", _FLOOR, new_s if phase == "stage" else bare[phase])
        note(samples, f"first {phase} s", label, first[phase])
    note(samples, "first / later call", label, first["call"] / later)
    return samples


def first_loads(rank: int, base: Path, kind_name: str, size_bytes: int) -> Samples:
    """The first load of a process, cold, and the median of those that follow, of what `write_once` has written."""
    shards = build(kinds(size_bytes)[kind_name], dist.get_world_size(), rank)
    (adapter,) = make_adapters(["mcore_ckpt"]).values()
    state = adapter.prepare(shards)
    costs = []
    for _ in range(4):
        wipe(shards)
        drop_page_cache(base / "mcore_ckpt")
        costs.append(timed(partial(adapter.load, state, base / "mcore_ckpt")))
        check(shards)
    samples: Samples = {}
    for figure in ("s", "cpu_s"):
        later = sorted(cost[figure] for cost in costs[1:])[1]
        note(samples, f"first load {figure}", "mcore_ckpt", costs[0][figure])
        note(samples, f"first / later load {figure}", "mcore_ckpt", costs[0][figure] / later)
    return samples


def save_cpu(rank: int, base: Path, kind_name: str, size_bytes: int, rounds: int) -> Samples:
    """CPU seconds of synchronous saves, all ranks together, beside those of their parts, the first save left out."""
    shards = _filled(rank, kind_name, size_bytes)
    adapters = make_adapters(["mcore_ckpt", "raw"])
    states = {name: adapter.prepare(shards) for name, adapter in adapters.items()}
    floors, buffer = _Floors(shards), aligned_buffer(_WINDOW_BYTES)
    samples: Samples = {}
    for turn in range(rounds + 1):
        path = fresh(base / "save")
        parts: dict[str, Callable[[], None]] = {
            "CRC-32": floors.summed,
            "copy": partial(floors.copied, buffer),
            "raw device": partial(adapters["raw"].save, states["raw"], path),
        }
        costs = {name: timed(work)["cpu_s"] for name, work in parts.items()}
        save_s = timed(partial(adapters["mcore_ckpt"].save, states["mcore_ckpt"], fresh(base / "save")))["cpu_s"]
        if turn:
            note(samples, "save cpu s", _FLOOR, sum(costs.values()))
            note(samples, "save cpu s", "mcore_ckpt", save_s)
            for name, cpu_s in costs.items():
                note(samples, "save cpu s", name, cpu_s)
    floors.close()
    return samples


def _filled(rank: int, kind_name: str, size_bytes: int) -> list[Shard]:
    shards = build(kinds(size_bytes)[kind_name], dist.get_world_size(), rank)
    fill(shards)
    return shards


def _bare(floors: _Floors, state: Any, shards: list[Shard], raw: Adapter, base: Path) -> dict[str, float]:
    """Seconds of each part on the slowest rank."""
    path = fresh(base / "bare")
    works: dict[str, Callable[[], None]] = {
        "walk": partial(do_nothing_save, state, fresh(base / "walk")),
        "plan": floors.plan,
        "stage": floors.stage,
        "hand-over": floors.hand_over,
        "writer": partial(raw.save, shards, path),
        "commit": partial(floors.commit, path),
    }
    bare = {name: timed(work)["s"] for name, work in works.items()}
    return {**bare, "call": sum(bare[name] for name in ("walk", "plan", "stage", "hand-over"))}


def _fork_s() -> float:
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    took_s = time.perf_counter() - started
    os.waitpid(pid, 0)
    return took_s
