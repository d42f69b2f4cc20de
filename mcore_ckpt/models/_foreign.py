"""What other frameworks have for what Megatron has: files of tensors, names of parameters, the optimizer's state.

Files. Safetensors, torch files and DCP checkpoints become payloads under their own keys.

Names. A checkpoint of `torch.distributed.checkpoint` holds whatever state dict was given to it: `model.layers.0...`,
`app.model.model.layers.0...`, `module.model.layers.0...`. So no prefix is known beforehand; it is what stands before
the names that a model has in most keys.

The state of an Adam optimizer, as Megatron's distributed optimizer keeps it:

    optim.state.NAME.exp_avg, .exp_avg_sq    ->  optimizer.state.exp_avg.KEY, optimizer.state.exp_avg_sq.KEY
    the weights, in float32                  ->  optimizer.state.param.KEY
    step, betas, eps, weight decay           ->  groups of parameters in the common state

Megatron has one step and one pair of betas for all parameters, and keeps everything in float32. What does not fit is
left out completely, with the reason: half of an optimizer's state is of no use.

And the last step of all imports: from payloads of a source to the plan of a `torch_dist` checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    OptionError,
    UnsafePickleError,
)
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    HF_INDEX,
    METADATA_FILE,
    encode_config,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.state_file import StateFile, read_state_file
from mcore_ckpt.format.tensor_pickle import DTYPES, FileTensor
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, SourceFiles, in_dtype
from mcore_ckpt.reshard.options import ImportOptions, RenameRule, rename_keys
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.reshard.target_directory import Target
from mcore_ckpt.reshard.view import FilePayloads, FileRange, Record, TensorView, ViewPayloads
from mcore_ckpt.reshard.weight_files import METADATA_KEY, SUMS_KEY, encode_state
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import read_plain_object
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled, read_box
from mcore_ckpt.tools.regrid import as_numbers, slabs

# --- files: tensors found, checked and described as the index of a checkpoint is; read where they are needed

_MAX_NUMBER = 2**63
_MAX_AXES = 64
# What the reference implementation allows.
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {entry.safetensors: name for name, entry in DTYPES.items() if entry.safetensors}
# Where in a larger tensor each of a file's begins, as DCP notes it in the metadata; and that one is not at its start.
_SHARDING = "DCP_SHARDING_INFO"
_INSIDE = re.compile(r'"saved_offsets":[^]]*[1-9]')


class WeightIndex(NamedTuple):
    """What an index of files says: the file of each key; CRC-32s of headers and tensors, if ours wrote it."""

    files: Mapping[str, str]
    headers: Mapping[str, int]
    tensors: Mapping[str, int]


NO_INDEX: Final = WeightIndex({}, {}, {})


def read_safetensors(directory: Path, name: str, listed: WeightIndex = NO_INDEX) -> dict[str, FileRange]:
    """The tensors of one file, by name. `CorruptCheckpointError`: names, offsets or lengths cannot be; `ChecksumError`:
    the header is not as `listed`; `OptionError`: it holds slices of tensors.
    """
    path = directory / name
    with storage_at(directory, follow_links=True).open_reader(name) as reader:
        size_bytes = reader.size_bytes
        length = int.from_bytes(reader.read(0, min(8, size_bytes)), "little")
        if size_bytes < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CorruptCheckpointError(f"{path}: a header of {length} bytes in a file of {size_bytes}")
        text = reader.read(8, length)
    expected = listed.headers.get(name)
    if expected is not None and crc32(text, crc32(length.to_bytes(8, "little"))) != expected:
        raise ChecksumError(
            f"{path}: its header does not have the CRC-32 {expected:#010x} that {HF_INDEX} states: it is "
            "damaged; fetch the file again. Where another model was saved over it, remove that index"
        )
    header = parse_json(text, str(path))
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{path}: its header is no JSON object; fetch the file again")
    metadata = header.pop(METADATA_KEY, None)
    tensors = {key: _tensor(path, name, key, fields, 8 + length, size_bytes) for key, fields in header.items()}
    for key, value in listed.tensors.items():
        if listed.files.get(key) == name and key in tensors:
            found = tensors[key]
            tensors[key] = found._replace(record=Record(key, found.offset, found.nbytes, value))
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
    noted = str(metadata.get(_SHARDING, "")) if isinstance(metadata, dict) else ""
    if (noted and name.startswith("shard-")) or _INSIDE.search(noted):
        raise OptionError(
            f"{path}: holds slices of tensors ({_SHARDING}), as DCP's HuggingFaceStorageWriter leaves them on each "
            "rank, and no file says how many ranks there were. Put the files of all of them together by torch's "
            "consolidate_safetensors_files"
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
        if text.startswith(POINTER):
            refuse_text(where, text)
        raise CorruptCheckpointError(
            f"{where}: not JSON ({type(error).__name__}: {error}); fetch the file again"
        ) from error


POINTER = b"version https://git-lfs.github.com/"
"""How the text begins that Git LFS has in place of a large file."""


def refuse_text(where: object, head: bytes) -> None:
    """Raise `CorruptCheckpointError` where a file that holds tensors begins as text does."""
    first = head[:100].decode(errors="replace").partition("\n")[0]
    if len(first) >= 8 and first.isprintable():
        is_pointer = head.startswith(POINTER)
        what = "a pointer of Git LFS, not the file; fetch that (git lfs pull)" if is_pointer else "fetch the file again"
        raise CorruptCheckpointError(f"{where}: is a text file, which begins {first!r}: {what}")


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


_MAX_DEPTH = 100
# A tensor may be expanded (a row that stands for many): so far beyond what lies in the file.
_MAX_EXPANDED_BYTES = 1024**3


def read_state(storage: Storage, file: str) -> StateFile:
    """A state file; raises as `read_state_file`."""
    with storage.open_reader(file) as reader:
        return read_state_file(reader.read, reader.size_bytes, str(storage.path(file)))


def file_range(file: str, tensor: FileTensor, state: StateFile, *, strided: bool = False) -> FileRange:
    """Where the elements of one of its tensors lie; raises `CorruptCheckpointError` for unexpected strides."""
    if tensor.strides and not strided:
        raise CorruptCheckpointError(
            f"{file}: a tensor of {list(tensor.shape)} in steps of {list(tensor.strides)} elements; expected elements "
            "that follow one another, as Megatron saves them"
        )
    record = state.records[tensor.record]
    whole = Record(f"record data/{tensor.record}", record.start, record.nbytes, record.crc32)
    at = record.start + tensor.first_byte
    return FileRange(file, at, tensor.nbytes, tensor.dtype, tensor.shape, whole, tensor.strides)


def read_torch_file(storage: Storage, file: str) -> tuple[dict[str, FileRange], list[str]]:
    """The tensors of a torch file by key (nested dicts joined by dots), and keys of other plain values."""
    path, size_bytes = storage.path(file), storage.size(file)
    state = read_state(storage, file)
    tensors: dict[str, FileRange] = {}
    others: list[str] = []
    # Nested dicts of a hostile file may contain one another: as many values as a file has bytes are enough.
    budget = max(100_000, size_bytes)

    def walk(value: Any, prefix: str, depth: int) -> None:
        nonlocal budget
        budget -= 1 + len(prefix) // 64
        if budget < 0 or depth > _MAX_DEPTH:
            raise CorruptCheckpointError(f"{path}: {prefix[:80]}: dicts are nested in one another without an end")
        if isinstance(value, Opaque) or (isinstance(value, type) and issubclass(value, Opaque)):
            raise UnsafePickleError(
                f"{path}: {prefix}: holds more than tensors and plain values: {value.name:.200}; load the file once "
                "with what has saved it, and save its tensors alone"
            )
        if type(value) is FileTensor:
            if prefix in tensors:
                raise CorruptCheckpointError(
                    f"{path}: two of its tensors would both be called {prefix}: of the keys of nested dicts, joined by "
                    "dots, each has to be another; one would be lost"
                )
            if value.nbytes > size_bytes + _MAX_EXPANDED_BYTES:
                raise CorruptCheckpointError(
                    f"{path}: {prefix}: {value.nbytes} bytes of elements, which are expanded from fewer; store a copy"
                )
            tensors[prefix] = file_range(file, value, state, strided=True)
        elif isinstance(value, dict):
            for key, part in value.items():
                if not isinstance(key, (str, int, float, bool, type(None))):
                    raise CorruptCheckpointError(f"{path}: {prefix}: a key of type {type(key).__name__}; expected text")
                walk(part, f"{prefix}.{key}" if prefix else str(key), depth + 1)
        elif hasattr(value, "element_size"):
            raise CorruptCheckpointError(
                f"{path}: {prefix}: expected a dense tensor of a plain dtype; convert it first"
            )
        else:
            others.append(prefix)

    walk(state.value, "", 0)
    return tensors, others


ImportFormat = Literal["safetensors", "torch", "dcp"]

# The longest index file: some hundred bytes for each key.
_MAX_INDEX_BYTES = 256 * 1024**2
CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 * 1024**2
_TORCH_ENDINGS = (".bin", ".pt", ".pth")
_INDEX = ".index.json"
WEIGHTS = (".safetensors", *_TORCH_ENDINGS, ".ckpt", ".gguf", ".h5", ".msgpack", _INDEX)
"""How files of weights end, those of other libraries among them."""

# What `transformers` looks for in a directory, in this order.
_MODEL_FILES = [name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", _INDEX)]
TRANSFORMERS_FILE = "transformers_weights"
"""A setting of `config.json`, which names another one."""
# What training, adapters and other systems leave next to weights, as far as names tell.
_BESIDE = ("._", "adapter_", "optimizer", "random_states", "rng_state", "scheduler", "training_args")
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")
_SHOWN = 5


class Opened(NamedTuple):
    """A source of a model: its tensors, open; what is left out, with reasons; its optimizer's settings."""

    directory: Path
    kind: ImportFormat
    payloads: StoredPayloads
    left_out: list[str]
    settings: OptimizerSettings


