"""Models of the Hugging Face libraries, by architecture: a `torch_dist` checkpoint as one, and one as a checkpoint.

    config.json or Megatron's arguments -> family and sizes -> which box is which (`families`) -> a view of what is
    stored under the keys that are wanted (`_pieces`) -> an export or a reshard like any other

No model is built, and neither `transformers` nor Megatron is needed. Every stored tensor has to be accounted for, and
every tensor of the target has to be filled: what is missing, and what is too much, is an error that names it.
"""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._foreign import (
    OptimizerPlan,
    Training,
    is_foreign_optimizer_key,
    launch_state,
    nemo_arguments,
    plain_names,
    plan_optimizer,
    refuse_another,
)
from mcore_ckpt.convert._pieces import PiecePayloads, Source, Wanted
from mcore_ckpt.convert._quantized import plain_payloads
from mcore_ckpt.convert._reshard_copy import Journal, cast_within, check_chunks
from mcore_ckpt.convert._reshard_target import file_states
from mcore_ckpt.convert._safetensors_files import parse_json
from mcore_ckpt.convert._shard_files import MODEL_FILES, Exported, export_fingerprint, write_files
from mcore_ckpt.convert._sources import Opened
from mcore_ckpt.convert.conversion import (
    Export,
    ExportOptions,
    Import,
    ImportOptions,
    KeyPlan,
    Made,
    saved,
    write_directory,
)
from mcore_ckpt.convert.reshard_plan import target_dtype, token_count
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.families.registry import family_named, family_of_arguments, family_of_config, hold_against, launch_notes
from mcore_ckpt.families.table import Family, Link, Model, Naming, Relation, extra_state_keys, relate
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry, object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import read_small_file
from mcore_ckpt.items.checksums import range_crc
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import is_optimizer_key
from mcore_ckpt.tools.payloads import PayloadSource, StoredPayload, StoredPayloads, check_tiled
from mcore_ckpt.tools.plain_state import read_plain_state

__all__ = ["export_model", "import_model"]

