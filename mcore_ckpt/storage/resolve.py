"""Which storage a path or URL names. Nothing outside this package names a back-end."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_ckpt.core.options import store_url
from mcore_ckpt.storage._local import LocalStorage
from mcore_ckpt.storage.base import Storage


def storage_at(place: str | os.PathLike[str], *, follow_links: bool = False) -> Storage:
    """The storage of a directory.

    Args:
        place: path of the directory, or URL of one in an object store; it need not exist.
        follow_links: read files through symbolic links, too. Not for checkpoints; for what others keep as links (the
            cache of Hugging Face), in a directory that a person has named.

    Raises:
        OptionError: it is a URL of another kind, or what it takes to reach that store is missing.
    """
    url = store_url(place)
    if url is None:
        return LocalStorage(place, follow_links=follow_links)
    from mcore_ckpt.storage._store_urls import open_store  # (importing it takes a while)

    return open_store(url)


def path_in_file_system(place: Path) -> Path:
    """The path by which the file system knows a directory, also of a URL whose profile names one; of all else `place`.
    Raises `OptionError` as `storage_at` does.
    """
    storage = storage_at(place)
    return storage.root if isinstance(storage, LocalStorage) else place
