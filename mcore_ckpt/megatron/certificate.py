"""Is a job, when it resumes, what was saved? The certificate says so, or names what differs, with rank and key.

Checksums say that the right bytes were read. The certificate looks at what they became: after all steps that follow a
load (the optimizer takes its state, masters and weights are copied, random states are set) the sharded state dict is
made again, as a save would make it, and compared with the checkpoint.

**Tensors** by fingerprints: each rank sums up what it holds, and takes the stored fingerprint from its sum where it
holds the tensor's first element. The terms of all ranks that hold one tensor add up to zero if it is as it was stored.
**Replicas** count as tensors of their own, by their `replica_id`. Where it is not zero, where ranks hold a tensor more
than once under one `replica_id`, or nothing is stored to compare with, they read it again and compare each bit.
**Objects** (random states, parameter groups) and the common state (iteration, scheduler, consumed samples) are read
again by each rank. **Weights** must be what their FP32 masters round to.

Megatron-LM's `load_checkpoint` ends with it, as `LoadOptions.certify` asks: the calls by which a resume makes its state
dict are noted (`install.py`), and made again when all has been loaded. Loops of one's own call `certify`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import math
import operator
import os
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted, logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointError, CheckpointNotFoundError, LoadError, OptionError, PlanError
from mcore_ckpt.core.fingerprints import part_of
from mcore_ckpt.core.options import LoadOptions, checkpoint_path
from mcore_ckpt.core.process import Outcome, collector_paused
from mcore_ckpt.core.ranks import RankGroup, coordination_group, without_modes
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex, TensorEntry, is_extra_state, is_flat_bucket
from mcore_ckpt.format.metadata_read import METADATA_FILE
from mcore_ckpt.format.parameter_table import GROUP_OBJECT, stored_tables, tensors_of_buckets
from mcore_ckpt.format.zip_records import layout_of_versions
from mcore_ckpt.load.checks import global_shape
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reader import CheckpointReader, read_shards
from mcore_ckpt.megatron.calls import MegatronLoad, in_progress, metadata_version
from mcore_ckpt.megatron.other_division import (
    FLAT_BUCKETS,
    SHARDING_TYPE,
    has_flat_state,
    under_this_division,
    with_own_ranges,
)
from mcore_ckpt.megatron.serialization import TRAINING, common_object, load_common, tell_uncertified
from mcore_ckpt.megatron.versions import SKYRL, own_version, parallel_layout
from mcore_ckpt.state.shards import (
    contents,
    dtype_name,
    is_dense,
    is_main_replica,
    leaves,
    leaves_by_kind,
    local_box,
    local_chunks,
)
from mcore_ckpt.state.values import first_difference, unequal
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of("mcore_ckpt")

_SAMPLE: Final = 32  # one tensor in so many
_SHOWN: Final = 10
_SCRATCH_BYTES: Final = 64 * 1024 * 1024
_WHAT: Final = "certify the state that was resumed"
_NOT_REQUESTED: Final = "not requested"  # and nothing says why
# Entries of the common state that jobs may change, or that say how it was saved.
_NOT_STATE: Final = ("args", "content_metadata", "checkpoint_version")
# Megatron-LM loads it where a rerun is pending.
_RERUN: Final = "rerun_state_machine"
_COUNTED: Final = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
# What `--override-opt-param-scheduler` sets.
_SCHEDULED: Final = tuple(
    "lr weight_decay max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps "
    "wd_incr_style".split()
)


class Difference(NamedTuple):
    """Something that is not as it was saved.

    Attributes:
        what: `"tensor"`, `"object"`, `"common state"`, `"weight"` (not what its master rounds to), or `"master"` (not
            what was loaded of it).
        rank: that holds it.
        key: in the checkpoint.
        where: of a tensor, the index of the first element that differs; of an object the path in it.
        expected: what is stored there; of a weight, what its master rounds to.
        got: what the rank holds.
    """

    what: str
    rank: int
    key: str
    where: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.what} {self.key}{self.where} on rank {self.rank}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was compared, and what differs; the same on all ranks.

    Attributes:
        checkpoint: name of its directory.
        tensors, objects: how many were compared, each once for all ranks.
        ranks: how many there are.
        differences: the first ones, in the order of ranks.
        differing: how many there are.
        not_compared: how much of what, and why.
    """

    checkpoint: str
    tensors: int
    objects: int
    ranks: int
    differences: tuple[Difference, ...] = ()
    differing: int = 0
    not_compared: tuple[str, ...] = ()

    def __str__(self) -> str:
        compared = f"{self.tensors:,} tensors, {self.objects:,} objects, {counted(self.ranks, 'rank')}"
        left = "; not compared: " + ", ".join(self.not_compared) if self.not_compared else ""
        if not self.differing:
            said = "as saved" if self.tensors or self.objects else "with NOTHING compared"
            return f"resumed from {self.checkpoint} {said}: {compared}{left}"
        more = ", and more" if self.differing > len(self.differences) else ""
        return (
            f"resumed from {self.checkpoint} NOT as saved: {counted(self.differing, 'difference')} in {compared}: "
            f"{'; '.join(map(str, self.differences))}{more}{left}"
        )


