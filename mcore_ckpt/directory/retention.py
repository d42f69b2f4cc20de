"""Removing a run's old checkpoints: by a person (`mcore-ckpt prune`), or by the run itself (`SaveOptions.keep_last`).

What is removed is only ever what the index of a checkpoint names, with the files that every checkpoint has and the
folders that a save of Megatron-Core makes in it; whatever else lies in its directory stays. `.metadata` goes first,
under another name: so nothing half removed passes for a checkpoint, and a removal that was interrupted can be finished.
The directory is locked for the whole removal, so that no save begins in it meanwhile; the note of the lock tells a
removal that has died from a save that has.

What a save that is gone has left goes, too, where it is all that the directory holds: no save may come into it again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, OptionError, SaveError
from mcore_ckpt.directory.drain_note import is_drain_note
from mcore_ckpt.directory.folders import FOLDERS_OF_MEGATRON, files_below, folders_of
from mcore_ckpt.directory.in_force import index_files, is_pending
from mcore_ckpt.directory.iterations import (
    RunCheckpoint,
    directories_of_run,
    flaw_of_files,
    iteration_of,
    look_at,
    tracked_name,
)
from mcore_ckpt.directory.lock import DirectoryLock, contenders, is_lock_file
from mcore_ckpt.format.file_names import DATA_SUFFIX, data_file_of
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    parse_index,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

# What `.metadata` is called while what it names is being removed.
_REMOVED_INDEX = METADATA_FILE + ".removed"
# What the note of a lock says whose directory is being removed.
_REMOVAL = "removal"
_READ = "a load is reading it"
_LOCKED = "a save is at work in it, or has died there"
_LEFT = "left by a save that is gone"
# What the note of a lock says whose directory holds only that: ids of these saves, whose own locks go first.
_TAKE_UP = "take_up"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SIDECARS = (CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE)
# Stock Megatron-Core and DCP mark no directory that they write to: files newer than the index tell, for so long.
_RECENT_NS = 3600 * 10**9


class _ReadMeanwhileError(Exception):
    """A load has begun just as its checkpoint was to go; the checkpoint is back in its place."""


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """What becomes of a checkpoint.

    Attributes:
        checkpoint: what it is.
        keep: whether it stays.
        reason: why.
        left: with `keep` false and after a removal, names in its directory that were not its own and are still there.
    """

    checkpoint: RunCheckpoint
    keep: bool
    reason: str
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was decided, in the order of the checkpoints; `removed` says whether it was done."""

    path: str
    removed: bool
    decisions: tuple[PruneDecision, ...]

    @property
    def freed_bytes(self) -> int:
        """Of the checkpoints that go."""
        return sum(decision.checkpoint.size_bytes for decision in self.decisions if not decision.keep)


