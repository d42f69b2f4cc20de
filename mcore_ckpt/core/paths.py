"""Which paths name a directory of a file system, and which a directory in an object store.

Checkpoints may be at either, so their paths go through `checkpoint_path`. Paths of files go through `local_path`, which
refuses URLs: otherwise a folder called `s3:` would appear in the working directory, where no one would look for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath
from typing import Any, Final

from mcore_ckpt.core.errors import OptionError

STORE_SCHEMES: Final = ("s3", "gs", "az", "msc", "memory")
"""Of object stores that can be read and written."""

# Two letters at least; of what has been a `Path`, one of the two slashes is left.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")


class StorePath(PosixPath):
    """A directory or object in a store: joined and taken apart as a path is, and shown as the URL that it is.

    It names nothing in any file system: `exists`, `open` and so on must not be asked of it.
    """

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    def __fspath__(self) -> str:
        return str(self)

    @property
    def parent(self) -> StorePath:
        """Of a bucket, that itself."""
        return StorePath(super().parent) if len(self.parts) > 2 else self

    def absolute(self) -> StorePath:
        return self

    def is_absolute(self) -> bool:
        return True


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint's directory, as it was given; of a URL one that is shown as that.

    Raises:
        OptionError: it is a URL of a kind that is not supported.
    """
    url = store_url(path)
    return local_path(path) if url is None else StorePath(url)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file or directory, as given. Raises `OptionError` if it names an object store, or is a URL."""
    text = _text(path)
    scheme = _scheme(text)
    if scheme is None:
        return Path(text)
    if scheme == "file":
        raise OptionError(f"{text}: this is a URL, and a path is needed; leave out file://")
    if scheme in STORE_SCHEMES:
        raise OptionError(f"{text}: a directory of a file system is needed here, not one in an object store")
    known = ", ".join(f"{each}://" for each in STORE_SCHEMES if each != "memory")
    raise OptionError(
        f"{text}: this names an object store ({scheme}) that mcore_ckpt does not know; nothing was read or written. "
        f"Checkpoints are kept in directories, local or mounted, or at {known}"
    )


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether `local_path` takes this path."""
    return _scheme(_text(path)) is None


def is_supported(path: str | os.PathLike[str]) -> bool:
    """Whether `checkpoint_path` takes this path."""
    return is_local(path) or store_url(path) is not None


def store_url(path: str | os.PathLike[str]) -> str | None:
    """The URL of a directory in an object store that is supported; None for all else."""
    text = _text(path)
    scheme = _scheme(text)
    if scheme not in STORE_SCHEMES:
        return None
    return f"{scheme}://{text[len(scheme) + 1 :].lstrip('/')}"


def _text(path: Any) -> str:
    # Path-like objects of storage clients say in words what they name; what `__fspath__` gives may be a copy of it.
    said = str(path)
    return said if _scheme(said) is not None else os.fsdecode(path)


def _scheme(text: str) -> str | None:
    found = _SCHEME.match(text)
    if found is None:
        return None
    scheme, second_slash = found.groups()
    # A directory of that name may exist, and be meant.
    return scheme.lower() if second_slash or not os.path.lexists(f"{scheme}:") else None
