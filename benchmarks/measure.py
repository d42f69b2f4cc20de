"""Clocks, page cache and memory, as one rank sees them and as all ranks together."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

__all__ = [
    "Cost",
    "cpu_s",
    "fresh",
    "peak_extra_bytes",
    "settle",
    "slowest",
    "timed",
    "total",
    "warm_page_cache",
]

Cost = dict[str, float]
_PIECE_BYTES = 8 * 1024 * 1024
_SETTLED_S = 0.4
_SETTLE_WITHIN_S = 40.0


def slowest(seconds: float) -> float:
    """The longest time of any rank."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def total(value: float) -> float:
    """The sum over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def cpu_s() -> float:
    """CPU seconds of this process, of its children that live, and of those that it has waited for."""
    spent, ended = time.process_time(), os.times()
    children = _children_cpu_s()
    # To look for them takes milliseconds, with which no work is charged, whether it comes before this call or after.
    _looking.append(time.process_time() - spent)
    return spent - sum(_looking[:-1]) + ended.children_user + ended.children_system + children


_looking: list[float] = []


def _children_cpu_s() -> float:
    spent = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            own = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent += own.user + own.system + own.children_user + own.children_system
    return float(spent)


def settle() -> None:
    """Wait until this process's children are idle: a worker process that imports its modules is not measured."""
    until_s = time.monotonic() + _SETTLE_WITHIN_S
    before = -1.0
    while (now := _children_cpu_s()) > before and time.monotonic() < until_s:
        before = now
        time.sleep(_SETTLED_S)
    dist.barrier()


def timed(work: Callable[[], Any]) -> Cost:
    """Run `work` on all ranks at once: seconds of the slowest; CPU seconds, and bytes read from devices, of all."""
    cpu_before, bytes_before = cpu_s(), psutil.Process().io_counters().read_bytes
    dist.barrier()
    started = time.perf_counter()
    work()
    took_s = time.perf_counter() - started
    spent_s, device_bytes = cpu_s() - cpu_before, psutil.Process().io_counters().read_bytes - bytes_before
    return {"s": slowest(took_s), "cpu s": total(spent_s), "device bytes": total(device_bytes)}


def fresh(path: Path) -> Path:
    """An empty directory, made by rank 0."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    return path


def warm_page_cache(path: Path) -> None:
    """Read a checkpoint's files into the page cache."""
    if dist.get_rank() == 0:
        for file in path.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    while stream.read(_PIECE_BYTES):
                        pass
    dist.barrier()


def peak_extra_bytes(work: Callable[[], Any]) -> float:
    """Resident memory that `work` takes beyond what was resident before: the most of any rank, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    work()
    peak = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return slowest(max(0, peak - before))
