"""CRC-32 as zip archives use it, of isal where that is installed.

Every byte of a checkpoint is summed on save and on load, so the speed counts: `isal` uses the carry-less multiplication
of the CPU and reaches about 30 GB/s on one core, zlib's table-driven loop about 4 GB/s. Both give the same value and
release the GIL on large buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

try:
    from isal import isal_zlib as _library
except ImportError:  # there is none for every machine
    import zlib as _library  # type: ignore[no-redef]

_combine: Callable[[int, int, int], int] | None = getattr(_library, "crc32_combine", None)


crc32: Callable[..., int] = _library.crc32
"""CRC-32 of a C-contiguous buffer, continued from a value: `crc32(b, crc32(a)) == crc32(a + b)`. Unsigned."""

NO_SHIFT = 1 << 31
"""The factor (`shift_factor`) of a CRC-32 that nothing follows."""

POLYNOMIAL = 0xEDB88320  # bit-reversed, as all of a CRC-32 is: the highest bit stands for x^0


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two adjoining blocks from that of each: the first times x^(8 * second_bytes), as Mark Adler has it."""
    if _combine is not None:
        return _combine(first, second, second_bytes)
    return (_multiply(_power_of_x(8 * second_bytes), first) if first else 0) ^ second


def crc32_of_zeros(nbytes: int) -> int:
    """CRC-32 of so many zero bytes."""
    return crc32_combine(0xFFFFFFFF, 0xFFFFFFFF, nbytes)


def shift_factor(nbytes: int) -> int:
    """The polynomial by which a CRC-32 is multiplied to count in front of so many bytes."""
    return crc32_combine(NO_SHIFT, 0, nbytes)


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials, modulo the CRC's."""
    product = 0
    bit = 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@lru_cache(maxsize=1 << 16)  # thousands of ranks, each at a place of its own in every tensor
def _power_of_x(exponent: int) -> int:
    result, square = NO_SHIFT, NO_SHIFT >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
