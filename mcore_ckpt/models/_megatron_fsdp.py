"""Checkpoints of Megatron-FSDP (`--ckpt-format fsdp_dtensor`), as `torch_dist`. Megatron is not needed.

    model.module.decoder.layers.3.mlp.linear_fc1.weight_w        ->  decoder.layers.mlp.linear_fc1.weight

A DCP checkpoint holds complete parameters under the names of Megatron's modules, as
`preprocess_fsdp_dtensor_state_dict` (Megatron-LM 0.16, 0.19) makes them. Such names become those of
`sharded_state_dict`: layers and experts are stacked, halves of a gated layer joined, and the norms of Megatron's own
layers are called as Transformer Engine calls them. No model is built.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.state_file import read_state_file
from mcore_ckpt.models._foreign import (
    Opened,
    Training,
    import_conversion,
    is_foreign_optimizer_key,
    launch_state,
    layout_of,
    no_tensor,
    plan_optimizer,
    refuse_another,
    without_wrappers,
)
from mcore_ckpt.models._settings import expert_layers_of
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan
from mcore_ckpt.reshard.options import ImportOptions
from mcore_ckpt.reshard.parameter_orders import plain_values
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
    split_half,
)
from mcore_ckpt.reshard.plan import padded_vocabulary, target_dtype
from mcore_ckpt.reshard.view import Part, TensorView
from mcore_ckpt.reshard.weight_files import encode_state, taken_over
from mcore_ckpt.tools.keys import read_object, read_plain_object


def stacks_layers(arguments: Mapping[str, Any]) -> bool:
    """Whether Megatron-Core saves these layers in one tensor for each kind of parameter."""

    def unlike(value: Any) -> bool:
        return isinstance(value, list) or (isinstance(value, int) and value > 1)

    return not (
        unlike(arguments.get("moe_layer_freq", 1))
        or unlike(arguments.get("linear_attention_freq"))
        or arguments.get("heterogeneous_layers_config_path")
        or arguments.get("heterogeneous_layers_config_encoded_json")
    )


_MOST_LAYERS = 100_000
_SCHEDULE = "opt_param_scheduler"
_HALVES = {"w": "first half", "v": "second half", "": "as it is"}


class _Whole(NamedTuple):
    """A parameter of a module, and which slice of a tensor of the target it is; `whole` is that tensor's shape."""

    place: ShardedName
    half: str  # "w", "v", or nothing
    shape: tuple[int, ...]
    slice: Box
    whole: tuple[int, ...]


def import_fsdp(opened: Opened, options: ImportOptions) -> Conversion:
    """A model of Megatron's, in a DCP checkpoint under the names of its modules, as a checkpoint."""
    index, layout, where = opened.payloads.index, layout_of(options), str(opened.directory)
    names, left_out = _module_names(index)
    arguments, training, carried, unknown = _launch(read_index(opened.directory))
    if arguments.get("untie_embeddings_and_output_weights") is False and OUTPUT in names:
        copy = names.pop(OUTPUT)
        refuse_another(opened.payloads, copy, names[EMBEDDING], "the stored arguments do not untie them")
        left_out.append(f"{copy} (tied to the embedding)")
    layers, experts = _counts(names, arguments, where)
    _check_layers(names, {**arguments, "num_layers": layers}, where)
    stacking = Stacking(layers, experts, stacks_layers(arguments), local_norms(names, arguments))
    parameters = {name: _parameter(name, index.tensors[key].shape, stacking) for name, key in names.items()}
    vocabulary = padded_vocabulary(arguments, layout.tp) or arguments.get("padded_vocab_size")
    apart = {name: one.place.key for name, one in parameters.items() if is_expert_key(one.place.key)}
    optimizer = plan_optimizer(index, names, opened.settings, apart if layout.ep > 1 else {})
    states = {"": names, **{f"optimizer.state.{state}.": keys for state, keys in optimizer.states.items()}}
    views = {
        prefix + key: view for prefix, keys in states.items() for key, view in _views(parameters, keys, vocabulary)
    }
    arguments = {
        **arguments,
        **layout.arguments,
        "ckpt_format": "torch_dist",
        **({"padded_vocab_size": views[EMBEDDING].shape[0]} if "padded_vocab_size" in arguments else {}),
    }
    state, more, notes = launch_state(optimizer, training, arguments, options.global_batch_size)
    taken = {no_tensor(key) for key in carried if _SCHEDULE in state or not key.startswith(_SCHEDULE)}
    left_out += [*optimizer.left_out, *(what for what in opened.left_out if what not in taken), *unknown]

    def row(prefix: str, name: str, key: str) -> KeyPlan:
        one = parameters[name]
        dtype = "float32" if prefix else target_dtype(index.tensors[key], options.dtype)
        target = f"{prefix}{one.place.key}{list(one.place.offsets) or ''}"
        return KeyPlan(key, 1, _HALVES[one.half], target, one.shape, dtype)

    return import_conversion(
        opened.payloads,
        options,
        layout,
        lambda _: encode_state({"args": Namespace(**{**arguments, **more}), **state}),
        ConversionReport(
            format=opened.kind,
            family="Megatron's own names",
            arguments=arguments,
            notes=notes,
            left_out=tuple(left_out),
        ),
        keys=lambda: (row(prefix, name, key) for prefix, named in states.items() for name, key in named.items()),
        tensors=views,
        objects=extra_states(one.place for one in parameters.values()),
    )


