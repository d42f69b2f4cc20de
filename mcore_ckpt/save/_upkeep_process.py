"""The process that looks after a run during training: one task for each line that comes in. No torch.

Two threads work: one removes old checkpoints, the other copies new ones to the second tier, which may take long.
"""

from __future__ import annotations

import contextlib
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
from mcore_ckpt.core.errors import CheckpointError, LoadError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.process import exit_with_parent, lower_priority
from mcore_ckpt.core.signals import leave_signals_to_parent
from mcore_ckpt.directory.copying import SupersededError, drain, give_up, there_now, undrained
from mcore_ckpt.directory.in_force import DrainNote
from mcore_ckpt.directory.iterations import iteration_of, look_at, tracked_name
from mcore_ckpt.directory.retention import prune_run
from mcore_ckpt.format.metadata_read import CONFIG_FILE, METADATA_FILE, TRACKER_FILE
from mcore_ckpt.load.item_checks import check_data_files
from mcore_ckpt.storage.resolve import storage_at

# Megatron writes the tracker file after the save has been published, a moment later. Before that, it names the
# checkpoint before, which therefore would stay.
_TRACKER_WITHIN_S: Final = 30.0
_LONGEST_PERIOD_S: Final = 4.0
# Pauses between attempts to copy a checkpoint, and between looks whether the parts of other nodes have come.
_FIRST_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 300.0
_PARTS_PERIOD_S: Final = 1.0
# So long a trainer that ends waits for the parts of other nodes.
_PARTS_WITHIN_S: Final = 300.0


def main(parent_pid: int, cpu_priority: int | None) -> None:
    """Work until the trainer says that it ends and all is done; end at once when the trainer is gone."""
    leave_signals_to_parent()
    exit_with_parent(parent_pid)
    lower_priority(cpu_priority, None)
    ends = threading.Event()
    removals: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    copies = _Copies(ends)
    remover = threading.Thread(target=_remove, args=(removals, ends, copies))
    copier = threading.Thread(target=copies.work)
    for worker in (remover, copier):
        worker.start()
    for line in sys.stdin:
        if (task := json.loads(line)) is None:
            break
        if "keep_last" in task:
            removals.put(task)
        else:
            copies.add(**task)
    ends.set()
    removals.put(None)
    copies.wake()
    remover.join()
    copies.close()
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


def _remove(tasks: queue.SimpleQueue[dict[str, Any] | None], ends: threading.Event, copies: _Copies) -> None:
    while (task := tasks.get()) is not None:
        _await_tracker(task["run"], task["name"], lambda period_s: ends.wait(period_s) or not tasks.empty())
        if tasks.empty() or ends.is_set():  # otherwise a later save asks for the same
            for directory, note in _remove_old(**task):
                copies.removed(directory, note)


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
    return [(each.path, each.drain) for each in gone if each.drain is not None and not each.drain.done]


class _NewerWaitsError(Exception):
    """A checkpoint that was saved later waits: an older one is copied after it."""


