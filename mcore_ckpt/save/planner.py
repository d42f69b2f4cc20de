"""From a sharded state dict to the plan that all ranks of a save agree on.

`collect` finds what one rank writes, and all that can be wrong with it. `lay_out_rank` divides that into balanced
buckets, a file each, and `prepare_write_data` fills them. All files, all offsets, and that all of it fits, are agreed
on before a byte is written.

Layout and plan follow from the structure of the state alone (keys, dtypes, shapes, offsets), and are kept in a
`Structure`. What a save adds is in a `WriteBucket`: the file's name, its bytes_data, its tensor_data, the footer. A
further save of the same model is planned by one exchange of a few bytes. Every rank says which plan it
can use again, by the id of the save that made it. If all name the same one, it is used. Otherwise all ranks plan again,
so no rank waits in another exchange than the others. What has moved from one rank to another is planned again, too.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from mcore_ckpt.core.errors import OptionError, PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import Outcome
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.index import COMMON_STATE_KEY, ObjectEntry, StoredItem, file_name_problem, is_extra_state
from mcore_ckpt.format.integrity import (
    PlannedTable,
    RankPlan,
    data_file_name,
    decoded_plans,
    encode_plan,
    text_bytes,
    with_id,
)
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.format.safe_pickle import warn_of_refused
from mcore_ckpt.format.zip_records import with_members
from mcore_ckpt.image.layout import (
    BucketLayout,
    GlobalPlan,
    TensorSpec,
    WriteBucket,
    fill_bucket,
    lay_out_file,
    objects_end,
)
from mcore_ckpt.state.plan_check import Accesses, check_saves
from mcore_ckpt.state.shards import (
    PLAIN,
    StoredForm,
    check_memory,
    dtype_name,
    main_replicas,
    noted_shapes,
    pointer_of,
    stored_form,
)

if TYPE_CHECKING:
    from mcore_ckpt.directory.commit import Commit
    from mcore_ckpt.save.replicas import ReplicaCheck


def balance(sizes_bytes: Sequence[int], buckets: int) -> list[list[int]]:
    """Distribute items evenly, the largest first; returns the indices of each bucket, neighbours in order."""
    if buckets == 1:
        return [list(range(len(sizes_bytes)))]
    filled = [(0, bucket) for bucket in range(buckets)]
    chosen: list[list[int]] = [[] for _ in range(buckets)]
    for index in sorted(range(len(sizes_bytes)), key=sizes_bytes.__getitem__, reverse=True):
        total_bytes, bucket = filled[0]
        chosen[bucket].append(index)
        heapq.heapreplace(filled, (total_bytes + sizes_bytes[index], bucket))
    for indices in chosen:
        indices.sort()
    return chosen


def check_hint(separation_hint: str) -> None:
    """Raise `OptionError` if names of files cannot begin with it."""
    problem = "names another directory" if "/" in separation_hint else None
    problem = problem or file_name_problem(data_file_name(0, 0, separation_hint))
    if problem:
        raise OptionError(f"separation_hint={separation_hint!r:.80}: a file name that begins with it {problem}")


def split_buckets(
    keys: Sequence[str],
    sizes_bytes: Sequence[int],
    thread_count: int,
    separation_hint: str | None = None,
) -> list[tuple[str, list[int]]]:
    """Choose the buckets of one rank: `(file name prefix, item indices)` for each that is not empty.

    With a separation hint, items whose key starts with it go into files whose names start with it; each of the two
    groups has half of the `thread_count` files.
    """
    groups: list[tuple[str, list[int]]] = [("", list(range(len(keys))))]
    if separation_hint is not None:
        thread_count = max(1, thread_count // 2)
        hinted = [index for index, key in enumerate(keys) if key.startswith(separation_hint)]
        apart = set(hinted)
        groups = [("", [i for i in range(len(keys)) if i not in apart]), (separation_hint, hinted)]
    buckets: list[tuple[str, list[int]]] = []
    for prefix, members in groups:
        sizes = [sizes_bytes[index] for index in members]
        chosen = [indices for indices in balance(sizes, min(thread_count, len(sizes))) if indices]
        buckets += [(prefix, [members[position] for position in indices]) for indices in chosen]
    return buckets


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The files of one rank, in every save of the same structure."""

    specs: tuple[TensorSpec, ...]  # the tensors, in the trainer's order; what a later save compares its own with
    buckets: tuple[BucketLayout, ...]  # the layout of each file
    members: tuple[tuple[int, ...], ...]  # for each file, the indices of its tensors
    objects: tuple[tuple[int, ...], ...]  # for each file, the indices of its objects
    plan: RankPlan  # the same for the coordinator
    object_keys: tuple[str, ...]  # of the objects that the files were laid out for
    separation_hint: str | None  # prefix of keys whose files carry it, too

    def has_room(self, keys: Sequence[str], sizes_bytes: Sequence[int]) -> bool:
        """Whether the objects of a save fit into these files: the same keys, in regions that are long enough."""
        return tuple(keys) == self.object_keys and all(
            not chosen or objects_end([sizes_bytes[index] for index in chosen]) <= bucket.region_bytes
            for bucket, chosen in zip(self.buckets, self.objects, strict=True)
        )

    def object_entries(self, buckets: Sequence[WriteBucket]) -> tuple[ObjectEntry, ...]:
        """Index entries of the objects of one save, file by file."""
        return tuple(
            ObjectEntry(self.object_keys[index], StoredItem(bucket.file.name, offset, len(data)))
            for bucket, chosen in zip(buckets, self.objects, strict=True)
            for index, offset, data in zip(chosen, bucket.offsets, bucket.bytes_data, strict=True)
        )


