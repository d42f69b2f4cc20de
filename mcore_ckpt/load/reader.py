"""A checkpoint that is read: its index, slices of its tensors, its objects.

    index (.metadata)  ->  plan (requests)  ->  byte ranges (ranges, reads)  ->  reads, destinations (placement)

Megatron's shards are read by `shards.py`; `dcp/reader.py` puts DCP's protocol in front.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from mcore_ckpt.core.errors import KindMismatchError, LoadError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path, ranks_of_this_host
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.directory.in_force import DrainNote
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry
from mcore_ckpt.format.metadata_read import METADATA_FILE, open_index, read_index
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.files import FileFooters, NearestFiles, OpenFiles, ReadStats, naming
from mcore_ckpt.load.policy import ReadPolicy
from mcore_ckpt.load.reads import ItemDecoder, Located, TensorReads
from mcore_ckpt.load.records import check_apart, missing_key
from mcore_ckpt.load.requests import DtypeConversions, LoadPlan, ReadRequest
from mcore_ckpt.storage.base import FileVersion, Storage
from mcore_ckpt.storage.resolve import storage_at


class BucketedParameters(Protocol):
    """What reads the states of parameters that are stored in flat buckets (`load/parameters.py`)."""

    def __contains__(self, key: str) -> bool:
        """Whether it reads what is requested under that key."""

    def read(self, reader: CheckpointReader, shards: Iterable[Any]) -> None:
        """Fill the data of `ShardedTensor`s."""


class CheckpointReader:
    """Reads a `torch_dist` checkpoint from a directory: exactly the bytes that are requested, and checks them.

    Args:
        path: the checkpoint's directory.
        options: how to read; by default from the environment.

    Attributes:
        path: as the argument.
        options: the options in force.
        stats: what the reads have cost so far (`ReadStats`).
        conversions: what loads convert to other dtypes.
        index_version: of the file that `index` was read from, or that was there when the index was handed over.
        ranks: of this host that load as this one does, as far as the launcher tells; what several of them request is
            read through the page cache (`LoadOptions.page_cache`). 1: no other requests the same.
        parameters: reads shards that are requested in another form than they are stored in; None: there are none.
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        self.path = checkpoint_path(path)
        self.options = LoadOptions.from_environment() if options is None else options
        self.stats = ReadStats()
        self.ranks = ranks_that_load_here()
        self.parameters: BucketedParameters | None = None
        self.forget()

    def forget(self, rank: int | None = None) -> None:
        """Forget what is known, and read the checkpoint of all ranks from now on, or what one rank alone has saved."""
        self._rank = rank
        self._storage = storage_at(self.path)
        self._files = self._nearest()
        self._index: CheckpointIndex | None = None
        self.index_version: FileVersion | None = None
        self.conversions = DtypeConversions(self.options.on_dtype_mismatch, str(self.path))
        self._located: Located = {}
        self._footers = FileFooters(lambda: self.index)
        self._open: OpenFiles | None = None
        self._decoder = ItemDecoder(self._opened, self.options, self.stats)

    @contextmanager
    def _opened(self) -> Iterator[OpenFiles]:
        """Data files of this checkpoint; in `files_stay_open` those that were opened before are still open."""
        if self._open is not None:
            yield self._open
            return
        files = OpenFiles(self._files, self.options.page_cache, self._footers)
        try:
            yield files
        finally:
            files.close()

    @contextmanager
    def files_stay_open(self) -> Iterator[None]:
        """Within the block files are opened once, whatever is read of them."""
        with self._opened() as self._open:
            try:
                yield
            finally:
                self._open = None

    def _nearest(self) -> Storage | NearestFiles:
        """What opens data files: with a second tier, where they are nearest."""
        name, run = self.path.name, self.path.absolute().parent
        local, second = (
            None if tier is None else checkpoint_path(tier.rstrip("/")).absolute()
            for tier in (self.options.local_tier, self.options.drain_to)
        )
        if local not in (None, run):
            return NearestFiles(storage_at(local / name), self._storage, self._storage, lambda: self.index)
        if second not in (None, run):
            return NearestFiles(self._storage, storage_at(second / name), self._storage, lambda: self.index)
        return self._storage

    @property
    def index(self) -> CheckpointIndex:
        """What the checkpoint holds; read on first use, then kept.

        Raises:
            CheckpointNotFoundError: no such directory, or no `.metadata` in it.
            CorruptCheckpointError, UnsafePickleError: `.metadata` cannot be right.
        """
        if self._index is None:
            with open_index(self.path, self._rank) as opened:
                index = read_index(self.path, rank=self._rank, opened=opened)
                check_apart(index)
                self._index, self.index_version = index, opened.version
        return self._index

    def read_by(self, index: CheckpointIndex, version: FileVersion | None) -> None:
        """Read what that index of this directory says is there, whatever `.metadata` says; `version`: of its file."""
        self.forget(self._rank)
        self._index, self.index_version = index, version

    def other_tier_in_use(self) -> AbstractContextManager[None]:
        """Within the block no `prune` removes the checkpoint where a load finds what is not in its own directory."""
        return self._files.in_use(METADATA_FILE) if isinstance(self._files, NearestFiles) else contextlib.nullcontext()

    # ----------------------------------------------------------------------------------------------- boxes and objects

    @without_modes()
    @collector_paused()
    def read_items(self, requests: Iterable[ReadRequest]) -> None:
        """Fill destinations with slices of global tensors, in any order.

        Each stored byte is read once, however many destinations request it. Memory beyond the destinations stays
        within a window for each read in flight. When it raises, destinations may be filled in part.

        Raises:
            MissingKeyError, KindMismatchError, ShapeMismatchError, DtypeMismatchError: the checkpoint does not hold
                what is asked for (`LoadOptions.on_dtype_mismatch`); nothing has been read.
            CorruptCheckpointError: stored chunks do not hold all of a slice (nothing has been read), or an item is not
                what the index says.
            ChecksumError: a record's bytes are not those that were written.
        """
        with self.conversions.of_one_load():
            plan = LoadPlan(self.index, self.conversions, ReadPolicy.of(self._files, self.options.page_cache))
            plan.add(requests)
            self._read(plan)

    def _read(self, plan: LoadPlan) -> None:
        with naming(self._where, self._remedy):
            for turn in plan.turns():
                with self._opened() as files:
                    TensorReads(files, self._located, self.stats, self._decoder, self.index, self.ranks).run(turn)

    def _where(self) -> str:
        """The directory of the data files, as messages name it."""
        return str(self._files if isinstance(self._files, NearestFiles) else self.path)

    def _remedy(self) -> str:
        """Where else files may be that are missing, unless the options name it."""
        with contextlib.suppress(LoadError, OSError):
            if self.options.drain_to is None and (note := DrainNote.in_force(self.path)) is not None:
                return note.remedy
        return ""

    @without_modes()
    def object_bytes(self, fqn: str) -> bytes:
        """A stored object as `torch.save` made it, checksums compared, not unpickled.

        Raises:
            MissingKeyError, KindMismatchError: no object is stored under that key.
            CorruptCheckpointError, ChecksumError: its bytes are not what was written.
        """
        return next(self._object_contents([self._object_entry(fqn)]))[1]

    def _object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        with naming(self._where, self._remedy):
            yield from self._decoder.object_contents(entries)

    @without_modes()
    def read_object(self, fqn: str) -> Any:
        """A stored object, its pickle held to the allow-list.

        Raises:
            UnsafePickleError: it contains a class outside the allow-list; the message says how to allow it.
            MissingKeyError, KindMismatchError, CorruptCheckpointError, ChecksumError: as `object_bytes`.
        """
        return self.read_objects([fqn])[fqn]

    def _unpickled(self, fqn: str, content: bytes) -> Any:
        return load_object(
            content,
            self.options.allowed_classes,
            where=f"{fqn} in {self.path}",
            verify_crc=False,  # compared when it was read
        )

    @without_modes()
    def read_objects(self, fqns: Iterable[str], version: Callable[[str, bytes], bytes] | None = None) -> dict[str, Any]:
        """Stored objects by key; those that lie together are read together. Raises as `read_object`. `version`: makes
        of key and record of each what is unpickled.
        """
        keys = list(dict.fromkeys(fqns))
        loaded = {
            entry.fqn: self._unpickled(entry.fqn, content if version is None else version(entry.fqn, content))
            for entry, content in self._object_contents(self._object_entry(fqn) for fqn in keys)
        }
        return {fqn: loaded[fqn] for fqn in keys}

    def _object_entry(self, fqn: str) -> ObjectEntry:
        entry = self.index.objects.get(fqn)
        if entry is None:
            if fqn in self.index.tensors:
                raise KindMismatchError(f"{fqn}: an object is requested, but {self.path} holds a tensor under this key")
            raise missing_key(fqn, f"the checkpoint {self.path}", [*self.index.tensors, *self.index.objects])
        return entry


def ranks_that_load_here() -> int:
    """How many ranks of a job load on this host, as far as the launcher tells."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return min(ranks_of_this_host(), dist.get_world_size())
