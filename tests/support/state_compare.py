"""Compare Megatron state bit for bit across parallel layouts, without any checkpoint code.

    write_reference(directory, rank, state_dict)             # on every rank that holds the state
    reference = Reference.read(directory)                    # anywhere, later
    comparison = reference.compare(other_state_dict)         # on every rank that holds the state to compare
    verdict = reference.verdict(comparisons_of_all_ranks)

The reference is the global tensors, put together from the shards by plain indexing; it travels by `torch.save`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Shard:
    fqn: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]  # of the box in the global tensor
    flat: tuple[int, int] | None  # what of the flattened box is there, half-open, in elements; None: all
    data: torch.Tensor  # flattened

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What belongs to this shard of a tensor of the global shape, flattened."""
        start, stop = self.flat or (None, None)
        return tensor[self._region].reshape(-1)[start:stop]

    def put(self, tensor: torch.Tensor, values: Any) -> None:
        """Set this shard's part of a tensor of the global shape."""
        start, stop = self.flat or (None, None)
        block = tensor[self._region].reshape(-1).clone()
        block[start:stop] = values
        tensor[self._region] = block.view(self.sizes)

    @property
    def _region(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one rank found: the shards that it compared (without data), and fqns of those that differ."""

    compared: tuple[_Shard, ...]
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All ranks' comparisons together."""

    differing: tuple[str, ...]  # fqns with at least one differing byte
    uncovered: tuple[str, ...]  # fqns of which no rank compared some element
    unknown: tuple[str, ...]  # fqns that the reference does not have

    @property
    def identical(self) -> bool:
        """Whether every byte of the reference was compared and found the same."""
        return not (self.differing or self.uncovered or self.unknown)

    def __str__(self) -> str:
        if self.identical:
            return "bit-identical"
        parts = [(self.differing, "differ"), (self.uncovered, "not compared"), (self.unknown, "not in the reference")]
        return "; ".join(f"{len(fqns)} tensors {what}, such as {fqns[0]}" for fqns, what in parts if fqns)


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
        # Up to 0.15 an optimizer's shard may be a stretch of its flattened parameter.
        flat = getattr(state_dict, "flattened_range", None)
        yield _Shard(
            state_dict.key,
            tuple(state_dict.global_shape),
            tuple(state_dict.global_offset),
            (1,) * state_dict.prepend_axis_num + tuple(state_dict.local_shape),
            None if flat is None else (flat.start, flat.stop),
            state_dict.data.detach().reshape(-1),
        )


def write_reference(directory: Path, rank: int, state_dict: Any) -> None:
    """Keep a copy of this rank's shards in `directory`."""
    own = [replace(shard, data=shard.data.clone()) for shard in shards(state_dict)]
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(own, directory / f"rank{rank}.pt")


@dataclass(frozen=True, slots=True)
class Reference:
    """Global tensors by fqn."""

    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, directory: Path) -> Reference:
        """Put the shards of all ranks together, of which replicas are equal."""
        tensors: dict[str, torch.Tensor] = {}
        filled: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("rank*.pt")):
            for shard in torch.load(path, weights_only=False):
                tensor = tensors.setdefault(shard.fqn, torch.zeros(shard.global_shape, dtype=shard.data.dtype))
                seen = filled.setdefault(shard.fqn, torch.zeros(shard.global_shape, dtype=torch.bool))
                if shard.of(seen).any():
                    same = torch.equal(_bits(shard.of(tensor)), _bits(shard.data))
                    assert same, f"{shard.fqn}: replicas differ at {shard.offset}"
                shard.put(tensor, shard.data)
                shard.put(seen, True)
        missing = [fqn for fqn, seen in filled.items() if not seen.all()]
        assert tensors, f"no reference in {directory}"
        assert not missing, f"no rank holds all of {missing}"
        return cls(tensors)

    def compare(self, state_dict: Any) -> Comparison:
        """Compare the shards of this rank's state dict with the reference."""
        return self._compare(shards(state_dict))

    def compare_tensors(self, tensors: dict[str, torch.Tensor]) -> Comparison:
        """Compare global tensors by fqn, as plain DCP loads them."""
        return self._compare(
            _Shard(fqn, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), None, t.reshape(-1))
            for fqn, t in tensors.items()
        )

    def _compare(self, found: Iterable[_Shard]) -> Comparison:
        compared, differing = [], []
        for shard in found:
            # No view: pickled, a view takes its whole storage along.
            compared.append(replace(shard, data=torch.empty(0)))
            expected = self.tensors.get(shard.fqn)
            if expected is not None and not (
                tuple(expected.shape) == shard.global_shape
                and expected.dtype == shard.data.dtype
                and torch.equal(_bits(shard.of(expected)), _bits(shard.data))
            ):
                differing.append(shard.fqn)
        return Comparison(tuple(compared), tuple(differing))

    def verdict(self, comparisons: Iterable[Comparison]) -> Verdict:
        """Whether the comparisons of all ranks together cover the reference and found no difference."""
        covered = {fqn: torch.zeros(tensor.shape, dtype=torch.bool) for fqn, tensor in self.tensors.items()}
        differing: set[str] = set()
        unknown: set[str] = set()
        for comparison in comparisons:
            differing.update(comparison.differing)
            for shard in comparison.compared:
                if shard.fqn in covered:
                    shard.put(covered[shard.fqn], True)
                else:
                    unknown.add(shard.fqn)
        return Verdict(
            differing=tuple(sorted(differing)),
            uncovered=tuple(sorted(fqn for fqn, seen in covered.items() if not seen.all())),
            unknown=tuple(sorted(unknown)),
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs and signed zeros compare as they are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
