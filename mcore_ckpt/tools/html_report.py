"""Markup, style and script of the report page. Everything is in the page: it opens from a disk without a network.

The script draws from the JSON in `#data`. Keys and file names are put into the page as text, never as markup.

A checkpoint as one self-contained HTML page: shard grid of any tensor, size by layer, balance of ranks and files.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_ckpt.core.console import human_bytes, human_count
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.tools.inspection import Summary, file_rows, rank_balance, summarize, tensor_bytes
from mcore_ckpt.tools.keys import group_of, is_optimizer_key, layer_number, model_key, stacked_axes

__all__ = [
    "PAGE",
    "render_report",
    "write_report",
]

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%(title)s</title>
<style>
:root { --ink: #1d2430; --dim: #667085; --line: #d8dde6; --back: #ffffff; --panel: #f6f8fb; --accent: #2f6fdf; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ecf3; --dim: #98a2b3; --line: #39424f; --back: #151a21; --panel: #1d242e; --accent: #79a6ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 24px; background: var(--back); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 32px 0 8px; }
p.note { color: var(--dim); margin: 0 0 8px; }
table { border-collapse: collapse; width: 100%%; }
td, th { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.wrap { overflow-wrap: anywhere; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto; }
.columns { display: grid; grid-template-columns: minmax(260px, 380px) 1fr; gap: 16px; }
@media (max-width: 800px) { .columns { grid-template-columns: 1fr; } }
input[type=search] { width: 100%%; padding: 6px 8px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--back); color: var(--ink); font: inherit; }
ul.keys { list-style: none; margin: 8px 0 0; padding: 0; max-height: 420px; overflow-y: auto; }
ul.keys button { width: 100%%; text-align: left; border: 0; border-radius: 4px; background: none; color: inherit;
  font: 12px/1.4 ui-monospace, monospace; padding: 3px 6px; cursor: pointer; overflow-wrap: anywhere; }
ul.keys button:hover, ul.keys button:focus-visible { background: var(--line); }
ul.keys button[aria-pressed=true] { background: var(--accent); color: #fff; }
svg { display: block; max-width: 100%%; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0 0; }
.legend span::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 5px;
  border-radius: 2px; background: var(--swatch); }
</style>
</head>
<body>
<h1>%(title)s</h1>
<p class="note" id="subtitle"></p>
<table id="summary"></table>
<h2>Shard grid</h2>
<p class="note">How a tensor is divided into chunks, and which rank's file each lies in. The last two axes are drawn;
leading axes are chosen below the picture.</p>
<div class="columns">
  <div class="panel"><input type="search" id="search" placeholder="part of a key" aria-label="filter keys">
    <ul class="keys" id="keys"></ul></div>
  <div class="panel" id="grid"></div>
</div>
<h2>Size by layer</h2>
<p class="note">Bytes of all tensors that belong to a layer, by kind.</p>
<div class="panel" id="layers"></div>
<h2>Balance of ranks and files</h2>
<div class="panel" id="ranks"></div>
<div class="panel" id="files" style="margin-top: 16px"></div>
<script type="application/json" id="data">%(data)s</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const LIMIT = 300;
function colour(n) { return "hsl(" + Math.round((n * 137.508 + 210) %% 360) + " 55%% 55%%)"; }
function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1000; at += 1; }
  return (at ? n.toPrecision(3) : n) + " " + units[at];
}
function element(parent, name, attributes, text) {
  const svg = name === "svg" || parent.namespaceURI === SVG;
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const key in attributes || {}) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}
function clear(node) { while (node.firstChild) node.removeChild(node.firstChild); return node; }
function rectangle(svg, x, y, width, height, fill, title) {
  const box = {x: x, y: y, width: Math.max(width, 0.5), height: Math.max(height, 0.5)};
  const made = element(svg, "rect", {...box, fill: fill});
  element(made, "title", {}, title);
  return made;
}
function rankOf(file) {
  const found = /__(\\d+)_\\d+\\.distcp$/.exec(data.files[file].file);
  return found ? Number(found[1]) : file;
}
function legend(parent, entries) {
  const list = element(parent, "div", {"class": "legend"});
  for (const [name, fill] of entries) element(list, "span", {style: "--swatch:" + fill}, name);
}
function showSummary() {
  document.getElementById("subtitle").textContent = data.subtitle;
  const table = document.getElementById("summary");
  for (const [name, value] of data.summary) {
    const row = element(table, "tr");
    element(row, "th", {scope: "row"}, name);
    element(row, "td", {"class": "wrap"}, value);
  }
}
function showKeys() {
  const wanted = document.getElementById("search").value.toLowerCase();
  const list = clear(document.getElementById("keys"));
  let shown = 0, more = 0;
  data.tensors.forEach((tensor, n) => {
    if (!tensor.key.toLowerCase().includes(wanted)) return;
    if (shown === LIMIT) { more += 1; return; }
    shown += 1;
    const button = element(element(list, "li"), "button", {type: "button", "aria-pressed": n === chosen}, tensor.key);
    button.addEventListener("click", () => { chosen = n; leading = []; showKeys(); showGrid(); });
  });
  if (more) element(list, "li", {}, "... and " + more + " more: type a part of the key");
}
let chosen = data.tensors.length ? data.first : -1;
let leading = [];
function showGrid() {
  const panel = clear(document.getElementById("grid"));
  if (chosen < 0) { element(panel, "p", {}, "no tensors"); return; }
  const tensor = data.tensors[chosen];
  element(panel, "strong", {"class": "wrap"}, tensor.key);
  element(panel, "p", {"class": "note"}, tensor.dtype + " [" + tensor.shape.join(", ") + "], " + bytes(tensor.bytes)
    + " in " + tensor.chunks.length + " chunks");
  const rank = tensor.shape.length;
  const rows = rank > 1 ? tensor.shape[rank - 2] : 1;
  const columns = rank > 0 ? tensor.shape[rank - 1] : 1;
  const front = Math.max(0, rank - 2);
  while (leading.length < front) leading.push(0);
  const here = tensor.chunks.filter(chunk =>
    leading.every((index, axis) => chunk[0][axis] <= index && index < chunk[0][axis] + chunk[1][axis]));
  const width = 640, height = rank > 1 ? Math.max(120, Math.min(420, width * rows / columns)) : 70;
  const svg = element(panel, "svg", {viewBox: "0 0 " + (width + 2) + " " + (height + 2), role: "img",
    "aria-label": "chunks of " + tensor.key, id: "grid-picture"});
  const ranks = new Map();
  for (const [offsets, sizes, file, start, stop] of here) {
    const x = rank > 0 ? offsets[rank - 1] / columns * width : 0;
    const w = rank > 0 ? sizes[rank - 1] / columns * width : width;
    const y = rank > 1 ? offsets[rank - 2] / rows * height : 0;
    const h = rank > 1 ? sizes[rank - 2] / rows * height : height;
    const owner = rankOf(file);
    ranks.set("rank " + owner, colour(owner));
    const name = data.files[file].file;
    const made = rectangle(svg, x + 1, y + 1, w, h, colour(owner), "[" + offsets.join(", ") + "] + ["
      + sizes.join(", ") + "]\\n" + name + " [" + start + ", " + stop + ")");
    made.setAttribute("stroke", "var(--back)");
    made.setAttribute("class", "chunk");
    if (w > 90 && h > 18) element(svg, "text", {x: x + 6, y: y + 15}, name);
  }
  legend(panel, [...ranks].sort((a, b) => a[0].localeCompare(b[0], undefined, {numeric: true})));
  for (let axis = 0; axis < front; axis += 1) {
    const label = element(element(panel, "div"), "label", {}, "axis " + axis + ": ");
    const slider = element(label, "input", {type: "range", min: 0, max: tensor.shape[axis] - 1, value: leading[axis]});
    const value = element(label, "span", {}, String(leading[axis]));
    slider.addEventListener("change", () => { leading[axis] = Number(slider.value); showGrid(); });
    slider.addEventListener("input", () => { value.textContent = slider.value; });
  }
}
function bars(panel, title, rows, kinds, id) {
  element(panel, "strong", {}, title);
  const left = 120, width = 520, step = 18;
  const most = Math.max(1, ...rows.map(row => row.parts.reduce((sum, part) => sum + part, 0)));
  const shown = rows.slice(0, 400);
  const across = left + width + 90, down = shown.length * step + 4;
  const svg = element(panel, "svg", {viewBox: "0 0 " + across + " " + down, width: across, height: down, role: "img",
    "aria-label": title, id: id});
  shown.forEach((row, n) => {
    element(svg, "text", {x: left - 6, y: n * step + 13, "text-anchor": "end"}, row.name);
    let x = left;
    row.parts.forEach((part, kind) => {
      if (!part) return;
      const w = part / most * width;
      rectangle(svg, x, n * step + 2, w, step - 4, colour(kind), row.name + ": " + kinds[kind] + " " + bytes(part));
      x += w;
    });
    element(svg, "text", {x: x + 6, y: n * step + 13}, bytes(row.parts.reduce((sum, part) => sum + part, 0)));
  });
  if (rows.length > shown.length) {
    element(panel, "p", {"class": "note"}, "the first " + shown.length + " of " + rows.length);
  }
  legend(panel, kinds.map((kind, n) => [kind, colour(n)]));
}
showSummary();
showKeys();
showGrid();
document.getElementById("search").addEventListener("input", showKeys);
bars(document.getElementById("layers"), "bytes by layer", data.layers, data.kinds, "layers-picture");
bars(document.getElementById("ranks"), "bytes by rank", data.ranks, ["all files"], "ranks-picture");
bars(document.getElementById("files"), "bytes by file", data.files.map(row => ({name: row.file, parts: row.parts})),
  ["tensor_data", "bytes_data", "unused"], "files-picture");
document.body.dataset.ready = "yes";
</script>
</body>
</html>
"""


