"""Files of a local (or mounted) file system.

Only regular files are read, and below the storage's directory no symbolic link is followed: names come from files that
nobody vouches for, and what lies there may be a pipe that blocks for ever, or a link to anything at all.

Reading: from the page cache what is there, past it what is not.

A checkpoint is read once, so what is cold is read with O_DIRECT, which neither evicts other pages nor pays for
allocating and filling new ones. What was just written, or read by another rank, is often still cached, and is then
copied at memory speed. `mincore` tells the two apart without touching a page. It is asked for each piece of a read,
since a file may well be cached in part.

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
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import (
    ALIGNMENT_BYTES,
    DirectIo,
    FileVersion,
    RangeReader,
    RangeWriter,
    Storage,
    align_up,
    check_name,
)

__all__ = [
    "BouncePool",
    "LocalReader",
    "LocalStorage",
    "open_regular",
]

# Below this, one read through the page cache costs less than finding out where the bytes are; headers are read so.
_MIN_DIRECT_BYTES: Final = 64 * 1024
# Up to here, copying the whole read from an aligned buffer is cheaper than two more requests for its ragged ends.
_MAX_COPIED_BYTES: Final = 1024 * 1024
_PIECE_BYTES: Final = 8 * 1024 * 1024
# Room for a piece, and for what is read of the pages around it.
_BOUNCE_BYTES: Final = _PIECE_BYTES + 4 * ALIGNMENT_BYTES
# Bytes are summed and copied in slices that are still in the CPU's cache when they are looked at again.
_SLICE_BYTES: Final = 512 * 1024

# Of what is cached for the most part, the rest is read as well.
_MOSTLY_CACHED: Final = 0.5

_Arrived = Callable[[memoryview], None]


def _ignore(_: memoryview) -> None:
    pass


def _copy(view: memoryview, read: memoryview, arrived: _Arrived) -> None:
    """Copy what has been read to the beginning of `view`, after `arrived` has seen it."""
    for done in range(0, len(read), _SLICE_BYTES):
        part = read[done : done + _SLICE_BYTES]
        arrived(part)
        direct_io.copy_bytes(view[done : done + len(part)], part)


class BouncePool:
    """Aligned buffers for reads whose destination O_DIRECT cannot take, as many as there are threads that need one.

    They lie in huge pages, which makes up for the copy (see `aligned_buffer`): a destination that happens to be aligned
    is read into without one, as it is most likely such a buffer itself.

    Shared by the readers of a storage, and freed when the last of them closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._readers = 0

    def enter(self) -> None:
        """A reader starts using the pool."""
        with self._lock:
            self._readers += 1

    def leave(self) -> None:
        """A reader has closed."""
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._free.clear()

    def take(self) -> memoryview:
        """A buffer for one piece and the pages around it, page-aligned."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return direct_io.aligned_buffer(_BOUNCE_BYTES)

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that `take` lent."""
        with self._lock:
            self._free.append(buffer)