def prune_run(
    run: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | None = None,
    remove: bool = False,
    saved_last: str | None = None,
) -> PruneReport:
    """Decide which checkpoints of a run can go, and with `remove` remove them.

    A run that was resumed from an older iteration leaves higher numbers behind: the newest are counted from what was
    saved last downwards. Never goes: `release`; what the tracker file names; the newest `keep_last` that are whole, by
    number or by time of saving, and whatever has a higher number than the lowest of the first; a directory that a save
    has marked, or in which files have just been written; what a load of this package is reading, as far as the
    storage tells; a link, and what a link in the run's directory leads to; what has no index that can be read, since
    nothing says which files are the checkpoint's. A link is not counted as one of the newest. Before a complete
    checkpoint goes, the newest are opened (index, manifest, footers): one that cannot be opened does not count.

    Args:
        run: the directory that holds `iter_0000100` and the like.
        keep_last: how many complete checkpoints stay, the newest; at least 1.
        keep_every: iterations that are multiples of it stay.
        remove: do it.
        saved_last: name of the directory that was saved last; None: what was published last, by the storage's clock.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint of any kind in it.
        CorruptCheckpointError, LoadError: it cannot be listed, or the tracker file names nothing.
        OptionError: `keep_last` or `keep_every` is below 1.
        SaveError: something could not be removed; the same call resumes.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: expected at least 1; the newest complete checkpoint always stays")
    tracked = tracked_name(run)
    directories = directories_of_run(run)
    checkpoints = [look_at(directory, tracked=tracked)[0] for directory in directories]
    links = storage_at(run).links()
    head = None if saved_last is None else iteration_of(saved_last)
    opened: set[str] = set()
    while True:
        newest = _newest(
            [each for each in checkpoints if each.whole and each.iteration is not None and each.name not in links],
            keep_last,
            head,
        )
        reasons = {each.name: _reason_to_keep(each, newest, links, keep_last, keep_every) for each in checkpoints}
        if all(reasons[each.name] for each in checkpoints if each.whole):
            break
        # Something complete goes: what stays in its place is opened first.
        flaws = {
            each.name: flaw
            for each in checkpoints
            if each.whole and newest.counts(each.iteration) and each.name not in opened
            if (flaw := flaw_of_files(each.path))
        }
        if not flaws:
            break
        opened |= {each.name for each in checkpoints if newest.counts(each.iteration)}
        checkpoints = [
            replace(each, problems=(flaws[each.name],)) if each.name in flaws else each for each in checkpoints
        ]
    decisions = []
    for checkpoint in checkpoints:
        if _is_left(checkpoint, newest, links):
            decisions.append(_taken_up(checkpoint) if remove else PruneDecision(checkpoint, False, _LEFT))
            continue
        reason = reasons[checkpoint.name] or _linked(checkpoint, links) or _reason_to_wait(checkpoint)
        if reason is not None:
            decisions.append(PruneDecision(checkpoint, True, reason))
        elif remove:
            decisions.append(_remove(checkpoint, run))
        else:
            decisions.append(
                PruneDecision(
                    checkpoint,
                    False,
                    "a removal was interrupted" if _half_removed(storage_at(checkpoint.path)) else "old",
                )
            )
    return PruneReport(str(run), remove, tuple(decisions))


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest checkpoints of a run: where its last save is, the lowest number, and who has been saved last."""

    head: int
    lowest: int | None  # None: there are not as many
    by_time: frozenset[int]

    def counts(self, iteration: int | None) -> bool:
        """Whether a complete checkpoint of that number is one of the newest, and stays in the place of older ones."""
        below = self.lowest is not None and iteration is not None and self.lowest <= iteration <= self.head
        return iteration in self.by_time or below


def _newest(whole: list[RunCheckpoint], keep_last: int, saved_last: int | None) -> _Newest:
    """`whole` is sorted by number. A number above the last save is of a branch that the run has left, or of a later
    save: neither counts.
    """
    times = {each.iteration: each.saved_at_s or 0.0 for each in whole if each.iteration is not None}
    by_time = sorted(times, key=lambda iteration: (times[iteration], iteration))
    head = saved_last if saved_last is not None else (by_time[-1] if by_time else 0)
    below = [iteration for iteration in times if iteration <= head]
    lowest = below[-keep_last] if len(below) >= keep_last else None
    return _Newest(head, lowest, frozenset(by_time[-keep_last:]))


def _linked(checkpoint: RunCheckpoint, links: Mapping[str, str]) -> str | None:
    """Why a checkpoint stays to which, or to something in which, a link leads; None if none does."""
    path = storage_at(checkpoint.path).location
    name = next((name for name, target in links.items() if f"{target}/".startswith(f"{path}/")), None)
    return None if name is None else f"the link {name} leads to it"


