"""`mcore-ckpt reshard`: rewrite a checkpoint for another parallel layout."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._conversions import add_options, given_options, notes_of, plan_outcome
from mcore_ckpt.commands._shell import Outcome
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.reshard.options import ReshardOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SRC", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument(
        "target",
        metavar="DST",
        help="directory to make; must not exist yet. Of a run: DST/iter_0001000, and the tracker",
    )
    add_options(parser, ReshardOptions)


def run(arguments: argparse.Namespace) -> Outcome:
    """Reshard, or show what would be done."""
    from mcore_ckpt.reshard.reshard import reshard_checkpoint

    report = reshard_checkpoint(arguments.source, arguments.target, **given_options(arguments, ReshardOptions))
    if arguments.dry_run:
        return plan_outcome(report)
    guesses = f", {report.guesses} of them by a guess (see --dry-run)" if report.guesses else ""
    text = (
        f"{report.target}: {report.target_layout}, {report.tensors} tensors{guesses} in {report.chunks} chunks, "
        f"{counted(len(report.files), 'file')}, {human_bytes(report.file_bytes)}\n"
        f"{'resumed, ' if report.resumed else ''}copied in {report.copy_s:.1f} s, "
        + (f"compared with the source in {report.verify_s:.1f} s" if report.verified else "not verified")
    )
    return Outcome(report, "\n".join([text, *notes_of(report)]))
