"""What a process of its own does for a run between its saves: remove old checkpoints or their optimizer's state, copy
new ones to a second tier, export their models.

The coordinator of a save asks for it when the checkpoint is published, and training goes on; where each node has its
own disk, one rank of each node does. The process is a bare interpreter without torch, and gives way to training. What
it has done, and what has failed, are lines in the log of the trainer; no save fails by it. It ends with the trainer.
A trainer that ends in order lets it finish what has been asked for.

In the process (`main`) one task comes with each line of its input. Three threads work: one removes old checkpoints, one
copies new ones to the second tier, one has models exported. Both may take long; an export has a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.console import human_bytes, logger_of
from mcore_ckpt.core.errors import CheckpointError, CheckpointNotFoundError, LoadError, OptionError, SaveError
from mcore_ckpt.core.options import PARTIAL, SaveOptions, checkpoint_path, local_path
from mcore_ckpt.core.process import exit_text
from mcore_ckpt.directory.copying import SupersededError, drain, give_up, identity_of, metadata_of, undrained
from mcore_ckpt.directory.in_force import DrainNote, is_in_force, iteration_of, noted_saves, tracked_name
from mcore_ckpt.directory.iterations import look_at
from mcore_ckpt.directory.retention import NOT_COPIED, prune_run
from mcore_ckpt.format.integrity import id_in_names
from mcore_ckpt.format.metadata_read import (
    CONFIG_FILE,
    DRAIN_FILE,
    EXPORTS_FILE,
    HF_INDEX,
    METADATA_FILE,
    TRACKER_FILE,
)
from mcore_ckpt.load.checks import check_data_files
from mcore_ckpt.save.jobs import TRAINING_FIRST_NICE, StatusPage, start_interpreter, work_for_trainer
from mcore_ckpt.storage.resolve import lies_in, storage_at

_logger = logger_of(__name__)


# How often a trainer that ends says what it waits for.
_SAY_EVERY_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0
# So long a second tier may take to say which directory it is.
_ASK_WITHIN_S: Final = 5.0


def checkpoint_published(directory: Path, options: SaveOptions, *, is_coordinator: bool = True) -> None:
    """A checkpoint is in force; ask for what the options say is to be done then. Raises nothing."""
    directory = directory.absolute()
    if iteration_of(directory.name) is None:
        _say_once(
            f"{directory}: is not named as iter_0000100, and so no checkpoint of a run: keep_last, drain_to, "
            "keep_optimizer_last and export_to do nothing here"
        )
        return
    task = {"run": str(directory.parent), "name": directory.name}
    kept = {"keep_last": options.keep_last, "keep_optimizer_last": options.keep_optimizer_last}
    if any(kept.values()):
        _ask({**task, **kept, "keep_every": options.keep_every})
    if options.drain_to is not None:
        _ask({**task, "drain_to": str(second_tier(options))})
    if options.export_to is not None and is_coordinator:
        config = None if options.export_config is None else str(local_path(options.export_config).absolute())
        _ask({**task, "export_to": str(checkpoint_path(options.export_to).absolute()), "hf_config": config})


def run_loaded(directory: Path, options: SaveOptions, local_tier: str | None = None) -> None:
    """A run is resumed: what an earlier job has not copied to the second tier is copied now; asked by one rank of each
    node. Raises nothing.
    """
    second = second_tier(options)
    run = directory.absolute().parent if local_tier is None else checkpoint_path(local_tier).absolute()
    if second not in (None, run) and iteration_of(directory.name) is not None:
        _ask({"run": str(run), "name": None, "drain_to": str(second)})


def second_tier(options: SaveOptions) -> Path | None:
    """The run's directory in the second tier; None if there is none."""
    given = options.drain_to
    return None if given is None else checkpoint_path(given.rstrip("/") or given).absolute()


def check_places(directory: Path, options: SaveOptions) -> None:
    """Raise `OptionError` if the second tier of a checkpoint, or the place of its model, is in its run, by whatever
    path.

    Either may hang, and is not waited for long: a second tier is asked again before anything is copied there, or
    removed here.
    """
    run = directory.absolute().parent
    for name in ("drain_to", "export_to") if iteration_of(directory.name) is not None else ():
        given = getattr(options, name)
        place = None if given is None else checkpoint_path(given.rstrip("/") or given).absolute()
        if place is not None and (place == run or _is_in(run, place, os.path.lexists(run))):
            raise OptionError(
                f"{name}={given!r}: lies in the run itself: the checkpoint is saved there already ({directory}); name "
                "another directory or URL"
            )


