"""Megatron's sharded leaves, and how they are stored; recognised by their attributes, so megatron is not imported.

A *shard* (Megatron's `ShardedTensor`) is what one rank holds of a global tensor, a *sharded object* part of an object.

A shard is a box of its global tensor and is stored as such, but for stretches of flattened tensors, which is how
Megatron-Core 0.12 to 0.15 kept optimizer state: a rank owns elements `[start, stop)` (`flattened_range`) of a box of
the global parameter, flattened. That is stored under another shape (Megatron's own form, which stock readers expect):

    parameter   global [X, Y], local [x, y]                          elements
    stored      [X / x, Y / y, x * y]                                grid of local boxes, each flattened
    one shard   offsets [i, j, start], sizes [1, 1, stop - start]

and `.metadata` notes the parameter's own global shape in `mcore_data`.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from mcore_ckpt.core.boxes import Box, flat_boxes
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.format.index import ORIGINAL_SHAPE

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dense(value: Any) -> bool:
    """Whether this is a plain tensor whose elements all lie in memory."""
    return type(value) in PLAIN and value.layout is torch.strided and not value.is_meta


def pointer_of(tensor: torch.Tensor) -> int:
    """Where a tensor's bytes lie in order in host memory; 0 if they cannot be copied from where they are."""
    return tensor.data_ptr() if tensor.is_cpu and tensor.is_contiguous() else 0


def memory_at(address: int, length: int) -> memoryview:
    """Writable bytes `[address, address + length)` of this process; their owner has to stay alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def check_memory(tensor: torch.Tensor, where: Callable[[], str]) -> None:
    """Raise `PlanError` unless all of a dense tensor's memory is there, since it is read by address.

    A storage can be cut under its tensors (`untyped_storage().resize_`), which is how some libraries offload. Meta and
    fake tensors have none, nor have those that hold others. `where` tells key and offset.
    """
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        raise PlanError(
            f"{where()}: the tensor ({type(tensor).__name__}) is on the meta device and has no elements to save; put it"
            " on a device and give it values before the save"
        )
    if type(tensor) not in PLAIN and tensor.numel() and not tensor.data_ptr():
        parts = getattr(tensor, "__tensor_flatten__", lambda: ((), None))()[0]
        raise PlanError(
            f"{where()}: a tensor of class {type(tensor).__module__}.{type(tensor).__qualname__} holds other tensors"
            f" ({', '.join(parts)}) and has no elements of its own, by which a checkpoint is loaded under any layout;"
            " save it as a plain tensor (`dequantize()`), or save what it holds under keys of their own"
        )
    held_bytes = storage.nbytes()
    last = tensor.storage_offset() + tensor.numel() - 1
    if not tensor.is_contiguous():
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if (last + 1) * tensor.itemsize > held_bytes and tensor.numel():
        raise PlanError(
            f"{where()}: the tensor's memory was given back ({held_bytes} bytes are left of"
            f" {(last + 1) * tensor.itemsize}); bring it back, from where it was offloaded to, before the save"
        )


@lru_cache(maxsize=256)
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without `torch.`, as stored in the index."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=256)
def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name, or None if this torch does not have it."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


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


def leaves(tree: object) -> Iterator[Any]:
    """Every sharded tensor and object of a nested dict/list, in order, with what Megatron's factories build."""
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
    """Sharded tensors and objects of a nested dict/list that this rank writes, in order; and its other objects."""
    of_kinds = leaves_by_kind(tree)
    tensors, objects = (
        [
            leaf
            for leaf in of_kind
            if (type(leaf.replica_id) is int and leaf.replica_id == 0) or is_main(leaf.replica_id)
        ]
        for of_kind in of_kinds
    )
    return tensors, objects, [leaf for leaf in of_kinds[1] if not is_main(leaf.replica_id)]


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
    if in_place and stretch == (0, math.prod(sizes)):
        yield memory_at(pointer_of(data), data.nbytes), Box((0,) * len(sizes), sizes)
        return
    flat, (start, stop) = data.detach().reshape(-1), stretch
    if in_place:
        flat = flat.as_strided(flat.shape, (1,))  # one element is contiguous in any stride
    step = max(1, stop - start if in_place else _WINDOW_BYTES // data.element_size())
    at = start
    for low in range(start, stop, step):
        for inside in flat_boxes(sizes, low, min(low + step, stop)):
            elements = flat[at - start : at - start + math.prod(inside.sizes)]
            if not in_place:
                elements = torch.empty(elements.shape, dtype=data.dtype, device="cpu").copy_(elements)
            yield elements.view(torch.uint8).numpy(), inside
            at += len(elements)