# What ranks hold of a tensor, or of a replica, adds up to this if it is there once, and what is stored: the XOR of
# CRC-32s with the stored one, how many have its first element, and how many elements more than these have there are.
_ONCE_AS_STORED: Final = (0, 1, 0)
_Residue = tuple[int, int, int]


class _Found(NamedTuple):
    """Findings of one rank or several; `residues`: sums of terms, by tensor or replica, but `_ONCE_AS_STORED`."""

    counts: Counter[str]
    differences: tuple[Difference, ...] = ()
    held: int = 0  # bits by number of the tensors that are chosen: those of which a rank has the first element
    objects: int = 0  # bits by number of the stored objects: those of which a rank has the main one
    absent: frozenset[str] = frozenset()
    residues: Mapping[str, _Residue] = {}
    unlike: frozenset[str] = frozenset()  # tensors of which a rank holds something in another form than is stored
    lacking: frozenset[str] = frozenset()  # what is stored in the common state, and a rank has not
    groups: Mapping[str, bool] = {}  # parameter groups that are stored, and whether a rank holds them
    stored: tuple[int, int] = (0, 0)  # how many tensors and objects are

    def merged(self, other: _Found) -> _Found:
        """The findings of both; ranks of `self` are lower."""
        return _Found(
            self.counts + other.counts,
            (*self.differences, *other.differences)[:_SHOWN],
            self.held | other.held,
            self.objects | other.objects,
            self.absent | other.absent,
            _added([*self.residues.items(), *other.residues.items()]),
            self.unlike | other.unlike,
            self.lacking | other.lacking,
            {**self.groups, **other.groups, **{name: True for name, is_held in self.groups.items() if is_held}},
            self.stored,
        )

    @property
    def partial(self) -> frozenset[str]:
        """Tensors that ranks do not hold once and whole: of what they hold, nothing differs."""
        is_right = not self.counts["differing"]
        found = (
            name for name, (_, *rest) in self.residues.items() if (is_right or rest != [1, 0]) and "\0" not in name
        )
        return frozenset(found) - self.unlike


@without_modes()
@collector_paused()
def certify(
    sharded_state_dict: Any,
    checkpoint_dir: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    options: LoadOptions | None = None,
    reasons: Sequence[str] = (),
    reader: CheckpointReader | None = None,
    handed_out: Callable[[Any], Any] | None = None,
) -> Certificate:
    """Compare what the ranks hold with a checkpoint; all ranks of the group call it together, after the load.

    Args:
        sharded_state_dict: as a save would be given it now: nested dict/list of Megatron's sharded tensors (shapes in
            elements) and objects, and of the common state; or a state dict of DCP; or a function that makes it.
        checkpoint_dir: what was loaded.
        optimizer: Megatron's; the weights of its parameters are compared with their FP32 masters.
        process_group: the ranks; None: all.
        options: `certify` of them says what is compared, and what becomes of differences; None: of the environment.
        reasons: why parts of the checkpoint were not loaded, for the log.
        reader: what it was loaded by, and has its index, or that of an older one; None: `checkpoint_dir` is read again.
        handed_out: what the load has made of the common state that is stored; None: it has changed nothing.

    Returns:
        What was compared; nothing where `options.certify` is `"off"`. Rank 0 logs it, as a warning if something
        differs.

    Raises:
        OptionError: on all ranks, if they differ in `options.certify`.
        LoadError: on all ranks, if something differs and `options.certify` is `"raise"`; or if the checkpoint cannot be
            read.
    """
    group = coordination_group(process_group)
    is_resume = reader is not None  # which has found out how its load divides the model

    def open_it() -> tuple[CheckpointReader, tuple[int, ...], LoadOptions]:
        path = checkpoint_path(checkpoint_dir) if reader is None else reader.path
        version = metadata_version(path)  # ahead of the index
        opened = reader or CheckpointReader(path, options=options)
        return opened, version, options or opened.options

    opened = Outcome.of(open_it)
    said = group.run_merged(_WHAT, lambda: {str(opened.value()[2].certify)}, operator.or_, sorted, wrap=LoadError)
    if len(said) > 1:
        raise OptionError(f"certify: expected one value on all ranks, got {' and '.join(said)}")
    reader, version, options = opened.value()
    directory = reader.path
    if options.certify == "off":
        return Certificate(directory.name, 0, 0, group.size)
    comparison = _Comparison(reader, version, options, group.rank)
    with storage_at(directory).in_use(METADATA_FILE):
        if not is_resume:
            call = MegatronLoad(options, process_group, group, directory=directory, reader=reader)
            sharded_state_dict = _under_this_division(sharded_state_dict, call, reader, group)
            reader.parameters, handed_out = call.buckets, handed_out or call.change_common
        compare = partial(comparison.of_one_save, comparison.compare, sharded_state_dict, optimizer, handed_out)
        found = group.run_merged(_WHAT, compare, _Found.merged, lambda both: both, wrap=LoadError)
        if found.residues or found.counts["unstored"]:
            read = partial(comparison.of_one_save, comparison.read_again, found)
            found = found.merged(group.run_merged(_WHAT, read, _Found.merged, lambda both: both, wrap=LoadError))
    certificate = _certificate(found, reader.index, comparison.compared, group, reasons)
    if certificate.differing and options.certify == "raise":
        raise LoadError(f"{certificate}. Do not train with this state")
    if group.is_coordinator:
        is_doubtful = certificate.differing or found.absent or found.partial or not all(found.groups.values())
        is_doubtful = is_doubtful or any(_NOT_REQUESTED in left for left in certificate.not_compared)
        is_well = not is_doubtful and (certificate.tensors or certificate.objects)
        _logger.log(logging.INFO if is_well else logging.WARNING, "%s", certificate)
    return certificate


