"""Functions that run in a child forked for them (`fork_call`).

A forked child runs what a writer of bytes cannot: functions of others (Megatron's own formats, local checkpoints,
logits). It also writes files out of the staging buffer (`writer="fork"`), where no second interpreter may be started.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import connection as mp_connection
from multiprocessing import process as mp_process
from multiprocessing.process import BaseProcess
from typing import Any, Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import SaveError, describe
from mcore_ckpt.core.process import (
    collector_paused,
    exit_text,
    exit_with_parent,
    leave_signals_to_parent,
    lower_priority,
    signals_held_back,
)
from mcore_ckpt.save.jobs import (
    REAP_DEADLINE_S,
    TRAINING_FIRST_NICE,
    ChildJob,
    StatusPage,
    SupervisedChild,
)

_logger = logger_of(__name__)


# A child of a process with threads can hang before its first line: CPython 3.11 takes a lock there (that of the list of
# threads) which another thread may have held at the moment of the fork, as gloo's do when they free a tensor. So it has
# to say that it is there; one that does not in time is killed, and forked again.
_START_DEADLINES_S: Final = (1.0, 3.0, 10.0, 30.0)
_HERE: Final = b"here"
_GO: Final = b"go"
_ONLY_JOB: Final = 1


def fork_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    what: str,
    expendable: bool = False,
    deadline_s: float | None = None,
    on_submit: Callable[[ChildJob], None] | None = None,
) -> ChildJob:
    """Fork, and return when the child has begun; `fn` runs on the memory as it is now. `on_submit` gets the job before
    that, for a caller that is interrupted. An expendable child ends with this process, and gives way to training; it
    must not use torch.distributed, CUDA or threads started before.
    """
    child = _ForkedChild.start(what, (fn, args, kwargs or {}), expendable, deadline_s is not None)
    return child.submit(what, deadline_s, on_submit)


class _ForkedChild(SupervisedChild):
    """The child of one call; the call has ended when the child has."""

    def __init__(
        self,
        process: BaseProcess,
        connection: mp_connection.Connection[Any, Any],
        result_fd: int,
        status: StatusPage | None,
    ) -> None:
        super().__init__(process, "process {pid}", status)
        self._connection = connection
        self._result_fd = result_fd
        self._returned = False
        self._outcome: Any = None

    @classmethod
    def start(cls, what: str, call: tuple[Any, ...], expendable: bool, with_status: bool) -> _ForkedChild:
        # What the function returns comes through memory: a child must be able to end though its result is not read.
        result_fd = os.memfd_create("mcore_ckpt_result", os.MFD_CLOEXEC)
        status = StatusPage() if with_status else None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, result_fd)
            if status is not None:
                on_failure.callback(status.close)
            for deadline_s in _START_DEADLINES_S:
                connection, theirs = multiprocessing.Pipe()
                process = multiprocessing.get_context("fork").Process(
                    target=_run_forked,
                    args=(os.getpid(), expendable, theirs, result_fd, status, *call),
                    name=what,
                )
                with contextlib.ExitStack() as on_giving_up:
                    on_giving_up.callback(connection.close)
                    on_giving_up.callback(_kill, process)
                    with theirs, signals_held_back():
                        _fork(process, what)
                    if expendable:  # at the exit multiprocessing would ask it to end, which it ignores, and wait for it
                        mp_process._children.discard(process)  # type: ignore[attr-defined]  # noqa: SLF001
                    if _is_there(connection, deadline_s):
                        child = cls(process, connection, result_fd, status)
                        on_giving_up.pop_all()
                        on_failure.pop_all()
                        return child
                _logger.warning(
                    "%s: the forked process %s did not start within %.0f s, as if a thread had held a lock of the "
                    "interpreter's when it was forked; it was killed, and another is tried",
                    what,
                    process.pid,
                    deadline_s,
                )
            raise SaveError(f"{what}: {len(_START_DEADLINES_S)} processes were forked, and none has started")

    def submit(self, what: str, deadline_s: float | None, on_submit: Callable[[ChildJob], None] | None) -> ChildJob:
        """Let the child begin. A child that has ended already has a job that says how."""
        job = self._jobs[_ONLY_JOB] = ChildJob(self, what, _ONLY_JOB, deadline_s)
        try:
            if on_submit is not None:
                on_submit(job)
            with contextlib.suppress(OSError):
                self._connection.send_bytes(_GO)
        except BaseException:
            job.abort()
            raise
        return job

    def _receive(self) -> bool:
        with contextlib.suppress(EOFError, OSError):
            while not self._returned and self._connection.poll():
                self._connection.recv_bytes()
                self._outcome = pickle.loads(os.pread(self._result_fd, os.fstat(self._result_fd).st_size, 0))
                self._returned = True
        return True  # what counts is the end of the process

    def _news_fd(self) -> int:
        return -1 if self._returned else self._connection.fileno()

    def _at_end(self) -> None:
        if self._returned:
            self._job_ended(_ONLY_JOB, self._outcome)

    def _end_text(self) -> str:
        return f"{exit_text(self._exit_code)} before the function had returned"

    def _release(self) -> None:
        self._connection.close()
        fd, self._result_fd = self._result_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:  # no caller asks for the outcome any more; the child continues
        try:
            self._sentinel.close()
            self._release()
        except Exception:  # noqa: BLE001  (at the interpreter's end, this module's names are gone)
            pass


def _fork(process: BaseProcess, what: str) -> None:
    try:
        # (a collection in the child would touch, and so copy, every page that holds an object)
        with collector_paused(), warnings.catch_warnings():
            # Python 3.12 warns of forking a process with threads. The child uses none of their locks: it runs no
            # torch kernels and no logging of theirs, and the caller asked for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except (OSError, AssertionError) as error:  # multiprocessing asserts that the trainer is no daemon of its own
        raise SaveError(f"{what}: cannot fork: {error}") from error


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:
        process.kill()
        process.join(REAP_DEADLINE_S)


def _is_there(connection: mp_connection.Connection[Any, Any], deadline_s: float) -> bool:
    """Whether the child has said that it is there, or has ended."""
    try:
        if not connection.poll(deadline_s):
            return False
        connection.recv_bytes()
    except (EOFError, OSError):
        pass
    return True


_status: StatusPage | None = None


def report_progress() -> None:
    """A sign of life from the child of a call; elsewhere it does nothing."""
    if _status is not None:
        _status.progress()


def _run_forked(
    parent_pid: int,
    expendable: bool,
    connection: mp_connection.Connection[Any, Any],
    result_fd: int,
    status: StatusPage | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    leave_signals_to_parent()  # a handler of the trainer's, if it has one, is not meant for this process
    exit_with_parent(parent_pid)
    # It waits for the parent's word: a child that is late may have been given up.
    try:
        connection.send_bytes(_HERE)
        connection.recv_bytes()
    except (EOFError, OSError):
        return
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the threads that OpenMP believes to have are not here, and it would wait for them
    if expendable:
        lower_priority(TRAINING_FIRST_NICE)
    global _status  # this process has one call
    _status = status
    try:
        message = pickle.dumps(fn(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001  (the trainer is told of any error)
        message = pickle.dumps(describe(error))
    with contextlib.suppress(OSError):
        with open(result_fd, "wb", closefd=False) as result:
            result.write(message)
        connection.send_bytes(_HERE)
