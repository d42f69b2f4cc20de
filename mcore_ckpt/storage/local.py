"""Files of a local (or mounted) file system.

Writes go past the page cache (O_DIRECT) where a trial says that the file system can: a checkpoint is not read back by
the machine that wrote it, so caching it only evicts what training needs, at the price of a copy. Elsewhere the
page cache is written back while the save goes on, and what has reached the device is dropped, so that the final fsync
has nearly nothing left to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections import deque
from pathlib import Path
from typing import Final

from mcore_ckpt.errors import CheckpointNotFoundError, LoadError, SaveError
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, RangeReader, RangeWriter, Storage, align_up, check_name
from mcore_ckpt.storage.local_reader import BouncePool, LocalReader

__all__ = ["LocalStorage"]

# One write-back in flight, and one before it that is waited for: enough to keep the device busy, and all that a
# buffered save may leave dirty in the page cache.
_UNSYNCED_WRITES: Final = 2
# A file system that cannot sync a directory (some FUSE and network ones) answers so; it has no such promise to keep.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
_FILE_MODE: Final = 0o666  # less the umask, as any open() does


def _save_error(what: str, path: str, error: OSError) -> SaveError:
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return SaveError(f"{path}: {what} failed: {error.strerror or error} ({code}); {_advice(error.errno)}")


def _advice(code: int | None) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free space (or raise the quota) and save again"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "check that this user may write there"
    if code == errno.EEXIST:
        return "files are never overwritten: save under another name, or delete it first"
    return "check the device and its file system (dmesg), then save again"


class LocalStorage(Storage):
    """A directory `root` of the local file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._bounce = BouncePool()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Path]]:
        return LocalStorage, (self.root,)  # writer processes get the path; buffers and locks stay here

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def path(self, name: str) -> str:
        """The path of the file of that name."""
        return os.path.join(self.root, check_name(name))

    def list(self) -> list[str]:
        names = []
        for directory, _, files in os.walk(self.root):
            relative = os.path.relpath(directory, self.root)
            names += files if relative == "." else [f"{relative}/{file}" for file in files]
        return sorted(names)

    def exists(self, name: str) -> bool:
        return os.path.isfile(self.path(name))

    def size(self, name: str) -> int:
        path = self.path(name)
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise _open_error(path, error) from error

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        path = self.path(name)
        try:
            return LocalReader(path, direct, self._bounce)
        except OSError as error:
            raise _open_error(path, error) from error

    def open_writer(self, name: str, *, size_bytes: int | None = None, direct: DirectIo = "auto") -> RangeWriter:
        path = self.path(name)
        try:
            if "/" in name:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            return _LocalWriter(path, size_bytes, direct)
        except OSError as error:
            raise _save_error("creating the file", path, error) from error

    def publish(self, name: str, content: bytes) -> None:
        path = self.path(name)
        try:
            _replace_durably(path, content)
        except OSError as error:
            raise _save_error("publishing it", path, error) from error

    def rename(self, source: str, destination: str) -> None:
        try:
            os.replace(self.path(source), self.path(destination))
        except OSError as error:
            raise _save_error(f"renaming it to {destination}", self.path(source), error) from error

    def delete(self, name: str, missing_ok: bool = True) -> None:
        path = self.path(name)
        try:
            os.unlink(path)
        except FileNotFoundError as error:
            if not missing_ok:
                raise _save_error("deleting it", path, error) from error
        except OSError as error:
            raise _save_error("deleting it", path, error) from error

    def ensure_directory(self) -> None:
        try:
            os.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise _save_error("making the directory", str(self.root), error) from error

    def sync_directory(self) -> None:
        try:
            _sync_directory(str(self.root))
        except OSError as error:
            raise _save_error("syncing the directory", str(self.root), error) from error


def _open_error(path: str, error: OSError) -> LoadError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointNotFoundError(
            f"{path}: no such file; the path is wrong, or the checkpoint is incomplete or was deleted meanwhile"
        )
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return LoadError(f"{path}: cannot be opened: {error.strerror or error} ({code})")


