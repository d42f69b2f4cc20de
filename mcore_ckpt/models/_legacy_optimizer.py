"""Which parameter a rank's optimizer state belongs to, in files of `--ckpt-format torch`.

State is kept by the number of a parameter in its group, or in flat buffers, without any names. The order is that of
the model's state dict, which the file holds: groups take parameters in that order, buffers in the reverse of it. That
it is so is checked for each parameter: numbers, shapes and lengths have to match exactly, and the optimizer's copy of a
parameter, converted to the model's dtype, has to be the model's parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.models._legacy_files import OPTIMIZER_FILE, Arguments, RankFiles
from mcore_ckpt.models._torch_files import file_range
from mcore_ckpt.reshard.partition import EMBEDDING, OUTPUT, is_expert_key
from mcore_ckpt.reshard.view import FileRange

# A buffer of the distributed optimizer begins each parameter at a multiple of so many elements.
_ALIGNMENTS = (64, 1)
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK = 40_000_000, 1_000_000
_FLAT_STATES = ("param", "exp_avg", "exp_avg_sq")
# What a state dict holds besides parameters.
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")


class RankParameter(Protocol):
    """What is asked of a parameter of a rank."""

    @property
    def stored(self) -> str:
        """Its key in the rank's state dict."""

    @property
    def chunk(self) -> int:
        """Number of the model's chunk."""

    @property
    def tensor(self) -> FileTensor:
        """The model's own."""


class StatePart(NamedTuple):
    """A tensor of the optimizer in the shape of parameter `number` (of those given), and where it lies."""

    number: int
    state: str
    range: FileRange


class FlatLayout(NamedTuple):
    """How a buffer is laid out: alignment of parameters, and elements after which a bucket ends (None: one for all)."""

    alignment: int
    bucket_elements: int | None


def main_parameter(distributed: bool) -> str:
    """What `torch_dist` calls the optimizer's own copy of a parameter."""
    return "param" if distributed else "fp32_param"


def optimizers_of(rank: RankFiles) -> list[dict[str, Any]]:
    """The optimizers of a rank; experts on several ranks have one of their own."""
    given = rank.state.get("optimizer")
    found: list[Any] = given if type(given) is list else [given]
    for optimizer in found:
        groups = _inner(optimizer).get("param_groups") if isinstance(optimizer, dict) else None
        if type(groups) is not list or not all(isinstance(group, dict) for group in groups):
            raise CorruptCheckpointError(f"{rank.file}: optimizer: expected groups of parameters (param_groups)")
    return found


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What torch's optimizer has given; under mixed precision, it lies inside of what Megatron's has."""
    inner = optimizer.get("optimizer", optimizer)
    return inner if isinstance(inner, Mapping) else {}


def is_distributed(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer keeps its state in flat buffers, in a file of its own."""
    return "state" not in _inner(optimizer)


def state_parts(
    rank: RankFiles, parameters: Sequence[RankParameter], arguments: Arguments
) -> Iterator[tuple[list[StatePart], bool]]:
    """The state of each of a rank's optimizers, and whether it is a distributed one. Raises `CorruptCheckpointError` if
    state and parameters do not match, `OptionError` for a form not known here.
    """
    covered: set[int] = set()
    for position, optimizer in enumerate(optimizers_of(rank)):
        groups = _group_members(rank.file, _inner(optimizer)["param_groups"], parameters, arguments)
        for number in (number for group in groups for number in group):
            if number in covered:
                raise OptionError(
                    f"{rank.file}: two optimizers have {parameters[number].stored} by what tells their groups apart; "
                    "such groups are not known here. Leave the optimizer's state out (--drop-optimizer)"
                )
            covered.add(number)
        if is_distributed(optimizer):
            yield (
                _flat_parts(
                    rank, position, sorted(number for group in groups for number in group), parameters, arguments
                ),
                True,
            )
        else:
            yield _plain_parts(rank, optimizer, groups, parameters), False
    left = [parameter.stored for n, parameter in enumerate(parameters) if n not in covered and not is_buffer(parameter)]
    if left:
        raise OptionError(
            f"{rank.file}: no group of the optimizer has {left[0]}; parameters that are not trained, and groups of "
            "another kind, are not known here. Leave the optimizer's state out (--drop-optimizer)"
        )


def is_buffer(parameter: RankParameter) -> bool:
    """Whether a tensor of the model is none that is trained."""
    return parameter.stored.rpartition(".")[2] in _BUFFERS


