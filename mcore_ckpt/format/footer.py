"""The integrity footer of a data file: what ties it to the `.metadata` that names it, and both to their save.

It stands behind the last item: a table of what the file holds (key, dtype, chunk and place of each tensor; key and
place of each object) and 64 bytes with the id of the save. Its length follows from the structure alone, so that it is
known when the file is laid out; its content is known when the snapshot is taken. What `.metadata` keeps of it is in
`manifest.py`. `docs/format.md` has every field.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import IF_DAMAGED, CorruptCheckpointError, NewerFormatError
from mcore_ckpt.format._columns import Columns, column_bytes, deflated, text_bytes

BLOCK_BYTES: Final = 1024 * 1024
"""Payloads are summed in blocks of this: what has to be read to check one byte of a long payload."""

SAVE_ID_BYTES: Final = 16
NO_SAVE_ID: Final = bytes(SAVE_ID_BYTES)

_FILE_VERSION: Final = 2
_FILE_MAGIC: Final = b"\x89mckFILE"
_FOOTER: Final = struct.Struct("<8sII16sQQQII")
FOOTER_BYTES: Final = _FOOTER.size

_TABLE_HEAD: Final = struct.Struct("<III")

_MIN_ITEM_BYTES: Final = 64


def shown_id(save_id: bytes) -> str:
    """A save id as people see it, and as DCP's `storage_meta` has it."""
    return save_id.hex()


