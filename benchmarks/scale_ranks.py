"""The same planning on real gloo ranks, to hold what is worked out against what is measured."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale import Job, Network, Ours, shard_of
from mcore_ckpt.core.errors import CheckpointError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import Outcome
from mcore_ckpt.core.ranks import RankGroup, coordination_group
from mcore_ckpt.save.planner import RankState, SavePlan, SaveRequest, Structure, agree, collect
from tests.support.gloo_ranks import standing_ranks

__all__ = ["Measured", "measure_message_s", "measure_ranks"]

_REPEATS = 5
_MESSAGES = 200


@dataclass(frozen=True, slots=True)
class Measured:
    """Processor seconds of all ranks together: planning a first save, and a later one of the same structure."""

    ranks: int
    items: int  # of each rank
    first_s: float
    later_s: float


def expected(ours: Ours, net: Network) -> tuple[float, float]:
    """What the model says of `Measured.first_s` and `later_s`: every rank's own part, the coordinator's, messages.

    An exchange takes a message up and one down for each rank. A later save has one. A first save has another, with
    every rank's plan, and a last word of the coordinator's.
    """
    later = ours.ranks * ours.compare_s + 2 * ours.ranks * net.message_s
    first = ours.ranks * (ours.compare_s + ours.lay_out_s) + 6 * ours.ranks * net.message_s + ours.check_s
    return first, later


def measure_ranks(items: int, ranks: int) -> Measured:
    """Start the ranks, plan saves of `items` tensors each, and end them."""
    with standing_ranks(ranks, preload=["megatron.core.dist_checkpointing", "mcore_ckpt.save.transaction"]) as group:
        outcomes = group.call(_plan, items, ranks)
    failed = next((outcome for outcome in outcomes if not outcome.ok), None)
    if failed is not None:
        raise RuntimeError(f"rank {failed.rank}: {failed.error_text}")
    firsts, laters = zip(*(outcome.value for outcome in outcomes), strict=True)
    return Measured(ranks, items, math.fsum(firsts), math.fsum(laters))


def measure_message_s() -> float:
    """Processor seconds of both sides for a message of a kilobyte over loopback."""
    with standing_ranks(2, preload=["mcore_ckpt.core.ranks"]) as group:
        outcomes = group.call(_exchange)
    # An exchange of two ranks is one message up and one down.
    return math.fsum(float(outcome.value) for outcome in outcomes) / (2 * _MESSAGES)


def _cpu_s(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def _exchange(rank: int) -> float:
    group = coordination_group()
    group.any("measure", False, wrap=CheckpointError)

    def exchange() -> None:
        for _ in range(_MESSAGES):
            group.any("measure", False, wrap=CheckpointError)

    return _cpu_s(exchange)


def _plan(rank: int, items: int, ranks: int) -> tuple[float, float]:
    specs = Job(ranks, items).specs(rank)
    state = {spec.key: shard_of(spec) for spec in specs}
    group, firsts, laters = coordination_group(), [], []
    gc.collect()
    for _ in range(_REPEATS):
        structure = Structure()
        group.any("measure", False, wrap=CheckpointError)
        firsts.append(_cpu_s(lambda structure=structure: _agree(structure, state, group)))  # type: ignore[misc]
        group.any("measure", False, wrap=CheckpointError)
        laters.append(_cpu_s(lambda structure=structure: _agree(structure, state, group)))  # type: ignore[misc]
    return min(firsts), min(laters)


def _agree(structure: Structure, state: dict[str, object], group: RankGroup) -> tuple[SavePlan, RankState] | None:
    collected = collect(state, structure.described)
    structure.described = collected.described
    request = SaveRequest(Path("checkpoint"), SaveOptions(), thread_count=2)
    return agree(structure, Outcome.of(lambda: collected), group, request, lambda: bytes(range(16)))
