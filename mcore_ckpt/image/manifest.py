"""`.metadata` from plans and results: the index of all ranks' tensors, the manifest, the fingerprints.

To put the index together takes half a second for 20,000 tensors of two ranks, grows with the number of ranks, and needs
nothing but the plans: so the coordinator's writer process does that on a second thread, and no training waits for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import shift_factor
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
    of_different_offsets,
)
from mcore_ckpt.format.integrity import NO_FINGERPRINT, Manifest, ManifestFile
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.metadata_write import ChunkFactors, MetadataEncoder
from mcore_ckpt.image.layout import WrittenFile
from mcore_ckpt.state.plans import LocalPlan, decoded_plans


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
    """All ranks' tensors, checked before (`state/plan_check.py`): what `.metadata` is made from. Cheap to pickle."""

    encoded: tuple[bytes, ...]  # every rank's `LocalPlan`, encoded
    files: tuple[tuple[str, int], ...] = ()  # name, without the id of a save, and length in bytes of all ranks' files
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in `CheckpointIndex`

    @collector_paused()
    def encoder(self) -> MetadataEncoder:
        """Put the index of the tensors together, which takes half a second for 20,000 tensors of two ranks."""
        tensors, order = index_tensors(decoded_plans(self.encoded))
        index = CheckpointIndex("", tensors, {}, mcore_data=self.mcore_data)
        return MetadataEncoder(index, order, chunk_factors(index))


def chunk_factors(index: CheckpointIndex) -> ChunkFactors:
    """How the CRC-32 of each chunk counts in the fingerprint of its tensor."""
    factors, firsts = array("I"), array("q")
    one = shift_factor(0)
    for key, dtype, shape, chunks, _ in index.tensors.values():
        firsts.append(len(factors))
        own_shape = index.original_shape(key)
        if len(chunks) == 1 and chunks[0].sizes == shape and own_shape is None:
            factors.append(one)
            continue
        elem_bytes = element_bytes(dtype)
        for offsets, sizes, _ in chunks:
            behind = Stretch.of_chunk(shape, offsets, sizes, elem_bytes, own_shape).bytes_behind()
            factors.append(0 if behind is None else shift_factor(behind))
    return ChunkFactors(factors, firsts)


def metadata_of(
    encoder: MetadataEncoder,
    objects: Sequence[tuple[ObjectEntry, ...]],
    files: Sequence[Sequence[WrittenFile]],
    *,
    save_id: bytes,
    storage_meta: dict[str, Any],
    common: ManifestFile | None = None,
    names: Mapping[str, str] | None = None,
) -> bytes:
    """The content of `.metadata`. Raises `PlanError` if two ranks have written objects of one key.

    `objects` are index entries of each rank's objects, file by file; `files` each rank's files, in the order of its
    plan. `names`: new names for files of the plan.
    """
    entries: dict[str, ObjectEntry] = {}
    for rank, of_rank in enumerate(objects):
        for entry in of_rank:
            if entry.fqn in entries:
                raise PlanError(f"{entry.fqn}: rank {rank} writes an object that another rank has written, too")
            entries[entry.fqn] = entry
    written = list(chain.from_iterable(files))
    manifest = _manifest(save_id, written, encoder, common)
    return encoder.encode(entries, files=names, storage_meta=storage_meta, manifest=manifest)


def _manifest(
    save_id: bytes, files: Sequence[WrittenFile], encoder: MetadataEncoder, common: ManifestFile | None
) -> Manifest:
    """The manifest of a save."""
    order = encoder.order  # the number of each tensor item among those of all files
    crcs = list(chain.from_iterable(file.crcs for file in files))
    firsts = list(accumulate((len(file.crcs) for file in files), initial=0))
    cumulative: dict[int, array[int]] = {}
    for first, file in zip(firsts, files, strict=False):
        at = 0
        for number, count in zip(file.long_payloads, file.inner_blocks, strict=True):
            cumulative[first + number] = file.blocks[at : at + count]
            at += count
    summed = [(n, cumulative[number]) for n, number in enumerate(order) if number in cumulative] if cumulative else []
    listed = {file.name: ManifestFile(file.size_bytes, file.table_crc32, save_id) for file in files}
    if common is not None:
        listed[COMMON_FILE] = common
    ordered = array("I", [crcs[number] for number in order])
    ordered.extend(chain.from_iterable(file.object_crcs for file in files))
    return Manifest(
        save_id,
        dict(sorted(listed.items())),
        ordered,
        array("Q", [n for n, _ in summed]),
        array("I", [len(sums) for _, sums in summed]),
        array("I", chain.from_iterable(sums for _, sums in summed)),
        fingerprints=None if encoder.factors is None else _fingerprints(encoder.factors, order, crcs, files, firsts),
    )


def _fingerprints(
    factors: ChunkFactors,
    order: Sequence[int],
    crcs: Sequence[int],
    files: Sequence[WrittenFile],
    firsts: Sequence[int],
) -> array[int]:
    """The fingerprint of each tensor; -1 of those without. `firsts`: number of the first item of each file."""
    import numpy as np  # which a writer process does without

    from mcore_ckpt.core.fingerprints import products

    if not factors.firsts:
        return array("q")
    ordered = np.array(crcs, np.uint32)[np.array(order)]
    multipliers = np.array(factors.factors, np.uint32)
    counts = products(ordered, multipliers)
    unknown = set[int]()
    if not multipliers.all():
        parts = {first + n: part for first, file in zip(firsts, files, strict=False) for n, part in file.parts}
        for chunk in np.flatnonzero(multipliers == 0).tolist():
            part = parts.get(order[chunk])
            counts[chunk] = part or 0
            if part is None:  # a rank saves without fingerprints
                unknown.add(bisect_right(factors.firsts, chunk) - 1)
    sums = np.bitwise_xor.reduceat(counts, np.array(factors.firsts)).astype(np.int64)
    sums[sorted(unknown)] = NO_FINGERPRINT
    return array("q", sums.tobytes())
