"""Carrying out reads: files opened as they are reached, counters, and what stays in the page cache.

Knows nothing of tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.options import PageCache
from mcore_ckpt.load.file_footers import FileFooters
from mcore_ckpt.load.nearest import NearestFiles
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, RangeReader, Storage, align_up

# Threads work in neighbouring files, so few are in use at once; a reader of 1,000 ranks' files must not need 1,000 fds.
_MAX_IDLE_FILES = 16

# Of one read, and of the buffer of each thread: long enough for a disk's full speed.
WINDOW_BYTES = 8 * 1024 * 1024
# The longest gap between two requested ranges that is read and thrown away: about what a disk delivers meanwhile.
MAX_GAP_BYTES = 256 * 1024

_DIRECT: dict[PageCache, DirectIo] = {"auto": "auto", "on": "off"}


@dataclass(slots=True)
class ReadStats:
    """What reads have cost so far; add to it under `lock`."""

    reads: int = 0  # read calls
    bytes_read: int = 0  # bytes that they brought, headers, padding and gaps included
    bytes_needed: int = 0  # bytes of the elements and objects that were asked for
    records_checked: int = 0  # records whose CRC-32 was compared
    fallbacks: int = 0  # items that had to be decoded completely (`item_decoding`)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(
        self,
        *,
        reads: int = 0,
        bytes_read: int = 0,
        bytes_needed: int = 0,
        records_checked: int = 0,
        fallbacks: int = 0,
    ) -> None:
        """Count; safe from any thread."""
        with self.lock:
            self.reads += reads
            self.bytes_read += bytes_read
            self.bytes_needed += bytes_needed
            self.records_checked += records_checked
            self.fallbacks += fallbacks


class OpenFiles:
    """Readers of a checkpoint's files, opened on first use and closed when they are no longer in use.

    `footers` checks each file when it is opened; None: what is read of them is checked elsewhere.
    """

    def __init__(self, storage: Storage | NearestFiles, page_cache: PageCache, footers: FileFooters | None) -> None:
        self._footers = footers
        self._storage = storage
        self._direct = _DIRECT[page_cache]
        self._lock = threading.Lock()
        self._closed = False
        # By name and how it is read. Each file is opened by one thread; others by others meanwhile.
        self._opening: dict[tuple[str, DirectIo], threading.Lock] = {}
        self._in_use: dict[tuple[str, DirectIo], tuple[RangeReader, int]] = {}
        self._idle: OrderedDict[tuple[str, DirectIo], RangeReader] = OrderedDict()

    @property
    def open_ahead(self) -> int:
        """How many files are opened ahead of the one that is read (`Storage`)."""
        return self._storage.open_ahead

    @property
    def reads_at_once(self) -> int:
        """How many keep the storage busy (`Storage`)."""
        return self._storage.reads_at_once

    def read_sizes(self) -> dict[str, int]:
        """Window and gaps, as `coalesce` and `split_box` take them."""
        request_bytes = self._storage.request_bytes
        return {
            "window_bytes": WINDOW_BYTES,
            "max_gap_bytes": max(MAX_GAP_BYTES, request_bytes),
            "request_bytes": request_bytes,
        }

    @contextmanager
    def reader(self, name: str, *, keeps: bool = False) -> Iterator[RangeReader]:
        """The reader of a file; several threads get the same one. Raises as `Storage.open_reader`.

        Args:
            name: of the file.
            keeps: what is read stays in the page cache, for the other ranks of this host, if the options leave that
                open (`LoadOptions.page_cache`).
        """
        key: tuple[str, DirectIo] = (name, "keep" if keeps and self._direct == "auto" else self._direct)
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:
            with self._lock:
                reader, users = self._in_use.get(key, (None, 0))
                if reader is None:
                    reader = self._idle.pop(key, None)
                if reader is not None:
                    self._in_use[key] = (reader, users + 1)
            if reader is None:
                reader = self._opened(*key)
                with self._lock:
                    self._in_use[key] = (reader, 1)
        try:
            yield reader
        finally:
            self._release(key)

    def _opened(self, name: str, direct: DirectIo) -> RangeReader:
        reader = self._storage.open_reader(name, direct=direct)
        try:
            if self._footers is not None:
                self._footers.check(name, reader)
        except BaseException:
            reader.close()
            raise
        return reader

    def _release(self, key: tuple[str, DirectIo]) -> None:
        surplus = None
        with self._lock:
            reader, users = self._in_use.pop(key)
            if users > 1:
                self._in_use[key] = (reader, users - 1)
            elif self._closed:
                surplus = reader
            else:
                self._idle[key] = reader
                if len(self._idle) > _MAX_IDLE_FILES:
                    _, surplus = self._idle.popitem(last=False)
        if surplus is not None:
            surplus.close()

    def forget(self) -> None:
        """Open files again from now on; none is in use."""
        with self._lock:
            readers = list(self._idle.values())
            self._idle.clear()
        for reader in readers:
            reader.close()

    def close(self) -> None:
        """Close what is idle, and what is in use when its last user releases it."""
        with self._lock:
            self._closed = True
            readers = list(self._idle.values())
            self._idle.clear()
        for reader in readers:
            reader.close()


def padded_range(start: int, stop: int, file_bytes: int) -> tuple[int, int]:
    """The aligned range around `[start, stop)`, which O_DIRECT can read straight into a buffer; not past the file."""
    return start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, max(stop, min(align_up(stop), file_bytes))


def naming(error: LoadError, where: str) -> LoadError:
    """The same error; it names `where` it happened, if it does not yet."""
    named = error if where in str(error) else type(error)(f"{where}: {error}")
    named.file = error.file
    return named


@contextmanager
def using(file: str) -> Iterator[None]:
    """Items of that file are read and checked within: a `LoadError` gets its name."""
    try:
        yield
    except LoadError as error:
        error.file = file
        raise
