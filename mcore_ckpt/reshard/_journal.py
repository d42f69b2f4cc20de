"""How far an unfinished target has come: a file next to its folder, locked while a run is at work there.

In an object store nothing is resumed, and the journal is kept in memory only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.metadata_read import read_small_file

Sums = tuple[int, list[int]]
"""Of the elements in one slot: their CRC-32, and the cumulative CRC-32s of their blocks."""

_VERSION = 4
# A line for each gibibyte or so, of some bytes for each tensor and MiB.
_MAX_BYTES: Final = 1024**3
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
# On file systems without locks, a journal that was written to within this time may be that of a run at work.
_FRESH_S: Final = 24 * 3600.0


class InUseError(SaveError):
    """Another run is at work; `is_certain` unless the file system has no locks that would tell."""

    is_certain = True


class Journal:
    """What is known of the target so far."""

    def __init__(self) -> None:
        self.done: dict[int, int] = {}  # for each worker, how many of its tensors are durable
        # CRC-32s of source chunks that are stored nowhere else: key in the source -> by position.
        self.crcs: dict[str, list[int]] = {}
        self.sums: dict[str, list[Sums]] = {}  # of the target's slots: key at the target -> by position
        self.unverified = False  # the kernel has copied payloads, which are compared only when the target is read back

    def record(self, worker: int, done: int, crcs: dict[str, list[int]], sums: dict[str, list[Sums]]) -> None:
        """The first `done` tensors of a worker are durable."""
        self.done[worker] = done
        self.crcs.update(crcs)
        self.sums.update(sums)

    def forget(self) -> None:
        """Nothing is done: the next run writes everything again."""
        self.done, self.crcs, self.sums, self.unverified = {}, {}, {}, False


class FileJournal(Journal):
    """One line for each stretch of a worker's tensors that is durable; a context manager.

    The first line names the plan by its fingerprint, so that a later run resumes only the same work. A torn last line
    is ignored. The lock (flock) on the file is the sign of life of a run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._lock = path, threading.Lock()
        self.fingerprint: str | None = ""  # of the plan; empty in a new journal, None in one that cannot be read
        is_new = not path.exists()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise SaveError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._take_lock(is_new=is_new)
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _take_lock(self, *, is_new: bool) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InUseError(f"{self._path}: another command is at work there; wait for it, or end it") from error
            age_s = time.time() - os.fstat(self._fd).st_mtime
            if not is_new and age_s < _FRESH_S:
                unknown = InUseError(
                    f"{self._path}: was written {age_s / 60:.0f} minutes ago, and this file system has no locks that "
                    "would tell whether a command is still at work there. If none is, remove this file and the folder "
                    "next to it, or wait: after a day, the same command does"
                )
                unknown.is_certain = False
                raise unknown from error
        if os.fstat(self._fd).st_nlink == 0:
            raise InUseError(f"{self._path}: another command has just finished there; run this one again")

    def _read(self) -> None:
        content = read_small_file(self._path.parent, self._path.name, _MAX_BYTES)
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            os.ftruncate(self._fd, len(complete))
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
            if not lines:
                return
            head = dict(lines[0])
            done = {int(line["worker"]): int(line["done"]) for line in lines[1:]}
            crcs = {key: list(map(int, found)) for line in lines[1:] for key, found in line["crcs"].items()}
            sums = {
                key: [(int(crc), list(map(int, running))) for crc, running in found]
                for line in lines[1:]
                for key, found in line["sums"].items()
            }
            unverified = any(bool(line["unverified"]) for line in lines[1:])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.fingerprint = None
            return
        if head.get("version") != _VERSION:
            self.fingerprint = None
            return
        self.fingerprint, self.done, self.crcs, self.sums = str(head.get("fingerprint")), done, crcs, sums
        self.unverified = unverified

    def begin(self, fingerprint: str) -> None:
        """Name the plan of a new journal."""
        self.fingerprint = fingerprint
        self._append({"version": _VERSION, "fingerprint": fingerprint})

    def record(self, worker: int, done: int, crcs: dict[str, list[int]], sums: dict[str, list[Sums]]) -> None:
        super().record(worker, done, crcs, sums)
        self._append({"worker": worker, "done": done, "crcs": crcs, "sums": sums, "unverified": self.unverified})

    def forget(self) -> None:
        super().forget()
        with self._lock:
            first = os.pread(self._fd, 1 << 16, 0)
            os.ftruncate(self._fd, first.index(b"\n") + 1)
            os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the file; the lock stays until it is closed."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
            os.fsync(self._fd)

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._fd)

    def __enter__(self) -> FileJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
