"""What a trainer and its writer process say to each other: messages, and signs of life.

Messages go over one stream socket, both ways: an 8-byte header (kind, flags, length), then a pickle. A long payload
travels in a memfd whose descriptor goes with the header, so that sending never waits for the other side to read: a job
of 20,000 tensors is half a megabyte of offsets, and a writer that is still starting reads nothing. Pickles are safe
here: both ends of the socket belong to this package, and no other process can reach them.

Signs of life stand in a page of shared memory, written by a process that works, read by any other. So a trainer tells
slow from stuck without a message, and a process that must not touch the trainer's socket sees that a job has ended.
"""

from __future__ import annotations

import contextlib
import enum
import io
import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Final, Literal


class Kind(enum.IntEnum):
    """What a message is; with what it holds."""

    # Trainer to writer.
    BUFFER = 1  # (key, size in bytes), with the staging buffer's descriptor
    FORGET_BUFFER = 2  # key
    JOB = 3  # (number, WriterJob without images, images or None if as before, key of the buffer, directory, umask)
    WINDOW_READY = 4  # (job number, window number)
    CANCEL = 5  # job number
    STOP = 6  # None
    # Writer to trainer.
    ENDED = 7  # (job number, JobResult or FailureReport)
    WINDOW_FREE = 8  # (job number, window number)


_HEADER: Final = struct.Struct("<BBxxI")
_IN_MEMFD: Final = 1
_INLINE_BYTES: Final = 32 * 1024
_MOST_FDS: Final = 2


def pack(kind: int, content: Any, *fds: int) -> tuple[bytes, list[int], int | None]:
    """A message as bytes and descriptors to send along; the third value is a descriptor to close after sending."""
    payload = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    if len(payload) <= _INLINE_BYTES:
        return _HEADER.pack(kind, 0, len(payload)) + payload, list(fds), None
    memfd = os.memfd_create("mcore_ckpt_message", os.MFD_CLOEXEC)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(memfd, view) :]
    except BaseException:
        os.close(memfd)
        raise
    return _HEADER.pack(kind, _IN_MEMFD, len(payload)), [*fds, memfd], memfd


class Inbox:
    """Puts messages together from what a socket yields. A message has at most one descriptor besides its memfd."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._fds: list[int] = []
        self.closed = False

    def fill(self, flags: int = 0) -> bool:
        """Read once from the socket. False if there was nothing to read, or there never will be (`closed`)."""
        try:
            # A descriptor comes with the first byte of its message, so one read never takes those of two messages
            # in the wrong order; the kernel ends a read at such a boundary.
            data, fds, _, _ = socket.recv_fds(self._connection, 64 * 1024, _MOST_FDS, flags | socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self.closed = True
            return False
        self._buffer += data
        return True

    def messages(self) -> Iterator[tuple[int, Any, int | None]]:
        """The complete messages so far: kind, content, and the descriptor that came along, now the caller's."""
        while len(self._buffer) >= _HEADER.size:
            kind, flags, length = _HEADER.unpack_from(self._buffer)
            in_memfd = bool(flags & _IN_MEMFD)
            stop = _HEADER.size + (0 if in_memfd else length)
            if len(self._buffer) < stop:
                return
            fd = self._fds.pop(0) if kind == Kind.BUFFER else None
            if in_memfd:
                with io.FileIO(self._fds.pop(0)) as memfd:
                    memfd.seek(0)
                    payload = memfd.readall()
            else:
                payload = bytes(self._buffer[_HEADER.size : stop])
            del self._buffer[:stop]
            yield kind, pickle.loads(payload), fd

    def close(self) -> None:
        """Close descriptors that came with messages that were not read."""
        while self._fds:
            os.close(self._fds.pop())


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
