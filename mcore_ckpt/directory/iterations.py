"""A run's checkpoints: its iterations, which of them are complete, and which one the tracker file names.

Megatron-Core keeps them as `iter_0001000` (seven digits or more) and `release`, next to the file
`latest_checkpointed_iteration.txt`. Other directories are ignored. In a checkpoint's directory may be folders, in which
other programs keep what belongs to it: ModelOpt its state, Megatron-Core the files of the tokenizer.

A checkpoint is *complete* by its structure, without reading a payload: the index can be read, its chunks make up their
tensors, and every file is there at its length. The manifest says the length. Where there is none, as in stock
checkpoints, a file ends behind its last record at the earliest. `verify` tells whether the bytes are those that were
written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, NewerFormatError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import in_parallel
from mcore_ckpt.directory.commit import CLAIM, REMOVED, common_file_in_force, notes, seems_gone
from mcore_ckpt.directory.in_force import RELEASE, DrainNote, iteration_of, noted_saves, saves_of
from mcore_ckpt.format.index import (
    COMMON_STATE_KEY,
    CheckpointIndex,
    Removed,
    parse_object_key,
    read_item,
)
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    METADATA_FILE,
    checked_footer,
    encode_config,
    read_common_file,
    read_config,
    read_index,
    read_index_and_version,
    read_small_file,
)
from mcore_ckpt.format.state_file import read_plain
from mcore_ckpt.format.zip_records import archive_of
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

FOLDERS_OF_MEGATRON: Final = ("modelopt_state", "tokenizer")
"""What a save of Megatron-Core makes in a checkpoint; all that is in there belongs to it."""

NO_NAMES: Final = frozenset({"/", ".", ".."})
"""What a part of a key in a store may be, and no file may be called; the first stands for an empty part."""

# Directories in one another that files of others may lie in.
_MAX_FOLDERS: Final = 32


def files_below(
    directory: Path, is_left_out: Callable[[str], bool] = lambda _: False, *, follow_links: bool = False
) -> Iterator[str]:
    """Names of all files in a directory and those in it; `is_left_out` is asked about its own entries. Raises
    `CorruptCheckpointError` for symbolic links, pipes and the like, and for directories too deep.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        storage = storage_at(directory / folder)
        try:
            links = {} if follow_links else storage.links()
            files, inner = storage.sizes(), storage.folders()
        except CheckpointNotFoundError:
            if folder:  # an empty one, which stores may list only where it lies
                continue
            raise
        for own_name in sorted({*storage.list(), *links, *inner}):
            name = f"{folder}/{own_name}" if folder else own_name
            if own_name in NO_NAMES:
                key = f"{directory}/{name}{'/' if own_name in inner and own_name != '/' else ''}"
                raise CorruptCheckpointError(
                    f"{key}: objects have keys that begin so, and no file can have such a name: a part is empty, '.' "
                    "or '..'; nothing has been written. Remove or rename them"
                )
            if (not folder and is_left_out(name)) or own_name.startswith(CLAIM):
                continue
            if own_name in files and own_name in inner:
                path = directory / name
                raise CorruptCheckpointError(
                    f"{path}: is an object, and others lie below {path}/: a directory cannot hold both; nothing has "
                    "been written. Remove or rename one of them"
                )
            if own_name in files and own_name not in links:
                yield name
            elif own_name in inner and own_name not in links and name.count("/") < _MAX_FOLDERS:
                folders.append(name)
            else:
                kind = f"a directory in {_MAX_FOLDERS} others" if own_name in inner else "a pipe, a socket or a device"
                raise CorruptCheckpointError(
                    f"{directory / name}: expected a regular file or a directory to take along, but it is "
                    f"{'a symbolic link' if own_name in links else kind}; nothing has been written. Remove it, or, if "
                    "you trust what links lead to, copy the checkpoint with its links resolved (cp -rL) and use that "
                    "copy"
                )


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that files of these names lie in, the innermost first; without the directory itself."""
    found = {str(parent) for name in names for parent in Path(name).parents if parent.name}
    return sorted(found, key=lambda folder: (-folder.count("/"), folder))


def sync_folders(directory: Path, names: Iterable[str]) -> None:
    """Make the names of files durable that lie in folders of a directory. Raises `SaveError`."""
    for folder in folders_of(names):
        storage_at(directory / folder).sync()


# A checkpoint without any of its files has a flaw for each; more than these are not shown.
_MAX_PROBLEMS = 20
# So often one is looked at that other saves replace meanwhile.
_LOOKS = 10


class Flaw(NamedTuple):
    """What the index itself shows to be wrong: with a key, and what that lacks."""

    key: str
    message: str


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One of a run's checkpoints, or what is left of one."""

    path: Path  # its directory
    iteration: int | None  # None for `release`
    problems: tuple[str, ...]  # why it is incomplete, the first of them
    size_bytes: int  # of the files in it
    saved_at_s: float | None  # when `.metadata` was published, in seconds since 1970; None without one
    tracked: bool  # the tracker file names it
    locked: bool  # a save is at work in it, or has died there
    abandoned: bool = False  # `locked`, and all saves that have locked it are gone, by what this host can see
    newer: str | None = None  # why this version cannot read it, where something newer has written it; no damage
    drain: DrainNote | None = None  # what is noted of its copy to a second tier
    removed: Removed | None = None  # what it had when it was saved, and has no longer

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self.path.name

    @property
    def made_at_s(self) -> float | None:
        """When it was saved: `saved_at_s`, but for what was removed of it since."""
        return self.saved_at_s if self.removed is None else self.removed.saved_at_ns / 1e9

    @property
    def whole(self) -> bool:
        """Nothing is missing, as far as its structure tells."""
        return not self.problems and self.newer is None


