"""Tables in README.md and docs out of docs/*.json, between `<!-- benchmark: NAME -->` and `<!-- end -->`.

A figure whose rounds differ by more than 30 % is not published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.results import FILE, ROOT, Results

__all__ = [
    "CALLS_FILE",
    "SCALE_FILE",
    "STORES_FILE",
    "changed",
    "everything",
    "of_calls",
    "of_scale",
    "of_stores",
    "of_wrapped_calls",
    "one",
    "put_results",
    "write",
]

CALLS_FILE, SCALE_FILE, STORES_FILE = (ROOT / "docs" / f"{name}.json" for name in ("scale_calls", "scale", "stores"))

_BLOCK: Final = re.compile(r"(?<=<!-- benchmark: )([\w ]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


class _Row(NamedTuple):
    """A figure of all contenders."""

    work: str  # as in the results
    figure: str  # of the work
    name: str  # in the table
    with_cpu: bool = False  # in the table of CPU seconds, too
    variant: str = ""  # of a contender, at the end of its label

    @property
    def cpu(self) -> str:
        """The figure of its CPU seconds."""
        return f"{self.figure.removesuffix('s')}cpu s"


_ROWS: Final = (
    _Row("dense", "save s", "large: save", True),
    _Row("dense", "cold s", "large: load, cold", True),
    _Row("dense", "second s", "large: load, second", True),
    _Row("dense", "warm s", "large: load, warm", True),
    _Row("4 to 2", "cold s", "4 ranks to 2, cold", True),
    _Row("4 to 2", "second s", "4 ranks to 2, second"),
    _Row("4 to 1", "cold s", "4 ranks to 1, cold", True),
    _Row("4 to 1", "second s", "4 ranks to 1, second"),
    _Row("a fifth", "cold s", "a fifth, 4 to 1, cold"),
    _Row("a fifth", "second s", "a fifth, 4 to 1, second"),
    _Row("slices", "cold s", "slices, 4 ranks to 8, cold", True),
    _Row("slices", "second s", "slices, 4 ranks to 8, second"),
    _Row("small", "save s", "small: save", True),
    _Row("small", "save s", "small: save, constant structure", True, ", constant structure"),
    _Row("small", "save s", "small: save, new structure", False, ", replanned"),
    _Row("small", "cold s", "small: load, cold", True),
    _Row("small", "second s", "small: load, second"),
    _Row("small", "warm s", "small: load, warm", True),
    _Row("scarce", "cold s", "load, cold, without page cache"),
    _Row("first", "save s", "first save of a process", True),
    _Row("first", "load cold s", "first load of a process, cold", True),
)
_ASYNC: Final = (
    _Row("async dense", "blocking s", "async, large: training waits"),
    _Row("async dense", "durable s", "async, large: durable after"),
    _Row("async dense", "next pass / normal", "async, large: next pass over memory / a normal one"),
    _Row("async dense", "cpu s", "async, large: CPU seconds"),
    _Row("first", "async blocking s", "first async save: training waits"),
    _Row("first", "async first / later", "first async save / a later one"),
    _Row("async small", "blocking s", "async, small: training waits"),
    _Row("async small", "durable s", "async, small: durable after"),
    _Row("async small", "cpu s", "async, small: CPU seconds"),
)
# Gains and losses alike: what a reader of README has to know of the rest.
_IN_README: Final = {
    ("dense", "save s"),
    ("dense", "cold s"),
    ("dense", "second s"),
    ("4 to 1", "cold s"),
    ("slices", "cold s"),
    ("small", "save s"),
    ("small", "cold s"),
    ("async dense", "blocking s"),
    ("async dense", "durable s"),
    ("first", "async blocking s"),
}
_BASELINES: Final = ("megatron", "megatron constant", "nvrx", "nvrx constant", "torch_checkpointing", "dcp")
_PHASES: Final = ("walk", "plan", "stage", "new stage", "dispatch", "call", "writer", "commit")
_NOT_ISOLATED: Final = "†"
_ONCE: Final = "‡"
_WITHHELD: Final = "¤"
_MOST_SPREAD: Final = 0.3
_FOOTNOTES: Final = {
    _NOT_ISOLATED: (
        "Not comparable: CPU tensors are not copied there, so the checkpoint holds what was written to them after "
        "the call."
    ),
    _ONCE: "Measured once.",
    _WITHHELD: f"Not published: the rounds differ by over {100 * _MOST_SPREAD:.0f} %.",
}


class _Read:
    """Results, as the tables ask for them."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.parts: dict[str, dict[str, Any]] = results["parts"]
        self.contenders: dict[str, dict[str, str]] = results["contenders"]
        self.main = next(iter(self.labels("mcore_ckpt")), "")

    def labels(self, *adapters: str) -> list[str]:
        """Labels of these adapters, in the order of the adapters."""
        return [label for adapter in adapters for label, one in self.contenders.items() if one["adapter"] == adapter]

    def values(self, work: str, figure: str, label: str) -> list[float]:
        """Samples; none where it was not measured."""
        found: list[float] = self.results["samples"].get(work, {}).get(figure, {}).get(label, [])
        return found

    def isolated(self, work: str, label: str) -> bool:
        """Whether asynchronous saves held the state at the call; true of what is none."""
        return all(self.values(work if work != "first" else "async dense", "isolated", label))

    def ratio(self, work: str, figure: str, label: str, to: str) -> str:
        """Median, least and most of the rounds' ratios."""
        pairs = zip(self.values(work, figure, label), self.values(work, figure, to), strict=False)
        ratios = [value / other for value, other in pairs if other]
        if not ratios or ("async" in work + figure and not self.isolated(work, to)):
            return ""
        return _spread(ratios, "{:.2f}".format)

    def variant(self, row: _Row, label: str) -> str:
        """The label that has the row's variant. This package itself keeps the plan of a constant structure."""
        if not row.variant or (row.variant == ", constant structure" and label in self.labels("mcore_ckpt")):
            return label
        return label + row.variant

    def cell(self, work: str, figure: str, label: str) -> str:
        """A median, with marks."""
        values = self.values(work, figure, label)
        if not values:
            return ""
        asynchronous = "async" in work + figure and not self.isolated(work, label)
        most = max(map(len, self.results["samples"][work][figure].values()))
        marks = (_NOT_ISOLATED if asynchronous else "") + (_ONCE if len(values) == 1 < most else "")
        return (_number(median(values)) if _is_steady(values) else _WITHHELD) + marks

    def rows(self, rows: Sequence[_Row], labels: Sequence[str], *, cpu: bool = False) -> str:
        """A table of cells."""
        cells = [
            (
                row.name,
                *(self.cell(row.work, row.cpu if cpu else row.figure, self.variant(row, label)) for label in labels),
            )
            for row in rows
        ]
        return _markdown(("CPU seconds" if cpu else "seconds", *labels), cells)


