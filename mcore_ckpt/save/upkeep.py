"""What a process of its own does for a run between its saves: remove old checkpoints, copy new ones to a second tier.

The coordinator of a save asks for it when the checkpoint is published, and training goes on; where each node has its
own disk, one rank of each node does. The process is a bare interpreter without torch, and gives way to training. What
it has done, and what has failed, are lines in the log of the trainer; no save fails by it. It ends with the trainer.
A trainer that ends in order lets it finish what has been asked for.
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
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.process import exit_text
from mcore_ckpt.core.signals import signals_held_back
from mcore_ckpt.core.threads import start_thread
from mcore_ckpt.directory.in_force import DrainNote, is_in_force, noted_saves
from mcore_ckpt.directory.iterations import iteration_of
from mcore_ckpt.format.file_names import id_in_names
from mcore_ckpt.format.metadata_read import DRAIN_FILE
from mcore_ckpt.save.supervised_child import TRAINING_FIRST_NICE, SupervisedChild
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)

# How often a trainer that ends says what it waits for.
_SAY_EVERY_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0
_READ_BYTES: Final = 65536
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
        _ask({**task, "drain_to": str(second_tier(options))})


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
    return None if options.drain_to is None else checkpoint_path(options.drain_to.rstrip("/")).absolute()


def check_second_tier(directory: Path, options: SaveOptions) -> None:
    """Raise `OptionError` if the second tier of a checkpoint would be the first one.

    The paths are compared, and the second tier is not asked: it may hang. Where links lead to one directory, nothing is
    copied.
    """
    if second_tier(options) == directory.absolute().parent:
        raise OptionError(
            f"drain_to={options.drain_to!r}: the checkpoint is saved there already ({directory}); name another "
            "directory or URL"
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
    with contextlib.suppress(LoadError):
        for save in noted_saves(storage.list()):  # of earlier saves, which were replaced, or have failed
            if not is_in_force(storage, bytes.fromhex(save)):
                storage.delete(f"{DRAIN_FILE}.{save}")
    own_files = None if files is None else tuple(files)
    DrainNote(id_in_names(save_id), str(second / directory.name), own_files, commits).write(directory)


@functools.cache
def _say_once(text: str) -> None:
    _logger.info(text)


class _UpkeepProcess(SupervisedChild):
    """The process, and a thread that turns what it says into lines of the log."""

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable is empty: there is no interpreter to start")
        program = _PROGRAM.format(
            path=[str(Path(path).absolute()) for path in [*sys.path, str(Path(__file__).resolve().parents[2])]],
            parent_pid=os.getpid(),
            cpu_priority=TRAINING_FIRST_NICE,
        )
        with signals_held_back():
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._pipes = (process.stdin, process.stdout)
        self._tasks_fd, self._lines_fd = (pipe.fileno() for pipe in self._pipes)
        self._said = b""
        for fd in (self._tasks_fd, self._lines_fd):
            os.set_blocking(fd, False)
        super().__init__(process, "the process that looks after the run")
        reader = threading.Thread(target=self._look_until_it_ends, name="mcore-ckpt-upkeep", daemon=True)
        if not start_thread(reader):
            self.kill("no thread can be started any more")
            raise OSError("no thread can be started any more")

    def send(self, task: dict[str, Any] | None) -> None:
        """A few hundred bytes, which a pipe takes at once; one that is full tells that the process hangs. None: end.

        (Closing the pipe would not tell: a process that the trainer has forked may hold it open.)
        """
        os.write(self._tasks_fd, json.dumps(task).encode() + b"\n")

    def finish(self) -> None:
        """Let it end what it is doing, and wait for that; what is interrupted here, the next run resumes."""
        began_s = said_s = time.monotonic()
        with contextlib.suppress(OSError):
            self.send(None)
        try:
            while not self.dead:
                self.wait_for_news(_LOOK_EVERY_S)
                self.look()
                if time.monotonic() - said_s >= _SAY_EVERY_S:
                    said_s = time.monotonic()
                    waited_s = said_s - began_s
                    _logger.warning(
                        "waiting for old checkpoints to be removed and new ones to be copied: %.0f s", waited_s
                    )
        except BaseException:
            self.kill("the trainer was interrupted", SaveError)
            raise

    def _look_until_it_ends(self) -> None:
        while not self.dead:
            self.wait_for_news(_LOOK_EVERY_S)
            self.look()

    def _receive(self) -> bool:
        while (content := self._read()) != b"":
            if content is None:
                return True
            *lines, self._said = (self._said + content).split(b"\n")
            for line in lines:
                _log(line)
        return False

    def _read(self) -> bytes | None:
        """What has come; None if that is nothing yet, and nothing at the end of the process."""
        try:
            return os.read(self._lines_fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def _news_fd(self) -> int:
        return self._lines_fd

    def _at_end(self) -> None:
        if self._exit_code:
            text = exit_text(self._exit_code)
            _logger.warning("the process that looks after the run %s; the next save starts another", text)

    def _release(self) -> None:
        self._tasks_fd = self._lines_fd = -1
        for pipe in self._pipes:
            pipe.close()


def _log(line: bytes) -> None:
    try:
        level, text = json.loads(line)
        _logger.log(level, "%s", text)
    except (ValueError, TypeError):
        _logger.warning("the process that looks after the run: %s", line.decode(errors="replace").rstrip())


# That of this process, if one was started; one that has died is replaced.
_started: list[_UpkeepProcess] = []


def _ask(task: dict[str, Any]) -> None:
    try:
        if not _started or _started[-1].dead:
            _started[:] = [_UpkeepProcess()]
        _started[-1].send(task)
    except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may make the save fail)
        _logger.warning("%s: the process that looks after this run cannot be started: %s", task["run"], error)


@atexit.register
def _finish() -> None:
    for process in _started:
        if not process.dead:
            process.finish()
