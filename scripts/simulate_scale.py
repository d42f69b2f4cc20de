"""What planning costs a job of many ranks, ours and stock's: their own code on the plans of all ranks, in one process.

    python scripts/simulate_scale.py --real 2 8 32 64                 1,000 tensors of 1 KB a rank; docs/scale.md
    python scripts/simulate_scale.py --gpt 70b --tp 8 --pp 8 --dp 2 16 64 --out build/70b.json
    python scripts/simulate_scale.py --ranks 8 64 --stock-up-to 0 --real 2 8 --out build/a-try.json

Nothing is written into a checkpoint; `benchmarks/scale.py` says what is run and what is worked out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine  # noqa: E402  (found by the line above)
from benchmarks.scale import Gpt, Job, Layout, Network, Ours, Stock, measure_ours, measure_stock  # noqa: E402
from benchmarks.scale_ranks import expected, measure_message_s, measure_ranks  # noqa: E402

_GPTS = {
    "7b": Gpt(32, 4096, 16384, 50304),
    "70b": Gpt(80, 8192, 32768, 128256),
    "moe": Gpt(48, 4096, 1536, 151936, experts=128),
}
_FURTHER = 16_384  # ranks
_FILE = ROOT / "docs" / "scale.json"
_PAGE = ROOT / "docs" / "scale.md"
_BEGIN, _END = "<!-- begin: tables -->\n", "<!-- end: tables -->\n"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1000, help="tensors of which each rank has rows (default: 1000)")
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[16, 64, 256, 1024, 4096], help="how many, with --items"
    )
    parser.add_argument("--gpt", choices=_GPTS, help="a model instead, under these sizes of parallelism:")
    parser.add_argument("--tp", type=int, default=8, help="(default: 8)")
    parser.add_argument("--pp", type=int, default=8, help="(default: 8)")
    parser.add_argument("--ep", type=int, default=1, help="(default: 1)")
    parser.add_argument("--dp", type=int, nargs="*", default=[2, 16, 64], help="(default: 2 16 64)")
    parser.add_argument("--stock-up-to", type=int, default=64, metavar="RANKS", help="then extrapolated (default: 64)")
    parser.add_argument("--real", type=int, nargs="*", default=[], metavar="RANKS", help="gloo ranks to start, too")
    parser.add_argument("--latency-us", type=float, default=30.0, help="of a message between hosts (default: 30)")
    parser.add_argument("--gbit", type=float, default=10.0, help="of one host's card, a second (default: 10)")
    parser.add_argument("--out", type=Path, default=_FILE, help="results (default: docs/scale.json, and its page)")
    parser.add_argument("--plot", type=Path, help="a picture of blocking times (needs matplotlib)")
    parser.add_argument("--tables", action="store_true", help="only the page's tables again, and the picture")
    arguments = parser.parse_args()
    if not arguments.tables:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(_measured(arguments), indent=1) + "\n")
    results = json.loads(arguments.out.read_text())
    text = _tables(results)
    sys.stdout.write(text)
    if arguments.out == _FILE:
        head, rest = _PAGE.read_text().split(_BEGIN)
        _PAGE.write_text(head + _BEGIN + text + _END + rest.split(_END)[1])
    if arguments.plot:
        _plot(results, arguments.plot)
    return 0


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    if arguments.gpt:
        gpt = _GPTS[arguments.gpt]
        return [Job(Layout(arguments.tp, arguments.pp, arguments.ep, dp), gpt) for dp in arguments.dp]
    return [Job(Layout(1, 1, 1, ranks), items=arguments.items) for ranks in arguments.ranks]


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    message_s = measure_message_s()
    network = Network(arguments.latency_us * 1e-6, arguments.gbit * 1e9 / 8, message_s)
    jobs = _jobs(arguments)
    ours, stock = [], []
    for job in jobs:
        ours.append(measure_ours(job))
        if job.layout.ranks <= arguments.stock_up_to:
            stock.append(measure_stock(job))
        sys.stderr.write(f"{job.layout.ranks} ranks done\n")
    real = []
    for ranks in arguments.real:
        found = measure_ranks(arguments.items, ranks)
        modelled = measure_ours(Job(Layout(1, 1, 1, ranks), items=arguments.items))
        first_s, later_s = expected(modelled, network)
        real.append({**asdict(found), "modelled_first_s": first_s, "modelled_later_s": later_s})
        sys.stderr.write(f"{ranks} real ranks done\n")
    return {
        "machine": describe_machine(ROOT),
        "what": arguments.gpt or f"{arguments.items:,} tensors of 1 KB a rank",
        "network": asdict(network),
        "ours": [asdict(one) for one in ours],
        "stock": [asdict(one) for one in stock],
        "real": real,
    }


def _stock_for(results: dict[str, Any]) -> list[tuple[Stock, bool]]:
    """For each number of ranks of ours: stock's, and whether it was measured; none where too little was."""
    measured = [Stock(**one) for one in results["stock"]]
    found = []
    for one in results["ours"]:
        same = next((stock for stock in measured if stock.ranks == one["ranks"]), None)
        if same is not None:
            found.append((same, True))
        elif len(measured) > 1:
            found.append((measured[-1].grown_to(one["ranks"], measured[-2]), False))
    return found


