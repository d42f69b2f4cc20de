"""Whose a directory is: at most one save, of whatever kind, works in it at a time, on whatever host.

A save has an id, and locks the directory before it writes anything else. Its lock is these files:

    .mcore_ckpt_incomplete                the marker: holds what the lease of the save holds that has the directory
    .mcore_ckpt_incomplete.ID             the lease: who that is (`Owner`); its time of change is the heartbeat
    .mcore_ckpt_incomplete.ID.publish     a token: becomes `.metadata` when the save is published
    .mcore_ckpt_incomplete.ID.common      a token: becomes the common state, where that is written ahead of all else
    .mcore_ckpt_incomplete.ID.marker      a token: becomes the marker, while the save ID takes over from another
    .mcore_ckpt_incomplete.ID.replaced    files of the checkpoint that the save replaces, whose names tell no save
    .mcore_ckpt_incomplete.ID.next        the lease of the save that takes over from the save ID, while that goes on

**Locking** is giving the marker's name to the lease, which succeeds for one of all who try at once.

**A holder is gone** if its lease is: it has released the directory. Or if it ran on this host, and its process does not
exist any more (id and start time are compared), or the host has been booted since. A process on another host, or in
another container, cannot be seen: it is gone when its lease has run out and the heartbeat does not move while it is
watched. Clocks of hosts are never compared, only times that the storage gives.

**Taking over** from a holder that is gone is giving the name `.ID.next` to one's own lease, which again only one can.
Then the files by which the old holder could still do something are deleted, and the new lease becomes the marker. A
save that dies within is taken over from in the same way, so the holder is the end of the chain that begins at the
marker.

**A holder that was only thought to be gone** (it was stopped, or cut off) can do no harm when it resumes: its heartbeat
finds no lease, and it can publish neither a common state nor a checkpoint, nor make its lease the marker, since the
tokens that would become those files have been deleted. The names of its data files carry its id, so no other save ever
uses them.

**A publish of which an object store has not said what becomes of it** is treated as that of a save that has died then:
released, such a lock leaves the marker, the token and the list, and what the published file names stays. The save that
takes over completes the publish before it looks at the directory: so what is still on its way arrives too late.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError, SaveError
from mcore_ckpt.core.threads import interpreter_ends, start_thread, together
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from mcore_ckpt.storage.base import RangeWriter, Storage

_logger = logger_of(__name__)

T = TypeVar("T")
BEAT_S: Final = 3.0
# A trainer that holds the interpreter's lock, or a server that hangs, stops the heartbeat for so long at most.
LEASE_S: Final = 60.0
# Even when a lease has run out by the file system's clock, which is the clients' on some, a heartbeat is waited for.
_WATCHED_BEATS: Final = 3
# What a marker without an owner's name may be: half written, where the file system has no hard links.
_UNREADABLE_S: Final = 2.0
_LONGEST_LEASE_S: Final = 3600.0
# When the interpreter ends there may be no thread for a heartbeat: it is renewed by hand then, between the steps of a
# save, which may take longer. A host that cannot see the process waits so long if it was killed.
_LEASE_BY_HAND_S: Final = 600.0
# A list of files names a million of them at most.
_MAX_LEASE_BYTES: Final = 64 * 1024 * 1024
_MISSED_S: Final = 0.5
_ATTEMPTS: Final = 1000
_RETRY_S: Final = 0.01
_PREFIX: Final = INCOMPLETE_MARKER + "."
_TOKEN: Final = ".publish"
_COMMON_TOKEN: Final = ".common"
_MARKER_TOKEN: Final = ".marker"
_NOTE: Final = ".replaced"
_NEXT: Final = ".next"
_SAVE_ID: Final = re.compile(r"[0-9a-f]{16}")
_LOCK_FILE: Final = re.compile(re.escape(_PREFIX) + r"([0-9a-f]{16})(\.publish|\.common|\.marker|\.replaced|\.next)?$")
_TOKENS: Final = (_TOKEN, _COMMON_TOKEN, _MARKER_TOKEN)

# Locks that this process holds, by save id; one that nothing refers to any more is not held.
_held: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()


def is_lock_file(name: str) -> bool:
    """Whether a file belongs to a lock, or to one that was being taken."""
    return name == INCOMPLETE_MARKER or name.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a directory, as its lease says."""

    # Of the save; 16 hexadecimal digits. Of a marker that names none, something that stands for its content.
    save_id: str
    host: str = ""  # name of the machine
    machine: str = ""  # what tells machines of one name apart
    boot: str = ""  # changes whenever the machine starts
    pid_namespace: str = ""  # container, as far as process ids go
    pid: int = 0  # the coordinator's process
    started: str = ""  # when that was started, in ticks since the boot: another process of the same id has another one
    since_s: float = 0.0  # when the directory was locked, by the host's clock; shown to people only
    beat_s: float = BEAT_S  # how often the heartbeat is renewed
    lease_s: float = LEASE_S  # how long it may be late
    noted: Mapping[str, Any] | None = None  # what else the lease says

    @classmethod
    def here(cls, noted: Mapping[str, Any] | None = None) -> Owner:
        """This process, for a new save."""
        return cls(
            save_id=secrets.token_hex(8),
            host=platform.node(),
            machine=_first_line("/etc/machine-id"),
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or "",
            since_s=time.time(),
            beat_s=BEAT_S,
            lease_s=_LEASE_BY_HAND_S if interpreter_ends() else LEASE_S,
            noted=noted,
        )

    def encode(self) -> bytes:
        """The lease's content."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "noted"}
        return json.dumps({**(self.noted or {}), **own}).encode()

    @classmethod
    def decode(cls, content: bytes) -> Owner:
        """Who a lease or marker names; one of an older version, or a torn one, names no process (`host` is empty)."""
        try:
            fields = json.loads(content)
            own = {name: fields.pop(name) for name in cls.__slots__ if name != "noted"}
            owner = cls(**own, noted=fields)
            texts = (owner.save_id, owner.host, owner.machine, owner.boot, owner.pid_namespace, owner.started)
            numbers = (owner.since_s, owner.beat_s, owner.lease_s)
            well_formed = (
                all(type(text) is str for text in texts)
                and type(owner.pid) is int
                and owner.pid > 0
                and all(type(value) in (int, float) for value in numbers)
                and _SAVE_ID.fullmatch(owner.save_id) is not None
                and owner.host != ""
            )
            if well_formed:
                return owner
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fields = None
        stands_for = hashlib.sha256(content).hexdigest()[:16]
        return cls(save_id=stands_for, noted=fields if isinstance(fields, dict) else None)

    def process_state(self) -> Literal["alive", "gone", "rebooted", "unknown"]:
        """What can be said of the owner's process from here: `"unknown"` if it cannot be seen."""
        if not self.host:
            return "gone"
        if self.host != platform.node() or self.machine != _first_line("/etc/machine-id"):
            return "unknown"
        if self.boot != _first_line("/proc/sys/kernel/random/boot_id"):
            return "rebooted"
        if self.pid_namespace != _pid_namespace():
            return "unknown"
        if self.pid == os.getpid():
            held = _held.get(self.save_id)
            return "alive" if held is not None and held.is_held else "gone"
        started = _start_of(self.pid)
        another = started is None or (started and self.started and started != self.started)
        return "gone" if another else "alive"

    def __str__(self) -> str:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        except (ValueError, OverflowError, OSError):  # the lease may say anything
            since = "an unknown time"
        return f"process {self.pid} on host {self.host}, since {since}"


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


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


