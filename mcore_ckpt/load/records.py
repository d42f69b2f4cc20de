"""What is stored, as loads and commands both see it: data files opened, records named and checked. Without torch.

Each file is compared with `.metadata` before the first byte of it is used, which takes one small read. Files of other
writers carry nothing to compare. With a second tier, a file is read on local storage if it lies there. The names of
data files carry the id of their save, and their lengths are in the manifest: a load never mixes two saves.

A record that is read completely is compared with the CRC-32 that its archive states. A payload that is read in parts,
in any order, is summed part by part and combined. Of a slice of a payload, the blocks that it lies in are checked by
the cumulative CRCs of the manifest: a block is sound if its CRC-32, continued from the cumulative CRC before it, is the
one behind it. So a load reads complete blocks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath

import numpy as np

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import (
    IF_DAMAGED,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    LoadError,
    MissingKeyError,
)
from mcore_ckpt.core.options import PageCache, checkpoint_path
from mcore_ckpt.format.index import MAX_INFLATION, CheckpointIndex, PackedTensors, Removed, StoredChunk, StoredItem
from mcore_ckpt.format.integrity import BLOCK_BYTES, tells_save
from mcore_ckpt.format.item import LocatedTensor, verify_records
from mcore_ckpt.format.metadata_read import checked_footer, index_name, read_index
from mcore_ckpt.load.ranges import CHEAP_GAP_BYTES, MAX_GAP_BYTES, MODES, STREAM_BYTES, ReadPolicy
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, FileVersion, RangeReader, Storage, align_up
from mcore_ckpt.storage.resolve import storage_at


def item_name(fqn: str, item: StoredItem) -> str:
    """An item as messages name it."""
    return f"{fqn} ({item.file}, bytes [{item.offset}, {item.offset + item.length}))"


def chunk_name(fqn: str, chunk: StoredChunk) -> str:
    """A tensor's item as messages name it."""
    return item_name(f"{fqn} at {list(chunk.offsets)}", chunk.item)


def named(error: LoadError, where: str, remedy: str = "") -> LoadError:
    """`error`, which names `where` it happened, and the `remedy`, if there is one."""
    text = str(error) if where in str(error) else f"{where}: {error}"
    text += f"; {remedy}" if remedy and remedy not in text else ""
    return error if text == str(error) else type(error)(text)