def open_regular(root: str | os.PathLike[str], name: str, flags: int = 0, *, follow_links: bool = False) -> int:
    """Open a regular file below a directory for reading; returns its descriptor.

    Args:
        root: the directory, which may itself be reached through symbolic links: whoever calls has named it.
        name: of the file, relative to it.
        flags: for `os.open`, beyond those for reading.
        follow_links: wherever they lead; for directories whose owner has named them and keeps links in them.

    Raises:
        CorruptCheckpointError: there is something else than a regular file, or a symbolic link on the way to it.
        OSError: it cannot be opened.
    """
    # It is looked at before it is opened: a pipe would block, and a device may act. (O_NONBLOCK, against the first,
    # makes file systems that keep files on tape refuse those.)
    with _looked_at(root, name, follow_links) as (entry, folder, _):
        no_link = 0 if follow_links else os.O_NOFOLLOW
        fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | no_link | flags, dir_fd=folder)
    try:
        _check_regular(os.path.join(root, name), os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _looked_at(
    root: str | os.PathLike[str], name: str, follow_links: bool
) -> Iterator[tuple[str, int | None, os.stat_result]]:
    """What leads to a regular file: its name, the descriptor of the folder to start from (None: the working directory),
    and its status. Raises as `open_regular`.
    """
    path = os.path.join(root, check_name(name))
    with contextlib.ExitStack() as opened:
        entry, folder = path, None
        if "/" in name and not follow_links:
            *folders, entry = name.split("/")
            folder = _open_folder(os.fspath(root), os.O_CLOEXEC)
            opened.callback(os.close, folder)
            for part in folders:
                if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise _link_error(path, f"it lies behind the symbolic link {part!r}")
                folder = _open_folder(part, os.O_CLOEXEC | os.O_NOFOLLOW, folder)
                opened.callback(os.close, folder)
        status = os.stat(entry, dir_fd=folder, follow_symlinks=follow_links)
        _check_regular(path, status.st_mode)
        yield entry, folder, status


def _open_folder(path: str, flags: int, folder: int | None = None) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | flags, dir_fd=folder)


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise _link_error(path, "it is a symbolic link")
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise CorruptCheckpointError(f"{path}: expected a regular file, but it is {kind}; load another copy")


def _link_error(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: expected a regular file inside the directory, but {what}. If you trust what it leads to, copy the"
        " checkpoint with its links resolved (cp -rL) and load the copy"
    )


