"""Models of the Hugging Face libraries, by architecture: a `torch_dist` checkpoint as one, and one as a checkpoint.

    config.json or Megatron's arguments -> family and sizes -> which box is which (`families`) -> a view of what is
    stored under the keys that are wanted (`_pieces`) -> an export or a reshard like any other

No model is built, and neither `transformers` nor Megatron is needed. Every stored tensor has to be accounted for, and
every tensor of the target has to be filled: what is missing, and what is too much, is an error that names it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._deepspeed import is_universal, open_universal, universal_directory
from mcore_ckpt.convert._foreign_names import is_foreign_optimizer_key, plain_names
from mcore_ckpt.convert._foreign_optimizer import OptimizerPlan, OptimizerSettings, plan_optimizer, stored_settings
from mcore_ckpt.convert._nemo import nemo_arguments
from mcore_ckpt.convert._new_directory import new_directory
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._pieces import PiecePayloads, Source, Wanted
from mcore_ckpt.convert._quantized import PlainPayloads, plain_payloads
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, file_states, refuse_changed, refuse_target
from mcore_ckpt.convert._safetensors_files import RawPayloads, parse_json
from mcore_ckpt.convert._shard_files import MODEL_FILES, Exported, export_fingerprint, is_exported, write_files
from mcore_ckpt.convert._sources import open_source
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan, target_dtype
from mcore_ckpt.convert.rules import RenameRule, parse_rename_rules, rules_in
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.families.registry import family_named, family_of_arguments, family_of_config, hold_against
from mcore_ckpt.families.table import (
    Family,
    Implementation,
    Link,
    Model,
    Naming,
    Relation,
    extra_state_keys,
    relate,
)
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry, object_key
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    TRACKER_FILE,
    encode_config,
    read_index,
    read_small_file,
)
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.plain_state import read_plain_state

__all__ = [
    "HuggingFaceOptions",
    "HuggingFacePlan",
    "HuggingFaceReport",
    "KeyPlan",
    "MegatronOptions",
    "export_huggingface",
    "export_model",
    "import_huggingface",
    "import_model",
    "open_model",
    "plan_export",
    "plan_import",
]

_MODEL_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_MAX_CONFIG_BYTES = 16 * 1024**2
_MAX_MODEL_FILE_BYTES = 256 * 1024**2
_STATE = "optimizer.state"
_EMBEDDING = "embedding.word_embeddings.weight"
_NUMBERED_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_NUMBERED_EXPERT = re.compile(r"\.experts\.experts\.\d+\.")
_HALF = re.compile(r"\.linear_fc1\.weight_[wv]$")
_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class HuggingFaceOptions:
    """What to make of a checkpoint of Megatron-Core.

    Attributes:
        arch: a family's name; `"auto"`: what `hf_config` or the stored arguments say.
        hf_config: directory with the model's `config.json`, which is taken over and held against the stored shapes;
            tokenizer files and `generation_config.json` beside it are taken along.
        dtype: convert to it, torch's name without `torch.`.
        max_shard_bytes: no file holds more, unless one tensor is larger.
    """

    arch: str = "auto"
    hf_config: str | None = None
    dtype: str | None = None
    max_shard_bytes: int = 5 * 1000**3


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """What to make of a Hugging Face model.

    Attributes:
        tp, pp, ep, etp: tensor, pipeline, expert, and expert tensor parallel size (by default `tp`) of the files; a
            launch loads them under any other layout as well.
        arch: a family's name; `"auto"`: what `config.json` says.
        dtype: convert to it, torch's name without `torch.`.
        transformer_impl: as `--transformer-impl` of the launch: the layers call some parameters differently.
        numbered_layers: a tensor for each layer; otherwise, as Megatron does, one for all, if they are alike.
        vocabulary_multiple: `--make-vocab-size-divisible-by` of the launch: rows of the embedding are padded to a
            multiple of this for each tensor parallel rank.
        workers, verify, memory_bytes: as for `reshard`.
        hf_config: directory with the model's `config.json`; None: it lies beside the tensors.
        rename: rules for the stored keys, before the family's table is held against them.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    arch: str = "auto"
    dtype: str | None = None
    transformer_impl: Implementation = "transformer_engine"
    numbered_layers: bool = False
    vocabulary_multiple: int = 128
    workers: int = 2
    verify: bool = True
    memory_bytes: int = 1024**3
    hf_config: str | None = None
    rename: tuple[RenameRule, ...] = ()

    @property
    def layout(self) -> TargetLayout:
        """The sizes together; raises `OptionError` where they cannot be."""
        return TargetLayout(self.tp, self.pp, self.ep, self.etp)


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """One tensor of Hugging Face and one of Megatron-Core, and how they are one another.

    Attributes:
        megatron: its key, and in brackets the index along axes that count layers and experts.
        shape: of the tensor of Hugging Face.
    """

    hf: str
    megatron: str
    transform: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class HuggingFacePlan:
    """What would be done.

    Attributes:
        config: the model's `config.json`.
        arguments: Megatron's.
        objects: how many objects the target has.
        left_out: keys of the source that have no place in the target, each with the reason.
    """

    family: str
    keys: tuple[KeyPlan, ...]
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    objects: int
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HuggingFaceReport:
    """What was made."""

    source: str
    target: str
    family: str
    files: tuple[str, ...]
    tensors: int
    payload_bytes: int
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


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

    def plan(self, dtypes: Mapping[str, str], objects: int) -> HuggingFacePlan:
        """For showing; `dtypes` by Hugging Face's key."""
        found: dict[tuple[str, str], KeyPlan] = {}
        for link in self.relation.links:
            shape = self.relation.joined.get(link.hf, self.relation.hf[link.hf])
            lead = link.lead
            index = ", ".join(map(str, link.megatron_box.offsets[:lead]))
            megatron = f"{link.megatron}[{index}]" if index else link.megatron
            stored = self.names.get(link.hf, link.hf)
            found[link.hf, megatron] = KeyPlan(stored, megatron, link.how, shape, dtypes[link.hf])
            for state, keys in self.optimizer.states.items():
                target = f"{_STATE}.{state}.{megatron}"
                found[keys[link.hf], target] = KeyPlan(keys[link.hf], target, link.how, shape, "float32")
        return HuggingFacePlan(
            self.family.name, tuple(found.values()), self.config, self.arguments, objects, self.notes, self.left_out
        )