def _replace_durably(path: str, content: bytes) -> None:
    """Write, sync, rename, sync the directory; the order that borg and others use, and the way back.

    If the last step fails, the rename has happened but may not outlast a power cut. Whoever is told of the failure
    removes the files that the new content names, so the old content has to come back.
    """
    directory, base = os.path.split(path)
    prefix = f".{base}."
    temporary = os.path.join(directory, f"{prefix}{secrets.token_hex(8)}.tmp")
    old = os.path.join(directory, f"{prefix}{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        try:
            _write_all(fd, memoryview(content), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        # Without hard links there is no way back; then a failing sync leaves the new content in place.
        with contextlib.suppress(OSError):
            os.link(path, old)
        existed = os.path.exists(path)
        os.replace(temporary, path)
        try:
            _sync_directory(directory)
        except OSError:
            if os.path.exists(old):
                os.replace(old, path)
            elif not existed:
                os.unlink(path)
            raise
    finally:
        # Also what a process that died at this point has left behind: nobody else publishes the same file.
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory or "."):
                if entry.startswith(prefix) and entry.endswith(".tmp"):
                    os.unlink(os.path.join(directory, entry))


def _sync_directory(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview, offset: int, granule: int = 1) -> None:
    """Write all of `view`; a write that stops short goes on from the last multiple of `granule` that it reached."""
    done = 0
    while done < len(view):
        written = os.pwrite(fd, view[done:], offset + done)
        if done + written < len(view):
            written -= (done + written) % granule
            if written <= 0:
                # No space is the one cause known for a write that gets nowhere; the next one would say so itself,
                # but a file system that returns 0 for ever would keep us here.
                raise OSError(errno.ENOSPC, "the write stopped short and does not go on")
        done += written


class _LocalWriter(RangeWriter):
    """A new file. `finish` is for one thread, after the last `write` has returned."""

    def __init__(self, path: str, size_bytes: int | None, direct: DirectIo) -> None:
        self.name = path
        self.direct = False
        self._insist = direct == "on"
        self._lock = threading.Lock()
        self._buffered_fd: int | None = None
        self._unsynced: deque[tuple[int, int]] = deque()
        self._writes_in_progress = 0
        self._aborted = False
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        self._fd: int | None = fd
        try:
            if direct != "off":
                self.direct = direct_io.enable(fd)
                if not self.direct and self._insist:
                    raise OSError(errno.EINVAL, 'the file system has no O_DIRECT, which direct_io="on" insists on')
            if size_bytes is not None:
                direct_io.preallocate(fd, align_up(size_bytes) if self.direct else size_bytes)
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        view = memoryview(view).cast("B")
        try:
            with self._lock:
                fd = self._open_fd()
                self._writes_in_progress += 1
            try:
                self._write(fd, offset, view)
            finally:
                with self._lock:
                    self._writes_in_progress -= 1
                    if self._aborted and self._writes_in_progress == 0:
                        self._close(suppress=True)
        except OSError as error:
            raise _save_error(f"writing bytes [{offset}, {offset + len(view)})", self.name, error) from error

    def _write(self, fd: int, offset: int, view: memoryview) -> None:
        if not self.direct:
            self._write_buffered(fd, offset, view)
            return
        if offset % ALIGNMENT_BYTES == 0 and len(view) % ALIGNMENT_BYTES == 0:
            try:
                _write_all(fd, view, offset, ALIGNMENT_BYTES)
                return
            except OSError as error:
                if error.errno != errno.EINVAL or self._insist:
                    raise
        self._write_buffered(self._buffered(), offset, view)

    def _open_fd(self) -> int:
        if self._fd is None or self._aborted:
            raise OSError(errno.EBADF, "the file has been finished or aborted already")
        return self._fd

    def _buffered(self) -> int:
        """A second fd on the file, for writes that O_DIRECT does not take; the kernel keeps the two coherent."""
        with self._lock:
            if self._buffered_fd is None:
                self._buffered_fd = os.open(self.name, os.O_WRONLY | os.O_CLOEXEC)
            return self._buffered_fd

    def _write_buffered(self, fd: int, offset: int, view: memoryview) -> None:
        _write_all(fd, view, offset)
        direct_io.write_back(fd, offset, len(view), wait=False)
        with self._lock:
            self._unsynced.append((offset, len(view)))
            oldest = self._unsynced.popleft() if len(self._unsynced) > _UNSYNCED_WRITES else None
        if oldest is not None:
            direct_io.write_back(fd, *oldest, wait=True)
            direct_io.drop_cached(fd, *oldest)

    def finish(self, size_bytes: int, fsync: bool = True) -> None:
        try:
            fd = self._open_fd()
            if os.fstat(fd).st_size != size_bytes:
                os.ftruncate(fd, size_bytes)
            if fsync:
                if self._buffered_fd is not None:
                    os.fsync(self._buffered_fd)  # a failed write-back is reported to the fd that was open then
                os.fsync(fd)
                if self._unsynced or self._buffered_fd is not None:
                    direct_io.drop_cached(fd)
        except OSError as error:
            self._close(suppress=True)
            raise _save_error(f"finishing the file at {size_bytes} bytes", self.name, error) from error
        try:
            self._close()
        except OSError as error:
            raise _save_error("closing the file", self.name, error) from error

    def _close(self, suppress: bool = False) -> None:
        fds = [fd for fd in (self._buffered_fd, self._fd) if fd is not None]
        self._fd = self._buffered_fd = None
        failure: OSError | None = None
        for fd in fds:
            try:
                os.close(fd)
            except OSError as error:
                failure = error
        if failure is not None and not suppress:
            raise failure

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            if self._writes_in_progress == 0:
                self._close(suppress=True)
        with contextlib.suppress(OSError):
            os.unlink(self.name)
