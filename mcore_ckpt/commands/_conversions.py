"""What `reshard`, `import` and `export` have in common: arguments made of a conversion's options, and what is shown."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from mcore_ckpt.commands._shell import Outcome, add_dry_run, numbers, one_line, table
from mcore_ckpt.core.errors import CheckpointError, OptionError
from mcore_ckpt.reshard.options import ConversionOptions, flags_of, help_of, kinds_of

if TYPE_CHECKING:
    from mcore_ckpt.reshard.conversion import ConversionReport


def add_options(parser: argparse.ArgumentParser, options: type[ConversionOptions], direction: str = "") -> None:
    """Declare an argument for each option; those of some kinds alone stand under `with DIRECTION KIND, ...`."""
    groups: dict[tuple[str, ...], Any] = {(): parser}
    add_dry_run(parser, "show each tensor's source and transform; write nothing")
    for option in fields(options):
        kinds = kinds_of(options, option.name)
        if kinds not in groups:
            groups[kinds] = parser.add_argument_group(f"with {direction} {', '.join(kinds)}")
        how: dict[str, Any] = {"dest": option.name, "default": None, "help": help_of(option).replace("%", "%%")}
        if option.metadata["choices"]:
            how["choices"] = option.metadata["choices"]
        elif option.type == "bool":
            how["action"] = argparse.BooleanOptionalAction if option.default else "store_true"
        else:
            how["metavar"] = option.metadata["metavar"]
            if str(option.type).startswith("int") and not option.name.endswith("_bytes"):
                how["type"] = int
        groups[kinds].add_argument(*flags_of(option), **how)


def given_options(arguments: argparse.Namespace, options: type[ConversionOptions]) -> dict[str, Any]:
    """The options that were given, by name, and what every conversion takes."""
    found = {option.name: getattr(arguments, option.name) for option in fields(options)}
    shown = {"dry_run": arguments.dry_run, "progress": False if arguments.quiet else None}
    return {**shown, **{name: value for name, value in found.items() if value is not None}}


def plan_outcome(report: ConversionReport) -> Outcome:
    """A conversion that was not made, row by row."""
    decided = any(key.decided_by for key in report.keys)
    header = ["source", "parts", "transform", "target", "shape", "dtype"]
    rows = [
        [key.source, key.parts, key.transform, key.target, numbers(key.shape), key.dtype, *_decision(key, decided)]
        for key in report.keys
    ]
    header += ["decided by", "note"] if decided else []
    layouts = " as ".join(layout for layout in (report.source_layout, report.target_layout) if layout)
    what = ": ".join(part for part in (report.family or report.format, layouts) if part)
    objects = f" and {report.objects} objects" if report.objects else ""
    guesses = f", {report.guesses} by a guess" if decided else ""
    said = f"{what}: {report.tensors} tensors{objects}{guesses}; nothing was written"
    return Outcome(report, "\n".join([table(header, rows), "", said, *notes_of(report)]))


def _decision(key: Any, decided: bool) -> list[str]:
    return [key.decided_by + (" (guess)" if key.guess else ""), key.note] if decided else []


def notes_of(report: ConversionReport) -> list[str]:
    """What was left out, and what is good to know."""
    left_out = [one_line(f"left out: {what}") for what in report.left_out]
    return [*left_out, *(one_line(f"note: {note}") for note in report.notes)]


def require_check(dry_run: bool) -> None:
    """Raise `OptionError`, before anything is written, where `--check-logits` cannot be done."""
    from mcore_ckpt.models.logits import require_packages

    if dry_run:
        raise OptionError("--check-logits runs the model that is written; with --dry-run there is none")
    require_packages()


def checked_outcome(report: ConversionReport, text: str, *, to_megatron: bool) -> Outcome:
    """A conversion that was made, and then compared with its source by logits (`--check-logits`)."""
    from mcore_ckpt.models.logits import check_logits

    checkpoint, model = (report.target, report.source) if to_megatron else (report.source, report.target)
    try:
        check = check_logits(checkpoint, model, report.family)
    except CheckpointError as error:
        raise OptionError(f"{report.target} was written, but not checked: {error}") from error
    document = {**asdict(report), "check": {**asdict(check), "same": check.same}}
    return Outcome(document, f"{text}\n{check}", 0 if check.same else 1)
