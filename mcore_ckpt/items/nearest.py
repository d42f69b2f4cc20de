"""Data files where they are nearest: on local storage if they lie there, else in the second tier, range by range.

The names of data files carry the id of their save, and their lengths are in the manifest of `.metadata`. So what is
found under such a name, at that length, is a file of the very save that is loaded: a load never mixes two.
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.storage.base import DirectIo, RangeReader, Storage


class NearestFiles:
    """Opens data files of one checkpoint.

    Args:
        near: where they are looked for first; the directory need not exist.
        far: where they are else.
        index: of the checkpoint; asked at the first file.
    """

    def __init__(self, near: Storage, far: Storage, index: Callable[[], CheckpointIndex]) -> None:
        self._near = near
        self._far = far
        self._index = index
        self.request_bytes = max(near.request_bytes, far.request_bytes)
        self.reads_at_once = max(near.reads_at_once, far.reads_at_once)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        """As `Storage.open_reader`."""
        return self._open_near(name, direct) or self._far.open_reader(name, direct=direct)

    def _open_near(self, name: str, direct: DirectIo) -> RangeReader | None:
        found, manifest = data_file_of(name), self._index().manifest
        expected = None if manifest is None else manifest.files.get(name)
        if found is None or found.save is None or expected is None:
            return None
        try:
            reader = self._near.open_reader(name, direct=direct)
        except LoadError:
            return None
        if reader.size_bytes == expected.size_bytes:
            return reader
        reader.close()
        return None
