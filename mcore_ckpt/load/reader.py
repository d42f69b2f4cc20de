"""The load half of the story, from a checkpoint's directory to filled tensors.

    index (.metadata)  ->  plan (requests)  ->  byte ranges (ranges, reads)  ->  reads, destinations (placement)

`FileSystemReader` is DCP's `StorageReader`, so `dcp.load(sd, storage_reader=FileSystemReader(path))` works; what else
loads (the strategies, the optimizer's state, the offline commands) asks it for boxes and objects directly.

`read_shards` reads Megatron's shards. Stretches of flattened tensors, as Megatron-Core 0.12 to 0.15 stored optimizer
state (`state/shards.py`), go from any stored form to any requested one: the same grid directly; another grid, or none,
through the parameter's own coordinates.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import operator
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import planner as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mcore_ckpt.core.boxes import Box, covers, flat_boxes, intersect, relative, strides_of
from mcore_ckpt.core.errors import CorruptCheckpointError, KindMismatchError, LoadError, OptionError, ShapeMismatchError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path, is_supported, ranks_of_this_host
from mcore_ckpt.core.process import collector_paused, run_concurrently
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, TensorEntry
from mcore_ckpt.format.integrity import shown_id
from mcore_ckpt.format.metadata_read import METADATA_FILE, index_name, open_index, read_index
from mcore_ckpt.format.safe_pickle import ANY_CLASS, load_object
from mcore_ckpt.load import files as data_files
from mcore_ckpt.load.files import FileFooters, NearestFiles, OpenFiles, ReadStats, naming
from mcore_ckpt.load.placement import narrow
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reads import ItemDecoder, Located, TensorReads
from mcore_ckpt.load.records import check_apart, missing_key, of_one_save, replaced_error
from mcore_ckpt.load.requests import DtypeConversions, LoadPlan, ReadRequest, check_planned, stored_dtype, tensor_entry
from mcore_ckpt.state.shards import local_box, stored_form
from mcore_ckpt.storage.base import FileVersion, Storage
from mcore_ckpt.storage.resolve import storage_at

# Of destinations that a planner makes buffers for, and of stretches that are spread over theirs, at once.
_BATCH_BYTES = 64 * 1024 * 1024


class FileSystemReader(StorageReader):
    """Reads a `torch_dist` checkpoint from a directory: exactly the bytes that are requested, and checks them.

    Args:
        path: the checkpoint's directory.
        _extension_registry: DCP's, for stream transforms; refused.
        options: how to read; by default from the environment.

    Raises:
        OptionError: an `_extension_registry` is given.

    Attributes:
        stats: what the reads have cost so far (`ReadStats`).
        options: the options in force.
        conversions: what loads convert to other dtypes.
        index_version: of the file that `index` was read from, or that was there when the index was handed over.
        ranks: of this host that load as this one does, as far as the launcher tells; what several of them request is
            read through the page cache (`LoadOptions.page_cache`). 1: no other requests the same.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        options: LoadOptions | None = None,
    ) -> None:
        super().__init__()
        self._load = ExitStack()
        if _extension_registry is not None:
            raise OptionError(
                "stream transforms (`_extension_registry`) are not supported; read with DCP's own FileSystemReader. "
                "Options are passed as `options=`"
            )
        self.options = LoadOptions.from_environment() if options is None else options
        self.stats = ReadStats()
        self.ranks = ranks_that_load_here()
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what is known of the checkpoint, and read from another one if `checkpoint_id` names it."""
        if checkpoint_id is not None and str(checkpoint_id):
            self.path = checkpoint_path(checkpoint_id)
        self._forget(None)
        self.load_id = str(uuid.uuid4())

    def _forget(self, rank: int | None) -> None:
        """Read the checkpoint of all ranks from now on, or that of one rank."""
        self._load.close()
        self._load = ExitStack()
        self._rank = rank
        self._storage = storage_at(self.path)
        self._files = self._nearest()
        self._index: CheckpointIndex | None = None
        self.index_version: FileVersion | None = None
        self._metadata: Metadata | None = None
        self.conversions = DtypeConversions(self.options.on_dtype_mismatch, str(self.path))
        self._located: Located = {}
        self._covered: set[str] = set()  # keys of tensors of which no chunk is missing
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
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory that is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for what can be a directory of a file system; see `checkpoint_path`."""
        return is_supported(checkpoint_id)

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
            plan = LoadPlan(self.index, self.conversions, data_files.WINDOW_BYTES)
            plan.add(requests)
            self._read(plan)

    def _read(self, plan: LoadPlan) -> None:
        with naming(self._where):
            for turn in plan.turns():
                with self._opened() as files:
                    TensorReads(files, self._located, self.stats, self._decoder, self.index, self.ranks).run(turn)

    def _where(self) -> str:
        """The directory of the data files, as messages name it."""
        return str(self._files if isinstance(self._files, NearestFiles) else self.path)

    @without_modes()
    def object_bytes(self, fqn: str) -> bytes:
        """A stored object as `torch.save` made it, checksums compared, not unpickled.

        Raises:
            MissingKeyError, KindMismatchError: no object is stored under that key.
            CorruptCheckpointError, ChecksumError: its bytes are not what was written.
        """
        return next(self._object_contents([self._object_entry(fqn)]))[1]

    def _object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        with naming(self._where):
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

    # ---------------------------------------------------------------------------------------------- DCP's StorageReader

    @without_modes()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's `Metadata` of the checkpoint, which is read at each call: it may have been replaced since.

        Args:
            args: not used.
            kwargs: `rank`, which DCP gives where there is no `.metadata`: then of what that rank has saved with
                `use_collectives=False`.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, UnsafePickleError: as `index`.
        """
        self._forget(kwargs.get("rank"))
        run_concurrently(self._storage.asks_at_once, self._begin_load, lambda: self.index)
        return self.dcp_metadata()

    def dcp_metadata(self) -> Metadata:
        """DCP's `Metadata` of the index in force, which is read if there is none. Raises as `index`."""
        if self._metadata is None:
            from mcore_ckpt.state.torch_classes import to_dcp_metadata

            self._metadata = to_dcp_metadata(self.index)
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def other_tier_in_use(self) -> AbstractContextManager[None]:
        """Within the block no `prune` removes the checkpoint where a load finds what is not in its own directory."""
        return self._files.in_use(METADATA_FILE) if isinstance(self._files, NearestFiles) else contextlib.nullcontext()

    def _begin_load(self) -> None:
        """Until `read_data` has ended, or this reader is deleted, no `prune` removes the checkpoint."""
        with ExitStack() as begun:
            begun.enter_context(self._storage.in_use(METADATA_FILE))
            if self._index is not None:
                begun.enter_context(self.other_tier_in_use())
            self._load.close()  # of a load that was begun before; after the other, so that there is no moment between
            self._load = begun.pop_all()

    @without_modes()
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata that this load goes by: what this reader has read, or what DCP or a caller hands over.

        Raises:
            CorruptCheckpointError: it does not say where things lie.
        """
        index = self._index
        if index is None or metadata is not self._metadata or not _has_keys_of(metadata, index):
            from mcore_ckpt.state.torch_classes import from_dcp_metadata

            index = from_dcp_metadata(metadata, self.path)
            check_apart(index)
            self.read_by(index, self._storage.version(index_name(self._rank)))
            self._metadata = metadata
        self._begin_load()

    def read_by(self, index: CheckpointIndex, version: FileVersion | None) -> None:
        """Read what that index of this directory says is there, whatever `.metadata` says; `version`: of its file."""
        self._forget(self._rank)
        self._index, self.index_version = index, version

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """The plan, with the save that it is of."""
        return replace(plan, storage_data=self._save())

    def _save(self) -> str:
        """The id of the save that the index in force is of; empty if it has none, or is of this rank alone."""
        if self._rank is not None:
            return ""
        if self.index.manifest is not None:
            return shown_id(self.index.manifest.save_id)
        return str((self.index.storage_meta or {}).get("save_id") or "")

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """The plans.

        Raises:
            LoadError: ranks go by the indexes of two saves.
        """
        saves = {plan.storage_data: rank for rank, plan in enumerate(plans) if plan.storage_data}
        if len(saves) > 1:
            (first, rank), (second, other) = list(saves.items())[:2]
            what = f"rank {rank} has read the index of save {first}, rank {other} that of {second}"
            raise replaced_error(self.path, what)
        return [replace(plan, storage_data=None) for plan in plans]

    @without_modes()
    def read_data(self, plan: dcp.LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into what its planner gives as destinations.

        Raises:
            ShapeMismatchError, DtypeMismatchError: a destination has another shape than what is stored, or another
                dtype (`LoadOptions.on_dtype_mismatch`).
            CorruptCheckpointError, ChecksumError, UnsafePickleError: stored bytes cannot be right, or not be trusted.
        """
        self._begin_load()
        try:
            with of_one_save(self.index, self.index_version, self._rank), self.files_stay_open():
                self._read_data(plan, planner)
        finally:
            self._load.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_data(self, plan: dcp.LoadPlan, planner: LoadPlanner) -> None:
        if _is_default(planner, "create_local_plan", "create_global_plan", "finish_plan"):
            where = f"{self.path}" if self._rank is None else f"{self.path} of rank {self._rank}"
            check_planned(plan.items, planner.state_dict, self.index.tensors, where)
        objects: dict[str, list[ReadItem]] = {}
        tensors: list[ReadItem] = []
        for read_item in plan.items:
            if read_item.type == LoadItemType.BYTE_IO:
                objects.setdefault(read_item.storage_index.fqn, []).append(read_item)
            else:
                tensors.append(read_item)
        self._hand_over_objects(objects, planner)
        # A planner may make a buffer for each destination and keep it until the commit (to dequantize from, say): those
        # of a few items at a time must do.
        in_place = _is_default(planner, "resolve_tensor", "transform_tensor", "commit_tensor")
        with self.conversions.of_one_load():
            for batch in [tensors] if in_place else batches(tensors, self._destination_bytes, _BATCH_BYTES):
                destinations: list[torch.Tensor] = []
                self.read_items(self._planned(batch, planner, destinations))
                for read_item, tensor in zip(batch, destinations, strict=True):
                    planner.commit_tensor(read_item, tensor)

    @collector_paused()
    def _planned(
        self, items: Iterable[ReadItem], planner: LoadPlanner, destinations: list[torch.Tensor]
    ) -> list[ReadRequest]:
        """What DCP has planned, with the planner's destinations, which are appended to `destinations`."""
        requests = []
        for read_item in items:
            tensor = planner.resolve_tensor(read_item)
            destinations.append(tensor)
            stored, sizes = read_item.storage_index, tuple(read_item.lengths)
            entry = tensor_entry(stored.fqn, self.index)
            if sizes != entry.shape:
                self._check_covered(entry)
            offsets = tuple(map(operator.add, stored.offset or (), read_item.storage_offsets))
            requests.append(ReadRequest(stored.fqn, tensor, offsets, sizes, entry.shape))
        return requests

    def _check_covered(self, entry: TensorEntry) -> None:
        """Raise `CorruptCheckpointError` if a stored chunk is missing: DCP plans the overlaps that it finds, and the
        destination would stay as it was.
        """
        if entry.fqn in self._covered or self._rank is not None:
            return
        problem = covers(entry.shape, [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if problem:
            raise CorruptCheckpointError(
                f"{entry.fqn}: the stored chunks do not make up the tensor: {problem}. The save of {self.path} did not"
                " finish or its index is damaged; load an earlier checkpoint"
            )
        self._covered.add(entry.fqn)

    def _hand_over_objects(self, objects: dict[str, list[ReadItem]], planner: LoadPlanner) -> None:
        for entry, content in self._object_contents(self._object_entry(fqn) for fqn in objects):
            given = content if ANY_CLASS in self.options.allowed_classes else self._pickled_again(entry.fqn, content)
            for read_item in objects[entry.fqn]:
                planner.load_bytes(read_item, io.BytesIO(given))

    def _pickled_again(self, fqn: str, content: bytes) -> bytes:
        """An object in bytes of our own, for a planner that unpickles without restraint, as DCP's does: torch reads the
        stored bytes in other ways (the archive at the other end), so what was checked need not be what it finds.
        """
        found = self._unpickled(fqn, content)
        saved = io.BytesIO()
        try:
            torch.save(found, saved)
        except Exception as error:
            raise LoadError(
                f"{fqn} in {self.path}: was read, but cannot be handed to the load planner ({type(error).__name__}: "
                f"{error!s:.200}); read it with `open_checkpoint({str(self.path)!r}).objects`"
            ) from error
        return saved.getvalue()

    def _destination_bytes(self, read_item: ReadItem) -> int:
        entry = tensor_entry(read_item.storage_index.fqn, self.index)
        return math.prod(read_item.lengths) * stored_dtype(entry).itemsize


def ranks_that_load_here() -> int:
    """How many ranks of a job load on this host, as far as the launcher tells."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return min(ranks_of_this_host(), dist.get_world_size())


def _has_keys_of(metadata: Metadata, index: CheckpointIndex) -> bool:
    """Whether nobody has renamed, added or removed keys of the metadata that were made of an index."""
    return metadata.state_dict_metadata.keys() == {*index.tensors, *index.objects}


def _is_default(planner: LoadPlanner, *methods: str) -> TypeGuard[DefaultLoadPlanner]:
    """Whether these methods of a planner are those of DCP's default planner."""
    kind = type(planner)
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(kind, name) is getattr(DefaultLoadPlanner, name) for name in methods
    )


# What a piece takes besides its elements, as a request and with all that leads to it.
_PIECE_BYTES = 2048
# A chunk is saved for a cell or a part of one; some may have been made one chunk since, but never more than so many.
_MAX_CELLS_OF_A_CHUNK = 16384


def destination(shard: Any) -> torch.Tensor:
    """The memory that a `ShardedTensor` is loaded into, detached: its own, or new on the CPU. Zeros where the stored
    tensor may be smaller than the requested one.
    """
    if shard.data is None:
        shard.init_data("cpu", torch.zeros if shard.allow_shape_mismatch else torch.empty)
    elif shard.allow_shape_mismatch:
        shard.data.detach().zero_()
    tensor: torch.Tensor = shard.data.detach()
    return tensor


@collector_paused()
def read_shards(reader: FileSystemReader, shards: Iterable[Any]) -> None:
    """Fill the data of Megatron's `ShardedTensor`s, flattened or not, of any layout; those without data get some on the
    CPU. Raises as `FileSystemReader.read_items`.
    """
    with reader.conversions.of_one_load():
        direct, spread = _requests(reader, shards)
        reader.read_items(direct)
        _read_spread(reader, spread)


# Of a shard whose data are a slice of the global tensor as they are.
_request_of = operator.attrgetter("key", "data", "global_offset", "local_shape", "global_shape")


def _requests(reader: FileSystemReader, shards: Iterable[Any]) -> tuple[list[ReadRequest], list[ReadRequest]]:
    """What is read of some shards as they are; and what is stored flattened in other stretches, as slices of the
    parameter, of its own shape.
    """
    index = reader.index
    direct: list[ReadRequest] = []
    spread: list[ReadRequest] = []
    for shard in shards:
        flattened = getattr(shard, "flattened_range", None) is not None
        own_shape = index.original_shape(shard.key) if index.mcore_data else None
        may_differ = shard.allow_shape_mismatch
        if not (flattened or own_shape or shard.prepend_axis_num or may_differ or shard.data is None):
            direct.append(ReadRequest(*_request_of(shard)))
            continue
        destination(shard)
        shape, entry = tuple(shard.global_shape), index.tensors.get(shard.key)
        if own_shape is None:
            wanted_shape = None if may_differ else shape
            direct += [ReadRequest(shard.key, part, *box, wanted_shape, may_differ) for box, part in _boxes(shard)]
        elif flattened and own_shape == shape and entry is not None and entry.shape == stored_form(shard).shape:
            form = stored_form(shard)
            tensor = shard.data.detach().view(form.sizes)
            direct.append(ReadRequest(shard.key, tensor, form.offsets, form.sizes, form.shape))
        elif own_shape != shape and not may_differ:
            raise ShapeMismatchError(
                f"{shard.key}: {reader.checkpoint_id} holds a tensor of global shape {list(own_shape)} (flattened), "
                f"wanted is {list(shape)}; load into a model of the shape that was saved"
            )
        else:
            spread += [ReadRequest(shard.key, part, *box, own_shape) for box, part in _boxes(shard)]
    return direct, spread


def _boxes(shard: Any) -> list[tuple[Box, torch.Tensor]]:
    """What a shard holds, as boxes of the global parameter, each with the view of its data that has the box's shape."""
    data = shard.data.detach()
    stretch = getattr(shard, "flattened_range", None)
    if stretch is None:
        sizes = local_box(shard)
        return [(Box(tuple(shard.global_offset), sizes), data.view(sizes) if shard.prepend_axis_num else data)]
    found = []
    position = 0
    for box in flat_boxes(local_box(shard), stretch.start, stretch.stop):
        count = math.prod(box.sizes)
        offsets = tuple(own + base for own, base in zip(box.offsets, shard.global_offset, strict=True))
        found.append((Box(offsets, box.sizes), data[position : position + count].view(box.sizes)))
        position += count
    return found


class _FlatRange(NamedTuple):
    """Some elements of one flattened cell, and where they go."""

    stored: tuple[str, tuple[int, ...], int, tuple[int, ...]]  # key, offsets, how many, shape of the stored tensor
    target: torch.Tensor
    strides: tuple[int, ...]  # in which the elements are those of `target`


def _read_spread(reader: FileSystemReader, wanted: Iterable[ReadRequest]) -> None:
    """Read the stretches that hold the wanted slices, some at a time, and copy the slices out of them."""
    ranges = itertools.chain.from_iterable(_flat_ranges(reader, one) for one in wanted)
    for batch in batches(ranges, _held_bytes, _BATCH_BYTES):
        requests = []
        for (key, offsets, count, shape), target, _ in batch:
            sizes = (*(1 for _ in offsets[1:]), count)
            requests.append(ReadRequest(key, torch.empty(sizes, dtype=target.dtype), offsets, sizes, shape))
        reader.read_items(requests)
        for request, piece in zip(requests, batch, strict=True):
            piece.target.copy_(torch.as_strided(request.tensor, piece.target.shape, piece.strides, 0))


def _held_bytes(piece: _FlatRange) -> int:
    return piece.stored[2] * piece.target.element_size() + _PIECE_BYTES


def _flat_ranges(reader: FileSystemReader, wanted: ReadRequest) -> Iterator[_FlatRange]:
    key, own_shape, box = wanted.fqn, wanted.global_shape or (), Box(wanted.offsets, wanted.sizes)
    entry = tensor_entry(key, reader.index)
    grid = entry.shape[:-1]
    if len(grid) != len(own_shape) or any(n <= 0 or size % n for size, n in zip(own_shape, grid, strict=True)):
        raise CorruptCheckpointError(
            f"{key}: stored as a grid {list(grid)} of flattened boxes of a tensor {list(own_shape)}, which it "
            "does not divide; `.metadata` contradicts itself"
        )
    if math.prod(grid) > _MAX_CELLS_OF_A_CHUNK * max(1, len(entry.chunks)):
        raise CorruptCheckpointError(
            f"{key}: stored as a grid {list(grid)} of flattened boxes, in {len(entry.chunks)} chunks, each of "
            "which was one box or a part of it when it was saved; `.metadata` contradicts itself"
        )
    cell = tuple(size // n for size, n in zip(own_shape, grid, strict=True))
    strides = strides_of(cell)
    ranges = [
        range(start // size, min(-(-(start + extent) // size), n))
        for start, extent, size, n in zip(*box, cell, grid, strict=True)
    ]
    for place in itertools.product(*ranges):
        cell_box = Box(tuple(map(operator.mul, place, cell)), cell)
        share = intersect(cell_box, box)
        if share is None:
            continue
        first = sum(map(operator.mul, relative(share, cell_box.offsets).offsets, strides))
        count = 1 + sum((n - 1) * stride for n, stride in zip(share.sizes, strides, strict=True))
        target = narrow(wanted.tensor, relative(share, box.offsets))
        yield _FlatRange((key, (*place, first), count, entry.shape), target, strides)
