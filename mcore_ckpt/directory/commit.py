"""Publishing a checkpoint so that a directory never holds a mix: the rules, in one place.

A save into a directory proceeds in this order; a crash between any two steps leaves either the old checkpoint whole or
the new one whole:

1. `open_target` (or, ahead of it, `reserve`): the directory is claimed (`claim.py`), and what is there already is
   looked at. New data files get numbers that no file has or had: beyond those that are there, and far beyond those of
   a save that is gone, which may have processes left that go on writing. The marker file `.mcore_ckpt_incomplete`
   names the number from which on data files belong to the save in progress, and the files of the checkpoint that is
   being replaced.
2. The ranks write and fsync their data files. If a checkpoint is being replaced, the new common state lies beside the
   old one as `common.pt.<number>.<id of the claim>.pending`.
3. `publish`: the coordinator sees every file that was planned, at its size. The new `.metadata` replaces the old one by
   a rename, which fails if the directory has been taken over by another save meanwhile. This is the moment the
   new checkpoint exists.
4. The pending common state takes its place, and the files that only the old `.metadata` named are removed, then the
   marker. A crash before the end of this step is mended by the next save; a reader meanwhile looks up which common
   state is in force with `common_file_in_force`.

Other programs keep files in the same directory, and may use the same names. So only these are ever removed: files that
the old index named and no index in force names; and those that a save which is gone has certainly made, by their seal,
or, of one that is half written, by its mark (`Storage.marked`). Whether there is a `.metadata`, and which, is asked of
the file itself: a listing of a network file system may lag behind. If it is there and cannot be read, nothing is
removed.

A rank that saves a checkpoint of its own (DCP without collectives) does the same with its part of the directory, whose
index is `__<rank>.metadata`: `open_part`, `publish_part`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mcore_ckpt.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
)
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.threads import in_parallel
from mcore_ckpt.directory.claim import Claim, holders, holders_of_parts, is_claim_file, seems_gone
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    metadata_of_rank,
    parse_index,
)
from mcore_ckpt.format.seal import FOOTER_BYTES, SAVE_ID_BYTES, decode_footer, shown_id
from mcore_ckpt.storage.base import FileVersion, Storage, align_up

__all__ = [
    "Target",
    "abandon",
    "check_files",
    "claim_late",
    "common_file_in_force",
    "data_bytes_of_rank",
    "data_file_name",
    "discard",
    "give_back",
    "index_files",
    "is_in_force",
    "open_part",
    "open_target",
    "publish",
    "publish_part",
    "reserve",
    "settle",
    "with_common_files",
    "write_common",
    "write_config",
]

_logger = logging.getLogger(__name__)

# What an older version has left, and nobody takes for anything.
_PENDING_COMMON = COMMON_FILE + ".pending"
_INTEGRITY_FILE = "integrity.json"
_COMMON_STATE_KEY = "common_state/"
_DATA_FILE = re.compile(r"__(\d+)_(\d+)\.distcp$")
_METADATA_OF_RANK = re.compile(r"__\d+" + re.escape(METADATA_FILE))
_PENDING_NUMBERED = re.compile(re.escape(COMMON_FILE) + r"\.(\d+)(?:\.([0-9a-f]{16}))?\.pending$")
_CLAIM_ID_BYTES = 8


# How long a file that another host has written may take to be seen on this one, and how often it is looked for.
_FILES_APPEAR_WITHIN_S = 10.0
_FIRST_PERIOD_S = 0.05
_LOOKERS = 16
_RENAMES = 5
# From the number of a save that is gone, a save that follows keeps this distance: more files than a rank ever has.
_DISTANCE = 2**20
_LOOKS = 20
# So many saves that are gone are remembered, until a save has come to its end and has removed what they left.
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Target:
    """The directory of a save, as its coordinator found it.

    Attributes:
        first_file: number of the first data file of each rank; no file of that number or above exists.
        old_files: files that only the checkpoint being replaced needs.
        replaces: there is a checkpoint that is being replaced.
        claim: by which the directory belongs to this save.
        gone: ids of saves that are gone, of which files may be left.
        common: the common state that was written ahead of all else, as it was then; None if none was.
        common_sum: length in bytes and CRC-32 of that.
        nonce: 8 bytes.
    """

    first_file: int
    old_files: tuple[str, ...]
    replaces: bool
    claim: Claim
    gone: frozenset[str] = frozenset()
    common: FileVersion | None = None
    common_sum: tuple[int, int] | None = None
    nonce: bytes = field(default_factory=partial(secrets.token_bytes, SAVE_ID_BYTES - _CLAIM_ID_BYTES))

    @property
    def save_id(self) -> bytes:
        """Of what is saved, for its seals; 16 bytes. It begins with the claim's id, which `pending_common` names."""
        return bytes.fromhex(self.claim.owner.save_id) + self.nonce

    @property
    def pending_common(self) -> str:
        """Name under which the new common state waits for being published."""
        return _pending_name(self.first_file, self.claim.owner.save_id)

    @property
    def common_file(self) -> str:
        """Where the new common state is to be written: one that is in force must not be touched."""
        return self.pending_common if self.replaces else COMMON_FILE