def _module_names(index: CheckpointIndex) -> tuple[dict[str, str], list[str]]:
    """Stored keys by names of Megatron-Core's modules, and what is none; raises `OptionError`."""
    plain = {key: without_wrappers(key) for key in index.tensors if not is_foreign_optimizer_key(key)}
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


def _launch(index: CheckpointIndex) -> tuple[dict[str, Any], Training, list[str], list[str]]:
    """Megatron's arguments; how far the job was; the objects that say so; arguments of no class known here."""
    arguments: dict[str, Any] = {}
    schedule: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    carried: list[str] = []
    unknown: list[str] = []
    for key, entry in index.objects.items():
        if key == "args":
            arguments, unknown = _stored_arguments(index, entry)
        elif key in ("iteration", "num_floating_point_operations_so_far"):
            counts[key] = read_plain_object(index, entry)
        elif key.startswith(f"{_SCHEDULE}."):  # DCP takes dicts apart
            schedule[key.removeprefix(f"{_SCHEDULE}.")] = read_plain_object(index, entry)
        else:
            continue
        carried.append(key)
    iteration, operations = counts.get("iteration"), counts.get("num_floating_point_operations_so_far")
    training = Training(
        iteration if type(iteration) is int else 0,
        plain_values(schedule),
        operations if isinstance(operations, (int, float)) else 0,
    )
    return arguments, training, carried, unknown


def _stored_arguments(index: CheckpointIndex, entry: ObjectEntry) -> tuple[dict[str, Any], list[str]]:
    """The arguments in an object of a DCP checkpoint, and those of classes that are not known."""
    content, where = read_object(index, entry), f"{entry.fqn} ({entry.item.file})"

    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    state = read_state_file(read, len(content), where)
    carried, left_out = {}, []
    for name, value in vars(state.value).items() if isinstance(state.value, Namespace) else ():
        try:
            carried[name] = taken_over(value, read, where, state.records)
        except (OptionError, KeyError):
            left_out.append(f"the argument {name[:200]} (of a class that is not known here)")
    return carried, left_out


