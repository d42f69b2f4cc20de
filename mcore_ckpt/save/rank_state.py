"""What one rank writes of a sharded state dict: its main replicas, described, checked, and its objects serialized.

All that can be wrong with one rank's state is found here, in one call. A save makes it where the other ranks are told
of its error: a rank that raised on its own would leave them waiting for it.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.layout.buckets import TensorSpec
from mcore_ckpt.layout.dense_tensors import check_memory, pointer_of
from mcore_ckpt.layout.shards import StoredForm, main_replicas, stored_form
from mcore_ckpt.layout.torch_classes import dtype_name

# What the storage of a subclass holds is not known.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Each question to torch takes a tenth of a microsecond, and there may be tens of thousands of tensors: they are put by
# loops of the interpreter's, to as many tensors as stay in the processor's cache from one question to the next.
_QUESTIONS: Final[tuple[Callable[[Any], Any], ...]] = (
    torch.Tensor.data_ptr,  # (`_ADDRESS`)
    torch.Tensor.is_contiguous,
    torch.Tensor.is_neg,
    torch.Tensor.storage_offset,
    *map(attrgetter, ("dtype", "nbytes", "is_cpu")),
)
_ANSWERS: Final = len(_QUESTIONS) + 2
_ADDRESS: Final = 1  # (the first answer is the type)
_ASKED_AT_ONCE: Final = 256


class Described(NamedTuple):
    """The shards of one save, in columns of an entry for each, for the next save to compare: what has not changed is
    neither worked out nor checked again.
    """

    fields: tuple[list[Any], ...]  # what a specification follows from, except the data; see `_fields`
    memory: tuple[Sequence[Any], ...]  # what was checked of each tensor's memory; see `_memory`
    pointers: list[int]  # where each tensor's bytes lie in order in host memory, as an address; 0 where they do not
    specs: tuple[TensorSpec, ...]  # the specifications


NOTHING: Final = Described((), (), [], ())


class RankState(NamedTuple):
    """One rank's part of a save: tensors (detached, unless they are read by address), objects by key in serialized
    form, and the tensors as the checkpoint will know them.
    """

    tensors: list[torch.Tensor]
    objects: list[tuple[str, memoryview]]
    described: Described

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors' specifications."""
        return self.described.specs

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


def collect(sharded_state_dict: Any, known: Described) -> RankState:
    """What this rank writes of a nested dict/list of Megatron's sharded tensors and objects. `PlanError`: a shard has
    no data, or data that cannot be its own; serializing an object may raise anything.
    """
    shards, sharded_objects = main_replicas(sharded_state_dict)
    tensors = [shard.data for shard in shards]
    fields = _fields(shards)
    described = known
    if not shards or len(shards) != len(known.specs):
        described = _described(shards, tensors, fields, NOTHING, range(len(shards)))
    else:
        others, elsewhere = _moved(tensors, known.memory)
        others |= _changed(fields, known.fields)
        if others or elsewhere:
            described = _described(shards, tensors, fields, known, sorted(others), elsewhere)
    if 0 in described.pointers:
        pairs = zip(tensors, described.pointers, strict=True)
        tensors = [tensor if pointer else tensor.detach() for tensor, pointer in pairs]
    objects: dict[str, list[Any]] = {}
    for leaf in sharded_objects:
        objects.setdefault(leaf.unique_key, []).append(leaf.data)
    serialized = [(key, memoryview(serialize_objects(values).getvalue())) for key, values in objects.items()]
    return RankState(tensors, serialized, described)


def _fields(shards: Sequence[Any]) -> tuple[list[Any], ...]:
    """All that the specification of a shard follows from, except its data: cheap to get and to compare."""
    return (
        [shard.key for shard in shards],
        list(map(tuple, [shard.global_shape for shard in shards])),
        list(map(tuple, [shard.global_offset for shard in shards])),
        list(map(tuple, [shard.local_shape for shard in shards])),
        [shard.prepend_axis_num for shard in shards],
        [shard.axis_fragmentations for shard in shards],
        [getattr(shard, "flattened_range", None) for shard in shards],
    )


def _changed(fields: tuple[list[Any], ...], before: tuple[list[Any], ...]) -> set[int]:
    """Which shards are not described as before."""
    changed: set[int] = set()
    for column, known in zip(fields, before, strict=True):
        if column != known:
            pairs = enumerate(zip(column, known, strict=True))
            changed.update(index for index, (value, former) in pairs if value != former)
    return changed


def _answers(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """What is compared of tensors that are read as they lie in memory, to know that this is as it was: where address,
    length and place in the storage are as before, and so is what the storage holds, a tensor lies in it as before.
    """
    yield list(map(type, tensors))
    for question in _QUESTIONS:
        yield list(map(question, tensors))
    yield list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)))