class _Copies:
    """Checkpoints on their way to the second tier. That which was saved last comes first, and leftovers of earlier jobs
    come last.
    """

    def __init__(self, ends: threading.Event) -> None:
        self._ends = ends
        self._changed = threading.Condition()
        self._waiting: dict[Path, float] = {}  # when to try, on the clock of `time.monotonic()`
        self._to: dict[Path, str] = {}  # second tier of each run
        self._order: dict[Path, int] = {}  # in which this job has saved them
        self._tracked: dict[Path, int] = {}  # of which the tracker file of the second tier is, by that order
        self._begun: dict[Path, DrainNote] = {}  # of which something may have been copied
        self._failures: dict[Path, int] = {}
        self._last: set[Path] = set()  # tried for the last time
        self._closed = False  # nothing more comes

    def add(self, run: str, name: str | None, drain_to: str) -> None:
        """A checkpoint was published, or (None) a run was loaded; at a run's first task, what is left is found."""
        directory, left = checkpoint_path(run), list[Path]()
        if directory not in self._to:
            try:
                left, untold = undrained(directory)
                for text in untold:
                    _say(logging.WARNING, text)
            except CheckpointError as error:
                _say(logging.WARNING, f"{run}: cannot be searched for checkpoints that are still to be copied: {error}")
        with self._changed:
            self._to[directory] = drain_to
            if name is not None:
                self._order[directory / name] = len(self._order) + 1
                left.append(directory / name)
            self._waiting.update(dict.fromkeys(left, 0.0))
            self._changed.notify()

    def removed(self, directory: Path, note: DrainNote) -> None:
        """A checkpoint was removed that had not been copied; an earlier job may have copied some of it."""
        with self._changed:
            self._begun.setdefault(directory, note)
            self._last.discard(directory)
            self._waiting[directory] = 0.0
            self._changed.notify()

    def close(self) -> None:
        """Nothing more is added or removed."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wake(self) -> None:
        """The trainer ends."""
        with self._changed:
            self._changed.notify()

    def work(self) -> None:
        """Try each checkpoint until it is copied; a last time when the trainer ends."""
        until_s = math.inf
        while (directory := self._next()) is not None:
            if self._ends.is_set():
                until_s = min(until_s, time.monotonic() + _PARTS_WITHIN_S)
            pause_s = self._attempt(directory)
            has_failed = pause_s is not None and pause_s >= _FIRST_PAUSE_S
            if self._ends.is_set() and (has_failed or time.monotonic() > until_s):
                self._last.add(directory)
            if pause_s is not None:
                with self._changed:
                    self._waiting.setdefault(directory, time.monotonic() + pause_s)

    def _next(self) -> Path | None:
        with self._changed:
            while True:
                now = time.monotonic()
                waiting = {path: when for path, when in self._waiting.items() if path not in self._last}
                ready = [path for path, when in waiting.items() if when <= now or self._is_retried_at_end(path)]
                if ready:
                    chosen = max(ready, key=self._rank)
                    del self._waiting[chosen]
                    return chosen
                if self._closed and not waiting:
                    return None
                self._changed.wait(min((when - now for when in waiting.values()), default=None))

    def _is_retried_at_end(self, path: Path) -> bool:
        return self._ends.is_set() and path in self._failures

    def _rank(self, path: Path) -> tuple[int, int]:
        return self._order.get(path, 0), iteration_of(path.name) or 0

    def _give_way(self, directory: Path) -> None:
        with self._changed:
            now = time.monotonic()
            if any(when <= now and self._rank(path) > self._rank(directory) for path, when in self._waiting.items()):
                raise _NewerWaitsError

    def _attempt(self, directory: Path) -> float | None:
        """Copy a checkpoint; returns after how many seconds to try again, None if it is done or gone."""
        note: DrainNote | None = None
        to = "the second tier"
        try:
            with storage_at(directory).in_use(METADATA_FILE):
                note = DrainNote.in_force(directory)
                self._give_up_other(directory, note)
                if note is None or note.done:
                    return None
                to = f"{self._to[directory.parent]}/{directory.name}"
                if note.to != to:
                    _say(
                        logging.WARNING,
                        f"{directory}: was saved to be copied to {note.to}, not to {to}: it is not copied. "
                        "`mcore-ckpt copy` copies it",
                    )
                    return None
                if note.replaces is None:
                    # A leftover of an earlier job, which had not begun, replaces nothing.
                    note = replace(note, replaces=there_now(note) if directory in self._order else "")
                    note.write(directory)
                self._begun[directory] = note
                return self._copy(directory, note)
        except _NewerWaitsError:
            return 0.0
        except SupersededError as error:
            assert note is not None
            _say(logging.WARNING, f"{directory}: is not copied: {error}")
            _write(replace(note, done=True, error=_words(error)), directory)
            return 0.0  # its parts are removed at the next attempt
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log, and tried again)
            if note is not None and _is_gone(directory):
                return 0.0  # that is said at the next attempt
            failures = self._failures[directory] = self._failures.get(directory, 0) + 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_S)
            again = "the next run resumes it" if self._ends.is_set() else f"it is tried again in {pause_s:.0f} s"
            what = f"could not be copied to {to}"
            if note is None and (begun := self._begun.get(directory)) is not None:
                what = f"what was copied of it to {begun.to} could not be removed"
            _say(logging.WARNING, f"{directory}: {what}: {_words(error)}; {again}")
            if note is not None:
                _write(replace(note, error=_words(error)), directory)
            return pause_s

    def _copy(self, directory: Path, note: DrainNote) -> float | None:
        started_s = time.monotonic()
        storage = storage_at(directory)
        if problems := look_at(directory)[0].problems:
            # (Megatron-Core writes it right after the checkpoint has been published.)
            if directory in self._order and not storage.exists(CONFIG_FILE) and not self._ends.is_set():
                return _PARTS_PERIOD_S
            raise SaveError(f"it is not complete: {problems[0]}")
        sent = drain(
            directory,
            note,
            lambda found, names: check_data_files(storage, found.index, names),
            partial(self._give_way, directory),
        )
        if sent is None:
            return _PARTS_PERIOD_S
        if note.commits:
            self._track(directory, note)
        replace(note, done=True, error="").write(directory)
        self._begun.pop(directory)
        self._failures.pop(directory, None)
        what = "copied" if note.commits else "this node's part copied"
        seconds = time.monotonic() - started_s
        _say(logging.INFO, f"{directory}: {what} to {note.to}, {human_bytes(sent.nbytes)} in {seconds:.1f} s")
        return None

    def _track(self, directory: Path, note: DrainNote) -> None:
        """Let the tracker file of the second tier name what this job has saved last of the checkpoints that are there,
        if the run has one, or Megatron-Core is going to write one. A leftover is named if the run's own names it.
        """
        run, order, is_named = directory.parent, self._order.get(directory, 0), False
        if order:
            runs_have_one = storage_at(run).exists(TRACKER_FILE) or storage_at(directory).exists(CONFIG_FILE)
            is_named = runs_have_one and order > self._tracked.get(run, 0)
        else:
            with contextlib.suppress(LoadError):  # it may be being written at this moment
                is_named = run not in self._tracked and tracked_name(run) == directory.name
        iteration = iteration_of(directory.name)
        if is_named and iteration is not None:
            storage_at(checkpoint_path(note.to).parent).publish(TRACKER_FILE, str(iteration).encode())
            self._tracked[run] = order

    def _give_up_other(self, directory: Path, note: DrainNote | None) -> None:
        """Remove from the second tier what was copied of a checkpoint that is not going to be committed there: it was
        removed here or replaced, or the second tier holds another.
        """
        begun = self._begun.get(directory)
        if begun is None or (note is not None and note.save == begun.save and not (note.done and note.error)):
            return
        if note is None and _is_gone(directory):
            _say(logging.WARNING, f"{directory}: was removed before it was copied to {begun.to}")
        give_up(begun)
        self._begun.pop(directory)


def _is_gone(directory: Path) -> bool:
    try:
        return not storage_at(directory).exists(METADATA_FILE)
    except LoadError:
        return False


def _write(note: DrainNote, directory: Path) -> None:
    try:
        note.write(directory)
    except CheckpointError as error:
        _say(logging.WARNING, f"{directory}: what became of its copy could not be noted: {error}")