def _by_layer(names: Iterable[str]) -> dict[int, set[str]]:
    """What each layer of the decoder has, by its number."""
    found: dict[int, set[str]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None and layer.before == "decoder.layers." and layer.number is not None:
            found.setdefault(layer.number, set()).add(layer.rest)
    return found


def _counts(names: Iterable[str], arguments: Mapping[str, Any], where: str) -> tuple[int, int]:
    """How many layers and experts there are: as many as the arguments say, if they do, and none is missing."""
    named = [expert_of(split_half(name)[0]) for name in names]
    experts = {expert.number for expert in named if expert is not None and expert.number is not None}
    found = []
    for what, there, said in (
        ("layers", set(_by_layer(names)), arguments.get("num_layers")),
        ("experts", experts, arguments.get("num_experts")),
    ):
        last = max(there, default=-1)
        count = said if type(said) is int else last + 1
        if not len(there) == last + 1 == count or count > _MOST_LAYERS:
            raise CorruptCheckpointError(
                f"{where}: expected {count} {what}, by the stored arguments or the last number, and parameters are "
                f"there of {len(there)}, the last number {last}. The checkpoint is incomplete, or not of one model. "
                "Nothing was written"
            )
        found.append(count)
    return found[0], found[1]


def _check_layers(names: Collection[str], arguments: Mapping[str, Any], where: str) -> None:
    """Raise `CorruptCheckpointError` where a layer lacks what its like have, or the model what every model has."""
    lacking = [] if any(name.startswith("decoder.final_") for name in names) else ["decoder.final_layernorm.weight"]
    for name, is_needed in (
        (OUTPUT, arguments.get("untie_embeddings_and_output_weights")),
        ("embedding.position_embeddings.weight", arguments.get("position_embedding_type") == "learned_absolute"),
    ):
        lacking += [name] if is_needed and name not in names else []
    if not any(arguments.get(f"heterogeneous_layers_config_{kind}") for kind in ("path", "encoded_json")):
        layers, kinds = _by_layer(names), expert_layers_of(arguments)
        alike: dict[bool, set[str]] = {}
        for number, own in layers.items():
            alike.setdefault(kinds[number], set()).update(own)
        for number, own in sorted(layers.items()):
            lacking += [f"decoder.layers.{number}.{rest}" for rest in sorted(alike[kinds[number]] - own)]
    if lacking:
        raise CorruptCheckpointError(
            f"{where}: {lacking[0]} is not there{f' (nor {len(lacking) - 1} others)' if lacking[1:] else ''}, by the "
            "stored arguments and by what other layers have. The checkpoint is incomplete. Nothing was written"
        )


def _parameter(name: str, shape: tuple[int, ...], stacking: Stacking) -> _Whole:
    name, half = split_half(name)
    place = stacking.sharded(name)
    first, *inner = shape or (1,)
    own = (*(1,) * len(place.counts), *shape)
    offsets = (*place.offsets, first if half == "v" else 0, *(0 for _ in inner))[: len(own)]
    total = ((2 if half else 1) * first, *inner) if shape else ()
    return _Whole(place, half, shape, Box(offsets, own), (*place.counts, *total))


def _views(
    parameters: Mapping[str, _Whole], keys: Mapping[str, str], vocabulary: Any
) -> Iterable[tuple[str, TensorView]]:
    """Tensors of the target by their keys, of stored ones with these keys by name; the vocabulary padded to so many."""
    groups: dict[str, list[str]] = {}
    for name in keys:
        groups.setdefault(parameters[name].place.key, []).append(name)
    for key, members in groups.items():
        whole = parameters[members[0]].whole
        problem = covers(whole, [parameters[name].slice for name in members])
        if problem or any(parameters[name].whole != whole for name in members):
            raise CorruptCheckpointError(
                f"{key}: {len(members)} parameters are stored, the first {members[0]}; expected one for each layer, "
                f"expert and half of {list(whole)}: {problem or 'they differ in shape'}. The checkpoint is incomplete. "
                "Nothing was written"
            )
        parts = [
            Part(parameters[name].slice, keys[name], Box((0,) * len(parameters[name].shape), parameters[name].shape))
            for name in members
        ]
        if key in (EMBEDDING, OUTPUT) and isinstance(vocabulary, int) and whole and whole[0] < vocabulary:
            more = Box((whole[0], *(0 for _ in whole[1:])), (vocabulary - whole[0], *whole[1:]))
            parts.append(Part(more, None))
            whole = (vocabulary, *whole[1:])
        yield key, TensorView(whole, tuple(parts))
