"""Child processes that work on jobs, as the process that started them sees them.

Three kinds stand on this. Each says only how its process is started, and how jobs and news travel:

    persistent_writer.py  a bare interpreter that maps the staging buffer and writes files; kept for all saves
    forked_call.py        a Python function in a child forked for it, whose memory is the snapshot
    call_worker.py        Python functions, pickled, in one spawned process that is kept for them

What is the same for all: the end of the process is noticed by its sentinel, in milliseconds, and named with its signal
or exit code; a job without a sign of life for longer than its deadline costs the process its life; what a job raised
comes back as the cause of an error here; and a process forked from the owner has no part in any of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointError, SaveError, WriterDiedError, WriteTimeoutError
from mcore_ckpt.core.failures import FailureReport, remote_cause, same_class
from mcore_ckpt.core.process import Sentinel, exit_text, is_running, wait_readable
from mcore_ckpt.save._writer_messages import StatusPage

# As Megatron's own persistent worker: where cores are scarce, training's next step goes first.
TRAINING_FIRST_NICE: Final = 10
_LONGEST_WAIT_S: Final = 1.0
_SHORTEST_WAIT_S: Final = 0.01
# A killed process that is not gone by then hangs inside the kernel; it is not waited for any longer.
_REAP_DEADLINE_S: Final = 1.0


class Job:
    """Work in progress, as its owner sees it: by a child process, or ended already.

    Attributes:
        what: the job in words, for messages.
        number: by which its process knows it.
        deadline_s: seconds without a sign of life after which the process counts as stuck; None waits for ever.
        submitted_s: when, on the clock of `time.monotonic()`.
        steps: what its process has reported on the way: windows of a ring taken over, or 1 for a preload.
        done: it has ended, well or not; `poll` looks for that.
        value: what it returned.
        error: why it failed.
    """

    def __init__(
        self, child: SupervisedChild | None, what: str, number: int = 0, deadline_s: float | None = None
    ) -> None:
        self.what = what
        self.number = number
        self.deadline_s = deadline_s
        self.submitted_s = time.monotonic()
        self.steps = 0
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._child = child
        # Made here: in a forked process the descriptor is closed, and the process is not the owner.
        self._watch = JobWatch() if child is None else child.watch(number)
        self._written_before = 0 if child is None else child.written_bytes()

    @classmethod
    def ended(cls, what: str, outcome: Any = None) -> Job:
        """A job that has ended, with a value or an exception that waits to be raised."""
        job = cls(None, what)
        job.done = True
        if isinstance(outcome, BaseException):
            job.error = outcome
        else:
            job.value = outcome
        return job

    @property
    def pid(self) -> int:
        """The process that works on the job; 0 if none does."""
        return 0 if self._child is None else self._child.pid

    def poll(self) -> bool:
        """Whether the job has ended, well or not. Returns at once."""
        if not self.done and self._child is not None:
            self._child.look()
        return self.done

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `poll`, but waits up to `timeout_s` seconds for the end; None waits as long as it takes."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            left_s = _LONGEST_WAIT_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return False
            self.wait_for_news(left_s)
        return True

    def wait_for_news(self, timeout_s: float = _LONGEST_WAIT_S) -> None:
        """Return when there may be something new to `poll`, or at the time-out, or after a second."""
        if self._child is not None:
            self._child.wait_for_news(min(timeout_s, _LONGEST_WAIT_S))

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

    def tell(self, step: int) -> None:
        """Tell the process that this step is ready for it."""
        if self._child is not None:
            self._child.tell(self, step)

    def abort(self) -> bool:
        """Give the job up: stop it, and remove what it wrote as far as it is not finished. Returns `memory_is_free`."""
        if not self.poll() and self._child is not None:
            self._child.cancel(self)
        return self.memory_is_free()

    def memory_is_free(self) -> bool:
        """Whether no process works any more on the job's memory, so that it may be used again: one that was killed and
        hangs inside the kernel may read and write there all the same.
        """
        return self.done and (self._child is None or self._child.lets_go_of_memory())

    def written_bytes(self) -> int:
        """How much has been written so far, as far as the process tells; 0 where it does not."""
        return 0 if self._child is None else max(0, self._child.written_bytes() - self._written_before)

    def watch(self) -> JobWatch:
        """What another process needs to see the job end."""
        return self._watch


class SupervisedChild(ABC):
    """A child process, from its start to its end. What belongs to a kind of child is what the subclasses override.

    `title` names the process in messages, with its pid. `status` is where it leaves its signs of life; None if it
    leaves none. `dead`: the process is gone or as good as gone; there will be no news of it.
    """

    stop_deadline_s: float = 5.0

    def __init__(
        self, process: subprocess.Popen[bytes] | BaseProcess, title: str, status: StatusPage | None = None
    ) -> None:
        assert process.pid is not None
        self.pid: int = process.pid
        self.title = title.format(pid=self.pid)
        self.status = status
        self.dead = False
        self._process = process
        self._exit_code: int | None = None
        self._gone = False
        self._sentinel = Sentinel(self.pid)
        self._jobs: dict[int, Job] = {}  # by number, oldest first
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

    def written_bytes(self) -> int:
        """How much the process has written so far, all jobs together; 0 where it does not tell."""
        return 0

    def tell(self, job: Job, step: int) -> None:  # noqa: B027  (most kinds do a job in one go)
        """Tell the process that a step of a job is ready for it."""

    def cancel(self, job: Job) -> None:
        """Give a job up; unless a kind can do better, that ends the process."""
        self.kill("its job was given up", SaveError)

    def _ask_to_stop(self) -> None:  # noqa: B027  (a kind may have nothing to say)
        """Tell the process to end after its jobs."""

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
            ended = self._has_ended()  # before reading: what it sent before its end must be read
            try:
                connected = self._receive()
            except (EOFError, OSError):
                connected = False
            if not (ended or connected):  # the connection closes a moment before the process is gone
                ended = self._has_ended(_REAP_DEADLINE_S)
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
                timeout_s = min(timeout_s, max(job.deadline_s - self._silent_s(job), _SHORTEST_WAIT_S))
        fd = self._news_fd()
        wait_readable([fd] if fd >= 0 else [], timeout_s, self._sentinel)

    def _silent_s(self, job: Job) -> float:
        return time.monotonic() - max(0.0 if self.status is None else self.status.stamp_s, job.submitted_s)

    def _check_deadlines(self) -> None:
        if self.status is not None and self.status.state == "waiting":
            return  # a writer that waits for the trainer's next window is not stuck
        for job in list(self._jobs.values()):
            if job.deadline_s is not None and (silent_s := self._silent_s(job)) > job.deadline_s:
                self.kill(
                    f"there was no progress for {silent_s:.1f} s (write_deadline_s={job.deadline_s}): a device or a "
                    "network file system hangs, or the deadline is too short"
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

    def _has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the process is gone: its memory is not in use any more. Collects its exit status."""
        if not self._gone:
            # Where exit statuses are collected elsewhere, only the sentinel knows; it is asked first, or a process that
            # ends between the two questions would be taken for such a one.
            ended = self._sentinel.wait(within_s)
            process = self._process
            self._exit_code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            self._gone = ended or self._exit_code is not None
        return self._gone

    def lets_go_of_memory(self) -> bool:
        """Whether memory of jobs that have ended may be used again: not where a killed process is still there."""
        return not self.dead or self._has_ended()

    def kill(self, reason: str, error: type[CheckpointError] = WriteTimeoutError) -> None:
        """Kill the process; its jobs end with `error`."""
        with self._lock:
            if not self.dead:
                self._process.kill()
                self._end(lambda job: error(f"{job.what}: {self.title} was killed: {reason}"))

    def stop(self, abort: bool) -> None:
        """End the process; its jobs first, unless aborting."""
        if not (abort or self.dead):
            for job in list(self._jobs.values()):
                job.wait()
            with self._lock:
                if not self.dead:
                    self._ask_to_stop()
            self._has_ended(self.stop_deadline_s)
        with self._lock:
            if not self.dead:
                self._process.kill()
                self._end(lambda job: SaveError(f"{job.what}: {self.title} was closed"))

    def _death(self, job: Job) -> CheckpointError:
        return WriterDiedError(f"{job.what}: {self.title} {self._end_text()}")

    def _end(self, error: Callable[[Job], CheckpointError]) -> None:
        """The process is dead or as good as dead: reap it, fail its jobs, release what belongs to it."""
        self.dead = True
        self._has_ended(_REAP_DEADLINE_S)
        self._at_end()
        self._fail_jobs(error)
        self._close_descriptors()

    def _fail_jobs(self, error: Callable[[Job], CheckpointError]) -> None:
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
    """Sees a job end from any process on this host; picklable. Reads a shared page, never the trainer's socket; without
    a page the process ends with the job.
    """

    def __init__(self, worker_pid: int = 0, status_fd: int = -1, number: int = 0) -> None:
        self._worker_pid = worker_pid
        self._owner_pid = os.getpid()
        self._status_fd = status_fd
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Wait, whatever the arguments: in the place of a request's function."""
        self.wait()

    def wait(self, period_s: float = 0.05) -> None:
        """Return when the job has ended, well or not, or when the process that works on it, or its owner, is gone."""
        status = None
        if self._status_fd >= 0:
            try:
                status = StatusPage(os.open(f"/proc/{self._owner_pid}/fd/{self._status_fd}", os.O_RDWR | os.O_CLOEXEC))
            except OSError:
                return  # the owner is gone, or hides its descriptors: the commit waits in any case
        while is_running(self._worker_pid) and is_running(self._owner_pid):
            if status is not None and status.last_finished >= self._number:
                break
            time.sleep(period_s)
        if status is not None:
            status.close()