def _group_members(
    where: str, groups: Sequence[Mapping[str, Any]], parameters: Sequence[RankParameter], arguments: Arguments
) -> list[list[int]]:
    """Numbers of the parameters of each group of an optimizer, in the order given. Raises `OptionError` if nothing that
    is known distinguishes two groups.
    """
    experts_apart = arguments.count("expert_model_parallel_size", default=1) > 1
    decoupled = any(_said(group, "is_decoupled_lr") for group in groups)

    def kind(parameter: RankParameter) -> tuple[bool, bool, bool]:
        name, shape = parameter.stored, parameter.tensor.shape
        norm_of_queries = ".q_layernorm." in name or ".k_layernorm." in name
        undecayed = (name.endswith(".bias") or len(shape) == 1) and not (
            arguments.flag("apply_wd_to_qk_layernorm") and norm_of_queries
        )
        outer = name.startswith(("embedding.word_embeddings.", "output_layer."))
        return undecayed, experts_apart and is_expert_key(name), decoupled and outer

    found: list[list[int]] = []
    kinds: dict[tuple[bool, bool, bool], int] = {}
    for position, group in enumerate(groups):
        wanted = (
            _said(group, "wd_mult") == 0.0,
            bool(_said(group, "is_expert_parallel")),
            bool(_said(group, "is_decoupled_lr")),
        )
        if wanted in kinds:
            raise OptionError(
                f"{where}: groups {kinds[wanted]} and {position} of the optimizer differ in nothing that tells "
                "their parameters apart; leave the optimizer's state out (--drop-optimizer)"
            )
        kinds[wanted] = position
        found.append([n for n, p in enumerate(parameters) if not is_buffer(p) and kind(p) == wanted])
    return found


def _said(group: Mapping[str, Any], name: str) -> Any:
    return group.get(name, group.get(f"pre_{name}"))


def _plain_parts(
    rank: RankFiles, optimizer: Mapping[str, Any], groups: Sequence[Sequence[int]], parameters: Sequence[RankParameter]
) -> list[StatePart]:
    """State by number of the parameter."""
    inner, found = _inner(optimizer), []
    state = inner["state"]
    mains = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    if not isinstance(state, dict) or (mains is not None and (type(mains) is not list or len(mains) != len(groups))):
        raise CorruptCheckpointError(f"{rank.file}: optimizer: expected state by number, and parameters by group")
    for position, (group, members) in enumerate(zip(inner["param_groups"], groups, strict=True)):
        numbers = group.get("params")
        if type(numbers) is not list or len(numbers) != len(members):
            count = len(numbers) if type(numbers) is list else 0
            raise OptionError(
                f"{rank.file}: group {position} of the optimizer has {count} parameters; by its settings, "
                f"{len(members)} of the model's belong to it. Leave the optimizer's state out (--drop-optimizer)"
            )
        own = mains[position] if mains is not None else []
        if mains is not None and (type(own) is not list or len(own) != len(members)):
            raise OptionError(
                f"{rank.file}: group {position} of the optimizer has copies of {len(own)} parameters, expected "
                f"{len(members)}; parameters of other dtypes next to them are not known here. Leave the optimizer's "
                "state out (--drop-optimizer)"
            )
        for order, (number, member) in enumerate(zip(numbers, members, strict=True)):
            states = state.get(number)
            if not isinstance(states, dict):
                raise CorruptCheckpointError(f"{rank.file}: optimizer: no state of parameter {number!r:.40}")
            named = {str(name): value for name, value in states.items() if name != "step"}
            if mains is not None:
                named[main_parameter(distributed=False)] = own[order]
            shape = parameters[member].tensor.shape
            for name, value in named.items():
                if type(value) is not FileTensor or value.shape != shape or "." in name:
                    got = list(value.shape) if type(value) is FileTensor else type(value).__name__
                    raise CorruptCheckpointError(
                        f"{rank.file}: optimizer: {name:.40} of parameter {number!r:.40} is {got}; expected "
                        f"{list(shape)}, the shape of {parameters[member].stored}"
                    )
                found.append(StatePart(member, name, file_range(rank.file, value, rank.model)))
    return found


# --------------------------------------------------------------------------------------------------------- flat buffers


def _flat_parts(
    rank: RankFiles,
    position: int,
    members: Sequence[int],
    parameters: Sequence[RankParameter],
    arguments: Arguments,
) -> list[StatePart]:
    """State in flat buffers, by the first layout whose lengths are right."""
    if rank.optimizer is None:
        return []
    where = f"{rank.folder}/{OPTIMIZER_FILE}"
    value = rank.optimizer.value
    if type(value) is list:
        value = value[position] if position < len(value) else None
        if value is None:
            return []  # of another data parallel rank, which has a file of its own
    elif position:
        raise CorruptCheckpointError(f"{where}: holds the state of one optimizer, expected {position + 1}")
    if not isinstance(value, dict) or value.get("buckets_coalesced") is not True:
        raise OptionError(
            f"{where}: is in the form from before February 2024 (buckets that are not joined); load it with Megatron "
            "by --ckpt-convert-update-legacy-dist-opt-format and save it again, or leave it out (--drop-optimizer)"
        )
    buffers = _buffers(value, where)
    wanted = _buffer_members(members, parameters)
    if len(buffers) != len(wanted):
        raise OptionError(f"{where}: {len(buffers)} buffers, expected {len(wanted)} for the parameters in {rank.file}")
    found = []
    for (dtype, tensors), (chunk, expected_dtype, numbers) in zip(buffers, wanted, strict=True):
        if dtype != expected_dtype:
            raise CorruptCheckpointError(f"{where}: a buffer of {dtype}, expected {expected_dtype}")
        length = tensors["param"].shape[0]
        starts = _places_of(rank, chunk, numbers, parameters, length, arguments, where)
        for name, tensor in tensors.items():
            for number, start in starts.items():
                shape = parameters[number].tensor.shape
                flat = file_range(where, tensor, rank.optimizer)
                part = flat._replace(offset=flat.offset + 4 * start, nbytes=4 * math.prod(shape), shape=shape)
                found.append(StatePart(number, name, part))
    return found


