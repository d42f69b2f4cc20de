"""The process that looks after a run during training: one task for each line that comes in. No torch.

Two threads work: one removes old checkpoints, the other copies new ones to the second tier, which may take long.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import CheckpointError, CheckpointNotFoundError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.process import exit_with_parent, lower_priority
from mcore_ckpt.core.signals import leave_signals_to_parent
from mcore_ckpt.directory.drain import (
    SupersededError,
    copy_late_files,
    drain,
    give_up,
    saved_last,
    track_drained,
    undrained,
)
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.iterations import iteration_of, look_at, tracked_name
from mcore_ckpt.directory.retention import prune_run
from mcore_ckpt.format.metadata_read import METADATA_FILE
from mcore_ckpt.items.item_checks import check_data_files
from mcore_ckpt.storage.resolve import storage_at

# Megatron writes the tracker file after the save has been published, a moment later. Before that, it names the
# checkpoint before, which therefore would stay.
_TRACKER_WITHIN_S: Final = 30.0
_LONGEST_PERIOD_S: Final = 4.0
# Pauses between attempts to copy a checkpoint, and between looks whether the parts of other nodes have arrived.
_FIRST_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 300.0
_ARRIVALS_PERIOD_S: Final = 1.0
# At the end, other nodes get so long from when this one has copied its own part.
_ARRIVALS_WITHIN_S: Final = 300.0
_NOTE_PERIOD_S: Final = 2.0
# When a checkpoint that was copied is looked at again for files that other programs have put there.
_LATE_FILES_AFTER_S: Final = 10.0
_TRACKER_STAYS: Final = (
    "its job had loaded no checkpoint, and the second tier holds {} of another: the tracker file there is not turned "
    "back. If training was to resume, as after the loss of a local disk, end the job and load from {}"
)


def main(parent_pid: int, cpu_priority: int | None) -> None:
    """Work until the trainer says that it ends and all is done; end at once when the trainer is gone."""
    leave_signals_to_parent()
    exit_with_parent(parent_pid)
    lower_priority(cpu_priority, None)
    ends = threading.Event()
    removals: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    drains = _Drains(ends)
    remover = threading.Thread(target=_remove, args=(removals, ends, drains))
    copier = threading.Thread(target=drains.work)
    for worker in (remover, copier):
        worker.start()
    for line in sys.stdin:
        if (task := json.loads(line)) is None:
            break
        if "keep_last" in task:
            removals.put(task)
        else:
            drains.add(**task)
    ends.set()
    removals.put(None)
    drains.wake()
    remover.join()
    drains.close()
    copier.join()


def _say(level: int, text: str) -> None:
    sys.stdout.write(json.dumps([level, text]) + "\n")
    sys.stdout.flush()


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _await_tracker(run: str, name: str, wait: Callable[[float], bool]) -> None:
    """Return when the tracker file names a checkpoint, or when `wait` says that it does not matter any more; or after
    some time, since not every trainer has such a file.
    """
    until_s = time.monotonic() + _TRACKER_WITHIN_S
    period_s = 0.1
    while time.monotonic() < until_s:
        try:
            if tracked_name(run) == name:
                return
        except CheckpointError:
            pass  # what is done then says so
        if wait(period_s):
            return
        period_s = min(2 * period_s, _LONGEST_PERIOD_S)


def _remove(tasks: queue.SimpleQueue[dict[str, Any] | None], ends: threading.Event, drains: _Drains) -> None:
    while (task := tasks.get()) is not None:
        _await_tracker(task["run"], task["name"], lambda period_s: ends.wait(period_s) or not tasks.empty())
        if tasks.empty() or ends.is_set():  # otherwise a later save asks for the same
            for directory, note in _remove_old(**task):
                drains.removed(directory, note)


def _remove_old(run: str, name: str, keep_last: int, keep_every: int | None) -> list[tuple[Path, DrainNote]]:
    """Returns which of the checkpoints that went had not been copied to the second tier, with their notes."""
    try:
        report = prune_run(run, keep_last=keep_last, keep_every=keep_every, remove=True, saved_last=name)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log: the next save tries again)
        _say(logging.WARNING, f"{run}: old checkpoints could not be removed after {name}: {_words(error)}")
        return []
    gone = [decision.checkpoint for decision in report.decisions if not decision.keep]
    if gone:
        names = ", ".join(checkpoint.name for checkpoint in gone)
        _say(logging.INFO, f"{run}: removed {names} ({human_bytes(report.freed_bytes)}) after {name}")
    return [(each.path, each.drain) for each in gone if each.drain is not None and each.drain.is_open]


class _Drains:
    """Checkpoints on their way to the second tier, the newest first: it is the one that is missed most."""

    def __init__(self, ends: threading.Event) -> None:
        self._ends = ends
        self._changed = threading.Condition()
        self._waiting: dict[Path, float] = {}  # when to try, on the clock of `time.monotonic()`
        self._to: dict[Path, str] = {}  # second tier of each run
        self._tracker: dict[Path, str] = {}  # what each says of the tracker file there
        self._begun: dict[Path, DrainNote] = {}  # of which something may have been copied
        self._arriving: dict[Path, float] = {}  # what other nodes are still to copy of, and since when
        self._last: set[Path] = set()  # tried for the last time
        self._closed = False  # nothing more comes

    def add(self, run: str, name: str | None, drain_to: str, tracker: str) -> None:
        """A checkpoint was published, or (None) a run was loaded; at a run's first task, what is left is found."""
        directory = checkpoint_path(run)
        is_known, self._to[directory] = directory in self._to, drain_to
        self._tracker[directory] = tracker
        found = [] if name is None else [directory / name]
        try:
            if not is_known:
                opened, untold = undrained(directory)
                for text in untold:
                    _say(logging.WARNING, text)
                left = dict(opened)
                with self._changed:
                    for path, note in left.items():
                        self._begun.setdefault(path, note)
                last = saved_last(directory)  # for files that came late
                found += [*left, *([] if last is None else [last])]
        except CheckpointError as error:
            _say(logging.WARNING, f"{run}: cannot be searched for checkpoints that are still to be copied: {error}")
        with self._changed:
            self._waiting.update(dict.fromkeys(found, time.monotonic()))
            self._changed.notify()

    def removed(self, directory: Path, note: DrainNote) -> None:
        """A checkpoint was removed that had not been copied; an earlier job may have copied some of it."""
        with self._changed:
            self._begun.setdefault(directory, note)
            self._last.discard(directory)
            self._waiting[directory] = time.monotonic()
            self._changed.notify()

    def close(self) -> None:
        """Nothing more is added or removed."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def work(self) -> None:
        """Try each checkpoint until it is copied; a last time when the trainer ends."""
        while (directory := self._next()) is not None:
            ending = self._ends.is_set()
            pause_s = self._attempt(directory)
            now = time.monotonic()
            if ending and now - self._arriving.get(directory, -math.inf) > _ARRIVALS_WITHIN_S:
                self._last.add(directory)
            if pause_s is not None:
                with self._changed:
                    self._waiting.setdefault(directory, now + pause_s)

    def _next(self) -> Path | None:
        with self._changed:
            while True:
                tried, now = self._last, time.monotonic()
                ending = self._ends.is_set()
                ready = [
                    path
                    for path, when in self._waiting.items()
                    if path not in tried and (when <= now or (ending and path not in self._arriving))
                ]
                if ready:
                    chosen = max(ready, key=lambda path: iteration_of(path.name) or 0)
                    del self._waiting[chosen]
                    return chosen
                later = [when - now for path, when in self._waiting.items() if path not in tried]
                if ending and self._closed and not later:
                    return None
                self._changed.wait(min(later, default=None))

    def _attempt(self, directory: Path) -> float | None:
        """Copy a checkpoint; returns after how many seconds to try again, None if it is done or gone."""
        note: DrainNote | None = None
        to = "the second tier"
        try:
            note = DrainNote.in_force(directory)
            self._give_up_other(directory, note)
            if note is not None and not note.is_open:
                self._copy_late(directory, note)
            if note is None or not note.is_open:
                return None
            to = f"{self._to[directory.parent]}/{directory.name}"
            if note.to != to:
                _say(
                    logging.WARNING,
                    f"{directory}: was saved to be copied to {note.to}, not to {to}: it is not copied. "
                    "`mcore-ckpt copy` copies it",
                )
                return None
            note = replace(note, copied_bytes=0, attempts=note.attempts + 1)
            if note.commits:
                _await_tracker(str(directory.parent), directory.name, self._ends.wait)
                checkpoint, _ = look_at(directory)
                if checkpoint.problems:
                    raise SaveError(f"it is not complete: {checkpoint.problems[0]}")
            self._begun[directory] = note
            started_s = time.monotonic()
            progress = _Progress(directory, note)
            check = partial(check_data_files, storage_at(directory))
            try:
                is_done = drain(directory, note, progress.add, check, own_are_there=directory in self._arriving)
            except SupersededError as error:
                _say(logging.WARNING, f"{directory}: is not copied: {error}")
                older = replace(note, state="superseded", error=_words(error), updated_s=time.time())
                _write(older, directory)
                self._give_up_other(directory, older)
                return None
            if not is_done:
                self._arriving.setdefault(directory, started_s)
                progress.end("waiting")
                return _ARRIVALS_PERIOD_S
            if note.commits:
                higher = track_drained(directory.parent, note, self._tracker[directory.parent])
                if higher:
                    _say(logging.WARNING, f"{directory}: {_TRACKER_STAYS.format(higher, note.to.rpartition('/')[0])}")
            progress.end("copied")
            self._begun.pop(directory)
            self._arriving.pop(directory, None)
            seconds = time.monotonic() - started_s
            what = "copied" if note.commits else "this node's part copied"
            _say(
                logging.INFO,
                f"{directory}: {what} to {to}, {human_bytes(progress.note.copied_bytes)} in {seconds:.1f} s",
            )
            if not note.commits:
                return None
            if not self._ends.is_set():
                return _LATE_FILES_AFTER_S
            self._copy_late(directory, progress.note)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log, and tried again)
            self._arriving.pop(directory, None)
            gone = isinstance(error, CheckpointNotFoundError) and not storage_at(directory).exists(METADATA_FILE)
            if gone and note is not None:
                return 0.0  # removed meanwhile: that is said at the next attempt
            attempts = 1 if note is None else note.attempts
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 10), _LONGEST_PAUSE_S)
            again = "the next run resumes it" if self._ends.is_set() else f"it is tried again in {pause_s:.0f} s"
            what = f"could not be copied to {to}"
            if note is None and (begun := self._begun.get(directory)) is not None:
                what = f"what was copied of it to {begun.to} could not be removed"
            _say(logging.WARNING, f"{directory}: {what}: {_words(error)}; {again}")
            if note is not None:
                _write(replace(note, state="failed", error=_words(error), updated_s=time.time()), directory)
            return pause_s
        return None

    def _copy_late(self, directory: Path, note: DrainNote) -> None:
        """Megatron-Core writes the files of the tokenizer after the tracker file: look again for what is there now."""
        is_own = note.to == f"{self._to[directory.parent]}/{directory.name}"
        if note.state == "copied" and note.commits and is_own and copy_late_files(directory, note):
            _say(logging.INFO, f"{directory}: files that came after the save are copied to {note.to}, too")

    def _give_up_other(self, directory: Path, note: DrainNote | None) -> None:
        """Remove from the second tier what was copied of a checkpoint that is not going to be committed there: it was
        removed here or replaced, or the second tier holds a later one.
        """
        begun = self._begun.get(directory)
        if begun is None or (note is not None and note.save == begun.save and note.is_open):
            return
        if note is None:
            what = "replaced" if storage_at(directory).exists(METADATA_FILE) else "removed"
            _say(logging.WARNING, f"{directory}: was {what} before it was copied to {begun.to}")
        give_up(begun)
        self._begun.pop(directory)
        self._arriving.pop(directory, None)


class _Progress:
    """How far a copy is, noted now and then in the directory, for `mcore-ckpt list`."""

    def __init__(self, directory: Path, note: DrainNote) -> None:
        self.note = replace(note, state="copying", error="")
        self._directory = directory
        self._lock = threading.Lock()
        self._noted_s = 0.0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.note = replace(self.note, copied_bytes=self.note.copied_bytes + nbytes)
            if time.monotonic() - self._noted_s >= _NOTE_PERIOD_S:
                self._noted_s = time.monotonic()
                self._write()

    def end(self, state: str) -> None:
        self.note = replace(self.note, state=state)
        self._write()

    def _write(self) -> None:
        _write(replace(self.note, updated_s=time.time()), self._directory)


def _write(note: DrainNote, directory: Path) -> None:
    """Note it, unless another save has replaced the checkpoint, or the directory is gone."""
    try:
        note.update(directory)
    except CheckpointError as error:
        _say(logging.WARNING, f"{directory}: how far the copy is could not be noted: {error}")
