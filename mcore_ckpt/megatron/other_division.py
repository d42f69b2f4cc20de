"""A load of flat buckets (`dp_reshardable`) by a job that divides its model otherwise than the one that saved them.

Whether it does, the tables of parameters tell (`format/parameter_table.py`): those of the job's own buckets are
compared with the stored ones. If all are the same, nothing is changed. Otherwise each rank asks for its own ranges of
the parameters in the place of its buckets, and Megatron gets the common state of a `fully_reshardable` checkpoint.

Megatron-LM's `load_checkpoint` refuses flat buckets under another TP and PP before it asks for anything. It reads the
common state for that: one that says `fully_reshardable` is handed to it, and it asks in that layout.

The state of single parameters is read from the flat buckets by the tables that were saved with them (`BucketReads`):

    tables of all groups  ->  where each slice of a parameter lies  ->  covering reads  ->  strided copies

A requested slice of `optimizer.state.<state>.<parameter>` is intersected with the stored ones. Its intersection with
one of them is a strided slice of a bucket, read in runs of at most 16 MiB, gaps included where its own runs are short;
dense ones go to their destination, others through at most 64 MiB of staging buffers.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, covers, intersect, relative, strides_of
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, MissingKeyError, PlanError, ShapeMismatchError
from mcore_ckpt.core.ranks import RankGroup, own_rank
from mcore_ckpt.directory.in_force import iteration_of
from mcore_ckpt.format.index import CheckpointIndex, ChunkLookup, is_flat_bucket
from mcore_ckpt.format.parameter_table import (
    GROUP_OBJECT,
    SIZES_OF_BUCKETS,
    STATE_KEY,
    TABLE_HOLDER,
    TABLE_MEMBER,
    ParameterTable,
    extent_of,
    flat_buckets,
    stored_tables,
    table_holders,
)
from mcore_ckpt.format.zip_records import member_of
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.load.requests import ReadRequest, narrow
from mcore_ckpt.megatron.calls import MegatronLoad, opened_reader
from mcore_ckpt.megatron.flat_buckets import OWN_RANGES, JobBuckets
from mcore_ckpt.megatron.versions import parallel_sizes, parameter_group_identifiers
from mcore_ckpt.state.shards import is_main_replica, is_sharded_object, leaves_by_kind, local_box

_logger = logger_of("mcore_ckpt")

FLAT_BUCKETS: Final = "dp_reshardable"
_HANDED_OUT: Final = "fully_reshardable"
SHARDING_TYPE: Final = "distrib_optim_sharding_type"


def _parts(state: Any) -> dict[int | None, dict[Any, Any]]:
    """What each of the chained optimizers asks for, by its number; None for the only one. Others are left out."""
    optimizer = state.get("optimizer") if isinstance(state, dict) else None
    if not isinstance(optimizer, dict):
        return {}
    numbered = {None: optimizer} if "param_state" in optimizer else optimizer
    return {number: part for number, part in numbered.items() if isinstance(part, dict) and "param_state" in part}


def _job_buckets(part: Mapping[Any, Any]) -> JobBuckets | None:
    holder = part["param_state"].get(TABLE_HOLDER) if isinstance(part["param_state"], dict) else None
    return getattr(holder, "job_buckets", None)


def has_flat_state(state: Any) -> bool:
    """Whether a sharded state dict asks for what may be stored as flat buckets."""
    return any(
        _job_buckets(part) is not None or OWN_RANGES in (part["param_state"] or ()) for part in _parts(state).values()
    )


class _Compared(NamedTuple):
    """Comparison by one rank or several: whether buckets differ from the stored ones, and the job's groups of ranks."""

    differs: bool
    groups: frozenset[str] = frozenset()

    def merged(self, other: _Compared) -> _Compared:
        """Both in one."""
        return _Compared(self.differs or other.differs, self.groups | other.groups)


