"""Sharded state dicts: one that has everything, and one that follows from a seed. Megatron is imported late."""

from typing import Any

import torch
import torch.distributed as dist

SHAPE = (24, 16)


def whole(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(seed, seed + SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE).to(dtype)


def sharded_state(rank: int, world: int, seed: int = 0, blank: bool = False) -> dict[str, Any]:
    """Split by rows, by columns, stacked, replicated, large, without axes, several dtypes, objects, nesting."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory

    sharded = dist_checkpointing.ShardedTensor.from_rank_offsets

    def cut(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        part = tensor.chunk(world, axis)[rank]
        return torch.zeros_like(part) if blank else part.contiguous()

    def value(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if blank else tensor

    halves = torch.cat([cut(whole(seed + 5), 0), cut(whole(seed + 6), 0)])

    def split_halves(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
        first, second = tensor.chunk(2)
        return [
            sharded(key, first, (0, rank, 2 * world), replica_id=replica_id),
            sharded(key, second, (0, world + rank, 2 * world), replica_id=replica_id),
        ]

    return {
        "model": {
            "rows": sharded("rows", cut(whole(seed), 0), (0, rank, world)),
            "columns": sharded("columns", cut(whole(seed + 1, torch.bfloat16), 1), (1, rank, world)),
            "stacked": sharded("stacked", value(whole(seed + 2)[0] + rank), (0, rank, world), prepend_axis_num=1),
            "replicated": sharded("replicated", value(whole(seed + 3)), replica_id=rank),
            "large": sharded("large", value(torch.arange(300_000.0) + seed), replica_id=world - 1 - rank),
            "scalar": sharded("scalar", value(torch.tensor(seed + 0.5)), replica_id=rank),
            "layers": [sharded(f"layer{i}", value(whole(seed + 10 + i)), replica_id=rank) for i in range(3)],
            "gated": ShardedTensorFactory("gated", halves, split_halves, lambda parts: torch.cat(parts), 0),
        },
        "objects": {"mine": ShardedObject("mine", None if blank else {"rank": rank, "seed": seed}, (world,), (rank,))},
        "local": LocalNonpersistentObject({"kept": rank}),
        "iteration": 0 if blank else seed,
    }


def check_state(loaded: dict[str, Any], rank: int, world: int, seed: int, saved_world: int) -> None:
    """Assert that a state which `saved_world` ranks have saved was loaded by this rank of `world`."""
    model = loaded["model"]
    assert torch.equal(model["rows"], whole(seed).chunk(world, 0)[rank])
    columns = whole(seed + 1, torch.bfloat16).chunk(world, 1)[rank]
    assert model["columns"].dtype == columns.dtype
    assert torch.equal(model["columns"], columns)
    assert torch.equal(model["replicated"], whole(seed + 3))
    assert torch.equal(model["large"], torch.arange(300_000.0) + seed)
    assert model["scalar"].item() == seed + 0.5
    for i, layer in enumerate(model["layers"]):
        assert torch.equal(layer, whole(seed + 10 + i))
    expected = [whole(seed + 5).chunk(world, 0)[rank], whole(seed + 6).chunk(world, 0)[rank]]
    assert torch.equal(model["gated"], torch.cat(expected))
    if world == saved_world:
        assert torch.equal(model["stacked"], whole(seed + 2)[0] + rank)
        assert loaded["objects"]["mine"] == {"rank": rank, "seed": seed}
    assert loaded["local"] == {"kept": rank}
    assert loaded["iteration"] == seed


# --- a state that follows from a seed alone, so that a mix of two checkpoints shows -----------------------------------


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
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

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