def prepare_write_data(
    layout: RankLayout,
    objects: Sequence[memoryview],
    tensors: Sequence[torch.Tensor],
    pointers: Sequence[int],
    save_id: bytes,
) -> list[WriteBucket]:
    """Sort what a rank saves into its buckets, bytes_data apart from tensor_data; names carry the save's id."""
    return [
        fill_bucket(
            of_file,
            with_id(of_file.file_name, save_id),
            save_id,
            [objects[index] for index in chosen],
            [tensors[index] for index in members],
            [pointers[index] for index in members],
        )
        for of_file, chosen, members in zip(layout.buckets, layout.objects, layout.members, strict=True)
    ]


def lay_out_rank(
    specs: Sequence[TensorSpec],
    object_keys: Sequence[str],
    object_bytes: Sequence[int],
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> RankLayout:
    """Lay out what a rank writes: `thread_count` files at most, keys with the `separation_hint` apart."""
    sizes = [spec.nbytes for spec in specs]
    chosen = split_buckets([spec.key for spec in specs], sizes, thread_count, separation_hint)
    objects: dict[str, list[int]] = {}  # by the prefix of the files that they go to, in turn
    for index, key in enumerate(object_keys):
        prefix = separation_hint if separation_hint and key.startswith(separation_hint) else ""
        objects.setdefault(prefix, []).append(index)
    with_tensors = {prefix for prefix, _ in chosen}
    chosen += [(prefix, []) for prefix in objects if prefix not in with_tensors]
    prefixes = [prefix for prefix, _ in chosen]
    objects_of_file, buckets, laid_out = [], [], []
    for number, (prefix, indices) in enumerate(chosen):
        own = objects.get(prefix, [])[prefixes[:number].count(prefix) :: prefixes.count(prefix)]
        of_file, of_objects = [specs[index] for index in indices], [object_bytes[index] for index in own]
        name = data_file_name(rank, number, prefix)
        bucket, columns = lay_out_file(name, of_file, [object_keys[index] for index in own], of_objects)
        objects_of_file.append(tuple(own))
        buckets.append(bucket)
        laid_out.append(PlannedTable(name, bucket.image.size_bytes, columns))
    return RankLayout(
        specs=tuple(specs),
        buckets=tuple(buckets),
        members=tuple(tuple(indices) for _, indices in chosen),
        objects=tuple(objects_of_file),
        plan=laid_out,
        object_keys=tuple(object_keys),
        separation_hint=separation_hint,
    )


# Attributes of tensors that are read as they lie in memory, compared with those of the plan: where place in the
# storage, length and what the storage holds are as before, a tensor lies in it as before. The address comes last: what
# a save is given may be made for it, and then it lies elsewhere. Each question takes a tenth of a microsecond, and
# there may be tens of thousands of tensors: they are put by loops of the interpreter's, to as many tensors as stay in
# the processor's cache from one question to the next.
_QUESTIONS: Final[tuple[Callable[[Any], Any], ...]] = (
    torch.Tensor.storage_offset,
    *map(attrgetter, ("dtype", "nbytes", "is_cpu")),
    torch.Tensor.data_ptr,
)
_AT_ONCE: Final = 256

_Answers = list[list[Any]]


class Described(NamedTuple):
    """The shards of one save; the next one describes and checks only what has changed."""

    fields: tuple[list[Any], ...]  # columns of what a specification follows from, except the data
    memory: list[_Answers | None]  # of so many shards at once, what was checked of their memory; see `_answers`
    pointers: list[int]  # where each tensor's bytes lie in order in host memory, as an address; 0 where they do not
    specs: tuple[TensorSpec, ...]  # the specifications


NOTHING: Final = Described((), [], [], ())


class RankState(NamedTuple):
    """One rank's part of a save."""

    tensors: list[torch.Tensor]  # detached, unless they are read by address
    objects: dict[str, memoryview]  # serialized, by key
    described: Described  # the tensors, as the checkpoint will know them
    replicas: dict[str, memoryview]  # objects that another rank saves
    digests: Digests  # of both


def collect(sharded_state_dict: Any, known: Described) -> RankState:
    """What this rank writes of a nested dict/list. `PlanError`: data are missing, or cannot be a shard's own."""
    shards, sharded_objects, other_objects = main_replicas(sharded_state_dict)
    # Asked for once: data may be made when they are asked for, and then the next ones are others.
    tensors = [shard.data for shard in shards]
    # First, since to serialize an object is foreign code: it may move or cut memory that is read by address.
    serialized = _serialized(sharded_objects), _serialized(other_objects)
    described = _described(shards, tensors, known)
    if 0 in described.pointers:
        pairs = zip(tensors, described.pointers, strict=True)
        tensors = [tensor if pointer else tensor.detach() for tensor, pointer in pairs]
    objects, replicas = serialized
    for key, content in objects.items():
        warn_of_refused(key, content)
    digests: dict[bytes, bytes] = {}
    for key, content in (*objects.items(), *replicas.items()):
        # The common state is compared apart; of extra state, ranks have their own.
        if key != COMMON_STATE_KEY and not is_extra_state(key):
            name, own = _hash(text_bytes(key)), _hash(content)
            digests[name] = _DIFFERS if digests.get(name, own) != own else own
    # What else their records are to have, by name.
    members = {leaf.unique_key: found for leaf in sharded_objects if (found := getattr(leaf, "record_members", None))}
    for key, of_record in members.items():
        objects[key] = memoryview(with_members(bytes(objects[key]), of_record))
    return RankState(tensors, objects, described, replicas, digests)


def _serialized(sharded_objects: Sequence[Any]) -> dict[str, memoryview]:
    objects: dict[str, list[Any]] = {}
    for leaf in sharded_objects:
        objects.setdefault(leaf.unique_key, []).append(leaf.data)
    found: dict[str, memoryview] = {}
    for key, values in objects.items():
        torch.save(values, stream := io.BytesIO())  # those of one key together, as Megatron's readers expect
        found[key] = memoryview(stream.getvalue())
    return found


def _answers(some: Sequence[Any]) -> _Answers | None:
    """What their storages hold, and to `_QUESTIONS`; None if a tensor is not read as it lies in memory."""
    if not set(map(type, some)).issubset(PLAIN):
        return None
    try:
        held_bytes = list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, some)))
        answers = [held_bytes, *(list(map(question, some)) for question in _QUESTIONS)]
    except RuntimeError:
        return None
    in_order = all(map(torch.Tensor.is_contiguous, some)) and not any(map(torch.Tensor.is_neg, some))
    return answers if in_order and not any(dtype.is_complex for dtype in set(answers[2])) else None