# --- to Hugging Face


def plan_export(source: str | os.PathLike[str], options: HuggingFaceOptions) -> HuggingFacePlan:
    """What an export would do; reads indexes and small files only, and raises what it would raise for them."""
    index = read_index(checkpoint_directory(source))
    conversion = _export_conversion(index, options)
    dtypes = {
        key: target_dtype(index.tensors[_source_key(wanted)], options.dtype)
        for key, wanted in conversion.wanted.items()
    }
    return conversion.plan(dtypes, 0)


def export_huggingface(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    arch: str = "auto",
    hf_config: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 1000**3,
    progress: bool | None = False,
) -> HuggingFaceReport:
    """Write the model in a checkpoint as a directory that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        source: directory of the checkpoint, or one with a tracker file.
        target: directory to make; it must not exist, or be empty. It appears when it is complete.
        arch: the model's family; `"auto"`: what `hf_config`, or else Megatron's stored arguments say.
        hf_config: directory with the model's `config.json`, which is taken over and held against the stored shapes;
            tokenizer files and `generation_config.json` beside it are taken along.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        max_shard_bytes: no file holds more, unless one tensor is larger.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, ChecksumError: the source cannot be read, or is damaged.
        CheckpointExistsError: there is something at `target`.
        OptionError: the model is of no family known here, or keys or shapes are not what its family has.
        SaveError: it cannot be written.
    """
    config = None if hf_config is None else os.fspath(hf_config)
    options = HuggingFaceOptions(arch, config, floating_dtype(dtype), max_shard_bytes)
    return export_model(source, target, options, progress=progress)


