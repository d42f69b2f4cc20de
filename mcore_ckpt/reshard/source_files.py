"""The files of a source, which another program may change while they are read."""

from __future__ import annotations

from collections.abc import Collection

from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import MADE_HERE


class SourceFiles:
    """The files of the tensors with these keys (default: all, and all objects), as they are now.

    `states`: length, time of change in nanoseconds, and what tells versions apart, by name. Raises
    `CheckpointNotFoundError` if one is missing.
    """

    def __init__(self, index: CheckpointIndex, keys: Collection[str] | None = None) -> None:
        self._index, self._keys = index, keys
        self.states = self._look()

    def _look(self) -> dict[str, list[int]]:
        index, keys = self._index, self._keys
        entries = index.tensors.values() if keys is None else (index.tensors[key] for key in keys)
        files = {chunk.item.file for entry in entries for chunk in entry.chunks}
        if keys is None:
            files |= {entry.item.file for entry in index.objects.values()}
        found, storage = {}, storage_at(index.path, follow_links=True)
        for file in sorted(files - {MADE_HERE}):
            version = storage.version(file)
            if version is None:
                raise CheckpointNotFoundError(
                    f"{storage.path(file)}: the index names this file, but it cannot be found; the checkpoint is "
                    f"incomplete, `mcore-ckpt verify {index.path}` lists what is missing"
                )
            found[file] = [version.size_bytes, version.modified_ns, version.number]
        return found

    def refuse_changes(self) -> None:
        """Raise `LoadError` if the files are not as they were: what was read may be of two saves, each part sound."""
        try:
            if self._look() == self.states:
                return
        except CheckpointNotFoundError as error:
            raise replaced_error(self._index.path) from error
        raise replaced_error(self._index.path)


def replaced_error(source: str) -> LoadError:
    """That a source is not the checkpoint any more that it was at first."""
    return LoadError(
        f"{source}: another program has replaced the checkpoint, or changed its files, while it was read. What was "
        "read may be of two saves, and the target does not get its name. Run the command again when no job saves "
        "there, with --restart or to a target of another name"
    )
