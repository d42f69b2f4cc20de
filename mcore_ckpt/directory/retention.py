"""Removing a run's old checkpoints: by a person (`mcore-ckpt prune`), or by the run itself (`SaveOptions.keep_last`).

Only files in the index of a checkpoint are removed, with the files of every checkpoint and the folders that a save of
Megatron-Core makes in it; whatever else lies in its directory stays. Nothing half removed passes for a checkpoint, and
a removal that was interrupted can be finished.

In a file system the directory is renamed, then looked at again, and renamed back if it is not what was judged: so
nothing goes that was saved meanwhile, and no save works in what goes. Its new name says which `.metadata` was judged:
the next removal finishes it, or brings back what is another. In an object store `.metadata` is replaced, as a save does
it, by a mark; no save begins while that is young, and the removal takes it away before it is old.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, OptionError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory.commit import (
    NOTE,
    REMOVED,
    YOUNG_S,
    Commit,
    file_on_its_way,
    identity_in_force,
    is_note,
    is_pending,
    notes,
)
from mcore_ckpt.directory.in_force import DrainNote, index_files, is_drain_note, iteration_of, saves_of, tracked_name
from mcore_ckpt.directory.iterations import (
    FOLDERS_OF_MEGATRON,
    RunCheckpoint,
    directories_of_run,
    files_below,
    flaw_of_files,
    folders_of,
    is_gone,
    look_at,
)
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import DATA_SUFFIX, Identity, tells_save
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    METADATA_FILE,
    parse_index,
    read_index,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

# What a directory is called while it is removed: with a sum of which `.metadata` was judged, and its own name, behind.
_ASIDE = ".mcore_ckpt_removed."
_ASIDE_NAME = re.compile(re.escape(_ASIDE) + r"(?P<judged>[0-9a-f]{16})\.(?P<id>[0-9a-f]{16})\.(?P<name>.+)")
# What a note says in a directory that is being removed.
REMOVAL: Final = "removal"
_READ = "a load is reading it"
NOT_COPIED = "it is not in the second tier"
LOCKED: Final = "a save is at work in it, or has died there"
_OTHER_REMOVAL: Final = "another removal is at work in it"
GONE: Final = "another removal has removed it"
# A mark in a store is taken away within so long, or stays.
_MARK_GOES_WITHIN_S = YOUNG_S / 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SIDECARS = (CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE, "train_state.pt", "run_config.yaml")  # the last two are Bridge's
# Stock Megatron-Core and DCP mark no directory that they write to: files newer than the index tell, for so long.
_RECENT_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """What becomes of a checkpoint.

    Attributes:
        checkpoint: what it is.
        keep: whether it stays.
        reason: why.
        left: with `keep` false and after a removal, names in its directory that were not its own and are still there.
        stays_bytes: with `keep` false, bytes of it that stay, where its optimizer's state goes alone.
    """

    checkpoint: RunCheckpoint
    keep: bool
    reason: str
    left: tuple[str, ...] = ()
    stays_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was decided, in the order of the checkpoints; `removed` says whether it was done."""

    path: str
    removed: bool
    decisions: tuple[PruneDecision, ...]

    @property
    def freed_bytes(self) -> int:
        """Bytes of the checkpoints, or of their optimizers' state, that go."""
        going = [each for each in self.decisions if not each.keep]
        return sum(max(0, each.checkpoint.size_bytes - each.stays_bytes) for each in going)


