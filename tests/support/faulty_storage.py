"""A storage that counts every operation that changes something, and does something right before one of them.

Operations are counted from 0, over all files and threads, before they are carried out.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.storage.base import RangeWriter, Storage
from mcore_ckpt.storage.resolve import LocalStorage


@dataclass
class Faults:
    """`do` is called right before the operation number `at`, of those called `only` (empty: of all)."""

    at: int | None = None
    do: Callable[[], object] = lambda: None
    only: str = ""
    operations: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def before(self, operation: str) -> None:
        if self.only in ("", operation):
            with self._lock:
                number = len(self.operations)
                self.operations.append(operation)
            if number == self.at:
                self.do()


def _passed_on(name: str) -> Any:
    return lambda self, *args, **named: getattr(self.inner, name)(*args, **named)


def _counted(name: str) -> Any:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        self.faults.before(name)
        return getattr(self.inner, name)(*args, **named)

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
    version, open_reader, claimed = map(_passed_on, ("version", "open_reader", "claimed"))
    in_use, is_in_use = map(_passed_on, ("in_use", "is_in_use"))
    overwrite, publish, create, claim = map(_counted, ("overwrite", "publish", "create", "claim"))
    move, delete, ensure, sync, remove = map(_counted, ("move", "delete", "ensure", "sync", "remove"))

    def open_writer(self, name: str, size_bytes: int, **options: Any) -> RangeWriter:
        self.faults.before("open_writer")
        return _FaultyWriter(self.inner.open_writer(name, size_bytes, **options), self.faults)


class _FaultyWriter(RangeWriter):
    def __init__(self, inner: RangeWriter, faults: Faults) -> None:
        self.name, self.direct = inner.name, inner.direct
        self._inner, self._faults = inner, faults

    def write(self, offset: int, view: memoryview) -> None:
        self._faults.before("write")
        self._inner.write(offset, view)

    def finish(self) -> None:
        self._faults.before("finish")
        self._inner.finish()

    def abort(self) -> None:
        # Cleaning up must work whatever failed before.
        self._inner.abort()
