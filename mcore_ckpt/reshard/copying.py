"""The bytes of a plan: read, checked, written to the slots of its files, and compared with the source.

Each worker takes its tensors one by one from the payloads to its files. Payloads pass through bounded buffers and are
summed on both sides: what is read is compared with its stored CRC-32, what is written gets its CRC-32 into its slot.
After every gibibyte or so, and when it is interrupted, a worker makes its files durable and records in the journal how
far it has come.

A walk (`tools.regrid`) reads every chunk front to back, and what it reads next is known before it begins. It announces
that to a `ReadAhead`, whose threads read it in that order, in large aligned blocks, into a bounded number of buffers.
What was not announced, could not be read, or does not lie plainly in a file, is read when it is asked for.

The comparison does not read the source again. The target is read back and divided again into the chunks of the source.
Each must have the CRC-32 that is stored with the source's chunk, or where none is stored, the one that the writer
found. So one pass over the target checks data and layout, from the target's own index. It also sums up tensors whose
chunks are columns, and compares them with the stored fingerprints; the checksums of chunks tell all other ones
(`plan.py`).
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from mcore_ckpt.core.boxes import Box, Stretch
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError
from mcore_ckpt.core.fingerprints import StridedSums, part_of_run
from mcore_ckpt.core.process import Crew, Task, in_parallel
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.files import OpenFiles, padded_range
from mcore_ckpt.load.records import ItemCheck, check_item, global_shape, stretch_of
from mcore_ckpt.reshard.plan import TargetPlan, TensorMove, another_fingerprint, source_sums
from mcore_ckpt.reshard.target_files import (
    FileStream,
    Journal,
    Streams,
    StreamSink,
    Sums,
    TargetFiles,
)
from mcore_ckpt.reshard.view import check_sum
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeWriter
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import Block, CrcSink, Walk, blocks, reads_of

_Step = TypeVar("_Step")

_BLOCK_BYTES: Final = 4 * 1024 * 1024
_BUFFER_BYTES: Final = _BLOCK_BYTES + 2 * ALIGNMENT_BYTES
# Less is read when it is asked for: handing it over would take longer.
_MIN_BYTES: Final = 256 * 1024


@dataclass(slots=True, eq=False)
class _Block:
    """Bytes `[start, stop)` of a file for steps up to `step`; the bytes before `given` have been copied."""

    file: str
    start: int
    stop: int
    step: int
    given: int = 0
    buffer: memoryview = field(default_factory=lambda: memoryview(b""))
    content: memoryview | None = None
    task: Task[None] | None = None


class ReadAhead:
    """Reads for one thread what it is going to ask for, into `buffers` of 4 MiB; a context manager."""

    def __init__(self, files: OpenFiles, buffers: int = 4, threads: int = 2) -> None:
        self._files = files
        self._crew = Crew(threads, "mcore_ckpt-ahead")
        self._is_open = False
        self._waiting: deque[_Block] = deque()
        self._begun: list[_Block] = []
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
        taken: deque[tuple[int, int, _Step]] = deque()
        left, announced = iter(enumerate(steps)), 0
        failure: Exception | None = None
        is_over = False
        while taken or not is_over:
            nbytes: int | None = 0
            try:
                number, step = next(left)
                nbytes = self._announce(number, asked(step))
                taken.append((number, nbytes or 0, step))
                announced += nbytes or 0
            except StopIteration:
                is_over = True
            except Exception as error:  # noqa: BLE001  (raised when the steps before it are done)
                failure, is_over = error, True
            while taken and (is_over or nbytes is None or announced - taken[0][1] >= self._enough_bytes):
                done, own, step = taken.popleft()
                yield step
                announced -= own
                self._forget(done)
        if failure is not None:
            raise failure

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
                self._append(payload.file, payload.offset + start, payload.offset + start + nbytes, step)
        self._begin_reads()
        if announced or in_memory:
            return None if in_memory else announced
        return self._enough_bytes // 8 if self._waiting or self._begun else None

    def _append(self, file: str, start: int, stop: int, step: int) -> None:
        """Blocks end on pages of the file, so that no page is read twice except at the ends of a range."""
        while start < stop:
            last = self._waiting[-1] if self._waiting else None
            if last is None or (last.file, last.stop) != (file, start) or _block_end(last.start) == start:
                last = _Block(file, start, start, step, given=start)
                self._waiting.append(last)
            last.step, last.stop = step, min(stop, _block_end(last.start))
            start = last.stop

    def _begin_reads(self) -> None:
        """Read into all buffers that are free."""
        while self._waiting and (self._free or self._unmade_buffers):
            if not self._free:
                self._unmade_buffers -= 1
                self._free.append(memoryview(direct_io.aligned_buffer(_BUFFER_BYTES)))
            block = self._waiting.popleft()
            block.buffer = self._free.pop()
            self._begun.append(block)
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
        while self._waiting and self._waiting[0].step <= step:
            self._waiting.popleft()
        for block in [block for block in self._begun if block.step <= step]:
            self._drop(block)

    def _drop(self, block: _Block) -> None:
        self._begun.remove(block)
        assert block.task is not None
        self._crew.result(block.task)  # its memory is used again
        self._free.append(block.buffer)
        self._begin_reads()

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill `view` with bytes of a file from `start` on; raises as `RangeReader.read_into`."""
        while len(view):
            content = self.lend(file, start, len(view))
            if content is None:
                content = view[:_BLOCK_BYTES]
                with self._files.reader(file) as reader:
                    reader.read_into(start, content)
            else:
                direct_io.copy_bytes(view[: len(content)], content)
            start, view = start + len(content), view[len(content) :]

    def lend(self, file: str, start: int, nbytes: int) -> memoryview | None:
        """At most `nbytes` of a file from `start` on, valid until the next call; None if they are not being read."""
        self._settle()
        block = next((block for block in self._begun if block.file == file and block.given == start), None)
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

    def __enter__(self) -> ReadAhead:
        self._crew.__enter__()
        self._is_open = True
        return self

    def __exit__(self, *ended: Any) -> None:
        self._is_open = False
        self._crew.__exit__(*ended)


