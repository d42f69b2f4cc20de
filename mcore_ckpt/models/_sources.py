"""What there is to import: tensors in files of others, found, checked and described as the index of a checkpoint is.

Safetensors, torch files, a DCP checkpoint; and a universal checkpoint of DeepSpeed's (`ds_to_universal`), which has a
folder for each parameter, and in it a file for each state of it:

    DIR/zero/NAME/fp32.pt            the parameter in float32: {"param": tensor, "cat_dim": ...}; of ZeRO 3 the elements
    DIR/zero/NAME/exp_avg.pt         alone, one after another; the moments likewise
    DIR/zero/NAME/exp_avg_sq.pt
    DIR/zero/NAME/step.pt            a number, or a tensor of one
    DIR/zero/optimizer_state.pt      groups of parameters
    DIR/*model_states.pt             ranks' files: shapes, arguments, random states, weights in 16 bits
    DIR/../latest_universal          which DIR it is

By `deepspeed/checkpoint/ds_to_universal.py` and `universal_checkpoint.py` (DeepSpeed 0.19). Every file is read as a
state file: nothing of DeepSpeed's is imported, and elements are read where they are needed.

A NeMo 2 directory has every field of its model's configuration, defaults included, instead of Megatron's arguments:

    DIR/weights/              a torch_dist checkpoint; its keys begin with `module.`, and no arguments are stored
    DIR/context/model.yaml    {_target_: ...LlamaModel, config: {_target_: ...Llama31Config8B, num_layers: 32, ...}}
"""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import METADATA_FILE, NEMO_CONTEXT, NEMO_WEIGHTS, read_index, read_small_file
from mcore_ckpt.format.state_file import StateFile
from mcore_ckpt.format.tensor_pickle import DTYPES, FileTensor
from mcore_ckpt.models._foreign import OptimizerSettings, others_than_settings, stored_settings
from mcore_ckpt.models._legacy_files import carried_arguments, file_range, read_state, read_torch_file, reading
from mcore_ckpt.reshard.options import RenameRule, rename_keys
from mcore_ckpt.reshard.view import FilePayloads, FileRange
from mcore_ckpt.reshard.weight_files import METADATA_KEY, SavedTensor, taken_over
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

_MAX_NUMBER = 2**63
_MAX_AXES = 64
# What the reference implementation allows.
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {entry.safetensors: name for name, entry in DTYPES.items() if entry.safetensors}


def read_safetensors(directory: Path, name: str) -> dict[str, FileRange]:
    """The tensors of one file, by name; each number is checked against the file. `CorruptCheckpointError` unless each
    name is there once, and the tensors follow one another without holes or overlaps.
    """
    path = directory / name
    with storage_at(directory, follow_links=True).open_reader(name) as reader:
        size_bytes = reader.size_bytes
        length = int.from_bytes(reader.read(0, min(8, size_bytes)), "little")
        if size_bytes < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CorruptCheckpointError(f"{path}: a header of {length} bytes in a file of {size_bytes}")
        text = reader.read(8, length)
    header = parse_json(text, str(path))
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{path}: its header is no JSON object; fetch the file again")
    header.pop(METADATA_KEY, None)
    tensors = {key: _tensor(path, name, key, fields, 8 + length, size_bytes) for key, fields in header.items()}
    stop, previous = 8 + length, ""
    for key, raw in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if raw.offset != stop:
            problem = "bytes before it belong to no tensor" if raw.offset > stop else f"it overlaps {previous}"
            raise CorruptCheckpointError(
                f"{path}: {key}: its data begin at byte {raw.offset}, expected {stop}: {problem}; fetch the file again"
            )
        stop, previous = raw.offset + raw.nbytes, key
    if stop != size_bytes:
        raise CorruptCheckpointError(
            f"{path}: its tensors end at byte {stop}, the file at {size_bytes}: tensors are missing from its header; "
            "fetch the file again"
        )
    return tensors


