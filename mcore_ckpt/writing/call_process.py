"""A Python function in a supervised child, forked for this one call.

For what a writer of bytes cannot run: functions of others (Megatron's own formats, local checkpoints, logits), and our
own writing where the snapshot is the forked child's memory.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointError, SaveError, WriterDiedError, WriteTimeoutError
from mcore_ckpt.core.failures import FailureReport, describe, remote_cause, same_class
from mcore_ckpt.core.process import (
    Sentinel,
    collector_paused,
    exit_text,
    exit_with_parent,
    kernel_can_watch,
    lower_priority,
    wait_readable,
)
from mcore_ckpt.writing.job_handle import JobHandle, JobWatch
from mcore_ckpt.writing.writer_messages import StatusPage

__all__ = ["Call", "ForkedCall", "report_progress"]

_logger = logging.getLogger(__name__)

# A child of a process with threads can hang before its first line: CPython 3.11 takes a lock there (that of the list of
# threads) which another thread may have held at the moment of the fork, as gloo's do when they free a tensor. So it has
# to say that it is there; one that does not in time is killed, and forked again.
_START_DEADLINES_S: Final = (1.0, 3.0, 10.0, 30.0)
_HERE: Final = b"here"
_GO: Final = b"go"
_REAP_DEADLINE_S: Final = 1.0
_SHORTEST_WAIT_S: Final = 0.01


class Call(JobHandle):
    """A function that runs elsewhere. `poll` reads the news; a failure comes with `result`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self.value: Any = None
        self.error: CheckpointError | None = None

    def _outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def fail(self, pid: int | None, report: FailureReport) -> None:
        """End the call with the exception that it raised."""
        error = same_class(report, SaveError)(f"{self.name} failed in process {pid}: {report.message}")
        error.__cause__ = remote_cause(report)
        self.error = error
        self.done = True

    def died(self, pid: int | None, code: int | None) -> None:
        """End the call since its process has ended."""
        self.error = WriterDiedError(f"{self.name}: process {pid} {exit_text(code)} before the function had returned")
        self.done = True


