"""What a process of its own does for a run between its saves: remove old checkpoints, copy new ones to a second tier.

The coordinator of a save asks for it when the checkpoint is published, and training goes on; where each node has its
own disk, one rank of each node does. The process is a bare
interpreter without torch, and gives way to training. What it has done, and what has failed, are lines in the log of the
trainer; no save fails by it. It ends with the trainer: one that ends in order lets it finish what has been asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import LoadError, OptionError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.paths import checkpoint_path, is_local
from mcore_ckpt.core.process import exit_text
from mcore_ckpt.core.signals import signals_held_back
from mcore_ckpt.core.threads import in_parallel, start_thread
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.iterations import iteration_directories, iteration_of
from mcore_ckpt.format.file_names import id_in_names
from mcore_ckpt.save.supervised_child import TRAINING_FIRST_NICE
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)

# How often a trainer that ends says what it waits for.
_SAY_EVERY_S: Final = 30.0
# Between two saves by the same clock, which has stood still or gone back.
_STEP_S: Final = 0.001
# How long the first save waits for what the second tier holds, which a load has begun to look through.
_LOOK_WITHIN_S: Final = 5.0
_PROGRAM: Final = """\
import os, sys
os.setpgid(0, 0)
sys.path += [path for path in {path!r} if path not in sys.path]
from mcore_ckpt.save._upkeep_process import main
main({parent_pid}, {cpu_priority})
"""


def checkpoint_published(directory: Path, options: SaveOptions) -> None:
    """A checkpoint is in force; ask for what the options say is to be done then. Raises nothing."""
    if options.keep_last is None and options.drain_to is None:
        return
    directory = directory.absolute()
    if iteration_of(directory.name) is None:
        _say_once(
            f"{directory}: is not named as iter_0000100, and so no checkpoint of a run: keep_last and drain_to do "
            "nothing here"
        )
        return
    task = {"run": str(directory.parent), "name": directory.name}
    if options.keep_last is not None:
        _ask({**task, "keep_last": options.keep_last, "keep_every": options.keep_every})
    if options.drain_to is not None:
        _ask({**task, "drain_to": str(second_tier(options)), "tracker": options.drain_tracker})


def run_loaded(directory: Path, options: SaveOptions, local_tier: str | None = None) -> None:
    """A run is resumed: what an earlier job has not copied to the second tier is copied now; asked by one rank of each
    node. Raises nothing.
    """
    global _has_loaded
    _has_loaded = True
    second = second_tier(options)
    if second is not None:
        _see(directory.absolute())
        _look_through(second)
    run = directory.absolute().parent if local_tier is None else checkpoint_path(local_tier).absolute()
    if second is not None and not _is_same_place(second, run) and iteration_of(directory.name) is not None:
        _ask({"run": str(run), "name": None, "drain_to": str(second), "tracker": options.drain_tracker})


def second_tier(options: SaveOptions) -> Path | None:
    """The run's directory in the second tier; None if there is none."""
    return None if options.drain_to is None else checkpoint_path(options.drain_to.rstrip("/")).absolute()


def check_second_tier(directory: Path, options: SaveOptions) -> None:
    """Raise `OptionError` if the second tier of a checkpoint would be the first one."""
    second = second_tier(options)
    if second is not None and _is_same_place(second, directory.absolute().parent):
        raise OptionError(
            f"drain_to={options.drain_to!r}: the checkpoint is saved there already ({directory}); name another "
            "directory or URL"
        )


@functools.cache
def _is_same_place(first: Path, second: Path) -> bool:
    """Whether two paths name one directory, by links, mounts or profiles of msc://, as far as can be told from here.
    Asked once for each pair: a second tier that hangs is to hold up no later save.
    """
    if first == second:
        return True
    try:
        places = [storage_at(path).location for path in (first, second)]
    except OptionError:
        return False  # the copying says so
    if places[0] == places[1]:
        return True
    if not all(map(is_local, places)):
        return False
    # Below what is there already, which may be mounted in two places, it is the same name.
    (there, below), (its, its_below) = map(_what_is_there, map(Path, places))
    return below == its_below and there is not None and its is not None and os.path.samestat(there, its)


def _what_is_there(path: Path) -> tuple[os.stat_result | None, tuple[str, ...]]:
    """The lowest directory on the way to a path that exists, and the names below."""
    for depth in range(len(path.parts), 0, -1):
        with contextlib.suppress(OSError):
            return Path(*path.parts[:depth]).stat(), path.parts[depth:]
    return None, path.parts


def note_drain(
    directory: Path,
    options: SaveOptions,
    save_id: bytes,
    files: Sequence[str] | None,
    *,
    commits: bool,
    total_bytes: int,
    tells_loads: bool = True,
) -> None:
    """Before a checkpoint is published: leave word that it is to be copied. Raises `SaveError`.

    `files`: names of the data files that lie here; None for all. `commits`: the second tier is committed from here.
    `tells_loads`: loads of this kind of job are told by `run_loaded`.
    """
    second = second_tier(options)
    if second is not None and iteration_of(directory.name) is not None:
        before = None
        with contextlib.suppress(LoadError):
            before = DrainNote.in_force(directory)
        DrainNote(
            save=id_in_names(save_id),
            to=str(second / directory.name),
            files=None if files is None else tuple(files),
            commits=commits,
            total_bytes=total_bytes,
            updated_s=time.time(),
            saved_s=_next_s(directory.absolute(), second),
            begun_s=_begun_s if tells_loads and not _has_loaded else 0.0,
            before=before,
        ).write(directory)


