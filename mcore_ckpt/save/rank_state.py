"""What one rank writes of a sharded state dict: its main replicas, described, checked, and its objects serialized.

All that can be wrong with one rank's state is found here, in one call, which a save makes where the other ranks hear of
its error: a rank that raised on its own would leave them waiting for it.
"""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any, NamedTuple

import torch

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.layout.buckets import PlacedObjects, RankLayout, TensorSpec
from mcore_ckpt.layout.shards import is_main_replica, is_sharded_tensor, leaves, stored_form
from mcore_ckpt.layout.torch_classes import dtype_name
from mcore_ckpt.writing.staging import BucketSource, check_memory, pointer_of

__all__ = ["RankState", "collect"]

# Of subclasses nobody knows what their storage holds.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class RankState(NamedTuple):
    """One rank's part of a save.

    Attributes:
        specs: its tensors, as the checkpoint will know them.
        tensors: the same, in the same order; detached, unless they are read by address.
        objects: key and serialized form of its objects; those that share a key are one list.
        pointers: where each tensor's bytes lie in order in host memory, as an address; 0 where they do not.
        shards: of each tensor's shard, what its specification follows from, and that: for the next save to compare.
    """

    specs: list[TensorSpec]
    tensors: list[torch.Tensor]
    objects: list[tuple[str, memoryview]]
    pointers: list[int]
    shards: list[tuple[tuple[Any, ...], TensorSpec]]

    @property
    def nbytes(self) -> int:
        """Size of all tensors and objects."""
        return sum(spec.nbytes for spec in self.specs) + sum(self.object_bytes)

    @property
    def object_keys(self) -> list[str]:
        """Keys of the objects."""
        return [key for key, _ in self.objects]

    @property
    def object_bytes(self) -> list[int]:
        """Sizes of the objects."""
        return [len(data) for _, data in self.objects]

    def sources(self, layout: RankLayout, placed: PlacedObjects, save_id: bytes) -> list[BucketSource]:
        """The bytes of each of the layout's files, for the save of that id."""
        return [
            BucketSource(
                bucket,
                [self.tensors[i] for i in members],
                [self.objects[i][1] for i in chosen],
                offsets,
                save_id,
                [self.pointers[i] for i in members],
            )
            for bucket, members, chosen, offsets in zip(
                layout.buckets, layout.members, placed.buckets, placed.offsets, strict=True
            )
        ]


def collect(sharded_state_dict: Any, known: list[tuple[tuple[Any, ...], TensorSpec]]) -> RankState:
    """What this rank writes of a nested dict/list of Megatron's sharded tensors and objects.

    Args:
        sharded_state_dict: what is to be saved.
        known: `shards` of the save before.

    Raises:
        PlanError: a shard has no data, or data that cannot be its: another number of elements, no memory of its own.
        Exception: whatever serializing an object raises.
    """
    specs: list[TensorSpec] = []
    tensors: list[torch.Tensor] = []
    objects: dict[str, list[Any]] = {}
    pointers: list[int] = []
    shards: list[tuple[tuple[Any, ...], TensorSpec]] = []
    before = iter(known)
    for leaf in leaves(sharded_state_dict):
        if not is_main_replica(leaf):
            continue
        if not is_sharded_tensor(leaf):
            objects.setdefault(leaf.unique_key, []).append(leaf.data)
            continue
        tensor = _own_data(leaf)
        seen = _described(leaf, tensor)
        shard = next(before, None)
        # What has not changed is kept as it is, so that nothing is made and thrown away for it.
        if shard is None or shard[0] != seen:
            shard = (seen, _specified(leaf, tensor))
        specs.append(shard[1])
        shards.append(shard)
        tensors.append(tensor)
        pointers.append(pointer_of(tensor))
    serialized = [(key, memoryview(serialize_objects(values).getvalue())) for key, values in objects.items()]
    return RankState(specs, tensors, serialized, pointers, shards)


def _where(shard: Any) -> str:
    return f"{shard.key} at offset {tuple(shard.global_offset)}"


def _own_data(shard: Any) -> torch.Tensor:
    """The data of a shard as they lie in memory, which is read by address: so it has to be there, all of it."""
    data = shard.data
    # Most are like this, and there may be tens of thousands; to detach one takes longer than all else here.
    if (
        type(data) in _PLAIN
        and data.is_cpu
        and data.layout is torch.strided
        and data.is_contiguous()
        and not data.is_neg()
        and not (data.dtype.is_complex and data.is_conj())
        and (data.storage_offset() + data.numel()) * data.itemsize <= data.untyped_storage().nbytes()
    ):
        plain: torch.Tensor = data
        return plain
    if data is None:
        raise PlanError(f"{_where(shard)}: the shard has no data to save")
    tensor: torch.Tensor = data.detach() if data.requires_grad else data
    if tensor.layout != torch.strided or tensor.is_meta:
        raise PlanError(
            f"{_where(shard)}: expected a dense tensor with data, got one of layout {tensor.layout} on {tensor.device};"
            " convert it before the save"
        )
    if type(data) in _PLAIN:
        check_memory(tensor, partial(_where, shard))
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _described(shard: Any, tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that the specification of a shard follows from, cheaply had and compared."""
    return (
        shard.key,
        tensor.dtype,
        tensor.shape,
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        tuple(shard.local_shape),
        shard.prepend_axis_num,
        shard.axis_fragmentations,
        getattr(shard, "flattened_range", None),
    )


def _specified(shard: Any, tensor: torch.Tensor) -> TensorSpec:
    form = stored_form(shard)
    if tensor.numel() != math.prod(form.sizes):
        raise PlanError(
            f"{_where(shard)}: expected {math.prod(form.sizes)} elements, as its sizes are {list(form.sizes)}, got data"
            f" of shape {list(tensor.shape)}; the data were replaced after the shard was described"
        )
    dtype = dtype_name(tensor.dtype)
    return TensorSpec(shard.key, dtype, form.shape, form.offsets, form.sizes, tensor.nbytes, form.original_shape)


def serialize_objects(values: list[Any]) -> io.BytesIO:
    """Serialize the objects that share one key: `torch.save` of their list, which is what Megatron's readers expect."""
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream
