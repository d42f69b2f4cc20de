"""The files of a target while they are written: in a folder of a file system, or at their place in an object store.

In a file system they are opened wherever a worker has come to, and may have been begun by an earlier run. In a store
each is one upload, which ends when all of its bytes are there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.reshard._file_stream import LocalFile, TargetFile
from mcore_ckpt.storage.base import RangeWriter, Storage
from mcore_ckpt.storage.resolve import storage_at


class TargetFiles(ABC):
    """All files of one target, which lie in `folder`; `storage` is that of the folder.

    Attributes:
        take_descriptors: its files are `LocalFile`s, to which the kernel can copy from other descriptors.
    """

    take_descriptors = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = storage_at(folder)

    @abstractmethod
    def begin(self, sizes: Mapping[str, int], *, resumed: bool) -> None:
        """Make room for files of these lengths; raises `SaveError` if there is none."""

    @abstractmethod
    def open(self, name: str, size_bytes: int) -> TargetFile:
        """A file of that length, to be written at any offset; raises `SaveError`."""

    @abstractmethod
    def write_end(self, name: str, size_bytes: int, end: bytes) -> None:
        """Write the last bytes of a file of that length, durably; raises `SaveError`."""

    def finish(self) -> None:
        """All bytes have been written: make the files readable. Raises `SaveError`."""
        return

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Make a file that `begin` was not told of, durably; raises `SaveError`."""

    @abstractmethod
    def new_file(self, name: str, size_bytes: int) -> RangeWriter:
        """As `put`, for a file of any size; raises `SaveError`."""

    def sync(self) -> None:
        """Make the names of all files durable. Raises `SaveError`."""
        return


class LocalFiles(TargetFiles):
    """Files in a folder of a file system."""

    take_descriptors = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folders: set[Path] = set()

    def begin(self, sizes: Mapping[str, int], *, resumed: bool) -> None:
        if not resumed:
            self._check_space(sizes)
        self._folders = {(self.folder / name).parent for name in sizes} - {self.folder}
        for inner in self._folders:
            inner.mkdir(parents=True, exist_ok=True)

    def _check_space(self, sizes: Mapping[str, int]) -> None:
        """What an earlier run has reserved for the files counts for them already."""
        needed_bytes = sum(sizes.values())
        for name, size in sizes.items():
            with contextlib.suppress(FileNotFoundError):
                needed_bytes -= min(size, (self.folder / name).stat().st_blocks * 512)
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        if free < needed_bytes:
            raise SaveError(
                f"{self.folder}: {needed_bytes} bytes are needed, {free} are free: free space, or choose another disk"
            )

    def open(self, name: str, size_bytes: int) -> TargetFile:
        return LocalFile(str(self.folder / name), size_bytes)

    def write_end(self, name: str, size_bytes: int, end: bytes) -> None:
        file = LocalFile(str(self.folder / name), size_bytes, direct=False)
        try:
            file.write(size_bytes - len(end), memoryview(end))
            file.sync()
        finally:
            file.close()

    def sync(self) -> None:
        for inner in self._folders:
            storage_at(inner).sync()

    def put(self, name: str, content: bytes) -> None:
        self.storage.publish(name, content)

    def new_file(self, name: str, size_bytes: int) -> RangeWriter:
        self.storage.delete(name)  # an earlier run may have come so far
        return self.storage.open_writer(name, size_bytes=size_bytes, direct="off")


class StoreFiles(TargetFiles):
    """Objects of a store, written by any number of workers each; none replaces another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lock = threading.Lock()
        self._writers: dict[str, RangeWriter] = {}
        self._sizes: Mapping[str, int] = {}

    def begin(self, sizes: Mapping[str, int], *, resumed: bool) -> None:
        self._sizes = sizes

    def open(self, name: str, size_bytes: int) -> TargetFile:
        with self._lock:
            writer = self._writers.get(name)
            if writer is None:
                writer = self._writers[name] = self.new_file(name, size_bytes)
        return _StoreFile(self.storage, name, writer)

    def write_end(self, name: str, size_bytes: int, end: bytes) -> None:
        self.open(name, size_bytes).write(size_bytes - len(end), memoryview(end))

    def finish(self) -> None:
        for name, writer in self._writers.items():
            writer.finish(self._sizes[name])

    def put(self, name: str, content: bytes) -> None:
        writer = self.new_file(name, len(content))
        try:
            writer.write(0, memoryview(content))
            writer.finish(len(content))
        except BaseException:
            writer.abort()
            raise

    def new_file(self, name: str, size_bytes: int) -> RangeWriter:
        return self.storage.open_writer(name, size_bytes=size_bytes)

    def abort(self) -> None:
        """Remove what `open` has made, finished or not, as far as that is possible."""
        for writer in self._writers.values():
            with contextlib.suppress(SaveError):
                writer.abort()


class _StoreFile(TargetFile):
    """One object."""

    def __init__(self, storage: Storage, name: str, writer: RangeWriter) -> None:
        self.path = storage.path(name)
        self._writer = writer

    def write(self, offset: int, view: memoryview) -> None:
        self._writer.write(offset, view)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass
