"""The data files of a checkpoint: where they are nearest, whether the index is of them, opened as they are reached.

With a second tier, a file is read on local storage if it lies there. The names of data files carry the id of their
save, and their lengths are in the manifest of `.metadata`: a load never mixes two saves.

Each file is compared with `.metadata` before the first byte of it is used, which takes one small read. Files of other
writers carry nothing to compare.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import PageCache
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import tells_save
from mcore_ckpt.format.metadata_read import checked_footer
from mcore_ckpt.load.policy import ReadPolicy
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, RangeReader, Storage, align_up


class NearestFiles:
    """Opens data files of one checkpoint: files of `near`, where they exist, else those of `far`. The index is of
    `home`, one of the two: files without the id of a save in their names, as Megatron-Core's, are read there alone.
    """

    def __init__(self, near: Storage, far: Storage, home: Storage, index: Callable[[], CheckpointIndex]) -> None:
        self._near = near
        self._far = far
        self._home = home
        self._index = index
        self.request_bytes = max(near.request_bytes, far.request_bytes)
        self.reads_at_once = max(near.reads_at_once, far.reads_at_once)
        self.open_ahead = max(near.open_ahead, far.open_ahead)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        """As `Storage.open_reader`."""
        manifest = self._index().manifest
        expected = None if manifest is None else manifest.files.get(name)
        if not tells_save(name) or expected is None:
            return self._home.open_reader(name, direct=direct)
        reader = self._open_near(name, direct, expected.size_bytes)
        return reader or self._far.open_reader(name, direct=direct)

    def __str__(self) -> str:
        return f"{self._near} (or {self._far}, for files that are not there)"

    @contextlib.contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """As `Storage.in_use`, of the directory that is read besides that of the index, if there is one to read."""
        other = self._near if self._home is self._far else self._far
        with contextlib.nullcontext() if other is self._far and self._all_are_near() else other.in_use(name):
            yield

    def _all_are_near(self) -> bool:
        manifest = self._index().manifest
        files = {} if manifest is None else {name: file for name, file in manifest.files.items() if tells_save(name)}
        there = self._near.sizes() if files else {}
        return all(there.get(name) == file.size_bytes for name, file in files.items())

    def _open_near(self, name: str, direct: DirectIo, size_bytes: int) -> RangeReader | None:
        try:
            reader = self._near.open_reader(name, direct=direct)
        except LoadError:
            return None
        if reader.size_bytes == size_bytes:
            return reader
        reader.close()
        return None


class FileFooters:
    """Checks data files of one checkpoint, each once, for any number of threads; `index` is asked at the first file."""

    def __init__(self, index: Callable[[], CheckpointIndex]) -> None:
        self._index = index
        self._checked: set[str] = set()

    def check(self, name: str, reader: RangeReader) -> None:
        """Compare a file with what `.metadata` says of it. Raises `CorruptCheckpointError`, or `LoadError`."""
        if reader.name not in self._checked:
            checked_footer(self._index(), name, reader)
            self._checked.add(reader.name)


# Threads work in neighbouring files, so few are in use at once; a reader of 1,000 ranks' files must not need 1,000 fds.
_MAX_IDLE_FILES = 16

_Key = tuple[str, DirectIo, int]


@dataclass(slots=True)
class ReadStats:
    """What reads have cost so far; add to it under `lock`."""

    reads: int = 0  # read calls
    bytes_read: int = 0  # bytes that they brought, headers, padding and gaps included
    bytes_needed: int = 0  # bytes of the elements and objects that were asked for
    records_checked: int = 0  # records whose CRC-32 was compared
    fallbacks: int = 0  # items that had to be decoded completely (`ItemDecoder`)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Count; safe from any thread."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class OpenFiles:
    """Readers of a checkpoint's files, opened on first use and closed when they are no longer in use. `footers` checks
    each file when it is opened; None: what is read of them is checked elsewhere. `open_ahead`, `reads_at_once`: as of
    the storage; `policy`: how they are read.
    """

    def __init__(self, storage: Storage | NearestFiles, page_cache: PageCache, footers: FileFooters | None) -> None:
        self.policy = ReadPolicy.of(storage, page_cache)
        self._footers = footers
        self._storage = storage
        self.open_ahead, self.reads_at_once = storage.open_ahead, storage.reads_at_once
        self._lock = threading.Lock()
        self._closed = False
        # By name, how it is read, and the thread that has it for itself, or 0. Each is opened by one, others meanwhile.
        self._opening: dict[_Key, threading.Lock] = {}
        self._in_use: dict[_Key, tuple[RangeReader, int]] = {}
        self._idle: OrderedDict[_Key, RangeReader] = OrderedDict()
        self._versions: dict[str, tuple[object, ...] | None] = {}  # of each file when it was opened first

    @contextmanager
    def reader(self, name: str, *, keeps: bool = False) -> Iterator[RangeReader]:
        """The reader of a file; several threads get the same one, but where each reads a stream. Raises as
        `Storage.open_reader`. `keeps`: what is read stays in the page cache, for the other ranks of this host, if the
        options leave that open.
        """
        policy = self.policy
        key = name, policy.mode(shared=keeps), threading.get_ident() if policy.stream_bytes(shared=keeps) else 0
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
                reader = self._opened(*key[:2])
                with self._lock:
                    self._in_use[key] = (reader, 1)
        try:
            yield reader
        finally:
            self._release(key)

    def _opened(self, name: str, direct: DirectIo) -> RangeReader:
        reader = self._storage.open_reader(name, direct=direct)
        try:
            version = reader.version and reader.version[:2]  # (a file may be touched)
            if self._versions.setdefault(reader.name, version) != version:
                raise LoadError(f"{reader.name}: another file took its name meanwhile; open the checkpoint again")
            if self._footers is not None:
                self._footers.check(name, reader)
        except BaseException:
            reader.close()
            raise
        return reader

    def _release(self, key: _Key) -> None:
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


def named(error: LoadError, where: str, remedy: str = "") -> LoadError:
    """`error`, which names `where` it happened, and the `remedy`, if there is one."""
    text = str(error) if where in str(error) else f"{where}: {error}"
    text += f"; {remedy}" if remedy and remedy not in text else ""
    return error if text == str(error) else type(error)(text)


@contextmanager
def naming(where: Callable[[], str], remedy: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Errors of the block are `named`; a remedy is that of lost and damaged files."""
    try:
        yield
    except LoadError as error:
        is_lost = isinstance(error, CheckpointNotFoundError | CorruptCheckpointError)
        raise named(error, where(), remedy() if is_lost else "") from error
