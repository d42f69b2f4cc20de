"""A second reader of the format, written from docs/format.md alone.

It shares no code with the package and needs neither it nor torch: what it reads, and what it refuses, is what the page
says. So a test that compares the two finds a page that is wrong, and a writer that changes without the page.

`read_checkpoint(directory)` checks all that the page calls normative, to the byte, and gives tensors as numpy arrays.
Numbers of dtypes that numpy does not have come as unsigned integers of their size. Objects come decoded if they are
plain values, and as `Opaque` otherwise. `CorruptError`: the page says that this is damaged. `UnsupportedError`: the
page has it, this reader does not (tensors behind stream transforms, items in forms that only other writers make).
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import stat
import struct
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MIB = 1 << 20
PAGE, LARGE_TENSOR, ZIP64_PAYLOAD = 4096, 524_288, 4_294_901_759
DATA_MAGIC, DATA_FOOTER = b"\x89mckFILE", 64
META_MAGIC, META_END = b"\x89mckSUMS", b"\x89mckEND\n"
STATE_MAGIC = b"\x89mckSTAT"
DATE_1980 = 0x0021
STORAGE_CLASSES = {
    name: f"{storage}Storage"
    for name, storage in zip(
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128".split(),
        "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexFloat ComplexDouble".split(),
        strict=True,
    )
}
_BYTES = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8"
_BYTES += " bits1x8 bits2x4 bits4x2"
RAW_DTYPES = {"bfloat16": "uint16", "bits16": "uint16", "complex32": "uint32", "bcomplex32": "uint32"}
RAW_DTYPES |= dict.fromkeys(_BYTES.split(), "uint8")
DTYPES = {
    name: np.dtype(RAW_DTYPES.get(name, name)).newbyteorder("<")
    for name in [*STORAGE_CLASSES, *RAW_DTYPES, "uint16", "uint32", "uint64"]
}


class CorruptError(Exception):
    """The bytes are not what the page says a checkpoint is."""


class UnsupportedError(Exception):
    """The page allows it, this reader does not read it."""


class Opaque(NamedTuple):
    """An object that is more than plain values: the bytes of its item."""

    item: bytes


@dataclass
class Checkpoint:
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    sealed: bool = False


class Chunk(NamedTuple):
    """One entry of `storage_data`."""

    key: str
    offsets: tuple[int, ...] | None  # None: an object
    file: str
    start: int
    length: int
    transformed: bool


class TensorMeta(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets, sizes


def need(condition: object, what: str) -> None:
    if not condition:
        raise CorruptError(what)


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


class Cursor:
    """Little endian numbers, one after the other; running out of bytes is corruption."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.at, self.what = data, 0, what

    def take(self, count: int) -> bytes:
        need(count <= len(self.data) - self.at, f"{self.what}: too short")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, size: int, count: int) -> list[int]:
        return np.frombuffer(self.take(size * count), f"<u{size}").tolist()

    def end(self) -> None:
        need(self.at == len(self.data), f"{self.what}: {len(self.data) - self.at} bytes too many")


# --- files


def read_file(directory: Path, name: str) -> bytes:
    """A regular file below the directory, with no link on the way to it."""
    parts = name.split("/")
    need(name and not name.startswith("/") and "\0" not in name, f"file name {name!r}")
    need(not {"", ".", ".."} & set(parts), f"file name {name!r} leaves the checkpoint")
    path = directory
    for part in parts[:-1]:
        path /= part
        need(path.exists() and stat.S_ISDIR(path.lstat().st_mode), f"{path} is not a directory")
    path /= parts[-1]
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise CorruptError(f"{path}: {error}") from error
    need(stat.S_ISREG(mode), f"{path} is not a regular file")
    return path.read_bytes()


# --- zip archives


class Record(NamedTuple):
    name: str
    begin: int  # of its local header
    end: int  # behind its data descriptor
    content: bytes
    crc: int


def zip_records(item: bytes) -> list[Record]:
    """All records of an archive, in the order of its directory; headers, directory and descriptors say the same."""
    try:
        return [_record(item, *entry) for entry in _directory(item)]
    except struct.error as error:
        raise CorruptError(f"zip archive: {error}") from error