# Directories that were claimed for a save that has yet to come, by location.
_reserved: dict[str, Target] = {}
# The `.metadata` that this process has published last, by location.
_published: dict[str, FileVersion] = {}


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Name of a rank's data file. `prefix` is the separation hint: readers find hinted files by it."""
    return f"{prefix}__{rank}_{number}.distcp"


def _file_number(name: str) -> int | None:
    match = _DATA_FILE.search(name)
    return int(match.group(2)) if match else None


def data_bytes_of_rank(directory: Path, rank: int, ranks: int) -> int | None:
    """How much one rank has written of a checkpoint, in whole pages; None if more or fewer ranks have saved it.

    By the names and lengths of the files: a guess that is right where nothing is left of other saves.

    Raises:
        OSError: the directory cannot be read.
    """
    nbytes = last_rank = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if match := _DATA_FILE.search(entry.name):
                last_rank = max(last_rank, int(match.group(1)))
                if int(match.group(1)) == rank:
                    nbytes += align_up(entry.stat().st_size)
    return nbytes if last_rank + 1 == ranks else None


def index_files(index: CheckpointIndex) -> set[str]:
    """Names of the data files that a checkpoint consists of."""
    files = {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}
    files.update(entry.item.file for entry in index.objects.values())
    return files


def open_target(storage: Storage, options: SaveOptions) -> Target:
    """Claim the directory of a save, and look at it; the coordinator calls this once.

    Raises:
        CheckpointExistsError: there is a checkpoint and `on_existing="error"`.
        SaveError: another save holds the directory, or it cannot be made or written.
    """
    target = _reserved.pop(storage.location, None)
    if target is None or not target.claim.is_held:
        target = _claim(storage)
    elif not target.claim.is_ours():
        # Claimed anew, it would be published beside a common state of somebody else.
        _refuse_lost(storage, target)
    if target.replaces and options.on_existing == "error":
        abandon(storage, target)
        raise CheckpointExistsError(
            f'{storage}: there is a checkpoint already and on_existing="error"; choose another directory,'
            ' or on_existing="replace"'
        )
    return target


def reserve(storage: Storage) -> Target:
    """Claim the directory for a save that is going to `open_target`, so that something can be written ahead of it.

    Raises:
        SaveError: another save holds the directory, or it cannot be made or written.
    """
    give_back(storage)
    target = _claim(storage, common_ahead=True)
    _reserved[storage.location] = target
    return target


