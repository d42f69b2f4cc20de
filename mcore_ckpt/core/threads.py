"""Threads that work for one caller, and what becomes of them when the interpreter ends.

A `Crew` is the one way in which this package works in parallel. It starts its threads when there are tasks for them,
keeps the first error, and never leaves a thread behind that goes on to use the caller's memory.

A program may save again when it ends (`atexit`). From Python 3.12 on no thread can be started then. The caller does
the tasks itself where not a single thread can be started.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, Final, Generic, TypeVar, overload

from mcore_ckpt.core.failures import attempt, value_of

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")

# Threads that are stuck in the kernel cannot be waited for; they end by themselves if the device comes back.
_STUCK_JOIN_S: Final = 0.1


class Task(Generic[T]):
    """A task of a `Crew`; ask `Crew.result` for its value. `done`: it has ended well."""

    __slots__ = ("done", "release", "value", "work")

    def __init__(self, work: Callable[[], T], release: Callable[[], object] | None) -> None:
        self.work = work
        self.release = release
        self.done = False
        self.value: T | None = None


class Crew:
    """Threads that do tasks in the order in which they are submitted. A context manager, for one caller.

    On leaving, all tasks are done, or the first error of a task is raised. After an error the tasks that have not begun
    are dropped. If the caller leaves by an exception of its own, the tasks in progress end first.

    Args:
        threads: tasks in progress at once, at most.
        name: of the threads.
        deadline_s: seconds without the end of any task, while the caller waits, after which the crew counts as stuck;
            None waits for ever.
        stuck: makes the error to raise then.
        interrupted_join_s: how long an interrupted caller waits for the tasks in progress; None waits for their end.
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
        self._deadline_s = deadline_s
        self._stuck = stuck
        self._interrupted_join_s = interrupted_join_s
        self._condition = threading.Condition()
        self._tasks: deque[Task[Any]] = deque()
        self._unfinished = 0  # tasks
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads
        self._failure: BaseException | None = None
        self._stopping = self._is_stuck = False

    @property
    def failed(self) -> bool:
        """A task has failed, or the caller was interrupted: a long task may end early."""
        return self._failure is not None

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
            if self._failure is not None:
                self._drop_waiting()
            elif self._idle < len(self._tasks) and len(self._threads) < self._most:
                self._start_thread()
            else:
                self._condition.notify_all()
        if not self._threads:
            self._work_on(wait=False)
        self._raise_failure()
        return task

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._work_on, args=(True,), name=f"{self._name}-{len(self._threads)}", daemon=True
        )
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, or the system has no more threads
            self._threads.remove(thread)
            self._most = len(self._threads)

    def wait_for(self, ready: Callable[[], T]) -> T:
        """The first true value of `ready()`, asked again whenever a task has ended. Raises a task's first error."""
        with self._condition:
            while self._failure is None:
                if value := ready():
                    return value
                if not self._condition.wait(self._deadline_s) and self._failure is None:
                    self._is_stuck = True
                    self._fail(self._stuck())
        raise self._failure

    def result(self, task: Task[T]) -> T:
        """The value of a task; waits for it. Raises the first error of any task."""
        self.wait_for(lambda: task.done)
        return task.value  # type: ignore[return-value]

    def drain(self) -> None:
        """Wait until all tasks have ended. Raises the first error of any task."""
        self.wait_for(lambda: not self._unfinished)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._drop_waiting()

    def _drop_waiting(self) -> None:
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
                self.drain()
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


def in_parallel(tasks: Iterable[T], work: Callable[[T], object], threads: int, name: str = "mcore_ckpt-read") -> None:
    """Call `work` on each task, in order, in at most `threads` threads; a single task is done by the caller.

    Raises the first error of `work`, or of making the tasks; tasks that had not begun are not done.
    """
    remaining = iter(tasks)
    first = list(islice(remaining, 2))
    remaining = chain(first, remaining)
    if len(first) < 2 or threads == 1:
        for task in remaining:
            work(task)
        return
    lock = threading.Lock()  # generators are not thread-safe
    crew = Crew(threads, name)

    def share() -> None:
        while not crew.failed:
            with lock:
                taken = list(islice(remaining, 1))
            if not taken:
                return
            work(taken[0])

    with crew:
        for _ in range(threads):
            crew.submit(share)


@overload
def together(threads: int, a: Callable[[], A], b: Callable[[], B], /) -> tuple[A, B]: ...
@overload
def together(threads: int, a: Callable[[], A], b: Callable[[], B], c: Callable[[], C], /) -> tuple[A, B, C]: ...
@overload
def together(threads: int, /, *calls: Callable[[], T]) -> tuple[T, ...]: ...
def together(threads: int, /, *calls: Callable[[], Any]) -> tuple[Any, ...]:
    """What each of these calls returns, made in turn, or in at most `threads` threads.

    All of them are made, whichever fails; then the first error of all, in their order, is raised.
    """
    outcomes: dict[int, Any] = {}

    def call(number: int) -> None:
        outcomes[number] = attempt(calls[number])

    in_parallel(range(len(calls)), call, min(threads, len(calls)), "mcore_ckpt-ask")
    return tuple(value_of(outcomes[number]) for number in range(len(calls)))


def interpreter_ends() -> bool:
    """Whether the main thread has come to its end, so that only what was registered for that (`atexit`) still runs, or
    threads that it waits for.

    From Python 3.12 on no thread can be started then. While it waits for threads, the main thread still counts as
    alive; that it does so is known to `threading` alone.
    """
    return not threading.main_thread().is_alive() or bool(getattr(threading, "_SHUTTING_DOWN", False))


def call_at_the_end(call: Callable[[], object]) -> None:
    """Have `call` called when the main thread has come to its end, while threads still run; also in the processes of
    `multiprocessing`, where `atexit` does nothing.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)


def start_thread(thread: threading.Thread) -> bool:
    """Start a thread; returns whether it runs, which it does not where `interpreter_ends`."""
    try:
        thread.start()
    except RuntimeError as error:
        if not _is_of_the_end(error):
            raise
        return False
    return True


def _is_of_the_end(error: RuntimeError) -> bool:
    """Whether Python refuses a thread because it ends; it may have come to that just now."""
    return interpreter_ends() or "interpreter shutdown" in str(error)
