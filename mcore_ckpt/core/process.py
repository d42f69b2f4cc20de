"""What is asked of interpreter and kernel for a process: to notice another's end, to step back, threads, no collecting.

A parent has to notice the end of its child, a child that of its parent. Linux has a descriptor for that, the pidfd,
which becomes readable when the process is gone, by whatever way. It depends on nobody's good behaviour, unlike the end
of a pipe, which any forked process may hold open.

A process that works beside the trainer lowers its own priority (`lower_priority`). And Python's garbage collector is
kept out of the way while many lasting objects are made (`collector_paused`): a plan or an index is hundreds of
thousands of small objects that all stay alive and hold no cycles, so that each full collection meanwhile would walk
through every object of the training process, and free nothing.

A Ctrl-C raises between any two steps of whoever is interrupted. One of several ranks which is on its way to a
collective would leave the others waiting there: so it waits (`interrupts_wait`) for a step whose failure all ranks
hear of (`interruptible`), or for the end.

A program may save once more when it ends (`atexit`). From Python 3.12 on no thread can be started any more then, so
whoever wants a thread asks whether it runs (`start_thread`, `done_by`), and does the work itself otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

__all__ = [
    "Sentinel",
    "collector_paused",
    "die_with_parent",
    "done_by",
    "exit_text",
    "exit_with_parent",
    "interpreter_ends",
    "interruptible",
    "interrupts_wait",
    "is_running",
    "kernel_can_watch",
    "leave_signals_to_parent",
    "lower_priority",
    "signals_held_back",
    "start_thread",
    "until_parent_is_gone",
    "wait_readable",
]


_Result = TypeVar("_Result")


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


def interpreter_ends() -> bool:
    """Whether the main thread has come to its end, so that only what was registered for that (`atexit`) still runs, or
    threads that it waits for.

    Executors take no work any more then, and from Python 3.12 on no thread can be started. While it waits for threads,
    the main thread still counts as alive; that it does so is known to `threading` alone.
    """
    return not threading.main_thread().is_alive() or bool(getattr(threading, "_SHUTTING_DOWN", False))


def start_thread(thread: threading.Thread) -> bool:
    """Start a thread; returns whether it runs, which it does not where `interpreter_ends`.

    Raises:
        RuntimeError: the system has no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if not _is_of_the_end(error):
            raise
        return False
    return True


def done_by(pool: Executor, work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """What `pool.submit(work, *arguments)` returns; at the end of the interpreter, where pools take no work any more,
    that of work which has been done here. A pool that was made before may come to know of the end only now.

    A signal waits until it is done: a pool that is interrupted while it starts a thread does not know of that thread,
    and nobody would wait for it.
    """
    try:
        with interrupts_wait():
            return pool.submit(work, *arguments)
    except RuntimeError as error:
        if not _is_of_the_end(error):
            raise
    from concurrent.futures import Future  # whose import takes longer than that of all of this module

    done: Future[_Result] = Future()
    try:
        done.set_result(work(*arguments))
    except BaseException as error:  # noqa: BLE001  (of the work, for whoever asks for the result)
        done.set_exception(error)
    return done


def _is_of_the_end(error: RuntimeError) -> bool:
    """Whether Python refuses a thread because it ends; it may have come to that just now."""
    return interpreter_ends() or "interpreter shutdown" in str(error)


# What terminals and schedulers send to all processes of a job: to stop it, or as a notice that its time is up.
_TO_ALL_PROCESSES: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _HeldBack:
    """The handlers of signals, and which signals have come that wait for them."""

    def __init__(self) -> None:
        self.passing = False
        self._waiting: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def begin(self) -> None:
        for number in _TO_ALL_PROCESSES:
            handler = signal.getsignal(number)
            if callable(handler):  # what the system does by default ends the process, which the others notice
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def end(self) -> None:
        try:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        finally:
            self.passing = True  # if one that is back has raised meanwhile, others are still in place: they pass on

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.passing or number in self._waiting:  # who asks twice is not kept waiting
            self._handlers[number](number, frame)
        else:
            self._waiting.append(number)

    def deliver(self) -> None:
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, None)
            finally:
                self.deliver()  # a Ctrl-C is raised here; what else has come is answered all the same


_held_back: _HeldBack | None = None


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C, and other signals that have handlers, wait until the block ends, however; but see `interruptible`.

    A second one of a kind does not wait. Signals come to the main thread; in others this does nothing. May be nested.
    """
    global _held_back
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer = _held_back
    if outer is not None:
        passing, outer.passing = outer.passing, False
        try:
            yield
        finally:
            outer.passing = passing
            if passing:
                outer.deliver()
        return
    held = _held_back = _HeldBack()
    try:
        held.begin()
        yield
    finally:
        _held_back = None
        try:
            held.end()
        finally:
            held.deliver()


@contextmanager
def interruptible() -> Iterator[None]:
    """Within `interrupts_wait`, what waits is raised now, and nothing waits until the block ends."""
    held = _held_back if threading.current_thread() is threading.main_thread() else None
    if held is None:
        yield
        return
    passing = held.passing
    try:
        held.passing = True
        held.deliver()
        yield
    finally:
        held.passing = passing


def leave_signals_to_parent() -> None:
    """In a process that works for another: what is sent to both is that one's to answer, which may still need this one.

    It is watched besides (`exit_with_parent`), and ended by SIGKILL.
    """
    for number in _TO_ALL_PROCESSES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_ALL_PROCESSES)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process that is started within the block gets none of them before it calls `leave_signals_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL_PROCESSES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        return "ended in a way that the system did not report (somebody else collected its exit status)"
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


class Sentinel:
    """Knows when a process ends: a descriptor that becomes readable then, where the kernel has such a thing."""

    def __init__(self, pid: int) -> None:
        self.fd = -1
        self._pid = pid
        with contextlib.suppress(AttributeError, OSError):
            self.fd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process is gone, whoever has collected its exit status; waits up to `timeout_s` for that."""
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
    """Return when this process's parent has ended, however it ended.

    Args:
        parent_pid: who the parent was when this process was started.
        fd: a descriptor to listen to meanwhile.
        on_readable: called when `fd` can be read; returns False to stop listening and return.
    """
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

    Only for a child whose parent said that it `kernel_can_watch`. Beside it, a thread that watches the parent is still
    needed: the request is lost when credentials change, and no other kernel has it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the request was made
        os._exit(0)


def exit_with_parent(parent_pid: int, kernel_watches: bool = False) -> None:
    """Start a thread that ends this process as soon as its parent is gone, however the parent ended.

    Args:
        parent_pid: who the parent is.
        kernel_watches: what `kernel_can_watch` said in the thread that started this process.
    """
    if kernel_watches:
        die_with_parent(parent_pid)

    def watch() -> None:
        until_parent_is_gone(parent_pid)
        os._exit(0)  # nobody is left to read the code

    threading.Thread(target=watch, name="mcore-ckpt-parent", daemon=True).start()


def lower_priority(cpu_priority: int | None, io_priority: int | None) -> None:
    """Give way to training: take a nice value and an I/O scheduling class. Refusals are not worth failing for.

    For a process in the trainer's session: where the kernel groups processes by session (`sched_autogroup_enabled`, on
    most machines without control groups for the CPU), nice values count within one only.
    """
    if cpu_priority is not None:
        with contextlib.suppress(OSError):
            os.nice(max(0, cpu_priority - os.nice(0)))
        with contextlib.suppress(OSError, AttributeError):  # what wakes up does not take the core from who has it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if io_priority is not None and number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, io_priority << _IOPRIO_CLASS_SHIFT)