def _described(shards: Sequence[Any], tensors: list[Any], known: Described) -> Described:
    """Describe what has changed since `known`. Data that are not read as they lie are replaced in `tensors`."""
    fields: tuple[list[Any], ...] = (
        [shard.key for shard in shards],
        list(map(tuple, [shard.global_shape for shard in shards])),
        list(map(tuple, [shard.global_offset for shard in shards])),
        list(map(tuple, [shard.local_shape for shard in shards])),
        [shard.prepend_axis_num for shard in shards],
        [shard.axis_fragmentations for shard in shards],
        [getattr(shard, "flattened_range", None) for shard in shards],
    )
    is_known = len(shards) == len(known.specs)
    is_same = is_known and fields == known.fields
    unchanged = is_same
    memory: list[_Answers | None] = []
    pointers: list[int] = []
    specs: list[TensorSpec] = []
    for number, start in enumerate(range(0, len(shards), _AT_ONCE)):
        part = slice(start, start + _AT_ONCE)
        answers, before = _answers(tensors[part]), known.memory[number] if is_known else None
        memory.append(answers)
        is_as_before = (
            answers is not None
            and before is not None
            and answers[:-1] == before[:-1]
            and (is_same or all(one[part] == former[part] for one, former in zip(fields, known.fields, strict=True)))
        )
        if is_as_before and answers is not None and before is not None:
            moved = zip(known.pointers[part], answers[-1], strict=True)
            pointers += [pointer and address for pointer, address in moved]  # (that of a device is none of the host's)
            specs += known.specs[part]
            unchanged = unchanged and answers[-1] == before[-1]
            continue
        unchanged = False
        addresses = [0] * len(tensors[part])  # 0 where a tensor is not read as it lies in host memory
        if answers is not None:
            addresses = [
                address if is_cpu and first * dtype.itemsize + nbytes <= held_bytes else 0
                for held_bytes, first, dtype, nbytes, is_cpu, address in zip(*answers, strict=True)
            ]
        for index, address in enumerate(addresses, start):
            if not address:
                tensors[index] = _own_data(shards[index], tensors[index])
            pointers.append(address or pointer_of(tensors[index]))
            specs.append(_specified(shards[index], [column[index] for column in fields], tensors[index]))
    return known if unchanged else Described(fields, memory, pointers, tuple(specs))