def export_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: HuggingFaceOptions,
    *,
    progress: bool | None = False,
) -> HuggingFaceReport:
    """As `export_huggingface`, which says what is raised."""
    index, directory = read_index(checkpoint_directory(source)), local_path(target)
    refuse_target(Path(index.path), directory)
    seen = file_states(index)
    conversion = _export_conversion(index, options)
    payloads = PiecePayloads(StoredPayloads(index), conversion.wanted)
    with payloads:
        tensors = [
            Exported(key, entry, target_dtype(entry, options.dtype), conversion.relation.joined.get(key))
            for key, entry in payloads.index.tensors.items()
        ]
        fingerprint = export_fingerprint(payloads, tensors, options.max_shard_bytes, seen)
        with new_directory(directory, is_exported, fingerprint) as (folder, journal):
            files = write_files(payloads, folder, "safetensors", tensors, options.max_shard_bytes, progress, journal)
            payloads.check_rest()
            _write_model_files(folder, conversion, tensors, options)
            refuse_changed(index, seen)
    total = sum(tensor.nbytes for tensor in tensors)
    return HuggingFaceReport(
        index.path,
        str(directory),
        conversion.family.name,
        tuple(files),
        len(tensors),
        total,
        conversion.notes,
        conversion.left_out,
    )


