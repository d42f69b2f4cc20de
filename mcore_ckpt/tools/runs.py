"""Runs: their checkpoints at a glance, where a copy or a conversion of one lies, copies, and lineage.

    SRC is a checkpoint            ->  DST is the new one
    SRC is a run, iteration 1000   ->  DST/iter_0001000
    SRC is a directory of NeMo     ->  DST/weights, and DST/context

A tracker file next to a checkpoint that is named as a job names them lets the job load it.

A copy, between any directories and object stores, is published as a save is: data files first, `.metadata` last, by
compare-and-swap. So it is there complete or not at all, and a copy that was interrupted is resumed: what arrived
complete is compared, not sent again. The source is compared with its own checksums before: a damaged one would else
replace the last intact copy of it.

Lineage: at which save of a run did a tensor or an object leave it? What a save holds of one parameter (weight, FP32
master, moments) changes from save to save, or all of it is frozen; so do the shards of one object, as each rank's
random state. Fingerprints and checksums in the indexes say what stands still while the rest changes, or after it has
changed before. No data of tensors is read.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    without_tracebacks,
)
from mcore_ckpt.core.options import PARTIAL, checkpoint_path
from mcore_ckpt.core.team import current_team
from mcore_ckpt.directory.commit import file_on_its_way
from mcore_ckpt.directory.copying import (
    OF_THIS_PACKAGE,
    CheckpointFiles,
    JudgedFiles,
    Sent,
    copy_and_commit,
    crc_of,
    files_of,
    metadata_of,
    refuse_others,
)
from mcore_ckpt.directory.in_force import RELEASE, is_checkpoint_name, iteration_of, tracked_name
from mcore_ckpt.directory.iterations import (
    FOLDERS_OF_MEGATRON,
    RunCheckpoint,
    directories_of_run,
    files_below,
    is_gone,
    iteration_directories,
    look_at,
    refuse_incomplete,
    structure_flaws,
    sync_folders,
)
from mcore_ckpt.format.index import CheckpointIndex, is_extra_state, is_flat_bucket
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    EXPORTS_FILE,
    HF_INDEX,
    METADATA_FILE,
    NEMO_CONTEXT,
    NEMO_WEIGHTS,
    TRACKER_FILE,
    parse_index,
    read_common_file,
    read_index,
)
from mcore_ckpt.format.zip_records import layout_of_versions
from mcore_ckpt.load.checks import check_data_files, global_shape
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import lies_in, storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import (
    ParallelLayout,
    is_optimizer_key,
    layout_of_chunks,
    model_key,
    read_object,
    read_plain_state,
)

_logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint of a run, the layout that its chunks show, if they can be read; whether it was exported."""

    checkpoint: RunCheckpoint
    layout: ParallelLayout | None
    exported: bool = False


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run has.

    Attributes:
        path: its directory.
        tracked: name of the checkpoint that the tracker file names; None without one.
        tracker_problem: why the tracker file names nothing, or nothing that can be loaded.
        checkpoints: `release` first, then by iteration.
        unfinished: directories that `reshard` or another conversion is making, or has left when it was interrupted; the
            same command resumes them.
        exports: directory or URL that gets the models, in a run that exports them.
    """

    path: str
    tracked: str | None
    tracker_problem: str | None
    checkpoints: tuple[ListedCheckpoint, ...]
    unfinished: tuple[str, ...] = ()
    exports: str | None = None


def list_run(run: str | os.PathLike[str]) -> RunReport:
    """The checkpoints of a run: whether they are complete (by their structure), how large, how old, in which layout.

    Args:
        run: the directory that holds `iter_0000100` and the like, or checkpoints of other names; or one checkpoint.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint of any kind in it.
        LoadError: it cannot be listed.
    """
    storage = storage_at(run)
    folders = storage.folders()
    unfinished = tuple(
        name
        for name in sorted(folders)
        if name.endswith(PARTIAL)
        and (is_checkpoint_name(name.removesuffix(PARTIAL)) or storage.exists(f"{name}.journal"))
    )
    tracked: str | None = None
    problem: str | None = None
    try:
        tracked = tracked_name(run)
    except LoadError as error:
        problem = str(error)
    found = []
    exports = _exports_of(storage)
    directories = iteration_directories(run) or _checkpoints_in(checkpoint_path(run), folders)
    for directory in directories if directories or unfinished else directories_of_run(run):
        checkpoint, index = look_at(directory, tracked=tracked)
        if checkpoint.problems and is_gone(directory):
            continue
        layout = None if index is None else layout_of_chunks(index)
        exported = exports is not None and storage_at(exports / directory.name).exists(HF_INDEX)
        found.append(ListedCheckpoint(checkpoint, layout, exported))
    named = next((listed.checkpoint for listed in found if listed.checkpoint.tracked), None)
    if tracked is not None and named is None and tracked_name(run) != tracked:
        return list_run(run)  # a job has saved meanwhile, and removed that
    if tracked is not None and named is None:
        problem = f"it names {tracked}, which is not there"
    elif named is not None and named.newer:
        problem = f"it names {tracked}, which this version cannot read: {named.newer}"
    elif named is not None and not named.whole:
        problem = f"it names {tracked}, which is incomplete: {named.problems[0]}"
    shown = None if exports is None else str(exports)
    return RunReport(str(run), tracked, problem, tuple(found), unfinished, shown)


def _exports_of(storage: Storage) -> Path | None:
    """Where the models of a run are exported to, if that can be reached."""
    try:
        path = checkpoint_path(os.fsdecode(storage.read(EXPORTS_FILE)))
        storage_at(path).folders()
        return path
    except (LoadError, OptionError):
        return None


def _checkpoints_in(path: Path, folders: Collection[str]) -> list[Path]:
    """Checkpoints that are not named as jobs of Megatron name them: the directory itself, or those in it."""
    order = sorted(folders, key=lambda name: [part.zfill(20) for part in re.split(r"(\d+)", name)])
    found = [one for one in (path, *(path / name for name in order)) if storage_at(one).exists(METADATA_FILE)]
    return found[:1] if found[:1] == [path] else found


@dataclass(frozen=True, slots=True)
class Places:
    """The checkpoint that is read and the one that is made, both directories."""

    source: Path
    target: Path
    nemo: Path | None = None  # the source's directory of NeMo, whose `context/` goes next to the target
    left_out: tuple[str, ...] = ()  # names in the run that is read, which are of none of its checkpoints

    def add_context(self, *, dry_run: bool = False) -> None:
        """Copy NeMo's `context/`, before there is a target; with `dry_run` only look. Raises `LoadError`, `SaveError`
        and, where there is another one, `CheckpointExistsError`.
        """
        if self.nemo is None:
            return
        reads, writes = storage_at(self.nemo), storage_at(self.target.parent)
        names = sorted(files_below(self.nemo, lambda name: name != NEMO_CONTEXT))
        there = files_below(self.target.parent, lambda name: name != NEMO_CONTEXT) if writes.is_directory() else ()
        is_made = storage_at(self.target).exists(METADATA_FILE)  # then a user may have added files
        for name in there:
            is_another = crc_of(reads, name) != crc_of(writes, name) if name in names else not is_made
            if is_another:
                raise CheckpointExistsError(
                    f"{writes.path(name)}: differs from what {self.nemo} has, and may be of another model. Nothing has "
                    "been written. Choose another directory, or remove that one first"
                )
        if dry_run:
            return
        writes.ensure()
        for name in writes.list():  # left by a copy that was killed
            if file_on_its_way(name) in {Path(each).name for each in names}:
                writes.delete(name)
        sent = Sent(reads, writes, JudgedFiles(reads))
        for name in names:
            sent.copy(name)
        sync_folders(self.target.parent, names)

    def finish(self) -> None:
        """Add the tracker file next to the target, which is complete. Raises `LoadError` and `SaveError`."""
        around = storage_at(self.target.parent)
        own = -1 if self.target.name == RELEASE else iteration_of(self.target.name)
        if own is None or not storage_at(self.target).exists(CONFIG_FILE):  # else nothing that a job loads
            return
        try:
            named = tracked_name(self.target.parent)
        except CorruptCheckpointError:
            named = "no checkpoint"
        earlier = own if named is None else iteration_of(named)
        if named is None or (earlier is not None and earlier < own):
            around.publish(TRACKER_FILE, (RELEASE if own < 0 else str(own)).encode())
        elif earlier is None and named != self.target.name:
            _logger.warning("%s: stays as it is, and names %s", around.path(TRACKER_FILE), named)


def places_of(source: str | os.PathLike[str], target: str | os.PathLike[str], *, same_format: bool) -> Places:
    """Where to read and what to make. What lies next to NeMo's tensors is kept only for a target of `same_format`."""
    given, taken = checkpoint_path(source), checkpoint_path(target)
    found = checkpoint_directory(given)
    if found == given:
        return Places(found, taken)
    if found.name != NEMO_WEIGHTS:
        return Places(found, taken / found.name, left_out=_next_to_checkpoints(given))
    if not same_format:
        return Places(found, taken)
    return Places(found, taken / NEMO_WEIGHTS, nemo=given)


