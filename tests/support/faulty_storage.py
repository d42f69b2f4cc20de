"""A storage that records every operation that changes something, and fails at the k-th one.

Operations are counted from 0, over all files and threads, before they are carried out: at the k-th, nothing of it has
happened yet.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.storage.base import RangeWriter, Storage
from mcore_ckpt.storage.resolve import LocalStorage


@dataclass
class Faults:
    """What is to go wrong, and the record of what happened."""

    at: int | None = None  # index of the operation that raises `SaveError` with `code`; None: all go well
    code: int = errno.ENOSPC
    only: frozenset[str] = frozenset()  # operations that count, by name; empty: all
    operations: list[tuple[str, str, int]] = field(default_factory=list)  # (operation, name, bytes), in order
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


class At(Faults):
    """Calls `do` right before the operation number `at`, once."""

    do: Callable[[], object] = staticmethod(lambda: None)

    def before(self, operation: str, name: str, size: int = 0, tear: Callable[[], None] | None = None) -> None:
        number = len(self.operations)
        self.operations.append((operation, name, size))
        if number == self.at:
            self.do()


def _without_id(name: str) -> str:
    """A name as records show it, so that they are the same for each run: without the random id of a save."""
    return re.sub(r"\b[0-9a-f]{16}\b", "ID", name)


def _passed_on(name: str) -> Any:
    return lambda self, *args, **named: getattr(self.inner, name)(*args, **named)


def _counted(name: str) -> Any:
    def call(self: Any, file: str = "", *args: Any, **named: Any) -> Any:
        self.faults.before(
            name, f"{_without_id(file)} -> {_without_id(args[0])}" if name == "move" else _without_id(file)
        )
        return getattr(self.inner, name)(*((file, *args) if file else args), **named)

    return call


class FaultyStorage(Storage):
    """Passes everything on to `inner`, past `faults`. Reading is never disturbed."""

    write_bytes = 64 * 1024  # so that files of a few hundred KB take several writes

    def __init__(self, inner: LocalStorage, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    @property
    def location(self) -> str:
        return self.inner.location

    path, list, sizes, folders = map(_passed_on, ("path", "list", "sizes", "folders"))
    version, open_reader, made_by, claimed = map(_passed_on, ("version", "open_reader", "made_by", "claimed"))
    in_use, is_in_use = map(_passed_on, ("in_use", "is_in_use"))
    overwrite, publish, create, claim = map(_counted, ("overwrite", "publish", "create", "claim"))
    move, delete, ensure, sync, remove = map(_counted, ("move", "delete", "ensure", "sync", "remove"))

    def open_writer(self, name: str, **options: Any) -> RangeWriter:
        self.faults.before("open_writer", _without_id(name), options.get("size_bytes") or 0)
        return _FaultyWriter(self.inner.open_writer(name, **options), name, self.faults)


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
