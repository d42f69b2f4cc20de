"""`mcore-ckpt copy`: copy a checkpoint between directories and object stores."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import Outcome, human_rate
from mcore_ckpt.core.console import counted, human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SRC", help="directory of a checkpoint, or its URL")
    parser.add_argument(
        "target", metavar="DST", help="directory of the copy, or its URL; an interrupted copy is resumed"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Copy, and compare."""
    from mcore_ckpt.tools.copy import copy_checkpoint

    report = copy_checkpoint(arguments.source, arguments.target)
    text = (
        f"{report.target}: copied {counted(len(report.copied), 'file')}, {human_bytes(report.copied_bytes)}"
        f"{human_rate(report.copied_bytes, report.seconds)}"
    )
    if report.kept:
        text += f"; {len(report.kept)} were there already"
    document = {
        "source": report.source,
        "target": report.target,
        "copied": report.copied,
        "kept": report.kept,
        "copied_bytes": report.copied_bytes,
        "seconds": report.seconds,
    }
    return Outcome(document, text)
