"""Which storage a path or URL names, and the usual one: a directory of a local (or mounted) file system.

Nothing outside this package names a back-end.

Each change of a local directory is complete and durable on return, or has not happened: a file is written, synced,
renamed, and its directory synced; that is the order of borg and others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.options import StorePath, local_path, store_url
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import (
    DirectIo,
    FileVersion,
    RangeReader,
    RangeWriter,
    Storage,
    advice,
    check_name,
    open_error,
    save_error,
    saving,
    shown,
)
from mcore_ckpt.storage.direct_io import (
    FILE_MODE,
    BounceBuffers,
    LocalReader,
    LocalWriter,
    close_read,
    look_again,
    open_regular,
    was_there,
)

# A file system that cannot sync a directory (some FUSE and network ones) answers so; it has no such promise to keep.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
# What one answers that has no file locks.
_NO_LOCKS: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

_T = TypeVar("_T")

_logger = logger_of(__name__)


def make_directories(path: str) -> None:
    """Make a directory and those above it; a new name is durable on return."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    with contextlib.suppress(PermissionError):  # it may be written, and not read
        sync_directory(parent)


def write_new(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
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


def sync_directory(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        close_read(fd)


def _leads_to(kind: Callable[[], bool]) -> bool:
    """Whether an entry is of this kind. A link in a loop leads nowhere, as one to a name that is not there."""
    try:
        return kind()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


class LocalStorage(Storage):
    """A directory `root` of the local file system. `follow_links`: read files through symbolic links in it, too,
    wherever they lead; not for checkpoints, but for what others keep as links (the cache of Hugging Face), in a
    directory that a person has named.
    """

    def __init__(self, root: str | os.PathLike[str], *, follow_links: bool = False) -> None:
        self.root = local_path(root)
        self._follow_links = follow_links
        self._bounce: weakref.ref[BounceBuffers] | None = None  # of the readers that are open

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root,)  # writer processes get the path; buffers and locks stay here

    def path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))

    def list(self) -> list[str]:
        try:
            return sorted(self._listed(lambda entry: None if _leads_to(entry.is_dir) else 0))
        except CheckpointNotFoundError:
            return []

    def sizes(self) -> dict[str, int]:
        return self._listed(lambda entry: entry.stat().st_size if _leads_to(entry.is_file) else None)

    def folders(self) -> Sequence[str]:
        return sorted(self._listed(lambda entry: 0 if _leads_to(entry.is_dir) else None))

    def links(self) -> dict[str, str]:
        return self._listed(lambda entry: os.path.realpath(entry.path) if entry.is_symlink() else None)

    def _listed(self, of: Callable[[os.DirEntry[str]], _T | None]) -> dict[str, _T]:
        """What `of` says of each entry, by name; None leaves one out."""

        def listed() -> dict[str, _T]:
            found: dict[str, _T] = {}
            with os.scandir(self.root) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        value = of(entry)
                        if value is not None:
                            found[entry.name] = value
            return found

        try:
            return look_again(os.fspath(self.root), listed)
        except NotADirectoryError as error:
            raise CheckpointNotFoundError(f"{self.root}: is a file, and a directory is expected") from error
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.root}: no such directory") from error
        except OSError as error:
            # Anything else would pass for an empty directory.
            raise LoadError(f"{self.root}: cannot be listed: {shown(error)}; {advice(error.errno)}") from error

    @contextlib.contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        def lock() -> int:
            fd = open_regular(self.root, name, follow_links=self._follow_links)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BaseException:
                close_read(fd)
                raise
            return fd

        fd, path = None, self.path(name)
        try:
            fd = look_again(path, lock)
        except (LoadError, FileNotFoundError, NotADirectoryError):
            pass  # which the reader of the file is told
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                _logger.warning("%s: no lock on it (%s): while it is read, a `prune` may remove it", path, error)
        try:
            yield
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too
                close_read(fd)

    @contextlib.contextmanager
    def readers_of(self, name: str) -> Iterator[Callable[[], bool]]:
        fd, problem = None, None
        try:
            fd = open_regular(self.root, name, os.O_RDWR)  # NFS asks for that
        except LoadError:
            pass
        except OSError as error:
            problem = error.errno

        def are_there() -> bool:
            if fd is None:
                return problem == errno.ESTALE
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno in (errno.EAGAIN, errno.ESTALE)  # another process has it, or it cannot be told
            fcntl.flock(fd, fcntl.LOCK_UN)
            return False

        try:
            yield are_there
        finally:
            if fd is not None:
                close_read(fd)

    def keep_owner(self, names: Iterable[str], like: str) -> None:
        with saving("looking at its owner", self.path(like)):
            status = os.stat(self.path(like), follow_symlinks=False)
        for name in names:
            path = self._own(name)
            with saving("giving it the mode of the file before it", path):
                with contextlib.suppress(PermissionError):
                    os.chown(path, status.st_uid, status.st_gid)
                os.chmod(path, stat.S_IMODE(status.st_mode))

    def overwrite(self, name: str, content: bytes) -> bool:
        with saving(f"writing bytes [0, {len(content)})", self.path(name)):
            try:
                fd = open_regular(self.root, name, os.O_RDWR)
            except (CorruptCheckpointError, FileNotFoundError):
                return False
            try:
                direct_io.write_all(fd, memoryview(content), 0)
                os.ftruncate(fd, len(content))
                os.fsync(fd)
            finally:
                os.close(fd)
        return True

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        path, bounce = self.path(name), None if self._bounce is None else self._bounce()
        if bounce is None:
            bounce = BounceBuffers()
            self._bounce = weakref.ref(bounce)
        try:
            opened = partial(LocalReader, self.root, name, direct, bounce, follow_links=self._follow_links)
            return look_again(path, opened)
        except OSError as error:
            raise open_error(path, error) from error

    def _own(self, name: str) -> str:
        """The path of a name that is going to be written or removed: links in folders of its own lead elsewhere."""
        path = self.path(name)
        folder = os.path.dirname(name)
        while folder and not self._follow_links:
            if os.path.islink(os.path.join(self.root, folder)):
                raise SaveError(f"{path}: lies behind the symbolic link {folder!r}; nothing is changed there")
            folder = os.path.dirname(folder)
        return path

    def open_writer(self, name: str, size_bytes: int, *, direct: DirectIo = "auto") -> RangeWriter:
        path = self._own(name)
        with saving("creating the file", path):
            if "/" in name:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            return LocalWriter(path, size_bytes, direct)

    def publish(self, name: str, content: bytes) -> None:
        path = self._own(name)
        with saving("publishing it", path):
            if "/" in name:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            directory, base = os.path.split(path)
            temporary = os.path.join(directory, f".{base}.{secrets.token_hex(8)}.tmp")
            write_new(temporary, content)
            try:
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            sync_directory(directory)

    def create(self, name: str, content: bytes) -> None:
        path = self._own(name)
        with saving("creating the file", path):
            write_new(path, content)

    def claim(self, name: str, owner: str) -> str:
        path = self.path(name)

        def claimed() -> str:
            try:
                os.symlink(owner, path)  # it is there with what it says, or not at all
            except FileExistsError:
                with was_there():
                    return os.readlink(path)  # one's own, if over NFS the answer was lost and the request sent again
            return owner

        with saving("claiming the directory (by a symbolic link)", path):
            return look_again(path, claimed)

    def claimed(self, name: str) -> str | None:
        path = self.path(name)
        try:
            return look_again(path, partial(os.readlink, path))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise LoadError(
                    f"{path}: expected a symbolic link, as a save leaves it that is killed while it is published, got "
                    "another file: a copy that follows links has made it. Delete it, and the .mcore_ckpt_incomplete.* "
                    "next to it"
                ) from error
            raise open_error(path, error) from error

    def version(self, name: str) -> FileVersion | None:
        path = self.path(name)
        try:
            try:
                fd = open_regular(self.root, name, follow_links=self._follow_links)
            except CorruptCheckpointError:  # a link, or what blocks or acts when it is opened
                status = os.stat(path, follow_symlinks=self._follow_links)
            else:
                status = os.fstat(fd)
                close_read(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise open_error(path, error) from error
        return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def location(self) -> str:
        return os.path.realpath(self.root)

    def move(self, source: str, name: str) -> None:
        with saving(f"renaming it to {name}", self.path(source)):
            os.replace(self._own(source), self._own(name))

    def delete(self, name: str, missing_ok: bool = True) -> None:
        path = self._own(name)
        with saving("deleting it", path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def ensure(self) -> None:
        with saving("making the directory", str(self.root)):
            make_directories(str(self.root.absolute()))

    def sync(self, *, parents: bool = False) -> None:
        place = os.path.realpath(self.root)
        try:
            sync_directory(place)
            device = os.stat(place).st_dev
            while parents and (parent := os.path.dirname(place)) != place and os.stat(parent).st_dev == device:
                sync_directory(parent)
                place = parent
        except OSError as error:
            if parents and isinstance(error, PermissionError):
                return  # a directory that this user may not read was not made by this user
            raise save_error("syncing the directory", place, error) from error

    def remove(self) -> bool:
        place = os.path.realpath(self.root)
        try:
            os.rmdir(self.root)
            sync_directory(os.path.dirname(place))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                return False
            raise save_error("removing the directory", str(self.root), error) from error
        return True


def storage_at(
    place: str | os.PathLike[str], *, follow_links: bool = False, deadline_s: float | None = None
) -> Storage:
    """The storage of a directory, by path or URL; it need not exist. So long a request to a store may take; None: as
    long as its client waits. Raises `OptionError` where none can be.
    """
    url = store_url(place)
    if url is None:
        return LocalStorage(place, follow_links=follow_links)
    from mcore_ckpt.storage._store_urls import open_store, path_of_profile  # (importing it takes a while)

    path = path_of_profile(url)
    return open_store(url, deadline_s) if path is None else LocalStorage(path)


def path_in_file_system(place: Path) -> Path:
    """The file system's path of a directory, also of a URL whose profile names one; of all else `place`."""
    storage = storage_at(place)
    return storage.root if isinstance(storage, LocalStorage) else place


def is_same_directory(one: Path, other: Path) -> bool:
    """Whether two paths lead to one directory, through links and mounts; False for what is in a store."""
    if isinstance(one, StorePath) or isinstance(other, StorePath):
        return False
    one, other = (Path(os.path.realpath(each)) for each in (one, other))  # also links to what is not there yet
    for here, there in zip((one, *one.parents), (other, *other.parents), strict=False):
        with contextlib.suppress(OSError):
            return os.path.samefile(here, there)
        if here.name != there.name:
            break
    return False


def lies_in(place: Path, directory: Path) -> bool:
    """Whether a directory is another one, or lies in it, whatever links and mounts are on the way."""
    outer, inner = (f"{storage_at(each).location.rstrip('/')}/" for each in (directory, place))
    return inner.startswith(outer) or any(
        is_same_directory(each, directory) for each in (place.absolute(), *place.absolute().parents)
    )