def _where(shard: Any) -> str:
    return f"{shard.key} at offset {tuple(shard.global_offset)}"


def _own_data(shard: Any, data: Any) -> torch.Tensor:
    """The data of a shard as they lie in memory, which is read by address: so it has to be there, all of it."""
    if data is None:
        raise PlanError(f"{_where(shard)}: the shard has no data to save")
    tensor: torch.Tensor = data.detach() if data.requires_grad else data
    if tensor.layout != torch.strided or tensor.is_meta:
        raise PlanError(
            f"{_where(shard)}: expected a dense tensor with data, got one of layout {tensor.layout} on {tensor.device};"
            " convert it before the save"
        )
    if type(data) in PLAIN or tensor.is_cpu:
        check_memory(tensor, partial(_where, shard))
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _specified(shard: Any, fields: Sequence[Any], tensor: torch.Tensor) -> TensorSpec:
    key, shape, offsets, local_shape, prepended, _, stretch = fields
    form = StoredForm(shape, offsets, (1,) * prepended + local_shape) if stretch is None else stored_form(shard)
    if tensor.numel() != math.prod(form.sizes):
        raise PlanError(
            f"{_where(shard)}: expected {math.prod(form.sizes)} elements, as its sizes are {list(form.sizes)}, got data"
            f" of shape {list(tensor.shape)}; the data were replaced after the shard was described"
        )
    dtype = dtype_name(tensor.dtype)
    return TensorSpec(key, dtype, form.shape, form.offsets, form.sizes, tensor.nbytes, form.original_shape)


# By a hash of its key, that of an object; `_DIFFERS` if ranks have several.
Digests = Mapping[bytes, bytes]
_DIFFERS: Final = b""


def _hash(content: Any) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


_SHOWN = 5