def _under_this_division(state: Any, call: MegatronLoad, reader: CheckpointReader, group: RankGroup) -> Any:
    """The state dict as a load of that checkpoint would ask for it; the call gets what that load would need. One of DCP
    comes as shards.
    """
    made: Any = None
    of_dcp: dict[str, Any] = {}

    def make() -> tuple[bool, dict[str, int]]:
        nonlocal made
        _ = reader.index  # which this rank alone may be unable to read
        made = state() if callable(state) else state
        if isinstance(made, dict) and next(leaves(made), None) is None:
            values = {key: one.state_dict() if isinstance(one, Stateful) else one for key, one in made.items()}
            of_dcp.update(flatten_state_dict(values)[0])
        undivided = (key for key, one in of_dcp.items() if not hasattr(one, "placements"))
        return has_flat_state(made), dict.fromkeys(undivided, group.rank)

    def merge(one: tuple[bool, dict[str, int]], other: tuple[bool, dict[str, int]]) -> tuple[bool, dict[str, int]]:
        return one[0] or other[0], {**other[1], **one[1]}

    has_buckets, first = group.run_merged(_WHAT, make, merge, lambda both: both, wrap=LoadError)
    if has_buckets:
        with in_progress(call):
            return under_this_division(made, call)
    if of_dcp.keys().isdisjoint([*reader.index.tensors, *reader.index.objects]):
        return made
    return [_shard_of(key, one, group.rank - first.get(key, group.rank)) for key, one in of_dcp.items()]


def _shard_of(key: str, value: Any, behind: int) -> Any:
    """A value of DCP's as a sharded tensor or object. `behind`: by how many ranks this one is behind the first that has
    it, unless it is a DTensor.
    """
    shard = SimpleNamespace(key=key, unique_key=key, data=value, global_offset=(), replica_id=behind)
    if isinstance(value, torch.Tensor):
        (chunk,) = local_chunks(value)
        shard.global_shape, shard.global_offset = tuple(value.shape), tuple(chunk.offsets)
        shard.local_shape, shard.prepend_axis_num = tuple(chunk.sizes), 0
    if hasattr(value, "placements"):
        places = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
        shard.data, shard.replica_id = value.to_local(), tuple(at for at, one in places if one.is_replicate())
    return shard


