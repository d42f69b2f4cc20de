#!/usr/bin/env python3
"""Make the pictures of the documentation: `make pictures`.

    scripts/pictures.py diagrams    a save and a load with their processes, from the text in this file
    scripts/pictures.py trace       two ranks save a Megatron model while they train it; the trace, and its picture

Without a name all are made, into docs/pictures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(ROOT))

PICTURES = ROOT / "docs" / "pictures"
TRACE = "async_save.trace.json"

# A person, an arrow or a note in a line: `T -> W: what` is done, `T --> W: what` is an answer, `T: what` is done alone.
DIAGRAMS = {
    "save.svg": """
        T = each rank: trainer
        W = each rank: writer process
        C = coordinator (rank 0)
        D = directory
        T -> C: local plan (columns of numbers)
        C -> D: lock
        C: check that the slices tile every tensor
        C --> T: go, or the first cause on all ranks
        T: copy tensors into the staging buffer
        T -> W: job: layout of the files
        T: training resumes
        W: checksums
        W -> D: data files, synced
        W --> T: lengths and checksums
        T -> C: results, when the save is finalized
        C: compare with the plan
        C -> D: .metadata, by a rename
        C -> D: release the lock
        C --> T: callbacks run, or the first cause on all ranks
    """,
    "load.svg": """
        T = each rank: trainer
        R = each rank: reader threads
        D = directory
        D -> T: .metadata
        T: requested slices, compared with stored chunks
        T -> R: byte ranges
        D -> R: ranges, with O_DIRECT or from the page cache
        R: compare lengths, headers, CRC-32
        R -> T: bytes into the destination tensors
        T: one error, on all ranks that load together
    """,
}

_COLORS = {
    "train": "#cfd8dc",
    "plan": "#ffb300",
    "stage": "#e53935",
    "dispatch": "#8e24aa",
    "writer": "#1e88e5",
    "gather": "#6d4c41",
    "commit": "#43a047",
}


class Drawing:
    """Elements of an SVG on white, so that it can be read in dark pages, too. Sizes in pixels."""

    def __init__(self, width: float, height: float) -> None:
        self.size = (width, height)
        self.elements: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        """A filled rectangle; `title` is shown under the pointer."""
        inside = f"<title>{escape(title)}</title>" if title else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, arrow: bool = False) -> None:
        """A line, with a head at its second end if it is an arrow."""
        more = ' stroke-dasharray="5 4"' * dashed + ' marker-end="url(#head)"' * arrow
        self.elements.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#546e7a"{more}/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False) -> None:
        """A line of text."""
        weight = ' font-weight="bold"' * bold
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def __str__(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            'font-family="sans-serif" font-size="12" fill="#263238">\n'
            '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#546e7a"/></marker>\n'
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>\n'
        )
        return head + "\n".join(self.elements) + "\n</svg>\n"


def draw_diagram(text: str) -> str:
    """Processes next to each other, and below one another what they do and send."""
    lines = [line.strip() for line in text.strip().splitlines()]
    names = dict(line.split(" = ") for line in lines if " = " in line)
    steps = [line for line in lines if " = " not in line]
    column, row, top = 235, 27, 52
    drawing = Drawing(column * len(names), top + row * len(steps) + 12)
    at = {name: column * (number + 0.5) for number, name in enumerate(names)}
    for name, title in names.items():
        drawing.rectangle(at[name] - 100, 10, 200, 26, "#eceff1")
        drawing.text(at[name], 27, title, "middle", bold=True)
        drawing.line(at[name], 36, at[name], drawing.size[1] - 6)
    for number, step in enumerate(steps):
        y = top + row * number + 12
        match = re.fullmatch(r"(\w)(?: (--?>) (\w))?: (.+)", step)
        assert match is not None, step
        begin, arrow, end, what = match.groups()
        if arrow is None:
            width = 6.4 * len(what) + 8
            drawing.rectangle(at[begin] - width / 2, y - 11, width, 19, "#fff8e1")
            drawing.text(at[begin], y + 3, what, "middle")
        else:
            drawing.text((at[begin] + at[end]) / 2, y - 3, what, "middle")
            drawing.line(at[begin], y + 3, at[end], y + 3, dashed=arrow == "-->", arrow=True)
    return str(drawing)


def draw_trace(trace: dict[str, Any]) -> str:
    """A row for each process, as Perfetto shows the same file."""
    names, spans = {}, []
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans.append(event)
        elif event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = f"rank {event['pid']}: {event['args']['name']}"
    end_ms = max(event["ts"] + event["dur"] for event in spans) / 1e3
    left, width, row, top = 150, 800, 34, 34
    drawing = Drawing(left + width + 20, top + row * len(names) + 32)
    x = left
    for name, color in _COLORS.items():
        drawing.rectangle(x, 10, 12, 12, color)
        drawing.text(x + 17, 20, name)
        x += 105
    for number, (thread, name) in enumerate(sorted(names.items())):
        y = top + row * number
        drawing.text(8, y + 20, name)
        for event in spans:
            if (event["pid"], event["tid"]) == thread:
                begin, length = (event[part] / 1e3 / end_ms * width for part in ("ts", "dur"))
                title = f"{event['name']}: {event['dur'] / 1e3:.1f} ms"
                drawing.rectangle(left + begin, y + 4, max(1.0, length - 0.7), row - 10, _COLORS[event["name"]], title)
    bottom = top + row * len(names)
    drawing.line(left, bottom, left + width, bottom)
    step_ms = 10 ** math.floor(math.log10(end_ms))
    step_ms /= 5 if end_ms / step_ms < 3 else 2 if end_ms / step_ms < 6 else 1
    for tick in range(int(end_ms / step_ms) + 1):
        x = left + tick * step_ms / end_ms * width
        drawing.line(x, bottom, x, bottom + 5)
        drawing.text(x, bottom + 19, f"{tick * step_ms:.0f} ms", "middle")
    return str(drawing)


def train_and_save(rank: int, work: Path) -> None:
    """On each of two ranks: an async save, and steps until it is published; twice, since the first takes memory."""
    warnings.simplefilter("ignore")
    from tests.support.models import GATED, Parallel, build_training

    training = build_training(dataclasses.replace(GATED, hidden=512, sequence=4, dtype="float32"), Parallel(tensor=2))
    from megatron.core import dist_checkpointing

    import mcore_ckpt

    mcore_ckpt.install()
    steps: list[dict[str, Any]] = []
    queue = mcore_ckpt.AsyncCallsQueue()
    for iteration in (1, 2):
        training.train(1)
        steps.clear()
        directory = work / f"iter_{iteration:07d}"
        directory.mkdir(exist_ok=True)
        strategy = mcore_ckpt.TorchDistSaveStrategy(options=mcore_ckpt.SaveOptions(trace_path=str(work / "traces")))
        state_dict = training.sharded_state_dict()
        queue.schedule_async_request(dist_checkpointing.save(state_dict, directory, strategy, async_sharded_save=True))
        while queue.get_num_unfinalized_calls():
            started_s = time.monotonic()
            training.train(1)
            seconds = time.monotonic() - started_s
            span = {"ph": "X", "cat": "train", "name": "train", "pid": rank, "tid": 0, "args": {}}
            steps.append({**span, "ts": started_s * 1e6, "dur": seconds * 1e6})
            queue.maybe_finalize_async_calls(blocking=False)
    queue.close()
    (work / f"steps{rank}.json").write_text(json.dumps(steps))


def joined(work: Path) -> dict[str, Any]:
    """The traces of both ranks and their steps as one, which begins at 0 and names no directory of this machine."""
    events: list[dict[str, Any]] = []
    for rank in range(2):
        text = (work / "traces" / f"iter_0000002_rank{rank}.trace.json").read_text().replace(f"{work}/", "")
        events += json.loads(text)["traceEvents"] + json.loads((work / f"steps{rank}.json").read_text())
    begin_us = min(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        if event["ph"] == "X":
            event["ts"], event["dur"] = round(event["ts"] - begin_us), round(event["dur"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def make(names: Sequence[str], target: Path) -> None:
    """Write the pictures of these names into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    if "diagrams" in names:
        for name, text in DIAGRAMS.items():
            (target / name).write_text(draw_diagram(text))
    if "trace" not in names:
        return
    from tests.support.gloo_ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="mcore-ckpt-pictures-") as folder:
        work = Path(folder)
        run_ranks(train_and_save, 2, work, deadline_s=240)
        trace = joined(work)
    events = ",\n".join(json.dumps(event) for event in trace["traceEvents"])
    (target / TRACE).write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n')
    (target / "async_save.svg").write_text(draw_trace(trace))


def main() -> None:
    """Make the pictures that the command line names."""
    kinds = ("diagrams", "trace")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(kinds)}; all if none is named")
    parser.add_argument("--to", type=Path, default=PICTURES, metavar="DIR", help="(default: docs/pictures)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(kinds)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(kinds)}")
    make(arguments.names or kinds, arguments.to)


if __name__ == "__main__":
    main()