def open_model(directory: Path, rename: Sequence[RenameRule]) -> Opened:
    """A model of others, in whichever format it is; raises what `open_source` raises."""
    kind, stored, left_out, objects = open_source(directory, rename, is_model=True)
    settings = stored_settings(stored, directory) if kind == "dcp" else OptimizerSettings()
    others = map(no_tensor, others_than_settings(objects))
    return Opened(directory, kind, stored, [*left_out, *others], settings)


def no_tensor(key: str) -> str:
    """What is said of an object that is left out."""
    return f"{key} (no tensor)"


def open_source(
    source: Path, rename: Sequence[RenameRule], *, is_model: bool = False
) -> tuple[ImportFormat, StoredPayloads, list[str], list[str]]:
    """The kind of source, its tensors under their new keys, files that are left out, and keys of other values.
    `is_model`: a configuration may name the file. Raises `LoadError` and `OptionError`.
    """
    if storage_at(source).exists(METADATA_FILE):
        index = read_index(source)
        names = _new_names(index.tensors, rename, source)
        check_tiled(index, names)
        renamed = {new: index.tensors[old]._replace(fqn=new) for old, new in names.items()}
        return "dcp", StoredPayloads(CheckpointIndex(index.path, renamed, {}), stored=index), [], list(index.objects)
    directory = source if storage_at(source).is_directory() else source.parent
    storage = storage_at(directory, follow_links=True)
    files, listed, left_out = _files(source, storage, is_model)
    kind: ImportFormat = "safetensors" if files[0].endswith(".safetensors") else "torch"
    tensors: dict[str, FileRange] = {}
    others: list[str] = []
    for file in files:
        with storage.open_reader(file) as reader:  # raises for what is no regular file: a pipe would never end
            refuse_text(directory / file, reader.read(0, min(100, reader.size_bytes)))
        found = read_safetensors(directory, file, listed) if kind == "safetensors" else None
        if found is None:
            found, more = read_torch_file(storage, file)
            others += more
        empty = [key for key in rename_keys(found, rename) if found[key].shape == (0,) and "float" in found[key].dtype]
        if empty:
            raise CorruptCheckpointError(
                f"{directory / file}: {len(empty)} tensors have no elements, the first {empty[0]}: DeepSpeed's ZeRO-3 "
                "leaves such placeholders on each rank. Gather the values (zero_to_fp32.py), or drop keys by --rename"
            )
        twice = tensors.keys() & found.keys()
        if twice:
            raise CorruptCheckpointError(f"{directory / file}: {min(twice)} is in another of the files too")
        tensors.update(found)
    check_listed(listed, {key: at.file for key, at in tensors.items()}, source)
    names = _new_names(tensors, rename, source)
    return kind, FilePayloads(directory, {new: tensors[old] for old, new in names.items()}, storage), left_out, others


