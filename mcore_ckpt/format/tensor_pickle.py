"""The dtypes of torch, and the one pickle that most tensor items have.

A tensor's pickle (`data.pkl`) is a short program that calls `_rebuild_tensor_v2` (dtypes that have a legacy storage
class) or `_rebuild_tensor_v3` (all newer ones) with the storage, offset, sizes and strides. To emit it is
concatenation; the restricted unpickler reads it (`state_file.py`). Nothing of torch is imported or called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.boxes import strides_of
from mcore_ckpt.core.errors import CheckpointError

MAX_AXES: Final = 64
"""Axes of a shape; torch and numpy have no more."""

MAX_SIZE: Final = 2**63 - 1
"""The largest size, stride or offset."""


class WrongArgumentsError(Exception):
    """Raised by a constructor for arguments that nothing that was saved has; the message says which."""


def checked_size(values: Any) -> tuple[int, ...]:
    """`values` as sizes, strides or offsets: at most 64 ints from 0 to 2**63 - 1; raises `WrongArgumentsError`."""
    if not isinstance(values, (tuple, list)) or len(values) > MAX_AXES:
        raise WrongArgumentsError(f"expected at most {MAX_AXES} sizes")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise WrongArgumentsError("expected sizes from 0 to 2**63 - 1")
    return tuple(values)


class UnsupportedDtypeError(CheckpointError, ValueError):
    """No tensor item can be made by hand for that dtype (quantized dtypes among them: they carry scales)."""


class DtypeEntry(NamedTuple):
    """How a dtype lies in a tensor item."""

    element_bytes: int  # bytes of one element
    # Name of the legacy class `torch.<storage_class>`; None if the dtype is newer than those, and is stored as an
    # untyped storage counted in bytes.
    storage_class: str | None = None
    numpy: str | None = None  # numpy's name for the same elements; None if it has none
    safetensors: str | None = None  # the name in safetensors files; None if that format has none


DTYPES: Final[Mapping[str, DtypeEntry]] = MappingProxyType(
    {
        "float64": DtypeEntry(8, "DoubleStorage", "float64", "F64"),
        "float32": DtypeEntry(4, "FloatStorage", "float32", "F32"),
        "float16": DtypeEntry(2, "HalfStorage", "float16", "F16"),
        "bfloat16": DtypeEntry(2, "BFloat16Storage", None, "BF16"),
        "int64": DtypeEntry(8, "LongStorage", "int64", "I64"),
        "int32": DtypeEntry(4, "IntStorage", "int32", "I32"),
        "int16": DtypeEntry(2, "ShortStorage", "int16", "I16"),
        "int8": DtypeEntry(1, "CharStorage", "int8", "I8"),
        "uint8": DtypeEntry(1, "ByteStorage", "uint8", "U8"),
        "bool": DtypeEntry(1, "BoolStorage", "bool", "BOOL"),
        "complex64": DtypeEntry(8, "ComplexFloatStorage", "complex64", "C64"),
        "complex128": DtypeEntry(16, "ComplexDoubleStorage", "complex128"),
        "complex32": DtypeEntry(4),
        "bcomplex32": DtypeEntry(4),  # two bfloat16; since torch 2.15
        "uint16": DtypeEntry(2, None, "uint16", "U16"),
        "uint32": DtypeEntry(4, None, "uint32", "U32"),
        "uint64": DtypeEntry(8, None, "uint64", "U64"),
        "float8_e4m3fn": DtypeEntry(1, None, None, "F8_E4M3"),
        "float8_e4m3fnuz": DtypeEntry(1),
        "float8_e5m2": DtypeEntry(1, None, None, "F8_E5M2"),
        "float8_e5m2fnuz": DtypeEntry(1),
        "float8_e8m0fnu": DtypeEntry(1, None, None, "F8_E8M0"),
        "float4_e2m1fn_x2": DtypeEntry(1),
        "bits8": DtypeEntry(1),
        "bits16": DtypeEntry(2),
        "bits1x8": DtypeEntry(1),
        "bits2x4": DtypeEntry(1),
        "bits4x2": DtypeEntry(1),
    }
)
"""torch's dtype names, without `torch.`, of every dtype that is plain bytes in `torch.save`."""

