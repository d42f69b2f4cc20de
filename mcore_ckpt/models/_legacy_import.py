"""Checkpoints of `--ckpt-format torch`, one file for each model-parallel rank, as `torch_dist`.

    state dict of each rank -> sharded key, layer and expert of each parameter -> the slice of the tensor that it is
    -> a view of the ranks' tensors under sharded keys -> a reshard like any other

No model is built, and Megatron is not needed. How a parameter is divided comes from the partition table. What ranks
hold alike has to be alike; what is missing, too much, or unknown is an error that names it.

A rank's optimizer state is kept by the number of a parameter in its group, or in flat buffers, without any names. The
order is that of the model's state dict, which the file holds: groups take parameters in that order, buffers in the
reverse of it. That it is so is checked for each parameter: numbers, shapes and lengths have to match exactly, and the
optimizer's copy of a parameter, converted to the model's dtype, has to be the model's parameter.
"""

from __future__ import annotations

import itertools
import math
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry, object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.models._foreign import import_conversion, layout_of
from mcore_ckpt.models._legacy_files import (
    OPTIMIZER_FILE,
    Arguments,
    RankFiles,
    carried_arguments,
    file_range,
    read_ranks,
    reading,
    stacks_layers,
)
from mcore_ckpt.models.options import ImportOptions
from mcore_ckpt.reshard.conversion import Conversion, KeyPlan
from mcore_ckpt.reshard.partition import (
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    Partition,
    Partitioner,
    ShardedName,
    Stacking,
    expert_of,
    is_expert_key,
    layer_of,
    local_norms,
    pattern_of,
    shard_slices,
)
from mcore_ckpt.reshard.plan import target_dtype
from mcore_ckpt.reshard.view import FilePayloads, FileRange, Part, TensorView
from mcore_ckpt.reshard.weight_files import SavedTensor, encode_state
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayload
from mcore_ckpt.tools.regrid import cast_floats

_MODEL_CHUNK = re.compile(r"model(\d{0,4})")
_CARRIED = ("checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")
_COMPARED_ELEMENTS = 64
_WINDOW_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of one rank: its key in the state dict of a chunk of the model, and its sharded name."""

    rank: RankFiles
    chunk: int
    stored: str
    name: ShardedName
    tensor: FileTensor

    @property
    def where(self) -> str:
        return f"{self.rank.file}: {self.stored}"

    def base(self, state: str = "model") -> str:
        """Its key, or that of one of its optimizer states, in the payloads of all ranks' files."""
        return f"{self.rank.folder}/{state}{self.chunk}/{self.stored}"


class _Shard(NamedTuple):
    """A parameter, or one of its optimizer states: its key in the payloads of all files, and the file it is in."""

    base: str
    file: str
    of: _Parameter

    @property
    def where(self) -> str:
        return f"{self.file}: {self.of.stored}"


@dataclass(slots=True)
class _Tensor:
    """A tensor of the target while its shards are collected: sizes of counting axes, shape and dtype of one shard."""

    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    pattern: str
    shards: list[_Shard] = field(default_factory=list)


@dataclass(slots=True)
class _Model:
    """What the ranks' files hold, while it is collected."""

    directory: Path
    ranks: list[RankFiles]
    arguments: Arguments
    ranges: dict[str, FileRange] = field(default_factory=dict)
    tensors: dict[str, _Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, key: str, parameter: _Parameter, at: FileRange, state: str = "model") -> None:
        """One more shard of the tensor `key`."""
        shard, counts = _Shard(parameter.base(state), at.file, parameter), parameter.name.counts
        self.ranges[shard.base] = at
        known = self.tensors.setdefault(key, _Tensor(counts, at.shape, at.dtype, pattern_of(parameter.stored)))
        if (known.shape, known.dtype, known.counts) != (at.shape, at.dtype, counts):
            raise CorruptCheckpointError(
                f"{shard.where}: {at.dtype} of {list(at.shape)}, but {known.shards[0].where} of the same tensor is "
                f"{known.dtype} of {list(known.shape)}; the files are of different checkpoints"
            )
        known.shards.append(shard)

    def shard_count(self, partition: Partition) -> int:
        """Among how many ranks a tensor is divided."""
        if not partition.expert:
            return self.arguments.layout.tp
        tp, etp = self.arguments.layout.tp, self.arguments.layout.expert_tp
        if etp not in (1, tp):
            raise OptionError(
                f"{self.arguments.where}: experts are divided among {etp} ranks, other layers among {tp}; only the "
                "same number, or one, is put together here"
            )
        return etp


