"""The note of a save at work: who it is, so that a second job in the same directory is usually refused at its start.

    .mcore_ckpt_incomplete.ID       the note of the save ID; in a file system, its index-to-be (see `commit`)
    .mcore_ckpt_next.TOKEN          a claim: which save is the successor of what TOKEN stands for

A note is a courtesy: it spares a second job the writing, and names host and process in the message. It is not renewed,
and nothing depends on it: which save comes into force is decided by the commit. A process on this host can be seen, so
its note counts as long as it lives. One on another host or in another container cannot: its note counts while it is
young, by the storage's clock.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mcore_ckpt.core.errors import CheckpointNotFoundError, SaveError
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from mcore_ckpt.storage.base import Storage

CLAIM: Final = ".mcore_ckpt_next."
NOTE: Final = INCOMPLETE_MARKER + "."
_NOTE_NAME: Final = re.compile(re.escape(NOTE) + r"(?P<id>[0-9a-f]{16})")
YOUNG_S: Final = 60.0
"""So long the note of a process that cannot be seen from here keeps other saves out."""
# What a note that names nobody may be: half written, or filled with an index that is just being published.
_UNREADABLE_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.02
# A list of files names a million of them at most.
_MAX_NOTE_BYTES: Final = 64 * 1024 * 1024
# So old is the note of a process that cannot be seen, where people are shown whether a save is at work.
_LONG_GONE_S: Final = 3600.0

# Saves of this process that are at work (`Commit`), by id; one that nothing refers to any more is not.
at_work: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def is_note(name: str) -> bool:
    """Whether a file is of a save at work, or of one that has died: a note or a claim."""
    return name.startswith((INCOMPLETE_MARKER, CLAIM))


def note_name(save: str) -> str:
    """The note of a save, by its id."""
    return NOTE + save


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has written a note."""

    save: str  # its id; 16 hexadecimal digits
    host: str = ""  # name of the machine; empty: the note cannot be read
    machine: str = ""  # what tells machines of one name apart
    boot: str = ""  # changes whenever the machine starts
    pid_namespace: str = ""  # container, as far as process ids go
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
            machine=_first_line("/etc/machine-id"),
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_pid_namespace(),
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
            texts = (owner.host, owner.machine, owner.boot, owner.pid_namespace, owner.started)
            well_formed = (
                all(type(text) is str for text in texts)
                and owner.save == save
                and owner.host != ""
                and type(owner.pid) is int
                and owner.pid > 0
                and type(owner.since_s) in (int, float)
            )
            if well_formed:
                return owner
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return cls(save)

    def process_state(self) -> Literal["alive", "gone", "unknown"]:
        """What can be said of the owner's process from here: `"unknown"` if it cannot be seen."""
        if not self.host:
            return "unknown"
        if self.host != platform.node() or self.machine != _first_line("/etc/machine-id"):
            return "unknown"
        if self.boot != _first_line("/proc/sys/kernel/random/boot_id"):
            return "gone"
        if self.pid_namespace != _pid_namespace():
            return "unknown"
        if self.pid == os.getpid():
            held = at_work.get(self.save)
            return "alive" if held is not None and not held.is_over else "gone"
        started = _start_of(self.pid)
        another = started is None or (started and self.started and started != self.started)
        return "gone" if another else "alive"

    def __str__(self) -> str:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        except (ValueError, OverflowError, OSError):  # the note may say anything
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


def notes(storage: Storage, names: Iterable[str]) -> list[Owner]:
    """Who has left notes, among these files of a directory. Raises `LoadError`."""
    found = [(name, match["id"]) for name in names if (match := _NOTE_NAME.fullmatch(name))]
    owners = ((read_note(storage, name), save) for name, save in found)
    return [Owner.decode(save, content) for content, save in owners if content is not None]


def read_note(storage: Storage, name: str) -> bytes | None:
    """What a note says; None if it is gone. Raises `LoadError`."""
    try:
        with storage.open_reader(name, direct="off") as reader:
            return reader.read(0, min(reader.size_bytes, _MAX_NOTE_BYTES))
    except CheckpointNotFoundError:
        return None


def refuse_others(storage: Storage, own: Owner, names: Iterable[str]) -> None:
    """Raise `SaveError` if another save is at work in a directory, by its note, which was there before one's own."""
    mine = storage.version(note_name(own.save))
    for owner in notes(storage, names):
        if owner.save == own.save or mine is None:
            continue
        until_s = time.monotonic() + _UNREADABLE_S
        while not owner.host and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)
            content = read_note(storage, note_name(owner.save))
            if content is None:
                break
            owner = Owner.decode(owner.save, content)
        there = storage.version(note_name(owner.save))
        if there is None or not owner.host or (there.modified_ns, owner.save) > (mine.modified_ns, own.save):
            continue
        state = owner.process_state()
        if state == "alive" and owner.pid == os.getpid():
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


def seems_gone(storage: Storage, owner: Owner) -> bool:
    """Whether the save that has left a note is gone, for display, by this host's clock. Raises `LoadError`."""
    state = owner.process_state()
    if state == "unknown":
        there = storage.version(note_name(owner.save))
        return there is None or time.time() - there.modified_ns / 1e9 > _LONG_GONE_S
    return state == "gone"
