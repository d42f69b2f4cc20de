"""Jobs: a `WriterJob` is all that a rank writes in one save, as plain data; a `Job` is work in progress.

The writer process gets a `WriterJob` in a message, a forked child has it from its fork. No torch, no numpy.

**Child processes** work on jobs; here is how the process that has started them sees them (`SupervisedChild`). Each kind
says only how its process is started, and how jobs and news travel:

    writer_process.py  a bare interpreter that maps the staging buffer and writes files; kept for all saves
    forked_child.py    a Python function in a child forked for it, whose memory is the snapshot

Of both, the end is noticed by a sentinel, in milliseconds, and named with its signal or exit code. A job without a sign
of life for longer than its deadline costs the process its life. What a job raised comes back as the cause of an error
here. A process forked from the owner has no part in any of it.

Signs of life stand in a page of shared memory, written by a process that works, read by any other. So a trainer tells
slow from stuck without a message, and a process that must not touch the trainer's socket sees that a job has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import (
    CheckpointError,
    FailureReport,
    SaveError,
    WriterDiedError,
    WriteTimeoutError,
    remote_cause,
    same_class,
)
from mcore_ckpt.core.process import (
    SLICES,
    Crew,
    Sentinel,
    exit_text,
    exit_with_parent,
    is_running,
    leave_signals_to_parent,
    lower_priority,
    signals_held_back,
    wait_readable,
    write_during_training,
)
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.image.layout import GlobalPlan, PlannedFile, WrittenFile
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
    """Work that was asked for, as its owner sees it; here it has ended. That of a child process is a `ChildJob`."""

    pid = 0  # of the process that works on it

    def __init__(self, what: str, value: Any = None, error: BaseException | None = None) -> None:
        self.what = what  # in words, for messages
        self.submitted_s = time.monotonic()
        self.done = True  # it has ended, well or not; `poll` looks for that
        self.value = value
        self.error = error

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
        return JobWatch()


def run_job(job: WriterJob, buffer: memoryview, on_written: Callable[[], None]) -> JobResult:
    """Do a job in this process; `on_written` comes on an I/O thread. `SaveError`: no file stays."""
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


_PROGRAM: Final = """\
import os, sys
os.setpgid(0, 0)
sys.path += [path for path in {path!r} if path not in sys.path]
from {module} import main
main{arguments!r}
"""


def start_interpreter(module: str, *arguments: int | str | None, **options: Any) -> subprocess.Popen[bytes]:
    """Start `main(*arguments)` of a module in a bare interpreter; `options` as of `subprocess.Popen`."""
    if not sys.executable:
        raise OSError("sys.executable is empty: there is no interpreter to start")
    # -S: no site-packages hooks; the trainer's import path is appended, so that none of its files can stand in for a
    # module of the standard library. A process group of its own is out of reach of the terminal's signals; it stays in
    # the trainer's session, to which it gives way (`lower_priority`).
    path = [str(Path(each).absolute()) for each in [*sys.path, str(Path(__file__).resolve().parents[2])]]
    program = _PROGRAM.format(path=path, module=module, arguments=arguments)
    command = [sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program]
    with signals_held_back():
        return subprocess.Popen(command, **options)


class StatusPage:
    """One page of numbers, stored whole: aligned 64-bit stores are not torn. `fd`: its own descriptor."""

    _STAMP, _FINISHED, _WAITS = range(3)

    def __init__(self, fd: int | None = None) -> None:
        """A new page, all zero, or the one that is behind a descriptor."""
        if fd is None:
            fd = os.memfd_create("mcore_ckpt_status", os.MFD_CLOEXEC)
            os.ftruncate(fd, mmap.PAGESIZE)
        self.fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("q")

    def progress(self) -> None:
        """Leave a sign of life."""
        self._numbers[self._STAMP] = time.monotonic_ns()

    def finished(self, job: int) -> None:
        """Say that the job of this number has ended, well or not. Jobs are numbered from 1 and end in order."""
        self._numbers[self._FINISHED] = job

    @property
    def last_finished(self) -> int:
        """Number of the last job that has ended."""
        return self._numbers[self._FINISHED]

    @property
    def stamp_s(self) -> float:
        """When the last sign of life was left, on the clock of `time.monotonic()`; 0 before the first."""
        return self._numbers[self._STAMP] / 1e9

    @property
    def training_waits(self) -> int:
        """For how many saves training waits: other work leaves the disk to them."""
        return self._numbers[self._WAITS]

    @training_waits.setter
    def training_waits(self, saves: int) -> None:
        self._numbers[self._WAITS] = saves

    def close(self) -> None:
        """Unmap the page and close the descriptor. Twice is harmless."""
        self._numbers.release()
        self._memory.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def work_for_trainer(parent_pid: int, page_fd: int, nice: int = 19) -> None:
    """Begin as a process that works during training: it ends with its parent, and writes while no save does. What can
    take its time gets a 70th of the cores that training keeps busy; at a nice value of 10 it is a tenth.
    """
    lower_priority(nice)
    leave_signals_to_parent()
    exit_with_parent(parent_pid)
    page = StatusPage(page_fd)
    write_during_training(lambda: page.training_waits > 0)


# As Megatron's own persistent worker: where cores are scarce, training's next step goes first.
TRAINING_FIRST_NICE: Final = 10
_LONGEST_WAIT_S: Final = 1.0
_SHORTEST_WAIT_S: Final = 0.01
_WATCH_PERIOD_S: Final = 0.05
# A killed process that is not gone by then hangs inside the kernel; it is not waited for any longer.
REAP_DEADLINE_S: Final = 1.0


class ChildJob(Job):
    """Work that a child process does."""

    def __init__(self, child: SupervisedChild, what: str, number: int, deadline_s: float | None = None) -> None:
        super().__init__(what)
        self.done = False
        self.number = number  # by which the process knows it
        self.deadline_s = deadline_s  # after so long without a sign of life it counts as stuck; None: never
        self.silent_s = 0.0  # so long no sign of life has come, while this process ran
        self._child = child
        # Made here: in a forked process the descriptor is closed, and the process is not the owner.
        self._watch = child.watch(number)

    @property
    def pid(self) -> int:  # type: ignore[override]
        """The process that works on the job."""
        return self._child.pid

    def poll(self) -> bool:
        if not self.done:
            self._child.look()
        return self.done

    def wait(self, timeout_s: float | None = None) -> bool:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            left_s = _LONGEST_WAIT_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._child.wait_for_news(min(left_s, _LONGEST_WAIT_S))
        return True

    def abort(self) -> None:
        if not self.poll():
            self._child.cancel(self)

    def memory_is_free(self) -> bool:
        """Whether no process, not even a killed one that hangs in the kernel, uses the job's memory any more."""
        return self.done and (not self._child.dead or self._child.has_ended())

    def watch(self) -> JobWatch:
        return self._watch


