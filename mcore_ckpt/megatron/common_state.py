"""The common state of a checkpoint: what is not sharded (arguments, schedules, iteration), the same for all ranks.

To 0.18 Megatron-Core keeps it in `common.pt`, from 0.19 on in an object `common_state` inside the data files. Either is
read here, whichever version is installed, and the one that belongs to the `.metadata` in force is taken: a `common.pt`
may be the rest of an older checkpoint, or be waiting under its pending name (see `in_force`).
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError, SaveError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path
from mcore_ckpt.core.ranks import coordination_group, without_modes
from mcore_ckpt.directory.in_force import common_file_in_force, read_common_file
from mcore_ckpt.directory.publish import write_common, write_config
from mcore_ckpt.format.index import COMMON_STATE_KEY
from mcore_ckpt.format.integrity import Manifest, split_metadata
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, MAX_METADATA_BYTES, METADATA_FILE, read_small_file
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.megatron._one_save import SaveIdentity, metadata_version, note_common
from mcore_ckpt.megatron._validation import come_to_exchange
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)

_PENDING_SUFFIX = ".pending"
# What cannot be read of a checkpoint that was replaced meanwhile is read of the new one, so often.
_READ_AGAIN = 5
_T = TypeVar("_T")
# Takes the error of `save_config`, where that must not be raised at once.
_late_error: ContextVar[list[Exception] | None] = ContextVar("_late_error", default=None)


@without_modes()
def save_common(common_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the common state of the save that follows, and lock the directory for it; every rank calls this. The first
    writes, when all have come. Next to an older checkpoint it waits under a name of its own until the new one is
    published.
    """

    def write(_: None) -> None:
        storage, content = storage_at(checkpoint_dir), io.BytesIO()
        torch.save(common_state_dict, content)
        write_common(storage, content.getvalue())

    come_to_exchange()
    coordination_group().run_merged(
        "write the common state", lambda: None, lambda first, _: first, write, wrap=SaveError
    )


def save_config(config: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write `metadata.json` when the checkpoint has been published; the first rank calls it. It replaces an older one
    by a rename, if it says something else, and not where another save has published since (`write_config`).
    """
    storage = storage_at(checkpoint_dir)
    try:
        written = write_config(storage, json.dumps(asdict(config)).encode())
    except Exception as error:
        late = _late_error.get()
        if late is None:
            raise
        late.append(error)
        return
    if not written:
        _logger.warning("%s: another save has the directory by now; %s stays as it is", storage, CONFIG_FILE)


def with_late_config_errors(call: Callable[[], _T]) -> tuple[_T, Exception | None]:
    """Call what lets the first rank write `metadata.json` while the others wait for it; its error is a value then."""
    errors: list[Exception] = []
    token = _late_error.set(errors)
    try:
        return call(), next(iter(errors), None)
    finally:
        _late_error.reset(token)


def raise_config_error(error: Exception | None) -> None:
    """Raise on all ranks what the first could not do; every rank calls this."""

    def tell() -> None:
        if error is not None:
            raise error

    coordination_group().run_on_coordinator("write metadata.json", tell, wrap=SaveError)


@without_modes()
def load_common(checkpoint_dir: str | os.PathLike[str], options: LoadOptions | None = None) -> Any:
    """The common state of a checkpoint, tensors on the CPU; of the new one, where it is replaced meanwhile. A class
    outside the allow-list, damage, and what does not belong to `.metadata` are refused.
    """
    options = LoadOptions.from_environment() if options is None else options
    directory = checkpoint_path(checkpoint_dir)
    for attempts_left in reversed(range(_READ_AGAIN)):
        version = metadata_version(directory)
        try:
            return _load_common(directory, options, version)
        except LoadError:
            if not attempts_left or metadata_version(directory) == version:
                raise
    raise AssertionError("the last attempt returns or raises")


def _load_common(directory: Path, options: LoadOptions, version: tuple[int, ...]) -> Any:
    storage = storage_at(directory)
    names = storage.list()
    for known in (COMMON_FILE, METADATA_FILE):  # which the listing of a network file system may not show yet
        if known not in names and storage.exists(known):
            names.append(known)
    file: str | None = COMMON_FILE if COMMON_FILE in names else None
    manifest: Manifest | None = None
    if METADATA_FILE in names:
        content = read_small_file(directory, METADATA_FILE, MAX_METADATA_BYTES)
        pickled, manifest = split_metadata(content, str(directory / METADATA_FILE))
        if _index_decides(pickled, names):
            reader = FileSystemReader(directory, options=options)
            manifest = reader.index.manifest
            file = common_file_in_force(names, reader.index)
            if file is None and COMMON_STATE_KEY in reader.index.objects:
                stored = reader.read_object(COMMON_STATE_KEY)
                note_common(directory, SaveIdentity.of(reader.index.manifest, version))
                return stored[0] if isinstance(stored, list) else stored
    if file is None:
        raise CheckpointNotFoundError(
            f"{directory / COMMON_FILE}: Common file does not exist, nor does .metadata name an object "
            f"{COMMON_STATE_KEY}; expected one of them in a checkpoint of Megatron-Core. The directory holds "
            f"{', '.join(sorted(names)[:8]) or 'nothing'}{', ...' if len(names) > 8 else ''}"
        )
    # Small, and read by every rank: all of it is compared with its checksums before anything is unpickled.
    loaded = load_object(
        read_common_file(storage, file, manifest),
        options.allowed_classes,
        where=str(directory / file),
    )
    note_common(directory, SaveIdentity.of(manifest, version))
    return loaded


def _index_decides(pickled: bytes, names: list[str]) -> bool:
    """Whether the index has to be decoded, which takes seconds for many ranks, to know where the common state is. Most
    have only `common.pt`; that it names no `common_state` shows in its bytes.
    """
    if COMMON_FILE not in names:
        return True
    if any(name.startswith(COMMON_FILE) and name.endswith(_PENDING_SUFFIX) for name in names):
        return True
    return COMMON_STATE_KEY.encode() in pickled
