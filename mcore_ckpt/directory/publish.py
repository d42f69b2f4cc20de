"""Making a new checkpoint the one that a directory holds, at one moment; `target.py` tells what goes before and after.

`metadata.json` is put next to it here, too: never over that of another save.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError, SaveError
from mcore_ckpt.core.threads import in_parallel, together
from mcore_ckpt.directory.target import Target, take_reserved
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, INTEGRITY_FILE, METADATA_FILE
from mcore_ckpt.storage.base import FileVersion, Storage

_logger = logger_of(__name__)

# How long a file that another host has written may take to be seen on this one, and how often it is looked for.
_FILES_APPEAR_WITHIN_S = 10.0
_FIRST_PERIOD_S = 0.05
_LOOKERS = 16

# The `.metadata` that this process has published last, by location.
_published: dict[str, FileVersion] = {}


def publish(
    storage: Storage, target: Target, metadata: bytes, *, has_common_state: bool, needed: Collection[str] = ()
) -> None:
    """Put the new checkpoint in force. All data files must be durable.

    `has_common_state`: it is an object (megatron-core 0.19 and later), so a `common.pt` of an older version must go:
    readers would prefer it. `needed`: its data files, if their names show other ids. On `SaveError` nothing is
    published, or it cannot be said (`Commit.is_undecided`).
    """
    # Megatron sums up the files after the save: what is there now are the sums of another checkpoint.
    stale = (COMMON_FILE, INTEGRITY_FILE) if has_common_state else (INTEGRITY_FILE,)
    target.commit.publish(metadata, needed=needed, stale=stale)
    with contextlib.suppress(LoadError):
        published = storage.version(METADATA_FILE)
        if published is not None:
            _published[storage.location] = published


def check_files(
    storage: Storage,
    planned: Iterable[tuple[str, int]],
    *,
    at_least: bool = False,
    missing: Callable[[], object] = lambda: None,
) -> None:
    """Raise `SaveError` unless every planned file (name, bytes) is there, at its size, as this process sees it.

    The ranks' own results do not tell whether all of them write to one place. `missing` is called when one is not there
    at first, and may raise what says better why.
    """

    def look_for(name: str) -> None:
        found[name] = _size(storage, name)

    def is_there(size: int | None, wanted: int) -> bool:
        return size is not None and (size >= wanted if at_least else size == wanted)

    left = dict(planned)
    until_s = time.monotonic() + _FILES_APPEAR_WITHIN_S
    period_s = _FIRST_PERIOD_S
    found: dict[str, int | None] = {}
    while left:
        in_parallel(left, look_for, _LOOKERS if len(left) > _LOOKERS else storage.asks_at_once)
        left = {name: size for name, size in left.items() if not is_there(found[name], size)}
        if not left or time.monotonic() >= until_s:
            break
        missing()
        # A network file system may show what another host has written a little later.
        time.sleep(period_s)
        period_s *= 2
        storage.list()
    if left:
        name, size = min(left.items())
        size_bytes = found[name]
        raise SaveError(
            f"{storage}: {len(left)} of the files that the ranks have written cannot be seen by the coordinator, on "
            f"host {platform.node()}, as they were written: {name} was planned with {size} bytes, "
            + ("and is not there" if size_bytes is None else f"and has {size_bytes}")
            + ". Is this directory not shared between the hosts, but on a disk of each one's own? All ranks must save "
            "to one directory, on a file system that all hosts share. Nothing was published"
        )


def _size(storage: Storage, name: str) -> int | None:
    version = storage.version(name)
    return None if version is None else version.size_bytes


def settle(storage: Storage, config: bytes | None = None) -> None:
    """The checkpoint that the directory was reserved for has been saved by other means than `open_target`.

    Its common state takes its place, and `metadata.json` gets `config` if given.
    """
    target = take_reserved(storage)
    if target is not None:
        try:
            if target.common_sum is not None:
                storage.move(target.commit.pending, COMMON_FILE)
            if config is not None and not _has_config(storage, config):
                storage.publish(CONFIG_FILE, config)
        finally:
            target.commit.give_up()


def write_config(storage: Storage, content: bytes) -> bool:
    """Write `metadata.json` of the checkpoint that this process has published last; False if another save has since.

    Megatron does so after the save, and this process may have been held up for any time.
    """
    settle(storage, content)  # another strategy saved next to the common state
    has_config, is_published = together(
        storage.asks_at_once, partial(_has_config, storage, content), partial(_is_still_published, storage)
    )
    if not has_config and is_published:
        storage.publish(CONFIG_FILE, content)
    return has_config or is_published


def _has_config(storage: Storage, content: bytes) -> bool:
    try:
        with storage.open_reader(CONFIG_FILE, direct="off") as reader:
            return reader.size_bytes == len(content) and reader.read(0, len(content)) == content
    except CheckpointNotFoundError:
        return False


def _is_still_published(storage: Storage) -> bool:
    """Whether no other save has replaced the checkpoint that this process published last, if it published any."""
    published = _published.get(storage.location)
    return published is None or storage.version(METADATA_FILE) == published