def _directory(item: bytes) -> list[tuple[str, int, int, int, int, int]]:
    end = len(item) - 22
    need(end >= 0 and item[end : end + 4] == b"PK\5\6", "zip archive: no end record in the last 22 bytes")
    disk, first_disk, here, count, size, offset, comment = struct.unpack_from("<4H2IH", item, end + 4)
    need(disk == first_disk == comment == 0 and here == count, "zip archive: comment, or several disks")
    directory_end = end
    if end >= 76 and item[end - 20 : end - 16] == b"PK\6\7":
        zero, at, disks = struct.unpack_from("<IQI", item, end - 16)
        need(zero == 0 and disks == 1 and at == end - 76, "zip archive: zip64 locator")
        need(item[at : at + 4] == b"PK\6\6", "zip archive: no zip64 end record")
        length, _, _, disk, first_disk, here, *wide = struct.unpack_from("<Q2H2I4Q", item, at + 4)
        need(length == 44 and disk == first_disk == 0 and here == wide[0], "zip archive: zip64 end record")
        for narrow, value, bits in zip((count, size, offset), wide, (16, 32, 32), strict=True):
            need(narrow in (value, (1 << bits) - 1), "zip archive: the two end records differ")
        count, size, offset = wide
        directory_end = at
    need(offset + size == directory_end, "zip archive: a gap behind the directory")
    entries, at = [], offset
    for _ in range(count):
        need(item[at : at + 4] == b"PK\1\2" and at + 46 <= directory_end, "zip archive: directory entry")
        flags, method, _, _, crc, packed, plain, n, e, c, disk = struct.unpack_from("<4H3I4H", item, at + 8)
        begin = struct.unpack_from("<I", item, at + 42)[0]
        name, extra = item[at + 46 : at + 46 + n], item[at + 46 + n : at + 46 + n + e]
        wide_fields = _zip64_field(extra)
        for_wide = iter(wide_fields)
        plain, packed, begin = (next(for_wide, v) if v == 0xFFFFFFFF else v for v in (plain, packed, begin))
        need(method == 0 and plain == packed and not flags & 1 and disk == 0, "zip archive: packed or encrypted record")
        entries.append((_utf8(name), flags, crc, plain, begin, offset))
        at += 46 + n + e + c
    need(at == directory_end, "zip archive: length of the directory")
    need(len({entry[0] for entry in entries}) == len(entries), "zip archive: two records of one name")
    return entries


def _zip64_field(extra: bytes) -> list[int]:
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            need(length % 8 == 0 and at + 4 + length <= len(extra), "zip archive: zip64 field")
            return list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
        at += 4 + length
    return []


def _record(item: bytes, name: str, flags: int, crc: int, size: int, begin: int, limit: int) -> Record:
    need(item[begin : begin + 4] == b"PK\3\4", f"zip archive: no local header of {name}")
    local_flags, method, _, _, local_crc, packed, plain, n, e = struct.unpack_from("<4H3I2H", item, begin + 6)
    at = begin + 30 + n + e
    need(local_flags == flags and method == 0, f"zip archive: flags of {name}")
    need(item[begin + 30 : begin + 30 + n] == name.encode(), f"zip archive: name of {name}")
    wide = _zip64_field(item[begin + 30 + n : at])
    if not flags & 8:
        need((local_crc, packed, plain) == (crc, size, size), f"zip archive: local header of {name}")
    end = at + size
    if flags & 8:
        form = "<I2Q" if wide else "<3I"
        need(item[end : end + 4] == b"PK\7\x08", f"zip archive: no data descriptor of {name}")
        need(struct.unpack_from(form, item, end + 4) == (crc, size, size), f"zip archive: data descriptor of {name}")
        end += 4 + struct.calcsize(form)
    need(end <= limit, f"zip archive: {name} reaches into the directory")
    content = item[at : at + size]
    need(zlib.crc32(content) == crc, f"zip archive: CRC-32 of {name}")
    return Record(name, begin, end, content, crc)


# --- tensor items


def _int_program(value: int) -> bytes:
    if value < 1 << 8:
        return struct.pack("<cB", b"K", value)
    if value < 1 << 16:
        return struct.pack("<cH", b"M", value)
    if value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)


