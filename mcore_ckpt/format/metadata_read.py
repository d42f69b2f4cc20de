"""The files that describe a checkpoint: `.metadata` (its index), `metadata.json`, and the common state's file.

`read_index` turns the `.metadata` of any writer (Megatron-Core 0.12 and later, torch.distributed.checkpoint, this
package) into one plain structure that the reader, the command and verify share, without importing torch. What this
package wrote is read from the columns of its manifest, all else from the pickle (`index_pickle.py`).

`metadata_write` makes such a file; `dcp/reader.py` turns the index into DCP's own classes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import time
from pathlib import Path

from mcore_ckpt.core.console import counted
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import IF_DAMAGED, CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import CheckpointIndex, read_columns
from mcore_ckpt.format.integrity import (
    FOOTER_BYTES,
    NO_FINGERPRINT,
    FileFooter,
    Manifest,
    ManifestFile,
    check_footer,
    decode_footer,
    shown_id,
    split_metadata,
)
from mcore_ckpt.format.tensor_pickle import DTYPE_NAMES
from mcore_ckpt.storage.base import FileVersion, RangeReader, Storage
from mcore_ckpt.storage.resolve import storage_at

METADATA_FILE = ".metadata"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
# In a directory of NeMo 2: the checkpoint, and the description of the model.
NEMO_WEIGHTS, NEMO_CONTEXT = "weights", "context"
HF_INDEX = "model.safetensors.index.json"  # in a model's directory for Hugging Face, its last file
INCOMPLETE_MARKER = ".mcore_ckpt_incomplete"
DRAIN_FILE = ".mcore_ckpt_drain"
# In a run's directory: where its models are exported to.
EXPORTS_FILE = ".mcore_ckpt_exports"
# Megatron-Core's, from 0.19 on: SHA-256 of all files.
INTEGRITY_FILE = "integrity.json"

# The index of 1,024 ranks with 1,000 items each, plans included, is 0.43 GB; ten times that is no index any more.
MAX_METADATA_BYTES = 4 * 1024**3
MAX_CONFIG_BYTES = 1024 * 1024
# What is not sharded: arguments, schedules, at most a few tensors. Every rank reads all of it.
MAX_COMMON_BYTES = 4 * 1024**3
# For a tenth of a second GlusterFS with two bricks has given a new `.metadata` the length of the one before it.
_LOOKS, _PAUSE_S = 8, 0.1
_METADATA_OF_RANK = re.compile(r"__(\d+)" + re.escape(METADATA_FILE))


def index_name(rank: int | None) -> str:
    """Name of the index of a checkpoint that one rank has saved alone; for None, of one that all ranks have saved."""
    return METADATA_FILE if rank is None else f"__{rank}{METADATA_FILE}"


def read_index(path: str | Path, *, strict: bool = True, rank: int | None = None) -> CheckpointIndex:
    """Read the index of the checkpoint in directory `path`, or that of a `rank` saved with `use_collectives=False`.

    `strict`: raise for a chunk or object that has no place in any file; otherwise list it in `problems`. Raises
    `CheckpointNotFoundError`, `CorruptCheckpointError`, or `UnsafePickleError` for a class that no index holds.
    """
    return read_index_and_version(path, strict=strict, rank=rank)[0]


def read_index_and_version(
    path: str | Path, *, strict: bool = True, rank: int | None = None
) -> tuple[CheckpointIndex, FileVersion | None]:
    """As `read_index`, and the version of its file."""
    directory, name, looks = checkpoint_path(path), index_name(rank), itertools.count(1)
    while True:
        with _open_small_file(directory, name) as opened:
            try:
                data = opened.read_all(MAX_METADATA_BYTES)
                return parse_index(data, str(directory), strict=strict, name=name), opened.version
            except CorruptCheckpointError:
                if not opened.may_lag or next(looks) == _LOOKS:
                    raise
        time.sleep(_PAUSE_S)


def parse_index(data: bytes, where: str, *, strict: bool = True, name: str = METADATA_FILE) -> CheckpointIndex:
    """The index in `data`, the content of the file `name` of the checkpoint `where`. Raises as `read_index`."""
    file = f"{where}/{name}"
    with collector_paused():
        pickled, manifest = split_metadata(data, file)  # compares the checksum, before anything is unpickled
        if manifest is None or manifest.columns is None:
            from mcore_ckpt.format.index_pickle import index_of_pickle  # of others' checkpoints, mostly

            index = index_of_pickle(pickled, where, file, strict, manifest)
        else:
            index = read_columns(manifest, where, file, DTYPE_NAMES)
        fingerprints = None if manifest is None else manifest.fingerprints
        if fingerprints is None:
            return index
        if len(fingerprints) != len(index.tensors):
            raise CorruptCheckpointError(
                f"{file}: {len(fingerprints)} fingerprints of {len(index.tensors)} tensors; {IF_DAMAGED}"
            )
        known = {key: crc for key, crc in zip(index.tensors, fingerprints, strict=True) if crc != NO_FINGERPRINT}
        return index.with_fingerprints(known)


def checked_footer(index: CheckpointIndex, name: str, reader: RangeReader) -> FileFooter | None:
    """Compare the end of a data file with the manifest; returns the footer, if it has one. Raises as `check_footer`."""
    size_bytes = reader.size_bytes
    end = reader.read(size_bytes - FOOTER_BYTES, FOOTER_BYTES) if size_bytes >= FOOTER_BYTES else b""
    footer = decode_footer(end, reader.name)
    check_footer(footer, size_bytes, None if index.manifest is None else index.manifest.files.get(name), reader.name)
    return footer


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`metadata.json`, in Megatron's form: which strategy wrote the sharded and the common part."""

    sharded_backend: str = "torch_dist"
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def read_config(path: str | Path) -> CheckpointConfig | None:
    """`metadata.json` of a checkpoint; None where there is none. Raises `CorruptCheckpointError`."""
    directory = checkpoint_path(path)
    try:
        text = read_small_file(directory, CONFIG_FILE)
    except CheckpointNotFoundError:
        return None
    try:
        fields = json.loads(text)
        config = CheckpointConfig(
            fields.pop("sharded_backend"),
            fields.pop("sharded_backend_version"),
            fields.pop("common_backend", "torch"),
            fields.pop("common_backend_version", 1),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{directory / CONFIG_FILE}: expected a JSON object with sharded_backend and sharded_backend_version "
            f"({type(error).__name__}: {error!s:.200}). Restore it from another checkpoint of the same run."
        ) from error
    values = [getattr(config, field.name) for field in dataclasses.fields(config)]
    if list(map(type, values)) != [str, int, str, int]:
        raise CorruptCheckpointError(
            f"{directory / CONFIG_FILE}: expected sharded_backend and common_backend to be strings and their versions "
            f"to be ints, got {(*values,)!r:.200}. Restore it from another checkpoint of the same run."
        )
    return config