def _files(source: Path, storage: Storage, is_model: bool) -> tuple[list[str], WeightIndex, list[str]]:
    """Files to read: one, those that `transformers` takes, or all of one kind; their index; files that are left out."""
    if storage.location != storage_at(source).location:
        if not storage.exists(source.name):
            raise CheckpointNotFoundError(f"{source}: no such file or directory")
        return [source.name], NO_INDEX, []
    names = storage.list()
    named = read_config(source).get(TRANSFORMERS_FILE) if is_model and CONFIG in names else None
    if named is not None and not (isinstance(named, str) and storage.exists(named)):
        raise CheckpointNotFoundError(
            f"{source}: {CONFIG} says that the weights are in {named!r:.200} ({TRANSFORMERS_FILE}), which is no file "
            "here; fetch it, or remove the setting"
        )
    chosen = [named] if named else [name for name in _MODEL_FILES if name in names][:1]
    for others in ((*_BESIDE, "consolidated"), _BESIDE if is_model else ()):
        for ending in (".safetensors", *_TORCH_ENDINGS):
            chosen = chosen or [name for name in names if name.endswith(ending) and not name.startswith(others)]
    if not chosen:
        there = some([name for name in names if name.endswith(WEIGHTS)]) or "none"
        raise CheckpointNotFoundError(
            f"{source}: nothing to import: expected *.safetensors, *.bin, *.pt or *.pth files of weights, or a DCP "
            f"checkpoint; found {there}"
        )
    first, listed = chosen[0], NO_INDEX
    if first.endswith(_INDEX):
        listed = read_weight_index(source / first)
        chosen = sorted(set(listed.files.values()))
    elif chosen == [first] and first + _INDEX in names:
        with contextlib.suppress(CorruptCheckpointError):  # `transformers` does not look at it
            listed = read_weight_index(source / (first + _INDEX))
            listed = listed if set(listed.files.values()) == {first} else NO_INDEX
    if not listed.files:
        check_numbered(source, chosen)
    known = {first, *chosen, *([first + _INDEX] if listed.files else [])}
    left = [name for name in names if name.endswith(WEIGHTS) and name not in known]
    taken = first if listed.files or len(chosen) == 1 else f"{len(chosen)} others"
    return chosen, listed, [f"{some(left)} (the model is in {taken})"] if left else []


