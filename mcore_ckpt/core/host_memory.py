"""How much memory this host has to spare."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def free_host_bytes() -> int:
    """Memory that this host, or the control groups that this process lives in, have to spare, in bytes."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):  # no such file outside Linux
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit_file, usage_file in _memory_limits():
        # The root has no such files, and where there is no limit, "max" is no number.
        with contextlib.suppress(OSError, ValueError):
            limit = int(limit_file.read_text(encoding="ascii"))
            used = int(usage_file.read_text(encoding="ascii")) - _page_cache_bytes(limit_file.with_name("memory.stat"))
            available = min(available, limit - used)
    return max(available, 0)


def _memory_limits(
    mount: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")
) -> list[tuple[Path, Path]]:
    """Where limit and use of memory are told, of each control group that this process lies in, up to the root: each has
    a limit of its own. Of version 2 first; some hosts have version 1 for memory.
    """
    try:
        lines = of_process.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[tuple[Path, Path]] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        # What leads out of the namespace's root ("/../..") is not mounted here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if number == "0":
            folder, names = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for depth in range(len(parts), -1, -1):
            group = folder.joinpath(*parts[:depth])
            found.append((group / names[0], group / names[1]))
    return found


def _page_cache_bytes(statistics: Path) -> int:
    """What a control group would give up first: it is counted as used, and is there for the asking."""
    for line in statistics.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
