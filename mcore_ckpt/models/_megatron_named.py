"""Models of Megatron's whose parameters are complete under the names of its modules, as `torch_dist`.

    Megatron-FSDP (`--ckpt-format fsdp_dtensor`)   model.module.decoder.layers.3.mlp.linear_fc1.weight_w
    Megatron-DeepSpeed, universal                  language_model.encoder.layers.3.mlp.dense_h_to_4h.weight, or of its
                                                   pipelines 5.mlp.dense_h_to_4h.weight

Such names become those of `sharded_state_dict`: layers and experts are stacked, halves of a gated layer joined, and the
norms of Megatron's own layers are called as Transformer Engine calls them. Names as
`preprocess_fsdp_dtensor_state_dict` (Megatron-LM 0.16, 0.19) and the model pipes of Megatron-DeepSpeed make them; no
model is built.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, object_key
from mcore_ckpt.format.metadata_read import METADATA_FILE, read_index
from mcore_ckpt.format.state_file import read_state_file
from mcore_ckpt.models._foreign import (
    LAUNCH_STATE,
    SCHEDULE,
    Training,
    import_conversion,
    is_foreign_optimizer_key,
    launch_state,
    layout_of,
    plain_launch,
    plan_optimizer,
    refuse_another,
    without_wrappers,
)
from mcore_ckpt.models._legacy_files import carried_arguments
from mcore_ckpt.models._sources import Opened, no_tensor, rank_state
from mcore_ckpt.models.options import ImportOptions
from mcore_ckpt.reshard.conversion import Conversion, KeyPlan
from mcore_ckpt.reshard.partition import (
    EMBEDDING,
    OUTPUT,
    ShardedName,
    Stacking,
    expert_of,
    extra_states,
    is_expert_key,
    layer_of,
    local_norms,
    prefix_of,
    shard_slices,
    split_half,
)
from mcore_ckpt.reshard.plan import padded_vocabulary, target_dtype
from mcore_ckpt.reshard.view import Part, TensorView
from mcore_ckpt.reshard.weight_files import encode_state
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import read_object, read_plain_object

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


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's parameters: stored keys by module's name, sharded name and half of each, and rows of the vocabulary."""

    names: Mapping[str, str]
    places: Mapping[str, tuple[ShardedName, str]]
    shapes: Mapping[str, tuple[int, ...]]
    vocabulary: int | None


def import_named(opened: Opened, options: ImportOptions) -> Conversion:
    """A model of Megatron's, in a DCP or universal checkpoint under the names of its modules, as a checkpoint."""
    index, directory, layout = opened.payloads.index, opened.directory, layout_of(options)
    names, left_out = _module_names(index)
    arguments, training, carried, unknown = _launch(directory)
    if arguments.get("untie_embeddings_and_output_weights") is False and OUTPUT in names:
        copy = names.pop(OUTPUT)
        refuse_another(opened.payloads, copy, names[EMBEDDING], "the stored arguments do not untie them")
        left_out.append(f"{copy} (tied to the embedding)")
    layers, experts = _counts(names, arguments, str(directory))
    _check_layers(names, arguments, str(directory))
    stacking = Stacking(layers, experts, _is_stacked(names, arguments), local_norms(names, arguments))
    vocabulary = padded_vocabulary(arguments, layout.tp)
    if vocabulary is None:
        padded = arguments.get("padded_vocab_size")
        vocabulary = padded if isinstance(padded, int) and padded > 0 else None
    model = _Model(
        names,
        {name: (stacking.sharded(split_half(name)[0]), split_half(name)[1]) for name in names},
        {name: index.tensors[key].shape for name, key in names.items()},
        vocabulary,
    )
    apart = {name: place.key for name, (place, _) in model.places.items() if is_expert_key(place.key)}
    optimizer = plan_optimizer(index, names, opened.settings, apart if layout.ep > 1 else {})
    states = {"": names, **{f"optimizer.state.{state}.": keys for state, keys in optimizer.states.items()}}
    views = {prefix + key: view for prefix, keys in states.items() for key, view in _put_together(model, keys).items()}
    arguments = {
        **arguments,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "ckpt_format": "torch_dist",
        **({"padded_vocab_size": views[EMBEDDING].shape[0]} if "padded_vocab_size" in arguments else {}),
    }
    state, more, notes = launch_state(optimizer, training, arguments, options.global_batch_size)
    taken = {no_tensor(key) for key in carried if SCHEDULE in state or not key.startswith(SCHEDULE)}
    left_out += [*optimizer.left_out, *(what for what in opened.left_out if what not in taken), *unknown]
    empty = [None]
    return import_conversion(
        opened.payloads,
        options,
        layout,
        arguments,
        lambda _: encode_state({"args": Namespace(**{**arguments, **more}), **state}),
        format=opened.kind,
        keys=lambda: (
            _row(model, prefix, name, key, index, options)
            for prefix, named in states.items()
            for name, key in named.items()
        ),
        tensors=views,
        objects={object_key(*state): empty for state in extra_states(place for place, _ in model.places.values())},
        family="Megatron's own names",
        notes=notes,
        left_out=tuple(left_out),
    )


