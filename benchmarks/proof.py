"""What it costs to know that a checkpoint is what was in the model: CPU seconds with and without, in turns.

    python -m benchmarks.proof                       1 GB, 9 rounds; docs/proof.json, and docs/reliability.md
    python -m benchmarks.proof --gb 0.1 --rounds 3 --states rows --out build/a-try.json

One rank holds a dense state in halves, as two tensor-parallel ranks would: rows, columns, or what a transformer layer
has of both. Each round runs all ways one after the other, in another order, so that what else the machine does meets
all of them. A synchronous save and a load are measured by the CPU seconds of the process; an async save by those of the
call, which the trainer waits for.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import tables
from benchmarks.machine import describe_machine, drop_page_cache
from benchmarks.results import ROOT, add_busy, wait_until_quiet
from mcore_ckpt.core.options import LoadOptions, SaveOptions
from mcore_ckpt.megatron.certificate import certify
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.save.async_queue import AsyncCallsQueue

# Global shape of float32, and the axis that is divided; so often as the size asks for.
_Shapes = dict[str, tuple[tuple[int, int], int]]
_HALF: Final = {"rows": ((4096, 2048), 0)}
_STATES: Final[dict[str, _Shapes]] = {
    "rows": _HALF,
    "a transformer layer, hidden size 2048": {
        "qkv": ((6144, 2048), 0),
        "proj": ((2048, 2048), 1),
        "fc1": ((8192, 2048), 0),
        "fc2": ((2048, 8192), 1),
    },
    "columns, rows of 16 KB": {"columns": ((1024, 8192), 1)},
    "columns, rows of 4 KB": {"columns": ((4096, 2048), 1)},
    "columns, rows of 1 KB": {"columns": ((16384, 512), 1)},
}
# Ways that are compared within each part; the first one is what the others are divided by.
_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "load, cold": ('certify="off"', 'certify="sample"', 'certify="warn"'),
    "load, page cache": ('certify="off"', 'certify="sample"', 'certify="warn"'),
    "save with 0.9 times as many bytes of replicas": (
        'compare_replicas="off"',
        'compare_replicas="sample"',
        'compare_replicas="warn"',
    ),
    "async call with 0.9 times as many bytes of replicas": (
        'compare_replicas="off"',
        'compare_replicas="sample"',
        'compare_replicas="warn"',
    ),
}
_REPLICAS: Final = 0.9
_Round = dict[str, dict[str, float]]


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of the state (default: 1)")
    parser.add_argument("--rounds", type=int, default=9, help="after a first one that is not counted (default: 9)")
    parser.add_argument("--states", nargs="+", choices=list(_STATES), default=list(_STATES), help="(default: all)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the storage that is measured")
    parser.add_argument("--out", type=Path, default=tables.PROOF_FILE, help="results (default: docs/proof.json)")
    add_busy(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    arguments.dir.mkdir(parents=True, exist_ok=True)
    size_bytes, states = int(arguments.gb * 1e9), {}
    for name in arguments.states:
        wait_until_quiet(name, busy=arguments.busy)
        state = _state(_STATES[name], size_bytes)
        with tempfile.TemporaryDirectory(prefix="proof-", dir=arguments.dir) as scratch:
            states[name] = [_round(state, Path(scratch), name) for _ in range(arguments.rounds + 1)][1:]
    about = {"machine": describe_machine(arguments.dir), "busy": arguments.busy, "bytes": size_bytes}
    results = {**about, "ways": _PARTS, "states": states}
    tables.put_results(arguments.out, results)
    sys.stdout.write(tables.of_proof(results))
    return 0


def _state(shapes: _Shapes, total_bytes: int) -> dict[str, Any]:
    """Layer after layer of shards, as long as there is room for one more."""
    state: dict[str, Any] = {}
    nbytes = sum(4 * rows * columns for (rows, columns), _ in shapes.values())
    made = torch.Generator().manual_seed(1)
    for layer in range(max(1, total_bytes // nbytes)):
        for name, (shape, axis) in shapes.items():
            sizes = tuple(size // 2 if at == axis else size for at, size in enumerate(shape))
            for half in range(2):
                offsets = tuple(half * size if at == axis else 0 for at, size in enumerate(sizes))
                data = torch.randint(-(2**31), 2**31 - 1, sizes, dtype=torch.int32, generator=made)
                key = f"decoder.layers.{layer}.{name}"
                state[f"{key}.{half}"] = _shard(key, data.view(torch.float32), shape, offsets)
    return state


def _shard(key: str, data: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], replica: int = 0) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    sizes = tuple(data.shape)
    pieces = tuple(n // m for n, m in zip(shape, sizes, strict=True))
    return ShardedTensor(key, data, data.dtype, sizes, shape, offsets, pieces, replica_id=replica)


def _round(state: dict[str, Any], folder: Path, name: str) -> _Round:
    found: _Round = {part: {} for part in _PARTS}
    replicated = _with_replicas(state) if name == "rows" else None
    turns = [(part, way) for part, ways in _PARTS.items() for way in ways]
    random.shuffle(turns)
    saved = folder / "saved"
    if not saved.exists():
        _save(state, saved, SaveOptions())
        torch.save({}, saved / "common.pt")
    for part, way in turns:
        option, _, value = way.partition("=")
        options = {option: value.strip('"')}
        if part.startswith("load"):
            if part == "load, cold":
                drop_page_cache(saved)
            else:
                _warm(saved)
            found[part][way] = _load(state, saved, LoadOptions(**options))  # type: ignore[arg-type]
            continue
        if "replicas" in part and replicated is None:
            continue
        held = replicated if "replicas" in part and replicated is not None else state
        save = _async_call if part.startswith("async") else _save
        found[part][way] = save(held, folder / "new", SaveOptions(**options))  # type: ignore[arg-type]
        shutil.rmtree(folder / "new")
    return found


def _with_replicas(state: dict[str, Any]) -> dict[str, Any]:
    """As a data-parallel rank holds them besides what it saves: of nine tenths of the bytes."""
    found, room = dict(state), _REPLICAS * sum(shard.data.nbytes for shard in state.values())
    for name, shard in state.items():
        room -= shard.data.nbytes
        if room < 0:
            break
        copied = shard.data.clone()
        found[f"{name}.replica"] = _shard(shard.key, copied, shard.global_shape, shard.global_offset, replica=1)
    return found


_savers: dict[tuple[str, str], TorchDistSaveStrategy] = {}


def _saver(options: SaveOptions) -> TorchDistSaveStrategy:
    """One for each way, so that a save is planned as the one before it."""
    return _savers.setdefault((repr(options), ""), TorchDistSaveStrategy(options=options))


def _save(state: dict[str, Any], path: Path, options: SaveOptions) -> float:
    path.mkdir()
    return _cpu_s(time.process_time, partial(_saver(options).save, state, path))


_queues: list[AsyncCallsQueue] = []


def _async_call(state: dict[str, Any], path: Path, options: SaveOptions) -> float:
    path.mkdir()
    if not _queues:
        _queues.append(AsyncCallsQueue(persistent=True))
    queue, saver = _queues[0], _saver(options)
    spent_s = _cpu_s(time.process_time, lambda: queue.schedule_async_request(saver.async_save(state, path)))
    queue.maybe_finalize_async_calls(blocking=True)
    return spent_s


def _load(state: dict[str, Any], path: Path, options: LoadOptions) -> float:
    for shard in state.values():
        shard.data.view(torch.int32).fill_(-1)
    strategy = TorchDistLoadStrategy(options=options)

    def load() -> None:
        strategy.load(dict(state), path)
        certify(state, path, options=options)

    return _cpu_s(time.process_time, load)


def _warm(path: Path) -> None:
    for file in path.iterdir():
        file.read_bytes()


def _cpu_s(clock: Callable[[], float], work: Callable[[], Any]) -> float:
    before = clock()
    work()
    return clock() - before


if __name__ == "__main__":
    sys.exit(main())
