"""Models of Megatron's whose parameters lie whole under the names of its modules, as `torch_dist`.

    Megatron-FSDP (`--ckpt-format fsdp_dtensor`)   model.module.decoder.layers.3.mlp.linear_fc1.weight_w
    Megatron-DeepSpeed, universal                  language_model.encoder.layers.3.mlp.dense_h_to_4h.weight, or of its
                                                   pipelines 5.mlp.dense_h_to_4h.weight

Such names become those of `sharded_state_dict`: layers and experts are stacked, halves of a gated layer joined, and the
norms of Megatron's own layers are called as Transformer Engine calls them. Names as
`preprocess_fsdp_dtensor_state_dict` (Megatron-LM 0.16, 0.19) and the model pipes of Megatron-DeepSpeed make them; no
model is built.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.convert._foreign import (
    LAUNCH_STATE,
    SCHEDULE,
    OptimizerPlan,
    Training,
    is_foreign_optimizer_key,
    launch_state,
    plain_launch,
    plan_optimizer,
    refuse_another,
    without_wrappers,
)
from mcore_ckpt.convert._legacy_files import carried_arguments
from mcore_ckpt.convert._legacy_import import LOCAL_NORMS
from mcore_ckpt.convert._pieces import Source, Wanted
from mcore_ckpt.convert._sources import Opened, no_tensor, rank_state
from mcore_ckpt.convert.conversion import Import, ImportOptions, KeyPlan, saved
from mcore_ckpt.convert.reshard_plan import padded_vocabulary, target_dtype
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, object_key
from mcore_ckpt.format.metadata_read import METADATA_FILE, read_index
from mcore_ckpt.format.state_file import read_state_file
from mcore_ckpt.tools.plain_state import read_object, read_plain_object

__all__ = ["import_named"]

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_VOCABULARY = (_EMBEDDING, _OUTPUT)
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d{1,6})\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})(_[wv])?")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias)\d*)_([wv])")
_MOST_LAYERS = 1_000_000
# Megatron-DeepSpeed's names, and of its pipelines those of modules by their number.
_DEEPSPEED = (
    (r"^(?:.*\.)?language_model\.embedding\.", "embedding."),
    (r"^(?:.*\.)?language_model\.encoder\.", "decoder."),
    (r"^(?:.*\.)?language_model\.output_layer\.", "output_layer."),
    (r"^tied_modules\.embed\.", "embedding."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
)
_PIPE = re.compile(r"(\d{1,6})\.(.+)")


class _Place(NamedTuple):
    """Where a parameter belongs: target key, indexes along axes that count layers and experts, which half."""

    key: str
    at: tuple[int, ...]
    half: str = ""


@dataclass(slots=True)
class _Conversion:
    """An import that has been thought through; nothing has been written."""

    wanted: dict[str, Wanted]
    objects: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    arguments: dict[str, Any]
    common: dict[str, Any]
    left_out: list[str]
    notes: tuple[str, ...]
    keys: list[KeyPlan] = field(default_factory=list)


def import_named(opened: Opened, options: ImportOptions) -> Import:
    """A model of Megatron's, in a DCP or universal checkpoint under the names of its modules, as a checkpoint.

    Args:
        opened: the checkpoint.
        options: sizes of the target's files and the like; those that speak of a family are not for here.

    Raises:
        OptionError: its keys are none of Megatron's.
        CorruptCheckpointError: parameters are not there.
    """
    found = _convert(opened, options)
    empty = [None]
    return Import(
        format=opened.kind,
        family="Megatron's own names",
        target_layout=str(options.layout),
        keys=lambda: found.keys,
        arguments=found.arguments,
        objects={object_key(*place): empty for place in found.objects},
        notes=found.notes,
        left_out=tuple(found.left_out),
        payloads=opened.payloads,
        layout=options.layout,
        common=lambda _: saved(found.common),
        wanted=found.wanted,
    )


def _convert(opened: Opened, options: ImportOptions) -> _Conversion:
    index, directory, settings = opened.payloads.index, opened.directory, opened.settings
    names, left_out = _module_names(index)
    arguments, training, carried, unknown = _launch(directory)
    if arguments.get("untie_embeddings_and_output_weights") is False and _OUTPUT in names:
        copy = names.pop(_OUTPUT)
        refuse_another(opened.payloads, copy, names[_EMBEDDING], "the stored arguments do not untie them")
        left_out.append(f"{copy} (tied to the embedding)")
    places = _places(names, arguments)
    layers, experts = _counts(names, places, arguments, str(directory))
    _check_layers(names, arguments, str(directory))
    shapes = {name: index.tensors[key].shape for name, key in names.items()}
    vocabulary = padded_vocabulary(arguments, options.layout.tp)
    if vocabulary is None:
        padded = arguments.get("padded_vocab_size")
        vocabulary = padded if isinstance(padded, int) and padded > 0 else None
    wanted = _put_together(names, shapes, places, layers, experts, vocabulary)
    apart = {name: places[name].key for name in names if ".experts.experts." in places[name].key}
    optimizer: OptimizerPlan = plan_optimizer(index, names, settings, apart if options.layout.ep > 1 else {})
    states = {"": names, **{f"optimizer.state.{state}.": keys for state, keys in optimizer.states.items()}}
    for prefix, keys in states.items():
        if prefix:
            more = _put_together(keys, shapes, places, layers, experts, vocabulary)
            wanted |= {prefix + key: tensor for key, tensor in more.items()}
    arguments = {
        **arguments,
        "tensor_model_parallel_size": options.layout.tp,
        "pipeline_model_parallel_size": options.layout.pp,
        "expert_model_parallel_size": options.layout.ep,
        "ckpt_format": "torch_dist",
        **({"padded_vocab_size": wanted[_EMBEDDING].shape[0]} if "padded_vocab_size" in arguments else {}),
    }
    state, more, notes = launch_state(optimizer, training, arguments, options.global_batch_size)
    common = {"args": Namespace(**{**arguments, **more}), **state}
    shown = [
        KeyPlan(
            key,
            1,
            {"w": "first half", "v": "second half"}.get(places[name].half, "as it is"),
            f"{prefix}{places[name].key}{list(places[name].at) or ''}",
            shapes[name],
            target_dtype(index.tensors[key], options.dtype) if not prefix else "float32",
        )
        for prefix, keys in states.items()
        for name, key in keys.items()
    ]
    taken = {no_tensor(key) for key in carried if SCHEDULE in state or not key.startswith(SCHEDULE)}
    left_out += [*optimizer.left_out, *(what for what in opened.left_out if what not in taken), *unknown]
    objects = _extra_states(places, layers, experts)
    return _Conversion(wanted, objects, arguments, common, left_out, notes, shown)


def _module_names(index: CheckpointIndex) -> tuple[dict[str, str], list[str]]:
    """Stored keys by names of Megatron-Core's modules, and what is none; raises `OptionError`."""
    keys = [key for key in index.tensors if not is_foreign_optimizer_key(key)]
    plain = {key: _renamed(without_wrappers(key)) for key in keys}
    numbers = sorted({int(found.group(1)) for name in plain.values() if (found := _PIPE.fullmatch(name))})
    if numbers:
        plain = _of_pipeline(plain)
    prefixes = [name.removesuffix(_EMBEDDING) for name in plain.values() if name.endswith(_EMBEDDING)]
    if not prefixes:
        raise OptionError(
            f"{index.path}: has no {_EMBEDDING} of Megatron's under any prefix. Of a model with Hugging Face's names, "
            "give the config.json (--hf-config DIR)"
        )
    prefix = min(prefixes, key=len)
    names: dict[str, str] = {}
    left_out = []
    for key, name in plain.items():
        if not name.startswith(prefix):
            left_out.append(f"{key} (not of the model, whose keys begin with {prefix or 'its modules'})")
        elif name.removeprefix(prefix) in names:
            raise OptionError(f"{index.path}: {key} and {names[name.removeprefix(prefix)]} are the same parameter")
        else:
            names[name.removeprefix(prefix)] = key
    return names, left_out


