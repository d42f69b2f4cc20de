"""What fingerprints, comparing replicas and proving a load cost: CPU seconds with and without, in turns.

    python scripts/bench_proof.py                       1 GB, 9 rounds; docs/proof.json, and docs/reliability.md
    python scripts/bench_proof.py --gb 0.1 --rounds 3 --states rows --out build/a-try.json

`benchmarks/proof_costs.py` says what is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine  # noqa: E402  (found by the line above)
from benchmarks.proof_costs import PARTS, STATES, measure_proof_costs  # noqa: E402

_FILE = ROOT / "docs" / "proof.json"
_PAGE = ROOT / "docs" / "reliability.md"
_BEGIN, _END = "<!-- begin: proof -->\n", "<!-- end: proof -->\n"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of the state (default: 1)")
    parser.add_argument("--rounds", type=int, default=9, help="after a first one that is not counted (default: 9)")
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=list(STATES), help="(default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="on the storage that is measured")
    parser.add_argument("--out", type=Path, default=_FILE, help="results (default: docs/proof.json, and its page)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    for folder in (arguments.folder, arguments.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    total_bytes = int(arguments.gb * 1e9)
    results: dict[str, Any] = {"machine": describe_machine(arguments.folder), "bytes": total_bytes, "states": {}}
    for state in arguments.states:
        results["states"] |= measure_proof_costs(arguments.folder, total_bytes, arguments.rounds, [state])
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    sys.stdout.write(text)
    if arguments.out == _FILE:
        head, rest = _PAGE.read_text().split(_BEGIN)
        _PAGE.write_text(head + _BEGIN + text + _END + rest.split(_END)[1])
    return 0


def table(results: dict[str, Any]) -> str:
    """Medians of CPU seconds; of their ratios within each round, with the quartiles."""
    rounds = len(next(iter(results["states"].values())))
    machine, gb = results["machine"], results["bytes"] / 1e9
    lines = [
        f"{machine['cpu']}, {machine['file system']}; {gb:g} GB of float32, one rank; medians of {rounds} rounds.\n",
        "| what | state | option | CPU s without | with | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for part, (without, *ways) in PARTS.items():
        for state, measured in results["states"].items():
            costs = [costs[part] for costs in measured if costs[part]]
            for way in ways if costs else ():
                ratios = sorted(one[way] / one[without] for one in costs)
                low, high = (ratios[len(ratios) * n // 4] for n in (1, 3))
                before, after = (statistics.median(one[which] for one in costs) for which in (without, way))
                lines.append(
                    f"| {part} | {state} | `{way}` | {before:.3f} | {after:.3f} | {statistics.median(ratios):.2f} "
                    f"({low:.2f} - {high:.2f}) |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