def prune_run(
    run: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | None = None,
    remove: bool = False,
    saved_last: str | None = None,
    counts: Callable[[CheckpointIndex], bool] = lambda _: True,
) -> PruneReport:
    """Decide which checkpoints of a run can go, and with `remove` remove them.

    A run that was resumed from an older iteration leaves higher numbers behind: the newest are counted from what was
    saved last downwards. Never goes: `release`; what the tracker file names; the newest `keep_last` that are whole, by
    number or by time of saving, and whatever has a higher number than the lowest of the first; a directory that a save
    has marked, or in which files have just been written; what a load of this package is reading, as far as the
    storage tells; what is to be copied to a second tier, and is not complete there; a link, and what a link in the
    run's directory leads to; a directory without a readable index, since nothing says which files are its own. A link
    is not counted as one of the newest. Before a complete checkpoint goes, the newest are opened (index, manifest,
    footers): one that cannot be opened does not count.

    Args:
        run: the directory that holds `iter_0000100` and the like.
        keep_last: how many complete checkpoints stay, the newest; at least 1.
        keep_every: iterations that are multiples of it stay.
        remove: do it.
        saved_last: name of the directory that was saved last; None: what was published last, by the storage's clock.
        counts: whether a complete checkpoint can be one of the newest.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint of any kind in it.
        CorruptCheckpointError, LoadError: it cannot be listed, or the tracker file names nothing.
        OptionError: `keep_last` or `keep_every` is below 1.
        SaveError: something could not be removed; the same call resumes.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: expected at least 1")
    tracked = tracked_name(run)
    directories = directories_of_run(run)
    aside = _finished(run) if remove else []
    looked = [look_at(directory, tracked=tracked) for directory in directories]
    checkpoints = [checkpoint for checkpoint, _ in looked]
    links = storage_at(run).links()
    passed_over = {*links, *(each.name for each, index in looked if index is not None and not counts(index))}
    flaws: dict[str, str | None] = {}

    def stays(checkpoint: RunCheckpoint) -> bool:
        """Whether one of the newest can stand in for older ones: it is opened first."""
        if checkpoint.name not in flaws:
            flaws[checkpoint.name] = flaw_of_files(checkpoint.path)
        return flaws[checkpoint.name] is None

    newest = _newest(
        [each for each in checkpoints if each.whole and each.name not in passed_over],
        keep_last,
        None if saved_last is None else iteration_of(saved_last),
        stays,
    )
    decisions = aside
    for found in checkpoints:
        flaw = flaws.get(found.name)
        checkpoint = found if flaw is None else replace(found, problems=(flaw,))
        storage = storage_at(checkpoint.path)
        reason = _reason_to_keep(checkpoint, newest, links, keep_last, keep_every)
        reason = reason or _linked(checkpoint, links) or _reason_to_wait(storage)
        if reason is not None:
            decision = PruneDecision(checkpoint, True, reason)
        elif remove:
            try:
                decision = _remove(checkpoint, run)
            except SaveError:
                if not is_gone(checkpoint.path):
                    raise
                decision = PruneDecision(checkpoint, True, GONE)
        else:
            why = "a removal was interrupted" if _half_removed(storage) else "old"
            decision = PruneDecision(checkpoint, False, why)
        if decision.keep and is_gone(checkpoint.path):
            decision = PruneDecision(checkpoint, False, GONE)
        decisions.append(decision)
    return PruneReport(str(run), remove, tuple(decisions))


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest checkpoints of a run: where its last save is, the lowest number, and who has been saved last."""

    head: int
    lowest: int | None  # None: there are not as many
    by_time: frozenset[int]


def _newest(
    whole: list[RunCheckpoint], keep_last: int, saved_last: int | None, stays: Callable[[RunCheckpoint], bool]
) -> _Newest:
    """`whole` is sorted by number. Numbers above the last save do not count: of a branch that was left, or later."""
    numbered = {each.iteration: each for each in reversed(whole) if each.iteration is not None}

    def first(iterations: Iterable[int]) -> list[int]:
        found = (each for each in iterations if stays(numbered[each]))
        return list(itertools.islice(found, min(keep_last, len(numbered))))

    times = {iteration: (each.made_at_s or 0.0, iteration) for iteration, each in numbered.items()}
    by_time = first(sorted(times, key=times.__getitem__, reverse=True))
    head = saved_last if saved_last is not None else next(iter(by_time), 0)
    below = first(iteration for iteration in numbered if iteration <= head)
    return _Newest(head, below[-1] if len(below) == keep_last else None, frozenset(by_time))


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
    if checkpoint.locked and (why := lock_of(storage_at(checkpoint.path))) is not None:
        return why
    if _half_removed(storage_at(checkpoint.path)):
        return None
    if newest.lowest is None:
        return f"not {keep_last} checkpoints are complete, counted down from the one that was saved last, {newest.head}"
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
    """Whether an earlier removal was interrupted here, in a store."""
    with contextlib.suppress(LoadError):
        return storage.read(METADATA_FILE, len(REMOVED)) == REMOVED
    return False


