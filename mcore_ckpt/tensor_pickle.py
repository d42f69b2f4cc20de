"""The pickle (`data.pkl`) with which `torch.save` describes one tensor, written by hand.

A tensor item's pickle is a short program for the pickle machine that calls `_rebuild_tensor_v2` (dtypes that have a
legacy storage class) or `_rebuild_tensor_v3` (all newer ones) with the storage, offset, sizes and strides. Emitting it
is concatenation. `tensor_unpickle.py` reads such programs back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from mcore_ckpt.errors import CheckpointError

__all__ = [
    "DTYPES",
    "DtypeEntry",
    "UnsupportedDtypeError",
    "contiguous_strides",
    "dtype_entry",
    "numbers_at",
    "own_dtype_and_shape",
    "tensor_pickle",
]


class UnsupportedDtypeError(CheckpointError, ValueError):
    """No tensor item can be made by hand for that dtype (quantized dtypes among them: they carry scales)."""


class DtypeEntry(NamedTuple):
    """How a dtype lies in a tensor item.

    Attributes:
        element_bytes: bytes of one element.
        storage_class: name of the legacy class `torch.<storage_class>`; None if the dtype is newer than those, and is
            stored as an untyped storage counted in bytes.
    """

    element_bytes: int
    storage_class: str | None


DTYPES: Mapping[str, DtypeEntry] = MappingProxyType(
    {
        "float64": DtypeEntry(8, "DoubleStorage"),
        "float32": DtypeEntry(4, "FloatStorage"),
        "float16": DtypeEntry(2, "HalfStorage"),
        "bfloat16": DtypeEntry(2, "BFloat16Storage"),
        "int64": DtypeEntry(8, "LongStorage"),
        "int32": DtypeEntry(4, "IntStorage"),
        "int16": DtypeEntry(2, "ShortStorage"),
        "int8": DtypeEntry(1, "CharStorage"),
        "uint8": DtypeEntry(1, "ByteStorage"),
        "bool": DtypeEntry(1, "BoolStorage"),
        "complex64": DtypeEntry(8, "ComplexFloatStorage"),
        "complex128": DtypeEntry(16, "ComplexDoubleStorage"),
        "complex32": DtypeEntry(4, None),
        "uint16": DtypeEntry(2, None),
        "uint32": DtypeEntry(4, None),
        "uint64": DtypeEntry(8, None),
        "float8_e4m3fn": DtypeEntry(1, None),
        "float8_e4m3fnuz": DtypeEntry(1, None),
        "float8_e5m2": DtypeEntry(1, None),
        "float8_e5m2fnuz": DtypeEntry(1, None),
        "float8_e8m0fnu": DtypeEntry(1, None),
        "float4_e2m1fn_x2": DtypeEntry(1, None),
        "bits8": DtypeEntry(1, None),
        "bits16": DtypeEntry(2, None),
        "bits1x8": DtypeEntry(1, None),
        "bits2x4": DtypeEntry(1, None),
        "bits4x2": DtypeEntry(1, None),
    }
)
"""torch's dtype names, without `torch.`, of every dtype that is plain bytes in `torch.save`."""


def dtype_entry(dtype: str) -> DtypeEntry:
    """The row of `DTYPES` for a dtype name without `torch.`; raises `UnsupportedDtypeError`."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(
            f"dtype {dtype!r} has no tensor item made by hand (expected one of {', '.join(DTYPES)}); "
            "save such a tensor as an object, or convert it"
        ) from None


# Opcodes of the pickle machine, protocol 2, as `pickletools` names them.
_PROTO_2, _GLOBAL, _MARK, _STOP = b"\x80\x02", b"c", b"(", b"."
_BINUNICODE, _BININT1, _BININT2, _BININT, _LONG1 = b"X", b"K", b"M", b"J", b"\x8a"
_EMPTY_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3, _TUPLE = b")", b"\x85", b"\x86", b"\x87", b"t"
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
    """The `data.pkl` of a C-contiguous tensor that fills storage `0`.

    Args:
        dtype: a key of `DTYPES`.
        shape: sizes, in elements; `element_count` is their product.
    """
    before_count, scale, after_strides = _PROGRAMS[dtype]
    rank = len(shape)
    layout: tuple[bytes, ...]
    count = _int(element_count * scale)
    if rank == 1:
        size = shape[0]
        layout = (_int(size), b"\x85K\x01\x85")
    elif rank == 2:
        rows, columns = shape
        layout = (_int(rows), _int(columns), _TUPLE2, _int(columns or 1), b"K\x01\x86")
    elif rank == 0:
        layout = (_EMPTY_TUPLE, _EMPTY_TUPLE)
    elif rank == 3:
        planes, rows, columns = shape
        row_stride = columns or 1
        layout = (
            *(_int(planes), _int(rows), _int(columns), _TUPLE3),
            *(_int((rows or 1) * row_stride), _int(row_stride), b"K\x01\x87"),
        )
    else:
        layout = (_MARK, *map(_int, shape), _TUPLE, _MARK, *map(_int, contiguous_strides(shape)), _TUPLE)
    return b"".join((before_count, count, _AFTER_COUNT, *layout, after_strides))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous tensor; as in torch, an axis of size 0 counts as 1."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size or 1
    return tuple(reversed(strides))


# From the start of the pickle to the count: own pickles of legacy dtypes are recognized by it at once.
_OWN_START = {program.before_count: dtype for dtype, program in _PROGRAMS.items() if DTYPES[dtype].storage_class}


def own_dtype_and_shape(pickle: bytes) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape that `tensor_pickle` may have made these bytes from; None if it surely did not.

    Only looks where they would stand: the caller has to make the pickle of them again and compare.
    """
    after_start = pickle.find(b"X\x03\x00\x00\x00cpu") + 8
    dtype = _OWN_START.get(pickle[:after_start])
    if dtype is None:
        dtype_at = pickle.rfind(b"ctorch\n") + 7
        dtype = pickle[dtype_at : pickle.find(b"\n", dtype_at)].decode("latin-1")
        if dtype not in DTYPES:
            return None
    position = pickle.find(_AFTER_COUNT, after_start) + len(_AFTER_COUNT)
    if pickle[position : position + 1] == _MARK:  # before a tuple of more than three
        position += 1
    return dtype, numbers_at(pickle, position)


def numbers_at(pickle: bytes, position: int) -> tuple[int, ...]:
    """The ints that a pickle pushes from `position` on, up to the first opcode of another kind (or the end)."""
    numbers = []
    stop = len(pickle)
    while position < stop:
        opcode = pickle[position]
        if opcode == 0x4B:  # BININT1
            number_at, position = position + 1, position + 2
        elif opcode == 0x4D:  # BININT2
            number_at, position = position + 1, position + 3
        elif opcode == 0x4A:  # BININT
            number_at, position = position + 1, position + 5
        elif opcode == 0x8A:  # LONG1
            number_at = position + 2
            position = number_at + int.from_bytes(pickle[position + 1 : number_at], "little")
        else:
            break
        numbers.append(int.from_bytes(pickle[number_at:position], "little", signed=position - number_at > 2))
    return tuple(numbers)
