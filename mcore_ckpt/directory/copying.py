"""A checkpoint copied to another place, file by file, and committed there; `mcore-ckpt copy` and the second tier.

Data files come first, under their names; each is read back, and its CRC-32 compared. A file that is there already is
compared, not sent again: so a copy that was interrupted is resumed. `.metadata` comes last, by compare-and-swap: until
then the place holds what it held. Files of other programs, whose names tell no save, are copied before it where there
are none, and replaced after it.

Two tiers: a checkpoint that was saved on fast local storage is copied to a second place (`drain`), as a note in the
local directory says (`DrainNote`). Where each node has its own disk, each has such a note, and copies its own data
files; the node of the coordinator commits when all are there. What is on the way when a process ends is resumed from
the note, maybe long after: so a copy replaces nothing but the checkpoint that was there when it began.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.errors import CheckpointExistsError, LoadError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import Outcome, await_turn, in_parallel
from mcore_ckpt.core.team import Counter, current_team
from mcore_ckpt.directory.commit import (
    NOTE,
    Commit,
    common_file_in_force,
    file_on_its_way,
    is_note,
    is_pending,
    length_flaw,
    notes,
    pending_name,
    seems_gone,
)
from mcore_ckpt.directory.in_force import (
    DrainNote,
    index_files,
    is_checkpoint_name,
    is_drain_note,
    is_in_force,
    saves_of,
)
from mcore_ckpt.directory.iterations import files_below, iteration_directories, sync_folders
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import data_file_of, id_in_names, tells_save
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    METADATA_FILE,
    parse_index,
    read_common_file,
    read_small_file,
)
from mcore_ckpt.storage.base import FileVersion, RangeReader, RangeWriter, Storage, align_up
from mcore_ckpt.storage.direct_io import aligned_buffer
from mcore_ckpt.storage.resolve import storage_at

OF_THIS_PACKAGE: Final = ".mcore_ckpt_"
_PIECE_BYTES: Final = 8 * 1024 * 1024
_THREADS: Final = 4
_MOST_SHOWN: Final = 5


class JudgedFiles:
    """Files of a checkpoint from which something is copied: still those of the save that was judged. Names that tell no
    save are used again, by saves of Megatron-Core in place, and before `.metadata` is.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._versions: dict[str, FileVersion | None] = {}
        self.add([METADATA_FILE])

    def add(self, names: Iterable[str]) -> None:
        """Note the identity of files whose names may be used again, ahead of the look that judges them."""
        for name in names:
            if not tells_save(name):
                self.note(name)

    def note(self, name: str) -> None:
        """Note what any file is, unless that was done before."""
        if name not in self._versions:
            self._versions[name] = self._storage.version(name)

    def check(self, name: str | None = None) -> None:
        """Raise `LoadError` if this file (None: any), or `.metadata`, is another one by now."""
        for each in tuple(self._versions) if name is None else (name, METADATA_FILE):
            if each in self._versions and self._storage.version(each) != self._versions[each]:
                raise LoadError(f"{self._storage.path(each)}: was replaced while it was copied from; begin again")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint, as it is copied."""

    metadata: bytes  # content of `.metadata`
    judged: JudgedFiles
    index: CheckpointIndex
    data: tuple[str, ...]  # names of the data files
    others: tuple[str, ...]  # of all other files but `.metadata` and the common state, also of those in folders
    common: str | None  # of the file that holds the common state; None if an object does, or nothing


@dataclass(slots=True)
class Sent:
    """What a copy has done: names of files that were sent, or were there with the same content, and bytes sent."""

    reads: Storage
    writes: Storage
    judged: JudgedFiles
    copied: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    nbytes: int = 0

    def copy(
        self, name: str, own_name: str = "", shown: str = "", check_held: Callable[[], object] = lambda: None
    ) -> None:
        """Copy a file, and note what was done. Args and raises: as `copy_file`."""
        nbytes = copy_file(self.reads, name, self.writes, own_name or name, self.judged, check_held)
        (self.kept if nbytes is None else self.copied).append(shown or name)
        self.nbytes += nbytes or 0

    def copy_share(self, names: Collection[str], check: Callable[[], object] = lambda: None) -> None:
        """Copy files, divided over a command's ranks; `check` comes before each, and before each gets its name."""
        team, counter = current_team(), Counter()

        def check_held() -> None:
            counter.add(0)
            check()

        def copy_all(own: Sequence[str]) -> tuple[list[str], list[str], int]:
            sent = Sent(self.reads, self.writes, self.judged)
            for name in own:
                check()
                sent.copy(name, check_held=check_held if team.size > 1 else lambda: None)
            if team.rank:
                self.writes.sync(parents=True)
            return sent.copied, sent.kept, sent.nbytes

        for copied, kept, nbytes in team.divide("copy the files", sorted(names), self.reads.size, copy_all, counter):
            self.copied += copied
            self.kept += kept
            self.nbytes += nbytes


