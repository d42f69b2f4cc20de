"""What a process asks of the kernel and the interpreter: to notice another's end, lower priority, no collection.

A parent has to notice the end of its child, a child that of its parent. Linux has a descriptor for that, the pidfd,
which becomes readable when the process is gone, whatever has ended it. The end of a pipe does not tell as much: any
forked process may hold it open.

A process that works during training lowers its own priority (`lower_priority`). And Python's garbage collector is
paused while many lasting objects are made (`collector_paused`): a plan or an index is hundreds of thousands of small
objects that all stay alive and hold no cycles. Each full collection would walk through every object of the training
process, and free nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection starts within the block; may be nested."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Without a pidfd (a kernel before 5.3, a sandbox) a process's end is looked for this often.
_NO_PIDFD_PERIOD_S: Final = 0.05
_NO_PIDFD_PARENT_PERIOD_S: Final = 0.25
_SYS_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_CLASS_SHIFT: Final = 13
_PR_SET_PDEATHSIG: Final = 1


def exit_text(code: int | None) -> str:
    """How a process ended, in words; `code` as in `subprocess.Popen.returncode`."""
    if code is None:
        return "ended in a way that the system did not report (another part of the program collected its exit status)"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel does that when memory runs out: see dmesg)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def host_identity() -> str:
    """Equal for processes that can share memory: of one boot of one host, in the same namespace, of the same user.

    Unlike that of any other process where this one may not be looked into (it is not "dumpable", or there is no /proc).
    """
    found = [socket.gethostname()]
    try:
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        found.append(str(Path("/proc/self/ns/pid").readlink()))
        user = Path("/proc/self/fd").stat().st_uid
        if user != os.geteuid():
            raise PermissionError
    except OSError:
        found.append(f"alone {os.getpid()} {time.time_ns()}")
    return " ".join([*found, str(os.geteuid())])


class Sentinel:
    """Knows when a process ends: a descriptor that becomes readable then, where the kernel has such a thing."""

    def __init__(self, pid: int) -> None:
        self.fd = -1
        self._pid = pid
        with contextlib.suppress(AttributeError, OSError):
            self.fd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process is gone, even if its exit status was collected elsewhere; waits up to `timeout_s`."""
        if self.fd >= 0:
            poller = select.poll()
            poller.register(self.fd, select.POLLIN)
            return bool(poller.poll(timeout_s * 1000))
        until_s = time.monotonic() + timeout_s
        while is_running(self._pid):
            if time.monotonic() >= until_s:
                return False
            time.sleep(min(timeout_s, _NO_PIDFD_PERIOD_S))
        return True

    def close(self) -> None:
        """Close the descriptor. Twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def wait_readable(fds: list[int], timeout_s: float, sentinel: Sentinel) -> None:
    """Wait until one of `fds` can be read or the sentinel's process is gone; without a pidfd, only for a moment."""
    poller = select.poll()
    for fd in [*fds, sentinel.fd]:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    if sentinel.fd < 0:
        timeout_s = min(timeout_s, _NO_PIDFD_PERIOD_S)
    poller.poll(max(0.0, timeout_s) * 1000)


def until_parent_is_gone(parent_pid: int, fd: int = -1, on_readable: Callable[[], bool] = lambda: True) -> None:
    """Return when this process's parent has ended. `on_readable` is called when `fd` can be read; False stops that."""
    poller = select.poll()
    parent = Sentinel(parent_pid)
    for each in (parent.fd, fd):
        if each >= 0:
            poller.register(each, select.POLLIN)
    while os.getppid() == parent_pid:
        ready = {each for each, _ in poller.poll(None if parent.fd >= 0 else _NO_PIDFD_PARENT_PERIOD_S * 1000)}
        if parent.fd in ready or (fd in ready and not on_readable()):
            return


def kernel_can_watch() -> bool:
    """Whether a child that this thread starts may ask the kernel to be killed with its parent.

    What the kernel calls the parent is the thread that started the child. The main thread lasts as long as its process;
    the child of another one would be killed as soon as that thread had ended, in the middle of a save.
    """
    return threading.current_thread() is threading.main_thread()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends: that reaches one that is stopped or hangs, too.

    Only for a child whose parent said that it `kernel_can_watch`. Besides, a thread that watches the parent is still
    needed: the request is lost when credentials change, and no other kernel has it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the request was made
        os._exit(0)


def exit_with_parent(parent_pid: int, kernel_watches: bool = False) -> None:
    """Start a thread that ends this process when its parent ends; `kernel_watches` is `kernel_can_watch`'s answer."""
    if kernel_watches:
        die_with_parent(parent_pid)

    def watch() -> None:
        until_parent_is_gone(parent_pid)
        os._exit(0)  # no process is left to read the code

    threading.Thread(target=watch, name="mcore-ckpt-parent", daemon=True).start()


def lower_priority(cpu_priority: int | None, io_priority: int | None) -> None:
    """Give way to training: take a nice value and an I/O scheduling class. Refusals are not worth failing for.

    For a process in the trainer's session: where the kernel groups processes by session (`sched_autogroup_enabled`, on
    most machines without control groups for the CPU), nice values count within one only.
    """
    if cpu_priority is not None:
        with contextlib.suppress(OSError):
            os.nice(max(0, cpu_priority - os.nice(0)))
        with contextlib.suppress(OSError, AttributeError):  # a thread that wakes up does not preempt the trainer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if io_priority is not None and number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, io_priority << _IOPRIO_CLASS_SHIFT)
