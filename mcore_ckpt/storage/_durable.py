"""Changes of a directory that last: each is complete and durable on return, or has not happened.

A file is written, synced, renamed, and its directory synced; that is the order of borg and others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import Final

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.storage import direct_io

# A file system that cannot sync a directory (some FUSE and network ones) answers so; it has no such promise to keep.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
# What a file system without hard links answers; NFS and some FUSE ones pass on an odd one of their server.
_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
FILE_MODE: Final = 0o666
"""Of new files, less the umask, as any open() does."""


def save_error(what: str, path: str, error: OSError) -> SaveError:
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return SaveError(f"{path}: {what} failed: {error.strerror or error} ({code}); {_advice(error.errno)}")


def _advice(code: int | None) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free space (or raise the quota) and save again"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "check that this user may write there"
    if code == errno.EEXIST:
        return "files are never overwritten: save under another name, or delete it first"
    if code in (errno.EREMOTEIO, errno.ETIMEDOUT):
        return "check the store and the network to it, then save again"
    return "check the device and its file system (dmesg), then save again"


def rename(source: str, path: str) -> None:
    """Give a file another name, replacing what is there; durable when the directory is synced."""
    os.replace(source, path)


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


def replace_durably(path: str, content: bytes) -> None:
    """Write, sync, rename, sync the directory; the order that borg and others use."""
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


def rename_new(source: str, path: str) -> bool:
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


def sync_directory(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(fd)