def _tables(results: dict[str, Any]) -> str:
    net = Network(**results["network"])
    ours = [Ours(**one) for one in results["ours"]]
    by_ranks = {stock.ranks: (stock, measured) for stock, measured in _stock_for(results)}
    parts = [
        (
            f"{results['what']}; {results['machine']['cpu']}, one core for each process; messages of a kilobyte "
            f"{net.message_s * 1e6:.0f} µs of processor here; network {net.latency_s * 1e6:.0f} µs, "
            f"{net.bytes_per_s * 8 / 1e9:g} Gbit/s.\n"
        ),
        _table(
            [
                "ranks",
                "lay out, plan",
                "compare",
                "plans MB",
                "check",
                "its memory MB",
                "index (writer)",
                "its memory MB",
                "`.metadata` MB",
            ],
            [
                [
                    f"{one.ranks:,}",
                    _s(one.lay_out_s),
                    _s(one.compare_s),
                    f"{one.plan_bytes / 1e6:.1f}",
                    _s(one.check_s),
                    f"{one.coordinator_bytes / 1e6:.0f}",
                    _s(one.index_s),
                    f"{one.index_bytes / 1e6:.0f}",
                    f"{one.metadata_bytes / 1e6:.1f}",
                ]
                for one in ours
            ],
        ),
    ]
    rows = []
    for one in ours:
        stock, measured = by_ranks.get(one.ranks, (None, False))
        mark = "" if measured else " *"
        rows.append(
            [
                f"{one.ranks:,}",
                _s(one.first_s(net)),
                "" if stock is None else _s(stock.first_s(net)) + mark,
                _s(one.later_s(net)),
                "" if stock is None else _s(stock.later_s(net)) + mark,
                _s(one.commit_s(net)),
                _s(one.read_s),
                _s(one.requests_s),
            ]
        )
    if ours and ours[-1].ranks < _FURTHER:
        # What a rank compares does not depend on how many there are.
        further = replace(ours[-1], ranks=_FURTHER)
        rows.append([f"{_FURTHER:,} †", "", "", _s(further.later_s(net)), "", "", "", ""])
    head = ["ranks", "first save", "stock", "later save", "stock", "commit", "load: read `.metadata`", "plan the reads"]
    parts.append(_table(head, rows))
    if by_ranks:
        parts.append("`*` extrapolated: each part grows on as between the two largest that were run.\n")
    parts.append("`†` only the exchange grows, by the logarithm of the number of ranks.\n")
    if results["real"]:
        head = ["real gloo ranks", "first save, CPU s of all", "the model", "later save", "the model"]
        real = [
            [
                str(one["ranks"]),
                _s(one["first_s"]),
                f"{_s(one['modelled_first_s'])} ({one['modelled_first_s'] / one['first_s']:.2f})",
                _s(one["later_s"]),
                f"{_s(one['modelled_later_s'])} ({one['modelled_later_s'] / one['later_s']:.2f})",
            ]
            for one in results["real"]
        ]
        parts.append(_table(head, real))
    return "\n".join(parts)


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plot(results: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    net = Network(**results["network"])
    ours = [Ours(**one) for one in results["ours"]]
    stock = [one for one, _ in _stock_for(results)]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, points, style in (
        ("stock, first save", [(one.ranks, one.first_s(net)) for one in stock], "C3-"),
        ("stock, later save", [(one.ranks, one.later_s(net)) for one in stock], "C3--"),
        ("mcore_ckpt, first save", [(one.ranks, one.first_s(net)) for one in ours], "C0-"),
        ("mcore_ckpt, later save", [(one.ranks, one.later_s(net)) for one in ours], "C0--"),
    ):
        if points:
            axes.loglog(*zip(*points, strict=True), style, marker="o", label=label)
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds of planning that training waits for")
    axes.set_title(results["what"])
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
