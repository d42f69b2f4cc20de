"""Checkpoints of `--ckpt-format torch`, one file for each model-parallel rank, as `torch_dist`.

    state dict of each rank -> key, layer and expert of each parameter -> which box of which tensor it is -> a view
    of the ranks' tensors under the keys of `torch_dist` (`_pieces`) -> a reshard like any other

No model is built, and Megatron is not needed. How a parameter is divided comes from the partition table; what ranks
hold alike has to be alike; what is missing, too much, or unknown is an error that names it.
"""

from __future__ import annotations

import itertools
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._legacy_files import (
    OPTIMIZER_FILE,
    Arguments,
    LegacyPayloads,
    Place,
    RankFiles,
    carried_arguments,
    owned,
    read_ranks,
    reading,
)
from mcore_ckpt.convert._legacy_optimizer import (
    is_buffer,
    is_distributed,
    main_parameter,
    optimizers_of,
    state_parts,
)
from mcore_ckpt.convert._partition import Partition, Partitioner, holds_several
from mcore_ckpt.convert._pieces import Source, Wanted
from mcore_ckpt.convert.conversion import Import, ImportOptions, KeyPlan, saved
from mcore_ckpt.convert.reshard_plan import TargetLayout, target_dtype
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry, object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.state_file import FileTensor
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.dtype_cast import cast_floats

