"""What planning costs a job of many ranks, ours and stock's: their own code on the plans of all ranks, in one process.

    python scripts/simulate_scale.py --real 2 8 32 64                 1,000 tensors of 1 KB a rank; docs/scale.md
    python scripts/simulate_scale.py --ranks 8 64 --stock-up-to 0 --real 2 8 --out build/a-try.json

Nothing is written into a checkpoint; `benchmarks/scale.py` says what is run and what is worked out.
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

from benchmarks import tables  # noqa: E402  (found by the line above)
from benchmarks.machine import describe_machine  # noqa: E402
from benchmarks.results import add_busy, wait_until_quiet  # noqa: E402
from benchmarks.scale import Job, Network, measure_ours, measure_stock  # noqa: E402
from benchmarks.scale_ranks import expected, measure_message_s, measure_ranks  # noqa: E402


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1000, help="tensors of which each rank has rows (default: 1000)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 256, 1024, 4096], help="how many")
    parser.add_argument("--stock-up-to", type=int, default=64, metavar="RANKS", help="then extrapolated (default: 64)")
    parser.add_argument("--real", type=int, nargs="*", default=[], metavar="RANKS", help="gloo ranks to start, too")
    parser.add_argument("--latency-us", type=float, default=30.0, help="of a message between hosts (default: 30)")
    parser.add_argument("--gbit", type=float, default=10.0, help="of one host's card, a second (default: 10)")
    parser.add_argument("--out", type=Path, default=tables.SCALE_FILE, help="results (default: docs/scale.json)")
    parser.add_argument("--tables", action="store_true", help="only the table again")
    add_busy(parser)
    arguments = parser.parse_args()
    if not arguments.tables:
        tables.put_results(arguments.out, _measured(arguments))
    sys.stdout.write(tables.of_scale(json.loads(arguments.out.read_text())))
    return 0


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    wait_until_quiet("scale", busy=arguments.busy)
    message_s = measure_message_s()
    network = Network(arguments.latency_us * 1e-6, arguments.gbit * 1e9 / 8, message_s)
    ours, stock = [], []
    for job in (Job(ranks, arguments.items) for ranks in arguments.ranks):
        ours.append(measure_ours(job))
        if job.ranks <= arguments.stock_up_to:
            stock.append(measure_stock(job))
        sys.stderr.write(f"{job.ranks} ranks done\n")
    real = []
    for ranks in arguments.real:
        found = measure_ranks(arguments.items, ranks)
        modelled = measure_ours(Job(ranks, arguments.items))
        first_s, later_s = expected(modelled, network)
        real.append({**asdict(found), "modelled_first_s": first_s, "modelled_later_s": later_s})
        sys.stderr.write(f"{ranks} real ranks done\n")
    return {
        "machine": describe_machine(ROOT),
        "busy": arguments.busy,
        "what": f"{arguments.items:,} tensors of 1 KB a rank",
        "network": asdict(network),
        "ours": [asdict(one) for one in ours],
        "stock": [asdict(one) for one in stock],
        "real": real,
    }


if __name__ == "__main__":
    sys.exit(main())
