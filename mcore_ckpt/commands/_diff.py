"""`mcore-ckpt diff`: compare two checkpoints, whatever their sharding."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from mcore_ckpt.commands._shell import DIFFERS, DONE, Outcome, add_workers, document_of, one_line, table
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import is_flat_bucket
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE
from mcore_ckpt.tools.keys import is_optimizer_key

if TYPE_CHECKING:
    from mcore_ckpt.tools.diff import DiffReport, TensorDiff

_SHOWN = 30
_SHOWN_VALUES = 5
_MOST_WORKERS = 8
_FLAT_BUCKETS = (
    "note: the optimizer's flat buckets (dp_reshardable) also hold what lay in memory between the parameters, which "
    "Megatron-Core never sets: it may differ though all parameters are the same. To compare these, reshard both with "
    "--optimizer-layout fully_reshardable first"
)

_AS_STORED = "; fingerprints compared as they are stored, without reading that data (mcore-ckpt verify does)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("a", metavar="A", help="directory of a checkpoint, or one with a tracker file")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--only", metavar="PATTERN", help="keys that match (shell pattern, or a part of the key)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keys-only", action="store_true", help="compare keys, shapes and dtypes, not values")
    what.add_argument(
        "--state", action="store_true", help="compare fingerprints of tensors, which reads little or nothing of them"
    )
    parser.add_argument(
        "--rtol", type=float, default=0.0, metavar="X", help="relative difference that counts as none (default: 0)"
    )
    parser.add_argument(
        "--atol", type=float, default=0.0, metavar="X", help="absolute difference that counts as none (default: 0)"
    )
    parser.add_argument("--all", action="store_true", help="list all that differ, and tensors that do not")
    add_workers(parser, "threads that read and compare")


def run(arguments: argparse.Namespace) -> Outcome:
    """Compare."""
    from mcore_ckpt.tools.diff import diff_checkpoints
    from mcore_ckpt.tools.inspection import checkpoint_directory

    if not 1 <= arguments.workers <= _MOST_WORKERS:
        raise OptionError(
            f"--workers {arguments.workers}: expected 1 to {_MOST_WORKERS}; each takes about 100 MB, and the command"
            " stays within 1 GiB"
        )
    report = diff_checkpoints(
        checkpoint_directory(arguments.a),
        checkpoint_directory(arguments.b),
        only=arguments.only,
        values=not arguments.keys_only,
        state=arguments.state,
        rtol=arguments.rtol,
        atol=arguments.atol,
        workers=arguments.workers,
        progress=False if arguments.quiet else None,
    )
    shown = [tensor for tensor in report.tensors if arguments.all or not tensor.same]
    left_out = is_optimizer_key if report.optimizer_differs and not arguments.all else lambda _: False
    lines = [one_line(f"only in A: {key}") for key in report.only_in_a if not left_out(key)]
    lines += [one_line(f"only in B: {key}") for key in report.only_in_b if not left_out(key)]
    lines += [one_line(f"object differs: {key}") for key in report.objects_differ]
    lines += [
        one_line(f"common state differs: {key}{_values_of(report, key, everything=arguments.all)}")
        for key in report.common_differs
    ]
    lines += [one_line(f"common state cannot be compared: {key}") for key in report.not_compared]
    limit = len(shown) if arguments.all else _SHOWN
    if shown:
        header = ("key", "what", "max abs", "max rel", "differing", "NaN/inf mismatches", "NaNs A/B")
        lines += ["", table(header, map(_row, shown[:limit]), right=(2, 3, 4, 5, 6))]
    if len(shown) > limit:
        lines.append(f"... and {len(shown) - limit} more tensors (--all lists them)")
    if any(is_flat_bucket(tensor.fqn) and not tensor.same for tensor in report.tensors):
        lines.append(_FLAT_BUCKETS)
    same = sum(tensor.same for tensor in report.tensors)
    verdict = "identical" if report.identical else "DIFFERENT"
    compared = f", {human_bytes(report.read_bytes)} compared"
    if arguments.keys_only or arguments.state:
        compared = _AS_STORED if arguments.state else ""
    total_objects = report.objects_same + len(report.objects_differ)
    lines += ["", f"{verdict}: {same} of {len(report.tensors)} common tensors are the same"]
    lines[-1] += f", {report.objects_same} of {total_objects} common objects; {len(report.only_in_a)} keys only in A"
    lines[-1] += f", {len(report.only_in_b)} only in B{compared}"
    if report.optimizer_differs:
        lines += _other_layouts(report)
    if report.shadow_copies:
        lines.append(f"{report.shadow_copies} shadow copies are left out; `mcore-ckpt verify` compares them")
    document = document_of(report, identical=report.identical, tensors=[_document(tensor) for tensor in report.tensors])
    return Outcome(document, "\n".join(lines).strip("\n"), DONE if report.identical else DIFFERS)


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
    dtypes = "" if tensor.dtype_a == tensor.dtype_b else f"{tensor.dtype_a} / {tensor.dtype_b}"
    if tensor.crcs is not None:
        a, b = tensor.crcs
        bits = "same fingerprint" if a == b else f"other bits ({a:08x} / {b:08x})"
        return f"{dtypes}, {bits}" if dtypes else bits
    if tensor.values is None:
        return dtypes or "same shape and dtype"
    if tensor.values.identical:
        return "identical"
    values = "values" if tensor.values.differing else ("same values" if dtypes else "same values, other bits")
    return f"{dtypes}, {values}" if dtypes else values


def _row(tensor: TensorDiff) -> tuple[object, ...]:
    values = tensor.values
    if values is None:
        return (tensor.fqn, _what(tensor), "-", "-", "-", "-", "-")
    return (
        tensor.fqn,
        _what(tensor),
        f"{values.max_abs:.3g}" if values.measured else "-",
        f"{values.max_rel:.3g}" if values.measured else "-",
        f"{values.differing}/{values.elements}",
        values.nan_mismatches,
        f"{values.nans_a}/{values.nans_b}",
    )


def _document(tensor: TensorDiff) -> dict[str, object]:
    return {
        "key": tensor.fqn,
        "same": tensor.same,
        "dtype_a": tensor.dtype_a,
        "dtype_b": tensor.dtype_b,
        "shape_a": tensor.shape_a,
        "shape_b": tensor.shape_b,
        "values": tensor.values,
        "crcs": tensor.crcs,
    }
