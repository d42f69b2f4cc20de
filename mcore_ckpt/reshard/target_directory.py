"""A target's directory: it appears by one rename, when everything in it is complete, and replaces nothing.

    TARGET.partial            the files, while they are written
    TARGET.partial.journal    which files are durable there; the lock on it shows that a run is at work
    TARGET.partial.journal.N  the same of files that rank N of several processes has written
    TARGET                    a rename of the folder, which fails where there is something already

A run locks the journal before it makes the folder, and removes the journal after the rename and the tracker file. So a
folder whose journal is not locked belongs to a run that has ended. The next run resumes it, if it is the same work, or
removes it. Where the target of a journal is there, the next run of the same work adds the tracker file.

In an object store, where nothing can be renamed, the files are written at their place, next to the note of a save. Each
appears when it is complete, and last the file that names the others or without which they are not read: `.metadata`,
the index of several safetensors or torch files, `config.json`. A run says the names of its files in its note before it
makes the first. The remains of a killed run are removed by the next one, which begins again: nothing is resumed there
but a target that lacks its tracker file, and the journal is kept in memory only. Files that no run has noted are of
others, and stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    SaveError,
)
from mcore_ckpt.core.options import PARTIAL
from mcore_ckpt.core.team import current_team
from mcore_ckpt.directory.commit import NOTE, Commit, Owner, identity_in_force, is_note, notes, sum_of_file
from mcore_ckpt.directory.iterations import files_below, flaw_of_files
from mcore_ckpt.format.integrity import SAVE_ID_BYTES, id_in_names, split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import COMMON_FILE, METADATA_FILE, read_small_file
from mcore_ckpt.image.layout import WrittenFile
from mcore_ckpt.storage.base import DirectIo, RangeWriter, Storage, saving
from mcore_ckpt.storage.resolve import lies_in, path_in_file_system, storage_at

# In the note in a store: files of the target that is being made there, and of what.
_NOTED: Final = "target"
_WORK: Final = "work"
# There, the file that comes after all others, once it is on its way.
_LAST: Final = "last"
_EXISTS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


class Journal:
    """The files of a target that are durable, by name."""

    def __init__(self) -> None:
        self.save_id = secrets.token_bytes(SAVE_ID_BYTES)  # of the target
        self.written: dict[str, WrittenFile] = {}
        # CRC-32 of each chunk of the source that stores none, by the target's key and the chunk's position.
        self.crcs: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def add(self, written: Mapping[str, WrittenFile], crcs: Mapping[tuple[str, int], int]) -> None:
        """These files are durable, as is known already; any number of threads may say so."""
        with self._lock:
            self.written.update(written)
            self.crcs.update(crcs)

    def record(self, files: Iterable[WrittenFile], crcs: Iterable[tuple[str, int, int]]) -> None:
        """As `add`, and known to the next run."""
        self.add({file.name: file for file in files}, {(key, number): crc for key, number, crc in crcs})

    def close(self) -> None:
        """Nothing more is recorded."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target that is being written."""

    folder: Path
    storage: Storage
    journal: Journal  # how far the files are
    publish: Callable[[str, bytes], None]  # puts the file that comes after all others; raises `SaveError`
    note: Callable[[Sequence[str]], None] = lambda _: None  # names of all files but `.metadata`, before the first

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Which files there will be, of these lengths; raises `SaveError` if there is no room for those that lack."""
        if self.storage.is_store:
            return
        lacking = sizes.keys() - self.journal.written.keys()
        for name in lacking:
            self.storage.delete(name)  # an earlier run may have begun it
        needed_bytes = sum(sizes[name] for name in lacking)
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        if free < needed_bytes:
            raise SaveError(
                f"{self.folder}: {needed_bytes} bytes are needed, {free} are free: free space, or choose another disk"
            )

    def new_file(self, name: str, size_bytes: int, direct: DirectIo = "auto") -> RangeWriter:
        """Begin a file, in place of one that an earlier run has left; raises `SaveError`."""
        if not self.storage.is_store:
            self.storage.delete(name)
        return self.storage.open_writer(name, size_bytes, direct=direct)

    def put(self, name: str, content: bytes) -> None:
        """Make a small file, durably; raises `SaveError`."""
        writer = self.new_file(name, len(content), direct="off")
        try:
            writer.write(0, memoryview(content))
            writer.finish()
        except BaseException:
            writer.abort()
            raise


def refuse_target(source: Path, target: Path, *, restart: bool = False) -> None:
    """Raise unless `target` is free, or its run, unless that is to `restart`, was killed before it was finished; and it
    is not inside the source.
    """
    with _begun(target) as begun:
        if restart or begun is None or not begun.has_made:
            _refuse_existing(target)
    refuse_inside(source, target)


def refuse_inside(source: Path, target: Path) -> None:
    """Raise `OptionError` if `target` lies inside the source."""
    if lies_in(target, source):
        raise OptionError(f"{target}: lies inside the source {source}, which is never written to")


def _refuse_existing(target: Path) -> None:
    if storage_at(target).is_store:
        # What else lies there may be what a killed run has left: that is looked at under the lock.
        if storage_at(target).exists(METADATA_FILE):
            raise _exists(target)
        return
    target = path_in_file_system(target)
    with saving("looking whether something is there", str(target)):
        if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise _exists(target)
    if target.name in ("", ".."):
        raise OptionError(
            f"{target}: is no name of a directory; the target is written next to its place, and renamed in the end: "
            "expected a path that ends with the directory's own name"
        )
    if target.is_mount():
        raise OptionError(
            f"{target}: a file system is mounted there, and a directory that is complete cannot get the name of a "
            f"mount point; nothing has been written. Choose a new directory in it, such as {target / 'checkpoint'}"
        )


def _exists(target: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{target}: there is something already, and nothing is ever overwritten: choose another name"
    )


def target_folder(
    target: Path, fingerprint: str, finish: Callable[[], None] = lambda: None, *, restart: bool = False
) -> AbstractContextManager[Target]:
    """Files to write, which become `target` at the end of the block; `fingerprint`: of the work, as JSON by names. In a
    file system, what was done stays if the run is interrupted, or cannot write; else the folder is removed. `finish` is
    called when the target is there. Raises `OptionError` for another run's work without `restart`,
    `CheckpointExistsError`, and `SaveError`.
    """
    return (_in_place if storage_at(target).is_store else _renamed)(target, fingerprint, finish, restart)


@contextmanager
def team_target(
    target: Path,
    fingerprint: str,
    begin: Callable[[Target], None],
    finish: Callable[[], None],
    *,
    restart: bool = False,
) -> Iterator[Target]:
    """As `target_folder`, for each rank of a command: the first makes the folder, calls `begin`, and publishes; then
    the others write files there, and journals of their own.
    """
    team, name = current_team(), "begin the target"
    if team.rank == 0:
        with target_folder(target, fingerprint, finish, restart=restart) as made:
            begin(made)
            journal = made.journal
            team.first(name, lambda: (made.folder, journal.save_id, journal.written, journal.crcs))
            yield made
        return
    begun: Any = team.first(name, lambda: None)
    folder, save_id, written, crcs = begun
    storage = storage_at(folder)
    if not storage.is_store and not storage.is_directory():
        raise SaveError(
            f"{folder}: the first rank has made it, and it is not there: all hosts must share this directory"
        )
    own = Journal() if storage.is_store else FileJournal(_journal_of(folder, team.rank))
    with contextlib.closing(own):
        own.save_id = save_id
        if isinstance(own, FileJournal):
            own.begin(fingerprint)
        own.add(written, crcs)
        yield Target(folder, storage, own, storage.publish)


def _journal_of(folder: Path, rank: int = 0) -> Path:
    return folder.with_name(f"{folder.name}.journal{f'.{rank}' if rank else ''}")


def _other_journals(folder: Path) -> list[Path]:
    """Journals that the other ranks of an interrupted run have left."""
    return [path for path in folder.parent.glob(f"{glob.escape(folder.name)}.journal.*") if path.suffix[1:].isdecimal()]


class _Begun(NamedTuple):
    """What a run that was interrupted tells the next one, in its journal or its note."""

    fingerprint: str
    has_written: bool
    has_made: bool  # the target has its name
    remove: Callable[[], None]  # what tells this


def begun_work(target: Path) -> dict[str, Any]:
    """The fingerprint, by its names, of the run that has begun a target and was interrupted. Raises `SaveError`."""
    with _begun(target) as begun:
        return _by_name(begun.fingerprint) if begun is not None and begun.has_written else {}


def finish_made(target: Path, fingerprint: str, finish: Callable[[], None]) -> bool:
    """Finish a target that has its name already, of a run of this work that was killed then; whether there is one."""
    with _begun(target) as begun:
        if begun is None or begun.fingerprint != fingerprint or not begun.has_made:
            return False
        if (flaw := flaw_of_files(target)) is not None:
            raise CorruptCheckpointError(f"{target}: {flaw}. It was complete, and has changed since: remove it")
        finish()
        begun.remove()
        return True


@contextmanager
def _begun(target: Path) -> Iterator[_Begun | None]:
    """What the run tells that has begun a target and was interrupted. Raises `SaveError` if it is at work."""
    storage, path = storage_at(target), target.parent / f"{target.name}{PARTIAL}.journal"
    if storage.is_store:
        for owner in _left_by_others(storage)[:1]:
            work, remove = (owner.noted or {}).get(_WORK), partial(storage.delete, NOTE + owner.save)
            yield _Begun(str(work), True, _has_made(owner.save, target), remove)
            return
        yield None
        return
    with saving("looking for what was begun", str(path)):
        is_there = path.exists()
    if not is_there:
        yield None
        return
    with contextlib.closing(FileJournal(path)) as journal:
        has_made = _has_made(id_in_names(journal.save_id), target)
        if has_made or path.with_suffix("").exists():
            yield _Begun(journal.fingerprint, journal.has_written, has_made, journal.remove)
        else:  # its target has appeared, and needs nothing, or is gone
            journal.remove()
            yield None


def _has_made(save: str, target: Path) -> bool:
    there = identity_in_force(storage_at(target))
    return there is not None and there.save == save


def remove_begun(target: Path, source: Path) -> bool:
    """Remove what an interrupted run has made of a target whose source is gone; whether it has. Raises `SaveError`."""
    storage, origin = storage_at(target), f"{storage_at(source).location}, "
    with _begun(target) as begun:
        if begun is None or not str(_by_name(begun.fingerprint).get("source")).startswith(origin):
            return False
        if storage.is_store:
            try:
                with Commit.begin(storage, {_NOTED: []}) as commit:
                    _clear(target, commit)
            except CheckpointExistsError:  # it is whole
                return False
        else:
            shutil.rmtree(target.parent / f"{target.name}{PARTIAL}", ignore_errors=True)
            begun.remove()
    return True


def _by_name(fingerprint: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(fingerprint), dict):
            return found
    return {"plan": fingerprint}


@contextmanager
def _renamed(target: Path, fingerprint: str, finish: Callable[[], None], restart: bool) -> Iterator[Target]:
    target = path_in_file_system(target)
    folder = target.parent / (target.name + PARTIAL)

    def publish(name: str, content: bytes) -> None:
        storage = storage_at(folder)
        storage.sync()
        storage.publish(name, content)

    with contextlib.closing(_open(target, folder, fingerprint, restart=restart)) as journal:
        own = folder.stat()
        kept = False
        try:
            yield Target(folder, storage_at(folder), journal, publish)
            storage_at(folder).sync()
            _appear(folder, own, target)
            finish()
        except BaseException as error:
            is_final = isinstance(error, LoadError | OptionError | CheckpointExistsError)
            kept = journal.has_written and not (is_final and _is(folder, own))  # else it has its name
            if kept and isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{folder} keeps what is done; the same command resumes it") from error
            raise
        finally:
            if not kept:
                if _is(folder, own):
                    shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    journal.remove()


@contextmanager
def _in_place(target: Path, fingerprint: str, finish: Callable[[], None], restart: bool) -> Iterator[Target]:
    """Nothing is resumed here: `restart` is of the other way."""
    storage = storage_at(target)
    storage.ensure()
    with Commit.begin(storage, {_NOTED: [], _WORK: fingerprint}) as commit:
        _clear(target, commit)
        making, journal = _Making(commit, target, finish), Journal()
        journal.save_id = commit.save_id
        try:
            yield Target(target, storage, journal, making.publish, making.note)
        except BaseException:
            making.give_up()
            raise


def _clear(target: Path, commit: Commit) -> None:
    """Remove what runs that were killed have left; if that fails it stays known, for the next run."""
    storage = commit.storage
    _refuse_existing(target)
    for owner in _left_by_others(storage):
        if owner.save != commit.id:
            last = (owner.noted or {}).get(_LAST)
            is_whole = isinstance(last, str) and storage.version(last) is not None  # killed when only its note was left
            if not is_whole:
                _remove_files(storage, _noted(owner))
            storage.delete(NOTE + owner.save)
            if is_whole:
                raise _exists(target)
    if storage.is_directory() and any(files_below(target, is_note)):
        raise _exists(target)


@dataclass(frozen=True, slots=True)
class _Making:
    """The files that a run makes at their place in a store."""

    commit: Commit
    target: Path
    finish: Callable[[], None]
    noted: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)  # the file that comes after all others, once it is on its way

    def note(self, names: Sequence[str]) -> None:
        for name in names:
            self.commit.storage.path(name)  # refuses a name that there cannot be
        self.noted.extend(names)
        self.commit.say({**(self.commit.owner.noted or {}), _NOTED: self.noted})

    def publish(self, name: str, content: bytes) -> None:
        self.last.append(name)
        if name == METADATA_FILE:
            self.commit.publish(content, needed=self.noted, spare=self.finish)
            return
        self.commit.say({**(self.commit.owner.noted or {}), _LAST: name})
        if self.commit.storage.replace_if(name, content, None) is None:
            raise _exists(self.target)

    def give_up(self) -> None:
        """Remove what was made, unless the last file is there, or may yet appear."""
        storage = self.commit.storage
        try:
            if self.commit.is_undecided or any(storage.version(name) is not None for name in self.last):
                return
            _remove_files(storage, self.noted)
        except CheckpointError:
            self.commit.is_over = True  # the next run finds the note, and removes what is left


def _left_by_others(storage: Storage) -> list[Owner]:
    """Who has left a target that is not finished."""
    return [owner for owner in notes(storage, storage.list()) if _NOTED in (owner.noted or {})]


def _noted(owner: Owner) -> list[str]:
    names = (owner.noted or {}).get(_NOTED)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _remove_files(storage: Storage, names: Iterable[str]) -> None:
    """Remove what a run has noted as its own; never `.metadata`, nor a note."""
    for name in names:
        if name != METADATA_FILE and not is_note(name):
            storage.delete(name)


def _open(target: Path, folder: Path, fingerprint: str, *, restart: bool) -> FileJournal:
    """The journal of this run, and its folder; of two runs that begin at once, the second sees the first."""
    try:
        _refuse_existing(target)
        folder.parent.mkdir(parents=True, exist_ok=True)
        journal = FileJournal(_journal_of(folder))
        try:
            _refuse_existing(target)
            for path in _other_journals(folder):
                with contextlib.closing(FileJournal(path)) as left:
                    if (left.fingerprint, left.save_id) == (journal.fingerprint, journal.save_id):
                        crcs = [(key, number, crc) for (key, number), crc in left.crcs.items()]
                        journal.record(left.written.values(), crcs)
                    left.remove()
            if folder.exists() and (not folder.is_dir() or (journal.is_new and any(folder.iterdir()))):
                raise OptionError(
                    f"{folder}: is or holds what no command of mcore-ckpt has left there; remove that, or choose "
                    "another name for the target"
                )
            if restart or journal.fingerprint != fingerprint or not folder.is_dir():
                if journal.written and folder.is_dir() and not restart:
                    was, now = _by_name(journal.fingerprint), _by_name(fingerprint)
                    other = [f"{name} ({was.get(name)}, now {now[name]})" for name in now if was.get(name) != now[name]]
                    raise OptionError(
                        f"{folder}: left by a run with another {', '.join(other[:-1] or other)}; repeat that command "
                        "to finish it, or throw its work away with --restart"
                    )
                if folder.exists():
                    shutil.rmtree(folder)
                journal.begin(fingerprint)
                storage_at(folder.parent).sync()
            folder.mkdir(exist_ok=True)
            for path in folder.glob(".*.tmp"):  # a run was killed when it published this
                path.unlink()
        except BaseException:  # the lock must not outlive the attempt: the next one would take it for a run
            if journal.is_new:
                journal.remove()
            journal.close()
            raise
        return journal
    except OSError as error:
        raise SaveError(f"{folder}: the directory cannot be made: {error.strerror or error}") from error


def _is(folder: Path, own: os.stat_result) -> bool:
    return folder.is_dir() and os.path.samestat(own, folder.stat())


def _appear(folder: Path, own: os.stat_result, target: Path) -> None:
    """Give a complete directory its name, durably; a directory that is renamed replaces at most an empty one."""
    try:
        if not _is(folder, own):
            raise SaveError(f"{folder}: another run has replaced the directory; run the command again")
        folder.rename(target)
    except OSError as error:
        if error.errno in _EXISTS:
            raise _exists(target) from error
        raise SaveError(f"{folder}: complete, but cannot be renamed to {target}: {error.strerror}") from error
    storage_at(target.parent).sync()


# A line for each part of the work, of some bytes for each tensor and MiB.
_MAX_BYTES: Final = 1024**3
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
# On file systems without locks, a journal that was written to within this time may be that of a run at work.
_FRESH_S: Final = 24 * 3600.0


class FileJournal(Journal):
    """Lines of JSON behind their CRC-32: the plan's fingerprint and the save's id, then what was recorded; a torn line
    is the end. The lock (flock) on the file is the sign of life of a run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.fingerprint = ""
        self.is_new = not path.exists()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise SaveError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._take_lock()
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _take_lock(self) -> None:
        problem = ""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink == 0:
                problem = "has just finished there; run this one again"
        except OSError as error:
            age_s = time.time() - os.fstat(self._fd).st_mtime
            if error.errno not in _NO_LOCKS:
                problem = "is at work there; wait for it, or end it"
            elif not self.is_new and age_s < _FRESH_S:
                problem = (
                    f"may be at work there: it was written {age_s / 60:.0f} minutes ago, and this file system has no "
                    "locks that would tell. If none is, remove this file and the folder next to it, or wait for a day"
                )
        if problem:
            raise SaveError(f"another command is making this target: {self.path}: a command {problem}")

    def _read(self) -> None:
        nbytes = 0
        content = read_small_file(self.path.parent, self.path.name, _MAX_BYTES)
        for line in content.splitlines(keepends=True):
            if _framed(line[_SUM_BYTES:]) != line:
                break
            found = json.loads(line[_SUM_BYTES:])
            if nbytes:
                super().record(map(_written, found[0]), found[1])
            else:
                self.fingerprint, self.save_id = found[0], bytes.fromhex(found[1])
            nbytes += len(line)
        if not nbytes and not _BEGUN.match(content):
            raise OptionError(
                f"{self.path}: is no journal of mcore-ckpt; remove it, or choose another name for the target"
            )
        os.ftruncate(self._fd, nbytes)

    def begin(self, fingerprint: str) -> None:
        """Forget what was written, and name the plan."""
        self.fingerprint, self.written, self.crcs = fingerprint, {}, {}
        os.ftruncate(self._fd, 0)
        self._append([fingerprint, self.save_id.hex()])

    def record(self, files: Iterable[WrittenFile], crcs: Iterable[tuple[str, int, int]]) -> None:
        files, crcs = list(files), list(crcs)
        super().record(files, crcs)
        self._append([list(map(_row, files)), crcs])

    @property
    def has_written(self) -> bool:
        return bool(self.written or _other_journals(self.path.with_suffix("")))

    def remove(self) -> None:
        """Remove the files of all ranks; the lock stays until it is closed."""
        for path in (*_other_journals(self.path.with_suffix("")), self.path):
            path.unlink(missing_ok=True)

    def _append(self, content: Any) -> None:
        left = _framed(json.dumps(content).encode() + b"\n")
        try:
            with self._lock:
                while left:
                    left = left[os.write(self._fd, left) :]
                os.fsync(self._fd)
        except OSError as error:
            raise SaveError(f"{self.path}: the journal cannot be written: {error}") from error

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._fd)


