"""Processes, as /proc shows them, and waiting for what they do."""

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def until(
    holds: Callable[[], object], what: str | Callable[[], str] = "it has not happened", within_s: float = 60.0
) -> None:
    """Wait for something. Raises `AssertionError`: `what` is so after so long."""
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, what if isinstance(what, str) else what()
        time.sleep(0.01)


def suspend(*others: int, for_s: float) -> None:
    """Stop this process and others, as a scheduler stops a job, until they are continued."""
    pids = [os.getpid(), *others]
    subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {' '.join(map(str, pids))}"])
    for pid in reversed(pids):
        os.kill(pid, signal.SIGSTOP)


def printed_by(code: str, *words: str) -> str:
    """What a new interpreter prints that runs this code with these arguments."""
    command, root = [sys.executable, "-c", code, *words], Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# --- a function in a child: what it imports, patches and leaves behind stays there ------------------------------------


def in_child(function: Callable[..., Any], *args: Any, deadline_s: float = 120.0) -> str:
    """Call `function(*args)` in a child of this process; what it returned, as text. Raises `AssertionError`: it raised
    (with its traceback), or passed the deadline and was killed.
    """
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        code = 0
        try:
            text = str(function(*args))
        except BaseException:  # noqa: BLE001  (whatever it is, the parent reports it)
            text, code = traceback.format_exc(), 1
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(text)
        sys.stderr.flush()
        os._exit(code)
    os.close(write_end)
    chunks: list[bytes] = []
    until_s = time.monotonic() + deadline_s
    try:
        while select.select([read_end], [], [], max(until_s - time.monotonic(), 0))[0]:
            chunk = os.read(read_end, 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
        else:
            os.kill(pid, signal.SIGKILL)
            chunks.append(f"{function} still ran after {deadline_s:.0f} s".encode())
    finally:
        os.close(read_end)
        _, status = os.waitpid(pid, 0)
    text = b"".join(chunks).decode()
    if status:
        raise AssertionError(text or f"the child ended with status {status}")
    return text


def forked(test: Callable[..., object]) -> Callable[..., None]:
    """A test that runs in a child, with its fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        in_child(functools.partial(test, **fixtures))

    return run


def fork(work: Callable[[], object]) -> int:
    """Start `work` in a child, which ends without another word; its process id."""
    from mcore_ckpt.core.errors import SaveError  # (here: processes of stock alone use this module, too)

    child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        except SaveError:
            code = 3
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Of a child that `fork` has started: 0, or 3 if a `SaveError` was raised."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
