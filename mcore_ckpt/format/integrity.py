"""What ties the files of a checkpoint together: their names, the footer of each data file, and the manifest.

A data file is called `[prefix]__{rank}_{number}.distcp`. Behind the number (counted from 1 here) stand the first eight
bytes of its save's id, in 20 decimal digits: so no name is ever used twice, a name tells which save has made the file,
and scripts that look for two numbers find them. (Among a million saves into one directory two have the same id with a
probability of 3e-8.) Other writers leave the id out. Readers take any name.

The integrity footer stands behind the last item: a table of what the file holds (key, dtype, chunk and place of each
tensor; key and place of each object) and 64 bytes with the id of the save. Its length follows from the structure alone,
so that it is known when the file is laid out; its content is known when the snapshot is taken.

The manifest stands behind the pickle in `.metadata`, where no unpickler looks: the id of the save, length and footer of
each data file, the CRC-32 of each item, of payloads longer than a block the cumulative CRC-32 at the end of each block,
so that a part can be checked without the rest, and the index in columns (`index.py`). It ends with the CRC-32 of all of
`.metadata`. The pickle announces it, in bytes that every unpickler drops: so a manifest that was cut off is missed.

`docs/format.md` has every field. Columns of numbers, no object for an item: there may be a million of them.
"""

from __future__ import annotations

import pickle
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import IF_DAMAGED, CorruptCheckpointError, NewerFormatError
from mcore_ckpt.storage.base import FileVersion, RangeReader

# deflate could make a thousand times its size. Rows that differ in nothing but their place make it forty times that.
_MAX_INFLATED_BYTES: Final = 1024 * 1024
_MAX_INFLATION: Final = 100


def column_bytes(column: array[int]) -> bytes:
    """An array as little-endian numbers."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def text_bytes(value: str) -> bytes:
    """UTF-8; lone surrogates as three bytes each."""
    return value.encode("utf-8", "surrogatepass")


def deflated(parts: Iterable[bytes]) -> tuple[bytes, int]:
    """The parts as one zlib stream, which `Columns.inflated` takes, and their length before that."""
    body = b"".join(parts)
    packed = zlib.compress(body, 1)
    if len(body) > _MAX_INFLATED_BYTES + _MAX_INFLATION * len(packed):
        packed = zlib.compress(body, 0)
    return packed, len(body)


class Columns:
    """Reads columns front to back; `what`: where they lie, for messages."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._what = what

    @classmethod
    def inflated(cls, packed: bytes | memoryview, unpacked_bytes: int, what: str) -> Columns:
        """Columns in a zlib stream; raises `CorruptCheckpointError` if it does not inflate to that length exactly."""
        columns = cls(b"", what)
        if unpacked_bytes > _MAX_INFLATED_BYTES + _MAX_INFLATION * len(packed):
            raise columns.wrong(f"{len(packed)} bytes would become {unpacked_bytes} when inflated")
        inflate = zlib.decompressobj()
        try:
            unpacked = inflate.decompress(packed, unpacked_bytes + 1)
        except zlib.error as error:
            raise columns.wrong(f"it cannot be inflated ({error})") from error
        if len(unpacked) != unpacked_bytes or not inflate.eof or inflate.unused_data:
            raise columns.wrong(f"it is not {unpacked_bytes} bytes long when inflated")
        return cls(unpacked, what)

    def wrong(self, what: str) -> CorruptCheckpointError:
        """The error to raise for a contradiction in them."""
        return CorruptCheckpointError(
            f"{self._what} is damaged: {what}. Restore it from another copy, or load an earlier checkpoint."
        )

    def bytes(self, nbytes: int) -> memoryview:
        """The next bytes; raises `CorruptCheckpointError` if there are fewer."""
        if nbytes > len(self._data) - self._at:
            raise self.wrong(f"{nbytes} bytes are to follow, {len(self._data) - self._at} do")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def column(self, code: str, count: int) -> array[int]:
        """The next numbers, of the type that `array` knows by `code`."""
        column = array(code)
        column.frombytes(self.bytes(count * column.itemsize))
        if sys.byteorder == "big":
            column.byteswap()
        return column

    def texts(self, lengths: Sequence[int]) -> list[str]:
        """The next texts, of these lengths in bytes."""
        data = bytes(self.bytes(sum(lengths)))
        bounds = list(accumulate(lengths, initial=0))
        try:
            if data.isascii():
                whole = data.decode("ascii")
                return [whole[a:b] for a, b in pairwise(bounds)]
            return [str(data[a:b], "utf-8", "surrogatepass") for a, b in pairwise(bounds)]
        except UnicodeDecodeError as error:
            raise self.wrong(f"a name is not UTF-8 ({error})") from error

    def finish(self) -> None:
        """Raise `CorruptCheckpointError` if something follows."""
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes follow its end")