@dataclass(slots=True)
class _Comparison:
    """What one rank holds, compared with one version of a checkpoint."""

    reader: CheckpointReader
    version: tuple[int, ...]
    options: LoadOptions
    rank: int
    compared: dict[str, int] = field(default_factory=dict)  # numbers of the chosen tensors; the same on all ranks
    shards: list[Any] = field(default_factory=list)  # of this rank, as it holds them

    def of_one_save(self, find: Callable[..., _Found], *args: Any) -> _Found:
        """What is found, if the checkpoint has not been replaced meanwhile."""
        outcome = Outcome.of(partial(find, *args))
        if metadata_version(self.reader.path) != self.version:
            raise LoadError(f"{self.reader.path} was replaced while it was compared") from outcome.error
        return outcome.value()

    def compare(self, state: Any, optimizer: Any, handed_out: Callable[[Any], Any] | None) -> _Found:
        """Compare all but the elements of tensors, of which the fingerprints tell. Arguments as of `certify`."""
        state, reader, rank = state() if callable(state) else state, self.reader, self.rank
        chosen = partial(_chosen, self.options, reader.index)
        stored, objects_stored = _as_loaded(reader)
        self.compared.update((name, number) for number, name in enumerate(chosen(stored)))
        if any(map(is_flat_bucket, self.compared)):
            _fill_padding([state], reader, self.compared)
        tensors, objects = leaves_by_kind(state)
        shifted = _told_shifted(optimizer, tensors) if reader.parameters is None else frozenset()
        found = _of_tensors(tensors, stored, reader.index, self.compared, rank, shifted, self.shards)
        common = self._common_state(handed_out)
        found.counts["without common"] = int(rank == 0 and common is None and isinstance(state, dict))  # not DCP's
        state, common = (one if isinstance(one, dict) else {} for one in (state, common))
        ignored = _SCHEDULED if getattr(state.get("args"), "override_opt_param_scheduler", False) else ()
        mains, groups = set[str](), dict[str, bool]()
        others = [*_of_objects(objects, reader, ignored, rank, found.counts, mains, groups)]
        others += _of_common_state(state, common, ignored, rank, groups)
        others += _of_weights(optimizer, self.shards, chosen, rank, found.counts)
        found.counts["differing"] = len(others)
        lacking = frozenset(map(str, common.keys() - state.keys() - {*_NOT_STATE, _RERUN}))
        job, saved = state.get("args"), common.get("args")
        samples = {f"args.{name}" for name in _COUNTED if hasattr(saved, name) and not hasattr(job, name)}
        absent = {one.unique_key for one in objects if not is_extra_state(one.unique_key)}
        return found._replace(
            differences=tuple(others[:_SHOWN]),
            stored=(len(stored), objects_stored),
            objects=_bits(key in mains for key in reader.index.objects),
            absent=found.absent | absent.difference(reader.index.objects),
            lacking=lacking | samples,
            groups=groups,
        )

    def _common_state(self, handed_out: Callable[[Any], Any] | None) -> Any:
        with contextlib.suppress(CheckpointNotFoundError):
            is_object = COMMON_STATE_KEY in self.reader.index.objects
            common = common_object(self.reader) if is_object else load_common(self.reader.path, self.reader.options)
            return common if handed_out is None else handed_out(common)
        return None

    def read_again(self, found: _Found) -> _Found:
        """Read the tensors of which fingerprints do not tell that they are as stored."""
        stored = self.reader.index.fingerprints
        named = _named(self.shards, self.rank)
        doubtful = [shard for name, shard in named if name in found.residues or shard.key not in stored]
        wrong = list(_read_differences(doubtful, self.reader, self.rank))
        return _Found(Counter(differing=len(wrong)), tuple(wrong[:_SHOWN]))


