"""Jobs: a `WriterJob` is all that a rank writes in one save, as plain data; a `Job` is work in progress.

The writer process gets a `WriterJob` in a message, a forked child has it from its fork. No torch, no numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcore_ckpt.core.process import Crew, Outcome
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.image.layout import PlannedFile, WrittenFile
from mcore_ckpt.image.manifest import GlobalPlan
from mcore_ckpt.image.writer import write_files
from mcore_ckpt.storage.base import Storage, align_up


@dataclass(frozen=True, slots=True)
class WriterJob:
    """The work of a writer process for one save: all files, or none."""

    storage: Storage  # where to; pickled, so it holds paths and not open files
    files: tuple[PlannedFile, ...]  # what
    # Seconds without progress after which the writer counts as stuck; None waits for ever.
    deadline_s: float | None = None
    # The plan of a new structure, on the coordinator: its index is to be put together during the writing.
    plan: GlobalPlan | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job."""

    files: tuple[WrittenFile, ...]  # in the order of the job
    started_s: float  # when the writer began with it, on the clock of `time.monotonic()`, which all processes share
    finished_s: float  # when the last file was durable, on the same clock
    encoder: MetadataEncoder | None = None  # of the job's `plan`


class Job:
    """Work that was asked for, as its owner sees it: here it has ended, with a value or with an exception that waits to
    be raised. One that a child process does is a `ChildJob` (`child_processes.py`).

    Attributes:
        what: the job in words, for messages.
        submitted_s: when, on the clock of `time.monotonic()`.
        done: it has ended, well or not; `poll` looks for that.
        value: what it returned.
        error: why it failed.
    """

    pid = 0  # of the process that works on it

    def __init__(self, what: str, value: Any = None, error: BaseException | None = None) -> None:
        self.what = what
        self.submitted_s = time.monotonic()
        self.done = True
        self.value = value
        self.error = error

    @classmethod
    def ended(cls, what: str, outcome: Outcome[Any]) -> Job:
        """A job that has come to this."""
        return cls(what, None if outcome.error else outcome.value(), outcome.error)

    def poll(self) -> bool:
        """Whether the job has ended, well or not. Returns at once."""
        return self.done

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `poll`, but waits up to `timeout_s` seconds for the end; None waits as long as it takes."""
        return self.done

    def result(self) -> Any:
        """Wait for the end and return what the job returned.

        Raises:
            WriterDiedError: the process ended before the job; names its signal or exit code.
            WriteTimeoutError: there was no progress for longer than the job's deadline; the process was killed.
            SaveError: the job raised; the exception there is the cause, with its traceback, and `errno` if it had one.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def abort(self) -> None:
        """Give the job up: stop it, and remove what it wrote as far as it is not finished."""

    def watch(self) -> Callable[..., None]:
        """A function that another process of this host calls to wait for the end; it can be pickled."""
        return has_ended


def has_ended(*args: Any, **kwargs: Any) -> None:
    """Wait for a job that has ended."""


def run_job(job: WriterJob, buffer: memoryview, on_written: Callable[[], None]) -> JobResult:
    """Do a job, in the process that calls; `on_written` is called on an I/O thread. `SaveError` names the file and the
    errno; no file stays then.
    """
    files = [
        (file, buffer[file.buffer_offset : file.buffer_offset + align_up(file.image.size_bytes)]) for file in job.files
    ]
    return timed_result(partial(write_files, job.storage, files, on_written=on_written), job.plan)


def timed_result(write: Callable[[], Sequence[WrittenFile]], plan: GlobalPlan | None) -> JobResult:
    """Write, put the index of a new plan together meanwhile, and say when that was."""
    started_s = time.monotonic()
    if plan is None:
        return JobResult(tuple(write()), started_s, time.monotonic())
    with Crew(1, "mcore_ckpt-metadata") as crew:
        encoder = crew.submit(plan.encoder)
        files = tuple(write())
        return JobResult(files, started_s, time.monotonic(), crew.result(encoder))