__all__ = ["LOCAL_NORMS", "legacy_import"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_EXTRA_STATE = "._extra_state"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_LOCAL_EXPERT = re.compile(r"(.*\.?mlp\.experts)\.local_experts\.(\d{1,6})\.(.+)")
_GROUPED_EXPERT = re.compile(r"(.*\.?mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d{1,6})")
_EXPERTS = re.compile(r"\.experts\.")
# The local layers' norms are called as Transformer Engine calls those that it keeps in the layer behind.
LOCAL_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_MODEL_CHUNK = re.compile(r"model(\d{0,4})")


@dataclass(frozen=True, slots=True)
class _Name:
    """Where a rank's parameter belongs: key at the target, indexes along axes that count layers and experts."""

    key: str
    index: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of one rank.

    Attributes:
        stored: its key in the rank's state dict.
        chunk: of the model, where pipelines are virtual.
        slot: which part along the divided axis.
    """

    rank: RankFiles
    chunk: int
    stored: str
    name: _Name
    tensor: FileTensor

    @property
    def where(self) -> str:
        return f"{self.rank.file}: {self.stored}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a rank that belong to a tensor of the target: as which index, and which part along its axis."""

    base: str
    where: str
    index: tuple[int, ...]
    rank: RankFiles


@dataclass(slots=True)
class _Tensor:
    """A tensor of the target, while its pieces are found."""

    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: str
    pieces: list[_Piece] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """An import that is being thought through."""

    directory: Path
    ranks: list[RankFiles]
    arguments: Arguments
    places: dict[str, tuple[Place, str, tuple[int, ...]]] = field(default_factory=dict)
    tensors: dict[str, _Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, key: str, name: _Name, place: Place, dtype: str, shape: tuple[int, ...], piece: _Piece) -> None:
        """One more piece of the tensor `key`."""
        self.places[piece.base] = place, dtype, shape
        pattern = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", piece.where.partition(": ")[2])
        known = self.tensors.setdefault(key, _Tensor(name.counts, shape, dtype, pattern))
        if (known.shape, known.dtype, known.counts) != (shape, dtype, name.counts):
            raise CorruptCheckpointError(
                f"{piece.where}: {dtype} of {list(shape)}, but {known.pieces[0].where} of the same tensor is "
                f"{known.dtype} of {list(known.shape)}; the files are of different checkpoints"
            )
        known.pieces.append(piece)


# ------------------------------------------------------------------------------------------------------------


class _Naming:
    """Keys of ranks to keys of `torch_dist`, as Megatron-Core makes them."""

    def __init__(self, arguments: Arguments, layers: int, experts: int | None, keys: Iterable[str]) -> None:
        self._layers, self._experts = layers, experts
        implementation = arguments.values.get("transformer_impl")
        if implementation is None:
            fused = any(".linear_qkv.layer_norm_weight" in key for key in keys)
            implementation = "transformer_engine" if fused else "local"
        latent = arguments.flag("multi_latent_attention")
        self._norms = LOCAL_NORMS if implementation == "local" and not latent else ()
        frequency, linear = arguments.values.get("moe_layer_freq", 1), arguments.values.get("linear_attention_freq")
        self._stacked = not (
            isinstance(frequency, list)
            or (isinstance(frequency, int) and frequency > 1)
            or isinstance(linear, list)
            or (isinstance(linear, int) and linear > 1)
            or arguments.values.get("heterogeneous_layers_config_path")
            or arguments.values.get("heterogeneous_layers_config_encoded_json")
        )
        self._ties = not arguments.flag("untie_embeddings_and_output_weights")

    def of(self, stored: str, first_layer: int, rank: RankFiles, local_experts: int, where: str) -> _Name:
        """Where a rank's key belongs."""
        key, index, counts = stored, tuple[int, ...](), tuple[int, ...]()
        if holds_several(stored):
            raise OptionError(
                f"{where}: {stored}: layers of Mamba and of linear attention are not put together here: torch_dist has "
                "what a rank keeps in this under several keys. Load the checkpoint once with Megatron, and save it as "
                "torch_dist"
            )
        if stored == _OUTPUT and self._ties:
            return _Name(_EMBEDDING, (), ())
        layer = _LAYER.fullmatch(stored)
        if layer is not None:
            number, rest = first_layer + int(layer.group(1)), layer.group(2)
            for local, other in self._norms:
                if rest.startswith(local):
                    rest = other + rest.removeprefix(local)
            key = f"decoder.layers.{rest}" if self._stacked else f"decoder.layers.{number}.{rest}"
            index, counts = ((number,), (self._layers,)) if self._stacked else ((), ())
        elif ".layers." in f".{stored}" or "experts." in stored:
            raise OptionError(
                f"{where}: {stored}: only layers of a decoder (`decoder.layers.N`) are put together here; this model "
                "has others. Load it once with Megatron, and save it as torch_dist"
            )
        found = _LOCAL_EXPERT.fullmatch(key)
        grouped = _GROUPED_EXPERT.fullmatch(key)
        if found is not None or grouped is not None:
            if found is not None:
                before, expert, rest = found.groups()
            else:
                assert grouped is not None
                before, layer_name, leaf, expert = grouped.groups()
                rest = f"{layer_name}.{leaf}"
            if self._experts is None:
                raise CorruptCheckpointError(f"{where}: {stored}: the stored arguments know of no experts")
            number = rank.ep * local_experts + int(expert)
            return _Name(f"{before}.experts.{rest}", (*index, number), (*counts, self._experts))
        if _EXPERTS.search(key):
            raise OptionError(
                f"{where}: {stored}: experts in this form are not put together here; expected "
                "`mlp.experts.local_experts.N` or grouped `mlp.experts.linear_fc1.weightN`. Load the checkpoint once "
                "with Megatron, and save it as torch_dist"
            )
        return _Name(key, index, counts)


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
        nested = [name for name, part in value.items() if isinstance(part, Mapping)]
        if nested:
            raise OptionError(
                f"{rank.file}: {key}.{nested[0]}: holds further dicts, as models from before Megatron-Core do; load "
                "it with the Megatron that made it, and save it from a model of Megatron-Core"
            )
        found.append((int(matched.group(1) or 0), value))
    found.sort(key=lambda chunk: chunk[0])
    if [number for number, _ in found] != list(range(len(found))):
        raise CorruptCheckpointError(f"{rank.file}: chunks {[number for number, _ in found]} of the model")
    return found


def _first_layers(draft: _Draft) -> tuple[dict[tuple[int, int], int], int]:
    """The number of the first layer of each stage's chunk: stages follow one another, chunk after chunk."""
    counts: dict[tuple[int, int], tuple[int, str]] = {}
    for rank in draft.ranks:
        for chunk, state in _chunks(rank):
            numbers = {int(layer.group(1)) for key in state if (layer := _LAYER.fullmatch(key))}
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
    layers = draft.arguments.count("num_layers", "decoder_num_layers", "encoder_num_layers")
    if total != layers:
        raise CorruptCheckpointError(
            f"{draft.directory}: the files hold {total} layers, the stored arguments say {layers}; files are missing, "
            "or it is no decoder alone"
        )
    return found, total


def _read_model(draft: _Draft) -> list[_Parameter]:
    """Find all parameters, and the pieces of the model's tensors that they are; and what layers keep of their own."""
    first_layers, layers = _first_layers(draft)
    experts = draft.arguments.values.get("num_experts")
    experts = None if experts is None else draft.arguments.count("num_experts")
    keys = {key for rank in draft.ranks for _, state in _chunks(rank) for key in state}
    naming = _Naming(draft.arguments, layers, experts, keys)
    local_experts, uneven = divmod(experts or 1, draft.arguments.count("expert_model_parallel_size", default=1))
    if uneven:
        raise CorruptCheckpointError(f"{draft.arguments.where}: {experts} experts do not divide among expert ranks")
    storage = storage_at(draft.directory)
    parameters = []
    for rank in draft.ranks:
        for chunk, state in _chunks(rank):
            for stored, value in state.items():
                where = f"{draft.directory / rank.file}"
                if stored.endswith(_EXTRA_STATE):
                    _note_extra_state(
                        draft, naming, rank, stored, value, first_layers[chunk, rank.pp], local_experts, storage
                    )
                    continue
                if type(value) is not FileTensor:
                    if value is None:
                        continue
                    raise OptionError(
                        f"{where}: {stored}: expected a tensor, got {type(value).__name__}; it is not known how the "
                        "ranks' parts of it belong together"
                    )
                name = naming.of(stored, first_layers[chunk, rank.pp], rank, local_experts, where)
                parameters.append(_Parameter(rank, chunk, stored, name, value))
    for parameter in parameters:
        tensor = parameter.tensor
        base = f"{parameter.rank.folder}/model{parameter.chunk}/{parameter.stored}"
        place = Place(parameter.rank.file, tensor.record, tensor.first_byte, tensor.nbytes)
        piece = _Piece(base, parameter.where, parameter.name.index, parameter.rank)
        draft.add(parameter.name.key, parameter.name, place, tensor.dtype, tensor.shape, piece)
    return parameters


def _note_extra_state(
    draft: _Draft,
    naming: _Naming,
    rank: RankFiles,
    stored: str,
    value: Any,
    first_layer: int,
    local_experts: int,
    storage: Storage,
) -> None:
    """An object that a layer asks for when it is loaded: the first rank's, as Megatron saves it."""
    if stored == f"output_layer{_EXTRA_STATE}":
        return
    where = f"{draft.directory / rank.file}"
    grouped = re.fullmatch(r"(.*\.mlp\.experts\.linear_fc[12])\._extra_state", stored)
    if grouped is not None and draft.arguments.values.get("fp8"):
        raise OptionError(f"{where}: {stored}: scales of grouped experts in FP8 are not divided here")
    numbers = range(local_experts) if grouped is not None else (None,)
    for number in numbers:
        # A grouped layer has one for all its experts; each of them is asked for by itself.
        template = stored if grouped is None else f"{grouped.group(1)}.weight{number}"
        name = naming.of(template, first_layer, rank, local_experts, where)
        key = name.key if grouped is None else name.key.removesuffix(".weight") + _EXTRA_STATE
        full = object_key(key, name.index or (0,), name.counts or (1,))
        if full not in draft.objects:
            draft.objects[full] = [owned(value, reading(storage, rank.file), rank.file, rank.model.records)]


# ---------------------------------------------------------------------------------------------------------- the pieces


def _partitions(draft: _Draft) -> dict[str, Partition]:
    """How each tensor is divided, by the table; raises `OptionError` for one that the table does not know."""
    entries = {
        key: TensorEntry(key, tensor.dtype, (*tensor.counts, *tensor.shape), ())
        for key, tensor in draft.tensors.items()
    }
    index = CheckpointIndex(str(draft.directory), entries, {})
    partitioner = Partitioner(index, arguments=draft.arguments.values, chunks_tell=False)
    found = {}
    for key in entries:
        partition = partitioner.decide(key)
        if partition.source == "whole" and _slots(draft, partition.expert) > 1:
            raise OptionError(
                f"{draft.tensors[key].pieces[0].where}: nothing tells how {key} is divided among tensor parallel "
                "ranks; load the checkpoint once with Megatron, and save it as torch_dist"
            )
        found[key] = partition
    return found


def _slots(draft: _Draft, expert: bool) -> int:
    tp = draft.arguments.count("tensor_model_parallel_size", "model_parallel_size")
    if not expert:
        return tp
    etp = draft.arguments.count("expert_tensor_parallel_size", default=tp)
    if etp not in (1, tp):
        raise OptionError(
            f"{draft.arguments.where}: experts are divided among {etp} ranks, other layers among {tp}; only the same "
            "number, or one, is put together here"
        )
    return etp


def _put_together(
    draft: _Draft, partitions: Mapping[str, Partition]
) -> tuple[dict[str, Wanted], list[tuple[_Piece, _Piece, str]], dict[str, int]]:
    """The tensors of the target from their pieces, and pairs of pieces that have to be the same."""
    wanted: dict[str, Wanted] = {}
    pairs: list[tuple[_Piece, _Piece, str]] = []
    counts: dict[str, int] = {}
    for key, tensor in draft.tensors.items():
        partition = partitions[key]
        lead, own = len(tensor.counts), tensor.shape
        axis = None if partition.axis is None else partition.axis - lead
        slots = 1 if axis is None else _slots(draft, partition.expert)
        chosen: dict[tuple[tuple[int, ...], int], _Piece] = {}
        for piece in tensor.pieces:
            slot = piece.rank.tp if slots > 1 else 0
            first = chosen.setdefault((piece.index, slot), piece)
            if first is not piece:
                pairs.append((first, piece, key))
        missing = next(
            (
                place
                for place in itertools.product(itertools.product(*map(range, tensor.counts)), range(slots))
                if place not in chosen
            ),
            None,
        )
        if missing is not None:
            raise CorruptCheckpointError(
                f"{draft.directory}: no rank holds the part {missing[1]} of {slots} of {key}"
                + (f" at {list(missing[0])}" if missing[0] else "")
                + f"; {tensor.pieces[0].where} is another part of it. Files are missing"
            )
        shape = [*tensor.counts, *own]
        parts = partition.parts if slots > 1 else 1
        if axis is not None:
            shape[lead + axis] *= slots
            if own[axis] % parts:
                raise CorruptCheckpointError(f"{tensor.pieces[0].where}: {list(own)} has no {parts} halves")
        sources = []
        for (index, slot), piece in sorted(chosen.items(), key=lambda item: item[0]):
            for part in range(parts):
                offsets, sizes, inner = [0] * len(own), list(own), [0] * len(own)
                if axis is not None:
                    step = own[axis] // parts
                    offsets[axis] = part * step * slots + slot * step
                    inner[axis], sizes[axis] = part * step, step
                box = Box((*index, *offsets), (*(1,) * lead, *sizes))
                sources.append(Source(box, piece.base, Box(tuple(inner), tuple(sizes))))
        wanted[key] = Wanted(tuple(shape), tuple(sources))
        counts[key] = len(chosen)
    return wanted, pairs, counts


def _check_same(payloads: LegacyPayloads, pairs: Iterable[tuple[_Piece, _Piece, str]]) -> None:
    """Raise `CorruptCheckpointError` where ranks differ in what all of them hold."""
    for first, other, key in pairs:
        at = payloads.same(first.base, other.base)
        if at is None:
            continue
        shape = payloads.index.tensors[first.base].shape
        place = []
        for size in reversed(shape):
            place.append(at % size)
            at //= size
        raise CorruptCheckpointError(
            f"{payloads.index.path}: {key} is the same on all ranks that hold it, but {first.where} and {other.where} "
            f"differ, first at element {place[::-1]} of {list(shape)}. One of the files is of another checkpoint, or "
            "the launch has let its ranks drift apart; nothing was written"
        )


# ----------------------------------------------------------------------------------------------------------- optimizer


def _read_optimizer(
    draft: _Draft, parameters: Iterable[_Parameter], common: dict[str, Any]
) -> list[tuple[_Parameter, str]]:
    """Find the pieces of the optimizer's tensors, and put its settings into the common state.

    Returns:
        Parameters, and the base key of the optimizer's own copy of each.
    """
    by_rank: dict[str, list[_Parameter]] = {rank.folder: [] for rank in draft.ranks}
    for parameter in parameters:
        by_rank[parameter.rank.folder].append(parameter)
    masters = []
    for rank in draft.ranks:
        own = by_rank[rank.folder]
        for parts, distributed in state_parts(rank, own, draft.arguments):
            for part in parts:
                parameter = own[part.number]
                key = f"optimizer.state.{part.state}.{parameter.name.key}"
                base = f"{rank.folder}/{part.state}{parameter.chunk}/{parameter.stored}"
                where = f"{part.place.file}: {parameter.stored}"
                piece = _Piece(base, where, parameter.name.index, rank)
                draft.add(key, parameter.name, part.place, part.dtype, parameter.tensor.shape, piece)
                if part.state == main_parameter(distributed):
                    masters.append((parameter, base))
    first = draft.ranks[0]
    settings = [_settings(draft, optimizer) for optimizer in optimizers_of(first)]
    if any("param_state_sharding_type" in one for one in settings):
        common["content_metadata"] = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            **common["content_metadata"],
        }
    several = type(first.state["optimizer"]) is list
    common["optimizer"] = dict(enumerate(settings)) if several else settings[0]
    with_state = {key.split(".", 3)[3] for key in draft.tensors if key.startswith("optimizer.state.")}
    lacking = next((p for p in parameters if not is_buffer(p) and p.name.key not in with_state), None)
    if lacking is not None:
        raise CorruptCheckpointError(
            f"{draft.directory}: no file holds the optimizer's state of {lacking.name.key} ({lacking.where}); is "
            f"{OPTIMIZER_FILE} missing? Without that state, take --drop optimizer"
        )
    return masters