def write_common(storage: Storage, content: bytes) -> None:
    """`reserve` the directory, and write the common state of the save that is going to `open_target`.

    Raises:
        SaveError: another save holds the directory, or has taken it over meanwhile, or it cannot be made or written.
    """
    target = reserve(storage)
    try:
        storage.publish(target.common_file, content, through=target.claim.common_ticket)
        written, told = storage.version(target.common_file), (len(content), crc32(content))
        _reserved[storage.location] = replace(target, common=written, common_sum=told)
        target.claim.check()
    except BaseException as error:
        if isinstance(error, SaveError) and not target.claim.is_ours():
            _refuse_lost(storage, _reserved.pop(storage.location, target))
        give_back(storage)
        raise


def _refuse_lost(storage: Storage, target: Target) -> NoReturn:
    """Raise `SaveError`, saying who has taken the directory over, and leave nothing there."""
    try:
        target.claim.check()
        raise SaveError(f"{storage}: this save lost the directory for a moment; save again")
    finally:
        abandon(storage, target)


def settle(storage: Storage, config: bytes | None = None) -> None:
    """The checkpoint that the directory was reserved for has been saved by other means than `open_target`.

    Its common state takes its place, and the directory is let go.

    Args:
        storage: the checkpoint's directory.
        config: what `metadata.json` is to hold; None leaves that alone.

    Raises:
        SaveError: it cannot be written.
    """
    target = _reserved.pop(storage.location, None)
    if target is not None:
        if not target.claim.is_ours():
            _refuse_lost(storage, target)
        if target.replaces and storage.version(target.pending_common) is not None:
            storage.rename(target.pending_common, COMMON_FILE)
        if config is not None and not _has_config(storage, config):
            storage.publish(CONFIG_FILE, config, through=target.claim.publish_ticket)
        target.claim.release()


def write_config(storage: Storage, content: bytes) -> bool:
    """Write `metadata.json` of the checkpoint that this process has published last, or has had somebody publish.

    Megatron does so last of all, when the directory has been let go: another save may have it by then, and this process
    may have been held up for as long as you like. So a file that is there is replaced by way of a claim only, and
    where there is none, one is made that replaces nothing: whoever holds the directory then has the last word.

    Returns:
        Whether the file says what it should. If not, another save has published since, or is about to.

    Raises:
        SaveError: it cannot be written.
    """
    settle(storage, content)  # a strategy that is not ours saved beside the common state
    if _has_config(storage, content):
        return True
    if not _is_still_published(storage):
        return False
    if storage.publish_new(CONFIG_FILE, content) or _has_config(storage, content):
        return True
    try:
        claim = Claim.take(storage)
    except SaveError:
        now = holders(storage)
        if now and not seems_gone(storage, now[-1]):
            return False
        raise
    with claim:
        if not _is_still_published(storage):
            return False
        storage.publish(CONFIG_FILE, content, through=claim.publish_ticket)
    return True


def _has_config(storage: Storage, content: bytes) -> bool:
    return (
        storage.exists(CONFIG_FILE)
        and storage.size(CONFIG_FILE) == len(content)
        and storage.read(CONFIG_FILE, 0, len(content)) == content
    )


def _is_still_published(storage: Storage) -> bool:
    """Whether the checkpoint that this process has published last is still the one that the directory holds.

    True also if it has published none there: somebody else has, for this process.
    """
    published = _published.get(storage.location)
    return published is None or storage.version(METADATA_FILE) == published


