"""`mcore-ckpt reshard`: rewrite a checkpoint for another parallel layout."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.commands._shell import MIN_MEMORY_BYTES, Outcome, numbers, one_line, parse_size, table
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import local_path

if TYPE_CHECKING:
    from mcore_ckpt.convert.reshard import ReshardOptions
    from mcore_ckpt.convert.reshard_plan import ReshardPlan, TensorMove

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SRC", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    layout = parser.add_argument_group("layout of the target")
    layout.add_argument("--tp", type=int, metavar="N", help="tensor parallel size")
    layout.add_argument("--pp", type=int, metavar="M", help="pipeline parallel size")
    layout.add_argument("--ep", type=int, default=1, metavar="K", help="expert parallel size (1)")
    layout.add_argument("--etp", type=int, metavar="N", help="expert tensor parallel size (as --tp)")
    layout.add_argument("--dp", type=int, metavar="D", help="spread chunks over D data parallel ranks")
    layout.add_argument(
        "--like", metavar="CKPT", help="take axes (without --tp and --pp: all of it) from this checkpoint"
    )
    layout.add_argument(
        "--rules", metavar="FILE", help="lines of: key pattern (regular expression), axis or `whole`, [x2]"
    )
    layout.add_argument("--merge", action="store_true", help="one file for each rank: the fewest files")
    content = parser.add_argument_group("what is carried")
    content.add_argument("--only", metavar="PATTERN", help="keys that match (shell pattern, or a part of the key)")
    content.add_argument("--drop", choices=["optimizer"], help="leave the optimizer's state out")
    content.add_argument(
        "--optimizer",
        choices=["fully_reshardable"],
        help="change the layout of the optimizer's state to this one, which loads under any division of the model",
    )
    content.add_argument("--dtype", metavar="TYPE", help="convert the model's floating-point tensors: bf16, fp16, fp32")
    work = parser.add_argument_group("how")
    work.add_argument("--dry-run", action="store_true", help="show each tensor's decision and write nothing")
    work.add_argument("--workers", type=int, default=2, metavar="W", help="tensors in progress at once (2)")
    work.add_argument("--memory", default="1G", metavar="SIZE", help="memory to stay within, e.g. 512M (1G)")
    work.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="prove DST against SRC by checksum (on)"
    )
    work.add_argument("--restart", action="store_true", help="throw away what an interrupted run has left")
    work.add_argument("--no-file-copy", action="store_true", help="never let the kernel copy between files")


def run(arguments: argparse.Namespace) -> Outcome:
    """Reshard, or show what would be done."""
    from mcore_ckpt.convert.reshard import plan_reshard, reshard
    from mcore_ckpt.format.metadata_read import (
        MAX_TRACKER_BYTES,
        NEMO_CONTEXT,
        NEMO_WEIGHTS,
        TRACKER_FILE,
        read_index,
        read_small_file,
    )
    from mcore_ckpt.storage.resolve import storage_at
    from mcore_ckpt.tools.inspection import checkpoint_directory

    options = _options(arguments)
    source, target = checkpoint_directory(arguments.source), local_path(arguments.target)
    if source != Path(arguments.source):  # a directory of iterations, or NeMo's: its layout is kept
        target = target / source.name
    if arguments.dry_run:
        plan = plan_reshard(read_index(source), options)
        return Outcome(_plan_document(plan), _plan_text(plan))
    report = reshard(source, target, options, progress=False if arguments.quiet else None)
    if source != Path(arguments.source):
        tracker = Path(arguments.source) / TRACKER_FILE
        copy = Path(arguments.target) / TRACKER_FILE
        if tracker.is_file() and not copy.exists():
            content = read_small_file(tracker.parent, tracker.name, MAX_TRACKER_BYTES, follow_links=True)
            storage_at(copy.parent).publish(copy.name, content)
        context = Path(arguments.source) / NEMO_CONTEXT  # what NeMo keeps of the model, beside the checkpoint
        if source.name == NEMO_WEIGHTS and context.is_dir() and not (target.parent / NEMO_CONTEXT).exists():
            shutil.copytree(context, target.parent / NEMO_CONTEXT, symlinks=True)
    guesses = f", {report.guesses} of them by a guess (see --dry-run)" if report.guesses else ""
    text = (
        f"{report.target}: {report.layout}, {report.tensors} tensors{guesses} in {report.chunks} chunks, "
        f"{report.files} files, {human_bytes(report.file_bytes)}\n"
        f"{'resumed, ' if report.resumed else ''}copied in {report.copy_s:.1f} s, "
        + (f"proved against the source in {report.verify_s:.1f} s" if report.verified else "not verified")
    )
    return Outcome(report, text)


def _options(arguments: argparse.Namespace) -> ReshardOptions:
    from mcore_ckpt.convert.reshard import ReshardOptions
    from mcore_ckpt.convert.reshard_plan import TargetLayout
    from mcore_ckpt.convert.rules import parse_partition_rules, rules_in
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    layout = None
    if arguments.tp is not None or arguments.pp is not None:
        if arguments.tp is None or arguments.pp is None:
            raise OptionError("--tp and --pp belong together: give both (1 is a size too)")
        layout = TargetLayout(arguments.tp, arguments.pp, arguments.ep, arguments.etp, arguments.dp)
    elif arguments.like is None and arguments.optimizer is None:
        raise OptionError("no target layout: give --tp N --pp M, or --like CKPT")
    elif arguments.ep != 1 or arguments.etp is not None or arguments.dp is not None:
        raise OptionError("--ep, --etp and --dp need --tp and --pp: --like alone takes its layout over as it is")
    if arguments.workers < 1:
        raise OptionError(f"--workers {arguments.workers}: expected at least 1")
    return ReshardOptions(
        layout=layout,
        like=arguments.like,
        rules=rules_in(arguments.rules or None, parse_partition_rules),
        only=arguments.only,
        drop_optimizer=arguments.drop == "optimizer",
        optimizer=arguments.optimizer,
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        merge=arguments.merge,
        workers=arguments.workers,
        verify=arguments.verify,
        restart=arguments.restart,
        move_files=not arguments.no_file_copy,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
    )


def _decision(move: TensorMove) -> dict[str, object]:
    partition = move.partition
    return {
        "key": move.entry.fqn,
        "shape": move.entry.shape,
        "dtype": move.dtype,
        "axis": partition.axis,
        "parts": partition.parts,
        "source": partition.source,
        "guess": partition.guess,
        "note": partition.note,
        "chunks_before": len(move.entry.chunks),
        "chunks_after": len(move.boxes),
        "ranks": sorted(set(move.ranks)),
    }


def _plan_document(plan: ReshardPlan) -> dict[str, object]:
    return {
        "layout": str(plan.layout),
        "tensors": [_decision(move) for move in sorted(plan.moves, key=lambda move: move.target_fqn)],
        "files": plan.sizes,
        "notes": plan.notes,
    }


def _plan_text(plan: ReshardPlan) -> str:

    rows = []
    guesses = 0
    for move in sorted(plan.moves, key=lambda move: move.target_fqn):
        partition = move.partition
        axis = "whole" if partition.axis is None else f"{partition.axis}" + (" x2" if partition.parts == 2 else "")
        guesses += partition.guess
        rows.append(
            (
                move.entry.fqn,
                numbers(move.entry.shape),
                move.dtype,
                "as stored" if partition.boxes is not None else axis,
                partition.source + (" (guess)" if partition.guess else ""),
                f"{len(move.entry.chunks)} -> {len(move.boxes)}",
                partition.note,
            )
        )
    text = table(("key", "shape", "dtype", "axis", "decided by", "chunks", "note"), rows)
    files = table(
        ("file", "bytes"), ((file, human_bytes(size)) for file, size in sorted(plan.sizes.items())), right=(1,)
    )
    total = human_bytes(sum(plan.sizes.values()))
    lines = [
        text,
        "",
        files,
        "",
        f"{plan.layout}: {len(rows)} tensors, {guesses} by a guess, {total}; nothing was written",
    ]
    return "\n".join([*lines, *(one_line(f"note: {note}") for note in plan.notes)])
