"""What a trainer and its persistent writer process say to each other.

Over one stream socket, both ways: an 8-byte header (kind, flags, length), then a pickle. A long payload travels in a
memfd whose descriptor goes with the header, so that sending never waits for the other side to read: a job of 20,000
tensors is half a megabyte of offsets, and a writer that is still starting reads nothing.

Pickles are safe here: both ends of the socket belong to this package, and no other process can reach them.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final


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