def _renamed(name: str) -> str:
    for pattern, new in _DEEPSPEED:
        name = re.sub(pattern, new, name)
    return name


def _of_pipeline(names: Mapping[str, str]) -> dict[str, str]:
    """Names of modules that a pipeline numbers: layers are in their order, between what is outside of them."""
    parts = {key: _PIPE.fullmatch(name) for key, name in names.items()}
    outer = ("weight", "bias", "lm_head.weight", "word_embeddings.weight", "position_embeddings.weight")
    layers = sorted({int(found.group(1)) for found in parts.values() if found and found.group(2) not in outer})
    if layers and layers != list(range(layers[0], layers[-1] + 1)):
        missing = next(number for number in range(layers[0], layers[-1]) if number not in layers)
        raise CorruptCheckpointError(
            f"{next(iter(names))} and others: modules {layers[0]} to {layers[-1]} of a pipeline are layers, and there "
            f"is nothing of number {missing}. The checkpoint is incomplete. Nothing was written"
        )
    place = {number: position for position, number in enumerate(layers)}
    renamed = {}
    for key, found in parts.items():
        if found is None:
            renamed[key] = names[key]
            continue
        number, rest = int(found.group(1)), found.group(2)
        if number in place:
            renamed[key] = f"decoder.layers.{place[number]}.{rest}"
        elif rest in ("weight", "bias"):
            renamed[key] = f"decoder.final_layernorm.{rest}"
        elif rest in ("lm_head.weight", "word_embeddings.weight", "position_embeddings.weight"):
            last = rest == "lm_head.weight" or (bool(layers) and number > layers[-1])
            renamed[key] = "output_layer.weight" if last else f"embedding.{rest}"
        else:
            renamed[key] = names[key]
    return renamed