def _reason_to_wait(storage: Storage, now_ns: int | None = None) -> str | None:
    """Why an old checkpoint must not go now; None: it can. `now_ns`: by the storage's clock, if known."""
    try:
        if _half_removed(storage):
            return None
        index = _index_of(storage)
        if index is None:
            return "no index says which of its files are the checkpoint's"
        versions = [storage.version(file) for file in _own_files(index)]
        newest_ns = max((version.modified_ns for version in versions if version is not None), default=0)
        of_index = storage.version(METADATA_FILE)
        limit_ns = 0 if of_index is None else of_index.modified_ns
        limit_ns = max(limit_ns, (time.time_ns() if now_ns is None else now_ns) - _RECENT_NS)
        if storage.is_in_use(METADATA_FILE):
            return _READ
        if (why := _not_copied(storage)) is not None:
            return why
    except LoadError as error:
        return f"its files cannot be looked at: {error}"
    return "its files are newer than its index: a save may be at work" if newest_ns > limit_ns else None


def _not_copied(storage: Storage) -> str | None:
    """Why a checkpoint is not where its note says that it is to be copied to. Raises `LoadError`."""
    note = DrainNote.in_force(checkpoint_path(storage.location))
    if note is None:
        return None
    try:
        if note.leads_back(storage):
            return f"{NOT_COPIED}: {note.to} is its own directory, by another path"
        there, index = look_at(checkpoint_path(note.to))
    except (LoadError, OptionError) as error:
        return f"{NOT_COPIED}, as far as can be told: {note.to}: {error}"
    if index is not None and note.save in saves_of(index) and there.whole:
        own = _index_of(storage)
        if there.removed is None or own is None or own.removed is not None:
            return None
    return f"{NOT_COPIED}, {note.to}"


def lock_of(storage: Storage, own: str = "") -> str | None:
    """Who keeps others out of a directory by a note, but one's own; None: at most removals, none of them known to be at
    work.
    """
    try:
        found = [owner for owner in notes(storage, storage.list()) if owner.save != own]
    except LoadError:
        return LOCKED
    others = [owner for owner in found if (owner.noted or {}).get(REMOVAL) is not True]
    if not all(not owner.host and _ended_as_model_only(storage, owner.save) for owner in others):
        return LOCKED
    at_work = any(owner.process_state() == "alive" for owner in found if owner not in others)
    return _OTHER_REMOVAL if at_work else None


def _ended_as_model_only(storage: Storage, save: str) -> bool:
    """Whether a note is an index that was to be published without the optimizer's state, and is left from then."""
    name = NOTE + save
    try:
        there, is_of_one = storage.version(name), parse_index(storage.read(name), storage.location, name=name).removed
    except LoadError:
        return False
    return there is not None and is_of_one is not None and time.time() - there.modified_ns / 1e9 > YOUNG_S


def reason_to_stay(checkpoint: RunCheckpoint, run: str | os.PathLike[str], own: str, there: Storage) -> str | None:
    """Why a checkpoint under a removal's own note must stay as it is; None: it can go. `there`: where it lies."""
    if tracked_name(run) == checkpoint.name:
        return "the tracker file names it"
    published = there.version(METADATA_FILE)
    if published is not None and published.modified_ns / 1e9 != checkpoint.saved_at_s:
        return "it has been saved again"
    if (why := lock_of(there, own)) is not None:
        return why
    note = there.version(NOTE + own)
    return _reason_to_wait(there, None if note is None else note.modified_ns)


