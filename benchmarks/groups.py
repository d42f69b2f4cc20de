"""Interpreters and groups of ranks, as the process that conducts a benchmark sees them.

Each adapter has ranks of its own, under the interpreter whose packages it uses; all of them are there at once, and the
conductor calls one group after the other.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Group", "Interpreter", "WorkFailedError", "package_of"]

_WITHIN_S = 120.0  # for a call on all ranks: stock's slowest takes a fifth of it
_ANSWER_WITHIN_S = _WITHIN_S + 60.0
_MEGATRON = ("tests.support.pretend_main", "megatron.core.dist_checkpointing")


class WorkFailedError(Exception):
    """A rank raised, died or hung; the text is that of the rank."""


class Interpreter:
    """A Python with its packages, and the `versions` of those; None for what is not installed."""

    def __init__(self, python: Path, path: Sequence[Path], *, megatron: bool = True) -> None:
        """Start its leader; folders of `path` come before its own packages. `megatron`: for adapters under Megatron,
        which has to take "cuda" for the CPU. Raises `WorkFailedError`.
        """
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with theirs:
            self._process = subprocess.Popen(
                [str(python), "-P", "-m", "benchmarks.leader", str(theirs.fileno()), *(_MEGATRON if megatron else ())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=path[-1],
            )
        self._connection = Connection(ours.detach())
        self.versions: dict[str, str | None] = self.ask("describe")

    def ask(self, name: str, *args: Any) -> Any:
        """Have the leader do something; raises `WorkFailedError` if it fails, or has died."""
        try:
            self._connection.send((name, args))
            if not self._connection.poll(_ANSWER_WITHIN_S):
                self._process.kill()
                raise WorkFailedError(f"{name}: no answer within {_ANSWER_WITHIN_S:.0f} s")
            done, value = self._connection.recv()
        except (EOFError, OSError):
            raise WorkFailedError("the interpreter has died") from None
        if not done:
            raise WorkFailedError(value)
        return value

    def close(self) -> None:
        """End it, and all of its ranks, also in the midst of a call."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


class Group:
    """The ranks of one adapter."""

    def __init__(self, interpreter: Interpreter, adapter: str, world: int, *, asynchronous: bool = False) -> None:
        """Start `world` ranks; `asynchronous`: with what a job starts before its first asynchronous save."""
        self._interpreter = interpreter
        self._number: int = interpreter.ask("open", world)
        try:
            self.call("begin", adapter, asynchronous)
        except WorkFailedError:
            self.close()
            raise

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of `benchmarks.work` on all ranks; what rank 0 returned. Raises `WorkFailedError`."""
        return self._interpreter.ask("call", self._number, _WITHIN_S, name, *args)

    def close(self) -> None:
        """End the ranks."""
        self._interpreter.ask("close", self._number)


def package_of(commit: str, root: Path, folder: Path) -> Path:
    """The package of a commit, compiled as an installed one is; the folder to import it from."""
    archive = ["git", "archive", commit, "mcore_ckpt"]
    content = subprocess.run(archive, cwd=root, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(folder, filter="data")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    return folder
