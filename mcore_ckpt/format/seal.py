"""Seals: what ties a data file to the `.metadata` that names it, and both to their save.

A **file seal** stands behind the last item of a data file: a table of what the file holds (key, dtype, box and place of
each tensor; key and place of each object) and a footer of fixed size with the id of the save. Its
length follows from the structure alone, so that it is known when the file is laid out; its content is known when the
snapshot is taken.

A **metadata seal** stands behind the pickle in `.metadata`, where no unpickler looks: the id of the save, size and seal
of each data file, the CRC-32 of each item, and, of payloads longer than a block, the running CRC-32 at the end of each
block, so that a part of a payload can be checked without the rest. It ends with the CRC-32 of all of `.metadata`. The
pickle announces it, in bytes that every unpickler drops, so that a seal which was cut off is missed.

`docs/format.md` has every field. Columns of numbers, no object for an item: there may be a million of them.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from mcore_ckpt.core.errors import CorruptCheckpointError, NewerFormatError
from mcore_ckpt.format.crc import crc32

__all__ = [
    "BLOCK_BYTES",
    "FOOTER_BYTES",
    "NO_SAVE_ID",
    "SAVE_ID_BYTES",
    "FileFooter",
    "FileSealPlan",
    "FileTable",
    "MetadataSeal",
    "RunningSum",
    "SealedFile",
    "TableColumns",
    "TableObject",
    "TableTensor",
    "check_footer",
    "decode_footer",
    "decode_table",
    "inner_blocks",
    "seal_metadata",
    "shown_id",
    "split_metadata",
]

BLOCK_BYTES: Final = 1024 * 1024
"""Payloads are summed in blocks of this: what has to be read to check one byte of a long payload."""

SAVE_ID_BYTES: Final = 16
NO_SAVE_ID: Final = bytes(SAVE_ID_BYTES)

_VERSION: Final = 1
_FILE_VERSION: Final = 2
_NAMED_FILE_VERSION: Final = 1  # its table begins with the file's own name
_FILE_MAGIC: Final = b"\x89mckFILE"
_METADATA_MAGIC: Final = b"\x89mckSUMS"
_METADATA_END: Final = b"\x89mckEND\n"
# SHORT_BINBYTES and POP, behind PROTO: gone when somebody unpickles the file and pickles it anew, as the seal is then.
_ANNOUNCED: Final = b"C" + bytes((len(_METADATA_MAGIC),)) + _METADATA_MAGIC + b"0"
_PROTO_BYTES: Final = 2

_FOOTER: Final = struct.Struct("<8sII16sQQQII")
FOOTER_BYTES: Final = _FOOTER.size

_TABLE_HEAD: Final = struct.Struct("<III")
_HEAD: Final = struct.Struct("<8sII16sQQQQ")
_TRAILER: Final = struct.Struct("<QI8s")
_TRAILER_UNSUMMED: Final = 12  # CRC-32 and magic

# What a table may be when it is unpacked: deflate could make it a thousand times its size. Rows that differ in nothing
# but their place make it forty times as large.
_MAX_TABLE_BYTES: Final = 1024 * 1024
_MAX_TABLE_INFLATION: Final = 100
_MIN_ITEM_BYTES: Final = 64


def shown_id(save_id: bytes) -> str:
    """A save id as people see it, and as DCP's `storage_meta` has it."""
    return save_id.hex()


