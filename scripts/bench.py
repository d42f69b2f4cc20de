"""Measure saves and loads side by side: this package, stock megatron-core, stock DCP, and the raw device.

    make bench                                  everything, about 20 minutes on two cores
    make bench ARGS="--only small --rounds 3"   part of it
    make bench ARGS="--only small --loads --add"  part of that, added to what earlier parts have left in `--out`
    make bench ARGS="--only floors"             what loads and saves cost at least, by bare loops
    make bench ARGS="--only floors --kinds async first"   a part of that
    make bench ARGS="--only device"             a GPU's memory into the stage, beside a plain pinned copy

Results go to `--out` (JSON, a table in Markdown, a plot). Only ratios travel between machines.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import async_saves, device, report, scenarios, snapshots  # noqa: E402  (found by the line above)
from benchmarks.bare import BARE, BARE_SMALL  # noqa: E402
from benchmarks.rounds import Samples  # noqa: E402
from tests.support.gloo_ranks import run_ranks  # noqa: E402

_EVERYBODY = ("raw", "mcore_ckpt", "megatron", "dcp")
_WRITERS = ("mcore_ckpt", "megatron", "dcp")
_ASYNC = ("mcore_ckpt", "mcore_ckpt replanned", "megatron", "dcp")
_PART = "a fifth of the tensors of 4 ranks' files"  # layers 1 and 10 to 19 of 59
_DEADLINE_S = 1800.0
_COMPARED = ("dense", "first", "small", "reshard", "async")
_ASYNC_KINDS = ("dense", "small")
_FLOOR_KINDS = ("dense", "rows", "small", "save", "async", "first")


def _pairs() -> list[tuple[str, str]]:
    same = [(name, name) for name in _WRITERS]
    # Ours also reads what the others wrote; raw reads as many bytes from the same place.
    return [("raw", "mcore_ckpt"), *same, ("mcore_ckpt", "megatron"), ("mcore_ckpt", "dcp")]


def _floors(ranks: Callable[..., Samples], size: int, rounds: int, kinds: Sequence[str]) -> dict[str, Samples]:
    """Loads and saves beside what they cost at least."""
    results: dict[str, Samples] = {}
    pairs = [*((name, "mcore_ckpt") for name in ("raw", *BARE, "mcore_ckpt")), ("megatron", "megatron")]
    for kind, loading in (
        ("dense", ((2, ""), (1, ""), (1, "decoder.layers.1"), (1, "decoder.layers.1."))),
        ("rows", ((8, ""),)),
    ):
        if kind not in kinds:
            continue
        ranks(4, scenarios.write_once, kind, size, ("mcore_ckpt", "megatron"))
        for count, prefix in loading:
            part = {"": "", "decoder.layers.1": ", a fifth of the tensors", "decoder.layers.1.": ", one tensor"}[prefix]
            work = f"floors: {kind}, 4 -> {count}{part}"
            results[work] = ranks(count, scenarios.loads, kind, size, pairs, rounds, prefix)
    if "small" in kinds:
        pairs = [(name, "mcore_ckpt") for name in ("raw", *BARE_SMALL, "mcore_ckpt")]
        for count in (1, 2):
            ranks(count, scenarios.write_once, "small", size, ("mcore_ckpt", "megatron"))
            work = f"floors: small, {count} -> {count}"
            results[work] = ranks(count, scenarios.loads, "small", size, pairs, rounds)
            # Once is enough of what takes ten times as long.
            _merge(results[work], ranks(count, scenarios.loads, "small", size, [("megatron", "megatron")], 1))
    if "save" in kinds:
        results["floors: save, dense, 2 ranks"] = ranks(2, snapshots.save_cpu, "dense", size, rounds)
    for kind in _ASYNC_KINDS if "async" in kinds else ():
        results[f"floors: async, {kind}, 2 ranks"] = ranks(2, snapshots.async_phases, kind, size, rounds)
    if "first" in kinds:
        first: Samples = {}
        ranks(2, scenarios.write_once, "dense", size, ("mcore_ckpt",))
        for _ in range(max(1, rounds // 2)):
            for shown_by in ("", "a load", "optimizers"):
                _merge(first, ranks(2, snapshots.first_phases, "dense", size, shown_by))
            _merge(first, ranks(2, snapshots.first_loads, "dense", size))
        results["floors: first, dense, 2 ranks"] = first
    return results


def _run(arguments: argparse.Namespace, base: Path) -> dict[str, Samples]:
    size, rounds = int(arguments.gb * 1e9), arguments.rounds
    results: dict[str, Samples] = {}

    def wanted(name: str) -> bool:
        return name in (arguments.only or _COMPARED)

    def ranks(count: int, work: Callable[..., Any], *rest: object) -> Samples:
        values: list[Samples] = run_ranks(work, count, base, *rest, deadline_s=_DEADLINE_S)
        return values[0]

    def saves_and_loads(kind: str) -> Samples:
        samples: Samples = {}
        if arguments.saves:
            names = (*_EVERYBODY, "mcore_ckpt replanned") if kind == "small" else _EVERYBODY
            chosen = [name for name in names if name == "raw" or name in (arguments.adapters or names)]
            samples |= ranks(2, scenarios.saves, kind, size, chosen, rounds)
        if arguments.loads:
            pairs = [pair for pair in _pairs() if not {*pair} - {"raw", *(arguments.adapters or _WRITERS)}]
            samples |= ranks(2, _write_and_load, kind, size, pairs, rounds)
        return samples

    if wanted("dense"):
        results["dense, 2 ranks"] = saves_and_loads("dense")
    if wanted("first"):
        first: Samples = {}
        for name in _WRITERS:
            for _ in range(max(1, rounds // 2)):
                for measured in (scenarios.first_save, scenarios.first_load):
                    _merge(first, ranks(2, measured, "dense", size, name))
        results["dense, first save and load of a process"] = first
    if wanted("small"):
        results["20,000 tensors of 4-64 KB, 2 ranks"] = saves_and_loads("small")
    if wanted("reshard"):
        ranks(4, scenarios.write_once, "dense", size, _WRITERS)
        results["resharding, 4 -> 1"] = ranks(1, scenarios.loads, "dense", size, _pairs(), rounds)
        for work, prefix in (("one tensor of 4 ranks' files", "decoder.layers.1."), (_PART, "decoder.layers.1")):
            results[work] = ranks(1, scenarios.loads, "dense", size, _pairs(), rounds, prefix)
        ranks(4, scenarios.write_once, "rows", size, _WRITERS)
        results["resharding along rows, 4 -> 8"] = ranks(8, scenarios.loads, "rows", size, _pairs(), rounds)
    if wanted("async"):
        for kind in [kind for kind in _ASYNC_KINDS if kind in (arguments.kinds or _ASYNC_KINDS)]:
            names = [name for name in _ASYNC if not arguments.adapters or name in arguments.adapters]
            work = f"async, {kind}, 2 ranks"
            results[work] = ranks(2, async_saves.async_saves, kind, size, names, rounds)
            for name, warm_up in [(name, False) for name in _WRITERS if name in names] + [("mcore_ckpt", True)]:
                for _ in range(max(1, rounds // 3)):
                    first_async = ranks(2, async_saves.first_async_save, kind, size, name, warm_up)
                    _merge(results[work], first_async)
    if wanted("floors"):
        results |= _floors(ranks, size, rounds, arguments.kinds or _FLOOR_KINDS)
    if wanted("device"):
        results["from a GPU"] = ranks(1, device.device_to_stage, size, rounds)
    return results


def _merge(into: Samples, more: Samples) -> None:
    for figure, by_name in more.items():
        for name, values in by_name.items():
            into.setdefault(figure, {}).setdefault(name, []).extend(values)


def _write_and_load(rank: int, base: Path, kind: str, size: int, pairs: list[tuple[str, str]], rounds: int) -> Samples:
    scenarios.write_once(rank, base, kind, size, sorted({writer for _, writer in pairs}))
    return scenarios.loads(rank, base, kind, size, pairs, rounds)


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the dense state, in 1e9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each (default: 5)")
    parser.add_argument("--only", nargs="*", choices=(*_COMPARED, "floors", "device"), default=[])
    parser.add_argument("--saves", action="store_true", help="saves only (of dense and small)")
    parser.add_argument("--loads", action="store_true", help="loads only (of dense and small)")
    parser.add_argument("--add", action="store_true", help="keep what earlier runs have left in --out beside this one")
    parser.add_argument("--adapters", nargs="*", choices=_ASYNC, default=[], help="of those, but for first and reshard")
    parser.add_argument("--kinds", nargs="*", choices=_FLOOR_KINDS, default=[], help="of async and floors")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; the file system that is measured")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="where results go")
    arguments = parser.parse_args()
    if not arguments.saves and not arguments.loads:
        arguments.saves = arguments.loads = True
    base = Path(tempfile.mkdtemp(prefix="mcore_ckpt_bench_", dir=arguments.dir or ROOT))
    try:
        results = _run(arguments, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    report.write(results, arguments.out, add=arguments.add)
    return 0


if __name__ == "__main__":
    sys.exit(main())
