"""The safetensors format: a header of JSON, then the tensors' bytes. Read with checks, written by hand; no dependency.

8 bytes    length of the header, little-endian
header     {"name": {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}, "__metadata__": {...}}
data       offsets count from here

A tensor that is read is one chunk, plain bytes in a file: so a reshard takes it like any other source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.stored_items import chunk_name
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads

__all__ = [
    "RawPayloads",
    "RawTensor",
    "raw_index",
    "read_safetensors",
    "safetensors_dtype",
    "safetensors_header",
]

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
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    position = 0
    for name, dtype, shape in tensors:
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

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is no safetensors file, or contradicts itself.
    """
    path = directory / name
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise CorruptCheckpointError(f"{path}: a header of {length} bytes in a file of {size_bytes}")
            text = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: no such file") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {
            key: _tensor(path, name, key, fields, 8 + length, size_bytes)
            for key, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        }
    except CorruptCheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path}: not a safetensors header ({type(error).__name__}: {error}); fetch the file again"
        ) from error


def _tensor(path: Path, name: str, key: str, fields: Mapping[str, Any], first: int, size_bytes: int) -> RawTensor:
    dtype, shape = _NAMES.get(fields["dtype"]), tuple(fields["shape"])
    start, stop = fields["data_offsets"]
    if dtype is None:
        raise CorruptCheckpointError(f"{path}: {key}: dtype {fields['dtype']!r} is not known here")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise CorruptCheckpointError(f"{path}: {key}: shape and offsets must be non-negative ints")
    expected = math.prod(shape) * element_bytes(dtype)
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
