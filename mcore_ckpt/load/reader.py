"""A checkpoint that is read: its index, slices of its tensors, its objects; and Megatron's shards, of any layout.

    index (.metadata)  ->  plan (requests)  ->  byte ranges (ranges, reads)  ->  reads, destinations

`dcp/reader.py` puts DCP's protocol in front. Stretches of flattened tensors, as Megatron-Core 0.12 to 0.15 stored
optimizer state (`state/shards.py`), go from any stored form to any requested one: the same grid directly; another grid,
or none, through the coordinates of the parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from mcore_ckpt.core.boxes import Box, flat_boxes, intersect, relative, strides_of
from mcore_ckpt.core.errors import CorruptCheckpointError, KindMismatchError, LoadError, OptionError, ShapeMismatchError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path, ranks_of_this_host
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.directory.in_force import DrainNote
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry
from mcore_ckpt.format.metadata_read import METADATA_FILE, read_index_and_version
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reads import ItemDecoder, Located, TensorReads
from mcore_ckpt.load.records import NearestFiles, OpenFiles, ReadStats, check_apart, missing_key, naming
from mcore_ckpt.load.requests import DtypeConversions, LoadPlan, ReadRequest, narrow, tensor_entry
from mcore_ckpt.state.shards import local_box, stored_form
from mcore_ckpt.storage.base import FileVersion, Storage
from mcore_ckpt.storage.resolve import storage_at


class BucketedParameters(Protocol):
    """What reads the states of parameters that are stored in flat buckets (`megatron/other_division.py`)."""

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
        # With a second tier, data files are opened where they are nearest.
        name, run = self.path.name, self.path.absolute().parent
        local, second = (
            None if tier is None else checkpoint_path(tier.rstrip("/")).absolute()
            for tier in (self.options.local_tier, self.options.drain_to)
        )
        self._files: Storage | NearestFiles = self._storage
        self._no_second = ""
        if local not in (None, run):
            self._files = NearestFiles(storage_at(local / name), self._storage, self._storage, lambda: self.index)
        elif second not in (None, run):
            try:
                self._files = NearestFiles(self._storage, storage_at(second / name), self._storage, lambda: self.index)
            except OptionError as error:  # of which a load that finds all files here needs to know nothing
                self._no_second = f"the second tier, {second}, cannot be opened: {error}"
        self._index: CheckpointIndex | None = None
        self.index_version: FileVersion | None = None
        self.conversions = DtypeConversions(self.options.on_dtype_mismatch, str(self.path))
        self._located: Located = {}
        self._checked: set[str] = set()  # data files that have been compared with the index
        self._open: OpenFiles | None = None
        self._decoder = ItemDecoder(self.files_stay_open, self.options, self.stats)

    @contextmanager
    def files_stay_open(self) -> Iterator[OpenFiles]:
        """Data files of this checkpoint: within the outermost block they are opened once, whatever is read of them."""
        if self._open is not None:
            yield self._open
            return
        self._open = files = OpenFiles(self._files, self.options.page_cache, lambda: self.index, self._checked)
        try:
            yield files
        finally:
            self._open = None
            files.close()

    @property
    def index(self) -> CheckpointIndex:
        """What the checkpoint holds; read on first use, then kept. Raises `LoadError`."""
        if self._index is None:
            index, version = read_index_and_version(self.path, rank=self._rank)
            check_apart(index)
            self._index, self.index_version = index, version
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
        """Fill destinations with slices of global tensors, each stored byte read once, a window for each read in
        flight. Raises `MissingKeyError`, `KindMismatchError`, `ShapeMismatchError` or `DtypeMismatchError` before
        anything is read; `CorruptCheckpointError` for stored chunks and items that cannot be, `ChecksumError` for bytes
        that are not as written: some destinations may be filled then.
        """
        with self.conversions.of_one_load(), self.files_stay_open() as files:
            plan = LoadPlan(self.index, self.conversions, files.policy)
            plan.add(requests)
            for turn in plan.turns():
                with naming(self._where, self._remedy):
                    TensorReads(files, self._located, self.stats, self._decoder, self.index, self.ranks).run(turn)

    def _where(self) -> str:
        """The directory of the data files, as messages name it."""
        return str(self._files if isinstance(self._files, NearestFiles) else self.path)

    def _remedy(self) -> str:
        """Where else files may be that are missing, unless the options name it, or why it cannot be opened."""
        with contextlib.suppress(LoadError, OSError):
            if self.options.drain_to is None and (note := DrainNote.in_force(self.path)) is not None:
                return note.remedy
        return self._no_second

    @without_modes()
    def object_bytes(self, fqn: str) -> bytes:
        """A stored object as `torch.save` made it, checksums compared, not unpickled. Raises `LoadError`."""
        return next(self._object_contents([self._object_entry(fqn)]))[1]

    def _object_contents(self, entries: Iterable[ObjectEntry]) -> Iterator[tuple[ObjectEntry, bytes]]:
        with naming(self._where, self._remedy):
            yield from self._decoder.object_contents(entries)

    @without_modes()
    def read_object(self, fqn: str) -> Any:
        """A stored object, its pickle held to the allow-list: `UnsafePickleError` otherwise; also as `object_bytes`."""
        return self.read_objects([fqn])[fqn]

    @without_modes()
    def read_objects(self, fqns: Iterable[str], version: Callable[[str, bytes], bytes] | None = None) -> dict[str, Any]:
        """Stored objects by key. Raises as `read_object`. `version`: makes of key and record what is unpickled."""
        loaded = dict.fromkeys(fqns)
        for entry, content in self._object_contents(map(self._object_entry, loaded)) if loaded else ():
            own = content if version is None else version(entry.fqn, content)
            loaded[entry.fqn] = self._unpickled(entry.fqn, own)
        return loaded

    def _unpickled(self, fqn: str, content: bytes) -> Any:
        where = f"{fqn} in {self.path}"  # (its CRC-32 was compared when it was read)
        return load_object(content, self.options.allowed_classes, where=where, verify_crc=False)

    def _object_entry(self, fqn: str) -> ObjectEntry:
        entry = self.index.objects.get(fqn)
        if entry is None:
            if fqn in self.index.tensors:
                raise KindMismatchError(f"{fqn}: an object is requested, but {self.path} holds a tensor under this key")
            keys = [*self.index.tensors, *self.index.objects]
            raise missing_key(fqn, f"the checkpoint {self.path}", keys, self.index.removed)
        return entry


def ranks_that_load_here() -> int:
    """How many ranks of a job load on this host, as far as the launcher tells."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return min(ranks_of_this_host(), dist.get_world_size())


