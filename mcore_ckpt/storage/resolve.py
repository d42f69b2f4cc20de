"""Which storage a path or URL names. Nothing outside this package names a back-end."""

from __future__ import annotations

import os

from mcore_ckpt.storage._local import LocalStorage
from mcore_ckpt.storage.base import Storage

__all__ = ["storage_at"]


def storage_at(place: str | os.PathLike[str], *, follow_links: bool = False) -> Storage:
    """The storage of a directory.

    Args:
        place: path of the directory; it need not exist.
        follow_links: read files through symbolic links, too. Not for checkpoints; for what others keep as links (the
            cache of Hugging Face), in a directory that a person has named.

    Raises:
        OptionError: it names an object store, or is a URL of another kind.
    """
    return LocalStorage(place, follow_links=follow_links)
