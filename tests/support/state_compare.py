"""Compare Megatron state bit for bit across parallel layouts, without any checkpoint code.

    write_reference(directory, rank, state_dict)             # on every rank that holds the state
    reference = Reference.read(directory)                    # anywhere, later
    comparison = reference.compare(other_state_dict)         # on every rank that holds the state to compare
    verdict = reference.verdict(comparisons_of_all_ranks)

The reference is the global tensors, put together from the shards by plain indexing; it travels by `torch.save`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Comparison", "Reference", "Verdict", "shards", "write_reference"]


@dataclass(frozen=True, slots=True)
class _Shard:
    fqn: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor  # with as many dimensions as the global tensor

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.data.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one rank found: `(fqn, offset, sizes)` of every shard it compared, and which of them differ."""

    boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All ranks' comparisons together.

    Attributes:
        tensors: global tensors that were compared.
        compared_bytes: bytes of the reference that were compared at least once.
        differing: fqns with at least one differing byte.
        uncovered: fqns of which no rank compared some element.
        unknown: fqns that the reference does not have.
    """

    tensors: int
    compared_bytes: int
    differing: tuple[str, ...]
    uncovered: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every byte of the reference was compared and found the same."""
        return self.tensors > 0 and not (self.differing or self.uncovered or self.unknown)

    def __str__(self) -> str:
        if self.identical:
            return "bit-identical"
        parts = [(self.differing, "differ"), (self.uncovered, "not compared"), (self.unknown, "not in the reference")]
        return "; ".join(f"{len(fqns)} tensors {what}, such as {fqns[0]}" for fqns, what in parts if fqns) or "empty"


def shards(state_dict: Any) -> Iterator[_Shard]:
    """Every sharded tensor of a nested state dict, factories resolved; data are views of the live tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(state_dict, dict):
        for value in state_dict.values():
            yield from shards(value)
    elif isinstance(state_dict, list | tuple):
        for value in state_dict:
            yield from shards(value)
    elif isinstance(state_dict, ShardedTensorFactory):
        yield from shards(state_dict.build())
    elif isinstance(state_dict, ShardedTensor):
        data = state_dict.data.detach()
        yield _Shard(
            state_dict.key,
            tuple(state_dict.global_shape),
            tuple(state_dict.global_offset),
            data.reshape((1,) * state_dict.prepend_axis_num + tuple(data.shape)),
        )


def write_reference(directory: Path, rank: int, state_dict: Any) -> None:
    """Keep a copy of this rank's shards in `directory`."""
    own = [(shard.fqn, shard.global_shape, shard.offset, shard.data.clone()) for shard in shards(state_dict)]
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(own, directory / f"rank{rank}.pt")


@dataclass(frozen=True, slots=True)
class Reference:
    """Global tensors by fqn."""

    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, directory: Path) -> Reference:
        """Put the shards of all ranks together.

        Raises:
            AssertionError: replicas of one shard differ, or an element of a tensor is on no rank.
        """
        tensors: dict[str, torch.Tensor] = {}
        filled: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("rank*.pt")):
            for shard in (_Shard(*fields) for fields in torch.load(path)):
                tensor = tensors.setdefault(shard.fqn, torch.zeros(shard.global_shape, dtype=shard.data.dtype))
                seen = filled.setdefault(shard.fqn, torch.zeros(shard.global_shape, dtype=torch.bool))
                if seen[shard.region].any():
                    same = torch.equal(_bits(tensor[shard.region]), _bits(shard.data))
                    assert same, f"{shard.fqn}: replicas differ at {shard.offset}"
                tensor[shard.region] = shard.data
                seen[shard.region] = True
        missing = [fqn for fqn, seen in filled.items() if not seen.all()]
        assert tensors, f"no reference in {directory}"
        assert not missing, f"no rank holds all of {missing}"
        return cls(tensors)

    @property
    def total_bytes(self) -> int:
        """Size of all global tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def compare(self, state_dict: Any) -> Comparison:
        """Compare the shards of this rank's state dict with the reference."""
        boxes, differing = [], []
        for shard in shards(state_dict):
            boxes.append((shard.fqn, shard.offset, tuple(shard.data.shape)))
            expected = self.tensors.get(shard.fqn)
            if expected is not None and not (
                tuple(expected.shape) == shard.global_shape
                and expected.dtype == shard.data.dtype
                and torch.equal(_bits(expected[shard.region]), _bits(shard.data))
            ):
                differing.append(shard.fqn)
        return Comparison(tuple(boxes), tuple(differing))

    def compare_tensors(self, tensors: dict[str, torch.Tensor]) -> Comparison:
        """Compare global tensors by fqn, as plain DCP loads them."""
        boxes = [(fqn, (0,) * tensor.dim(), tuple(tensor.shape)) for fqn, tensor in tensors.items()]
        differing = [
            fqn
            for fqn, tensor in tensors.items()
            if (expected := self.tensors.get(fqn)) is not None
            and not (expected.dtype == tensor.dtype and torch.equal(_bits(expected), _bits(tensor)))
        ]
        return Comparison(tuple(boxes), tuple(differing))

    def verdict(self, comparisons: Iterable[Comparison]) -> Verdict:
        """Whether the comparisons of all ranks together cover the reference and found no difference."""
        covered = {fqn: torch.zeros(tensor.shape, dtype=torch.bool) for fqn, tensor in self.tensors.items()}
        differing: set[str] = set()
        unknown: set[str] = set()
        for comparison in comparisons:
            differing.update(comparison.differing)
            for fqn, offset, sizes in comparison.boxes:
                if fqn in covered:
                    covered[fqn][tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = True
                else:
                    unknown.add(fqn)
        return Verdict(
            tensors=sum(bool(seen.any()) for seen in covered.values()),
            compared_bytes=sum(int(covered[fqn].sum()) * t.element_size() for fqn, t in self.tensors.items()),
            differing=tuple(sorted(differing)),
            uncovered=tuple(sorted(fqn for fqn, seen in covered.items() if not seen.all())),
            unknown=tuple(sorted(unknown)),
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs and signed zeros compare as they are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