def _tuple_program(values: tuple[int, ...]) -> bytes:
    ints = b"".join(map(_int_program, values))
    return b"(" + ints + b"t" if len(values) > 3 else ints + b")\x85\x86\x87"[len(values) :][:1]


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The content of archive/data.pkl."""
    strides = tuple(math.prod(size or 1 for size in shape[axis + 1 :]) for axis in range(len(shape)))
    elements, own_class = math.prod(shape), STORAGE_CLASSES.get(dtype)
    rebuild, storage = ("v2", f"torch\n{own_class}") if own_class else ("v3", "torch.storage\nUntypedStorage")
    count = elements if own_class else elements * DTYPES[dtype].itemsize
    program = b"\x80\x02" + f"ctorch._utils\n_rebuild_tensor_{rebuild}\n((".encode()
    program += _text("storage") + f"c{storage}\n".encode() + _text("0") + _text("cpu") + _int_program(count) + b"tQ"
    program += _int_program(0) + _tuple_program(shape) + _tuple_program(strides) + b"\x89"
    program += b"ccollections\nOrderedDict\n)R" + (b"" if own_class else f"ctorch\n{dtype}\n".encode())
    return program + b"tR."


def head_length(dtype: str, shape: tuple[int, ...]) -> int:
    wide_sizes = 20 if math.prod(shape) * DTYPES[dtype].itemsize >= ZIP64_PAYLOAD else 0
    headers = 2 * 30 + len("archive/data.pkl") + len("archive/data/0") + wide_sizes
    return -(-(headers + len(tensor_pickle(dtype, shape)) + 4) // 64) * 64  # the padding has a tag of 4 bytes at least


def tensor_form(dtype: str, shape: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    """Head and tail of a tensor item that is not a zip64 archive, to the byte."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    program = tensor_pickle(dtype, shape)

    def local(name: str, content: bytes) -> bytes:
        numbers = (20, 0x0800, 0, 0, DATE_1980, zlib.crc32(content), len(content), len(content), len(name), 0)
        return b"PK\3\4" + struct.pack("<5H3I2H", *numbers) + name.encode() + content

    head = local("archive/data.pkl", program)
    payload_header = len(head)
    padding = head_length(dtype, shape) - len(head) - 30 - len("archive/data/0") - 4
    head += b"PK\3\4" + struct.pack("<5H3I2H", 20, 0x0808, 0, 0, DATE_1980, 0, 0, 0, 14, 4 + padding)
    head += b"archive/data/0" + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    tail = b"PK\7\x08" + struct.pack("<3I", crc, size, size)
    entries = [("archive/data.pkl", 0x0800, zlib.crc32(program), len(program), 0)]
    entries.append(("archive/data/0", 0x0808, crc, size, payload_header))
    for name, content in (("archive/version", b"3\n"), ("archive/byteorder", b"little")):
        entries.append((name, 0x0800, zlib.crc32(content), len(content), len(head) + size + len(tail)))
        tail += local(name, content)
    directory = b"".join(
        b"PK\1\2"
        + struct.pack("<6H3I5H2I", 20, 20, flags, 0, 0, DATE_1980, check, length, length, len(name), 0, 0, 0, 0, 0, at)
        + name.encode()
        for name, flags, check, length, at in entries
    )
    end = struct.pack("<4H2IH", 0, 0, 4, 4, len(directory), len(head) + size + len(tail), 0)
    return head, tail + directory + b"PK\5\6" + end


