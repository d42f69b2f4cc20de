"""What is written, laid out: tensors and objects -> balanced buckets -> every offset of each bucket's file.

A bucket is what goes into one file. Its file holds two halves: first **bytes_data**, the serialized objects, in a
region with some room to grow, then **tensor_data**, each tensor in the zip that `torch.save` writes. Sizes of tensors
are known when a save is planned, so every offset is, too; and because objects have a region of their own, tensors do
not move when an object changes its size.

`lay_out_rank` does so for all that one rank writes in one save. A `RankLayout` depends on the structure of the state
only (keys, dtypes, shapes, offsets), so it is kept and used again as long as that stays: the second save's planning is
free. `lay_out_file` lays out one file from the same parts, for a writer that is handed its buckets one by one.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from mcore_ckpt.format.file_names import data_file_name, with_id
from mcore_ckpt.format.index import ObjectEntry, StoredItem
from mcore_ckpt.format.item_layout import TensorTemplate, place, tensor_template
from mcore_ckpt.format.seal import BLOCK_BYTES, FileSealPlan, TableColumns, inner_blocks
from mcore_ckpt.layout.file_image import FileImage
from mcore_ckpt.layout.plans import LocalPlan, LocalPlanBuilder

__all__ = [
    "BucketLayout",
    "PlacedObjects",
    "RankLayout",
    "TensorSpec",
    "balance",
    "lay_out",
    "lay_out_file",
    "lay_out_rank",
    "place_objects",
    "region_bytes",
    "seal_plan",
    "split_buckets",
]

_PAGE_BYTES = 4096
_OBJECT_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where everything lies in one bucket's file. All offsets are bytes from the start of the file.

    Attributes:
        file_name: name inside the checkpoint directory; the id of a save comes into it by `RankLayout.named`.
        region_bytes: length of the bytes_data region, which starts at 0 and is a multiple of 4096.
        templates: for each tensor, its item without the payload.
        item_offsets: for each tensor, where its item starts.
        image: what a writer needs: the file's size, the payloads and the places of their checksums.
        seal: what ends the file, as far as the structure tells.
        long_payloads: which tensors' payloads are longer than a block.
        inner_blocks: for each of those, how many block boundaries lie inside it.
    """

    file_name: str = field(compare=False)
    region_bytes: int
    templates: tuple[TensorTemplate, ...]
    item_offsets: array[int]
    image: FileImage
    seal: FileSealPlan
    long_payloads: array[int]
    inner_blocks: array[int]

    @property
    def seal_offset(self) -> int:
        """Where the seal begins, which is where the last item ends."""
        return self.image.size_bytes - self.seal.size_bytes


def balance(sizes_bytes: Sequence[int], buckets: int) -> list[list[int]]:
    """Distribute items over buckets evenly: the largest item first, each to the bucket that is least filled.

    Args:
        sizes_bytes: size of each item.
        buckets: how many buckets, at least 1.

    Returns:
        For each bucket the indices of its items, in their original order, so that neighbours in the model stay
        neighbours in the file.
    """
    if buckets == 1:
        return [list(range(len(sizes_bytes)))]
    filled = [(0, bucket) for bucket in range(buckets)]
    chosen: list[list[int]] = [[] for _ in range(buckets)]
    for index in sorted(range(len(sizes_bytes)), key=sizes_bytes.__getitem__, reverse=True):
        total_bytes, bucket = heapq.heappop(filled)
        chosen[bucket].append(index)
        heapq.heappush(filled, (total_bytes + sizes_bytes[index], bucket))
    for indices in chosen:
        indices.sort()
    return chosen