def check_numbered(source: Path, names: Iterable[str]) -> None:
    """Raise `CorruptCheckpointError` if, by their names, these files are not all of a model."""
    numbered = [found for name in names if (found := _NUMBERED.search(name))]
    if numbered and len({found[1] for found in numbered}) < int(numbered[0][2]):
        raise CorruptCheckpointError(f"{source}: of {numbered[0][2]} files not all are there; fetch the others, too")


def some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration of a Hugging Face model; raises `CheckpointNotFoundError` and `CorruptCheckpointError`."""
    path = directory / CONFIG
    if not storage_at(directory, follow_links=True).exists(CONFIG):
        raise CheckpointNotFoundError(f"{path}: no such file; expected the configuration of a Hugging Face model")
    document = parse_json(read_small_file(directory, CONFIG, _MAX_CONFIG_BYTES, follow_links=True), str(path))
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{path}: expected settings by name, got {type(document).__name__}")
    return document


def read_weight_index(path: Path) -> WeightIndex:
    """An index of the Hugging Face libraries, which may have checksums; raises `CorruptCheckpointError`."""
    document = parse_json(read_small_file(path.parent, path.name, _MAX_INDEX_BYTES, follow_links=True), str(path))
    mapped = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise CorruptCheckpointError(f"{path}: expected a `weight_map` from keys to files")
    for key, file in mapped.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CorruptCheckpointError(f"{path}: {key}: expected the name of a file next to it, got {file!r:.200}")
    metadata = document.get("metadata")
    sums = (metadata.get(SUMS_KEY) if isinstance(metadata, dict) else None) or {}
    try:
        headers, tensors = (
            {name: int(value, 16) for name, value in sums.get(of, {}).items()} for of in ("headers", "tensors")
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{path}: expected in `{SUMS_KEY}` hexadecimal digits for each tensor and each header; fetch the file again"
        ) from error
    return WeightIndex(mapped, headers, tensors)


def check_listed(listed: WeightIndex, found: Mapping[str, str], source: Path) -> None:
    """Compare what the index says with what the files hold; raises `CorruptCheckpointError`."""
    mapped = listed.files
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


# --- names

# Bytes of tensors that are compared at a time.
_COMPARED_BYTES = 4 * 1024**2
# Put into names by wrappers of modules: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim|optimizers?|chained_\d+)\.")


def is_foreign_optimizer_key(key: str) -> bool:
    """Whether a key belongs to an optimizer's state, whatever stands before it."""
    return _OPTIMIZER.search(key) is not None


