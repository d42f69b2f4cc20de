"""What there is to import: tensors in files of others, found, checked and described as the index of a checkpoint is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcore_ckpt.convert._deepspeed import is_universal, open_universal
from mcore_ckpt.convert._foreign import OptimizerSettings, stored_settings
from mcore_ckpt.convert._safetensors_files import RawPayloads, RawTensor, parse_json, raw_index, read_safetensors
from mcore_ckpt.convert.rules import RenameRule, rename_keys
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.metadata_read import METADATA_FILE, read_index, read_small_file
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

__all__ = ["ImportFormat", "Opened", "open_model", "open_source"]

ImportFormat = Literal["safetensors", "torch", "dcp", "ucp"]

# Of an index file, some hundred bytes for each key.
_MAX_INDEX_BYTES = 256 * 1024**2
_TORCH_ENDINGS = (".bin", ".pt", ".pth")


class Opened(NamedTuple):
    """A source of a model, and what is known of it before anybody asks what model it is.

    Attributes:
        directory: where it is.
        payloads: its tensors, open.
        left_out: what is no tensor of it, each with the reason.
        settings: of an optimizer whose state it has.
    """

    directory: Path
    kind: ImportFormat
    payloads: StoredPayloads
    left_out: list[str]
    settings: OptimizerSettings


def open_model(directory: Path, rename: Sequence[RenameRule]) -> Opened:
    """A model of others, in whichever format it is; raises as `open_source` and `open_universal` do."""
    if is_universal(directory):
        payloads, left_out, settings = open_universal(directory, rename)
        return Opened(directory, "ucp", payloads, left_out, settings)
    kind, stored, others = open_source(directory, rename)
    settings = stored_settings(stored, directory) if kind == "dcp" else OptimizerSettings()
    return Opened(directory, kind, stored, [f"{key} (no tensor)" for key in others], settings)


def open_source(source: Path, rename: Sequence[RenameRule]) -> tuple[ImportFormat, StoredPayloads, list[str]]:
    """What is there, its tensors under their new keys, and the keys of what is no tensor.

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError: it contradicts itself.
        UnsafePickleError: a torch file holds more than tensors and plain values.
        OptionError: nothing is left of it.
    """
    if source.is_dir() and (source / METADATA_FILE).exists():
        index = read_index(source)
        names = _new_names(index.tensors, rename, source)
        check_tiled(index, names)
        return "dcp", StoredPayloads(_renamed(index, names), stored=index), list(index.objects)
    directory = source if source.is_dir() else source.parent
    files, mapped = _files(source)
    storage = LocalStorage(directory, follow_links=True)
    for file in files:
        storage.size(file)  # raises for what is no regular file: a pipe would never end
    if files[0].endswith(".safetensors"):
        raw: dict[str, RawTensor] = {}
        for file in files:
            _merge(raw, read_safetensors(directory, file), directory / file)
        _check_mapped(mapped, {key: tensor.file for key, tensor in raw.items()}, source)
        names = _new_names(raw, rename, source)
        found = raw_index(directory, {new: raw[old] for old, new in names.items()})
        return "safetensors", RawPayloads(found, storage), []
    from mcore_ckpt.convert._torch_files import TorchPayloads, read_torch_file, torch_index

    tensors: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    left_out: list[str] = []
    for file in files:
        loaded, others = read_torch_file(directory / file)
        left_out += others
        _merge(tensors, loaded, directory / file)
        entries.update(torch_index(directory, file, loaded).tensors)
    _check_mapped(mapped, {key: entry.chunks[0].item.file for key, entry in entries.items()}, source)
    names = _new_names(tensors, rename, source)
    index = _renamed(CheckpointIndex(str(directory), entries, {}), names)
    return "torch", TorchPayloads(index, {new: tensors[old] for old, new in names.items()}), left_out


def _files(source: Path) -> tuple[list[str], dict[str, str]]:
    """The files to read: one, or those of an index, or all of one kind; and the file of each key, if an index says."""
    if source.is_file():
        return [source.name], {}
    if not source.is_dir():
        raise CheckpointNotFoundError(f"{source}: no such file or directory")
    for ending in (".safetensors", *_TORCH_ENDINGS):
        indexes = sorted(source.glob(f"*{ending}.index.json"))
        if len(indexes) == 1:
            mapped = _weight_map(indexes[0])
            return sorted(set(mapped.values())), mapped
        files = sorted(path.name for path in source.glob(f"*{ending}"))
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
            raise CorruptCheckpointError(f"{path}: {key}: expected the name of a file beside it, got {file!r:.200}")
    return mapped


def _check_mapped(mapped: Mapping[str, str], found: Mapping[str, str], source: Path) -> None:
    """Hold what the index says against what the files hold; raises `CorruptCheckpointError`."""
    wrong = [key for key, file in mapped.items() if found.get(key) != file]
    if wrong:
        where = found.get(wrong[0])
        raise CorruptCheckpointError(
            f"{source}: {len(wrong)} keys are not where its index says: {wrong[0]} is not in {mapped[wrong[0]]}, but "
            f"{'in no file' if where is None else f'in {where}'}; fetch the files and their index again"
        )


def _merge(tensors: dict[str, Any], more: dict[str, Any], path: Path) -> None:
    twice = tensors.keys() & more.keys()
    if twice:
        raise CorruptCheckpointError(f"{path}: {min(twice)} is in another of the files too")
    tensors.update(more)


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