def inner_blocks(payload_bytes: int) -> int:
    """How many block boundaries lie inside a payload: as many running sums are kept of it."""
    return max(0, (payload_bytes - 1) // BLOCK_BYTES)


class RunningSum:
    """The CRC-32 of a payload that comes front to back, and what it is at each block boundary.

    Attributes:
        crc32: of what has come so far.
        blocks: what it was at each boundary that something has come behind of.
    """

    __slots__ = ("_nbytes", "blocks", "crc32")

    def __init__(self) -> None:
        self.crc32 = 0
        self.blocks: list[int] = []
        self._nbytes = 0

    def feed(self, view: memoryview) -> None:
        """The next bytes."""
        at = 0
        while at < len(view):
            inside = self._nbytes % BLOCK_BYTES
            if self._nbytes and not inside:
                self.blocks.append(self.crc32)
            taken = min(len(view) - at, BLOCK_BYTES - inside)
            self.crc32 = crc32(view[at : at + taken], self.crc32)
            self._nbytes += taken
            at += taken


def _newer(where: str, version: int, expected: int) -> NewerFormatError:
    return NewerFormatError(
        f"{where}: written by a newer mcore_ckpt: its seal has version {version}, expected {expected}. Nothing shows "
        "that the file is damaged; load it with a newer mcore_ckpt"
    )


def _column(code: str, data: bytes | memoryview = b"") -> array[int]:
    """Little-endian numbers as an array."""
    column = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _raw(column: array[int]) -> bytes:
    """An array as little-endian numbers."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


# ----------------------------------------------------------------------------------------------------------- file seal


@dataclass(frozen=True, slots=True)
class TableColumns:
    """What a data file holds, in columns, in the order of the file.

    Attributes:
        dtypes: names of the dtypes that occur.
        keys: of the tensors.
        dtype_codes: for each tensor, which of `dtypes` (4 bytes each).
        ndims: for each tensor, its number of axes (4 bytes each).
        boxes: for each tensor, global shape, offsets and sizes, `3 * ndims[i]` numbers in elements (8 bytes each).
        places: for each tensor, offset and length of its item (8 bytes each).
        object_keys: of the objects; where they lie is told when they are.
    """

    dtypes: Sequence[str]
    keys: Sequence[str]
    dtype_codes: array[int]
    ndims: array[int]
    boxes: array[int]
    places: array[int]
    object_keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class FileSealPlan:
    """The seal of a data file that is laid out, without what only a save knows.

    Attributes:
        packed: the table up to the objects' places, deflated.
        unpacked_bytes: its length before that.
        object_count: how many objects' places follow.
    """

    packed: bytes
    unpacked_bytes: int
    object_count: int

    @classmethod
    def of(cls, columns: TableColumns) -> FileSealPlan:
        """Lay out the seal of a file."""
        names = [_text(name) for name in (*columns.dtypes, *columns.keys, *columns.object_keys)]
        parts = [
            _TABLE_HEAD.pack(len(columns.keys), len(columns.object_keys), len(columns.dtypes)),
            _raw(array("I", map(len, names))),
            _raw(columns.dtype_codes),
            _raw(columns.ndims),
            _raw(columns.boxes),
            _raw(columns.places),
            *names,
        ]
        table = b"".join(parts)
        return cls(zlib.compress(table, 1), len(table), len(columns.object_keys))

    @property
    def size_bytes(self) -> int:
        """Length of table and footer."""
        return len(self.packed) + 16 * self.object_count + FOOTER_BYTES

    def fill(self, save_id: bytes, file_bytes: int, object_places: Iterable[tuple[int, int]]) -> tuple[bytes, int]:
        """The seal of one save.

        Args:
            save_id: 16 bytes.
            file_bytes: length of the whole file, seal included.
            object_places: offset and length of each object, in the order of the table's keys.

        Returns:
            The bytes that end the file, and the CRC-32 of the table.
        """
        places = array("Q", [number for place in object_places for number in place])
        if len(save_id) != SAVE_ID_BYTES or len(places) != 2 * self.object_count:
            raise ValueError(f"a save id of {len(save_id)} bytes, {len(places) // 2} of {self.object_count} objects")
        table = self.packed + _raw(places)
        table_crc = crc32(table)
        footer = _FOOTER.pack(
            *(_FILE_MAGIC, _FILE_VERSION, table_crc, save_id, file_bytes, len(table), self.unpacked_bytes),
            *(self.object_count, 0),
        )
        summed = footer[:-4]
        return table + summed + struct.pack("<I", crc32(summed)), table_crc


class FileFooter(NamedTuple):
    """The end of a data file.

    Attributes:
        save_id: of the save that wrote it.
        file_bytes: length that the file had then.
        table_bytes: length of the table, which ends where the footer begins.
        table_crc32: of the table.
        unpacked_bytes: of the part of the table that is deflated.
        object_count: objects in the table.
        version: of the table.
    """

    save_id: bytes
    file_bytes: int
    table_bytes: int
    table_crc32: int
    unpacked_bytes: int
    object_count: int
    version: int = _FILE_VERSION


def decode_footer(data: bytes, where: str) -> FileFooter | None:
    """The footer in the last 64 bytes of a file; None if they are none (another writer's file).

    Raises:
        CorruptCheckpointError: it is one, and damaged.
    """
    if len(data) != FOOTER_BYTES or not data.startswith(_FILE_MAGIC):
        return None
    _, version, table_crc, save_id, file_bytes, table_bytes, unpacked, objects, stated = _FOOTER.unpack(data)
    if crc32(data[:-4]) != stated:
        raise CorruptCheckpointError(
            f"{where}: its seal (the last {FOOTER_BYTES} bytes) does not have the CRC-32 that it states; the file was "
            "damaged after it was written, load another copy or an earlier checkpoint"
        )
    if version not in (_NAMED_FILE_VERSION, _FILE_VERSION):
        raise _newer(where, version, _FILE_VERSION)
    return FileFooter(save_id, file_bytes, table_bytes, table_crc, unpacked, objects, version)


class SealedFile(NamedTuple):
    """What `.metadata` says of a data file.

    Attributes:
        size_bytes: its length.
        table_crc32: of its seal's table.
        save_id: that its seal carries.
    """

    size_bytes: int
    table_crc32: int
    save_id: bytes


def check_footer(footer: FileFooter | None, size_bytes: int, expected: SealedFile | None, where: str) -> None:
    """Compare what a data file says of itself with its size, and with what `.metadata` says of it.

    Args:
        footer: of the file; None if it has none.
        size_bytes: that the file has.
        expected: from `.metadata`; None if that is not sealed.
        where: the file, for messages.

    Raises:
        CorruptCheckpointError: they do not belong together.
    """
    if expected is not None:
        if footer is None:
            raise CorruptCheckpointError(
                f"{where}: expected a data file of save {shown_id(expected.save_id)}, got one without a seal "
                f"({size_bytes} bytes, expected {expected.size_bytes}): it was truncated, overwritten or put there by "
                "another program; load another copy or an earlier checkpoint"
            )
        if footer.save_id != expected.save_id:
            raise CorruptCheckpointError(
                f"{where}: expected a data file of save {shown_id(expected.save_id)}, got one of save "
                f"{shown_id(footer.save_id)}: data files and .metadata of two saves were mixed; put the files of one "
                "save together again, or load another checkpoint"
            )
        if footer.table_crc32 != expected.table_crc32:
            raise CorruptCheckpointError(
                f"{where}: is a data file of save {shown_id(footer.save_id)}, but another one than .metadata says "
                f"(CRC-32 of its table {footer.table_crc32:#010x}, expected {expected.table_crc32:#010x}): files of "
                "two ranks were swapped or renamed; give each its own name again, or load another checkpoint"
            )
    planned_bytes = footer.file_bytes if footer is not None else size_bytes
    if size_bytes != planned_bytes or (expected is not None and expected.size_bytes != size_bytes):
        raise CorruptCheckpointError(
            f"{where}: expected {planned_bytes if expected is None else expected.size_bytes} bytes, the file has "
            f"{size_bytes}: it was truncated or extended; load another copy or an earlier checkpoint"
        )


class TableTensor(NamedTuple):
    """A tensor item as a file's table lists it: box of a global tensor, in elements, and place, in bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int
    length: int


class TableObject(NamedTuple):
    """An object item as a file's table lists it; place in bytes."""

    key: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FileTable:
    """What a data file says that it holds.

    Attributes:
        tensors, objects: in the order of the file.
    """

    tensors: tuple[TableTensor, ...]
    objects: tuple[TableObject, ...]


class _Table:
    """Reads a table's columns front to back."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._where = where

    def wrong(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._where}: the table in its seal is damaged: {what}; load another copy or an earlier checkpoint"
        )

    def bytes(self, nbytes: int) -> memoryview:
        if nbytes > len(self._data) - self._at:
            raise self.wrong(f"{nbytes} bytes are to follow, {len(self._data) - self._at} do")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def column(self, code: str, count: int) -> list[int]:
        return _column(code, self.bytes(count * array(code).itemsize)).tolist()

    def text(self, nbytes: int) -> str:
        try:
            return str(self.bytes(nbytes), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.wrong(f"a name is not UTF-8 ({error})") from error

    def finish(self) -> None:
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes follow its end")


def decode_table(data: bytes, footer: FileFooter, where: str) -> FileTable:
    """The table of a file.

    Args:
        data: the `footer.table_bytes` bytes before the footer.
        footer: of the same file.
        where: the file, for messages.

    Raises:
        CorruptCheckpointError: it does not have its CRC-32, or is no table.
    """
    whole = _Table(data, where)
    if len(data) != footer.table_bytes or crc32(data) != footer.table_crc32:
        raise whole.wrong(f"it does not have the CRC-32 {footer.table_crc32:#010x} that the footer states")
    places_bytes = 16 * footer.object_count
    if places_bytes > len(data) or footer.unpacked_bytes > _MAX_TABLE_BYTES + _MAX_TABLE_INFLATION * len(data):
        raise whole.wrong(f"{footer.object_count} objects and {footer.unpacked_bytes} bytes are said to be in it")
    table = _Table(_inflated(whole, whole.bytes(len(data) - places_bytes), footer.unpacked_bytes), where)
    tensors, objects, dtypes = _TABLE_HEAD.unpack(table.bytes(_TABLE_HEAD.size))
    if (tensors + objects) * _MIN_ITEM_BYTES > footer.file_bytes:
        raise table.wrong(f"{tensors + objects} items cannot lie in {footer.file_bytes} bytes")
    if objects != footer.object_count:
        raise table.wrong(f"the footer counts {footer.object_count} objects, the table {objects}")
    own_names = int(footer.version == _NAMED_FILE_VERSION)
    lengths = table.column("I", own_names + dtypes + tensors + objects)
    codes, ndims = table.column("I", tensors), table.column("I", tensors)
    if any(code >= dtypes for code in codes):
        raise table.wrong("a tensor has a dtype that is not in it")
    boxes = table.column("q", 3 * sum(ndims))
    places = table.column("q", 2 * tensors)
    names = [table.text(nbytes) for nbytes in lengths][own_names:]
    table.finish()
    object_places = whole.column("Q", 2 * objects)
    whole.finish()
    dtype_names, keys, object_keys = names[:dtypes], names[dtypes:], names[dtypes + tensors :]
    starts = accumulate((3 * ndim for ndim in ndims), initial=0)
    return FileTable(
        tuple(
            TableTensor(
                keys[n],
                dtype_names[codes[n]],
                tuple(boxes[at : at + ndim]),
                tuple(boxes[at + ndim : at + 2 * ndim]),
                tuple(boxes[at + 2 * ndim : at + 3 * ndim]),
                places[2 * n],
                places[2 * n + 1],
            )
            for n, (ndim, at) in enumerate(zip(ndims, starts, strict=False))
        ),
        tuple(TableObject(object_keys[n], object_places[2 * n], object_places[2 * n + 1]) for n in range(objects)),
    )


def _inflated(table: _Table, packed: memoryview, unpacked_bytes: int) -> bytes:
    """The deflated part of a table; never more than it is said to be."""
    inflate = zlib.decompressobj()
    try:
        unpacked = inflate.decompress(packed, unpacked_bytes + 1)
    except zlib.error as error:
        raise table.wrong(f"it cannot be inflated ({error})") from error
    if len(unpacked) != unpacked_bytes or not inflate.eof or inflate.unused_data:
        raise table.wrong(f"it is not {unpacked_bytes} bytes long when inflated")
    return unpacked


# ------------------------------------------------------------------------------------------------------- metadata seal


@dataclass(frozen=True, slots=True)
class MetadataSeal:
    """What `.metadata` says of its save, its files and their bytes.

    Items are numbered as `storage_data` lists them, from 0.

    Attributes:
        save_id: 16 bytes.
        files: each data file, by name; and the file of the common state, if the save has one (of that, the CRC-32 is of
            all its bytes).
        crcs: CRC-32 of each item's payload; of the whole item for objects and for what is stored through a transform.
        block_items: numbers of the items of which running sums are kept, ascending.
        block_counts: how many, for each of those.
        blocks: the running sums: CRC-32 of the payload's first 1, 2, 3, ... MiB, up to the last boundary inside it.
    """

    save_id: bytes
    files: Mapping[str, SealedFile]
    crcs: array[int]
    block_items: array[int] = field(default_factory=lambda: array("Q"))
    block_counts: array[int] = field(default_factory=lambda: array("I"))
    blocks: array[int] = field(default_factory=lambda: array("I"))

    def running(self) -> Iterator[tuple[int, array[int]]]:
        """Number of each item that has running sums, and those."""
        at = 0
        for number, count in zip(self.block_items, self.block_counts, strict=True):
            yield number, self.blocks[at : at + count]
            at += count


def seal_metadata(content: bytes, seal: MetadataSeal) -> bytes:
    """`content`, a pickle, which announces its seal, followed by that."""
    if content[:1] == b"\x80":
        content = b"".join((content[:_PROTO_BYTES], _ANNOUNCED, memoryview(content)[_PROTO_BYTES:]))
    names = [_text(name) for name in seal.files]
    files = seal.files.values()
    body = b"".join(
        (
            _HEAD.pack(
                *(_METADATA_MAGIC, _VERSION, len(names), seal.save_id),
                *(len(seal.crcs), len(seal.block_items), len(seal.blocks), sum(map(len, names))),
            ),
            _raw(array("Q", [file.size_bytes for file in files])),
            _raw(array("I", [file.table_crc32 for file in files])),
            b"".join(file.save_id for file in files),
            _raw(array("I", map(len, names))),
            *names,
            _raw(seal.crcs),
            _raw(seal.block_items),
            _raw(seal.block_counts),
            _raw(seal.blocks),
        )
    )
    body += struct.pack("<Q", len(body) + _TRAILER.size)
    return b"".join((content, body, struct.pack("<I8s", crc32(body, crc32(content)), _METADATA_END)))


def split_metadata(data: bytes, where: str) -> tuple[bytes, MetadataSeal | None]:
    """The pickle in a `.metadata`, and its seal, whose CRC-32 of the whole has been compared; None if there is none.

    Raises:
        CorruptCheckpointError: there is one, and it or anything before it is damaged.
    """
    if not data.endswith(_METADATA_END):
        if _METADATA_MAGIC in data:
            raise _damaged(where, "its seal is missing, or has no end; the file was truncated or damaged")
        return data, None
    if len(data) < _HEAD.size + _TRAILER.size:
        raise _damaged(where, f"{len(data)} bytes cannot hold a seal")
    length, stated, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    got = crc32(memoryview(data)[: len(data) - _TRAILER_UNSUMMED])
    if got != stated:
        raise _damaged(where, f"it has CRC-32 {got:#010x}, expected {stated:#010x}")
    if not _HEAD.size + _TRAILER.size <= length <= len(data):
        raise _damaged(where, f"its seal is said to have {length} bytes")
    start = len(data) - length
    seal = _decode_seal(data[start : len(data) - _TRAILER.size], where)
    if not data.startswith(_ANNOUNCED, _PROTO_BYTES):
        return data[:start], seal
    return b"".join((data[:_PROTO_BYTES], memoryview(data)[_PROTO_BYTES + len(_ANNOUNCED) : start])), seal


def _decode_seal(data: bytes, where: str) -> MetadataSeal:
    magic, version, file_count, save_id, items, block_items, blocks, name_bytes = _HEAD.unpack_from(data)
    if magic != _METADATA_MAGIC:
        raise _damaged(where, "its seal does not begin where its end says")
    if version != _VERSION:
        raise _newer(where, version, _VERSION)
    if _HEAD.size + 32 * file_count + name_bytes + 4 * items + 12 * block_items + 4 * blocks != len(data):
        raise _damaged(where, "its seal has not the length that its columns take")
    at = _HEAD.size

    def column(code: str, count: int) -> array[int]:
        nonlocal at
        taken = _column(code, data[at : at + count * array(code).itemsize])
        at += count * taken.itemsize
        return taken

    sizes, table_crcs = column("Q", file_count), column("I", file_count)
    ids = data[at : at + SAVE_ID_BYTES * file_count]
    at += len(ids)
    name_lengths = column("I", file_count)
    ends = list(accumulate(name_lengths, initial=at))
    if ends[-1] - at != name_bytes:
        raise _damaged(where, "the names of its files have not the length that they should")
    try:
        names = [str(data[a:b], "utf-8", "surrogatepass") for a, b in pairwise(ends)]
    except UnicodeDecodeError as error:
        raise _damaged(where, f"a name of a file is not UTF-8 ({error})") from error
    at += name_bytes
    files = {
        name: SealedFile(size, crc, ids[SAVE_ID_BYTES * n : SAVE_ID_BYTES * (n + 1)])
        for n, (name, size, crc) in enumerate(zip(names, sizes, table_crcs, strict=True))
    }
    seal = MetadataSeal(
        save_id, files, column("I", items), column("Q", block_items), column("I", block_items), column("I", blocks)
    )
    if len(files) != file_count or sum(seal.block_counts) != blocks:
        raise _damaged(where, "its columns contradict each other")
    if any(number >= items for number in seal.block_items):
        raise _damaged(where, "it holds sums of an item that is not there")
    return seal


def _damaged(where: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where}: the file is damaged: {what}. Restore it from another copy, or load an earlier checkpoint."
    )
