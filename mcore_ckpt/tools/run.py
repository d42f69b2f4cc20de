"""A run at a glance, and letting go of its old checkpoints.

What is removed is only ever what the index of a checkpoint names, with the files that every checkpoint has; whatever
else lies in its directory stays. `.metadata` goes first, under another name: so nothing half removed passes for a
checkpoint, and a removal that was interrupted can be finished. The directory is claimed for the whole removal, so that
no save begins in it meanwhile; the claim's note tells a removal that has died from a save that has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError, OptionError, SaveError
from mcore_ckpt.directory.claim import Claim, claimants, is_claim_file
from mcore_ckpt.directory.in_force import index_files, is_pending
from mcore_ckpt.directory.run import RunCheckpoint, iteration_directories, look_at, tracked_name
from mcore_ckpt.format.file_names import DATA_SUFFIX
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, MAX_METADATA_BYTES, METADATA_FILE, parse_index
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.parallel_layout import ParallelLayout, layout_of_chunks

__all__ = ["Fate", "ListedCheckpoint", "PruneReport", "RunReport", "list_run", "prune_run"]

# What `.metadata` is called while what it names is being removed.
_REMOVED_INDEX = METADATA_FILE + ".removed"
# What the note of a claim says whose directory is being removed.
_REMOVAL = "removal"
_CLAIMED = "a save is at work in it, or has died there"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SIDECARS = (CONFIG_FILE, COMMON_FILE, "integrity.json")
# Stock Megatron-Core and DCP mark no directory that they write to: files newer than the index tell, for so long.
_RECENT_S = 3600.0


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One of a run's checkpoints, and the parallel layout that its chunks show; None where the index cannot be read."""

    checkpoint: RunCheckpoint
    layout: ParallelLayout | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run has.

    Attributes:
        path: its directory.
        tracked: name of the checkpoint that the tracker file names; None without one.
        tracker_problem: why the tracker file names nothing, or nothing that can be loaded.
        checkpoints: `release` first, then by iteration.
    """

    path: str
    tracked: str | None
    tracker_problem: str | None
    checkpoints: tuple[ListedCheckpoint, ...]


@dataclass(frozen=True, slots=True)
class Fate:
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
    fates: tuple[Fate, ...]

    @property
    def freed_bytes(self) -> int:
        """Of the checkpoints that go."""
        return sum(fate.checkpoint.size_bytes for fate in self.fates if not fate.keep)


def list_run(run: str | os.PathLike[str]) -> RunReport:
    """The checkpoints of a run: whether they are whole (by their structure), how large, how old, in which layout.

    Args:
        run: the directory that holds `iter_0000100` and the like.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint of any kind in it.
        LoadError: it cannot be listed.
    """
    tracked: str | None = None
    problem: str | None = None
    try:
        tracked = tracked_name(run)
    except LoadError as error:
        problem = str(error)
    found = []
    for directory in _directories(run):
        checkpoint, index = look_at(directory, tracked=tracked)
        found.append(ListedCheckpoint(checkpoint, None if index is None else layout_of_chunks(index)))
    named = next((listed.checkpoint for listed in found if listed.checkpoint.tracked), None)
    if tracked is not None and named is None:
        problem = f"it names {tracked}, which is not there"
    elif named is not None and named.newer:
        problem = f"it names {tracked}, which this version cannot read: {named.newer}"
    elif named is not None and not named.whole:
        problem = f"it names {tracked}, which is not whole: {named.problems[0]}"
    return RunReport(str(run), tracked, problem, tuple(found))


def prune_run(
    run: str | os.PathLike[str], *, keep_last: int, keep_every: int | None = None, remove: bool = False
) -> PruneReport:
    """Decide which checkpoints of a run can go, and with `remove` let them go.

    Never goes: `release`; what the tracker file names; the newest `keep_last` that are whole, and whatever is newer
    than the oldest of these; a directory that a save has marked, or in which files have just been written; a directory
    behind a link; what has no index that can be read, since nothing says which files are the checkpoint's.

    Args:
        run: the directory that holds `iter_0000100` and the like.
        keep_last: how many whole checkpoints stay, the newest; at least 1.
        keep_every: iterations that are multiples of it stay.
        remove: do it.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint of any kind in it.
        CorruptCheckpointError, LoadError: it cannot be listed, or the tracker file names nothing.
        OptionError: `keep_last` or `keep_every` is below 1.
        SaveError: something could not be removed; the same call goes on with it.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: expected at least 1; the newest whole checkpoint always stays")
    tracked = tracked_name(run)
    directories = _directories(run)
    checkpoints = [look_at(directory, tracked=tracked)[0] for directory in directories]
    whole = [checkpoint for checkpoint in checkpoints if checkpoint.whole and checkpoint.iteration is not None]
    oldest_kept = whole[-keep_last:][0].iteration if len(whole) >= keep_last else None
    fates = []
    for checkpoint in checkpoints:
        reason = _reason_to_keep(checkpoint, oldest_kept, keep_last, keep_every) or _reason_to_wait(checkpoint)
        if reason is not None:
            fates.append(Fate(checkpoint, True, reason))
        elif remove:
            fates.append(_let_go(checkpoint, Path(run)))
        else:
            fates.append(Fate(checkpoint, False, "a removal was interrupted" if _half_removed(checkpoint) else "old"))
    return PruneReport(str(run), remove, tuple(fates))


