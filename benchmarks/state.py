"""State dicts whose every element can be computed from its place, so that a load under any layout can be checked."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

__all__ = ["Shard", "State", "StateKind", "build", "check", "fill", "holds", "kinds"]

_MIB = 1024 * 1024


class Shard(NamedTuple):
    """One rank's slice of a global tensor; shapes and offsets in elements."""

    key: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    axis: int


@dataclass(frozen=True, slots=True)
class StateKind:
    """A family of state dicts."""

    name: str
    tensors: tuple[tuple[str, int, int], ...]  # `(key, rows, columns)` of each float32 tensor
    axis: Literal[0, 1] = 0  # along which it is divided among the ranks

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole state, all ranks together."""
        return sum(4 * rows * columns for _, rows, columns in self.tensors)


def kinds(size_bytes: int) -> dict[str, StateKind]:
    """The families that are measured: a few large tensors, and, for each GB of these, 20,000 of 4 to 64 KB."""
    count = max(1, size_bytes // (16 * _MIB))
    large = tuple((f"decoder.layers.{i}.mlp.weight", 2048, 2048) for i in range(count))
    chance = random.Random(20)  # the same sizes in every run
    small = tuple(
        (f"decoder.layers.{i // 50}.part{i % 50}.weight", 8, chance.randrange(128, 2048 + 1))
        for i in range(size_bytes // 50_000)
    )
    return {
        "dense": StateKind("dense", large),
        "rows": StateKind("rows", large, axis=1),
        "small": StateKind("small", small),
    }


class State(NamedTuple):
    """A state dict that is measured."""

    kind: str  # name of the family
    size_bytes: int  # of the large tensors, all ranks together
    prefix: str = ""  # only keys that begin with it

    def shards(self, world: int, rank: int) -> list[Shard]:
        """Those of one rank, allocated and touched, values not set."""
        return build(kinds(self.size_bytes)[self.kind], world, rank, self.prefix)


def build(kind: StateKind, world: int, rank: int, only: str = "") -> list[Shard]:
    """The shards of one rank, allocated and touched, values not set; `only` keeps keys that begin with it."""
    shards = []
    for key, rows, columns in kind.tensors:
        if not key.startswith(only):
            continue
        shape = [rows, columns]
        part = shape[kind.axis] // world
        sizes, offsets = list(shape), [0, 0]
        sizes[kind.axis], offsets[kind.axis] = part, part * rank
        if rank == world - 1:
            sizes[kind.axis] = shape[kind.axis] - offsets[kind.axis]
        tensor = torch.zeros(sizes, dtype=torch.float32)
        shards.append(Shard(key, tensor, tuple(offsets), tuple(shape), kind.axis))
    return shards


def _expected(shard: Shard, step: int) -> torch.Tensor:
    rows, columns = shard.tensor.shape
    first_row, first_column = shard.offsets
    row = torch.arange(first_row, first_row + rows, dtype=torch.int32).unsqueeze(1)
    column = torch.arange(first_column, first_column + columns, dtype=torch.int32).unsqueeze(0)
    # Mixed so that neighbouring elements differ in every byte; int32 wraps, which is what is wanted.
    return (row * shard.global_shape[1] + column + (hash_of(shard.key) + step)) * 0x5BD1E995


def hash_of(key: str) -> int:
    """A number for a key, the same in every process."""
    return sum((index + 1) * byte for index, byte in enumerate(key.encode())) & 0xFFFFFF


def fill(shards: list[Shard], step: int = 0) -> None:
    """Set every element to what it must be at `step`."""
    for shard in shards:
        shard.tensor.view(torch.int32).copy_(_expected(shard, step))


def holds(shard: Shard, step: int = 0) -> bool:
    """Whether every bit is what `fill` sets."""
    return torch.equal(shard.tensor.view(torch.int32), _expected(shard, step))


def check(shards: list[Shard], step: int = 0) -> None:
    """Raise unless every bit is what `fill` sets."""
    for shard in shards:
        if not holds(shard, step):
            raise AssertionError(f"{shard.key} at {shard.offsets}: the loaded values are not those that were saved")