class ForkedCall(Call):
    """A function that runs in a forked child, on the memory as it is now."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        expendable: bool = False,
        deadline_s: float | None = None,
        cpu_priority: int | None = None,
    ) -> None:
        """Fork, and return when the child has begun.

        Args:
            fn: runs in the child; its value must be picklable.
            args: for `fn`; not pickled.
            kwargs: for `fn`; not pickled.
            name: the call in words, for messages.
            expendable: if this process exits before the child, the child is ended rather than waited for. Such a child
                cannot have children of its own by multiprocessing.
            deadline_s: seconds without `report_progress` in the child after which it is killed; None waits for ever.
            cpu_priority: nice value of the child; None keeps this process's.

        Raises:
            SaveError: the process cannot be forked, or its children do not start.
        """
        super().__init__(name)
        self._owner_pid = os.getpid()
        self._deadline_s = deadline_s
        self._status = StatusPage.private() if deadline_s is not None else None
        # What the function returns comes through memory: a child must be able to end though nobody reads what it says.
        self._result_fd = os.memfd_create("mcore_ckpt_result", os.MFD_CLOEXEC)
        for deadline in _START_DEADLINES_S:
            self._fork((kernel_can_watch(), cpu_priority), (fn, args, kwargs), expendable)
            if self._has_begun(deadline):
                break
            _logger.warning(
                "%s: the forked process %s did not start within %.0f s, as if a thread had held a lock of the "
                "interpreter's when it was forked; it was killed, and another is tried",
                name,
                self._process.pid,
                deadline,
            )
            self._process.kill()
            self._process.join(_REAP_DEADLINE_S)
            self._connection.close()
        else:
            os.close(self._result_fd)
            raise SaveError(f"{name}: {len(_START_DEADLINES_S)} processes were forked, and none has started")
        self._started_s = time.monotonic()
        self.pid = self._process.pid
        assert self.pid is not None
        self._sentinel = Sentinel(self.pid)
        self._watch = JobWatch(self.pid)
        self._report: tuple[bool, Any] | None = None

    def _fork(self, how: tuple[bool, int | None], call: tuple[Any, ...], expendable: bool) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_run_forked,
            args=(self._owner_pid, *how, theirs, self._result_fd, self._status, *call),
            name=self.name,
            daemon=expendable,
        )
        try:
            # (a collection in the child would touch, and so copy, every page that holds an object)
            with collector_paused(), warnings.catch_warnings():
                # Python 3.12 warns of forking a process with threads. The child uses none of their locks: it runs no
                # torch kernels and no logging of theirs, and whoever asks for a fork has been told of this.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except (OSError, AssertionError) as error:  # multiprocessing asserts that a daemon has no children
            self._connection.close()
            os.close(self._result_fd)
            raise SaveError(f"{self.name}: cannot fork: {error}") from error
        finally:
            theirs.close()

    def _has_begun(self, deadline_s: float) -> bool:
        """Wait for the child's first word, and let it go on. A child that has ended has begun: `poll` says how."""
        try:
            if not self._connection.poll(deadline_s):
                return False
            self._connection.recv_bytes()
            self._connection.send_bytes(_GO)
        except (EOFError, OSError):
            pass
        return True

    def poll(self) -> bool:
        if self.done:
            return True
        if os.getpid() != self._owner_pid:
            raise SaveError(f"{self.name}: the call belongs to process {self._owner_pid}, which forked this one")
        ended = not self._process.is_alive()  # before reading: what it sent before its end must be read
        self._read()
        if not ended and not self._is_stuck():
            return False
        if self.error is not None:
            self.done = True
        elif self._report is None:
            self.died(self.pid, self._process.exitcode)
        elif not self._report[0]:
            self.fail(self.pid, self._report[1])
        else:
            self.value = self._report[1]
            self.done = True
        self._release()
        return True

    def _is_stuck(self) -> bool:
        """Whether the deadline has passed; the child is killed then."""
        if self._status is None or self._deadline_s is None:
            return False
        silent_s = self._silent_s()
        if silent_s <= self._deadline_s:
            return False
        self._process.kill()
        self._process.join(_REAP_DEADLINE_S)
        self.error = WriteTimeoutError(
            f"{self.name}: process {self.pid} was killed: there was no progress for {silent_s:.1f} s "
            f"(write_deadline_s={self._deadline_s}); a device or a network file system hangs, or the deadline is too "
            "short"
        )
        return True

    def _silent_s(self) -> float:
        return time.monotonic() - max(self._started_s, 0.0 if self._status is None else self._status.stamp_s)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._report is None and self._connection.poll():
                self._connection.recv_bytes()
                self._report = pickle.loads(os.pread(self._result_fd, os.fstat(self._result_fd).st_size, 0))

    def _wait_for_news(self, timeout_s: float) -> None:
        if self._deadline_s is not None:
            timeout_s = min(timeout_s, max(self._deadline_s - self._silent_s(), _SHORTEST_WAIT_S))
        wait_readable([] if self._report is not None else [self._connection.fileno()], timeout_s, self._sentinel)

    def abort(self) -> bool:
        if not self.poll():
            self._process.kill()
            self._process.join(_REAP_DEADLINE_S)
            return self.poll()
        return True

    def watch(self) -> JobWatch:
        return self._watch

    def _release(self) -> None:
        self._close_descriptors()
        if self._status is not None:
            self._status.close()
        with contextlib.suppress(ValueError):  # it hangs inside the kernel, killed; multiprocessing collects it later
            self._process.close()

    def _close_descriptors(self) -> None:
        self._sentinel.close()
        self._connection.close()
        fd, self._result_fd = self._result_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._owner_pid == os.getpid():
                self._close_descriptors()


_status: StatusPage | None = None


def report_progress(nbytes: int) -> None:
    """A sign of life from the child of a `ForkedCall`, after writing `nbytes` more bytes; elsewhere it does nothing."""
    if _status is not None:
        _status.progress("writing", nbytes)


def _run_forked(
    parent_pid: int,
    kernel_watches: bool,
    cpu_priority: int | None,
    connection: mp_connection.Connection[Any, Any],
    result_fd: int,
    status: StatusPage | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what a Ctrl-C ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer's handler, if it has one, is not meant for this process
    exit_with_parent(parent_pid, kernel_watches)
    # Not before the parent has heard of it does it do anything: one that is late may have been given up.
    try:
        connection.send_bytes(_HERE)
        connection.recv_bytes()
    except (EOFError, OSError):
        return
    gc.freeze()
    lower_priority(cpu_priority, None)
    global _status  # this process has one call
    _status = status
    try:
        message = pickle.dumps((True, fn(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the trainer has to hear of it)
        message = pickle.dumps((False, describe(error)))
    with contextlib.suppress(OSError):
        with open(result_fd, "wb", closefd=False) as result:
            result.write(message)
        connection.send_bytes(_HERE)