def tensor_payload(item: bytes, dtype: str, shape: tuple[int, ...], what: str) -> tuple[bytes, int]:
    """The payload of a tensor item of ours, and its CRC-32, which is compared."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    records = zip_records(item)
    names = [record.name for record in records]
    if names != ["archive/data.pkl", "archive/data/0", "archive/version", "archive/byteorder"]:
        raise UnsupportedError(f"{what}: not an item of ours: {names}")
    program, payload, version, byteorder = records
    need(program.content == tensor_pickle(dtype, shape), f"{what}: data.pkl does not rebuild {dtype} {shape}")
    need(version.content == b"3\n" and byteorder.content == b"little", f"{what}: version or byte order")
    need(len(payload.content) == size, f"{what}: {len(payload.content)} bytes of payload")
    need(payload.end - size >= 64 and not program.begin, f"{what}: order of the records")
    if size < ZIP64_PAYLOAD:
        head, tail = tensor_form(dtype, shape, payload.crc)
        need(len(item) == len(head) + size + len(tail), f"{what}: length of the item")
        need(item.startswith(head), f"{what}: head")
        need(item.endswith(tail), f"{what}: tail")
    return payload.content, payload.crc


# --- object items


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise UnsupportedError(f"{module}.{name}")


def decode_object(item: bytes, what: str) -> Any:
    records = {record.name.partition("/")[2]: record.content for record in zip_records(item)}
    need("data.pkl" in records, f"{what}: no data.pkl")
    need(records.get("byteorder", b"little") == b"little", f"{what}: byte order")
    try:
        return _PlainUnpickler(io.BytesIO(records["data.pkl"]), encoding="utf-8").load()
    except (UnsupportedError, pickle.UnpicklingError):  # a class, or a storage
        return Opaque(item)
    except Exception as error:
        raise CorruptError(f"{what}: {error!r}") from error


# --- data files


Span = tuple[int, int]


class TableRow(NamedTuple):
    key: str
    dtype: str | None  # None: listed as an object
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class DataFile:
    name: str
    content: bytes
    save_id: bytes
    table_crc: int
    rows: dict[Span, list[TableRow]]  # by offset and length of the item


def read_seal(name: str, content: bytes) -> DataFile | None:
    """The seal at a data file's end: None if there is no footer."""
    footer = content[-DATA_FOOTER:]
    if len(footer) < DATA_FOOTER or not footer.startswith(DATA_MAGIC):
        return None
    version, table_crc = struct.unpack_from("<2I", footer, 8)
    length, table_length, inflated, objects, own_crc = struct.unpack_from("<3Q2I", footer, 32)
    need(zlib.crc32(footer[:60]) == own_crc, f"{name}: CRC-32 of the footer")
    need(version == 2, f"{name}: version {version} of the seal")
    need(length == len(content), f"{name}: {len(content)} bytes, its footer says {length}")
    need(16 * objects <= table_length <= length - DATA_FOOTER, f"{name}: length of the table")
    table = content[length - DATA_FOOTER - table_length : length - DATA_FOOTER]
    need(zlib.crc32(table) == table_crc, f"{name}: CRC-32 of the table")
    split = table_length - 16 * objects
    inflater = zlib.decompressobj()
    try:
        names_and_boxes = inflater.decompress(table[:split], inflated + 1)
    except zlib.error as error:
        raise CorruptError(f"{name}: table: {error}") from error
    need(inflater.eof and not inflater.unused_data and len(names_and_boxes) == inflated, f"{name}: length of the table")
    spans = [tuple(span) for span in np.frombuffer(table[split:], "<u8").reshape(-1, 2).tolist()]
    rows = _table_rows(name, length - DATA_FOOTER - table_length, names_and_boxes, spans)
    return DataFile(name, content, footer[16:32], table_crc, rows)


def _table_rows(file: str, end: int, table: bytes, objects: list[Span]) -> dict[Span, list[TableRow]]:
    cursor = Cursor(table, f"{file}: table")
    n, m, d = cursor.numbers(4, 3)
    need(m == len(objects), f"{file}: number of objects")
    name_lengths = cursor.numbers(4, d + n + m)
    dtypes, axes = cursor.numbers(4, n), cursor.numbers(4, n)
    boxes = [tuple(tuple(cursor.numbers(8, count)) for _ in range(3)) for count in axes]
    tensors: list[Span] = [tuple(cursor.numbers(8, 2)) for _ in range(n)]
    names = [_utf8(cursor.take(length)) for length in name_lengths]
    cursor.end()
    need(all(kind < d for kind in dtypes) and set(names[:d]) <= set(DTYPES), f"{file}: dtype in the table")
    keys = names[d:]
    listed = [TableRow(key, names[kind], *box) for key, kind, box in zip(keys, dtypes, boxes, strict=False)]
    sizes = [math.prod(row.sizes) * DTYPES[row.dtype].itemsize for row in listed]
    heads = [
        head_length(row.dtype, row.sizes) if size >= LARGE_TENSOR else None
        for row, size in zip(listed, sizes, strict=True)
    ]
    listed += [TableRow(key, None, (), (), ()) for key in keys[n:]]
    _check_layout(file, end, tensors, heads, objects)
    rows: dict[Span, list[TableRow]] = {}
    for row, span in zip(listed, tensors + objects, strict=True):
        rows.setdefault(span, []).append(row)
    return rows