def _directories(run: str | os.PathLike[str]) -> list[Path]:
    found = iteration_directories(run)
    if not found:
        raise CheckpointNotFoundError(f"{run}: no checkpoints in it: expected directories such as iter_0000100")
    return found


def _reason_to_keep(
    checkpoint: RunCheckpoint, oldest_kept: int | None, keep_last: int, keep_every: int | None
) -> str | None:
    """Why a checkpoint stays; None if it can go."""
    if checkpoint.iteration is None:
        return "it is no iteration"
    if checkpoint.tracked:
        return "the tracker file names it"
    if checkpoint.path.is_symlink():
        return "its directory is a link"
    if checkpoint.claimed and not _is_of_removals(checkpoint.path):
        return _CLAIMED
    if _half_removed(checkpoint):
        return None
    if oldest_kept is None:
        return f"there are no {keep_last} whole checkpoints" if keep_last > 1 else "no checkpoint is whole"
    if checkpoint.iteration >= oldest_kept:
        return f"one of the newest {keep_last}" if checkpoint.whole else f"newer than one of the last {keep_last}"
    if keep_every is not None and checkpoint.iteration % keep_every == 0:
        return f"a multiple of {keep_every}"
    return None


def _half_removed(checkpoint: RunCheckpoint) -> bool:
    """Whether an earlier removal was interrupted here, and no checkpoint has been written into the directory since."""
    return (checkpoint.path / _REMOVED_INDEX).is_file() and not (checkpoint.path / METADATA_FILE).exists()


def _reason_to_wait(checkpoint: RunCheckpoint) -> str | None:
    """Why a checkpoint that could go must not go now; None if nothing stands against it."""
    directory = checkpoint.path
    index_path, index = _index_to_remove(directory)
    if index is None:
        return "no index says which of its files are the checkpoint's"
    try:
        # A rename changes nothing but the time of the last change: before it, no file was removed.
        status = index_path.stat()
        limit_s = status.st_ctime if _half_removed(checkpoint) else max(status.st_mtime, time.time() - _RECENT_S)
        newest_s = max((path.stat().st_mtime for path in _own_files(directory, index) if path.exists()), default=0.0)
    except OSError as error:
        return f"its files cannot be looked at: {error.strerror or error}"
    return "its files are newer than its index: a save may be at work" if newest_s > limit_s else None


def _is_of_removals(directory: Path) -> bool:
    """Whether nobody has claimed a directory but removals, of which none is known to go on; also if nobody has."""
    storage = storage_at(directory)
    try:
        found = claimants(storage, [path.name for path in directory.iterdir()])
    except (LoadError, OSError):
        return False
    return all((owner.noted or {}).get(_REMOVAL) is True and owner.process_state() != "alive" for owner in found)


def _let_go(checkpoint: RunCheckpoint, run: Path) -> Fate:
    """Remove a checkpoint, unless it has come into use meanwhile."""
    directory = checkpoint.path
    if not _is_of_removals(directory):
        return Fate(checkpoint, True, _CLAIMED)
    try:
        claim = _claim(checkpoint, run)
    except (SaveError, LoadError) as error:
        if not _is_of_removals(directory):
            return Fate(checkpoint, True, _CLAIMED)
        raise SaveError(f"{directory}: cannot be claimed, and so not removed: {error}") from error
    save_before = any((owner.noted or {}).get(_REMOVAL) is not True for owner in claim.after)
    try:
        reason = _CLAIMED if save_before else _reason_now(checkpoint, run)
        if reason is not None:
            return Fate(checkpoint, True, reason)
        claim.sweep([path.name for path in directory.iterdir()])
        for path in _being_removed(directory):
            claim.check()
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_be_removed(directory, error) from error
    finally:
        # What a save that is gone has left, the next save is still to find.
        with contextlib.suppress(SaveError, LoadError, OSError):
            claim.release(remove_marker=not save_before)
    # From here on a save may claim it again: then it is not empty.
    left = _remove_directory(directory)
    return Fate(checkpoint, False, "removed" if not left else "removed, but for files that are not its own", left)


