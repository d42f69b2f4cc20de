"""The commit: `.metadata` is replaced only if it is still the one that was there when the save began.

Any number of savers may work in one directory, on whatever hosts, and be stopped at any moment. `.metadata`
is the one commit point, and one compare-and-swap decides which saver comes into force. There is no lease in it, and no
clock. A saver whose base has been replaced has lost, for ever: no `.metadata` comes back.

**In a file system**, where a rename cannot be made conditional:

1. The note `.mcore_ckpt_incomplete.ID` is made, and notes of others are looked for: one that counts ends this save.
2. *Base*: the identity of `.metadata`. Claims on the base are completed first (7), if their save can still be
   published. Then the base's own common state is renamed into place, if it is still pending, so that nobody does so
   late, over a newer one. (Were the base read ahead of the note, two saves could work on one base unseen.)
3. Data files are written, and `common.pt.ID.pending`. All names are made once. At the commit the index is written into
   the note, in place, and all is synced.
4. The directory is listed. Only what is in this list may be removed after the commit (8).
5. *Claim*: the symbolic link `.mcore_ckpt_next.TOKEN` to the note. TOKEN stands for the base: one save has it.
   Another save that finds a claim whose note is there completes it. A claim whose note is gone is dead: its save can
   never be published. The next claim is then made on a token of both, the base and the dead claim. No claim on a base
   that is in force is ever removed.
6. *Second look*, after the claim: if `.metadata` is still the base, nobody else can replace it. Else this save has
   lost.
7. *Publish*: the note is renamed to `.metadata`, the directory is synced, the pending common state is renamed. The
   saver does so, or who has found its claim; each rename uses up a name that is never made again. Without a base the
   common state goes first. A saver that has an error before the rename removes its note: nothing of it is published.
8. What was in the list of 4 and is of other saves is removed, and last the claim.

**In an object store** the put of `.metadata` is conditional itself: on the version of the base. If the store does not
say what has become of it, the save fails, its files stay, and the next save removes them after its own commit: then the
put is refused, however late it arrives. What does not wait for another answer is asked for at once: the pending common
state is put next to the look at the data files, the listing of 4, and a look at `common.pt`, which is changed only if
it is the same after the commit. What comes then has no order, but that note and pending common state go last.

**The note** is a courtesy: it spares a second job the writing, and names host and process in the message. It is not
renewed, and nothing depends on it. A process on this host can be seen, so its note counts as long as it lives. One on
another host or in another container cannot: its note counts while it is young, by the storage's clock.

**The common state** is a file of its own to megatron-core 0.18. The manifest names it next to the data files, by its
length and the CRC-32 of all its bytes, also where stock has written it: so the saved file is told from that of another
save, from a damaged one, and from one that a killed save of stock had replaced. A file that a user has changed on
purpose cannot be told from those; it is refused until it is accepted (`mcore-ckpt repair`).

**Around the commit**, on the coordinator of a save: `open_target` begins it, or continues one that has begun where
the common state is a file. `check_files` looks for what the ranks have written. `write_config` puts `metadata.json`
next to a published checkpoint, never over that of another save. A save that fails removes its data files (`discard`)
and gives the directory up.

`tests/directory/commit_model.py` explores all interleavings, crashes and power cuts, and what each rule prevents.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import operator
import os
import platform
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    NewerFormatError,
    SaveError,
)
from mcore_ckpt.core.options import SaveOptions, checkpoint_path
from mcore_ckpt.core.process import in_parallel, run_concurrently
from mcore_ckpt.directory.in_force import (
    MAX_NOTE_BYTES,
    DrainNote,
    index_files,
    noted_saves,
    read_in_force,
    saves_of,
)
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex
from mcore_ckpt.format.integrity import SAVE_ID_BYTES, Identity, ManifestFile, data_file_of, identity_of
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INCOMPLETE_MARKER,
    INTEGRITY_FILE,
    METADATA_FILE,
    parse_index,
    read_index,
)
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.storage.base import FileVersion, OutcomeUnknownError, Storage
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)

CLAIM: Final = ".mcore_ckpt_next."
NOTE: Final = INCOMPLETE_MARKER + "."
"""What the name of a note begins with; the id of its save follows."""
_NOTE_NAME: Final = re.compile(re.escape(NOTE) + r"(?P<id>[0-9a-f]{16})")
_PENDING: Final = re.compile(re.escape(COMMON_FILE) + r"\.[0-9a-f]{16}\.pending")
# A small file on its way, or one of a copy, under a name of its own.
_ON_ITS_WAY: Final = re.compile(r"\.(?P<of>.+)\.[0-9a-f]{16}\.tmp")
YOUNG_S: Final = 60.0
"""So long the note of a process that cannot be seen from here keeps other saves out, and the mark of a removal."""
# So old is the note of a process that cannot be seen, where people are shown whether a save is at work.
_LONG_GONE_S: Final = 3600.0

# Saves of this process that are at work (`Commit`), by id; one that nothing refers to any more is not.
at_work: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def is_note(name: str) -> bool:
    """Whether a file is of a save at work, or of one that has died: a note or a claim."""
    return name.startswith((INCOMPLETE_MARKER, CLAIM))


def pending_name(save: str) -> str:
    """Where the common state of a save that replaces a checkpoint waits for being published."""
    return f"{COMMON_FILE}.{save}.pending"


def is_pending(name: str) -> bool:
    """Whether a file is a common state that waits, or has waited, for being published."""
    return _PENDING.fullmatch(name) is not None


def file_on_its_way(name: str) -> str | None:
    """Which file a process was writing under a name of its own, when it died; None if it is no such name."""
    match = _ON_ITS_WAY.fullmatch(name)
    return None if match is None else match["of"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has written a note."""

    save: str  # its id; 16 hexadecimal digits
    host: str = ""  # name of the machine; empty: the note cannot be read
    place: str = ""  # where its process can be seen: a machine since its start, and a container
    pid: int = 0  # the coordinator's process
    started: str = ""  # when that was started, in ticks since the boot: another process of the same id has another one
    since_s: float = 0.0  # when the save began, by the host's clock; shown to people only
    noted: Mapping[str, Any] | None = None  # what else the note says

    @classmethod
    def here(cls, noted: Mapping[str, Any] | None = None) -> Owner:
        """This process, for a new save."""
        return cls(
            save=secrets.token_hex(8),
            host=platform.node(),
            place=_place(),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or "",
            since_s=time.time(),
            noted=noted,
        )

    def encode(self) -> bytes:
        """The note's content."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "noted"}
        return json.dumps({**(self.noted or {}), **own}).encode()

    @classmethod
    def decode(cls, save: str, content: bytes) -> Owner:
        """Whom a note names; of one that cannot be read, `host` is empty."""
        try:
            fields = json.loads(content)
            own = {name: fields.pop(name) for name in cls.__slots__ if name != "noted"}
            owner = cls(**own, noted=fields)
            str(owner)  # raises where the time is none
            well_formed = (
                all(type(text) is str for text in (owner.host, owner.place, owner.started))
                and owner.save == save
                and owner.host != ""
                and type(owner.pid) is int
                and owner.pid > 0
                and type(owner.since_s) in (int, float)
            )
            if well_formed:
                return owner
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError, RecursionError):
            pass
        return cls(save)

    def process_state(self) -> Literal["alive", "gone", "unknown"]:
        """What can be said of the owner's process from here: `"unknown"` if it cannot be seen."""
        if not self.host or self.place != _place():
            return "unknown"
        if self.pid == os.getpid():
            held = at_work.get(self.save)
            return "alive" if held is not None and not held.is_over else "gone"
        started = _start_of(self.pid)
        another = started is None or (started and self.started and started != self.started)
        return "gone" if another else "alive"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        return f"process {self.pid} on host {self.host}, since {since}"