# --- parameters


def _chunks(rank: RankFiles) -> list[tuple[int, Mapping[str, Any]]]:
    """A rank's model, or its chunks where pipelines are virtual, in their order."""
    found: list[tuple[int, Mapping[str, Any]]] = []
    state: dict[Any, Any] = rank.state
    for key, value in state.items():
        matched = _MODEL_CHUNK.fullmatch(key) if isinstance(key, str) else None
        if matched is None:
            continue
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise CorruptCheckpointError(f"{rank.file}: {key}: expected parameters by name")
        found.append((int(matched.group(1) or 0), value))
    found.sort(key=lambda chunk: chunk[0])
    if [number for number, _ in found] != list(range(len(found))):
        raise CorruptCheckpointError(f"{rank.file}: chunks {[number for number, _ in found]} of the model")
    return found


def _layer_number(name: str) -> int | None:
    layer = layer_of(name)
    return layer.number if layer is not None and layer.before == "decoder.layers." else None


def _first_layers(model: _Model) -> tuple[dict[tuple[int, int], int], int]:
    """The number of the first layer of each stage's chunk: stages follow one another, chunk after chunk."""
    counts: dict[tuple[int, int], tuple[int, str]] = {}
    for rank in model.ranks:
        for chunk, state in _chunks(rank):
            numbers = {number for key in state if (number := _layer_number(key)) is not None}
            if numbers != set(range(len(numbers))):
                raise CorruptCheckpointError(f"{rank.file}: layers {sorted(numbers)[:20]}; some are missing")
            known = counts.setdefault((chunk, rank.pp), (len(numbers), rank.file))
            if known[0] != len(numbers):
                raise CorruptCheckpointError(
                    f"{rank.file}: {len(numbers)} layers, {known[1]} of the same pipeline stage has {known[0]}"
                )
    found: dict[tuple[int, int], int] = {}
    total = 0
    for place in sorted(counts):
        found[place] = total
        total += counts[place][0]
    layers = model.arguments.count("num_layers")
    if total != layers:
        raise CorruptCheckpointError(
            f"{model.directory}: the files hold {total} layers, the stored arguments say {layers}; files are missing, "
            "or it is no decoder alone"
        )
    return found, total


def _read_model(model: _Model) -> list[_Parameter]:
    """Find all parameters, and the shards of the model's tensors that they are; and what layers keep for themselves."""
    arguments = model.arguments
    first_layers, layers = _first_layers(model)
    experts = 0 if arguments.values.get("num_experts") is None else arguments.count("num_experts")
    local_experts, uneven = divmod(experts or 1, model.arguments.layout.ep)
    if uneven:
        raise CorruptCheckpointError(f"{arguments.where}: {experts} experts do not divide among expert ranks")
    keys = [key for rank in model.ranks for _, state in _chunks(rank) for key in state]
    stacking = Stacking(layers, experts, stacks_layers(arguments.values), local_norms(keys, arguments.values))
    tied = not arguments.flag("untie_embeddings_and_output_weights")
    parameters = []
    for rank in model.ranks:
        for chunk, state in _chunks(rank):
            first_layer, first_expert = first_layers[chunk, rank.pp], rank.ep * local_experts

            def sharded(
                name: str, where: str, first_layer: int = first_layer, first_expert: int = first_expert
            ) -> ShardedName:
                if not experts and expert_of(name) is not None:
                    raise CorruptCheckpointError(f"{where}: {name}: the stored arguments know of no experts")
                if name == OUTPUT and tied:
                    return ShardedName(EMBEDDING, (), ())
                try:
                    return stacking.sharded(name, first_layer, first_expert)
                except OptionError as error:
                    raise OptionError(f"{where}: {error}") from error

            where = str(model.directory / rank.file)
            for stored, value in state.items():
                if stored.endswith(f".{EXTRA_STATE}"):
                    for key, name in _objects_of(stored, local_experts, arguments, where):
                        at = sharded(name, where)
                        key = at.key if name == stored else f"{at.key.rpartition('.')[0]}.{EXTRA_STATE}"
                        full = object_key(key, at.offsets or (0,), at.counts or (1,))
                        if full not in model.objects:
                            model.objects[full] = [rank.taken(model.directory, value)]
                elif type(value) is FileTensor:
                    parameters.append(_Parameter(rank, chunk, stored, sharded(stored, where), value))
                elif value is not None:
                    raise OptionError(
                        f"{where}: {stored}: expected a tensor, got {type(value).__name__}; it is not known how the "
                        "ranks' parts of it belong together"
                    )
    for parameter in parameters:
        lies = file_range(parameter.rank.file, parameter.tensor, parameter.rank.model)
        model.add(parameter.name.key, parameter, lies)
    return parameters