def _launch(directory: Path) -> tuple[dict[str, Any], Training, list[str], list[str]]:
    """Megatron's arguments; how far the launch was; the objects that say so; arguments of no class known here."""
    if not (directory / METADATA_FILE).exists():
        state, unknown = rank_state(directory)
        return *plain_launch(state), [], unknown
    index = read_index(directory)
    found: dict[str, Any] = {}
    carried, unknown = [], []
    for key, entry in index.objects.items():
        if key == "args":
            found[key], unknown = _arguments(index, entry)
        elif key in LAUNCH_STATE:
            found[key] = read_plain_object(index, entry)
        elif key.startswith(f"{SCHEDULE}."):  # DCP takes dicts apart
            found.setdefault(SCHEDULE, {})[key.removeprefix(f"{SCHEDULE}.")] = read_plain_object(index, entry)
        else:
            continue
        carried.append(key)
    return *plain_launch(found), carried, unknown


def _arguments(index: CheckpointIndex, entry: ObjectEntry) -> tuple[Any, list[str]]:
    """The arguments in an object of a DCP checkpoint, and those of classes that are not known."""
    content, where = read_object(index, entry), f"{entry.fqn} ({entry.item.file})"

    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    if entry.item.transforms:
        raise LoadError(f"{where}: stored through {', '.join(entry.item.transforms)}, which is not undone here")
    state = read_state_file(read, len(content), where)
    given = vars(state.value) if isinstance(state.value, Namespace) else state.value
    return carried_arguments(given, read, where, state.records) if isinstance(given, dict) else ({}, [])


def _places(names: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, _Place]:
    known = list(names)
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in known)
    norms = () if fused or arguments.get("multi_latent_attention") else LOCAL_NORMS
    kinds: dict[int, set[str]] = {}
    for name in known:
        if layer := _LAYER.fullmatch(name):
            kinds.setdefault(int(layer.group(1)), set()).add(layer.group(2))
    alike = len({frozenset(kind) for kind in kinds.values()}) < 2
    stacked = alike and not isinstance(arguments.get("moe_layer_freq"), (list, tuple))
    return {name: _place(name, norms, stacked) for name in known}