def split_buckets(
    keys: Sequence[str],
    sizes_bytes: Sequence[int],
    thread_count: int,
    separation_hint: str | None = None,
) -> list[tuple[str, list[int]]]:
    """Choose the buckets of one rank.

    Args:
        keys: fqn of each item.
        sizes_bytes: size of each item.
        thread_count: files to write, at most; with a separation hint, that many for each of the two groups, halved.
        separation_hint: items whose key starts with it go into files whose names start with it.

    Returns:
        `(file name prefix, item indices)` for each non-empty bucket.
    """
    groups: list[tuple[str, list[int]]] = [("", list(range(len(keys))))]
    if separation_hint is not None:
        thread_count = max(1, thread_count // 2)
        hinted = [index for index, key in enumerate(keys) if key.startswith(separation_hint)]
        apart = set(hinted)
        groups = [("", [i for i in range(len(keys)) if i not in apart]), (separation_hint, hinted)]
    buckets: list[tuple[str, list[int]]] = []
    for prefix, members in groups:
        sizes = [sizes_bytes[index] for index in members]
        chosen = [indices for indices in balance(sizes, thread_count) if indices]
        buckets += [(prefix, [members[position] for position in indices]) for indices in chosen]
    return buckets


def region_bytes(objects_bytes: Sequence[int]) -> int:
    """Length of the region for serialized objects: what they take now and a quarter more, in whole pages."""
    if not objects_bytes:
        return 0
    needed = place_objects(objects_bytes)[-1] + objects_bytes[-1]
    return -(-(needed + needed // 4) // _PAGE_BYTES) * _PAGE_BYTES


def place_objects(objects_bytes: Sequence[int]) -> list[int]:
    """Offset of each serialized object in its region, in bytes: one after the other, 64-aligned."""
    offsets = []
    position = 0
    for nbytes in objects_bytes:
        offsets.append(position)
        position += -(-nbytes // _OBJECT_ALIGNMENT_BYTES) * _OBJECT_ALIGNMENT_BYTES
    return offsets


class TensorSpec(NamedTuple):
    """One tensor to be written: box (`offsets`, `sizes`) of a global tensor of `shape`, in elements.

    `original_shape` is the parameter's own global shape where `shape` is that of a stored form (see `flattened`).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    original_shape: tuple[int, ...] | None = None


def lay_out(
    file_name: str, specs: Sequence[TensorSpec], bytes_region: int, object_keys: Sequence[str] = ()
) -> BucketLayout:
    """Lay out a bucket's file.

    Args:
        file_name: name inside the checkpoint directory.
        specs: the bucket's tensors, in the order in which they are written.
        bytes_region: length of the region for objects, a multiple of 4096, at the start of the file.
        object_keys: keys of the objects, in the order of their places.
    """
    templates = [tensor_template(spec.dtype, spec.sizes) for spec in specs]
    item_offsets = array("q")
    payload_offsets = array("q")
    payload_lengths = array("q")
    crc_positions = array("q")
    position = bytes_region
    for template in templates:
        start = place(position, template)
        payload = start + len(template.head)
        tail = payload + template.payload_bytes
        item_offsets.append(start)
        payload_offsets.append(payload)
        payload_lengths.append(template.payload_bytes)
        for crc_position in template.crc_positions:
            crc_positions.append(tail + crc_position)
        position = tail + len(template.tail)
    seal = seal_plan(specs, item_offsets, [template.item_bytes for template in templates], object_keys)
    image = FileImage(
        file_name=file_name,
        size_bytes=position + seal.size_bytes,
        payload_offsets=payload_offsets,
        payload_lengths=payload_lengths,
        crc_positions=crc_positions,
    )
    long_payloads = array("I", [n for n, nbytes in enumerate(payload_lengths) if nbytes > BLOCK_BYTES])
    counts = array("I", [inner_blocks(payload_lengths[n]) for n in long_payloads])
    return BucketLayout(file_name, bytes_region, tuple(templates), item_offsets, image, seal, long_payloads, counts)


def lay_out_file(
    file_name: str, specs: Sequence[TensorSpec], object_keys: Sequence[str], objects_bytes: Sequence[int]
) -> BucketLayout:
    """Lay out a file that holds these tensors, and objects of these keys and sizes."""
    return lay_out(file_name, specs, region_bytes(objects_bytes), object_keys)


def seal_plan(
    specs: Sequence[TensorSpec],
    item_offsets: Iterable[int],
    item_bytes: Iterable[int],
    object_keys: Sequence[str],
) -> FileSealPlan:
    """The seal of a file that holds these tensors, in its order, with places in bytes, and objects of these keys."""
    dtypes = {dtype: code for code, dtype in enumerate(dict.fromkeys(spec.dtype for spec in specs))}
    boxes = chain.from_iterable((*spec.shape, *spec.offsets, *spec.sizes) for spec in specs)
    places = chain.from_iterable(zip(item_offsets, item_bytes, strict=True))
    return FileSealPlan.of(
        TableColumns(
            tuple(dtypes),
            [spec.key for spec in specs],
            array("I", [dtypes[spec.dtype] for spec in specs]),
            array("I", [len(spec.shape) for spec in specs]),
            array("q", boxes),
            array("q", places),
            object_keys,
        )
    )


@dataclass(frozen=True, slots=True)
class PlacedObjects:
    """Where the serialized objects of one save lie.

    Attributes:
        buckets: for each bucket of the layout, the indices of its objects.
        offsets: for each bucket, where they lie in its file, in bytes.
        entries: index entry of each object, in the order of the objects.
    """

    buckets: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    entries: tuple[ObjectEntry, ...]

    def named(self, save_id: bytes) -> PlacedObjects:
        """As they lie in the files of one save."""
        entries = tuple(
            replace(entry, item=entry.item._replace(file=with_id(entry.item.file, save_id))) for entry in self.entries
        )
        return replace(self, entries=entries)

    def places(self, bucket: int) -> list[tuple[int, int]]:
        """Offset and length of each object in the file of that number, in bytes."""
        lengths = [self.entries[index].item.length for index in self.buckets[bucket]]
        return list(zip(self.offsets[bucket], lengths, strict=True))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The files of one rank.

    Attributes:
        specs: the tensors, in the trainer's order; what a later save compares its own with.
        buckets: the layout of each file.
        members: for each file, the indices of its tensors.
        plan: the same for the coordinator.
        object_keys: of the objects that the files were laid out for.
        separation_hint: prefix of keys whose files carry it, too.
    """

    specs: tuple[TensorSpec, ...]
    buckets: tuple[BucketLayout, ...]
    members: tuple[tuple[int, ...], ...]
    plan: LocalPlan
    object_keys: tuple[str, ...]
    separation_hint: str | None

    @property
    def file_bytes(self) -> int:
        """Length of all files together, in bytes."""
        return sum(bucket.image.size_bytes for bucket in self.buckets)

    def named(self, save_id: bytes) -> RankLayout:
        """The files of one save: a layout is kept from save to save, and a name is used once."""
        buckets = tuple(
            replace(bucket, file_name=name, image=replace(bucket.image, file_name=name))
            for bucket in self.buckets
            for name in (with_id(bucket.file_name, save_id),)
        )
        return replace(self, buckets=buckets)

    def place_objects(self, keys: Sequence[str], sizes_bytes: Sequence[int]) -> PlacedObjects | None:
        """Find room for the objects of a save; None if a new layout is needed: for other keys, or larger regions."""
        if tuple(keys) != self.object_keys:
            return None
        chosen = _spread(keys, [bucket.file_name for bucket in self.buckets], self.separation_hint)
        offsets = []
        entries: dict[int, ObjectEntry] = {}
        for bucket, indices in zip(self.buckets, chosen, strict=True):
            sizes = [sizes_bytes[index] for index in indices]
            placed = place_objects(sizes)
            if placed and placed[-1] + sizes[-1] > bucket.region_bytes:
                return None
            offsets.append(tuple(placed))
            for index, offset in zip(indices, placed, strict=True):
                item = StoredItem(bucket.file_name, offset, sizes_bytes[index])
                entries[index] = ObjectEntry(keys[index], item)
        if len(entries) != len(keys):
            return None
        return PlacedObjects(
            tuple(tuple(indices) for indices in chosen),
            tuple(offsets),
            tuple(entries[index] for index in range(len(keys))),
        )


def lay_out_rank(
    specs: Sequence[TensorSpec],
    object_keys: Sequence[str],
    object_bytes: Sequence[int],
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> RankLayout:
    """Lay out what a rank writes.

    Args:
        specs: its tensors.
        object_keys: keys of its serialized objects.
        object_bytes: their sizes now; each file's region gets some room to grow.
        rank: of the writing process, for the file names.
        thread_count: files to write, at most.
        separation_hint: prefix of keys that get files of their own.
    """
    keys = [spec.key for spec in specs]
    chosen = split_buckets(keys, [spec.nbytes for spec in specs], thread_count, separation_hint)
    prefixes = [prefix for prefix, _ in chosen]
    for prefix in _prefixes_of_objects(object_keys, separation_hint):
        if prefix not in prefixes:
            chosen.append((prefix, []))
            prefixes.append(prefix)
    names = [data_file_name(rank, i, prefix) for i, prefix in enumerate(prefixes)]
    objects_of_file = _spread(object_keys, names, separation_hint)
    builder = LocalPlanBuilder()
    buckets = []
    for name, objects, (_, indices) in zip(names, objects_of_file, chosen, strict=True):
        of_file = [specs[index] for index in indices]
        sizes = [object_bytes[index] for index in objects]
        bucket = lay_out_file(name, of_file, [object_keys[index] for index in objects], sizes)
        buckets.append(bucket)
        builder.begin_file(name, bucket.image.size_bytes)
        for spec, offset, template in zip(of_file, bucket.item_offsets, bucket.templates, strict=True):
            builder.add(spec.key, spec.dtype, spec.shape, spec.offsets, spec.sizes, offset, template.item_bytes)
    members = tuple(tuple(indices) for _, indices in chosen)
    return RankLayout(tuple(specs), tuple(buckets), members, builder.build(), tuple(object_keys), separation_hint)


def _prefixes_of_objects(keys: Sequence[str], separation_hint: str | None) -> list[str]:
    if separation_hint is None:
        return [""] if keys else []
    hinted = [key.startswith(separation_hint) for key in keys]
    return ([] if all(hinted) else [""]) + ([separation_hint] if any(hinted) else [])


def _spread(keys: Sequence[str], names: Sequence[str], hint: str | None) -> list[list[int]]:
    """Objects to files, in turn; hinted keys only to files that carry the hint, the others only to the others."""
    chosen: list[list[int]] = [[] for _ in names]
    hinted_files = [i for i, name in enumerate(names) if hint is not None and name.startswith(hint)]
    plain_files = [i for i in range(len(names)) if i not in hinted_files]
    turns = {True: 0, False: 0}
    for index, key in enumerate(keys):
        hinted = hint is not None and key.startswith(hint)
        files = hinted_files if hinted else plain_files
        if not files:
            continue
        chosen[files[turns[hinted] % len(files)]].append(index)
        turns[hinted] += 1
    return chosen
