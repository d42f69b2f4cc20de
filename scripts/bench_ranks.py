"""What whole calls of Megatron-Core's `save` and `load` cost many ranks, with this package installed and without.

    python scripts/bench_ranks.py                        16 ranks x 1,000 tensors of 1 KB; docs/scale.md
    python scripts/bench_ranks.py --ranks 16 64          hours of processor time for stock's calls of 64
    python scripts/bench_ranks.py --ranks 8 --items 100 --out build/a-try.json

`benchmarks/whole_calls.py` says what is run.
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
from benchmarks.whole_calls import Call, measure_calls, per_call  # noqa: E402

_FILE = ROOT / "docs" / "scale_calls.json"
_PAGE = ROOT / "docs" / "scale.md"
_BEGIN, _END = "<!-- begin: whole calls -->\n", "<!-- end: whole calls -->\n"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="how many, even numbers (default: 16)")
    parser.add_argument("--items", type=int, default=1000, help="tensors of which each rank has rows (default: 1000)")
    parser.add_argument(
        "--out", type=Path, default=_FILE, help="results (default: docs/scale_calls.json, and its page)"
    )
    parser.add_argument("--tables", action="store_true", help="only the page's table again")
    arguments = parser.parse_args()
    if not arguments.tables:
        results: dict[str, Any] = {"machine": describe_machine(ROOT), "calls": []}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        for ranks in arguments.ranks:
            results["calls"] += [asdict(call) for call in measure_calls(ranks, arguments.items)]
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            sys.stderr.write(f"{ranks} ranks done\n")
    text = _table(json.loads(arguments.out.read_text()))
    sys.stdout.write(text)
    if arguments.out == _FILE:
        head, rest = _PAGE.read_text().split(_BEGIN)
        _PAGE.write_text(head + _BEGIN + text + _END + rest.split(_END)[1])
    return 0


def _table(results: dict[str, Any]) -> str:
    calls = [Call(**one) for one in results["calls"]]
    lines = [
        f"{results['machine']['cpu']}; processor seconds of all ranks together.\n",
        "| ranks x tensors | call | mcore_ckpt | Megatron-Core | times as much |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ranks, items in dict.fromkeys((call.ranks, call.items) for call in calls):
        found = per_call([call for call in calls if (call.ranks, call.items) == (ranks, items)])
        job = f"{ranks:,} x {items:,}"
        lines += [
            f"| {job} | {name} | {ours.cpu_s:.2f} | {stock.cpu_s:.1f} | {stock.cpu_s / ours.cpu_s:.1f} |"
            for name, (ours, stock) in found.items()
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