def _objects_of(stored: str, local_experts: int, arguments: Arguments, where: str) -> Iterator[tuple[str, str]]:
    """The module's names by which the object of a layer is asked for: the first rank's, as Megatron saves it."""
    if stored == f"output_layer.{EXTRA_STATE}":
        return
    owner = stored.removesuffix(f".{EXTRA_STATE}")
    if not owner.endswith((".mlp.experts.linear_fc1", ".mlp.experts.linear_fc2")):
        yield stored, stored
        return
    if arguments.values.get("fp8"):
        raise OptionError(f"{where}: {stored}: scales of grouped experts in FP8 are not divided here")
    # A grouped layer has one for all its experts; each of them is asked for by itself.
    yield from ((stored, f"{owner}.weight{number}") for number in range(local_experts))


# --- tensors


def _partitions(model: _Model) -> dict[str, Partition]:
    """How each tensor is divided, by the table; raises `OptionError` for one that the table does not know."""
    entries = {
        key: TensorEntry(key, tensor.dtype, (*tensor.counts, *tensor.shape), ())
        for key, tensor in model.tensors.items()
    }
    index = CheckpointIndex(str(model.directory), entries, {})
    partitioner = Partitioner(index, arguments=model.arguments.values, chunks_tell=False)
    found = {key: partitioner.decide(key) for key in entries}
    for key, partition in found.items():
        if partition.decider == "whole" and model.shard_count(partition) > 1:
            raise OptionError(
                f"{model.tensors[key].shards[0].where}: nothing tells how {key} is divided among tensor parallel "
                "ranks; load the checkpoint once with Megatron, and save it as torch_dist"
            )
    return found


def _put_together(
    model: _Model, partitions: Mapping[str, Partition]
) -> tuple[dict[str, TensorView], list[tuple[_Shard, _Shard, str]]]:
    """The tensors of the target from their shards, and pairs of shards that have to be the same."""
    views: dict[str, TensorView] = {}
    pairs: list[tuple[_Shard, _Shard, str]] = []
    for key, tensor in model.tensors.items():
        partition, lead = partitions[key], len(tensor.counts)
        axis = None if partition.axis is None else partition.axis - lead
        count = 1 if axis is None else model.shard_count(partition)
        parts = partition.parts if count > 1 else 1
        chosen: dict[tuple[tuple[int, ...], int], _Shard] = {}
        for shard in tensor.shards:
            first = chosen.setdefault((shard.of.name.offsets, shard.of.rank.tp if count > 1 else 0), shard)
            if first is not shard:
                pairs.append((first, shard, key))
        places = itertools.product(itertools.product(*map(range, tensor.counts)), range(count))
        missing = next((place for place in places if place not in chosen), None)
        if missing is not None:
            raise CorruptCheckpointError(
                f"{model.directory}: no rank holds the part {missing[1]} of {count} of {key}"
                + (f" at {list(missing[0])}" if missing[0] else "")
                + f"; {tensor.shards[0].where} is another part of it. Files are missing"
            )
        shape = list(tensor.shape)
        if axis is not None:
            if shape[axis] % parts:
                raise CorruptCheckpointError(f"{tensor.shards[0].where}: {shape} has no {parts} halves")
            shape[axis] *= count
        found = [
            Part(Box((*index, *there.offsets), (*(1,) * lead, *there.sizes)), shard.base, own)
            for (index, number), shard in sorted(chosen.items(), key=lambda item: item[0])
            for own, there in shard_slices(shape, axis, parts, count, number)
        ]
        views[key] = TensorView((*tensor.counts, *shape), tuple(found))
    return views, pairs