def iteration_directories(run: str | os.PathLike[str]) -> list[Path]:
    """The directories of a run's checkpoints, in any state: `release` first, then by iteration. Raises `LoadError`."""
    names = storage_at(run).folders()
    order = {name: iteration for name in names if (iteration := iteration_of(name)) is not None}
    found = sorted(order, key=lambda name: order[name])
    return [checkpoint_path(run) / name for name in ([RELEASE] if RELEASE in names else []) + found]


def directories_of_run(run: str | os.PathLike[str]) -> list[Path]:
    """As `iteration_directories`. Raises `CheckpointNotFoundError` if there are none."""
    found = iteration_directories(run)
    if not found:
        folders = sorted(storage_at(run).folders())
        runs = ", ".join(name for name in folders if iteration_directories(checkpoint_path(run) / name))
        more = f"; those in it that hold some: {runs}" if runs else ""
        raise CheckpointNotFoundError(f"{run}: no checkpoints in it: expected directories such as iter_0000100{more}")
    return found


def is_gone(directory: Path) -> bool:
    """Whether a checkpoint that was there before has been removed, or is being removed in a store."""
    storage = storage_at(directory)
    with contextlib.suppress(LoadError):
        return not storage.is_directory() or storage.read(METADATA_FILE, len(REMOVED)) == REMOVED
    return False


def look_at(directory: Path, *, tracked: str | None = None) -> tuple[RunCheckpoint, CheckpointIndex | None]:
    """One checkpoint of a run, and its index, if that can be read. `tracked`: what the tracker file names."""
    before = None
    for _ in range(_LOOKS):
        checkpoint, index = _look_once(directory, tracked)
        # What was just replaced is not incomplete: two looks at one `.metadata` have to find something.
        if not checkpoint.problems or checkpoint.saved_at_s == before:
            return checkpoint, index
        before = checkpoint.saved_at_s
    return replace(checkpoint, problems=(f"{directory}: other saves replace it all the time; look again",)), index


