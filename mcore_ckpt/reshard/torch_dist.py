"""Data files of a `torch_dist` checkpoint, their footers, and its `.metadata`.

Every rank has one data file for each worker, `__{rank}_{worker}.distcp`. A worker writes its files front to back, so
items lie in them in the order in which the worker takes its tensors.
"""

from __future__ import annotations

import math
import operator
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.footer import SAVE_ID_BYTES, FooterPlan, ManifestFile, shown_id
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.item_layout import TensorTemplate, element_bytes, place, tensor_template
from mcore_ckpt.format.manifest import NO_FINGERPRINT, Manifest
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load.stored_fingerprints import fingerprint_from_sums
from mcore_ckpt.reshard._journal import Journal
from mcore_ckpt.reshard._written_proof import another_fingerprint, source_sums
from mcore_ckpt.reshard.slots import Blob, Slot, TargetPlan, TensorMove
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.save.buckets import TensorSpec, footer_plan
from mcore_ckpt.storage.base import align_up
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.tilings import blocks

# Objects come first in a file; a little room behind them keeps tensors on pages of their own.
_PAGE_BYTES = 4096


class DividedTensor(NamedTuple):
    """A tensor, the slices that its target chunks hold, and the rank of each chunk."""

    entry: TensorEntry
    key: str
    slices: Sequence[Box]
    ranks: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class _TorchDistPlan(TargetPlan):
    index: CheckpointIndex
    footers: Mapping[str, FooterPlan]

    def frame(self, move: TensorMove, number: int) -> TensorTemplate:
        return tensor_template(move.entry.dtype, move.slots[number].slice.sizes)

    def finish(self, files: TargetFiles, journal: Journal, payloads: StoredPayloads, *, is_compared: bool) -> bytes:
        """As `TargetPlan.finish`: the footers of the data files, and `.metadata` with its manifest."""
        save_id = secrets.token_bytes(SAVE_ID_BYTES)
        objects: dict[str, list[tuple[int, int]]] = {file: [] for file in self.sizes}
        for stored in self.index.objects.values():
            objects[stored.item.file].append((stored.item.offset, stored.item.length))
        listed = {}
        for name, size_bytes in sorted(self.sizes.items()):
            end, table_crc = self.footers[name].fill(save_id, size_bytes, sorted(objects[name]))
            files.write_end(name, size_bytes, end)
            listed[name] = ManifestFile(size_bytes, table_crc, save_id)
        sums = [known for key in self.index.tensors for known in journal.sums[key]]
        crcs = array("I", [crc for crc, _ in sums])
        for key in self.index.objects:
            item = payloads.index.objects[key].item
            with payloads.files.reader(item.file) as reader:
                crcs.append(crc32(reader.read(item.offset, item.length)))
        running = [(number, sums_of) for number, (_, sums_of) in enumerate(sums) if sums_of]
        manifest = Manifest(
            save_id,
            listed,
            crcs,
            array("Q", [number for number, _ in running]),
            array("I", [len(sums_of) for _, sums_of in running]),
            array("I", chain.from_iterable(sums_of for _, sums_of in running)),
            fingerprints=self._fingerprints(journal, payloads, is_compared),
        )
        # Another checkpoint than the source, and than other targets of the source: of another save.
        meta = {**(self.index.storage_meta or {}), "save_id": shown_id(save_id)}
        return encode_metadata(self.index, storage_meta=meta, manifest=manifest)

    def _fingerprints(self, journal: Journal, payloads: StoredPayloads, is_compared: bool) -> array[int]:
        """Those of the target's tensors: stored with the source, and told by sums of the target or of the source. Where
        both are there, they have to agree. Where no sums tell, of columns, the comparison sums up what was written;
        without one, what the source says is not passed on.
        """
        fingerprints = {}
        for move in self.moves:
            entry = self.index.tensors[move.key]
            told = fingerprint_from_sums(self.index, entry, [crc for crc, _ in journal.sums[move.key]])
            if told is None:
                told = fingerprint_from_sums(payloads.index, move.entry, source_sums(move, journal, payloads))
            known = payloads.index.fingerprints.get(move.entry.fqn)
            if known is not None and told is not None and known != told:
                raise another_fingerprint(move.key, told, known)
            fingerprints[move.key] = known if told is None and is_compared else told
        found = (fingerprints[key] for key in self.index.tensors)
        return array("q", [NO_FINGERPRINT if value is None else value for value in found])


