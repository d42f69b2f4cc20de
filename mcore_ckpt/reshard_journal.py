"""How far an interrupted reshard has come: one line for each stretch of a worker's tensors that is safe on the disk.

The first line names the plan by a fingerprint (layout of the target, and size and time of every source file), so that a
later run goes on only with the very same work. A line is written after the bytes that it speaks of are durable. A torn
last line is ignored. The file is locked while a run has it.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_ckpt.errors import OptionError, SaveError

__all__ = ["JOURNAL_FILE", "Journal"]

JOURNAL_FILE = ".reshard_journal"
_VERSION = 1


class Journal:
    """The journal in a target's temporary directory; a context manager.

    Args:
        directory: the temporary directory.
        fingerprint: of the plan.

    Attributes:
        done: for each worker, how many of its tensors are finished.
        crcs: CRC-32s of source chunks, in the target's dtype, that are stored nowhere else: fqn -> by position.

    Raises:
        OptionError: the directory belongs to another reshard.
        SaveError: another process is at it, or it cannot be written.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.done: dict[int, int] = {}
        self.crcs: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        path = directory / JOURNAL_FILE
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise SaveError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._take(path, fingerprint)
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, path: Path, fingerprint: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SaveError(f"{path.parent}: another reshard is writing there; wait for it, or end it") from error
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        if len(whole) < len(content):
            os.ftruncate(self._fd, len(whole))
        if not lines:
            self._append({"version": _VERSION, "fingerprint": fingerprint})
            return
        if lines[0].get("version") != _VERSION or lines[0].get("fingerprint") != fingerprint:
            raise OptionError(
                f"{path.parent}: left by a reshard of another source, layout or set of options; repeat that command to "
                "finish it, or give --restart to throw its work away"
            )
        for line in lines[1:]:
            self.done[line["worker"]] = line["done"]
            self.crcs.update(line["crcs"])

    def record(self, worker: int, done: int, crcs: dict[str, list[int]]) -> None:
        """The first `done` tensors of a worker are durable."""
        self.done[worker] = done
        self.crcs.update(crcs)
        self._append({"worker": worker, "done": done, "crcs": crcs})

    def forget(self) -> None:
        """Nothing is done: the next run writes everything again."""
        self.done, self.crcs = {}, {}
        with self._lock:
            first = os.pread(self._fd, 1 << 16, 0)
            os.ftruncate(self._fd, first.index(b"\n") + 1)
            os.fsync(self._fd)

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
            os.fsync(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)
