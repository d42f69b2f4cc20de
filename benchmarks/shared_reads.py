"""Ranks of one host that load the same bytes: each for itself, one for all, one rank alone; and the machine's floor.

The floor is what is left when nothing is read: each rank copies as many bytes out of memory that all share, and sums
their CRC-32, as a load does with what it is handed. With fewer cores than ranks this alone may take longer than one
rank needs for its whole load. Tensors to load into have been touched before, and what has been loaded is compared.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.machine import drop_page_cache
from benchmarks.measure import Cost, timed
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.storage import direct_io
from tests.support.standing_ranks import StandingRanks, standing_ranks

__all__ = ["ALONE", "WAYS", "measure_shared_reads"]

ALONE, OFF, ON, AUTO, CACHED_OFF, CACHED_AUTO, FLOOR = WAYS = (
    "one rank alone",
    'all, cooperative="off"',
    'all, cooperative="on"',
    'all, cooperative="auto"',
    'from the page cache, cooperative="off"',
    'from the page cache, cooperative="auto"',
    "floor: all copy from memory",
)
_OPTIONS: Final[dict[str, Literal["auto", "on", "off"]]] = {
    ALONE: "off",
    OFF: "off",
    ON: "on",
    AUTO: "auto",
    CACHED_OFF: "off",
    CACHED_AUTO: "auto",
}
_TENSORS: Final = 16
_SLICE_BYTES: Final = 512 * 1024
_WITHIN_S: Final = 120.0


def measure_shared_reads(folder: Path, ranks: int, total_bytes: int, rounds: int) -> list[dict[str, Cost]]:
    """Rounds of all ways, one after the other: seconds of the slowest rank; CPU seconds and device bytes of all.

    Args:
        folder: on the storage that is measured.
        ranks: gloo ranks of this host, all of which want the same tensors.
        total_bytes: of these.
        rounds: the first one is not returned.

    Raises:
        RuntimeError: a rank failed, or has loaded something else than was saved.
        AssertionError: a rank hangs.
    """
    with tempfile.TemporaryDirectory(prefix="shared-reads-", dir=folder) as scratch, standing_ranks(ranks) as group:
        _called(group, _save, scratch, total_bytes)
        found = []
        for _ in range(rounds):
            costs: dict[str, Cost] = {}
            for way in WAYS:
                (_warm_page_cache if way in (CACHED_OFF, CACHED_AUTO) else drop_page_cache)(Path(scratch))
                costs[way] = _called(group, _measured, scratch, total_bytes, way)
            found.append(costs)
        return found[1:]


def _warm_page_cache(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            file.read_bytes()


def _called(group: StandingRanks, function: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 returns; all ranks call it."""
    outcomes = group.call(function, *args, within_s=_WITHIN_S)
    for outcome in outcomes:
        if not outcome.ok:
            raise RuntimeError(f"rank {outcome.rank}: {outcome.error_text}")
    return outcomes[0].value


@cache
def _saved(total_bytes: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    one = torch.randint(-(2**31), 2**31 - 1, (total_bytes // _TENSORS // 4,), dtype=torch.int32, generator=made)
    return {f"w{n:02}": one + n for n in range(_TENSORS)}


@cache
def _sums(total_bytes: int) -> dict[str, int]:
    return {key: crc32(_bytes_of(value)) for key, value in _saved(total_bytes).items()}


def _save(rank: int, directory: str, total_bytes: int) -> None:
    sums = _sums(total_bytes)
    dcp.save(_saved(total_bytes), storage_writer=FileSystemWriterAsync(Path(directory) / "checkpoint"))
    _saved.cache_clear()
    assert len(set(sums.values())) == _TENSORS


@cache
def _wanted(total_bytes: int) -> dict[str, torch.Tensor]:
    return {f"w{n:02}": torch.ones(total_bytes // _TENSORS // 4, dtype=torch.int32) for n in range(_TENSORS)}


def _measured(rank: int, directory: str, total_bytes: int, way: str) -> Cost:
    wanted = _wanted(total_bytes)
    for value in wanted.values():
        value.fill_(-1)
    if way == FLOOR:
        return _floor(rank, wanted)
    work = partial(_load, Path(directory) / "checkpoint", wanted, way)
    cost = timed(work if way != ALONE or rank == 0 else lambda: None)
    if way != ALONE or rank == 0:
        differ = [key for key, crc in _sums(total_bytes).items() if crc32(_bytes_of(wanted[key])) != crc]
        if differ:
            raise AssertionError(f"{way} has loaded other bits than were saved: {differ}")
    return cost


def _load(path: Path, wanted: dict[str, torch.Tensor], way: str) -> None:
    reader = FileSystemReader(path, options=LoadOptions(cooperative=_OPTIONS[way]))
    dcp.load(wanted, storage_reader=reader, no_dist=way == ALONE)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().view(np.uint8).data


def _floor(rank: int, wanted: dict[str, torch.Tensor]) -> Cost:
    """Rank 0 leaves one tensor's bytes in memory; all copy it as often as there are tensors."""
    length = _bytes_of(wanted["w00"]).nbytes
    path = Path("/dev/shm") / f"mcore_ckpt-bench-{os.getppid()}"
    if rank == 0:
        path.write_bytes(os.urandom(length))
    dist.barrier()
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
    dist.barrier()
    if rank == 0:
        path.unlink()

    def copy() -> None:
        for tensor in wanted.values():
            to, source = _bytes_of(tensor), memoryview(memory)
            for start in range(0, length, _SLICE_BYTES):
                part = to[start : start + _SLICE_BYTES]
                direct_io.copy_bytes(part, source[start : start + len(part)])
                crc32(part)

    return timed(copy)