def _buffers(value: Mapping[Any, Any], where: str) -> list[tuple[str, dict[str, FileTensor]]]:
    """Dtype and tensors of each buffer, in their order."""
    found = []
    count = sum(type(key) is int for key in value)
    for number in range(count):
        by_dtype = value.get(number)
        if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
            raise CorruptCheckpointError(f"{where}: buffer {number}: expected tensors by dtype")
        ((dtypes, tensors),) = by_dtype.items()
        dtype = str(dtypes[0] if type(dtypes) is tuple and dtypes else dtypes).removeprefix("torch.")
        right = isinstance(tensors, dict) and set(_FLAT_STATES) <= set(tensors)
        flat = {name: tensors[name] for name in _FLAT_STATES} if right else {}
        length = tensors.get("numel_unpadded") if isinstance(tensors, dict) else None
        if not right or any(
            type(tensor) is not FileTensor or tensor.dtype != "float32" or tensor.shape != (length,)
            for tensor in flat.values()
        ):
            raise CorruptCheckpointError(
                f"{where}: buffer {number}: expected {', '.join(_FLAT_STATES)} in float32 of {length!r:.40} elements"
            )
        found.append((dtype, flat))
    return found


def _buffer_members(members: Iterable[int], parameters: Sequence[RankParameter]) -> list[tuple[int, str, list[int]]]:
    """Chunk, dtype and parameters of each buffer: one for each dtype of a chunk, in the order of their first one."""
    found: dict[tuple[int, str], list[int]] = {}
    for number in members:
        parameter = parameters[number]
        found.setdefault((parameter.chunk, parameter.tensor.dtype), []).append(number)
    chunks = sorted({chunk for chunk, _ in found})
    return [(chunk, dtype, found[chunk, dtype]) for wanted in chunks for chunk, dtype in found if chunk == wanted]


def _places_of(
    rank: RankFiles,
    chunk: int,
    numbers: Sequence[int],
    parameters: Sequence[RankParameter],
    length: int,
    arguments: Arguments,
    where: str,
) -> dict[int, int]:
    tied = not arguments.flag("untie_embeddings_and_output_weights")
    shared = tied and arguments.count("pipeline_model_parallel_size", default=1) > 1
    alone = {number for number in numbers if shared and parameters[number].stored in (EMBEDDING, OUTPUT)}
    sizes = {number: math.prod(parameters[number].tensor.shape) for number in numbers}
    totals = []
    for layout in _layouts(rank.pp, chunk, arguments, sum(sizes.values())):
        starts, total = flat_places(sizes, alone, layout)
        if total == length:
            return starts
        totals.append(total)
    raise OptionError(
        f"{where}: a buffer of {length} elements; the parameters in {rank.file}, laid out as Megatron does, take "
        f"{' or '.join(map(str, dict.fromkeys(totals)))}. Where each lies is not known; leave the optimizer's state "
        "out (--drop-optimizer)"
    )


def _layouts(stage: int, chunk: int, arguments: Arguments, elements: int) -> list[FlatLayout]:
    """How a buffer may be laid out, most likely first."""
    sizes: list[int | None] = [None]
    if arguments.flag("overlap_grad_reduce") and stage == 0 and chunk == 0:
        ranks = arguments.count("data_parallel_size", default=1) * arguments.count("context_parallel_size", default=1)
        size = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK * ranks)
        if arguments.values.get("ddp_num_buckets"):
            size = max(1, elements // arguments.count("ddp_num_buckets"))
        elif arguments.values.get("ddp_bucket_size"):
            size = arguments.count("ddp_bucket_size")
        sizes.insert(0, size)
    return [FlatLayout(alignment, size) for alignment in _ALIGNMENTS for size in sizes]


def flat_places(sizes: Mapping[int, int], alone: Iterable[int], layout: FlatLayout) -> tuple[dict[int, int], int]:
    """The first element of each parameter in a buffer whose buckets are joined without padding, and its length.
    `sizes`: elements in the model's order, which the buffer reverses; those of `alone` have a bucket of their own.
    """
    own = set(alone)
    starts: dict[int, int] = {}
    bucket = inside = 0
    for number in reversed(list(sizes)):
        inside = -(-inside // layout.alignment) * layout.alignment
        if number in own and inside:
            bucket, inside = bucket + inside, 0
        starts[number] = bucket + inside
        inside += sizes[number]
        if number in own or (layout.bucket_elements is not None and inside >= layout.bucket_elements):
            bucket, inside = bucket + inside, 0
    return starts, bucket + inside
