"""The dtypes of torch, in one table: how each lies in a file, and what others call it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from mcore_ckpt.core.errors import CheckpointError


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
