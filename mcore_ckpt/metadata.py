"""The files that describe a checkpoint: `.metadata`, the index of what is stored, and `metadata.json`.

`read_index` turns `.metadata`, whoever wrote it (Megatron-Core 0.12 and later, torch.distributed.checkpoint, this
package), into one plain structure that the reader, the command and verify share, without importing torch.
`metadata_write` makes it, `dcp_metadata` turns it into DCP's own classes.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint_index import (
    CheckpointIndex,
    ObjectEntry,
    ObjectShard,
    StoredChunk,
    StoredItem,
    TensorEntry,
    object_key,
    parse_object_key,
)
from mcore_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.index_parsing import file_name_problem, parse_pickled_index

__all__ = [
    "COMMON_FILE",
    "CONFIG_FILE",
    "INCOMPLETE_MARKER",
    "MAX_METADATA_BYTES",
    "METADATA_FILE",
    "TRACKER_FILE",
    "CheckpointConfig",
    "CheckpointIndex",
    "ObjectEntry",
    "ObjectShard",
    "StoredChunk",
    "StoredItem",
    "TensorEntry",
    "encode_config",
    "file_name_problem",
    "object_key",
    "parse_index",
    "parse_object_key",
    "read_config",
    "read_index",
]

METADATA_FILE = ".metadata"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
INCOMPLETE_MARKER = ".mcore_ckpt_incomplete"

# The index of 1,024 ranks with 1,000 items each, plans included, is 0.43 GB; ten times that is no index any more.
MAX_METADATA_BYTES = 4 * 1024**3
_MAX_CONFIG_BYTES = 1024 * 1024


def read_index(path: str | Path, *, strict: bool = True) -> CheckpointIndex:
    """Read the index of the checkpoint in directory `path`.

    Args:
        path: the checkpoint's directory (`.../iter_0000100`).
        strict: raise for a chunk or object that has no place in any file; otherwise list it in `problems`.

    Raises:
        CheckpointNotFoundError: there is no such directory, or it holds no `.metadata`.
        CorruptCheckpointError: `.metadata` is damaged or contradicts itself.
        UnsafePickleError: `.metadata` names a class that no index holds.
    """
    directory = Path(path)
    data = _read_small_file(directory, METADATA_FILE, MAX_METADATA_BYTES)
    return parse_index(data, str(directory), strict=strict)


def parse_index(data: bytes, where: str, *, strict: bool = True) -> CheckpointIndex:
    """The index in `data`, the content of a `.metadata` file of the checkpoint `where`. Raises as `read_index`."""
    return parse_pickled_index(data, where, f"{where}/{METADATA_FILE}", strict=strict)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`metadata.json`: which strategy wrote the sharded and the common part."""

    backend: str = "torch_dist"
    version: int = 1
    common_backend: str = "torch"
    common_version: int = 1


def read_config(path: str | Path) -> CheckpointConfig | None:
    """`metadata.json` of the checkpoint in `path`; None where there is none (plain DCP).

    Raises:
        CorruptCheckpointError: the file is not what Megatron writes.
    """
    directory = Path(path)
    try:
        text = _read_small_file(directory, CONFIG_FILE, _MAX_CONFIG_BYTES)
    except CheckpointNotFoundError:
        return None
    try:
        fields = json.loads(text)
        config = CheckpointConfig(
            fields["sharded_backend"],
            fields["sharded_backend_version"],
            fields.get("common_backend", "torch"),
            fields.get("common_backend_version", 1),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{directory / CONFIG_FILE}: expected a JSON object with sharded_backend and sharded_backend_version "
            f"({type(error).__name__}: {error}). Restore it from another checkpoint of the same run."
        ) from error
    if type(config.backend) is not str or type(config.version) is not int:
        raise CorruptCheckpointError(
            f"{directory / CONFIG_FILE}: expected sharded_backend to be a string and sharded_backend_version an int, "
            f"got {config.backend!r:.80} and {config.version!r:.80}"
        )
    return config


def encode_config(backend: str = "torch_dist", version: int = 1) -> bytes:
    """The content of `metadata.json`, in Megatron's form."""
    return json.dumps(
        {
            "sharded_backend": backend,
            "sharded_backend_version": version,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    ).encode()


def _read_small_file(directory: Path, name: str, max_bytes: int) -> bytes:
    path = directory / name
    try:
        status = path.stat()
        # Looked at before it is opened: a pipe would block, and a device has no end.
        if not stat.S_ISREG(status.st_mode):
            raise LoadError(f"{path}: cannot be read: it is not a regular file")
        if status.st_size > max_bytes:
            raise CorruptCheckpointError(f"{path}: expected at most {max_bytes} bytes, the file has {status.st_size}")
        with path.open("rb") as stream:
            return stream.read(max_bytes)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(_not_found(directory, name)) from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def _not_found(directory: Path, name: str) -> str:
    """What is wrong with `directory`, and which directory may have been meant."""
    if not directory.exists():
        return f"{directory}: there is no such directory; check the path of the checkpoint"
    if not directory.is_dir():
        return f"{directory}: is a file; a checkpoint is a directory that holds {METADATA_FILE}"
    if (directory / INCOMPLETE_MARKER).exists():
        return f"{directory}: holds no {name}: a save into it was interrupted. Load an earlier checkpoint."
    iterations = sorted(child.name for child in directory.glob("iter_*") if (child / METADATA_FILE).exists())
    if iterations:
        return (
            f"{directory}: holds no {name} itself, but checkpoints of {len(iterations)} iterations; "
            f"give one of them, for example {directory / iterations[-1]}"
        )
    if any(directory.glob("__*.metadata")):
        return (
            f"{directory}: holds no {name}, but metadata of single ranks: it was saved without collectives "
            "(`dcp.save(use_collectives=False)`), which cannot be read as one checkpoint"
        )
    return (
        f"{directory}: holds no {name}, so there is no finished checkpoint in it. The save did not finish, "
        "or this is not a checkpoint in the torch_dist or torch.distributed.checkpoint format."
    )
