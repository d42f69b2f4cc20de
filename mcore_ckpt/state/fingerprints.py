"""The fingerprint of the state that ranks hold: each rank sums up its main replicas, with names all its replicas, and
the coordinator puts them together. Of the tensors of plain DCP no rank by itself knows who else holds the same. A state
is plain DCP's if no rank holds anything sharded by Megatron.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.fingerprints import (
    DivergedReplica,
    StateFingerprint,
    TensorFingerprint,
    part_of,
    state_of,
)
from mcore_ckpt.core.ranks import coordination_group, without_modes
from mcore_ckpt.state.shards import LocalTensor, contents, is_main_replica, is_sharded_tensor, leaves, local_box
from mcore_ckpt.state.torch_classes import dtype_name

if TYPE_CHECKING:
    import torch.distributed as dist


def dcp_tensors(tree: Any) -> Iterator[LocalTensor]:
    """All slices in a nested dict/list; raises `PlanError` for what DCP cannot flatten."""
    try:
        flat, _ = flatten_state_dict(tree) if isinstance(tree, dict) else ({}, None)
    except ValueError as error:
        raise PlanError(f"the state dict has no keys as DCP makes them: {error}") from error
    for key, value in flat.items():
        for item in _create_write_items(key, value):
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                continue
            chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
            data = find_state_dict_object(flat, item.index)
            yield LocalTensor(key, data, shape, Box(tuple(chunk.offsets), tuple(chunk.sizes)))


@without_modes()
def fingerprint(
    sharded_state_dict: Any, process_group: dist.ProcessGroup | None = None, *, names: bool = False
) -> StateFingerprint:
    """The fingerprint of what the ranks hold now: the same under every parallel layout, and that of the checkpoint.

    All ranks of the group call it together. Objects have no part in it. A tensor that layouts pad otherwise (a
    vocabulary) is another tensor.

    Args:
        sharded_state_dict: nested dict/list with Megatron's sharded tensors, and factories of them, which are built.
            Without any of Megatron's on any rank, a state dict as plain DCP saves it: its tensors and DTensors (FSDP2)
            count, under the keys that DCP gives them. Which of several replicas DCP saves is settled when it saves; the
            one of the lowest rank counts. So where some have diverged, the checkpoint may have another fingerprint.
        process_group: the ranks that hold it together; None: all.
        names: also return the fingerprint of each tensor, on every rank, and compare replicas with those that count.
            All replicas are read then.

    Raises:
        PlanError: a shard has no data, ranks disagree on a tensor, or their main replicas do not make it up.
    """
    group = coordination_group(process_group)
    what = "take the fingerprint of the state"
    built: list[Any] = []

    def holds_megatrons() -> bool:
        built.append(_built(sharded_state_dict))
        return next(leaves(built[0]), None) is not None

    is_megatrons = group.run_merged(what, holds_megatrons, operator.or_, lambda found: found, wrap=PlanError)
    take = partial(parts_of, replicas=names) if is_megatrons else _dcp_parts
    gathered = group.gather(what, lambda: list(take(built[0])), wrap=PlanError)
    compared = group.run_on_coordinator(what, lambda: _compared(gathered or []), wrap=PlanError)
    return compared if names else StateFingerprint(compared.total)


class Part(NamedTuple):
    """One rank's replica of a slice of a tensor, or of a stretch of the flattened slice."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    stretch: tuple[int, int]  # in elements of the flattened slice
    crc: int  # what it adds to the tensor's CRC-32
    is_main: bool | None  # None: not known; one of those that hold this slice is

    @property
    def is_first(self) -> bool:
        """Whether the tensor's first element is among these, or would be."""
        start, stop = self.stretch
        return start == 0 and not any(self.box.offsets) and (stop > 0 or not math.prod(self.shape))


def parts_of(tree: Any, *, replicas: bool) -> Iterator[Part]:
    """The main replicas of Megatron's that this rank holds, or all replicas, summed up."""
    for shard in shards_of(tree):
        is_main = is_main_replica(shard)
        if is_main or replicas:
            yield part_of_shard(shard.key, shard, is_main)


def _dcp_parts(tree: Any) -> Iterator[Part]:
    """All that plain DCP would find on this rank."""
    for key, data, shape, box in dcp_tensors(tree):
        yield _part(key, data, shape, box, (0, math.prod(box.sizes)), None)