def without_wrappers(key: str) -> str:
    """A key without what wrappers of modules put into it."""
    return _WRAPPERS.sub("", key)


def plain_names(keys: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """All stored keys (without the optimizer's) by the names that a model has for them. An unknown key goes without
    wrappers and without the prefix of most known ones, or as stored if that is taken.
    """
    bare = {key: without_wrappers(key) for key in keys}
    found: Counter[str] = Counter()
    for name in bare.values():
        if (end := _suffix(name, known)) is not None:
            found[name.removesuffix(end)] += 1
    prefix = min(found, key=lambda text: (-found[text], len(text)), default="")
    names: dict[str, str] = {}
    for key, name in bare.items():
        new = name.removeprefix(prefix)
        names[key if new in names else new] = key
    return names


def where_other(payloads: StoredPayloads, key: str, other: str) -> str:
    """Where two tensors hold other values, in words; empty if they are the same. Equal checksums tell that at once."""
    entries = [payloads.index.tensors[name] for name in (key, other)]
    shape, is_one_dtype = entries[0].shape, entries[0].dtype == entries[1].dtype
    if shape != entries[1].shape:
        return "it has another shape"
    sums = {payloads.locate(entry, chunk).crc32 for entry in entries for chunk in entry.chunks}
    if is_one_dtype and len(sums) == len(entries[0].chunks) == len(entries[1].chunks) == 1 and None not in sums:
        return ""
    for slab in slabs(Box((0,) * len(shape), shape), 8, _COMPARED_BYTES):
        found = [read_box(payloads, entry, *slab) for entry in entries]
        if is_one_dtype:
            same = found[0] == found[1]
        else:
            mine, theirs = (as_numbers(part, entry.dtype) for part, entry in zip(found, entries, strict=True))
            same = mine is not None and theirs is not None and bool((mine == theirs).all())
        if not same:
            return f"first in the slice at {list(slab.offsets)} of sizes {list(slab.sizes)}"
    return ""


def refuse_another(payloads: StoredPayloads, key: str, embedding: str, said: str) -> None:
    """Raise `OptionError` where an output layer that is to be tied to the embedding (as `said`) holds other values."""
    if differs := where_other(payloads, key, embedding):
        raise OptionError(
            f"{payloads.index.path}: {key} is not {embedding} ({differs}), though {said}: which of the two the model "
            "computes with is not known. Say that they are not tied, or remove the one that is not meant. Nothing was "
            "written"
        )


# --- the optimizer's state

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "step")
# Groups of torch's optimizers; and of Megatron-FSDP, which notes the settings of a group for each of its parameters.
_GROUP = re.compile(r"(?:^|\.)(?:param_groups|param_to_group_meta)\.")
_MOST_OBJECTS = 100_000


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What an optimizer stores besides its moments: the steps of its parameters, settings by group."""

    steps: tuple[float, ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What is carried of an optimizer; `states`: by Megatron's name the stored keys, by the model's names. Without
    states, `left_out` says why. `step` is how often the parameters were updated.
    """

    states: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Training:
    """How far a training was, as far as stored; `schedule`: `opt_param_scheduler`; `operations`: of floats."""

    iteration: int = 0
    schedule: Mapping[str, Any] = field(default_factory=dict)
    operations: float = 0