def _utf8(name: bytes) -> str:
    try:
        return name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{name!r} is not UTF-8") from error


def _check_layout(file: str, end: int, tensors: list[Span], heads: list[int | None], objects: list[Span]) -> None:
    """Where the page says that items start, and that the seal stands directly behind the last one."""
    at = 0
    for start, length in objects:
        need(start % 64 == 0 and start >= at, f"{file}: object at {start}")
        at = start + length
    room = -(-(at + at // 4) // PAGE) * PAGE  # what bytes_data has
    need(tensors or end == room, f"{file}: bytes_data has {end} bytes")
    for number, ((start, length), head) in enumerate(zip(tensors, heads, strict=True)):
        first = at = -(-at // 64) * 64 if number else room
        if head is not None:
            first += -(at + head) % PAGE
        need(start == first, f"{file}: tensor at {start} instead of {first}")
        at = start + length
    need(not tensors or at == end, f"{file}: the seal is not directly behind the last item")


# --- .metadata


class Inert:
    """Stands for whatever the pickle names: it keeps what it is given and does nothing."""

    where = ("", "")

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        made = object.__new__(cls)
        made.__dict__.update({"arguments": arguments, "state": None})
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Inert,), {"where": (module, name)})


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The attributes of an instance of one of DCP's dataclasses."""
    need(isinstance(value, Inert) and value.where[1] == name, f".metadata: no {name}")
    need(value.where[0].startswith("torch.distributed.checkpoint."), f".metadata: no {name}")
    state = {} if value.state is None else value.state
    need(type(state) is dict, f".metadata: state of {name}")
    return state


def _size(value: Any) -> tuple[int, ...]:
    need(
        isinstance(value, Inert) and value.where == ("torch", "Size") and len(value.arguments) == 1,
        ".metadata: no Size",
    )
    numbers = value.arguments[0]
    need(type(numbers) is tuple and all(map(is_count, numbers)), ".metadata: Size")
    return numbers


def _tensor_meta(key: str, value: Any) -> TensorMeta | None:
    if isinstance(value, Inert) and value.where[1] == "BytesStorageMetadata":
        return None
    state = _fields(value, "TensorStorageMetadata")
    properties = state.get("properties")
    need(isinstance(properties, Inert) and type(properties.state) is tuple and properties.state, f"{key}: properties")
    dtype = properties.state[0]
    need(isinstance(dtype, type) and issubclass(dtype, Inert) and dtype.where[0] == "torch", f"{key}: dtype")
    if dtype.where[1] not in DTYPES:
        raise UnsupportedError(f"{key}: dtype {dtype.where[1]}")
    need(type(state.get("chunks")) is list, f"{key}: chunks")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    boxes = [(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in chunks]
    return TensorMeta(dtype.where[1], _size(state.get("size")), boxes)


def _chunk(index: Any, info: Any) -> Chunk:
    where, what = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    key, offset = where.get("fqn"), where.get("offset")
    file, start, length = what.get("relative_path"), what.get("offset"), what.get("length")
    need(type(key) is str and type(file) is str and is_count(start) and is_count(length), f".metadata: item of {key}")
    return Chunk(
        key, None if offset is None else _size(offset), file, start, length, bool(what.get("transform_descriptors"))
    )


def read_metadata(program: bytes) -> tuple[dict[str, TensorMeta | None], list[Chunk]]:
    """What the pickle says: tensors (None for objects) by key, and the items in their order."""
    stream = io.BytesIO(program)
    try:
        state = _fields(_MetadataUnpickler(stream).load(), "Metadata")
    except CorruptError:
        raise
    except Exception as error:  # damaged pickles raise about everything
        raise CorruptError(f".metadata: {error!r}") from error
    need(stream.tell() == len(program), ".metadata: bytes between the pickle and its seal")
    entries, items = state.get("state_dict_metadata"), state.get("storage_data")
    need(
        type(entries) is dict and type(items) is dict and all(type(key) is str for key in entries),
        ".metadata: no items",
    )
    return {key: _tensor_meta(key, value) for key, value in entries.items()}, [_chunk(*item) for item in items.items()]


@dataclass
class Sums:
    """The manifest of .metadata."""

    files: dict[str, tuple[int, int, bytes]]  # name -> length, CRC-32 of the table, id
    items: list[int]
    running: dict[int, list[int]]
    columns: tuple[dict[str, TensorMeta | None], list[Chunk]] | None  # the index once more
    fingerprints: list[int | None] | None  # of each tensor


def split_metadata(data: bytes) -> tuple[bytes, Sums | None]:
    """The pickle, and the manifest behind it, whose CRC-32 is compared."""
    if not data.endswith(META_END):
        need(META_MAGIC not in data, ".metadata: its manifest has no end")
        return data, None
    need(len(data) >= 20, ".metadata: too short")
    length, crc = struct.unpack_from("<QI", data, len(data) - 20)
    need(zlib.crc32(data[:-12]) == crc, ".metadata: CRC-32")
    need(length <= len(data), ".metadata: length of the manifest")
    begin = len(data) - length
    cursor = Cursor(data[begin:-20], ".metadata: manifest")
    need(cursor.take(8) == META_MAGIC, ".metadata: no manifest where it should begin")
    version, file_count = cursor.numbers(4, 2)
    need(version == 2, f".metadata: version {version} of the manifest")
    cursor.take(16)
    item_count, with_running, running_count, name_bytes = cursor.numbers(8, 4)
    sections = cursor.numbers(8, 4)
    lengths, tables = cursor.numbers(8, file_count), cursor.numbers(4, file_count)
    ids = [cursor.take(16) for _ in range(file_count)]
    name_lengths = cursor.numbers(4, file_count)
    need(sum(name_lengths) == name_bytes, ".metadata: manifest: names")
    names = [_utf8(cursor.take(count)) for count in name_lengths]
    items = cursor.numbers(4, item_count)
    numbers, counts = cursor.numbers(8, with_running), cursor.numbers(4, with_running)
    need(sum(counts) == running_count and sorted(set(numbers)) == numbers, ".metadata: manifest: running sums")
    need(not numbers or numbers[-1] < item_count, ".metadata: manifest: running sums")
    running = {number: cursor.numbers(4, count) for number, count in zip(numbers, counts, strict=True)}
    first, second = (cursor.take(sections[n]) for n in (0, 2))
    cursor.end()
    columns = read_columns(inflate(first, sections[1]), inflate(second, sections[3]), names) if first else None
    files = dict(zip(names, zip(lengths, tables, ids, strict=True), strict=True))
    need(len(files) == file_count, ".metadata: manifest: two files of one name")
    program, fingerprints = split_fingerprints(data[:begin])
    return program, Sums(files, items, running, columns, fingerprints)


def split_fingerprints(data: bytes) -> tuple[bytes, list[int | None] | None]:
    """The pickle, and the fingerprints between it and the manifest."""
    if not data.endswith(STATE_MAGIC):
        return data, None
    need(len(data) >= 16, ".metadata: fingerprints: too short")
    length = struct.unpack_from("<Q", data, len(data) - 16)[0]
    need(length <= len(data), ".metadata: fingerprints: length")
    begin = len(data) - length
    cursor = Cursor(data[begin:-16], ".metadata: fingerprints")
    need(cursor.take(8) == STATE_MAGIC, ".metadata: no fingerprints where they should begin")
    if cursor.numbers(4, 1) != [1]:
        return data[:begin], None
    count, without_count = cursor.numbers(8, 2)
    found: list[int | None] = list(cursor.numbers(4, count))
    without = cursor.numbers(4, without_count)
    cursor.end()
    need(sorted(set(without)) == without and (not without or without[-1] < count), ".metadata: fingerprints: without")
    for number in without:
        need(found[number] == 0, ".metadata: fingerprint of a tensor without")
        found[number] = None
    return data[:begin], found


def inflate(packed: bytes, length: int) -> bytes:
    need(length <= MIB + 100 * len(packed), ".metadata: a section inflates to too much")
    unpack = zlib.decompressobj()
    try:
        content = unpack.decompress(packed, length + 1)
    except zlib.error as error:
        raise CorruptError(f".metadata: {error}") from error
    need(len(content) == length and unpack.eof and not unpack.unused_data, ".metadata: length of a section")
    return content


def read_columns(first: bytes, second: bytes, files: list[str]) -> tuple[dict[str, TensorMeta | None], list[Chunk]]:
    """What the columns say, as `read_metadata` has it from the pickle."""
    cursor = Cursor(first, ".metadata: tensors")
    tensors, kinds, chunk_count, words, note_words = cursor.numbers(8, 5)
    dtype_lengths, _grads = cursor.numbers(4, kinds), cursor.numbers(4, kinds)
    key_lengths, of_forms = cursor.numbers(4, tensors), cursor.numbers(4, tensors)
    places = list(zip(*(cursor.numbers(size, chunk_count) for size in (4, 8, 8)), strict=True))
    numbers, _notes = cursor.numbers(8, words), cursor.numbers(8, note_words)
    dtypes = [_utf8(cursor.take(length)) for length in dtype_lengths]
    keys = [_utf8(cursor.take(length)) for length in key_lengths]
    cursor.end()
    forms = []
    while numbers:
        need(len(numbers) >= 3 and numbers[0] < kinds and numbers[1] <= 64, ".metadata: a form")
        kind, axes, count = numbers[:3]
        taken = axes * (1 + 2 * count)
        need(3 + taken <= len(numbers) and count <= chunk_count, ".metadata: a form")
        sizes = iter(numbers[3 : 3 + taken])
        shape, *parts = (tuple(itertools.islice(sizes, axes)) for _ in range(1 + 2 * count))
        forms.append(TensorMeta(dtypes[kind], shape, list(zip(parts[::2], parts[1::2], strict=True))))
        del numbers[: 3 + taken]
    entries: dict[str, TensorMeta | None] = {}
    chunks, left = [], iter(places)
    for key, number in zip(keys, of_forms, strict=True):
        need(number < len(forms), ".metadata: no such form")
        entries[key] = forms[number]
        for offsets, _ in forms[number].boxes:
            place = next(left, None)
            need(place is not None and place[0] < len(files), ".metadata: no such file")
            chunks.append(Chunk(key, offsets, files[place[0]], *place[1:], False))
    need(next(left, None) is None and len(entries) == tensors, ".metadata: chunks of no tensor")
    cursor = Cursor(second, ".metadata: objects")
    objects, paths, details = cursor.numbers(8, 3)
    key_lengths = cursor.numbers(4, objects)
    places = list(zip(*(cursor.numbers(size, objects) for size in (4, 8, 8)), strict=True))
    cursor.numbers(4, paths)
    for length, place in zip(key_lengths, places, strict=True):
        key = _utf8(cursor.take(length))
        need(key not in entries and place[0] < len(files), ".metadata: an object")
        entries[key] = None
        chunks.append(Chunk(key, None, files[place[0]], *place[1:], False))
    json.loads(cursor.take(details))
    cursor.end()
    return entries, chunks


def check_sums(payload: bytes, crc: int, sum_of_item: int, running: list[int] | None, what: str) -> None:
    need(crc == sum_of_item, f"{what}: the seal states another CRC-32")
    if running is None:
        return
    need(len(payload) > MIB and len(running) == (len(payload) - 1) // MIB, f"{what}: number of running sums")
    previous = 0
    for block, after in enumerate([*running, crc]):
        found = zlib.crc32(memoryview(payload)[block * MIB : (block + 1) * MIB], previous)
        need(found == after, f"{what}: block {block}")
        previous = after


# --- the checkpoint


def read_checkpoint(directory: str | Path) -> Checkpoint:
    directory = Path(directory)
    program, sums = split_metadata(read_file(directory, ".metadata"))
    entries, chunks = read_metadata(program)
    need(sums is None or len(sums.items) == len(chunks), ".metadata: the manifest is for another number of items")
    need(not sums or not sums.columns or sums.columns == (entries, chunks), ".metadata: columns and pickle differ")
    places = {(chunk.key, chunk.offsets): number for number, chunk in enumerate(chunks)}
    need(len(places) == len(chunks), ".metadata: an item is named twice")
    keys = [key for key, entry in entries.items() if entry is not None]
    stored = sums.fingerprints if sums and sums.fingerprints is not None else [None] * len(keys)
    need(len(stored) == len(keys), ".metadata: fingerprints of another number of tensors")
    fingerprints = dict(zip(keys, stored, strict=True))
    need({chunk.key for chunk in chunks} <= set(entries), ".metadata: an item of no entry")
    files = {name: _open_data_file(directory, name, sums) for name in sorted({chunk.file for chunk in chunks})}

    def item_of(chunk: Chunk) -> bytes:
        content = files[chunk.file].content
        need(chunk.start + chunk.length <= len(content), f"{chunk.key}: behind the end of {chunk.file}")
        return content[chunk.start : chunk.start + chunk.length]

    result = Checkpoint(sealed=sums is not None)
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for key, entry in entries.items():
        if entry is None:
            need((key, None) in places, f"{key}: no item")
            number = places[key, None]
            chunk = chunks[number]
            item = item_of(chunk)
            _check_row(files[chunk.file], chunk, TableRow(key, None, (), (), ()))
            used[chunk.file].append((chunk.start, chunk.length))
            if sums:
                check_sums(item, zlib.crc32(item), sums.items[number], None, key)
            result.objects[key] = Opaque(item) if chunk.transformed else decode_object(item, key)
            continue
        array, todo = np.zeros(entry.shape, DTYPES[entry.dtype]), np.ones(entry.shape, bool)
        for offsets, sizes in entry.boxes:
            need(len(offsets) == len(sizes) == len(entry.shape), f"{key}: axes of a chunk")
            inside = zip(offsets, sizes, entry.shape, strict=True)
            need(all(offset + size <= whole for offset, size, whole in inside), f"{key}: a chunk leaves the tensor")
            need((key, offsets) in places, f"{key}: no item at {offsets}")
            number = places[key, offsets]
            chunk = chunks[number]
            row = TableRow(key, entry.dtype, entry.shape, offsets, sizes)
            if 0 in sizes and row not in files[chunk.file].rows.get((chunk.start, chunk.length), []):
                continue  # may be said to lie where another chunk lies: nothing of it is read
            if chunk.transformed:
                raise UnsupportedError(f"{key}: behind a stream transform")
            what = f"{key} at {offsets} ({chunk.file}, {chunk.start})"
            _check_row(files[chunk.file], chunk, row)
            used[chunk.file].append((chunk.start, chunk.length))
            payload, crc = tensor_payload(item_of(chunk), entry.dtype, sizes, what)
            payload_at = chunk.start + head_length(entry.dtype, sizes)
            need(len(payload) < LARGE_TENSOR or payload_at % PAGE == 0, f"{what}: payload starts at {payload_at}")
            if sums:
                check_sums(payload, crc, sums.items[number], sums.running.get(number), what)
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            need(todo[box].all(), f"{key}: chunks overlap")
            todo[box] = False
            array[box] = np.frombuffer(payload, array.dtype).reshape(sizes)
        need(not todo.any(), f"{key}: elements that no chunk has")
        # Those of Megatron-Core's flattened stretches are of another shape, which this reader does not make.
        known = None if program.count(b"mcore_data") else fingerprints[key]
        need(known in (None, zlib.crc32(array.tobytes())), f"{key}: fingerprint")
        result.tensors[key] = array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("="))
    for name, spans in used.items():
        spans.sort()
        apart = all(start + length <= later for (start, length), (later, _) in itertools.pairwise(spans))
        need(apart, f"{name}: two items have a byte in common")
    return result


def _open_data_file(directory: Path, name: str, sums: Sums | None) -> DataFile:
    content = read_file(directory, name)
    sealed = read_seal(name, content)
    if sums is not None:
        need(name in sums.files, f"{name}: not in the seal of .metadata")
        need(sealed, f"{name}: no footer")
        found = (len(content), sealed.table_crc, sealed.save_id) if sealed else None
        need(found == sums.files[name], f"{name}: not the file that .metadata means")
    return sealed or DataFile(name, content, b"", 0, {})


def _check_row(file: DataFile, chunk: Chunk, expected: TableRow) -> None:
    """That the table of the file, where there is one, lists this item at its place."""
    if file.save_id:
        rows = file.rows.get((chunk.start, chunk.length), [])
        need(expected in rows, f"{chunk.key}: the table of {file.name} has {rows} there")
