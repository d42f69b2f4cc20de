"""Megatron's sharded leaves, and how they are stored; recognised by their attributes, so megatron is not imported.

A *shard* is what one rank holds of a global tensor: Megatron's `ShardedTensor` (key, data, local and global shape,
offset). A *sharded object* is one rank's part of a global object: Megatron's `ShardedObject`.

A shard is a box of its global tensor and is stored as such, but for stretches of flattened tensors, which is how
Megatron-Core 0.12 to 0.15 kept optimizer state. A rank of the distributed optimizer owns elements `[start, stop)` of
its flattened parameter, which in turn is a box of the global parameter: a `ShardedTensor` with a `flattened_range`.
Such a stretch is no box of the global tensor, so it is stored under another shape (Megatron's own form, which stock
readers expect):

    parameter   global [X, Y], local [x, y]                          elements
    stored      [X / x, Y / y, x * y]                                grid of local boxes, each flattened
    one shard   offsets [i, j, start], sizes [1, 1, stop - start]

and `.metadata` notes the parameter's own global shape in `mcore_data`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import compress
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.format.index import CheckpointIndex

# Of those that were met before, whether it is a tensor: to look at the attributes of each leaf takes longer than all
# else of a walk.
_LEAF_TYPES: dict[type, bool] = {}

_NOTE = "nd_reformulated_orig_global_shape"


def is_sharded_tensor(value: object) -> bool:
    """True for Megatron's `ShardedTensor`."""
    return hasattr(value, "global_offset") and hasattr(value, "local_shape")


def is_sharded_object(value: object) -> bool:
    """True for Megatron's `ShardedObject`."""
    return hasattr(value, "unique_key") and hasattr(value, "global_offset") and not hasattr(value, "local_shape")


def is_main_replica(shard: Any) -> bool:
    """True when this copy of a replicated shard is the one that is written (`replica_id` is 0, or all zeros)."""
    return is_main(shard.replica_id)


def is_main(replica_id: Any) -> bool:
    """The same of a `replica_id`."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return not any(replica_id)


def box_sizes(shard: Any) -> tuple[int, ...]:
    """Sizes of the box that a shard fills in its global tensor; raises `PlanError` for a slice of a flattened one."""
    if getattr(shard, "flattened_range", None) is not None:
        raise PlanError(
            f"{shard.key}: flattened_range={shard.flattened_range} is a stretch, and plain DCP plans boxes;"
            " save and load it with Megatron's dist_checkpointing after mcore_ckpt.install(), or choose an optimizer"
            " sharding type that keeps the model's shapes (fully_reshardable) or flat buckets (dp_reshardable)"
        )
    return local_box(shard)


def leaves(tree: object) -> Iterator[Any]:
    """Every sharded tensor and sharded object of a nested dict/list, in order."""
    found: list[Any] = []
    _collect([tree], found)
    return iter(found)


def _collect(values: Iterable[object], found: list[Any]) -> None:
    # A list and not a generator for each value: a state may have tens of thousands of them.
    for value in values:
        if type(value) in _LEAF_TYPES:
            found.append(value)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif (is_tensor := is_sharded_tensor(value)) or is_sharded_object(value):
            if is_dataclass(value):  # all of a type have the same fields
                _LEAF_TYPES[type(value)] = is_tensor
            found.append(value)


def leaves_by_kind(tree: object) -> tuple[list[Any], list[Any]]:
    """The sharded tensors, and the sharded objects, of a nested dict/list, each in order."""
    found = list(leaves(tree))
    kinds = [_LEAF_TYPES.get(type(leaf)) for leaf in found]
    are_tensors = [is_sharded_tensor(leaf) if kind is None else kind for leaf, kind in zip(found, kinds, strict=True)]
    return list(compress(found, are_tensors)), list(compress(found, map(operator.not_, are_tensors)))


def main_replicas(tree: object) -> tuple[list[Any], list[Any]]:
    """Sharded tensors and sharded objects of a nested dict/list that this rank writes (`is_main_replica`), in order."""
    tensors, objects = (
        [leaf for leaf in of_kind if (type(leaf.replica_id) is int and leaf.replica_id == 0) or is_main_replica(leaf)]
        for of_kind in leaves_by_kind(tree)
    )
    return tensors, objects


def replace_leaves(tree: Any, replacement: Callable[[Any], Any]) -> Any:
    """A copy of a nested dict/list in which each sharded leaf is what `replacement(leaf)` returns."""
    if isinstance(tree, dict):
        return {
            key: replacement(value) if type(value) in _LEAF_TYPES else replace_leaves(value, replacement)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [replace_leaves(value, replacement) for value in tree]
    if type(tree) in _LEAF_TYPES or is_sharded_tensor(tree) or is_sharded_object(tree):
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


class StoredForm(NamedTuple):
    """What a shard is in the checkpoint, in elements."""

    shape: tuple[int, ...]  # of the global tensor as stored
    offsets: tuple[int, ...]  # of the shard in it
    sizes: tuple[int, ...]  # of the shard in it
    # Of the global parameter, where the stored one is another; None where it is the same.
    original_shape: tuple[int, ...] | None = None


def stored_form(shard: Any) -> StoredForm:
    """How a `ShardedTensor` is stored; raises `PlanError` if its flattened box is not a cell of a regular grid."""
    if getattr(shard, "flattened_range", None) is None:
        return StoredForm(tuple(shard.global_shape), tuple(shard.global_offset), local_box(shard))
    cell = local_box(shard)
    if any(offset % size for offset, size in zip(shard.global_offset, cell, strict=True)):
        raise PlanError(
            f"{shard.key}: a flattened shard must lie on a grid of boxes {list(cell)}; its box starts at "
            f"{list(shard.global_offset)} of the global tensor {list(shard.global_shape)}"
        )
    start, stop = shard.flattened_range.start, shard.flattened_range.stop
    return StoredForm(
        (*shard.axis_fragmentations, math.prod(cell)),
        (*(offset // size for offset, size in zip(shard.global_offset, cell, strict=True)), start),
        (*(1 for _ in cell), stop - start),
        tuple(shard.global_shape),
    )


def noted_shapes(original_shapes: Iterable[Mapping[str, tuple[int, ...]]]) -> dict[str, dict[str, Any]]:
    """The notes for `.metadata`, from each rank's parameter shapes by key; raises `PlanError` if ranks disagree."""
    merged: dict[str, tuple[int, ...]] = {}
    for shapes in original_shapes:
        for key, shape in shapes.items():
            if merged.setdefault(key, shape) != shape:
                raise PlanError(f"{key}: global shape {list(shape)} on one rank, {list(merged[key])} on another")
    return {key: {_NOTE: shape} for key, shape in merged.items()}


def original_shape(index: CheckpointIndex, key: str) -> tuple[int, ...] | None:
    """Global shape of a parameter that is stored as flattened stretches; None if it is stored as it is."""
    shape = index.mcore_data.get(key, {}).get(_NOTE)
    return None if shape is None else tuple(shape)


def local_box(shard: Any) -> tuple[int, ...]:
    """Sizes of the box that a shard, or the parameter it is a stretch of, fills in its global tensor, in elements."""
    prepended: int = shard.prepend_axis_num
    return (1,) * prepended + tuple(shard.local_shape)
