"""One stored item, as every reader of payloads sees it: its name, and whether it is what the index says.

Loads (`_tensor_reads.py`) and the offline commands (`tools/payloads.py`) stand on this; without torch and numpy.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath

from mcore_ckpt.core.errors import IF_DAMAGED, ChecksumError, CorruptCheckpointError, LoadError, MissingKeyError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.format.index import CheckpointIndex, PackedTensors, StoredChunk, StoredItem
from mcore_ckpt.format.item_reading import LocatedTensor
from mcore_ckpt.format.metadata_read import index_name, read_index
from mcore_ckpt.storage.base import FileVersion
from mcore_ckpt.storage.resolve import storage_at

# More than any deflated record can grow.
_MAX_INFLATION = 1100


def item_name(fqn: str, item: StoredItem) -> str:
    """An item as messages name it."""
    return f"{fqn} ({item.file}, bytes [{item.offset}, {item.offset + item.length}))"


def chunk_name(fqn: str, chunk: StoredChunk) -> str:
    """A tensor's item as messages name it."""
    return item_name(f"{fqn} at {list(chunk.offsets)}", chunk.item)


@contextmanager
def of_one_save(
    index: CheckpointIndex, version: FileVersion | None, rank: int | None = None, *, shows: bool = True
) -> Iterator[None]:
    """Within the block something is read by that index, whose file had that `version`: raises `LoadError` if a read
    fails since another save has replaced the checkpoint, or where that would not show (no manifest, or not `shows`).
    """
    try:
        yield
    except LoadError as error:
        if _was_replaced(index, version, rank):
            raise replaced_error(index.path, str(error)) from error
        raise
    if (index.manifest is None or not shows) and _was_replaced(index, version, rank):
        raise replaced_error(index.path, f"{index_name(rank)} is another file than before")


def _was_replaced(index: CheckpointIndex, version: FileVersion | None, rank: int | None) -> bool:
    try:
        found = storage_at(checkpoint_path(index.path)).version(index_name(rank))
        if found != version or index.manifest is None:
            return found is not None and found != version
        manifest = read_index(index.path, rank=rank).manifest
    except LoadError:
        return False
    return manifest is None or manifest.save_id != index.manifest.save_id


def replaced_error(directory: str | PurePath, what: str) -> LoadError:
    """What to raise of a checkpoint that another save replaced under the load."""
    return LoadError(
        f"{directory}: the checkpoint was replaced by another save while it was loaded: {what}; what was loaded is "
        "not to be used. Load again, when no save is at work in this directory"
    )


def missing_key(fqn: str, where: str, keys: Iterable[str]) -> MissingKeyError:
    """The error for a key that a checkpoint does not have; names the keys most like it."""
    import difflib  # (seldom needed, and slow to import)

    known = list(keys)
    close = difflib.get_close_matches(fqn, known[:5000], n=3, cutoff=0.6)
    hint = f"similar keys: {', '.join(close)}" if close else f"it has {len(known)} keys, none of them similar"
    return MissingKeyError(f"{fqn}: {where} has no such key; {hint}")


def check_apart(index: CheckpointIndex) -> None:
    """Raise `CorruptCheckpointError` if two items of a checkpoint have a byte in common.

    No writer stores two things in one place: then an offset or a file in the index is not what was written, and the
    bytes that are there may well be sound, and another shard's. Takes 0.4 us for each item.

    Chunks without elements do not count, since nothing is read for them: DCP knows a chunk by its offsets, so that all
    empty ones at the end of a tensor (DTensors of more ranks than rows) have the one item that was written last.
    """
    ends: dict[str, int] = {}
    for file, offset, length in _places(index):
        # As a rule they stand in the index in the order in which they lie in their files.
        if offset < ends.get(file, 0):
            break
        ends[file] = offset + length
    else:
        return
    bounds: dict[str, tuple[list[int], list[int]]] = {}
    for file, offset, length in _places(index):
        known = bounds.get(file)
        if known is None:
            known = bounds[file] = [], []
        known[0].append(offset)
        known[1].append(offset + length)
    for file, (starts, stops) in bounds.items():
        starts.sort()
        stops.sort()
        # Ranges are apart exactly if, sorted each by itself, every stop comes before the next start.
        if not all(map(operator.le, stops, itertools.islice(starts, 1, None))):
            raise _overlap(index, file)