def note_drain(
    directory: Path, options: SaveOptions, save_id: bytes, files: Sequence[str] | None, *, commits: bool
) -> None:
    """Before a checkpoint is published: leave word that it is to be copied. Raises `SaveError`.

    `files`: names of the data files that lie here; None for all. `commits`: the second tier is committed from here.
    """
    second = second_tier(options)
    if second is None or iteration_of(directory.name) is None:
        return
    storage = storage_at(directory)
    with suppress(LoadError):
        for save in noted_saves(storage.list()):  # of earlier saves, which were replaced, or have failed
            if not is_in_force(storage, bytes.fromhex(save)):
                storage.delete(f"{DRAIN_FILE}.{save}")
    own_files = None if files is None else tuple(files)
    replaces = "" if options.on_existing == "error" else None
    note = DrainNote(id_in_names(save_id), str(second / directory.name), own_files, commits, replaces=replaces)
    note.write(directory)


@functools.cache
def _is_in(run: Path, place: Path, _is_there: bool) -> bool:
    """Whether a directory is the run's or lies in it; looked at again when the run's directory has been made."""
    found: list[bool] = []

    def ask() -> None:
        with suppress(OptionError):  # it cannot be opened: what is to be copied or exported there says so
            found.append(lies_in(place, run))

    asker = threading.Thread(target=ask, daemon=True)
    with suppress(RuntimeError):  # at the interpreter's end
        asker.start()
        asker.join(_ASK_WITHIN_S)
    return found == [True]


@functools.cache
def _say_once(text: str) -> None:
    _logger.info(text)


class _UpkeepProcess:
    """The process, and a thread that turns what it says into lines of the log."""

    def __init__(self) -> None:
        self.page = StatusPage()
        self.process = start_interpreter(
            __name__,
            os.getpid(),
            self.page.fd,
            pass_fds=(self.page.fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        self.pid = self.process.pid
        assert self.process.stdin is not None
        self._tasks = self.process.stdin
        os.set_blocking(self._tasks.fileno(), False)
        self._reader = threading.Thread(target=self._log_lines, name="mcore-ckpt-upkeep", daemon=True)
        try:
            self._reader.start()
        except RuntimeError:  # at the interpreter's end
            self.process.kill()
            raise

    @property
    def dead(self) -> bool:
        """The process has ended, or is that of a trainer that has forked this one."""
        return self.process.poll() is not None

    def send(self, task: dict[str, Any] | None) -> None:
        """A few hundred bytes, which a pipe takes at once; one that is full tells that the process hangs. None: end.

        (Closing the pipe would not tell: a process that the trainer has forked may hold it open.)
        """
        line = json.dumps(task).encode() + b"\n"
        if self._tasks.write(line) != len(line):
            raise OSError("it takes no more tasks")

    def finish(self) -> None:
        """Let it end what it is doing, and wait for that; what is interrupted here, the next run resumes."""
        began_s = said_s = time.monotonic()
        is_told = False
        self.page.training_waits = 0  # a thread that still saves cannot end any more
        try:
            while not self.dead:
                if not is_told:
                    with suppress(OSError, ValueError):  # the pipe is full, or it has just ended
                        self.send(None)
                        is_told = True
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_LOOK_EVERY_S)
                if time.monotonic() - said_s >= _SAY_EVERY_S:
                    said_s = time.monotonic()
                    waited_s = said_s - began_s
                    _logger.warning(
                        "waiting for old checkpoints to be removed and new ones to be copied or exported: %.0f s",
                        waited_s,
                    )
            self._reader.join(_LOOK_EVERY_S)  # longer only if a fork of the trainer holds the pipe open
        except BaseException:
            self.process.kill()
            raise

    def _log_lines(self) -> None:
        with self.process as process:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    level, text = json.loads(line)
                    _logger.log(level, "%s", text)
                except (ValueError, TypeError):
                    shown = line.decode(errors="replace").rstrip()
                    _logger.warning("the process that looks after the run: %s", shown)
        if process.returncode:
            text = exit_text(process.returncode)
            _logger.warning("the process that looks after the run %s; the next save starts another", text)


# The upkeep process of this process, if one was started; one that has died is replaced.
_started: list[_UpkeepProcess] = []
_lock = threading.Lock()  # of that list, and of what pages count


def _disown() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the trainer may have held it
    for process in _started:
        process.process.returncode = 0  # a fork of the trainer has nothing to wait for


os.register_at_fork(after_in_child=_disown)


def _ask(task: dict[str, Any]) -> None:
    try:
        if _is_over:  # a save of an `atexit` function that was registered before this module's
            raise SaveError(
                "the trainer ends, and has waited for it already. The next run removes old checkpoints, and copies this"
                " one; `mcore-ckpt export` exports it"
            )
        with _lock:
            if not _started or _started[-1].dead:
                _started[:] = [_UpkeepProcess()]
            _started[-1].send(task)
    except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may make the save fail)
        _logger.warning("%s: the process that looks after this run cannot be started: %s", task["run"], error)