class LocalReader(RangeReader):
    """An open local file; any number of threads may read it at once, but none while it is being closed.

    Args:
        root: directory of the storage.
        name: of the file in it.
        direct: `"auto"`: O_DIRECT for what is not cached, if the file system has it; `"on"`: for everything, or fail;
            `"off"`: never.
        bounce: where reads into unaligned memory borrow their buffers.
        follow_links: as in `open_regular`.

    Raises:
        CorruptCheckpointError: if it is no regular file inside the directory.
        OSError: if it cannot be opened, or has no O_DIRECT and that is insisted on.
    """

    def __init__(
        self, root: Path, name: str, direct: DirectIo, bounce: BouncePool, *, follow_links: bool = False
    ) -> None:
        self.name = os.path.join(root, name)
        self._insist = direct == "on"
        self._keep = False
        self._bounce = bounce
        self._direct_fd: int | None = None
        self._residency: direct_io.Residency | None = None
        self._fd: int | None = open_regular(root, name, follow_links=follow_links)
        bounce.enter()
        try:
            status = os.fstat(self._fd)
            self.size_bytes = status.st_size
            if direct != "off":
                try:
                    self._direct_fd = open_regular(root, name, os.O_DIRECT, follow_links=follow_links)
                except OSError as error:
                    if error.errno != errno.EINVAL or self._insist:
                        raise
                else:
                    if not os.path.samestat(status, os.fstat(self._direct_fd)):
                        raise OSError(errno.ESTALE, "another file took its name while it was opened")
            if direct == "auto":
                self._residency = direct_io.Residency(self._fd, self.size_bytes)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, view: memoryview, arrived: _Arrived | None = None) -> None:
        self._read(offset, view, arrived or _ignore, shared=False)

    def read_framed(
        self,
        offset: int,
        before: memoryview,
        view: memoryview,
        after: memoryview,
        arrived: _Arrived | None = None,
    ) -> None:
        nbytes = len(before) + len(view) + len(after)
        self.check_range(offset, nbytes)
        if not self._wants_direct(offset, nbytes):
            self.expect(offset, nbytes)
            position = offset
            for part, look in ((before, _ignore), (view, arrived or _ignore), (after, _ignore)):
                self._read(position, part, look, shared=True)
                position += len(part)
        elif not self._frame_direct(offset, before, view, after, arrived or _ignore):
            super().read_framed(offset, before, view, after, arrived)

    def read_shared(self, offset: int, view: memoryview) -> None:
        """Through the page cache, from where the next process gets them. The kernel's own read-ahead, of a few threads,
        keeps the device busier than asking it for megabytes at once.
        """
        self._read(offset, view, _ignore, shared=not self._insist)

    def _read(self, offset: int, view: memoryview, arrived: _Arrived, *, shared: bool) -> None:
        view = view.cast("B")
        self.check_range(offset, len(view))
        if self._fd is None:
            raise ValueError(f"{self.name}: the reader is closed")
        done = 0
        try:
            while done < len(view):
                start = offset + done
                # Pieces end on aligned offsets, so that those after the first begin on one.
                piece = view[done : done + _PIECE_BYTES - start % ALIGNMENT_BYTES]
                if not shared and self._wants_direct(start, len(piece)):
                    self._read_direct(start, piece, arrived)
                else:
                    if not shared:
                        self.expect(start, len(piece))
                    self._read_buffered(self._fd, start, piece, arrived)
                done += len(piece)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "no errno")
            raise LoadError(
                f"{self.name}: reading bytes [{offset + done}, {offset + len(view)}) failed: "
                f"{error.strerror or error} ({code}); check the device and its file system (dmesg)"
            ) from error

    def scatter(self, offset: int, vectors: int, count: int, nbytes: int) -> bool:
        self.check_range(offset, nbytes)
        if self._fd is None or self._insist:
            return False
        return direct_io.read_vectors(self._fd, vectors, count, offset) == nbytes

    def keep_cached(self) -> bool:
        self._keep = not self._insist
        return self._keep

    def expect(self, offset: int, length: int) -> None:
        if self._keep and self._residency is not None and length >= _MIN_DIRECT_BYTES:
            self._residency.bring(offset, length)

    def is_cached(self, offset: int, length: int) -> bool:
        if self._keep:
            return True  # by way of the page cache in any case, ahead of which the kernel reads
        return self._residency is not None and self._residency.cached_share(offset, length) >= _MOSTLY_CACHED

    @contextmanager
    def cached(self, offset: int, length: int) -> Iterator[int]:
        """The page cache itself, mapped; only where all of the range is cached.

        Touching a mapped file that another program cuts at that very moment ends the process (SIGBUS), which a read
        would survive. So the mapping serves only what reads serve badly (many short runs), for the milliseconds of a
        copy, after a look at the file's length; `direct="off"` rules it out.
        """
        fd, residency = self._fd, self._residency
        if fd is None or residency is None or os.fstat(fd).st_size != self.size_bytes:
            yield 0
            return
        if self._keep:
            residency.bring(offset, length, mapped=True)
        mapped = residency.address_of(offset, length)
        try:
            yield mapped
        finally:
            if mapped:
                residency.forget(offset, length)

    def _wants_direct(self, offset: int, nbytes: int) -> bool:
        if self._direct_fd is None or self._keep:
            return False
        if self._residency is None:
            return self._insist
        return nbytes >= _MIN_DIRECT_BYTES and not self.is_cached(offset, nbytes)

    def _read_buffered(self, fd: int, offset: int, view: memoryview, arrived: _Arrived) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done : done + _SLICE_BYTES]], offset + done)
            if got == 0:
                self._ended_early(offset + done, offset, len(view))
            arrived(view[done : done + got])
            done += got

    def _read_direct(self, offset: int, view: memoryview, arrived: _Arrived) -> None:
        """Read past the page cache, straight into `view` where its address allows it."""
        stop = offset + len(view)
        position = offset
        straight = (
            len(view) > _MAX_COPIED_BYTES
            and (direct_io.address(view) - offset) % ALIGNMENT_BYTES == 0  # memory and file are aligned together
        )
        try:
            while position < stop:
                if not straight:
                    position += self._read_copied(position, view[position - offset :], arrived)
                elif position % ALIGNMENT_BYTES:
                    to_boundary = align_up(position) - position
                    position += self._read_copied(position, view[position - offset :][:to_boundary], arrived)
                elif stop - position < ALIGNMENT_BYTES:
                    position += self._read_copied(position, view[position - offset :], arrived)
                else:
                    whole_bytes = (stop - position) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                    space = view[position - offset :][:whole_bytes]
                    got = os.preadv(self._direct(), [space], position)
                    if got == 0:
                        self._ended_early(position, offset, len(view))
                    arrived(space[:got])
                    position += got
        except OSError as error:
            # The file system takes the flag and not the read, or asks for more alignment than any known to us.
            if error.errno != errno.EINVAL or self._insist or self._fd is None:
                raise
            self._read_buffered(self._fd, position, view[position - offset :], arrived)

    def _direct(self) -> int:
        if self._direct_fd is None:
            raise OSError(errno.EBADF, "the reader was closed during a read")
        return self._direct_fd

    def _read_copied(self, offset: int, view: memoryview, arrived: _Arrived) -> int:
        """Read the first bytes of `view` by way of an aligned buffer; returns how many."""
        start = offset - offset % ALIGNMENT_BYTES
        buffer = self._bounce.take()
        try:
            wanted = align_up(min(offset + len(view) - start, len(buffer)))
            got = os.preadv(self._direct(), [buffer[:wanted]], start) - (offset - start)
            if got <= 0:
                self._ended_early(offset, offset, len(view))
            got = min(got, len(view))
            read = buffer[offset - start :][:got]
            _copy(view, read, arrived)
            return got
        finally:
            self._bounce.give_back(buffer)

    def _frame_direct(
        self, offset: int, before: memoryview, view: memoryview, after: memoryview, arrived: _Arrived
    ) -> bool:
        """Read all of it past the page cache at once; False if that cannot be, and `arrived` has not been called."""
        first = offset % ALIGNMENT_BYTES
        start = first + len(before)
        stop = start + len(view)
        wanted = align_up(stop + len(after))
        aligned = (direct_io.address(view) - start) % ALIGNMENT_BYTES == 0
        if wanted > _BOUNCE_BYTES or (aligned and len(view) > _MAX_COPIED_BYTES):  # else it goes straight there
            return False
        buffer = self._bounce.take()
        try:
            # Whatever is wrong shows again when the parts are read by themselves.
            with contextlib.suppress(OSError):
                if os.preadv(self._direct(), [buffer[:wanted]], offset - first) < stop + len(after):
                    return False
                before[:], after[:] = buffer[first:start], buffer[stop : stop + len(after)]
                _copy(view, buffer[start:stop], arrived)
                return True
            return False
        finally:
            self._bounce.give_back(buffer)

    def _ended_early(self, at: int, offset: int, nbytes: int) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self.name}: the file ended at byte {at} where [{offset}, {offset + nbytes}) was wanted; it had "
            f"{self.size_bytes} bytes when it was opened, so it was cut meanwhile"
        )

    def close(self) -> None:
        fds = [fd for fd in (self._direct_fd, self._fd) if fd is not None]
        if self._residency is not None:
            self._residency.close()
        if self._fd is not None:
            self._bounce.leave()
        self._fd = self._direct_fd = self._residency = None
        for fd in fds:
            os.close(fd)


