"""Clocks, page cache and memory, as one rank sees them and as all ranks together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

__all__ = ["Cost", "drop_page_cache", "peak_extra_bytes", "slowest", "timed", "total", "warm_page_cache"]

Cost = dict[str, float]


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


def _cpu_s() -> float:
    """CPU seconds of this process, of its children that live, and of those that it has waited for."""
    me = psutil.Process()
    times = me.cpu_times()
    spent = times.user + times.system + times.children_user + times.children_system
    for child in me.children(recursive=True):
        try:
            own = child.cpu_times()
            spent += own.user + own.system + own.children_user + own.children_system
        except psutil.NoSuchProcess:
            continue
    return float(spent)


def _device_bytes() -> float:
    """Bytes that this process has had read from devices, read-ahead included."""
    return float(psutil.Process().io_counters().read_bytes)


def timed(work: Callable[[], Any]) -> Cost:
    """Run `work` on all ranks at once: seconds until the slowest is done; CPU seconds and bytes from devices of all."""
    dist.barrier()
    cpu_before, bytes_before = _cpu_s(), _device_bytes()
    started = time.perf_counter()
    work()
    took_s = time.perf_counter() - started
    cpu_s, device_bytes = _cpu_s() - cpu_before, _device_bytes() - bytes_before
    return {"s": slowest(took_s), "cpu_s": total(cpu_s), "device_bytes": total(device_bytes)}


def drop_page_cache(path: Path) -> None:
    """Drop a checkpoint's files from the page cache; one rank does it. The files are synced, so all pages can go."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        for file in path.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
    dist.barrier()


def warm_page_cache(path: Path) -> None:
    """Read a checkpoint's files into the page cache."""
    if dist.get_rank() == 0:
        for file in path.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    while stream.read(8 * 1024 * 1024):
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
