"""The flat buckets of this job's distributed optimizers, in Megatron's `dp_reshardable`: what lies where in them.

A save of buckets stores a table of the slices of parameters with each group of ranks (`format/parameter_table.py`), by
which a later job finds them under any division of the model. At a load each rank asks for its own range of each
parameter, and gets it in the optimizer's own memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from mcore_ckpt.core.boxes import Box, flat_boxes, intersect, relative, strides_of
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.parameter_table import TABLE_HOLDER, TABLE_MEMBER, Form, Region, encode_parameters
from mcore_ckpt.load.requests import narrow
from mcore_ckpt.megatron.versions import mapping
from mcore_ckpt.state.shards import PLAIN, is_main, is_main_replica, leaves

_logger = logger_of("mcore_ckpt")

OWN_RANGES: Final = "mcore_ckpt_own_ranges"
"""Key in `param_state` of what `set_own_ranges` needs, where each rank asks for its own ranges."""
_strides_of_alike = functools.lru_cache(strides_of)  # many parameters have few shapes


class _Tabulated(NamedTuple):
    keys: list[str] | None  # of the model's entries: all that may change in a job of what the table follows from
    table: bytes | None


_tables: WeakKeyDictionary[Any, _Tabulated] = WeakKeyDictionary()
"""The table of each optimizer, as it was made last."""


# --- in the place of methods of Megatron's distributed optimizer (`install.py`) ---------------------------------------


def with_table(
    stock: Any, optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> Any:
    """`sharded_param_state_dp_reshardable`, which stores what lies where in the buckets."""
    state = stock(optimizer, model_sharded_state_dict, is_loading, metadata)
    holder = state[TABLE_HOLDER]
    holder.job_buckets = JobBuckets(optimizer, model_sharded_state_dict)
    if not is_loading and is_main_replica(holder) and (table := holder.job_buckets.table()) is not None:
        holder.record_members = {TABLE_MEMBER: table}
    return state


def asking_for_own_ranges(
    stock: Any, optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> Any:
    """`sharded_param_state_fully_reshardable`, which at a load asks for this rank's own ranges alone."""
    if is_loading:
        try:
            return JobBuckets(optimizer, model_sharded_state_dict).own_ranges()
        except PlanError as error:
            _logger.debug("each rank asks for the state of its whole model-parallel rank: %s", error)
    return stock(optimizer, model_sharded_state_dict, is_loading, metadata)


