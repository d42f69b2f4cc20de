"""File systems that hosts share, and what they answer when another host has just replaced or removed a file.

For some seconds GlusterFS gives a name's old file from its caches, or answers ESTALE; NFS answers so of an open file
that is gone. A server that is asked knows better. So the server has to `confirm` what was opened, and a look that is
answered ESTALE is repeated for half a minute (`look_again`), as clients of NFS do. Before that the directory is listed:
clients take names from the server then. Looks only: no change of a file is asked for twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

_T = TypeVar("_T")

# GlusterFS with two bricks has been seen to answer ESTALE for 9 s when it was asked for what a healthy file holds.
# (EAGAIN: a lock that another process has, if only to look.)
_LOOKS_S: Final = 30.0
_AGAIN: Final = (errno.ESTALE, errno.EAGAIN)
_PAUSE_S: Final = 0.02
# No file has it. Clients answer from their caches about names and contents, but ask the server for this.
_ATTRIBUTE: Final = "user.mcore_ckpt"


def look_again(path: str, look: Callable[[], _T]) -> _T:
    """What `look` returns; while it is answered ESTALE it is called again, for some seconds. It changes nothing."""
    until_s = time.monotonic() + _LOOKS_S
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in _AGAIN or time.monotonic() > until_s:
                raise
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(path) or ".")
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def was_there() -> Iterator[None]:
    """A file was there right before the block; if it is gone within, it is looked at again."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), error.filename) from error


def confirm(fd: int) -> None:
    """Ask the server for the file that was opened; raises ESTALE if it is gone."""
    try:
        os.getxattr(fd, _ATTRIBUTE)
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.ENOENT):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error


def close_read(fd: int) -> None:
    """Close what was only read: whatever that is answered, nothing is lost."""
    with contextlib.suppress(OSError):
        os.close(fd)