def parse_json(text: bytes, where: str) -> Any:
    """A JSON document; `CorruptCheckpointError` if an object has one name twice, of which one value would be lost."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            raise CorruptCheckpointError(
                f"{where}: {names.most_common(1)[0][0]!r:.200} is in it twice; one would be lost"
            )
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where}: not JSON ({type(error).__name__}: {error}); fetch the file again"
        ) from error


def _tensor(path: Path, name: str, key: str, fields: Any, first: int, size_bytes: int) -> FileRange:
    try:
        dtype_name, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        dtype = _NAMES.get(dtype_name)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{path}: {key}: expected dtype, shape and two data_offsets ({type(error).__name__}: {error}); fetch the "
            "file again"
        ) from error
    if dtype is None:
        raise CorruptCheckpointError(f"{path}: {key}: dtype {dtype_name!r:.80} is not known here")
    numbers = (*shape, start, stop)
    possible = len(shape) <= _MAX_AXES and all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers)
    if not possible or math.prod(filter(None, shape)) >= _MAX_NUMBER:
        raise CorruptCheckpointError(f"{path}: {key}: expected non-negative ints, and axes that can be multiplied")
    expected = math.prod(shape) * element_bytes(dtype)
    if stop - start != expected or first + stop > size_bytes:
        raise CorruptCheckpointError(
            f"{path}: {key}: bytes [{start}, {stop}) of the data for {dtype} {list(shape)}, expected {expected} bytes "
            f"inside the file of {size_bytes}"
        )
    return FileRange(name, first + start, expected, dtype, shape)


ImportFormat = Literal["safetensors", "torch", "dcp", "ucp"]

# Of an index file, some hundred bytes for each key.
_MAX_INDEX_BYTES = 256 * 1024**2
_TORCH_ENDINGS = (".bin", ".pt", ".pth")


class Opened(NamedTuple):
    """A source of a model: its tensors, open; what is left out, with reasons; its optimizer's settings."""

    directory: Path
    kind: ImportFormat
    payloads: StoredPayloads
    left_out: list[str]
    settings: OptimizerSettings


def open_model(directory: Path, rename: Sequence[RenameRule]) -> Opened:
    """A model of others, in whichever format it is; raises what `open_source` raises."""
    if _is_universal(directory):
        payloads, left_out, settings = _open_universal(directory, rename)
        return Opened(directory, "ucp", payloads, left_out, settings)
    kind, stored, others = open_source(directory, rename)
    settings = stored_settings(stored, directory) if kind == "dcp" else OptimizerSettings()
    return Opened(directory, kind, stored, list(map(no_tensor, others_than_settings(others))), settings)


def no_tensor(key: str) -> str:
    """What is said of an object that is left out."""
    return f"{key} (no tensor)"


def open_source(source: Path, rename: Sequence[RenameRule]) -> tuple[ImportFormat, StoredPayloads, list[str]]:
    """What is there, its tensors under their new keys, and the keys of what is no tensor. Raises
    `CheckpointNotFoundError` and `OptionError` where there is nothing, or nothing is left of it.
    """
    if storage_at(source).exists(METADATA_FILE):
        index = read_index(source).without_shadow_copies()
        names = _new_names(index.tensors, rename, source)
        check_tiled(index, names)
        return "dcp", StoredPayloads(_renamed(index, names), stored=index), list(index.objects)
    directory = source if storage_at(source).is_directory() else source.parent
    storage = storage_at(directory, follow_links=True)
    files, mapped = _files(source, storage)
    for file in files:
        storage.size(file)  # raises for what is no regular file: a pipe would never end
    kind: ImportFormat = "safetensors" if files[0].endswith(".safetensors") else "torch"
    tensors: dict[str, FileRange] = {}
    left_out: list[str] = []
    for file in files:
        found = read_safetensors(directory, file) if kind == "safetensors" else None
        if found is None:
            found, others = read_torch_file(storage, file)
            left_out += others
        twice = tensors.keys() & found.keys()
        if twice:
            raise CorruptCheckpointError(f"{directory / file}: {min(twice)} is in another of the files too")
        tensors.update(found)
    _check_mapped(mapped, {key: at.file for key, at in tensors.items()}, source)
    names = _new_names(tensors, rename, source)
    return kind, FilePayloads(directory, {new: tensors[old] for old, new in names.items()}, storage), left_out


def _files(source: Path, storage: Storage) -> tuple[list[str], dict[str, str]]:
    """The files to read: one, or those of an index, or all of one kind; and the file of each key, if an index says.
    `storage` is that of the directory.
    """
    if storage.location != storage_at(source).location:
        if not storage.exists(source.name):
            raise CheckpointNotFoundError(f"{source}: no such file or directory")
        return [source.name], {}
    names = storage.list()
    for ending in (".safetensors", *_TORCH_ENDINGS):
        indexes = [name for name in names if name.endswith(f"{ending}.index.json")]
        if len(indexes) == 1:
            mapped = _weight_map(source / indexes[0])
            return sorted(set(mapped.values())), mapped
        files = [name for name in names if name.endswith(ending)]
        if files:
            return files, {}
    raise CheckpointNotFoundError(
        f"{source}: nothing to import: expected *.safetensors, *.bin, *.pt or *.pth files, or a DCP checkpoint"
    )


