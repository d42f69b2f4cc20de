"""Which paths name a directory of a file system, and which name an object store, whose objects cannot be had so.

Every entrance asks `local_path`: strategies, readers and writers, the functions behind the commands. Otherwise a save
to `s3://bucket/run` would write a folder called `s3:` into the working directory, where no one would look for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import OptionError

# Two letters at least; of what has been a `Path`, one of the two slashes is left.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file or directory, as given. Raises `OptionError` if it names an object store, or is a URL."""
    text = _text(path)
    scheme = _scheme(text)
    if scheme is None:
        return Path(text)
    if scheme == "file":
        raise OptionError(f"{text}: this is a URL, and a path is needed; leave out file://")
    raise OptionError(
        f"{text}: this names an object store ({scheme}), and mcore_ckpt reads and writes directories of a file system "
        "only; nothing was read or written. Use a directory, local or mounted, and copy it to or from the store by the "
        "store's own tool; or let Megatron-Core do it without mcore_ckpt.install()"
    )


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether `local_path` takes this path."""
    return _scheme(_text(path)) is None


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