_SUM_BYTES: Final = 9
# How a journal starts of which nothing else may have arrived.
_BEGUN: Final = re.compile(rb"\0*\Z|[0-9a-f]{8} \[")


def bind_common_file(content: bytes, directory: Path, name: str = COMMON_FILE) -> bytes:
    """The content of `.metadata`; its manifest, if any, names the common state in `directory`, too, if there is one:
    the file `name`, which has not got its own name yet where a save was killed then.
    """
    pickled, manifest = split_metadata(content, str(directory))
    found = None if manifest is None else sum_of_file(storage_at(directory), manifest.save_id, name)
    if manifest is None or found is None:
        return content
    return with_manifest(pickled, replace(manifest, files={**manifest.files, COMMON_FILE: found}))


def _framed(text: bytes) -> bytes:
    return b"%08x " % crc32(text) + text


def _row(file: WrittenFile) -> list[Any]:
    columns = file.object_crcs, file.crcs, file.long_payloads, file.inner_blocks, file.blocks
    return [file.name, file.size_bytes, file.table_crc32, *map(list, columns), file.parts]


def _written(row: list[Any]) -> WrittenFile:
    name, size_bytes, table_crc32, *columns, parts = row
    objects, crcs, long_payloads, counts, inner = (array("I", column) for column in columns)
    strided = tuple((number, part) for number, part in parts)
    return WrittenFile(name, size_bytes, table_crc32, objects, crcs, long_payloads, counts, inner, strided)