def _claim(checkpoint: RunCheckpoint, run: Path) -> Claim:
    """Claim the directory of a checkpoint that is to go; where no space is left for that, its first file makes room."""
    storage = storage_at(checkpoint.path)
    try:
        return Claim.take(storage, {_REMOVAL: True})
    except SaveError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _FULL or _reason_now(checkpoint, run) is not None:
            raise
    try:
        next(_being_removed(checkpoint.path)).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_be_removed(checkpoint.path, error) from error
    return Claim.take(storage, {_REMOVAL: True})


def _cannot_be_removed(directory: Path, error: OSError) -> SaveError:
    return SaveError(
        f"{directory}: cannot be removed: {error.strerror or error} ({error.filename}); what is left of it is no "
        "checkpoint any more, the same command goes on with it"
    )


def _reason_now(checkpoint: RunCheckpoint, run: Path) -> str | None:
    """Why a checkpoint must stay as it is now that it is claimed; None if it is as it was when it was chosen."""
    if tracked_name(run) == checkpoint.name:
        return "the tracker file names it"
    published = checkpoint.path / METADATA_FILE
    # After a removal has begun there is none, until a save publishes one.
    if published.exists() and published.stat().st_mtime != checkpoint.saved_at_s:
        return "it has been saved anew"
    return _reason_to_wait(checkpoint)


def _being_removed(directory: Path) -> Iterator[Path]:
    """What a checkpoint consists of, its index last of all; from the first on, it is no checkpoint any more.

    Raises:
        OSError: its index cannot be read or renamed.
    """
    index_path, index = _index_to_remove(directory)
    removed_index = directory / _REMOVED_INDEX
    if index is None:
        raise OSError(0, "its index has changed", str(index_path))
    if index_path != removed_index:
        index_path.replace(removed_index)
        storage_at(directory).sync_directory()
    folders: set[Path] = set()
    for path in _own_files(directory, index):
        yield path
        folders.update(parent for parent in path.parents if directory in parent.parents)
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        _remove_if_empty(folder)
    yield from _sidecars(directory)
    yield removed_index


def _remove_directory(directory: Path) -> tuple[str, ...]:
    """Remove a directory if it is empty; returns the names of what else lies there, but for claims."""
    if _remove_if_empty(directory):
        storage_at(directory.parent).sync_directory()
        return ()
    try:
        return tuple(sorted(path.name for path in directory.iterdir() if not is_claim_file(path.name)))
    except FileNotFoundError:
        return ()


def _index_to_remove(directory: Path) -> tuple[Path, CheckpointIndex | None]:
    """The index that says what there is to remove, under its own name or that of a removal under way."""
    path = directory / METADATA_FILE
    if not path.exists():
        path = directory / _REMOVED_INDEX
    if not _is_plain_file(path):
        return path, None
    try:
        with path.open("rb") as file:
            return path, parse_index(
                file.read(min(MAX_METADATA_BYTES, path.stat().st_size)), str(directory), strict=False
            )
    except (LoadError, OSError):
        return path, None


def _own_files(directory: Path, index: CheckpointIndex) -> Iterator[Path]:
    """The data files that an index names and that lie in its directory; an index may say anything."""
    for name in sorted(index_files(index)):
        path = directory / name
        leads_elsewhere = any(parent.is_symlink() for parent in path.parents if directory in parent.parents)
        if name.endswith(DATA_SUFFIX) and not leads_elsewhere:
            yield path


def _sidecars(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if (path.name in _SIDECARS or is_pending(path.name)) and _is_plain_file(path):
            yield path


def _is_plain_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _remove_if_empty(directory: Path) -> bool:
    """Remove a directory; False if something is in it, or it is gone already."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return False
    except OSError:
        if any(directory.iterdir()):
            return False
        raise
    return True
