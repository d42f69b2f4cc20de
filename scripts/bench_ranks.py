"""What whole calls of Megatron-Core's `save` and `load` cost many ranks, with this package installed and without.

    python scripts/bench_ranks.py                        16 ranks x 1,000 tensors of 1 KB; docs/scale.md
    python scripts/bench_ranks.py --only wrapped         only the calls behind the fully parallel wrappers
    python scripts/bench_ranks.py --only plain --ranks 32 --load-items 500 --out build/32.json     four minutes
    python scripts/bench_ranks.py --only plain --ranks 64 --ours-only --out build/a-try.json

`benchmarks/whole_calls.py` and `benchmarks/parallel_calls.py` say what is run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine  # noqa: E402  (found by the line above)
from benchmarks.parallel_calls import (  # noqa: E402
    PARALLEL_CALLS,
    PARALLEL_SIDES,
    ParallelCall,
    measure_parallel_calls,
)
from benchmarks.whole_calls import OURS, STOCK, Call, measure_calls, per_call  # noqa: E402

_FILE = ROOT / "docs" / "scale_calls.json"
_PAGE = ROOT / "docs" / "scale.md"
_PLAIN, _WRAPPED = "whole calls", "wrapped calls"  # tables of the page


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="how many, even numbers (default: 16)")
    parser.add_argument("--items", type=int, default=1000, help="tensors of which each rank has rows (default: 1000)")
    parser.add_argument(
        "--load-items",
        type=int,
        help="the same in loads: each of Megatron-Core's ranks holds all ranks' tensors (default: as --items)",
    )
    parser.add_argument(
        "--out", type=Path, default=_FILE, help="results (default: docs/scale_calls.json, and its page)"
    )
    parser.add_argument(
        "--only", choices=("plain", "wrapped"), help="without the fully parallel wrappers, or behind them"
    )
    parser.add_argument("--ours-only", action="store_true", help="without the wrappers, nothing of Megatron-Core's own")
    parser.add_argument("--tables", action="store_true", help="only the page's table again")
    arguments = parser.parse_args()
    if not arguments.tables:
        _measure(arguments)
    results = json.loads(arguments.out.read_text())
    for name, text in ((_PLAIN, _table(results)), (_WRAPPED, _wrapped_table(results))):
        sys.stdout.write(text)
        if arguments.out == _FILE and text:
            begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
            head, rest = _PAGE.read_text().split(begin)
            _PAGE.write_text(head + begin + text + end + rest.split(end)[1])
    return 0


def _measure(arguments: argparse.Namespace) -> None:
    known = json.loads(arguments.out.read_text()) if arguments.only and arguments.out.exists() else {}
    results: dict[str, Any] = {"calls": [], "wrapped": [], **known, "machine": describe_machine(ROOT)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for part in ("plain", "wrapped") if arguments.only is None else (arguments.only,):
        name = "calls" if part == "plain" else "wrapped"
        results[name] = []
        for ranks in arguments.ranks:
            if part == "plain":
                for side in (OURS,) if arguments.ours_only else (OURS, STOCK):
                    calls = measure_calls(side, ranks, arguments.items, arguments.load_items or arguments.items)
                    results[name] += [asdict(call) for call in calls]
            else:
                for parts in (1, 4) if ranks % 4 == 0 else (1,):
                    wrapped = measure_parallel_calls(ranks // parts, parts, arguments.items)
                    results[name] += [asdict(call) for call in wrapped]
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            sys.stderr.write(f"{ranks} ranks done: {part}\n")


def _wrapped_table(results: dict[str, Any]) -> str:
    calls = [ParallelCall(**one) for one in results.get("wrapped", ())]
    if not calls:
        return ""
    lines = [
        f"{results['machine']['cpu']}; processor seconds of all ranks together.\n",
        f"| ranks x shards | call | {' | '.join(PARALLEL_SIDES)} |",
        "| --- | --- | --- | --- |",
    ]
    for layout in dict.fromkeys((call.data_parallel, call.tensor_parallel, call.items) for call in calls):
        of_layout = [call for call in calls if (call.data_parallel, call.tensor_parallel, call.items) == layout]
        job = f"DP {layout[0]}" + (f" x TP {layout[1]}" if layout[1] > 1 else "") + f" x {layout[2]:,}"
        for name in PARALLEL_CALLS:
            spent = {call.side: call.cpu_s for call in of_layout if call.call == name}
            if not spent:
                continue
            cells = [f"{spent[side]:.2f}" if spent[side] < 10 else f"{spent[side]:.1f}" for side in PARALLEL_SIDES]
            lines.append(f"| {job} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _table(results: dict[str, Any]) -> str:
    calls = [Call(**one) for one in results["calls"]]
    if not calls:
        return ""
    lines = [
        f"{results['machine']['cpu']}; processor seconds of all ranks together.\n",
        "| ranks x tensors | call | mcore_ckpt | Megatron-Core | times as much |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ranks in dict.fromkeys(call.ranks for call in calls):
        for name, (ours, stock) in per_call([call for call in calls if call.ranks == ranks]).items():
            job = f"{ranks:,} x {ours.items:,}"
            against = f"{stock.cpu_s:.1f} | {stock.cpu_s / ours.cpu_s:.1f}" if stock else "- | -"
            lines.append(f"| {job} | {name} | {ours.cpu_s:.2f} | {against} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
