"""Megatron's `integrity.json` (0.19, `--verify-integrity`): the SHA-256 of each file of a checkpoint.

Megatron sums up whatever lies in the directory. Some of that is no part of the checkpoint: it changes later, goes, or
is in no copy (the note how far a copy to a second tier is, locks, files of a save that was replaced). Each of these
would make every later load fail. So the file is written here, of what belongs to the checkpoint; Megatron compares it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

from mcore_ckpt.core.errors import CheckpointNotFoundError
from mcore_ckpt.core.options import checkpoint_path, is_supported
from mcore_ckpt.directory.copying import own_files
from mcore_ckpt.format.metadata_read import INTEGRITY_FILE, METADATA_FILE
from mcore_ckpt.megatron._errors import MegatronErrors
from mcore_ckpt.megatron._versions import megatron_module, patches
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

_NAME = "save_integrity_manifest"
_PIECE_BYTES = 8 * 1024 * 1024


def replace_integrity() -> None:
    """Where this version of Megatron-Core has such a file."""
    validation = megatron_module("validation")
    if hasattr(validation, _NAME):
        patches.replace(validation, _NAME, _of_what_belongs_to_it(getattr(validation, _NAME)))


def _of_what_belongs_to_it(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def save_integrity_manifest(checkpoint_dir: Any) -> None:
        with MegatronErrors():
            if not is_supported(checkpoint_dir):
                return stock(checkpoint_dir)
            directory = checkpoint_path(checkpoint_dir)
            storage = storage_at(directory)
            version = storage.version(METADATA_FILE)
            try:
                names = own_files(directory)
            except CheckpointNotFoundError:  # of another format
                return stock(checkpoint_dir)
            sums = {name: _sha256(storage, name) for name in sorted(names) if name != INTEGRITY_FILE}
            if storage.version(METADATA_FILE) == version:  # else they are of a checkpoint that was replaced
                content = json.dumps({"algorithm": "sha256", "files": sums}, indent=2)
                storage.publish(INTEGRITY_FILE, content.encode())
            return None

    return save_integrity_manifest


def _sha256(storage: Storage, name: str) -> str:
    found = hashlib.sha256()
    with storage.open_reader(name, direct="off") as reader:
        for at in range(0, reader.size_bytes, _PIECE_BYTES):
            found.update(reader.read(at, min(_PIECE_BYTES, reader.size_bytes - at)))
    return found.hexdigest()
