"""What is done with a run between its saves, by a process of its own: old checkpoints are removed.

The coordinator of a save asks for it when the checkpoint is published, and training goes on. The process is a bare
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
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import exit_text
from mcore_ckpt.core.signals import signals_held_back
from mcore_ckpt.core.threads import start_thread
from mcore_ckpt.directory.iterations import iteration_of
from mcore_ckpt.writing.supervised_child import TRAINING_FIRST_NICE

_logger = logging.getLogger(__name__)

# A trainer that ends waits so long for a removal in progress; the next run resumes it.
_EXIT_WAIT_S: Final = 60.0
_PROGRAM: Final = """\
import os, sys
os.setpgid(0, 0)
sys.path += [path for path in {path!r} if path not in sys.path]
from mcore_ckpt.save._upkeep_process import main
main({parent_pid}, {cpu_priority})
"""


def checkpoint_published(directory: Path, options: SaveOptions) -> None:
    """Coordinator: a checkpoint is in force; ask for what the options say is to be done then. Raises nothing."""
    if options.keep_last is None:
        return
    directory = directory.absolute()
    if iteration_of(directory.name) is None:
        _say_once(
            f"{directory}: keep_last={options.keep_last} removes nothing here: only directories that are named as "
            "iter_0000100 are checkpoints of a run"
        )
        return
    task = {"run": str(directory.parent), "name": directory.name}
    try:
        _process().send({**task, "keep_last": options.keep_last, "keep_every": options.keep_every})
    except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may make the save fail)
        _logger.warning("%s: old checkpoints are not removed, their process cannot be started: %s", directory, error)


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
                _logger.warning("removing old checkpoints: %s", line.decode(errors="replace").rstrip())
        code = self._process.wait()
        if code:
            _logger.warning(
                "the process that removes old checkpoints %s; the next save starts another", exit_text(code)
            )

    def finish(self) -> None:
        """Let it end what it is doing, and wait for that, but not for ever."""
        with contextlib.suppress(OSError):
            self.send(None)
        try:
            self._process.wait(_EXIT_WAIT_S)
            self._reader.join(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            _logger.warning("old checkpoints are still being removed; the next run resumes it")
            self._process.kill()


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
