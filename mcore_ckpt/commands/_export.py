"""`mcore-ckpt export`: a checkpoint as safetensors, torch files or a plain DCP checkpoint."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import Outcome, few, parse_size
from mcore_ckpt.core.console import human_bytes

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="directory of the checkpoint, or one with a tracker file"
    )
    parser.add_argument("directory", metavar="DIR", help="directory to make; must not exist yet")
    parser.add_argument(
        "--to", choices=["safetensors", "torch", "dcp"], default="safetensors", help="format (safetensors)"
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="largest file, e.g. 2G (5G)")
    parser.add_argument("--rename", metavar="RULES", help="file of lines: key pattern, replacement or `-` to drop")
    parser.add_argument("--only", metavar="PATTERN", help="keys that match (shell pattern, or a part of the key)")
    parser.add_argument("--drop", choices=["optimizer"], help="leave the optimizer's state out")
    parser.add_argument("--dtype", metavar="TYPE", help="convert the model's floating-point tensors: bf16, fp16, fp32")


def run(arguments: argparse.Namespace) -> Outcome:
    """Export."""
    from mcore_ckpt.convert.export import export_checkpoint
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    sizes = {} if arguments.max_shard_size is None else {"max_shard_bytes": parse_size(arguments.max_shard_size)}
    report = export_checkpoint(
        arguments.checkpoint,
        arguments.directory,
        to=arguments.to,
        rename=arguments.rename or None,
        only=arguments.only,
        drop_optimizer=arguments.drop == "optimizer",
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        progress=False if arguments.quiet else None,
        **sizes,
    )
    text = (
        f"{report.target}: {report.tensors} tensors, {human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    if report.left_out:
        text += (
            f"; {report.left_out} objects have no place in this format and were left out: {few(report.left_out_keys)}"
        )
    return Outcome(report, text)