def setting_own_ranges(stock: Any, optimizer: Any, state_dict: Any) -> None:
    """`load_parameter_state_from_fully_reshardable`, of what the function above has asked for: the optimizer takes its
    states, in whose memory most of them are already.
    """
    if OWN_RANGES not in state_dict:
        stock(optimizer, state_dict)
        return
    with torch.no_grad():
        for number, (parameter, states, parts) in enumerate(state_dict[OWN_RANGES]):
            for state, of_state in parts.items():
                for n, part in enumerate(of_state):
                    found = state_dict[number][state][n]
                    if found.data_ptr() != part.data_ptr():  # as a fully parallel load hands it over
                        part.copy_(found.view(part.shape))
            optimizer._set_main_param_and_optimizer_states(parameter, states)  # noqa: SLF001
        # An offloaded optimizer has copies.
        if (sync := getattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers", None)) is not None:
            sync()


class _OwnParameter(NamedTuple):
    """A parameter of which this rank's optimizer has a range: its states, and what is loaded into each, in order."""

    parameter: Any
    states: dict[str, Any]
    parts: dict[str, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class JobBuckets:
    """The flat buckets of one optimizer, and the sharded state dict of its model."""

    optimizer: Any
    model: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a state dict that is sent to other ranks takes no optimizer along

    def __deepcopy__(self, _: Any) -> JobBuckets:
        return self

    @collector_paused()
    def table(self) -> bytes | None:
        """Which elements are which parameters', made again if the model has other keys; None, warned of: unknown."""
        known = _tables.get(self.optimizer)
        keys: list[str] | None = None
        try:
            found = self._sharded()
            if known is not None and known.keys == [entry.key for entry in found]:
                return known.table
            entries = self._entries(found)
            keys = [entry.key for entry in found]
            table = encode_parameters(self._buckets(), list(self._regions(entries)))
        except Exception as error:  # noqa: BLE001 (a save never fails for it)
            table = None
            if known is None or known.table is not None:
                _logger.warning(
                    "the optimizer's flat buckets (dp_reshardable) are without a table of their parameters, so a "
                    "checkpoint of them loads under the same division of the model alone: %s",
                    error,
                )
        _tables[self.optimizer] = _Tabulated(keys, table)
        return table

    def own_ranges(self) -> dict[Any, Any]:
        """What `fully_reshardable` asks for, but of each parameter the range alone that this rank's optimizer has, in
        its memory. `PlanError`: a parameter is not made of slices that could be asked for.
        """
        of_model = self._entries(self._sharded())
        entries = {id(row[2]): entry for row, entry in zip(self._parameters(), of_model, strict=True)}
        instance = getattr(self.optimizer, "distributed_optimizer_instance_id", 0)
        state: dict[Any, Any] = {}
        own: list[_OwnParameter] = []
        for ranges in self.optimizer.gbuf_ranges:
            for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
                for parameter, held in bucket["param_map"].items():
                    start, stop = held["param"].start, held["param"].end
                    states = self.optimizer._get_main_param_and_optimizer_states(parameter)  # noqa: SLF001
                    # The master of a 32-bit weight is the weight itself, which is loaded, too.
                    if _in_one_memory(states["param"], parameter):
                        states = {**states, "param": states["param"].clone()}
                    entry, shape = entries[id(parameter)], tuple(parameter.shape)
                    found = _OwnParameter(parameter, states, {})
                    asked: dict[str, dict[int, Any]] = {}
                    slices = list(_slices_of_range(entry, shape, start, stop))
                    for name, values in states.items():
                        if not isinstance(values, torch.Tensor) or values.numel() != stop - start or name == "step":
                            continue
                        shards = [_shard_of(name, one, values.detach().view(-1), instance) for one in slices]
                        asked[name], found.parts[name] = dict(enumerate(shards)), [shard.data for shard in shards]
                    state[len(own)] = asked
                    own.append(found)
        return {**state, OWN_RANGES: mapping().LocalNonpersistentObject(own)}

    def _parameters(self) -> Iterator[tuple[int, int, Any, int, int]]:
        """Number of the buffer and of the bucket, parameter, and its first and last element in the bucket."""
        for number, buffer in enumerate(self.optimizer.buffers):
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                begin = buffer.buckets[bucket].offset
                yield number, bucket, parameter, start - begin, end - begin

    def _sharded(self) -> list[Any]:
        """Entries of the model's sharded state dict that are tensors."""
        kinds = mapping()
        found: list[Any] = []
        _collect(self.model.values(), (kinds.ShardedTensor, kinds.ShardedTensorFactory), found)
        return found

    def _entries(self, found: Sequence[Any]) -> list[Any]:
        """Entries of the parameters, in order."""
        of_data = dict(zip(map(id, [entry.data for entry in found]), found, strict=True))
        parameters = [one for buffer in self.optimizer.buffers for one in buffer.param_index_map]
        entries = list(map(of_data.get, map(id, parameters)))
        if type(None) in set(map(type, entries)):
            shape = list(next(one.shape for one, entry in zip(parameters, entries, strict=True) if entry is None))
            raise PlanError(
                f"the model's sharded state dict has no entry for a parameter of shape {shape}; was it made with "
                "keep_vars=False, or a part of the model left out?"
            )
        return entries

    def _buckets(self) -> list[tuple[str, int]]:
        return [
            (f"gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{bucket}", buffer.buckets[bucket].numel_unpadded)
            for number, (buffer, ranges) in enumerate(
                zip(self.optimizer.buffers, self.optimizer.gbuf_ranges, strict=True)
            )
            for dtype in ranges
            for bucket in range(len(buffer.buckets))
        ]

    def _regions(self, entries: Iterable[Any]) -> Iterator[Region]:
        begins = [0]
        for buffer in self.optimizer.buffers:
            begins.append(begins[-1] + len(buffer.buckets))
        for entry, (buffer, bucket, parameter, first, end) in zip(entries, self._parameters(), strict=True):
            if end - first != parameter.numel():
                raise PlanError(f"{entry.key}: {parameter.numel()} elements are in {end - first} of a bucket")
            for leaf, begin, strides in _leaves(entry, tuple(parameter.shape)):
                prepended, shape = leaf.prepend_axis_num, tuple(leaf.global_shape)
                form = Form(shape, (1,) * prepended + tuple(leaf.local_shape), (0,) * prepended + strides)
                if 0 not in form.sizes:
                    is_copy, offsets = not is_main(leaf.replica_id), tuple(leaf.global_offset)
                    yield Region(begins[buffer] + bucket, leaf.key, form, offsets, first + begin, is_copy)


def _in_one_memory(master: torch.Tensor, weight: torch.Tensor) -> bool:
    # Weights of other classes may have no storage, as 8-bit ones.
    return type(weight) in PLAIN and master.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def _collect(values: Iterable[Any], kinds: tuple[type, ...], found: list[Any]) -> None:
    for value in values:
        if type(value) in kinds:
            found.append(value)
        elif isinstance(value, dict):
            _collect(value.values(), kinds, found)
        elif isinstance(value, (list, tuple)):
            _collect(value, kinds, found)


def _leaves(entry: Any, shape: tuple[int, ...]) -> list[tuple[Any, int, tuple[int, ...]]]:
    """The stored slice of a parameter, its first element there, and its strides. A factory builds on a tensor without
    memory, of which the slices are views; one that copies builds on the numbers of the elements.
    """
    if hasattr(entry, "local_shape"):
        return [(entry, 0, _strides_of_alike(tuple(entry.local_shape)))]
    base = torch.empty(shape, device="meta")
    found = list(leaves(replace(entry, data=base).build()))
    if all(leaf.data is base or leaf.data._base is base for leaf in found):  # noqa: SLF001
        made = [(leaf, leaf.data.storage_offset(), tuple(leaf.data.stride())) for leaf in found]
    else:
        numbers = torch.arange(base.numel()).view(shape)
        made = [_leaf_of_numbers(leaf) for leaf in leaves(replace(entry, data=numbers).build())]
    if sum(leaf.data.numel() for leaf, *_ in made) != base.numel():
        raise PlanError(f"{entry.key}: its factory makes other elements of it than it has")
    return made


def _leaf_of_numbers(leaf: Any) -> tuple[Any, int, tuple[int, ...]]:
    numbers = leaf.data
    shape = tuple(numbers.shape)
    if 0 in shape:
        return leaf, 0, strides_of(shape)
    expected = first = numbers[(0,) * len(shape)]
    axes = range(len(shape))
    strides = [numbers[tuple(int(one == axis and shape[axis] > 1) for one in axes)] - first for axis in axes]
    for size, stride in zip(shape, strides, strict=True):
        expected = expected[..., None] + stride * torch.arange(size)
    if not torch.equal(numbers, expected):
        raise PlanError(f"{leaf.key}: its factory changes elements, or their order")
    return leaf, int(first), tuple(map(int, strides))


class _OwnSlice(NamedTuple):
    """A slice of what is stored of a parameter, in a range of the flattened parameter."""

    leaf: Any
    offsets: tuple[int, ...]  # in the stored tensor, without prepended axes
    first: int  # of the block that it lies in, in elements of the range
    block: Box  # of the flattened parameter
    inside: Box  # of the block


def _slices_of_range(entry: Any, shape: tuple[int, ...], start: int, stop: int) -> Iterator[_OwnSlice]:
    strides = strides_of(shape)
    of_entry = []
    for leaf, first, leaf_strides in _leaves(entry, shape):
        if len(leaf_strides) != len(strides) or any(
            size > 1 and own != whole for size, own, whole in zip(leaf.local_shape, leaf_strides, strides, strict=True)
        ):
            raise PlanError(f"{leaf.key}: its factory reshapes the parameter")
        offsets = []
        for stride in strides:
            offsets.append(first // stride)
            first %= stride
        of_entry.append((leaf, Box(tuple(offsets), tuple(leaf.local_shape))))
    first = 0
    for block in flat_boxes(shape, start, stop):
        for leaf, box in of_entry:
            share = intersect(block, box)
            if share is not None:
                stored = leaf.global_offset[leaf.prepend_axis_num :]
                offsets_there = tuple(map(operator.add, stored, relative(share, box.offsets).offsets))
                yield _OwnSlice(leaf, offsets_there, first, block, relative(share, block.offsets))
        first += math.prod(block.sizes)


def _shard_of(state: str, own: _OwnSlice, values: torch.Tensor, instance: int) -> Any:
    leaf, prepended = own.leaf, own.leaf.prepend_axis_num
    block = values[own.first : own.first + math.prod(own.block.sizes)].view(own.block.sizes)
    part = narrow(block, own.inside)
    replica = leaf.replica_id
    return mapping().ShardedTensor(
        key=f"optimizer.state.{state}.{leaf.key}",
        data=part,
        dtype=part.dtype,
        local_shape=tuple(part.shape),
        global_shape=tuple(leaf.global_shape),
        global_offset=(*leaf.global_offset[:prepended], *own.offsets),
        axis_fragmentations=None,
        # (the last is that of the data-parallel rank, and each has another range)
        replica_id=instance if isinstance(replica, int) else (*replica[:-1], instance),
        prepend_axis_num=prepended,
        allow_shape_mismatch=leaf.allow_shape_mismatch,
    )
