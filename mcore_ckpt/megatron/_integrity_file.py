"""Megatron's `integrity.json`, from 0.17 on (`--verify-integrity`): the SHA-256 of each file of a checkpoint.

Megatron sums up whatever lies in the directory. Some of that is no part of the checkpoint: it changes later, goes, or
is in no copy, and each of these would make every later load fail.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointNotFoundError
from mcore_ckpt.core.options import checkpoint_path, is_supported
from mcore_ckpt.directory.copying import own_files
from mcore_ckpt.format.metadata_read import INTEGRITY_FILE, METADATA_FILE
from mcore_ckpt.megatron._versions import MegatronErrors
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_PIECE_BYTES: Final = 8 * 1024 * 1024


def write_integrity_file(stock: Callable[[Any], None], checkpoint_dir: Any) -> None:
    """Write that of what belongs to the checkpoint; one of another format is left to Megatron's own function."""
    with MegatronErrors():
        if not is_supported(checkpoint_dir):
            return stock(checkpoint_dir)
        directory = checkpoint_path(checkpoint_dir)
        storage = storage_at(directory)
        version = storage.version(METADATA_FILE)
        try:
            names = own_files(directory)
        except CheckpointNotFoundError:
            return stock(checkpoint_dir)
        sums = {name: _sha256(storage, name) for name in sorted(names) if name != INTEGRITY_FILE}
        if storage.version(METADATA_FILE) == version:  # else they are of a checkpoint that was replaced
            content = json.dumps({"algorithm": "sha256", "files": sums}, indent=2)
            storage.publish(INTEGRITY_FILE, content.encode())
        return None


def _sha256(storage: Storage, name: str) -> str:
    found = hashlib.sha256()
    with storage.open_reader(name, direct="off") as reader:
        for at in range(0, reader.size_bytes, _PIECE_BYTES):
            found.update(reader.read(at, min(_PIECE_BYTES, reader.size_bytes - at)))
    return found.hexdigest()
