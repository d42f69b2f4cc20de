"""What a trainer and its persistent writer process say to each other.

Over one stream socket, both ways: an 8-byte header (kind, flags, length), then a pickle. A long payload travels in a
memfd whose descriptor goes with the header, so that sending never waits for the other side to read: a job of 20,000
tensors is half a megabyte of offsets, and a writer that is still starting reads nothing.

Beside the socket there is a page of shared memory in which the writer leaves its signs of life, so that the trainer can
tell slow from stuck without a message, and a process that must not touch the socket can see that a job is done.

Pickles are safe here: both ends of the socket are ours, and nobody else can get at them.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.layout.file_image import FileImage, ImageResult
from mcore_ckpt.layout.plans import TensorPlans
from mcore_ckpt.storage.base import DirectIo, Storage

__all__ = [
    "CANCEL",
    "DONE",
    "FAILED",
    "FORGET_STAGE",
    "JOB",
    "STAGE",
    "STOP",
    "WINDOW_FREE",
    "WINDOW_READY",
    "FileJob",
    "Inbox",
    "JobResult",
    "Ring",
    "StatusPage",
    "WriterJob",
    "pack",
]

# Trainer to writer.
STAGE: Final = 1  # (key, size in bytes), with the stage's descriptor
FORGET_STAGE: Final = 2  # key
JOB: Final = 3  # (number, WriterJob, key of the stage, working directory)
WINDOW_READY: Final = 4  # (job number, window number)
CANCEL: Final = 5  # job number
STOP: Final = 6  # None
# Writer to trainer.
DONE: Final = 7  # (job number, JobResult)
FAILED: Final = 8  # (job number, FailureReport)
WINDOW_FREE: Final = 9  # (job number, window number)

_HEADER: Final = struct.Struct("<BBxxI")
_IN_MEMFD: Final = 1
_INLINE_BYTES: Final = 32 * 1024
_MOST_FDS: Final = 2


@dataclass(frozen=True, slots=True)
class Ring:
    """Part of a stage through which a save that is larger than the stage is passed, window by window.

    Windows are numbered through all files of the job, in order; window k lies in slot `k % slots`.

    Attributes:
        offset: of slot 0 in the stage, bytes.
        slot_bytes: size of a slot and of a window, a multiple of 4096.
        slots: how many.
    """

    offset: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class FileJob:
    """One file to write.

    Attributes:
        image: its layout.
        stage_offset: where its bytes begin in the stage, a multiple of 4096; without meaning in a job with a `Ring`.
    """

    image: FileImage
    stage_offset: int = 0


@dataclass(frozen=True, slots=True)
class WriterJob:
    """What a writer process does for one save: all files, or none.

    Attributes:
        storage: where to; pickled, so it holds paths and not open files.
        files: what.
        ring: set if the files do not lie in the stage as a whole.
        direct: O_DIRECT, as in `SaveOptions.direct_io`.
        fsync: make each file durable.
        io_threads: writes in flight at once.
        piece_bytes: size of one write from the stage.
        deadline_s: seconds without progress after which the writer counts as stuck; None waits for ever.
        plans: of a new structure, on the coordinator: `.metadata` is to be put together beside the writing.
    """

    storage: Storage
    files: tuple[FileJob, ...]
    ring: Ring | None = None
    direct: DirectIo = "auto"
    fsync: bool = True
    io_threads: int = 2
    piece_bytes: int = 8 * 1024 * 1024
    deadline_s: float | None = None
    plans: TensorPlans | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job.

    Attributes:
        files: by the order of the job.
        started_s: when the writer began with it, on the clock of `time.monotonic()`, which all processes share.
        finished_s: when the last file was durable, on the same clock.
        encoder: of the job's `plans`.
    """

    files: tuple[ImageResult, ...]
    started_s: float
    finished_s: float
    encoder: MetadataEncoder | None = None


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
            fd = self._fds.pop(0) if kind == STAGE else None
            if in_memfd:
                with io.FileIO(self._fds.pop(0)) as memfd:
                    memfd.seek(0)
                    payload = memfd.readall()
            else:
                payload = bytes(self._buffer[_HEADER.size : stop])
            del self._buffer[:stop]
            yield kind, pickle.loads(payload), fd

    def close(self) -> None:
        """Close descriptors that came with messages nobody has read."""
        while self._fds:
            os.close(self._fds.pop())


State = Literal["idle", "writing", "waiting"]
_STATES: Final[tuple[State, ...]] = ("idle", "writing", "waiting")


class StatusPage:
    """One page of shared memory, written by the writer and read by anybody.

    Numbers are stored whole: aligned 64-bit stores are not torn.
    """

    _STAMP, _STATE, _BYTES, _FINISHED = range(4)

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("q")

    @staticmethod
    def create() -> int:
        """A descriptor of a new page, all zero."""
        fd = os.memfd_create("mcore_ckpt_status", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    @staticmethod
    def private() -> StatusPage:
        """A page that forked children share, and nobody else."""
        fd = StatusPage.create()
        try:
            return StatusPage(fd)
        finally:
            os.close(fd)

    def progress(self, state: State, nbytes: int = 0) -> None:
        """Leave a sign of life: what the writer is doing, and how many more bytes it has written."""
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
        """What the writer was doing at its last sign of life."""
        return _STATES[self._numbers[self._STATE]]

    @property
    def stamp_s(self) -> float:
        """When the last sign of life was left, on the clock of `time.monotonic()`."""
        return self._numbers[self._STAMP] / 1e9

    @property
    def bytes_written(self) -> int:
        """Bytes written by this process so far, all jobs together."""
        return self._numbers[self._BYTES]

    def close(self) -> None:
        """Unmap the page."""
        self._numbers.release()
        self._memory.close()