def under_this_division(state: Any, call: MegatronLoad) -> Any:
    """Within a load of all ranks, the sharded state dict as it is asked for of that checkpoint. What is damaged of a
    table is raised on all of them, before anything is filled.
    """
    group = call.group or RankGroup(None)

    def compare() -> _Compared:
        call.reader = opened_reader(call.directory, call.options)
        return _compared(call.reader, state, is_alone=call.group is None)

    def conclude(found: _Compared) -> bool:
        assert call.reader is not None
        stored = frozenset(flat_buckets(call.reader.index))
        return found.differs or (call.group is not None and found.groups not in (frozenset(), stored))

    what = "compare the optimizer's flat buckets"
    if not group.run_merged(what, compare, _Compared.merged, conclude, wrap=LoadError):
        return state
    return group.each(
        "find parameters in the optimizer's flat buckets", partial(_asked_for, state, call), wrap=LoadError
    )


def _compared(reader: CheckpointReader, state: Any, *, is_alone: bool) -> _Compared:
    stored, holders = flat_buckets(reader.index), table_holders(reader.index)
    groups = set()
    for part in _parts(state).values() if stored else ():
        job = _job_buckets(part)
        if job is None:
            return _Compared(OWN_RANGES in (part["param_state"] or ()))
        holder = part["param_state"][TABLE_HOLDER]
        if not (is_alone or is_main_replica(holder)):
            continue
        group = holder.unique_key.removesuffix(f"{TABLE_HOLDER}/shard_0_1")
        groups.add(group)
        if (own := job.table()) is None:
            continue
        nearest = group if group in holders else min(holders, default="")
        record = reader.object_bytes(holders[nearest]) if nearest else b""
        if (content := member_of(record, TABLE_MEMBER)) is None:  # of an older version, or of other programs
            if advice := advice_on_other_buckets(reader, leaves_by_kind(part["param_state"])[0]):
                raise MissingKeyError(f"{reader.path}: other buckets of {group} are stored than this job has{advice}")
            continue
        if group != nearest:
            return _Compared(True)
        if content != own:
            where = f"{reader.path}: the table of parameters of {group}"
            table = ParameterTable(content, where, group, stored.get(group, {}))
            if not table.is_as(ParameterTable(own, "the job's own table")):
                return _Compared(True)
    return _Compared(False, frozenset(groups))


def with_own_ranges(state: Any) -> Any:
    """A state dict with this rank's ranges of parameters for its flat buckets, and settings that are not sharded."""
    parts = _parts(state)
    changed: dict[int | None, Any] = {}
    for number, part in parts.items():
        changed[number] = part
        if (job := _job_buckets(part)) is not None:
            settings = {name: value.data if is_sharded_object(value) else value for name, value in part.items()}
            changed[number] = {**settings, "param_state": job.own_ranges(), "param_state_sharding_type": _HANDED_OUT}
    return {**state, "optimizer": changed.get(None, {**state["optimizer"], **changed})} if parts else state


def _asked_for(state: Any, call: MegatronLoad) -> Any:
    reader = call.reader
    assert reader is not None
    try:
        changed = with_own_ranges(state)
    except PlanError as error:
        error.args = (f"{error}. Another layout than that of the save takes a conversion: {_conversion(reader.path)}",)
        raise
    parts = _parts(changed)
    shards = leaves_by_kind([part["param_state"] for part in parts.values()])[0]
    found = [STATE_KEY.fullmatch(shard.key) for shard in shards]
    try:
        buckets = BucketReads(reader, {match["key"] for match in found if match is not None})
    except MissingKeyError as error:
        error.args = (f"{error}{_advice_on_layout(reader.path)}",)
        raise
    buckets.check(shards)
    wanted = {number: (part.get("optimizer") or {}).get("param_groups", ()) for number, part in parts.items()}
    others = changed["optimizer"].keys() - wanted.keys() if None not in wanted else ()
    call.buckets = buckets
    call.change_common = partial(_handed_out, reader=reader, wanted=wanted, others=frozenset(others))
    return changed