def _next_to_checkpoints(run: Path) -> tuple[str, ...]:
    """Files and folders in a run's directory that are neither checkpoints, being made, or removed, nor trackers."""
    storage = storage_at(run)
    names = sorted({*storage.list(), *storage.folders()} - {TRACKER_FILE})
    return tuple(n for n in names if not (is_checkpoint_name(n.partition(PARTIAL)[0]) or n.startswith(OF_THIS_PACKAGE)))


def _refuse_other(there: CheckpointIndex, full: CheckpointIndex) -> None:
    """Raise `CheckpointExistsError` unless a checkpoint is the model of another one, which has an optimizer: of the
    same save, or of the same iteration and bit for bit the same.
    """
    why = "there is another checkpoint already"
    if there.removed is not None:
        manifests = [index.manifest for index in (there, full) if index.manifest is not None]
        tensors = [key for key in full.tensors if is_optimizer_key(key)]
        if not any(map(is_optimizer_key, (*full.tensors, *full.objects))):
            why = f"it is model-only, and {full.path} has no optimizer's state either"
        elif len(manifests) == 2 and manifests[0].save_id == manifests[1].save_id:
            return
        elif len(tensors) < there.removed.tensors and not any(map(is_flat_bucket, tensors)):
            why = f"its optimizer had {there.removed.tensors} tensors, and {full.path} has {len(tensors)}"
        else:
            from mcore_ckpt.tools.diff import checkpoint_fingerprint, model_and_optimizer

            own, other = (read_plain_state(index).get("iteration") for index in (there, full))
            model, others = (model_and_optimizer(checkpoint_fingerprint(index.path))[0] for index in (there, full))
            if own == other and model.total == others.total:
                return
            differing = ", ".join(model.differing(others)[:1]) or f"iteration {other}"
            why = f"it is the model of iteration {own}, and {full.path} has another {differing}"
    raise CheckpointExistsError(f"{there.path}: {why}; copy into another directory, or remove it first")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy has done.

    Attributes:
        source: where the checkpoint is.
        target: where its copy is.
        copied: names of the files that were sent.
        kept: names of those that were there already, with the same content.
        copied_bytes: that were sent.
        seconds: it took.
        left_out: names in a run that is read, which are of none of its checkpoints, and are not copied.
    """

    source: str
    target: str
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    copied_bytes: int
    seconds: float
    left_out: tuple[str, ...] = ()


def copy_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> CopyReport:
    """Copy one checkpoint that its own checksums say is intact; each file is read back, and its CRC-32 compared.

    Args:
        source: directory of a checkpoint, or of a run whose tracker file names one; a path or a URL.
        target: directory of the copy, a path or a URL. What an interrupted copy has left there is used. If `source` is
            a run, `target` becomes one: the copy is `target/iter_0001000`. A checkpoint called `iter_0001000` gets a
            tracker file next to it, unless one there names a later iteration.

    Raises:
        CheckpointExistsError: there is another checkpoint, or what an interrupted copy of another one has left.
        OptionError: the target is the source, or lies inside it.
        CorruptCheckpointError: the source is damaged. Nothing is written.
        LoadError: the checkpoint cannot be read.
        SaveError: the copy cannot be written, or does not hold what was written, or a save holds the directory.
    """
    places = places_of(source, target, same_format=True)
    given, taken = places.source, places.target
    if lies_in(taken, given):
        raise OptionError(f"{taken}: is the checkpoint to be copied, {given}, or lies inside it; copy it elsewhere")
    team = current_team()
    team.first("look at context/", partial(places.add_context, dry_run=True))
    report = copy_into(given, taken, prepare=places.add_context)
    if team.rank == 0:
        places.finish()
    return replace(report, left_out=places.left_out)


def copy_into(
    given: Path, taken: Path, *, dry_run: bool = False, prepare: Callable[[], None] = lambda: None
) -> CopyReport:
    """Copy a checkpoint into a directory that has none, or this one, or its model alone; raises as `copy_checkpoint`.
    With `dry_run` write nothing. `prepare`: as of `copy_and_commit`.
    """
    started_s, source, target = time.monotonic(), str(given), str(taken)
    reads, writes = storage_at(given), storage_at(taken)

    def accepts(found: CheckpointFiles, there: bytes | None) -> None:
        if there != held:
            raise CheckpointExistsError(f"{taken}: another checkpoint has just been published there; look at it first")
        if there is None and writes.is_directory():
            refuse_others(taken, {*found.data, *found.others, *({COMMON_FILE} if found.common else ())})

    def check(found: CheckpointFiles) -> None:
        for name in (*found.data, *found.others):
            writes.path(name)  # refuses a name that there cannot be
        _refuse_damaged(given, found)

    with reads.in_use(METADATA_FILE):
        held = metadata_of(writes)
        if held not in (None, metadata_of(reads)):
            _refuse_other(parse_index(held, str(taken)), read_index(given))
        if dry_run:
            found = files_of(given)
            check(found)
            return CopyReport(source, target, found.data, (), 0, 0.0)
        sent = copy_and_commit(given, taken, accepts=accepts, check=check, prepare=prepare)
    assert sent is not None
    seconds = time.monotonic() - started_s
    return CopyReport(source, target, tuple(sent.copied), tuple(sent.kept), sent.nbytes, seconds)


def _refuse_damaged(given: Path, found: CheckpointFiles) -> None:
    """Raise `LoadError` if a file is not what the index says; also in folders that hold checkpoints of their own."""
    reads = storage_at(given)
    try:
        check = partial(check_data_files, reads, found.index)
        current_team().divide("check the source", found.data, reads.size, check)
        if gap := next(structure_flaws(found.index, megatron=found.common is not None), None):
            raise CorruptCheckpointError(gap.message)
        refuse_incomplete(given, found.index)
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        said = without_tracebacks(str(error))
        raise CorruptCheckpointError(
            f"the checkpoint that is to be copied is damaged, and nothing is copied: {said} (mcore-ckpt repair "
            f"{shlex.quote(str(given))} --from COPY)"
        ) from error
    if found.common is not None:
        read_common_file(reads, found.common, found.index.manifest)
    for folder in FOLDERS_OF_MEGATRON:
        if f"{folder}/{METADATA_FILE}" in found.others:
            _refuse_damaged(given / folder, files_of(given / folder))


# A weight of fewer elements in 16 bits may round to the same again, as those of norms do.
_TELLING_ELEMENTS: Final = 1024
_STANDS_STILL: Final = "stands still while others of its kind change"
_STOPS: Final = "stands still, and did change before"
_LEFT_OUT: Final = "of a checkpoint that is not complete: left out"
_VERSIONS: Final = "ranks that claim to hold replicas hold other objects"


@dataclass(frozen=True, slots=True)
class Departure:
    """What a save has otherwise than the one before it, for the first time."""

    checkpoint: str  # name of the save's directory
    key: str  # of the tensor or object
    what: str  # in words

    def __str__(self) -> str:
        return f"{self.checkpoint}: {self.key}: {self.what}"


@dataclass(frozen=True, slots=True)
class LineageReport:
    """What the saves of a run in `path` have otherwise than those before them."""

    path: str
    checkpoints: tuple[str, ...]  # names of those that were compared, each with the next
    departures: tuple[Departure, ...]  # in the order of saves
    unknown: int  # tensors of them without a fingerprint, and objects without a checksum, as stock saves them


class _Held(NamedTuple):
    form: str
    crc: int | None
    family: str
    is_telling: bool


def lineage_of_run(run: str | os.PathLike[str]) -> LineageReport:
    """Compare each complete checkpoint of a run with the next one. `CheckpointNotFoundError`: there are no two."""
    looked = [look_at(directory) for directory in directories_of_run(run)]
    looked = [(one, index) for one, index in looked if one.whole or not is_gone(one.path)]
    indexes = [(one.name, index) for one, index in looked if one.whole and one.iteration is not None and index]
    if len(indexes) < 2:
        raise CheckpointNotFoundError(f"{run}: a lineage takes two complete checkpoints of a run, found {len(indexes)}")
    states = [(name, _held(index)) for name, index in indexes]
    order = {one.name: number for number, (one, _) in enumerate(looked)}
    left_out = [one.name for one, _ in looked if not one.whole and not one.locked]
    found = {
        (name, ""): Departure(name, METADATA_FILE, _LEFT_OUT) for name in left_out
    }  # the first of each key and kind
    changed = set[str]()
    for number, ((_, before), (name, after)) in enumerate(pairwise(states)):
        if any(index.removed for _, index in indexes[number : number + 2]):
            model = ({key: held for key, held in one.items() if not is_optimizer_key(key)} for one in (before, after))
            before, after = model
        for key, what in _departures(before, after, changed):
            found.setdefault((key, what), Departure(name, key, what))
    for name, index in indexes:
        for key, entry in index.objects.items():
            if is_extra_state(key):
                continue
            try:
                content = read_object(index, entry)
            except LoadError as error:  # each of them is named
                found[name, key] = Departure(name, key, f"cannot be read: {error}")
                continue
            if layout_of_versions(content) is not None:
                found.setdefault((key, _VERSIONS), Departure(name, key, _VERSIONS))
    unknown = sum(one.crc is None for _, state in states for one in state.values())
    departures = sorted(found.values(), key=lambda one: order[one.checkpoint])
    return LineageReport(str(run), tuple(name for name, _ in indexes), tuple(departures), unknown)


def _held(index: CheckpointIndex) -> dict[str, _Held]:
    found = {}
    for key, stored in index.objects.items():  # of which random states alone change with each step
        family, is_random = key.rpartition("/")[0] or key, "rng" in key or "random" in key
        found[key] = _Held("an object", stored.item.crc32, family, is_random)
    for key, entry in index.tensors.items():
        shape = global_shape(index, entry)
        family = key.rpartition(".")[0] if is_flat_bucket(key) else model_key(key)
        is_telling = entry.dtype == "float32" or math.prod(shape) >= _TELLING_ELEMENTS
        found[key] = _Held(f"{entry.dtype} {list(shape)}", index.fingerprints.get(key), family, is_telling)
    return found


def _departures(before: dict[str, _Held], after: dict[str, _Held], changed: set[str]) -> list[tuple[str, str]]:
    """Keys, and what is otherwise; `changed`: the keys that have changed before; those of this pair are added."""
    found = [(key, "disappears") for key in before if key not in after]
    families: defaultdict[str, set[bool]] = defaultdict(set)
    pairs = []
    for key, held in after.items():
        former = before.get(key)
        if former is None:
            found.append((key, "appears"))
        elif former.form != held.form:
            found.append((key, f"was {former.form}, is {held.form}"))
        elif former.crc is not None and held.crc is not None:
            families[held.family].add(former.crc != held.crc)
            pairs.append((key, held, former.crc != held.crc))
    is_trained = bool(changed) or any(has_changed for *_, has_changed in pairs)  # else it is one state, saved twice
    for key, held, has_changed in pairs:
        if has_changed:
            changed.add(key)
        elif is_trained and held.is_telling and True in families[held.family]:
            found.append((key, _STANDS_STILL))
        elif is_trained and held.is_telling and key in changed:
            found.append((key, _STOPS))
    return found
