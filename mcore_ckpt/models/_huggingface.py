"""Models of the Hugging Face libraries, by architecture: a `torch_dist` checkpoint as one, and one as a checkpoint.

    config.json or Megatron's arguments -> family and sizes -> the box of each tensor (`families`) -> a view of the
    source under the requested keys -> an export or a reshard like any other

No model is built, and neither `transformers` nor Megatron is needed. Every stored tensor has to be accounted for, and
every tensor of the target has to be filled: missing and additional tensors are errors that name them.

Tensors may be stored in few bits with a scale for each block. Two ways are known: matrices of 8-bit floats with a
factor for each square block (`X`, `X_scale_inv`: DeepSeek-V3, Qwen3), and pairs of 4-bit floats with a power of two for
each 32 (`X_blocks`, `X_scales`: MXFP4, GPT-OSS). Nothing is decoded beforehand: a range of bytes of the plain tensor is
computed when it is read.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import StorePath, checkpoint_path
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import read_small_file
from mcore_ckpt.models._arguments import as_built, compare_settings, contradictions, launch_notes
from mcore_ckpt.models._families import family_of_arguments, family_of_config
from mcore_ckpt.models._foreign import (
    CONFIG,
    POINTER,
    TRANSFORMERS_FILE,
    WEIGHTS,
    Opened,
    Training,
    import_conversion,
    is_foreign_optimizer_key,
    launch_state,
    layout_of,
    parse_json,
    plain_names,
    plan_optimizer,
    read_config,
    refuse_another,
    some,
)
from mcore_ckpt.models._settings import count
from mcore_ckpt.models._table import PREDICTING, PREDICTING_LAYERS, Family, Link, Model, Naming, Relation, relate
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, SourceFiles, arguments_of, in_dtype
from mcore_ckpt.reshard.options import ExportOptions, ImportOptions
from mcore_ckpt.reshard.partition import (
    EMBEDDING,
    expert_of,
    extra_states,
    is_expert_key,
    layer_of,
    prefix_of,
    split_half,
)
from mcore_ckpt.reshard.plan import target_dtype, token_count
from mcore_ckpt.reshard.target_directory import Target
from mcore_ckpt.reshard.view import DerivedPayloads, Part, RegroupedPayloads, TensorView, ViewPayloads, cast_payloads
from mcore_ckpt.reshard.weight_files import Exported, encode_state, plan_safetensors
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import is_optimizer_key, read_plain_state
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads, check_tiled, read_box
from mcore_ckpt.tools.regrid import DTYPE_NAMES, as_numbers

_GENERATION_CONFIG = "generation_config.json"
_MAX_MODEL_FILE_BYTES = 256 * 1024**2
_STATE = "optimizer.state"
# What lies next to the weights of a model of the Hugging Face libraries, and goes along with others.
_COMPANIONS = (
    "generation_config.json *tokenizer* *vocab* merges.txt special_tokens_map.json added_tokens.json chat_template* "
    "additional_chat_templates/*.jinja *.model *.model.v* *.tiktoken tekken.json *processor_config.json bpe.codes "
    "byte_maps.json dict.txt emoji.json normalizer.json word_pronunciation.json word_shape.json"
).split()
_TEMPLATES = "additional_chat_templates"
# What a configuration says of weights that an export does not have, and why.
_NOT_WRITTEN: Mapping[str, str] = {
    **dict.fromkeys(PREDICTING_LAYERS, "no layers that predict further tokens are written"),
    TRANSFORMERS_FILE: "the weights have their usual names",
    "quantization_config": "the weights are plain",
}
_NOT_FORWARDED = (
    "the stored argument {} is {!r:.80}; config.json says {}, with which pretrain_gpt.py builds the model whatever "
    "that option says. A job whose script gives it to GPTModel needs --rope-forwarded"
)
_PREDICTING, _JOINED = PREDICTING.partition("{")[0], ".eh_proj.weight"
# Any of which makes a directory one that `AutoTokenizer.from_pretrained` can load a tokenizer from.
_TOKENIZER_FILES = "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt spiece.model".split()


def _rows(
    relation: Relation,
    dtype_of: Callable[[str], str],
    names: Mapping[str, str] | None = None,
    states: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[KeyPlan]:
    """Rows for showing; `dtype_of` gives the target's dtypes. Of an import, `names` and `states` are stored keys."""
    seen = set()
    for link in relation.links:
        shape = relation.joined.get(link.hf, relation.hf[link.hf])
        index = ", ".join(map(str, link.megatron_box.offsets[: link.lead]))
        megatron = f"{link.megatron}[{index}]" if index else link.megatron
        if (link.hf, megatron) in seen:
            continue
        seen.add((link.hf, megatron))
        pair = (megatron, link.hf) if names is None else (names[link.hf], megatron)
        yield KeyPlan(pair[0], 1, link.how, pair[1], shape, dtype_of(link.hf))
        for state, keys in (states or {}).items():
            yield KeyPlan(keys[link.hf], 1, link.how, f"{_STATE}.{state}.{megatron}", shape, "float32")


