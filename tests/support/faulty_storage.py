"""A storage that records every operation, and fails at the k-th one.

Operations are counted from 0, over all files and threads, before they are carried out: at the k-th, nothing of it has
happened yet.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.storage.base import DirectIo, FileVersion, RangeReader, RangeWriter, Storage
from mcore_ckpt.storage.resolve import LocalStorage


@dataclass
class Faults:
    """What is to go wrong, and the record of what happened.

    Attributes:
        at: index of the operation that raises `SaveError` with `code`; None: all go well.
        code: errno of an error.
        only: operations that count, by name; empty: all that change something.
        operations: what was asked for, in order, as (operation, name, bytes).
    """

    at: int | None = None
    code: int = errno.ENOSPC
    only: frozenset[str] = frozenset()
    operations: list[tuple[str, str, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def before(self, operation: str, name: str, size: int = 0) -> None:
        """Count an operation, and let it go wrong if it is its turn."""
        if self.only and operation not in self.only:
            return
        with self._lock:
            index = len(self.operations)
            self.operations.append((operation, name, size))
        if index == self.at:
            error = OSError(self.code, os.strerror(self.code), name)
            raise SaveError(f"{name}: {operation} failed: {error.strerror} (injected)") from error


def _without_id(name: str) -> str:
    """A name as records show it, so that they are the same for each run: without the random id of a save."""
    return re.sub(r"\b[0-9a-f]{16}\b", "ID", name)


class FaultyStorage(Storage):
    """Passes everything on to `inner`, past `faults`. Reading is never disturbed."""

    write_bytes = 64 * 1024  # so that files of a few hundred KB take several writes

    def __init__(self, inner: LocalStorage, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

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
        self._faults.before("write", self._file_name, len(view))
        self._inner.write(offset, view)

    def finish(self, size_bytes: int) -> None:
        self._faults.before("finish", self._file_name, size_bytes)
        self._inner.finish(size_bytes)

    def abort(self) -> None:
        # Cleaning up must work whatever failed before.
        self._inner.abort()
