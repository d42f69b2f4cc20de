"""Signs of life in a page of shared memory: written by a process that works, read by any other.

So a trainer tells slow from stuck without a message, and a process that must not touch the trainer's socket sees that
a job has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from typing import Final, Literal

State = Literal["idle", "writing", "waiting"]
_STATES: Final[tuple[State, ...]] = ("idle", "writing", "waiting")


class StatusPage:
    """One page of numbers, stored whole: aligned 64-bit stores are not torn. `fd`: its descriptor, the page's own;
    forked children share the page without it.
    """

    _STAMP, _STATE, _BYTES, _FINISHED = range(4)

    def __init__(self, fd: int | None = None) -> None:
        """A new page, all zero, or the one that is behind a descriptor."""
        if fd is None:
            fd = os.memfd_create("mcore_ckpt_status", os.MFD_CLOEXEC)
            os.ftruncate(fd, mmap.PAGESIZE)
        self.fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("q")

    def progress(self, state: State, nbytes: int = 0) -> None:
        """Leave a sign of life: what the process is doing, and how many more bytes it has written."""
        self._numbers[self._STATE] = _STATES.index(state)
        self._numbers[self._BYTES] += nbytes
        self._numbers[self._STAMP] = time.monotonic_ns()

    def finished(self, job: int) -> None:
        """Say that the job of this number has ended, well or not. Jobs are numbered from 1 and end in order."""
        self._numbers[self._FINISHED] = job

    @property
    def last_finished(self) -> int:
        """Number of the last job that has ended."""
        return self._numbers[self._FINISHED]

    @property
    def state(self) -> State:
        """What the process was doing at its last sign of life."""
        return _STATES[self._numbers[self._STATE]]

    @property
    def stamp_s(self) -> float:
        """When the last sign of life was left, on the clock of `time.monotonic()`; 0 before the first."""
        return self._numbers[self._STAMP] / 1e9

    @property
    def bytes_written(self) -> int:
        """Bytes written by the process so far, all jobs together."""
        return self._numbers[self._BYTES]

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