def advice_on_other_buckets(reader: CheckpointReader, shards: Iterable[Any]) -> str:
    """How a load goes on that requests other flat buckets than are stored; nothing, if it does not."""
    stored = reader.index.tensors
    asked = [shard for shard in shards if is_flat_bucket(shard.key) or STATE_KEY.fullmatch(shard.key)]
    requested = {shard.key: tuple(shard.global_shape) for shard in asked}
    missing = [key for key, shape in requested.items() if key not in stored or stored[key].shape != shape]
    if not missing or reader.parameters is not None or not any(map(is_flat_bucket, stored)):
        return ""
    if any(member_of(reader.object_bytes(key), TABLE_MEMBER) for key in table_holders(reader.index).values()):
        return (
            ". The optimizer's state is flat buckets (dp_reshardable) of another layout. Their tables serve a state "
            "dict that has the optimizer under 'optimizer', the model's own parameters (keep_vars), and no grouped "
            f"experts, whose weights are reshaped. Or convert it, for any layout: {_conversion(reader.path)}"
        )
    return advice_on_states(missing, reader.index) or _advice_on_layout(reader.path)


def _advice_on_layout(checkpoint: Path) -> str:
    """How flat buckets without tables are loaded under another layout than that of the save."""
    return (
        ". The optimizer's state is flat buckets (dp_reshardable) of the TP, PP and EP that saved it, without tables "
        "of their parameters, which a save by this package adds: save it again so under that layout. Or convert it, "
        f"for any layout: {_conversion(checkpoint)}"
    )


def _conversion(checkpoint: Path) -> str:
    step, layout = iteration_of(checkpoint.name), _HANDED_OUT
    run = str(checkpoint if step is None else checkpoint.parent)
    name, chosen = ("", "") if step is None else (f"/iter_{step:07d}", f" --ckpt-step {step}")
    words = shlex.join(["mcore-ckpt", "reshard", run + name, f"{run}-{layout}{name}", "--optimizer-layout", layout])
    return f"{words}; then --load {shlex.quote(f'{run}-{layout}')}{chosen}"


# --- the common state


def declared_reshardable(common: Any, directory: Path) -> Any:
    """The common state of a checkpoint for Megatron-LM, which refuses flat buckets under another TP and PP: one that
    says `fully_reshardable`, if these differ and there are tables; else as it is.
    """
    content = common.get("content_metadata") if isinstance(common, dict) else None
    if not isinstance(content, dict) or content.get(SHARDING_TYPE) != FLAT_BUCKETS:
        return common
    saved = [getattr(common.get("args"), f"{name}_model_parallel_size", None) for name in ("tensor", "pipeline")]
    if parallel_sizes() in (None, tuple(saved)):
        return common
    reader = CheckpointReader(directory)
    holders = table_holders(reader.index).values()
    is_removed = reader.index.removed is not None  # which the load says, if it is asked for
    if not any(map(is_flat_bucket, reader.index.tensors)) and not is_removed:  # an optimizer of another kind
        return common
    if not is_removed and not any(member_of(reader.object_bytes(key), TABLE_MEMBER) for key in sorted(holders)[:1]):
        if own_rank() == 0:  # what Megatron-LM raises names an option that does not help
            _logger.warning("%s was saved under another TP or PP%s", directory, _advice_on_layout(directory))
        return common
    return {**common, "content_metadata": _reshardable(content)}


def _reshardable(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, SHARDING_TYPE: _HANDED_OUT, "distrib_optim_fully_reshardable_mem_efficient": False}