def stored_settings(payloads: StoredPayloads, directory: Path) -> OptimizerSettings:
    """Settings in a DCP checkpoint: tensors `...step`, objects `...param_groups.GROUP.betas` and the like."""
    keys = [key for key in payloads.index.tensors if is_foreign_optimizer_key(key)]
    if not keys:
        return OptimizerSettings()
    steps = []
    for key in keys:
        entry = payloads.index.tensors[key]
        if key.endswith(".step") and entry.shape in ((), (1,)):
            numbers = as_numbers(read_box(payloads, entry, (0,) * len(entry.shape), entry.shape), entry.dtype)
            steps += [] if numbers is None else [float(numbers[0])]
    index = read_index(directory)
    groups: dict[str, dict[str, Any]] = {}
    for key in list(index.objects)[:_MOST_OBJECTS]:
        group, _, name = key.rpartition(".")
        if name in _SETTINGS and _GROUP.search(group) and is_foreign_optimizer_key(key):
            groups.setdefault(group, {})[name] = read_plain_object(index, index.objects[key])
    if not steps:
        noted = [group.get("step") for group in groups.values()]
        steps = [float(step) for step in noted if isinstance(step, (int, float)) and not isinstance(step, bool)]
    return OptimizerSettings(tuple(steps), tuple(groups.values()))


def others_than_settings(keys: Iterable[str]) -> Iterator[str]:
    """Keys of objects without the settings that are taken; of the others one for each name, with how many there are."""
    counts: Counter[tuple[str, str]] = Counter()
    for key in keys:
        group, _, name = key.rpartition(".")
        found = _GROUP.search(group)
        if found is None or not is_foreign_optimizer_key(key):
            yield key
        elif name not in _SETTINGS:
            counts[group[: found.end()], name] += 1
    yield from (f"{groups}*.{name} of {count} parameters or groups" for (groups, name), count in counts.items())