DATA_SUFFIX: Final = ".distcp"
_ID_BYTES: Final = 8
_ID_DIGITS: Final = 20
# A hexadecimal id stands in names that were written before the first release.
_DATA_FILE: Final = re.compile(
    r"(?P<prefix>.*?)__(?P<rank>\d+)_"
    r"(?:(?P<count>[1-9]\d*)(?P<digits>\d{20})|(?P<number>\d+)(?:\.(?P<hex>[0-9a-f]{16}))?)\.distcp",
    re.DOTALL,
)


class DataFileName(NamedTuple):
    """What the name of a data file tells."""

    rank: int  # that has written it
    number: int  # of the file among those of that rank and save
    save: str | None  # id of the save; None for files of other writers
    prefix: str  # the separation hint, or empty


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Name of a rank's data file, without the id of a save. `prefix` is the separation hint: readers go by it."""
    return f"{prefix}__{rank}_{number}{DATA_SUFFIX}"


def id_in_names(save_id: bytes) -> str:
    """How a note or a pending file shows a save's id (16 bytes) in its name."""
    return save_id[:_ID_BYTES].hex()


def id_in_data_names(save_id: bytes) -> str:
    """How the names of its data files show a save's id (8 bytes or more)."""
    return f"{int.from_bytes(save_id[:_ID_BYTES], 'big'):0{_ID_DIGITS}d}"


def with_id(name: str, save_id: bytes) -> str:
    """The name that a file has in one save; `name` is from `data_file_name`."""
    start, _, number = name.removesuffix(DATA_SUFFIX).rpartition("_")
    return f"{start}_{int(number) + 1}{id_in_data_names(save_id)}{DATA_SUFFIX}"


@lru_cache(maxsize=4096)
def data_file_of(name: str) -> DataFileName | None:
    """What a name tells; None if it is no data file's."""
    match = _DATA_FILE.fullmatch(name)
    if match is None:
        return None
    number, save = match["number"], match["hex"]
    if number is None and int(match["digits"]) < 1 << 8 * _ID_BYTES:
        number, save = int(match["count"]) - 1, f"{int(match['digits']):0{2 * _ID_BYTES}x}"
    elif number is None:
        number = match["count"] + match["digits"]
    return DataFileName(int(match["rank"]), int(number), save, match["prefix"])


def tells_save(name: str) -> bool:
    """Whether a name is that of a data file of one save, which no other uses."""
    found = data_file_of(name)
    return found is not None and found.save is not None


BLOCK_BYTES: Final = 1024 * 1024
"""Payloads are summed in blocks of this: what has to be read to check one byte of a long payload."""

SAVE_ID_BYTES: Final = 16
NO_SAVE_ID: Final = bytes(SAVE_ID_BYTES)

_FILE_VERSION: Final = 2
_FILE_MAGIC: Final = b"\x89mckFILE"
_FOOTER: Final = struct.Struct("<8sII16sQQQII")
FOOTER_BYTES: Final = _FOOTER.size

TABLE_HEAD: Final = struct.Struct("<III")


def shown_id(save_id: bytes) -> str:
    """A save id as people see it, and as DCP's `storage_meta` has it."""
    return save_id.hex()