def _place(name: str, norms: Iterable[tuple[str, str]], stacked: bool) -> _Place:
    half = ""
    if matched := _HALF.fullmatch(name):
        name, half = matched.groups()
    layer = _LAYER.fullmatch(name)
    if layer is None:
        if ".layers." in f".{name}" or ".experts." in name:
            raise OptionError(f"{name}: only layers of a decoder (`decoder.layers.N`) are put together here")
        return _Place(name, (), half)
    number, rest = int(layer.group(1)), layer.group(2)
    for local, fused in norms:
        if rest.startswith(local):
            rest = fused + rest.removeprefix(local)
    index: tuple[int, ...] = (number,) if stacked else ()
    if matched := _LOCAL_EXPERT.fullmatch(rest):
        index, rest = (*index, int(matched.group(1))), f"mlp.experts.experts.{matched.group(2)}"
    elif matched := _GROUPED_EXPERT.fullmatch(rest):
        index, rest = (*index, int(matched.group(2))), f"mlp.experts.experts.{matched.group(1)}"
    elif ".experts." in rest and ".shared_experts." not in rest:
        raise OptionError(
            f"{name}: experts in this form are not put together here; expected `mlp.experts.local_experts.N` or "
            "`mlp.experts.linear_fc1.weightN`"
        )
    return _Place(f"decoder.layers.{rest}" if stacked else f"decoder.layers.{number}.{rest}", index, half)


def _counts(
    names: Iterable[str], places: Mapping[str, _Place], arguments: Mapping[str, Any], where: str
) -> tuple[int, int]:
    """How many layers there are, and experts: those that are there have to be as many as the arguments say."""
    numbers = {int(layer.group(1)) for name in names if (layer := _LAYER.fullmatch(name))}
    experts = {place.at[-1] for place in places.values() if ".experts.experts." in place.key}
    found = []
    for what, there, said in (
        ("layers", numbers, _stated(arguments, "num_layers")),
        # Megatron-DeepSpeed says 1 of a model that has none.
        ("experts", experts, _stated(arguments, "num_experts", more_than=1)),
    ):
        count = max(there, default=-1) + 1
        if count > _MOST_LAYERS:
            raise CorruptCheckpointError(f"{where}: {count} {what}: no model has that many")
        if said is not None and count != said:
            raise CorruptCheckpointError(
                f"{where}: the stored arguments say {said} {what}, and parameters are there of {len(there)}, the last "
                f"number {count - 1}. The checkpoint is incomplete, or not of one model. Nothing was written"
            )
        missing = [number for number in range(count) if number not in there]
        if missing:
            shown = ", ".join(map(str, missing[:10]))
            raise CorruptCheckpointError(
                f"{where}: of {count} {what}, there is nothing of number {shown}. The checkpoint is incomplete. "
                "Nothing was written"
            )
        found.append(count)
    return found[0], found[1]


def _stated(arguments: Mapping[str, Any], name: str, more_than: int = 0) -> int | None:
    value = arguments.get(name)
    return value if type(value) is int and value > more_than else None


def _check_layers(names: Collection[str], arguments: Mapping[str, Any], where: str) -> None:
    """Raise `CorruptCheckpointError` where a layer lacks what its like have, or the model what every model has."""
    needed = []
    if not any(name.startswith("decoder.final_") for name in names):
        needed.append("decoder.final_layernorm.weight")
    if arguments.get("untie_embeddings_and_output_weights"):
        needed.append(_OUTPUT)
    if (
        arguments.get("position_embedding_type") == "learned_absolute"
        and arguments.get("add_position_embedding", True)
        and not arguments.get("use_rotary_position_embeddings")
    ):
        needed.append("embedding.position_embeddings.weight")
    lacking = [name for name in needed if name not in names]
    layers: dict[int, set[str]] = {}
    for name in names:
        if layer := _LAYER.fullmatch(name):
            layers.setdefault(int(layer.group(1)), set()).add(layer.group(2))
    if not any(arguments.get(f"heterogeneous_layers_config_{kind}") for kind in ("path", "encoded_json")):
        alike: dict[Any, set[str]] = {}
        experts = any(".experts." in name for name in names)
        kinds = {number: _kind(number, own, arguments, experts=experts) for number, own in layers.items()}
        for number, own in layers.items():
            alike.setdefault(kinds[number], set()).update(own)
        for number, own in sorted(layers.items()):
            lacking += [f"decoder.layers.{number}.{rest}" for rest in sorted(alike[kinds[number]] - own)]
    if lacking:
        raise CorruptCheckpointError(
            f"{where}: {lacking[0]} is not there{f' (nor {len(lacking) - 1} others)' if lacking[1:] else ''}, by the "
            "stored arguments and by what other layers have. The checkpoint is incomplete. Nothing was written"
        )