class Validation(NamedTuple):
    """What a save has to check besides the plan; the same on all ranks. (Megatron's validation of access integrity.)"""

    accesses: Accesses  # all that this rank holds, main replicas or not
    common_digest: bytes | None = None  # of the state that all ranks should have alike
    compare_common: Callable[[RankGroup], None] | None = None  # called on all ranks where the digests are not the same
    # The main replicas are what ranks save, though other ranks may save them than hold them.
    mains_are_saved: bool = False


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is asked of a save, the same on all ranks."""

    directory: Path  # of the checkpoint
    options: SaveOptions  # see `SaveOptions`
    thread_count: int  # files that each rank writes, at most
    separation_hint: str | None = None  # prefix of keys that get files of their own
    is_async: bool = False  # take a snapshot, which another process writes during training
    validation: Validation | None = None  # what is to be checked besides the plan
    layout: Callable[[], str] = str  # of the job, as text: where it is the same, ranks of the same number hold the same
    has_common_file: bool = False  # the common state is a file: no object may have the key that it has where it is none
    earlier: Commit | None = None  # on the coordinator: of the same call, begun with that file


@dataclass(slots=True)
class Planned:
    """On the coordinator: the checked plan of all ranks, and its encoder once a writer or a commit has made that."""

    plan: GlobalPlan
    held: Sequence[bytes] = ()  # by rank, what it holds of what is to be compared (`held_slices`)
    encoder: MetadataEncoder | None = None
    _replicas: ReplicaCheck | None = None

    @property
    def replicas(self) -> ReplicaCheck:
        """What compares replicas with what is saved, made when it is first needed."""
        if self._replicas is None:
            from mcore_ckpt.save.replicas import ReplicaCheck  # (few saves compare them)

            self._replicas = ReplicaCheck(self.plan, self.held)
        return self._replicas


@dataclass(slots=True)
class Structure:
    """What one strategy keeps between its saves."""

    layout: RankLayout | None = None  # this rank's files
    planned: Planned | None = None  # on the coordinator, every rank's plan
    # The shards of the last save. To compare takes a fraction of the time of describing them.
    described: Described = NOTHING
    # Rank, number of ranks and `thread_count` when it was laid out: files and plans are of those. A restart inside the
    # process may give it another place, and a setting may be changed between two saves.
    laid_out_for: tuple[int, int, int] | None = None
    laid_out_in: bytes = b""
    accesses: Accesses | None = None  # what was checked with it, if that was asked for


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank is going to write, and on the coordinator what all are; `reused`: as in the save before."""

    layout: RankLayout
    planned: Planned | None
    save_id: bytes
    reused: bool


class Proposal(NamedTuple):
    """What ranks say ahead of a save: one, or several merged."""

    plan: bytes  # that they can use, by the id of the save that made it; empty: none, or several
    left_out: bool  # one of them wants no save now
    second_tiers: frozenset[str | None]
    common: frozenset[bytes | None]  # digests of the common state
    names: frozenset[str]  # of the directory
    objects: Digests

    def merged(self, other: Proposal) -> Proposal:
        """Both in one."""
        return Proposal(
            self.plan if self.plan == other.plan else b"",
            self.left_out or other.left_out,
            self.second_tiers | other.second_tiers,
            self.common | other.common,
            self.names | other.names,
            {
                key: _DIFFERS if self.objects.get(key, own) != own else own
                for key, own in {**self.objects, **other.objects}.items()
            },
        )

    def settle(self, open_directory: Callable[[], bytes]) -> Agreement | None:
        """On the coordinator, of all ranks: open the directory; None if the save is left out."""
        if len(self.names) > 1:
            # With a second tier each of them would pass for a node's own part of one checkpoint.
            raise SaveError(
                f"the ranks save to different checkpoints, {', '.join(sorted(self.names)[:_SHOWN])}: they are at "
                "different iterations, or were given different directories"
            )
        if len(self.second_tiers) > 1:
            raise OptionError(
                f"drain_to differs between the ranks: {sorted(map(str, self.second_tiers))}; set "
                "MCORE_CKPT_DRAIN_TO alike on all hosts, or nowhere"
            )
        if None in self.common and len(self.common) > 1:
            raise OptionError(
                "the access integrity is to be validated on some ranks of the save, and not on others: pass "
                "validate_access_integrity alike on all"
            )
        if self.left_out:
            return None
        differing = frozenset(key for key, digest in self.objects.items() if digest == _DIFFERS)
        return Agreement(self.plan, open_directory(), len(self.common) > 1, differing)


class Agreement(NamedTuple):
    """What the ranks of a save have agreed on: the plan to be used, empty if they plan together; the save's id."""

    plan: bytes
    save_id: bytes
    common_differs: bool  # between ranks, the state that all should have alike
    objects_differ: frozenset[bytes]  # between ranks that hold replicas of them: hashes of their keys


def agree(
    own: Outcome[RankState],
    structure: Structure,
    group: RankGroup,
    request: SaveRequest,
    left_out: bool,
    open_directory: Callable[[], bytes],
) -> Agreement | None:
    """Settle with all ranks which plan is used, and let the coordinator open the directory: one exchange. None, and
    nothing is touched, if a rank wants the save `left_out`. What a rank has failed with is raised on all ranks.
    """
    common = None if request.validation is None else request.validation.common_digest
    return group.run_merged(
        "prepare the save",
        lambda: Proposal(
            plan=structure.laid_out_in if _fits(structure, own.value(), group, request) else b"",
            left_out=left_out,
            second_tiers=frozenset([request.options.drain_to]),
            common=frozenset([common]),
            names=frozenset([request.directory.absolute().name]),
            objects=own.value().digests,
        ),
        Proposal.merged,
        partial(Proposal.settle, open_directory=open_directory),
        wrap=SaveError,
    )


