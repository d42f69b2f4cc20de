"""What the commands have in common: arguments that several of them take, tables, outcomes and exit codes."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from mcore_ckpt.core.console import human_bytes, is_terminal

Container = argparse._ActionsContainer  # noqa: SLF001  (a parser, or a group of its arguments)

DONE: Final = 0
"""Done, identical, or valid."""

DIFFERS: Final = 1
"""Different, or damaged."""

FAILED: Final = 2
"""Bad usage, or something that cannot be read or written."""

INTERNAL: Final = 70
"""A mistake of this package: `EX_SOFTWARE` of sysexits.h."""

INTERRUPTED: Final = 130
"""Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes: `document` is what `--json` prints, `text` what a person reads."""

    document: Any
    text: str
    code: int = DONE


def add_workers(parser: Container, what: str) -> None:
    parser.add_argument("--workers", "-j", type=int, default=2, metavar="N", help=f"{what} (default: 2)")


def add_dry_run(parser: Container, what: str) -> None:
    parser.add_argument("--dry-run", "-n", action="store_true", help=what)


def document_of(report: Any, **more: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, and others, or others in their place."""
    return {**{field.name: getattr(report, field.name) for field in fields(report)}, **more}


def human_age(seconds: float) -> str:
    """`5 min`, `3 h`, `12 d`: the largest unit of which there is more than one."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def human_rate(nbytes: int, seconds: float) -> str:
    """` in 12.3 s (2.1 GB/s)`; without the rate below a second, which says nothing of the storage."""
    rate = f" ({human_bytes(int(nbytes / seconds))}/s)" if seconds >= 1 else ""
    return f" in {seconds:.1f} s{rate}"


def one_line(text: str) -> str:
    """What a key or a message says, in one line: no checkpoint is to write a line of the command's."""
    return text.replace("\n", "\\n")


def numbers(values: Iterable[int]) -> str:
    """A shape or an offset: `[4096, 1024]`."""
    return "[" + ", ".join(map(str, values)) + "]"


def fact(name: str, value: object) -> str:
    """A name and what there is under it."""
    return one_line(f"{name:<12}{value}")


def _cell(value: object) -> str:
    return "-" if value is None else numbers(value) if isinstance(value, tuple) else str(value)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Columns as wide as their widest cell, with `-` for None; `right` names those that are aligned to the right. On a
    terminal that is too narrow for them, the other cells of each row stand below its first.
    """
    cells = [[one_line(_cell(cell)) for cell in row] for row in rows]
    widths = [
        max(len(header[n]), *(len(row[n]) for row in cells)) if cells else len(header[n]) for n in range(len(header))
    ]
    columns = shutil.get_terminal_size().columns
    if is_terminal(sys.stdout) and sum(widths) + 2 * (len(widths) - 1) > columns:
        lines, wrapper = [], textwrap.TextWrapper(columns - 4, break_long_words=False, break_on_hyphens=False)
        for first, *others in cells:
            named = (f"{name} {cell}".strip() for name, cell in zip(header[1:], others, strict=True) if cell)
            together = "; ".join(text.replace(" ", "\xa0") for text in named)  # no cell is broken
            lines += [first, *(f"    {line}".replace("\xa0", " ") for line in wrapper.wrap(together))]
        return "\n".join(lines)
    to_the_right = set(right)

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if n in to_the_right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(parts).rstrip()

    return "\n".join(line(row) for row in [list(header), ["-" * width for width in widths], *cells])