def _weight_map(path: Path) -> dict[str, str]:
    """Which file each key is in, as an index of the Hugging Face libraries says."""
    document = parse_json(read_small_file(path.parent, path.name, _MAX_INDEX_BYTES, follow_links=True), str(path))
    mapped = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise CorruptCheckpointError(f"{path}: expected a `weight_map` from keys to files")
    for key, file in mapped.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CorruptCheckpointError(f"{path}: {key}: expected the name of a file next to it, got {file!r:.200}")
    return mapped


def _check_mapped(mapped: Mapping[str, str], found: Mapping[str, str], source: Path) -> None:
    """Compare what the index says with what the files hold; raises `CorruptCheckpointError`."""
    wrong = [key for key, file in mapped.items() if found.get(key) != file]
    if wrong:
        where = found.get(wrong[0])
        raise CorruptCheckpointError(
            f"{source}: {len(wrong)} keys are not where its index says: {wrong[0]} is not in {mapped[wrong[0]]}, but "
            f"{'in no file' if where is None else f'in {where}'}; fetch the files and their index again"
        )


def _new_names(keys: Iterable[str], rules: Sequence[RenameRule], source: Path) -> dict[str, str]:
    names = rename_keys(keys, rules)
    if not names:
        raise OptionError(f"{source}: no tensor is left to import")
    return names


def _renamed(index: CheckpointIndex, names: dict[str, str]) -> CheckpointIndex:
    tensors = {}
    for old, new in names.items():
        entry = index.tensors[old]
        tensors[new] = TensorEntry(new, entry.dtype, entry.shape, entry.chunks, entry.requires_grad)
    return CheckpointIndex(index.path, tensors, {})


# --- universal checkpoints of DeepSpeed's

_ZERO, _LATEST = "zero", "latest_universal"
_MAX_NAME_BYTES = 4096
_STATES = {"fp32": "{}", "exp_avg": "optim.state.{}.exp_avg", "exp_avg_sq": "optim.state.{}.exp_avg_sq"}
_MODEL_STATES = "_model_states.pt"


def universal_directory(source: Path) -> Path:
    """`source`, or the checkpoint in it that `latest_universal` names."""
    if not storage_at(source / _ZERO).is_directory() and storage_at(source).exists(_LATEST):
        content = read_small_file(source, _LATEST, _MAX_NAME_BYTES).decode(errors="replace").strip()
        if re.fullmatch(r"[\w.-]+", content) and not content.startswith("."):
            return source / content
    return source


def _is_universal(source: Path) -> bool:
    """Whether a directory is a universal checkpoint; raises `OptionError` for another one of DeepSpeed's."""
    universal = storage_at(source / _ZERO).is_directory()
    if not universal and any(name.endswith("_optim_states.pt") for name in storage_at(source).list()):
        raise OptionError(
            f"{source}: a checkpoint of DeepSpeed's as its ranks have saved it; make a universal one of it "
            f"(`ds_to_universal.py --input_folder {source} --output_folder ...`), and import that"
        )
    return universal


