"""A second reader of the format, written from docs/format.md alone.

It shares no code with the package and needs neither it nor torch: what it reads, and what it refuses, is what the page
says. So a test that compares the two finds a page that is wrong, and a writer that changes without the page.

`read_checkpoint(directory)` checks what the page calls normative, and gives tensors as numpy arrays. Archives are left
to `zipfile`; the bytes around a payload are compared with frozen items in `test_container_hostile.py`.
Numbers of dtypes that numpy does not have come as unsigned integers of their size, objects as their pickles.
`CorruptError`: the page says that this is damaged. `UnsupportedError`: the page has it, this reader does not (tensors
behind stream transforms, items in forms that only other writers make).
"""

import io
import itertools
import json
import math
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MIB = 1 << 20
PAGE, LARGE_TENSOR = 4096, 524_288
DATA_MAGIC, DATA_FOOTER = b"\x89mckFILE", 64
META_MAGIC, META_END = b"\x89mckSUMS", b"\x89mckEND\n"
STATE_MAGIC = b"\x89mckSTAT"
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


@dataclass
class Checkpoint:
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # their pickles
    sealed: bool = False
    regions: list["Region"] = field(default_factory=list)  # of parameters in flat buckets


class Chunk(NamedTuple):
    """One entry of `storage_data`."""

    key: str
    offsets: tuple[int, ...] | None  # None: an object
    file: str
    start: int
    length: int


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

    def names(self, lengths: list[int]) -> list[str]:
        try:
            return [self.take(length).decode("utf-8", "surrogatepass") for length in lengths]
        except UnicodeDecodeError as error:
            raise CorruptError(f"{self.what}: not UTF-8") from error

    def end(self) -> None:
        need(self.at == len(self.data), f"{self.what}: {len(self.data) - self.at} bytes too many")


# --- files


def read_file(directory: Path, name: str) -> bytes:
    parts = name.split("/")
    need(name and "\0" not in name and not {"", ".", ".."} & set(parts), f"file name {name!r} leaves the checkpoint")
    path = directory / name
    need(path.is_file() and not path.is_symlink(), f"{path} is not a regular file")
    return path.read_bytes()


# --- zip archives


def zip_records(item: bytes) -> dict[str, bytes]:
    """The content of each record, in the order of the directory; CRC-32s are compared."""
    try:
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            entries = archive.infolist()
            need(all(entry.compress_type == zipfile.ZIP_STORED for entry in entries), "zip archive: packed record")
            return {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, struct.error) as error:
        raise CorruptError(f"zip archive: {error}") from error


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


def tensor_payload(item: bytes, dtype: str, shape: tuple[int, ...], what: str) -> bytes:
    """The payload of a tensor item of ours."""
    records = zip_records(item)
    if list(records) != ["archive/data.pkl", "archive/data/0", "archive/version", "archive/byteorder"]:
        raise UnsupportedError(f"{what}: not an item of ours: {list(records)}")
    program, payload, version, byteorder = records.values()
    need(program == tensor_pickle(dtype, shape), f"{what}: data.pkl does not rebuild {dtype} {shape}")
    need(version == b"3\n" and byteorder == b"little", f"{what}: version or byte order")
    need(len(payload) == math.prod(shape) * DTYPES[dtype].itemsize, f"{what}: {len(payload)} bytes of payload")
    return payload


# --- object items


def object_pickle(item: bytes, what: str) -> bytes:
    """The pickle of an object item."""
    records = {name.partition("/")[2]: content for name, content in zip_records(item).items()}
    need("data.pkl" in records, f"{what}: no data.pkl")
    need(records.get("byteorder", b"little") == b"little", f"{what}: byte order")
    return records["data.pkl"]


# --- the table of parameters of flat buckets

FLAT_MAGIC, FLAT_HOLDER = b"\x89mckFLAT", "per_bucket_numel/shard_0_1"


class Region(NamedTuple):
    bucket: str  # its key without the state
    parameter: str
    shape: tuple[int, ...]  # of the parameter
    offsets: tuple[int, ...]  # of the slice, as the sizes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    is_copy: bool

    @property
    def elements(self) -> np.ndarray:
        """Which elements of the bucket it is, in the slice's shape."""
        found = np.full(self.sizes, self.first, np.int64)
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            found += (np.arange(size) * stride).reshape([-1 if n == axis else 1 for n in range(len(self.sizes))])
        return found