# Whether this process has loaded a checkpoint, and the time of its first save.
_has_loaded = False
_begun_s = 0.0
# The latest time of a save that this process knows of, and the runs in which it has looked for some.
_latest_s = 0.0
_seen: set[Path] = set()
# Second tiers that are being looked through.
_looking: dict[Path, threading.Thread] = {}


def _next_s(directory: Path, second: Path) -> float:
    """The time of a save: later than that of all saves before it, of which some may be by the clock of another host."""
    global _latest_s, _begun_s
    if directory.parent not in _seen:
        _seen.add(directory.parent)
        with contextlib.suppress(LoadError):
            for other in iteration_directories(directory.parent):
                _see(other)
    _look_through(second)
    if (looking := _looking.pop(second, None)) is not None:
        looking.join(_LOOK_WITHIN_S)
        if looking.is_alive():
            _logger.warning(
                "%s: the second tier could not be looked through in %.0f s. If a host whose clock is ahead has saved "
                "there, what is saved now may be refused there as older",
                second,
                _LOOK_WITHIN_S,
            )
    with _lock:
        _latest_s = max(time.time(), _latest_s + _STEP_S)
    _begun_s = _begun_s or _latest_s
    return _latest_s


def _look_through(second: Path) -> None:
    """Begin to see all that the second tier holds, once in this process: what is saved from now on is later."""
    if second not in _seen:
        _seen.add(second)
        thread = threading.Thread(target=_see_all, args=(second,), name="mcore-ckpt-second-tier", daemon=True)
        if start_thread(thread):
            _looking[second] = thread


def _see_all(second: Path) -> None:
    with contextlib.suppress(LoadError, SaveError, OSError):  # the copying says what is wrong there
        in_parallel(iteration_directories(second), _see, storage_at(second).asks_at_once)


def _see(directory: Path) -> None:
    global _latest_s
    with contextlib.suppress(LoadError):
        note = DrainNote.read(directory)
        with _lock:
            _latest_s = max(_latest_s, 0.0 if note is None else note.saved_s)


def _ask(task: dict[str, Any]) -> None:
    try:
        _process().send(task)
    except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may make the save fail)
        _logger.warning("%s: the process that looks after this run cannot be started: %s", task["run"], error)


@functools.cache
def _say_once(text: str) -> None:
    _logger.info(text)


class _UpkeepProcess:
    """The process, and a thread that turns what it says into lines of the log."""

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable is empty: there is no interpreter to start")
        self.owner_pid = os.getpid()
        program = _PROGRAM.format(
            path=[str(Path(path).absolute()) for path in [*sys.path, str(Path(__file__).resolve().parents[2])]],
            parent_pid=os.getpid(),
            cpu_priority=TRAINING_FIRST_NICE,
        )
        with signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self._reader = threading.Thread(target=self._log_what_is_said, name="mcore-ckpt-upkeep", daemon=True)
        if not start_thread(self._reader):
            self._process.kill()
            raise OSError("no thread can be started any more")

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self.owner_pid == os.getpid() and self._process.poll() is None

    def send(self, task: dict[str, Any] | None) -> None:
        """A few hundred bytes, which a pipe takes at once; one that is full tells that the process hangs. None: end.

        (Closing the pipe would not tell: a process that the trainer has forked may hold it open.)
        """
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        os.set_blocking(fd, False)
        os.write(fd, json.dumps(task).encode() + b"\n")

    def _log_what_is_said(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                level, text = json.loads(line)
                _logger.log(level, "%s", text)
            except (ValueError, TypeError):
                _logger.warning("the process that looks after the run: %s", line.decode(errors="replace").rstrip())
        code = self._process.wait()
        if code:
            _logger.warning("the process that looks after the run %s; the next save starts another", exit_text(code))

    def finish(self) -> None:
        """Let it end what it is doing, and wait for that; what is interrupted here, the next run resumes."""
        with contextlib.suppress(OSError):
            self.send(None)
        began_s = time.monotonic()
        while self._process.poll() is None:
            try:
                self._process.wait(_SAY_EVERY_S)
            except subprocess.TimeoutExpired:
                waited_s = time.monotonic() - began_s
                _logger.warning("waiting for old checkpoints to be removed and new ones to be copied: %.0f s", waited_s)
            except BaseException:
                self._process.kill()
                raise
        self._reader.join(_SAY_EVERY_S)
        if not self._reader.is_alive():
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()


_lock = threading.Lock()
_started: list[_UpkeepProcess] = []


def _process() -> _UpkeepProcess:
    with _lock:
        if not _started or not _started[-1].is_running():
            _started.append(_UpkeepProcess())
        return _started[-1]


@atexit.register
def _finish() -> None:
    for process in _started:
        if process.is_running():
            process.finish()


def _forget_the_parents() -> None:
    """In a forked process: the process is the trainer's."""
    global _lock
    _lock = threading.Lock()
    _looking.clear()


os.register_at_fork(after_in_child=_forget_the_parents)
