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

STORE_SCHEMES: Final = ("s3", "gs", "az", "msc")
"""Of object stores that can be read and written."""

PARTIAL: Final = ".partial"
"""Behind the name of a directory that a conversion is making, or was making when it was interrupted."""

# Two letters at least; of what has been a `Path`, one of the two slashes is left, and none where nothing comes after.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/(/?)|\Z)")


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
        OptionError: it is empty, holds a NUL, or is a URL of a kind that is not supported or that names no bucket.
    """
    url = store_url(path)
    return local_path(path) if url is None else StorePath(url)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file or directory, as given. Raises `OptionError` if it is empty, holds a NUL, names an object
    store, or is a URL.
    """
    text = _text(path)
    scheme = _scheme(text)
    if not text:
        raise OptionError("the path is empty; `.` names the working directory")
    if "\0" in text:
        raise _has_nul(text)
    if scheme is None:
        return Path(text)
    if scheme == "file":
        raise OptionError(f"{text}: this is a URL, and a path is needed; leave out file://")
    if scheme in STORE_SCHEMES:
        raise OptionError(f"{text}: a path in a file system is needed here, not one in an object store")
    known = ", ".join(f"{each}://" for each in STORE_SCHEMES)
    raise OptionError(
        f"{text}: this names an object store ({scheme}) that mcore_ckpt does not know; nothing was read or written. "
        f"Checkpoints are kept in directories, local or mounted, or at {known}"
    )


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether `local_path` takes this path."""
    return _scheme(_text(path)) is None


def is_supported(path: str | os.PathLike[str]) -> bool:
    """Whether `checkpoint_path` takes this path."""
    try:
        checkpoint_path(path)
    except OptionError:
        return False
    return True


def store_url(path: str | os.PathLike[str]) -> str | None:
    """The URL of a directory in an object store that is supported; None for all else. Raises `OptionError` if it names
    no bucket, or holds a NUL.
    """
    text = _text(path)
    scheme = _scheme(text)
    if scheme not in STORE_SCHEMES:
        return None
    rest = text[len(scheme) + 1 :]
    # (What is not set leaves nothing behind in `s3://$BUCKET/run`.)
    if not rest.strip("/") or rest.startswith("///"):
        name = "profile" if scheme == "msc" else "bucket"
        raise OptionError(f"{text}: names no {name}: expected {scheme}://{name}/prefix; nothing was read or written")
    if "\0" in text:
        raise _has_nul(text)
    return f"{scheme}://{rest.lstrip('/')}"


def _has_nul(text: str) -> OptionError:
    return OptionError(f"{text!r}: holds a NUL character, which no path or URL may have")


def _text(path: Any) -> str:
    # Path-like objects of storage clients say in words what they name; what `__fspath__` gives may be a copy of it.
    said = str(path)
    return said if _scheme(said) is not None else os.fsdecode(path)


def _scheme(text: str) -> str | None:
    found = _SCHEME.match(text)
    if found is None:
        return None
    scheme, second_slash = found[1].lower(), found[2]
    if second_slash:
        return scheme
    if second_slash is None and scheme not in STORE_SCHEMES:
        return None
    # A directory of that name may exist, and be meant.
    return None if os.path.lexists(f"{found[1]}:") else scheme