def _settings(draft: _Draft, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What of an optimizer all ranks share: groups without their parameters, the step, the loss scale."""
    first, step = draft.ranks[0], None
    storage = storage_at(draft.directory)

    def own(value: Any) -> Any:
        return owned(value, reading(storage, first.file), first.file, first.model.records)

    inner = dict(optimizer.get("optimizer", optimizer))
    if isinstance(inner.get("state"), dict):
        steps = [own(state["step"]) for state in inner["state"].values() if isinstance(state, dict) and "step" in state]
        if len({float(value) for value in steps}) > 1:
            raise OptionError(f"{first.file}: the optimizer's steps differ among parameters; Megatron-Core has one")
        step = steps[0] if steps else None
    found = {key: own(value) for key, value in inner.items() if key not in ("state", "param_groups")}
    found["param_groups"] = [
        {key: own(value) for key, value in group.items() if key != "params"} for group in inner["param_groups"]
    ]
    if step is not None:
        found["state"] = {"common_step": step}
    if "optimizer" in optimizer:
        rest = ("optimizer", "fp32_from_fp16_params", "fp32_from_fp16")
        found = {"optimizer": found, **{key: own(value) for key, value in optimizer.items() if key not in rest}}
    if is_distributed(optimizer):
        found["param_state_sharding_type"] = "fully_reshardable"
    return found


_COMPARED_ELEMENTS = 64


def _check_masters(payloads: LegacyPayloads, masters: Iterable[tuple[_Parameter, str]]) -> None:
    """Raise `CorruptCheckpointError` where the optimizer's copy of a parameter is not the model's parameter.

    The first and last elements are compared. Where they are the same, the order of the optimizer's state is right.
    """
    for parameter, base in masters:
        model = f"{parameter.rank.folder}/model{parameter.chunk}/{parameter.stored}"
        entries = [payloads.index.tensors[key] for key in (base, model)]
        count = math.prod(entries[0].shape)
        length = min(count, _COMPARED_ELEMENTS)
        for start in {0, count - length}:
            found = []
            for entry in entries:
                width = element_bytes(entry.dtype)
                view = memoryview(bytearray(length * width))
                payloads.read_into(payloads.locate(entry, entry.chunks[0]), start * width, view)
                found.append(view)
            if entries[0].dtype != entries[1].dtype:
                found[0] = memoryview(cast_floats(found[0], entries[0].dtype, entries[1].dtype))
            if bytes(found[0]) != bytes(found[1]):
                raise CorruptCheckpointError(
                    f"{payloads.index.path}: the optimizer's copy of {parameter.where} does not round to the "
                    f"parameter, in elements [{start}, {start + length}): the order of its state is not what it is "
                    "taken to be, or the weights were changed after it was saved. The model alone can be had by "
                    "--drop optimizer"
                )


# -------------------------------------------------------------------------------------------------------- common state


def _common_state(draft: _Draft) -> dict[str, Any]:
    """What all ranks share, of the first of them."""
    first = draft.ranks[0]
    storage = storage_at(draft.directory)
    common: dict[str, Any] = {"args": _carried_arguments(draft)}
    for key, value in first.state.items():
        if key in ("args", "optimizer", "rng_state") or _MODEL_CHUNK.fullmatch(str(key)):
            continue
        if key not in (
            "checkpoint_version",
            "iteration",
            "opt_param_scheduler",
            "num_floating_point_operations_so_far",
        ):
            draft.left_out.append(f"{str(key)[:200]} (of each rank, and not known how it belongs together)")
            continue
        common[key] = owned(value, reading(storage, first.file), first.file, first.model.records)
    common["content_metadata"] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return common


def _carried_arguments(draft: _Draft) -> Namespace:
    read = reading(storage_at(draft.directory), "")
    carried, left_out = carried_arguments(draft.arguments.values, read, draft.arguments.where, {})
    draft.left_out += left_out
    carried |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    return Namespace(**carried)


def _random_states(draft: _Draft) -> dict[str, Any]:
    """The objects in which a launch finds the random state of each rank."""
    count = draft.arguments.count
    tp, pp = (
        count("tensor_model_parallel_size", "model_parallel_size"),
        count("pipeline_model_parallel_size", default=1),
    )
    ep = count("expert_model_parallel_size", default=1)
    storage = storage_at(draft.directory)
    states = {
        (rank.pp, rank.tp, rank.ep): owned(
            rank.state["rng_state"], reading(storage, rank.file), rank.file, rank.model.records
        )
        for rank in draft.ranks
        if rank.state.get("rng_state") is not None
    }
    if len(states) != len(draft.ranks):
        draft.left_out += ["rng_state (not of all ranks)"] if states else []
        return {}
    if ep == 1:
        return {object_key("rng_state", (p, t), (pp, tp)): [states[p, t, 0]] for p in range(pp) for t in range(tp)}
    # With experts on several ranks, one for each data parallel rank; it has that of the experts that it holds.
    dp = count("data_parallel_size", default=1) * count("context_parallel_size", default=1)
    etp = count("expert_tensor_parallel_size", default=tp)
    found = {}
    for p, t, d in itertools.product(range(pp), range(tp), range(dp)):
        state = states.get((p, t, (t + tp * d) // etp % ep))
        if state is None:
            draft.left_out.append("rng_state (not of all ranks)")
            return {}
        found[object_key("rng_state", (p, t, d), (pp, tp, dp))] = [state]
    return found


# --------------------------------------------------------------------------------------------------------------- import


def legacy_import(directory: Path, options: ImportOptions) -> Import:
    """What a launch has saved with `--ckpt-format torch` as a checkpoint.

    Reads indexes, small files, what ranks hold alike, and the ends of what the optimizer copies.

    Args:
        directory: of an iteration.
        options: what to make.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: its files are damaged, contradict one another, or are not all there.
        ChecksumError: a file is damaged.
        UnsafePickleError: a file was made to do harm.
        OptionError: it holds what is not known here.
    """
    ranks, arguments = read_ranks(directory)
    draft = _Draft(directory, ranks, arguments)
    parameters = _read_model(draft)
    common = _common_state(draft)
    masters: list[tuple[_Parameter, str]] = []
    if "optimizer" in ranks[0].state and not options.drop_optimizer:
        masters = _read_optimizer(draft, parameters, common)
    draft.objects |= _random_states(draft)
    partitions = _partitions(draft)
    wanted, pairs, counts = _put_together(draft, partitions)
    records = {rank.file: rank.model.records for rank in ranks}
    records |= {rank.optimizer_file: rank.optimizer.records for rank in ranks if rank.optimizer is not None}
    payloads = LegacyPayloads(directory, draft.places, records)
    try:
        _check_masters(payloads, masters)
        _check_same(payloads, pairs)
    except BaseException:
        payloads.close()
        raise
    source_layout = TargetLayout(
        arguments.count("tensor_model_parallel_size", "model_parallel_size"),
        arguments.count("pipeline_model_parallel_size", default=1),
        arguments.count("expert_model_parallel_size", default=1),
        arguments.values.get("expert_tensor_parallel_size"),
    )
    layout = options.layout_like(source_layout)
    return Import(
        format="megatron-legacy",
        source_layout=str(source_layout),
        target_layout=str(layout),
        keys=lambda: (
            _shown(key, draft.tensors[key], partitions[key], wanted[key], counts[key], draft, options) for key in wanted
        ),
        arguments=vars(common["args"]),
        objects=draft.objects,
        left_out=tuple(draft.left_out),
        payloads=payloads,
        layout=layout,
        common=lambda _: saved(common),
        wanted=wanted,
    )


def _shown(
    key: str,
    tensor: _Tensor,
    partition: Partition,
    wanted: Wanted,
    pieces: int,
    draft: _Draft,
    options: ImportOptions,
) -> KeyPlan:
    how = []
    slots = 1 if partition.axis is None else _slots(draft, partition.expert)
    if slots > 1 and partition.axis is not None:
        halves = ", each half by itself" if partition.parts > 1 else ""
        how.append(f"joined along axis {partition.axis - len(tensor.counts)}{halves}")
    if tensor.counts:
        how.append("stacked")
    entry = TensorEntry(key, tensor.dtype, wanted.shape, ())
    return KeyPlan(
        tensor.source, pieces, ", ".join(how) or "as it is", key, wanted.shape, target_dtype(entry, options.dtype)
    )