def _place() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _start_of(pid: int) -> str | None:
    """When a process was started, in ticks; None if there is none, or only its exit status is left; "" if unknown."""
    try:
        # The name of the program, in brackets, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # No /proc here, or one that hides what other users run.
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
        except OSError:
            pass
        return ""
    except (OSError, UnicodeDecodeError):
        return ""
    return None if fields[0] in "ZX" else fields[19]


def notes(storage: Storage, names: Iterable[str]) -> list[Owner]:
    """Who has left notes, among these files of a directory. Raises `LoadError`."""
    found = []
    for name, save in ((name, match["id"]) for name in names if (match := _NOTE_NAME.fullmatch(name))):
        try:
            content = storage.read(name, MAX_NOTE_BYTES)
        except CheckpointNotFoundError:  # ended meanwhile
            continue
        except CorruptCheckpointError:  # no regular file, or too long: it names nobody
            content = b""
        found.append(Owner.decode(save, content))
    return found


def refuse_others(storage: Storage, own: Owner, names: Iterable[str]) -> None:
    """Raise `SaveError` if another save is at work in a directory, by its note, which was there before one's own."""
    others = notes(storage, (name for name in names if name != NOTE + own.save))
    mine = storage.version(NOTE + own.save) if others else None
    for owner in others:
        there = storage.version(NOTE + owner.save)
        if mine is None or there is None or not owner.host:
            continue
        # The clock of a store ticks once a second.
        times = (owner.since_s, own.since_s) if owner.place == own.place else (there.modified_ns, mine.modified_ns)
        if (times[0], owner.save) > (times[1], own.save):
            continue
        state = owner.process_state()
        if state == "alive" and owner.pid == os.getpid():
            held = at_work.get(owner.save)
            if held is not None and not held.has_opened and held.thread is not threading.current_thread():
                raise SaveError(
                    f"{storage}: a save has begun here in another thread. A strategy has to save in the thread in "
                    "which Megatron calls it"
                )
            raise SaveError(
                f"{storage}: an earlier save into this directory is not finalized yet;"
                " call maybe_finalize_async_calls(blocking=True) before saving there again"
            )
        if state == "alive":
            raise _in_use(storage, owner, "which is running", "wait until that save has ended")
        left_s = YOUNG_S - (mine.modified_ns - there.modified_ns) / 1e9
        if state == "unknown" and left_s > 0:
            why = "whose process cannot be seen from here"
            raise _in_use(storage, owner, why, f"if that job has ended, save again in {left_s:.0f} s")