def _handed_out(
    common: Any,
    *,
    reader: CheckpointReader,
    wanted: Mapping[int | None, Sequence[Mapping[str, Any]]],
    others: Collection[Any],
) -> Any:
    """The common state as of a `fully_reshardable` checkpoint of a job with these optimizers: with the parameter groups
    of each, as stored with its buckets. Optimizers without flat buckets keep what is stored of them.
    """
    if not isinstance(common, dict):
        return common
    objects = {key: match for key in reader.index.objects if (match := GROUP_OBJECT.fullmatch(key)) is not None}
    settings = {key: match for key, match in objects.items() if match["name"] not in SIZES_OF_BUCKETS}
    stored: dict[str, dict[str, dict[str, Any]]] = {}  # of each optimizer, what each group of ranks has of it
    for key, value in reader.read_objects(settings).items():
        match = settings[key]
        of_group = stored.setdefault(match["chained"] or "", {}).setdefault(match["group"], {})
        of_group[match["name"]] = value[0] if isinstance(value, list) else value
    parts = [[*of_groups.values()] for _, of_groups in sorted(stored.items())]
    as_stored = common.get("optimizer")
    kept = as_stored if isinstance(as_stored, dict) else {}
    made: dict[Any, Any] = {number: kept[number] for number in others if number in kept}
    for position, (number, groups) in enumerate(wanted.items()):
        own = parts[min(position, len(parts) - 1)]
        part = copy.deepcopy(own[0])
        if isinstance(part.get("optimizer"), dict):
            described = own if len(parts) == len(wanted) else itertools.chain.from_iterable(parts)
            of_all = itertools.chain.from_iterable(wanted.values())
            part["optimizer"]["param_groups"] = _parameter_groups(described, groups, of_all)
        made[number] = {**part, "param_state_sharding_type": _HANDED_OUT}
    content = common.get("content_metadata") or {}
    return {**common, "optimizer": made.get(None, made), "content_metadata": _reshardable(content)}