def _places(index: CheckpointIndex) -> Iterator[tuple[str, int, int]]:
    """File, offset and length of all items from which something is read."""
    tensors = index.tensors
    if not isinstance(tensors, PackedTensors):
        return ((item.file, item.offset, item.length) for _, _, item in _read_items(index))
    places = tensors.places
    columns: Iterator[tuple[str, int, int]] = zip(
        map(places.files.__getitem__, places.file_numbers), places.offsets, places.lengths, strict=True
    )
    empty = {id(form): [0 in sizes for sizes in form.sizes] for form in tensors.forms}
    if any(map(any, empty.values())):
        of_chunks = itertools.chain.from_iterable(empty[id(form)] for form in tensors.forms)
        columns = itertools.compress(columns, map(operator.not_, of_chunks))
    of_objects = [(stored.item.file, stored.item.offset, stored.item.length) for stored in index.objects.values()]
    return itertools.chain(columns, of_objects)


def _read_items(index: CheckpointIndex) -> Iterator[tuple[str, StoredChunk | None, StoredItem]]:
    """Key, chunk (None: an object) and item of all from which something is read."""
    for fqn, entry in index.tensors.items():
        for chunk in entry.chunks:
            if 0 not in chunk.sizes:
                yield fqn, chunk, chunk.item
    for fqn, stored in index.objects.items():
        yield fqn, None, stored.item


def _overlap(index: CheckpointIndex, file: str) -> CorruptCheckpointError:
    inside = sorted(
        (item.offset, item.offset + item.length, item_name(fqn, item) if chunk is None else chunk_name(fqn, chunk))
        for fqn, chunk, item in _read_items(index)
        if item.file == file
    )
    reaching = inside[0]  # the one that reaches furthest of those before
    for following in inside[1:]:
        if following[0] < reaching[1]:
            break
        reaching = max(reaching, following, key=operator.itemgetter(1))
    return CorruptCheckpointError(
        f"{index.path}: {reaching[2]} and {following[2]} are said to be stored in the same bytes, so one of the"
        f" two is not: the index is damaged; {IF_DAMAGED}"
    )


def check_located(
    located: LocatedTensor, dtype: str, sizes: Sequence[int], payload_bytes: int, crc: int | None = None
) -> None:
    """Raise `CorruptCheckpointError` unless an item holds the tensor, and its CRC-32 if known, that the index says."""
    if located.shape != sizes or located.dtype != dtype:
        raise CorruptCheckpointError(
            f"the index says {dtype} of shape {list(sizes)}, stored is {located.dtype} of shape {list(located.shape)};"
            " index and data file do not belong together"
        )
    if located.payload_bytes != payload_bytes:
        raise CorruptCheckpointError(f"expected {payload_bytes} bytes of elements, got {located.payload_bytes}")
    if crc is not None and located.crc32 is not None and located.crc32 != crc:
        raise ChecksumError(
            f"the item states the CRC-32 {located.crc32:#010x} for its elements, .metadata {crc:#010x}: the file was"
            f" damaged after it was written, or part of it is another save's; {IF_DAMAGED}"
        )


def check_proportion(nbytes: int, item: StoredItem, where: str) -> None:
    """Raise `CorruptCheckpointError` if an item is to hold many times more elements than it has bytes.

    The item repeats one element (a stride of 0), or the index is damaged; the elements would fill the memory.
    """
    if not item.transforms and nbytes > _MAX_INFLATION * item.length:
        raise CorruptCheckpointError(
            f"{where}: {nbytes} bytes of elements cannot lie in {item.length} bytes: the index is damaged, or the item "
            f"repeats one element, as no checkpoint does; {IF_DAMAGED}"
        )