def parameter_regions(item: bytes, group: str, stored: dict[str, int]) -> list[Region] | None:
    """What the record of the object that holds it says of the buckets of a group; `stored`: their lengths."""
    records = {name.partition("/")[2]: content for name, content in zip_records(item).items()}
    if "mcore_ckpt/parameters" not in records:
        return None
    what = f"parameters of {group}"
    head = Cursor(records["mcore_ckpt/parameters"], what)
    need(head.take(8) == FLAT_MAGIC and head.numbers(4, 1) == [1], f"{what}: version")
    (length,) = head.numbers(8, 1)
    need(length <= 1 << 28, f"{what}: {length} bytes")
    cursor = Cursor(inflate(head.data[head.at :], length), what)
    buckets, form_count, count, words, axes_of_all, alignment, longest = cursor.numbers(8, 7)
    need(count <= 2_000_000, f"{what}: {count} regions")
    lengths, numbers = cursor.numbers(8, buckets), iter(cursor.numbers(8, words))
    forms = []
    for _ in range(form_count):
        axes = next(numbers, 0)
        forms.append(tuple(tuple(itertools.islice(numbers, axes)) for _ in range(3)))
        need(len({*map(len, forms[-1])}) == 1, f"{what}: a form")
    need(next(numbers, None) is None, f"{what}: forms")
    offsets, firsts = iter(cursor.numbers(8, axes_of_all)), cursor.numbers(8, count)
    owners, of_forms, copies = (cursor.numbers(4, count) for _ in range(3))
    names = cursor.names(cursor.numbers(4, buckets + count))
    cursor.end()
    need(dict(zip([group + name for name in names[:buckets]], lengths, strict=True)) == stored, f"{what}: buckets")
    found, taken = [], [np.zeros(length, np.int8) for length in lengths]
    for key, owner, form, first, copy in zip(names[buckets:], owners, of_forms, firsts, copies, strict=True):
        need(owner < buckets and form < form_count and copy < 2, f"{what}: a region")
        shape, sizes, strides = forms[form]
        at = tuple(itertools.islice(offsets, len(shape)))
        need(all(n > 0 and o + n <= all_ for o, n, all_ in zip(at, sizes, shape, strict=True)), f"{what}: a slice")
        region = Region(group + names[owner], key, shape, at, sizes, strides, first, bool(copy))
        elements = region.elements
        need(elements.max() < lengths[owner], f"{what}: {key} leaves its bucket")
        np.add.at(taken[owner], elements.ravel(), 1)
        found.append(region)
    need(next(offsets, None) is None, f"{what}: offsets")
    for bucket in taken:
        need(bucket.max() == 1, f"{what}: two regions in one another")
        edges = np.flatnonzero(np.diff(np.concatenate([[1], bucket, [1]])))
        for start, stop in edges.reshape(-1, 2).tolist():
            is_aligned = stop == len(bucket) or stop % alignment == 0
            need(stop - start <= longest and is_aligned, f"{what}: elements [{start}, {stop}) of no parameter")
    return found


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
    content: bytes
    save_id: bytes = b""
    table_crc: int = 0
    rows: dict[Span, list[TableRow]] = field(default_factory=dict)  # by offset and length of the item


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
    names_and_boxes = inflate(table[:split], inflated)
    spans = [tuple(span) for span in np.frombuffer(table[split:], "<u8").reshape(-1, 2).tolist()]
    rows = _table_rows(name, names_and_boxes, spans)
    return DataFile(content, footer[16:32], table_crc, rows)


def _table_rows(file: str, table: bytes, objects: list[Span]) -> dict[Span, list[TableRow]]:
    cursor = Cursor(table, f"{file}: table")
    n, m, d = cursor.numbers(4, 3)
    need(m == len(objects), f"{file}: number of objects")
    name_lengths = cursor.numbers(4, d + n + m)
    dtypes, axes = cursor.numbers(4, n), cursor.numbers(4, n)
    boxes = [tuple(tuple(cursor.numbers(8, count)) for _ in range(3)) for count in axes]
    tensors: list[Span] = [tuple(cursor.numbers(8, 2)) for _ in range(n)]
    names = cursor.names(name_lengths)
    cursor.end()
    need(all(kind < d for kind in dtypes) and set(names[:d]) <= set(DTYPES), f"{file}: dtype in the table")
    keys = names[d:]
    listed = [TableRow(key, names[kind], *box) for key, kind, box in zip(keys, dtypes, boxes, strict=False)]
    listed += [TableRow(key, None, (), (), ()) for key in keys[n:]]
    rows: dict[Span, list[TableRow]] = {}
    for row, span in zip(listed, tensors + objects, strict=True):
        rows.setdefault(span, []).append(row)
    return rows


# --- .metadata


class Inert:
    """Stands for whatever the pickle names: it keeps what it is given and does nothing."""

    where = ("", "")

    def __new__(cls, *arguments: Any, **_: Any) -> "Inert":
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
    need(isinstance(value, Inert) and value.where == ("torch", "Size") and value.arguments, ".metadata: no Size")
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
    if what.get("transform_descriptors"):
        raise UnsupportedError(f"{key}: behind a stream transform")
    return Chunk(key, None if offset is None else _size(offset), file, start, length)


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
    need(type(entries) is dict and type(items) is dict and {*map(type, entries)} <= {str}, ".metadata: no items")
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
    names = cursor.names(name_lengths)
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
    need(length <= MIB + 100 * len(packed), "columns inflate to too much")
    unpack = zlib.decompressobj()
    try:
        content = unpack.decompress(packed, length + 1)
    except zlib.error as error:
        raise CorruptError(f"columns: {error}") from error
    need(len(content) == length and unpack.eof and not unpack.unused_data, "columns: length")
    return content