def _certificate(
    found: _Found, index: CheckpointIndex, chosen: Mapping[str, int], group: RankGroup, reasons: Sequence[str]
) -> Certificate:
    counts, held = found.counts, {name for name, number in chosen.items() if found.held >> number & 1}
    elsewise, groups = found.unlike | found.partial, [name for name, is_held in found.groups.items() if not is_held]
    lost = chosen.keys() - held - elsewise
    tensors = len(lost) - counts["shifted"]
    rerun = sum(key.startswith(_RERUN) and not found.objects >> n & 1 for n, key in enumerate(index.objects))
    objects = found.stored[1] - found.objects.bit_count() - counts["rewritten"] - rerun
    left = (
        (found.stored[0] - len(chosen), "tensor", f"one in {_SAMPLE} is"),
        (len(found.unlike), "tensor", "of another dtype, shape or class"),
        (len(found.partial), "tensor", f"that ranks do not hold once and whole: {_listed(found.partial)}"),
        (counts["shifted"], "tensor", "of an optimizer of several buckets, which Megatron-Core tells shifted"),
        (counts["rewritten"], "object", "written in another way by its module"),
        (rerun, "object", "of the rerun state machine"),
        (counts["elsewhere"], "object", "in a version of this rank: these are of another layout"),
        (len(found.absent), "key", f"not in the checkpoint: {_listed(found.absent)}"),
        (len(groups), "parameter group", f"that no rank holds: {_listed(groups)}"),
        (counts["sampled out"], "weight", f"one in {_SAMPLE} is"),
        (counts["weights"], "weight", "Megatron-Core names no plain master of its size"),
        (len(found.lacking), "part", f"of the common state, that a rank has not: {_listed(found.lacking)}"),
        (counts["without common"], "common state", "none is there"),
        (max(0, tensors), "tensor", ", ".join(reasons) or f"{_NOT_REQUESTED}: {_listed(lost)}"),
        (max(0, objects), "object", ", ".join(reasons) or _NOT_REQUESTED),
    )
    return Certificate(
        checkpoint=PurePath(index.path).name,
        tensors=len(held - elsewise),
        objects=found.objects.bit_count(),
        ranks=group.size,
        differences=found.differences,
        differing=counts["differing"],
        not_compared=tuple(f"{counted(count, what)} ({why})" for count, what, why in left if count),
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


# --- tensors ----------------------------------------------------------------------------------------------------------


def _chosen(options: LoadOptions, index: CheckpointIndex, names: Collection[str]) -> list[str]:
    """Names to compare, in an order that is the same on all ranks; a sample has other ones for each save."""
    if options.certify != "sample":
        return list(names)
    # A save is known by its id, and where it has none by the name of its directory.
    save = crc32(os.fsencode(PurePath(index.path).name) if index.manifest is None else index.manifest.save_id)
    drawn = set(random.Random(save).sample(range(len(names)), -(-len(names) // _SAMPLE)))
    return [name for number, name in enumerate(names) if number in drawn]


def _fill_padding(state: Any, reader: CheckpointReader, chosen: Collection[str]) -> None:
    """Read what pads flat buckets (`dp_reshardable`): it is memory that nobody has written."""
    if isinstance(state, dict) and getattr(state.get("padding"), "obj", False):
        read_shards(reader, [one for one in leaves(state) if one.key in chosen and is_flat_bucket(one.key)])
    else:
        for value in state.values() if isinstance(state, dict) else state:
            if isinstance(value, (dict, list, tuple)):
                _fill_padding(value, reader, chosen)


def _as_loaded(reader: CheckpointReader) -> tuple[Mapping[str, TensorEntry], int]:
    """The tensors that are stored, or that were loaded of flat buckets in their place; and how many objects are."""
    index, objects = reader.index, reader.index.objects.keys() - {COMMON_STATE_KEY}
    if reader.parameters is None:
        return index.tensors, len(objects)
    forms = tensors_of_buckets(index, stored_tables(index, reader.object_bytes))
    of_buckets = {key: TensorEntry(key, *form, ()) for key, form in forms.items()}
    others = {key: entry for key, entry in index.tensors.items() if not is_flat_bucket(key)}
    return {**others, **of_buckets}, sum(GROUP_OBJECT.fullmatch(key) is None for key in objects)


def _of_tensors(
    tensors: Sequence[Any],
    stored_as: Mapping[str, TensorEntry],
    index: CheckpointIndex,
    chosen: Mapping[str, int],
    rank: int,
    shifted: Collection[str],
    compared: list[Any],
) -> _Found:
    """What shards of tensors add that are stored in the same dtype and shape: what is converted, quantized or padded
    otherwise has other bits. Those go into `compared`. `shifted`: keys of gathered state, which has not.
    """
    counts, unlike, residues, held = Counter[str](), set(), list[tuple[str, _Residue]](), bytearray(len(chosen))
    keys = [shard.key for shard in tensors]  # of tens of thousands most are not chosen: no loop of Python's over these
    absent = frozenset(set(keys).difference(stored_as))
    for shard, number in zip(tensors, map(chosen.get, keys), strict=True):
        if number is None or shard.data is None:
            continue
        entry = stored_as[shard.key]
        stretch = getattr(shard, "flattened_range", None)
        is_first = is_main_replica(shard) and not any(shard.global_offset) and not (stretch and stretch.start)
        is_first = is_first and not (0 in shard.local_shape and math.prod(shard.global_shape))
        is_alike = is_dense(shard.data) and dtype_name(shard.data.dtype) == entry.dtype
        is_alike = is_alike and global_shape(index, entry) == tuple(shard.global_shape)
        is_shifted = shard.key in shifted
        counts["shifted"] += is_first and is_shifted
        held[number] |= is_first and not is_shifted
        if is_alike and not is_shifted:
            compared.append(shard)
        elif not is_shifted:
            unlike.add(shard.key)
    for name, shard in _named(compared, rank):
        stored = index.fingerprints.get(shard.key)
        counts["unstored"] += stored is None
        if shard.data.numel():
            crc, is_first = crc_of_shard(shard)
            if stored is None:  # its elements are counted, and read again
                crc = stored = 0
            elems, total = shard.data.numel(), math.prod(shard.global_shape)
            residues.append((name, (crc ^ stored, 1, elems - total) if is_first else (crc, 0, elems)))
    return _Found(counts, held=_bits(held), absent=absent, residues=_added(residues), unlike=frozenset(unlike))


def _bits(flags: Iterable[int]) -> int:
    """One for each flag that is not 0, the first the lowest."""
    return int.from_bytes(np.packbits(np.fromiter(flags, bool), bitorder="little").tobytes(), "little")


def crc_of_shard(shard: Any) -> tuple[int, bool]:
    """What a replica adds (by XOR) to its tensor's CRC-32, and whether it has the first element; raises `PlanError`."""
    key, data, sizes = shard.key, shard.data, local_box(shard)
    shape, offsets = tuple(map(int, shard.global_shape)), tuple(map(int, shard.global_offset))
    flattened = getattr(shard, "flattened_range", None)
    stretch = (0, math.prod(sizes)) if flattened is None else (flattened.start, flattened.stop)
    if data.numel() != stretch[1] - stretch[0]:
        raise PlanError(
            f"{key}: the shard at {list(offsets)} has data of shape {list(data.shape)}, expected "
            f"{stretch[1] - stretch[0]} elements of the slice of sizes {list(sizes)}"
        )
    crc = 0
    for content, inside in contents(key, data, sizes, stretch):
        lies = Box(tuple(map(operator.add, offsets, inside.offsets)), inside.sizes)
        crc ^= part_of(content, shape, lies, data.element_size())
    return crc, not any(offsets) and stretch[0] == 0 and data.numel() > 0


def _added(residues: Iterable[tuple[str, _Residue]]) -> dict[str, _Residue]:
    found: dict[str, _Residue] = {}
    for name, (crc, firsts, elems) in residues:
        known = found.get(name, (0, 0, 0))
        found[name] = known[0] ^ crc, known[1] + firsts, known[2] + elems
    return {name: residue for name, residue in found.items() if residue != _ONCE_AS_STORED}


def _named(shards: Iterable[Any], rank: int) -> Iterator[tuple[str, Any]]:
    """Shards with the name under which what ranks hold of a tensor, or of a replica, is added up."""
    wholes = Counter[str]()
    for shard in shards:
        name = shard.key
        if not is_main_replica(shard):
            name += f"\0{shard.replica_id}"
            if shard.data.numel() == math.prod(shard.global_shape):  # a copy by itself: several ranks may have one id
                wholes[name] += 1
                name += f"\0{rank}\0{wholes[name]}"
        yield name, shard


def _read_differences(shards: Iterable[Any], reader: CheckpointReader, rank: int) -> Iterator[Difference]:
    """What is not what is stored, bit for bit, of shards whose slices are read for it."""
    for batch in batches(shards, lambda shard: int(shard.data.nbytes), _SCRATCH_BYTES):
        stored = [copy.copy(shard) for shard in batch]
        for one in stored:
            one.allow_shape_mismatch = False
            one.data = torch.empty(tuple(one.data.shape), dtype=one.data.dtype, device="cpu")
        read_shards(reader, stored)
        for one, shard in zip(stored, batch, strict=True):
            if (found := first_difference(one.data, shard.data)) is not None:
                number, expected, got, more = found
                stretch = getattr(shard, "flattened_range", None)
                number += stretch.start if stretch else 0
                inside = np.unravel_index(number, local_box(shard) or (1,))
                at = [int(a) + b for a, b in zip(inside, shard.global_offset, strict=False)]
                which = "" if is_main_replica(shard) else f" (replica {shard.replica_id})"
                yield Difference("tensor", rank, shard.key, f"{at}{which}", expected, f"{got}{more}")


def _of_weights(
    optimizer: Any,
    shards: Iterable[Any],
    chosen: Callable[[Collection[str]], Iterable[str]],
    rank: int,
    counts: Counter[str],
) -> Iterator[Difference]:
    """Weights that differ from their rounded FP32 masters, and masters that an offloaded optimizer has not taken."""
    pairs = {f"weight {number}": pair for number, pair in enumerate(_masters(optimizer))}
    compared = set(chosen(pairs))
    counts["sampled out"] += len(pairs) - len(compared)
    for name, (weight, master, loaded) in pairs.items():
        if name not in compared:
            continue
        if not (is_dense(weight) and is_dense(master) and weight.numel() == master.numel()):
            counts["weights"] += 1
            continue
        of_weight = first_difference(master.detach().to(weight.dtype), weight)
        is_kept = is_dense(loaded) and loaded.dtype == master.dtype and loaded.numel() == master.numel()
        of_master = first_difference(loaded, master) if is_kept else None
        for what, of, found in (("weight", " of its master", of_weight), ("master", "", of_master)):
            if found is not None:
                at, expected, got, more = found
                key = next((shard.key for shard in shards if _lies_in(weight, shard.data)), name)
                yield Difference(what, rank, key, f"[element {at}]", f"{expected}{of}", f"{got}{more}")


def _told_shifted(optimizer: Any, tensors: Iterable[Any]) -> set[str]:
    """Keys of the state that Megatron-Core, to 0.19, gathers shifted for `fully_reshardable`: that of parameters in a
    bucket behind a padded one, and of those whose bucket is not known.
    """
    right, is_any = list[Any](), False
    for one in getattr(optimizer, "chained_optimizers", (optimizer,)):
        for buffer in getattr(one, "buffers", ()):
            sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
            starts = itertools.accumulate(sizes, initial=0)
            for bucket, start in zip(buffer.buckets, starts, strict=False):
                right += [bucket.param_data] if bucket.offset == start else []
                is_any |= bucket.offset != start
    if not is_any:
        return set()
    known = {shard.key for shard in tensors if any(_lies_in(shard.data, whole) for whole in right)}
    state = {shard.key for shard in tensors if "optimizer.state." in shard.key and not is_flat_bucket(shard.key)}
    return {key for key in state if key.partition("optimizer.state.")[2].partition(".")[2] not in known}


def _lies_in(part: Any, whole: Any) -> bool:
    if not (isinstance(whole, torch.Tensor) and isinstance(part, torch.Tensor)) or whole.dtype != part.dtype:
        return False
    return 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes


def _masters(optimizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Weights, or the rank's parts of them, with their masters, and with the copies of an offloaded optimizer. Before
    its first step it saves the masters that it was built with; it trains with the loaded ones.
    """
    for one in getattr(optimizer, "chained_optimizers", () if optimizer is None else (optimizer,)):
        inner: Any = getattr(one, "optimizer", None)
        kept = [dict(getattr(inner, name, None) or {}) for name in ("param_to_fp32_param", "gpu_params_map_cpu_copy")]
        both = getattr(one, "_get_model_and_main_params_data_float16", None)
        if both is not None and not getattr(one, "is_stub_optimizer", False):
            try:
                weights, masters = both()
            except AttributeError:  # as of Megatron-FSDP
                weights, masters = (None,), (torch.empty(0),)
            pairs = itertools.zip_longest(weights, masters)  # none of an offloaded optimizer's, which has them itself
            yield from ((weight, master, None) for weight, master in pairs if master is not None or not any(kept))
        for weight, master in itertools.chain.from_iterable(of_kind.items() for of_kind in kept):
            yield weight, master, inner.state.get(weight, {}).get("master_param")


# --- objects ----------------------------------------------------------------------------------------------------------


def _of_objects(
    objects: Iterable[Any],
    reader: CheckpointReader,
    ignored: tuple[str, ...],
    rank: int,
    counts: Counter[str],
    mains: set[str],
    groups: dict[str, bool],
) -> Iterator[Difference]:
    """What differs; keys of the main ones that are compared go into `mains`, and parameter groups into `groups`."""
    held: dict[str, list[Any]] = {}

    def version(key: str, content: bytes) -> bytes:
        if any(map(is_main_replica, held[key])) and layout_of_versions(content) not in (None, parallel_layout()):
            counts["elsewhere"] += 1
        return own_version(key, content)

    for leaf in objects:
        if leaf.unique_key in reader.index.objects:
            held.setdefault(leaf.unique_key, []).append(leaf)
    stored = reader.read_objects(held, version)
    for key, of_key in held.items():
        values = stored[key] if isinstance(stored[key], list) else [stored[key]]
        # Settings may be added by a later Megatron, or written as a list or as 1; of a random state all is state.
        own_groups = dict[str, bool]()
        compare = partial(unequal, ignored=ignored, exact=of_key[0].key == "rng_state", groups=own_groups)
        values = [*values, *values[:1] * len(of_key)]  # what is held again claims to be the same
        found = [one for leaf, was in zip(of_key, values, strict=False) for one in compare(_of(leaf, was), leaf.data)]
        groups |= {key + where: is_held for where, is_held in own_groups.items()}
        is_rewritten = bool(found) and is_extra_state(key)
        if any(map(is_main_replica, of_key)):
            counts["rewritten"] += is_rewritten
            mains |= set() if is_rewritten else {key}
        if not is_rewritten:
            yield from (Difference("object", rank, key, *one) for one in found)


def _of_common_state(
    state: Mapping[str, Any], common: Mapping[str, Any], ignored: tuple[str, ...], rank: int, groups: dict[str, bool]
) -> Iterator[Difference]:
    job, saved = state.get("args"), common.get("args")
    names = [name for name in _COUNTED if hasattr(saved, name) and hasattr(job, name)]
    pairs = {key: (common[key], state[key]) for key in common if key in state and key not in _NOT_STATE}
    pairs |= {f"args.{name}": (getattr(saved, name), getattr(job, name)) for name in names}
    for key, pair in pairs.items():
        of_key = dict[str, bool]()
        yield from (Difference("common state", rank, key, *one) for one in unequal(*pair, ignored, groups=of_key))
        groups |= {key + where: is_held for where, is_held in of_key.items()}


def _of(leaf: Any, value: Any) -> Any:
    """What is stored; of random states, one for each data-parallel rank, those of ranks that there still are."""
    is_of_ranks = leaf.key == "rng_state" and isinstance(value, list) and isinstance(leaf.data, list)
    return value[: len(leaf.data)] if is_of_ranks else value


# --- the resume of Megatron-LM ----------------------------------------------------------------------------------------


@without_modes()
def certify_loaded(
    make: Callable[[], Any], directory: str | Path, optimizer: Any, options: LoadOptions | None = None, **others: Any
) -> None:
    """Certify what has been loaded, as `make` makes it again, or say why that cannot be. `others`: as of `certify`."""
    options = options or LoadOptions.from_environment()
    try:
        certify(make, directory, optimizer, options=options, **others)
    except CheckpointError as error:
        if options.certify == "raise":
            raise
        tell_uncertified(directory, options, error)


@without_modes()
def certify_resume(
    stock: Mapping[str, Callable[..., Any]],
    load: MegatronLoad,
    arguments: Mapping[str, tuple[Any, Any]],
    module: Any,
    optimizer: Any,
    result: tuple[Any, ...],
) -> None:
    """Certify what `load_checkpoint` has made of a job, by the calls that it has noted. `stock`: functions of `module`,
    by Megatron-LM's names; `result`: the iteration, and of Megatron-LM the operations.
    """
    directory, options = load.directory, load.options
    if "generate_state_dict" not in arguments:
        return tell_uncertified(directory, options, f"`generate_state_dict` of {module.__name__} has been replaced")
    args, kwargs = arguments["generate_state_dict"]
    call = inspect.signature(stock["generate_state_dict"]).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    job = given["args" if "args" in given else "ckpt_cfg"]
    flags = [name for name in ("finetune", "no_load_optim", "no_load_rng") if getattr(job, name, False)]
    reasons = [f"--{name.replace('_', '-')}" for name in flags]
    reader = load.filled_by
    has_random = reader is None or any("rng_state/" in key for key in reader.index.objects)
    if given["rng_state"] is None and has_random and not reasons:
        is_model = given.get("optimizer") is None
        reasons.append("the model alone was loaded" if is_model else "random states of another layout")
    certify_loaded(
        partial(_state_as_resumed, stock, load, arguments, call, module, result),
        directory,
        optimizer,
        options,
        process_group=load.process_group,
        reasons=reasons,
        reader=reader,
        handed_out=load.change_common,
    )
    return None


def _state_as_resumed(
    stock: Mapping[str, Callable[..., Any]],
    load: MegatronLoad,
    arguments: Mapping[str, tuple[Any, Any]],
    call: inspect.BoundArguments,
    module: Any,
    result: tuple[Any, ...],
) -> Any:
    """The state dict that `call` makes of the job as it has been resumed."""
    given = call.arguments
    job = given["args" if "args" in given else "ckpt_cfg"]
    if given["rng_state"] is not None:
        again, named = arguments["get_rng_state"]
        given["rng_state"] = stock["get_rng_state"](*again, **named)
    # As for a save: on its way to a load, an optimizer gives itself states of zeros.
    given["optim_sd_kwargs"] = {**(given["optim_sd_kwargs"] or {}), "is_loading": False}
    if load.change_common is not None:  # nor is anything gathered: each rank has its own ranges
        metadata = {**(given["optim_sd_kwargs"].get("metadata") or {}), SHARDING_TYPE: FLAT_BUCKETS}
        given["optim_sd_kwargs"]["metadata"] = metadata
    if given.get("rerun_state"):  # a rerun is pending
        machine = module.get_rerun_state_machine()
        given["rerun_state"] = machine.state_dict(None, job.ckpt_format, force=True)
        # What it gives the iterators when there are some.
        given["rerun_state"]["sharded"].data["data_iterator_checkpoints"] = machine.data_iterator_checkpoints
    given.update(iteration=result[0])
    state = stock["generate_state_dict"](*call.args, **call.kwargs)
    if "change_state_dict" in arguments:  # keys of a base under adapters, or the adapters alone
        (_, *how), named = arguments["change_state_dict"]
        stock["change_state_dict"](state, *how, **named)
    # Bridge saves no arguments: its scheduler itself says whether settings take the place of what was saved.
    overrides = getattr(given.get("opt_param_scheduler"), "override_opt_param_scheduler", False)
    state.setdefault("args", Namespace(override_opt_param_scheduler=overrides))
    if module.__name__ == TRAINING:
        state["num_floating_point_operations_so_far"] = result[1]
    if metadata_version(load.directory) != load.version:  # (not earlier: Megatron gathers, with all ranks or none)
        raise LoadError(f"{load.directory} was replaced while it was loaded")
    is_new = job.finetune or (not result[0] and given.get("optimizer") is None)  # as ms-swift loads a base of adapters
    if is_new or load.directory.name == "release" or getattr(job, "override_ckpt_iteration", None) is not None:
        del state["iteration"]
        state.pop("args", None)
    return state if load.change_common is None else with_own_ranges(state)


# --- the loads of verl and SkyRL


def parts_of_verl(self: Any, local_path: Any, *_: Any, **__: Any) -> Iterator[Any]:
    """Model, optimizer and random states have a directory each."""
    metadata = self._build_sharded_state_dict_metadata()
    model = partial(self._build_model_sharded_state_dict, metadata)
    parts = {
        "model": (self.should_load_dist_ckpt_model and self.peft_cls is None, model),
        "optimizer": (self.should_load_optimizer, lambda: self._build_optimizer_state_dict(model(), metadata)),
        "extra": (self.should_load_extra, self._build_extra_state_dict),
    }
    for name, (is_loaded, make) in parts.items():
        if is_loaded and not self.use_megatron_fsdp:
            yield make, Path(local_path, name, "dist_ckpt"), self.optimizer if name == "optimizer" else None


def parts_of_skyrl(
    self: Any, model: Any, ckpt_dir: Any, optimizer: Any = None, scheduler: Any = None, *_: Any, **loads: bool
) -> Iterator[Any]:
    """All is in one directory."""

    def make() -> dict[str, Any]:
        (inner,) = model.actor_module
        while hasattr(inner, "module"):
            inner = inner.module
        of_model, metadata = inner.sharded_state_dict(), self._dist_ckpt_optim_metadata
        state = {"rng": self.get_rng_state()}
        if not self.is_lora:
            state["model"] = of_model
        if optimizer and loads.get("load_optimizer_states", True):
            with sys.modules[SKYRL]._without_stub_optimizers(optimizer):  # noqa: SLF001
                state["optimizer"] = optimizer.sharded_state_dict(of_model, is_loading=False, metadata=metadata)
        if scheduler and loads.get("load_lr_scheduler_states", True):
            state["lr_scheduler"] = scheduler.state_dict()
        return state

    yield make, ckpt_dir, optimizer