def _reason_to_keep(
    checkpoint: RunCheckpoint, newest: _Newest, links: Mapping[str, str], keep_last: int, keep_every: int | None
) -> str | None:
    """Why a checkpoint stays; None if it can go."""
    if checkpoint.iteration is None:
        return "it is no iteration"
    if checkpoint.tracked:
        return "the tracker file names it"
    if checkpoint.name in links:
        return "its directory is a link"
    if checkpoint.locked and not _is_of_removals(storage_at(checkpoint.path)):
        return _LOCKED
    if _half_removed(storage_at(checkpoint.path)):
        return None
    if newest.lowest is None:
        if not newest.by_time:
            return "no checkpoint is complete"
        said = "is no complete checkpoint" if keep_last == 1 else f"are no {keep_last} complete checkpoints"
        return f"there {said}, counted down from iteration {newest.head}, which was saved last"
    if checkpoint.iteration > newest.head:
        return f"its number is above that of the last save, {newest.head}"
    if checkpoint.iteration in newest.by_time:
        return f"one of the newest {keep_last}"
    if checkpoint.iteration >= newest.lowest:
        return f"one of the newest {keep_last}" if checkpoint.whole else f"newer than one of the last {keep_last}"
    if keep_every is not None and checkpoint.iteration % keep_every == 0:
        return f"a multiple of {keep_every}"
    return None


def _half_removed(storage: Storage) -> bool:
    """Whether an earlier removal was interrupted here, and no checkpoint has been written into the directory since."""
    return storage.exists(_REMOVED_INDEX) and not storage.exists(METADATA_FILE)


def _reason_to_wait(checkpoint: RunCheckpoint, now_ns: int | None = None) -> str | None:
    """Why a checkpoint that could go must not go now; None if nothing stands against it. `now_ns`: by the storage's
    clock, if that is known, since the clock of this host may be wrong.
    """
    storage = storage_at(checkpoint.path)
    try:
        name, index = _index_to_remove(storage)
        if index is None:
            return "no index says which of its files are the checkpoint's"
        versions = [storage.version(file) for file in _own_files(index)]
        newest_ns = max((version.modified_ns for version in versions if version is not None), default=0)
        of_index = storage.version(name)
        limit_ns = 0 if of_index is None else of_index.modified_ns
        if name == METADATA_FILE:
            limit_ns = max(limit_ns, (time.time_ns() if now_ns is None else now_ns) - _RECENT_NS)
        if storage.is_in_use(name):
            return _READ
    except LoadError as error:
        return f"its files cannot be looked at: {error}"
    return "its files are newer than its index: a save may be at work" if newest_ns > limit_ns else None


def _is_left(checkpoint: RunCheckpoint, newest: _Newest, links: Mapping[str, str]) -> bool:
    """Whether a directory holds nothing but what saves that are gone have left, untouched for an hour by this host's
    clock. An iteration above the last save is left to the save that is likely to come.
    """
    if (
        not checkpoint.abandoned
        or checkpoint.tracked
        or checkpoint.iteration is None
        or checkpoint.iteration >= newest.head
        or checkpoint.name in links
        or _linked(checkpoint, links)
    ):
        return False
    storage = storage_at(checkpoint.path)
    try:
        names = storage.list()
        return _holds_only(storage, names, _gone(storage, names)) and _is_quiet(storage, names, time.time_ns())
    except LoadError:
        return False


def _gone(storage: Storage, names: list[str]) -> set[str]:
    """Ids of the saves whose locks are left, and of those that an attempt to remove what they have left has noted."""
    found = contenders(storage, names)
    noted = [(owner.noted or {}).get(_TAKE_UP) for owner in found]
    ids = [each for listed in noted if isinstance(listed, list) for each in listed if isinstance(each, str)]
    return {*ids, *(owner.save_id for owner in found)}


def _holds_only(storage: Storage, names: list[str], gone: set[str]) -> bool:
    """Whether files and uploads are those that such saves have made, with what every save makes next to its data."""
    if storage.folders():
        return False
    carry_ids = [name for name in names if not (is_lock_file(name) or _comes_with_data(name))]
    files = [data_file_of(name) for name in (*carry_ids, *storage.unfinished())]
    return all(found is not None and found.save in gone for found in files)


def _is_sidecar(name: str) -> bool:
    return name in _SIDECARS or is_pending(name) or is_drain_note(name)


