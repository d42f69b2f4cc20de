"""A state that follows from a seed alone, so that a mix of two checkpoints shows. Needs stock Megatron, and no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """All tensors of a seed, whole, by key."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(300, 200, generator=generator),
        "medium": torch.randn(100, 100, generator=generator).to(torch.bfloat16),
        **{f"small.{k}": torch.randn(k + 1, generator=generator) for k in range(5)},
    }


def sharded_state_dict(seed: int) -> dict[str, Any]:
    """What this rank has of a seed: the tensors, the largest divided among the ranks; an object; and the seed itself as
    `iteration`, in the common state.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank) for key, tensor in tensors(seed).items()
    }
    part = tensors(seed)["large"].chunk(world)[rank]
    state["large"] = ShardedTensor.from_rank_offsets("large", part, (0, rank, world))
    # Objects of another length each time: they must not move the tensors.
    state["object"] = ShardedObject("object", {"seed": seed, "text": "x" * (100 * seed)}, (1,), (0,), rank)
    state["iteration"] = seed  # the common state
    return state