_MODEL_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_MAX_CONFIG_BYTES = 16 * 1024**2
_MAX_MODEL_FILE_BYTES = 256 * 1024**2
_STATE = "optimizer.state"
_WINDOW_BYTES = 4 * 1024**2
_EMBEDDING = "embedding.word_embeddings.weight"
_NUMBERED_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_NUMBERED_EXPERT = re.compile(r"\.experts\.experts\.\d+\.")
_HALF = re.compile(r"\.linear_fc1\.weight_[wv]$")


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A conversion that has been thought through; nothing has been written."""

    family: Family
    model: Model
    config: dict[str, Any]
    arguments: dict[str, Any]
    relation: Relation
    naming: Naming
    wanted: dict[str, Wanted]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)  # stored keys by Hugging Face's, where they are others
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)

    def keys(self, dtype_of: Callable[[str], str], *, to_megatron: bool) -> Iterator[KeyPlan]:
        """One after another, for showing; `dtype_of` gives the target's, by Hugging Face's key."""
        seen = set()
        for link in self.relation.links:
            shape = self.relation.joined.get(link.hf, self.relation.hf[link.hf])
            lead = link.lead
            index = ", ".join(map(str, link.megatron_box.offsets[:lead]))
            megatron = f"{link.megatron}[{index}]" if index else link.megatron
            if (link.hf, megatron) in seen:
                continue
            seen.add((link.hf, megatron))
            stored = self.names.get(link.hf, link.hf)
            pair = (stored, megatron) if to_megatron else (megatron, stored)
            yield KeyPlan(pair[0], 1, link.how, pair[1], shape, dtype_of(link.hf))
            for state, keys in self.optimizer.states.items():
                yield KeyPlan(keys[link.hf], 1, link.how, f"{_STATE}.{state}.{megatron}", shape, "float32")


# --- to Hugging Face


def export_model(index: CheckpointIndex, options: ExportOptions) -> Export:
    """The model in a checkpoint as a directory that `AutoModelForCausalLM.from_pretrained` loads.

    Raises:
        OptionError: the model is of no family known here, or keys or shapes are not what its family has.
        CheckpointNotFoundError, CorruptCheckpointError: the checkpoint, or what `hf_config` names, is not there or is
            damaged.
    """
    seen = file_states(index)
    conversion = _export_conversion(index, options)
    payloads = PiecePayloads(StoredPayloads(index), conversion.wanted)

    def make(target: Path, progress: bool | None) -> Made:
        tensors = [
            Exported(key, entry, target_dtype(entry, options.dtype), conversion.relation.joined.get(key))
            for key, entry in payloads.index.tensors.items()
        ]
        fingerprint = export_fingerprint(payloads, tensors, options.max_shard_bytes, seen)

        def write(folder: Path, journal: Journal | None) -> list[str]:
            files = write_files(payloads, folder, "safetensors", tensors, options.max_shard_bytes, progress, journal)
            _write_model_files(folder, conversion, tensors, options)
            return files

        files = write_directory(target, index, seen, payloads, write, fingerprint=fingerprint)
        return Made(files, len(tensors), sum(tensor.nbytes for tensor in tensors))

    def dtype_of(key: str) -> str:
        return target_dtype(index.tensors[_source_key(conversion.wanted[key])], options.dtype)

    return Export(
        format="hf",
        family=conversion.family.name,
        keys=lambda: conversion.keys(dtype_of, to_megatron=False),
        config=conversion.config,
        arguments=conversion.arguments,
        notes=conversion.notes,
        left_out=conversion.left_out,
        payloads=payloads,
        make=make,
    )


def _export_conversion(index: CheckpointIndex, options: ExportOptions) -> _Conversion:
    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    check_tiled(index, keys)
    common = read_plain_state(index)
    arguments = common.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    notes: list[str] = []
    try:
        arguments = arguments or nemo_arguments(Path(index.path))
    except OptionError as error:
        if options.hf_config is None:
            raise
        notes.append(f"config.json was not held against the stored configuration: {error}")
    # What Megatron's wrappers put before all keys: `module.` in checkpoints of NeMo.
    prefix = min((key.removesuffix(_EMBEDDING) for key in keys if key.endswith(_EMBEDDING)), key=len, default="")
    names = {key.removeprefix(prefix): key for key in keys}
    embedding = index.tensors.get(prefix + _EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or len(names) != len(keys):
        raise OptionError(
            f"{index.path}: has no {_EMBEDDING}, which every model here begins with; `mcore-ckpt inspect --tensors` "
            "lists what there is"
        )
    padded = embedding.shape[0]
    if options.hf_config is not None:
        config = _read_config(Path(options.hf_config))
        where = str(Path(options.hf_config) / _MODEL_CONFIG)
        family = family_of_config(config, where) if options.arch == "auto" else family_named(options.arch)
    else:
        if not arguments:
            raise OptionError(
                f"{index.path}: stores no arguments of Megatron, which would tell what the model is; give its "
                "config.json (--hf-config DIR)"
            )
        where = f"{index.path}: its stored arguments"
        family = family_of_arguments(arguments, index.path) if options.arch == "auto" else family_named(options.arch)
        vocabulary = token_count(arguments)
        if vocabulary is None or vocabulary > padded:
            vocabulary = padded
            notes.append(
                f"the stored arguments do not tell the vocabulary's size: all {padded} rows of the embedding are "
                "taken, padding included; a config.json of the model (--hf-config) tells it"
            )
        config = family.config(arguments, vocabulary)
    config = {**config, "model_type": config.get("model_type", family.model_types[0])}
    config.setdefault("architectures", [family.architecture])
    model = family.model(config)
    _refuse_too_many(model, index, where)
    notes += hold_against(family, config, arguments, where, given=options.hf_config is not None)
    naming, relation = _naming_of(index, names, family, model, padded)
    _compare_tensors(
        {name: index.tensors[key].shape for name, key in names.items()},
        relation.megatron,
        f"{family.name}, {where}",
        index.path,
    )
    wanted = {
        key: Wanted(shape, tuple(sources))
        for (key, shape), sources in zip(relation.hf.items(), _by_hf_key(relation, names), strict=True)
    }
    optimizer = sum(map(is_optimizer_key, (*index.tensors, *index.objects)))
    left_out = (f"{optimizer} keys of the optimizer's state",) if optimizer else ()
    return _Conversion(family, model, config, arguments, relation, naming, wanted, tuple(notes), left_out)


def _by_hf_key(relation: Relation, names: Mapping[str, str]) -> list[list[Source]]:
    found: dict[str, list[Source]] = {key: [] for key in relation.hf}
    for link in relation.links:
        axes = None if link.axes is None else tuple((theirs, mine) for mine, theirs in link.axes)
        found[link.hf].append(Source(link.hf_box, names[link.megatron], link.megatron_box, axes))
    return list(found.values())


def _naming_of(
    index: CheckpointIndex, keys: Iterable[str], family: Family, model: Model, padded: int
) -> tuple[Naming, Relation]:
    """How a checkpoint names things, from its keys, and the family's table under those names."""
    found = set(keys)
    naming = Naming(
        stacked_layers=not any(map(_NUMBERED_LAYER.search, found)),
        stacked_experts=not any(map(_NUMBERED_EXPERT.search, found)),
        halves_apart=any(map(_HALF.search, found)),
    )
    relation = relate(family, model, naming, padded)
    if relation.megatron.keys() != found:
        engine = replace(naming, implementation="transformer_engine")
        other = relate(family, model, engine, padded)
        if len(other.megatron.keys() ^ found) < len(relation.megatron.keys() ^ found):
            return engine, other
    return naming, relation


