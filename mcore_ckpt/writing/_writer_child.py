"""One persistent writer process, from its start to its end, as the trainer sees it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointError, SaveError, WriterDiedError, WriteTimeoutError
from mcore_ckpt.core.failures import FailureReport, remote_cause, same_class
from mcore_ckpt.core.process import Sentinel, exit_text, kernel_can_watch, wait_readable
from mcore_ckpt.writing.job_handle import LONGEST_WAIT_S, JobHandle, JobWatch
from mcore_ckpt.writing.writer_messages import (
    CANCEL,
    DONE,
    FORGET_STAGE,
    JOB,
    STAGE,
    STOP,
    WINDOW_FREE,
    WINDOW_READY,
    Inbox,
    JobResult,
    StatusPage,
    WriterJob,
    pack,
)

__all__ = ["WriterChild"]

_SEND_DEADLINE_S: Final = 10.0
_SHORTEST_WAIT_S: Final = 0.01
_STOP_DEADLINE_S: Final = 5.0
# A killed process that is not gone by then hangs inside the kernel; nobody waits longer for it.
_REAP_DEADLINE_S: Final = 1.0
_OUTPUT_TAIL_BYTES: Final = 4000
_KEPT_STAGES: Final = 4

# -S: no site-packages hooks; what can be imported is handed over, behind the standard library, so that a file of the
# training script's directory can never stand in for one of its modules.
_PROGRAM: Final = """\
import sys
sys.path += [path for path in {path!r} if path not in sys.path]
from mcore_ckpt.writing._writer_process import main
main({control_fd}, {status_fd}, {parent_pid}, {kernel_watches}, {cpu_priority}, {io_priority})
"""


class WriterChild:
    """A writer process and the trainer's ends of what connects them.

    Attributes:
        pid: of the process.
        dead: the process is gone or as good as gone; there will be no news of it.
        gone: it is known to have ended, so that nobody else uses its stages.
        sentinel: readable once the process has ended.
        status_fd: its `StatusPage`.
    """

    def __init__(self, cpu_priority: int | None, io_priority: int | None) -> None:
        if not sys.executable:
            raise SaveError(
                "sys.executable is empty: no interpreter to start the writer process with; "
                'set it, or use SaveOptions(writer="fork")'
            )
        self.dead = False
        self.gone = False
        self._tail = ""
        self._handles: dict[int, WriterJobHandle] = {}
        self._lock = threading.RLock()
        self._stages: dict[tuple[int, int], int] = {}
        self.status_fd = StatusPage.create()
        self._status = StatusPage(self.status_fd)
        self._output_fd = os.memfd_create("mcore_ckpt_writer_output", os.MFD_CLOEXEC)
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        root = str(Path(__file__).resolve().parents[2])
        program = _PROGRAM.format(
            path=[str(Path(path).absolute()) for path in [*sys.path, root]],
            control_fd=theirs.fileno(),
            status_fd=self.status_fd,
            parent_pid=os.getpid(),
            kernel_watches=kernel_can_watch(),
            cpu_priority=cpu_priority,
            io_priority=io_priority,
        )
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output_fd,
                stderr=self._output_fd,
                pass_fds=(theirs.fileno(), self.status_fd),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self.sentinel = Sentinel(self.pid)
        self._inbox = Inbox(self._connection)
        _children.add(self)

    def written_bytes(self) -> int:
        """How much this process has written so far, all jobs together; 0 once it is gone."""
        return 0 if self.dead else self._status.bytes_written

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, content: Any, *fds: int) -> None:
        """Send a message. A writer that is gone is noticed later, by whoever asks for the outcome."""
        message, all_fds, to_close = pack(kind, content, *fds)
        try:
            with self._lock:
                if self.dead:
                    return
                until_s = time.monotonic() + _SEND_DEADLINE_S
                view = memoryview(message)
                while view:
                    try:
                        # The descriptors go with the message's first byte.
                        sent = (
                            socket.send_fds(self._connection, [view[:1]], all_fds)
                            if all_fds
                            else self._connection.send(view)
                        )
                        view, all_fds = view[sent:], []
                    except (BlockingIOError, InterruptedError):
                        if time.monotonic() > until_s:
                            self.kill(f"it has not read a message for {_SEND_DEADLINE_S:.0f} s")
                            return
                        _wait_writable(self._connection)
        except OSError:
            self.receive()
        finally:
            if to_close is not None:
                os.close(to_close)

    def receive(self) -> None:
        """Take in what has arrived; notice the writer's end, and a deadline that has passed."""
        with self._lock:
            if self.dead:
                return
            ended = self._popen.poll() is not None  # before reading: what it sent before its end must be read
            while self._inbox.fill():
                pass
            for kind, content, _ in self._inbox.messages():
                self._dispatch(kind, *content)
            if ended or self._inbox.closed:
                self._died()
            else:
                self._check_deadlines()

    def _dispatch(self, kind: int, number: int, content: Any) -> None:
        handle = self._handles.get(number)
        if handle is None:
            return
        if kind == WINDOW_FREE:
            handle.windows_free = content + 1
            return
        if kind == DONE:
            handle.value = content
        else:
            report: FailureReport = content
            error = same_class(report, SaveError)(f"the writer process (pid {self.pid}): {report.message}")
            error.__cause__ = remote_cause(report)
            handle.error = error
        handle.done = True
        del self._handles[number]

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait for a message, the writer's end, or a deadline."""
        if self.dead:
            return
        now_s = time.monotonic()
        for handle in list(self._handles.values()):
            if handle.job.deadline_s is not None:
                left_s = handle.job.deadline_s - (now_s - self._last_sign_s(handle))
                timeout_s = min(timeout_s, max(left_s, _SHORTEST_WAIT_S))
        wait_readable([self._connection.fileno()], timeout_s, self.sentinel)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, number: int, job: WriterJob, stage_fd: int) -> WriterJobHandle:
        """Hand over a job. Never raises because the process is gone: the handle tells."""
        with self._lock:
            key = self.send_stage(stage_fd)
            handle = self._handles[number] = WriterJobHandle(self, number, job)
            self.send(JOB, (number, job, key, _working_directory()))
            if self.dead:
                self._fail_jobs(self._end_error)
        return handle

    def send_stage(self, stage_fd: int) -> tuple[int, int]:
        """Have the writer map a stage, unless it has; it keeps the few that were used last."""
        stat = os.fstat(stage_fd)
        key = (stat.st_dev, stat.st_ino)
        known = self._stages.pop(key, None)
        self._stages[key] = stat.st_size
        if known != stat.st_size:
            self.send(STAGE, (key, stat.st_size), stage_fd)
        while len(self._stages) > _KEPT_STAGES:
            oldest = next(iter(self._stages))
            del self._stages[oldest]
            self.send(FORGET_STAGE, oldest)
        return key

    def forget_stage(self, stage_fd: int) -> None:
        """Have the writer unmap a stage, so that its memory can be given back."""
        stat = os.fstat(stage_fd)
        key = (stat.st_dev, stat.st_ino)
        if self._stages.pop(key, None) is not None:
            self.send(FORGET_STAGE, key)

    # --- end ----------------------------------------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        if not self._handles or self._status.state == "waiting":
            return  # a writer that waits for the trainer's next window is not stuck
        now_s = time.monotonic()
        for handle in self._handles.values():
            silent_s = now_s - self._last_sign_s(handle)
            if handle.job.deadline_s is not None and silent_s > handle.job.deadline_s:
                self.kill(
                    f"there was no progress for {silent_s:.1f} s (write_deadline_s={handle.job.deadline_s}): a "
                    "device or a network file system hangs, or the deadline is too short"
                )
                return

    def _last_sign_s(self, handle: WriterJobHandle) -> float:
        return max(self._status.stamp_s, handle.submitted_s)

    def kill(self, reason: str) -> bool:
        """Kill the writer since it is stuck; its jobs end with `WriteTimeoutError`. Whether it is gone."""
        with self._lock:
            if not self.dead:
                self._popen.kill()
                self._finish(
                    lambda what: WriteTimeoutError(
                        f"writing {what}: the writer process (pid {self.pid}) was killed: {reason}"
                    )
                )
            return self.gone

    def _died(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_DEADLINE_S)  # the socket closes a moment before the process is gone
        if self._popen.returncode is None:
            self._popen.kill()
        self._finish(self._end_error)

    def _end_error(self, what: str) -> SaveError:
        return WriterDiedError(f"writing {what}: {self.end_text()}; the next save starts another process")

    def end_text(self) -> str:
        """How the process ended, and what it said last."""
        tail = f"\n--- its last output ---\n{self._tail}\n---\n" if self._tail else ""
        return f"the writer process (pid {self.pid}) {exit_text(self._popen.returncode)}{tail}"

    def _finish(self, error: Callable[[str], SaveError]) -> None:
        """The writer is dead or as good as dead: fail its jobs, reap it, release what belongs to it."""
        self.dead = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_DEADLINE_S)
        self.gone = self._popen.returncode is not None
        self._tail = self._output_tail()
        self._fail_jobs(error)
        self.release()

    def _fail_jobs(self, error: Callable[[str], SaveError]) -> None:
        for handle in self._handles.values():
            handle.error = error(handle.what)
            handle.done = True
        self._handles.clear()

    def _output_tail(self) -> str:
        size = os.fstat(self._output_fd).st_size
        return (
            os.pread(self._output_fd, _OUTPUT_TAIL_BYTES, max(0, size - _OUTPUT_TAIL_BYTES))
            .decode(errors="replace")
            .strip()
        )

    def stop(self, abort: bool) -> None:
        """End the process; its jobs first, unless aborting."""
        with self._lock:
            if self.dead:
                return
            if abort:
                self._popen.kill()
            else:
                self.send(STOP, None)
        if not abort:
            for handle in list(self._handles.values()):
                handle.wait()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_STOP_DEADLINE_S)
        with self._lock:
            if not self.dead:
                self._popen.kill()
                self._finish(lambda what: SaveError(f"writing {what}: the writer process was closed"))

    def started(self) -> bool:
        """Whether the process has come so far as to wait for jobs."""
        return not self.dead and self._status.stamp_s > 0

    def release(self) -> None:
        """Close the trainer's descriptors."""
        self._connection.close()
        self._inbox.close()
        self.sentinel.close()
        self._status.close()  # the mapping holds a descriptor, too
        for name in ("_output_fd", "status_fd"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def disown(self) -> None:
        """In a process forked from the trainer: let go of all that belongs to the trainer, and touch no lock of its."""
        self._lock = threading.RLock()
        if not self.dead:
            self.dead = True
            self._fail_jobs(
                lambda what: SaveError(f"writing {what}: the writer belongs to the process that forked this")
            )
            self._popen.returncode = 0  # not ours to wait for
            self.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.stop(abort=True)


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed; only relative paths are the worse for it
        return None


def _wait_writable(connection: socket.socket) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    poller.poll(50)


_children: weakref.WeakSet[WriterChild] = weakref.WeakSet()


def _disown_all() -> None:
    for child in list(_children):
        child.disown()


os.register_at_fork(after_in_child=_disown_all)


_CANCEL_DEADLINE_S: Final = 2.0


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
            self._wait_for_news(LONGEST_WAIT_S)

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
