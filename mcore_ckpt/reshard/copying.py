"""The bytes of a plan: read, checked, written to the slots of its files, and compared with the source.

Each worker takes its tensors one by one from the payloads to its files. Payloads pass through bounded buffers and are
summed on both sides: what is read is compared with its stored CRC-32, what is written gets its CRC-32 into its slot.
After every gibibyte or so, and when it is interrupted, a worker makes its files durable and records in the journal how
far it has come.

A tensor passes slab by slab (`tools.regrid`), so every chunk is read front to back, and what is read next is known
before it begins: threads read it into a bounded number of buffers (`read_ahead`). What does not lie plainly in a file
is computed when its turn comes.

A run that resumes another compares what lies in the slots with what the journal says of them, and writes the tensor
again where that is not there.

The comparison does not read the source again. The target is read back and divided again into the chunks of the source.
Each must have the CRC-32 that is stored with the source's chunk, or where none is stored, the one that the writer
found. So one pass over the target checks data and layout, from the target's own index. It also sums up tensors whose
chunks are columns, and compares them with the stored fingerprints; the checksums of chunks tell all other ones
(`plan.py`).
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from mcore_ckpt.core.boxes import Box, Stretch, relative, runs
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.fingerprints import StridedSums, part_of_run
from mcore_ckpt.core.process import Crew, Task, in_parallel
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.integrity import RunningSum
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.checks import global_shape, stretch_of
from mcore_ckpt.load.files import OpenFiles, padded_range
from mcore_ckpt.load.records import item_name
from mcore_ckpt.reshard.plan import TargetPlan, TensorMove, another_fingerprint, in_shares, source_sums
from mcore_ckpt.reshard.target_files import FileStream, Journal, Streams, Sums, TargetFiles, Written
from mcore_ckpt.reshard.view import check_sum
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeWriter, align_up
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import SLAB_BYTES, Block, assembled, blocks, slabs_of

_READS: Final = 2
# Reads of this length and longer are whole pages of the file, and of the buffer.
_MIN_PADDED_BYTES: Final = 256 * 1024
_BUFFER_BYTES: Final = SLAB_BYTES + 3 * ALIGNMENT_BYTES * (SLAB_BYTES // _MIN_PADDED_BYTES)


class Division(NamedTuple):
    """A tensor on its way: the chunks of `entry` are read, and divided into `targets`, block by block."""

    entry: TensorEntry
    targets: Sequence[Box]
    blocks: Sequence[Block]


class Read(NamedTuple):
    """Bytes of a chunk: the chunk's position, and the part of the tensor that they are."""

    number: int
    part: Box
    payload: StoredPayload
    start: int
    nbytes: int

    @property
    def is_plain(self) -> bool:
        """They lie in a file as they are."""
        return self.payload.decoded is None and self.payload.fill is None


class Step(NamedTuple):
    """A slab: what is read of it, and what its targets get."""

    reads: list[Read]
    targets: list[tuple[int, Box]]
    located: dict[int, StoredPayload]  # all chunks of the block
    elem_bytes: int
    is_last: bool  # of its block

    @property
    def is_decoded(self) -> bool:
        """Some of it was decoded, and is in memory already."""
        return any(read.payload.decoded is not None for read in self.reads)


Ahead = Iterator[tuple[Step, list[memoryview]]]
"""All slabs in order, with the bytes of their reads, which are valid until the next one."""


def _steps(payloads: StoredPayloads, divisions: Iterable[Division]) -> Iterator[Step]:
    for entry, targets, found in divisions:
        sources = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        elem_bytes = element_bytes(entry.dtype)
        for block in found:
            located = {n: payloads.locate(entry, entry.chunks[n]) for n in block.sources}
            for slab in slabs_of(block, sources, targets, elem_bytes):
                reads = []
                for n, part in slab.sources:
                    first = runs(sources[n].sizes, relative(part, sources[n].offsets), elem_bytes).first_byte
                    reads.append(Read(n, part, located[n], first, math.prod(part.sizes) * elem_bytes))
                yield Step(reads, slab.targets, located, elem_bytes, slab.is_last)


