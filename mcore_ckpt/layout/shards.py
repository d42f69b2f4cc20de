"""Megatron's sharded leaves as the planner sees them, recognised by their attributes so that megatron is not imported.

A *shard* is what one rank holds of a global tensor: Megatron's `ShardedTensor` (key, data, local and global shape,
offset). A *sharded object* is one rank's part of a global object: Megatron's `ShardedObject`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mcore_ckpt.core.errors import PlanError

__all__ = [
    "box_sizes",
    "is_main_replica",
    "is_sharded_object",
    "is_sharded_tensor",
    "leaves",
    "replace_leaves",
    "without_leaves",
]


def is_sharded_tensor(value: object) -> bool:
    """True for Megatron's `ShardedTensor`."""
    return hasattr(value, "global_offset") and hasattr(value, "local_shape")


def is_sharded_object(value: object) -> bool:
    """True for Megatron's `ShardedObject`."""
    return hasattr(value, "unique_key") and hasattr(value, "global_offset") and not hasattr(value, "local_shape")


def is_main_replica(shard: Any) -> bool:
    """True when this copy of a replicated shard is the one that is written (`replica_id` is 0, or all zeros)."""
    replica_id = shard.replica_id
    if isinstance(replica_id, int):
        return replica_id == 0
    return not any(replica_id)


def box_sizes(shard: Any) -> tuple[int, ...]:
    """Sizes of the box that a shard fills in its global tensor: the local shape after the prepended axes, in elements.

    Raises:
        PlanError: the shard is a slice of a flattened tensor (`flattened_range`), which has no box.
    """
    if getattr(shard, "flattened_range", None) is not None:
        raise PlanError(
            f"{shard.key}: flattened_range={shard.flattened_range} is a stretch, and plain DCP plans boxes;"
            " save and load it with Megatron's dist_checkpointing after mcore_ckpt.install(), or choose an optimizer"
            " sharding type that keeps the model's shapes (fully_reshardable) or flat buckets (dp_reshardable)"
        )
    prepended: int = shard.prepend_axis_num
    return (1,) * prepended + tuple(shard.local_shape)


def leaves(tree: object) -> Iterator[Any]:
    """Every sharded tensor and sharded object of a nested dict/list, in order."""
    found: list[Any] = []
    _collect([tree], found)
    return iter(found)


def _collect(values: Iterable[object], found: list[Any]) -> None:
    # A list and not a generator for each value: a state may have tens of thousands of them.
    for value in values:
        if isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif is_sharded_tensor(value) or is_sharded_object(value):
            found.append(value)


def replace_leaves(tree: Any, replacement: Callable[[Any], Any]) -> Any:
    """A copy of a nested dict/list in which each sharded leaf is what `replacement(leaf)` returns."""
    if isinstance(tree, dict):
        return {key: replace_leaves(value, replacement) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replace_leaves(value, replacement) for value in tree]
    if is_sharded_tensor(tree) or is_sharded_object(tree):
        return replacement(tree)
    return tree


def without_leaves(tree: Any) -> Any:
    """A nested dict/list without its sharded leaves, and without the containers that held nothing else."""
    if isinstance(tree, dict):
        kept = {}
        for key, value in tree.items():
            if is_sharded_tensor(value) or is_sharded_object(value):
                continue
            rest = without_leaves(value)
            if isinstance(value, (dict, list)) and value and not rest:
                continue
            kept[key] = rest
        return kept
    if isinstance(tree, list):
        kept_list = [without_leaves(v) for v in tree if not (is_sharded_tensor(v) or is_sharded_object(v))]
        return [v for v in kept_list if not (isinstance(v, (dict, list)) and not v)] if tree else tree
    return tree