def write_report(index: CheckpointIndex, path: str | Path) -> None:
    """Write the page to `path`; raises `SaveError` if that cannot be done."""
    try:
        Path(path).write_text(render_report(index), encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{path}: the report cannot be written: {error.strerror}") from error


def render_report(index: CheckpointIndex) -> str:
    """The page."""
    summary = summarize(index.path, index)
    content = json.dumps(_data(index, summary), separators=(",", ":"))
    # Inside a script element only these could end it, or open a comment in it.
    content = content.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return PAGE % {"title": html.escape(f"Checkpoint {Path(index.path).name}"), "data": content}


def _data(index: CheckpointIndex, summary: Summary) -> dict[str, Any]:
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
            {"file": row.file, "parts": [row.tensor_bytes, row.object_bytes, max(0, row.unused_bytes or 0)]}
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


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "written by", "Megatron-Core" if summary.written_by == "megatron" else "torch.distributed.checkpoint"
    if summary.iteration is not None:
        yield "iteration", str(summary.iteration)
    yield "size", f"{human_bytes(summary.file_bytes)} in {summary.files} files of {summary.ranks} ranks"
    yield "holds", f"{summary.tensors} tensors in {summary.chunks} chunks, {summary.objects} objects"
    yield "model", f"{human_count(summary.model_elements)} elements, {human_bytes(summary.model_bytes)}"
    if summary.optimizer is not None:
        yield "optimizer", f"{summary.optimizer}, {human_bytes(summary.optimizer_bytes)}"
    sizes = (("TP", summary.layout.tp), ("PP", summary.layout.pp), ("EP", summary.layout.ep))
    shown = " ".join(f"{name} {size}" for name, size in sizes if size is not None)
    yield "layout", shown or "not known"
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
        if stacked.layer is not None and entry.shape[0]:
            names = [f"layer {n}" for n in range(entry.shape[0])]
        else:
            names = ["no layer" if number is None else f"layer {number}"]
        for name in names:
            row = sizes.setdefault(name, {})
            row[kind] = row.get(kind, 0) + nbytes // len(names)
    kinds = sorted({kind for row in sizes.values() for kind in row})
    order = sorted(sizes, key=lambda name: -1 if name == "no layer" else int(name.removeprefix("layer ")))
    return kinds, [{"name": name, "parts": [sizes[name].get(kind, 0) for kind in kinds]} for name in order]
