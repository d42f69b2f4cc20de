"""`mcore-ckpt export`: a checkpoint as a Hugging Face model, safetensors, torch files or a plain DCP checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mcore_ckpt.commands._shell import (
    Outcome,
    checked_outcome,
    few,
    one_line,
    parse_size,
    plan_outcome,
    require_check,
)
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError

if TYPE_CHECKING:
    from mcore_ckpt.convert.conversion import ConversionReport

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="directory of the checkpoint, or one with a tracker file"
    )
    parser.add_argument("directory", metavar="DIR", help="directory to make; must not exist yet")
    parser.add_argument(
        "--to",
        choices=["safetensors", "torch", "dcp", "hf", "megatron-legacy"],
        default="safetensors",
        help="format (safetensors); hf: a model that transformers loads, by its architecture; "
        "megatron-legacy: files that --ckpt-format torch loads",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="largest file, e.g. 2G (5G)")
    parser.add_argument("--rename", metavar="RULES", help="file of lines: key pattern, replacement or `-` to drop")
    parser.add_argument("--only", metavar="PATTERN", help="keys that match (shell pattern, or a part of the key)")
    parser.add_argument("--drop", choices=["optimizer"], help="leave the optimizer's state out")
    parser.add_argument("--dtype", metavar="TYPE", help="convert the model's floating-point tensors: bf16, fp16, fp32")
    legacy = parser.add_argument_group("with --to megatron-legacy")
    legacy.add_argument("--tp", type=int, metavar="N", help="tensor parallel size (1)")
    legacy.add_argument("--pp", type=int, metavar="M", help="pipeline parallel size (1)")
    legacy.add_argument("--ep", type=int, metavar="K", help="expert parallel size (1)")
    legacy.add_argument("--etp", type=int, metavar="N", help="expert tensor parallel size (as --tp)")
    legacy.add_argument("--vpp", type=int, metavar="V", help="chunks of the model that each pipeline stage has (1)")
    model = parser.add_argument_group("with --to hf")
    model.add_argument("--arch", metavar="FAMILY", help="the model's family (auto: as arguments or config.json say)")
    model.add_argument(
        "--hf-config", metavar="DIR", help="take config.json from here, and tokenizer files; checked against shapes"
    )
    model.add_argument(
        "--check",
        action="store_true",
        help="then run both models on random tokens, and compare logits; needs transformers and megatron-core",
    )
    both = parser.add_argument_group("with --to hf and megatron-legacy")
    both.add_argument("--dry-run", action="store_true", help="show each key's source and transform; write nothing")


_OF_MODELS = ("arch", "hf_config", "check")
_SIZES = ("tp", "pp", "ep", "etp", "vpp")


def run(arguments: argparse.Namespace) -> Outcome:
    """Export."""
    _refuse(arguments)
    from mcore_ckpt.convert.conversion import ExportOptions
    from mcore_ckpt.convert.exchange import export_as, plan_export
    from mcore_ckpt.convert.rules import parse_rename_rules, rules_in
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    most = {} if arguments.max_shard_size is None else {"max_shard_bytes": parse_size(arguments.max_shard_size)}
    options = ExportOptions(
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        drop_optimizer=arguments.drop == "optimizer",
        rename=rules_in(arguments.rename or None, parse_rename_rules),
        only=arguments.only,
        arch=arguments.arch or "auto",
        hf_config=arguments.hf_config,
        **{name: size for name in _SIZES if (size := getattr(arguments, name)) is not None},
        **most,
    )
    if arguments.check:
        require_check(arguments.dry_run)
    if arguments.dry_run:
        return plan_outcome(plan_export(arguments.to, arguments.checkpoint, options))
    progress = False if arguments.quiet else None
    report = export_as(arguments.to, arguments.checkpoint, arguments.directory, options, progress=progress)
    if arguments.check:
        return checked_outcome(report, _text(report), to_megatron=False)
    return Outcome(report, _text(report))


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise `OptionError` for options that say nothing of the target's format."""
    if arguments.to == "megatron-legacy":
        names = ("rename", "only", "dtype", "max_shard_size", *_OF_MODELS)
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name, None)]
        if given:
            raise OptionError(
                f"{', '.join(given)}: not with --to megatron-legacy, whose files hold what Megatron wants"
            )
    elif any(getattr(arguments, name) is not None for name in _SIZES):
        sizes = "--tp and --pp" if arguments.ep is arguments.etp is arguments.vpp is None else "parallel sizes"
        raise OptionError(f"{sizes} need --to megatron-legacy: other formats do not divide a model among ranks")
    elif arguments.to == "hf":
        if arguments.rename or arguments.only:
            raise OptionError(
                "--rename and --only do not go with --to hf: a model has all of its family's keys, so named"
            )
    elif arguments.to == "dcp" and arguments.max_shard_size is not None:
        raise OptionError("--max-shard-size does not go with --to dcp, whose data files are not cut by size")
    elif any(getattr(arguments, name) for name in (*_OF_MODELS, "dry_run")):
        raise OptionError("--arch, --hf-config, --check and --dry-run need --to hf: other formats know no models")


def _text(report: ConversionReport) -> str:
    size = f"{report.tensors} tensors, {human_bytes(report.payload_bytes)} in {len(report.files)} files"
    text = f"{report.target}: {report.family}, {size}" if report.family else f"{report.target}: {size}"
    if report.format == "megatron-legacy":
        text = "\n".join([text, *(one_line(f"left out: {what}") for what in report.left_out)])
    elif report.format == "hf":
        text += f"; left out: {few(report.left_out)}" if report.left_out else ""
    if report.format in ("hf", "megatron-legacy"):
        return "\n".join([text, *(one_line(f"note: {note}") for note in report.notes)])
    if report.left_out:
        count = len(report.left_out)
        text += f"; {count} objects have no place in this format and were left out: {few(report.left_out)}"
    return text
