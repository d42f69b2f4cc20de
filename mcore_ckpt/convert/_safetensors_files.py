"""The safetensors format: a header of JSON, then the tensors' bytes. Read with checks, written by hand; no dependency.

8 bytes    length of the header, little-endian
header     {"name": {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}, "__metadata__": {...}}
data       offsets count from here

A tensor that is read is one chunk, plain bytes in a file: so a reshard takes it like any other source.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.items.checks import chunk_name
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads

__all__ = [
    "RawPayloads",
    "RawTensor",
    "parse_json",
    "raw_index",
    "read_safetensors",
    "safetensors_dtype",
    "safetensors_header",
]

_METADATA = "__metadata__"
_MAX_NUMBER = 2**63
_MAX_AXES = 64
# What the reference implementation allows.
_MAX_HEADER_BYTES = 100_000_000
# Readers that map the file want elements aligned; the header is padded with spaces, as the format provides.
_ALIGNMENT = 64

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}


class RawTensor(NamedTuple):
    """Plain elements in a file: bytes `[offset, offset + nbytes)`, C order, little-endian."""

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def safetensors_dtype(dtype: str, key: str) -> str:
    """The format's name for a dtype of torch; raises `OptionError` if it has none."""
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise OptionError(
            f"{key}: safetensors has no {dtype}; leave it out (--only, --rename), convert it (--dtype), or export to "
            "torch"
        ) from None


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The file up to the data, and where each tensor starts in the file.

    Args:
        tensors: name, torch's dtype and shape of each, in the order in which their bytes follow.
        metadata: strings for `__metadata__`.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    starts: dict[str, int] = {}
    position = 0
    for name, dtype, shape in tensors:
        if name == _METADATA:
            raise OptionError(f"{name}: safetensors keeps this name for itself; give the tensor another one (--rename)")
        stop = position + math.prod(shape) * element_bytes(dtype)
        header[name] = {
            "dtype": safetensors_dtype(dtype, name),
            "shape": list(shape),
            "data_offsets": [position, stop],
        }
        starts[name] = position
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + start for name, start in starts.items()}


def read_safetensors(directory: Path, name: str) -> dict[str, RawTensor]:
    """The tensors of one file, by name; every number is held against the file before it is believed.

    As the format demands, each name is there once, and the tensors follow one another without holes or overlaps from
    the first byte of the data to the last: anything else is a file of which some part would be lost, or read twice.

    Raises:
        CheckpointNotFoundError: there is no such file.
        LoadError: it cannot be read.
        CorruptCheckpointError: it is no safetensors file, or contradicts itself.
    """
    path = directory / name
    with storage_at(directory, follow_links=True).open_reader(name) as reader:
        size_bytes = reader.size_bytes
        length = int.from_bytes(reader.read(0, min(8, size_bytes)), "little")
        if size_bytes < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CorruptCheckpointError(f"{path}: a header of {length} bytes in a file of {size_bytes}")
        text = reader.read(8, length)
    header = parse_json(text, str(path))
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{path}: its header is no JSON object; fetch the file again")
    header.pop(_METADATA, None)
    tensors = {key: _tensor(path, name, key, fields, 8 + length, size_bytes) for key, fields in header.items()}
    stop, previous = 8 + length, ""
    for key, raw in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if raw.offset != stop:
            problem = "bytes before it belong to no tensor" if raw.offset > stop else f"it overlaps {previous}"
            raise CorruptCheckpointError(
                f"{path}: {key}: its data begin at byte {raw.offset}, expected {stop}: {problem}; fetch the file again"
            )
        stop, previous = raw.offset + raw.nbytes, key
    if stop != size_bytes:
        raise CorruptCheckpointError(
            f"{path}: its tensors end at byte {stop}, the file at {size_bytes}: tensors are missing from its header; "
            "fetch the file again"
        )
    return tensors


def parse_json(text: bytes, where: str) -> Any:
    """A JSON document in which no object has one name twice: of the two values, one would be lost.

    Raises:
        CorruptCheckpointError: it is none.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            raise CorruptCheckpointError(
                f"{where}: {names.most_common(1)[0][0]!r:.200} is in it twice; one would be lost"
            )
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where}: not JSON ({type(error).__name__}: {error}); fetch the file again"
        ) from error


def _tensor(path: Path, name: str, key: str, fields: Any, first: int, size_bytes: int) -> RawTensor:
    try:
        dtype_name, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        dtype = _NAMES.get(dtype_name)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{path}: {key}: expected dtype, shape and two data_offsets ({type(error).__name__}: {error}); fetch the "
            "file again"
        ) from error
    if dtype is None:
        raise CorruptCheckpointError(f"{path}: {key}: dtype {dtype_name!r:.80} is not known here")
    if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in (*shape, start, stop)):
        raise CorruptCheckpointError(f"{path}: {key}: shape and offsets must be non-negative ints")
    if len(shape) > _MAX_AXES:
        raise CorruptCheckpointError(f"{path}: {key}: {len(shape)} axes, expected at most {_MAX_AXES}")
    expected = math.prod(shape) * element_bytes(dtype)
    if 0 in shape and math.prod(filter(None, shape)) >= _MAX_NUMBER:
        raise CorruptCheckpointError(f"{path}: {key}: expected axes that can be multiplied, got {list(shape)}")
    if stop - start != expected or first + stop > size_bytes:
        raise CorruptCheckpointError(
            f"{path}: {key}: bytes [{start}, {stop}) of the data for {dtype} {list(shape)}, expected {expected} bytes "
            f"inside the file of {size_bytes}"
        )
    return RawTensor(name, first + start, expected, dtype, shape)


def raw_index(directory: Path, tensors: Mapping[str, RawTensor]) -> CheckpointIndex:
    """An index of tensors that lie plainly in files."""
    entries = {}
    for key, raw in tensors.items():
        item = StoredItem(raw.file, raw.offset, raw.nbytes)
        entries[key] = TensorEntry(key, raw.dtype, raw.shape, (StoredChunk((0,) * len(raw.shape), raw.shape, item),))
    return CheckpointIndex(str(directory), entries, {})


class RawPayloads(StoredPayloads):
    """Payloads of a `raw_index`: an item is its payload."""

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        item, where = chunk.item, chunk_name(entry.fqn, chunk)
        with self.files.reader(item.file) as reader:
            reader.check_range(item.offset, item.length)
        return StoredPayload(where, item.file, item.offset, item.length, None)
