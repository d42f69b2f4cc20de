"""What there is to import: tensors in files of others, found, checked and described as the index of a checkpoint is.

Safetensors, torch files, a DCP checkpoint. Elements are read where they are needed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import METADATA_FILE, read_index, read_small_file
from mcore_ckpt.format.tensor_pickle import DTYPES
from mcore_ckpt.models._foreign import OptimizerSettings, others_than_settings, stored_settings
from mcore_ckpt.models._legacy_files import read_torch_file
from mcore_ckpt.reshard.options import RenameRule, rename_keys
from mcore_ckpt.reshard.view import FilePayloads, FileRange
from mcore_ckpt.reshard.weight_files import METADATA_KEY
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

_MAX_NUMBER = 2**63
_MAX_AXES = 64
# What the reference implementation allows.
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {entry.safetensors: name for name, entry in DTYPES.items() if entry.safetensors}
# Where in a larger tensor each of a file's begins, as DCP notes it in the metadata; and that one is not at its start.
_SHARDING = "DCP_SHARDING_INFO"
_INSIDE = re.compile(r'"saved_offsets":[^]]*[1-9]')


def read_safetensors(directory: Path, name: str) -> dict[str, FileRange]:
    """The tensors of one file, by name; each number is checked against the file. `CorruptCheckpointError` unless each
    name is there once, and the tensors follow one another without holes or overlaps; `OptionError` for slices of some.
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
    metadata = header.pop(METADATA_KEY, None)
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
# What training, adapters, other libraries and other systems leave next to weights, as far as names tell.
_BESIDE = ("._", "adapter_", "consolidated", "optimizer", "random_states", "rng_state", "scheduler", "training_args")
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
    `is_model`: a configuration may name the file. Raises `CheckpointNotFoundError` and `OptionError` where there is
    nothing, or nothing is left of it; `CorruptCheckpointError` for a part of it.
    """
    if storage_at(source).exists(METADATA_FILE):
        index = read_index(source)
        names = _new_names(index.tensors, rename, source)
        check_tiled(index, names)
        return "dcp", StoredPayloads(_renamed(index, names), stored=index), [], list(index.objects)
    directory = source if storage_at(source).is_directory() else source.parent
    storage = storage_at(directory, follow_links=True)
    files, mapped, left_out = _files(source, storage, is_model)
    kind: ImportFormat = "safetensors" if files[0].endswith(".safetensors") else "torch"
    tensors: dict[str, FileRange] = {}
    others: list[str] = []
    for file in files:
        with storage.open_reader(file) as reader:  # raises for what is no regular file: a pipe would never end
            refuse_text(directory / file, reader.read(0, min(100, reader.size_bytes)))
        found = read_safetensors(directory, file) if kind == "safetensors" else None
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
    _check_mapped(mapped, {key: at.file for key, at in tensors.items()}, source)
    names = _new_names(tensors, rename, source)
    return kind, FilePayloads(directory, {new: tensors[old] for old, new in names.items()}, storage), left_out, others


def _files(source: Path, storage: Storage, is_model: bool) -> tuple[list[str], dict[str, str], list[str]]:
    """The files to read: one, or those that `transformers` takes, or all of one kind; the file of each key, if an index
    says; and files of weights that are left out. `storage` is that of the directory.
    """
    if storage.location != storage_at(source).location:
        if not storage.exists(source.name):
            raise CheckpointNotFoundError(f"{source}: no such file or directory")
        return [source.name], {}, []
    names = storage.list()
    named = read_config(source).get(TRANSFORMERS_FILE) if is_model and CONFIG in names else None
    chosen = [name for name in (named, *_MODEL_FILES) if name in names][:1]
    for ending in (".safetensors", *_TORCH_ENDINGS):
        of_kind = [name for name in names if name.endswith(ending)]
        chosen = chosen or [name for name in of_kind if not name.startswith(_BESIDE)] or of_kind
    if not chosen:
        raise CheckpointNotFoundError(
            f"{source}: nothing to import: expected *.safetensors, *.bin, *.pt or *.pth files, or a DCP checkpoint"
        )
    first, mapped = chosen[0], dict[str, str]()
    if first.endswith(_INDEX):
        mapped = _weight_map(source / first)
        chosen = sorted(set(mapped.values()))
    numbered = [found for name in chosen if (found := _NUMBERED.search(name))]
    if numbered and not mapped and len({found[1] for found in numbered}) < int(numbered[0][2]):
        raise CorruptCheckpointError(f"{source}: of {numbered[0][2]} files not all are there; fetch the others, too")
    left = [name for name in names if name.endswith(WEIGHTS) and name not in {first, *chosen}]
    taken = first if mapped or len(chosen) == 1 else f"{len(chosen)} others"
    return chosen, mapped, [f"{some(left)} (the model is in {taken})"] if left else []


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
    return CheckpointIndex(index.path, {new: index.tensors[old]._replace(fqn=new) for old, new in names.items()}, {})
