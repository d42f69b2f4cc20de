"""`mcore-ckpt reshard`: rewrite a checkpoint for another parallel layout."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mcore_ckpt.commands._conversions import add_options, given_options, plan_outcome
from mcore_ckpt.commands._shell import Outcome
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.paths import local_path
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

    source, target = checkpoint_directory(arguments.source), local_path(arguments.target)
    if source != Path(arguments.source):  # a directory of iterations, or NeMo's: its layout is kept
        target = target / source.name
    report = reshard_checkpoint(
        source,
        target,
        **given_options(arguments, ReshardOptions),
    )
    if arguments.dry_run:
        return plan_outcome(report)
    if source != Path(arguments.source):
        _carry_surroundings(Path(arguments.source), source, target)
    guesses = f", {report.guesses} of them by a guess (see --dry-run)" if report.guesses else ""
    text = (
        f"{report.target}: {report.target_layout}, {report.tensors} tensors{guesses} in {report.chunks} chunks, "
        f"{len(report.files)} files, {human_bytes(report.file_bytes)}\n"
        f"{'resumed, ' if report.resumed else ''}copied in {report.copy_s:.1f} s, "
        + (f"compared with the source in {report.verify_s:.1f} s" if report.verified else "not verified")
    )
    return Outcome(report, text)


def _carry_surroundings(given: Path, source: Path, target: Path) -> None:
    """What lies next to a checkpoint: a run's tracker file, or what NeMo keeps of the model."""
    from mcore_ckpt.format.metadata_read import (
        MAX_TRACKER_BYTES,
        NEMO_CONTEXT,
        NEMO_WEIGHTS,
        TRACKER_FILE,
        read_small_file,
    )
    from mcore_ckpt.storage.resolve import storage_at

    if (given / TRACKER_FILE).is_file() and not (target.parent / TRACKER_FILE).exists():
        content = read_small_file(given, TRACKER_FILE, MAX_TRACKER_BYTES, follow_links=True)
        storage_at(target.parent).publish(TRACKER_FILE, content)
    context = given / NEMO_CONTEXT
    if source.name == NEMO_WEIGHTS and context.is_dir() and not (target.parent / NEMO_CONTEXT).exists():
        shutil.copytree(context, target.parent / NEMO_CONTEXT, symlinks=True)