@contextmanager
def training_waits() -> Iterator[None]:
    """Training waits for a save: other work writes nothing meanwhile."""
    with _lock:
        pages = [process.page for process in _started if not process.dead]
        for page in pages:
            page.training_waits += 1
    try:
        yield
    finally:
        with _lock:
            for page in pages:
                page.training_waits -= 1


# The process has ended with its trainer, or could not: at the interpreter's end nothing more is registered.
_is_over = not threading.main_thread().is_alive()


@atexit.register
def _end() -> None:
    global _is_over
    _is_over = True
    _finish()


def _finish() -> None:
    for process in _started:
        if not process.dead:
            process.finish()


# Megatron writes the tracker file after the save has been published, a moment later. Before that, it names the
# checkpoint before, which therefore would stay.
_TRACKER_WITHIN_S: Final = 30.0
_TRACKER_PERIOD_S: Final = 0.5
# Pauses between attempts to copy a checkpoint, and between looks whether the parts of other nodes have come.
_FIRST_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 300.0
_PARTS_PERIOD_S: Final = 1.0
# By their names: conversions build upon saves.
_EXPORTER: Final = "mcore_ckpt.models.conversions"
_MODEL_ONLY: Final = "mcore_ckpt.reshard.model_only"
# So long a trainer that ends waits for the parts of other nodes.
_PARTS_WITHIN_S: Final = 300.0


def main(parent_pid: int, page_fd: int) -> None:
    """Work until the trainer says that it ends and all is done; end at once when the trainer is gone."""
    work_for_trainer(parent_pid, page_fd, TRAINING_FIRST_NICE)
    ends = threading.Event()
    removals, copies, exports = _Newest(), _Copies(), _Newest()
    remover = threading.Thread(target=_remove, args=(removals, ends, page_fd))
    copier = threading.Thread(target=copies.work)
    exporter = threading.Thread(target=_export, args=(exports, page_fd))
    for worker in (remover, copier, exporter):
        worker.start()
    last, held = dict[str, dict[str, Any]](), False
    for line in sys.stdin:
        if (task := json.loads(line)) is None:
            break
        if "keep_last" in task:
            last[task["run"]] = task
            removals.put(task)
        elif "export_to" in task:
            held = True
            if (older := exports.put(task)) is not None:
                text = f"{older['run']}: {older['name']} is not exported, since {task['name']} is newer"
                _say(logging.INFO, text)
        else:
            held = True
            copies.add(**task)
    ends.set()
    exports.end()
    copies.finish()
    copier.join()
    exporter.join()
    for task in last.values() if held else ():  # again: what has been copied and exported by now can go
        removals.put(task)
    removals.end()
    remover.join()


