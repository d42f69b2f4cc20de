"""Safetensors, torch files and plain DCP checkpoints as a `torch_dist` checkpoint of any parallel layout.

The other way of `export`: the same keys and tensors come back. What Megatron-Core wants besides the data is added:
`metadata.json`, and a common state, empty unless one is given.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, refuse_target
from mcore_ckpt.convert._safetensors_files import RawPayloads, RawTensor, parse_json, raw_index, read_safetensors
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan
from mcore_ckpt.convert.rules import (
    PartitionRule,
    RenameRule,
    parse_partition_rules,
    parse_rename_rules,
    rename_keys,
    rules_in,
)
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    METADATA_FILE,
    encode_config,
    read_index,
    read_small_file,
)
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.verify import check_file

__all__ = ["ImportReport", "import_checkpoint"]

# Of an index file, some hundred bytes for each key.
_MAX_INDEX_BYTES = 256 * 1024**2
_TORCH_ENDINGS = (".bin", ".pt", ".pth")

Format = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was made.

    Attributes:
        left_out: how many objects of a DCP checkpoint, or entries of a torch file, are no tensors.
        left_out_keys: their keys.
    """

    source: str
    target: str
    format: Format
    tensors: int
    payload_bytes: int
    left_out: int
    left_out_keys: tuple[str, ...] = ()


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    rules: str | os.PathLike[str] | Iterable[PartitionRule] | None = None,
    dtype: str | None = None,
    common: str | os.PathLike[str] | None = None,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    progress: bool | None = False,
) -> ImportReport:
    """Make a `torch_dist` checkpoint of tensors in the format of others.

    Args:
        source: a directory of safetensors or torch files, one such file, or a DCP checkpoint.
        target: directory to make; it must not exist, or be empty.
        tp: tensor parallel size of the target.
        pp: pipeline parallel size.
        ep: expert parallel size.
        rename: a file of rename rules: lines of a regular expression and what to put for it, or `-` to drop the key.
        rules: a file of partition rules, as for a reshard; they see the new keys.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        common: a `common.pt` of another checkpoint to take along; an empty one without it.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError: it contradicts itself.
        UnsafePickleError: a torch file holds more than tensors and plain values.
        CheckpointExistsError, OptionError, SaveError: as for `reshard_checkpoint`.
    """
    layout, dtype = TargetLayout(tp, pp, ep), floating_dtype(dtype)
    partition = rules_in(rules, parse_partition_rules)
    src, dst = checkpoint_directory(source), local_path(target)
    refuse_target(src if src.is_dir() else src.parent / "-", dst)
    kind, payloads, left_out = _open(src, rules_in(rename, parse_rename_rules))
    with payloads:
        plan = make_plan(
            payloads.index,
            layout,
            Partitioner(payloads.index, rules=partition),
            dtype=dtype,
            workers=workers,
        )

        def carry(partial: Path) -> None:
            storage = LocalStorage(partial)
            storage.publish(CONFIG_FILE, encode_config())
            storage.publish(COMMON_FILE, _common_state(common))

        build = BuildOptions(workers=workers, verify=verify, memory_bytes=memory_bytes)
        build_target(payloads, plan, dst, build, carry=carry, progress=progress)
    total = sum(move.payload_bytes for move in plan.moves)
    return ImportReport(str(src), str(dst), kind, len(plan.moves), total, len(left_out), tuple(left_out))


def _common_state(path: str | os.PathLike[str] | None) -> bytes:
    if path is not None:
        storage = LocalStorage(Path(path).parent, follow_links=True)
        check_file(storage, Path(path).name)
        return storage.read(Path(path).name)
    import torch

    content = io.BytesIO()
    torch.save({}, content)
    return content.getvalue()


def _open(source: Path, rename: Sequence[RenameRule]) -> tuple[Format, StoredPayloads, list[str]]:
    """What is there, its tensors under their new keys, and the keys of what is no tensor."""
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
