"""A job that another process works on, as whoever submitted it sees it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.writing.writer_messages import StatusPage

__all__ = ["LONGEST_WAIT_S", "JobHandle", "JobWatch"]

LONGEST_WAIT_S: Final = 1.0


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
            left_s = LONGEST_WAIT_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_for_news(min(left_s, LONGEST_WAIT_S))
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