# One write-back in flight, and one before it that is waited for: enough to keep the device busy, and all that a
# buffered save may leave dirty in the page cache.
_UNSYNCED_WRITES: Final = 2
# A file system that cannot sync a directory (some FUSE and network ones) answers so; it has no such promise to keep.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
_FILE_MODE: Final = 0o666  # less the umask, as any open() does
# The extended attribute that holds the mark of a file.
_MARK: Final = "user.mcore_ckpt.save"


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
    """A directory `root` of the local file system.

    Args:
        root: the directory.
        follow_links: read files through symbolic links in it, too, wherever they lead. Not for checkpoints; for what
            others keep as links (the cache of Hugging Face), in a directory that a person has named.

    Attributes:
        mark: see `marked`; empty for none.
    """

    def __init__(self, root: str | os.PathLike[str], *, follow_links: bool = False) -> None:
        self.root = local_path(root)
        self._follow_links = follow_links
        self._bounce = BouncePool()
        self.mark = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.root, self.mark)  # writer processes get the path; buffers and locks stay here

    def marked(self, mark: str) -> LocalStorage:
        same = object.__new__(type(self))  # (copying goes by way of `__reduce__`)
        same.__dict__.update(self.__dict__)
        same.mark = mark
        return same

    def mark_of(self, name: str) -> str | None:
        try:
            return os.getxattr(self.path(name), _MARK, follow_symlinks=False).decode("ascii", "replace")
        except OSError:
            return None

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def path(self, name: str) -> str:
        """The path of the file of that name."""
        return os.path.join(self.root, check_name(name))

    def list(self) -> list[str]:
        failed: list[OSError] = []
        names = []
        for directory, _, files in os.walk(self.root, onerror=failed.append):
            relative = os.path.relpath(directory, self.root)
            names += files if relative == "." else [f"{relative}/{file}" for file in files]
        for error in failed:
            # What was removed meanwhile is not there. Anything else would pass for an empty directory.
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                code = errno.errorcode.get(error.errno or 0, "no errno")
                raise LoadError(
                    f"{error.filename or self.root}: cannot be listed: {error.strerror or error} ({code}); check the "
                    "device and its file system (dmesg)"
                ) from error
        return sorted(names)

    def exists(self, name: str) -> bool:
        return os.path.isfile(self.path(name))

    def size(self, name: str) -> int:
        try:
            with _looked_at(self.root, name, self._follow_links) as (_, _, status):
                return status.st_size
        except OSError as error:
            raise _open_error(self.path(name), error) from error

    def open_descriptor(self, name: str) -> int:
        """A descriptor of a regular file, for reading; the caller closes it. Raises as `open_regular`."""
        return open_regular(self.root, name, follow_links=self._follow_links)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        try:
            return LocalReader(self.root, check_name(name), direct, self._bounce, follow_links=self._follow_links)
        except OSError as error:
            raise _open_error(self.path(name), error) from error

    def _own(self, name: str) -> str:
        """The path of a name that is going to be written or removed: links in folders of its own lead elsewhere."""
        path = self.path(name)
        folder = os.path.dirname(name)
        while folder and not self._follow_links:
            if os.path.islink(os.path.join(self.root, folder)):
                raise SaveError(f"{path}: lies behind the symbolic link {folder!r}; nothing is changed there")
            folder = os.path.dirname(folder)
        return path

    def keeps_cheaply(self) -> bool:
        try:
            return direct_io.has_large_cached_pages(os.stat(self.root).st_dev)
        except OSError:
            return False

    def open_writer(self, name: str, *, size_bytes: int | None = None, direct: DirectIo = "auto") -> RangeWriter:
        path = self._own(name)
        try:
            if "/" in name:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            return _LocalWriter(path, size_bytes, direct, self.mark)
        except OSError as error:
            raise _save_error("creating the file", path, error) from error

    def publish(self, name: str, content: bytes, *, through: str | None = None) -> None:
        path = self._own(name)
        try:
            _replace_durably(path, content, None if through is None else self.path(through))
        except OSError as error:
            raise _save_error("publishing it", path, error) from error

    def publish_new(self, name: str, content: bytes) -> bool:
        path = self.path(name)
        try:
            return _make_durably(path, content)
        except OSError as error:
            raise _save_error("publishing it", path, error) from error

    def create(self, name: str, content: bytes) -> None:
        path = self._own(name)
        try:
            _write_new(path, content)
        except OSError as error:
            raise _save_error("creating the file", path, error) from error

    def link(self, source: str, name: str) -> bool:
        path = self.path(name)
        try:
            return _link(self.path(source), path)
        except OSError as error:
            raise _save_error(f"giving {source} this name", path, error) from error

    def touch(self, name: str) -> bool:
        path = self.path(name)
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _save_error("renewing its time", path, error) from error
        return True

    def version(self, name: str) -> FileVersion | None:
        path = self.path(name)
        flags = os.O_RDONLY | os.O_CLOEXEC | (0 if self._follow_links else os.O_NOFOLLOW)
        try:
            try:
                status = os.stat(path, follow_symlinks=self._follow_links)
            except FileNotFoundError:
                flags |= os.O_NONBLOCK  # it may be there by now, and a pipe
            else:
                if not stat.S_ISREG(status.st_mode):  # a link, or what blocks or acts when it is opened
                    return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
            # Opened, not asked for by name alone: that is when NFS asks the server.
            fd = os.open(path, flags)
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _open_error(path, error) from error
        return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def location(self) -> str:
        return os.path.realpath(self.root)

    def rename(self, source: str, destination: str) -> None:
        try:
            os.replace(self._own(source), self._own(destination))
        except OSError as error:
            raise _save_error(f"renaming it to {destination}", self.path(source), error) from error

    def rename_new(self, source: str, destination: str) -> bool:
        """As `rename`, unless there is a file of that name already; durable on return.

        Returns:
            False if the name is taken; `source` is still there then.

        Raises:
            SaveError: the name cannot be given.
        """
        path = self._own(destination)
        try:
            done = _rename_new(self._own(source), path)
            if done:
                _sync_directory(os.path.dirname(path))
        except OSError as error:
            raise _save_error(f"giving {source} this name", path, error) from error
        return done

    def delete(self, name: str, missing_ok: bool = True) -> None:
        path = self._own(name)
        try:
            os.unlink(path)
        except FileNotFoundError as error:
            if not missing_ok:
                raise _save_error("deleting it", path, error) from error
        except OSError as error:
            raise _save_error("deleting it", path, error) from error

    def ensure_directory(self) -> None:
        try:
            _make_directories(os.path.abspath(self.root))
        except OSError as error:
            raise _save_error("making the directory", str(self.root), error) from error

    def sync_directory(self) -> None:
        try:
            _sync_directory(str(self.root))
        except OSError as error:
            raise _save_error("syncing the directory", str(self.root), error) from error

    def sync_parents(self) -> None:
        place = os.path.realpath(self.root)
        try:
            device = os.stat(place).st_dev
            while (parent := os.path.dirname(place)) != place and os.stat(parent).st_dev == device:
                _sync_directory(parent)
                place = parent
        except PermissionError:
            pass  # a directory that this user may not read was not made by this user
        except OSError as error:
            raise _save_error("syncing the directory that it is in", place, error) from error


