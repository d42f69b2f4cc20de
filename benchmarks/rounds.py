"""What every scenario needs: adapters that take turns, a fresh directory for each save, samples."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.adapters import ADAPTERS, Adapter
from benchmarks.bare import BARE, BARE_SMALL
from benchmarks.state import Shard

__all__ = ["Samples", "fresh", "make_adapters", "note", "rotated", "wipe"]

# figure -> adapter -> one value for each round
Samples = dict[str, dict[str, list[float]]]


def make_adapters(names: Sequence[str]) -> dict[str, Adapter]:
    """One of each, kept for all rounds."""
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()  # stock Megatron names CUDA devices outright
    known = ADAPTERS | BARE | BARE_SMALL
    return {name: known[name]() for name in names}


def fresh(path: Path) -> Path:
    """An empty directory, made by rank 0."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    return path


def note(samples: Samples, figure: str, name: str, value: float) -> None:
    """Add a value to those of a figure and an adapter."""
    samples.setdefault(figure, {}).setdefault(name, []).append(value)


def wipe(shards: list[Shard]) -> None:
    """Set the tensors to what no save holds, so that a load which does nothing shows."""
    for shard in shards:
        shard.tensor.fill_(-1.0)


def rotated(items: dict[Any, Adapter], turn: int) -> list[tuple[Any, Adapter]]:
    """The items, beginning with another one in each round, so that none always follows the same neighbour."""
    listed = list(items.items())
    shift = turn % len(listed)
    return listed[shift:] + listed[:shift]
