"""Safetensors files as sources: every number in a header is compared with the file before it is believed."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.dtypes import DTYPES
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.reshard.view import FileRange
from mcore_ckpt.reshard.weight_files import METADATA_KEY
from mcore_ckpt.storage.resolve import storage_at

_MAX_NUMBER = 2**63
_MAX_AXES = 64
# What the reference implementation allows.
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {entry.safetensors: name for name, entry in DTYPES.items() if entry.safetensors}


def read_safetensors(directory: Path, name: str) -> dict[str, FileRange]:
    """The tensors of one file, by name; each number is checked against the file. `CorruptCheckpointError` unless each
    name is there once, and the tensors follow one another without holes or overlaps.
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
    header.pop(METADATA_KEY, None)
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
    """A JSON document; `CorruptCheckpointError` if an object has one name twice, of which one value would be lost."""

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


def _tensor(path: Path, name: str, key: str, fields: Any, first: int, size_bytes: int) -> FileRange:
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
    return FileRange(name, first + start, expected, dtype, shape)
