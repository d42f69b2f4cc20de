"""A checkpoint of GPTModel as one of HybridModel, and back: other keys, the same elements.

A layer of GPTModel has attention and an MLP. HybridModel has layers of one kind each, which a pattern names: `*` is
attention, `-` an MLP, `E` experts, `M` Mamba. So layer i of GPTModel is the i-th `*` and the i-th `-` or `E`, as in
Megatron-LM's `gpt_hybrid_conversion`. The optimizer's state follows its parameter.

GPTModel keeps a parameter of all layers in one tensor where they are alike. HybridModel numbers its layers.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, object_key, parse_object_key
from mcore_ckpt.reshard._optimizer_layout import Rewritten, changed_common_state
from mcore_ckpt.reshard.conversion import arguments_of
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE, GPT_TO_HYBRID, HYBRID_TO_GPT, ReshardOptions
from mcore_ckpt.reshard.partition import EXTRA_STATE, layer_of, prefix_of
from mcore_ckpt.reshard.view import Part, TensorView, as_stored
from mcore_ckpt.reshard.weight_files import encode_state
from mcore_ckpt.tools.keys import is_optimizer_key, model_key, optimizer_layout, read_object

_KINDS: Final = {
    "*": re.compile(r"input_layernorm\.|self_attention\.(?:linear_qkv|linear_proj|core_attention|[qk]_layernorm)\."),
    "-": re.compile(r"pre_mlp_layernorm\.|mlp\.linear_fc[12]\."),  # that norm may stand before experts, too
    "E": re.compile(r"mlp\.(?:router|experts|shared_experts)\."),
    "M": re.compile(r"mixer\.|norm\."),
}
_FORMS: Final = {
    GPT_TO_HYBRID: (re.compile(r"(?:\*[-E] )+"), "attention (*) and an MLP (-) or experts (E) in each"),
    HYBRID_TO_GPT: (re.compile(r"(?:M )*(?:\* (?:M )*[-E] (?:M )*)+"), "*, -, E or M, and one - or E behind each *"),
}
_FINAL_NORMS: Final = ("decoder.final_layernorm.", "decoder.final_norm.")
_OUTPUT_STATE: Final = f"output_layer.{EXTRA_STATE}/shard_0_1"  # an empty object, which GPTModel leaves out
_PATTERNS: Final = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second up to 0.16
_COUNT_LAYERS: Final = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq")


class _Member(NamedTuple):
    """A parameter of one layer, or an object; its key is `before`, the number and `rest`."""

    before: str
    number: int
    rest: str  # an object's place among shards is that of numbered layers
    kind: str
    fqn: str  # where it is stored
    view: TensorView | None  # None: an object


_Made = list[tuple[str, str, TensorView | None]]
"""Keys of the target, stored keys, and tensors; None: an object."""


def in_other_model(index: CheckpointIndex, common: Mapping[str, Any], options: ReshardOptions) -> Rewritten:
    """Plan `options.convert_model`. Raises `OptionError` for layers, names and states that the other model lacks."""
    keys = [key for key in (*index.tensors, *index.objects) if not (options.drop_optimizer and is_optimizer_key(key))]
    kind = None if options.drop_optimizer else optimizer_layout(index, common)
    if kind not in (None, FULLY_RESHARDABLE):
        raise OptionError(
            f"{index.path}: its optimizer state is {kind!r}; expected {FULLY_RESHARDABLE}, which --optimizer-layout "
            "makes in a command of its own, or --drop-optimizer. Nothing was written"
        )
    arguments, is_hybrid = arguments_of(common), options.convert_model == GPT_TO_HYBRID
    prefix = prefix_of(map(model_key, index.tensors)) or ""
    members = [member for key in keys for member in _members(index, key, prefix)]
    layers = _kinds(members)
    form, expected = _FORMS[options.convert_model or ""]
    if not form.fullmatch("".join(f"{kinds} " for kinds in layers)):
        raise OptionError(
            f"{index.path}: the layers are {' '.join(layers) or 'none'}; {options.convert_model} expects {expected}. "
            "Nothing was written"
        )
    pattern, mamba = "".join(layers), [member.fqn for member in members if member.kind == "M"]
    if any(map(is_optimizer_key, mamba)):
        raise OptionError(f"{index.path}: GPTModel has no optimizer state for Mamba's layers; give --drop-optimizer")
    if is_hybrid:
        made = _numbered(member._replace(number=2 * member.number + (member.kind != "*")) for member in members)
    else:
        places = {number: pattern.count("*", 0, number + 1) - 1 for number in range(len(pattern))}
        kept = [member._replace(number=places[member.number]) for member in members if member.kind != "M"]
        made = _stacked(kept, pattern.count("*"), arguments) or _numbered(kept)
    old, new = _FINAL_NORMS if is_hybrid else _FINAL_NORMS[::-1]
    in_layers = {member.fqn for member in members}
    for key in keys:
        if key not in in_layers and not key.endswith(_OUTPUT_STATE):
            made.append((key.replace(old, new), key, as_stored(index.tensors[key]) if key in index.tensors else None))
    tensors = {key: view for key, _, view in made if view is not None}
    objects = {key: fqn for key, fqn, view in made if view is None}
    if len(tensors) + len(objects) < len(made):
        raise OptionError(f"{index.path}: two stored names would become one. Nothing was written")
    changed, common_file = changed_common_state(index, lambda state: _with_layers(state, pattern, is_hybrid=is_hybrid))
    contents = {key: read_object(index, index.objects[fqn]) for key, fqn in objects.items() if key != fqn}
    if is_hybrid:
        contents[f"{prefix_of(index.tensors) or ''}{_OUTPUT_STATE}"] = encode_state([None])
    notes = [f"{name} is for the source's layers" for name in _COUNT_LAYERS if arguments.get(name) not in (None, 0, 1)]
    if is_hybrid:
        notes.append(f"the job needs --hybrid-layer-pattern '{pattern}', to which it may add `|`, and a --spec")
    left_out = (f"Mamba's layers ({counted(len(mamba), 'item')}), which GPTModel has not",) if mamba else ()
    contents |= changed
    same = tuple(key for key in objects if key not in contents)
    return Rewritten(tensors, same, contents, common_file, notes=tuple(notes), left_out=left_out)


def _members(index: CheckpointIndex, fqn: str, prefix: str) -> Iterator[_Member]:
    """What a key holds of each layer of the decoder behind `prefix`."""
    entry, shard = index.tensors.get(fqn), parse_object_key(fqn)
    stored = fqn if entry is not None or shard is None else shard.key
    name = model_key(stored)
    layer = layer_of(name)
    if layer is None:
        return
    kind = next((kind for kind, names in _KINDS.items() if names.match(layer.rest)), None)
    known = shard is not None if entry is None else all(entry.shape or (0,))
    if kind is None or layer.before != f"{prefix}decoder.layers." or not known:
        raise OptionError(f"{index.path}: {fqn} is nothing that both models have in a layer. Nothing was written")
    before, number = stored.removesuffix(name) + layer.before, layer.number
    if entry is not None and number is not None:
        yield _Member(before, number, layer.rest, kind, fqn, as_stored(entry))
    elif entry is not None:
        own, zeros = entry.shape[1:], (0,) * (len(entry.shape) - 1)
        for n in range(entry.shape[0]):
            part = Part(Box(zeros, own), fqn, Box((n, *zeros), (1, *own)))
            yield _Member(before, n, layer.rest, kind, fqn, TensorView(own, (part,)))
    elif shard is not None:
        offset, shape = shard.offset, shard.shape
        if number is None:
            number, offset, shape = offset[0], offset[1:] or (0,), shape[1:] or (1,)
        yield _Member(before, number, object_key(layer.rest, offset, shape), kind, fqn, None)


def _kinds(members: Iterable[_Member]) -> list[str]:
    """The kinds in each layer."""
    found: dict[int, set[str]] = {}
    for member in members:
        found.setdefault(member.number, set()).add(member.kind)
    layers = [found.get(number, set()) for number in range(len(found))]
    return ["".join(sorted(kinds - {"-"} if "E" in kinds else kinds)) for kinds in layers]


def _numbered(members: Iterable[_Member]) -> _Made:
    return [(f"{member.before}{member.number}.{member.rest}", member.fqn, member.view) for member in members]


def _stacked(members: Iterable[_Member], layers: int, arguments: Mapping[str, Any]) -> _Made | None:
    """A tensor for all layers; None where Megatron's GPTModel has one for each."""
    if arguments.get("hetereogenous_dist_checkpoint") or isinstance(arguments.get("moe_layer_freq"), list):
        return None
    made: _Made = []
    stacks: dict[str, dict[int, TensorView]] = {}
    for member in members:
        if member.view is not None:
            stacks.setdefault(member.before + member.rest, {})[member.number] = member.view
        elif (shard := parse_object_key(member.rest)) is not None:
            offset, shape = ((), ()) if shard.shape == (1,) else (shard.offset, shard.shape)
            key = object_key(member.before + shard.key, (member.number, *offset), (layers, *shape))
            made.append((key, member.fqn, None))
    for key, stack in stacks.items():
        shapes = {view.shape for view in stack.values()}
        if len(stack) < layers or len(shapes) > 1:
            return None
        parts = [
            part._replace(slice=Box((number, *part.slice.offsets), (1, *part.slice.sizes)))
            for number, view in sorted(stack.items())
            for part in view.parts
        ]
        made.append((key, key, TensorView((layers, *shapes.pop()), parts)))
    return made


def _with_layers(state: dict[Any, Any], pattern: str, *, is_hybrid: bool) -> dict[Any, Any]:
    """A common state whose arguments say which layers the model has."""
    given = state.get("args")
    if not isinstance(given, Namespace):
        return state
    layers = len(pattern) if is_hybrid else pattern.count("*")
    values: dict[str, Any] = {"num_layers": layers, "is_hybrid_model": is_hybrid, "spec": None}
    values |= dict.fromkeys(_PATTERNS)
    experts = [int(kind == "E") for kind in pattern if kind in "-E"]
    if not is_hybrid and 0 < sum(experts) < len(experts):
        values["moe_layer_freq"] = experts
    if is_hybrid:
        values[_PATTERNS[not hasattr(given, _PATTERNS[0])]] = pattern
    known = {name: value for name, value in values.items() if hasattr(given, name)}
    return {**state, "args": Namespace(**{**vars(given), **known})}