class _Newest:
    """Tasks that wait, of each run the one that came last: a trainer may save several runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._ended = False

    def put(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """Add a task; returns the one of the same run in whose place it waits."""
        with self._changed:
            older = self._waiting.pop(task["run"], None)
            self._waiting[task["run"]] = task
            self._changed.notify()
        return older

    def end(self) -> None:
        """Nothing more is added."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def get(self) -> dict[str, Any] | None:
        """The next task; None when all are done and nothing more is added."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def has(self, run: str) -> bool:
        """Whether a task of that run waits."""
        return run in self._waiting


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
    while time.monotonic() < until_s:
        with suppress(CheckpointError):  # what is done then says so
            if tracked_name(run) == name:
                return
        if wait(_TRACKER_PERIOD_S):
            return


def _remove(tasks: _Newest, ends: threading.Event, page_fd: int) -> None:
    while (task := tasks.get()) is not None:
        run, name, every = task["run"], task["name"], task["keep_every"]
        _await_tracker(run, name, lambda period_s, run=run: ends.wait(period_s) or tasks.has(run))  # type: ignore[misc]
        if not tasks.has(run) or ends.is_set():  # otherwise a later save asks for the same
            if (last := task["keep_last"]) is not None:
                _remove_old(run, name, last, every)
            if (last := task["keep_optimizer_last"]) is not None:
                _remove_optimizers(page_fd, run, name, last, every)


def _remove_old(run: str, name: str, keep_last: int, keep_every: int | None) -> None:
    try:
        report = prune_run(run, keep_last=keep_last, keep_every=keep_every, remove=True, saved_last=name)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log: the next save tries again)
        _say(logging.WARNING, f"{run}: old checkpoints could not be removed after {name}: {_words(error)}")
        return
    gone = [decision.checkpoint for decision in report.decisions if not decision.keep]
    if gone:
        names = ", ".join(checkpoint.name for checkpoint in gone)
        _say(logging.INFO, f"{run}: removed {names} ({human_bytes(report.freed_bytes)}) after {name}")
    if waiting := [decision for decision in report.decisions if decision.reason.startswith(NOT_COPIED)]:
        names = ", ".join(decision.checkpoint.name for decision in waiting)
        _say(logging.WARNING, f"{run}: more than keep_last={keep_last} stay, {names}: {waiting[0].reason}")


def _remove_optimizers(page_fd: int, run: str, name: str, keep_last: int, keep_every: int | None) -> None:
    what = "the optimizer's state of"
    try:
        said = _answer_of(_MODEL_ONLY, page_fd, run, keep_last, keep_every, name)
    except Exception as error:  # noqa: BLE001  (as above)
        _say(logging.WARNING, f"{run}: {what} old checkpoints could not be removed after {name}: {_words(error)}")
        return
    for text in said["warnings"]:
        _say(logging.WARNING, text)
    if said["names"]:
        freed = human_bytes(said["nbytes"])
        _say(logging.INFO, f"{run}: removed {what} {', '.join(said['names'])} ({freed}) after {name}")


def _answer_of(module: str, page_fd: int, *arguments: str | int | None) -> dict[str, Any]:
    """What a process says in the end that runs `main` of a later layer. Raises `SaveError`."""
    process = start_interpreter(
        module,
        os.getpid(),
        page_fd,
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(page_fd,),
    )
    answer, _ = process.communicate()
    if process.returncode:
        raise SaveError(f"the process that does it {exit_text(process.returncode)}")
    said: dict[str, Any] = json.loads(answer)
    if "error" in said:
        raise SaveError(said["error"])
    return said


def _export(tasks: _Newest, page_fd: int) -> None:
    seen: set[str] = set()
    while (task := tasks.get()) is not None:
        _export_model(page_fd, **task)
        if task["run"] not in seen:
            seen.add(task["run"])
            for name in _begun_exports(task):
                _export_model(page_fd, **{**task, "name": name})


def _begun_exports(task: dict[str, Any]) -> list[str]:
    """Checkpoints whose export an earlier job has begun, and not finished; they may have been removed since."""
    try:
        place = checkpoint_path(task["export_to"])
        folders = storage_at(place).folders()
        begun = [n for n in folders if n.endswith(PARTIAL) or not storage_at(place / n).exists(HF_INDEX)]
        return sorted({name for n in begun if iteration_of(name := n.removesuffix(PARTIAL)) is not None})
    except CheckpointNotFoundError:  # nothing has been exported yet
        return []
    except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log)
        _say(logging.WARNING, f"{task['run']}: cannot tell which exports are not finished: {_words(error)}")
        return []


def _export_model(page_fd: int, run: str, name: str, export_to: str, hf_config: str | None) -> None:
    source, target = (checkpoint_path(folder) / name for folder in (run, export_to))
    started_s = time.monotonic()
    try:
        storage_at(run).publish(EXPORTS_FILE, os.fsencode(export_to))  # for `list`
        with storage_at(source).in_use(METADATA_FILE):
            said = _answer_of(_EXPORTER, page_fd, str(source), str(target), hf_config)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log)
        _say(logging.WARNING, f"{source}: could not be exported to {target}: {_words(error)}")
        return
    seconds = time.monotonic() - started_s
    text = f"exported to {target}, {human_bytes(said['nbytes'])} in {seconds:.1f} s"
    if said["is_gone"]:
        if not said["is_removed"]:
            return  # another's
        text = f"was removed before its model was exported; what was begun of that at {target} is removed, too"
    _say(logging.INFO, f"{source}: {text}")


class _Copies:
    """Checkpoints on their way to the second tier. That which was saved last comes first, and leftovers of earlier jobs
    come last.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Path, float] = {}  # when to try, on the clock of `time.monotonic()`
        self._to: dict[Path, str] = {}  # second tier of each run
        self._order: dict[Path, int] = {}  # in which this job has saved them
        self._tracked: dict[Path, int] = {}  # of which the tracker file of the second tier is, by that order
        self._failures: dict[Path, int] = {}
        self._until_s = math.inf  # the trainer ends, and waits for the parts of other nodes until then

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

    def finish(self) -> None:
        """The trainer ends, and nothing more is added: each that waits is tried a last time."""
        with self._changed:
            self._until_s = time.monotonic() + _PARTS_WITHIN_S
            self._waiting = dict.fromkeys(self._waiting, 0.0)
            self._changed.notify()

    @property
    def _ends(self) -> bool:
        return self._until_s < math.inf

    def work(self) -> None:
        """Try each checkpoint until it is copied."""
        while (directory := self._next()) is not None:
            pause_s = self._attempt(directory)
            with self._changed:
                if pause_s is not None and time.monotonic() < self._until_s:
                    pause_s = min(pause_s, _PARTS_PERIOD_S) if self._ends else pause_s
                    self._waiting.setdefault(directory, time.monotonic() + pause_s)

    def _next(self) -> Path | None:
        with self._changed:
            while self._waiting or not self._ends:
                now = time.monotonic()
                ready = [path for path, when in self._waiting.items() if when <= now]
                if ready:
                    chosen = max(ready, key=lambda path: (self._order.get(path, 0), iteration_of(path.name) or 0))
                    del self._waiting[chosen]
                    return chosen
                self._changed.wait(min((when - now for when in self._waiting.values()), default=None))
            return None

    def _attempt(self, directory: Path) -> float | None:
        """Copy a checkpoint; returns after how many seconds to try again, None if it is done, gone or given up."""
        note: DrainNote | None = None
        to = "the second tier"
        try:
            with storage_at(directory).in_use(METADATA_FILE):
                note = DrainNote.in_force(directory)
                if note is None or note.done:
                    return None
                to = f"{self._to[directory.parent]}/{directory.name}"
                if note.to != to:
                    text = f"was saved to be copied to {note.to}, not to {to} as jobs do now: `mcore-ckpt copy` does it"
                    _say(logging.WARNING, f"{directory}: {text}")
                    _write(replace(note, error=text), directory)
                    return None
                if note.replaces is None:
                    # A leftover of an earlier job, which had not begun, replaces nothing.
                    there = metadata_of(storage_at(note.to)) if directory in self._order else None
                    note = replace(note, replaces=identity_of(there))
                    note.write(directory)
                return self._copy(directory, note)
        except SupersededError as error:
            assert note is not None
            _say(logging.WARNING, f"{directory}: is not copied: {error}")
            _write(replace(note, done=True, error=_words(error)), directory)
            _give_up(directory, note)
            return None
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log, and tried again)
            failures = self._failures[directory] = self._failures.get(directory, 0) + 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_S)
            again = "the next run resumes it" if self._ends else f"it is tried again in {pause_s:.0f} s"
            _say(logging.WARNING, f"{directory}: could not be copied to {to}: {_words(error)}; {again}")
            if note is not None:
                _write(replace(note, error=_words(error)), directory)
            return None if self._ends else pause_s

    def _copy(self, directory: Path, note: DrainNote) -> float | None:
        started_s = time.monotonic()
        storage = storage_at(directory)
        if problems := look_at(directory)[0].problems:
            # (Megatron-Core writes it right after the checkpoint has been published.)
            if directory in self._order and not storage.exists(CONFIG_FILE) and not self._ends:
                return _PARTS_PERIOD_S
            raise SaveError(f"it is not complete: {problems[0]}")
        sent = drain(directory, note, lambda found, names: check_data_files(storage, found.index, names))
        if sent is None:
            return _PARTS_PERIOD_S
        if note.commits:
            self._track(directory, note)
        replace(note, done=True, error="").write(directory)
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
            with suppress(LoadError):  # it may be being written at this moment
                is_named = run not in self._tracked and tracked_name(run) == directory.name
        iteration = iteration_of(directory.name)
        if is_named and iteration is not None:
            storage_at(checkpoint_path(note.to).parent).publish(TRACKER_FILE, str(iteration).encode())
            self._tracked[run] = order


def _give_up(directory: Path, note: DrainNote) -> None:
    """Remove from the second tier what was copied of a checkpoint that is not going to be committed there."""
    try:
        give_up(note)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log)
        text = f"{directory}: what was copied of it to {note.to} could not be removed: {_words(error)}"
        _say(logging.WARNING, text)


def _write(note: DrainNote, directory: Path) -> None:
    try:
        note.write(directory)
    except CheckpointError as error:
        _say(logging.WARNING, f"{directory}: what became of its copy could not be noted: {error}")
