"""`mcore-ckpt prune`: delete a run's old checkpoints."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import Outcome, add_dry_run, table
from mcore_ckpt.core.console import counted, human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="directory that holds iter_0000100 and the like")
    parser.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="the newest N complete checkpoints stay, at least one"
    )
    parser.add_argument("--keep-every", type=int, metavar="N", help="iterations that are multiples of N stay")
    what = parser.add_mutually_exclusive_group()
    add_dry_run(what, "list what would be deleted; this is the default")
    what.add_argument("--yes", "-y", action="store_true", help="delete them; without it they are only listed")


def run(arguments: argparse.Namespace) -> Outcome:
    """Decide, and remove if asked."""
    from mcore_ckpt.directory.retention import prune_run

    report = prune_run(
        arguments.run, keep_last=arguments.keep_last, keep_every=arguments.keep_every, remove=arguments.yes
    )
    rows, notes, documents = [], [], []
    for decision in report.decisions:
        found = decision.checkpoint
        rows.append((found.name, "keep" if decision.keep else "remove", human_bytes(found.size_bytes), decision.reason))
        if decision.left:
            notes.append(f"{found.path}: not of the checkpoint, still there: {', '.join(decision.left[:5])}")
        documents.append(
            {
                "name": found.name,
                "iteration": found.iteration,
                "whole": found.whole,
                "keep": decision.keep,
                "reason": decision.reason,
                "size_bytes": found.size_bytes,
                "left": decision.left,
            }
        )
    going = sum(not decision.keep for decision in report.decisions)
    verb = "removed" if report.removed else "to remove"
    text = f"{report.path}: {going} of {counted(len(rows), 'checkpoint')} {verb}, {human_bytes(report.freed_bytes)}"
    if going and not report.removed:
        text += "; nothing was removed (--yes does it)"
    lines = [table(("checkpoint", "", "size", "why"), rows, right=(2,)), *notes, text]
    document = {
        "path": report.path,
        "removed": report.removed,
        "freed_bytes": report.freed_bytes,
        "checkpoints": documents,
    }
    return Outcome(document, "\n".join(lines))
