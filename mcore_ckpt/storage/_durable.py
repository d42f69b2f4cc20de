"""Changes of a directory that last: each is complete and durable on return, or has not happened.

A file is written, synced, renamed, and its directory synced; that is the order of borg and others.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from typing import Final

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.storage import direct_io

# A file system that cannot sync a directory (some FUSE and network ones) answers so; it has no such promise to keep.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
# What a file system without hard links answers; NFS and some FUSE ones pass on an odd one of their server.
_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# What another process is just publishing under the same name, as two do with a note, is left alone for so long.
_OTHERS_S: Final = 600.0
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


def link(source: str, path: str) -> bool:
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
            write_new(path, content)
        except FileExistsError:
            return False
    return True


def replace_durably(path: str, content: bytes, through: str | None = None) -> None:
    """Write, sync, rename, sync the directory; the order that borg and others use, and the way back.

    If the last step fails, the rename has happened but may not outlast a power cut. A caller that gets the error
    removes the files that the new content names, so the old content has to come back.
    """
    directory, base = os.path.split(path)
    prefix = f".{base}."
    temporary = through or os.path.join(directory, f"{prefix}{secrets.token_hex(8)}.tmp")
    old = os.path.join(directory, f"{prefix}{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if through is None else os.O_TRUNC)
    try:
        fd = os.open(temporary, flags, FILE_MODE)
        try:
            direct_io.write_all(fd, memoryview(content), 0)
            os.fsync(fd)
            now_s = os.fstat(fd).st_ctime  # by the clock of the file system
        finally:
            os.close(fd)
        # What a process has left that died in here; who has a token is alone. Not at the end: who reads the old common
        # state next to the new `.metadata` waits for this to return.
        _remove_left(directory, prefix, temporary, math.inf if through is not None else now_s - _OTHERS_S)
        # Without hard links there is no way back; then a failing sync leaves the new content in place.
        with contextlib.suppress(OSError):
            os.link(path, old)
        existed = os.path.exists(path)
        os.replace(temporary, path)
        try:
            sync_directory(directory)
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


def _remove_left(directory: str, prefix: str, own: str, before_s: float) -> None:
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory or "."):
            path = os.path.join(directory, entry)
            if entry.startswith(prefix) and entry.endswith(".tmp") and path != own:
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    # When it got this name: what stands under it may have been written long before.
                    if os.lstat(path).st_ctime <= before_s:
                        os.unlink(path)


def make_durably(path: str, content: bytes) -> bool:
    """Write, sync, link, sync the directory; False if the name is taken.

    Where there are no hard links, a file that another process makes between the last look and the renaming is replaced.
    """
    directory, base = os.path.split(path)
    temporary = os.path.join(directory, f".{base}.{secrets.token_hex(8)}.tmp")
    write_new(temporary, content)
    try:
        if not rename_new(temporary, path):
            return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_directory(directory)
    return True


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