def _row(model: _Model, prefix: str, name: str, key: str, index: CheckpointIndex, options: ImportOptions) -> KeyPlan:
    place, half = model.places[name]
    transform = {"w": "first half", "v": "second half"}.get(half, "as it is")
    dtype = "float32" if prefix else target_dtype(index.tensors[key], options.dtype)
    return KeyPlan(key, 1, transform, f"{prefix}{place.key}{list(place.offsets) or ''}", model.shapes[name], dtype)


def _module_names(index: CheckpointIndex) -> tuple[dict[str, str], list[str]]:
    """Stored keys by names of Megatron-Core's modules, and what is none; raises `OptionError`."""
    keys = [key for key in index.tensors if not is_foreign_optimizer_key(key)]
    plain = {key: _renamed(without_wrappers(key)) for key in keys}
    numbers = sorted({int(found.group(1)) for name in plain.values() if (found := _PIPE.fullmatch(name))})
    if numbers:
        plain = _of_pipeline(plain)
    prefix = prefix_of(plain.values())
    if prefix is None:
        raise OptionError(
            f"{index.path}: has no {EMBEDDING} of Megatron's under any prefix. Of a model with Hugging Face's names, "
            "give the config.json (--hf-config DIR)"
        )
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
    """Megatron's arguments; how far the job was; the objects that say so; arguments of no class known here."""
    if not storage_at(directory).exists(METADATA_FILE):
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


def _is_stacked(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    """Whether all layers are alike, so that one tensor holds a parameter of all of them."""
    kinds = {frozenset(own) for own in _by_layer(names).values()}
    return len(kinds) < 2 and not isinstance(arguments.get("moe_layer_freq"), (list, tuple))


def _by_layer(names: Iterable[str]) -> dict[int, set[str]]:
    """What each layer of the decoder has, by its number."""
    found: dict[int, set[str]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None and layer.before == "decoder.layers." and layer.number is not None:
            found.setdefault(layer.number, set()).add(layer.rest)
    return found


def _counts(names: Iterable[str], arguments: Mapping[str, Any], where: str) -> tuple[int, int]:
    """How many layers there are, and experts: those that are there have to be as many as the arguments say."""
    numbers = set(_by_layer(names))
    named = [expert_of(split_half(name)[0]) for name in names]
    experts = {expert.number for expert in named if expert is not None and expert.number is not None}
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
        needed.append(OUTPUT)
    if (
        arguments.get("position_embedding_type") == "learned_absolute"
        and arguments.get("add_position_embedding", True)
        and not arguments.get("use_rotary_position_embeddings")
    ):
        needed.append("embedding.position_embeddings.weight")
    lacking = [name for name in needed if name not in names]
    layers = _by_layer(names)
    if not any(arguments.get(f"heterogeneous_layers_config_{kind}") for kind in ("path", "encoded_json")):
        alike: dict[Any, set[str]] = {}
        experts = any(map(is_expert_key, names))
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
    """Whether a layer has to have experts, by the arguments if they say so; and whether its attention is linear. `own`
    is what the layer has; `experts`, whether some layer has some.
    """
    linear = any(name.startswith("self_attention.in_proj.") for name in own)
    frequency = arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, (list, tuple)) and number < len(frequency):
        return bool(frequency[number]), linear
    if type(frequency) is int and frequency > 0 and _stated(arguments, "num_experts", more_than=1):
        return number % frequency == 0, linear
    return experts and not any(name.startswith("mlp.linear_fc") for name in own), linear


def _put_together(model: _Model, keys: Mapping[str, str]) -> dict[str, TensorView]:
    """Targets by sharded key, of the tensors with these stored keys."""
    groups: dict[str, list[str]] = {}
    for name in keys:
        groups.setdefault(model.places[name][0].key, []).append(name)
    views = {}
    for key, members in groups.items():
        own, lead = model.shapes[members[0]], model.places[members[0]][0].counts
        halves = {model.places[name][1] for name in members}
        if len({model.shapes[name] for name in members}) > 1 or ("" in halves and len(halves) > 1):
            raise CorruptCheckpointError(f"{key}: its parts {members[0]} and others have different shapes or forms")
        count = 1 if halves == {""} else 2
        if len(members) != count * math.prod(lead):
            raise CorruptCheckpointError(
                f"{key}: {len(members)} parameters are stored, the first {members[0]}; expected one for each layer, "
                f"expert and half, {count * math.prod(lead)}. The checkpoint is incomplete. Nothing was written"
            )
        total = (count * own[0], *own[1:]) if own else ()
        parts = []
        for name in members:
            place, half = model.places[name]
            for mine, there in shard_slices(total, 0 if count > 1 else None, 1, count, int(half == "v")):
                box = Box((*place.offsets, *there.offsets), (*(1,) * len(lead), *there.sizes))
                parts.append(Part(box, keys[name], mine))
        if model.vocabulary is not None and key in (EMBEDDING, OUTPUT) and own[0] < model.vocabulary:
            parts.append(Part(Box((own[0], *(0,) * (len(own) - 1)), (model.vocabulary - own[0], *own[1:])), None))
            total = (model.vocabulary, *own[1:])
        views[key] = TensorView((*lead, *total), tuple(parts))
    return views