def _remove(checkpoint: RunCheckpoint, run: str | os.PathLike[str]) -> PruneDecision:
    """Remove a checkpoint, unless it has come into use meanwhile."""
    storage = storage_at(checkpoint.path)
    if (why := lock_of(storage)) is not None:
        return PruneDecision(checkpoint, True, why)
    try:
        commit = Commit.begin(storage, {REMOVAL: True})
    except SaveError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _FULL:
            if (why := lock_of(storage)) is not None:
                return PruneDecision(checkpoint, True, why)
            raise SaveError(f"{checkpoint.path}: cannot be removed: {error}") from error
        commit = None  # the note keeps saves out, as a rule; where no space is left, none can be made
    reason = partial(reason_to_stay, checkpoint, run, "" if commit is None else commit.id)
    try:
        if (why := reason(storage)) is not None:
            return PruneDecision(checkpoint, True, why)
        if storage.is_store:
            return _removed_in_store(checkpoint, commit)
        return _removed_aside(checkpoint, reason)
    except (SaveError, LoadError, OSError) as error:
        text = f"{checkpoint.path}: cannot be removed: {error}"
        if not storage.exists(METADATA_FILE) or _half_removed(storage):
            text += ". What is left of it is no checkpoint any more, the same command resumes its removal"
        raise SaveError(text) from error
    finally:
        if commit is not None:
            commit.give_up()


# In a file system


def _removed_aside(checkpoint: RunCheckpoint, reason: Callable[[Storage], str | None]) -> PruneDecision:
    directory = Path(storage_at(checkpoint.path).location)
    judged = identity_in_force(storage_at(directory))
    _below(directory, storage_at(directory))  # whatever cannot be listed is found before anything has gone
    name = f"{_ASIDE}{_sum(judged)}.{secrets.token_hex(8)}.{directory.name}"
    aside = directory.parent / name
    directory.rename(aside)
    storage = storage_at(aside)
    why = LOCKED if _sum(identity_in_force(storage)) != _sum(judged) else reason(storage)
    if why is not None:
        _bring_back(aside, directory)
        return PruneDecision(checkpoint, True, why)
    storage_at(directory.parent).sync()
    left = _remove_aside(aside, directory)
    return PruneDecision(checkpoint, False, "removed, but for files that are not its own" if left else "removed", left)


def _sum(judged: Identity | None) -> str:
    return hashlib.sha256(("" if judged is None else judged.token).encode()).hexdigest()[:16]


def _bring_back(aside: Path, directory: Path) -> None:
    try:
        aside.rename(directory)
    except OSError as error:
        raise SaveError(
            f"{aside}: was to be removed, and is in use; it cannot get its name {directory.name} back: {error}. "
            "Rename it by hand"
        ) from error


def _remove_aside(aside: Path, directory: Path) -> tuple[str, ...]:
    """Remove what is a checkpoint's own of a directory that was renamed; the rest gets its place back. Returns that."""
    storage = storage_at(aside)
    try:
        names = [*_below(aside, storage), *_of_checkpoint(storage)]
        for name in names:
            storage.delete(name)
        for folder in (*folders_of(names), *_folders_of_megatron(storage)):
            storage_at(aside / folder).remove()
        if storage.remove():
            return ()
        left = tuple(sorted((*storage.list(), *storage.folders())))
        try:
            aside.rename(directory)  # what is there may be empty
        except OSError:
            directory.mkdir(exist_ok=True)
            for name in left:
                if not os.path.lexists(directory / name):
                    (aside / name).rename(directory / name)
            storage.remove()
        return left
    except (SaveError, LoadError, OSError):
        if not is_gone(aside):
            raise
        return ()  # another removal has finished it


