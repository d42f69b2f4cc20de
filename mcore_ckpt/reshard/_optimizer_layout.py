"""The optimizer's state of a checkpoint in the layout that every later job loads, under any division of the model.

    fully_sharded_model_space (0.12 to 0.14)   stretches of flattened parameters, under the parameters' keys
    dp_reshardable                             flat buckets, which say nothing of parameters
    -> fully_reshardable (from 0.15 on)        a tensor of the parameter's own shape for each state

As with models, the target is a view: its tensors are slices of what is stored, and no element is computed. The
table saved with a bucket says which slice is which parameter. Where there is none, as in older checkpoints,
`parameter_orders` tells, and the checkpoint's own elements confirm it: the optimizer's copy of a parameter, rounded to
the model's dtype, is the model's parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, MissingKeyError, OptionError
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex, TensorEntry
from mcore_ckpt.format.parameter_table import (
    BUCKET,
    GROUP_OBJECT,
    SIZES_OF_BUCKETS,
    STATE_KEY,
    dense_slices,
    stored_tables,
)
from mcore_ckpt.reshard.options import FULLY_RESHARDABLE
from mcore_ckpt.reshard.parameter_orders import FlatParameter, ParameterBox, parameter_orders, places_in_buckets
from mcore_ckpt.reshard.view import Part, TensorView, as_stored
from mcore_ckpt.reshard.weight_files import decode_state, encode_state
from mcore_ckpt.tools.keys import is_optimizer_key, optimizer_layout, read_object, stored_common_state, unwrapped
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