def _in_use(storage: Storage, holder: Owner, why: str, what_to_do: str) -> SaveError:
    return SaveError(
        f"{storage}: another save is at work in this directory: {holder}, {why}; nothing was changed. Save into "
        f"another directory; or {what_to_do}"
    )


def seems_gone(storage: Storage, owner: Owner, *, may_be_late: bool = False) -> bool:
    """Whether a note's save is gone, by this host's clock: for people. `may_be_late`: its requests may yet come."""
    state = owner.process_state()
    if state == "unknown" or (state == "gone" and may_be_late):
        there = storage.version(NOTE + owner.save)
        return there is None or time.time() - there.modified_ns / 1e9 > _LONG_GONE_S
    return state == "gone"


# What `.metadata` holds in a store while its checkpoint is removed: no save begins while that is young.
REMOVED: Final = b"removed by mcore-ckpt\n"
_SHARED: Final = COMMON_FILE, INTEGRITY_FILE  # others use these names, too
_NONE: Final = "none"  # the token of a directory without `.metadata`
_ATTEMPTS: Final = 1000
_RENAMES: Final = 5
_RETRY_S: Final = 0.05
# DCP has written indexes of single ranks without collectives: no file that they may name is removed.
_INDEX_OF_RANK: Final = re.compile(r"__\d+" + re.escape(METADATA_FILE))