def open_part(storage: Storage, rank: int) -> Target:
    """Claim a rank's part of a directory, for a checkpoint of its own, and look at it.

    Raises:
        SaveError: another save holds that part, or the whole directory, or it cannot be made or written.
    """
    storage.ensure_directory()
    claim = Claim.take(storage, {"rank": rank}, part=rank)
    try:
        storage.sync_directory()
        gone = frozenset(owner.save_id for owner in claim.after)
        if gone:
            _sweep(storage, [name for name in storage.list() if _is_of_rank(name, rank)], gone)
        seen = _look(storage)
        old = _index_of_rank(storage, rank)
        old_files = index_files(old) if old is not None else set()
        named = [*seen.names, *old_files, *(index_files(seen.index) if seen.index is not None else ())]
        numbers = [_file_number(name) for name in named if _is_of_rank(name, rank)]
        first_file = max((number for number in numbers if number is not None), default=-1) + 1
        told = [_number(owner.noted or {}, "first_file") or 0 for owner in holders(storage)]
        if gone or told:
            first_file = (max([first_file, *told]) // _DISTANCE + 1) * _DISTANCE
        replaces = storage.version(metadata_of_rank(rank)) is not None
        return Target(first_file, tuple(sorted(old_files)), replaces, claim, gone)
    except BaseException:
        claim.release(remove_marker=not claim.after)
        raise


def publish_part(storage: Storage, target: Target, rank: int, metadata: bytes) -> None:
    """Make a rank's own checkpoint the one that its part of the directory holds. All its data files must be durable.

    Raises:
        SaveError: it cannot be written, or the part has been taken over; nothing is published.
    """
    storage.sync_directory()
    if not target.replaces:
        storage.sync_parents()
    target.claim.check()
    storage.publish(metadata_of_rank(rank), metadata, through=target.claim.publish_ticket)
    try:
        needed = _look(storage).needed
        for name in target.old_files:
            if needed is not None and name not in needed:
                storage.delete(name)
        target.claim.release()
    except Exception as error:  # noqa: BLE001  (as in `publish`)
        _logger.warning("%s: the checkpoint is published, but not everything old could be removed: %s", storage, error)
        with contextlib.suppress(SaveError, LoadError, OSError):
            target.claim.release(remove_marker=False)


def _is_of_rank(name: str, rank: int) -> bool:
    match = _DATA_FILE.search(name)
    return match is not None and "/" not in name and int(match.group(1)) == rank


def _index_of_rank(storage: Storage, rank: int) -> CheckpointIndex | None:
    name = metadata_of_rank(rank)
    try:
        return parse_index(_index_bytes(storage, name), f"{storage}/{name}")
    except CheckpointNotFoundError:
        return None
    except LoadError as error:
        _logger.warning("%s: %s cannot be read, its files stay: %s", storage, name, error)
        return None


def claim_late(storage: Storage, written: Collection[str]) -> Target:
    """Claim a directory into which these data files were written before anybody had claimed it.

    Raises:
        SaveError: another save holds the directory.
    """
    for _ in range(_LOOKS):
        seen = _look(storage)
        old_files = tuple(sorted(seen.replaced - set(written)))
        claim = Claim.take(storage)
        if _is_unchanged(storage, storage.list(), seen):
            return Target(seen.first_file, old_files, seen.metadata is not None, claim)
        claim.release(remove_marker=not claim.after)
    raise _restless(storage)


def give_back(storage: Storage) -> None:
    """The save that the directory was reserved for does not come; nothing of it stays."""
    target = _reserved.pop(storage.location, None)
    if target is not None:
        abandon(storage, target)


@dataclass(frozen=True, slots=True)
class _Look:
    """What is in a directory.

    Attributes:
        names: of its files, but for those of claims.
        metadata: which `.metadata` there is; None if there is none.
        index: what that says; None if it cannot be read.
        of_ranks: what the checkpoints of single ranks (`__<rank>.metadata`) consist of; None if one cannot be read.
        gone: what the markers say, by save, of those that hold the directory or held it. If this look is followed by a
            claim, they are gone.
    """

    names: tuple[str, ...]
    metadata: FileVersion | None
    index: CheckpointIndex | None
    of_ranks: frozenset[str] | None
    gone: Mapping[str, Mapping[str, Any]]

    @property
    def replaced(self) -> set[str]:
        """Files that only the checkpoint in force needs, as far as that is known."""
        if self.index is None or self.of_ranks is None:
            return set()
        return index_files(self.index) - self.of_ranks

    @property
    def highest_number(self) -> int:
        # Numbers that the old `.metadata` names count although their files are gone: what it names is removed at the
        # end.
        named = index_files(self.index) if self.index is not None else ()
        return max((number for number in map(_file_number, [*self.names, *named]) if number is not None), default=-1)

    @property
    def first_file(self) -> int:
        highest = max([self.highest_number, *(_number(told, "first_file") or 0 for told in self.gone.values())])
        if self.gone:
            return (highest // _DISTANCE + 1) * _DISTANCE
        # A number that no save of stock gives to all its files, also where the old checkpoint has none with a number.
        return max(highest + 1, int(self.metadata is not None))

    @property
    def gone_ids(self) -> frozenset[str]:
        """Ids of the saves that are gone, also of those that a save has noted which is gone itself."""
        noted = [name for told in self.gone.values() for name in _names(told, "gone")]
        return frozenset([*self.gone, *noted][:_REMEMBERED])

    @property
    def needed(self) -> set[str] | None:
        """Files that some index in force names; None if nobody knows."""
        if self.of_ranks is None or (self.metadata is not None and self.index is None):
            return None
        return (index_files(self.index) if self.index is not None else set()) | self.of_ranks


def _names(told: Mapping[str, Any], name: str) -> list[str]:
    value = told.get(name)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _number(told: Mapping[str, Any], name: str) -> int | None:
    value = told.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**62 else None


def _claim(storage: Storage, *, common_ahead: bool = False) -> Target:
    """Claim a directory with a marker that says what is there. Looking goes first, so what was seen is seen again."""
    storage.ensure_directory()
    for _ in range(_LOOKS):
        seen = _look(storage)
        old_files = tuple(sorted(seen.replaced))
        noted = {"first_file": seen.first_file, "gone": sorted(seen.gone_ids), "replaces": list(old_files)}
        claim = Claim.take(storage, noted, common_ahead=common_ahead)
        try:
            names = storage.list()
            after = {owner.save_id for owner in claim.after}
            if after == seen.gone.keys() and _is_unchanged(storage, names, seen):
                storage.sync_directory()
                claim.sweep(names)
                _clean_up_after_failed_save(storage, seen)
                return Target(seen.first_file, old_files, seen.metadata is not None, claim, seen.gone_ids)
        except BaseException:
            claim.release(remove_marker=not claim.after)
            raise
        claim.release(remove_marker=not claim.after)
    raise _restless(storage)


def _restless(storage: Storage) -> SaveError:
    return SaveError(f"{storage}: the directory changes while it is looked at; other programs write there")


def _look(storage: Storage) -> _Look:
    metadata = storage.version(METADATA_FILE)
    index = None if metadata is None else _old_index(storage)
    names = storage.list()
    gone = {holder.save_id: holder.noted or {} for holder in [*holders(storage), *holders_of_parts(storage, names)]}
    names = _own_names(names)
    return _Look(tuple(names), metadata, index, _files_of_ranks(storage, names), gone)


def _files_of_ranks(storage: Storage, names: Iterable[str]) -> frozenset[str] | None:
    """Data files of the checkpoints of single ranks, which were saved without collectives; None if nobody knows."""
    found: set[str] = set()
    for name in names:
        if _METADATA_OF_RANK.fullmatch(name):
            try:
                found |= index_files(parse_index(_index_bytes(storage, name), f"{storage}/{name}"))
            except CheckpointNotFoundError:
                continue
            except LoadError as error:
                _logger.warning("%s: %s cannot be read, no files are removed: %s", storage, name, error)
                return None
    return frozenset(found)


def _own_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if not is_claim_file(name)]


def _is_unchanged(storage: Storage, names: Iterable[str], seen: _Look) -> bool:
    if storage.version(METADATA_FILE) != seen.metadata:
        return False
    return [*filter(_is_checkpoint_file, names)] == [*filter(_is_checkpoint_file, seen.names)]


def _is_checkpoint_file(name: str) -> bool:
    """Whether a save could read, name or remove the file; what other programs write beside or below is theirs."""
    if "/" in name:
        return False
    return name.startswith(COMMON_FILE) or name.endswith(METADATA_FILE) or _file_number(name) is not None


def publish(storage: Storage, target: Target, metadata: bytes, *, has_common_state: bool) -> None:
    """Make the new checkpoint the one that the directory holds. All data files must be durable.

    Args:
        storage: the checkpoint's directory.
        target: what `open_target` found.
        metadata: the new `.metadata`.
        has_common_state: the common state is an object in the data files (megatron-core 0.19 and later), so that a
            `common.pt` of an older version must go: readers would prefer it.
    """
    storage.sync_directory()
    if not target.replaces:
        storage.sync_parents()  # whoever has made the directory
    target.claim.check()
    try:
        storage.publish(METADATA_FILE, metadata, through=target.claim.publish_ticket)
    except SaveError:
        if not target.claim.is_still_held():
            target.claim.check()  # says better what has happened, if the directory was lost between the two
        raise
    with contextlib.suppress(LoadError):
        if (published := storage.version(METADATA_FILE)) is not None:
            _published[storage.location] = published
    try:
        _tidy_up(storage, target, has_common_state)
    except Exception as error:  # noqa: BLE001  (whatever it is, the checkpoint must not pass for a failed one)
        # The new checkpoint is whole and in force; what is left over is mended by the next save into the directory.
        _logger.warning("%s: the checkpoint is published, but not everything old could be removed: %s", storage, error)
        with contextlib.suppress(SaveError, LoadError, OSError):
            target.claim.release(remove_marker=False)


def _tidy_up(storage: Storage, target: Target, has_common_state: bool) -> None:
    # The common state first, before anything else is even looked at: until that is done, stock readers, which know of
    # no pending name, see the old one beside the new `.metadata`.
    pending = target.pending_common
    if has_common_state:
        # Left by an older version, or by a save of it that was killed; readers of 0.19 would prefer it.
        storage.delete(COMMON_FILE)
        storage.delete(pending)
    elif storage.version(pending) is not None:
        _rename_for_sure(storage, pending, COMMON_FILE)
    names = storage.list()
    if target.replaces or _INTEGRITY_FILE in names:  # a listing may lag behind
        # Megatron sums up the files after the save: what is there now are the sums of another checkpoint.
        storage.delete(_INTEGRITY_FILE)
    for name in target.old_files:
        storage.delete(name)
    if target.gone:
        # Written since the directory was claimed, by processes of a save that was taken for gone.
        _sweep(storage, names, target.gone)
    target.claim.release()
    storage.sync_directory()


def _rename_for_sure(storage: Storage, source: str, name: str) -> None:
    """Rename; an error of a moment must not leave stock readers the old common state beside the new `.metadata`."""
    for _ in range(_RENAMES - 1):
        try:
            storage.rename(source, name)
            return
        except SaveError as error:
            _logger.warning("%s: %s; it is tried again", storage, error)
            time.sleep(_FIRST_PERIOD_S)
    storage.rename(source, name)


def check_files(storage: Storage, planned: Iterable[tuple[str, int]], *, at_least: bool = False) -> None:
    """Raise `SaveError` unless every planned file is there, at its size, as this process sees it.

    What the ranks say of their own files does not tell whether they all write to one place.

    Args:
        storage: the checkpoint's directory.
        planned: names, and lengths in bytes.
        at_least: the files may be longer.
    """

    def look(name: str) -> None:
        found[name] = _size(storage, name)

    def is_there(size: int | None, wanted: int) -> bool:
        return size is not None and (size >= wanted if at_least else size == wanted)

    left = dict(planned)
    until_s = time.monotonic() + _FILES_APPEAR_WITHIN_S
    period_s = _FIRST_PERIOD_S
    found: dict[str, int | None] = {}
    while left:
        in_parallel(left, look, _LOOKERS if len(left) > _LOOKERS else 1)
        left = {name: size for name, size in left.items() if not is_there(found[name], size)}
        if not left or time.monotonic() >= until_s:
            break
        # A network file system may show what another host has written a little later.
        time.sleep(period_s)
        period_s *= 2
        storage.list()
    if left:
        name, size = min(left.items())
        seen = found[name]
        raise SaveError(
            f"{storage}: {len(left)} of the files that the ranks have written cannot be seen by the coordinator, on "
            f"host {platform.node()}, as they were written: {name} was planned with {size} bytes, "
            + ("and is not there" if seen is None else f"and has {seen}")
            + ". Is this directory not shared between the hosts, but on a disk of each one's own? All ranks must save "
            "to one directory, on a file system that all hosts share. Nothing was published"
        )


def _size(storage: Storage, name: str) -> int | None:
    version = storage.version(name)
    return None if version is None else version.size_bytes


def is_in_force(storage: Storage, files: Iterable[str]) -> bool:
    """Whether the `.metadata` in force names one of these files, or cannot be read so that nobody knows.

    What interrupts a coordinator that has just published makes it report a failure; data files must stay then.
    """
    try:
        content = _index_bytes(storage, METADATA_FILE) if storage.exists(METADATA_FILE) else b""
    except (LoadError, OSError):
        return True
    return any(name.encode("utf-8", "surrogatepass") in content for name in files)


def discard(storage: Storage, files: Iterable[str], save_id: bytes) -> None:
    """Remove the data files that a failed save has written, as far as that is still possible.

    Savers that know of no claims may have given the planned names to files of theirs; those stay.

    Args:
        storage: the checkpoint's directory.
        files: the names planned.
        save_id: of the save; 16 bytes.
    """
    try:
        for name in files:
            if _save_of(storage, name) == shown_id(save_id):
                storage.delete(name)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not remove the files of a failed save: %s", storage, error)


def _save_of(storage: Storage, name: str) -> str | None:
    """Id of the save that has made a data file: by its seal, or, if it is half written, its mark; None if unknown."""
    try:
        with storage.open_reader(name, direct="off") as reader:
            size = reader.size_bytes
            end = reader.read(size - FOOTER_BYTES, FOOTER_BYTES) if size >= FOOTER_BYTES else b""
            footer = decode_footer(end, reader.name)
    except LoadError:
        footer = None
    return storage.mark_of(name) if footer is None else shown_id(footer.save_id)


def _sweep(storage: Storage, names: Iterable[str], gone: Collection[str]) -> None:
    """Remove data files that saves have made which are gone, and that no index names.

    Args:
        storage: the checkpoint's directory, which is claimed.
        names: of its files.
        gone: ids of the claims of those saves.
    """
    own = [name for name in names if "/" not in name and _file_number(name) is not None]
    needed = _look(storage).needed if own else None
    if needed is None:
        return
    for name in own:
        if name not in needed and (_save_of(storage, name) or "")[: 2 * _CLAIM_ID_BYTES] in gone:
            storage.delete(name)


def abandon(storage: Storage, target: Target, *, others_clean_up: bool = True) -> None:
    """Coordinator: put the directory back as it was before `open_target`, and let it go.

    Where there is no checkpoint the marker stays, and says that what lies there is not one.

    Args:
        storage: the checkpoint's directory.
        target: what `open_target` found.
        others_clean_up: every other rank is known to have removed its files. If one may not have, the marker stays, by
            which the next save finds what is left.
    """
    try:
        storage.delete(target.pending_common)
        ours = target.common is not None and not target.replaces and target.claim.is_ours()
        if ours and storage.version(COMMON_FILE) == target.common:
            storage.delete(COMMON_FILE)
    except (SaveError, LoadError, OSError) as error:
        _logger.warning("%s: could not clean up after a failed save: %s", storage, error)
    try:
        target.claim.release(remove_marker=target.replaces and others_clean_up)
    except (SaveError, LoadError, OSError) as error:
        _logger.warning("%s: could not clean up after a failed save: %s", storage, error)


def common_file_in_force(names: Iterable[str], index: CheckpointIndex) -> str | None:
    """Which file holds the common state of the checkpoint that `.metadata` describes; None if none does.

    A crash right after the publish can leave the new common state under its pending name, which says of which save it
    is: the one whose id, as the seal of `.metadata` tells it, begins so. Where there is no seal, or an older version
    has written the name: the one whose data files have that number or a higher one, all of them.
    """
    if any(key.startswith(_COMMON_STATE_KEY) for key in index.objects):
        return None
    # A save that replaces a checkpoint gives all its files numbers from its own on. One of stock begins at 0, so what
    # somebody else has published since is never taken for the save that left its common state behind.
    first = min((n for n in map(_file_number, index_files(index)) if n is not None), default=-1)
    names = list(names)
    for name in names:
        match = _PENDING_NUMBERED.match(name)
        if match is None:
            continue
        number, claim_id = match.groups()
        if index.seal is not None and claim_id is not None:
            if index.seal.save_id[:_CLAIM_ID_BYTES].hex() == claim_id:
                return name
        elif int(number) <= first:
            return name
    return COMMON_FILE if COMMON_FILE in names else None


def with_common_files(storage: Storage, names: Iterable[str], index: CheckpointIndex) -> list[str]:
    """What a listing has named, set right for the files that the common state of this index may be in.

    These are asked for by their names: the listing of a network file system may lag behind.

    Args:
        storage: the checkpoint's directory.
        names: of its files, as they were listed.
        index: of the checkpoint.

    Raises:
        LoadError: the file system cannot say.
    """
    asked = {COMMON_FILE}
    first = min((n for n in map(_file_number, index_files(index)) if n is not None), default=None)
    if index.seal is not None and first is not None:
        asked.add(_pending_name(first, index.seal.save_id[:_CLAIM_ID_BYTES].hex()))
    there = [name for name in sorted(asked) if storage.version(name) is not None]
    return [name for name in names if name not in asked] + there


def _pending_name(first_file: int, claim_id: str) -> str:
    return f"{COMMON_FILE}.{first_file}.{claim_id}.pending"


def _index_bytes(storage: Storage, name: str) -> bytes:
    """The content of an index, if it is not too large for one; raises as `Storage.read`."""
    with storage.open_reader(name) as reader:
        if reader.size_bytes > MAX_METADATA_BYTES:
            raise CorruptCheckpointError(
                f"{storage}/{name}: expected at most {MAX_METADATA_BYTES} bytes, the file has {reader.size_bytes}"
            )
        return reader.read(0, reader.size_bytes)


def _old_index(storage: Storage) -> CheckpointIndex | None:
    try:
        return parse_index(_index_bytes(storage, METADATA_FILE), f"{storage}/{METADATA_FILE}")
    except LoadError as error:
        _logger.warning("%s: the checkpoint that is being replaced cannot be read, its files stay: %s", storage, error)
        return None


def _clean_up_after_failed_save(storage: Storage, seen: _Look) -> None:
    """Finish or undo what saves that are gone have left; nothing that the old `.metadata` names is touched."""
    needed = seen.needed
    if needed is None:
        return
    if seen.index is not None:
        in_force = common_file_in_force(seen.names, seen.index)
        # A listing that lags behind may still name what has been renamed since.
        if in_force is not None and in_force != COMMON_FILE and storage.version(in_force) is not None:
            storage.rename(in_force, COMMON_FILE)
    for name in seen.names:
        if _PENDING_NUMBERED.match(name) or name == _PENDING_COMMON:
            storage.delete(name, missing_ok=True)
    garbage: set[str] = set()
    for told in seen.gone.values():
        first_file = _number(told, "first_file")
        if first_file is None:
            continue
        # Otherwise it was killed before it published: the old checkpoint is in force.
        if seen.index is not None and any((_file_number(name) or 0) >= first_file for name in index_files(seen.index)):
            garbage.update(_names(told, "replaces"))
    for name in seen.names:
        # A save puts its files into the directory itself. In those below it lie other checkpoints.
        if "/" in name or name in needed or (_file_number(name) is None and name not in garbage):
            continue
        if name in garbage or (_save_of(storage, name) or "")[: 2 * _CLAIM_ID_BYTES] in seen.gone_ids:
            storage.delete(name)
