"""What one rank does for the benchmark: the leader calls these functions on all ranks of an adapter at once.

Each returns figures by name; the slowest rank's seconds (`s`), all ranks' CPU seconds together (`cpu s`). A load
compares every bit with what was saved.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.adapters import ADAPTERS, Adapter, Raw
from benchmarks.machine import drop_page_cache
from benchmarks.measure import (
    Cost,
    cpu_s,
    fresh,
    peak_extra_bytes,
    settle,
    slowest,
    timed,
    total,
    warm_page_cache,
)
from benchmarks.state import Shard, State, check, fill, holds

__all__ = ["call"]

_POLL_S = 0.002
_PASSES = 3


class _Rank:
    """What a rank keeps between calls: its adapter, and the state of asynchronous saves."""

    adapter: Adapter
    phases: Any = None
    kept: tuple[State, list[Shard]] | None = None


def call(rank: int, name: str, *args: Any) -> Any:
    """Call a function of this module, then give its memory back: many adapters share the machine's."""
    value = globals()[name](*args)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return value


def describe() -> dict[str, str | None]:
    """Versions of what this interpreter has; None for what it has not."""
    names = ("torch", "megatron-core", "nvidia-resiliency-ext", "torch-checkpointing", "numpy", "isal")
    return {"python": sys.version.split()[0], **{name: _version(name) for name in names}}


def begin(adapter: str, asynchronous: bool) -> None:
    """Make the adapter, and start what a training job starts."""
    if "tests.support.pretend_main" in sys.modules:
        # Megatron's workers import the main module again; it makes "cuda" mean the CPU there, too.
        sys.modules["__main__"] = sys.modules["tests.support.pretend_main"]
    _Rank.adapter = _adapter(adapter)
    if asynchronous:
        _Rank.adapter.launch()
    settle()


def enter_cgroup(procs: str) -> None:
    """Put this process into a control group."""
    Path(procs).write_text("0")


def warm_up(state: State) -> None:
    """Do ahead of the first asynchronous save what can be done then."""
    _Rank.adapter.warm_up(_Rank.adapter.prepare(_kept_shards(state)))


def save(path: Path, state: State, peak: bool = False) -> Cost:
    """A synchronous save; with `peak`, of the resident memory that it takes on top, too."""
    shards = state.shards(dist.get_world_size(), dist.get_rank())
    fill(shards)
    prepared = _Rank.adapter.prepare(shards)
    fresh(path)
    cost: Cost = {}
    work = partial(_Rank.adapter.save, prepared, path)
    if peak:
        cost["peak extra MB"] = peak_extra_bytes(lambda: cost.update(timed(work))) / 1e6
    else:
        cost.update(timed(work))
    del cost["device bytes"]
    payload_bytes = total(sum(shard.tensor.nbytes for shard in shards))
    return cost | {"file bytes / payload": _size_bytes(path) / payload_bytes}


def load(path: Path, state: State, then: Sequence[str], slow_s: float) -> Cost:
    """A load with the page cache dropped (`cold`), and `then` others of the same files: `second`, right afterwards, if
    the cold one took at most `slow_s`; `warm`, with all of the files in the page cache.
    """
    _add_megatron_files(path)
    shards = state.shards(dist.get_world_size(), dist.get_rank())
    needed_bytes = total(sum(shard.tensor.nbytes for shard in shards))
    costs: Cost = {}

    def one(name: str, cold: bool = False) -> float:
        for shard in shards:
            shard.tensor.fill_(-1.0)  # a load that does nothing shows
        prepared = _Rank.adapter.prepare(shards)
        _Rank.adapter.look(prepared, path, cold)
        dist.barrier()
        if cold and dist.get_rank() == 0:
            drop_page_cache(path)
        cost = timed(partial(_Rank.adapter.load, prepared, path))
        if not isinstance(_Rank.adapter, Raw):
            check(shards)
        costs.update({f"{name} s": cost["s"], f"{name} cpu s": cost["cpu s"]})
        if cold:
            costs["device bytes / needed"] = cost["device bytes"] / needed_bytes
        return cost["s"]

    took_s = one("cold", cold=True)
    for name in then if not isinstance(_Rank.adapter, Raw) else ():
        if name == "warm":
            warm_page_cache(path)
        if name == "warm" or took_s < slow_s:
            one(name)
    return costs


def async_save(path: Path, state: State, step: int) -> Cost:
    """An asynchronous save, the trainer passing over its memory right after the call and polling until it is durable.

    Figures: `blocking s`, until the call returns; `next pass / normal`, the trainer's next pass over its memory as a
    multiple of a normal one; `durable s`, from the call to the published checkpoint; `cpu s`, of all that but the pass.
    """
    shards = _kept_shards(state)
    fill(shards, step)
    _touch(shards)
    normal_s = sorted(timed(partial(_touch, shards))["s"] for _ in range(_PASSES))[_PASSES // 2]
    fill(shards, step)
    prepared = _Rank.adapter.prepare(shards)
    fresh(path)
    before_s = cpu_s()
    dist.barrier()
    started = time.perf_counter()
    finalize = _Rank.adapter.start(prepared, path)
    blocking_s = slowest(time.perf_counter() - started)
    own_s = time.process_time()
    touched_s = timed(partial(_touch, shards))["s"]
    own_s = time.process_time() - own_s
    while slowest(0.0 if finalize(False) else 1.0) != 0.0:
        time.sleep(_POLL_S)
    durable_s = slowest(time.perf_counter() - started)
    return {
        "blocking s": blocking_s,
        "next pass / normal": touched_s / normal_s,
        "durable s": durable_s,
        "cpu s": total(cpu_s() - before_s - own_s),
    }


def verify(path: Path, state: State, step: int) -> bool:
    """Whether a checkpoint holds the state at `step`, to the bit."""
    _add_megatron_files(path)
    shards = state.shards(dist.get_world_size(), dist.get_rank())
    _Rank.adapter.load(_Rank.adapter.prepare(shards), path)
    return slowest(0.0 if all(holds(shard, step) for shard in shards) else 1.0) == 0.0


def phases(base: Path, state: State) -> dict[str, Cost]:
    """Seconds of each phase of an asynchronous save, as the package tells them, and of the lower bound of each."""
    from benchmarks.phases import Phases

    if _Rank.phases is None:
        shards = _kept_shards(state)
        fill(shards)
        _Rank.phases = Phases(shards)
    return _Rank.phases.one_round(base)


def _adapter(name: str) -> Adapter:
    if name in ADAPTERS:
        return ADAPTERS[name]()
    # Knows the insides of the package that is measured, so not for a package of another commit.
    from benchmarks.bare import BARE

    return BARE[name]()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kept_shards(state: State) -> list[Shard]:
    """The shards that this rank's asynchronous saves take, the same tensors in each, as a trainer's are."""
    if _Rank.kept is None or _Rank.kept[0] != state:
        _Rank.kept = (state, state.shards(dist.get_world_size(), dist.get_rank()))
    return _Rank.kept[1]


def _touch(shards: list[Shard]) -> None:
    """The trainer's next pass over its memory: writes to every page."""
    for shard in shards:
        shard.tensor.add_(1.0)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _add_megatron_files(path: Path) -> None:
    """What Megatron's `load` asks for in addition to the data of a checkpoint that plain DCP wrote."""
    if dist.get_rank() == 0 and (path / ".metadata").exists() and not (path / "metadata.json").exists():
        torch.save({}, path / "common.pt")
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (path / "metadata.json").write_text(
            json.dumps(config | {"common_backend": "torch", "common_backend_version": 1})
        )
    dist.barrier()