def _refuse_too_many(model: Model, index: CheckpointIndex, where: str) -> None:
    """Raise `OptionError` for more layers and experts than the stored elements can be of, before each gets its rows.

    A norm of each layer has an element for each of the hidden size, and each expert's matrices have more.
    """
    instances = model.layers + sum(model.expert_layers) * model.experts
    elements = sum(math.prod(entry.shape) for entry in index.tensors.values())
    if instances * model.sizes["hidden"] > elements:
        raise OptionError(
            f"{where}: {model.layers} layers, {model.experts} experts and a hidden size of {model.sizes['hidden']}, of "
            f"which the {elements} elements in {index.path} cannot be. Nothing was written"
        )


def _compare_tensors(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], who: str, path: str
) -> None:
    """Raise `OptionError` unless the tensors that are stored are those that a model has."""
    unknown = sorted(stored.keys() - expected.keys())
    missing = sorted(expected.keys() - stored.keys())
    if unknown or missing:
        parts = [f"{path}: its tensors are not those of {who}"]
        if unknown:
            parts.append(f"{len(unknown)} that no row of the family's table covers, the first {unknown[0]}")
        if missing:
            parts.append(f"{len(missing)} that the model has are not stored, the first {missing[0]}")
        raise OptionError("; ".join(parts) + ". Nothing was written")
    for key, shape in expected.items():
        if stored[key] != shape:
            raise OptionError(
                f"{path}: {key} has the shape {list(stored[key])}, expected {list(shape)} by {who}. Nothing was written"
            )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / _MODEL_CONFIG
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path}: no such file; expected the configuration of a Hugging Face model")
    content = read_small_file(directory, _MODEL_CONFIG, _MAX_CONFIG_BYTES, follow_links=True)
    document = parse_json(content, str(path))
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{path}: expected settings by name, got {type(document).__name__}")
    return document