def _finished(run: str | os.PathLike[str]) -> list[PruneDecision]:
    """What comes of directories whose removal was interrupted."""
    storage, done = storage_at(run), []
    for found in filter(None, map(_ASIDE_NAME.fullmatch, storage.folders())):
        aside, directory = checkpoint_path(run) / found[0], checkpoint_path(run) / found["name"]
        checkpoint = replace(look_at(aside)[0], path=directory, iteration=iteration_of(found["name"]))
        there = storage_at(aside)
        if _is_at_work(there):
            done.append(PruneDecision(checkpoint, True, _OTHER_REMOVAL))
        elif _sum(identity_in_force(there)) not in (found["judged"], _sum(None)):
            _bring_back(aside, directory)  # it was saved after it was judged
        elif there.is_in_use(METADATA_FILE):
            done.append(PruneDecision(checkpoint, True, _READ))
        else:
            done.append(PruneDecision(checkpoint, False, "removed", _remove_aside(aside, directory)))
    return done


def _is_at_work(aside: Storage) -> bool:
    with contextlib.suppress(LoadError):
        others = [owner for owner in notes(aside, aside.list()) if owner.pid != os.getpid()]
        return any(owner.process_state() == "alive" for owner in others)
    return False


# In an object store


def _removed_in_store(checkpoint: RunCheckpoint, commit: Commit | None) -> PruneDecision:
    storage = storage_at(checkpoint.path)
    if commit is None:
        raise SaveError(f"{storage}: no space is left for a note")
    names = [*_below(checkpoint.path, storage), *_of_checkpoint(storage)]
    began_s = time.monotonic()
    commit.publish(REMOVED, needed=names)
    for name in names:
        if name != METADATA_FILE and commit.is_in_force():
            storage.delete(name)
    for folder in (*folders_of(names), *_folders_of_megatron(storage)):
        storage_at(checkpoint.path / folder).remove()
    if commit.is_in_force() and time.monotonic() - began_s < _MARK_GOES_WITHIN_S:
        storage.delete(METADATA_FILE)
    if storage.remove():
        return PruneDecision(checkpoint, False, "removed")
    left = sorted(name for name in (*storage.list(), *storage.folders()) if not is_note(name))
    return PruneDecision(checkpoint, False, "removed, but for files that are not its own", tuple(left))


# What goes


def _below(directory: Path, storage: Storage) -> list[str]:
    """What Megatron-Core has made in folders."""
    below: list[str] = []
    for folder in _folders_of_megatron(storage):
        with contextlib.suppress(CorruptCheckpointError):  # with links in it, all of it stays
            below += [f"{folder}/{name}" for name in files_below(directory / folder)]
    return below


def _of_checkpoint(storage: Storage) -> list[str]:
    """The files of a checkpoint, and of saves into its directory; its index last."""
    index = _index_of(storage)
    own = set() if index is None else set(_own_files(index))
    names = storage.list()
    published = storage.version(METADATA_FILE)
    if index is not None and index.removed is not None and published is not None:
        # A removal of the optimizer that was killed has left them; newer ones are of a save that is at work.
        before = [name for name in index.removed.files if name in names and name.endswith(DATA_SUFFIX)]
        found = {name: storage.version(name) for name in before}
        own.update(name for name, one in found.items() if one and one.modified_ns <= published.modified_ns)
    kinds = (_SIDECARS.__contains__, is_pending, is_drain_note, is_note, file_on_its_way)
    others = [name for name in names if any(is_kind(name) for is_kind in kinds)]
    return [*sorted(own.union(filter(tells_save, names))), *others, METADATA_FILE]


def _folders_of_megatron(storage: Storage) -> list[str]:
    there = {*storage.folders()} - {*storage.links()}
    return [folder for folder in FOLDERS_OF_MEGATRON if folder in there]


def _index_of(storage: Storage) -> CheckpointIndex | None:
    """The index that says what there is to remove."""
    with contextlib.suppress(LoadError):
        return read_index(checkpoint_path(storage.location), strict=False)
    return None


def _own_files(index: CheckpointIndex) -> Iterator[str]:
    """The data files that an index names and that lie in the directory itself; an index may say anything."""
    return (name for name in sorted(index_files(index)) if name.endswith(DATA_SUFFIX) and "/" not in name)