def files_of(directory: Path) -> CheckpointFiles:
    """What there is to copy. Raises `LoadError`."""
    storage = storage_at(directory)
    judged = JudgedFiles(storage)
    metadata = read_small_file(directory, METADATA_FILE)
    index = parse_index(metadata, str(directory))
    data = tuple(sorted(index_files(index)))
    common = common_file_in_force(storage, index)
    others = _others(directory, data)
    in_folders = (name for name in others if "/" in name)  # which may hold checkpoints of their own
    judged.add((*data, *in_folders, *([] if common is None else [common])))
    if common is not None and not storage.exists(common):  # it has just got its other name, or is another save's
        return files_of(directory)
    return CheckpointFiles(metadata, judged, index, data, others, common)


def _others(directory: Path, data: Collection[str]) -> tuple[str, ...]:
    found = files_below(directory, lambda name: name in data or _is_left_out(name))
    # A folder may hold a checkpoint of its own (ModelOpt's): no index is there before what it names.
    names = (name for name in found if not is_note(Path(name).name))
    return tuple(sorted(names, key=lambda name: (Path(name).name == METADATA_FILE, name)))


def metadata_of(storage: Storage) -> bytes | None:
    """The `.metadata` in force; None if there is none. Raises `LoadError`."""
    return storage.read(METADATA_FILE) if storage.exists(METADATA_FILE) else None


def identity_of(metadata: bytes | None) -> str:
    """What tells a checkpoint from others in its place; "" for none."""
    return "" if metadata is None else hashlib.sha256(metadata).hexdigest()[:32]


