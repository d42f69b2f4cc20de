"""What a process asks of the kernel and the interpreter: ends of processes, signals, threads, memory, no collection.

- A parent has to notice the end of its child, a child that of its parent. Linux has a descriptor for that, the pidfd,
  which becomes readable when the process is gone, whatever has ended it. The end of a pipe does not tell as much: any
  forked process may hold it open.
- A helper process leaves the signals that a whole job gets to its parent (`leave_signals_to_parent`).
- A `Crew` is the one way in which this package works in parallel. It keeps the first error, and leaves no thread behind
  that uses the caller's memory. A program may save when it ends (`atexit`): from Python 3.12 on no thread can be
  started then, and the caller does the tasks itself.
- Python's garbage collector is paused while many lasting objects are made (`collector_paused`), as of a plan or an
  index: a full collection would walk through every object of the training process, and free nothing.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, overload

from mcore_ckpt.core.errors import OptionError


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
    """Files of limit and use of memory of each control group of this process, up to the root; of both versions."""
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


# What terminals and schedulers send to all processes of a job: to stop it, or as a notice that its time is up.
_TO_ALL_PROCESSES: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def leave_signals_to_parent() -> None:
    """In a helper process: ignore signals sent to the whole job; the parent handles them, and may need this one."""
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


def wait_readable(fd: int, timeout_s: float, sentinel: Sentinel) -> None:
    """Wait until `fd` can be read or the sentinel's process is gone; without a pidfd, only for a moment."""
    poller = select.poll()
    for each in (fd, sentinel.fd):
        if each >= 0:
            poller.register(each, select.POLLIN)
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


def exit_with_parent(parent_pid: int) -> None:
    """Start a thread that ends this process when its parent ends."""

    def watch() -> None:
        until_parent_is_gone(parent_pid)
        os._exit(0)  # no process is left to read the code

    threading.Thread(target=watch, name="mcore-ckpt-parent", daemon=True).start()


def lower_priority(cpu_priority: int | None, io_priority: int | None = None) -> None:
    """Give way to training: take a nice value and an I/O scheduling class, where that is allowed.

    In the trainer's session alone: nice values count within one, where the kernel groups processes by session.
    """
    if cpu_priority is not None:
        with contextlib.suppress(OSError):
            os.nice(max(0, cpu_priority - os.nice(0)))
        with contextlib.suppress(OSError, AttributeError):  # a thread that wakes up does not preempt the trainer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if io_priority is not None and number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, io_priority << _IOPRIO_CLASS_SHIFT)


_training_waits: Callable[[], bool] | None = None
_TURN_PERIOD_S: Final = 0.002


def write_during_training(training_waits: Callable[[], bool]) -> None:
    """Have what this process writes wait as long as that is true (`await_turn`)."""
    global _training_waits
    _training_waits = training_waits


def await_turn() -> None:
    """Wait while training waits for a save, if this process works for a run in training: the disk is the save's."""
    while _training_waits is not None and _training_waits():
        time.sleep(_TURN_PERIOD_S)


A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a step of one rank has come to: a value, or what it raised, kept until the other ranks can be told."""

    _value: T | None = None
    error: BaseException | None = None

    @classmethod
    def of(cls, step: Callable[[], T]) -> Outcome[T]:
        """Take the step. Also after a Ctrl-C in it the others must not wait for this rank."""
        try:
            return cls(step())
        except BaseException as error:  # noqa: BLE001  (raised again by `value`)
            return cls(error=error)

    def value(self) -> T:
        """The value; raises what the step raised, inside an exchange of all ranks."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


# Threads that are stuck in the kernel cannot be waited for; they end by themselves if the device comes back.
_STUCK_JOIN_S: Final = 0.1
SLICES: Final = 8
"""A deadline is waited for in so many slices: what a suspended process has slept through counts as one of them."""


@dataclass(slots=True, eq=False)
class Task(Generic[T]):
    """A task of a `Crew`; ask `Crew.result` for its value. `done`: it has ended well."""

    work: Callable[[], T]
    release: Callable[[], object] | None
    done: bool = False
    value: T | None = None


