"""Compare Megatron state bit for bit across parallel layouts, without any checkpoint code.

    write_state(directory, rank, state_dict)                 # on every rank that holds the state
    tensors = read_state(directory)                          # anywhere, later: global tensors by key
    assert differing(tensors, read_state(other)) == []

The shards travel by `torch.save`, and are put together by plain indexing.
"""

from collections.abc import Iterator
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


def _shards(state_dict: Any) -> Iterator[_Shard]:
    """Every sharded tensor of a nested state dict, factories resolved; data are views of the live tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(state_dict, dict):
        for value in state_dict.values():
            yield from _shards(value)
    elif isinstance(state_dict, list | tuple):
        for value in state_dict:
            yield from _shards(value)
    elif isinstance(state_dict, ShardedTensorFactory):
        yield from _shards(state_dict.build())
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


def write_state(directory: Path, rank: int, state_dict: Any) -> None:
    """Keep a copy of this rank's shards in `directory`."""
    # No views: pickled, a view takes its whole storage along.
    own = [replace(shard, data=shard.data.clone()) for shard in _shards(state_dict)]
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(own, directory / f"rank{rank}.pt")


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    """The global tensors by key, of the shards of all ranks. Raises `AssertionError`: replicas differ, or a part of a
    tensor is with no rank.
    """
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
    assert tensors, f"no state in {directory}"
    assert not missing, f"no rank holds all of {missing}"
    return tensors


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The keys of tensors that are not the same to the last bit, or that one side alone has."""

    def is_same(key: str) -> bool:
        one, other = found.get(key), expected.get(key)
        if one is None or other is None:
            return False
        return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bits(one), _bits(other))

    return [key for key in sorted({*found, *expected}) if not is_same(key)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs and signed zeros compare as they are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
