"""Is the target, as it lies on the disk, the source? Proved by checksum, without reading the source again.

The target is read back and divided once more into the chunks of the source. Each must have the CRC-32 that the source's
item carries (or, where the source carries none or the dtype was changed, the one that the copy found). That takes one
pass over the target, and proves the data and the layout at once, from the target's own index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mcore_ckpt.boxes import Box
from mcore_ckpt.container import element_bytes
from mcore_ckpt.errors import ChecksumError, CorruptCheckpointError
from mcore_ckpt.fetch import in_parallel
from mcore_ckpt.metadata import CheckpointIndex, TensorEntry
from mcore_ckpt.regrid import CrcSink, Walk, blocks
from mcore_ckpt.reshard_copy import expected_crcs
from mcore_ckpt.reshard_journal import Journal
from mcore_ckpt.reshard_plan import ReshardPlan, TensorMove
from mcore_ckpt.stored_payloads import PayloadSource, StoredPayloads

__all__ = ["check_all"]

_WINDOW_BYTES = 4 * 1024 * 1024


def check_all(
    plan: ReshardPlan,
    given: StoredPayloads,
    target: CheckpointIndex,
    journal: Journal,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """Compare the whole target with the source.

    Args:
        plan: what was to be done.
        given: the source's tensors.
        target: index of the target, its path being where the files lie now.
        journal: holds CRC-32s that are stored nowhere else.
        workers: threads.
        advance: called with payload bytes that have been compared.

    Raises:
        ChecksumError, CorruptCheckpointError: the target is not what it should be.
    """
    # Objects keep their keys; tensors may have been renamed.
    names = {move.entry.fqn: move.target_fqn for moves in plan.work for move in moves}
    with StoredPayloads(target) as written:
        threads = threading.local()

        def check(move: TensorMove) -> None:
            if not hasattr(threads, "window"):
                threads.window = memoryview(bytearray(_WINDOW_BYTES))
            entry = written.index.tensors[names[move.entry.fqn]]
            _check_tensor(move, entry, given, written, journal, threads.window)
            advance(move.payload_bytes)

        moves = [move for moves in plan.work for move in moves]
        moves.sort(key=lambda move: (move.files[0], move.offsets[0]) if move.files else ("", 0))
        in_parallel(moves, check, workers)
        for fqn, entry in target.objects.items():
            item, origin = entry.item, given.index.objects[fqn].item
            with written.files.reader(item.file) as copy, given.files.reader(origin.file) as original:
                if copy.read(item.offset, item.length) != original.read(origin.offset, origin.length):
                    raise CorruptCheckpointError(
                        f"{fqn}: bytes [{item.offset}, {item.offset + item.length}) of {copy.name} differ from the "
                        "source's item; check the device, then run the command again"
                    )


def _check_tensor(
    move: TensorMove,
    entry: TensorEntry,
    given: StoredPayloads,
    written: StoredPayloads,
    journal: Journal,
    window: memoryview,
) -> None:
    stored = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    expected = expected_crcs(given, move, journal)
    walk = Walk(element_bytes(entry.dtype))
    source_boxes = move.source_boxes
    for block in blocks(stored, source_boxes):
        payloads = [written.locate(entry, entry.chunks[n]) for n in block.sources]
        sinks = [CrcSink(window) for _ in block.targets]
        read = walk.move(
            [stored[n] for n in block.sources],
            [PayloadSource(written, payload) for payload in payloads],
            [source_boxes[n] for n in block.targets],
            sinks,
        )
        for payload, value in zip(payloads, read, strict=True):
            if payload.crc32 != value:
                raise _wrong(payload.where, payload.crc32, value)
        for n, sink in zip(block.targets, sinks, strict=True):
            if sink.crc32 != expected[n]:
                where = (
                    f"{entry.fqn}: the source's chunk at {list(source_boxes[n].offsets)}, put together from the target"
                )
                raise _wrong(where, expected[n], sink.crc32)


def _wrong(where: str, expected: int | None, got: int) -> ChecksumError:
    shown = "none" if expected is None else f"{expected:#010x}"
    return ChecksumError(
        f"{where}: has CRC-32 {got:#010x}, expected {shown}: what was written is not what is on the disk. Check the "
        "device and the source (`mcore-ckpt verify`), then run the command again"
    )