def _memory(some: Sequence[Any]) -> list[list[Any]]:
    """The answers of tensors, in columns; one that is not read as it lies there has no type, which is no answer."""
    if all(kind in _PLAIN for kind in map(type, some)):
        with contextlib.suppress(RuntimeError):  # one has no memory that could be asked for
            types, addresses, contiguous, negated, starts, dtypes, *others = _answers(some)
            in_order = zip(types, contiguous, negated, dtypes, strict=True)
            kept = [
                kind if is_contiguous and not is_neg and not dtype.is_complex else None
                for kind, is_contiguous, is_neg, dtype in in_order
            ]
            return [kept, addresses, contiguous, negated, starts, dtypes, *others]
    if len(some) == 1:
        return [[None] for _ in range(_ANSWERS)]
    return [[answer for (answer,) in column] for column in zip(*(_memory([one]) for one in some), strict=True)]


def _moved(tensors: Sequence[Any], before: tuple[Sequence[Any], ...]) -> tuple[set[int], dict[int, int]]:
    """Which tensors' memory has to be checked again; and the addresses of those that only lie elsewhere: what a save is
    given may be made for it, and then all of them do.
    """
    others: set[int] = set()
    elsewhere: dict[int, int] = {}
    for start in range(0, len(tensors), _ASKED_AT_ONCE):
        _compare(tensors[start : start + _ASKED_AT_ONCE], before, start, others, elsewhere)
    return others, elsewhere


def _compare(
    some: Sequence[Any], before: tuple[Sequence[Any], ...], start: int, others: set[int], elsewhere: dict[int, int]
) -> None:
    stop = start + len(some)
    try:
        # What is of another class may not be asked for anything.
        answers = [] if list(map(type, some)) != before[0][start:stop] else list(_answers(some))
    except RuntimeError:  # one has no memory that could be asked for
        answers = []
    if not answers and len(some) == 1:
        others.add(start)
    elif not answers:
        for number, tensor in enumerate(some, start):
            _compare([tensor], before, number, others, elsewhere)
    for question, answered in enumerate(answers):
        former = before[question][start:stop]
        if answered != former:
            pairs = enumerate(zip(answered, former, strict=True), start)
            differing = [(index, answer) for index, (answer, known) in pairs if answer != known]
            if question == _ADDRESS:
                elsewhere.update(differing)
            else:
                others.update(index for index, _ in differing)


def _described(
    shards: Sequence[Any],
    tensors: list[Any],
    fields: tuple[list[Any], ...],
    known: Described,
    others: Sequence[int],
    elsewhere: Mapping[int, int] = MappingProxyType({}),
) -> Described:
    """The shards as described before, but for addresses `elsewhere`, and for `others`, which are looked at; their data
    in `tensors` are replaced.
    """
    number = len(shards)
    specs: list[Any] = [*known.specs] or [None] * number
    pointers = [*known.pointers] or [0] * number
    memory = [[*column] for column in known.memory] or [[None] * number for _ in range(_ANSWERS)]
    for index, address in elsewhere.items():
        memory[_ADDRESS][index] = address
        pointers[index] = pointers[index] and address  # (that of another device is none of the host's)
    # Asked for once: data may be made when they are asked for, and then the next ones are others.
    given = [tensors[index] for index in others]
    for start in range(0, len(others), _ASKED_AT_ONCE):
        some = others[start : start + _ASKED_AT_ONCE]
        answers = _memory(given[start : start + _ASKED_AT_ONCE])
        for column, answered in zip(memory, answers, strict=True):
            for index, answer in zip(some, answered, strict=True):
                column[index] = answer
        for index, address in zip(some, _addresses(answers), strict=True):
            if address:
                pointers[index] = address
            else:
                tensors[index] = _own_data(shards[index], tensors[index])
                pointers[index] = pointer_of(tensors[index])
    for index in others:
        same = bool(known.specs) and all(
            column[index] == before[index] for column, before in zip(fields, known.fields, strict=True)
        )
        tensor = tensors[index]
        if not same or (specs[index].dtype, specs[index].nbytes) != (dtype_name(tensor.dtype), tensor.nbytes):
            specs[index] = _specified(shards[index], [column[index] for column in fields], tensor)
    return Described(fields, tuple(memory), pointers, tuple(specs))


def _addresses(answers: Sequence[Sequence[Any]]) -> list[int]:
    """Of tensors with these answers, where each is read as it lies in host memory; 0 where it has to be looked at."""
    return [
        address if kind is not None and is_cpu and start * dtype.itemsize + nbytes <= held_bytes else 0
        for kind, address, _, _, start, dtype, nbytes, is_cpu, held_bytes in zip(*answers, strict=True)
    ]


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
    if type(data) in _PLAIN or tensor.is_cpu:
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


def serialize_objects(values: list[Any]) -> io.BytesIO:
    """Serialize the objects that share one key: `torch.save` of their list, which is what Megatron's readers expect."""
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream
