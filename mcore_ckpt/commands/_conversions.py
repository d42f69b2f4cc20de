"""`mcore-ckpt reshard`, `export`, `merge` and `import`: arguments made of a conversion's options, and what is shown."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mcore_ckpt.commands.cli import Outcome, add_dry_run, document_of, first_of, one_line, table
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.core.errors import CheckpointError, OptionError
from mcore_ckpt.core.team import current_team
from mcore_ckpt.reshard.options import (
    ConversionOptions,
    ExportOptions,
    ImportOptions,
    MergeOptions,
    ReshardOptions,
    flags_of,
    help_of,
    kinds_of,
)

if TYPE_CHECKING:
    from mcore_ckpt.reshard.conversion import ConversionReport

_SHOWN = 20


def add_options(parser: argparse.ArgumentParser, options: type[ConversionOptions], direction: str = "") -> None:
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
    given = {name: value for name, value in found.items() if value is not None}
    return {"dry_run": arguments.dry_run, "progress": arguments.progress, **given}


def plan_outcome(report: ConversionReport) -> Outcome:
    """A conversion that was not made, row by row."""
    decided = any(key.decided_by for key in report.keys)
    header = ["source", "parts", "transform", "target", "shape", "dtype"]
    rows = [[key.source, key.parts, key.transform, key.target, tuple(key.shape), key.dtype] for key in report.keys]
    if decided:
        header += ["decided by", "note"]
        for row, key in zip(rows, report.keys, strict=True):
            row += [key.decided_by + (" (guess)" if key.guess else ""), key.note]
    layouts = " as ".join(layout for layout in (report.source_layout, report.target_layout) if layout)
    what = ": ".join(part for part in (report.family or report.format, layouts) if part)
    objects = f" and {counted(report.objects, 'object')}" if report.objects else ""
    guesses = f", {report.guesses} by a guess" if decided else ""
    said = f"{what}: {counted(report.tensors, 'tensor')}{objects}{guesses}; nothing was written"
    return Outcome(report, "\n".join([table(header, rows), "", said, *notes_of(report)]))


def notes_of(report: ConversionReport) -> list[str]:
    """What was left out, and what is good to know."""
    left_out = first_of([one_line(f"left out: {what}") for what in report.left_out], _SHOWN)
    return [*left_out, *(one_line(f"note: {note}") for note in report.notes)]


def _made(report: ConversionReport, arguments: argparse.Namespace, *, to_megatron: bool) -> Outcome:
    """A conversion: its plan, or what was written, compared by logits if asked for."""
    if arguments.dry_run:
        return plan_outcome(report)
    layouts = " as ".join(part for part in (report.source_layout, report.target_layout) if part and to_megatron)
    what = " for ".join(part for part in (report.family, layouts) if part)
    guesses = f", {report.guesses} of them by a guess (see --dry-run)" if report.guesses else ""
    size = f"{counted(report.tensors, 'tensor')}{guesses}, {human_bytes(report.payload_bytes)}"
    made = ", ".join(part for part in (what, size) if part)
    took = f"{'resumed, ' if report.resumed else ''}copied in {report.copy_s:.1f} s"
    took += f", compared with the source in {report.verify_s:.1f} s" if report.verified else ""
    text = "\n".join([f"{report.target}: {made} in {counted(len(report.files), 'file')}", took, *notes_of(report)])
    if not arguments.check_logits:
        return Outcome(report, text)
    from mcore_ckpt.models.logits import check_logits

    checkpoint, model = (report.target, report.source) if to_megatron else (report.source, report.target)
    arch = arguments.arch if arguments.arch not in (None, "auto") else report.family
    try:
        check = current_team().first("compare logits", lambda: check_logits(checkpoint, model, arch))
    except CheckpointError as error:
        raise OptionError(f"{report.target} was written, but not checked: {error}") from error
    document = document_of(report, check=document_of(check, same=check.same))
    return Outcome(document, f"{text}\n{check}", 0 if check.same else 1)


def add_reshard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("target", metavar="DST", help="directory to make; of a run: DST/iter_0001000, and the tracker")
    add_options(parser, ReshardOptions)
    parser.set_defaults(check_logits=False)


def run_reshard(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.reshard.reshard import reshard_checkpoint

    report = reshard_checkpoint(arguments.source, arguments.target, **given_options(arguments, ReshardOptions))
    return _made(report, arguments, to_megatron=True)


def _add_kind(
    parser: argparse.ArgumentParser, flag: str, options: type[ConversionOptions], default: str, what: str
) -> None:
    """`--to` or `--from`, the options of each kind, and `--check-logits`."""
    kinds, what = list(options.TAKES), f"{what} (default: {default})"
    parser.add_argument(flag, dest="kind", choices=kinds, default=default, help=what)
    add_options(parser, options, flag)
    says = "then run both models on random tokens, and compare logits; needs transformers and megatron-core"
    parser.add_argument("--check-logits", action="store_true", help=f"with {flag} hf: {says}")


def _require_check(arguments: argparse.Namespace, impossible: str) -> None:
    """Raise `OptionError`, before anything is written, where `--check-logits` is given and cannot be done."""
    if not arguments.check_logits:
        return
    from mcore_ckpt.models.logits import require_packages

    if impossible:
        raise OptionError(f"--check-logits: {impossible}")
    if arguments.dry_run:
        raise OptionError("--check-logits runs the model that is written; with --dry-run there is none")
    require_packages()


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("directory", metavar="DIR", help="directory to make; must not exist yet")
    what = "format; hf: a model that transformers loads, by its architecture"
    _add_kind(parser, "--to", ExportOptions, "safetensors", what)


def run_export(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.models.conversions import export_checkpoint

    _require_check(arguments, "" if arguments.kind == "hf" else f"not with --to {arguments.kind}; it goes with hf")
    options = given_options(arguments, ExportOptions)
    report = export_checkpoint(arguments.checkpoint, arguments.directory, to=arguments.kind, **options)
    return _made(report, arguments, to_megatron=False)


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    parser.add_argument("sources", metavar="CKPT", nargs="+", help="checkpoints of one model, oldest first, or runs")
    add_options(parser, MergeOptions, "--to")
    parser.set_defaults(check_logits=False)


def run_merge(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.models.conversions import merge_checkpoints

    report = merge_checkpoints(arguments.sources, arguments.target, **given_options(arguments, MergeOptions))
    return _made(report, arguments, to_megatron=report.format != "hf")


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="directory of a model, of a checkpoint or of a run, or a file")
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    what = (
        "what SRC is: tensors under their own keys (files), a Hugging Face model, to become Megatron's (hf), one that "
        "FSDP2 or Megatron-FSDP has saved by DCP (dcp), or that of a job with --ckpt-format torch (megatron-legacy)"
    )
    _add_kind(parser, "--from", ImportOptions, "files", what)


def run_import(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.models.conversions import import_checkpoint

    options = given_options(arguments, ImportOptions)
    is_loaded = arguments.kind == "hf" and "hf_config" not in options
    _require_check(arguments, "" if is_loaded else "transformers must load SRC: it needs --from hf, and no --hf-config")
    report = import_checkpoint(arguments.source, arguments.target, kind=arguments.kind, **options)
    return _made(report, arguments, to_megatron=True)