def _parameter_groups(
    stored: Iterable[Mapping[str, Any]], wanted: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer, each once, by what Megatron knows them by: the stored ones, but not those that
    only its others want. Which are of experts depends on EP: one that differs in this alone stands for a wanted one.
    """
    known_by = parameter_group_identifiers()

    def name(settings: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(repr(settings.get(key, settings.get(f"pre_{key}"))) for key in known_by)

    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for of_group in stored:
        for settings in (of_group.get("optimizer") or {}).get("param_groups", ()):
            found.setdefault(name(settings), settings)
    known = {name({**settings, "is_expert_parallel": either}) for settings in others for either in (False, True)}
    exact = {name(settings): settings for settings in wanted}
    made = [settings for one, settings in found.items() if one in exact or one not in known]
    for one, settings in exact.items():
        is_expert = settings.get("is_expert_parallel")
        other = found.get(name({**settings, "is_expert_parallel": not is_expert}))
        if one not in found and other is not None:
            made.append({**other, "is_expert_parallel": is_expert})
    return copy.deepcopy(made)


# --- parameters in flat buckets

_READ_BYTES: Final = 16 * 1024 * 1024
_STAGED_BYTES: Final = 64 * 1024 * 1024
# Runs that are shorter are read with what lies between them.
_RUN_ELEMS: Final = 16 * 1024
_MAIN_PARAMETER: Final = "param"
_FROZEN_OR_NEW: Final = "it was frozen in the job that saved them, or is new in this one"


class _Part(NamedTuple):
    """A stored slice of a parameter."""

    slice: Box  # of the parameter
    bucket: str  # key without the state
    first: int  # element of the bucket
    strides: tuple[int, ...]  # in it


@dataclass(slots=True)
class _Parameter:
    shape: tuple[int, ...]
    parts: list[_Part] = field(default_factory=list)
    lookup: ChunkLookup | None = None

    def overlapping(self, box: Box) -> list[_Part]:
        """Parts that may overlap a slice."""
        slices = [part.slice for part in self.parts] if self.lookup is None else []
        self.lookup = self.lookup or ChunkLookup([box.offsets for box in slices], [box.sizes for box in slices])
        return [self.parts[number] for number in self.lookup.near(box)]


class _Read(NamedTuple):
    """A run of a bucket, and what of it goes where."""

    key: str
    first: int
    elems: int
    strides: tuple[int, ...]
    target: torch.Tensor

    @property
    def is_dense(self) -> bool:
        """Whether the run is what goes there, in its order."""
        sizes = tuple(self.target.shape)
        in_order = zip(sizes, self.strides, strides_of(sizes), strict=True)
        is_run = all(size == 1 or stride == dense for size, stride, dense in in_order)
        return is_run and self.target.is_contiguous()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging buffer that it needs."""
        return 0 if self.is_dense else self.elems * self.target.element_size()


def advice_on_states(missing: Collection[str], index: CheckpointIndex) -> str:
    """Why a checkpoint has weights in flat buckets, but none of these states next to them; or nothing."""
    weights = {f"{key.rpartition('.')[0]}.{_MAIN_PARAMETER}" for key in missing}
    if not index.tensors.keys().isdisjoint(missing) or not weights <= index.tensors.keys():
        return ""
    return (
        ". The job that saved it had taken no step of its optimizer, which had no such state (with fp16, the loss "
        "scaler skips the first steps): load another iteration, or add --no-load-optim"
    )


class BucketReads:
    """Parameters with these keys whose optimizer state is flat buckets, for loads under any division of the model.
    `CorruptCheckpointError`: tables are damaged or contradict each other; `MissingKeyError`: a bucket has none.
    """

    def __init__(self, reader: CheckpointReader, keys: Collection[str]) -> None:
        self._index = reader.index
        self._parameters: dict[str, _Parameter] = {}
        requested = dict.fromkeys(keys)
        for table in stored_tables(reader.index, reader.object_bytes):
            for region in table.regions(requested):
                known = self._parameters.setdefault(region.key, _Parameter(region.form.shape))
                if known.shape != region.form.shape:
                    raise CorruptCheckpointError(
                        f"{reader.path}: {region.key} has the shape {list(known.shape)} in one table of parameters, "
                        f"{list(region.form.shape)} in that of {table.buckets[region.bucket]}"
                    )
                if not region.is_copy:
                    bucket = table.buckets[region.bucket]
                    known.parts.append(_Part(region.slice, bucket, region.first, region.form.strides))

    def __contains__(self, key: str) -> bool:
        """Whether that is the key of a state of a parameter that the buckets have, and no tensor is stored under it."""
        return key not in self._index.tensors and self._found(key) is not None

    def _found(self, key: str) -> tuple[str, _Parameter] | None:
        match = STATE_KEY.fullmatch(key)
        parameter = None if match is None else self._parameters.get(match["key"])
        return None if match is None or parameter is None else (match["state"], parameter)

    def check(self, shards: Iterable[Any]) -> None:
        """Raise `LoadError` unless all that these `ShardedTensor`s ask for is in the buckets, in its shape, once."""
        for shard in shards:
            found = self._found(shard.key)
            if found is not None:
                self._shares(shard, *found)
            elif shard.key not in self._index.tensors:
                raise MissingKeyError(
                    f"{shard.key}: the optimizer's flat buckets of {self._index.path} have no such parameter; "
                    f"{_FROZEN_OR_NEW}"
                )

    def _shares(self, shard: Any, state: str, parameter: _Parameter) -> list[tuple[_Part, Box]]:
        """Stored slices that make up a requested one, each with what they have in common."""
        shape = tuple(shard.global_shape)
        if shape != parameter.shape and not (shard.allow_shape_mismatch and len(shape) == len(parameter.shape)):
            raise ShapeMismatchError(
                f"{shard.key}: the checkpoint {self._index.path} has the parameter in the shape "
                f"{list(parameter.shape)}, expected {list(shape)}"
            )
        requested = Box(tuple(shard.global_offset), local_box(shard))
        near = [(part, intersect(part.slice, requested)) for part in parameter.overlapping(requested)]
        shares = [(part, share) for part, share in near if share is not None]
        buckets = sorted({part.bucket for part, _ in shares})
        for bucket in buckets:
            if f"{bucket}.{state}" not in self._index.tensors:
                why = advice_on_states([f"{bucket}.{state}"], self._index)
                raise MissingKeyError(f"{shard.key}: {bucket} of {self._index.path} has no {state!r}{why}")
        # Layers share a key. A gap of frozen layers matters to ranks that ask for these alone.
        within = intersect(requested, Box((0,) * len(parameter.shape), parameter.shape))
        found = [] if within is None else [relative(share, within.offsets) for _, share in shares]
        if within is None or not (problem := covers(within.sizes, found)):
            return shares
        if sum(math.prod(box.sizes) for box in found) < math.prod(within.sizes):
            raise MissingKeyError(
                f"{shard.key}: the optimizer's flat buckets of {self._index.path} do not have all of its elements at "
                f"{list(within.offsets)} of sizes {list(within.sizes)}; {_FROZEN_OR_NEW}"
            )
        raise CorruptCheckpointError(
            f"{self._index.path}: the tables of parameters of {', '.join(buckets[:3])} do not make up {shard.key}: "
            f"{problem}. One is of another save, or damaged; load another copy or an earlier checkpoint"
        )

    def _of_shard(self, shard: Any, state: str, parameter: _Parameter) -> Iterator[_Read]:
        requested = Box(tuple(shard.global_offset), local_box(shard))
        shares = self._shares(shard, state, parameter)
        if shard.data is None:
            shard.init_data("cpu")
        data = shard.data.detach().view(requested.sizes)
        if tuple(shard.global_shape) != parameter.shape:
            data.zero_()
        for part, share in shares:
            inside = relative(share, part.slice.offsets).offsets
            first = part.first + sum(map(operator.mul, inside, part.strides))
            yield from _covering(
                f"{part.bucket}.{state}", first, part.strides, narrow(data, relative(share, requested.offsets))
            )

    def read(self, reader: CheckpointReader, shards: Iterable[Any]) -> None:
        """Fill the data of `ShardedTensor`s, in the order of the buckets. Raises as `check` and `read_items`."""
        found: list[_Read] = []
        for shard in shards:
            if (asked := self._found(shard.key)) is not None:
                found += self._of_shard(shard, *asked)
        found.sort(key=operator.attrgetter("key", "first"))
        with torch.no_grad():
            for batch in batches(found, operator.attrgetter("staged_bytes"), _STAGED_BYTES):
                requests = []
                for read in batch:
                    shape = self._index.tensors[read.key].shape
                    to = read.target.view(-1) if read.is_dense else torch.empty(read.elems, dtype=read.target.dtype)
                    requests.append(ReadRequest(read.key, to, (read.first,), (read.elems,), shape))
                reader.read_items(requests)
                for read, request in zip(batch, requests, strict=True):
                    if not read.is_dense:
                        read.target.copy_(torch.as_strided(request.tensor, read.target.shape, read.strides))


def _covering(key: str, first: int, strides: tuple[int, ...], target: torch.Tensor) -> Iterator[_Read]:
    """Reads of at most 16 MiB that cover a strided slice of a bucket; what has long runs is read run by run."""
    sizes = tuple(target.shape)
    count = extent_of(sizes, strides)
    longest = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=operator.itemgetter(1)):
        if size > 1 and stride == longest:
            longest *= size
    is_dense = count <= 4 * math.prod(sizes) or longest < _RUN_ELEMS
    if (count * target.element_size() <= _READ_BYTES and is_dense) or math.prod(sizes) == 1:
        yield _Read(key, first, count, strides, target)
        return
    axis = max((a for a, size in enumerate(sizes) if size > 1), key=lambda a: (strides[a], sizes[a]))
    half = sizes[axis] // 2
    yield from _covering(key, first, strides, target.narrow(axis, 0, half))
    rest = target.narrow(axis, half, sizes[axis] - half)
    yield from _covering(key, first + half * strides[axis], strides, rest)
