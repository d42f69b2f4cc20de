"""The writer process that is kept for all saves: start, health, messages, result, shutdown, and what runs in it.

A bare interpreter (no torch, no numpy, not the trainer's `__main__`) that maps the staging buffers. It has a process
group of its own, so that a Ctrl-C at the terminal reaches the trainer only. A writer that has died is replaced at the
next save.

Messages go over one socket, both ways, each as one packet: a pickle. A long one travels in a memfd whose descriptor
goes with the packet, so that sending never waits for the other side to read: a job of 20,000 tensors is half a megabyte
of offsets, and a writer that is still starting reads nothing. Pickles are safe here: both ends of the socket belong to
this package, and no other process can reach them.

In the process the main thread writes, one job after the other. A second thread reads the socket, and ends the process
as soon as the trainer is gone, in the middle of a write if need be: its files would not be committed.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import faulthandler
import itertools
import mmap
import os
import pickle
import queue
import select
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from mcore_ckpt.core.errors import FailureReport, SaveError, WriterDiedError, WriteTimeoutError, describe
from mcore_ckpt.core.process import (
    exit_text,
    leave_signals_to_parent,
    lower_priority,
    until_parent_is_gone,
)
from mcore_ckpt.save.jobs import (
    TRAINING_FIRST_NICE,
    ChildJob,
    JobResult,
    JobWatch,
    StatusPage,
    SupervisedChild,
    WriterJob,
    run_job,
    start_interpreter,
)

_START_DEADLINE_S: Final = 60.0
_START_PERIOD_S: Final = 0.002
_SEND_DEADLINE_S: Final = 10.0
_FULL_PERIOD_MS: Final = 50
_CANCEL_DEADLINE_S: Final = 2.0
_STOP_DEADLINE_S: Final = 5.0
_OUTPUT_TAIL_BYTES: Final = 4000
_job_numbers = itertools.count(1)


class Kind(enum.IntEnum):
    """What a message is; with what it holds."""

    # Trainer to writer.
    BUFFER = 1  # size in bytes, with the descriptor of the staging buffer of the jobs that follow
    FORGET_BUFFER = 2  # None
    JOB = 3  # (number, WriterJob)
    CANCEL = 4  # job number
    STOP = 5  # None
    # Writer to trainer.
    ENDED = 6  # (job number, JobResult or FailureReport)


_INLINE_BYTES: Final = 32 * 1024
_IN_MEMFD: Final = b"memfd"
_MOST_FDS: Final = 2


def send_message(connection: socket.socket, kind: int, content: Any, *fds: int) -> None:
    """Send a message and descriptors. Raises `BlockingIOError` where the socket is full, and does not block."""
    packet = pickle.dumps((kind, content), protocol=pickle.HIGHEST_PROTOCOL)
    if len(packet) <= _INLINE_BYTES:
        socket.send_fds(connection, [packet], fds)
        return
    with os.fdopen(os.memfd_create("mcore_ckpt_message", os.MFD_CLOEXEC), "wb") as memfd:
        memfd.write(packet)
        memfd.flush()
        socket.send_fds(connection, [_IN_MEMFD], [*fds, memfd.fileno()])


def receive_message(connection: socket.socket) -> tuple[int, Any, list[int]] | None:
    """The next message: kind, content, descriptors; None: nothing more comes. `BlockingIOError`: none yet."""
    try:
        packet, fds, _, _ = socket.recv_fds(connection, _INLINE_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError:
        return None
    if not packet:
        return None
    if packet == _IN_MEMFD:
        with os.fdopen(fds.pop(), "rb") as memfd:
            memfd.seek(0)
            packet = memfd.read()
    return *pickle.loads(packet), fds


class PersistentWriter:
    """A long-lived writer process, started when first needed; a priority of None is the trainer's."""

    def __init__(self, cpu_priority: int | None = None, io_priority: int | None = None) -> None:
        self.cpu_priority = cpu_priority
        self.io_priority = io_priority
        self._child: _WriterChild | None = None
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process, None if none runs."""
        child = self._child
        if child is None or self._owner_pid != os.getpid():
            return None
        child.look()
        return None if child.dead else child.pid

    def warm_up(self, *, buffer_fd: int | None = None, wait: bool = True) -> None:
        """Start the process, and have it map a staging buffer; `wait`: until it is ready, or `WriterDiedError`."""
        child = self._running_child()
        if buffer_fd is not None:
            child.send_buffer(buffer_fd)
        until_s = time.monotonic() + _START_DEADLINE_S
        while wait and not child.started():
            child.look()
            if child.dead:
                raise WriterDiedError(f"{child.title} {child.end_text()}")
            if time.monotonic() > until_s:
                child.kill("it did not start")
                raise WriteTimeoutError(f"the writer process (pid {child.pid}) did not start in {_START_DEADLINE_S} s")
            time.sleep(_START_PERIOD_S)

    def submit(self, job: WriterJob, buffer_fd: int, on_submit: Callable[[ChildJob], None] | None = None) -> ChildJob:
        """Dispatch a job and return at once. `on_submit` gets it before that, to give it up if interrupted."""
        child = self._running_child()
        return child.submit(next(_job_numbers), job, buffer_fd, on_submit)

    def forget_buffer(self, buffer_fd: int) -> None:
        """Have the process unmap a staging buffer that is about to be closed: its memory would stay taken otherwise."""
        if self.pid is not None and self._child is not None:
            self._child.forget_buffer(buffer_fd)

    def close(self, abort: bool = False) -> None:
        """End the process: after its jobs, or in the middle if `abort`. The next job starts another."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None and self._owner_pid == os.getpid():
            child.stop(abort)

    def _running_child(self) -> _WriterChild:
        if self._owner_pid != os.getpid():  # we are in a fork of the trainer: its writer is not ours
            self._owner_pid, self._child, self._lock = os.getpid(), None, threading.Lock()
        with self._lock:
            if self._child is not None:
                self._child.look()
            if self._child is None or self._child.dead:
                try:
                    self._child = _WriterChild(self.cpu_priority, self.io_priority)
                except OSError as error:
                    raise SaveError(
                        f'cannot start the writer process: {error}; SaveOptions(writer="fork") needs none'
                    ) from error
            return self._child