def copy_and_commit(
    directory: Path,
    target: Path,
    *,
    accepts: Callable[[CheckpointFiles, bytes | None], None],
    check: Callable[[CheckpointFiles], None],
    prepare: Callable[[], None] = lambda: None,
    own: Collection[str] | None = None,
    waits: bool = False,
) -> Sent | None:
    """Copy a checkpoint, and make it the one that the target holds; returns what was done. Raises `LoadError`: it
    cannot be read, is damaged, or was replaced meanwhile; `SaveError`: the copy cannot be written, does not hold what
    was written, or a save holds the target. `accepts` gets the `.metadata` there, unless it is this one, and raises if
    that must not be replaced; `check` raises if a file is damaged. `prepare` comes on the first rank, when the target
    is held, and nothing is written. `own`: data files that are copied from here; other nodes copy the others. `waits`:
    return None, and publish nothing, if a data file of another node has not come yet; the same call resumes.
    """
    reads, writes = storage_at(directory), storage_at(target)
    found, held = files_of(directory), metadata_of(writes)
    current_team().same(f"copy {directory}", crc32(found.metadata))
    if held != found.metadata:
        accepts(found, held)
    try:
        if held != found.metadata or not waits:
            check(found)
    except LoadError:
        found.judged.check()  # what was replaced meanwhile is not damaged
        raise

    def begin() -> _Copy:
        writes.ensure()
        commit = Commit.begin(writes, {"copied": identity_of(found.metadata)})
        sent = Sent(reads, writes, found.judged)
        try:
            copy = _Copy(target, found, sent, commit, writes.list(), metadata_of(writes), own)
            if copy.is_published:
                copy.refuse_other_data()
            else:
                accepts(found, copy.held)
            prepare()
        except BaseException as error:
            commit.give_up()
            if isinstance(error, LoadError):
                found.judged.check()
            raise
        return copy

    team = current_team()
    begun: Outcome[_Copy] = Outcome() if team.rank else Outcome.of(begin)
    note = team.first(f"copy {directory}", lambda: NOTE + begun.value().commit.id)
    if team.rank:  # the first rank commits, and waits for what the others copy
        sent = Sent(reads, writes, found.judged)
        sent.copy_share(found.data, partial(_check_note, writes, note))
        return sent
    copy = begun.value()
    try:
        if not copy.send_data(waits):
            return None
        copy.send_others(_others(directory, found.data))
        if not copy.is_published:
            copy.publish()
        (copy.sent.kept if copy.is_published else copy.sent.copied).append(METADATA_FILE)
        copy.replace_and_remove()
    except LoadError:
        found.judged.check()
        raise
    finally:
        copy.commit.give_up()
    return copy.sent


def _check_note(storage: Storage, note: str) -> None:
    """Raise `SaveError` if the first rank's copy has ended: its note is gone."""
    if not storage.exists(note):
        raise SaveError(f"{storage}: the copy of the first rank has ended, or another one has begun there")