def _remade(root: Path, mark: str) -> LocalStorage:
    return LocalStorage(root).marked(mark)


def _make_directories(path: str) -> None:
    """Make a directory and those above it; a new name is durable on return."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    with contextlib.suppress(PermissionError):  # it may be written, and not read
        _sync_directory(parent)


def _open_error(path: str, error: OSError) -> LoadError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointNotFoundError(
            f"{path}: no such file; the path is wrong, or the checkpoint is incomplete or was deleted meanwhile"
        )
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return LoadError(f"{path}: cannot be opened: {error.strerror or error} ({code})")


# What a file system without hard links answers; NFS and some FUSE ones pass on an odd one of their server.
_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def _write_new(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        if content:
            direct_io.write_all(fd, memoryview(content), 0)
            os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def _link(source: str, path: str) -> bool:
    """A second name for a file; False if the name is taken.

    Over NFS the answer to a link may be lost, and the request sent again, so that it fails although it was done: then
    the two names stand for one file.
    """
    try:
        os.link(source, path)
    except FileExistsError:
        with contextlib.suppress(OSError):
            return os.path.samefile(source, path)
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with open(source, "rb") as stream:
            content = stream.read()
        try:
            _write_new(path, content)
        except FileExistsError:
            return False
    return True


def _replace_durably(path: str, content: bytes, through: str | None = None) -> None:
    """Write, sync, rename, sync the directory; the order that borg and others use, and the way back.

    If the last step fails, the rename has happened but may not outlast a power cut. Whoever is told of the failure
    removes the files that the new content names, so the old content has to come back.
    """
    directory, base = os.path.split(path)
    prefix = f".{base}."
    temporary = through or os.path.join(directory, f"{prefix}{secrets.token_hex(8)}.tmp")
    old = os.path.join(directory, f"{prefix}{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if through is None else os.O_TRUNC)
    # What a process has left that died in here: nobody else publishes the same file. Not at the end: who reads the old
    # common state beside the new `.metadata` waits for this to return.
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory or "."):
            if entry.startswith(prefix) and entry.endswith(".tmp"):
                os.unlink(os.path.join(directory, entry))
    try:
        fd = os.open(temporary, flags, _FILE_MODE)
        try:
            direct_io.write_all(fd, memoryview(content), 0)
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
        for left in {temporary, old} - {through}:
            with contextlib.suppress(OSError):
                os.unlink(left)


def _make_durably(path: str, content: bytes) -> bool:
    """Write, sync, link, sync the directory; False if the name is taken.

    Where there are no hard links, a file that somebody makes between the last look and the renaming is replaced.
    """
    directory, base = os.path.split(path)
    temporary = os.path.join(directory, f".{base}.{secrets.token_hex(8)}.tmp")
    _write_new(temporary, content)
    try:
        if not _rename_new(temporary, path):
            return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_directory(directory)
    return True


def _rename_new(source: str, path: str) -> bool:
    """Give a file another name; False if that is taken."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(path):
            return False
        os.replace(source, path)
    else:
        os.unlink(source)
    return True