_shared = PersistentWriter(cpu_priority=TRAINING_FIRST_NICE)


def shared_writer() -> PersistentWriter:
    """The writer process of this trainer. One is enough: the device is what is scarce."""
    return _shared


@atexit.register
def _close_shared() -> None:
    # The trainer ends: what is not written now will not be committed.
    _shared.close(abort=True)


class _WriterChild(SupervisedChild):
    """A writer process and the trainer's ends of what connects them."""

    def __init__(self, cpu_priority: int | None, io_priority: int | None) -> None:
        self._tail = ""
        self._buffer: tuple[int, int, int] | None = None  # that the process has mapped: device, inode, size
        self._output_fd = os.memfd_create("mcore_ckpt_writer_output", os.MFD_CLOEXEC)
        self._connection, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        status = StatusPage()
        try:
            with theirs:
                process = start_interpreter(
                    __name__,
                    theirs.fileno(),
                    status.fd,
                    os.getpid(),
                    cpu_priority,
                    io_priority,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output_fd,
                    stderr=self._output_fd,
                    pass_fds=(theirs.fileno(), status.fd),
                )
        except BaseException:
            self._release()
            status.close()
            raise
        super().__init__(process, "the writer process (pid {pid})", status)
        self._page = status

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, content: Any, *fds: int) -> None:
        """Send a message. A writer that is gone is noticed later, when the outcome is asked for."""
        until_s = time.monotonic() + _SEND_DEADLINE_S
        try:
            with self._lock:
                while not self.dead:
                    try:
                        send_message(self._connection, kind, content, *fds)
                        return
                    except BlockingIOError:
                        if time.monotonic() > until_s:
                            self.kill(f"it has not read a message for {_SEND_DEADLINE_S:.0f} s")
                        else:
                            poller = select.poll()
                            poller.register(self._connection, select.POLLOUT)
                            poller.poll(_FULL_PERIOD_MS)
        except OSError:
            self.look()

    def _receive(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            while (message := receive_message(self._connection)) is not None:
                _, (number, outcome), _ = message
                self._job_ended(number, outcome)
            return False
        return True

    def _news_fd(self) -> int:
        return self._connection.fileno()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit(
        self, number: int, writer_job: WriterJob, buffer_fd: int, on_submit: Callable[[ChildJob], None] | None
    ) -> ChildJob:
        """Dispatch a job. Never raises because the process is gone: the job tells."""
        names = [file.name for file in writer_job.files]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        with self._lock:
            self.send_buffer(buffer_fd)
            what = f"writing {shown} into {writer_job.storage}"
            job = self._jobs[number] = ChildJob(self, what, number, writer_job.deadline_s)
            try:
                if on_submit is not None:
                    on_submit(job)
                self.send(Kind.JOB, (number, writer_job))
            except BaseException:
                job.abort()
                raise
            if self.dead:
                self._fail_jobs(self._death)
        return job

    def send_buffer(self, buffer_fd: int) -> None:
        """Have the writer map a staging buffer for the jobs that follow, unless it has."""
        stat = os.fstat(buffer_fd)
        buffer = (stat.st_dev, stat.st_ino, stat.st_size)
        if buffer != self._buffer:
            self._buffer = buffer
            self.send(Kind.BUFFER, stat.st_size, buffer_fd)

    def forget_buffer(self, buffer_fd: int) -> None:
        """Have the writer unmap a staging buffer, so that its memory can be given back."""
        stat = os.fstat(buffer_fd)
        if self._buffer is not None and self._buffer[:2] == (stat.st_dev, stat.st_ino):
            self._buffer = None
            self.send(Kind.FORGET_BUFFER, None)

    def watch(self, number: int) -> JobWatch:
        return JobWatch(self.pid, self._page.fd, number)

    def cancel(self, job: ChildJob) -> None:
        self.send(Kind.CANCEL, job.number)
        if not job.wait(_CANCEL_DEADLINE_S):
            self.kill("it did not stop when its job was aborted")

    def started(self) -> bool:
        """Whether the process has come so far as to wait for jobs."""
        return not self.dead and self._page.stamp_s > 0

    # --- end ----------------------------------------------------------------------------------------------------------

    def stop(self, abort: bool) -> None:
        """End the process; its jobs first, unless aborting."""
        if not (abort or self.dead):
            for job in list(self._jobs.values()):
                job.wait()
            self.send(Kind.STOP, None)
            self.has_ended(_STOP_DEADLINE_S)
        with self._lock:
            if not self.dead:
                self._process.kill()
                self._end(lambda job: SaveError(f"{job.what}: {self.title} was closed"))

    def _at_end(self) -> None:
        size = os.fstat(self._output_fd).st_size
        output = os.pread(self._output_fd, _OUTPUT_TAIL_BYTES, max(0, size - _OUTPUT_TAIL_BYTES))
        self._tail = output.decode(errors="replace").strip()

    def _end_text(self) -> str:
        return f"{self.end_text()}; the next save starts another process"

    def end_text(self) -> str:
        """How the process ended, and what it said last."""
        tail = f"\n--- its last output ---\n{self._tail}\n---\n" if self._tail else ""
        return f"{exit_text(self._exit_code)}{tail}"

    def _release(self) -> None:
        self._connection.close()
        fd, self._output_fd = self._output_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.stop(abort=True)


class _CancelledError(Exception):
    """The trainer does not want the job any more."""


class _Writer:
    """The state of the process."""

    def __init__(self, connection: socket.socket, status: StatusPage) -> None:
        self._connection = connection
        self._status = status
        self._buffer: mmap.mmap | None = None
        self._jobs: queue.SimpleQueue[tuple[int, WriterJob, mmap.mmap | None] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()

    def receive(self) -> bool:
        """Act on the message that has arrived; on the control thread. False if the trainer has closed the socket."""
        message = receive_message(self._connection)
        if message is None:
            return False
        kind, content, fds = message
        if kind == Kind.BUFFER:
            (fd,) = fds
            try:
                self._buffer = mmap.mmap(fd, content)
            finally:
                os.close(fd)
        elif kind == Kind.FORGET_BUFFER:
            self._buffer = None
        elif kind == Kind.JOB:
            number, job = content
            self._jobs.put((number, job, self._buffer))
        elif kind == Kind.CANCEL:
            self._cancelled.add(content)
        elif kind == Kind.STOP:
            self._jobs.put(None)
        return True

    def serve(self) -> None:
        """Do one job after the other until told to stop."""
        while (entry := self._jobs.get()) is not None:
            number, job, buffer = entry
            outcome: JobResult | FailureReport
            try:
                outcome = self._write(number, job, buffer)
            except Exception as error:  # noqa: BLE001  (the trainer is told of any error)
                outcome = describe(error)
            del entry, buffer
            self._status.progress()
            self._status.finished(number)
            try:
                send_message(self._connection, Kind.ENDED, (number, outcome))
            except OSError:
                os._exit(0)  # the trainer is gone

    def _write(self, number: int, job: WriterJob, buffer: mmap.mmap | None) -> JobResult:
        if buffer is None:
            raise RuntimeError(f"job {number} came without its staging buffer")

        def written() -> None:
            self._status.progress()
            if number in self._cancelled:
                raise _CancelledError("cancelled by the trainer")

        written()
        return run_job(job, memoryview(buffer), written)


def main(
    control_fd: int,
    status_fd: int,
    parent_pid: int,
    cpu_priority: int | None,
    io_priority: int | None,
) -> None:
    """Run the writer until its trainer says stop or is gone; a priority of None is the trainer's."""
    faulthandler.enable(all_threads=False)  # a dump of threads that still run can crash, and hide the first signal
    leave_signals_to_parent()  # a Ctrl-C, or a scheduler's notice, must not take away what the last save needs
    lower_priority(cpu_priority, io_priority)
    connection = socket.socket(fileno=control_fd)
    status = StatusPage(status_fd)
    status.progress()
    writer = _Writer(connection, status)
    threading.Thread(
        target=_control, args=(writer, connection, parent_pid), name="mcore-ckpt-control", daemon=True
    ).start()
    writer.serve()
    os._exit(0)  # the control thread is inside a system call


def _control(writer: _Writer, connection: socket.socket, parent_pid: int) -> None:
    try:
        until_parent_is_gone(parent_pid, connection.fileno(), writer.receive)
    except BaseException:  # noqa: BLE001  (without this thread the process is deaf to the trainer)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # no process is left to read the code