def _block_end(start: int) -> int:
    return (start + _BLOCK_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


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


_SYNC_BYTES: Final = 1024**3
# In flight at once.
_WRITES: Final = 2
_MIN_BUFFER_BYTES: Final = 256 * 1024
_MAX_BUFFER_BYTES: Final = 8 * 1024 * 1024
_OBJECT_PART_BYTES: Final = 1024 * 1024
# Of one worker: what is read ahead takes 16 MiB of it, or half of that.
_MUCH_MEMORY_BYTES: Final = 96 * 1024 * 1024
_MAX_PADDING_BYTES: Final = 64 * 1024
# File descriptors for all but the target's data files.
_OTHER_FILES: Final = 256


@dataclass(slots=True)
class _Run:
    """What all workers share."""

    plan: TargetPlan
    payloads: StoredPayloads
    files: TargetFiles
    journal: Journal
    memory_bytes: int
    advance: Callable[[int], None]
    crew: Crew


def write_all(
    plan: TargetPlan,
    payloads: StoredPayloads,
    files: TargetFiles,
    journal: Journal,
    *,
    memory_bytes: int,
    advance: Callable[[int], None],
) -> None:
    """Write all slots and blobs that the journal does not have as done, with `memory_bytes` of buffers; `advance` is
    called with payload bytes that were written.
    """
    workers = [w for w in range(len(plan.work)) if plan.work[w] or (plan.blobs and not w)]
    _allow_open_files(2 * len(plan.sizes) + _OTHER_FILES)
    memory_bytes //= max(1, len(workers))
    with Crew(max(1, len(workers)), "mcore_ckpt-target") as crew:
        run = _Run(plan, payloads, files, journal, memory_bytes, advance, crew)
        for number in workers:
            crew.submit(_Worker(run, number).work)


def _allow_open_files(count: int) -> None:
    """Raise the process's own limit, where the system allows it: a thousand target ranks are a thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Located(NamedTuple):
    """A block of a tensor, and where its source chunks lie."""

    move: TensorMove
    block: Block
    found: list[StoredPayload]


class _Worker:
    """One worker, in its own thread."""

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self._number = number
        self._moves = run.plan.work[number]
        self._files: set[str] = set()
        self._mains: dict[str, FileStream] = {}
        self._walk = Walk()
        self._ahead = ReadAhead(run.payloads.files, 4 if run.memory_bytes >= _MUCH_MEMORY_BYTES else 2)
        self._blocks: Iterator[_Located] = iter(())
        self._crcs: dict[str, list[int]] = {}
        self._sums: dict[str, list[Sums]] = {}
        self._unsynced_bytes = 0

    def work(self) -> None:
        """Do all that is not done yet."""
        run = self._run
        done = run.journal.done.get(self._number, 0)
        for move in self._moves[:done]:
            run.advance(move.payload_bytes)
        files = run.plan.files_at_once or len({slot.file for move in self._moves for slot in move.slots}) + 1
        buffer_bytes, count = _buffers(run.memory_bytes, files)
        with Crew(_WRITES, "mcore_ckpt-write") as crew, self._ahead:
            streams = Streams(crew, buffer_bytes, count)
            self._blocks = self._ahead.steps(self._located(done), self._reads)
            if not self._number and self._number not in run.journal.done:
                self._write_blobs(streams)
            for position in range(done, len(self._moves)):
                if run.crew.failed:
                    break
                self._write_tensor(streams, self._moves[position])
                done = position + 1
                if self._unsynced_bytes >= _SYNC_BYTES:
                    self._sync(streams, done)
            self._sync(streams, done)

    def _sync(self, streams: Streams, done: int) -> None:
        streams.flush()
        streams.crew.drain()
        for name in self._files:
            self._file(name).sync()
        self._run.journal.record(self._number, done, self._crcs, self._sums)
        self._crcs, self._sums = {}, {}
        self._unsynced_bytes = 0

    def _main(self, streams: Streams, name: str, position: int) -> FileStream:
        """The stream of a file, at a position; short gaps are filled, if they may be, so that writes stay large."""
        stream = self._mains.get(name)
        if stream is None:
            stream = self._mains[name] = streams.open(self._file(name), position)
        elif self._run.plan.filled_gaps and 0 <= position - stream.position <= _MAX_PADDING_BYTES:
            stream.pad_to(position)
        else:
            stream.seek(position)
        return stream

    def _file(self, name: str) -> RangeWriter:
        self._files.add(name)
        return self._run.files.open(name)

    def _write_blobs(self, streams: Streams) -> None:
        for blob in self._run.plan.blobs:
            stream = self._main(streams, blob.file, blob.offset)
            if isinstance(blob.content, bytes):
                stream.write(blob.content)
                continue
            item = blob.content.item
            with self._run.payloads.files.reader(item.file) as reader:
                check_item(ItemCheck(blob.content.fqn, item), reader)
                done = 0
                while done < item.length:
                    space = stream.space(min(_OBJECT_PART_BYTES, item.length - done))
                    reader.read_into(item.offset + done, space)
                    stream.filled(space)
                    done += len(space)

    def _located(self, first: int) -> Iterator[_Located]:
        """All blocks of the tensors from this one on."""
        locate = self._run.payloads.locate
        for move in self._moves[first:]:
            for block in move.blocks:
                yield _Located(move, block, [locate(move.entry, move.entry.chunks[n]) for n in block.sources])

    def _reads(self, located: _Located) -> Iterator[tuple[StoredPayload, int, int]]:
        """What is going to be read of a block, in order."""
        move, block, found = located
        source_boxes = [Box(*move.entry.chunks[n][:2]) for n in block.sources]
        target_boxes = [move.slots[n].slice for n in block.targets]
        for n, start, nbytes in reads_of(source_boxes, target_boxes, element_bytes(move.entry.dtype)):
            yield found[n], start, nbytes

    def _write_tensor(self, streams: Streams, move: TensorMove) -> None:
        entry = move.entry
        crcs = [0] * len(entry.chunks)
        sums: list[Sums] = [(0, [])] * len(move.slots)
        source_boxes = move.source_boxes
        self._walk.elem_bytes = element_bytes(entry.dtype)
        keep_crcs = False
        written = set()
        for block in move.blocks:
            found = next(self._blocks).found
            keep_crcs |= any(payload.crc32 is None for payload in found)
            written.update(block.targets)
            self._write_block(streams, move, block, found, source_boxes, crcs, sums)
        for number in sorted(set(range(len(move.slots))) - written):  # slots without elements
            frame = self._run.plan.frame(move, number)
            self._main(streams, move.slots[number].file, move.slots[number].offset).write(
                frame.head + frame.tail_with(0)
            )
        if keep_crcs and self._run.plan.index is not None:
            self._crcs[entry.fqn] = crcs
        self._sums[move.key] = sums
        self._run.advance(move.payload_bytes)
        self._unsynced_bytes += move.payload_bytes

    def _write_block(
        self,
        streams: Streams,
        move: TensorMove,
        block: Block,
        found: Sequence[StoredPayload],
        source_boxes: Sequence[Box],
        crcs: list[int],
        sums: list[Sums],
    ) -> None:
        payloads, plan = self._run.payloads, self._run.plan
        opened: list[FileStream] = []
        sinks: list[StreamSink] = []
        used: set[str] = set()
        for number in block.targets:
            name, offset, _ = move.slots[number]
            # A file's second slot in the same block is written next to the first: its stream is for this block only.
            stream = streams.open(self._file(name), offset) if name in used else self._main(streams, name, offset)
            used.add(name)
            stream.write(plan.frame(move, number).head)
            opened.append(stream)
            sinks.append(StreamSink(stream))
        read = self._walk.move(
            [source_boxes[n] for n in block.sources],
            [AheadSource(self._ahead, payloads, payload) for payload in found],
            [move.slots[n].slice for n in block.targets],
            sinks,
        )
        for n, payload, value in zip(block.sources, found, read, strict=True):
            check_sum(payload, value)
            crcs[n] = value
            payloads.was_read(move.entry, move.entry.chunks[n], value)
        for number, stream, sink in zip(block.targets, opened, sinks, strict=True):
            sums[number] = (sink.sums.crc32, sink.sums.blocks)
            stream.write(plan.frame(move, number).tail_with(sink.sums.crc32))
            main = self._mains[move.slots[number].file]
            if stream is not main:
                stream.flush()
                main.seek(stream.position)


def _buffers(memory_bytes: int, streams: int) -> tuple[int, int]:
    """Size and number of a worker's buffers: one for each stream and a few in flight, if that can be."""
    wanted = streams + 4
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // wanted // 4096 * 4096))
    return size, max(4, min(wanted, memory_bytes // size))


_WINDOW_BYTES = 4 * 1024 * 1024
# Less is read where it is compared: threads and buffers would cost more than they save.
_MIN_AHEAD_BYTES = 16 * 1024 * 1024


def check_all(
    plan: TargetPlan,
    payloads: StoredPayloads,
    target: CheckpointIndex,
    journal: Journal,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """Compare a target, whose path is where the files lie now, with its source; raises `ChecksumError` or
    `CorruptCheckpointError`. `advance` is called with payload bytes that have been compared.
    """
    with StoredPayloads(target) as written:
        threads = threading.local()

        def check(move: TensorMove) -> None:
            if not hasattr(threads, "window"):
                threads.window = memoryview(bytearray(_WINDOW_BYTES))
            _check_tensor(move, payloads, written, journal, threads.window)
            advance(move.payload_bytes)

        in_parallel(sorted(plan.moves, key=lambda move: move.slots[:1]), check, workers)
        for fqn, entry in target.objects.items():  # objects keep their keys
            item, origin = entry.item, payloads.index.objects[fqn].item
            with written.files.reader(item.file) as copy, payloads.files.reader(origin.file) as original:
                if copy.read(item.offset, item.length) != original.read(origin.offset, origin.length):
                    raise CorruptCheckpointError(
                        f"{fqn}: bytes [{item.offset}, {item.offset + item.length}) of {copy.name} differ from the "
                        "source's item; check the device, then run the command again"
                    )


def _check_tensor(
    move: TensorMove, payloads: StoredPayloads, written: StoredPayloads, journal: Journal, window: memoryview
) -> None:
    entry = written.index.tensors[move.key]
    stored = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    expected = [crc or 0 for crc in source_sums(move, journal, payloads)]
    sums = _sums_of_columns(move, entry, payloads.index, written.index)
    walk = Walk(element_bytes(entry.dtype))
    source_boxes = move.source_boxes

    def locate(block: Block) -> tuple[Block, list[StoredPayload]]:
        return block, [written.locate(entry, entry.chunks[n]) for n in block.sources]

    def reads(located: tuple[Block, list[StoredPayload]]) -> Iterator[tuple[StoredPayload, int, int]]:
        block, found = located
        targets = [source_boxes[n] for n in block.targets]
        for n, start, nbytes in reads_of([stored[n] for n in block.sources], targets, walk.elem_bytes):
            yield found[n], start, nbytes

    ahead = ReadAhead(written.files)
    with ahead if move.payload_bytes >= _MIN_AHEAD_BYTES else contextlib.nullcontext():
        for block, found in ahead.steps(map(locate, blocks(stored, source_boxes)), reads):
            sinks = [CrcSink(window) if sums is None else sums.sink(n, window) for n in block.targets]
            read = walk.move(
                [stored[n] for n in block.sources],
                [AheadSource(ahead, written, payload) for payload in found],
                [source_boxes[n] for n in block.targets],
                sinks,
            )
            for payload, value in zip(found, read, strict=True):
                if payload.crc32 != value:
                    raise _wrong(payload.where, payload.crc32, value)
            for n, sink in zip(block.targets, sinks, strict=True):
                if sink.crc32 != expected[n]:
                    where = f"{entry.fqn}: the source's chunk at {list(source_boxes[n].offsets)}, put together from the"
                    raise _wrong(f"{where} target", expected[n], sink.crc32)
    known = written.index.fingerprints.get(move.key)
    if sums is not None and known is not None:
        total = sums.fingerprint(expected)
        if total != known:
            raise another_fingerprint(move.key, total, known)


class _ColumnSums:
    """The fingerprint of a tensor, from its chunks as they are divided in the source."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._strided = StridedSums()

    def sink(self, number: int, window: memoryview) -> CrcSink:
        """For the chunk of that number."""
        stretch = self._stretches[number]
        return _StridedSink(window, self._strided, number, stretch) if _is_strided(stretch) else CrcSink(window)

    def fingerprint(self, crcs: Sequence[int]) -> int:
        """Of the tensor, when all chunks have come, whose CRC-32s are these."""
        total = 0
        for part in self._strided.finish().values():
            total ^= part
        for crc, stretch in zip(crcs, self._stretches, strict=True):
            total ^= part_of_run(crc, stretch) or 0
        return total


class _StridedSink(CrcSink):
    """Sums rows, too."""

    __slots__ = ("_done", "_number", "_stretch", "_sums")

    def __init__(self, window: memoryview, sums: StridedSums, number: int, stretch: Stretch) -> None:
        super().__init__(window)
        self._sums, self._number, self._stretch, self._done = sums, number, stretch, 0

    def filled(self, view: memoryview) -> None:
        self.crc32 = self._sums.feed(self._number, self._stretch, view, self._done, self.crc32)[-1]
        self._done += len(view)


def _is_strided(stretch: Stretch) -> bool:
    return stretch.elems > 0 and stretch.bytes_behind() is None


def _sums_of_columns(
    move: TensorMove, entry: TensorEntry, source: CheckpointIndex, target: CheckpointIndex
) -> _ColumnSums | None:
    """Where neither chunks of the source nor of the target tell the fingerprint of a tensor that has one."""
    if move.key not in target.fingerprints:
        return None
    shape = global_shape(target, entry)
    if not any(_is_strided(stretch_of(entry, chunk, shape)) for chunk in entry.chunks):
        return None
    shape = global_shape(source, move.entry)
    stretches = [stretch_of(move.entry, chunk, shape) for chunk in move.entry.chunks]
    return _ColumnSums(stretches) if any(map(_is_strided, stretches)) else None


def _wrong(where: str, expected: int | None, got: int) -> ChecksumError:
    shown = "none" if expected is None else f"{expected:#010x}"
    return ChecksumError(
        f"{where}: has CRC-32 {got:#010x}, expected {shown}: what was written is not what is on the disk. Check the "
        "device and the source (`mcore-ckpt verify`), then run the command again"
    )
