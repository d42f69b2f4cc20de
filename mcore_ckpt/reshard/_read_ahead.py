"""Payloads read before they are asked for: while one thread sums and arranges what has come, others wait for the disk.

A walk (`tools.regrid`) reads every chunk front to back, and what it reads next is known before it begins. It announces
that to a `ReadAhead`, whose threads read it in that order, in large aligned blocks, into a bounded number of buffers;
from there it is copied. What was not announced, or does not lie plainly in a file, is read when it is asked for. So is
what could not be read: the error is raised where the bytes are missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from mcore_ckpt.core.threads import Crew, Task
from mcore_ckpt.load.open_files import OpenFiles, padded_range
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads

_Step = TypeVar("_Step")

_BLOCK_BYTES: Final = 4 * 1024 * 1024
_BUFFER_BYTES: Final = _BLOCK_BYTES + 2 * ALIGNMENT_BYTES
# Less is read when it is asked for: handing it over would take longer.
_MIN_BYTES: Final = 256 * 1024


@dataclass(slots=True, eq=False)
class _Range:
    """Bytes `[start, stop)` of a file that a step is going to ask for, of which nothing has been read."""

    file: str
    start: int
    stop: int
    step: int


@dataclass(slots=True, eq=False)
class _Block(_Range):
    """Bytes that are being read, or have been; `given` is up to where they have been copied."""

    buffer: memoryview
    given: int
    content: memoryview | None = None
    task: Task[None] | None = field(default=None)


class ReadAhead:
    """Reads for one thread what it is going to ask for, into `buffers` of 4 MiB; a context manager."""

    def __init__(self, files: OpenFiles, buffers: int = 4, threads: int = 2) -> None:
        self._files = files
        self._crew = Crew(threads, "mcore_ckpt-ahead")
        self._is_open = False
        self._ranges: deque[_Range] = deque()
        self._blocks: list[_Block] = []
        self._free: list[memoryview] = []
        self._lent: _Block | None = None
        self._unmade_buffers = buffers
        self._enough_bytes = buffers * _BLOCK_BYTES

    def steps(
        self, steps: Iterable[_Step], asked: Callable[[_Step], Iterable[tuple[StoredPayload, int, int]]]
    ) -> Iterator[_Step]:
        """The steps, one after another; the reads of each step, and of the next few, have begun when it is returned.
        `asked` gives payload, first byte and number of bytes of all that a step reads, in its order.
        """
        waiting: deque[tuple[int, int, _Step]] = deque()
        announced = 0
        try:
            for number, step in enumerate(steps):
                nbytes = self._announce(number, asked(step))
                announced += nbytes or 0
                waiting.append((number, nbytes or 0, step))
                while waiting and (nbytes is None or announced - waiting[0][1] >= self._enough_bytes):
                    done, own, step = waiting.popleft()
                    yield step
                    announced -= own
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

    def _announce(self, step: int, asked: Iterable[tuple[StoredPayload, int, int]]) -> int | None:
        """Begin a step's reads; returns how many bytes they count as, None if no later step may be taken yet. A small
        step is passed over while reads are in progress; none is taken behind elements in memory.
        """
        if not self._is_open:
            return None
        announced, in_memory = 0, False
        for payload, start, nbytes in asked:
            if payload.decoded is not None or payload.computed:
                in_memory = True
            elif nbytes >= _MIN_BYTES:
                announced += nbytes
                self._append(payload.file, payload.offset + start, nbytes, step)
        self._begin_reads()
        if announced or in_memory:
            return None if in_memory else announced
        return self._enough_bytes // 8 if self._ranges or self._blocks else None

    def _append(self, file: str, start: int, nbytes: int, step: int) -> None:
        last = self._ranges[-1] if self._ranges else None
        if last is not None and (last.file, last.stop) == (file, start):
            last.stop, last.step = start + nbytes, step
        else:
            self._ranges.append(_Range(file, start, start + nbytes, step))

    def _begin_reads(self) -> None:
        """Read into all buffers that are free."""
        while self._ranges and (self._free or self._unmade_buffers):
            wanted = self._ranges[0]
            # Blocks end on pages of the file, so that no page is read twice except at the ends of a range.
            stop = (wanted.start + _BLOCK_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            stop = wanted.stop if wanted.stop - wanted.start <= _BLOCK_BYTES else stop
            if not self._free:
                self._unmade_buffers -= 1
                self._free.append(memoryview(direct_io.aligned_buffer(_BUFFER_BYTES)))
            block = _Block(wanted.file, wanted.start, stop, wanted.step, self._free.pop(), wanted.start)
            self._blocks.append(block)
            wanted.start = stop
            if stop == wanted.stop:
                self._ranges.popleft()
            block.task = self._crew.submit(lambda block=block: self._read(block))  # type: ignore[misc]

    def _read(self, block: _Block) -> None:
        try:
            with self._files.reader(block.file) as reader:
                first, stop = padded_range(block.start, block.stop, reader.size_bytes)
                reader.read_into(first, block.buffer[: stop - first])
            block.content = block.buffer[block.start - first : block.stop - first]
        except Exception:  # noqa: BLE001  (the caller that asks for the bytes reads them, and raises the error)
            block.content = None

    def _forget(self, step: int) -> None:
        """What the steps up to this one have not asked for is not read any more."""
        self._settle()
        while self._ranges and self._ranges[0].step <= step:
            self._ranges.popleft()
        for block in [block for block in self._blocks if block.step <= step]:
            self._drop(block)

    def _drop(self, block: _Block) -> None:
        self._blocks.remove(block)
        assert block.task is not None
        self._crew.result(block.task)  # its memory is used again
        self._free.append(block.buffer)
        self._begin_reads()

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill `view` with bytes of a file from `start` on; raises as `RangeReader.read_into`."""
        done = 0
        while done < len(view):
            content = self.lend(file, start + done, len(view) - done)
            if content is not None:
                direct_io.copy_bytes(view[done : done + len(content)], content)
                done += len(content)
                continue
            nbytes = self._take_over(file, start + done, len(view) - done)
            with self._files.reader(file) as reader:
                reader.read_into(start + done, view[done : done + nbytes])
            done += nbytes

    def lend(self, file: str, start: int, nbytes: int) -> memoryview | None:
        """At most `nbytes` of a file from `start` on, valid until the next call; None if they are not being read."""
        self._settle()
        block = next((block for block in self._blocks if block.file == file and block.given == start), None)
        if block is None:
            return None
        assert block.task is not None
        self._crew.result(block.task)
        if block.content is None:
            self._drop(block)
            return None
        self._lent = block
        block.given = min(block.stop, start + nbytes)
        return block.content[start - block.start : block.given - block.start]

    def _settle(self) -> None:
        """What was lent is not in use any more."""
        if self._lent is not None and self._lent.given == self._lent.stop:
            self._drop(self._lent)
        self._lent = None

    def _take_over(self, file: str, start: int, nbytes: int) -> int:
        """How much of this the caller reads itself: no thread is going to read it."""
        for block in self._blocks:
            if block.file == file and start < block.given < start + nbytes:
                nbytes = block.given - start
        for wanted in self._ranges:
            if wanted.file == file and wanted.start == start:
                wanted.start = min(wanted.stop, start + min(nbytes, _BLOCK_BYTES))
                nbytes = wanted.start - start
                if wanted.start == wanted.stop:
                    self._ranges.remove(wanted)
                break
            if wanted.file == file and start < wanted.start < start + nbytes:
                nbytes = wanted.start - start
        return nbytes

    def __enter__(self) -> ReadAhead:
        self._crew.__enter__()
        self._is_open = True
        return self

    def __exit__(self, *ended: Any) -> None:
        self._is_open = False
        self._crew.__exit__(*ended)


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
