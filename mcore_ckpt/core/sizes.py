"""Sizes in bytes as people write them, in options of commands and in environment variables."""

from __future__ import annotations

from typing import Final

from mcore_ckpt.core.errors import OptionError

_PREFIXES: Final = "KMGT"


def parse_size(given: str | int, *, at_least: int = 1, what: str = "size ") -> int:
    """Bytes, from `2G` or `2GB` (`2 * 1000**3`), `2GiB` or `2Gi` (`2 * 1024**3`) or a plain number; raises
    `OptionError`, in which `what` stands before the text.
    """
    text = str(given)
    number, base = text.strip().upper().removesuffix("B"), 1000
    if number.endswith("I"):
        number, base = number[:-1], 1024
    power = _PREFIXES.find(number[-1:]) + 1 if number else 0
    try:
        value = int(float(number[:-1] if power or base == 1024 else number) * base**power)
    except (ValueError, OverflowError):
        value = -1
    if value < at_least:
        raise OptionError(
            f"{what}{text!r}: expected a number such as 512M (512 * 1000**2) or 512MiB (512 * 1024**2), and at least "
            f"{shown_size(at_least)}"
        )
    return value


def shown_size(size_bytes: int) -> str:
    """A size as `parse_size` takes it: `5GB`, `384MiB`."""
    for base, unit in ((1000, "B"), (1024, "iB")):
        for power in range(len(_PREFIXES), 0, -1):
            if size_bytes and size_bytes % base**power == 0:
                return f"{size_bytes // base**power}{_PREFIXES[power - 1]}{unit}"
    return str(size_bytes)
