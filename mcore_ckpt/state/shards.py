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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from mcore_ckpt.core.boxes import Box, flat_boxes
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.format.index import ORIGINAL_SHAPE
from mcore_ckpt.state.torch_classes import PLAIN, check_memory, is_dense, pointer_of

# Types met before, and whether each is a tensor's: looking at the attributes of each leaf takes longer than all
# else of a walk.
_LEAF_TYPES: dict[type, bool] = {}


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
    """Whether a `replica_id` is that of the main replica."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return not any(replica_id)


def record_members(leaf: Any) -> Mapping[str, bytes]:
    """What else the record of a sharded object has, by name, where it is stored."""
    found: Mapping[str, bytes] = getattr(leaf, "record_members", {})
    return found


def leaves(tree: object) -> Iterator[Any]:
    """Every sharded tensor and sharded object of a nested dict/list, in order, with what Megatron's factories build in
    their place.
    """
    found: list[Any] = []
    _collect([tree], found)
    return iter(found)


def _collect(values: Collection[object], found: list[Any]) -> None:
    # A list and not a generator for each value: a state may have tens of thousands of them.
    if _LEAF_TYPES.keys() >= set(map(type, values)):
        found.extend(values)
        return
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
        elif hasattr(value, "build_fn") and hasattr(value, "build"):  # Megatron's `ShardedTensorFactory`
            _collect([value.build()], found)


def leaves_by_kind(tree: object) -> tuple[list[Any], list[Any]]:
    """The sharded tensors, and the sharded objects, of a nested dict/list, each in order."""
    found: list[Any] = []
    _collect([tree], found)
    kinds = list(map(_LEAF_TYPES.get, map(type, found)))
    if None in kinds:
        kinds = [is_sharded_tensor(leaf) if kind is None else kind for leaf, kind in zip(found, kinds, strict=True)]
    return list(compress(found, kinds)), list(compress(found, map(operator.not_, kinds)))


def main_replicas(tree: object) -> tuple[list[Any], list[Any], list[Any]]:
    """Sharded tensors and sharded objects of a nested dict/list that this rank writes (`is_main_replica`), in order;
    and the objects that it does not write.
    """
    of_kinds = leaves_by_kind(tree)
    tensors, objects = (
        [leaf for leaf in of_kind if (type(leaf.replica_id) is int and leaf.replica_id == 0) or is_main_replica(leaf)]
        for of_kind in of_kinds
    )
    return tensors, objects, [leaf for leaf in of_kinds[1] if not is_main_replica(leaf)]


def filled(tree: Any, object_of: Callable[[Any], Any]) -> Any:
    """A copy of a nested dict/list with the data of each sharded tensor, and the object of each sharded object."""
    if isinstance(tree, dict):
        is_tensor = _LEAF_TYPES.get
        return {key: own.data if is_tensor(type(own)) else filled(own, object_of) for key, own in tree.items()}
    if isinstance(tree, list):
        return [filled(value, object_of) for value in tree]
    if is_sharded_tensor(tree):
        return tree.data
    return object_of(tree) if is_sharded_object(tree) else tree


class StoredForm(NamedTuple):
    """What a shard is in the checkpoint, in elements."""

    shape: tuple[int, ...]  # of the global tensor as stored
    offsets: tuple[int, ...]  # of the shard in it
    sizes: tuple[int, ...]  # of the shard in it
    # Shape of the global parameter, where the stored one is another; None where it is the same.
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
    return {key: {ORIGINAL_SHAPE: shape} for key, shape in merged.items()}


def local_box(shard: Any) -> tuple[int, ...]:
    """Sizes of the box that a shard, or the parameter it is a stretch of, fills in its global tensor, in elements."""
    prepended: int = shard.prepend_axis_num
    return (1,) * prepended + tuple(shard.local_shape)


# A plain tensor with these attributes stands for slices of a global one (`CheckpointableTensor` of torch from 2.15 on).
_LAYOUT = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def tells_its_slices(tensor: torch.Tensor) -> bool:
    """Whether a tensor itself says which slices of a global tensor it holds, as DTensors do."""
    return hasattr(tensor, "__create_chunk_list__") or _has_layout(tensor)


def _has_layout(tensor: torch.Tensor) -> bool:
    return all(hasattr(tensor, name) for name in _LAYOUT)


def carry_layout(source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The copy, which stands for the same slices of a global tensor as its source."""
    if _has_layout(source):
        vars(copied).update({name: getattr(source, name) for name in _LAYOUT})
    return copied


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that DCP saves a tensor under."""
    return tuple(tensor.global_shape if _has_layout(tensor) else tensor.size())  # type: ignore[attr-defined]


def local_chunks(tensor: torch.Tensor) -> Sequence[ChunkStorageMetadata]:
    """The slices of a global tensor that DCP takes a tensor for; there may be several, of other sizes than its own."""
    found: Sequence[ChunkStorageMetadata] = _create_chunk_list(tensor)
    return found


_WINDOW_BYTES = 32 * 1024 * 1024


def contents(
    key: str, data: torch.Tensor, sizes: tuple[int, ...], stretch: tuple[int, int]
) -> Iterator[tuple[Any, Box]]:
    """The bytes of a shard's elements, as slices of its own slice; what cannot be read where it lies in windows."""
    in_place = type(data) in PLAIN and bool(pointer_of(data)) and not data.is_conj() and not data.is_neg()
    if is_dense(data):
        check_memory(data, lambda: key)
    flat, (start, stop) = data.detach().reshape(-1), stretch
    if in_place:
        flat = flat.as_strided(flat.shape, (1,))  # one element is contiguous in any stride
    if in_place and stretch == (0, math.prod(sizes)):
        yield flat.view(torch.uint8).numpy(), Box((0,) * len(sizes), sizes)
        return
    step = max(1, stop - start if in_place else _WINDOW_BYTES // data.element_size())
    at = start
    for low in range(start, stop, step):
        for inside in flat_boxes(sizes, low, min(low + step, stop)):
            elements = flat[at - start : at - start + math.prod(inside.sizes)]
            if not in_place:
                elements = torch.empty(elements.shape, dtype=data.dtype, device="cpu").copy_(elements)
            yield elements.view(torch.uint8).numpy(), inside
            at += len(elements)
