"""Plain text for people: sizes, counts and tables. Pure; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mcore_ckpt.errors import OptionError

__all__ = ["MIN_MEMORY_BYTES", "human_bytes", "human_count", "numbers", "parse_size", "table"]

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def human_bytes(nbytes: int) -> str:
    """Decimal units, three digits: `1.53 GB`."""
    value = float(nbytes)
    for unit in _UNITS:
        if abs(value) < 1000 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError("unreachable: the last unit takes everything")


_FACTORS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


MIN_MEMORY_BYTES: Final = 384 * 1024**2
"""The least that a command can be told to stay within: the process itself and the smallest buffers."""


def parse_size(text: str, *, at_least: int = 1) -> int:
    """Bytes from `512M`, `2G` or a plain number (binary units); raises `OptionError`."""
    number, unit = text.strip().upper().removesuffix("B").removesuffix("I"), ""
    if number and number[-1] in _FACTORS:
        number, unit = number[:-1], number[-1:]
    try:
        value = int(float(number) * _FACTORS[unit])
    except (ValueError, OverflowError):
        value = -1
    if value < at_least:
        raise OptionError(f"size {text!r}: expected a number with K, M, G or T, and at least {human_bytes(at_least)}")
    return value


def human_count(count: int) -> str:
    """`8.03 B` parameters and the like."""
    value = float(count)
    for unit in ("", " K", " M", " B"):
        if abs(value) < 1000 or unit == " B":
            return f"{value:.3g}{unit}" if unit else str(count)
        value /= 1000
    raise AssertionError("unreachable: the last unit takes everything")


def numbers(values: Iterable[int]) -> str:
    """A shape or an offset: `[4096, 1024]`."""
    return "[" + ", ".join(map(str, values)) + "]"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Columns as wide as their widest cell; `right` names the columns that are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(header[n]), *(len(row[n]) for row in cells)) if cells else len(header[n]) for n in range(len(header))
    ]
    to_the_right = set(right)

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if n in to_the_right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(parts).rstrip()

    return "\n".join(line(row) for row in [list(header), ["-" * width for width in widths], *cells])