@dataclass(slots=True)
class _Copy:
    """A copy to a target that it holds, in the order of its methods."""

    target: Path
    found: CheckpointFiles
    sent: Sent
    commit: Commit
    names: list[str]  # of the files there, when it began
    held: bytes | None  # the `.metadata` there, then
    own: Collection[str] | None  # names of the data files that are copied from here; None: all

    @property
    def is_published(self) -> bool:
        """Whether the target held this checkpoint already."""
        return self.held == self.found.metadata

    def refuse_other_data(self) -> None:
        """An index without the id of a save is that of any save of this layout: then the data tell, and they stay."""
        index, reads, writes = self.found.index, self.sent.reads, self.sent.writes
        if saves_of(index) or (index.storage_meta or {}).get("save_id"):
            return
        common = self.found.common
        for name in (*self.found.data, *([] if common is None else [common])):
            if writes.exists(name) and crc_of(reads, name) != crc_of(writes, name):
                raise CheckpointExistsError(
                    f"{writes.path(name)}: differs from {reads.path(name)}, and the indexes are the same, without the "
                    "id of a save: another checkpoint, or a damaged copy. Nothing has been written. Copy into another "
                    "directory; `mcore-ckpt repair` repairs a damaged copy"
                )

    def send_data(self, waits: bool) -> bool:
        """Copy data files from here; False if those of other nodes have not all come."""
        needed = self.found.data if self.own is None else self.own
        self.sent.copy_share(() if self.is_published and waits else needed, self.commit.check)
        return not waits or self.is_published or all(map(self.sent.writes.exists, self.found.data))

    def send_others(self, others: tuple[str, ...]) -> None:
        """Copy files of other programs, to which more may have come since: those that are not there."""
        self.found = replace(self.found, others=others)
        for name in others:
            if self.held is None or not self.sent.writes.exists(name):
                self.sent.copy(name)

    def publish(self) -> None:
        """Make this the checkpoint that the target holds."""
        found, writes = self.found, self.sent.writes
        if found.common is not None:  # until the commit it waits under a name that tells its save
            manifest = found.index.manifest
            read_common_file(self.sent.reads, found.common, manifest)  # refuses a damaged one
            save = self.commit.id if manifest is None else id_in_names(manifest.save_id)
            self.commit.pending = pending_name(save)
            self.sent.copy(found.common, self.commit.pending, COMMON_FILE)
        for name in found.data:  # other nodes have copied some, and others may have removed them since
            if (flaw := length_flaw(writes, name, found.index)) is not None:
                raise SaveError(f"{writes}: {flaw}; the checkpoint is not committed, and copied again")
        sync_folders(self.target, found.others)
        writes.sync(parents=True)
        found.judged.check(METADATA_FILE)
        # (Where other nodes copy files, those of a later save may have come already.)
        self.commit.publish(found.metadata, needed=(*found.data, *(() if self.own is None else self.names)))

    def replace_and_remove(self) -> None:
        """Replace files whose names a later save uses, too, and remove what is left of others."""
        found, writes = self.found, self.sent.writes
        # A save that was there before may yet be published: nothing has been since it began. Copies of this have come.
        others = []
        if self.is_published:
            others = [owner for owner in notes(writes, writes.list()) if owner.save != self.commit.id]
        of_others = (one for one in others if one.noted != self.commit.owner.noted)
        at_work = next((one for one in of_others if not seems_gone(writes, one, may_be_late=writes.is_store)), None)
        if metadata_of(writes) != found.metadata:
            raise SaveError(
                f"{self.target}: another checkpoint has replaced this one there as soon as it was published"
            )
        if at_work is not None and self.own is None:
            raise SaveError(
                f"{self.target}: another save may be at work there ({at_work}): no file was replaced or removed; copy "
                "again when it has ended"
            )
        if at_work is None:
            for name in found.others:
                if name not in (*self.sent.copied, *self.sent.kept):
                    self.sent.copy(name)
            if self.is_published and found.common is not None:
                read_common_file(self.sent.reads, found.common, found.index.manifest)  # refuses a damaged one
                self.sent.copy(found.common, COMMON_FILE, COMMON_FILE)
            unused = {COMMON_FILE, CONFIG_FILE, INTEGRITY_FILE} - {*found.others, found.common and COMMON_FILE}
            is_left = _left_by_others(found, self._replaced(), is_alone=self.own is None)
            for name in (*unused, *filter(is_left, self.names), *(NOTE + owner.save for owner in others)):
                writes.delete(name)
        sync_folders(self.target, found.others)
        writes.sync()

    def _replaced(self) -> set[str]:
        """Data files of the checkpoint that was replaced; none if its index cannot be read."""
        if self.held is not None and not self.is_published:
            with contextlib.suppress(LoadError):
                return index_files(parse_index(self.held, str(self.target)))
        return set()


def _left_by_others(found: CheckpointFiles, replaced: set[str], *, is_alone: bool) -> Callable[[str], bool]:
    """Whether a target's file is of a replaced or failed save; without `is_alone`, later ones may have come."""

    def is_left(name: str) -> bool:
        of = file_on_its_way(name) or name
        if is_pending(name):
            return True
        if name in found.data:
            return False
        if is_alone:
            return of != name or of in replaced or tells_save(of)
        return of in replaced or of in found.data

    return is_left


def own_files(directory: Path) -> list[str]:
    """Names of the files in a directory itself that a copy of the checkpoint has, too. Raises `LoadError`."""
    index = parse_index(read_small_file(directory, METADATA_FILE), str(directory))
    data = index_files(index)
    return [
        name
        for name in storage_at(directory).list()
        if name in data or name == METADATA_FILE or not (_is_left_out(name) or name.startswith(OF_THIS_PACKAGE))
    ]


def _is_left_out(name: str) -> bool:
    """Whether an entry of the directory is copied otherwise, or not at all."""
    if name in (METADATA_FILE, COMMON_FILE) or is_checkpoint_name(name) or is_drain_note(name):
        return True
    return _is_passing(name) or is_pending(name) or data_file_of(name) is not None


