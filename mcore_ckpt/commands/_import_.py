"""`mcore-ckpt import`: what others have written, and Megatron itself in its older format, as `torch_dist`."""

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
from mcore_ckpt.models.options import ImportOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source", metavar="SRC", help="directory of a model or of a checkpoint, one file, or one with a tracker file"
    )
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=list(ImportOptions.TAKES),
        default="files",
        help="what SRC is: tensors under their own keys (files), a Hugging Face model, to become Megatron's (hf), one "
        "that FSDP2 has saved by DCP (dcp), or DeepSpeed as a universal checkpoint (ucp), or what a job has saved "
        "with --ckpt-format torch (megatron-legacy); default: files",
    )
    add_options(parser, ImportOptions, "--from")
    parser.add_argument(
        "--check-logits",
        action="store_true",
        help="with --from hf: then run both models on random tokens, and compare logits; needs transformers and "
        "megatron-core",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Import."""
    from mcore_ckpt.models.conversions import import_checkpoint

    options = given_options(arguments, ImportOptions)
    if arguments.check_logits:
        if arguments.kind != "hf" or "hf_config" in options:
            raise OptionError("--check-logits: transformers has to load SRC: it needs --from hf, and no --hf-config")
        require_check(arguments.dry_run)
    report = import_checkpoint(
        arguments.source,
        arguments.target,
        kind=arguments.kind,
        **options,
    )
    if arguments.dry_run:
        return plan_outcome(report)
    size = f"{report.tensors} tensors, {human_bytes(report.payload_bytes)}"
    if arguments.kind == "files":
        text = f"{report.target}: {size} from {report.format}"
        if report.left_out:
            count = len(report.left_out)
            text += f"; {count} entries that are no tensors were left out: {few(report.left_out)}"
        return Outcome(report, text)
    layouts = " as ".join(part for part in (report.source_layout, report.target_layout) if part)
    what = f"{report.family} for {layouts}" if report.family else layouts
    text = "\n".join([f"{report.target}: {what}, {size} in {counted(len(report.files), 'file')}", *notes_of(report)])
    return checked_outcome(report, text, to_megatron=True) if arguments.check_logits else Outcome(report, text)
