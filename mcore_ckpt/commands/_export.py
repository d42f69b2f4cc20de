"""`mcore-ckpt export`: a checkpoint in the format of others."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._conversions import (
    add_options,
    checked_outcome,
    given_options,
    notes_of,
    plan_outcome,
    require_check,
)
from mcore_ckpt.commands._shell import Outcome, few
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.options import ExportOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("directory", metavar="DIR", help="directory to make; must not exist yet")
    parser.add_argument(
        "--to",
        choices=list(ExportOptions.TAKES),
        default="safetensors",
        help="format; hf: a model that transformers loads, by its architecture; fsdp_dtensor, megatron-legacy: "
        "what Megatron-FSDP and --ckpt-format torch load (default: safetensors)",
    )
    add_options(parser, ExportOptions, "--to")
    parser.add_argument(
        "--check-logits",
        action="store_true",
        help="with --to hf: then run both models on random tokens, and compare logits; needs transformers and "
        "megatron-core",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Export."""
    from mcore_ckpt.models.conversions import export_checkpoint

    if arguments.check_logits:
        if arguments.to != "hf":
            raise OptionError(f"--check-logits: not with --to {arguments.to}; it goes with hf")
        require_check(arguments.dry_run)
    report = export_checkpoint(
        arguments.checkpoint,
        arguments.directory,
        to=arguments.to,
        **given_options(arguments, ExportOptions),
    )
    if arguments.dry_run:
        return plan_outcome(report)
    files = counted(len(report.files), "file")
    size = f"{counted(report.tensors, 'tensor')}, {human_bytes(report.payload_bytes)} in {files}"
    text = f"{report.target}: {report.family}, {size}" if report.family else f"{report.target}: {size}"
    if report.format in ("hf", "fsdp_dtensor", "megatron-legacy"):
        text = "\n".join([text, *notes_of(report)])
    elif report.left_out:
        text += (
            f"; {len(report.left_out)} objects have no place in this format and were left out: {few(report.left_out)}"
        )
    return checked_outcome(report, text, to_megatron=False) if arguments.check_logits else Outcome(report, text)
