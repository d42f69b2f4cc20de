"""`mcore-ckpt reshard`: rewrite a checkpoint for another parallel layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from mcore_ckpt.commands._conversions import add_options, given_options, notes_of, plan_outcome
from mcore_ckpt.commands._shell import Outcome
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE, ReshardOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SRC", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    add_options(parser, ReshardOptions)
    parser.add_argument("--optimizer", dest="optimizer_layout", choices=(FULLY_RESHARDABLE,), help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> Outcome:
    """Reshard, or show what would be done."""
    from mcore_ckpt.models.conversions import reshard_checkpoint
    from mcore_ckpt.tools.inspection import checkpoint_directory

    given = checkpoint_path(arguments.source)
    source, target = checkpoint_directory(given), checkpoint_path(arguments.target)
    if source != given:  # a directory of iterations, or NeMo's: its layout is kept
        target = target / source.name
    report = reshard_checkpoint(
        source,
        target,
        **given_options(arguments, ReshardOptions),
    )
    if arguments.dry_run:
        return plan_outcome(report)
    if source != given:
        _carry_surroundings(given, source, target)
    guesses = f", {report.guesses} of them by a guess (see --dry-run)" if report.guesses else ""
    text = (
        f"{report.target}: {report.target_layout}, {report.tensors} tensors{guesses} in {report.chunks} chunks, "
        f"{counted(len(report.files), 'file')}, {human_bytes(report.file_bytes)}\n"
        f"{'resumed, ' if report.resumed else ''}copied in {report.copy_s:.1f} s, "
        + (f"compared with the source in {report.verify_s:.1f} s" if report.verified else "not verified")
    )
    return Outcome(report, "\n".join([text, *notes_of(report)]))


def _carry_surroundings(given: Path, source: Path, target: Path) -> None:
    """What lies next to a checkpoint: a run's tracker file, or what NeMo keeps of the model."""
    from mcore_ckpt.format.metadata_read import (
        MAX_TRACKER_BYTES,
        NEMO_CONTEXT,
        NEMO_WEIGHTS,
        TRACKER_FILE,
        read_small_file,
    )
    from mcore_ckpt.reshard.sidecars import carry_folder
    from mcore_ckpt.storage.resolve import storage_at

    reads, writes = storage_at(given, follow_links=True), storage_at(target.parent)
    if reads.exists(TRACKER_FILE) and not writes.exists(TRACKER_FILE):
        writes.publish(TRACKER_FILE, read_small_file(given, TRACKER_FILE, MAX_TRACKER_BYTES, follow_links=True))
    if source.name == NEMO_WEIGHTS and NEMO_CONTEXT in reads.folders() and NEMO_CONTEXT not in writes.folders():
        carry_folder(given / NEMO_CONTEXT, target.parent / NEMO_CONTEXT)