def compare_claimed(
    agreement: Agreement, state: RankState, structure: Structure, group: RankGroup, request: SaveRequest
) -> tuple[RankState, Agreement]:
    """All ranks: compare what claims to be equal and is not, the common state and replicas of objects. Each version of
    an object is kept; where one then needs more room than the plan has, the ranks plan again.
    """
    validation = request.validation
    if agreement.common_differs and validation is not None and validation.compare_common is not None:
        validation.compare_common(group)
    if not agreement.objects_differ:
        return state, agreement
    from mcore_ckpt.save.replicas import keep_versions  # (few saves have such objects)

    keys = {key for key in (*state.objects, *state.replicas) if _hash(text_bytes(key)) in agreement.objects_differ}
    kept = keep_versions(
        *(keys, state.objects, state.replicas, request.layout(), group, str(request.directory)),
        refused=request.options.compare_replicas == "raise",
    )
    state = state._replace(objects=kept)
    is_longer = not _fits(structure, state, group, request)
    if group.any("plan the kept objects", is_longer, wrap=SaveError):
        agreement = agreement._replace(plan=b"")
    return state, agreement


def plan_together(
    state: RankState,
    structure: Structure,
    agreement: Agreement,
    group: RankGroup,
    request: SaveRequest,
    held: Callable[[], bytes] | None = None,
) -> SavePlan:
    """Lay out this rank's files; the coordinator checks all plans. `held`: the slices to be compared."""
    structure.layout = structure.planned = structure.accesses = None
    specs, validation = state.described.specs, request.validation
    lay_out = partial(
        lay_out_rank,
        specs,
        list(state.objects),
        list(map(len, state.objects.values())),
        rank=group.rank,
        thread_count=request.thread_count,
        separation_hint=request.separation_hint,
    )
    layout = Outcome.of(lay_out)

    def encode() -> list[bytes]:
        """Plan and shapes of stored forms; slices that it holds, to compare them; all its shards, to validate."""
        own_shapes = {spec.key: spec.original_shape for spec in specs if spec.original_shape is not None}
        parts = [pickle.dumps((encode_plan(layout.value().plan), own_shapes)), b"" if held is None else held()]
        if validation is not None:
            parts += validation.accesses.told(specs, mains_are_written=validation.mains_are_saved)
        return parts

    gathered = group.gather_parts("plan the save", encode, wrap=SaveError) or []

    def check() -> None:
        plans = [pickle.loads(of_rank[0]) for of_rank in gathered]
        others = [of_rank[2:] for of_rank in gathered]
        plan = global_plan(plans, others if all(others) else ())
        structure.planned = Planned(plan, held=[of_rank[1] for of_rank in gathered])

    group.run_on_coordinator("check the plan", check, wrap=SaveError)
    structure.layout = layout.value()
    structure.accesses = None if validation is None else validation.accesses
    structure.laid_out_for, structure.laid_out_in = (group.rank, group.size, request.thread_count), agreement.save_id
    return SavePlan(structure.layout, structure.planned, agreement.save_id, reused=False)


def _fits(structure: Structure, state: RankState, group: RankGroup, request: SaveRequest) -> bool:
    """Whether this rank can use the plan of the save before again."""
    layout, validation = structure.layout, request.validation
    return (
        layout is not None
        and structure.laid_out_for == (group.rank, group.size, request.thread_count)
        and (layout.separation_hint, layout.specs) == (request.separation_hint, state.described.specs)
        and layout.has_room(list(state.objects), list(map(len, state.objects.values())))
        and (validation is None or validation.accesses == structure.accesses)
    )


def global_plan(
    told: Sequence[tuple[bytes, Mapping[str, tuple[int, ...]]]], accesses: Sequence[Sequence[bytes]] = ()
) -> GlobalPlan:
    """Put all ranks' plans and notes together; check them, and what `accesses` tell. Raises `PlanError`."""
    plans = decoded_plans(encoded for encoded, _ in told)
    check_saves(plans, accesses)
    files = sorted((file.name, file.size_bytes) for plan in plans for file in plan)
    return GlobalPlan(tuple(encoded for encoded, _ in told), tuple(files), noted_shapes(shapes for _, shapes in told))
