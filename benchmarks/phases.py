"""What an asynchronous save costs at least: its phases, each alone, next to this package's, in one run.

A *lower bound* is what the same bytes, or the same number of collectives, take without any of a checkpoint's own work.
Of the phases that a trace shows (`SaveOptions.trace_path`):

    walk        Megatron's own `dist_checkpointing.save` with a strategy that does nothing; it is part of the call only
    plan        one address and one shape of each tensor looked at, and two collectives
    stage       every tensor moved to shared memory that was touched before, by one call each
    dispatch    a message to another process
    writer      the raw device: the same bytes by O_DIRECT from one buffer, and fsync
    commit      two collectives, and a small file written, synced, renamed, its directory synced
    call        walk + plan + stage + dispatch
    new stage   as `stage`, but into new memory, by system calls: the first save of a process
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.adapters import McoreCkpt, Raw, do_nothing_save
from benchmarks.measure import Cost, fresh, slowest, timed
from benchmarks.state import Shard
from mcore_ckpt.save.staging import StagingBuffer
from mcore_ckpt.storage.direct_io import address, write_all

__all__ = ["Phases"]

_METADATA_BYTES = 16 * 1024
_TOLD = {"plan": "plan", "stage": "stage", "dispatch": "dispatch", "writer": "writer"}


class Phases:
    """Both sides, on one rank; every figure is of the slowest rank."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards
        self._saver = _Timed()
        self._state = self._saver.prepare(shards)
        self._raw = Raw()
        self._bounds = _Bounds(shards)

    def one_round(self, base: Path) -> dict[str, Cost]:
        """Seconds of each phase: of the lower bound, of this package, and of this package planning all of it."""
        return {
            "lower bound": self._lower_bound(base),
            "mcore_ckpt": self._saver.call(self._state, fresh(base / "phases")),
            "mcore_ckpt replanned": self._saver.call(self._state, fresh(base / "phases"), replan=True),
        }

    def _lower_bound(self, base: Path) -> Cost:
        path = fresh(base / "bound")
        works: dict[str, Callable[[], None]] = {
            "walk": partial(do_nothing_save, self._state, fresh(base / "walk")),
            "plan": self._bounds.plan,
            "stage": self._bounds.stage,
            "new stage": self._bounds.new_stage,
            "dispatch": self._bounds.dispatch,
            "writer": partial(self._raw.save, self._shards, path),
            "commit": partial(self._bounds.commit, path),
        }
        bound = {f"{name} s": timed(work)["s"] for name, work in works.items()}
        return bound | {"call s": sum(bound[f"{name} s"] for name in ("walk", "plan", "stage", "dispatch"))}


class _Timed(McoreCkpt):
    """Keeps the phases of each save, which are read from its trace."""

    def __init__(self) -> None:
        self._traces = tempfile.TemporaryDirectory()
        super().__init__()

    def save_strategy(self) -> Any:
        from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

        return TorchDistSaveStrategy(options=SaveOptions(trace_path=self._traces.name))

    def _phases_s(self, path: Path) -> dict[str, float]:
        trace = Path(self._traces.name) / f"{path.name}_rank{dist.get_rank()}.trace.json"
        events = json.loads(trace.read_text())["traceEvents"]
        return {event["name"]: event["dur"] / 1e6 for event in events if event["ph"] == "X"}

    def call(self, state: Any, path: Path, *, replan: bool = False) -> Cost:
        """An asynchronous save, waited for: seconds of its phases and of the call, on the slowest rank."""
        if replan:
            self._save = self.save_strategy()
        dist.barrier()
        started = time.perf_counter()
        finalize = self.start(state, path)
        call_s = time.perf_counter() - started
        while not finalize(True):
            time.sleep(0.01)
        phases_s = self._phases_s(path)
        told = {name: phases_s[phase] for name, phase in _TOLD.items()}
        told |= {"commit": phases_s["gather"] + phases_s["commit"], "call": call_s}
        return {f"{name} s": slowest(s) for name, s in told.items()}


class _Bounds:
    """The parts alone, on one rank."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards
        self._pointers = [(shard.tensor.data_ptr(), shard.tensor.nbytes) for shard in shards]
        self._nbytes = sum(nbytes for _, nbytes in self._pointers)
        self._stage = StagingBuffer()
        self._target = address(self._stage.reserve(self._nbytes))
        self._ends = socket.socketpair()

    def plan(self) -> None:
        for shard in self._shards:
            _ = shard.tensor.data_ptr(), shard.tensor.shape
        _collective()
        _collective()

    def stage(self) -> None:
        at, memmove = self._target, ctypes.memmove
        for pointer, nbytes in self._pointers:
            memmove(at, pointer, nbytes)
            at += nbytes

    def new_stage(self) -> None:
        stage = StagingBuffer()
        stage.reserve(self._nbytes, touch=False)
        at = 0
        for pointer, nbytes in self._pointers:
            write_all(stage.fd, memoryview((ctypes.c_char * nbytes).from_address(pointer)), at)
            at += nbytes
        stage.close()

    def dispatch(self) -> None:
        self._ends[0].send(bytes(1024))
        self._ends[1].recv(1024)

    def commit(self, directory: Path) -> None:
        _collective()
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
        _collective()


def _collective() -> None:
    dist.all_gather_object([None] * dist.get_world_size(), 0)
