"""What a load costs the ranks of one host that all request the same bytes, cold and from the page cache.

    python -m benchmarks.shared_reads --ranks 2 4 8            1 GB, 5 rounds; prints the table of docs/megatron.md

Destinations have been touched before, and what has been loaded is compared. Rounds go through all ways in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.machine import drop_page_cache
from benchmarks.measure import Cost, timed
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.load.reader import FileSystemReader
from tests.support.standing_ranks import StandingRanks, standing_ranks

_ALONE, _ALL, _CACHED = _WAYS = ("one rank alone", "all", "all, from the page cache")
_TENSORS: Final = 16
_WITHIN_S: Final = 120.0


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="gloo ranks (default: 8)")
    parser.add_argument("--gb", type=float, default=1.0, help="of tensors that all ranks request (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="after a first one that is not counted (default: 5)")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="on the storage that is measured")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    elems = int(arguments.gb * 1e9) // _TENSORS // 4096 * 1024
    sys.stdout.write("| ranks | load | bytes from the disk / requested | least s | median s | CPU s of all |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    for ranks in arguments.ranks:
        for way, costs in _measure(arguments.folder, ranks, elems, arguments.rounds).items():
            read, cpu = (statistics.median(cost[figure] for cost in costs) for figure in ("device bytes", "cpu s"))
            seconds = [cost["s"] for cost in costs]
            sys.stdout.write(
                f"| {ranks} | {way} | {read / (4 * elems * _TENSORS):.2f} | {min(seconds):.2f} | "
                f"{statistics.median(seconds):.2f} | {cpu:.2f} |\n"
            )
    return 0


def _measure(folder: Path, ranks: int, elems: int, rounds: int) -> dict[str, list[Cost]]:
    """Of each way what its rounds have cost: seconds of the slowest rank; CPU seconds and device bytes of all."""
    found: dict[str, list[Cost]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="shared-reads-", dir=folder) as scratch, standing_ranks(ranks) as group:
        path = Path(scratch) / "checkpoint"
        _called(group, _save, path, elems)
        for number in range(rounds + 1):
            for way, costs in found.items():
                drop_page_cache(path)
                for file in path.iterdir() if way == _CACHED else ():
                    file.read_bytes()
                cost = _called(group, _load, path, elems, way, ranks)
                if number:
                    costs.append(cost)
    return found


def _called(group: StandingRanks, function: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 returns; all ranks call it."""
    outcomes = group.call(function, *args, within_s=_WITHIN_S)
    for outcome in outcomes:
        if not outcome.ok:
            raise RuntimeError(f"rank {outcome.rank}: {outcome.error_text}")
    return outcomes[0].value


def _state(elems: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    one = torch.randint(-(2**31), 2**31 - 1, (elems,), dtype=torch.int32, generator=made)
    return {f"w{number:02}": one + number for number in range(_TENSORS)}


def _save(rank: int, path: Path, elems: int) -> None:
    dcp.save(_state(elems), storage_writer=FileSystemWriterAsync(path))


@cache
def _destinations(elems: int) -> dict[str, torch.Tensor]:
    return {f"w{number:02}": torch.ones(elems, dtype=torch.int32) for number in range(_TENSORS)}


def _load(rank: int, path: Path, elems: int, way: str, ranks: int) -> Cost:
    loaded, takes_part = _destinations(elems), way != _ALONE or rank == 0
    for value in loaded.values():
        value.fill_(-1)
    os.environ["LOCAL_WORLD_SIZE"] = str(1 if way == _ALONE else ranks)
    work = partial(dcp.load, loaded, storage_reader=FileSystemReader(path), no_dist=way == _ALONE)
    cost = timed(work if takes_part else lambda: None)
    if takes_part and not all(value.equal(loaded[key]) for key, value in _state(elems).items()):
        raise AssertionError(f"{way}: rank {rank} has loaded other bits than were saved")
    return cost


if __name__ == "__main__":
    sys.exit(main())