def _batches(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Steps that are read into one buffer; one that was decoded ends a batch."""
    batch: list[Step] = []
    nbytes = 0
    for step in steps:
        own = sum(read.nbytes for read in step.reads)
        if batch and nbytes + own > SLAB_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(step)
        nbytes += own
        if step.is_decoded:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def read_ahead(payloads: StoredPayloads, divisions: Iterable[Division], crew: Crew, buffers: int) -> Ahead:
    """The slabs of these tensors; while one is in use, the crew reads the next ones into the other buffers."""
    free: list[memoryview] = []
    waiting: deque[tuple[list[Step], memoryview, Task[list[memoryview]]]] = deque()
    batches = _batches(_steps(payloads, divisions))
    while True:
        while len(waiting) < buffers and not (waiting and waiting[-1][0][-1].is_decoded):
            batch = next(batches, None)
            if batch is None:
                break
            buffer = free.pop() if free else direct_io.aligned_buffer(_BUFFER_BYTES)
            waiting.append((batch, buffer, crew.submit(partial(_read_files, payloads, batch, buffer))))
        if not waiting:
            return
        batch, buffer, task = waiting.popleft()
        read_views = crew.result(task)
        views = iter(read_views)
        for step in batch:
            contents = [next(views) for _ in step.reads]
            for read, view in zip(step.reads, contents, strict=True):
                if not read.is_plain:
                    payloads.read_into(read.payload, read.start, view)
            yield step, contents
        free.append(buffer)


def _read_files(payloads: StoredPayloads, batch: Sequence[Step], buffer: memoryview) -> list[memoryview]:
    """Where in a buffer each read goes; what lies plainly in a file is there."""
    views, at = [], 0
    for read in (read for step in batch for read in step.reads):
        start = first = read.payload.offset + read.start
        stop = start + read.nbytes
        if read.is_plain:
            with payloads.files.reader(read.payload.file) as reader:
                if read.nbytes >= _MIN_PADDED_BYTES:
                    at = align_up(at)
                    first, stop = padded_range(start, stop, reader.size_bytes)
                reader.read_into(first, buffer[at : at + stop - first])
        views.append(buffer[at + start - first :][: read.nbytes])
        at += stop - first
    return views


# From this size on, a second sum of the same bytes is cheaper derived from the first than computed.
_MIN_COMBINED_BYTES: Final = 512 * 1024


class Sink(Protocol):
    """Where the bytes of one target go, front to back; `crc32` is that of what has come."""

    crc32: int

    def feed(self, view: memoryview, /) -> None:
        """The next bytes."""


def move_block(ahead: Ahead, sinks: Mapping[int, Sink]) -> Iterator[tuple[int, StoredPayload, int]]:
    """Give the targets of one block their elements; then position, payload and CRC-32 of each source."""
    crcs: dict[int, int] = {}
    for step, contents in ahead:
        found = list(zip(step.reads, contents, strict=True))
        summed = set()
        for number, part in step.targets:
            sink = sinks[number]
            same = next(((read.number, content) for read, content in found if read.part == part), None)
            if same is None:
                sink.feed(assembled(part, step.elem_bytes, [(read.part, content) for read, content in found]))
                continue
            source, content = same
            before = sink.crc32
            sink.feed(content)
            if len(content) >= _MIN_COMBINED_BYTES:
                # From another beginning the same bytes lead to another sum, by what became of the difference.
                crcs[source] = crc32_combine(before ^ crcs.get(source, 0), sink.crc32, len(content))
                summed.add(source)
        for read, content in found:
            if read.number not in summed:
                crcs[read.number] = crc32(content, crcs.get(read.number, 0))
        if step.is_last:
            return ((n, payload, crcs.get(n, 0)) for n, payload in step.located.items())
    raise AssertionError("a block has a last slab")


_SYNC_BYTES: Final = 1024**3
# In flight at once.
_WRITES: Final = 2
_MIN_BUFFER_BYTES: Final = 256 * 1024
_MAX_BUFFER_BYTES: Final = 8 * 1024 * 1024
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
    there: OpenFiles  # the target's files as they are
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
    _allow_open_files(2 * len(plan.sizes) + _OTHER_FILES + sum(1 for _ in Path("/proc/self/fd").iterdir()))
    memory_bytes //= max(1, len(workers))
    there = OpenFiles(files.storage, "auto", None)
    with contextlib.closing(there), Crew(max(1, len(workers)), "mcore_ckpt-target") as crew:
        run = _Run(plan, payloads, files, journal, there, memory_bytes, advance, crew)
        for number in workers:
            crew.submit(_Worker(run, number).work)


def _allow_open_files(count: int) -> None:
    """Raise the process's own limit, where the system allows it: a thousand target ranks are a thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _SlotSink(RunningSum):
    """A slot's elements on their way into its file; sums them."""

    __slots__ = ("stream",)

    def __init__(self, stream: FileStream) -> None:
        super().__init__()
        self.stream = stream

    def feed(self, view: memoryview) -> None:
        super().feed(view)
        self.stream.write(view)


class _Worker:
    """One worker, in its own thread."""

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self._number = number
        self._moves = run.plan.work[number]
        self._files: set[str] = set()
        self._mains: dict[str, FileStream] = {}
        self._written: dict[str, Written] = {}
        self._unsynced_bytes = 0
        self._fills_gaps = run.plan.filled_gaps

    def work(self) -> None:
        """Write all that is not there yet."""
        run = self._run
        left = []
        for move in self._moves:
            if self._is_there(move):
                run.advance(move.payload_bytes)
                self._fills_gaps = False  # it may lie in one
            else:
                left.append(move)
        files = run.plan.files_at_once or len({slot.file for move in self._moves for slot in move.slots}) + 1
        buffer_bytes, count = _buffers(run.memory_bytes, files)
        ahead_buffers = 4 if run.memory_bytes >= _MUCH_MEMORY_BYTES else 2
        with Crew(_WRITES, "mcore_ckpt-write") as crew, Crew(_READS, "mcore_ckpt-ahead") as readers:
            streams = Streams(crew, buffer_bytes, count)
            if not self._number:
                self._write_blobs(streams)
            divisions = (Division(move.entry, [slot.slice for slot in move.slots], move.blocks) for move in left)
            ahead = read_ahead(run.payloads, divisions, readers, ahead_buffers)
            for move in left:
                if run.crew.failed:
                    break
                self._write_tensor(streams, ahead, move)
                if self._unsynced_bytes >= _SYNC_BYTES:
                    self._sync(streams)
            self._sync(streams)

    def _is_there(self, move: TensorMove) -> bool:
        """Whether an earlier run has written a tensor, and its slots hold what that run has noted."""
        known = self._run.journal.written.get(move.key)
        if known is None:
            return False
        window = memoryview(bytearray(min(SLAB_BYTES, move.payload_bytes)))
        sums: list[Sums] = []
        try:
            for number, slot in enumerate(move.slots):
                frame, found = self._run.plan.frame(move, number), RunningSum()
                left = math.prod(slot.slice.sizes) * element_bytes(move.entry.dtype)
                at = slot.offset + len(frame.head)
                with self._run.there.reader(slot.file) as reader:
                    is_same = reader.read(slot.offset, len(frame.head)) == frame.head
                    while left:
                        view = window[:left]
                        reader.read_into(at, view)
                        found.feed(view)
                        at, left = at + len(view), left - len(view)
                    tail = frame.tail_with(found.crc32)
                    if not is_same or reader.read(at, len(tail)) != tail:
                        return False
                sums.append((found.crc32, found.blocks))
        except LoadError:
            return False
        return sums == known.sums

    def _sync(self, streams: Streams) -> None:
        streams.flush()
        streams.crew.drain()
        for name in self._files:
            self._file(name).sync()
        self._run.journal.record(self._written)
        self._written = {}
        self._unsynced_bytes = 0

    def _main(self, streams: Streams, name: str, position: int) -> FileStream:
        """The stream of a file, at a position; short gaps are filled, if they may be, so that writes stay large."""
        stream = self._mains.get(name)
        if stream is None:
            stream = self._mains[name] = streams.open(self._file(name), position)
        elif self._fills_gaps and 0 <= position - stream.position <= _MAX_PADDING_BYTES:
            stream.write(bytes(position - stream.position))
        else:
            stream.seek(position)
        return stream

    def _file(self, name: str) -> RangeWriter:
        self._files.add(name)
        return self._run.files.open(name)

    def _write_blobs(self, streams: Streams) -> None:
        for blob in self._run.plan.blobs:
            stream = self._main(streams, blob.file, blob.offset)
            content = blob.content
            stream.write(content if isinstance(content, bytes) else self._run.payloads.object_bytes(content))

    def _write_tensor(self, streams: Streams, ahead: Ahead, move: TensorMove) -> None:
        run, entry = self._run, move.entry
        crcs = [0] * len(entry.chunks)
        sums: list[Sums] = [(0, [])] * len(move.slots)
        keep_crcs = False
        empty = set(range(len(move.slots)))
        for block in move.blocks:
            sinks: dict[int, _SlotSink] = {}
            used: set[str] = set()
            for number in block.targets:
                name, offset, _ = move.slots[number]
                # A file's second slot in the same block is written next to the first: its stream is for this block.
                is_second = name in used
                stream = streams.open(self._file(name), offset) if is_second else self._main(streams, name, offset)
                used.add(name)
                stream.write(run.plan.frame(move, number).head)
                sinks[number] = _SlotSink(stream)
            for n, payload, value in move_block(ahead, sinks):
                check_sum(payload, value)
                crcs[n] = value
                keep_crcs |= payload.crc32 is None
                run.payloads.was_read(entry, entry.chunks[n], value)
            for number, sink in sinks.items():
                sums[number] = (sink.crc32, sink.blocks)
                sink.stream.write(run.plan.frame(move, number).tail_with(sink.crc32))
                main = self._mains[move.slots[number].file]
                if sink.stream is not main:
                    sink.stream.flush()
                    main.seek(sink.stream.position)
            empty -= sinks.keys()
        for number in sorted(empty):
            frame = run.plan.frame(move, number)
            name, offset, _ = move.slots[number]
            self._main(streams, name, offset).write(frame.head + frame.tail_with(0))
        self._written[move.key] = Written(sums, crcs if keep_crcs and run.plan.index is not None else None)
        run.advance(move.payload_bytes)
        self._unsynced_bytes += move.payload_bytes


def _buffers(memory_bytes: int, streams: int) -> tuple[int, int]:
    """Size and number of a worker's buffers: one for each stream and a few in flight, if that can be."""
    wanted = streams + 4
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // wanted // 4096 * 4096))
    return size, max(4, min(wanted, memory_bytes // size))


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

        def check(moves: Sequence[TensorMove]) -> None:
            divisions = []
            for move in moves:
                entry = target.tensors[move.key]
                stored = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
                divisions.append(Division(entry, move.source_boxes, list(blocks(stored, move.source_boxes))))
            with Crew(_READS, "mcore_ckpt-ahead") as crew:
                ahead = read_ahead(written, divisions, crew, 4)
                for move, division in zip(moves, divisions, strict=True):
                    _check_tensor(move, division, ahead, source_sums(move, journal, payloads), payloads.index, target)
                    advance(move.payload_bytes)

        everything = sorted(plan.moves, key=lambda move: move.slots[:1])
        in_parallel(in_shares(everything, lambda move: move.payload_bytes, workers), check, workers)
        for fqn, entry in target.objects.items():  # objects keep their keys
            if written.object_bytes(entry) != payloads.object_bytes(payloads.index.objects[fqn]):
                raise CorruptCheckpointError(
                    f"{item_name(fqn, entry.item)}: differs from the source's item; check the device, then run the "
                    "command again"
                )


def _check_tensor(
    move: TensorMove,
    division: Division,
    ahead: Ahead,
    expected: Sequence[int | None],
    source: CheckpointIndex,
    target: CheckpointIndex,
) -> None:
    entry = division.entry
    sums = _sums_of_columns(move, entry, source, target)
    for block in division.blocks:
        sinks: dict[int, Sink] = {n: RunningSum() if sums is None else sums.sink(n) for n in block.targets}
        for _, payload, value in move_block(ahead, sinks):
            if payload.crc32 != value:
                raise _wrong(payload.where, payload.crc32, value)
        for n, sink in sinks.items():
            if sink.crc32 != (expected[n] or 0):
                where = f"{entry.fqn}: the source's chunk at {list(division.targets[n].offsets)}, put together from the"
                raise _wrong(f"{where} target", expected[n], sink.crc32)
    known = target.fingerprints.get(move.key)
    if sums is not None and known is not None:
        total = sums.fingerprint([crc or 0 for crc in expected])
        if total != known:
            raise another_fingerprint(move.key, total, known)


class _ColumnSums:
    """The fingerprint of a tensor, from its chunks as they are divided in the source."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._strided = StridedSums()

    def sink(self, number: int) -> Sink:
        """For the chunk of that number."""
        stretch = self._stretches[number]
        return _StridedSink(self._strided, number, stretch) if _is_strided(stretch) else RunningSum()

    def fingerprint(self, crcs: Sequence[int]) -> int:
        """Of the tensor, when all chunks have come, whose CRC-32s are these."""
        total = 0
        for part in self._strided.finish().values():
            total ^= part
        for crc, stretch in zip(crcs, self._stretches, strict=True):
            total ^= part_of_run(crc, stretch) or 0
        return total


class _StridedSink:
    """Sums rows, too."""

    def __init__(self, sums: StridedSums, number: int, stretch: Stretch) -> None:
        self.crc32 = 0
        self._sums, self._number, self._stretch, self._done = sums, number, stretch, 0

    def feed(self, view: memoryview) -> None:
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
