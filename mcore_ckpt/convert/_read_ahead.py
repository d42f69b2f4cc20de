"""Payloads read before they are asked for: while one thread sums and arranges what has come, others wait for the disk.

A walk (`tools.regrid`) reads every chunk front to back, and what it reads next is known before it begins. It is told to
a `ReadAhead`, whose threads read it in that order, in large aligned pieces, into a bounded number of buffers; from
there it is copied to where it is wanted. What was not told, or does not lie plainly in a file, is read when it is
wanted. So is what could not be read: the error is raised where the bytes are missed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeVar

from mcore_ckpt.core.threads import start_thread
from mcore_ckpt.items.open_files import OpenFiles, padded_range
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads

__all__ = ["AheadSource", "ReadAhead"]

_Step = TypeVar("_Step")

_PIECE_BYTES: Final = 4 * 1024 * 1024
_BUFFER_BYTES: Final = _PIECE_BYTES + 2 * ALIGNMENT_BYTES
# Less is read by whoever wants it: handing it over would take longer.
_MIN_BYTES: Final = 256 * 1024


@dataclass(slots=True, eq=False)
class _Stretch:
    """Bytes `[start, stop)` of a file that a step is going to want, of which nothing has been read."""

    file: str
    start: int
    stop: int
    step: int


@dataclass(slots=True, eq=False)
class _Piece:
    """Bytes `[start, stop)` of a file that are being read, or have been; `content` when they are there.

    Attributes:
        given: up to where they have been copied.
        unwanted: nobody is going to ask for it any more.
    """

    file: str
    start: int
    stop: int
    step: int
    buffer: memoryview
    given: int
    content: memoryview | None = None
    failed: bool = False
    unwanted: bool = False


class ReadAhead:
    """Reads for one thread what that is going to ask for; a context manager.

    Args:
        files: of the checkpoint.
        buffers: of 4 MiB each.
        threads: reads in flight at once; none where the interpreter ends.
    """

    def __init__(self, files: OpenFiles, buffers: int = 4, threads: int = 2) -> None:
        self._files = files
        self._condition = threading.Condition()
        self._stretches: deque[_Stretch] = deque()
        self._pieces: list[_Piece] = []
        self._free: list[memoryview] = []
        self._lent: _Piece | None = None
        self._left_buffers = buffers
        self._enough_bytes = buffers * _PIECE_BYTES
        self._stopping = False
        self._has_threads = False
        self._threads = [
            threading.Thread(target=self._work, name=f"mcore-ckpt-ahead-{n}", daemon=True) for n in range(threads)
        ]

    def steps(
        self, steps: Iterable[_Step], wanted: Callable[[_Step], Iterable[tuple[StoredPayload, int, int]]]
    ) -> Iterator[_Step]:
        """The steps, one after another; of each that is given out, and of the next few, reading has begun.

        Args:
            steps: what is going to be done; taken a little ahead.
            wanted: payload, first byte and number of bytes of all that a step reads, in its order.
        """
        waiting: deque[tuple[int, int, _Step]] = deque()
        told = 0
        try:
            for number, step in enumerate(steps):
                nbytes = self._tell(number, wanted(step))
                told += nbytes or 0
                waiting.append((number, nbytes or 0, step))
                while waiting and (nbytes is None or told - waiting[0][1] >= self._enough_bytes):
                    done, own, step = waiting.popleft()
                    yield step
                    told -= own
                    self._forget(done)
        except GeneratorExit:
            raise
        except BaseException:
            # What stands before the step that cannot be taken is done first, as it would be without looking ahead.
            yield from self._rest(waiting)
            raise
        yield from self._rest(waiting)

    def _rest(self, waiting: Iterable[tuple[int, int, _Step]]) -> Iterator[_Step]:
        for done, _, step in waiting:
            yield step
            self._forget(done)

    def _tell(self, step: int, wanted: Iterable[tuple[StoredPayload, int, int]]) -> int | None:
        """Have it read; returns how much that is, or what it counts as, or None where nothing is to be taken beyond it.

        Little steps are passed over while there is something to read, and not looked ahead of otherwise: to find a
        tensor long before it is wanted gains nothing then. And nothing is taken beyond elements in memory.
        """
        if not self._has_threads:
            return None
        told, in_memory = 0, False
        for payload, start, nbytes in wanted:
            if payload.decoded is not None or payload.computed:
                in_memory = True
            elif nbytes >= _MIN_BYTES:
                told += nbytes
                self._append(payload.file, payload.offset + start, nbytes, step)
        if told or in_memory:
            return None if in_memory else told
        with self._condition:
            return self._enough_bytes // 8 if self._stretches or self._pieces else None

    def _append(self, file: str, start: int, nbytes: int, step: int) -> None:
        with self._condition:
            last = self._stretches[-1] if self._stretches else None
            if last is not None and (last.file, last.stop) == (file, start):
                last.stop, last.step = start + nbytes, step
            else:
                self._stretches.append(_Stretch(file, start, start + nbytes, step))
            self._condition.notify_all()

    def _forget(self, step: int) -> None:
        """What the steps up to this one have not asked for is not wanted any more."""
        with self._condition:
            self._settle()
            while self._stretches and self._stretches[0].step <= step:
                self._stretches.popleft()
            for piece in [piece for piece in self._pieces if piece.step <= step]:
                self._drop(piece)

    def _drop(self, piece: _Piece) -> None:
        self._pieces.remove(piece)
        if piece.content is None and not piece.failed:
            piece.unwanted = True  # its thread gives the buffer back
        else:
            self._free.append(piece.buffer)
            self._condition.notify_all()

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill `view` with bytes of a file from `start` on; raises as `RangeReader.read_into`."""
        done = 0
        while done < len(view):
            content = self.lend(file, start + done, len(view) - done)
            if content is not None:
                direct_io.copy_bytes(view[done : done + len(content)], content)
                done += len(content)
                continue
            with self._condition:
                nbytes = self._take_over(file, start + done, len(view) - done)
            with self._files.reader(file) as reader:
                reader.read_into(start + done, view[done : done + nbytes])
            done += nbytes

    def lend(self, file: str, start: int, nbytes: int) -> memoryview | None:
        """Memory with bytes of a file from `start` on, `nbytes` or fewer, until the next call; None if they are not
        being read.
        """
        with self._condition:
            self._settle()
            piece = next((piece for piece in self._pieces if piece.file == file and piece.given == start), None)
            if piece is None:
                return None
            while piece.content is None and not piece.failed:
                self._condition.wait()
            if piece.content is None:
                self._drop(piece)
                return None
            self._lent = piece
            stop = min(piece.stop, start + nbytes)
            piece.given = stop
            return piece.content[start - piece.start : stop - piece.start]

    def _settle(self) -> None:
        """What was lent is not in use any more."""
        if self._lent is not None and self._lent.given == self._lent.stop:
            self._drop(self._lent)
        self._lent = None

    def _take_over(self, file: str, start: int, nbytes: int) -> int:
        """How much of this the caller is to read: it is told to no thread any more."""
        for piece in self._pieces:
            if piece.file == file and start < piece.given < start + nbytes:
                nbytes = piece.given - start
        for stretch in self._stretches:
            if stretch.file == file and stretch.start == start:
                stretch.start = min(stretch.stop, start + min(nbytes, _PIECE_BYTES))
                nbytes = stretch.start - start
                if stretch.start == stretch.stop:
                    self._stretches.remove(stretch)
                break
            if stretch.file == file and start < stretch.start < start + nbytes:
                nbytes = stretch.start - start
        return nbytes

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._stopping and not (self._stretches and (self._free or self._left_buffers)):
                    self._condition.wait()
                if self._stopping:
                    return
                piece = self._next_piece()
            try:
                with self._files.reader(piece.file) as reader:
                    first, stop = padded_range(piece.start, piece.stop, reader.size_bytes)
                    reader.read_into(first, piece.buffer[: stop - first])
                content = piece.buffer[piece.start - first : piece.stop - first]
            except BaseException:  # noqa: BLE001  (whoever wants the bytes reads them, and raises what comes of it)
                content = None
            with self._condition:
                piece.content, piece.failed = content, content is None
                if piece.unwanted:
                    self._free.append(piece.buffer)
                self._condition.notify_all()

    def _next_piece(self) -> _Piece:
        stretch = self._stretches[0]
        # Pieces end on pages of the file, so that no page is read twice but at the ends of a stretch.
        stop = (stretch.start + _PIECE_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        stop = stretch.stop if stretch.stop - stretch.start <= _PIECE_BYTES else stop
        if not self._free:
            self._left_buffers -= 1
            self._free.append(memoryview(direct_io.aligned_buffer(_BUFFER_BYTES)))
        piece = _Piece(stretch.file, stretch.start, stop, stretch.step, self._free.pop(), stretch.start)
        self._pieces.append(piece)
        stretch.start = stop
        if stop == stretch.stop:
            self._stretches.popleft()
        return piece

    def __enter__(self) -> ReadAhead:
        try:
            self._has_threads = any(list(map(start_thread, self._threads)))  # all are started
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()


class AheadSource:
    """A stored chunk as a source for `tools.regrid`, of which some may have been read already."""

    __slots__ = ("_ahead", "_payload", "_payloads")

    def __init__(self, ahead: ReadAhead, payloads: StoredPayloads, payload: StoredPayload) -> None:
        self._ahead, self._payloads, self._payload = ahead, payloads, payload

    def read_into(self, start: int, view: memoryview) -> None:
        """Bytes from `start` on."""
        payload = self._payload
        if payload.decoded is not None or payload.computed:
            self._payloads.read_into(payload, start, view)
        else:
            self._ahead.read_into(payload.file, payload.offset + start, view)

    def lend(self, start: int, nbytes: int) -> memoryview | None:
        """Some of them in memory, if they are there or on the way."""
        payload = self._payload
        if payload.decoded is not None or payload.computed:
            return None
        return self._ahead.lend(payload.file, payload.offset + start, nbytes)
