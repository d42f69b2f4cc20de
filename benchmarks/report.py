"""Samples -> medians and ratios: JSON, a Markdown table, a plot."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.rounds import Samples

__all__ = ["table", "write"]

_PLOTTED = ("save s", "load cold s")


def table(results: dict[str, Samples]) -> str:
    """A Markdown table: the median of each figure and adapter, and its ratio to the raw device or the floor."""
    lines = ["| work | figure | adapter | median | min - max | x raw or floor |", "|---|---|---|---|---|---|"]
    for work, samples in results.items():
        for figure, by_adapter in samples.items():
            least = by_adapter.get("raw") or by_adapter.get("floor")
            raw = statistics.median(least) if least else None
            for adapter, values in by_adapter.items():
                median = statistics.median(values)
                ratio = f"{median / raw:.2f}" if raw else ""
                spread = f"{min(values):.3f} - {max(values):.3f}"
                lines.append(f"| {work} | {figure} | {adapter} | {median:.3f} | {spread} | {ratio} |")
    return "\n".join(lines) + "\n"


def write(results: dict[str, Samples], out: Path, *, add: bool = False) -> None:
    """Write `bench.json`, `bench.md` and `bench.png` into `out`, and print the table.

    Args:
        results: samples by work.
        out: directory; made if need be.
        add: keep what `bench.json` has already, but for figures that are measured anew.
    """
    out.mkdir(parents=True, exist_ok=True)
    if add and (out / "bench.json").exists():
        earlier: dict[str, Samples] = json.loads((out / "bench.json").read_text())["results"]
        results = earlier | {work: earlier.get(work, {}) | samples for work, samples in results.items()}
    facts: dict[str, Any] = {"python": sys.version.split()[0], "machine": platform.machine(), "results": results}
    (out / "bench.json").write_text(json.dumps(facts, indent=1))
    text = table(results)
    (out / "bench.md").write_text(text)
    sys.stdout.write(text)
    _plot(results, out / "bench.png")


def _plot(results: dict[str, Samples], path: Path) -> None:
    """Bars of time relative to the raw device, for saves and cold loads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [
        (f"{work}\n{figure.removesuffix(' s')}", samples[figure])
        for work, samples in results.items()
        for figure in _PLOTTED
        if "raw" in samples.get(figure, {})
    ]
    if not groups:
        return
    figure, axes = pyplot.subplots(figsize=(1.5 + 2.2 * len(groups), 4))
    colours = {"mcore_ckpt": "tab:green", "megatron": "tab:gray", "dcp": "tab:orange"}
    for position, (_, by_adapter) in enumerate(groups):
        raw = statistics.median(by_adapter["raw"])
        for offset, (adapter, colour) in enumerate(colours.items()):
            if adapter in by_adapter:
                ratio = statistics.median(by_adapter[adapter]) / raw
                bar = axes.bar(position + 0.27 * (offset - 1), ratio, 0.25, color=colour)
                axes.bar_label(bar, fmt="%.1f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(groups)), [label for label, _ in groups], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("time / time of the raw device")
    axes.legend([pyplot.Rectangle((0, 0), 1, 1, color=c) for c in colours.values()], list(colours), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