@dataclass(slots=True)
class _Life:
    """What a lock and its thread share: where it is, the process that it is of, whether it has ended, and how."""

    storage: Storage
    pid: int = field(default_factory=os.getpid)
    ended: threading.Event = field(default_factory=threading.Event)
    released: bool = False
    lost: bool = False
    undecided: set[str] = field(default_factory=set)  # tokens by which something may yet be published


class DirectoryLock:
    """A directory that this process holds for one save, until the lock is released, or forgotten.

    Made by `take`. A thread renews its heartbeat; it takes no part in any collective, and ends with the process. Where
    no thread can be started, at the end of the interpreter, `is_still_held` renews it.

    Attributes:
        owner: this process, with the save's id.
        after: the holders, now gone, that it was taken over from.
    """

    def __init__(self, storage: Storage, owner: Owner, after: Iterable[Owner]) -> None:
        self.owner = owner
        self.after = tuple(after)
        self._life = _Life(storage)
        self._token_used = False  # for other things than publishing, which end with it
        self._has_published = False  # which has used the token up
        _held[owner.save_id] = self
        # The thread releases a lock that is forgotten: a device that hangs must not hold up the thread that forgets it.
        forgotten = weakref.finalize(self, self._life.ended.set)
        forgotten.atexit = False
        thread = threading.Thread(target=_renew, args=(owner, self._life), name="mcore-ckpt-lock", daemon=True)
        self._beats_by_hand = not start_thread(thread)

    @classmethod
    def take(
        cls,
        storage: Storage,
        noted: Mapping[str, Any] | None = None,
        *,
        common_ahead: bool = False,
    ) -> DirectoryLock:
        """Lock a directory, which must exist; waits until it is known whether a holder elsewhere is gone.

        `noted` are more entries of the lease, in JSON's types. `common_ahead`: a common state is going to be published,
        too. Raises `SaveError` if another save holds it.
        """
        owner = Owner.here(noted)
        try:
            files = [(_lease(owner), owner.encode()), (_lease(owner, _TOKEN), b"")]
            if common_ahead:  # now, so that a save that takes over finds it to delete
                files.append((_lease(owner, _COMMON_TOKEN), b""))
            together(storage.asks_at_once, *(partial(storage.create, *file) for file in files))
            after = _take(storage, owner)
        except BaseException:
            for end in ("", *_TOKENS):
                with contextlib.suppress(SaveError, OSError):
                    storage.delete(_lease(owner, end))
            raise
        try:
            return cls(storage, owner, after)
        except BaseException:  # no thread can be started
            _release(_Life(storage), owner, remove_marker=not after)
            raise

    @property
    def is_held(self) -> bool:
        """Whether this process still has it, as far as it knows without asking the storage."""
        return not self._life.ended.is_set() and self._life.pid == os.getpid()

    def note(self, replaced: Sequence[str]) -> None:
        """Keep a list of files, for the save that takes over if this one publishes and does not remove them."""
        if replaced:
            self.storage.create(_lease(self.owner, _NOTE), json.dumps(list(replaced)).encode())

    def left_notes(self, names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
        """The lists that saves which are gone have left, with their ids; each is removed when the next is asked for."""
        for name in names:
            match = _LOCK_FILE.match(name)
            if match is None or match.group(2) != _NOTE or self.is_locked_by(match.group(1)):
                continue
            try:
                listed = json.loads(_read(self.storage, name) or b"[]")
            except (ValueError, RecursionError):
                listed = []
            yield match.group(1), [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
            self.storage.delete(name)

    def is_locked_by(self, save: str) -> bool:
        """Whether a save holds the directory or a part of it, or is about to; asked of its lease."""
        return is_locked_by(self.storage, save)

    def sweep(self, names: Iterable[str], *, notes: bool = True) -> None:
        """Remove what is left of locks of processes that are gone, among these files of the directory; with `notes`
        also lists of files, which `left_notes` has not been asked for.

        A process that cannot be seen is gone when its heartbeat is an hour old: nobody waits for that to be so here.
        """
        for name in sorted(names, reverse=True):  # the rights to publish before the lease
            match = _LOCK_FILE.match(name)
            if match is None or match.group(1) == self.owner.save_id or (match.group(2) == _NOTE and not notes):
                continue
            # The file `.next` belongs to the save that it names.
            content = _read(self.storage, name if match.group(2) == _NEXT else _PREFIX + match.group(1))
            owner = None if content is None else Owner.decode(content)
            if owner is not None and not owner.host and self._is_young(name):
                continue  # a save that is about to lock the directory is writing it
            if owner is None or _is_long_gone(self.storage, owner, self.now_ns):
                remove = self.storage.revoke if match.group(2) in _TOKENS else self.storage.delete
                remove(name)

    def _is_young(self, name: str) -> bool:
        file, now_ns = self.storage.version(name), self.now_ns()
        return file is not None and now_ns is not None and now_ns - file.modified_ns < _UNREADABLE_S * 1e9

    def publish(self, name: str, content: bytes, *, common: bool = False) -> None:
        """Publish a file, unless the directory has been taken over: one, and with `common` one common state."""
        if self._beats_by_hand or self._life.lost or not self.is_held:
            self.check()
        token = _lease(self.owner, _COMMON_TOKEN) if common else _lease(self.owner, _TOKEN)
        try:  # through what a save that takes over takes away
            self.storage.publish(name, content, through=token)
            self._has_published = self._has_published or not common
        except BaseException as error:
            if self.storage.may_yet_publish(token):
                self._life.undecided.add(token)
            if isinstance(error, SaveError):
                self.check()  # says better what has happened, if the directory was lost between the two
            if isinstance(error, SaveError) and self.is_undecided:
                raise SaveError(f"{error}. It may still come into force: its files stay") from error.__cause__
            raise

    @property
    def is_undecided(self) -> bool:
        """Whether `publish` has failed, and what it was to publish may come into force all the same."""
        return bool(self._life.undecided)

    def delete(self, name: str) -> None:
        """Remove a file of a name that other saves may use, too, unless the directory has been taken over."""
        self._through(lambda token: self.storage.delete_through(name, token))

    def remove(self, name: str) -> None:
        """As `delete`; after `publish`, which has used the right to that up, the directory is only looked at first."""
        if self._has_published:
            self.check()
            self.storage.delete(name)
        else:
            self.delete(name)

    def open_writer(self, name: str, *, size_bytes: int) -> RangeWriter:
        """Create a file of a name that other saves may use, too: it gets it with `finish`, unless the directory has
        been taken over.
        """
        return self._through(lambda token: self.storage.open_writer(name, size_bytes=size_bytes, through=token))

    def _through(self, do: Callable[[str], T]) -> T:
        self.check()
        self._token_used = True
        try:
            return do(_lease(self.owner, _TOKEN))
        except SaveError:
            self.check()
            raise

    def has_published_common(self) -> bool:
        """Whether a common state has been published; asked of the storage."""
        return self.storage.version(_lease(self.owner, _COMMON_TOKEN)) is None

    def is_still_held(self) -> bool:
        """Whether the directory is still this save's, asked of the storage. Raises `LoadError`."""
        held = self.is_held and not self._life.lost
        if held and self._beats_by_hand:
            self.storage.renew(_lease(self.owner))
        return held and self.storage.version(_lease(self.owner)) is not None

    def now_ns(self) -> int | None:
        """What time it is, in nanoseconds since 1970, by the clock by which the storage's files have theirs; None if
        the lease is lost.
        """
        self.storage.renew(_lease(self.owner))
        now = self.storage.version(_lease(self.owner))
        return None if now is None else now.modified_ns

    def check(self) -> None:
        """Raise `SaveError` if the directory is not this save's any more."""
        if not self.is_still_held():
            now = holders(self.storage)
            raise SaveError(
                f"{self.storage}: this save ({self.owner}) has lost the directory, "
                + (f"which {now[-1]} has taken over" if now and now[-1].host else "and no save holds it now")
                + ": it gave no sign of life for longer than its lease. Nothing of it is published; save again"
            )

    @property
    def storage(self) -> Storage:
        """The directory."""
        return self._life.storage

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self, *, remove_marker: bool = True, keep_note: bool = False) -> None:
        """Release the directory; again, or after it was lost, that does nothing.

        `remove_marker=False` leaves the marker: there is no complete checkpoint. `keep_note` leaves the noted files to
        the next save.
        """
        if not self.is_held:
            return
        self._life.released = True
        self._life.ended.set()
        _held.pop(self.owner.save_id, None)
        if self._token_used and not self.is_undecided:
            with contextlib.suppress(SaveError, LoadError, OSError):
                self.storage.revoke(_lease(self.owner, _TOKEN))
        _release(self._life, self.owner, remove_marker=remove_marker, keep_note=keep_note)


def is_locked_by(storage: Storage, save: str) -> bool:
    """Whether the lease of a save is in a directory; raises `LoadError`."""
    return storage.version(_PREFIX + save) is not None


def may_yet_publish(storage: Storage, save: str) -> bool:
    """Whether a save that has failed may still come into force, by its id; see `Storage.may_yet_publish`."""
    return storage.may_yet_publish(_PREFIX + save + _TOKEN)


def holders(storage: Storage) -> list[Owner]:
    """The holders that were gone, in turn, and last the one that holds the directory now; empty if none does.

    The last may be gone, too: that is for `DirectoryLock.take` to find out.
    """
    found: list[Owner] = []
    name = INCOMPLETE_MARKER
    while len(found) < _ATTEMPTS:
        content = _read(storage, name)
        if content is None:
            break
        owner = Owner.decode(content)
        if any(owner.save_id == other.save_id for other in found):
            break
        found.append(owner)
        name = _lease(owner, _NEXT)
    return found


def contenders(storage: Storage, names: Iterable[str]) -> list[Owner]:
    """All saves of which a lock has left files, by the names in the directory: holders, old and new, and attempts."""
    found: dict[str, Owner] = {}
    for name in names:
        if not is_lock_file(name):
            continue
        lease = name.removesuffix(_TOKEN).removesuffix(_MARKER_TOKEN)  # that has other content, and names no process
        content = _read(storage, lease)
        owner = Owner(lease.removeprefix(_PREFIX)) if content is None else Owner.decode(content)
        found.setdefault(owner.save_id, owner)
    return list(found.values())


def seems_gone(storage: Storage, owner: Owner) -> bool:
    """Whether the save that locked the directory is gone, for display, by this host's clock. Raises `LoadError`."""
    beat = storage.version(_lease(owner))
    if beat is None:
        return True  # released, and the marker left: its save has failed
    state = owner.process_state()
    if state == "unknown":
        return time.time() - beat.modified_ns / 1e9 > _LONGEST_LEASE_S
    return state != "alive"


def _is_long_gone(storage: Storage, owner: Owner, now_ns: Callable[[], int | None]) -> bool:
    """Whether a save that is locking the directory, or was, is gone, without waiting to see; `now_ns` by the storage's
    clock, if that can be told.
    """
    state = owner.process_state()
    if state != "unknown":
        return state != "alive"
    beat = storage.version(_lease(owner))
    if beat is None:
        return True
    now = now_ns()
    return now is not None and now - beat.modified_ns > _LONGEST_LEASE_S * 1e9


def _lease(owner: Owner, end: str = "") -> str:
    """The lease of a save, or another file of its lock."""
    return f"{_PREFIX}{owner.save_id}{end}"


def _read(storage: Storage, name: str) -> bytes | None:
    try:
        with storage.open_reader(name, direct="off") as reader:
            return reader.read(0, min(reader.size_bytes, _MAX_LEASE_BYTES))
    except CheckpointNotFoundError:
        return None


def _take(storage: Storage, owner: Owner) -> list[Owner]:
    for _ in range(_ATTEMPTS):
        # Most directories are free: one request tells, and takes it.
        if storage.lock(INCOMPLETE_MARKER, _lease(owner), owner.encode()):
            return []
        if chain := holders(storage):
            _wait_until_gone(storage, chain[-1], owner)
            if after := _take_over(storage, chain[-1], owner):
                return after
        time.sleep(_RETRY_S * secrets.randbelow(10) / 10)  # those that met here do not meet again
    raise SaveError(f"{storage}: the directory could not be locked in {_ATTEMPTS} attempts: other saves lock it, too")


def _take_over(storage: Storage, gone: Owner, owner: Owner) -> list[Owner]:
    """Become the holder after one that is gone; returns all that are gone, or none if another save did."""
    storage.create(_lease(owner, _MARKER_TOKEN), b"")  # first, so that who finds this save by the link finds it, too
    if not storage.lock(_lease(gone, _NEXT), _lease(owner)):
        storage.delete(_lease(owner, _MARKER_TOKEN))
        return []
    chain = holders(storage)
    ids = [each.save_id for each in chain]
    if owner.save_id not in ids:
        # Another save had taken over, and tidied up, before the link was made: nothing leads to it.
        for name in (_lease(gone, _NEXT), _lease(owner, _MARKER_TOKEN)):
            storage.delete(name)
        return []
    if ids[-1] != owner.save_id:
        raise SaveError(f"{storage}: {chain[-1]} has locked the directory while this process was held up")
    for each in chain[:-1]:
        # From here on, it cannot do anything any more, if it should not be gone after all.
        for end in _TOKENS:
            storage.revoke(_lease(each, end))
        storage.delete(_lease(each))
    try:
        storage.publish(INCOMPLETE_MARKER, owner.encode(), through=_lease(owner, _MARKER_TOKEN))
    except SaveError as error:
        now = holders(storage)
        if now and now[-1].save_id == owner.save_id:
            raise
        who = now[-1] if now else "another save"
        raise SaveError(f"{storage}: {who} has locked the directory while this process was held up") from error
    for each in chain[:-1]:
        storage.delete(_lease(each, _NEXT))
    if gone.host and not _is_of_living_process(gone, owner):  # else that save has failed, and its process has said so
        _logger.warning("%s: taken over from a save that is gone (%s)", storage, gone)
    return chain[:-1]


def _is_of_living_process(gone: Owner, here: Owner) -> bool:
    """Whether the process of a save that is gone lives: this one (`here`), or another."""
    is_here = bool(gone.started) and all(
        getattr(gone, name) == getattr(here, name)
        for name in ("host", "machine", "boot", "pid_namespace", "pid", "started")
    )
    return is_here or gone.process_state() == "alive"


def _wait_until_gone(storage: Storage, holder: Owner, owner: Owner) -> None:
    """Return when the holder is known to be gone; raise `SaveError` if it is not."""
    if not holder.host:
        _wait_for_content(storage, holder)
        return
    before = storage.version(_lease(holder))
    state = holder.process_state()
    if before is None or state == "gone":
        return
    if state == "alive" and holder.pid == os.getpid():
        raise SaveError(
            f"{storage}: an earlier save into this directory is not finalized yet;"
            " call maybe_finalize_async_calls(blocking=True) before saving there again"
        )
    if state == "alive":
        raise _in_use(storage, holder, "which is running")
    beat_s = min(max(holder.beat_s, 0.0), _LONGEST_LEASE_S)
    watched_s = _WATCHED_BEATS * beat_s
    lease_s = watched_s if state == "rebooted" else min(max(holder.lease_s, watched_s), _LONGEST_LEASE_S)
    # Both times are the file system's.
    storage.renew(_lease(owner))
    now = storage.version(_lease(owner))
    late_s = 0.0 if now is None else (now.modified_ns - before.modified_ns) / 1e9
    if state == "rebooted" and late_s >= lease_s:
        return
    wait_s = max(watched_s, lease_s - max(0.0, late_s))
    _logger.warning(
        "%s: held by %s, whose process cannot be seen from here; watching its heartbeat for %.0f s",
        storage,
        holder,
        wait_s,
    )
    until_s = time.monotonic() + wait_s
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, max(beat_s / 4, _RETRY_S)))
        storage.renew(_lease(owner))  # another save that watches this process meanwhile sees that it lives
        beat = storage.version(_lease(holder))
        if beat is None:
            return
        if beat != before:
            raise _in_use(storage, holder, "which renews its lease")


