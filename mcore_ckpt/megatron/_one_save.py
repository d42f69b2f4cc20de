"""That all that one load reads is of one save: the common state and the tensors, on every rank.

A save may replace the checkpoint in the same directory at any moment. The common state is read ahead of the tensors,
each with a look at `.metadata` of its own, and by each rank for itself. What was read is known by the save's id, which
the manifest of `.metadata` carries, and is compared; that of stock has none, and is known by the file itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.directory.in_force import read_common_file
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import Manifest, shown_id
from mcore_ckpt.format.metadata_read import COMMON_FILE, METADATA_FILE
from mcore_ckpt.load.records import replaced_error
from mcore_ckpt.storage.resolve import storage_at

# Of each directory whose common state the load in progress has read: which save that was of. None outside of a load.
_common_of: ContextVar[dict[str, SaveIdentity] | None] = ContextVar("_common_of", default=None)


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """Which save something was read of: its id (empty where `.metadata` has no manifest), and the version of that
    `.metadata`.
    """

    save_id: bytes
    version: tuple[int, ...]

    @classmethod
    def of(cls, manifest: Manifest | None, version: tuple[int, ...]) -> SaveIdentity:
        """What was read by a `.metadata` of that manifest and version."""
        return cls(b"" if manifest is None else manifest.save_id, version)

    def is_same(self, other: SaveIdentity) -> bool:
        """Whether both are of one save."""
        if self.save_id or other.save_id:
            return self.save_id == other.save_id
        return self.version == other.version

    def __str__(self) -> str:
        return f"save {shown_id(self.save_id)}" if self.save_id else "a .metadata without a manifest"


def metadata_version(directory: Path) -> tuple[int, ...]:
    """Changes when the checkpoint in that directory is replaced; empty if there is none."""
    try:
        found = storage_at(directory).version(METADATA_FILE)
    except LoadError:
        return ()
    return () if found is None else tuple(found)


@contextmanager
def one_load() -> Iterator[None]:
    """What is read within is of one load."""
    token = _common_of.set({})
    try:
        yield
    finally:
        _common_of.reset(token)


def note_common(directory: Path, source: SaveIdentity) -> None:
    """The common state was read, and is of that save."""
    if (noted := _common_of.get()) is not None:
        noted[str(directory.absolute())] = source


def check_common(directory: Path, source: SaveIdentity, index: CheckpointIndex) -> None:
    """Raise `LoadError` if tensors and the common state that the same load has read are of two saves. Without
    `install()` Megatron-Core has read `common.pt` by itself: then that file is compared with the manifest.
    """
    noted = _common_of.get()
    if noted is None:
        if index.manifest is not None and COMMON_FILE in index.manifest.files:
            read_common_file(storage_at(directory), COMMON_FILE, index.manifest)
        return
    common = noted.get(str(directory.absolute()))
    if common is not None and not common.is_same(source):
        raise replaced_error(directory, f"the common state was read of {common}, the tensors of {source}")


def check_ranks(directory: Path, first_ranks: Mapping[bytes, int]) -> None:
    """Raise `LoadError` if ranks have opened several saves; of each id the first rank that has."""
    if len(first_ranks) > 1:
        (rank, save_id), (other, other_id) = sorted((rank, save_id) for save_id, rank in first_ranks.items())[:2]
        first, second = SaveIdentity(save_id, ()), SaveIdentity(other_id, ())
        raise replaced_error(directory, f"rank {rank} has read {first}, rank {other} {second}")
