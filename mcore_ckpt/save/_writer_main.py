"""The writer process: a bare interpreter that gets bytes and layouts and writes files. No torch, no numpy.

The main thread writes, one job after the other. A second thread reads the control socket, watches the trainer, and ends
the process as soon as the trainer is gone, in the middle of a write if need be: its files would not be committed.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import queue
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from mcore_ckpt.core.failures import FailureReport, describe
from mcore_ckpt.core.process import die_with_parent, lower_priority, until_parent_is_gone
from mcore_ckpt.core.signals import leave_signals_to_parent
from mcore_ckpt.save._writer_messages import Inbox, Kind, StatusPage, pack
from mcore_ckpt.save.buckets import FileImage, Fill, Window
from mcore_ckpt.save.writer import JobResult, Ring, WriterJob, run_job, with_images


class _CancelledError(Exception):
    """The trainer does not want the job any more."""


class _RunningJob:
    """What the control thread tells the main thread about a job: windows that are ready, and whether to give up."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cancelled = False
        self._ready = 0
        self._condition = threading.Condition()

    def window_ready(self, window: int) -> None:
        with self._condition:
            self._ready = window + 1
            self._condition.notify()

    def cancel(self) -> None:
        with self._condition:
            self.cancelled = True
            self._condition.notify()

    def wait_for_window(self, window: int) -> None:
        with self._condition:
            while self._ready <= window and not self.cancelled:
                self._condition.wait()
        self.check()

    def check(self) -> None:
        if self.cancelled:
            raise _CancelledError("cancelled by the trainer")


class _Writer:
    """The state of the process."""

    def __init__(self, connection: socket.socket, status: StatusPage) -> None:
        self.inbox = Inbox(connection)
        self._connection = connection
        self._status = status
        self._buffers: dict[Any, mmap.mmap] = {}
        self._images: Sequence[FileImage] = ()  # of the last job that has arrived
        self._jobs: queue.SimpleQueue[tuple[_RunningJob, WriterJob, Any, str | None, int | None] | None]
        self._jobs = queue.SimpleQueue()
        self._known: dict[int, _RunningJob] = {}
        self._sending = threading.Lock()

    def receive(self) -> bool:
        """Act on what has arrived on the socket; on the control thread. False if the trainer has closed it."""
        self.inbox.fill()
        for kind, content, fd in self.inbox.messages():
            if kind == Kind.BUFFER:
                assert fd is not None
                key, nbytes = content
                try:
                    self._buffers[key] = mmap.mmap(fd, nbytes)
                finally:
                    os.close(fd)
            elif kind == Kind.FORGET_BUFFER:
                self._buffers.pop(content, None)
            elif kind == Kind.JOB:
                number, job, images, key, directory, umask = content
                self._images = self._images if images is None else images
                job = with_images(job, self._images)
                running = self._known[number] = _RunningJob(number)
                self._jobs.put((running, job, self._buffers.get(key), directory, umask))
            elif kind == Kind.WINDOW_READY:
                number, window = content
                if (running_now := self._known.get(number)) is not None:
                    running_now.window_ready(window)
            elif kind == Kind.CANCEL:
                if (running_now := self._known.get(content)) is not None:
                    running_now.cancel()
            elif kind == Kind.STOP:
                self._jobs.put(None)
        return not self.inbox.closed

    def serve(self) -> None:
        """Do one job after the other until told to stop."""
        while (entry := self._jobs.get()) is not None:
            running, job, buffer, directory, umask = entry
            outcome: JobResult | FailureReport
            try:
                running.check()
                if directory is not None:  # asking where this process is fails if that directory has been removed
                    os.chdir(directory)  # a relative path means what it means to the trainer
                if umask is not None:
                    os.umask(umask)  # and files are for whom its other files are
                outcome = self._write(running, job, buffer)
            except Exception as error:  # noqa: BLE001  (the trainer is told of any error)
                outcome = describe(error)
            del entry, buffer
            self._known.pop(running.number, None)
            self._status.progress("idle")
            self._status.finished(running.number)
            self.send(Kind.ENDED, (running.number, outcome))

    def send(self, kind: int, content: Any) -> None:
        message, fds, to_close = pack(kind, content)
        try:
            with self._sending:
                if fds:
                    socket.send_fds(self._connection, [message[:1]], fds)
                    message = message[1:]
                self._connection.sendall(message)
        except OSError:
            os._exit(0)  # the trainer is gone
        finally:
            if to_close is not None:
                os.close(to_close)

    def _write(self, running: _RunningJob, job: WriterJob, buffer: mmap.mmap | None) -> JobResult:
        if buffer is None:
            raise RuntimeError(f"job {running.number} came without its staging buffer")
        status = self._status

        def written(nbytes: int) -> None:
            status.progress("writing", nbytes)
            running.check()

        status.progress("writing")
        fill = None if job.ring is None else self._ring_fill(running, job.ring, buffer)
        return run_job(job, memoryview(buffer), written, fill)

    def _ring_fill(self, running: _RunningJob, ring: Ring, buffer: mmap.mmap) -> Fill:
        memory = memoryview(buffer)
        window_number = 0

        def fill(window: Window, view: memoryview) -> None:
            nonlocal window_number
            self._status.progress("waiting")
            running.wait_for_window(window_number)
            self._status.progress("writing")
            start = ring.offset + window_number % ring.slots * ring.slot_bytes
            view[:] = memory[start : start + window.stop - window.start]
            self.send(Kind.WINDOW_FREE, (running.number, window_number))
            window_number += 1

        return fill


def main(
    control_fd: int,
    status_fd: int,
    parent_pid: int,
    kernel_watches: bool,
    cpu_priority: int | None,
    io_priority: int | None,
) -> None:
    """Run the writer process until its trainer says stop or is gone. It gets the descriptors of its end of the control
    socket and of the shared status page; a priority of None is the trainer's.
    """
    if kernel_watches:
        die_with_parent(parent_pid)
    faulthandler.enable(all_threads=False)  # a dump of threads that still run can crash, and hide the first signal
    leave_signals_to_parent()  # a Ctrl-C, or a scheduler's notice, must not take away what the last save needs
    lower_priority(cpu_priority, io_priority)
    connection = socket.socket(fileno=control_fd)
    status = StatusPage(status_fd)
    status.progress("idle")
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
