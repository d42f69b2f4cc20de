"""What a load costs the ranks of one host that all want the same bytes: each for itself, or one for all.

    python scripts/bench_shared_reads.py                  8 ranks, 1 GB, 5 rounds; docs/megatron.md
    python scripts/bench_shared_reads.py --gb 0.25 --ranks 2 --out build/a-try.json

`benchmarks/shared_reads.py` says what is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine  # noqa: E402  (found by the line above)
from benchmarks.shared_reads import ALONE, WAYS, measure_shared_reads  # noqa: E402

_FILE = ROOT / "docs" / "shared_reads.json"
_PAGE = ROOT / "docs" / "megatron.md"
_BEGIN, _END = "<!-- begin: shared reads -->\n", "<!-- end: shared reads -->\n"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="gloo ranks (default: 8)")
    parser.add_argument("--gb", type=float, default=1.0, help="of tensors that all ranks want (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="after a first one that is not counted (default: 5)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="on the storage that is measured")
    parser.add_argument(
        "--out", type=Path, default=_FILE, help="results (default: docs/shared_reads.json, and its page)"
    )
    arguments = parser.parse_args()
    total_bytes = int(arguments.gb * 1e9) // 4096 * 4096
    for folder in (arguments.folder, arguments.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": describe_machine(arguments.folder), "bytes": total_bytes, "rounds": {}}
    for ranks in arguments.ranks:
        results["rounds"][str(ranks)] = measure_shared_reads(arguments.folder, ranks, total_bytes, arguments.rounds + 1)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    text = _table(results)
    sys.stdout.write(text)
    if arguments.out == _FILE:
        head, rest = _PAGE.read_text().split(_BEGIN)
        _PAGE.write_text(head + _BEGIN + text + _END + rest.split(_END)[1])
    return 0


def _table(results: dict[str, Any]) -> str:
    """Medians; ratios within each round."""
    gb = results["bytes"] / 1e9
    counted = len(next(iter(results["rounds"].values())))
    lines = [
        f"{results['machine']['cpu']}; {gb:g} GB; medians of {counted} rounds.\n",
        "| ranks | load | bytes from the disk / wanted | seconds | seconds / one rank alone | CPU seconds of all |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for ranks, rounds in results["rounds"].items():
        for way in WAYS:
            ratios = [costs[way]["s"] / costs[ALONE]["s"] for costs in rounds]
            read, seconds, cpu = (
                statistics.median(costs[way][figure] for costs in rounds) for figure in ("device bytes", "s", "cpu s")
            )
            lines.append(
                f"| {ranks} | {way} | {read / results['bytes']:.2f} | {seconds:.2f} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} - {max(ratios):.2f}) | {cpu:.2f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