def _is_passing(name: str) -> bool:
    """Whether a file is a note, or is just being published or copied, or was when its process ended."""
    return is_note(name) or (name.startswith(".") and name.endswith(".tmp"))


def refuse_others(target: Path, names: Collection[str]) -> None:
    """Raise `CheckpointExistsError` if a directory without an index holds anything but files of these names: of another
    checkpoint, whose copy was interrupted, that would pass for part of this one.
    """
    passing = (_is_passing, is_pending, is_checkpoint_name, is_drain_note)
    found = files_below(target, lambda name: any(is_kind(name) for is_kind in passing))
    others = list(itertools.islice((name for name in found if name not in names), _MOST_SHOWN + 1))
    if others:
        shown = ", ".join(others[:_MOST_SHOWN]) + (", ..." if len(others) > _MOST_SHOWN else "")
        raise CheckpointExistsError(
            f"{target}: holds files that are not of the checkpoint that is copied: {shown}. They may be of another, "
            "whose copy was interrupted, and are not published with this one; nothing has been written. Remove them if "
            "nobody needs them, or copy into another directory"
        )


def copy_file(
    reads: Storage,
    name: str,
    writes: Storage,
    own_name: str,
    judged: JudgedFiles,
    check_held: Callable[[], object] = lambda: None,
) -> int | None:
    """Copy a file, and compare; returns its length, or None if it was there. It replaces another one of that name, in a
    directory atomically; `check_held` is called before it gets its name. Raises `LoadError` or `SaveError`.
    """
    judged.note(name)
    folder, _, last = own_name.rpartition("/")
    private = own_name if writes.is_store else f".{last}.{secrets.token_hex(8)}.tmp"
    with reads.open_reader(name) as reader:
        there = writes.version(own_name)
        if there is not None and there.size_bytes == reader.size_bytes and _crc(reader) == crc_of(writes, own_name):
            judged.check(name)
            return None
        if there is not None and private == own_name:
            writes.delete(own_name)
        writer = writes.open_writer(private, reader.size_bytes)
        try:
            expected = _crc(reader, writer)
            judged.check(name)  # what was read may be of both
            check_held()
            writer.finish()
        except BaseException:
            writer.abort()
            raise
    try:
        got = crc_of(writes, private)
        if got != expected:
            raise SaveError(
                f"{writes.path(own_name)}: the copy has CRC-32 {got:#010x}, expected {expected:#010x}, as read from "
                f"{reads.path(name)}. Check the device, and copy again"
            )
        if private != own_name:
            storage_at(checkpoint_path(writes.location) / folder).ensure()
            check_held()
            if writes.version(own_name) != there:
                raise SaveError(f"{writes.path(own_name)}: another program has written it while it was copied")
            writes.move(private, own_name)
    except BaseException:
        if private != own_name:
            with contextlib.suppress(SaveError):
                writes.delete(private)
        raise
    return reader.size_bytes


def crc_of(storage: Storage, name: str) -> int:
    """The CRC-32 of a file. Raises `SaveError` if it cannot be read."""
    try:
        with storage.open_reader(name) as reader:
            return _crc(reader)
    except LoadError as error:
        raise SaveError(f"{storage.path(name)}: what was written cannot be read back: {error}") from error