def _write_model_files(folder: Path, conversion: _Conversion, tensors: list[Exported], options: ExportOptions) -> None:
    """`config.json`, and what else belongs beside the weights."""
    storage = storage_at(folder)
    # What most elements are: norms and routers may be kept in another.
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    dtype = max(sizes, key=lambda name: sizes[name])
    config = {name: value for name, value in conversion.config.items() if name != "quantization_config"}  # it is plain
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    storage.publish(_MODEL_CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    carried = set()
    if options.hf_config is not None:
        directory = Path(options.hf_config)
        for name in MODEL_FILES:
            if name != _MODEL_CONFIG and (directory / name).is_file():
                storage.publish(name, read_small_file(directory, name, _MAX_MODEL_FILE_BYTES, follow_links=True))
                carried.add(name)
    if _GENERATION_CONFIG not in carried:
        document: dict[str, Any] = {"_from_model_config": True}
        document |= {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
        storage.publish(_GENERATION_CONFIG, json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")


def _source_key(wanted: Wanted) -> str:
    return next(source.key for source in wanted.sources if source.key is not None)


# --- from Hugging Face


def import_model(opened: Opened, options: ImportOptions) -> Import:
    """A Hugging Face model as a checkpoint with which a launch of Megatron starts.

    Args:
        opened: files of the model, or a checkpoint of others with its parameters under Hugging Face's names.
        options: what to make of it.

    Raises:
        OptionError: it is of no family known here, or has settings, keys or shapes that Megatron-Core has not.
        CheckpointNotFoundError, CorruptCheckpointError: its configuration is not there, or is none.
    """
    conversion, payloads = _import_conversion(opened, options)
    index = payloads.index
    state, arguments, notes = launch_state(
        conversion.optimizer, Training(), conversion.arguments, options.global_batch_size
    )
    empty = [None]
    objects = extra_state_keys(conversion.family, conversion.model, conversion.naming)
    return Import(
        format=opened.kind,
        family=conversion.family.name,
        target_layout=str(options.layout),
        keys=lambda: conversion.keys(
            lambda key: target_dtype(index.tensors[conversion.names[key]], options.dtype), to_megatron=True
        ),
        config=conversion.config,
        arguments=conversion.arguments,
        objects={object_key(*place): empty for place in objects},
        notes=(*conversion.notes, *notes),
        left_out=conversion.left_out,
        payloads=payloads,
        layout=options.layout,
        common=lambda dtypes: saved(
            {"args": _stored_arguments(conversion, opened.directory, dtypes, options, arguments), **state}
        ),
        wanted=conversion.wanted,
    )


def _import_conversion(opened: Opened, options: ImportOptions) -> tuple[_Conversion, StoredPayloads]:
    """What is to be done, and the plain tensors, of which it is to be done."""
    stored, directory = opened.payloads, opened.directory
    beside = directory if options.hf_config is None else Path(options.hf_config)
    config = _read_config(beside)
    where = str(beside / _MODEL_CONFIG)
    family = family_of_config(config, where) if options.arch == "auto" else family_named(options.arch)
    family = family.of_keys(stored.index.tensors)
    if options.vocabulary_multiple < 1:
        raise OptionError(f"vocabulary multiple {options.vocabulary_multiple}: expected at least 1")
    model = family.model(config)
    _refuse_too_many(model, stored.index, where)
    arguments = family.arguments(config)
    # With a list of the layers that have experts Megatron asks for numbered ones, also where all are alike.
    alike = arguments.get("moe_layer_freq", 1) == 1
    naming = Naming(options.transformer_impl, stacked_layers=alike and not options.numbered_layers)
    unit = options.vocabulary_multiple * options.layout.tp
    padded = -(-model.sizes["vocab"] // unit) * unit
    relation = relate(family, model, naming, padded)
    payloads, turned = plain_payloads(stored, config, options.dtype)
    index = payloads.index
    names, left_out, copies = _known_names(index, family, relation, model)
    _compare_tensors(
        {name: index.tensors[key].shape for name, key in names.items()},
        {key: _turned(shape, names.get(key), turned) for key, shape in {**relation.hf, **relation.joined}.items()},
        f"{family.name}, {where}",
        str(directory),
    )
    embedding = next(names[link.hf] for link in relation.links if link.megatron == _EMBEDDING)
    for key in copies:
        refuse_another(payloads, key, embedding, "the configuration says tie_word_embeddings")
    if relation.joined:
        apart = {names[name]: _turned(relation.hf[name], names[name], turned) for name in relation.joined}
        payloads = _ApartPayloads(payloads, apart)
    wanted = _by_megatron_key(relation, names, turned)
    payloads = _of_one_dtype(payloads, wanted.values(), options.dtype)
    experts = {link.hf: link.megatron for link in relation.links if ".experts.experts." in link.megatron}
    optimizer = plan_optimizer(index, names, opened.settings, experts if options.layout.ep > 1 else {})
    for state, keys in optimizer.states.items():
        wanted |= {f"{_STATE}.{state}.{key}": tensor for key, tensor in _by_megatron_key(relation, keys).items()}
    arguments = {
        **arguments,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": options.vocabulary_multiple,
        "transformer_impl": options.transformer_impl,
        "tensor_model_parallel_size": options.layout.tp,
        "pipeline_model_parallel_size": options.layout.pp,
        "expert_model_parallel_size": options.layout.ep,
        "expert_tensor_parallel_size": options.layout.expert_tp,
    }
    left_out += [*optimizer.left_out, *opened.left_out]
    notes = (*family.remarks(family.complete(config)), *launch_notes(arguments))
    conversion = _Conversion(
        family, model, config, arguments, relation, naming, wanted, notes, tuple(left_out), names, optimizer
    )
    return conversion, payloads


def _by_megatron_key(relation: Relation, names: Mapping[str, str], turned: Collection[str] = ()) -> dict[str, Wanted]:
    """Megatron's tensors, of stored ones with these keys."""
    found: dict[str, list[Source]] = {key: [] for key in relation.megatron}
    for link in relation.links:
        found[link.megatron].append(_source(link, names[link.hf], turned))
    for key, box in relation.padding.items():
        found[key].append(Source(box, None))
    return {key: Wanted(shape, tuple(found[key])) for key, shape in relation.megatron.items()}


def _turned(shape: tuple[int, ...], key: str | None, turned: Collection[str]) -> tuple[int, ...]:
    """A shape as it is stored: inputs behind outputs, where they are turned."""
    return (shape[0], *shape[2:], shape[1]) if key in turned and len(shape) > 2 else shape


def _source(link: Link, key: str, turned: Collection[str]) -> Source:
    """Where a box of Megatron's comes from."""
    box = link.hf_box
    if key not in turned:
        return Source(link.megatron_box, key, box, link.axes)
    assert link.axes is not None
    count = len(box.sizes)
    order = [0, *range(2, count), 1]
    there = {axis - count: place - count for place, axis in enumerate(order)}
    return Source(
        link.megatron_box,
        key,
        Box(tuple(box.offsets[axis] for axis in order), tuple(box.sizes[axis] for axis in order)),
        tuple((mine, there[theirs]) for mine, theirs in link.axes),
    )


def _of_one_dtype(payloads: StoredPayloads, wanted: Iterable[Wanted], dtype: str | None) -> StoredPayloads:
    """Payloads in which parts of one tensor that are stored in several dtypes have the one that it is going to have."""
    tensors = payloads.index.tensors
    cast: dict[str, str] = {}
    for tensor in wanted:
        keys = {source.key for source in tensor.sources if source.key is not None}
        if dtype is not None and len({tensors[key].dtype for key in keys}) > 1:
            cast |= {key: target_dtype(tensors[key]._replace(dtype="float32"), dtype) for key in keys}
    cast = {key: to for key, to in cast.items() if tensors[key].dtype != to}
    return _CastPayloads(payloads, cast) if cast else payloads


class _CastPayloads(StoredPayloads):
    """Payloads some of which are in another floating-point dtype; a context manager, which closes those it is made of.

    Args:
        stored: as they are.
        dtypes: those to have, by key.
    """

    def __init__(self, stored: StoredPayloads, dtypes: Mapping[str, str]) -> None:
        self._stored = stored
        self._dtypes = dtypes
        self._cast: dict[str, tuple[StoredPayload, str, str]] = {}
        tensors = stored.index.tensors
        tensors = {**tensors, **{key: tensors[key]._replace(dtype=dtype) for key, dtype in dtypes.items()}}
        super().__init__(CheckpointIndex(stored.index.path, tensors, stored.index.objects), stored.storage)
        self.files = stored.files

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        before = self._stored.index.tensors[entry.fqn]
        payload = self._stored.locate(before, chunk)
        if entry.fqn not in self._dtypes:
            return payload
        if payload.crc32 is not None:
            source = PayloadSource(self._stored, payload)
            value = range_crc(source.read_into, 0, payload.nbytes, memoryview(bytearray(_WINDOW_BYTES)))
            check_chunks([payload], [source], [value], self.index.path, "import")
        self._cast[payload.where] = payload, before.dtype, entry.dtype
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
        return StoredPayload(payload.where, payload.file, 0, nbytes, None, computed=True)

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        """As `StoredPayloads.read_into`."""
        if payload.where not in self._cast:
            self._stored.read_into(payload, start, view)
            return
        stored, dtype, to = self._cast[payload.where]
        elem_bytes, to_bytes = element_bytes(dtype), element_bytes(to)
        first, last = start // to_bytes, -(-(start + len(view)) // to_bytes)
        raw = memoryview(bytearray((last - first) * elem_bytes))
        self._stored.read_into(stored, first * elem_bytes, raw)
        view[:] = cast_within(raw, dtype, to, payload.where)[start - first * to_bytes :][: len(view)]

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """As `StoredPayloads.was_read`."""
        if entry.fqn not in self._dtypes:
            self._stored.was_read(entry, chunk, value)

    def check_rest(self) -> None:
        """As `StoredPayloads.check_rest`."""
        self._stored.check_rest()


class _ApartPayloads(StoredPayloads):
    """Payloads some of which count several things along one axis, as tensors that have an axis for each; a context
    manager, which closes those that it is made of.

    Args:
        stored: as they are.
        shapes: those to have, of such tensors; elements stay where they are.

    Raises:
        OptionError: a chunk begins or ends between things that are counted together.
    """

    def __init__(self, stored: StoredPayloads, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._stored = stored
        self._joined: dict[tuple[str, StoredChunk], tuple[TensorEntry, StoredChunk]] = {}
        tensors = dict(stored.index.tensors)
        for key, shape in shapes.items():
            entry = tensors[key]
            axis = next(n for n, size in enumerate(shape) if size != entry.shape[n])
            together = shape[axis + 1]
            chunks = []
            for chunk in entry.chunks:
                if chunk.offsets[axis] % together or chunk.sizes[axis] % together:
                    raise OptionError(
                        f"{key}: a chunk at {list(chunk.offsets)} of sizes {list(chunk.sizes)} parts what is "
                        f"counted in {together}s along axis {axis}; save the model in whole rows of that axis"
                    )
                offsets, sizes = list(chunk.offsets), list(chunk.sizes)
                offsets[axis : axis + 1] = [offsets[axis] // together, 0]
                sizes[axis : axis + 1] = [sizes[axis] // together, together]
                chunks.append(chunk._replace(offsets=tuple(offsets), sizes=tuple(sizes)))
                self._joined[key, chunks[-1]] = entry, chunk
            tensors[key] = TensorEntry(key, entry.dtype, shape, tuple(chunks), entry.requires_grad)
        super().__init__(CheckpointIndex(stored.index.path, tensors, stored.index.objects), stored.storage)
        self.files = stored.files

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        return self._stored.locate(*self._joined.get((entry.fqn, chunk), (entry, chunk)))

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        """As `StoredPayloads.read_into`."""
        self._stored.read_into(payload, start, view)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """As `StoredPayloads.was_read`."""
        self._stored.was_read(*self._joined.get((entry.fqn, chunk), (entry, chunk)), value)

    def check_rest(self) -> None:
        """As `StoredPayloads.check_rest`."""
        self._stored.check_rest()

    def recipe(self) -> Iterable[str]:
        """As `StoredPayloads.recipe`."""
        return self._stored.recipe()

    def close(self) -> None:
        """Close the files."""
        self._stored.close()


def _known_names(
    index: CheckpointIndex, family: Family, relation: Relation, model: Model
) -> tuple[dict[str, str], list[str], list[str]]:
    """Stored keys by those of the table; what a family's models hold nothing of their own in; what is to be tied."""
    names: dict[str, str] = {}
    left_out: list[str] = []
    copies: list[str] = []
    derived = [re.compile(pattern.replace("{layers}", str(model.layers))) for pattern in family.derived]
    tied = {key for row in family.rows if "untied" in row.when for part in row.parts for key in [part.key]}
    optional = {key.removeprefix(family.optional_prefix): key for key in relation.hf} if family.optional_prefix else {}
    stored = [key for key in index.tensors if not is_foreign_optimizer_key(key)]
    for name, key in plain_names(stored, relation.hf.keys() | optional.keys()).items():
        if name in relation.hf:
            names[name] = key
        elif name in optional:
            names[optional[name]] = key
        elif any(pattern.search(name) for pattern in derived):
            left_out.append(f"{key} (not a parameter of the model that is made)")
        elif name in tied and "untied" not in model.holds:
            left_out.append(f"{key} (tied to the embedding)")
            copies.append(key)
        else:
            names[key] = key  # which `_compare_tensors` is going to name
    return names, left_out, copies


def _stored_arguments(
    conversion: _Conversion, directory: Path, dtypes: set[str], options: ImportOptions, more: Mapping[str, Any]
) -> Namespace:
    """Megatron's arguments, as a launch looks for them."""
    return Namespace(
        **conversion.arguments,
        bf16="bfloat16" in dtypes,
        fp16="float16" in dtypes and "bfloat16" not in dtypes,
        ckpt_format="torch_dist",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=options.hf_config or str(directory),
        **more,
    )
