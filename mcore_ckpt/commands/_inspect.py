"""`mcore-ckpt inspect`: what a checkpoint holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mcore_ckpt.commands._shell import DONE, Outcome, fact, numbers, one_line, table
from mcore_ckpt.core.console import counted, human_bytes, human_count

if TYPE_CHECKING:
    from mcore_ckpt.format.index import CheckpointIndex
    from mcore_ckpt.tools.inspection import GroupRow

_EVERYTHING = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    views = parser.add_mutually_exclusive_group()
    for view, shows in (
        ("--tensors", "each tensor: shape, dtype, chunks, files, bytes"),
        ("--items", "each stored item: key, type, box, file, byte range"),
        ("--objects", "each stored object: key, file, byte range"),
    ):
        views.add_argument(view, nargs="?", const=_EVERYTHING, metavar="PATTERN", help=shows)
    views.add_argument("--files", action="store_true", help="each data file: its two halves, and the balance of ranks")
    views.add_argument("--args", action="store_true", help="Megatron's arguments, as stored")
    views.add_argument("--html", metavar="FILE", help="write a self-contained report with pictures of the shards")


def run(arguments: argparse.Namespace) -> Outcome:
    """Show what was asked for."""
    from mcore_ckpt.format.metadata_read import read_index
    from mcore_ckpt.tools.inspection import checkpoint_directory

    index = read_index(checkpoint_directory(arguments.checkpoint), strict=False)
    if arguments.tensors is not None:
        return _tensors(index, arguments.tensors)
    if arguments.items is not None:
        return _items(index, arguments.items)
    if arguments.objects is not None:
        return _objects(index, arguments.objects)
    if arguments.files:
        return _files(index)
    if arguments.html:
        from mcore_ckpt.tools.html_report import write_report

        write_report(index, arguments.html)
        return Outcome({"report": arguments.html}, f"wrote {arguments.html}")
    return _summary(index, arguments_only=arguments.args)


def _tensors(index: CheckpointIndex, pattern: str) -> Outcome:
    from mcore_ckpt.tools.inspection import tensor_rows

    rows = list(tensor_rows(index, pattern))
    text = table(
        ("key", "dtype", "shape", "chunks", "grid", "bytes", "files"),
        (
            (
                row.fqn,
                row.dtype,
                numbers(row.shape),
                row.chunks,
                "x".join(map(str, row.grid)) or "-",
                human_bytes(row.payload_bytes),
                " ".join(row.files[:4]) + (f" +{len(row.files) - 4}" if len(row.files) > 4 else ""),
            )
            for row in rows
        ),
        right=(3, 5),
    )
    total = sum(row.payload_bytes for row in rows)
    return Outcome({"tensors": rows}, f"{text}\n{len(rows)} tensors, {human_bytes(total)}")


def _items(index: CheckpointIndex, pattern: str) -> Outcome:
    from mcore_ckpt.tools.inspection import describe_items

    rows = describe_items(index, pattern)
    text = table(
        ("file", "start", "stop", "half", "key", "type", "dtype", "shape", "offsets"),
        (
            (
                row.file,
                row.start,
                row.stop,
                row.half,
                row.fqn,
                "object" if row.dtype is None else "tensor",
                row.dtype or "-",
                "-" if row.shape is None else numbers(row.shape),
                "-" if row.offsets is None else numbers(row.offsets),
            )
            for row in rows
        ),
        right=(1, 2),
    )
    total = sum(row.stop - row.start for row in rows)
    return Outcome({"items": rows}, f"{text}\n{counted(len(rows), 'item')}, {human_bytes(total)}")


def _objects(index: CheckpointIndex, pattern: str) -> Outcome:
    from mcore_ckpt.tools.inspection import object_rows

    rows = list(object_rows(index, pattern))
    text = table(
        ("key", "shard", "of", "file", "start", "stop"),
        (
            (
                row.fqn if row.key is None else row.key,
                "-" if row.offset is None else numbers(row.offset),
                "-" if row.grid is None else numbers(row.grid),
                row.file,
                row.start,
                row.stop,
            )
            for row in rows
        ),
        right=(4, 5),
    )
    return Outcome({"objects": rows}, f"{text}\n{len(rows)} objects")


def _files(index: CheckpointIndex) -> Outcome:
    from mcore_ckpt.tools.inspection import file_rows, rank_balance

    rows = file_rows(index)
    balance = rank_balance(rows)
    text = table(
        ("file", "rank", "size", "tensors", "tensor_data", "objects", "bytes_data", "unused"),
        (
            (
                row.file,
                "-" if row.rank is None else row.rank,
                "MISSING" if row.size_bytes is None else human_bytes(row.size_bytes),
                row.tensors,
                "-" if row.tensor_data is None else "[{}, {})".format(*row.tensor_data),
                row.objects,
                "-" if row.bytes_data is None else "[{}, {})".format(*row.bytes_data),
                "-" if row.unused_bytes is None else human_bytes(row.unused_bytes),
            )
            for row in rows
        ),
        right=(1, 2, 3, 5, 7),
    )
    most = max(balance.values(), default=0)
    bars = {rank: "#" * round(40 * nbytes / most if most else 0) for rank, nbytes in balance.items()}
    ranks = table(
        ("rank", "size", ""),
        ((rank, human_bytes(nbytes), bars[rank]) for rank, nbytes in balance.items()),
        right=(0, 1),
    )
    return Outcome({"files": rows, "rank_bytes": balance}, f"{text}\n\n{ranks}")


def _summary(index: CheckpointIndex, *, arguments_only: bool) -> Outcome:
    from mcore_ckpt.tools.inspection import summarize

    summary = summarize(index)
    if arguments_only:
        text = table(("argument", "value"), sorted(summary.arguments.items()))
        return Outcome({"arguments": summary.arguments}, text)
    layout = f"{summary.layout} (from its chunks)"
    if summary.trained_layout is not None:
        layout += f"; saved at {summary.trained_layout} (args)"
    facts = [
        ("checkpoint", summary.path),
        ("written by", summary.origin),
        ("iteration", "-" if summary.iteration is None else summary.iteration),
        ("save", "no manifest" if summary.save_id is None else summary.save_id),
        (
            "size",
            f"{human_bytes(summary.file_bytes)} in {counted(summary.files, 'file')} of {counted(summary.ranks, 'rank')}"
            + ("" if summary.balance is None else f" (largest rank / mean {summary.balance:.2f})")
            + f", .metadata {human_bytes(summary.metadata_bytes)}",
        ),
        (
            "holds",
            f"{summary.tensors} tensors in {summary.chunks} chunks, {summary.objects} objects"
            + (
                f"; {summary.shadow_copies} shadow copies, {human_bytes(summary.shadow_bytes)}"
                if summary.shadow_copies
                else ""
            ),
        ),
        ("model", f"{human_count(summary.model_elements)} elements, {human_bytes(summary.model_bytes)}"),
        (
            "optimizer",
            "none" if summary.optimizer is None else f"{summary.optimizer}, {human_bytes(summary.optimizer_bytes)}",
        ),
        ("layout", layout),
    ]
    lines = [fact(name, value) for name, value in facts]
    lines += ["", _group_table(summary.groups)]
    if summary.arguments:
        lines += ["", f"{len(summary.arguments)} Megatron arguments are stored; --args shows them"]
    lines += [one_line(f"problem: {problem}") for problem in summary.problems]
    return Outcome(summary, "\n".join(lines), DONE)


def _group_table(groups: tuple[GroupRow, ...]) -> str:
    total = sum(row.payload_bytes for row in groups) or 1
    return table(
        ("group", "tensors", "elements", "bytes", "share", "dtype"),
        (
            (
                row.group,
                row.tensors,
                human_count(row.elements),
                human_bytes(row.payload_bytes),
                f"{row.payload_bytes / total:.1%}",
                " ".join(row.dtypes),
            )
            for row in groups
        ),
        right=(1, 2, 3, 4),
    )