class SupervisedChild(ABC):
    """A child process, from its start to its end. What belongs to a kind of child is what the subclasses override."""

    def __init__(
        self, process: subprocess.Popen[bytes] | BaseProcess, title: str, status: StatusPage | None = None
    ) -> None:
        assert process.pid is not None
        self.pid: int = process.pid
        self.title = title.format(pid=self.pid)  # in messages
        self.status = status  # where it leaves its signs of life, if it does
        self.dead = False  # gone, or as good as gone: there will be no news of it
        self._process = process
        self._exit_code: int | None = None
        self._gone = False
        self._sentinel = Sentinel(self.pid)
        self._jobs: dict[int, ChildJob] = {}  # by number, oldest first
        self._looked = (0, 0.0, 0.0)  # which thread has looked last, its CPU time, and when
        self._lock = threading.RLock()
        _children.add(self)

    # --- what each kind says for itself -------------------------------------------------------------------------------

    @abstractmethod
    def _receive(self) -> bool:
        """Take in what has arrived. False if nothing more can come; `EOFError` and `OSError` mean the same."""

    @abstractmethod
    def _news_fd(self) -> int:
        """A descriptor that can be read when there is news; -1 for none."""

    def watch(self, number: int) -> JobWatch:
        """What another process needs to see a job end; unless a kind can do better, it sees the end of the process."""
        return JobWatch(self.pid)

    def cancel(self, job: ChildJob) -> None:
        """Give a job up; unless a kind can do better, that ends the process."""
        self.kill("its job was given up", SaveError)

    def _end_text(self) -> str:
        """How the process ended, in words that follow on its title."""
        return exit_text(self._exit_code)

    def _at_end(self) -> None:  # noqa: B027  (a kind may have nothing to do)
        """Act on what counts only now that the process has ended."""

    @abstractmethod
    def _release(self) -> None:
        """Close descriptors, once the process is dead; must bear being called twice."""

    # --- being watched ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what has arrived; notice the process's end, and a deadline that has passed."""
        with self._lock:
            if self.dead:
                return
            ended = self.has_ended()  # before reading: what it sent before its end must be read
            try:
                connected = self._receive()
            except (EOFError, OSError):
                connected = False
            if not (ended or connected):  # the connection closes a moment before the process is gone
                ended = self.has_ended(REAP_DEADLINE_S)
                if not ended:
                    self._process.kill()
            if ended or not connected:
                self._end(self._death)
            else:
                self._check_deadlines()

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait for a message, the process's end, or a deadline."""
        if self.dead:
            return
        for job in list(self._jobs.values()):
            if job.deadline_s is not None:
                timeout_s = min(timeout_s, max(job.deadline_s / SLICES, _SHORTEST_WAIT_S))
        wait_readable(self._news_fd(), timeout_s, self._sentinel)

    def _check_deadlines(self) -> None:
        """Kill at a deadline. While all are suspended, none waits: a look counts a slice, or as long as it ran."""
        thread, ran_s, looked_s = self._looked
        self._looked = threading.get_ident(), time.thread_time(), time.monotonic()
        ran_s = self._looked[1] - ran_s if self._looked[0] == thread else 0.0
        alive_s = 0.0 if self.status is None else self.status.stamp_s
        for job in list(self._jobs.values()):
            if job.deadline_s is None:
                continue
            slice_s = max(min(job.deadline_s / SLICES, _LONGEST_WAIT_S), _SHORTEST_WAIT_S)
            silent_s = job.silent_s + min(self._looked[2] - looked_s, max(slice_s, ran_s))
            job.silent_s = min(silent_s, self._looked[2] - max(alive_s, job.submitted_s))
            if job.silent_s > job.deadline_s:
                self.kill(
                    f"there was no progress for {job.silent_s:.1f} s (write_deadline_s={job.deadline_s}): a device or "
                    "a network file system hangs, or the deadline is too short"
                )
                return

    def _job_ended(self, number: int, outcome: Any) -> None:
        """The process says so: `outcome` is a `FailureReport`, or what the job returned."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        if isinstance(outcome, FailureReport):
            job.error = same_class(outcome, SaveError)(f"{job.what} failed in {self.title}: {outcome.message}")
            job.error.__cause__ = remote_cause(outcome)
        else:
            job.value = outcome
        job.done = True

    # --- the end ------------------------------------------------------------------------------------------------------

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the process is gone: its memory is not in use any more. Collects its exit status."""
        if not self._gone:
            # Where exit statuses are collected elsewhere, only the sentinel knows; it is asked first, or a process that
            # ends between the two questions would be taken for such a one.
            ended = self._sentinel.wait(within_s)
            process = self._process
            self._exit_code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            self._gone = ended or self._exit_code is not None
        return self._gone

    def kill(self, reason: str, error: type[CheckpointError] = WriteTimeoutError) -> None:
        """Kill the process; its jobs end with `error`."""
        with self._lock:
            if not self.dead:
                self._process.kill()
                self._end(lambda job: error(f"{job.what}: {self.title} was killed: {reason}"))

    def _death(self, job: ChildJob) -> CheckpointError:
        return WriterDiedError(f"{job.what}: {self.title} {self._end_text()}")

    def _end(self, error: Callable[[ChildJob], CheckpointError]) -> None:
        """The process is dead or as good as dead: reap it, fail its jobs, release what belongs to it."""
        self.dead = True
        self.has_ended(REAP_DEADLINE_S)
        self._at_end()
        self._fail_jobs(error)
        self._close_descriptors()

    def _fail_jobs(self, error: Callable[[ChildJob], CheckpointError]) -> None:
        for job in self._jobs.values():
            job.error = error(job)
            job.done = True
        self._jobs.clear()

    def _close_descriptors(self) -> None:
        self._release()
        if self._gone:
            self._sentinel.close()
            if isinstance(self._process, BaseProcess):
                with contextlib.suppress(ValueError, AssertionError):  # of another process, or collected elsewhere
                    self._process.close()
        if self.status is not None:
            self.status.close()

    def disown(self) -> None:
        """In a process forked from the owner: release all that belongs to the owner, and touch no lock of its."""
        self._lock = threading.RLock()
        if not self.dead:
            self.dead = self._gone = True
            self._fail_jobs(lambda job: SaveError(f"{job.what}: {self.title} belongs to the process that forked this"))
            if isinstance(self._process, subprocess.Popen):
                self._process.returncode = 0  # not ours to wait for
            self._close_descriptors()


# All of this process, so that one that is forked from it can disown them.
_children: weakref.WeakSet[SupervisedChild] = weakref.WeakSet()


def _disown_all() -> None:
    for child in list(_children):
        child.disown()


os.register_at_fork(after_in_child=_disown_all)


class JobWatch:
    """Sees a job end from any process on this host; picklable. Without a page, the process ends with the job."""

    def __init__(self, worker_pid: int = 0, status_fd: int = -1, number: int = 0) -> None:
        self._worker_pid = worker_pid
        self._owner_pid = os.getpid()
        self._status_fd = status_fd
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Return when the job, its process or its owner has ended; takes the arguments of a request's function."""
        status = None
        if self._status_fd >= 0:
            try:
                status = StatusPage(os.open(f"/proc/{self._owner_pid}/fd/{self._status_fd}", os.O_RDWR | os.O_CLOEXEC))
            except OSError:
                return  # the owner is gone, or hides its descriptors: the commit waits in any case
        while is_running(self._worker_pid) and is_running(self._owner_pid):
            if status is not None and status.last_finished >= self._number:
                break
            time.sleep(_WATCH_PERIOD_S)
        if status is not None:
            status.close()