def plan_torch_dist(
    index: CheckpointIndex, tensors: Sequence[DividedTensor], objects: Iterable[tuple[ObjectEntry, int]], workers: int
) -> TargetPlan:
    """Give each target chunk its slot, and each object (with its rank) its place; objects are copied as they are.

    `tensors` come in the order of the target's index. Each rank has `workers` files.
    """
    sizes: dict[str, int] = {}
    blobs: list[Blob] = []
    for entry, rank in objects:
        file = f"__{rank}_0.distcp"
        blobs.append(Blob(file, align_up(sizes.get(file, 0), 64), entry))
        sizes[file] = blobs[-1].offset + entry.item.length
    sizes = {file: align_up(size, _PAGE_BYTES) for file, size in sizes.items()}
    work = [
        [_lay_out(tensors[position], worker, sizes) for position in share]
        for worker, share in enumerate(_shares([tensor.entry for tensor in tensors], workers))
    ]
    moves = {move.entry.fqn: move for worker in work for move in worker}
    keys = {tensor.entry.fqn: tensor.key for tensor in tensors}
    stored = {}
    for blob in blobs:
        assert isinstance(blob.content, ObjectEntry)
        item = StoredItem(blob.file, blob.offset, blob.content.item.length, blob.content.item.transforms)
        stored[blob.content.fqn] = ObjectEntry(blob.content.fqn, item)
    target = replace(
        CheckpointIndex(index.path, {tensor.key: _target_entry(moves[tensor.entry.fqn]) for tensor in tensors}, stored),
        planner_data=index.planner_data,
        mcore_data={keys[fqn]: data for fqn, data in index.mcore_data.items() if fqn in keys},
        storage_meta=index.storage_meta,
        version=index.version,
    )
    footers = _footers(target, sizes)
    return _TorchDistPlan(
        work=tuple(map(tuple, work)),
        blobs=tuple(blobs),
        sizes={file: size + footers[file].size_bytes for file, size in sizes.items()},
        filled_gaps=True,
        index=target,
        footers=footers,
    )


def _shares(entries: Sequence[TensorEntry], workers: int) -> list[list[int]]:
    """Positions of tensors for each worker: about the same bytes, and in each the order of the source's files."""

    def size(entry: TensorEntry) -> int:
        return math.prod(entry.shape) * element_bytes(entry.dtype)

    loads = [0] * workers
    shares: list[list[int]] = [[] for _ in range(workers)]
    for position in sorted(range(len(entries)), key=lambda n: -size(entries[n])):
        worker = min(range(workers), key=lambda w: loads[w])
        shares[worker].append(position)
        # A tensor costs something even if it is small: many small ones are not to end up with one worker.
        loads[worker] += size(entries[position]) + 64 * 1024

    def in_source(position: int) -> tuple[str, int]:
        chunks = entries[position].chunks
        return (chunks[0].item.file, chunks[0].item.offset) if chunks else ("", 0)

    for share in shares:
        share.sort(key=in_source)
    return shares


def _lay_out(tensor: DividedTensor, worker: int, sizes: dict[str, int]) -> TensorMove:
    """Give each target chunk its place, in the order in which it is going to be written."""
    entry, key, slices, ranks = tensor
    found = tuple(blocks([Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks], slices))
    slots: list[Slot] = [Slot(f"__{rank}_{worker}.distcp", 0, part) for rank, part in zip(ranks, slices, strict=True)]
    in_blocks = [target for block in found for target in block.targets]
    for target in (*in_blocks, *sorted(set(range(len(slices))) - set(in_blocks))):
        template = tensor_template(entry.dtype, slices[target].sizes)
        file = slots[target].file
        slots[target] = slots[target]._replace(offset=place(sizes.get(file, 0), template))
        sizes[file] = slots[target].offset + template.item_bytes
    return TensorMove(entry, key, tuple(slots), found)


def _target_entry(move: TensorMove) -> TensorEntry:
    dtype = move.entry.dtype
    chunks = tuple(
        StoredChunk(part.offsets, part.sizes, StoredItem(file, offset, tensor_template(dtype, part.sizes).item_bytes))
        for file, offset, part in move.slots
    )
    return TensorEntry(move.key, dtype, move.entry.shape, chunks, move.entry.requires_grad)


def _footers(target: CheckpointIndex, files: Iterable[str]) -> dict[str, FooterPlan]:
    """The integrity footer of each target file."""
    tensors: dict[str, list[tuple[int, int, TensorSpec]]] = {file: [] for file in files}
    objects: dict[str, list[tuple[int, str]]] = {file: [] for file in tensors}
    for fqn, entry in target.tensors.items():
        for offsets, sizes, item in entry.chunks:
            nbytes = math.prod(sizes) * element_bytes(entry.dtype)
            spec = TensorSpec(fqn, entry.dtype, entry.shape, offsets, sizes, nbytes)
            tensors[item.file].append((item.offset, item.length, spec))
    for fqn, stored in target.objects.items():
        objects[stored.item.file].append((stored.item.offset, fqn))
    footers = {}
    for file, rows in tensors.items():
        rows.sort(key=operator.itemgetter(0))
        starts, lengths = [row[0] for row in rows], [row[1] for row in rows]
        keys = [fqn for _, fqn in sorted(objects[file])]
        footers[file] = footer_plan([row[2] for row in rows], starts, lengths, keys)
    return footers