def inner_blocks(payload_bytes: int) -> int:
    """How many block boundaries lie inside a payload: as many cumulative CRCs are kept of it."""
    return max(0, (payload_bytes - 1) // BLOCK_BYTES)


class RunningSum:
    """The CRC-32 of a payload that comes front to back, and `blocks`: what it was at each block boundary that something
    has come behind of.
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


def newer_error(where: str, version: int, expected: int) -> NewerFormatError:
    """The error to raise for a footer or manifest of a later version."""
    return NewerFormatError(
        f"{where}: written by a newer mcore_ckpt: its format has version {version}, expected {expected}. Nothing shows "
        "that the file is damaged; load it with a newer mcore_ckpt"
    )


# ----------------------------------------------------------------------------------------------------------- the footer


@dataclass(frozen=True, slots=True)
class TableColumns:
    """What a data file holds, in columns, in the order of the file."""

    dtypes: Sequence[str]  # names of the dtypes that occur
    keys: Sequence[str]  # of the tensors
    dtype_codes: array[int]  # for each tensor, which of `dtypes` (4 bytes each)
    ndims: array[int]  # for each tensor, its number of axes (4 bytes each)
    # For each tensor, global shape, offsets and sizes, `3 * ndims[i]` numbers in elements (8 bytes each).
    boxes: array[int]
    places: array[int]  # for each tensor, offset and length of its item (8 bytes each)
    object_keys: Sequence[str]  # of the objects; where they lie is told when they are


@dataclass(frozen=True, slots=True)
class FooterPlan:
    """The integrity footer of a data file that is laid out, without what only a save knows."""

    packed: bytes  # the table up to the objects' places, deflated
    unpacked_bytes: int  # its length before that
    object_count: int  # how many objects' places follow

    @classmethod
    def of(cls, columns: TableColumns) -> FooterPlan:
        """Lay out the footer of a file."""
        names = [text_bytes(name) for name in (*columns.dtypes, *columns.keys, *columns.object_keys)]
        parts = [
            _TABLE_HEAD.pack(len(columns.keys), len(columns.object_keys), len(columns.dtypes)),
            column_bytes(array("I", map(len, names))),
            column_bytes(columns.dtype_codes),
            column_bytes(columns.ndims),
            column_bytes(columns.boxes),
            column_bytes(columns.places),
            *names,
        ]
        return cls(*deflated(parts), len(columns.object_keys))

    @property
    def size_bytes(self) -> int:
        """Length of table and footer."""
        return len(self.packed) + 16 * self.object_count + FOOTER_BYTES

    def fill(self, save_id: bytes, file_bytes: int, object_places: Iterable[tuple[int, int]]) -> tuple[bytes, int]:
        """The footer of one save, and the CRC-32 of its table; `object_places`: offset and length, as the table lists
        them.
        """
        places = array("Q", [number for place in object_places for number in place])
        if len(save_id) != SAVE_ID_BYTES or len(places) != 2 * self.object_count:
            raise ValueError(f"a save id of {len(save_id)} bytes, {len(places) // 2} of {self.object_count} objects")
        table = self.packed + column_bytes(places)
        table_crc = crc32(table)
        footer = _FOOTER.pack(
            *(_FILE_MAGIC, _FILE_VERSION, table_crc, save_id, file_bytes, len(table), self.unpacked_bytes),
            *(self.object_count, 0),
        )
        summed = footer[:-4]
        return table + summed + struct.pack("<I", crc32(summed)), table_crc


class FileFooter(NamedTuple):
    """The end of a data file."""

    save_id: bytes  # of the save that wrote it
    file_bytes: int  # length that the file had then
    table_bytes: int  # length of the table, which ends where the footer begins
    table_crc32: int  # of the table
    unpacked_bytes: int  # of the part of the table that is deflated
    object_count: int  # objects in the table


def decode_footer(data: bytes, where: str) -> FileFooter | None:
    """The footer in the last 64 bytes of a file; None if they are none. Raises `CorruptCheckpointError` for damage."""
    if len(data) != FOOTER_BYTES or not data.startswith(_FILE_MAGIC):
        return None
    _, version, table_crc, save_id, file_bytes, table_bytes, unpacked, objects, stated = _FOOTER.unpack(data)
    if crc32(data[:-4]) != stated:
        raise CorruptCheckpointError(
            f"{where}: its integrity footer (the last {FOOTER_BYTES} bytes) does not have the CRC-32 that it "
            f"states: the file was damaged after it was written; {IF_DAMAGED}"
        )
    if version != _FILE_VERSION:
        raise newer_error(where, version, _FILE_VERSION)
    return FileFooter(save_id, file_bytes, table_bytes, table_crc, unpacked, objects)


class ManifestFile(NamedTuple):
    """What `.metadata` says of a data file."""

    size_bytes: int  # its length
    table_crc32: int  # of the table in its footer
    save_id: bytes  # that its footer carries


def check_footer(footer: FileFooter | None, size_bytes: int, expected: ManifestFile | None, where: str) -> None:
    """Compare a file's footer (None: it has none) with its size, and with what the manifest says (None: no manifest).

    Raises `CorruptCheckpointError` if they do not belong together.
    """
    if expected is not None:
        if footer is None:
            raise CorruptCheckpointError(
                f"{where}: expected a data file of save {shown_id(expected.save_id)}, got one without an integrity "
                f"footer ({size_bytes} bytes, expected {expected.size_bytes}): it was truncated, overwritten or put "
                f"there by another program; {IF_DAMAGED}"
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
            f"{size_bytes}: it was truncated or extended; {IF_DAMAGED}"
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
    """What a data file says that it holds."""

    tensors: tuple[TableTensor, ...]  # in the order of the file
    objects: tuple[TableObject, ...]  # in the order of the file


def decode_table(data: bytes, footer: FileFooter, where: str) -> FileTable:
    """The table of a file, from the bytes before its footer; raises `CorruptCheckpointError`."""
    what = f"{where}: the table of its integrity footer"
    whole = Columns(data, what)
    if len(data) != footer.table_bytes or crc32(data) != footer.table_crc32:
        raise whole.wrong(f"it does not have the CRC-32 {footer.table_crc32:#010x} that the footer states")
    places_bytes = 16 * footer.object_count
    if places_bytes > len(data):
        raise whole.wrong(f"{footer.object_count} objects are said to be in it")
    table = Columns.inflated(whole.bytes(len(data) - places_bytes), footer.unpacked_bytes, what)
    tensors, objects, dtypes = _TABLE_HEAD.unpack(table.bytes(_TABLE_HEAD.size))
    if (tensors + objects) * _MIN_ITEM_BYTES > footer.file_bytes:
        raise table.wrong(f"{tensors + objects} items cannot lie in {footer.file_bytes} bytes")
    if objects != footer.object_count:
        raise table.wrong(f"the footer counts {footer.object_count} objects, the table {objects}")
    lengths = table.column("I", dtypes + tensors + objects)
    codes, ndims = table.column("I", tensors), table.column("I", tensors)
    if any(code >= dtypes for code in codes):
        raise table.wrong("a tensor has a dtype that is not in it")
    boxes = table.column("q", 3 * sum(ndims)).tolist()
    places = table.column("q", 2 * tensors)
    names = table.texts(lengths)
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