def _comes_with_data(name: str) -> bool:
    return _is_sidecar(name) or (name.startswith(".") and name.endswith(".tmp"))


def _is_quiet(storage: Storage, names: list[str], now_ns: int) -> bool:
    versions = [storage.version(name) for name in names]
    return all(version is None or version.modified_ns < now_ns - _RECENT_NS for version in versions)


def _taken_up(checkpoint: RunCheckpoint) -> PruneDecision:
    """Remove a directory that holds nothing but what saves that are gone have left."""
    storage = storage_at(checkpoint.path)
    try:
        before = storage.list()
        gone = _gone(storage, before)
        locks = [version for name in before if is_lock_file(name) and (version := storage.version(name)) is not None]
        lock = DirectoryLock.take(storage, {_TAKE_UP: sorted(gone)})
        is_done = False
        try:
            lock.sweep(before)  # first: a publish of which the store has said nothing is completed by that
            now_ns, names = lock.now_ns(), storage.list()
            others = [name for name in names if not is_lock_file(name)]
            if (
                now_ns is not None
                and all(version.modified_ns < now_ns - _RECENT_NS for version in locks)
                and _holds_only(storage, others, gone)
                and _is_quiet(storage, others, now_ns)
            ):
                for name in storage.unfinished():
                    storage.discard_unfinished(name)
                for name in others:
                    lock.delete(name)
                is_done = True
        finally:
            lock.release(remove_marker=is_done)
    except (SaveError, LoadError) as error:
        return PruneDecision(checkpoint, True, f"{_LEFT}, and cannot be removed: {error}")
    if is_done and storage.remove():
        return PruneDecision(checkpoint, False, "removed")
    return PruneDecision(checkpoint, True, _LOCKED)


def _is_of_removals(storage: Storage) -> bool:
    """Whether removals alone have locked a directory, and none of them is known to be at work."""
    try:
        found = contenders(storage, storage.list())
    except LoadError:
        return False
    return all((owner.noted or {}).get(_REMOVAL) is True and owner.process_state() != "alive" for owner in found)


def _remove(checkpoint: RunCheckpoint, run: str | os.PathLike[str]) -> PruneDecision:
    """Remove a checkpoint, unless it has come into use meanwhile."""
    storage = storage_at(checkpoint.path)
    if not _is_of_removals(storage):
        return PruneDecision(checkpoint, True, _LOCKED)
    try:
        lock = _locked(storage, checkpoint, run)
    except (SaveError, LoadError) as error:
        if not _is_of_removals(storage):
            return PruneDecision(checkpoint, True, _LOCKED)
        raise SaveError(f"{checkpoint.path}: cannot be locked, and so not removed: {error}") from error
    save_before = any((owner.noted or {}).get(_REMOVAL) is not True for owner in lock.after)
    try:
        reason = _LOCKED if save_before else _reason_now(storage, checkpoint, run, lock.now_ns())
        if reason is not None:
            return PruneDecision(checkpoint, True, reason)
        lock.sweep(storage.list())
        for name in storage.unfinished():
            storage.discard_unfinished(name)
        try:
            removed = list(_being_removed(checkpoint.path, lock))
        except _ReadMeanwhileError:
            return PruneDecision(checkpoint, True, _READ)
        for name in removed:
            lock.delete(name)
        for folder in (*folders_of(removed), *_folders_of_megatron(storage)):
            storage_at(checkpoint.path / folder).remove()
    except (SaveError, LoadError) as error:
        text = f"{checkpoint.path}: cannot be removed: {error}"
        if not storage.exists(METADATA_FILE):
            text += ". What is left of it is no checkpoint any more, the same command resumes its removal"
        raise SaveError(text) from error
    finally:
        # What a save that is gone has left, the next save is still to find.
        with contextlib.suppress(SaveError, LoadError, OSError):
            lock.release(remove_marker=not save_before)
    # From here on a save may lock it again: then it is not empty.
    if storage.remove():
        return PruneDecision(checkpoint, False, "removed")
    left = sorted(name for name in (*storage.list(), *storage.folders()) if not is_lock_file(name))
    return PruneDecision(checkpoint, False, "removed, but for files that are not its own", tuple(left))


