"""A job that another process works on, as whoever submitted it sees it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mcore_ckpt.core.errors import CheckpointError, SaveError, WriteTimeoutError
from mcore_ckpt.writing.writer_messages import CANCEL, WINDOW_READY, JobResult, StatusPage, WriterJob

if TYPE_CHECKING:
    from mcore_ckpt.writing._writer_child import WriterChild

__all__ = ["JobHandle", "JobWatch", "WriterJobHandle"]

_LONGEST_WAIT_S: Final = 1.0
_CANCEL_DEADLINE_S: Final = 2.0


class JobHandle(ABC):
    """A job that another process works on."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether the job has ended, well or not. Returns at once."""

    @abstractmethod
    def _wait_for_news(self, timeout_s: float) -> None:
        """Return when there may be something new to `poll`, or at the time-out."""

    @abstractmethod
    def _outcome(self) -> Any:
        """The result of a job that has ended, or its error, raised."""

    @abstractmethod
    def abort(self) -> bool:
        """Give the job up: stop it, and remove what it wrote as far as it is not finished.

        Returns:
            Whether the stage may be used again. If not, the process hangs inside the kernel, and may still read or
            write there.
        """

    @abstractmethod
    def watch(self) -> JobWatch:
        """What another process needs to see the job end."""

    def written_bytes(self) -> int:
        """How much has been written so far, as far as the worker tells; 0 where it does not."""
        return 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `poll`, but waits up to `timeout_s` seconds for the end; None waits as long as it takes."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            left_s = _LONGEST_WAIT_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_for_news(min(left_s, _LONGEST_WAIT_S))
        return True

    def result(self) -> Any:
        """Wait for the end and return what the job returned.

        Raises:
            WriterDiedError: the process ended before the job; names its signal or exit code.
            WriteTimeoutError: there was no progress for longer than the job's deadline; the process was killed.
            SaveError: the job raised; the exception there is the cause, with its traceback, and `errno` if it had one.
        """
        self.wait()
        return self._outcome()


class JobWatch:
    """Sees a job end from any process on this host; picklable. Reads a shared page, never the trainer's socket."""

    def __init__(self, worker_pid: int, status_fd: int = -1, job: int = 0) -> None:
        self._worker_pid = worker_pid
        self._owner_pid = os.getpid()
        self._status_fd = status_fd
        self._job = job

    def wait(self, period_s: float = 0.05) -> None:
        """Return when the job has ended, well or not, or when the process that works on it, or its owner, is gone."""
        status = None
        if self._status_fd >= 0:
            try:
                fd = os.open(f"/proc/{self._owner_pid}/fd/{self._status_fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return  # the owner is gone, or hides its descriptors: the commit waits in any case
            try:
                status = StatusPage(fd)
            finally:
                os.close(fd)
        while _is_running(self._worker_pid) and _is_running(self._owner_pid):
            if status is not None and status.last_finished >= self._job:
                break
            time.sleep(period_s)
        if status is not None:
            status.close()


def _is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


class WriterJobHandle(JobHandle):
    """A job of a persistent writer.

    Attributes:
        job: what is to be written.
        number: of the job, counted over all writer processes.
    """

    def __init__(self, child: WriterChild, number: int, job: WriterJob) -> None:
        self.job = job
        self.number = number
        self.submitted_s = time.monotonic()
        self.done = False
        self.value: JobResult | None = None
        self.error: CheckpointError | None = None
        self.windows_free = 0
        self._child = child
        self._written_before = child.written_bytes()
        # Made here: in a forked process the descriptor is closed, and the process is not the owner.
        self._watch = JobWatch(child.pid, child.status_fd, number)

    @property
    def what(self) -> str:
        """Files and directory, for messages."""
        names = [file.image.file_name for file in self.job.files]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{shown} into {self.job.storage}"

    def written_bytes(self) -> int:
        return max(0, self._child.written_bytes() - self._written_before)

    def poll(self) -> bool:
        if not self.done:
            self._child.receive()
        return self.done

    def _wait_for_news(self, timeout_s: float) -> None:
        self._child.wait_for_news(timeout_s)

    def _outcome(self) -> JobResult:
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def fileno(self) -> int:
        """The writer's sentinel, -1 where there is none: readable once the writer is gone."""
        return self._child.sentinel.fd

    def acquire_window(self, number: int, timeout_s: float | None = None) -> None:
        """Wait until window `number` of a job with a `Ring` may be put into its slot.

        Raises:
            SaveError: the job has failed meanwhile, or `timeout_s` has passed; see `result`.
        """
        ring = self.job.ring
        assert ring is not None
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while number - self.windows_free >= ring.slots:
            if self.poll():
                self._outcome()
                raise SaveError(f"job {self.number} has ended before its window {number}: the windows do not add up")
            if number - self.windows_free < ring.slots:
                return
            if until_s is not None and time.monotonic() >= until_s:
                raise WriteTimeoutError(f"no window became free in {timeout_s} s while writing {self.what}")
            self._wait_for_news(_LONGEST_WAIT_S)

    def window_ready(self, number: int) -> None:
        """Tell the writer that window `number` lies in its slot."""
        self._child.send(WINDOW_READY, (self.number, number))

    def abort(self) -> bool:
        if self.poll():
            return self._child.gone or not self._child.dead
        self._child.send(CANCEL, self.number)
        if self.wait(_CANCEL_DEADLINE_S):
            return self._child.gone or not self._child.dead
        return self._child.kill("it did not stop when its job was aborted")

    def watch(self) -> JobWatch:
        return self._watch