class Commit:
    """One save on its way into force; made by `begin`, ended by `publish` or `give_up`."""

    def __init__(self, storage: Storage, owner: Owner, base: Identity | None, common: bytes | None = None) -> None:
        self.storage = storage
        self.owner = owner  # this process, with the save's id
        self.id = owner.save  # of the save, as the names of its files show it
        # The manifest's id of the save: the id of the commit, which is of one directory only, and random bytes.
        self.save_id = bytes.fromhex(owner.save) + secrets.token_bytes(SAVE_ID_BYTES // 2)
        self.base = base  # which `.metadata` there was; None: none
        self.common = common  # the new common state, if that is a file
        self._note = NOTE + owner.save
        self.pending: str | None = None  # under which the new common state waits for the commit, once it does
        self.thread = threading.current_thread()  # which has begun it
        self.has_opened = False  # files of its data may be written
        self.is_undecided = False  # `publish` has failed, and it may come into force all the same
        self.published: FileVersion | None = None  # in a store, the `.metadata` that it has put in force
        self.is_over = False  # it was published, given up or lost, or leaves its note to the next save
        self.was_given_up = False
        self._seen: list[str] | None = None  # in a store, what was listed before `publish`
        self._shared: dict[str, FileVersion | None] = {}  # in a store, those of `_SHARED` before it
        self._own: Identity | None = None  # in a file system: what its `.metadata` is
        self._unnamed: frozenset[str] = frozenset()  # files of the base that show no id, when they were listed
        at_work[owner.save] = self

    @classmethod
    def begin(cls, storage: Storage, noted: Mapping[str, Any] | None = None, *, common: bytes | None = None) -> Commit:
        """Begin a save into a directory, which must exist, before anything is written there, with that `common` state;
        `noted` are more entries of the note, in JSON's types. Raises `SaveError` if another save is at work, by its
        note.
        """
        commit = cls(storage, Owner.here(noted), None, common)
        try:
            note = partial(storage.create, commit._note, commit.owner.encode())
            found = run_concurrently(storage.asks_at_once, note, storage.list, partial(_settled, storage))
            commit.base = found[2]
            refuse_others(storage, commit.owner, found[1])
            if storage.is_store:
                commit._refuse_removal()
            else:  # (in a store later, next to other requests)
                commit.have_common_wait()
        except BaseException:
            commit.give_up()
            raise
        return commit

    @property
    def common_file(self) -> ManifestFile | None:
        """The manifest's record of the common state, if that is a file that is written here."""
        return None if self.common is None else ManifestFile(len(self.common), crc32(self.common), self.save_id)

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def check(self) -> None:
        """Raise `SaveError` if it has lost already: another save has been published since it began."""
        if identity_in_force(self.storage) != self.base or self.storage.version(self._note) is None:
            raise self._lost()

    def say(self, noted: Mapping[str, Any]) -> None:
        """Say more in the note."""
        self.owner = replace(self.owner, noted=noted)
        if not self.storage.overwrite(self._note, self.owner.encode()):
            raise self._lost()

    def prepare(self) -> None:
        """Ahead of `publish`, next to other requests: have the common state wait; in a store, see what is there."""
        look = (self._look,) if self.storage.is_store else ()
        run_concurrently(self.storage.asks_at_once, self.have_common_wait, *look)

    def have_common_wait(self) -> None:
        """Write the new common state, if there is one, under the name by which it waits for the commit."""
        if self.common is not None and self.pending is None:
            self.pending = pending_name(self.id)
            self.storage.create(self.pending, self.common)

    def place_common(self) -> None:
        """Put the common state next to what another strategy saves; that is all of this save."""
        try:
            self.have_common_wait()
            if self.pending is not None:
                self.storage.move(self.pending, COMMON_FILE)
        finally:
            self.give_up()

    def _look(self) -> None:
        versions = (partial(self.storage.version, name) for name in _SHARED)
        asks = self.storage.asks_at_once
        self._seen, found = run_concurrently(asks, self._listed, partial(run_concurrently, asks, *versions))
        self._shared = dict(zip(_SHARED, found, strict=True))

    def publish(
        self,
        metadata: bytes,
        *,
        needed: Collection[str] = (),
        stale: Collection[str] = (),
        spare: Callable[[], object] = lambda: False,
    ) -> None:
        """Make `metadata` the content of `.metadata`, then remove what is left of other saves. All files that it names
        must be there, and durable; `needed`: those of other saves. `stale`: files of the checkpoint that it replaces,
        by names that others may use, too. `spare`: called when it is published, before anything is removed; whether all
        files of others stay, as a load reads them. Raises `SaveError`: nothing is published, unless `is_undecided`.
        """
        self.have_common_wait()
        way = self._publish_by_condition if self.storage.is_store else self._publish_by_claim
        listed, claim = way(metadata)
        left = [name for name in listed if self._is_of_another_save(name, needed) and name != claim]
        stale, left = ((), []) if spare() else (stale, left)
        reused, published = {*stale, *self._unnamed}, self.published

        def remove(name: str) -> None:
            # Others may have written files of these names since; and a listing may lag behind.
            if name not in reused or (self.storage.version(name) is not None and self.is_in_force()):
                self.storage.delete(name)

        absent = {name for name, version in self._shared.items() if version is None}
        tasks: list[Callable[[], object]] = [partial(remove, name) for name in (*stale, *left) if name not in absent]
        ends = [claim]  # then others may begin
        if published is not None and self.pending is not None:
            before = self._shared[COMMON_FILE]
            tasks.insert(0, partial(_place_in_store, self.storage, self.pending, published, self.common, before))
            ends.append(self.pending)
        try:
            in_parallel(tasks, lambda task: task(), self.storage.asks_at_once)
            in_parallel(ends, self.storage.delete, self.storage.asks_at_once)
            self.storage.sync()
        except (SaveError, LoadError, OSError) as error:
            # The new checkpoint is complete and in force; the next save into the directory does what is left to do.
            _logger.warning("%s: the checkpoint is published, but cleaning up has failed: %s", self.storage, error)

    def give_up(self) -> None:
        """Remove what this save has next to its data files. Nothing after `publish`, and in a forked process."""
        if self.is_over or self.owner.pid != os.getpid():
            return
        self.is_over = self.was_given_up = True
        for name in filter(None, (self._note, self.pending)):
            try:
                self.storage.delete(name)
            except (SaveError, LoadError, OSError) as error:
                _logger.warning("%s: could not clean up after a failed save: %s", self.storage, error)
                return  # as long as the note is there, it may be completed

    def _refuse_removal(self) -> None:
        """Raise `SaveError` where a checkpoint is just being removed from a store."""
        version = None if self.base is None else self.base.version
        if version is None or version.size_bytes != len(REMOVED):
            return
        mine = self.storage.version(self._note)
        is_mark = self.storage.read(METADATA_FILE) == REMOVED
        if is_mark and mine is not None and mine.modified_ns - version.modified_ns < YOUNG_S * 1e9:
            raise SaveError(
                f"{self.storage}: the checkpoint in this directory is just being removed; save again in "
                f"{YOUNG_S:.0f} s, or into another directory"
            )

    def remove_left(self) -> None:
        """Remove what is left of other saves in a directory that holds no checkpoint, and is not going to."""
        for name in self._listed():
            if self._is_of_another_save(name, ()) and not name.startswith(CLAIM):
                self.storage.delete(name)

    def _lost(self) -> SaveError:
        now = identity_in_force(self.storage)
        if now is None:
            what = "its files were removed by another process, or the directory was"
        else:
            other = f"another save ({now.save or 'not of this package'})"
            what = f"{other} has been published in this directory since then"
            if now == self.base:  # that one has listed this one's note, and this one has seen that one in force
                what = f"{other} was published just when it began, or its files were removed by another process"
        return SaveError(
            f"{self.storage}: this save ({self.owner}) has lost: {what}. Nothing of it is published, and nothing of "
            "the other was changed. Are two jobs saving into one directory?"
        )

    # In a file system

    def _publish_by_claim(self, metadata: bytes) -> tuple[list[str], str]:
        storage = self.storage
        listed, claim = list[str](), self._note  # nothing to remove, after an error
        try:
            if not storage.overwrite(self._note, metadata):
                raise self._lost()
            self._own = identity_in_force(storage, self._note)
            storage.sync(parents=self.base is None)  # (the directory may be new)
            listed = self._listed()
            claim = self._claim()
            now = identity_in_force(storage)
            if now == self.base and self._own is not None:
                if not _publish(storage, self._note, self._own, self.base, self.pending):
                    raise self._lost()
            elif now != self._own:
                raise self._lost()
            else:  # completed by another
                _finish(storage, self.pending)
        except BaseException as error:
            if self._is_withdrawn():
                raise
            self.is_over = True
            if not isinstance(error, Exception):
                raise
            _logger.warning("%s: published, after an error: %s", storage, error)
            _finish(storage, self.pending)
        self.is_over = True
        return listed, claim

    def _claim(self) -> str:
        """Claim the base; returns the claim's name. Raises `SaveError` if another save has it."""
        for _ in range(_ATTEMPTS):
            name = _next_claim(self.storage, self.base, self.id)
            if name is None:
                raise self._lost()
            if self.storage.claim(name, self._note) == self._note:
                return name
        raise SaveError(f"{self.storage}: other saves claim the directory all the time; save again")

    def _is_withdrawn(self) -> bool:
        """After an error: whether this save can never be published any more. What would become `.metadata` goes."""
        storage = self.storage
        try:
            storage.delete(self._note, missing_ok=False)
        except SaveError as error:
            if not _is_missing(error):
                self.is_undecided = self.is_over = True
                return True
            if self._own is not None and identity_in_force(storage) == self._own:
                return False
        # It may have been in force, and what has replaced it not be on the disk yet: its files go next.
        with contextlib.suppress(SaveError):
            storage.sync()
        return True

    # In an object store

    def _publish_by_condition(self, metadata: bytes) -> tuple[list[str], str]:
        storage = self.storage
        if self._seen is None:
            self._look()
        try:
            put = storage.replace_if(METADATA_FILE, metadata, None if self.base is None else self.base.version)
        except BaseException as error:
            if not isinstance(error, SaveError) or isinstance(error, OutcomeUnknownError):  # or interrupted
                self.is_undecided = self.is_over = True
            raise
        if put is None:
            raise self._lost()
        self.is_over = True
        self.published = put
        return self._seen or [], self._note

    # What is left of others

    def _listed(self) -> list[str]:
        """What may be removed after the commit, among it files of the base that show no id."""
        names = self.storage.list()
        self._unnamed = frozenset()
        without_id = [name for name in names if (found := data_file_of(name)) is not None and found.save is None]
        if without_id and self.base is not None and not any(map(_INDEX_OF_RANK.fullmatch, names)):
            index = read_in_force(self.storage)
            self._unnamed = frozenset(without_id) & (frozenset() if index is None else index_files(index))
        return names

    def _is_of_another_save(self, name: str, needed: Collection[str]) -> bool:
        found = data_file_of(name)
        if found is not None:
            is_old = name in self._unnamed if found.save is None else found.save != self.id
            return is_old and name not in needed
        if is_pending(name):  # which a repair needs, where `.metadata` cannot tell whose it is
            return name != self.pending and name not in needed
        if is_note(name):
            return name != self._note
        return file_on_its_way(name) is not None

    def is_in_force(self) -> bool:
        """Whether it has been published, and no other save since."""
        if self.published is None:
            return identity_in_force(self.storage) == self._own
        now = self.storage.version(METADATA_FILE)
        return now is not None and now.number == self.published.number


def _settled(storage: Storage) -> Identity | None:
    """The base of a new save: what is in force, when all that has been decided is done."""
    for _ in range(_ATTEMPTS):
        base = identity_in_force(storage)
        if not storage.is_store and _next_claim(storage, base) is None:
            continue
        if base is not None:
            _place_waiting(storage, base)
        return base
    raise SaveError(f"{storage}: other saves are published all the time; save again")


def refuse_decided(storage: Storage) -> None:
    """Raise `SaveError` where a save is decided, and was killed then: it comes into force with whatever begins next, in
    the place of the checkpoint that people have looked at.
    """
    base = None if storage.is_store else identity_in_force(storage)
    noted = None if base is None else storage.claimed(CLAIM + base.token)
    if base is not None and noted is not None and identity_in_force(storage, noted) is not None:
        raise SaveError(
            f"{storage}: a save is decided that replaces this checkpoint: at once, or, if it was killed, when the next "
            f"one begins. Nothing was changed; to give up one that was killed, delete {CLAIM}{base.token}"
        )


def _place_waiting(storage: Storage, base: Identity) -> None:
    """Give the common state of what is in force its name, if it still waits for that."""
    save = base.save
    if save is None:  # a `.metadata` that has no manifest
        waiting = [name for name in storage.list() if is_pending(name)]
        index = read_in_force(storage) if waiting else None
        saves = set() if index is None else saves_of(index)
        save = next((save for save in saves if pending_name(save) in waiting), None)
    if save is None or storage.version(pending_name(save)) is None:
        return
    if not storage.is_store:
        storage.sync()  # first: else a power cut may leave the index before it with this common state
        _place_common(storage, pending_name(save))
    elif base.version is not None:
        _place_in_store(storage, pending_name(save), base.version)
        storage.delete(pending_name(save))


def identity_in_force(storage: Storage, name: str = METADATA_FILE) -> Identity | None:
    """Which `.metadata` a directory holds, or which one a note of this `name` is going to be; None if none."""
    for is_last in (False, True):
        try:
            with storage.open_reader(name, direct="off") as reader:
                return identity_of(reader)
        except CheckpointNotFoundError:
            return None
        except LoadError as error:
            if getattr(error.__cause__, "errno", None) != errno.ESTALE:
                break
            if is_last:  # else what was opened was replaced before it was read: the name stands for another file
                raise
    there = storage.version(name)  # it may be a pipe, or a link
    return None if there is None else Identity("-".join(f"{part:x}" for part in there), None, there)


def _next_claim(storage: Storage, base: Identity | None, own: str = "") -> str | None:
    """The name of the next claim on a base; None: it is replaced, by now if not before, by the save with the claim."""
    token = _NONE if base is None else base.token
    for _ in range(_ATTEMPTS):
        name = CLAIM + token
        noted = storage.claimed(name)
        if noted is None or noted == NOTE + own:
            return name
        if _NOTE_NAME.fullmatch(noted) is None:
            raise SaveError(
                f"{storage.path(name)}: is a link to {noted!r}, expected a save's note ({NOTE}ID); delete it"
            )
        save = noted.removeprefix(NOTE)
        claimant = identity_in_force(storage, noted)
        if claimant is not None:
            _check_complete(storage, noted, name)
            if identity_in_force(storage) == base:
                _publish(storage, noted, claimant, base, pending_name(claimant.save or save))
            return None
        if identity_in_force(storage) != base:
            return None
        # Dead. Its common state must not be placed late; but a power cut must not bring its note back without that.
        storage.sync()
        storage.delete(pending_name(save))
        token = hashlib.sha256(f"{token} {save}".encode()).hexdigest()[:16]
    raise SaveError(f"{storage}: {_ATTEMPTS} saves into this directory have failed; remove {CLAIM}* there")


def _check_complete(storage: Storage, note: str, claim: str) -> None:
    """Raise `SaveError` unless a claimed note's data files are complete; a copied directory may lack some."""
    try:
        index = parse_index(storage.read(note), storage.location, name=note)
        wanted: Collection[str] = index_files(index)
        for save in saves_of(index).intersection(noted_saves(storage.list())):
            # With a second tier, each node may have a disk of its own under this path, and the files of its own ranks.
            own = DrainNote.read(checkpoint_path(storage.location), save).files
            wanted = wanted if own is None else own
        problem = next(filter(None, (length_flaw(storage, name, index) for name in wanted)), None)
    except CheckpointNotFoundError:
        return  # published or withdrawn meanwhile
    except NewerFormatError:
        return  # of a later version, which knows what it has written
    except LoadError as error:
        problem = str(error)
    if problem is not None and storage.version(note) is not None:
        raise SaveError(
            f"{storage}: a save was killed here while it was published, and its files are not complete: {problem}. If "
            f"this directory is a copy, delete {claim} and {note}; the checkpoint that is here stays as it is"
        )


def length_flaw(storage: Storage, name: str, index: CheckpointIndex) -> str | None:
    """Why a data file is not as its save has left it, as far as its length tells."""
    version, listed = storage.version(name), None if index.manifest is None else index.manifest.files.get(name)
    if version is None:
        return f"{name} is missing"
    if listed is None or listed.size_bytes == version.size_bytes:
        return None
    return f"{name} has {version.size_bytes} bytes, expected {listed.size_bytes}"


def _publish(storage: Storage, note: str, identity: Identity, base: Identity | None, pending: str | None) -> bool:
    """Bring a save into force whose claim found the base in force; False: it was withdrawn. Again is harmless."""
    if base is None and pending is not None:
        _place_common(storage, pending)  # no reader is harmed by it
    try:
        storage.move(note, METADATA_FILE)
    except SaveError as error:
        if not _is_missing(error):
            raise
        if identity_in_force(storage) != identity:
            return False
    _finish(storage, pending)
    return True


def _finish(storage: Storage, pending: str | None) -> None:
    storage.sync()  # before all else: else a power cut may leave the index before it with this common state
    if pending is None:
        return
    try:
        _place_common(storage, pending)
    except SaveError as error:
        _logger.warning("%s: published; the next save puts its common state in place: %s", storage, error)


def _place_common(storage: Storage, pending: str) -> None:
    """Give the pending common state its name; an error of a moment must not leave stock readers the old one."""
    for left in reversed(range(_RENAMES)):
        try:
            storage.move(pending, COMMON_FILE)
            return
        except SaveError as error:
            if _is_missing(error):
                return
            if not left:
                raise
            _logger.warning("%s: %s; it is tried again", storage, error)
            time.sleep(_RETRY_S)


def _place_in_store(
    storage: Storage, name: str, version: FileVersion, content: bytes | None = None, before: FileVersion | None = None
) -> None:
    """As `_place_common`, as long as that version of `.metadata` is in force: each put replaces only the object that
    was there before, so a late one is refused. `content`: the pending one, if it is known, and the one in force
    `before` this version. The pending one stays.
    """
    for _ in range(_ATTEMPTS):
        if content is None:
            try:
                content = storage.read(name)
            except CheckpointNotFoundError:
                return
            before, now = storage.version(COMMON_FILE), storage.version(METADATA_FILE)
            if now is None or now.number != version.number:
                return
        if storage.replace_if(COMMON_FILE, content, before) is not None:
            return
        content = None


def _is_missing(error: SaveError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def common_file_in_force(storage: Storage, index: CheckpointIndex) -> str | None:
    """Which file holds the common state of an index, maybe the pending one of its save; None: none does."""
    if COMMON_STATE_KEY in index.objects:
        return None
    # Asked for by its name, since a listing may lag behind; the pending one first: it is renamed to the other.
    return next(filter(storage.exists, (*map(pending_name, sorted(saves_of(index))), COMMON_FILE)), None)


# --- around the commit ------------------------------------------------------------------------------------------------


def open_target(storage: Storage, options: SaveOptions, earlier: Commit | None = None) -> Commit:
    """Begin a save into a directory, on the coordinator, or continue one that has begun with its common state.
    `earlier`: of the same call; where it has failed, its common state is saved again. Raises `CheckpointExistsError`,
    or `SaveError`.
    """
    if (commit := begun_ahead(storage)) is None:
        storage.ensure()
        common = None
        if earlier is not None and earlier.storage.location == storage.location:
            common = earlier.common if earlier.was_given_up or earlier.is_undecided else None
        commit = Commit.begin(storage, common=common)
    commit.storage, commit.has_opened = storage, True  # with the deadlines of this save
    if commit.base is not None and options.on_existing == "error":
        commit.give_up()
        raise CheckpointExistsError(
            # "Checkpoint already exists" is what DCP says, and callers look for.
            f'{storage}: Checkpoint already exists and on_existing="error" (overwrite=False); choose another directory,'
            ' or on_existing="replace"'
        )
    return commit


def begun_ahead(storage: Storage) -> Commit | None:
    """The save into a directory that this thread has begun with its common state, and whose data are to come: by
    whatever strategy. (A thread that a strategy has given up may come to this in the middle of a later save.)
    """
    here, own = os.getpid(), threading.current_thread()
    saves: tuple[Commit, ...] = tuple(at_work.values())
    for one in saves:
        is_ahead = one.common is not None and not (one.has_opened or one.is_over)
        if is_ahead and one.owner.pid == here and one.thread is own and one.storage.location == storage.location:
            return one
    return None


def discard(storage: Storage, files: Iterable[str]) -> None:
    """Remove the data files that a failed save has written, as far as that is still possible."""
    try:
        for name in files:
            storage.delete(name)
    except (SaveError, OSError) as error:
        _logger.warning("%s: could not remove the files of a failed save: %s", storage, error)


def sum_of_file(storage: Storage, save_id: bytes, name: str = COMMON_FILE) -> ManifestFile | None:
    """The entry of a file as it is now in the manifest of a save; None if there is no such file."""
    try:
        content = storage.read(name)
    except CheckpointNotFoundError:
        return None
    return ManifestFile(len(content), crc32(content), save_id)


# How long a file that another host has written may take to be seen on this one, and how often it is looked for.
_FILES_APPEAR_WITHIN_S = 10.0
_FIRST_PERIOD_S = 0.05
_LOOKERS = 16


def check_files(commit: Commit, planned: Mapping[str, int], *, at_least: bool = False) -> None:
    """Raise `SaveError` unless every planned file is there, of so many bytes, as this process sees it: the ranks may
    write to several places. Where one is not, the save may have lost already.
    """
    storage = commit.storage

    is_wrong = operator.lt if at_least else operator.ne
    left = dict(planned)
    until_s = time.monotonic() + _FILES_APPEAR_WITHIN_S
    period_s = _FIRST_PERIOD_S
    found: dict[str, FileVersion | None] = {}
    look = partial(in_parallel, work=lambda name: found.update({name: storage.version(name)}))
    while left:
        threads = _LOOKERS if len(left) > _LOOKERS else storage.asks_at_once
        run_concurrently(storage.asks_at_once, partial(look, left, threads=threads), commit.prepare)
        sizes = {name: -1 if (file := found[name]) is None else file.size_bytes for name in left}
        left = {name: size for name, size in left.items() if is_wrong(sizes[name], size)}
        if not left or time.monotonic() >= until_s:
            break
        commit.check()
        # A network file system may show what another host has written a little later.
        time.sleep(period_s)
        period_s *= 2
        storage.list()
    if left:
        name, size = min(left.items())
        file = found[name]
        raise SaveError(
            f"{storage}: {len(left)} of the files that the ranks have written cannot be seen by the coordinator, on "
            f"host {platform.node()}, as they were written: {name} was planned with {size} bytes, "
            + ("and is not there" if file is None else f"and has {file.size_bytes}")
            + ". Is this directory not shared between the hosts, but on a disk of each one's own, or has a store lost "
            "what it has confirmed? All ranks must save to one directory that all hosts share. Nothing was published"
        )


def write_config(storage: Storage, content: bytes, commit: Commit | None) -> bool:
    """Write `metadata.json` of the checkpoint that `commit` has published; False if another save has replaced it. None:
    it is not known who has published. Raises `SaveError` if the strategy of `commit` has left nothing to go with it.
    """
    if commit is not None and commit.has_opened and not commit.is_over:  # it comes later
        commit = None
    elif commit is not None and (commit.was_given_up or not commit.is_over):
        is_new = identity_in_force(storage) != commit.base
        if not commit.is_over and (is_new or commit.base is None):  # of another strategy, which may need no .metadata
            commit.place_common()
        elif commit.common is not None or not is_new:
            commit.give_up()
            raise SaveError(
                f"{storage}: when Megatron's save ended, its strategy had published nothing here that its common state "
                f"could go with; {METADATA_FILE}, if there is one, is of another save. Save into a new directory"
            )
        commit = None
    has_config, is_published = run_concurrently(
        storage.asks_at_once,
        partial(_has_config, storage, content),
        lambda: commit is None or commit.is_in_force(),
    )
    if not has_config and is_published:
        storage.publish(CONFIG_FILE, content)
    return has_config or is_published


def _has_config(storage: Storage, content: bytes) -> bool:
    try:
        return storage.read(CONFIG_FILE, len(content)) == content
    except (CheckpointNotFoundError, CorruptCheckpointError):  # longer
        return False


def remove_tensors(path: Path, key_prefix: str) -> list[str]:
    """Remove all keys with this prefix, then files that hold nothing else; returns these."""
    storage = storage_at(path)
    with Commit.begin(storage) as commit:
        index = read_index(path)
        tensors = {key: entry for key, entry in index.tensors.items() if not key.startswith(key_prefix)}
        objects = {key: entry for key, entry in index.objects.items() if not key.startswith(key_prefix)}
        if not key_prefix or len(tensors) + len(objects) == len(index.tensors) + len(index.objects):
            _logger.warning("%s: no key begins with %r, nothing is removed", storage, key_prefix)
            return []
        planner_data = index.planner_data
        if isinstance(planner_data, dict):
            planner_data = {key: value for key, value in planner_data.items() if not str(key).startswith(key_prefix)}
        kept = replace(index, tensors=tensors, objects=objects, planner_data=planner_data)
        kept = kept.with_fingerprints(index.fingerprints)
        needed = index_files(kept)
        commit.publish(encode_metadata(kept), needed=needed)
        return sorted(index_files(index) - needed)
