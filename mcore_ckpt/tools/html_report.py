"""A checkpoint as one self-contained HTML page: shard grid of any tensor, size by layer, balance of ranks and files."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_ckpt.core.console import counted, human_bytes, human_count
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.tools.inspection import CheckpointSummary, file_rows, rank_balance, summarize, tensor_bytes
from mcore_ckpt.tools.keys import group_of, is_optimizer_key, layer_number, model_key, stacked_axes

# Markup, style and script. All of it ends up in the page, which opens from a disk without a network; the script draws
# from the JSON in `#data`, and puts keys and file names into the page as text, never as markup.
_PAGE = Path(__file__).with_name("report.html")
# What an index claims to be layers beyond these is shown as if it were none: no model has so many.
_MOST_LAYERS = 10_000


def write_report(index: CheckpointIndex, path: str | Path) -> None:
    """Write the page to `path`; raises `SaveError` if that cannot be done, and `OptionError` for what is no path."""
    file = local_path(path)
    try:
        # Names that are no UTF-8 are shown as far as they are; the page is made before its file is.
        file.write_bytes(render_report(index).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise SaveError(f"{path}: the report cannot be written: {error.strerror}") from error


def render_report(index: CheckpointIndex) -> str:
    """The page."""
    summary = summarize(index)
    content = json.dumps(_data(index, summary), separators=(",", ":"))
    # Inside a script element only these could end it, or open a comment in it.
    content = content.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    title = html.escape(f"Checkpoint {Path(index.path).name}")
    head, tail = _PAGE.read_text(encoding="utf-8").split("{{data}}")
    return head.replace("{{title}}", title) + content + tail


def _data(index: CheckpointIndex, summary: CheckpointSummary) -> dict[str, Any]:
    files = file_rows(index)
    numbers = {row.file: n for n, row in enumerate(files)}
    tensors = [_tensor(entry, numbers) for entry in index.tensors.values()]
    # The picture that opens first should show something: a weight of the model that is divided among ranks.
    first = max(range(len(tensors)), key=lambda n: _interest(tensors[n]), default=-1)
    kinds, layers = _layers(index)
    return {
        "subtitle": summary.path,
        "summary": list(_facts(summary)),
        "tensors": tensors,
        "first": first,
        "files": [
            {
                "file": row.file,
                "rank": row.rank,
                "parts": [row.tensor_bytes, row.object_bytes, max(0, row.unused_bytes or 0)],
            }
            for row in files
        ],
        "ranks": [{"name": f"rank {rank}", "parts": [nbytes]} for rank, nbytes in rank_balance(files).items()],
        "kinds": kinds,
        "layers": layers,
    }


def _interest(tensor: dict[str, Any]) -> tuple[bool, int, int]:
    files = {chunk[2] for chunk in tensor["chunks"]}
    return (not is_optimizer_key(tensor["key"]), min(len(files), 8), tensor["bytes"])


def _tensor(entry: TensorEntry, numbers: dict[str, int]) -> dict[str, Any]:
    return {
        "key": entry.fqn,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "bytes": tensor_bytes(entry.dtype, entry.shape),
        "chunks": [
            (
                chunk.offsets,
                chunk.sizes,
                numbers[chunk.item.file],
                chunk.item.offset,
                chunk.item.offset + chunk.item.length,
            )
            for chunk in entry.chunks
        ],
    }


def _facts(summary: CheckpointSummary) -> Iterator[tuple[str, str]]:
    yield "written by", summary.origin
    if summary.iteration is not None:
        yield "iteration", str(summary.iteration)
    yield (
        "size",
        f"{human_bytes(summary.file_bytes)} in {counted(summary.files, 'file')} of {counted(summary.ranks, 'rank')}",
    )
    yield "holds", f"{summary.tensors} tensors in {summary.chunks} chunks, {summary.objects} objects"
    yield "model", f"{human_count(summary.model_elements)} elements, {human_bytes(summary.model_bytes)}"
    if summary.optimizer is not None:
        yield "optimizer", f"{summary.optimizer}, {human_bytes(summary.optimizer_bytes)}"
    yield "layout", str(summary.layout)
    for problem in summary.problems:
        yield "problem", problem


def _layers(index: CheckpointIndex) -> tuple[list[str], list[dict[str, Any]]]:
    """Bytes of each kind of tensor in each layer, and in what is no layer."""
    sizes: dict[str, dict[str, int]] = {}
    for fqn, entry in index.tensors.items():
        kind = "optimizer" if is_optimizer_key(fqn) else group_of(fqn)
        nbytes = tensor_bytes(entry.dtype, entry.shape)
        stacked = stacked_axes(fqn, entry.shape)
        number = layer_number(model_key(fqn))
        if stacked.layer is not None and 0 < entry.shape[0] <= _MOST_LAYERS:
            names = [f"layer {n}" for n in range(entry.shape[0])]
        else:
            names = ["no layer" if number is None else f"layer {number}"]
        for name in names:
            row = sizes.setdefault(name, {})
            row[kind] = row.get(kind, 0) + nbytes // len(names)
    kinds = sorted({kind for row in sizes.values() for kind in row})
    order = sorted(sizes, key=lambda name: -1 if name == "no layer" else int(name.removeprefix("layer ")))
    return kinds, [{"name": name, "parts": [sizes[name].get(kind, 0) for kind in kinds]} for name in order]