def _look_once(directory: Path, tracked: str | None) -> tuple[RunCheckpoint, CheckpointIndex | None]:
    storage = storage_at(directory)
    index: CheckpointIndex | None = None
    saved_at_s = None
    sizes: dict[str, int] = {}
    newer = drain = None
    try:
        sizes = storage.sizes()
        index, version = read_index_and_version(directory, strict=False)
        saved_at_s = None if version is None else version.modified_ns / 1e9
        drain = _drain_of(directory, index, sizes)
        found = list(itertools.islice(_problems(directory, index, sizes, drain), _MAX_PROBLEMS))
    except NewerFormatError as error:
        found, newer = [], " ".join(str(error).split())
    except LoadError as error:
        found = [" ".join(str(error).split())]
    locked, abandoned = True, False  # if that cannot be told
    with contextlib.suppress(LoadError):
        owners = notes(storage, sizes)
        locked, abandoned = bool(owners), bool(owners) and all(seems_gone(storage, owner) for owner in owners)
    checkpoint = RunCheckpoint(
        path=directory,
        iteration=iteration_of(directory.name),
        problems=tuple(found),
        size_bytes=sum(sizes.values()),
        saved_at_s=saved_at_s,
        tracked=directory.name == tracked,
        locked=locked,
        abandoned=abandoned,
        newer=newer,
        drain=drain,
        removed=None if index is None else index.removed,
    )
    return checkpoint, index


def _drain_of(directory: Path, index: CheckpointIndex, names: Iterable[str]) -> DrainNote | None:
    """The note of this very save. One that cannot be read says nothing of the checkpoint."""
    for save in saves_of(index).intersection(noted_saves(names)):
        with contextlib.suppress(LoadError):
            return DrainNote.read(directory, save)
    return None


def _problems(
    directory: Path, index: CheckpointIndex, sizes: Mapping[str, int], drain: DrainNote | None
) -> Iterator[str]:
    yield from index.problems
    files = _files_here(index, drain)
    # (On the other nodes, no more is known of what Megatron-Core needs than that it has been saved.)
    megatron, flaw = is_megatrons(directory, index) if drain is None or drain.commits else (False, None)
    if flaw:
        yield flaw
    yield from (flaw.message for flaw in structure_flaws(index, megatron=megatron))
    storage = storage_at(directory)
    links = storage.links()
    common = common_file_in_force(storage, index) if megatron else None
    if common is not None:
        files = {common: 0, **files}
    elif megatron and (flaw := common_state_flaw(directory, index)):
        yield flaw
    for file, needed in files.items():
        if file in links:
            yield f"{storage.path(file)}: is a symbolic link, which no load follows; expected a regular file"
            continue
        size = None if file == common else sizes.get(file)  # by that name there was another one
        if size is None:
            try:
                size = storage.size(file)  # in a directory below, or a file of another kind
            except CheckpointNotFoundError:
                yield f"{storage.path(file)}: the index names this file, but it cannot be found"
                continue
            except LoadError as error:
                yield str(error)
                continue
        listed = None if index.manifest is None else index.manifest.files.get(COMMON_FILE if file == common else file)
        if size < needed:
            yield f"{directory / file}: ends at byte {size}, the index needs {needed}; it was truncated"
        elif listed is not None and size != listed.size_bytes:
            expected = f"expected {listed.size_bytes} bytes, the file has {size}"
            yield f"{directory / file}: {expected}; it was truncated or extended, or is of another save"


def flaw_of_files(directory: Path) -> str | None:
    """Why a complete checkpoint cannot be opened: index, manifest, common state, or a footer. Reads no payload."""
    storage = storage_at(directory)

    def check(name: str) -> None:
        with storage.open_reader(name) as reader:
            checked_footer(index, name, reader)
            if common is None and state is not None and state.item.file == name:
                content, where = read_item(reader, state.item), f"{state.fqn} ({name})"
                read_plain(content, where)
                archive = archive_of(content, where)
                for record in archive.records.values():
                    archive.content(record)  # raises where its checksum is not that of its bytes

    try:
        index = read_index(directory)
        if (common := common_file_in_force(storage, index)) is not None:
            read_common_file(storage, common, index.manifest)
        state = index.objects.get(COMMON_STATE_KEY)
        in_parallel(_files_here(index, _drain_of(directory, index, storage.list())), check, storage.asks_at_once)
    except LoadError as error:
        return " ".join(str(error).split())
    return None


