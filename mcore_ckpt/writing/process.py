"""Writer processes: start, health, result, shutdown.

Two kinds with one kind of handle. The persistent writer is a bare interpreter (no torch, not the trainer's `__main__`)
that maps the stage and is reused for every save; it lives in a session of its own, so that a Ctrl-C at the terminal
reaches the trainer only, and it ends by itself as soon as the trainer is gone. The forked writer is a child for one
save, whose memory is the snapshot.

A writer that has died is replaced at the next save.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mcore_ckpt.core.errors import SaveError, WriterDiedError, WriteTimeoutError
from mcore_ckpt.writing._writer_child import WriterChild, WriterJobHandle
from mcore_ckpt.writing.call_process import ForkedCall, report_progress
from mcore_ckpt.writing.job_handle import JobHandle, JobWatch
from mcore_ckpt.writing.writer_messages import FileJob, JobResult, Ring, WriterJob

__all__ = [
    "FileJob",
    "ForkedCall",
    "ForkedWriter",
    "JobHandle",
    "JobResult",
    "JobWatch",
    "PersistentWriter",
    "Ring",
    "WriterJob",
    "WriterJobHandle",
    "report_progress",
    "shared_writer",
]

_START_DEADLINE_S: Final = 60.0
_START_PERIOD_S: Final = 0.002
# As Megatron's own persistent worker: where cores are scarce, training's next step goes first.
_NICE: Final = 10
_job_numbers = itertools.count(1)


class PersistentWriter:
    """A long-lived writer process, started when it is first needed.

    Attributes:
        cpu_priority: nice value of the next process that is started; None keeps the trainer's.
        io_priority: its I/O scheduling class; None keeps the trainer's.
    """

    def __init__(self, cpu_priority: int | None = None, io_priority: int | None = None) -> None:
        self.cpu_priority = cpu_priority
        self.io_priority = io_priority
        self._child: WriterChild | None = None
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process, None if none runs."""
        child = self._child
        if child is None or self._owner_pid != os.getpid():
            return None
        child.receive()
        return None if child.dead else child.pid

    def warm_up(self, *, stage_fd: int | None = None, wait: bool = True) -> None:
        """Start the process, and have it map a stage, ahead of the first save.

        Args:
            stage_fd: descriptor of the stage that the saves will use.
            wait: return only when the process is ready.

        Raises:
            WriterDiedError: it could not start; its output is in the message.
        """
        child = self._running_child()
        if stage_fd is not None:
            child.send_stage(stage_fd)
        until_s = time.monotonic() + _START_DEADLINE_S
        while wait and not child.started():
            child.receive()
            if child.dead:
                raise WriterDiedError(f"{child.end_text()}")
            if time.monotonic() > until_s:
                child.kill("it did not start")
                raise WriteTimeoutError(f"the writer process (pid {child.pid}) did not start in {_START_DEADLINE_S} s")
            time.sleep(_START_PERIOD_S)

    def submit(self, job: WriterJob, stage_fd: int) -> WriterJobHandle:
        """Hand a job to the process and return at once. Jobs are done in order.

        Args:
            job: what to write. The stage must not be touched until the job has ended.
            stage_fd: descriptor of the shared memory in which the files, or the job's ring, lie.

        Raises:
            SaveError: no process can be started.
        """
        child = self._running_child()
        return child.submit(next(_job_numbers), job, stage_fd)

    def forget_stage(self, stage_fd: int) -> None:
        """Have the process unmap a stage that is about to be closed: its memory would stay taken otherwise."""
        if self.pid is not None and self._child is not None:
            self._child.forget_stage(stage_fd)

    def close(self, abort: bool = False) -> None:
        """End the process: after its jobs, or in the middle if `abort`. The next job starts another."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None and self._owner_pid == os.getpid():
            child.stop(abort)

    def _running_child(self) -> WriterChild:
        if self._owner_pid != os.getpid():  # we are in a fork of the trainer: its writer is not ours
            self._owner_pid, self._child, self._lock = os.getpid(), None, threading.Lock()
        with self._lock:
            if self._child is not None:
                self._child.receive()
            if self._child is None or self._child.dead:
                try:
                    self._child = WriterChild(self.cpu_priority, self.io_priority)
                except OSError as error:
                    raise SaveError(f"cannot start the writer process: {error}") from error
            return self._child


_shared = PersistentWriter(cpu_priority=_NICE)


def shared_writer() -> PersistentWriter:
    """The writer process of this trainer. One is enough: the device is what is scarce."""
    return _shared


@atexit.register
def _close_shared() -> None:
    # The trainer ends: what is not written now will not be committed.
    _shared.close(abort=True)


class ForkedWriter:
    """One forked child for each job: nothing is copied, the child's copy-on-write memory is the snapshot.

    Only for a trainer whose tensors are on the CPU: the child of a process that uses CUDA must not touch it, and pinned
    memory is not inherited.
    """

    def submit(self, fn: Callable[[], Any], what: str, deadline_s: float | None = None) -> ForkedCall:
        """Fork, run `fn` in the child and return at once; the handle's result is what `fn` returned.

        Args:
            fn: must not use torch.distributed, CUDA or threads started before.
            what: the job in words, for messages.
            deadline_s: seconds after which a child that has not called `report_progress` meanwhile counts as stuck.

        Raises:
            SaveError: the process cannot be forked.
        """
        return ForkedCall(fn, (), {}, name=what, expendable=True, deadline_s=deadline_s, cpu_priority=_NICE)
