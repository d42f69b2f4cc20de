"""`mcore-ckpt import`: safetensors, torch files or a DCP checkpoint as a `torch_dist` checkpoint."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import MIN_MEMORY_BYTES, Outcome, parse_size, rules_from, torch_dtype
from mcore_ckpt.core.console import human_bytes

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source", metavar="SRC", help="directory of safetensors or torch files, one file, or a DCP checkpoint"
    )
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel size (1)")
    parser.add_argument("--pp", type=int, default=1, metavar="M", help="pipeline parallel size (1)")
    parser.add_argument("--ep", type=int, default=1, metavar="K", help="expert parallel size (1)")
    parser.add_argument("--rename", metavar="RULES", help="file of lines: key pattern, replacement or `-` to drop")
    parser.add_argument("--rules", metavar="FILE", help="partition rules, as for reshard; they see the new keys")
    parser.add_argument("--dtype", metavar="TYPE", help="convert floating-point tensors: bf16, fp16, fp32")
    parser.add_argument("--common", metavar="FILE", help="common.pt to take along (an empty one)")
    parser.add_argument("--workers", type=int, default=2, metavar="W", help="tensors in progress at once (2)")
    parser.add_argument("--memory", default="1G", metavar="SIZE", help="memory to stay within, e.g. 512M (1G)")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="prove DST against SRC by checksum (on)"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Import."""
    from mcore_ckpt.convert.import_ import ImportOptions, import_checkpoint
    from mcore_ckpt.convert.reshard_plan import TargetLayout
    from mcore_ckpt.convert.rules import parse_partition_rules, parse_rename_rules
    from mcore_ckpt.tools.inspection import checkpoint_directory

    options = ImportOptions(
        layout=TargetLayout(arguments.tp, arguments.pp, arguments.ep),
        rename=rules_from(arguments.rename, parse_rename_rules),
        rules=rules_from(arguments.rules, parse_partition_rules),
        dtype=torch_dtype(arguments.dtype),
        common=arguments.common,
        workers=max(1, arguments.workers),
        verify=arguments.verify,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
    )
    source = checkpoint_directory(arguments.source)
    report = import_checkpoint(source, arguments.target, options, progress=False if arguments.quiet else None)
    text = f"{report.target}: {report.tensors} tensors, {human_bytes(report.payload_bytes)} from {report.format}"
    if report.left_out:
        text += f"; {report.left_out} entries that are no tensors were left out"
    return Outcome(report, text)
