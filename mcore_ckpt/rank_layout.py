"""All that one rank writes in one save, laid out: tensors -> buckets -> files, with room for the objects.

The layout depends on the structure of the state only (keys, dtypes, shapes, offsets), so a `RankLayout` is kept and
used again as long as the structure stays, which is what makes the second save's planning free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mcore_ckpt.buckets import BucketLayout, lay_out, place_objects, region_bytes, split_buckets
from mcore_ckpt.commit import data_file_name
from mcore_ckpt.container import tensor_template
from mcore_ckpt.local_plan import LocalPlan, LocalPlanBuilder
from mcore_ckpt.metadata import ObjectEntry, StoredItem

__all__ = ["PlacedObjects", "RankLayout", "TensorSpec", "lay_out_rank"]


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


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The files of one rank.

    Attributes:
        specs: the tensors, in the trainer's order; what a later save compares its own with.
        first_file: number of the first file.
        buckets: the layout of each file.
        members: for each file, the indices of its tensors.
        plan: the same for the coordinator.
        separation_hint: prefix of keys whose files carry it, too.
    """

    specs: tuple[TensorSpec, ...]
    first_file: int
    buckets: tuple[BucketLayout, ...]
    members: tuple[tuple[int, ...], ...]
    plan: LocalPlan
    separation_hint: str | None

    @property
    def file_bytes(self) -> int:
        """Length of all files together, in bytes."""
        return sum(bucket.image.size_bytes for bucket in self.buckets)

    def place_objects(self, keys: Sequence[str], sizes_bytes: Sequence[int]) -> PlacedObjects | None:
        """Find room for the objects of a save; None if a region is too small, and a new layout is needed."""
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
    first_file: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> RankLayout:
    """Lay out what a rank writes.

    Args:
        specs: its tensors.
        object_keys: keys of its serialized objects.
        object_bytes: their sizes now; each file's region gets some room to grow.
        rank: of the writing process, for the file names.
        first_file: number of its first file.
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
    names = [data_file_name(rank, first_file + i, prefix) for i, prefix in enumerate(prefixes)]
    objects_of_file = _spread(object_keys, names, separation_hint)
    regions = [region_bytes([object_bytes[index] for index in indices]) for indices in objects_of_file]
    builder = LocalPlanBuilder()
    buckets = []
    for name, region, (_, indices) in zip(names, regions, chosen, strict=True):
        of_file = [specs[index] for index in indices]
        bucket = lay_out(name, [tensor_template(spec.dtype, spec.sizes) for spec in of_file], region)
        buckets.append(bucket)
        builder.begin_file(name, bucket.image.size_bytes)
        for spec, offset, template in zip(of_file, bucket.item_offsets, bucket.templates, strict=True):
            builder.add(spec.key, spec.dtype, spec.shape, spec.offsets, spec.sizes, offset, template.item_bytes)
    members = tuple(tuple(indices) for _, indices in chosen)
    return RankLayout(tuple(specs), first_file, tuple(buckets), members, builder.build(), separation_hint)


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