def _open_universal(source: Path, rename: Sequence[RenameRule]) -> tuple[FilePayloads, list[str], OptimizerSettings]:
    """Parameters by their names, moments as `optim.state.NAME.exp_avg`; what is left out; settings of the
    optimizer.
    """
    storage = storage_at(source)
    tensors: dict[str, FileRange] = {}
    left_out: list[str] = []
    steps: list[float] = []
    shapes: dict[str, tuple[int, ...]] | None = None
    for name in _parameters(source):
        for own_name in storage_at(source / _ZERO / name).list():
            file, state = f"{_ZERO}/{name}/{own_name}", own_name.removesuffix(".pt")
            if state == "step":
                steps.append(_number(storage, file))
                continue
            if state not in _STATES or not own_name.endswith(".pt"):
                left_out.append(f"{file} (no state of Adam's)")
                continue
            read = read_state(storage, file)
            tensor = read.value.get("param") if isinstance(read.value, dict) else read.value
            if type(tensor) is not FileTensor:
                raise CorruptCheckpointError(
                    f"{storage.path(file)}: expected a tensor, or a dict with one as `param`; got "
                    f"{type(tensor).__name__}"
                )
            shape = tensor.shape
            if type(read.value) is FileTensor and len(shape) == 1:
                shapes = _shapes(storage) if shapes is None else shapes
                shape = shapes.get(name, shape)
                if math.prod(shape) != math.prod(tensor.shape):
                    raise CorruptCheckpointError(
                        f"{storage.path(file)}: {tensor.shape[0]} elements; the ranks' files say that {name} has the "
                        f"shape {list(shape)}"
                    )
            tensors[_STATES[state].format(name)] = file_range(file, tensor, read)._replace(shape=shape)
    ranks = "a rank's file: random states, schedules, the weights in 16 bits"
    left_out += [f"{name} ({ranks})" for name in _rank_files(storage)]
    names = rename_keys(tensors, rename)
    if not any(not key.startswith("optim.state.") for key in names.values()):
        raise OptionError(f"{source}: no parameter is left to import")
    settings = OptimizerSettings(tuple(steps), tuple(_groups(storage, steps)))
    if settings.groups and not steps:
        settings = _with_inner_step(storage, settings)
    return FilePayloads(source, {new: tensors[old] for old, new in names.items()}), left_out, settings


def rank_state(source: Path) -> tuple[Mapping[str, Any], list[str]]:
    """The state of the first rank's file that has Megatron's arguments, and what of these is of no class known here."""
    storage = storage_at(source)
    for name in _rank_files(storage):
        read = read_state(storage, name)
        given = read.value.get("args") if isinstance(read.value, dict) else None
        if isinstance(given, Namespace):
            arguments, left_out = carried_arguments(vars(given), reading(storage, name), name, read.records)
            return {**read.value, "args": arguments}, left_out
    return {}, []


def _rank_files(storage: Storage) -> list[str]:
    return [name for name in storage.list() if name.endswith(_MODEL_STATES)]


def _parameters(source: Path) -> list[str]:
    zero = storage_at(source / _ZERO)
    found = sorted({*zero.folders()} - {*zero.links()})
    if not found:
        raise CheckpointNotFoundError(
            f"{source / _ZERO}: holds no folders of parameters; make a universal checkpoint of DeepSpeed's by its "
            "`ds_to_universal.py`"
        )
    return found


def _number(storage: Storage, file: str) -> float:
    """A number in a file, or in a tensor of one element in it."""
    read = read_state(storage, file)
    number = _plain_number(storage, file, read, read.value)
    if number is None:
        raise CorruptCheckpointError(f"{storage.path(file)}: expected a number, got {type(read.value).__name__}")
    return number


def _plain_number(storage: Storage, file: str, read: StateFile, value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if type(value) is not FileTensor or value.nbytes > 8:
        return None
    taken: SavedTensor = taken_over(value, reading(storage, file), str(storage.path(file)), read.records)
    return taken.number


def _shapes(storage: Storage) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters, from the ranks' files: ZeRO 3 writes elements without any."""
    found: dict[str, tuple[int, ...]] = {}
    for name in _rank_files(storage):
        value = read_state(storage, name).value
        stated = value.get("param_shapes") if isinstance(value, dict) else None
        for group in stated if isinstance(stated, list) else [stated]:
            for key, shape in group.items() if isinstance(group, dict) else ():
                if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
                    found[str(key)] = tuple(shape)
    return found


def _groups(storage: Storage, steps: Sequence[float]) -> Iterator[Mapping[str, Any]]:
    file = f"{_ZERO}/optimizer_state.pt"
    if not storage.exists(file):
        return
    value = read_state(storage, file).value
    for group in value.get("param_groups") or () if isinstance(value, dict) else ():
        if isinstance(group, dict):
            yield {name: group[name] for name in ("lr", "betas", "eps", "weight_decay") if name in group}


def _with_inner_step(storage: Storage, settings: OptimizerSettings) -> OptimizerSettings:
    """ZeRO 3 writes no steps next to its parameters; they stay in the optimizer's own state, for each flat group."""
    file = f"{_ZERO}/optimizer_state.pt"
    read = read_state(storage, file)
    inner = read.value.get("optimizer_state_dict") if isinstance(read.value, dict) else None
    states = inner.get("state") if isinstance(inner, dict) else None
    found = []
    for state in states.values() if isinstance(states, dict) else ():
        number = _plain_number(storage, file, read, state.get("step")) if isinstance(state, dict) else None
        found += [] if number is None else [number]
    return OptimizerSettings(tuple(found), settings.groups)


# --- NeMo

_MAX_YAML_BYTES = 16 * 1024**2
# NeMo's and Megatron-Core's name of what a job calls otherwise.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "bias_activation_fusion": "bias_gelu_fusion",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "seq_length": "max_position_embeddings",
}
_PLAIN = (bool, int, float, str)
# What Megatron-Core's `rope_scaling` has built in, by NeMo's names.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}