DTYPE_NAMES: Final = (
    *DTYPES,
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u")),
)
"""Every dtype that torch has had since 2.1: an index may name them all."""

DTYPE_OF_STORAGE: Final = {entry.storage_class: dtype for dtype, entry in DTYPES.items() if entry.storage_class}
"""Dtype by legacy storage class."""


def dtype_entry(dtype: str) -> DtypeEntry:
    """The row of `DTYPES` for a dtype name without `torch.`; raises `UnsupportedDtypeError`."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(
            f"dtype {dtype!r} has no tensor item made by hand (expected one of {', '.join(DTYPES)}); "
            "save such a tensor as an object, or convert it"
        ) from None


# --------------------------------------------------------------------------------------------------------- written

# Opcodes of protocol 2, as `pickletools` names them.
_PROTO_2, _GLOBAL, _MARK, _STOP = b"\x80\x02", b"c", b"(", b"."
_BINUNICODE, _BININT1, _BININT2, _BININT, _LONG1 = b"X", b"K", b"M", b"J", b"\x8a"
_EMPTY_TUPLE, _TUPLE = b")", b"t"
_SHORT_TUPLES = (_EMPTY_TUPLE, b"\x85", b"\x86", b"\x87")
_BINPERSID, _REDUCE, _NEWFALSE = b"Q", b"R", b"\x89"

_SMALL_INTS = tuple(_BININT1 + bytes((value,)) for value in range(256))


def _int(value: int) -> bytes:
    """A non-negative int, in the shortest form that pickle protocol 2 has."""
    if value < 256:
        return _SMALL_INTS[value]
    if value < 1 << 16:
        return _BININT2 + value.to_bytes(2, "little")
    if value < 1 << 31:
        return _BININT + value.to_bytes(4, "little")
    length = (value.bit_length() >> 3) + 1
    return _LONG1 + bytes((length,)) + value.to_bytes(length, "little", signed=True)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def _name(module: str, name: str) -> bytes:
    return _GLOBAL + f"{module}\n{name}\n".encode()


class _Program(NamedTuple):
    """The parts of a tensor's pickle that depend on the dtype alone."""

    before_count: bytes
    storage_element_bytes: int
    after_strides: bytes


def _program(dtype: str, entry: DtypeEntry) -> _Program:
    untyped = entry.storage_class is None
    storage = ("torch.storage", "UntypedStorage") if entry.storage_class is None else ("torch", entry.storage_class)
    no_hooks = _NEWFALSE + _name("collections", "OrderedDict") + _EMPTY_TUPLE + _REDUCE  # requires_grad=False, hooks
    return _Program(
        before_count=b"".join(
            (
                _PROTO_2,
                _name("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2"),
                _MARK,
                _MARK,
                _text("storage"),
                _name(*storage),
                _text("0"),
                _text("cpu"),
            )
        ),
        storage_element_bytes=entry.element_bytes if untyped else 1,
        after_strides=no_hooks + (_name("torch", dtype) if untyped else b"") + _TUPLE + _REDUCE + _STOP,
    )


_PROGRAMS = {dtype: _program(dtype, entry) for dtype, entry in DTYPES.items()}
_AFTER_COUNT = _TUPLE + _BINPERSID + _int(0)  # ends the storage's id; the tensor starts at offset 0 of it


def tensor_pickle(dtype: str, shape: Sequence[int], element_count: int) -> bytes:
    """The `data.pkl` of a C-contiguous tensor that fills storage `0`; `element_count` is the product of `shape`."""
    before_count, scale, after_strides = _PROGRAMS[dtype]
    place = _tuple(shape) + _tuple(strides_of(shape))
    return b"".join((before_count, _int(element_count * scale), _AFTER_COUNT, place, after_strides))