def _locked(storage: Storage, checkpoint: RunCheckpoint, run: str | os.PathLike[str]) -> DirectoryLock:
    """Lock the directory of a checkpoint that is to go; where no space is left for that, its first file makes room."""
    try:
        return DirectoryLock.take(storage, {_REMOVAL: True})
    except SaveError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _FULL or _reason_now(storage, checkpoint, run):
            raise
    storage.delete(next(_being_removed(checkpoint.path, None)))
    return DirectoryLock.take(storage, {_REMOVAL: True})


def _reason_now(
    storage: Storage, checkpoint: RunCheckpoint, run: str | os.PathLike[str], now_ns: int | None = None
) -> str | None:
    """Why a checkpoint must stay as it is now that it is locked; None if it is as it was when it was chosen."""
    if tracked_name(run) == checkpoint.name:
        return "the tracker file names it"
    published = storage.version(METADATA_FILE)
    # After a removal has begun there is none, until a save publishes one.
    if published is not None and published.modified_ns / 1e9 != checkpoint.saved_at_s:
        return "it has been saved again"
    return _reason_to_wait(checkpoint, now_ns)


def _being_removed(directory: Path, lock: DirectoryLock | None) -> Iterator[str]:
    """What a checkpoint consists of, its index last of all; from the first on, it is no checkpoint any more."""
    storage = storage_at(directory)
    name, index = _index_to_remove(storage)
    if index is None:
        raise SaveError(f"{storage.path(name)}: its index has changed")
    below: list[str] = []
    for folder in _folders_of_megatron(storage):  # whatever cannot be listed is found before anything has gone
        with contextlib.suppress(CorruptCheckpointError):  # with links in it, all of it stays
            below += [f"{folder}/{name}" for name in files_below(directory / folder)]
    if name == METADATA_FILE:
        if lock is None:
            storage.move(METADATA_FILE, _REMOVED_INDEX)
        else:
            # A second name first. Taking the first away fails if a save has taken the directory over meanwhile.
            lock.delete(_REMOVED_INDEX)
            storage.lock(_REMOVED_INDEX, METADATA_FILE)
            lock.delete(METADATA_FILE)
            # A load that comes from here on finds no checkpoint; one that came since this was last asked has found it.
            if storage.is_in_use(_REMOVED_INDEX):
                storage.lock(METADATA_FILE, _REMOVED_INDEX)
                lock.delete(_REMOVED_INDEX)
                raise _ReadMeanwhileError
        storage.renew(_REMOVED_INDEX)  # a file that is newer from now on is not of this checkpoint
        storage.sync()
    yield from _own_files(index)
    yield from below
    yield from filter(_is_sidecar, storage.sizes())
    yield _REMOVED_INDEX


def _folders_of_megatron(storage: Storage) -> list[str]:
    there = {*storage.folders()} - {*storage.links()}
    return [folder for folder in FOLDERS_OF_MEGATRON if folder in there]


def _index_to_remove(storage: Storage) -> tuple[str, CheckpointIndex | None]:
    """The index that says what there is to remove, under its own name or that of a removal under way."""
    name = METADATA_FILE if storage.exists(METADATA_FILE) else _REMOVED_INDEX
    try:
        with storage.open_reader(name, direct="off") as reader:
            content = reader.read(0, min(MAX_METADATA_BYTES, reader.size_bytes))
        return name, parse_index(content, storage.location, strict=False)
    except LoadError:
        return name, None


def _own_files(index: CheckpointIndex) -> Iterator[str]:
    """The data files that an index names and that lie in the directory itself; an index may say anything."""
    return (name for name in sorted(index_files(index)) if name.endswith(DATA_SUFFIX) and "/" not in name)
