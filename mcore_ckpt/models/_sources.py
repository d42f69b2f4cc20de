"""What there is to import: tensors in files of others, found, checked and described as the index of a checkpoint is.

Safetensors, torch files, a DCP checkpoint. Elements are read where they are needed.
"""

from __future__ import annotations

import json
import math
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


ImportFormat = Literal["safetensors", "torch", "dcp"]

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
        index = read_index(source)
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
    return CheckpointIndex(index.path, {new: index.tensors[old]._replace(fqn=new) for old, new in names.items()}, {})
