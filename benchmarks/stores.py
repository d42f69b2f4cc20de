"""Saves and loads in a store whose answers come late, next to what its client alone takes for the same bytes.

    python -m benchmarks.stores                          docs/stores.json; a few minutes
    python -m benchmarks.stores --mb 32 --rounds 1 --out build/stores.json      a try, which changes no table

Two ranks. The store is `benchmarks.paced_store`, so that no device is measured. "client alone" is obstore, which this
package uses: each rank puts its bytes as one object in parts of 8 MiB, eight at once, or reads one object. Loads are
compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks import tables
from benchmarks.machine import describe_machine
from benchmarks.measure import slowest
from benchmarks.paced_store import paced_store
from benchmarks.results import ROOT, add_busy, commit_of_code, wait_until_quiet
from benchmarks.state import State, check, fill, kinds
from tests.support.gloo_ranks import StandingRanks, standing_ranks
from tests.support.object_server import s3_environment

__all__ = ["main"]

_LATENCIES_MS: Final = (0.0, 10.0, 50.0)
_MB_PER_S: Final = 100.0
_RANKS: Final = 2
_PART_BYTES: Final = 8 * 1024 * 1024
_OURS, _CLIENT, _DIRECTORY = "mcore_ckpt", "client alone", "mcore_ckpt, a directory"
_WITHIN_S = 300.0


class _Client:
    """obstore alone."""

    def __init__(self, nbytes: int) -> None:
        from obstore.store import S3Store

        self._store = S3Store("checkpoints", config={"unsigned_payload": True, "checksum_algorithm": "CRC64NVME"})
        self._shards = State("dense", nbytes).shards(_RANKS, dist.get_rank())

    def save(self, name: str, step: int) -> float:
        """Seconds."""
        import obstore

        memory = torch.cat([shard.tensor.view(-1) for shard in self._shards]).view(torch.uint8).numpy().data
        key = f"{name}/{dist.get_rank()}"
        return _seconds(
            lambda: obstore.put(self._store, key, memory, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=8)
        )

    def load(self, name: str, step: int) -> float:
        """Seconds."""
        import obstore

        return _seconds(lambda: obstore.get(self._store, f"{name}/{dist.get_rank()}").bytes())


class _Ours:
    """This package's strategies."""

    def __init__(self, nbytes: int) -> None:
        from mcore_ckpt import AsyncCallsQueue, TorchDistSaveStrategy

        self._shards = State("dense", nbytes).shards(_RANKS, dist.get_rank())
        self._save = TorchDistSaveStrategy()
        self._queue = AsyncCallsQueue()

    def _state(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {
            shard.key: ShardedTensor.from_rank_offsets(shard.key, shard.tensor, (0, dist.get_rank(), _RANKS))
            for shard in self._shards
        }

    def save(self, name: str, step: int) -> float:
        """Seconds."""
        fill(self._shards, step)
        return _seconds(lambda: self._save.save(self._state(), name))

    def start(self, name: str, step: int) -> float:
        """Seconds of an asynchronous call; the save is waited for behind it."""
        fill(self._shards, step)
        took_s = _seconds(lambda: self._queue.schedule_async_request(self._save.async_save(self._state(), name)))
        self._queue.maybe_finalize_async_calls(blocking=True)
        return took_s

    def load(self, name: str, step: int) -> float:
        """Seconds."""
        from mcore_ckpt import TorchDistLoadStrategy

        fill(self._shards, -1)
        took_s = _seconds(lambda: TorchDistLoadStrategy().load(self._state(), name))
        check(self._shards, step)
        return took_s


def _seconds(work: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    began_s = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began_s)


@cache
def _contender(side: str, nbytes: int) -> Any:
    return _Client(nbytes) if side == _CLIENT else _Ours(nbytes)


def _run(rank: int, side: str, nbytes: int, call: str, name: str, step: int) -> float:
    seconds: float = getattr(_contender(side, nbytes), call)(name, step)
    return seconds


def _measured(group: StandingRanks, scratch: str, nbytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by call and side; a round before them is not counted."""
    places = {_OURS: "s3://checkpoints/ours", _CLIENT: "client", _DIRECTORY: scratch}
    calls = [(call, side) for call in ("save", "load") for side in (_OURS, _CLIENT)]
    calls += [("start", _OURS), ("start", _DIRECTORY)]
    found: dict[str, dict[str, list[float]]] = {}
    for step in range(rounds + 1):
        for call, side in calls:
            name = f"{places[side]}/{'save' if call == 'load' else call}{step}"
            if side == _DIRECTORY:
                Path(name).mkdir()
            outcomes = group.call(_run, side, nbytes, call, name, step, within_s=_WITHIN_S)
            for outcome in outcomes:
                if not outcome.ok:
                    raise RuntimeError(f"{side}, {call}, rank {outcome.rank}: {outcome.error_text}")
            if step:
                found.setdefault(call, {}).setdefault(side, []).append(round(outcomes[0].value, 4))
    return found


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=256.0, help="of both ranks together (default: 256)")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds (default: 4)")
    parser.add_argument("--out", type=Path, default=tables.STORES_FILE, help="results (default: docs/stores.json)")
    add_busy(parser)
    arguments = parser.parse_args()
    samples: dict[str, Any] = {}
    about = {"commit": commit_of_code(), "machine": describe_machine(ROOT), "busy": arguments.busy}
    nbytes = int(arguments.mb * 1e6)
    mb = kinds(nbytes)["dense"].size_bytes / 1e6
    results = {**about, "mb": round(mb), "mb_per_s": _MB_PER_S, "samples": samples}
    for latency_ms in _LATENCIES_MS:
        wait_until_quiet(f"{latency_ms:g} ms", busy=arguments.busy)
        with (
            tempfile.TemporaryDirectory(prefix="stores-", dir=ROOT) as scratch,
            paced_store(latency_ms, _MB_PER_S) as url,
            standing_ranks(
                _RANKS,
                environment=s3_environment(url) | {"AWS_ALLOW_HTTP": "true", "OMP_NUM_THREADS": "1"},
                preload=("tests.support.pretend_main", "megatron.core.dist_checkpointing"),
                is_measured=True,
            ) as group,
        ):
            samples[f"{latency_ms:g}"] = _measured(group, scratch, nbytes, arguments.rounds)
        tables.put_results(arguments.out, results)
    sys.stdout.write(tables.of_stores(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
