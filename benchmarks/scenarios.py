"""The measured work. Each function runs on every rank; adapters take turns inside one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.adapters import ADAPTERS
from benchmarks.measure import Cost, drop_page_cache, peak_extra_bytes, timed, total, warm_page_cache
from benchmarks.rounds import Samples
from benchmarks.rounds import fresh as _fresh
from benchmarks.rounds import make_adapters as _start
from benchmarks.rounds import note as _note
from benchmarks.rounds import rotated as _rotated
from benchmarks.rounds import wipe as _wipe
from benchmarks.state import build, check, fill, kinds

__all__ = ["first_load", "first_save", "loads", "saves", "write_once"]


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.distcp"))


def saves(rank: int, base: Path, kind_name: str, size_bytes: int, names: Sequence[str], rounds: int) -> Samples:
    """Synchronous saves in the steady state: time, CPU, size of the files."""
    kind = kinds(size_bytes)[kind_name]
    adapters = _start(names)
    shards = build(kind, dist.get_world_size(), rank)
    fill(shards)
    states = {name: adapter.prepare(shards) for name, adapter in adapters.items()}
    samples: Samples = {}
    for turn in range(rounds + 1):
        for name, adapter in _rotated(adapters, turn):
            path = _fresh(base / name)
            cost = timed(partial(adapter.save, states[name], path))
            if turn == 0:
                continue  # the first save of a process is measured apart
            _note(samples, "save s", name, cost["s"])
            _note(samples, "save cpu s", name, cost["cpu_s"])
            if turn == rounds and name != "raw":
                _note(samples, "file bytes / payload", name, _size_bytes(path) / kind.size_bytes)
    return samples


def first_save(rank: int, base: Path, kind_name: str, size_bytes: int, name: str) -> Samples:
    """The first save of a process, beside the raw device in the same processes."""
    kind = kinds(size_bytes)[kind_name]
    adapters = _start(["raw", name])
    shards = build(kind, dist.get_world_size(), rank)
    fill(shards)
    samples: Samples = {}
    for each in ("raw", name, "raw"):
        state = adapters[each].prepare(shards)
        path = _fresh(base / each)
        cost: Cost = {}
        peak = peak_extra_bytes(partial(_timed_into, cost, partial(adapters[each].save, state, path)))
        _note(samples, f"first save s ({name})", each, cost["s"])
        if each == name:
            _note(samples, "first save peak extra MB", name, peak / 1e6)
    return samples


def first_load(rank: int, base: Path, kind_name: str, size_bytes: int, name: str) -> Samples:
    """The first load of a process, cold, of what `first_save` left; compared bit for bit."""
    adapter = _start([name])[name]
    shards = build(kinds(size_bytes)[kind_name], dist.get_world_size(), rank)
    _wipe(shards)
    state = adapter.prepare(shards)
    path = base / name
    if rank == 0 and name == "dcp":
        _add_megatron_files(path)
    drop_page_cache(path)
    peak = peak_extra_bytes(partial(adapter.load, state, path))
    check(shards)
    samples: Samples = {}
    _note(samples, "first load peak extra MB", name, peak / 1e6)
    return samples


def _timed_into(cost: Cost, work: Callable[[], Any]) -> None:
    cost.update(timed(work))


def write_once(rank: int, base: Path, kind_name: str, size_bytes: int, names: Sequence[str]) -> None:
    """Checkpoints for `loads`, one by each adapter, under `base/<adapter>`."""
    kind = kinds(size_bytes)[kind_name]
    adapters = _start(names)
    shards = build(kind, dist.get_world_size(), rank)
    fill(shards)
    for name, adapter in adapters.items():
        adapter.save(adapter.prepare(shards), _fresh(base / name))
        if rank == 0 and name == "dcp":
            _add_megatron_files(base / name)
    dist.barrier()


def _add_megatron_files(path: Path) -> None:
    """What Megatron's `load` wants beside the data of a checkpoint that plain DCP wrote."""
    torch.save({}, path / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(config | {"common_backend": "torch", "common_backend_version": 1}))


def loads(
    rank: int,
    base: Path,
    kind_name: str,
    size_bytes: int,
    pairs: Sequence[tuple[str, str]],
    rounds: int,
    only: str = "",
) -> Samples:
    """Loads of the checkpoints that `write_once` made; every one is compared bit for bit.

    Args:
        rank: this rank.
        base: where the checkpoints are.
        kind_name: family of the state.
        size_bytes: of the whole state.
        pairs: (reader, writer): adapter that loads, adapter that wrote.
        rounds: how many of each.
        only: load keys that begin with this.
    """
    kind = kinds(size_bytes)[kind_name]
    adapters = _start(sorted({reader for reader, _ in pairs}))
    shards = build(kind, dist.get_world_size(), rank, only)
    needed_by_all = total(sum(shard.tensor.nbytes for shard in shards))
    samples: Samples = {}
    for temperature in ("cold", "warm"):
        for turn in range(rounds):
            for (reader, writer), adapter in _rotated({pair: adapters[pair[0]] for pair in pairs}, turn):
                if reader == "raw" and temperature == "warm":
                    continue
                _wipe(shards)
                state = adapter.prepare(shards)
                path = base / writer
                adapter.look(state, path, temperature == "cold")
                drop_page_cache(path) if temperature == "cold" else warm_page_cache(path)
                cost = timed(partial(adapter.load, state, path))
                label = reader if reader == writer or reader == "raw" else f"{reader} of {writer}"
                _note(samples, f"load {temperature} s", label, cost["s"])
                _note(samples, f"load {temperature} cpu s", label, cost["cpu_s"])
                if reader != "raw":
                    check(shards)
                if temperature == "cold":
                    _note(samples, "bytes from the device / needed", label, cost["device_bytes"] / needed_by_all)
                if temperature == "cold" and reader in ADAPTERS and reader != "raw":
                    _wipe(shards)
                    cost = timed(partial(adapter.load, adapter.prepare(shards), path))
                    _note(samples, "load again, as the cold one has left it, s", label, cost["s"])
                    check(shards)
    return samples
