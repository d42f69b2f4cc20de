"""What a run and a checkpoint hold: `mcore-ckpt list`, `inspect`, `cat` and `diff`."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.commands.cli import (
    DIFFERS,
    DONE,
    FAILED,
    Outcome,
    add_workers,
    document_of,
    first_of,
    human_age,
    numbers,
    one_line,
    table,
)
from mcore_ckpt.core.console import counted, human_bytes, human_count
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.format.index import is_flat_bucket
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE
from mcore_ckpt.tools.keys import is_optimizer_key

if TYPE_CHECKING:
    from mcore_ckpt.tools.checkpoint import Checkpoint, LazyTensor
    from mcore_ckpt.tools.diff import DiffReport, TensorDiff
    from mcore_ckpt.tools.inspection import FileRow, GroupRow, ItemRow, TensorRow


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory that holds iter_0000100 and the like")


def run_list(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.runs import list_run

    report = list_run(arguments.run)
    now_s = time.time()
    rows, notes, documents = [], [], []
    for listed in report.checkpoints:
        found = listed.checkpoint
        age = None if found.made_at_s is None else human_age(max(0.0, now_s - found.made_at_s))
        state = "complete" if found.whole else "INCOMPLETE" if found.problems else "WRITTEN BY SOMETHING NEWER"
        state += "" if found.removed is None else ", model only"
        if found.locked:
            state += ", left by a save that is gone" if found.abandoned else ", being written"
        said = [*found.problems[:1], found.newer]
        if (drain := found.drain) is not None:
            copied = "not copied" if drain.error else "copied" if drain.commits else "this node's part copied"
            state += f", {copied if drain.done else 'not copied yet'}"
            waits = f"a job with drain_to={checkpoint_path(drain.to).parent} copies it, or `mcore-ckpt copy`"
            said.insert(0, drain.error or ("" if drain.done else waits))
            said.append(drain.remedy if found.problems else "")
        notes += [one_line(f"{found.name}: {each}") for each in said if each]
        marks = "exported" if listed.exported else "", "<- tracker" if found.tracked else ""
        name, size = found.name or str(found.path), human_bytes(found.size_bytes)
        rows.append((name, state, size, age, listed.layout, *marks))
        more = {"layout": listed.layout, "exported": listed.exported}
        documents.append(document_of(found, name=found.name, whole=found.whole, **more))
    whole = sum(listed.checkpoint.whole for listed in report.checkpoints)
    total_bytes = sum(listed.checkpoint.size_bytes for listed in report.checkpoints)
    notes += [
        f"{name}: not complete: a conversion makes it, or has been interrupted; the command that made it resumes it"
        for name in report.unfinished
    ]
    names = ("checkpoint", "state", "size", "age", "layout", "model" if report.exports else "", "")
    shown = table(names, rows, right=(2, 3))
    lines = [shown, *notes] if rows else notes
    if report.tracker_problem:
        lines.append(f"tracker: {report.tracker_problem}")
    lines.append(f"{report.path}: {counted(len(rows), 'checkpoint')}, {whole} complete, {human_bytes(total_bytes)}")
    document = document_of(report, checkpoints=documents)
    newer = [listed.checkpoint for listed in report.checkpoints if listed.checkpoint.newer]
    damaged = any(listed.checkpoint.problems and not listed.checkpoint.locked for listed in report.checkpoints)
    damaged |= bool(report.tracker_problem) and not any(found.tracked for found in newer)
    return Outcome(document, "\n".join(lines), DIFFERS if damaged else FAILED if newer else DONE)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    views = parser.add_mutually_exclusive_group()
    for view, shows in (
        ("--tensors", "each tensor: shape, dtype, chunks, files, bytes"),
        ("--items", "each stored item: key, type, box, file, byte range"),
    ):
        views.add_argument(view, nargs="?", const="", metavar="PATTERN", help=shows)
    views.add_argument("--files", action="store_true", help="each data file: its rank, its size, its two halves")
    views.add_argument("--args", action="store_true", help="Megatron's arguments, as stored")
    views.add_argument("--html", metavar="FILE", help="write a self-contained report with pictures of the shards")


def run_inspect(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools import inspection

    directory = inspection.checkpoint_directory(arguments.checkpoint)
    with inspection.in_force(directory):
        return _inspected(directory, arguments)


def _inspected(directory: Path, arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.format.metadata_read import read_index
    from mcore_ckpt.tools import inspection

    index = read_index(directory, strict=False)
    if arguments.tensors is not None:
        tensors = list(inspection.tensor_rows(index, arguments.tensors))
        total = human_bytes(sum(row.payload_bytes for row in tensors))
        return Outcome({"tensors": tensors}, f"{_tensor_table(tensors)}\n{counted(len(tensors), 'tensor')}, {total}")
    if arguments.items is not None:
        items = inspection.describe_items(index, arguments.items)
        total = human_bytes(sum(row.stop - row.start for row in items))
        return Outcome({"items": items}, f"{_item_table(items)}\n{counted(len(items), 'item')}, {total}")
    if arguments.files:
        files = inspection.file_rows(index)
        return Outcome({"files": files}, _file_table(files))
    if arguments.html:
        inspection.write_report(index, arguments.html)
        return Outcome({"report": arguments.html}, f"wrote {arguments.html}")
    summary = inspection.summarize(index)
    if arguments.args:
        text = table(("argument", "value"), [(name, str(value)) for name, value in sorted(summary.arguments.items())])
        return Outcome({"arguments": summary.arguments}, text)
    facts = [one_line(f"{name:<12}{value}") for name, value in summary.facts()]
    lines = [*facts, "", _group_table(summary.groups)]
    if summary.arguments:
        lines += ["", f"{len(summary.arguments)} Megatron arguments are stored; --args shows them"]
    lines += [one_line(f"problem: {problem}") for problem in summary.problems]
    return Outcome(summary, "\n".join(lines))


def _tensor_table(rows: Sequence[TensorRow]) -> str:
    cells = []
    for row in rows:
        grid, size = "x".join(map(str, row.grid)) or None, human_bytes(row.payload_bytes)
        files = " ".join(row.files[:4]) + (f" +{len(row.files) - 4}" if len(row.files) > 4 else "")
        cells.append((row.fqn, row.dtype, row.shape, row.chunks, grid, size, files))
    return table(("key", "dtype", "shape", "chunks", "grid", "bytes", "files"), cells, right=(3, 5))


def _item_table(rows: Sequence[ItemRow]) -> str:
    cells = []
    for row in rows:
        kind = "object" if row.dtype is None else "tensor"
        cells.append((row.file, row.start, row.stop, row.half, row.fqn, kind, row.dtype, row.shape, row.offsets))
    header = ("file", "start", "stop", "half", "key", "type", "dtype", "shape", "offsets")
    return table(header, cells, right=(1, 2))


def _file_table(rows: Sequence[FileRow]) -> str:
    cells = (
        (
            *(row.file, row.rank, "MISSING" if row.size_bytes is None else human_bytes(row.size_bytes)),
            *(row.tensors, row.tensor_data and "[{}, {})".format(*row.tensor_data)),
            *(row.objects, row.bytes_data and "[{}, {})".format(*row.bytes_data)),
            None if row.unused_bytes is None else human_bytes(row.unused_bytes),
        )
        for row in rows
    )
    header = ("file", "rank", "size", "tensors", "tensor_data", "objects", "bytes_data", "unused")
    return table(header, cells, right=(1, 2, 3, 5, 7))


def _group_table(groups: tuple[GroupRow, ...]) -> str:
    total = sum(row.payload_bytes for row in groups) or 1
    cells = []
    for row in groups:
        size, share = human_bytes(row.payload_bytes), f"{row.payload_bytes / total:.1%}"
        cells.append((row.group, row.tensors, human_count(row.elements), size, share, " ".join(row.dtypes)))
    return table(("group", "tensors", "elements", "bytes", "share", "dtype"), cells, right=(1, 2, 3, 4))


_SLICE = re.compile(r"-?\d+|(?:-?\d+)?:(?:-?\d+)?(?::(?:0*[1-9]\d*)?)?|\.\.\.")


def add_cat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("key", metavar="KEY", help="of a tensor or an object; a part that only one key has will do")
    parser.add_argument("--slice", metavar="SLICE", help="of a tensor: '0:4, :' or '..., ::2'; --slice=-1,0")
    parser.add_argument("--head", type=int, default=10, metavar="N", help="elements to show (default: 10)")
    parser.add_argument("--stats", action="store_true", help="min, max, mean, std, norm, NaNs of tensor or slice")


def run_cat(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.checkpoint import open_checkpoint

    with open_checkpoint(arguments.checkpoint) as checkpoint:
        key = _resolve(checkpoint, arguments.key)
        if key in checkpoint.index.objects:
            return _object(checkpoint, key)
        return _tensor(checkpoint, checkpoint.tensors[key], arguments)


def _resolve(checkpoint: Checkpoint, key: str) -> str:
    if key in checkpoint.index.tensors or key in checkpoint.index.objects:
        return key
    found = [other for other in checkpoint if key in other]
    if len(found) == 1:
        return found[0]
    if found:
        raise OptionError(
            f"{key!r}: {len(found)} keys of {checkpoint.path} contain this, such as {', '.join(found[:3])}; "
            "give a whole key"
        )
    raise checkpoint.missing(key)


def _object(checkpoint: Checkpoint, key: str) -> Outcome:
    import pprint

    from mcore_ckpt.tools.keys import read_plain_object

    entry = checkpoint.index.objects[key]
    value = read_plain_object(checkpoint.index, entry)
    item = entry.item
    header = f"{one_line(key)}: object, {item.file} bytes [{item.offset}, {item.offset + item.length})"
    return Outcome({"key": key, "value": value}, f"{header}\n{pprint.pformat(value, width=110)}")


def _parse_slice(text: str) -> Any:
    """`'0:4, :, -1'` -> a tuple of slices and ints."""
    parts: list[Any] = []
    for word in text.strip().removeprefix("[").removesuffix("]").removesuffix(",").split(","):
        word = word.strip()
        if not _SLICE.fullmatch(word):
            raise OptionError(
                f"--slice {text!r}: expected numbers, `...`, and slices with a step of 1 or more, such as '0:4, :, -1'"
            )
        if word == "...":
            parts.append(Ellipsis)
        elif ":" in word:
            parts.append(slice(*(int(bound) if bound else None for bound in word.split(":"))))
        else:
            parts.append(int(word))
    return tuple(parts)


def _tensor(checkpoint: Checkpoint, tensor: LazyTensor, arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.payloads import tensor_stats

    index = _parse_slice(arguments.slice) if arguments.slice else None
    chunks = len(tensor.chunks)
    document: dict[str, Any] = {"key": tensor.fqn, "dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}
    size = f"{human_bytes(tensor.nbytes)} in {counted(chunks, 'chunk')}"
    lines = [f"{one_line(tensor.fqn)}: {tensor.dtype} {numbers(tensor.shape)}, {size}"]
    try:
        if arguments.stats:
            part = None if index is None else tensor.numpy(index)
            stats = document_of(tensor_stats(checkpoint.payloads, checkpoint.index.tensors[tensor.fqn], part))
            document["stats"] = {name: _rounded(value, 9) for name, value in stats.items()}
            lines.append("  ".join(f"{name} {value}" for name, value in document["stats"].items()))
        document["values"] = values = _head(tensor, index, arguments.head)
        lines.append(str(values) if index is not None else f"first elements: {values}")
    except IndexError as error:
        raise OptionError(f"--slice {arguments.slice!r}: {error}") from error
    return Outcome(document, "\n".join(lines))


def _head(tensor: LazyTensor, index: Any, count: int) -> Any:
    """The slice as nested lists (its first rows), or without a slice the first elements."""
    import numpy as np

    if index is None:
        index = ()
        for size in tensor.shape[:-1]:
            index = (*index, 0) if size else (*index, slice(0))
        if tensor.shape:
            index = (*index, slice(0, count))
    values = np.atleast_1d(tensor.numpy(index))
    return _rounded(values[: max(count, 1)].tolist())


def _rounded(value: Any, digits: int = 7) -> Any:
    """Nested lists with floats of so many digits."""
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


_SHOWN = 30
_SHOWN_VALUES = 5
_FLAT_BUCKETS = (
    "note: the optimizer's flat buckets (dp_reshardable) also hold what lay in memory between the parameters, which "
    "Megatron-Core never sets: it may differ though all parameters are the same. To compare these, reshard both with "
    "--optimizer-layout fully_reshardable first"
)

_AS_STORED = "; fingerprints compared as they are stored, without reading that data (mcore-ckpt verify does)"


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="directory of a checkpoint, or one with a tracker file")
    parser.add_argument("b", metavar="B", nargs="?", help="the other one; left out, with --state: A is a run")
    parser.add_argument("--only", metavar="PATTERN", help="keys that match (shell pattern, or a part of the key)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keys-only", action="store_true", help="compare keys, shapes and dtypes, not values")
    what.add_argument(
        "--state",
        action="store_true",
        help="compare fingerprints of tensors, which reads little or nothing of them; of a run alone, each checkpoint "
        "with the next: what first stands still, appears or disappears",
    )
    for flag, kind in (("--rtol", "relative"), ("--atol", "absolute")):
        says = f"{kind} difference that is none (default: 0)"
        parser.add_argument(flag, type=float, default=0.0, metavar="X", help=says)
    parser.add_argument("--all", action="store_true", help="list all that differ, and tensors that do not")
    add_workers(parser, "threads that read and compare, of about 100 MB each")


def run_diff(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.diff import diff_checkpoints
    from mcore_ckpt.tools.inspection import checkpoint_directory

    if arguments.b is None:
        if not arguments.state:
            raise OptionError("diff takes two checkpoints; of one run, --state compares each checkpoint with the next")
        return _lineage(arguments)
    report = diff_checkpoints(
        checkpoint_directory(arguments.a),
        checkpoint_directory(arguments.b),
        only=arguments.only,
        values=not arguments.keys_only,
        state=arguments.state,
        rtol=arguments.rtol,
        atol=arguments.atol,
        workers=arguments.workers,
        progress=arguments.progress,
    )
    shown = [tensor for tensor in report.tensors if arguments.all or not tensor.same]
    apart = report.optimizer_differs or any(report.removed)
    left_out = is_optimizer_key if apart and not arguments.all else lambda _: False
    differ = [f"{key}{_values_of(report, key, everything=arguments.all)}" for key in report.common_differs]
    found = {
        "only in A": [key for key in report.only_in_a if not left_out(key)],
        "only in B": [key for key in report.only_in_b if not left_out(key)],
        "object differs": report.objects_differ,
        "common state differs": differ,
        "common state cannot be compared": report.not_compared,
    }
    lines = [one_line(f"{what}: {key}") for what, keys in found.items() for key in keys]
    limit = len(shown) if arguments.all else _SHOWN
    if shown:
        header = ("key", "what", "max abs", "max rel", "differing", "NaN/inf mismatches", "NaNs A/B")
        lines += ["", table(header, map(_row, shown[:limit]), right=(2, 3, 4, 5, 6))]
    if len(shown) > limit:
        lines.append(f"... and {counted(len(shown) - limit, 'more tensor')} (--all lists them)")
    if any(is_flat_bucket(tensor.fqn) and not tensor.same for tensor in report.tensors):
        lines.append(_FLAT_BUCKETS)
    same = sum(tensor.same for tensor in report.tensors)
    verdict = "identical" if report.identical else "DIFFERENT"
    compared = f", {human_bytes(report.read_bytes)} compared"
    if arguments.keys_only or arguments.state:
        compared = _AS_STORED if arguments.state else ""
    objects = f"{report.objects_same} of {report.objects_same + len(report.objects_differ)} common objects"
    only = f"{len(report.only_in_a)} keys only in A, {len(report.only_in_b)} only in B"
    tensors = f"{same} of {len(report.tensors)} common tensors are the same"
    lines += ["", f"{verdict}: {tensors}, {objects}; {only}{compared}"]
    said = zip((report.a, report.b), report.removed, strict=True)
    lines += [one_line(f"{path}: {removed.said}") for path, removed in said if removed]
    if report.optimizer_differs:
        lines += _other_layouts(report)
    rows = [document_of(tensor, same=tensor.same) for tensor in report.tensors]
    document = document_of(report, identical=report.identical, tensors=rows)
    return Outcome(document, "\n".join(lines).strip("\n"), DONE if report.identical else DIFFERS)


def _lineage(arguments: argparse.Namespace) -> Outcome:
    """What of a run first left its lineage at which save."""
    from mcore_ckpt.tools.runs import lineage_of_run

    report = lineage_of_run(arguments.a)
    limit = len(report.departures) if arguments.all else _SHOWN
    lines = first_of([one_line(str(departure)) for departure in report.departures], limit, " (--all lists them)")
    verdict = counted(len(report.departures), "departure") if report.departures else "nothing left its lineage"
    lines.append(f"{one_line(report.path)}: {verdict} in {counted(len(report.checkpoints), 'checkpoint')}")
    lines[-1] += f"; {counted(report.unknown, 'value')} without a fingerprint" if report.unknown else ""
    return Outcome(document_of(report), "\n".join(lines), DIFFERS if report.departures else DONE)


def _other_layouts(report: DiffReport) -> list[str]:
    """What was compared of two checkpoints whose optimizers have other layouts, what was not, and how it can be."""
    of_a, of_b = report.optimizer_layouts
    only_a, only_b = (sum(map(is_optimizer_key, keys)) for keys in (report.only_in_a, report.only_in_b))
    said = (
        f"compared: the model and the common state. Not compared: the optimizer's state, which A holds as {of_a} "
        f"({only_a} keys) and B as {of_b} ({only_b} keys)"
    )
    convertible = [path for path, layout in ((report.a, of_a), (report.b, of_b)) if layout != FULLY_RESHARDABLE]
    if FULLY_RESHARDABLE not in (of_a, of_b):
        return [said]
    convert = f"mcore-ckpt reshard {shlex.quote(convertible[0])} NEW --optimizer-layout {FULLY_RESHARDABLE}"
    return [said, f"To compare it, too: {convert}; then compare NEW"]


def _values_of(report: DiffReport, entry: str, *, everything: bool) -> str:
    """What differs in an entry of the common state, behind its name: a few of the values, or all."""
    found = [each for each in report.common_values if each.entry == entry]
    shown = found if everything else found[:_SHOWN_VALUES]
    values = ", ".join(f"{each.name} {each.a} / {each.b}".strip() for each in shown)
    more = f", ... ({len(found) - len(shown)} more, --all lists them)" if len(shown) < len(found) else ""
    return f": {values}{more}"


def _what(tensor: TensorDiff) -> str:
    if tensor.shape_a != tensor.shape_b:
        return f"shape {list(tensor.shape_a)} / {list(tensor.shape_b)}"
    said = [] if tensor.dtype_a == tensor.dtype_b else [f"{tensor.dtype_a} / {tensor.dtype_b}"]
    if tensor.crcs is not None:
        a, b = tensor.crcs
        said.append("same fingerprint" if a == b else f"other bits ({a:08x} / {b:08x})")
    elif tensor.values is not None and not tensor.values.identical:
        said.append("values" if tensor.values.differing else "same values" if said else "same values, other bits")
    return ", ".join(said) or ("same shape and dtype" if tensor.values is None else "identical")


def _row(tensor: TensorDiff) -> tuple[object, ...]:
    if (values := tensor.values) is None:
        return (tensor.fqn, _what(tensor), *[None] * 5)
    most = [f"{value:.3g}" if values.measured else None for value in (values.max_abs, values.max_rel)]
    counts = f"{values.differing}/{values.elements}", values.nan_mismatches, f"{values.nans_a}/{values.nans_b}"
    return (tensor.fqn, _what(tensor), *most, *counts)