def _crc(reader: RangeReader, writer: RangeWriter | None = None) -> int:
    """The CRC-32 of a file that is read, in several pieces at once, and with a writer also written there."""
    size_bytes = reader.size_bytes
    sums = [0] * -(-size_bytes // _PIECE_BYTES)
    buffers = threading.local()
    unreadable: list[BaseException] = []

    def piece(number: int) -> None:
        if not hasattr(buffers, "view"):
            buffers.view = aligned_buffer(_PIECE_BYTES)
        start = number * _PIECE_BYTES
        view = buffers.view[: min(_PIECE_BYTES, size_bytes - start)]
        await_turn()
        try:
            reader.read_into(start, view)
        except BaseException as error:
            unreadable.append(error)
            if writer is not None:
                writer.abort()  # other threads may wait for this piece to be written before theirs
            raise
        sums[number] = crc32(view)
        if writer is not None:
            writer.write(start, buffers.view[: align_up(len(view))])

    try:
        in_parallel(range(len(sums)), piece, _THREADS, "mcore-ckpt-copy")
    except SaveError:
        if unreadable:  # by which the writing was ended
            raise unreadable[0] from None
        raise
    total = 0
    for number, value in enumerate(sums):
        total = crc32_combine(total, value, min(_PIECE_BYTES, size_bytes - number * _PIECE_BYTES))
    return total


class SupersededError(SaveError):
    """The second tier holds another checkpoint in that place, which must stay."""


def drain(directory: Path, note: DrainNote, check: Callable[[CheckpointFiles, Collection[str]], None]) -> Sent | None:
    """Copy what lies in a local directory to the second tier, and commit there if that is for this node to do; None if
    something has not come yet: then nothing is committed, and the same call resumes. Arguments and errors as of
    `copy_and_commit`; also `SupersededError`: the second tier holds another checkpoint there, which must stay.
    """
    reads, writes = storage_at(directory), storage_at(note.to)
    if note.leads_back(reads):
        raise SaveError(
            f"{note.to} is this directory itself, by another path: there is no second tier. Name another directory or "
            "URL as drain_to"
        )

    def check_own(found: CheckpointFiles) -> None:
        if note.save not in saves_of(found.index):
            raise LoadError(f"{directory}: another save has replaced the checkpoint before it was copied to {note.to}")
        check(found, found.data if note.files is None else note.files)

    if not note.commits:
        check_own(files_of(directory))
        writes.ensure()
        sent = Sent(reads, writes, JudgedFiles(reads))
        for name in note.files or ():
            sent.copy(name)
        writes.sync(parents=True)
        return sent

    def accepts(_: CheckpointFiles, held: bytes | None) -> None:
        if held is not None and identity_of(held) != note.replaces:
            raise SupersededError(
                f"{note.to} holds another checkpoint than when this one was saved, or on_existing='error' keeps it: it "
                "is not replaced. If this one is to be there, remove that one (`mcore-ckpt prune`), and copy this one "
                "(`mcore-ckpt copy`)"
            )

    target = checkpoint_path(note.to)
    return copy_and_commit(directory, target, accepts=accepts, check=check_own, own=note.files, waits=True)


def give_up(note: DrainNote) -> None:
    """Remove from the second tier what was copied of a checkpoint that is not going to be committed there."""
    storage, save_id = storage_at(note.to), bytes.fromhex(note.save)
    # (The note lies in the first tier: where there is no second one, all that there is would go.)
    if storage.exists(note.name) or is_in_force(storage, save_id) or not storage.list():
        return
    with Commit.begin(storage) as commit:
        if is_in_force(storage, save_id):  # by another process, meanwhile
            return
        for name in storage.list():
            file = data_file_of(file_on_its_way(name) or name)
            if name == pending_name(note.save) or (file is not None and file.save == note.save):
                storage.delete(name)
        if commit.base is None:  # of a checkpoint that is there, they are
            for name in (CONFIG_FILE, COMMON_FILE, INTEGRITY_FILE):
                commit.check()
                storage.delete(name)
            commit.remove_left()
    storage.remove()


def undrained(run: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints of a run still to be copied to the second tier; and those of which it cannot be told, and why."""
    found, untold = [], []
    for directory in iteration_directories(run):
        try:
            note = DrainNote.in_force(directory)
            if note is not None and not note.done:
                found.append(directory)
        except LoadError as error:
            untold.append(f"{directory}: cannot be told whether it is still to be copied: {error}")
    return found, untold