# Bytes of stretches that are spread over their destinations at once.
_BATCH_BYTES = 64 * 1024 * 1024
# What a piece takes besides its elements, as a request and with all that leads to it.
_PIECE_BYTES = 2048
# A chunk is saved for a cell or a part of one; some may have been made one chunk since, but never more than so many.
_MAX_CELLS_OF_A_CHUNK = 16384


# Fields of a shard whose data are a slice of the global tensor as they are.
_request_of = operator.attrgetter("key", "data", "global_offset", "local_shape", "global_shape")


@collector_paused()
def read_shards(reader: CheckpointReader, shards: Iterable[Any]) -> None:
    """Fill Megatron's `ShardedTensor`s, flattened or not, of any layout; those without data get some on the CPU."""
    with reader.conversions.of_one_load():
        if (parameters := reader.parameters) is not None:
            shards = list(shards)
            parameters.read(reader, [shard for shard in shards if shard.key in parameters])
            shards = [shard for shard in shards if shard.key not in parameters]
        index = reader.index
        direct: list[ReadRequest] = []  # as they are
        spread: list[ReadRequest] = []  # slices of a parameter, of its own shape, stored flattened in other stretches
        for shard in shards:
            flattened = getattr(shard, "flattened_range", None) is not None
            own_shape = index.original_shape(shard.key) if index.mcore_data else None
            may_differ = shard.allow_shape_mismatch
            if not (flattened or own_shape or shard.prepend_axis_num or may_differ or shard.data is None):
                direct.append(ReadRequest(*_request_of(shard)))
                continue
            # Where the stored tensor may be smaller than the requested one, the rest is zeros.
            if shard.data is None:
                shard.init_data("cpu", torch.zeros if may_differ else torch.empty)
            elif may_differ:
                shard.data.detach().zero_()
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
                    f"{shard.key}: {reader.path} holds a tensor of global shape {list(own_shape)} (flattened), "
                    f"wanted is {list(shape)}; load into a model of the shape that was saved"
                )
            else:
                spread += [ReadRequest(shard.key, part, *box, own_shape) for box, part in _boxes(shard)]
        reader.read_items(direct)
        if spread:
            _read_spread(reader, spread)


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


def _read_spread(reader: CheckpointReader, wanted: Iterable[ReadRequest]) -> None:
    """Read the stretches that hold the wanted slices, some at a time, and copy the slices out of them."""
    ranges = itertools.chain.from_iterable(_flat_ranges(reader, one) for one in wanted)
    for batch in batches(ranges, lambda one: one.stored[2] * one.target.element_size() + _PIECE_BYTES, _BATCH_BYTES):
        requests = []
        for (key, offsets, count, shape), target, _ in batch:
            sizes = (*(1 for _ in offsets[1:]), count)
            requests.append(ReadRequest(key, torch.empty(sizes, dtype=target.dtype), offsets, sizes, shape))
        reader.read_items(requests)
        for request, piece in zip(requests, batch, strict=True):
            piece.target.copy_(torch.as_strided(request.tensor, piece.target.shape, piece.strides, 0))


def _flat_ranges(reader: CheckpointReader, wanted: ReadRequest) -> Iterator[_FlatRange]:
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
