"""The pieces of which the pickle of an index is put together, as this package writes it: names, numbers, references."""

from __future__ import annotations

from struct import Struct

__all__ = ["integer", "memo_get", "named_classes", "text"]

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    "Metadata": _METADATA,
    "MetadataIndex": _METADATA,
    "TensorStorageMetadata": _METADATA,
    "BytesStorageMetadata": _METADATA,
    "ChunkStorageMetadata": _METADATA,
    "StorageMeta": _METADATA,
    "TensorProperties": _METADATA,
    "_MEM_FORMAT_ENCODING": _METADATA,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
_ATTRIBUTES = (
    *("fqn", "offset", "index", "properties", "size", "chunks", "offsets", "sizes"),
    *("relative_path", "length", "transform_descriptors"),
)

_PACK_INT = Struct("<ci").pack
_PACK_GET = Struct("<cI").pack


def text(value: str) -> bytes:
    """SHORT_BINUNICODE or BINUNICODE."""
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return b"\x8c" + bytes((len(data),)) + data
    return b"X" + len(data).to_bytes(4, "little") + data


_BYTES = tuple(b"K" + bytes((value,)) for value in range(256))


def integer(value: int) -> bytes:
    """BININT1, BININT or LONG1."""
    if 0 <= value < 256:
        return _BYTES[value]
    if -(2**31) <= value < 2**31:
        return _PACK_INT(b"J", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def memo_get(number: int) -> bytes:
    """BINGET or LONG_BINGET of a memoized object."""
    return b"h" + bytes((number,)) if number < 256 else _PACK_GET(b"j", number)


def named_classes() -> tuple[bytes, dict[str, bytes]]:
    """What every pickle begins with: all classes and attribute names, memoized and popped; and the GET of each."""
    names = [(name, text(module) + text(name) + b"\x93") for name, module in _CLASSES.items()]
    names += [(name, text(name)) for name in _ATTRIBUTES]
    return b"".join(made + b"\x940" for _, made in names), {name: memo_get(n) for n, (name, _) in enumerate(names)}