def _tuple(values: Sequence[int]) -> bytes:
    ints = b"".join(map(_int, values))
    return ints + _SHORT_TUPLES[len(values)] if len(values) < 4 else _MARK + ints + _TUPLE


# ------------------------------------------------------------------------------------------------------------ read

MAX_PICKLE_BYTES = 16 * 1024
"""More than the pickle of a tensor with 64 axes takes."""


class NotPlainTensorError(WrongArgumentsError):
    """The pickle is of something else than one C-contiguous tensor; the message says of what."""


class FileTensor(NamedTuple):
    """A tensor that stays in its file, as its pickle describes it."""

    record: str  # number of its storage, which other tensors may share
    dtype: str  # torch's name without `torch.`
    offset: int  # of the first element, in elements of the storage
    shape: tuple[int, ...]  # sizes, in elements
    strides: tuple[int, ...] = ()  # in elements, where the elements do not follow one another in C order
    storage_bytes: int = 0  # of the storage

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].element_bytes

    @property
    def first_byte(self) -> int:
        """First byte of its elements, in the storage."""
        return self.offset * DTYPES[self.dtype].element_bytes


class StorageKind(NamedTuple):
    """The class of a storage; dtype None: untyped, counted in bytes."""

    dtype: str | None


class StorageReference(NamedTuple):
    """A storage that a pickle refers to."""

    record: str
    dtype: str | None
    nbytes: int


def stored_storage(reference: Any) -> StorageReference:
    """A storage, as torch refers to it; raises `WrongArgumentsError` for anything else."""
    if type(reference) is not tuple or len(reference) not in (5, 6) or reference[0] != "storage":
        raise WrongArgumentsError("a reference to something else than a storage")
    if len(reference) == 6 and reference[5] is not None:
        raise WrongArgumentsError("a storage that is a view of another")
    kind, record, count = reference[1], reference[2], reference[4]
    if type(kind) is not StorageKind or type(record) is not str or type(count) is not int or not 0 <= count <= MAX_SIZE:
        raise WrongArgumentsError("a reference to no storage")
    width = 1 if kind.dtype is None else DTYPES[kind.dtype].element_bytes
    return StorageReference(record, kind.dtype, count * width)


def described(storage: Any, dtype: str, offset: Any, size: Any, stride: Any) -> FileTensor:
    """The tensor of one call; raises `WrongArgumentsError` if it does not lie inside its storage."""
    if type(storage) is not StorageReference or dtype not in DTYPES:
        raise WrongArgumentsError(f"a tensor of {dtype:.40} in a storage")
    (offset,), size, stride = checked_size((offset,)), checked_size(size), checked_size(stride)
    if len(stride) != len(size):
        raise WrongArgumentsError(f"a tensor of {len(size)} axes in {len(stride)} steps")
    held = storage.nbytes // DTYPES[dtype].element_bytes
    last = -1 if 0 in size else offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= held:
        raise WrongArgumentsError(f"elements up to {last} inside a storage of {held}")
    # The stride of an axis of one element says nothing.
    steps = zip(size, stride, strides_of(size), strict=True)
    strided = last >= 0 and any(n > 1 and step != plain for n, step, plain in steps)
    at = offset if last >= 0 else 0
    return FileTensor(storage.record, dtype, at, size, stride if strided else (), storage.nbytes)


def contiguous(tensor: FileTensor) -> FileTensor:
    """A tensor whose elements follow one another; raises `NotPlainTensorError`."""
    if tensor.strides:
        raise NotPlainTensorError("its strides are not those of a contiguous tensor")
    return tensor


STORAGE_KINDS: Final[Mapping[str, StorageKind]] = {
    **{f"torch.{name}": StorageKind(dtype) for name, dtype in DTYPE_OF_STORAGE.items()},
    **{f"{module}.UntypedStorage": StorageKind(None) for module in ("torch", "torch.storage")},
}
"""By the name of their class."""
