"""`mcore-ckpt import`: safetensors, torch files or a DCP checkpoint as a `torch_dist` checkpoint."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import MIN_MEMORY_BYTES, Outcome, few, parse_size
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
    from mcore_ckpt.convert.import_ import import_checkpoint
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    report = import_checkpoint(
        arguments.source,
        arguments.target,
        tp=arguments.tp,
        pp=arguments.pp,
        ep=arguments.ep,
        rename=arguments.rename or None,
        rules=arguments.rules or None,
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        common=arguments.common,
        workers=max(1, arguments.workers),
        verify=arguments.verify,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
        progress=False if arguments.quiet else None,
    )
    text = f"{report.target}: {report.tensors} tensors, {human_bytes(report.payload_bytes)} from {report.format}"
    if report.left_out:
        text += f"; {report.left_out} entries that are no tensors were left out: {few(report.left_out_keys)}"
    return Outcome(report, text)