def inner_blocks(payload_bytes: int) -> int:
    """How many block boundaries lie inside a payload: as many cumulative CRCs are kept of it."""
    return max(0, (payload_bytes - 1) // BLOCK_BYTES)


def newer_error(where: str, version: int, expected: int) -> NewerFormatError:
    """The error to raise for a footer or manifest of a later version."""
    return NewerFormatError(
        f"{where}: written by a newer mcore_ckpt: its format has version {version}, expected {expected}. Nothing shows "
        "that the file is damaged; load it with a newer mcore_ckpt"
    )


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
    object_keys: Sequence[str] = ()  # of the objects; where they lie is told when they are

    @classmethod
    def of(
        cls,
        keys: Sequence[str],
        dtypes: Sequence[str],
        boxes: Iterable[Sequence[Sequence[int]]],
        places: Iterable[int] = (),
        object_keys: Sequence[str] = (),
    ) -> TableColumns:
        """The columns of tensors; `boxes`: global shape, offsets and sizes of each."""
        codes = {dtype: code for code, dtype in enumerate(dict.fromkeys(dtypes))}
        boxes = list(boxes)
        return cls(
            tuple(codes),
            keys,
            array("I", [codes[dtype] for dtype in dtypes]),
            array("I", [len(shape) for shape, _, _ in boxes]),
            array("q", list(chain.from_iterable(chain.from_iterable(boxes)))),
            array("q", list(places)),
            object_keys,
        )


class PlannedTable(NamedTuple):
    """A file of a rank's plan, as the coordinator gets it: columns of numbers, and no object for each tensor."""

    name: str  # without the id of a save
    size_bytes: int
    columns: TableColumns


RankPlan = Sequence[PlannedTable]


def encode_plan(plan: RankPlan) -> bytes:
    """A rank's plan as bytes, to send to the coordinator of its process group."""
    tables = [(pickle.dumps(columns.keys), name, nbytes, replace(columns, keys=())) for name, nbytes, columns in plan]
    # A tenth of the bytes for a tenth of the time: keys and shapes are alike. The coordinator keeps those of all.
    return zlib.compress(pickle.dumps(tables), 1)


def decoded_plans(encoded: Iterable[bytes]) -> list[RankPlan]:
    """Plans of several ranks of this process group. Files with the same keys share one list of them."""
    known_keys: dict[bytes, Sequence[str]] = {}
    plans: list[RankPlan] = []
    for data in encoded:
        plan = []
        for encoded_keys, name, size_bytes, columns in pickle.loads(zlib.decompress(data)):
            if encoded_keys not in known_keys:
                known_keys[encoded_keys] = pickle.loads(encoded_keys)
            plan.append(PlannedTable(name, size_bytes, replace(columns, keys=known_keys[encoded_keys])))
        plans.append(plan)
    return plans


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
            TABLE_HEAD.pack(len(columns.keys), len(columns.object_keys), len(columns.dtypes)),
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
        """The footer of one save, and the CRC-32 of its table; `object_places`: offsets and lengths."""
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
    """Compare a file's footer with its size and the manifest, where there are any. Raises `CorruptCheckpointError`."""
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


_VERSION: Final = 2
_MAGIC: Final = b"\x89mckSUMS"
_END: Final = b"\x89mckEND\n"
# SHORT_BINBYTES and POP, behind PROTO: gone when a program unpickles the file and pickles it again, as the manifest is.
_ANNOUNCED: Final = b"C" + bytes((len(_MAGIC),)) + _MAGIC + b"0"
_PROTO_BYTES: Final = 2
_HEAD: Final = struct.Struct("<8sII16sQQQQ")
_SECTIONS: Final = struct.Struct("<QQQQ")
_TRAILER: Final = struct.Struct("<QI8s")
_TRAILER_UNSUMMED: Final = 12  # CRC-32 and magic

# The fingerprints of tensors stand before the manifest, with the same in front and behind.
_SUMS_MAGIC: Final = b"\x89mckSTAT"
_SUMS_HEAD: Final = struct.Struct("<8sIQQ")
_SUMS_END: Final = struct.Struct("<Q8s")
_SUMS_VERSION: Final = 1

_SOME_BYTES: Final = 64 * 1024

NO_FINGERPRINT: Final = -1
"""Of a tensor whose fingerprint is not stored."""

Section = tuple[bytes, int]
"""Columns as they lie in the file, deflated, and their length when inflated."""
_NONE: Final = (b"", 0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `.metadata` says of its save, its files and their bytes.

    Items are numbered as `storage_data` lists them, from 0.
    """

    save_id: bytes  # 16 bytes
    # Each data file, by name; and the file of the common state, if the save has one (of that, the CRC-32 is of all its
    # bytes). The columns of the index number them in this order.
    files: Mapping[str, ManifestFile]
    # CRC-32 of each item's payload; of the whole item for objects and for what is stored through a transform.
    crcs: array[int]
    # Numbers of the items of which cumulative CRCs are kept, ascending.
    block_items: array[int] = field(default_factory=lambda: array("Q"))
    block_counts: array[int] = field(default_factory=lambda: array("I"))  # how many, for each of those
    # The cumulative CRC-32 of the payload's first 1, 2, 3, ... MiB, up to the last boundary inside it.
    blocks: array[int] = field(default_factory=lambda: array("I"))
    # The index, of the tensors and of the rest; None where the pickle alone says it.
    columns: tuple[Section, Section] | None = field(default=None, compare=False, repr=False)
    # The fingerprint of each tensor, in the order of the index (`array('q')`), or `NO_FINGERPRINT`; None: of none.
    fingerprints: array[int] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which `.metadata` a file is: no two saves make the same, even of equal content."""

    token: str  # tells it from all others in its directory
    save: str | None  # id of the save, as file names show it, from the manifest; None without one
    version: FileVersion | None = field(compare=False)  # of the file


def identity_of(reader: RangeReader) -> Identity:
    """The identity of a `.metadata`, whatever it holds: by its manifest, or by some bytes and the file itself."""
    size_bytes, version = reader.size_bytes, reader.version
    end = reader.read(max(0, size_bytes - _TRAILER.size), min(size_bytes, _TRAILER.size))
    if end.endswith(_END) and len(end) == _TRAILER.size:
        length, stated, _ = _TRAILER.unpack(end)
        if _HEAD.size <= length <= size_bytes:
            magic, _, _, save_id, *_ = _HEAD.unpack(reader.read(size_bytes - length, _HEAD.size))
            if magic == _MAGIC:
                return Identity(f"{save_id.hex()}{stated:08x}", id_in_names(save_id), version)
    # A manifest is what makes an index of this package. Of another the ends are enough, next to its inode and time.
    some = min(size_bytes, _SOME_BYTES)
    crc = crc32(reader.read(size_bytes - some, some), crc32(reader.read(0, some)))
    stat = "" if version is None else "-".join(f"{part:x}" for part in version)
    return Identity(f"{crc:08x}-{size_bytes:x}-{stat}", None, version)


def with_manifest(content: bytes, manifest: Manifest) -> bytes:
    """`content`, a pickle, which announces its manifest, followed by that."""
    if content[:1] == b"\x80":
        content = b"".join((content[:_PROTO_BYTES], _ANNOUNCED, memoryview(content)[_PROTO_BYTES:]))
    names = [text_bytes(name) for name in manifest.files]
    files = manifest.files.values()
    of_tensors, of_objects = manifest.columns or (_NONE, _NONE)
    body = b"".join(
        (
            _HEAD.pack(
                *(_MAGIC, _VERSION, len(names), manifest.save_id),
                *(len(manifest.crcs), len(manifest.block_items), len(manifest.blocks), sum(map(len, names))),
            ),
            _SECTIONS.pack(len(of_tensors[0]), of_tensors[1], len(of_objects[0]), of_objects[1]),
            column_bytes(array("Q", [file.size_bytes for file in files])),
            column_bytes(array("I", [file.table_crc32 for file in files])),
            b"".join(file.save_id for file in files),
            column_bytes(array("I", map(len, names))),
            *names,
            column_bytes(manifest.crcs),
            column_bytes(manifest.block_items),
            column_bytes(manifest.block_counts),
            column_bytes(manifest.blocks),
            of_tensors[0],
            of_objects[0],
        )
    )
    body += struct.pack("<Q", len(body) + _TRAILER.size)
    if (fingerprints := manifest.fingerprints) is not None:
        without = array("I", [number for number, value in enumerate(fingerprints) if value == NO_FINGERPRINT])
        values = fingerprints if not without else [max(value, 0) for value in fingerprints]
        head = _SUMS_HEAD.pack(_SUMS_MAGIC, _SUMS_VERSION, len(fingerprints), len(without))
        section = head + column_bytes(array("I", values)) + column_bytes(without)
        content += section + _SUMS_END.pack(len(section) + _SUMS_END.size, _SUMS_MAGIC)
    return b"".join((content, body, struct.pack("<I8s", crc32(body, crc32(content)), _END)))


def _split_fingerprints(data: memoryview, where: str) -> tuple[int, array[int] | None]:
    """Where the pickle ends in what precedes the manifest, and the fingerprints behind it, if any."""
    if data[-len(_SUMS_MAGIC) :].tobytes() != _SUMS_MAGIC:
        return len(data), None
    columns = Columns(data, f"{where}: its fingerprints")
    length, _ = _SUMS_END.unpack(data[-_SUMS_END.size :]) if len(data) >= _SUMS_END.size else (0, b"")
    start = len(data) - length
    if start < 0 or length < _SUMS_HEAD.size + _SUMS_END.size:
        raise columns.wrong(f"they are said to have {length} bytes")
    columns = Columns(data[start : len(data) - _SUMS_END.size], f"{where}: its fingerprints")
    magic, version, count, without_count = _SUMS_HEAD.unpack(columns.bytes(_SUMS_HEAD.size))
    if magic != _SUMS_MAGIC:
        raise columns.wrong("they do not begin where their end says")
    if version != _SUMS_VERSION:
        return start, None  # nothing is missing without them
    fingerprints, without = array("q", columns.column("I", count)), columns.column("I", without_count)
    columns.finish()
    if any(number >= count for number in without):
        raise columns.wrong("one of a tensor that is not there")
    for number in without:
        fingerprints[number] = NO_FINGERPRINT
    return start, fingerprints


def split_metadata(data: bytes, where: str) -> tuple[bytes, Manifest | None]:
    """The pickle in a `.metadata`, and its checked manifest, if any. Raises `LoadError` for damage or a new version."""
    if not data.endswith(_END):
        if _MAGIC in data:
            raise _damaged(where, "its manifest is missing, or has no end; the file was truncated or damaged")
        return data, None
    if len(data) < _HEAD.size + _TRAILER.size:
        raise _damaged(where, f"{len(data)} bytes cannot hold a manifest")
    length, stated, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    got = crc32(memoryview(data)[: len(data) - _TRAILER_UNSUMMED])
    if got != stated:
        raise _damaged(where, f"it has CRC-32 {got:#010x}, expected {stated:#010x}")
    if not _HEAD.size + _TRAILER.size <= length <= len(data):
        raise _damaged(where, f"its manifest is said to have {length} bytes")
    start = len(data) - length
    manifest = _decode(memoryview(data)[start : len(data) - _TRAILER.size], where)
    start, fingerprints = _split_fingerprints(memoryview(data)[:start], where)
    if fingerprints is not None:
        manifest = replace(manifest, fingerprints=fingerprints)
    if not data.startswith(_ANNOUNCED, _PROTO_BYTES):
        return data[:start], manifest
    return b"".join((data[:_PROTO_BYTES], memoryview(data)[_PROTO_BYTES + len(_ANNOUNCED) : start])), manifest


def _decode(data: memoryview, where: str) -> Manifest:
    columns = Columns(data, f"{where}: its manifest")
    magic, version, file_count, save_id, items, block_items, blocks, name_bytes = _HEAD.unpack(
        columns.bytes(_HEAD.size)
    )
    if magic != _MAGIC:
        raise columns.wrong("it does not begin where its end says")
    if version != _VERSION:
        raise newer_error(where, version, _VERSION)
    packed, unpacked, more_packed, more_unpacked = _SECTIONS.unpack(columns.bytes(_SECTIONS.size))
    sizes, table_crcs = columns.column("Q", file_count), columns.column("I", file_count)
    ids = bytes(columns.bytes(SAVE_ID_BYTES * file_count))
    name_lengths = columns.column("I", file_count)
    if sum(name_lengths) != name_bytes:
        raise columns.wrong("the names of its files have not the length that they should")
    files = {
        name: ManifestFile(size, crc, ids[SAVE_ID_BYTES * n : SAVE_ID_BYTES * (n + 1)])
        for n, (name, size, crc) in enumerate(zip(columns.texts(name_lengths), sizes, table_crcs, strict=True))
    }
    manifest = Manifest(
        save_id,
        files,
        columns.column("I", items),
        columns.column("Q", block_items),
        columns.column("I", block_items),
        columns.column("I", blocks),
        ((bytes(columns.bytes(packed)), unpacked), (bytes(columns.bytes(more_packed)), more_unpacked))
        if packed
        else None,
    )
    columns.finish()
    if len(files) != file_count or sum(manifest.block_counts) != blocks:
        raise columns.wrong("its columns contradict each other")
    if any(number >= items for number in manifest.block_items):
        raise columns.wrong("it holds sums of an item that is not there")
    return manifest


def _damaged(where: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where}: the file is damaged: {what}. Restore it from another copy, or load an earlier checkpoint."
    )