def _kind(number: int, own: Collection[str], arguments: Mapping[str, Any], *, experts: bool) -> tuple[bool, bool]:
    """Whether a layer has to have experts, by the arguments if they say so; and whether its attention is linear.

    Args:
        number: of the layer.
        own: what it has.
        arguments: as they are stored.
        experts: whether some layer has some.
    """
    linear = any(name.startswith("self_attention.in_proj.") for name in own)
    frequency = arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, (list, tuple)) and number < len(frequency):
        return bool(frequency[number]), linear
    if type(frequency) is int and frequency > 0 and _stated(arguments, "num_experts", more_than=1):
        return number % frequency == 0, linear
    return experts and not any(name.startswith("mlp.linear_fc") for name in own), linear


def _lead(place: _Place, layers: int, experts: int) -> tuple[int, ...]:
    """Sizes of the axes that count layers and experts."""
    expert = ".experts.experts." in place.key
    return (*((layers,) if len(place.at) > expert else ()), *((experts,) if expert else ()))


def _put_together(
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[str, _Place],
    layers: int,
    experts: int,
    vocabulary: int | None,
) -> dict[str, Wanted]:
    """Targets by key; that boxes make them up exactly is seen when they become a view."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(places[name].key, []).append(name)
    wanted = {}
    for key, members in groups.items():
        halves = {places[name].half for name in members}
        if len({shapes[name] for name in members}) > 1 or ("" in halves and len(halves) > 1):
            raise CorruptCheckpointError(f"{key}: its parts {members[0]} and others have different shapes or forms")
        own = shapes[members[0]]
        lead = _lead(places[members[0]], layers, experts)
        total = own if halves == {""} else (2 * own[0], *own[1:])
        sources = []
        for name in members:
            place = places[name]
            start = (own[0] if place.half == "v" else 0, *(0,) * (len(own) - 1)) if own else ()
            box = Box((*place.at, *start), (*(1,) * len(lead), *own))
            sources.append(Source(box, names[name], Box((0,) * len(own), own)))
        if vocabulary is not None and key in _VOCABULARY and own[0] < vocabulary:
            sources.append(Source(Box((own[0], *(0,) * (len(own) - 1)), (vocabulary - own[0], *own[1:])), None))
            total = (vocabulary, *own[1:])
        _check_members(key, members, lead, halves)
        wanted[key] = Wanted((*lead, *total), tuple(sources))
    return wanted


def _check_members(key: str, members: list[str], lead: tuple[int, ...], halves: set[str]) -> None:
    """Raise `CorruptCheckpointError` where a layer, an expert or a half of a tensor is not there."""
    expected = len(halves | ({"w", "v"} if halves != {""} else set()))
    for size in lead:
        expected *= size
    if len(members) != expected:
        raise CorruptCheckpointError(
            f"{key}: {len(members)} parameters are stored, the first {members[0]}; expected {expected}, one for each "
            f"layer, expert and half ({list(lead)}). The checkpoint is incomplete. Nothing was written"
        )


def _extra_states(
    places: Mapping[str, _Place], layers: int, experts: int
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """The objects that linear layers ask for; without FP8 they hold nothing."""
    found = {}
    for place in places.values():
        owner, _, leaf = place.key.rpartition(".")
        if leaf == "weight" and owner.rpartition(".")[2].startswith("linear_"):
            lead = _lead(place, layers, experts)
            found[f"{owner}._extra_state", place.at or (0,)] = lead or (1,)
    return [(key, index, counts) for (key, index), counts in found.items()]
