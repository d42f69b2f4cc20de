"""Making a new checkpoint the one that a directory holds, at one moment; `target.py` tells what goes before and after.

`metadata.json` and the common state are put next to it here, too: never over those of another save.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError, SaveError
from mcore_ckpt.core.threads import in_parallel, together
from mcore_ckpt.directory._leftovers import sweep
from mcore_ckpt.directory.in_force import look
from mcore_ckpt.directory.lock import DirectoryLock, holders, seems_gone
from mcore_ckpt.directory.target import Target, refuse_lost, take_reserved
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, INTEGRITY_FILE, METADATA_FILE
from mcore_ckpt.storage.base import FileVersion, Storage

_logger = logger_of(__name__)

# How long a file that another host has written may take to be seen on this one, and how often it is looked for.
_FILES_APPEAR_WITHIN_S = 10.0
_FIRST_PERIOD_S = 0.05
_LOOKERS = 16
_RENAMES = 5

# The `.metadata` that this process has published last, by location.
_published: dict[str, FileVersion] = {}


def publish(storage: Storage, target: Target, metadata: bytes, *, has_common_state: bool) -> None:
    """Put the new checkpoint in force. All data files must be durable.

    `has_common_state`: it is an object (megatron-core 0.19 and later), so a `common.pt` of an older version must go:
    readers would prefer it. On `SaveError` nothing is published.
    """
    storage.sync()
    if not target.replaces:
        storage.sync(parents=True)  # the directory may be new
    target.lock.publish(METADATA_FILE, metadata)
    try:
        # The common state first, before anything else is even looked at: until that is done, stock readers, which
        # know of no pending name, see the old one next to the new `.metadata`.
        common = partial(_settle_common, storage, target, has_common_state)
        # Megatron sums up the files after the save: what is there now are the sums of another checkpoint.
        sums = partial(storage.delete, INTEGRITY_FILE)
        together(storage.asks_at_once, common, partial(_note_published, storage), sums)
        _tidy_up(storage, target)
    except Exception as error:  # noqa: BLE001  (whatever it is, the checkpoint must not pass for a failed one)
        # The new checkpoint is complete and in force; the next save into the directory removes what is left over.
        _logger.warning("%s: the checkpoint is published, but not everything old could be removed: %s", storage, error)
        with contextlib.suppress(SaveError, LoadError, OSError):
            target.lock.release(keep_note=True)


def _note_published(storage: Storage) -> None:
    with contextlib.suppress(LoadError):
        if (published := storage.version(METADATA_FILE)) is not None:
            _published[storage.location] = published


def _settle_common(storage: Storage, target: Target, has_common_state: bool) -> None:
    pending = target.pending_common
    if has_common_state:
        # Left by an older version, or by a save of it that was killed; readers of 0.19 would prefer it.
        storage.delete(COMMON_FILE)
        storage.delete(pending)
    elif storage.version(pending) is not None:
        _rename_for_sure(storage, target)


def _tidy_up(storage: Storage, target: Target) -> None:
    in_parallel(target.old_files, storage.delete, storage.asks_at_once)
    if target.lock.after:
        # Written since the directory was locked, by processes of a save that was taken for gone.
        sweep(storage, target.lock, look(storage))
    target.lock.release()
    storage.sync()


def _rename_for_sure(storage: Storage, target: Target) -> None:
    """Rename the pending common state, unless a save that has taken over has put its own there; an error of a moment
    must not leave stock readers the old one next to the new `.metadata`.
    """
    rename = partial(storage.move_over, target.pending_common, COMMON_FILE, target.common_before)
    for _ in range(_RENAMES - 1):
        try:
            rename()
            return
        except SaveError as error:
            _logger.warning("%s: %s; it is tried again", storage, error)
            time.sleep(_FIRST_PERIOD_S)
    rename()


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

    Its common state takes its place, `metadata.json` gets `config` if given, and the directory is released.
    """
    target = take_reserved(storage)
    if target is not None:
        if not target.lock.is_still_held():
            refuse_lost(storage, target)
        if target.replaces and storage.version(target.pending_common) is not None:
            storage.move_over(target.pending_common, COMMON_FILE, target.common_before)
        if config is not None and not _has_config(storage, config):
            target.lock.publish(CONFIG_FILE, config)
        sweep(storage, target.lock, look(storage))
        target.lock.release()


def write_config(storage: Storage, content: bytes) -> bool:
    """Write `metadata.json` of the checkpoint that this process has published last; False if another save has since.

    Megatron does so after the directory was released, and this process may have been held up for any time. So an
    existing file is replaced under a lock only, and a new one replaces nothing.
    """
    settle(storage, content)  # another strategy saved next to the common state
    has_config, is_published = together(
        storage.asks_at_once, partial(_has_config, storage, content), partial(_is_still_published, storage)
    )
    if has_config:
        return True
    if not is_published:
        return False
    if storage.publish_new(CONFIG_FILE, content) or _has_config(storage, content):
        return True
    try:
        lock = DirectoryLock.take(storage)
    except SaveError:
        now = holders(storage)
        if now and not seems_gone(storage, now[-1]):
            return False
        raise
    with lock:
        if not _is_still_published(storage):
            return False
        lock.publish(CONFIG_FILE, content)
    return True


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
