"""What the commands have in common: arguments that several of them take, tables, outcomes and exit codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from mcore_ckpt.convert.conversion import ConversionPlan, ConversionReport

__all__ = [
    "DIFFERS",
    "DONE",
    "FAILED",
    "MIN_MEMORY_BYTES",
    "Outcome",
    "checked_outcome",
    "few",
    "human_age",
    "numbers",
    "one_line",
    "parse_size",
    "plan_outcome",
    "require_check",
    "table",
]

DONE: Final = 0
"""Done, identical, or whole."""

DIFFERS: Final = 1
"""Different, or damaged."""

FAILED: Final = 2
"""Bad usage, or something that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes: `document` is what `--json` prints, `text` what a person reads."""

    document: Any
    text: str
    code: int = DONE


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


def human_age(seconds: float) -> str:
    """`5 min`, `3 h`, `12 d`: the largest unit of which there is more than one."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def one_line(text: str) -> str:
    """What a key or a message says, in one line: no checkpoint is to write a line of the command's."""
    return text.replace("\n", "\\n")


def few(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f", ... ({len(names) - most} more)" if len(names) > most else "")


def numbers(values: Iterable[int]) -> str:
    """A shape or an offset: `[4096, 1024]`."""
    return "[" + ", ".join(map(str, values)) + "]"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Columns as wide as their widest cell; `right` names the columns that are aligned to the right."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
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


def plan_outcome(plan: ConversionPlan) -> Outcome:
    """A conversion, key by key: source, transform, target."""
    header: tuple[str, ...]
    rows: list[tuple[object, ...]]
    if plan.format == "megatron-legacy":
        header = ("source", "pieces", "transform", "target", "shape", "dtype")
        rows = [(key.source, key.pieces, key.transform, key.target, numbers(key.shape), key.dtype) for key in plan.keys]
        sizes = f"{plan.source_layout} as {plan.target_layout}" if plan.source_layout else f"to {plan.target_layout}"
        objects = f" and {plan.objects} objects" if plan.source_layout else ""
        said = [f"{sizes}: {len(plan.keys)} tensors{objects}", "nothing was written"]
    else:
        header = ("source", "transform", "target", "shape at Hugging Face", "dtype")
        rows = [(key.source, key.transform, key.target, numbers(key.shape), key.dtype) for key in plan.keys]
        objects = f", {plan.objects} empty objects that its layers ask for" if plan.objects else ""
        said = [f"{plan.family}: {len(plan.keys)} keys{objects}; nothing was written"]
    left_out = [one_line(f"left out: {what}") for what in plan.left_out]
    notes = [one_line(f"note: {note}") for note in plan.notes]
    return Outcome(plan, "\n".join([table(header, rows), "", *said, *left_out, *notes]))


def require_check(dry_run: bool) -> None:
    """Raise `OptionError`, before anything is written, where `--check` cannot be done."""
    from mcore_ckpt.convert.logits import require_packages

    if dry_run:
        raise OptionError("--check runs the model that is written; with --dry-run there is none")
    require_packages()


def checked_outcome(report: ConversionReport, text: str, *, to_megatron: bool) -> Outcome:
    """A conversion that was made, and then held against its source by logits (`--check`)."""
    from dataclasses import asdict

    from mcore_ckpt.convert.logits import check_logits

    checkpoint, model = (report.target, report.source) if to_megatron else (report.source, report.target)
    try:
        check = check_logits(checkpoint, model, report.family)
    except CheckpointError as error:
        raise OptionError(f"{report.target} was written, but not checked: {error}") from error
    document = {**asdict(report), "check": {**asdict(check), "same": check.same}}
    return Outcome(document, f"{text}\n{check}", DONE if check.same else DIFFERS)
