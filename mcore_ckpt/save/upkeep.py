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
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.process import exit_text
from mcore_ckpt.core.signals import signals_held_back
from mcore_ckpt.core.threads import start_thread
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.iterations import iteration_of
from mcore_ckpt.format.file_names import id_in_names
from mcore_ckpt.writing.supervised_child import TRAINING_FIRST_NICE

_logger = logging.getLogger(__name__)

# How often a trainer that ends says what it waits for.
_SAY_EVERY_S: Final = 30.0
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
    second = second_tier(options)
    run = directory.absolute().parent if local_tier is None else checkpoint_path(local_tier).absolute()
    if second not in (None, run) and iteration_of(directory.name) is not None:
        _ask({"run": str(run), "name": None, "drain_to": str(second), "tracker": options.drain_tracker})


def second_tier(options: SaveOptions) -> Path | None:
    """The run's directory in the second tier; None if there is none."""
    return None if options.drain_to is None else checkpoint_path(options.drain_to.rstrip("/")).absolute()


def check_second_tier(directory: Path, options: SaveOptions) -> None:
    """Raise `OptionError` if the second tier of a checkpoint would be the first one."""
    if second_tier(options) == directory.absolute().parent:
        raise OptionError(
            f"drain_to={options.drain_to!r}: the checkpoint is saved there already ({directory}); name another "
            "directory or URL"
        )


def note_drain(
    directory: Path,
    options: SaveOptions,
    save_id: bytes,
    files: Sequence[str] | None,
    *,
    commits: bool,
    total_bytes: int,
) -> None:
    """Before a checkpoint is published: leave word that it is to be copied. Raises `SaveError`.

    `files`: names of the data files that lie here; None for all. `commits`: the second tier is committed from here.
    """
    second = second_tier(options)
    if second is not None and iteration_of(directory.name) is not None:
        now_s = time.time()
        DrainNote(
            save=id_in_names(save_id),
            to=str(second / directory.name),
            files=None if files is None else tuple(files),
            commits=commits,
            total_bytes=total_bytes,
            updated_s=now_s,
            saved_s=now_s,
        ).write(directory)


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


os.register_at_fork(after_in_child=_forget_the_parents)
