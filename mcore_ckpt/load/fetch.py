"""Carrying out reads: files opened as they are reached, counters, and what stays in the page cache.

Knows nothing of tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.host_memory import free_host_bytes
from mcore_ckpt.core.options import DirectIo, LoadOptions, ranks_of_this_host
from mcore_ckpt.load.file_seals import FileSeals
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader, Storage, align_up

__all__ = ["OpenFiles", "ReadStats", "keeps_cached", "naming", "padded_range"]

# Threads work in neighbouring files, so few are in use at once; a reader of 1,000 ranks' files must not need 1,000 fds.
_MAX_IDLE_FILES = 16

# What so many ranks of a host want is read by way of the page cache (less what headers and padding take), if the host
# has so many times the memory to spare that the checkpoint takes. On two cores, two ranks that wanted the same 0.64 GB
# had it in 0.8 s by O_DIRECT and in 1.0 s by way of the page cache, four ranks in 1.9 and 1.55 s.
_COPIES_WANTED = 3.9
_MEMORY_FACTOR = 2

# Where the page cache costs next to nothing, this much of the checkpoint is enough, if it is small beside what is free:
# large pages are brought whole, so that parts here and there would be read with what lies around them.
_MOST_WANTED = 0.5
_PLENTY_FACTOR = 4


@dataclass(slots=True)
class ReadStats:
    """What reads have cost so far; add to it under `lock`.

    Attributes:
        reads: read calls.
        bytes_read: bytes that they brought, headers, padding and gaps included.
        bytes_needed: bytes of the elements and objects that were asked for.
        records_checked: records whose CRC-32 was compared.
        fallbacks: items that had to be decoded as a whole (`item_decoding`).
    """

    reads: int = 0
    bytes_read: int = 0
    bytes_needed: int = 0
    records_checked: int = 0
    fallbacks: int = 0
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

    Args:
        storage: where the files lie.
        direct: past the page cache (`LoadOptions.direct_io`).
        seals: check each file when it is opened; None: what is read of them is checked elsewhere.
        keep_cached: what is read stays in the page cache.

    Attributes:
        keep_cached: as the argument.
    """

    def __init__(
        self, storage: Storage, direct: DirectIo, seals: FileSeals | None, *, keep_cached: bool = False
    ) -> None:
        self.keep_cached = keep_cached
        self._seals = seals
        self._storage = storage
        self._direct: DirectIo = direct
        self._lock = threading.Lock()
        self._closed = False
        self._in_use: dict[str, tuple[RangeReader, int]] = {}
        self._idle: OrderedDict[str, RangeReader] = OrderedDict()

    @contextmanager
    def reader(self, name: str) -> Iterator[RangeReader]:
        """The reader of a file; several threads get the same one. Raises as `Storage.open_reader`."""
        with self._lock:
            reader, users = self._in_use.get(name, (None, 0))
            if reader is None:
                reader = self._idle.pop(name, None) or self._opened(name)
            self._in_use[name] = (reader, users + 1)
        try:
            yield reader
        finally:
            self._release(name)

    def _opened(self, name: str) -> RangeReader:
        reader = self._storage.open_reader(name, direct=self._direct)
        try:
            if self._seals is not None:
                self._seals.check(name, reader)
        except BaseException:
            reader.close()
            raise
        if self.keep_cached:
            reader.keep_cached()
        return reader

    def _release(self, name: str) -> None:
        surplus = None
        with self._lock:
            reader, users = self._in_use.pop(name)
            if users > 1:
                self._in_use[name] = (reader, users - 1)
            elif self._closed:
                surplus = reader
            else:
                self._idle[name] = reader
                if len(self._idle) > _MAX_IDLE_FILES:
                    _, surplus = self._idle.popitem(last=False)
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Close what is idle, and what is in use when its last user lets go of it."""
        with self._lock:
            self._closed = True
            readers = list(self._idle.values())
            self._idle.clear()
        for reader in readers:
            reader.close()


def keeps_cached(options: LoadOptions, needed_bytes: int, stored_bytes: int, keeps_cheaply: Callable[[], bool]) -> bool:
    """Whether what a load reads is to stay in the page cache, by `LoadOptions.page_cache`.

    A load cannot know what others want. But where the ranks of this host, if each wants as much as this one, want all
    that is stored several times over, they want the same bytes: then the first to read them spares the others the
    disk. And most checkpoints that are loaded are loaded again, by a restart or an evaluation: where the page cache has
    large pages, the first load of large tensors is as fast by way of it (0.06 CPU s more for each GB), and the second
    many times faster. With small pages it takes 0.1 to 0.3 CPU s more, and O_DIRECT is faster; with small tensors, the
    first load takes a third longer.

    Args:
        options: of the load.
        needed_bytes: that this rank wants.
        stored_bytes: that the checkpoint's files have together.
        keeps_cheaply: whether it costs next to nothing; asked if it matters.
    """
    if options.page_cache != "auto":
        return options.page_cache == "on"
    wanted_bytes = ranks_of_this_host() * needed_bytes
    if stored_bytes <= 0 or wanted_bytes < _MOST_WANTED * stored_bytes:
        return False
    free_bytes = free_host_bytes()
    if wanted_bytes >= _COPIES_WANTED * stored_bytes and free_bytes >= _MEMORY_FACTOR * stored_bytes:
        return True
    return free_bytes >= _PLENTY_FACTOR * stored_bytes and keeps_cheaply()


def padded_range(start: int, stop: int, file_bytes: int) -> tuple[int, int]:
    """The aligned range around `[start, stop)`, which O_DIRECT can read straight into a buffer; not past the file."""
    return start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, max(stop, min(align_up(stop), file_bytes))


def naming(error: LoadError, where: str) -> LoadError:
    """The same error; it names `where` it happened, if it does not yet."""
    return error if where in str(error) else type(error)(f"{where}: {error}")
