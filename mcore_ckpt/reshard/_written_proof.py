"""Is a target, as it lies on the disk, its source? Shown by checksum, without reading the source again.

The target is read back and divided again into the chunks of the source. Each must have the CRC-32 that is stored
with the source's chunk, or where none is stored, the one that the writer found. So one pass over the target checks data
and layout at once, from the target's own index. It also sums up tensors whose chunks are columns, and compares them
with the fingerprints that were stored: of all other ones the checksums of the chunks tell it (`torch_dist.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from mcore_ckpt.core.boxes import Box, Stretch
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError
from mcore_ckpt.core.fingerprints import StridedSums, part_of_run
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.stored_fingerprints import global_shape, stretch_of
from mcore_ckpt.reshard._journal import Journal
from mcore_ckpt.reshard._read_ahead import AheadSource, ReadAhead
from mcore_ckpt.reshard.slots import TargetPlan, TensorMove
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import CrcSink, Walk, reads_of
from mcore_ckpt.tools.tilings import Block, blocks

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


def source_sums(move: TensorMove, journal: Journal, payloads: StoredPayloads) -> Sequence[int | None]:
    """The CRC-32s of a tensor's chunks in the source: stored, or as they were read."""
    found = journal.crcs.get(move.entry.fqn)
    return [payloads.locate(move.entry, chunk).crc32 for chunk in move.entry.chunks] if found is None else found


def another_fingerprint(key: str, found: int, known: int) -> ChecksumError:
    """The error for a tensor that is not what the source says it is."""
    return ChecksumError(
        f"{key}: what was written has the fingerprint {found:08x}, the source says {known:08x}: its chunks are not "
        "where they were when it was saved. Compare it with another copy (`mcore-ckpt verify --state`)"
    )


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
