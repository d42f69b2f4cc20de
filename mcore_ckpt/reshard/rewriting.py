"""A checkpoint as other tensors of the same elements: its optimizer in another layout, or its model of another kind.

The target is a view: its tensors are slices of what is stored, and no element is computed.

**The optimizer's state** in the layout that every later job loads, under any division of the model:

    fully_sharded_model_space (0.12 to 0.14)   stretches of flattened parameters, under the parameters' keys
    dp_reshardable                             flat buckets, which say nothing of parameters
    -> fully_reshardable (from 0.15 on)        a tensor of the parameter's own shape for each state

The table saved with a bucket says which slice is which parameter. Where there is none, as in older checkpoints,
`parameter_orders` tells, and the checkpoint's own elements confirm it: the optimizer's copy of a parameter, rounded to
the model's dtype, is the model's parameter.

**GPTModel as HybridModel**, and back. A layer of GPTModel has attention and an MLP. HybridModel has layers of one kind
each, which a pattern names: `*` is attention, `-` an MLP, `E` experts, `M` Mamba. So layer i of GPTModel is the i-th
`*` and the i-th `-` or `E`, as in Megatron-LM's `gpt_hybrid_conversion`. The optimizer's state follows its parameter.
GPTModel keeps a parameter of all layers in one tensor where they are alike. HybridModel numbers its layers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import CorruptCheckpointError, MissingKeyError, OptionError
from mcore_ckpt.format.index import (
    COMMON_STATE_KEY,
    CheckpointIndex,
    TensorEntry,
    object_key,
    parse_object_key,
)
from mcore_ckpt.format.parameter_table import (
    BUCKET,
    GROUP_OBJECT,
    SIZES_OF_BUCKETS,
    STATE_KEY,
    dense_slices,
    stored_tables,
)
from mcore_ckpt.reshard.conversion import arguments_of
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE, GPT_TO_HYBRID, HYBRID_TO_GPT, ReshardOptions
from mcore_ckpt.reshard.parameter_orders import FlatParameter, ParameterBox, parameter_orders, places_in_buckets
from mcore_ckpt.reshard.partition import EXTRA_STATE, layer_of, prefix_of
from mcore_ckpt.reshard.view import Part, TensorView, as_stored
from mcore_ckpt.reshard.weight_files import decode_state, encode_state
from mcore_ckpt.tools.keys import (
    is_optimizer_key,
    model_key,
    optimizer_layout,
    read_object,
    stored_common_state,
    unwrapped,
)
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.regrid import cast_floats

_ELEMENTS_COMPARED = 64
_MAIN_PARAMETER = "param"
# Members of a state that differ in nothing else: Megatron 0.15 and later call the first one the second.
_OLD_MAIN_PARAMETER = "fp32_param"


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Tensors of a target, stored objects that stay, new objects; `common.pt`, if the common state is that file."""

    tensors: dict[str, TensorView]
    kept_objects: tuple[str, ...]
    objects: dict[str, bytes] = field(default_factory=dict)
    common: bytes | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def convert_optimizer(payloads: StoredPayloads, common: Mapping[str, Any]) -> Rewritten | None:
    """Plan the conversion to `fully_reshardable`; None if that is the layout. Raises `OptionError` and `LoadError`."""
    index = payloads.index
    kind = optimizer_layout(index, common)
    if kind is None:
        raise OptionError(f"{index.path}: holds no optimizer state whose layout could be changed")
    flattened = any(is_optimizer_key(key) and index.mcore_data.get(key) for key in index.tensors)
    if kind == FULLY_RESHARDABLE and not flattened:
        return None
    if kind == "dp_reshardable":
        return _from_buckets(payloads, common)
    if kind in ("fully_sharded_model_space", FULLY_RESHARDABLE):
        return _from_stretches(index, common)
    raise OptionError(
        f"{index.path}: its optimizer state is {kind!r}; expected dp_reshardable or fully_sharded_model_space, which "
        f"can be made {FULLY_RESHARDABLE}. Reshard the model alone with --drop-optimizer. Nothing was written"
    )


# --- from stretches of flattened parameters


def _from_stretches(index: CheckpointIndex, common: Mapping[str, Any]) -> Rewritten:
    views: dict[str, TensorView] = {}
    changed = 0
    for key, entry in index.tensors.items():
        found = STATE_KEY.fullmatch(key)
        name = key
        if found is not None and found["state"] == _OLD_MAIN_PARAMETER:
            name = f"{found['prefix']}{_MAIN_PARAMETER}.{found['key']}"
        if name != key and name in index.tensors:
            raise OptionError(f"{index.path}: holds {key} and {name}; expected one of them. Nothing was written")
        shape = index.original_shape(key)
        if shape is None:
            views[name] = as_stored(entry)
        else:
            views[name] = _unflattened(entry, shape)
            changed += 1
    objects, content = _with_layout(index, common, {})
    kept = tuple(key for key in index.objects if key not in objects)
    note = f"optimizer: {changed} flattened tensors become tensors of their parameters' shapes ({FULLY_RESHARDABLE})"
    return Rewritten(views, kept, objects, content, (note,))