@contextmanager
def naming(where: Callable[[], str], remedy: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Errors of the block are `named`; a remedy is that of lost and damaged files."""
    try:
        yield
    except LoadError as error:
        is_lost = isinstance(error, CheckpointNotFoundError | CorruptCheckpointError)
        raise named(error, where(), remedy() if is_lost else "") from error


# ---------------------------------------------------------------------------------------------------------- data files


class NearestFiles:
    """Opens data files in `near`, or else in `far`; files that name no save in `home`, where the index is."""

    def __init__(self, near: Storage, far: Storage, home: Storage, index: Callable[[], CheckpointIndex]) -> None:
        self._near = near
        self._far = far
        self._home = home
        self._index = index
        self.request_bytes = max(near.request_bytes, far.request_bytes)
        self.reads_at_once = max(near.reads_at_once, far.reads_at_once)
        self.open_ahead = max(near.open_ahead, far.open_ahead)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        """As `Storage.open_reader`."""
        manifest = self._index().manifest
        expected = None if manifest is None else manifest.files.get(name)
        if not tells_save(name) or expected is None:
            return self._home.open_reader(name, direct=direct)
        with suppress(LoadError):
            reader = self._near.open_reader(name, direct=direct)
            if reader.size_bytes == expected.size_bytes:
                return reader
            reader.close()
        return self._far.open_reader(name, direct=direct)

    def __str__(self) -> str:
        return f"{self._near} (or {self._far}, for files that are not there)"

    def in_use(self, name: str) -> AbstractContextManager[None]:
        """As `Storage.in_use`, of the directory that is read besides that of the index, if there is one to read."""
        if self._home is self._far:
            return self._near.in_use(name)
        manifest = self._index().manifest
        files = {} if manifest is None else {name: file for name, file in manifest.files.items() if tells_save(name)}
        there = self._near.sizes() if files else {}
        all_are_near = all(there.get(name) == file.size_bytes for name, file in files.items())
        return nullcontext() if all_are_near else self._far.in_use(name)


def padded_range(start: int, stop: int, file_bytes: int) -> tuple[int, int]:
    """The aligned range around `[start, stop)`, which O_DIRECT can read straight into a buffer; not past the file."""
    return start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, max(stop, min(align_up(stop), file_bytes))


# Threads work in neighbouring files, so few are in use at once; a reader of 1,000 ranks' files must not need 1,000 fds.
MAX_IDLE_FILES = 16

_Key = tuple[str, DirectIo, int]


@dataclass(slots=True)
class ReadStats:
    """What reads have cost so far; add to it under `lock`."""

    reads: int = 0  # read calls
    bytes_read: int = 0  # bytes that they brought, headers, padding and gaps included
    bytes_needed: int = 0  # bytes of the elements and objects that were asked for
    records_checked: int = 0  # records whose CRC-32 was compared
    fallbacks: int = 0  # items that had to be decoded completely (`ItemDecoder`)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Count; safe from any thread."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class OpenFiles:
    """Readers of a checkpoint's files, opened on first use. Each footer is compared with `index`, unless the file is
    among `checked`; without an index, what is read is checked elsewhere.
    """

    def __init__(
        self,
        storage: Storage | NearestFiles,
        page_cache: PageCache,
        index: Callable[[], CheckpointIndex] | None,
        checked: set[str] | None = None,
    ) -> None:
        modes = MODES[page_cache]
        # Where a request costs more, longer gaps are read. Where an open takes one, no thread has a file for itself.
        self.policy = ReadPolicy(
            max_gap_bytes=max(MAX_GAP_BYTES, storage.request_bytes),
            cheap_gap_bytes=max(CHEAP_GAP_BYTES, storage.request_bytes),
            modes=modes,
            stream_bytes=[0 if storage.open_ahead or mode == "auto" else STREAM_BYTES for mode in modes],
        )
        self._index, self._checked = index, set() if checked is None else checked
        self._storage = storage
        self.open_ahead, self.reads_at_once = storage.open_ahead, storage.reads_at_once
        self._lock = threading.Lock()
        self._closed = False
        # By name, how it is read, and the thread that has it for itself, or 0. Each is opened by one, others meanwhile.
        self._opening: dict[_Key, threading.Lock] = {}
        self._in_use: dict[_Key, tuple[RangeReader, int]] = {}
        self._idle: OrderedDict[_Key, RangeReader] = OrderedDict()
        self._versions: dict[str, tuple[object, ...] | None] = {}  # of each file when it was opened first

    @contextmanager
    def reader(self, name: str, *, keeps: bool = False) -> Iterator[RangeReader]:
        """The reader of a file, for several threads, but where each reads a stream. `keeps`: what is read stays in the
        page cache, for the other ranks of this host, if the options leave that open.
        """
        policy = self.policy
        key = name, policy.modes[keeps], threading.get_ident() if policy.stream_bytes[keeps] else 0
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:
            with self._lock:
                reader, users = self._in_use.get(key, (None, 0))
                if reader is None:
                    reader = self._idle.pop(key, None)
                if reader is not None:
                    self._in_use[key] = (reader, users + 1)
            if reader is None:
                reader = self._opened(*key[:2])
                with self._lock:
                    self._in_use[key] = (reader, 1)
        try:
            yield reader
        finally:
            surplus = None
            with self._lock:
                _, users = self._in_use.pop(key)
                if users > 1:
                    self._in_use[key] = (reader, users - 1)
                elif self._closed:
                    surplus = reader
                else:
                    self._idle[key] = reader
                    if len(self._idle) > MAX_IDLE_FILES:
                        _, surplus = self._idle.popitem(last=False)
            if surplus is not None:
                surplus.close()

    def _opened(self, name: str, direct: DirectIo) -> RangeReader:
        reader = self._storage.open_reader(name, direct=direct)
        try:
            version = reader.version and reader.version[:2]  # (a file may be touched)
            if self._versions.setdefault(reader.name, version) != version:
                raise LoadError(f"{reader.name}: another file took its name meanwhile; open the checkpoint again")
            if self._index is not None and reader.name not in self._checked:
                checked_footer(self._index(), name, reader)
                self._checked.add(reader.name)
        except BaseException:
            reader.close()
            raise
        return reader

    def close(self) -> None:
        """Close what is idle, and what is in use when its last user releases it."""
        with self._lock:
            self._closed = True
            readers = list(self._idle.values())
            self._idle.clear()
        for reader in readers:
            reader.close()


# ----------------------------------------------------------------------------------------------------------- the index


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


def missing_key(fqn: str, where: str, keys: Iterable[str], removed: Removed | None = None) -> MissingKeyError:
    """The error for a key that a checkpoint does not have; names the keys most like it, and what was removed."""
    import difflib  # (seldom needed, and slow to import)

    known = list(keys)
    close = difflib.get_close_matches(fqn, known[:5000], n=3, cutoff=0.6)
    hint = f"similar keys: {', '.join(close)}" if close else f"none of its {counted(len(known), 'key')} is similar"
    hint = hint if removed is None else f"{removed.said}; {hint}"
    return MissingKeyError(f"{fqn}: {where} has no such key; {hint}")


def check_apart(index: CheckpointIndex) -> None:
    """Raise `CorruptCheckpointError` if two items of a checkpoint have a byte in common: then the index is not what was
    written, and bytes may be sound, and another shard's. Chunks without elements, of which DCP stores one, do not
    count.
    """
    tensors = index.tensors
    if isinstance(tensors, PackedTensors) and all(all(map(all, form.sizes)) for form in tensors.forms):  # by columns
        places, objects = tensors.places, [stored.item for stored in index.objects.values()]
        numbers = {file: number for number, file in enumerate([*places.files, *(item.file for item in objects)])}
        own = np.array([numbers[file] for file in places.files], dtype=np.int64)
        columns = (
            (own[np.frombuffer(places.file_numbers, dtype=np.uint32)], [numbers[item.file] for item in objects]),
            (np.frombuffer(places.offsets, dtype=np.int64), [item.offset for item in objects]),
            (np.frombuffer(places.lengths, dtype=np.int64), [item.length for item in objects]),
        )
        files, starts, lengths = (np.append(packed, np.array(few, dtype=np.int64)) for packed, few in columns)
        order = np.lexsort((starts, files))
        files, starts, stops = files[order], starts[order], (starts + lengths)[order]
        if np.all(starts <= stops) and np.all((files[1:] != files[:-1]) | (stops[:-1] <= starts[1:])):
            return
    read = (stored for stored in index.items() if stored[1] is None or 0 not in stored[1].sizes)
    in_order = sorted(read, key=lambda stored: stored[2][:2])
    for pair in pairwise(in_order):
        before, item = pair[0][2], pair[1][2]
        if before.file == item.file and item.offset < before.offset + before.length:
            names = (item_name(fqn, own) if chunk is None else chunk_name(fqn, chunk) for fqn, chunk, own in pair)
            raise CorruptCheckpointError(
                f"{index.path}: {' and '.join(names)} are said to be stored in the same bytes, so one of the two is "
                f"not: the index is damaged; {IF_DAMAGED}"
            )


# ------------------------------------------------------------------------------------------------------------- records

# More than any block of zstd can grow.
_MAX_ZSTD_INFLATION = 2**15


def check_kind(dtype: str, shape: Sequence[int], expected: tuple[str, Sequence[int]]) -> None:
    """Raise `CorruptCheckpointError` unless a stored tensor has the dtype and shape that the index says."""
    if (dtype, tuple(shape)) != (expected[0], tuple(expected[1])):
        raise CorruptCheckpointError(
            f"the index says {expected[0]} of shape {list(expected[1])}, stored is {dtype} of shape {list(shape)};"
            " index and data file do not belong together"
        )


def check_located(
    located: LocatedTensor, dtype: str, sizes: Sequence[int], payload_bytes: int, crc: int | None = None
) -> None:
    """Raise `CorruptCheckpointError` unless an item holds the tensor, and its CRC-32 if known, that the index says."""
    check_kind(located.dtype, located.shape, (dtype, sizes))
    if located.payload_bytes != payload_bytes:
        raise CorruptCheckpointError(f"expected {payload_bytes} bytes of elements, got {located.payload_bytes}")
    if crc is not None and located.crc32 is not None and located.crc32 != crc:
        raise ChecksumError(
            f"the item states the CRC-32 {located.crc32:#010x} for its elements, .metadata {crc:#010x}: the file was"
            f" damaged after it was written, or part of it is another save's; {IF_DAMAGED}"
        )


def check_proportion(nbytes: int, item: StoredItem, where: str) -> None:
    """Raise `CorruptCheckpointError` if an item's elements would fill memory: many times more than it has bytes."""
    if nbytes > (_MAX_ZSTD_INFLATION if item.is_compressed else MAX_INFLATION) * item.length:
        raise CorruptCheckpointError(
            f"{where}: {nbytes} bytes of elements cannot lie in {item.length} bytes: the index is damaged, or the item "
            f"repeats one element, as no checkpoint does; {IF_DAMAGED}"
        )


def contiguous_around(sizes: Sequence[int], box: Box) -> Box:
    """The smallest box around `box` whose elements follow one another without gaps in an array of `sizes`."""
    offsets, inner = list(box.offsets), list(box.sizes)
    first = next((axis for axis, size in enumerate(inner) if size > 1), len(inner))
    for axis in range(first + 1, len(inner)):
        offsets[axis], inner[axis] = 0, sizes[axis]
    return Box(tuple(offsets), tuple(inner))


def whole_blocks(start: int, stop: int, payload_bytes: int) -> tuple[int, int]:
    """Bytes `[start, stop)` of a payload, widened to the blocks that they lie in."""
    return start // BLOCK_BYTES * BLOCK_BYTES, min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, payload_bytes)


class PayloadSums:
    """The sums of a payload that is read in parts, by any number of threads, compared block by block where `running`
    has its cumulative CRCs. `damaged` makes the error for bytes [start, stop), of what they have and what they should.
    """

    def __init__(
        self, payload_bytes: int, crc: int, running: Sequence[int], damaged: Callable[[int, int, int, int], Exception]
    ) -> None:
        self._payload_bytes = payload_bytes
        self._block_bytes = BLOCK_BYTES if running else max(1, payload_bytes)
        self._running = running
        self._crc = crc
        self._damaged = damaged
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()

    def begin(self, position: int) -> int:
        """The sum that bytes from `position` on continue: the running one at the beginning of a block, 0 inside."""
        block, inside = divmod(position, self._block_bytes)
        return self._running[block - 1] if not inside and 0 < block <= len(self._running) else 0

    def end_of_block(self, position: int) -> int:
        """Where the block ends that holds the byte at `position`."""
        return min((position // self._block_bytes + 1) * self._block_bytes, self._payload_bytes)

    def note(self, start: int, stop: int, value: int) -> bool:
        """Note the sum of bytes of one block, and compare a complete block; whether that was all of the payload."""
        block = start // self._block_bytes
        first, last = block * self._block_bytes, self.end_of_block(start)
        if (start, stop) != (first, last):
            with self._lock:
                parts = self._parts.setdefault(block, [])
                parts.append((start, stop, value))
                if sum(b - a for a, b, _ in parts) < last - first:
                    return False
                del self._parts[block]
            parts.sort()
            value = parts[0][2]
            for a, b, part in parts[1:]:
                value = crc32_combine(value, part, b - a)
        expected = self._running[block] if block < len(self._running) else self._crc
        if value != expected:
            raise self._damaged(first, last, value, expected)
        return not self._running


class PartSum:
    """Sums a part of a payload, whose bytes come in order; of no `sums`, nothing."""

    __slots__ = ("_begun", "_position", "_records", "_sums", "_value")

    def __init__(self, sums: PayloadSums | None, start: int) -> None:
        self._sums = sums
        self._begun = self._position = start
        self._value = 0 if sums is None else sums.begin(start)
        self._records = 0

    def feed(self, view: memoryview) -> None:
        """The next bytes. Raises as `PayloadSums.note`."""
        sums, at = self._sums, 0
        if sums is None:
            return
        while at < len(view):
            end = sums.end_of_block(self._position)
            taken = min(len(view) - at, end - self._position)
            self._value = crc32(view[at : at + taken], self._value)
            self._position += taken
            at += taken
            if self._position == end:
                self._records += sums.note(self._begun, end, self._value)
                self._begun, self._value = end, sums.begin(end)

    def finish(self) -> int:
        """There are no more bytes: how many records were compared completely. Raises as `PayloadSums.note`."""
        if self._sums is not None and self._position > self._begun:
            self._records += self._sums.note(self._begun, self._position, self._value)
        return self._records


def checksum_error(where: str, what: str, got: int, expected: int) -> ChecksumError:
    """The error for bytes that do not have the CRC-32 which was written with them; `what` is those bytes and a verb."""
    return ChecksumError(
        f"{where}: {what} CRC-32 {got:#010x}, expected {expected:#010x}: the file was damaged after it was written; "
        f"{IF_DAMAGED}"
    )


def check_records(
    read: Callable[[int, int], bytes], sum_up: Callable[[int, int], int], item_bytes: int, where: str
) -> int:
    """Compare the CRC-32 of each record of an item; how many have one. `sum_up`: the CRC-32 of some of its bytes."""
    checked = 0
    for name, offset, nbytes, expected in verify_records(read, item_bytes, where):
        if expected is None:
            continue
        got = sum_up(offset, nbytes)
        if got != expected:
            what = f"record {name} (bytes [{offset}, {offset + nbytes}) of the item) has"
            raise checksum_error(where, what, got, expected)
        checked += 1
    return checked


def check_content(content: bytes, where: str, crc: int | None = None) -> int:
    """As `check_records`, of an item that is in memory; `crc`: of all its bytes, if that is known."""
    if crc is not None and (got := crc32(content)) != crc:
        raise checksum_error(where, "its bytes have", got, crc)
    view = memoryview(content)
    return check_records(
        lambda at, length: content[at : at + length], lambda at, n: crc32(view[at : at + n]), len(content), where
    )