def shards_of(tree: Any) -> list[Any]:
    """The sharded tensors in a nested dict/list, those that factories make among them."""
    return [leaf for leaf in leaves(_built(tree)) if is_sharded_tensor(leaf)]


def is_factory(value: object) -> bool:
    """Whether this is Megatron's `ShardedTensorFactory`."""
    return hasattr(value, "build_fn") and hasattr(value, "build")


def _built(tree: Any) -> Any:
    """The same with what factories make in their place."""
    if is_factory(tree):
        return _built(tree.build())
    if isinstance(tree, dict):
        return {key: _built(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_built(value) for value in tree]
    return tree


def part_of_shard(key: str, shard: Any, is_main: bool) -> Part:
    """A replica, summed up. Raises `PlanError` as `fingerprint`."""
    data = shard.data
    if not isinstance(data, torch.Tensor):
        raise PlanError(f"{key}: the shard at {list(shard.global_offset)} has no data ({type(data).__name__})")
    shape, sizes = tuple(map(int, shard.global_shape)), local_box(shard)
    box, stretch = Box(tuple(map(int, shard.global_offset)), sizes), (0, math.prod(sizes))
    flattened = getattr(shard, "flattened_range", None)
    if flattened is not None:
        stretch = flattened.start, flattened.stop
    if data.numel() != stretch[1] - stretch[0]:
        raise PlanError(
            f"{key}: the shard at {list(box.offsets)} has data of shape {list(data.shape)}, expected "
            f"{stretch[1] - stretch[0]} elements of the slice of sizes {list(sizes)}"
        )
    return _part(key, data, shape, box, stretch, is_main)


def _part(
    key: str, data: torch.Tensor, shape: tuple[int, ...], box: Box, stretch: tuple[int, int], is_main: bool | None
) -> Part:
    elem_bytes, crc = data.element_size(), 0
    with torch.no_grad():
        for content, inside in contents(key, data, box.sizes, stretch):
            lies = Box(tuple(map(operator.add, box.offsets, inside.offsets)), inside.sizes)
            crc ^= part_of(content, shape, lies, elem_bytes)
    return Part(key, dtype_name(data.dtype), shape, box, stretch, crc, is_main)


def _compared(gathered: list[list[Part]]) -> StateFingerprint:
    """All ranks' parts put together."""
    mains: dict[str, list[tuple[int, Part]]] = {}
    slices: dict[tuple[str, Box, tuple[int, int]], list[tuple[int, Part]]] = {}
    for rank, parts in enumerate(gathered):
        for part in parts:
            known = slices.setdefault((part.key, part.box, part.stretch), [])
            known.append((rank, part))
            if part.is_main or (part.is_main is None and len(known) == 1):
                mains.setdefault(part.key, []).append((rank, part))
    tensors: dict[str, TensorFingerprint] = {}
    for key, of_key in mains.items():
        rank, first = of_key[0]
        crc = elements = 0
        for other, part in of_key:
            if (part.dtype, part.shape) != (first.dtype, first.shape):
                raise PlanError(
                    f"{key}: rank {rank} holds {first.dtype} of global shape {list(first.shape)}, rank {other} "
                    f"{part.dtype} of {list(part.shape)}"
                )
            crc ^= part.crc
            elements += part.stretch[1] - part.stretch[0]
        if elements != math.prod(first.shape):
            raise PlanError(
                f"{key}: ranks {sorted({rank for rank, _ in of_key})} hold main replicas of {elements} elements, "
                f"expected {math.prod(first.shape)} of the shape {list(first.shape)}"
            )
        tensors[key] = TensorFingerprint(first.dtype, first.shape, crc)
    return state_of(tensors, list(_diverged(slices)))


def _diverged(
    slices: dict[tuple[str, Box, tuple[int, int]], list[tuple[int, Part]]],
) -> Iterator[DivergedReplica]:
    for (key, box, _), of_slice in slices.items():
        main = next(((rank, part) for rank, part in of_slice if part.is_main), of_slice[0])
        others = tuple(rank for rank, part in of_slice if (part.crc, part.dtype) != (main[1].crc, main[1].dtype))
        if others:
            # What DCP finds on several ranks is saved by one that depends on planner and sizes.
            saved_by = None if main[1].is_main is None else main[0]
            yield DivergedReplica(key, *box, saved_by, others, main[0])