# --- to Hugging Face


def export_model(index: CheckpointIndex, options: ExportOptions, derived: StoredPayloads | None = None) -> Conversion:
    """The model as a directory for `AutoModelForCausalLM.from_pretrained`, with the elements of `derived`, if given."""
    files = SourceFiles(index)
    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    check_tiled(index, keys)
    stored = arguments_of(read_plain_state(index))
    arguments = as_built(stored, forwarded=options.rope_forwarded)
    notes = [_NOT_FORWARDED.format(*each) for each in contradictions(stored, arguments)]
    prefix = prefix_of(keys) or ""
    names = {key.removeprefix(prefix): key for key in keys}
    predicting = [name for name in names if name.startswith(_PREDICTING)]
    embedding = index.tensors.get(prefix + EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or len(names) != len(keys):
        raise OptionError(
            f"{index.path}: has no {EMBEDDING}, which every model here begins with; `mcore-ckpt inspect --tensors` "
            "lists what there is"
        )
    padded = embedding.shape[0]
    left_out = []
    if predicting and not options.mtp:
        names = {name: key for name, key in names.items() if name not in predicting}
        arguments["mtp_num_layers"] = None
        left_out.append(f"{len(predicting)} tensors of layers that predict further tokens (--no-mtp)")
    asked = _asked_for(index, options, arguments, padded, notes, predicts=bool(predicting and options.mtp))
    family, config, where = asked.family, asked.config, asked.where
    model = family.model(config)
    _refuse_too_many(model, index, where)
    notes += compare_settings(family, config, arguments, where, given=options.hf_config is not None)
    relation = _relation_of(index, names, family, model, padded)
    _compare_tensors(
        {name: index.tensors[key].shape for name, key in names.items()},
        relation.megatron,
        f"{family.name}, {where}",
        index.path,
    )
    parts = _by_hf_key(relation, names)
    views = {key: TensorView(shape, tuple(parts[key])) for key, shape in relation.hf.items()}
    views |= {copy: views[key] for copy, key in relation.copies.items()}
    optimizer = sum(map(is_optimizer_key, (*index.tensors, *index.objects)))
    payloads = in_dtype(ViewPayloads(derived or StoredPayloads(index), views), options.dtype)
    entries = payloads.index.tensors
    tensors = [Exported(key, entry, relation.joined.get(key)) for key, entry in entries.items()]
    return Conversion(
        payloads=payloads,
        source=files,
        plan=plan_safetensors(tensors, options.max_shard_bytes),
        keys=lambda: _rows(relation, lambda key: entries[key].dtype),
        report=ConversionReport(
            format="hf",
            family=family.name,
            config=config,
            arguments=arguments,
            notes=tuple(notes),
            left_out=(*([f"{optimizer} keys of the optimizer's state"] * (optimizer > 0)), *left_out, *asked.left_out),
        ),
        carry=lambda target: _write_model_files(target, config, tensors, asked.companions),
        carried=(*asked.companions, CONFIG, _GENERATION_CONFIG),
    )


class _AskedFor(NamedTuple):
    """The model that an export is to make: its configuration, from `where`; files that go along, and what does not."""

    family: Family
    config: dict[str, Any]
    where: str
    companions: dict[str, bytes]
    left_out: list[str]


def _asked_for(
    index: CheckpointIndex,
    options: ExportOptions,
    arguments: Mapping[str, Any],
    padded: int,
    notes: list[str],
    *,
    predicts: bool,
) -> _AskedFor:
    """The model of the given configuration, or of stored arguments; `notes` gets what they leave open."""
    companions, left_out = dict[str, bytes](), list[str]()
    if options.hf_config is not None:
        config, companions, left_out = _original(checkpoint_path(options.hf_config), predicts)
        where = str(checkpoint_path(options.hf_config) / CONFIG)
        family = family_of_config(config, where, options.arch)
        said = family.model(config).sizes["vocab"]
        config = {**config, "vocab_size": _rows_of(said, arguments, padded, options.vocab_size, where, notes)}
    else:
        if not arguments:
            raise OptionError(
                f"{index.path}: stores no arguments of Megatron, which would tell what the model is; give its "
                "config.json (--hf-config DIR)"
            )
        where = f"{index.path}: its stored arguments"
        family = family_of_arguments(arguments, index.path, options.arch)
        config = family.config(arguments, _rows_of(None, arguments, padded, options.vocab_size, where, notes))
        config["pad_token_id"] = None  # which token that is nobody has said, and classes have some of their own
    config = {"model_type": family.model_type, "architectures": [family.architecture], **config}
    return _AskedFor(family, config, where, companions, left_out)


def _rows_of(
    said: int | None, arguments: Mapping[str, Any], padded: int, meant: int | None, where: str, notes: list[str]
) -> int:
    """How many of the `padded` rows are tokens of the model that is made: as is `meant`, or its configuration has
    `said`, or stored arguments do. Raises `OptionError` where the two differ, or so many rows are not stored.
    """
    least = most = token_count(arguments) or 0
    if not 0 < most <= padded:  # not known: at least as many as Megatron pads to so many rows
        tp = count(arguments, "tensor_model_parallel_size", 1)
        unit = count(arguments, "make_vocab_size_divisible_by", padded) * tp
        least, most = 1 if padded % unit else padded - unit + 1, padded
    rows = (said or most) if meant is None else meant
    if rows > padded or (meant is None and not least <= rows <= most):
        what = "rows of tokens would be lost" if rows < least else "rows of padding would become tokens"
        raise OptionError(
            f"{where}: vocab_size is {rows}, and the checkpoint has {least} tokens{' or more' * (least < most)} in "
            f"{padded} rows: {what}. Say how many the model is to have (--vocab-size {least}). Nothing was written"
        )
    if meant is None and least < most:
        notes.append(
            f"the stored arguments do not tell the vocabulary's size: of the embedding's {padded} rows the model gets "
            f"{rows}; --vocab-size or a config.json (--hf-config) tells how many are no padding"
        )
    return rows


def _by_hf_key(relation: Relation, names: Mapping[str, str]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {key: [] for key in relation.hf}
    for link in relation.links:
        axes = None if link.axes is None else tuple((theirs, mine) for mine, theirs in link.axes)
        found[link.hf].append(Part(link.hf_box, names[link.megatron], link.megatron_box, axes))
    return found


def _relation_of(index: CheckpointIndex, keys: Iterable[str], family: Family, model: Model, padded: int) -> Relation:
    """The family's table under the names that a checkpoint has, as its keys tell."""
    found = set(keys)
    # Layers that predict have numbers always.
    layers, experts = (
        map(of, (key for key in found if not key.startswith(_PREDICTING))) for of in (layer_of, expert_of)
    )
    naming = Naming(
        stacked_layers=not any(layer is not None and layer.number is not None for layer in layers),
        stacked_experts=not any(expert is not None and expert.number is not None for expert in experts),
        halves_apart=any(split_half(name)[1] for name in found),
    )
    relation = relate(family, model, naming, padded)
    if relation.megatron.keys() != found:
        engine = replace(naming, implementation="transformer_engine")
        other = relate(family, model, engine, padded)
        if len(other.megatron.keys() ^ found) < len(relation.megatron.keys() ^ found):
            return other
    return relation


def _refuse_too_many(model: Model, index: CheckpointIndex, where: str) -> None:
    """Raise `OptionError` for more layers and experts than there are elements, before each gets its rows."""
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
    """Raise `OptionError` unless the stored tensors are those of a model."""
    unknown = sorted(stored.keys() - expected.keys())
    missing = sorted(expected.keys() - stored.keys())
    if unknown or missing:
        parts = [f"{path}: its tensors are not those of {who}"]
        if unknown:
            parts.append(f"{len(unknown)} that no row of the family's table covers: {some(unknown)}")
        if missing:
            parts.append(f"{len(missing)} that the model has are not stored: {some(missing)}")
        raise OptionError("; ".join(parts) + ". Nothing was written")
    for key, shape in expected.items():
        if stored[key] != shape:
            raise OptionError(
                f"{path}: {key} has the shape {list(stored[key])}, expected {list(shape)} by {who}. Nothing was written"
            )


def _original(directory: Path, predicts: bool) -> tuple[dict[str, Any], dict[str, bytes], list[str]]:
    """The configuration of the model to be like, without what is untrue of the weights; files that go along."""
    config, storage = read_config(directory), storage_at(directory, follow_links=True)
    untrue = {name: why for name, why in _NOT_WRITTEN.items() if not (predicts and name in PREDICTING_LAYERS)}
    left_out = [f"{name} of {CONFIG} ({why})" for name, why in untrue.items() if config.pop(name, None)]
    templates = storage_at(directory / _TEMPLATES)
    names = [*storage.list(), *(f"{_TEMPLATES}/{name}" for name in templates.list())]
    regular = {f"{_TEMPLATES}/{name}" for name in (templates.sizes() if templates.is_directory() else ())}
    regular |= storage.sizes().keys()
    names = [name for name in names if name != CONFIG and not name.startswith(".") and not name.endswith(WEIGHTS)]
    if unread := [name for name in names if name not in regular]:
        left_out.append(f"{some(unread)} of {directory} (a link that leads nowhere, or no regular file)")
    names = [name for name in names if name in regular]
    code = {name for name in names if name.endswith(".py")}
    files: dict[str, bytes] = {}
    documents = {CONFIG: config}
    for name in names:
        if name in code or any(fnmatch.fnmatchcase(name, pattern) for pattern in _COMPANIONS):
            files[name] = read_small_file(directory, name, _MAX_MODEL_FILE_BYTES, follow_links=True)
        if name.endswith(f"_{CONFIG}") and b'"auto_map"' in files.get(name, b""):
            documents[name] = parse_json(files[name], str(directory / name))
    for name, document in documents.items():
        if not _modules(document.get("auto_map")) <= code:
            left_out.append(f"auto_map of {name} (its code is not in {directory})")
            del document["auto_map"]
            document.pop("architectures", None)  # those of that code
            files |= {name: _json(document)} if name != CONFIG else {}
    pointers = [name for name, content in files.items() if content.startswith(POINTER)]
    if pointers:
        left_out.append(f"{some(pointers)} (pointers of Git LFS in place of the files; git lfs pull)")
    unused = set() if any("auto_map" in document for document in documents.values()) else code
    files = {name: content for name, content in files.items() if name not in {*pointers, *unused}}
    others = [name for name in (*names, *(f"{name}/" for name in storage.folders())) if name not in files]
    others = [name for name in others if name not in pointers and not name.startswith((".", _TEMPLATES))]
    if others:
        left_out.append(f"{some(others)} of {directory} (only configuration, tokenizer and its code go along)")
    return config, files, left_out


def _modules(classes: Any) -> set[str]:
    """The files that an `auto_map` names classes in; one of another model is none of these."""
    if isinstance(classes, (dict, list)):
        return set().union(*map(_modules, classes.values() if isinstance(classes, dict) else classes))
    return set() if classes is None else {f"{str(classes).rpartition('.')[0]}.py"}


def _write_model_files(
    target: Target, given: Mapping[str, Any], tensors: list[Exported], files: Mapping[str, bytes]
) -> None:
    """What else belongs to the weights; `config.json` last, since nothing is loaded without it."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.entry.dtype] += tensor.nbytes
    # What most elements are: norms and routers may be kept in another.
    config = {**given, "dtype" if "dtype" in given else "torch_dtype": sizes.most_common(1)[0][0]}
    generation: dict[str, Any] = {"_from_model_config": True}
    tokens = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation |= {name: token for name, token in tokens.items() if token is not None}
    for name, content in {_GENERATION_CONFIG: _json(generation), **files, CONFIG: _json(config)}.items():
        target.put(name, content)


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


# --- from Hugging Face


def import_model(opened: Opened, options: ImportOptions) -> Conversion:
    """A Hugging Face model, or a checkpoint of others under its names, as one with which a job of Megatron starts."""
    stored, directory = opened.payloads, opened.directory
    layout = layout_of(options)
    model_directory = directory if options.hf_config is None else checkpoint_path(options.hf_config)
    config = read_config(model_directory)
    where = str(model_directory / CONFIG)
    family = family_of_config(config, where, options.arch).of_keys(stored.index.tensors)
    absent = _absent_layers(family.model(config), stored.index, directory)
    if absent or not options.mtp:
        config |= {name: 0 for name in PREDICTING_LAYERS if name in config}
    model = family.model(config)
    _refuse_too_many(model, stored.index, where)
    arguments = family.arguments(config)
    # With a list of the layers that have experts Megatron asks for numbered ones, also where all are alike.
    alike = arguments.get("moe_layer_freq", 1) == 1
    naming = Naming(options.transformer_impl, stacked_layers=alike and not options.numbered_layers)
    unit = options.vocabulary_multiple * layout.tp
    padded = -(-model.sizes["vocab"] // unit) * unit
    relation = relate(family, model, naming, padded)
    payloads, names, transposed, left_out = _matched(stored, config, options, family, model, relation, where)
    experts = {link.hf: link.megatron for link in relation.links if is_expert_key(link.megatron)}
    optimizer = plan_optimizer(payloads.index, names, opened.settings, experts if layout.ep > 1 else {})
    if relation.joined:
        apart = {names[name]: _transposed(relation.hf[name], names[name], transposed) for name in relation.joined}
        payloads = RegroupedPayloads(payloads, apart)
    tensors = _by_megatron_key(relation, names, transposed)
    payloads = _of_one_dtype(payloads, tensors.values(), options.dtype)
    for state, keys in optimizer.states.items():
        tensors |= {f"{_STATE}.{state}.{key}": tensor for key, tensor in _by_megatron_key(relation, keys).items()}
    arguments |= {
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": options.vocabulary_multiple,
        "transformer_impl": options.transformer_impl,
        **layout.arguments,
    }
    launched, more, notes = launch_state(optimizer, Training(), arguments, options.global_batch_size)
    return import_conversion(
        payloads,
        options,
        layout,
        lambda dtypes: encode_state(
            {"args": _stored_arguments(arguments, directory, dtypes, options, more), **launched}
        ),
        ConversionReport(
            format=opened.kind,
            family=family.name,
            config=config,
            arguments=arguments,
            notes=(*family.remarks(family.complete(config)), *launch_notes(arguments), *notes),
            left_out=(*left_out, *absent, *optimizer.left_out, *opened.left_out),
        ),
        keys=lambda: _rows(
            relation,
            lambda key: target_dtype(payloads.index.tensors[names[key]], options.dtype),
            names,
            optimizer.states,
        ),
        tensors=tensors,
        objects=extra_states(relation.parameters(), engine=options.transformer_impl == "transformer_engine"),
    )


def _absent_layers(model: Model, index: CheckpointIndex, directory: Path) -> list[str]:
    """What is said of layers that predict further tokens, if the files have none."""
    behind = f".layers.{model.layers}."
    if not model.predicting or any(behind in f".{key}" for key in index.tensors):
        return []
    return [f"{model.predicting} layers that predict further tokens (not in the files of {directory})"]


def _matched(
    stored: StoredPayloads,
    config: Mapping[str, Any],
    options: ImportOptions,
    family: Family,
    model: Model,
    relation: Relation,
    where: str,
) -> tuple[StoredPayloads, dict[str, str], frozenset[str], list[str]]:
    """Plain payloads, stored keys by the table's, transposed ones, and what is left out. Raises `OptionError`."""
    payloads, transposed = plain_payloads(stored, config, options.dtype)
    index = payloads.index
    names, left_out, copies = _known_names(index, family, relation, model, options)
    _compare_tensors(
        {name: index.tensors[key].shape for name, key in names.items()},
        {
            key: _transposed(shape, names.get(key), transposed)
            for key, shape in {**relation.hf, **relation.joined}.items()
        },
        f"{family.name}, {where}",
        stored.index.path,
    )
    for key in names.values():
        if index.tensors[key].dtype not in DTYPE_NAMES:
            raise OptionError(
                f"{index.path}: {key} is stored as {index.tensors[key].dtype}, without factors for its blocks "
                f"({key}{_SCALE}): expected those, or a floating-point dtype of at least 16 bits. Fetch the files again"
            )
    for key, name in copies.items():
        why = "tie_word_embeddings" if name not in relation.copies.values() else "that layers predict further tokens"
        refuse_another(payloads, key, names[name], f"the configuration says {why}")
    return payloads, names, transposed, left_out


def _by_megatron_key(
    relation: Relation, names: Mapping[str, str], transposed: Collection[str] = ()
) -> dict[str, TensorView]:
    """Megatron's tensors, of stored ones with these keys."""
    found: dict[str, list[Part]] = {key: [] for key in relation.megatron}
    for link in relation.links:
        found[link.megatron].append(_part(link, names[link.hf], transposed))
    for key, box in relation.padding.items():
        found[key].append(Part(box, None))
    return {key: TensorView(shape, tuple(found[key])) for key, shape in relation.megatron.items()}


def _transposed(shape: tuple[int, ...], key: str | None, transposed: Collection[str]) -> tuple[int, ...]:
    """A shape as it is stored: inputs behind outputs, where they are transposed."""
    return (shape[0], *shape[2:], shape[1]) if key in transposed and len(shape) > 2 else shape


def _part(link: Link, key: str, transposed: Collection[str]) -> Part:
    """Where a slice of Megatron's comes from."""
    box = link.hf_box
    if key not in transposed:
        return Part(link.megatron_box, key, box, link.axes)
    assert link.axes is not None
    count = len(box.sizes)
    order = [0, *range(2, count), 1]
    there = {axis - count: place - count for place, axis in enumerate(order)}
    return Part(
        link.megatron_box,
        key,
        Box(tuple(box.offsets[axis] for axis in order), tuple(box.sizes[axis] for axis in order)),
        tuple((mine, there[theirs]) for mine, theirs in link.axes),
    )


def _of_one_dtype(payloads: StoredPayloads, wanted: Iterable[TensorView], dtype: str | None) -> StoredPayloads:
    """Payloads in which the parts of a tensor, stored in several dtypes, have its dtype in the target."""
    tensors = payloads.index.tensors
    cast: dict[str, str] = {}
    for tensor in wanted:
        keys = {part.key for part in tensor.parts if part.key is not None}
        if dtype is not None and len({tensors[key].dtype for key in keys}) > 1:
            cast |= {key: target_dtype(tensors[key]._replace(dtype="float32"), dtype) for key in keys}
    return cast_payloads(payloads, lambda entry: cast.get(entry.fqn, entry.dtype))


def _known_names(
    index: CheckpointIndex, family: Family, relation: Relation, model: Model, options: ImportOptions
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Stored keys by those of the table; keys with nothing of their own; copies, with the keys they copy."""
    names: dict[str, str] = {}
    left_out: list[str] = []
    copies: dict[str, str] = {}
    embedding = next(link.hf for link in relation.links if link.megatron == EMBEDDING)
    derived = [re.compile(pattern.replace("{layers}", str(model.layers))) for pattern in family.derived]
    tied = {key for row in family.rows if "untied" in row.when for part in row.parts for key in [part.key]}
    optional = {key.removeprefix(family.optional_prefix): key for key in relation.hf} if family.optional_prefix else {}
    stored = [key for key in index.tensors if not is_foreign_optimizer_key(key)]
    plain = plain_names(stored, relation.hf.keys() | optional.keys())
    behind = tuple(name.removesuffix(_JOINED) + "." for name in plain if name.endswith(_JOINED) and not options.mtp)
    for name, key in plain.items():
        if name in relation.hf:
            names[name] = key
        elif name in relation.copies:
            left_out.append(f"{key} (as {relation.copies[name]})")
            copies[key] = relation.copies[name]
        elif behind and name.startswith(behind):
            left_out.append(f"{key} (--no-mtp)")
        elif name in optional:
            names[optional[name]] = key
        elif any(pattern.search(name) for pattern in derived):
            left_out.append(f"{key} (not a parameter of the model that is made)")
        elif name in tied and "untied" not in model.holds:
            left_out.append(f"{key} (tied to the embedding)")
            copies[key] = embedding
        else:
            names[key] = key  # which `_compare_tensors` is going to name
    return names, left_out, copies


def _stored_arguments(
    arguments: Mapping[str, Any], directory: Path, dtypes: set[str], options: ImportOptions, more: Mapping[str, Any]
) -> Namespace:
    """Megatron's arguments, as a job looks for them."""
    directories = ([] if options.hf_config is None else [checkpoint_path(options.hf_config)]) + [directory]
    local = [path for path in directories if not isinstance(path, StorePath)]  # none is loaded from an object store
    there = (path for path in local if any((path / name).is_file() for name in _TOKENIZER_FILES))
    tokenizer = next((str(path.absolute()) for path in there), None)
    # A job takes what is stored rather than its own options, and may start in another directory.
    of_tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer} if tokenizer else {}
    return Namespace(
        **arguments,
        bf16="bfloat16" in dtypes,
        fp16="float16" in dtypes and "bfloat16" not in dtypes,
        ckpt_format="torch_dist",
        **of_tokenizer,
        **more,
    )


# --- weights in few bits

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_PER_BLOCK: Final = 32
# 4-bit floats: a sign, two bits of exponent, one of mantissa.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# DeepSeek's, and those of Qwen3.
_FACTORS = ("float32", "bfloat16")
_MAX_SCALES = 64


@dataclass(frozen=True, slots=True)
class _Quantized:
    """What a plain tensor is computed from; `block`: rows and columns that share a factor, None: MXFP4."""

    values: TensorEntry
    scales: TensorEntry
    block: tuple[int, int] | None


def plain_payloads(
    payloads: StoredPayloads, config: Mapping[str, Any], dtype: str | None
) -> tuple[StoredPayloads, frozenset[str]]:
    """Payloads with tensors in blocks made plain, and keys of transposed ones (MXFP4's); raises `OptionError`."""
    tensors = payloads.index.tensors
    found: dict[str, _Quantized] = {}
    for key, entry in tensors.items():
        if key.endswith(_SCALE) and key.removesuffix(_SCALE) in tensors:
            values = tensors[key.removesuffix(_SCALE)]
            found[values.fqn] = _squares(values, entry, config)
            if dtype is None:
                raise OptionError(
                    f"{values.fqn}: is stored as {values.dtype} with a factor for each block; say what it is to "
                    "become (--dtype bf16)"
                )
        elif key.endswith(_BLOCKS) and key.removesuffix(_BLOCKS) + _SCALES in tensors:
            found[key.removesuffix(_BLOCKS)] = _mxfp4(entry, tensors[key.removesuffix(_BLOCKS) + _SCALES])
    if not found:
        return payloads, frozenset()
    taken = {part.fqn for quantized in found.values() for part in (quantized.values, quantized.scales)}
    plain = {key: entry for key, entry in tensors.items() if key not in taken}
    plain |= {key: _plain_entry(key, quantized) for key, quantized in found.items()}
    index = CheckpointIndex(payloads.index.path, plain, payloads.index.objects)
    transposed = frozenset(key for key, quantized in found.items() if quantized.block is None)
    return PlainPayloads(payloads, index, found), transposed


def _squares(values: TensorEntry, scales: TensorEntry, config: Mapping[str, Any]) -> _Quantized:
    if not values.dtype.startswith("float8_"):
        raise OptionError(
            f"{values.fqn}: is stored as {values.dtype}, with factors for its blocks ({scales.fqn}); expected 8-bit "
            "floats, which alone are known to be multiplied by such factors. Remove the factors where they are stale"
        )
    settings = config.get("quantization_config")
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    block = [128, 128] if block is None else block
    right = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not right:
        raise OptionError(f"weight_block_size={block!r:.80}: expected rows and columns of a block")
    wanted = tuple(-(-size // n) for size, n in zip(values.shape, block, strict=False))
    if len(values.shape) != 2 or scales.shape != wanted or scales.dtype not in _FACTORS:
        raise OptionError(
            f"{scales.fqn}: {scales.dtype} {list(scales.shape)} for {values.dtype} {list(values.shape)} in blocks of "
            f"{block}; expected {' or '.join(_FACTORS)} {list(wanted)}"
        )
    return _Quantized(values, scales, (block[0], block[1]))


def _mxfp4(values: TensorEntry, scales: TensorEntry) -> _Quantized:
    fits = values.shape == (*scales.shape, _PER_BLOCK // 2) and {values.dtype, scales.dtype} == {"uint8"}
    if not fits or len(scales.shape) != 3:
        raise OptionError(
            f"{values.fqn}: {values.dtype} {list(values.shape)} with scales {scales.dtype} {list(scales.shape)}; "
            f"expected bytes of [experts, outputs, blocks, {_PER_BLOCK // 2}], and a byte for each block"
        )
    return _Quantized(values, scales, None)


def _plain_entry(key: str, quantized: _Quantized) -> TensorEntry:
    shape, dtype = quantized.values.shape, "float32"
    if quantized.block is None:
        *outer, blocks, half = shape
        shape, dtype = (*outer, blocks * half * 2), "bfloat16"  # which holds each of these values
    first = quantized.values.chunks[0].item
    item = StoredItem(first.file, first.offset, first.length)
    return TensorEntry(key, dtype, shape, (StoredChunk((0,) * len(shape), shape, item),))


class PlainPayloads(DerivedPayloads):
    """Payloads some of which are computed from values and scales; a context manager, which closes its base."""

    def __init__(self, base: StoredPayloads, index: CheckpointIndex, quantized: Mapping[str, _Quantized]) -> None:
        super().__init__(base, index)
        self._quantized = quantized
        self._factors = functools.lru_cache(_MAX_SCALES)(self._read_factors)

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        return None if entry.fqn in self._quantized else (entry, chunk)

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        quantized = self._quantized.get(entry.fqn)
        if quantized is None:
            return self.base.locate(entry, chunk)
        compute = self._float8 if quantized.block else self._float4

        def fill(start: int, view: memoryview) -> None:
            first, content = compute(quantized, start, start + len(view))
            view[:] = content[start - first : start - first + len(view)]

        return self.computed(entry, chunk, fill)

    def _float8(self, quantized: _Quantized, start: int, stop: int) -> tuple[int, memoryview]:
        """Whole rows around a range of bytes of float32, and where they start."""
        assert quantized.block is not None
        columns = quantized.values.shape[1]
        first, last = start // (4 * columns), -(-stop // (4 * columns))
        codes = self._bytes(quantized.values, first * columns, (last - first) * columns)
        numbers = as_numbers(codes, quantized.values.dtype)
        assert numbers is not None
        rows = self._factors(quantized.scales.fqn)[np.arange(first, last) // quantized.block[0]]
        factors = np.repeat(rows, quantized.block[1], axis=1)[:, :columns]
        values = numbers.reshape(last - first, columns) * factors
        return first * columns * 4, memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def _float4(self, quantized: _Quantized, start: int, stop: int) -> tuple[int, memoryview]:
        """Whole blocks around a range of bytes of bfloat16, and where they start."""
        block_bytes = 2 * _PER_BLOCK
        first, last = start // block_bytes, -(-stop // block_bytes)
        half = _PER_BLOCK // 2
        codes = np.frombuffer(self._bytes(quantized.values, first * half, (last - first) * half), np.uint8)
        scales = np.frombuffer(self._bytes(quantized.scales, first, last - first), np.uint8)
        values = np.empty((last - first, half, 2), np.float32)
        values[:, :, 0] = _FLOAT4[codes & 15].reshape(-1, half)  # the first of two has the lower bits
        values[:, :, 1] = _FLOAT4[codes >> 4].reshape(-1, half)
        values = np.ldexp(values, scales.astype(np.int32)[:, None, None] - 127)
        bits = (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
        return first * block_bytes, memoryview(bits.view(np.uint8).data)

    def _bytes(self, entry: TensorEntry, start: int, nbytes: int) -> memoryview:
        return self.read_part(entry, entry.chunks[0], start, nbytes)

    def _read_factors(self, key: str) -> np.ndarray[Any, Any]:
        entry = self.base.index.tensors[key]
        numbers = as_numbers(read_box(self.base, entry, (0, 0), entry.shape), entry.dtype)
        assert numbers is not None
        return numbers.reshape(entry.shape)
