"""Data files where they are nearest: on local storage if they lie there, else in the second tier, range by range.

The names of data files carry the id of their save, and their lengths are in the manifest of `.metadata`. So what is
found under such a name, at that length, is a file of the very save that is loaded: a load never mixes two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import data_file_of
from mcore_ckpt.storage.base import DirectIo, RangeReader, Storage


class NearestFiles:
    """Opens data files of one checkpoint.

    Args:
        near: where they are looked for first; the directory need not exist.
        far: where they are else.
        home: which of the two the index is of: files that cannot be told from others by name and length, as those of
            Megatron-Core, are read there alone.
        index: of the checkpoint; asked at the first file.
    """

    def __init__(self, near: Storage, far: Storage, home: Storage, index: Callable[[], CheckpointIndex]) -> None:
        self._near = near
        self._far = far
        self._home = home
        self._index = index
        self._opened: dict[str, Storage] = {}
        self._is_left = False
        self.request_bytes = max(near.request_bytes, far.request_bytes)
        self.reads_at_once = max(near.reads_at_once, far.reads_at_once)
        self.open_ahead = max(near.open_ahead, far.open_ahead)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        """As `Storage.open_reader`."""
        manifest = self._index().manifest
        expected = None if manifest is None else manifest.files.get(name)
        if not _is_told(name) or expected is None:
            return self._home.open_reader(name, direct=direct)
        reader = None if self._is_left else self._open_near(name, direct, expected.size_bytes)
        self._opened[name] = self._far if reader is None else self._near
        return reader or self._far.open_reader(name, direct=direct)

    @contextlib.contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """As `Storage.in_use`, of the directory that is read besides that of the index, if there is one to read."""
        if self._home is self._far:
            other = self._near
        elif self._all_are_near():
            yield
            return
        else:
            other = self._far
        with other.in_use(name):
            yield

    def _all_are_near(self) -> bool:
        manifest = self._index().manifest
        files = {} if manifest is None else {name: file for name, file in manifest.files.items() if _is_told(name)}
        there = self._near.sizes() if files else {}
        return all(there.get(name) == file.size_bytes for name, file in files.items())

    def where(self, error: LoadError) -> Storage | None:
        """The directory in which the file of an error was read; None if the error is of none."""
        return None if error.file is None else self._opened.get(error.file)

    def leave_near(self, error: LoadError) -> Storage | None:
        """Where all files of this save are read from now on, if the error is of one that was read near; else None."""
        if self._is_left or self.where(error) is not self._near:
            return None
        self._is_left = True
        return self._far

    def _open_near(self, name: str, direct: DirectIo, size_bytes: int) -> RangeReader | None:
        try:
            reader = self._near.open_reader(name, direct=direct)
        except LoadError:
            return None
        if reader.size_bytes == size_bytes:
            return reader
        reader.close()
        return None


def _is_told(name: str) -> bool:
    """Whether a name tells of which save a file is."""
    found = data_file_of(name)
    return found is not None and found.save is not None