def _wait_for_content(storage: Storage, holder: Owner) -> None:
    """Give a save that has just made the marker the time to write it. One that an older version wrote is sound."""
    if holder.noted is not None:
        return
    until_s = time.monotonic() + _UNREADABLE_S
    while time.monotonic() < until_s:
        time.sleep(_RETRY_S * 5)
        now = holders(storage)
        if not now or now[-1].save_id != holder.save_id:
            return


def _in_use(storage: Storage, holder: Owner, why: str) -> SaveError:
    return SaveError(
        f"{storage}: another save holds this directory: {holder}, {why}; nothing was changed. Save into another "
        "directory, or wait until that save has ended (if its process ends, the directory is free)"
    )


def _renew(owner: Owner, life: _Life) -> None:
    """Body of the thread that keeps a lock: it holds no reference to the lock, so that this can be forgotten."""
    missed = 0
    while not life.ended.wait(_MISSED_S if missed else owner.beat_s):
        try:
            missed = 0 if life.storage.renew(_lease(owner)) else missed + 1
        except Exception as error:  # noqa: BLE001 (without this thread the directory is lost)
            _logger.warning("%s: the lease could not be renewed: %s: %s", life.storage, type(error).__name__, error)
        if missed > 1:  # (once, while the directory is being renamed)
            life.lost = True
            _logger.warning("%s: this save (%s) has lost the directory: it cannot publish", life.storage, owner)
            return
    if not life.released and life.pid == os.getpid():
        with contextlib.suppress(SaveError, LoadError, OSError):
            _release(life, owner, remove_marker=False)


def _release(life: _Life, owner: Owner, *, remove_marker: bool, keep_note: bool = False) -> None:
    storage = life.storage
    if life.undecided:
        remove_marker, keep_note = False, True
        _logger.warning(
            "%s: the store has not said what becomes of what this save (%s) was to publish: that may still come into "
            "force. The files that it names stay; the next save into this directory completes it first",
            storage,
            owner,
        )

    def delete_marker() -> None:
        storage.delete_own(INCOMPLETE_MARKER, lambda content: Owner.decode(content).save_id == owner.save_id)

    ends = (_TOKEN, _COMMON_TOKEN) if keep_note else (_TOKEN, _COMMON_TOKEN, _NOTE)
    names = [name for end in ends if (name := _lease(owner, end)) not in life.undecided]
    deleted = [partial(storage.delete, name) for name in names]
    try:
        together(storage.asks_at_once, *([delete_marker] if remove_marker else []), *deleted)
    finally:
        # Last: as long as the lease is there, no other save locks the directory.
        storage.delete(_lease(owner))