def _check_same(payloads: FilePayloads, pairs: Iterable[tuple[_Shard, _Shard, str]]) -> None:
    """Raise `CorruptCheckpointError` where ranks differ in what all of them hold."""
    for first, other, key in pairs:
        one, two = (_payload(payloads, shard.base) for shard in (first, other))
        if one.crc32 is not None and one.crc32 == two.crc32:
            continue
        entry = payloads.index.tensors[first.base]
        for start in range(0, one.nbytes, _WINDOW_BYTES):
            views = [memoryview(bytearray(min(_WINDOW_BYTES, one.nbytes - start))) for _ in range(2)]
            payloads.read_into(one, start, views[0])
            payloads.read_into(two, start, views[1])
            if views[0] != views[1]:
                byte = next(n for n, (a, b) in enumerate(zip(*views, strict=True)) if a != b)
                at, place = (start + byte) // element_bytes(entry.dtype), []
                for size in reversed(entry.shape):
                    place.append(at % size)
                    at //= size
                raise CorruptCheckpointError(
                    f"{payloads.index.path}: {key} is the same on all ranks that hold it, but {first.where} and "
                    f"{other.where} differ, first at element {place[::-1]} of {list(entry.shape)}. One of the files is "
                    "of another checkpoint, or the job has let its ranks drift apart; nothing was written"
                )


def _payload(payloads: FilePayloads, base: str) -> StoredPayload:
    entry = payloads.index.tensors[base]
    return payloads.locate(entry, entry.chunks[0])


# --- the optimizer's tensors


def _read_optimizer(
    model: _Model, parameters: list[_Parameter], common: dict[str, Any]
) -> list[tuple[_Parameter, str]]:
    """Find the shards of the optimizer's tensors, and put its settings into the common state. Returns parameters, and
    the base key of the optimizer's own copy of each.
    """
    by_rank: dict[str, list[_Parameter]] = {rank.folder: [] for rank in model.ranks}
    for parameter in parameters:
        by_rank[parameter.rank.folder].append(parameter)
    masters, with_state = [], set()
    for rank in model.ranks:
        own = by_rank[rank.folder]
        for parts, distributed in state_parts(rank, own, model.arguments):
            for part in parts:
                parameter = own[part.number]
                model.add(f"optimizer.state.{part.state}.{parameter.name.key}", parameter, part.range, part.state)
                with_state.add(parameter.name.key)
                if part.state == main_parameter(distributed):
                    masters.append((parameter, parameter.base(part.state)))
    first = model.ranks[0]
    settings = [_settings(model, optimizer) for optimizer in optimizers_of(first)]
    if any("param_state_sharding_type" in one for one in settings):
        common["content_metadata"] = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            **common["content_metadata"],
        }
    several = type(first.state["optimizer"]) is list
    common["optimizer"] = dict(enumerate(settings)) if several else settings[0]
    lacking = next((p for p in parameters if not is_buffer(p) and p.name.key not in with_state), None)
    if lacking is not None:
        raise CorruptCheckpointError(
            f"{model.directory}: no file holds the optimizer's state of {lacking.name.key} ({lacking.where}); is "
            f"{OPTIMIZER_FILE} missing? Without that state, take --drop-optimizer"
        )
    return masters


