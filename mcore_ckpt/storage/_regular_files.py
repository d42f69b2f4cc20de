"""Opening regular files below a directory, and nothing else.

Names come from files that nobody vouches for, and what lies under them may be a pipe that blocks for ever, or a link to
anything at all. So only regular files are opened, and below the directory no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.storage.base import check_name


def open_regular(root: str | os.PathLike[str], name: str, flags: int = 0, *, follow_links: bool = False) -> int:
    """Open a regular file below a directory for reading; returns its descriptor.

    Args:
        root: the directory, which may itself be reached through symbolic links: the caller named it.
        name: of the file, relative to it.
        flags: for `os.open`, beyond those for reading.
        follow_links: wherever they lead; for directories whose owner has named them and keeps links in them.

    Raises:
        CorruptCheckpointError: there is something else than a regular file, or a symbolic link on the way to it.
        OSError: it cannot be opened.
    """
    # It is looked at before it is opened: a pipe would block, and a device may act. (O_NONBLOCK, against the first,
    # makes file systems that keep files on tape refuse those.)
    with looked_at(root, name, follow_links) as (entry, folder, _):
        no_link = 0 if follow_links else os.O_NOFOLLOW
        fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | no_link | flags, dir_fd=folder)
    try:
        _check_regular(os.path.join(root, name), os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def looked_at(
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


def open_error(path: str, error: OSError) -> LoadError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointNotFoundError(
            f"{path}: no such file; the path is wrong, or the checkpoint is incomplete or was deleted meanwhile"
        )
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return LoadError(f"{path}: cannot be opened: {error.strerror or error} ({code})")