def read_columns(first: bytes, second: bytes, files: list[str]) -> tuple[dict[str, TensorMeta | None], list[Chunk]]:
    """What the columns say, as `read_metadata` has it from the pickle."""
    cursor = Cursor(first, ".metadata: tensors")
    tensors, kinds, chunk_count, words, note_words = cursor.numbers(8, 5)
    dtype_lengths, _grads = cursor.numbers(4, kinds), cursor.numbers(4, kinds)
    key_lengths, of_forms = cursor.numbers(4, tensors), cursor.numbers(4, tensors)
    places = list(zip(*(cursor.numbers(size, chunk_count) for size in (4, 8, 8)), strict=True))
    numbers, _notes = cursor.numbers(8, words), cursor.numbers(8, note_words)
    dtypes, keys = cursor.names(dtype_lengths), cursor.names(key_lengths)
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
            chunks.append(Chunk(key, offsets, files[place[0]], *place[1:]))
    need(next(left, None) is None and len(entries) == tensors, ".metadata: chunks of no tensor")
    cursor = Cursor(second, ".metadata: objects")
    objects, paths, details = cursor.numbers(8, 3)
    key_lengths = cursor.numbers(4, objects)
    places = list(zip(*(cursor.numbers(size, objects) for size in (4, 8, 8)), strict=True))
    cursor.numbers(4, paths)
    for key, place in zip(cursor.names(key_lengths), places, strict=True):
        need(key not in entries and place[0] < len(files), ".metadata: an object")
        entries[key] = None
        chunks.append(Chunk(key, None, files[place[0]], *place[1:]))
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
            result.objects[key] = object_pickle(item, key)
            if key.endswith(FLAT_HOLDER):
                group = key.removesuffix(FLAT_HOLDER)
                flat = {
                    name.rpartition(".")[0]: meta.shape[0]
                    for name, meta in entries.items()
                    if meta is not None and name.startswith(f"{group}gbuf_idx_")
                }
                result.regions += parameter_regions(item, group, flat) or []
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
            what = f"{key} at {offsets} ({chunk.file}, {chunk.start})"
            _check_row(files[chunk.file], chunk, row)
            used[chunk.file].append((chunk.start, chunk.length))
            item = item_of(chunk)
            payload = tensor_payload(item, entry.dtype, sizes, what)
            named = item.index(b"archive/data/0")
            payload_at = chunk.start + named + 14 + struct.unpack_from("<H", item, named - 2)[0]
            aligned = payload_at % (PAGE if len(payload) >= LARGE_TENSOR else 64) == chunk.start % 64 == 0
            need(aligned, f"{what}: payload starts at {payload_at}")
            if sums:
                check_sums(payload, zlib.crc32(payload), sums.items[number], sums.running.get(number), what)
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            need(todo[box].all(), f"{key}: chunks overlap")
            todo[box] = False
            array[box] = np.frombuffer(payload, array.dtype).reshape(sizes)
        need(not todo.any(), f"{key}: elements that no chunk has")
        # Those of Megatron-Core's flattened stretches are of another shape, which this reader does not make.
        known = None if program.count(b"mcore_data") else fingerprints[key]
        need(known in (None, zlib.crc32(array.tobytes())), f"{key}: fingerprint")
        result.tensors[key] = array
    tiled: dict[str, np.ndarray] = {}
    for region in (one for one in result.regions if not one.is_copy):
        counts = tiled.setdefault(region.parameter, np.zeros(region.shape, np.int8))
        need(counts.shape == region.shape, f"{region.parameter}: two shapes")
        counts[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))] += 1
    need(all((counts == 1).all() for counts in tiled.values()), "parameters of flat buckets: slices do not tile one")
    for name, spans in used.items():
        spans.sort()
        apart = all(start + length <= later for (start, length), (later, _) in itertools.pairwise(spans))
        need(apart, f"{name}: two items have a byte in common")
    return result


def _open_data_file(directory: Path, name: str, sums: Sums | None) -> DataFile:
    content = read_file(directory, name)
    file = read_seal(name, content) or DataFile(content)
    if sums is not None:
        need(name in sums.files, f"{name}: not in the seal of .metadata")
        found = len(content), file.table_crc, file.save_id
        need(found == sums.files[name], f"{name}: not the file that .metadata means")
    return file


def _check_row(file: DataFile, chunk: Chunk, expected: TableRow) -> None:
    """That the table of the file, where there is one, lists this item at its place."""
    rows = file.rows.get((chunk.start, chunk.length), [])
    need(not file.save_id or expected in rows, f"{chunk.key}: the table of {chunk.file} has {rows} there")