def _settings(model: _Model, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What of an optimizer all ranks share: groups without their parameters, the step, the loss scale."""
    first, step = model.ranks[0], None

    def taken(value: Any) -> Any:
        return first.taken(model.directory, value)

    inner = dict(optimizer.get("optimizer", optimizer))
    if isinstance(inner.get("state"), dict):
        steps = [taken(one["step"]) for one in inner["state"].values() if isinstance(one, dict) and "step" in one]
        # A step may be a tensor of one element.
        if len({value.number if isinstance(value, SavedTensor) else value for value in steps}) > 1:
            raise OptionError(f"{first.file}: the optimizer's steps differ among parameters; Megatron-Core has one")
        step = steps[0] if steps else None
    found = {key: taken(value) for key, value in inner.items() if key not in ("state", "param_groups")}
    found["param_groups"] = [
        {key: taken(value) for key, value in group.items() if key != "params"} for group in inner["param_groups"]
    ]
    if step is not None:
        found["state"] = {"common_step": step}
    if "optimizer" in optimizer:
        rest = ("optimizer", "fp32_from_fp16_params")
        found = {"optimizer": found, **{key: taken(value) for key, value in optimizer.items() if key not in rest}}
    if is_distributed(optimizer):
        found["param_state_sharding_type"] = "fully_reshardable"
    return found


def _check_masters(payloads: FilePayloads, masters: Iterable[tuple[_Parameter, str]]) -> None:
    """Raise `CorruptCheckpointError` where the first and last elements of the optimizer's copy are not the parameter's:
    where they are the same, the order of the optimizer's state is right.
    """
    for parameter, base in masters:
        entries = [payloads.index.tensors[key] for key in (base, parameter.base())]
        count = math.prod(entries[0].shape)
        length = min(count, _COMPARED_ELEMENTS)
        for start in {0, count - length}:
            found = []
            for entry in entries:
                width = element_bytes(entry.dtype)
                view = memoryview(bytearray(length * width))
                payloads.read_into(_payload(payloads, entry.fqn), start * width, view)
                found.append(view)
            if entries[0].dtype != entries[1].dtype:
                found[0] = memoryview(cast_floats(found[0], entries[0].dtype, entries[1].dtype))
            if bytes(found[0]) != bytes(found[1]):
                raise CorruptCheckpointError(
                    f"{payloads.index.path}: the optimizer's copy of {parameter.where} does not round to the "
                    f"parameter, in elements [{start}, {start + length}): the order of its state is not what it is "
                    "taken to be, or the weights were changed after it was saved. The model alone can be had by "
                    "--drop-optimizer"
                )


# --- common state


def _common_state(model: _Model) -> dict[str, Any]:
    """What all ranks share, of the first of them."""
    first = model.ranks[0]
    read = reading(storage_at(model.directory), "")
    carried, left_out = carried_arguments(model.arguments.values, read, model.arguments.where, {})
    model.left_out += left_out
    common: dict[str, Any] = {"args": Namespace(**{**carried, "ckpt_format": "torch_dist", "use_dist_ckpt": True})}
    for key, value in first.state.items():
        if key in ("args", "optimizer", "rng_state") or _MODEL_CHUNK.fullmatch(str(key)):
            continue
        if key in _CARRIED:
            common[key] = first.taken(model.directory, value)
        else:
            model.left_out.append(f"{str(key)[:200]} (of each rank, and not known how it belongs together)")
    common["content_metadata"] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return common


def _random_states(model: _Model) -> dict[str, Any]:
    """The objects in which a job finds the random state of each rank."""
    sizes, count = model.arguments.layout, model.arguments.count
    states = {
        (rank.pp, rank.tp, rank.ep): rank.taken(model.directory, rank.state["rng_state"])
        for rank in model.ranks
        if rank.state.get("rng_state") is not None
    }
    if len(states) != len(model.ranks):
        model.left_out += ["rng_state (not of all ranks)"] if states else []
        return {}
    # With experts on several ranks, one for each data parallel rank; it has that of the experts that it holds.
    several = sizes.ep > 1
    dp = count("data_parallel_size", default=1) * count("context_parallel_size", default=1) if several else 1
    found = {}
    for p, t, d in itertools.product(range(sizes.pp), range(sizes.tp), range(dp)):
        state = states.get((p, t, (t + sizes.tp * d) // sizes.expert_tp % sizes.ep if several else 0))
        if state is None:
            model.left_out.append("rng_state (not of all ranks)")
            return {}
        place, of = ((p, t, d), (sizes.pp, sizes.tp, dp)) if several else ((p, t), (sizes.pp, sizes.tp))
        found[object_key("rng_state", place, of)] = [state]
    return found


# --- the optimizer's state in a rank's files

# A buffer of the distributed optimizer begins each parameter at a multiple of so many elements.
_ALIGNMENT = 64
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK = 40_000_000, 1_000_000
_FLAT_STATES = ("param", "exp_avg", "exp_avg_sq")
# What a state dict holds besides parameters.
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")


class StatePart(NamedTuple):
    """A tensor of the optimizer in the shape of parameter `number` (of those given), and where it lies."""

    number: int
    state: str
    range: FileRange


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
    rank: RankFiles, parameters: Sequence[_Parameter], arguments: Arguments
) -> Iterator[tuple[list[StatePart], bool]]:
    """The state of each of a rank's optimizers, and whether it is a distributed one. Raises `CorruptCheckpointError` if
    state and parameters do not match, `OptionError` for a form not known here.
    """
    covered: set[int] = set()
    for position, optimizer in enumerate(optimizers_of(rank)):
        groups = _group_members(rank.file, _inner(optimizer)["param_groups"], parameters, arguments)
        for number in (number for group in groups for number in group):
            if number in covered:
                raise _unknown(rank.file, f"two optimizers have {parameters[number].stored} in their groups")
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
        raise _unknown(rank.file, f"no group of the optimizer has {left[0]}")


def _unknown(where: str, found: str) -> OptionError:
    return OptionError(
        f"{where}: {found}: parameters that are not trained, of other dtypes, or in groups of another kind are not "
        "known here. Leave the optimizer's state out (--drop-optimizer)"
    )


def is_buffer(parameter: _Parameter) -> bool:
    """Whether a tensor of the model is none that is trained."""
    return parameter.stored.rpartition(".")[2] in _BUFFERS


def _group_members(
    where: str, groups: Sequence[Mapping[str, Any]], parameters: Sequence[_Parameter], arguments: Arguments
) -> list[list[int]]:
    """Numbers of the parameters of each group of an optimizer, in the order given. Raises `OptionError` if nothing that
    is known distinguishes two groups.
    """
    experts_apart = arguments.count("expert_model_parallel_size", default=1) > 1
    decoupled = any(group.get("is_decoupled_lr") for group in groups)

    def kind(parameter: _Parameter) -> tuple[bool, bool, bool]:
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
            group.get("wd_mult") == 0.0,
            bool(group.get("is_expert_parallel")),
            bool(group.get("is_decoupled_lr")),
        )
        if wanted in kinds:
            raise _unknown(where, f"nothing tells apart the parameters of groups {kinds[wanted]} and {position}")
        kinds[wanted] = position
        found.append([n for n, p in enumerate(parameters) if not is_buffer(p) and kind(p) == wanted])
    return found


def _plain_parts(
    rank: RankFiles, optimizer: Mapping[str, Any], groups: Sequence[Sequence[int]], parameters: Sequence[_Parameter]
) -> list[StatePart]:
    """State by number of the parameter."""
    inner, found = _inner(optimizer), []
    state = inner["state"]
    mains = optimizer.get("fp32_from_fp16_params")
    if not isinstance(state, dict) or (mains is not None and (type(mains) is not list or len(mains) != len(groups))):
        raise CorruptCheckpointError(f"{rank.file}: optimizer: expected state by number, and parameters by group")
    for position, (group, members) in enumerate(zip(inner["param_groups"], groups, strict=True)):
        numbers = group.get("params")
        if type(numbers) is not list or len(numbers) != len(members):
            count = len(numbers) if type(numbers) is list else 0
            raise _unknown(rank.file, f"group {position} has {count} parameters, by its settings {len(members)}")
        own = mains[position] if mains is not None else []
        if mains is not None and (type(own) is not list or len(own) != len(members)):
            raise _unknown(rank.file, f"group {position} has copies of {len(own)} parameters, not {len(members)}")
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


# --- flat buffers


def _flat_parts(
    rank: RankFiles,
    position: int,
    members: Sequence[int],
    parameters: Sequence[_Parameter],
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
        raise OptionError(f"{where}: expected joined buckets (buckets_coalesced); leave them out (--drop-optimizer)")
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


def _buffer_members(members: Iterable[int], parameters: Sequence[_Parameter]) -> list[tuple[int, str, list[int]]]:
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
    parameters: Sequence[_Parameter],
    length: int,
    arguments: Arguments,
    where: str,
) -> dict[int, int]:
    tied = not arguments.flag("untie_embeddings_and_output_weights")
    shared = tied and arguments.count("pipeline_model_parallel_size", default=1) > 1
    alone = {number for number in numbers if shared and parameters[number].stored in (EMBEDDING, OUTPUT)}
    sizes = {number: math.prod(parameters[number].tensor.shape) for number in numbers}
    totals = []
    first = rank.pp == 0 and chunk == 0
    own_size = _bucket_elements(arguments, sum(sizes.values())) if first else None
    for bucket in dict.fromkeys((own_size, None)):
        starts, total = _flat_places(sizes, alone, bucket)
        if total == length:
            return starts
        totals.append(total)
    raise OptionError(
        f"{where}: a buffer of {length} elements; the parameters in {rank.file}, laid out as Megatron does, take "
        f"{' or '.join(map(str, dict.fromkeys(totals)))}. Where each lies is not known; leave the optimizer's state "
        "out (--drop-optimizer)"
    )


def _bucket_elements(arguments: Arguments, elements: int) -> int | None:
    """About how many elements a bucket of the first chunk has; None: there is one bucket."""
    if not arguments.flag("overlap_grad_reduce"):
        return None
    if arguments.values.get("ddp_num_buckets"):
        return max(1, elements // arguments.count("ddp_num_buckets"))
    ranks = arguments.count("data_parallel_size", default=1) * arguments.count("context_parallel_size", default=1)
    usual = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK * ranks)
    return arguments.count("ddp_bucket_size", default=usual)


def _flat_places(
    sizes: Mapping[int, int], alone: Collection[int], bucket_elements: int | None
) -> tuple[dict[int, int], int]:
    """The first element of each parameter in a buffer whose buckets (None: one) are joined without padding, and its
    length. `sizes`: elements in the model's order, which the buffer reverses; those of `alone` have their own buckets.
    """
    starts: dict[int, int] = {}
    bucket = inside = 0
    for number in reversed(list(sizes)):
        inside = -(-inside // _ALIGNMENT) * _ALIGNMENT
        if number in alone and inside:
            bucket, inside = bucket + inside, 0
        starts[number] = bucket + inside
        inside += sizes[number]
        if number in alone or (bucket_elements is not None and inside >= bucket_elements):
            bucket, inside = bucket + inside, 0
    return starts, bucket + inside


# --- the import


def legacy_import(directory: Path, options: ImportOptions) -> Conversion:
    """What a job has saved with `--ckpt-format torch` as a checkpoint. Reads indexes, small files, what ranks hold
    alike, and the ends of what the optimizer copies.
    """
    ranks, arguments = read_ranks(directory)
    model = _Model(directory, ranks, arguments)
    parameters = _read_model(model)
    common = _common_state(model)
    masters: list[tuple[_Parameter, str]] = []
    if "optimizer" in ranks[0].state and not options.drop_optimizer:
        masters = _read_optimizer(model, parameters, common)
    model.objects |= _random_states(model)
    partitions = _partitions(model)
    views, pairs = _put_together(model, partitions)
    payloads = FilePayloads(directory, model.ranges)
    try:
        _check_masters(payloads, masters)
        _check_same(payloads, pairs)
        return import_conversion(
            payloads,
            options,
            layout_of(options, model.arguments.layout),
            vars(common["args"]),
            lambda _: encode_state(common),
            format="megatron-legacy",
            keys=lambda: (_row(model, key, partitions[key], view, options) for key, view in views.items()),
            tensors=views,
            objects=model.objects,
            source_layout=str(model.arguments.layout),
            left_out=tuple(model.left_out),
        )
    except BaseException:
        payloads.close()
        raise


def _row(model: _Model, key: str, partition: Partition, view: TensorView, options: ImportOptions) -> KeyPlan:
    tensor, how = model.tensors[key], []
    count = 1 if partition.axis is None else model.shard_count(partition)
    if count > 1 and partition.axis is not None:
        halves = ", each half by itself" if partition.parts > 1 else ""
        how.append(f"joined along axis {partition.axis - len(tensor.counts)}{halves}")
    if tensor.counts:
        how.append("stacked")
    dtype = target_dtype(TensorEntry(key, tensor.dtype, view.shape, ()), options.dtype)
    parts = len({part.key for part in view.parts})
    return KeyPlan(tensor.pattern, parts, ", ".join(how) or "as it is", key, view.shape, dtype)
