"""`mcore-ckpt list`: the checkpoints of a run."""

from __future__ import annotations

import argparse
import time

from mcore_ckpt.commands._shell import DIFFERS, DONE, FAILED, Outcome, document_of, human_age, one_line, table
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.directory.in_force import DrainNote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="directory that holds iter_0000100 and the like")


def run(arguments: argparse.Namespace) -> Outcome:
    """List."""
    from mcore_ckpt.tools.run_listing import list_run

    report = list_run(arguments.run)
    now_s = time.time()
    rows, notes, documents = [], [], []
    for listed in report.checkpoints:
        found = listed.checkpoint
        layout = str(listed.layout) if listed.layout else "-"
        age_s = None if found.saved_at_s is None else max(0.0, now_s - found.saved_at_s)
        state = "complete" if found.whole else "INCOMPLETE" if found.problems else "WRITTEN BY SOMETHING NEWER"
        if found.locked:
            state += ", left by a save that is gone" if found.abandoned else ", being written"
        if found.drain is not None:
            state += f", {_drained(found.drain)}"
        rows.append(
            (
                found.name,
                state,
                human_bytes(found.size_bytes),
                "-" if age_s is None else human_age(age_s),
                layout,
                "<- tracker" if found.tracked else "",
            )
        )
        if found.drain is not None and found.drain.error:
            notes.append(one_line(f"{found.name}: {found.drain.error}"))
        notes += [one_line(f"{found.name}: {reason}") for reason in (*found.problems[:1], found.newer) if reason]
        documents.append(document_of(found, name=found.name, whole=found.whole, layout=listed.layout))
    whole = sum(listed.checkpoint.whole for listed in report.checkpoints)
    total_bytes = sum(listed.checkpoint.size_bytes for listed in report.checkpoints)
    notes += [
        f"{name}: not complete: a conversion makes it, or has been interrupted; the command that made it resumes it"
        for name in report.unfinished
    ]
    lines = [table(("checkpoint", "state", "size", "age", "layout", ""), rows, right=(2, 3)), *notes]
    if report.tracker_problem:
        lines.append(f"tracker: {report.tracker_problem}")
    lines.append(f"{report.path}: {counted(len(rows), 'checkpoint')}, {whole} complete, {human_bytes(total_bytes)}")
    document = document_of(report, checkpoints=documents)
    newer = [listed.checkpoint for listed in report.checkpoints if listed.checkpoint.newer]
    damaged = any(listed.checkpoint.problems and not listed.checkpoint.locked for listed in report.checkpoints)
    if damaged or (report.tracker_problem and not any(found.tracked for found in newer)):
        return Outcome(document, "\n".join(lines), DIFFERS)
    return Outcome(document, "\n".join(lines), FAILED if newer else DONE)


def _drained(note: DrainNote) -> str:
    """How far the copy to the second tier is, in a few words."""
    if note.done:
        return "not copied" if note.error else "copied" if note.commits else "this node's part copied"
    return "copy failed, tried again" if note.error else "waits for being copied"