def _export_conversion(index: CheckpointIndex, options: HuggingFaceOptions) -> _Conversion:
    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    check_tiled(index, keys)
    common = read_plain_state(index)
    arguments = common.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    arguments = arguments or nemo_arguments(Path(index.path))
    # What Megatron's wrappers put before all keys: `module.` in checkpoints of NeMo.
    prefix = min((key.removesuffix(_EMBEDDING) for key in keys if key.endswith(_EMBEDDING)), key=len, default="")
    names = {key.removeprefix(prefix): key for key in keys}
    embedding = index.tensors.get(prefix + _EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or len(names) != len(keys):
        raise OptionError(
            f"{index.path}: has no {_EMBEDDING}, which every model here begins with; `mcore-ckpt inspect --tensors` "
            "lists what there is"
        )
    padded, notes = embedding.shape[0], []
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
        vocabulary = arguments.get("vocab_size")
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 0 < vocabulary <= padded:
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


def _write_model_files(
    folder: Path, conversion: _Conversion, tensors: list[Exported], options: HuggingFaceOptions
) -> None:
    """`config.json`, and what else belongs beside the weights."""
    storage = LocalStorage(folder)
    # What most elements are: norms and routers may be kept in another.
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    dtype = max(sizes, key=lambda name: sizes[name])
    config = {**conversion.config}
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


def plan_import(source: str | os.PathLike[str], options: MegatronOptions) -> HuggingFacePlan:
    """What an import would do; reads headers and small files only, and raises what it would raise for them."""
    directory = universal_directory(Path(checkpoint_directory(source)))
    payloads, others, settings = open_model(directory, options)
    with payloads:
        conversion, payloads = _import_conversion(payloads, directory, options, others, settings)
        dtypes = {
            name: target_dtype(payloads.index.tensors[key], options.dtype) for name, key in conversion.names.items()
        }
        return conversion.plan(dtypes, len(_objects(conversion, b"")))


def import_huggingface(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    arch: str = "auto",
    dtype: str | None = None,
    transformer_impl: Implementation = "transformer_engine",
    numbered_layers: bool = False,
    vocabulary_multiple: int = 128,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    hf_config: str | os.PathLike[str] | None = None,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    progress: bool | None = False,
) -> HuggingFaceReport:
    """Make a `torch_dist` checkpoint of a Hugging Face model, with which a launch of Megatron starts.

    Args:
        source: directory of the model: `config.json`, and safetensors or torch files; or a checkpoint that
            `torch.distributed.checkpoint` has saved of such a model (FSDP2, for one), and `hf_config`.
        target: directory to make; it must not exist, or be empty. It appears when it is complete. Called `release` or
            `iter_0000000`, it gets a tracker file beside it, if there is none, and the directory around it can be given
            to `--load`.
        tp: tensor parallel size of the files; a launch loads them under other layouts as well.
        pp: pipeline parallel size of the files.
        ep: expert parallel size of the files.
        etp: tensor parallel size of experts; by default `tp`.
        arch: the model's family; `"auto"`: what `config.json` says.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        transformer_impl: as `--transformer-impl` of the launch: the layers call some parameters differently.
        numbered_layers: a tensor for each layer, instead of one for all layers where they are alike.
        vocabulary_multiple: `--make-vocab-size-divisible-by` of the launch.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        hf_config: directory with the model's `config.json`; by default `source`.
        rename: a file of rename rules for the stored keys, applied before they are held against the family's names.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError: there is no such model.
        CorruptCheckpointError: its files contradict themselves.
        OptionError: it is of no family known here, or has settings, keys or shapes that Megatron-Core has not.
        CheckpointExistsError, SaveError, ChecksumError: as for `reshard_checkpoint`.
    """
    options = MegatronOptions(
        tp,
        pp,
        ep,
        etp,
        arch,
        floating_dtype(dtype),
        transformer_impl,
        numbered_layers,
        vocabulary_multiple,
        workers,
        verify,
        memory_bytes,
        None if hf_config is None else os.fspath(hf_config),
        rules_in(rename, parse_rename_rules),
    )
    return import_model(source, target, options, progress=progress)


def import_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: MegatronOptions,
    *,
    progress: bool | None = False,
) -> HuggingFaceReport:
    """As `import_huggingface`, which says what is raised."""
    directory, dst = universal_directory(Path(checkpoint_directory(source))), local_path(target)
    refuse_target(directory, dst)
    raw, others, settings = open_model(directory, options)
    with raw:
        conversion, base = _import_conversion(raw, directory, options, others, settings)
        payloads = PiecePayloads(base, conversion.wanted, _objects(conversion, _saved([None])))
        plan = make_plan(
            payloads.index,
            options.layout,
            Partitioner(payloads.index, arguments=conversion.arguments, chunks_tell=False),
            dtype=options.dtype,
            workers=options.workers,
            arguments=conversion.arguments,
        )
        common = _saved(_common_state(conversion, directory, {move.dtype for move in plan.moves}, options))

        def carry(partial: Path) -> None:
            storage = LocalStorage(partial)
            storage.publish(CONFIG_FILE, encode_config())
            storage.publish(COMMON_FILE, common)

        build = BuildOptions(workers=options.workers, verify=options.verify, memory_bytes=options.memory_bytes)
        build_target(payloads, plan, dst, build, carry=carry, progress=progress)
    _write_tracker(dst)
    total = sum(move.payload_bytes for move in plan.moves)
    return HuggingFaceReport(
        str(directory),
        str(dst),
        conversion.family.name,
        tuple(sorted(plan.sizes)),
        len(plan.moves),
        total,
        conversion.notes,
        conversion.left_out,
    )


def open_model(directory: Path, options: MegatronOptions) -> tuple[StoredPayloads, list[str], OptimizerSettings]:
    """What is stored, what of it is left out, and settings of an optimizer."""
    if is_universal(directory):
        return open_universal(directory, options.rename)
    kind, payloads, others = open_source(directory, options.rename)
    settings = stored_settings(payloads, directory) if kind == "dcp" else OptimizerSettings()
    return payloads, [f"{key} (no tensor)" for key in others], settings