def _sync_directory(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(fd)


def _create_marked(path: str, mark: str) -> int:
    """A new file, open for writing, that says from its first moment on which save makes it.

    It is made without a name, marked, and then named: whoever is killed in between leaves nothing. Where the file
    system has no files without names, it may be there for a moment without the mark; where it keeps no marks, always.
    """
    fd = None if mark == "" else _create_nameless(os.path.dirname(path) or ".", mark)
    if fd is not None:
        try:
            # As for an absolute path the descriptor is not needed; with one, Python asks that the link be followed.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, OSError) or error.errno == errno.EEXIST:
                raise
        else:
            return fd
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    if mark:
        with contextlib.suppress(OSError):
            os.setxattr(fd, _MARK, mark.encode("ascii"))
    return fd


def _create_nameless(directory: str, mark: str) -> int | None:
    try:
        fd = os.open(directory, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, _FILE_MODE)
    except OSError:
        return None
    try:
        os.setxattr(fd, _MARK, mark.encode("ascii"))
    except OSError:
        os.close(fd)
        return None
    return fd


class _LocalWriter(RangeWriter):
    """A new file. `finish` is for one thread, after the last `write` has returned."""

    def __init__(self, path: str, size_bytes: int | None, direct: DirectIo, mark: str) -> None:
        self.name = path
        self.direct = False
        self._insist = direct == "on"
        self._keep = False
        self._lock = threading.Lock()
        self._buffered_fd: int | None = None
        self._unsynced: deque[tuple[int, int]] = deque()
        self._writes_in_progress = 0
        self._aborted = False
        fd = _create_marked(path, mark)
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
                direct_io.write_all(fd, view, offset, ALIGNMENT_BYTES)
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
        direct_io.write_all(fd, view, offset)
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