def _unflattened(entry: TensorEntry, shape: tuple[int, ...]) -> TensorView:
    """A parameter that is stored as a grid of flattened slices, `[slices along each axis..., elements of a slice]`."""
    grid = entry.shape[:-1]
    cells_fit = len(grid) == len(shape) and all(n > 0 and size % n == 0 for size, n in zip(shape, grid, strict=False))
    cell = tuple(size // n for size, n in zip(shape, grid, strict=True)) if cells_fit else ()
    if not cells_fit or math.prod(cell) != entry.shape[-1]:
        raise CorruptCheckpointError(
            f"{entry.fqn}: stored as a grid {list(entry.shape)} of flattened boxes of a tensor {list(shape)}, which it "
            "does not divide; `.metadata` contradicts itself"
        )
    parts = []
    for place in itertools.product(*map(range, grid)):
        box = Box(tuple(map(operator.mul, place, cell)), cell)
        parts.append(Part(box, entry.fqn, Box((*place, 0), (*(1,) * len(grid), entry.shape[-1])), flat=0))
    return TensorView(shape, tuple(parts))


# --- from flat buckets


_Buffers = dict[tuple[str, int], dict[int, dict[str, list[str]]]]
"""Buffers by prefix of their keys and group of ranks, then by number: by state, the keys of the buckets in order."""


def _from_buckets(payloads: StoredPayloads, common: Mapping[str, Any]) -> Rewritten:
    index = payloads.index
    found = _from_tables(index, common)
    shapes, sources = _from_model(payloads, common) if found is None else found
    views = {key: as_stored(entry) for key, entry in index.tensors.items() if not BUCKET.fullmatch(key)}
    count = len(index.tensors) - len(views)
    views |= {key: TensorView(shapes[key], tuple(parts)) for key, parts in sources.items()}
    group_objects = {key: match for key in index.objects if (match := GROUP_OBJECT.fullmatch(key))}
    objects, common_file = _with_layout(index, common, _shared_state(index, group_objects))
    kept = tuple(key for key in index.objects if key not in objects and key not in group_objects)
    note = (
        f"optimizer: {count} flat buckets become {len(sources)} tensors of the parameters' shapes ({FULLY_RESHARDABLE})"
    )
    how = "the order of parameters is that of the model that megatron-core builds from the stored arguments"
    return Rewritten(views, kept, objects, common_file, (note,) if found is not None else (note, how))


_Sources = tuple[dict[str, tuple[int, ...]], dict[str, list[Part]]]
"""Shape and parts of each tensor, by key."""


def _from_tables(index: CheckpointIndex, common: Mapping[str, Any]) -> _Sources | None:
    """As the tables of parameters say that were saved with the buckets; None if one has none."""
    content = common.get("content_metadata")
    avoid_prefix = isinstance(content, dict) and bool(content.get("chained_optim_avoid_prefix"))
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, list[Part]] = {}
    with contextlib.suppress(MissingKeyError):
        for table in stored_tables(index, lambda key: read_object(index, index.objects[key])):
            for region in table.regions():
                bucket = table.buckets[region.bucket]
                array = Box((0,), (table.sizes[region.bucket],))
                prefix = "" if avoid_prefix else bucket.partition("optimizer.")[0]
                for state in table.states[region.bucket] if not region.is_copy else ():
                    key = f"{prefix}optimizer.state.{state}.{region.key}"
                    if shapes.setdefault(key, region.form.shape) != region.form.shape:
                        raise CorruptCheckpointError(f"{index.path}: tables of parameters have two shapes of {key}")
                    parts = (Part(box, f"{bucket}.{state}", array, flat=at) for box, at in dense_slices(region))
                    sources.setdefault(key, []).extend(parts)
        for key, found in sources.items():
            if sum(math.prod(part.slice.sizes) for part in found) < math.prod(shapes[key]):
                raise OptionError(
                    f"{index.path}: the flat buckets do not have all layers of {key}, since some were frozen, and "
                    f"{FULLY_RESHARDABLE} stores whole tensors alone. A job with the same layers frozen loads the "
                    "checkpoint as it is, under any layout. Nothing was written"
                )
        return shapes, sources
    return None