class Crew:
    """Threads that do tasks in the order in which they are submitted. A context manager, for one caller.

    On leaving, all tasks are done, or the first error of a task is raised; tasks that have not begun by then are
    dropped. If the caller leaves by an exception of its own, the tasks in progress end first.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        deadline_s: float | None = None,
        stuck: Callable[[], Exception] = TimeoutError,
        interrupted_join_s: float | None = None,
    ) -> None:
        self._most = threads
        self._name = name
        self._deadline_s = deadline_s  # after so long a wait without the end of a task the crew counts as stuck
        self._stuck = stuck  # makes the error to raise then
        self._interrupted_join_s = interrupted_join_s  # so long an interrupted caller waits; None: for all in progress
        self._condition = threading.Condition()
        self._tasks: deque[Task[Any]] = deque()
        self._unfinished = 0  # tasks
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads
        self.failure: BaseException | None = None  # of a task, or of the caller: a long task may end early then
        self._stopping = self._is_stuck = False

    def submit(
        self, work: Callable[[], T], release: Callable[[], object] | None = None, *, first: bool = False
    ) -> Task[T]:
        """Have `work` done by a thread, or by the caller where no thread can be started. A task may submit another.

        `release` is called when the task has ended or was dropped: its memory may be used again. With `first` the task
        goes before all that have not begun. Raises the first error of an earlier task.
        """
        task = Task(work, release)
        with self._condition:
            self._unfinished += 1
            (self._tasks.appendleft if first else self._tasks.append)(task)
            if self.failure is not None:
                self._fail(self.failure)
            elif self._idle < len(self._tasks) and len(self._threads) < self._most:
                thread = threading.Thread(
                    target=self._work_on, args=(True,), name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends, or the system has no more threads
                    self._threads.remove(thread)
                    self._most = len(self._threads)
            else:
                self._condition.notify_all()
        if not self._threads:
            self._work_on(wait=False)
        if self.failure is not None:
            raise self.failure
        return task

    def wait_for(self, ready: Callable[[], T]) -> T:
        """The first true value of `ready()`, asked again whenever a task has ended. Raises a task's first error."""
        slice_s = None if self._deadline_s is None else self._deadline_s / SLICES
        waited = 0  # slices, in each of which this process has run: in one long wait it may have been suspended
        with self._condition:
            while self.failure is None:
                if value := ready():
                    return value
                waited = 0 if self._condition.wait(slice_s) else waited + 1
                if waited == SLICES and self.failure is None:
                    self._is_stuck = True
                    self._fail(self._stuck())
        raise self.failure

    def result(self, task: Task[T]) -> T:
        """The value of a task; waits for it. Raises the first error of any task."""
        self.wait_for(lambda: task.done)
        return task.value  # type: ignore[return-value]

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and drop the tasks that have not begun."""
        self.failure = self.failure or error
        while self._tasks:
            self._end(self._tasks.popleft())

    def _end(self, task: Task[Any]) -> None:
        if task.release is not None:
            task.release()
        self._unfinished -= 1
        self._condition.notify_all()

    def _work_on(self, wait: bool) -> None:
        """Do the tasks that there are; with `wait`, those to come."""
        while True:
            with self._condition:
                while wait and not self._tasks and not self._stopping:
                    self._idle += 1
                    self._condition.wait()
                    self._idle -= 1
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            try:
                task.value = task.work()
                task.done = True
            except BaseException as error:  # noqa: BLE001  (raised from the next call of the caller)
                with self._condition:
                    self._fail(error)
            with self._condition:
                self._end(task)
            del task  # what it refers to belongs to the caller again

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.wait_for(lambda: not self._unfinished)
        except BaseException as caught:
            error = caught
            raise
        finally:
            with self._condition:
                if error is not None:
                    self._fail(error)
                self._stopping = True
                self._condition.notify_all()
            timeout_s = None if error is None or isinstance(error, Exception) else self._interrupted_join_s
            for thread in self._threads:
                # A caller that was interrupted while it started a thread may not know that it runs. That thread finds
                # nothing to do any more.
                with contextlib.suppress(RuntimeError):
                    thread.join(_STUCK_JOIN_S if self._is_stuck else timeout_s)


_MOST_THREADS: Final = 1024


def in_parallel(tasks: Iterable[T], work: Callable[[T], object], threads: int, name: str = "mcore_ckpt-read") -> None:
    """Call `work` on each task, in order, in at most `threads` threads. The first error ends it, and is raised."""
    if threads < 1:  # none would do the work, and nothing would tell
        raise OptionError(f"workers={threads}: expected at least 1")
    remaining = iter(tasks)
    first = list(islice(remaining, min(threads, _MOST_THREADS)))
    remaining = chain(first, remaining)
    if len(first) < 2:
        for task in remaining:
            work(task)
        return
    lock = threading.Lock()  # generators are not thread-safe
    crew = Crew(len(first), name)

    def share() -> None:
        while crew.failure is None:
            with lock:
                taken = list(islice(remaining, 1))
            if not taken:
                return
            work(taken[0])

    with crew:
        for _ in first:
            crew.submit(share)


@overload
def run_concurrently(threads: int, a: Callable[[], A], b: Callable[[], B], /) -> tuple[A, B]: ...
@overload
def run_concurrently(threads: int, a: Callable[[], A], b: Callable[[], B], c: Callable[[], C], /) -> tuple[A, B, C]: ...
@overload
def run_concurrently(threads: int, /, *calls: Callable[[], T]) -> tuple[T, ...]: ...
def run_concurrently(threads: int, /, *calls: Callable[[], Any]) -> tuple[Any, ...]:
    """The values of all calls, made in at most `threads` threads; then the first error in their order is raised."""
    outcomes: dict[int, Any] = {}

    in_parallel(range(len(calls)), lambda n: outcomes.update({n: Outcome.of(calls[n])}), threads)
    return tuple(outcomes[number].value() for number in range(len(calls)))