def _import_conversion(
    stored: StoredPayloads, directory: Path, options: MegatronOptions, others: list[str], settings: OptimizerSettings
) -> tuple[_Conversion, StoredPayloads]:
    """What is to be done, and the plain tensors, of which it is to be done."""
    beside = directory if options.hf_config is None else Path(options.hf_config)
    config = _read_config(beside)
    where = str(beside / _MODEL_CONFIG)
    family = family_of_config(config, where) if options.arch == "auto" else family_named(options.arch)
    if options.vocabulary_multiple < 1:
        raise OptionError(f"vocabulary multiple {options.vocabulary_multiple}: expected at least 1")
    model = family.model(config)
    _refuse_too_many(model, stored.index, where)
    arguments = family.arguments(config)
    alike = len(set(model.expert_layers)) < 2
    naming = Naming(options.transformer_impl, stacked_layers=alike and not options.numbered_layers)
    unit = options.vocabulary_multiple * options.layout.tp
    padded = -(-model.sizes["vocab"] // unit) * unit
    relation = relate(family, model, naming, padded)
    payloads, turned = plain_payloads(stored, config, options.dtype)
    index = payloads.index
    names, left_out = _known_names(index, family, relation, model)
    _compare_tensors(
        {name: index.tensors[key].shape for name, key in names.items()},
        {key: _turned(shape, names.get(key), turned) for key, shape in {**relation.hf, **relation.joined}.items()},
        f"{family.name}, {where}",
        str(directory),
    )
    if relation.joined and not isinstance(payloads, (RawPayloads, PlainPayloads)):
        raise OptionError(
            f"{directory}: {min(relation.joined)} counts pairs along its last axis; it can be taken from "
            "safetensors only"
        )
    for name in relation.joined:
        payloads.index = _taken_apart(payloads.index, names[name], _turned(relation.hf[name], names[name], turned))
    wanted = _by_megatron_key(relation, names, turned)
    optimizer = plan_optimizer(index, names, settings, experts=model.experts > 0)
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
    left_out += [*optimizer.left_out, *others]
    notes = family.remarks(family.complete(config))
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


def _taken_apart(index: CheckpointIndex, key: str, shape: tuple[int, ...]) -> CheckpointIndex:
    """The same elements, which lie plainly in one file, as a tensor with more axes."""
    entry = index.tensors[key]
    chunk = entry.chunks[0]._replace(offsets=(0,) * len(shape), sizes=shape)
    apart = TensorEntry(key, entry.dtype, shape, (chunk,), entry.requires_grad)
    return CheckpointIndex(index.path, {**index.tensors, key: apart}, index.objects)


def _known_names(
    index: CheckpointIndex, family: Family, relation: Relation, model: Model
) -> tuple[dict[str, str], list[str]]:
    """Stored keys by those of the table, without what a family's models hold nothing of their own in."""
    names: dict[str, str] = {}
    left_out: list[str] = []
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
        else:
            names[key] = key  # which `_compare_tensors` is going to name
    return names, left_out


def _objects(conversion: _Conversion, content: bytes) -> dict[str, bytes]:
    return {
        object_key(key, offset, shape): content
        for key, offset, shape in extra_state_keys(conversion.family, conversion.model, conversion.naming)
    }


def _saved(value: Any) -> bytes:
    import torch

    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _common_state(
    conversion: _Conversion, directory: Path, dtypes: set[str], options: MegatronOptions
) -> dict[str, Any]:
    """What a launch looks for beside the tensors."""
    from argparse import Namespace

    return {
        "args": Namespace(
            **conversion.arguments,
            bf16="bfloat16" in dtypes,
            fp16="float16" in dtypes and "bfloat16" not in dtypes,
            ckpt_format="torch_dist",
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=options.hf_config or str(directory),
            consumed_train_samples=0,
            consumed_valid_samples=0,
        ),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        **conversion.optimizer.common,
    }


def _write_tracker(target: Path) -> None:
    """The tracker file beside a checkpoint that is named as a launch names them, if there is none."""
    found = _ITERATION.fullmatch(target.name)
    text = "release" if target.name == "release" else str(int(found.group(1))) if found else None
    if text is not None and not (target.parent / TRACKER_FILE).exists():
        LocalStorage(target.parent).publish(TRACKER_FILE, text.encode())