def plan_optimizer(
    index: CheckpointIndex, names: Mapping[str, str], settings: OptimizerSettings, apart: Mapping[str, str]
) -> OptimizerPlan:
    """Which states are carried; `names` are stored keys of the parameters, by the model's names. `apart`: Megatron's
    keys of experts' parameters if experts are on several ranks, where those have an optimizer of their own.
    """
    keys = [key for key in index.tensors if is_foreign_optimizer_key(key)]
    if not keys:
        return OptimizerPlan()
    states: dict[str, dict[str, str]] = {moment: {} for moment in _MOMENTS}
    others = []
    for key in keys:
        parameter, _, leaf = without_wrappers(key).rpartition(".")
        name = _suffix(parameter, names)
        if leaf in states and name is not None and name not in states[leaf]:
            states[leaf][name] = key
        elif leaf != "step":
            others.append(key)
    reason = _why_not(index, names, states)
    groups: list[dict[str, Any]] = []
    if not reason:
        try:
            groups = _groups(settings)
        except CheckpointError as error:
            reason = str(error)
    if reason:
        return OptimizerPlan(left_out=(f"{len(keys)} tensors of the optimizer's state ({reason})",))
    kinds = {not key.endswith(".bias") for key in apart.values()}  # with weight decay, or without
    of_experts = [{**group, "is_expert_parallel": True} for group in groups if bool(group["wd_mult"]) in kinds]
    optimizers = [
        {"optimizer": {"param_groups": own}, "param_state_sharding_type": "fully_reshardable"}
        for own in (groups, of_experts)
        if own
    ]
    common = {
        "optimizer": dict(enumerate(optimizers)) if apart else optimizers[0],
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    left_out = tuple(f"{key} (Megatron's optimizer keeps no such state)" for key in others)
    return OptimizerPlan({"param": dict(names), **states}, common, groups[0]["step"], left_out)


# What a job asks a stored schedule for; but for the last one, it can be told to take its own.
_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")


def launch_state(
    optimizer: OptimizerPlan, training: Training, arguments: Mapping[str, Any], batch: int | None
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """What a job needs besides tensors to resume: common state, arguments, notes. `batch`: of all its ranks."""
    iteration, notes = training.iteration, tuple[str, ...]()
    if optimizer.states and not iteration and batch is not None:
        iteration = optimizer.step
    samples = arguments.get("consumed_train_samples")
    if not isinstance(samples, int) or (not samples and batch is not None):
        known = batch if batch is not None else arguments.get("global_batch_size")
        samples = iteration * known if isinstance(known, int) else 0
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": training.operations,
        **optimizer.common,
    }
    if optimizer.states:
        schedule = {name: value for name, value in training.schedule.items() if value is not None}
        if not set(_SCHEDULE) <= schedule.keys():
            schedule = {**dict.fromkeys(_SCHEDULE), **schedule, "num_steps": schedule.get("num_steps", samples)}
            told = f"a job resumes at iteration {iteration}, after {samples} samples, by its own one"
            notes = (f"no schedule of the learning rate is stored: {told} (--override-opt_param-scheduler)",)
        common["opt_param_scheduler"] = schedule
    # Other frameworks keep no random states as Megatron does; so said, a job does not look for them.
    more = {"consumed_train_samples": samples, "no_save_rng": True}
    more |= {} if "consumed_valid_samples" in arguments else {"consumed_valid_samples": 0}
    return common, more, notes


def _suffix(key: str, names: Collection[str]) -> str | None:
    """The longest end of a key, from a dot on, that is a name."""
    at = 0
    while key[at:] not in names:
        at = key.find(".", at) + 1
        if not at:
            return None
    return key[at:]


def _why_not(index: CheckpointIndex, names: Mapping[str, str], states: Mapping[str, Mapping[str, str]]) -> str:
    """What keeps the moments from being carried; empty if nothing does."""
    for moment, found in states.items():
        missing = sorted(names.keys() - found.keys())
        if missing:
            return f"{len(missing)} of {len(names)} parameters have no {moment}, the first {missing[0]}"
        for name, key in found.items():
            entry, parameter = index.tensors[key], index.tensors[names[name]]
            if entry.shape != parameter.shape:
                return f"{key} has the shape {list(entry.shape)}, its parameter {list(parameter.shape)}"
    for key in (*names.values(), *(key for found in states.values() for key in found.values())):
        if index.tensors[key].dtype != "float32":
            return f"{key} is stored as {index.tensors[key].dtype}; Megatron's optimizer keeps float32"
    return ""


def _groups(settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Megatron's groups of parameters: with weight decay, and without; raises `CorruptCheckpointError`."""
    steps = set(settings.steps)
    if len(steps) != 1 or not (step := steps.pop()).is_integer():
        shown = ", ".join(f"{step:g}" for step in sorted(settings.steps)[:3]) or "none"
        raise CorruptCheckpointError(f"expected one step for all parameters, got {shown}")
    betas = _same([_numbers(group.get("betas"), 2) for group in settings.groups], "betas")
    (epsilon,) = _same([_numbers([group.get("eps")], 1) for group in settings.groups], "eps")
    rates = [_numbers([group.get("lr")], 1)[0] for group in settings.groups]
    decays = [_numbers([group.get("weight_decay", 0.0)], 1)[0] for group in settings.groups]
    return [
        {
            "lr": max(rates),
            "betas": tuple(betas),
            "eps": epsilon,
            "weight_decay": max(decays) * with_decay,
            "wd_mult": with_decay,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "bias_correction": True,
            "step": int(step),
        }
        for with_decay in (1.0, 0.0)
    ]


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    plain = isinstance(values, (list, tuple)) and len(values) == count
    if not plain or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise CorruptCheckpointError("the groups of parameters do not say lr, betas and eps in numbers")
    return tuple(map(float, values))


def _same(found: Sequence[Iterable[float]], name: str) -> list[float]:
    different = {tuple(values) for values in found}
    if len(different) != 1:
        raise CorruptCheckpointError(f"expected the same {name} for all groups of parameters, got {len(different)}")
    return list(different.pop())


# --- the plan of an import

_UNDIVIDED = TargetLayout(1, 1)


def layout_of(options: ImportOptions, source: TargetLayout = _UNDIVIDED) -> TargetLayout:
    """The sizes together, as the source has them where nothing was said; raises `OptionError` where they cannot be."""
    etp = options.etp if options.etp is not None or options.tp is not None else source.etp
    tp, pp, ep = (
        own if size is None else size
        for size, own in ((options.tp, source.tp), (options.pp, source.pp), (options.ep, source.ep))
    )
    return TargetLayout(tp, pp, ep, etp)


def import_conversion(
    payloads: StoredPayloads,
    options: ImportOptions,
    layout: TargetLayout,
    common: Callable[[set[str]], bytes],
    report: ConversionReport,
    *,
    keys: Callable[[], Iterable[KeyPlan]],
    tensors: Mapping[str, TensorView] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Conversion:
    """Plan the target of an import. `common` makes `common.pt` for the target's dtypes; no `tensors`: the source's."""
    files = SourceFiles(payloads.index)
    if tensors is not None:
        # Many of the objects are one and the same.
        contents = {id(value): encode_state(value) for value in (objects or {}).values()}
        payloads = ViewPayloads(payloads, tensors, {key: contents[id(value)] for key, value in (objects or {}).items()})
    payloads = in_dtype(payloads, options.dtype)
    index = payloads.index
    arguments = report.arguments
    partitioner = Partitioner(index, rules=options.rules, arguments=arguments, chunks_tell=tensors is None)
    is_asked = any(size is not None for size in (options.tp, options.pp, options.ep, options.etp))
    plan = make_plan(
        index,
        layout,
        partitioner,
        workers=options.workers,
        arguments=arguments,
        allow_whole=options.allow_whole or not is_asked,
    )

    def carry(target: Target) -> None:
        target.put(CONFIG_FILE, encode_config())
        target.put(COMMON_FILE, common({entry.dtype for entry in index.tensors.values()}))

    return Conversion(
        payloads=payloads,
        source=files,
        plan=plan.target,
        keys=keys,
        report=replace(report, target_layout=str(plan), objects=len(objects or ())),
        carry=carry,
        carried=(CONFIG_FILE, COMMON_FILE),
    )