def _files_here(index: CheckpointIndex, drain: DrainNote | None) -> dict[str, int]:
    """How long each file has to be at least; where each node has a disk of its own, of those on this one."""
    needed: dict[str, int] = {}
    for _, _, item in index.items():
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    if drain is None or drain.files is None:
        return needed
    return {name: length for name, length in needed.items() if name in drain.files}


def is_megatrons(directory: Path, index: CheckpointIndex) -> tuple[bool, str | None]:
    """Whether a checkpoint is Megatron-Core's, and why its `metadata.json` would keep Megatron-Core from loading it. A
    killed save may lack that file: then the common state tells, or, where that is lost, too, the index.
    """
    try:
        flaw = config_flaw(directory)
    except CheckpointNotFoundError:
        if not _is_of_megatron(storage_at(directory), index):
            return False, None
        flaw = (
            f"{directory / CONFIG_FILE}: missing: Megatron-Core takes the directory for no checkpoint (its save ended "
            "early, or the file was deleted). Copy the file from another checkpoint of the same run"
        )
    except (LoadError, OSError) as error:
        flaw = str(error)
    return True, flaw


def config_flaw(directory: Path) -> str | None:
    """Why Megatron-Core could not load by the `metadata.json` in a directory; None if it can. Raises `LoadError`."""
    read_config(directory)
    fields = json.loads(read_small_file(directory, CONFIG_FILE))
    known = json.loads(encode_config())
    wrong = [
        name
        for name, value in fields.items()
        if name not in known or (known[name], type(known[name])) != (value, type(value))
    ]
    if not wrong:
        return None
    return (
        f"{directory / CONFIG_FILE}: {wrong[0]!r:.80} is {fields[wrong[0]]!r:.80}, expected "
        f"{known.get(wrong[0], 'no such field')!r}: Megatron-Core cannot load it so. Restore the file from another "
        "checkpoint of the same run"
    )


def _is_of_megatron(storage: Storage, index: CheckpointIndex) -> bool:
    """Whether there is, or has been, a common state, which only Megatron-Core writes. A manifest lists it. Without one
    the keys tell: Megatron-Core's objects are shards, and its index lacks the paths that DCP notes of each key.
    """
    if COMMON_STATE_KEY in index.objects or common_file_in_force(storage, index) is not None:
        return True
    if index.manifest is not None:
        return COMMON_FILE in index.manifest.files
    return not index.planner_data and any(map(parse_object_key, index.objects))


def structure_flaws(index: CheckpointIndex, *, megatron: bool) -> Iterator[Flaw]:
    """Tensors that their chunks do not make up, and with `megatron` sharded objects of which some shard is missing."""
    for fqn, entry in index.tensors.items():
        problem = covers(entry.shape, [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        # An empty chunk list of a tensor without elements tiles it.
        if problem and (entry.chunks or math.prod(entry.shape)):
            yield Flaw(fqn, f"{fqn}: {problem}")
    if not megatron:
        return
    grids: dict[tuple[str, tuple[int, ...]], int] = {}
    for fqn in index.objects:
        shard = parse_object_key(fqn)
        if shard is not None and -1 not in shard.shape:
            grids[shard.key, shard.shape] = grids.get((shard.key, shard.shape), 0) + 1
    for (key, shape), count in grids.items():
        if count != math.prod(shape):
            message = f"{key}: {count} of the {math.prod(shape)} shards of a grid of {list(shape)} are stored"
            yield Flaw(key, message)


def common_state_flaw(directory: Path, index: CheckpointIndex) -> str | None:
    """Why Megatron-Core finds no common state, which is a file, or from 0.19 on an object; None if it does."""
    if COMMON_STATE_KEY in index.objects or common_file_in_force(storage_at(directory), index) is not None:
        return None
    missing = f"{directory / COMMON_FILE}: missing, and no object {COMMON_STATE_KEY}"
    return f"{missing}: Megatron-Core cannot load it so"


def refuse_incomplete(directory: Path, index: CheckpointIndex) -> None:
    """Raise `CorruptCheckpointError` for a checkpoint of Megatron-Core that it could not load."""
    megatron, flaw = is_megatrons(directory, index)
    if flaw := (megatron and common_state_flaw(directory, index)) or flaw:
        raise CorruptCheckpointError(flaw)
