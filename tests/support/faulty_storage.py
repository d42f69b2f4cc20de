"""A storage that records every operation, and at the k-th one fails, or ends the process as a crash would.

A crash test records the N operations of a save with `Faults()`, then repeats the save N times with `Faults(at=k, ...)`
and looks at what is left on disk. Operations are counted from 0, over all files and threads of the process, before
they are carried out: at the k-th, nothing of it has happened yet, unless `how="torn"`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.storage.base import DirectIo, FileVersion, RangeReader, RangeWriter, Storage
from mcore_ckpt.storage.resolve import LocalStorage

How = Literal["error", "exit", "kill", "torn"]


@dataclass
class Faults:
    """What is to go wrong, and the record of what happened.

    Attributes:
        at: index of the operation that goes wrong; None: all go well.
        how: `"error"`: it raises `SaveError` with `code`, and so does every later one if `sticky`; `"exit"`: the
            process ends at once, without cleaning up; `"kill"`: by SIGKILL; `"torn"`: half of a write reaches the file,
            then the process ends (of other operations: nothing).
        code: errno of an error.
        sticky: later operations fail, too, as they do on a full disk.
        only: operations that count, by name; empty: all that change something.
        record: file to which each operation is appended, so that the record outlives the process.
        in_writer: what becomes of this in the writer process, which counts for itself; None: it does nothing.
        operations: what was asked for, in order, as (operation, name, bytes).
    """

    at: int | None = None
    how: How = "error"
    code: int = errno.ENOSPC
    sticky: bool = False
    only: frozenset[str] = frozenset()
    record: str | None = None
    in_writer: Faults | None = None
    operations: list[tuple[str, str, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def before(self, operation: str, name: str, size: int = 0, tear: Callable[[], None] | None = None) -> None:
        """Count an operation, and let it go wrong if it is its turn."""
        if self.only and operation not in self.only:
            return
        with self._lock:
            index = len(self.operations)
            self.operations.append((operation, name, size))
            if self.record is not None:
                with open(self.record, "a") as record:
                    record.write(f"{operation} {name} {size}\n")
        if self.at is None or index < self.at or (index > self.at and not self.sticky):
            return
        if self.how == "error":
            error = OSError(self.code, os.strerror(self.code), name)
            raise SaveError(f"{name}: {operation} failed: {error.strerror} (injected)") from error
        if self.how == "torn" and tear is not None:
            tear()
        self._end()

    def _end(self) -> NoReturn:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # the signal is on its way
        os._exit(17)


def _without_id(name: str) -> str:
    """A name as records show it, so that they are the same for each run: without the random id of a save."""
    return re.sub(r"\b[0-9a-f]{16}\b", "ID", name)


class FaultyStorage(Storage):
    """Passes everything on to `inner`, by way of `faults`. Reading is never disturbed.

    Pickled (on its way to a writer process), it takes `faults.in_writer` along.
    """

    write_bytes = 64 * 1024  # so that files of a few hundred KB take several writes

    def __init__(self, inner: LocalStorage, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    def __reduce__(self) -> tuple[type[FaultyStorage], tuple[LocalStorage, Faults]]:
        return FaultyStorage, (self.inner, self.faults.in_writer or Faults())

    def __repr__(self) -> str:
        return f"FaultyStorage({self.inner!r})"

    @property
    def location(self) -> str:
        return self.inner.location

    def path(self, name: str) -> str:
        return self.inner.path(name)

    def list(self) -> list[str]:
        return self.inner.list()

    def sizes(self) -> dict[str, int]:
        return self.inner.sizes()

    def folders(self) -> Sequence[str]:
        return self.inner.folders()

    def version(self, name: str) -> FileVersion | None:
        return self.inner.version(name)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        return self.inner.open_reader(name, direct=direct)

    @contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        with self.inner.in_use(name):
            yield

    def is_in_use(self, name: str) -> bool:
        return self.inner.is_in_use(name)

    def open_writer(
        self, name: str, *, size_bytes: int | None = None, direct: DirectIo = "auto", resumed: bool = False
    ) -> RangeWriter:
        self.faults.before("open_writer", _without_id(name), size_bytes or 0)
        writer = self.inner.open_writer(name, size_bytes=size_bytes, direct=direct, resumed=resumed)
        return _FaultyWriter(writer, name, self.faults)

    def overwrite(self, name: str, offset: int, content: bytes, *, is_end: bool = False) -> bool:
        self.faults.before("overwrite", _without_id(name), len(content))
        return self.inner.overwrite(name, offset, content, is_end=is_end)

    def publish(self, name: str, content: bytes) -> None:
        self.faults.before("publish", _without_id(name), len(content))
        self.inner.publish(name, content)

    def create(self, name: str, content: bytes) -> None:
        self.faults.before("create", _without_id(name), len(content))
        self.inner.create(name, content)

    def claim(self, name: str, owner: str) -> str:
        self.faults.before("claim", _without_id(name))
        return self.inner.claim(name, owner)

    def claimed(self, name: str) -> str | None:
        return self.inner.claimed(name)

    def move(self, source: str, name: str) -> None:
        self.faults.before("move", f"{_without_id(source)} -> {_without_id(name)}")
        self.inner.move(source, name)

    def delete(self, name: str, missing_ok: bool = True) -> None:
        self.faults.before("delete", _without_id(name))
        self.inner.delete(name, missing_ok)

    def made_by(self, *, renamed: Any, in_place: Any) -> Any:
        return self.inner.made_by(renamed=renamed, in_place=in_place)

    def ensure(self) -> None:
        self.faults.before("ensure", "")
        self.inner.ensure()

    def sync(self, *, parents: bool = False) -> None:
        self.faults.before("sync", "")
        self.inner.sync(parents=parents)

    def remove(self) -> bool:
        self.faults.before("remove", "")
        return self.inner.remove()


class _FaultyWriter(RangeWriter):
    def __init__(self, inner: RangeWriter, file_name: str, faults: Faults) -> None:
        self.name = inner.name
        self.direct = inner.direct
        self._inner = inner
        self._file_name = _without_id(file_name)
        self._faults = faults

    def write(self, offset: int, view: memoryview) -> None:
        half = len(view) // 8192 * 4096
        self._faults.before("write", self._file_name, len(view), lambda: self._inner.write(offset, view[:half]))
        self._inner.write(offset, view)

    def finish(self, size_bytes: int) -> None:
        self._faults.before("finish", self._file_name, size_bytes)
        self._inner.finish(size_bytes)

    def abort(self) -> None:
        # Cleaning up must work whatever failed before; only a process that ends does not get to it.
        self._inner.abort()