def encode_config() -> bytes:
    """The content of `metadata.json`."""
    return json.dumps(dataclasses.asdict(CheckpointConfig())).encode()


def read_small_file(directory: Path, name: str, max_bytes: int | None = None, *, follow_links: bool = False) -> bytes:
    """All of a file that has no reason to be large. Raises `LoadError`, of the class that says why."""
    default_bytes = MAX_CONFIG_BYTES if name == CONFIG_FILE else MAX_METADATA_BYTES
    with _open_small_file(directory, name, follow_links=follow_links) as reader:
        return reader.read_all(default_bytes if max_bytes is None else max_bytes)


def _open_small_file(directory: Path, name: str, *, follow_links: bool = False) -> RangeReader:
    try:
        return storage_at(directory, follow_links=follow_links).open_reader(name, direct="off")
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(_not_found(directory, name)) from error


def _not_found(directory: Path, name: str) -> str:
    """What is wrong with `directory`, and which directory may have been meant."""
    storage = storage_at(directory)
    try:
        names, folders = storage.sizes(), storage.folders()
    except LoadError as error:
        return f"{error}; check the path of the checkpoint"
    if any(other.startswith(INCOMPLETE_MARKER) for other in names):
        return f"{directory}: holds no {name}: a save into it was interrupted. Load an earlier checkpoint."
    if storage.exists(f"{NEMO_WEIGHTS}/{METADATA_FILE}"):
        return f"{directory}: holds no {name} itself; NeMo keeps the checkpoint in {directory / NEMO_WEIGHTS}: use that"
    inner = [n for n in sorted(folders) if storage.exists(f"{n}/{METADATA_FILE}")]
    if inner:
        return (
            f"{directory}: holds no {name} itself, but {counted(len(inner), 'checkpoint')}; give one of them, for "
            f"example {directory / inner[-1]}"
        )
    ranks = sorted(int(found[1]) for n in names if (found := _METADATA_OF_RANK.fullmatch(n)))
    if ranks:
        return (
            f"{directory}: holds no {name}, but the checkpoints of {counted(len(ranks), 'single rank')} ({ranks[0]} to "
            f"{ranks[-1]}): it was saved by `dcp.save(use_collectives=False)`. Each rank can load only what it saved: "
            f"use `dcp.load` on {counted(len(ranks), 'rank')}, under the layout of the save"
        )
    return (
        f"{directory}: holds no {name}, so there is no finished checkpoint in it. The save did not finish, "
        "or this is not a checkpoint in the torch_dist or torch.distributed.checkpoint format."
    )


def read_common_file(storage: Storage, name: str, manifest: Manifest | None) -> bytes:
    """All bytes of the common state's file, compared with the manifest. Raises `LoadError`."""
    expected = None if manifest is None else manifest.files.get(COMMON_FILE)
    try:
        opened = storage.open_reader(name, direct="off")
    except CheckpointNotFoundError:
        if name == COMMON_FILE or expected is None:
            raise
        return read_common_file(storage, COMMON_FILE, manifest)  # it has waited under that name, and just got this one
    with opened as reader:
        if expected is not None and reader.size_bytes != expected.size_bytes:
            raise _other_file(storage, name, expected, f"{reader.size_bytes} bytes")
        content = reader.read_all(MAX_COMMON_BYTES if expected is None else None)
    if expected is not None and (got := crc32(content)) != expected.table_crc32:
        raise _other_file(storage, name, expected, f"CRC-32 {got:#010x}")
    return content


def _other_file(storage: Storage, name: str, expected: ManifestFile, got: str) -> CorruptCheckpointError:
    directory = storage.location
    return CorruptCheckpointError(
        f"{directory}/{name}: expected the common state of save {shown_id(expected.save_id)} ({expected.size_bytes} "
        f"bytes, CRC-32 {expected.table_crc32:#010x}), got {got}: it is of another save, damaged, or was changed "
        "since. Restore it from another copy, or load another checkpoint. If it was changed on purpose: `mcore-ckpt "
        f"repair --accept-common-state {shlex.quote(directory)}` takes it as it is"
    )