def nemo_arguments(checkpoint: Path) -> dict[str, Any]:
    """Megatron's arguments for the model of a NeMo directory, whose `weights` are `checkpoint`; empty without a
    `context/model.yaml`. Raises `OptionError` for what no job has arguments for, or `CorruptCheckpointError`.
    """
    path = checkpoint.parent / NEMO_CONTEXT / "model.yaml"
    if checkpoint.name != NEMO_WEIGHTS or not storage_at(path.parent, follow_links=True).exists(path.name):
        return {}
    document = _parse(read_small_file(path.parent, path.name, _MAX_YAML_BYTES, follow_links=True), path)
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("num_layers"), int):
        raise CorruptCheckpointError(f"{path}: expected a model with a `config` that says how many layers it has")
    plain = {name: _said(value) for name, value in config.items() if value is not None}
    arguments = {**plain, **{new: plain[old] for old, new in _RENAMED.items() if old in plain}}
    groups = plain.get("num_query_groups")
    arguments |= {
        "group_query_attention": groups is not None and groups != plain.get("num_attention_heads"),
        "untie_embeddings_and_output_weights": not plain.get("share_embeddings_and_output_weights", True),
        **_activation(config, path),
        **_rope_scaling(plain, path),
    }
    return arguments


def _said(value: Any) -> Any:
    """A setting; for what is no plain value, its name in brackets, which no model's computation is described by."""
    if isinstance(value, dict) and value.get("_target_") in ("builtins.tuple", "builtins.list"):
        parts = value.get("_args_")
        value = parts[0] if isinstance(parts, list) and len(parts) == 1 else value
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value):
        return value
    return f"<{value.get('_target_', 'settings')}>" if isinstance(value, dict) else f"<{type(value).__name__}>"


def _parse(content: bytes, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise OptionError(
            f"{path}: reading it takes PyYAML, which is not installed (pip install pyyaml); or give the model's "
            "config.json (--hf-config DIR)"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Plain values only: what a tag would build is its name."""

    Loader.add_multi_constructor("", lambda loader, tag, node: f"<{tag}>")
    Loader.add_constructor(
        "tag:yaml.org,2002:python/tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
    )
    try:
        return yaml.load(content, Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise CorruptCheckpointError(f"{path}: is no YAML ({type(error).__name__}: {error!s:.200})") from error


def _activation(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    function = config.get("activation_func")
    name = function.get("_target_") if isinstance(function, dict) else function
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    gated = bool(config.get("gated_linear_unit"))
    if gated and last == "silu":
        return {"swiglu": True, "squared_relu": False}
    if gated and last == "quick_gelu":
        return {"swiglu": False, "squared_relu": False, "quick_geglu": True}
    if last in ("gelu", "fast_gelu", "openai_gelu"):
        # All but the first are the approximation, and so is what Megatron-Core has fused of that.
        approximate = last != "gelu" or bool(config.get("bias_activation_fusion"))
        return {"swiglu": False, "squared_relu": False, "gated_linear_unit": gated, "bias_gelu_fusion": approximate}
    if not gated and last == "squared_relu":
        return {"swiglu": False, "squared_relu": True}
    raise OptionError(
        f"{path}: activation {name!r:.120}, {'gated' if gated else 'not gated'}: expected a gated silu or "
        "quick_gelu, or gelu; give the model's config.json (--hf-config DIR)"
    )


def _rope_scaling(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """NeMo's Llama 3.1 has fields of its own for what Megatron-Core calls `rope_scaling`."""
    if config.get("scale_factor") is None or "old_context_len" not in config:
        scaling = bool(config.get("rope_scaling"))
        return {"use_rope_scaling": scaling, "rope_scaling_factor": config.get("rope_scaling_factor") or 8.0}
    for name, fixed in _LLAMA3_SCALING.items():
        if config.get(name) != fixed:
            raise OptionError(f"{path}: rotary scaling with {name}={config.get(name)!r:.40}: expected {fixed}")
    return {"use_rope_scaling": True, "rope_scaling_factor": float(config["scale_factor"])}
