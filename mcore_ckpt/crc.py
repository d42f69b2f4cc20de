"""CRC-32 as zip archives use it, from the fastest library that is installed.

Every byte of a checkpoint is summed on save and on load, so the speed counts: `isal` and `zlib_ng` use the carry-less
multiplication of the CPU and reach about 30 GB/s on one core, zlib's table-driven loop about 4 GB/s. All three give the
same value and release the GIL on large buffers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["IMPLEMENTATION", "crc32"]

# In order of preference. zlib is part of the standard library, so the search cannot fail.
_CANDIDATES = ("isal.isal_zlib", "zlib_ng.zlib_ng", "zlib")


def _fastest(candidates: tuple[str, ...]) -> tuple[str, Callable[..., int]]:
    for module_name in candidates[:-1]:
        try:
            return module_name, importlib.import_module(module_name).crc32
        except (ImportError, AttributeError):
            continue
    return candidates[-1], importlib.import_module(candidates[-1]).crc32


IMPLEMENTATION, _crc32 = _fastest(_CANDIDATES)


def crc32(buffer: Any, value: int = 0) -> int:
    """CRC-32 of `buffer`, continued from `value`: `crc32(b, crc32(a)) == crc32(a + b)`.

    Args:
        buffer: C-contiguous object with the buffer protocol.
        value: CRC-32 of what precedes `buffer`; 0 at the start.

    Returns:
        Unsigned 32-bit value, the same for every implementation.
    """
    return _crc32(buffer, value)