def _number(value: float) -> str:
    digits = 0 if value >= 20 else 1 if value >= 5 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f}"


def _is_steady(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _MOST_SPREAD * median(values)


def _spread(values: Sequence[float], number: Callable[[float], str] = _number) -> str:
    """Median, least and most."""
    if not _is_steady(values):
        return _WITHHELD
    return f"{number(median(values))} ({number(min(values))}-{number(max(values))})"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, without rows and columns that say nothing, and the footnotes of its marks."""
    nothing = {_WITHHELD, ""}
    rows = [row for row in rows if not nothing.issuperset(row[1:])]
    used = [column for column in range(len(head)) if column == 0 or not nothing.issuperset(row[column] for row in rows)]
    lines = [[head[column] for column in used], ["---", *("---:" for _ in used[1:])]]
    lines += [[row[column] for column in used] for row in rows]
    text = "".join(f"|{'|'.join(line)}|\n" for line in lines)
    return text + "".join(_footnote(mark) for mark in _FOOTNOTES if mark in text)


def _footnote(mark: str) -> str:
    return f"\n{mark} {_FOOTNOTES[mark]}\n"


def _title(read: _Read) -> str:
    """Of a table: on what, how often, and what not."""
    machine, part = read.results["machine"], read.parts["dense"]
    torches = dict.fromkeys(read.contenders[label]["torch"] for label in read.labels("mcore_ckpt"))
    return (
        f"CPU tensors, 2 ranks unless the row says otherwise; {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['file system']}, torch {' and '.join(torches)}; commit {read.results['commit']}. "
        "Cold: page cache dropped; second: right after the cold one; warm: files in the page cache. "
        f"Seconds, medians of {part['rounds']} rounds ({part['baseline_rounds']} with baselines). "
        f"**Nothing has been measured on a GPU.**\n\n"
    )


def _headline(read: _Read) -> str:
    """One figure against Megatron-Core, with its conditions: the first of README."""
    megatron = read.labels("megatron")[0]
    own, theirs = (read.cell("dense", "save s", label) for label in (read.main, megatron))
    machine, part = read.results["machine"], read.parts["dense"]
    return (
        f"A synchronous save of {part['gb']:g} GB in large tensors takes **{own} s**, with {megatron} {theirs} s: 2 "
        f"ranks on {machine['cores']} CPU cores, {machine['file system']}. Nothing has been measured on a GPU.\n"
    )


def _summary(read: _Read) -> str:
    """The table at the top of README, the best of each row in bold."""
    baselines, nvrx = read.labels("megatron", "torch_checkpointing", "dcp"), read.labels("nvrx")
    newest = read.labels("megatron")[-1:]
    cells = []
    for row in (row for row in (*_ROWS, *_ASYNC) if (row.work, row.figure) in _IN_README and not row.variant):
        by_nvrx = nvrx and read.values(row.work, row.figure, nvrx[0])
        labels = [read.main, *(nvrx[0] if by_nvrx and [one] == newest else one for one in baselines)]
        labels = [read.variant(row, label) for label in labels]
        texts = {label: read.cell(row.work, row.figure, label) for label in labels}
        medians = {
            label: median(read.values(row.work, row.figure, label))
            for label, text in texts.items()
            if text and _NOT_ISOLATED not in text and _WITHHELD not in text
        }
        best = "" if _WITHHELD in texts.values() else min(medians, key=lambda label: medians[label], default="")
        cells.append((row.name, *(f"**{text}**" if label == best else text for label, text in texts.items())))
    heads = [f"{one} (async: nvrx)" if nvrx and [one] == newest else one for one in baselines]
    machine, part = read.results["machine"], read.parts["dense"]
    title = (
        f"Seconds on CPUs, less is better, the best of a row in bold, if none is withheld; 2 ranks, {machine['cores']} "
        f"cores, {machine['file system']}; {part['gb']:g} GB in tensors of 16 MiB, or 20,000 small tensors. Cold: page "
        "cache dropped before; second: right after the cold load; 4 ranks to 1: one rank loads what four have saved. "
        "**Nothing has been measured on a GPU.**\n\n"
    )
    return title + _markdown(("", read.main, *heads), cells)


def _asynchronous(read: _Read) -> str:
    labels = [read.main, f"{read.main}, warm_up()", *read.labels("replanned"), *read.labels("mcore_ckpt")[1:]]
    labels += read.labels(*_BASELINES)
    works = ("async dense", "async small")
    rows = [
        (
            label,
            *(read.cell(row.work, row.figure, label) for row in _ASYNC),
            "" if not any(read.values(work, "isolated", label) for work in works) else
            "yes" if all(read.isolated(work, label) for work in works) else "no",
        )
        for label in labels
    ]  # fmt: skip
    return _markdown(("", *(row.name for row in _ASYNC), "isolated"), rows)


def _against(read: _Read) -> str:
    label = next(iter(read.labels("against")), "")
    rows = [
        (row.name, *(read.ratio(row.work, figure, read.main, label) for figure in (row.figure, row.cpu)))
        for row in (*_ROWS, *_ASYNC)
        if not row.variant and "/" not in row.figure
    ]
    return _markdown((f"mcore_ckpt / {label}", "seconds", "CPU seconds"), rows)


def _bounds(read: _Read) -> str:
    labels = ("raw device", "lower bound", read.main)
    rows = [
        (
            row.name,
            *(read.cell(row.work, figure, label) for figure in (row.figure, row.cpu) for label in labels),
            read.ratio(row.work, row.figure, read.main, "lower bound"),
        )
        for row in _ROWS
        if read.values(row.work, row.figure, "lower bound") and not row.variant
    ]
    heads = (f"{label}, {unit}" for unit in ("s", "CPU s") for label in labels)
    return _markdown(("", *heads, "mcore_ckpt / lower bound"), rows)


def _phases(read: _Read) -> str:
    columns = [
        (work, label)
        for work in ("phases dense", "phases small")
        for label in ("lower bound", "mcore_ckpt", "mcore_ckpt replanned")
    ]
    rows = [(phase, *(read.cell(work, f"{phase} s", label) for work, label in columns)) for phase in _PHASES]
    return _markdown(("seconds", *(f"{label}, {work.removeprefix('phases ')}" for work, label in columns)), rows)


def _certificate(read: _Read) -> str:
    """What a certificate takes on top of a load: ratios of seconds."""
    labels = read.labels("certified", "certified whole")
    if not labels:
        return "Not measured yet.\n"
    rows = [
        (
            f"{state}: load, {figure}",
            read.cell(f"certificate {kind}", f"{figure} s", read.main),
            *(read.ratio(f"certificate {kind}", f"{figure} s", label, read.main) for label in labels),
        )
        for kind, state in (("dense", "large"), ("small", "small"))
        for figure in ("cold", "warm")
    ]
    return _markdown(("", "no certificate, s", *(f"`{label}`, times as long" for label in labels)), rows)


def _machine(read: _Read) -> str:
    figures = dict.fromkeys(figure.rpartition(", ")[0] for figure in read.results["samples"].get("machine", {}))
    rows = [
        (figure, *(_spread(read.values("machine", f"{figure}, {unit} per GB", "")) for unit in ("s", "cpu s")))
        for figure in figures
    ]
    return _markdown(("per GB", "seconds", "CPU seconds"), rows)


def _tools(read: _Read) -> str:
    about = read.parts.get("tools", {})
    compared = about.get("compared_with", {})
    rows = []
    if not about:
        return "Not measured yet.\n"
    for label, values in read.results["samples"].get("tools", {}).get("s", {}).items():
        other = compared.get(label, "")
        ratio = read.ratio("tools", "s", label, other) if other else ""
        others = (read.cell("tools", figure, label) for figure in ("cpu s", "MB"))
        rows.append((label, _spread(values), ratio, other, *others))
    title = f"A checkpoint and a model of {about['gb']} GB each, {about['rounds']} rounds.\n\n" if about else ""
    return title + _markdown(("command", "seconds", "ratio", "to", "CPU seconds", "MB"), rows)


def _about(read: _Read) -> str:
    rows = [
        (
            name + ", other work ran" * part.get("busy", False),
            part["date"].partition("+")[0],
            *(str(part[fact]) for fact in ("took s", "gb", "rounds")),
            part["load average"].replace(" to ", "-"),
        )
        for name, part in read.parts.items()
    ]
    lines = [f"machine: {', '.join(f'{name} {value}' for name, value in read.results['machine'].items())}"]
    lines += [f"not run: {name} ({why})" for name, why in read.results["not run"].items()]
    for name, part in read.parts.items():
        labels = dict.fromkeys(failed.partition(" (")[0] for failed in part["failed"])
        lines += [f"{name}, failed: {'; '.join(labels)}"] if labels else []
    for label in read.labels("mcore_ckpt"):
        versions = (f"{name} {version}" for name, version in read.contenders[label].items() if version)
        lines.append(f"{label}: {', '.join(list(versions)[1:])}")
    table = _markdown(("part", "date", "took s", "GB", "rounds", "load average"), rows)
    return table + "\n" + "".join(f"- {line}\n" for line in lines)


_COLUMNS: Final = ("raw", "mcore_ckpt", "megatron", "torch_checkpointing", "dcp")
_TABLES: Final[dict[str, Callable[[_Read], str]]] = {
    "headline": _headline,
    "summary": _summary,
    "saves and loads": lambda read: _title(read) + read.rows(_ROWS, read.labels(*_COLUMNS)),
    "cpu": lambda read: read.rows([row for row in _ROWS if row.with_cpu], read.labels(*_COLUMNS), cpu=True),
    "async": _asynchronous,
    "against": _against,
    "bounds": _bounds,
    "phases": _phases,
    "certificate": _certificate,
    "machine": _machine,
    "tools": _tools,
    "about": _about,
}


def of_calls(results: Results) -> str:
    """Whole calls without the fully parallel wrappers."""
    rows = []
    for ranks, items, call, cpu_s in _calls(results, wrapped=False):
        ours, stock = cpu_s["mcore_ckpt"], cpu_s.get("Megatron-Core")
        against = (f"{stock:.1f}", f"{stock / ours:.1f}") if stock else ("-", "-")
        rows.append((f"{ranks[0]:,} x {items:,}", call, f"{ours:.2f}", *against))
    return _titled(results, ("ranks x tensors", "call", "mcore_ckpt", "Megatron-Core", "times as much"), rows)


def of_wrapped_calls(results: Results) -> str:
    """Saves behind the fully parallel wrappers."""
    rows = []
    for (ranks, replicas), items, call, cpu_s in _calls(results, wrapped=True):
        layout = f"DP {replicas}" + (f" x TP {ranks // replicas}" if ranks > replicas else "")
        shown = {side: f"{s:.2f}" if s < 10 else f"{s:.1f}" for side, s in cpu_s.items()}
        rows.append((f"{layout} x {items:,}", call, shown["mcore_ckpt"], shown.get("Megatron-Core", "-")))
    return _titled(results, ("ranks x shards", "call", "mcore_ckpt", "Megatron-Core"), rows)


def _calls(results: Results, *, wrapped: bool) -> Iterator[tuple[tuple[int, int], int, str, dict[str, float]]]:
    """Ranks and replicas, tensors, call, and processor seconds by side."""
    found: dict[tuple[tuple[int, int], str], tuple[int, dict[str, float]]] = {}
    for one in results["calls"]:
        if bool(one["replicas"]) == wrapped:
            key = (one["ranks"], one["replicas"]), one["call"]
            found.setdefault(key, (one["items"], {}))[1][one["side"]] = one["cpu_s"]
    yield from ((ranks, items, call, cpu_s) for (ranks, call), (items, cpu_s) in found.items())


def _titled(results: Results, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    busy = ", while other work ran" * results.get("busy", False)
    about = f"{results['machine']['cpu']}, commit {results['commit']}{busy}"
    return f"{about}; processor seconds of all ranks together.\n\n" + _markdown(head, rows)


def of_scale(results: Results) -> str:
    """What planning costs by number of ranks."""
    head = (
        "ranks; lay out, plan; compare; plans MB; check; its memory MB; index (writer); its memory MB; `.metadata` MB; "
        "load: read `.metadata`; plan the reads"
    )
    rows = [
        (
            f"{one['ranks']:,}",
            *(_s(one["lay_out_s"]), _s(one["compare_s"]), f"{one['plan_bytes'] / 1e6:.1f}"),
            *(_s(one["check_s"]), f"{one['coordinator_bytes'] / 1e6:.0f}"),
            *(_s(one["index_s"]), f"{one['index_bytes'] / 1e6:.0f}", f"{one['metadata_bytes'] / 1e6:.1f}"),
            *(_s(one["read_s"]), _s(one["requests_s"])),
        )
        for one in results["ours"]
    ]
    busy = ", while other work ran" * results.get("busy", False)
    about = f"{results['what']}; {results['machine']['cpu']}, commit {results['commit']}"
    return f"{about}, one core for each process{busy}.\n\n" + _markdown(head.split("; "), rows)


def of_stores(results: Results) -> str:
    """Saves and loads in a store, next to its client alone; asynchronous calls, next to those of a directory."""
    head = ("an answer comes after", "save", "client alone", "ratio", "load", "client alone", "ratio")
    rows = []
    for latency_ms, by_call in results["samples"].items():
        cells = [f"{latency_ms} ms"]
        for call in ("save", "load"):
            ours, client = by_call[call]["mcore_ckpt"], by_call[call]["client alone"]
            ratios = [one / other for one, other in zip(ours, client, strict=True)]
            cells += [f"{median(ours):.2f}", f"{median(client):.2f}"]
            cells.append(f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        of_calls = by_call["start"]
        cells += [f"{median(of_calls[side]):.3f}" for side in ("mcore_ckpt", "mcore_ckpt, a directory")]
        rows.append(cells)
    busy = ", while other work ran" * results.get("busy", False)
    title = (
        f"{results['mb']:g} MB of two ranks at {results['mb_per_s']:g} MB/s, commit {results['commit']}; seconds, "
        f"medians of {len(ours)} rounds{busy}."
    )
    return f"{title}\n\n" + _markdown([*head, "async call", "the same, a directory"], rows)


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


_OF_OTHER_FILES: Final[dict[str, tuple[Path, Callable[[Results], str]]]] = {
    "whole calls": (CALLS_FILE, of_calls),
    "wrapped calls": (CALLS_FILE, of_wrapped_calls),
    "scale": (SCALE_FILE, of_scale),
    "stores": (STORES_FILE, of_stores),
}


def one(results: Results, name: str) -> str:
    """A table of docs/benchmark.json."""
    read = _Read(results)
    return _TABLES[name](read) if read.main or name == "tools" else "Not measured yet.\n"


def _pages(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each page with tables: as it is, and as the results have it."""

    def table(found: re.Match[str]) -> str:
        file, made = _OF_OTHER_FILES.get(found[1], (FILE, lambda results: one(results, found[1])))
        text = made(json.loads((root / file.relative_to(ROOT)).read_text()))
        for mark in _FOOTNOTES:
            if mark in text and mark in explained:
                text = text.replace(_footnote(mark), "")
            elif mark in text:
                explained.add(mark)
        return f"{found[1]}{found[2]}{text}"

    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = page.read_text()
        explained: set[str] = set()  # marks, each once a page
        yield page, text, _BLOCK.sub(table, text)


def write(root: Path) -> None:
    """Write the tables of all pages again."""
    for page, text, new in _pages(root):
        if new != text:
            page.write_text(new)


def put_results(file: Path, results: Results) -> None:
    """Write results, and the tables of the pages if the file is theirs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    if file.parent == FILE.parent:
        write(ROOT)


def changed(root: Path) -> list[str]:
    """Pages whose tables are not those of the results."""
    return [page.name for page, text, new in _pages(root) if new != text]


def everything(results: Results) -> str:
    """All figures, for a terminal."""
    lines = [
        f"{work:14}{figure:42}{label:44}{_spread(values):>24}, {len(values)}"
        for work, by_figure in results["samples"].items()
        for figure, by_label in by_figure.items()
        for label, values in by_label.items()
    ]
    return "\n".join(lines) + "\n"