def _from_model(payloads: StoredPayloads, common: Mapping[str, Any]) -> _Sources:
    """As the model has them that megatron-core builds from the stored arguments."""
    index = payloads.index
    content = common.get("content_metadata")
    content = content if isinstance(content, dict) else {}
    arguments = common.get("args")
    orders = parameter_orders(arguments if isinstance(arguments, dict) else {}, content)
    buffers = _buffers(index)
    _compare_model(index, itertools.chain.from_iterable(orders.values()))
    avoid_prefix = bool(content.get("chained_optim_avoid_prefix"))
    sources: dict[str, list[Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    done: set[tuple[bool, int]] = set()
    for (chained, group), numbered in buffers.items():
        held_by = chained == "chained_1.", group
        chunks = [chunk for chunk in orders.get(held_by, []) if chunk]
        where = f"{index.path}: {chained}optimizer.distributed.dp_group_idx_{group}"
        if chained not in ("", "chained_0.", "chained_1.") or len(chunks) != len(numbered):
            raise OptionError(
                f"{where}: holds {len(numbered)} buffers, expected {len(chunks)}, one for each chunk of the model that "
                "megatron-core builds from the stored arguments; parameters of several dtypes, or several optimizers, "
                "are not converted. Nothing was written"
            )
        done.add(held_by)
        for (number, states), chunk in zip(numbered.items(), chunks, strict=True):
            sizes = _bucket_sizes(index, states, f"{where}.gbuf_idx_{number}")
            places = places_in_buckets(chunk, sizes, f"{where}.gbuf_idx_{number}")
            prefix = "" if avoid_prefix else chained
            for parameter, place in zip(chunk, places, strict=True):
                for part in parameter.boxes:
                    first = place.first + part.first
                    _compare_elements(payloads, states[_MAIN_PARAMETER][place.bucket], first, part)
                    if parameter.is_copy:
                        continue
                    for state, keys in states.items():
                        key = f"{prefix}optimizer.state.{state}.{part.key}"
                        shapes[key] = part.shape
                        array = Box((0,), (sizes[place.bucket],))
                        sources.setdefault(key, []).append(Part(part.box, keys[place.bucket], array, flat=first))
    missing = sorted(orders.keys() - done)
    if missing:
        raise OptionError(
            f"{index.path}: no buckets are stored for group {missing[0][1]} of the ranks that the stored arguments "
            f"name, and {len(missing) - 1} more. Nothing was written"
        )
    return shapes, sources


def _buffers(index: CheckpointIndex) -> _Buffers:
    found: dict[tuple[str, int, int, str], dict[int, str]] = {}
    for key in index.tensors:
        match = BUCKET.fullmatch(key)
        if match is not None:
            of = match["chained"] or "", int(match["number"]), int(match["buffer"]), match["state"]
            found.setdefault(of, {})[int(match["bucket"])] = key
    buffers: _Buffers = {}
    for (chained, group, number, state), buckets in sorted(found.items()):
        if sorted(buckets) != list(range(len(buckets))):
            raise CorruptCheckpointError(
                f"{index.path}: {next(iter(buckets.values()))}: buckets {sorted(buckets)[:8]} of {state} are stored, "
                f"expected all from 0 to {max(buckets)}. Nothing was written"
            )
        keys = [buckets[n] for n in range(len(buckets))]
        buffers.setdefault((chained, group), {}).setdefault(number, {})[state] = keys
    return buffers


def _bucket_sizes(index: CheckpointIndex, states: Mapping[str, Sequence[str]], where: str) -> list[int]:
    """Elements of each bucket, which all states have in common."""
    if _MAIN_PARAMETER not in states:
        raise OptionError(f"{where}: holds {', '.join(sorted(states))}, expected {_MAIN_PARAMETER} among them")
    sizes = [index.tensors[key].shape for key in states[_MAIN_PARAMETER]]
    for state, keys in states.items():
        entries = [index.tensors[key] for key in keys]
        if [entry.shape for entry in entries] != sizes:
            raise CorruptCheckpointError(
                f"{where}: buckets of {state} have {[entry.shape for entry in entries][:8]} elements, those of "
                f"{_MAIN_PARAMETER} {sizes[:8]}. Nothing was written"
            )
        other = next((entry for entry in entries if entry.dtype != "float32"), None)
        if other is not None:
            raise OptionError(
                f"{other.fqn}: its elements are {other.dtype}; expected float32, as jobs keep them in the layout "
                f"{FULLY_RESHARDABLE}. Nothing was written"
            )
    return [shape[0] for shape in sizes]


def _compare_model(index: CheckpointIndex, chunks: Iterable[Sequence[FlatParameter]]) -> None:
    """Raise `OptionError` unless the model that was built is the one that is stored."""
    built = {(part.key, part.shape) for chunk in chunks for parameter in chunk for part in parameter.boxes}
    for key, shape in sorted(built):
        entry = index.tensors.get(key)
        if entry is None or entry.shape != shape:
            got = "holds no such tensor" if entry is None else f"holds it with the shape {list(entry.shape)}"
            raise OptionError(
                f"{index.path}: the model that megatron-core builds from the stored arguments has {key} of shape "
                f"{list(shape)}, the checkpoint {got}. Where its parameters lie in the optimizer's buckets is not "
                "known. Nothing was written"
            )


def _compare_elements(payloads: StoredPayloads, bucket: str, first: int, part: ParameterBox) -> None:
    """Compare the first and the last elements of a parameter with the optimizer's copy of them."""
    index = payloads.index
    stored, copy = index.tensors[part.key], index.tensors[bucket]
    count = min(_ELEMENTS_COMPARED, part.box.sizes[-1] if part.box.sizes else 1)
    ends = [offset + size for offset, size in zip(part.box.offsets, part.box.sizes, strict=True)]
    sizes = (*(1,) * (len(ends) - 1), count)
    for at, offsets in (
        (first, part.box.offsets),
        (first + math.prod(part.box.sizes) - count, tuple(map(operator.sub, ends, sizes))),
    ):
        expected = read_box(payloads, stored, offsets, sizes if ends else (), checked=False)
        exact = read_box(payloads, copy, (at,), (count,), checked=False)
        if cast_floats(exact, copy.dtype, stored.dtype) != expected:
            raise CorruptCheckpointError(
                f"{index.path}: elements [{at}, {at + count}) of {bucket} should be those of {part.key} at "
                f"{list(offsets)}, and are others. The optimizer that was saved keeps its parameters in another order "
                "than the model that megatron-core builds from the stored arguments, or its state is not that of these "
                "weights. Nothing was written"
            )


def _shared_state(index: CheckpointIndex, objects: Mapping[str, re.Match[str]]) -> dict[str, dict[str, Any]]:
    """The optimizer's state but its tensors, by prefix and name: the first group's, as a save would keep it."""
    found: dict[str, dict[str, Any]] = {}
    for key, match in objects.items():
        if int(match["number"]) == 0 and match["name"] not in SIZES_OF_BUCKETS:
            value = unwrapped(decode_state(read_object(index, index.objects[key]), key))
            found.setdefault(match["chained"] or "", {})[match["name"]] = value
    return found


# --- the common state


def _with_layout(
    index: CheckpointIndex, common: Mapping[str, Any], shared: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, bytes], bytes | None]:
    """The common state that says how the optimizer's state is laid out: as an object, or as the content of a file."""

    def laid_out(state: dict[Any, Any]) -> dict[Any, Any]:
        metadata = state.get("content_metadata")
        metadata = {**metadata} if isinstance(metadata, dict) else {}
        metadata["distrib_optim_sharding_type"] = FULLY_RESHARDABLE
        metadata.setdefault("distrib_optim_fully_reshardable_mem_efficient", False)
        optimizer = state.get("optimizer")
        optimizer = {**optimizer} if isinstance(optimizer, dict) else {}
        if any(isinstance(name, int) for name in optimizer):
            for number, part in optimizer.items():
                optimizer[number] = _laid_out(part, shared.get(f"chained_{number}.", {}))
        else:
            optimizer = _laid_out(optimizer, shared.get("", {}))
        return {**state, "optimizer": optimizer, "content_metadata": metadata}

    objects, content = changed_common_state(index, laid_out)
    if not objects and content is None:
        raise OptionError(
            f"{index.path}: holds no common state that could say how the optimizer's state is laid out; expected that "
            "of a job of Megatron. Nothing was written"
        )
    return objects, content


def changed_common_state(
    index: CheckpointIndex, change: Callable[[dict[Any, Any]], dict[Any, Any]]
) -> tuple[dict[str, bytes], bytes | None]:
    """The common state after a change: as an object, or as the content of a file; neither, if there is none."""
    stored = stored_common_state(index)
    if stored is None:
        return {}, None
    decoded = decode_state(stored.content, stored.where)
    state = unwrapped(decoded)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{stored.where}: expected a dict, got {type(state).__name__}")
    changed = change(state)
    content = encode_state([changed] if isinstance(decoded, list) else changed)
    if COMMON_STATE_KEY in index.objects and stored.where.startswith(COMMON_STATE_KEY):
        return {COMMON_STATE_KEY: content}, None
    return {}, content


def _laid_out(optimizer: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    part = {**optimizer} if isinstance(optimizer, dict) else {}
    part.pop("param_state", None)  # lists that older jobs left there next to flat buckets, and no load can merge
    return {**shared, **part, "param_state_sharding_type": FULLY_RESHARDABLE}


# --- GPTModel and HybridModel

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
