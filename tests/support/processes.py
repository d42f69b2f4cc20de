"""Processes, as /proc shows them, and waiting for what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int | None = None) -> set[int]:
    """Children of a process: of this one, if none is named; none of one that is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    # A leader is a zombie before its last thread is gone; only then can anybody be told of the process's end.
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes() or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def until(holds: Callable[[], object], what: str = "it has not happened", within_s: float = 60.0) -> None:
    """Wait for something. Raises `AssertionError`: `what` is so after so long."""
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.01)


def suspend(*others: int, for_s: float) -> None:
    """Stop this process and others, as a scheduler stops a job, until they are continued."""
    pids = [os.getpid(), *others]
    subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {' '.join(map(str, pids))}"])
    for pid in reversed(pids):
        os.kill(pid, signal.SIGSTOP)
