"""What a rank tells the coordinator of its plan: columns of numbers and a list of keys, no object graphs.

Unpickling one object for each write item is most of a coordinator's time on a large cluster; columns cost a fixed
number of buffers for each rank. The coordinator checks them (`plan_check.py`). To make `.metadata` from them takes half
a second for 20,000 tensors of two ranks, grows with the number of ranks, and needs nothing but the plans: so the
coordinator's writer process does that on a second thread (`save/writer.py`), and no training waits for it.
"""

from __future__ import annotations

import math
import pickle
import re
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import crc32_of_zeros, shift_factor
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.file_names import DataFileName, data_file_of
from mcore_ckpt.format.footer import TableColumns
from mcore_ckpt.format.index import (
    CheckpointIndex,
    StoredChunk,
    StoredItem,
    TensorEntry,
    of_different_offsets,
    parse_shadow_key,
)
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_write import ChunkFactors, MetadataEncoder
from mcore_ckpt.state.shards import original_shape

# What Adam, SGD with momentum, Muon and others call what they keep of the gradients.
_MOMENT = re.compile(r"(?:^|\.)(?:exp_avg|exp_avg_sq|momentum_buffer|exp_avg_slow|exp_inf)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """One rank's tensors, in columns."""

    keys: list[str]  # fqn of each tensor item
    dtypes: list[str]  # names of the dtypes that occur; `dtype_codes[i]` selects one for item i
    dtype_codes: array[int]
    files: list[str]  # names of the files that this rank writes; `file_codes[i]` selects one for item i
    file_bytes: list[int]  # length of each of those files
    file_codes: array[int]
    # Number of axes of item i; `boxes` holds 3 * ndims[i] numbers for it: global shape, offsets, sizes, all in
    # elements.
    ndims: array[int]
    boxes: array[int]
    places: array[int]  # for each item, offset in its file and length, in bytes

    def encode(self) -> bytes:
        """The plan as bytes, to send to the coordinator of this process group."""
        keys, *others = (getattr(self, name) for name in self.__slots__)
        columns = pickle.dumps((pickle.dumps(keys, protocol=5), *others), protocol=5)
        # A tenth of the bytes for a tenth of the time: keys and shapes are alike. The coordinator keeps those of all.
        return zlib.compress(columns, 1)

    @classmethod
    def decode(cls, data: bytes, known_keys: dict[bytes, list[str]] | None = None) -> LocalPlan:
        """The inverse of `encode`; only for bytes that a rank of this process group sent. `known_keys`: lists of plans
        decoded before, one of which this plan shares if its keys are the same.
        """
        encoded_keys, *others = pickle.loads(zlib.decompress(data))
        keys = None if known_keys is None else known_keys.get(encoded_keys)
        if keys is None:
            keys = pickle.loads(encoded_keys)
            if known_keys is not None:
                known_keys[encoded_keys] = keys
        return cls(keys, *others)


def decoded_plans(encoded: Iterable[bytes]) -> list[LocalPlan]:
    """Plans of several ranks. Those with the same keys, as most ranks of a large job have, share one list of them."""
    known_keys: dict[bytes, list[str]] = {}
    return [LocalPlan.decode(plan, known_keys) for plan in encoded]


class LocalPlanBuilder:
    """Collects a rank's items, bucket by bucket."""

    def __init__(self) -> None:
        self._plan = LocalPlan([], [], array("i"), [], [], array("i"), array("i"), array("q"), array("q"))
        self._dtype_codes: dict[str, int] = {}

    def begin_file(self, file_name: str, size_bytes: int) -> None:
        """The items that follow lie in this file."""
        self._plan.files.append(file_name)
        self._plan.file_bytes.append(size_bytes)

    def add(
        self,
        key: str,
        dtype: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        offset_bytes: int,
        length_bytes: int,
    ) -> None:
        """One chunk: box (`offsets`, `sizes`) of a tensor of `shape`, `length_bytes` at `offset_bytes`."""
        plan = self._plan
        plan.keys.append(key)
        plan.dtype_codes.append(self._code(dtype))
        plan.file_codes.append(len(plan.files) - 1)
        plan.ndims.append(len(shape))
        plan.boxes.extend(shape)
        plan.boxes.extend(offsets)
        plan.boxes.extend(sizes)
        plan.places.append(offset_bytes)
        plan.places.append(length_bytes)

    def add_file(self, file_name: str, size_bytes: int, columns: TableColumns) -> None:
        """A file, and all of its chunks, in columns."""
        plan = self._plan
        self.begin_file(file_name, size_bytes)
        plan.dtype_codes.extend(array("i", map([*map(self._code, columns.dtypes)].__getitem__, columns.dtype_codes)))
        plan.keys.extend(columns.keys)
        plan.file_codes.extend(array("i", [len(plan.files) - 1]) * len(columns.keys))
        plan.ndims.extend(array("i", columns.ndims))
        plan.boxes.extend(columns.boxes)
        plan.places.extend(columns.places)

    def _code(self, dtype: str) -> int:
        code = self._dtype_codes.get(dtype)
        if code is None:
            code = self._dtype_codes[dtype] = len(self._plan.dtypes)
            self._plan.dtypes.append(dtype)
        return code

    def build(self) -> LocalPlan:
        """The finished plan."""
        return self._plan


def index_tensors(plans: Iterable[LocalPlan]) -> tuple[dict[str, TensorEntry], array[int]]:
    """The index entries of all ranks' tensors, by key; and for each chunk its item's number among those of
    all plans.
    """
    heads: dict[str, tuple[str, tuple[int, ...], list[StoredChunk], list[int]]] = {}
    number = 0
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # offsets and sizes recur in many tensors: one of each is kept
    same = known.setdefault
    for plan in plans:
        boxes, places, files, dtypes = plan.boxes.tolist(), plan.places.tolist(), plan.files, plan.dtypes
        position = 0
        columns = zip(plan.keys, plan.ndims, plan.dtype_codes, plan.file_codes, places[::2], places[1::2], strict=True)
        for key, ndim, dtype_code, file_code, offset, length in columns:
            offsets_at = position + ndim
            sizes_at = offsets_at + ndim
            stop = sizes_at + ndim
            head = heads.get(key)
            if head is None:
                head = heads[key] = (dtypes[dtype_code], tuple(boxes[position:offsets_at]), [], [])
            item = StoredItem(files[file_code], offset, length)
            offsets, sizes = tuple(boxes[offsets_at:sizes_at]), tuple(boxes[sizes_at:stop])
            head[2].append(StoredChunk(same(offsets, offsets), same(sizes, sizes), item))
            head[3].append(number)
            number += 1
            position = stop
    entries: dict[str, TensorEntry] = {}
    order = array("I")
    for key, (dtype, shape, chunks, numbers) in heads.items():
        kept = of_different_offsets(chunks)
        entries[key] = TensorEntry(key, dtype, shape, tuple(chunks[n] for n in kept) if kept else tuple(chunks))
        order.extend([numbers[n] for n in kept] if kept else numbers)
    return entries, order


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """All ranks' tensors, checked before (`plan_check.py`): what `.metadata` is made from. Cheap to pickle."""

    encoded: tuple[bytes, ...]  # every rank's `LocalPlan`, encoded
    files: tuple[tuple[str, int], ...] = ()  # name, without the id of a save, and length in bytes of all ranks' files
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in `CheckpointIndex`
    fingerprints: bool = False  # whether `.metadata` is to have those of the tensors

    def decoded(self) -> list[LocalPlan]:
        """Every rank's plan."""
        return decoded_plans(self.encoded)

    @collector_paused()
    def encoder(self) -> MetadataEncoder:
        """Put the index of the tensors together, which takes half a second for 20,000 tensors of two ranks."""
        tensors, order = index_tensors(self.decoded())
        index = CheckpointIndex("", tensors, {}, mcore_data=self.mcore_data)
        return MetadataEncoder(index, order, chunk_factors(index) if self.fingerprints else None)


def chunk_factors(index: CheckpointIndex) -> ChunkFactors:
    """How the CRC-32 of each chunk counts in the fingerprint of its tensor."""
    factors, firsts, without = array("I"), array("q"), array("I")
    moments = []
    one = shift_factor(0)
    for number, (key, dtype, shape, chunks, _) in enumerate(index.tensors.values()):
        firsts.append(len(factors))
        own_shape = original_shape(index, key)
        if _MOMENT.search(key):
            moments.append((number, key, crc32_of_zeros(math.prod(shape) * element_bytes(dtype))))
        if parse_shadow_key(key) is not None:
            without.append(number)
        elif len(chunks) == 1 and chunks[0].sizes == shape and own_shape is None:
            factors.append(one)
            continue
        elem_bytes = element_bytes(dtype)
        for offsets, sizes, _ in chunks:
            behind = Stretch.of_chunk(shape, offsets, sizes, elem_bytes, own_shape).bytes_behind()
            factors.append(0 if behind is None else shift_factor(behind))
    return ChunkFactors(factors, firsts, without, tuple(moments))


@dataclass(frozen=True, slots=True)
class SavedPlan(GlobalPlan):
    """The plan of a checkpoint that was loaded, from its index."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)  # in files without the id of a save
    order: array[int] = field(default_factory=lambda: array("I"))  # for each chunk, its number among those of all plans

    def decoded(self) -> list[LocalPlan]:
        """Every rank's plan, up to the last rank that has a file."""
        # Rank after rank, in the order of the files' numbers.
        files = sorted(self.files, key=lambda file: _named(file[0])[:2])
        builders = [LocalPlanBuilder() for _ in range(1 + max((_named(name).rank for name, _ in files), default=-1))]
        chunks = [(entry, chunk) for entry in self.tensors.values() for chunk in entry.chunks]
        of_file: dict[str, list[tuple[TensorEntry, StoredChunk]]] = {}
        for number in sorted(range(len(chunks)), key=self.order.__getitem__):
            of_file.setdefault(chunks[number][1].item.file, []).append(chunks[number])
        for name, size_bytes in files:
            builder = builders[_named(name).rank]
            builder.begin_file(name, size_bytes)
            for entry, (offsets, sizes, item) in of_file.get(name, ()):
                builder.add(entry.fqn, entry.dtype, entry.shape, offsets, sizes, item.offset, item.length)
        return [builder.build() for builder in builders]

    def head(self, key: str) -> tuple[str, tuple[int, ...], int] | None:
        """dtype and global shape of a tensor, and the first rank that has a chunk of it; None if none has."""
        entry = self.tensors.get(key)
        return None if entry is None else (entry.dtype, entry.shape, _named(entry.chunks[0].item.file).rank)

    @collector_paused()
    def encoder(self) -> MetadataEncoder:
        """As of any plan."""
        index = CheckpointIndex("", self.tensors, {})
        return MetadataEncoder(index, self.order, chunk_factors(index) if self.fingerprints else None)


def _named(name: str) -> DataFileName:
    told = data_file_of(name)
    assert told is not None
    return told
