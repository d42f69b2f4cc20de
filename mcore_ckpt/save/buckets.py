"""The files of one rank in one save: its tensors and objects -> balanced buckets, one file each.

`lay_out_rank` lays out all that one rank writes. A `RankLayout` depends on the structure of the state only (keys,
dtypes, shapes, offsets), so it is kept and used again as long as that stays: the second save's planning is free. What a
save adds to a layout is a `WriteBucket`, made by `prepare_write_data`: the file's name, its bytes_data, its tensor_data
and the integrity footer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import ObjectEntry, StoredItem, file_name_problem
from mcore_ckpt.format.integrity import data_file_name, with_id
from mcore_ckpt.image.layout import BucketLayout, TensorSpec, WriteBucket, fill_bucket, lay_out_file, objects_end
from mcore_ckpt.state.plans import LocalPlan

if TYPE_CHECKING:
    import torch


def balance(sizes_bytes: Sequence[int], buckets: int) -> list[list[int]]:
    """Distribute items over buckets evenly: the largest item first, each to the bucket that is least filled.

    Returns the indices of each bucket's items in their original order: neighbours in the model stay neighbours.
    """
    if buckets == 1:
        return [list(range(len(sizes_bytes)))]
    filled = [(0, bucket) for bucket in range(buckets)]
    chosen: list[list[int]] = [[] for _ in range(buckets)]
    for index in sorted(range(len(sizes_bytes)), key=sizes_bytes.__getitem__, reverse=True):
        total_bytes, bucket = filled[0]
        chosen[bucket].append(index)
        heapq.heapreplace(filled, (total_bytes + sizes_bytes[index], bucket))
    for indices in chosen:
        indices.sort()
    return chosen


def check_hint(separation_hint: str) -> None:
    """Raise `OptionError` if names of files cannot begin with it."""
    problem = "names another directory" if "/" in separation_hint else None
    problem = problem or file_name_problem(data_file_name(0, 0, separation_hint))
    if problem:
        raise OptionError(f"separation_hint={separation_hint!r:.80}: a file name that begins with it {problem}")


def split_buckets(
    keys: Sequence[str],
    sizes_bytes: Sequence[int],
    thread_count: int,
    separation_hint: str | None = None,
) -> list[tuple[str, list[int]]]:
    """Choose the buckets of one rank: `(file name prefix, item indices)` for each that is not empty.

    With a separation hint, items whose key starts with it go into files whose names start with it; each of the two
    groups has half of the `thread_count` files.
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


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The files of one rank, in every save of the same structure."""

    specs: tuple[TensorSpec, ...]  # the tensors, in the trainer's order; what a later save compares its own with
    buckets: tuple[BucketLayout, ...]  # the layout of each file
    members: tuple[tuple[int, ...], ...]  # for each file, the indices of its tensors
    objects: tuple[tuple[int, ...], ...]  # for each file, the indices of its objects
    plan: LocalPlan  # the same for the coordinator
    object_keys: tuple[str, ...]  # of the objects that the files were laid out for
    separation_hint: str | None  # prefix of keys whose files carry it, too

    @property
    def file_bytes(self) -> int:
        """Length of all files together, in bytes."""
        return sum(bucket.image.size_bytes for bucket in self.buckets)

    def has_room(self, keys: Sequence[str], sizes_bytes: Sequence[int]) -> bool:
        """Whether the objects of a save fit into these files: the same keys, in regions that are long enough."""
        return tuple(keys) == self.object_keys and all(
            not chosen or objects_end([sizes_bytes[index] for index in chosen]) <= bucket.region_bytes
            for bucket, chosen in zip(self.buckets, self.objects, strict=True)
        )

    def object_entries(self, buckets: Sequence[WriteBucket]) -> tuple[ObjectEntry, ...]:
        """Index entries of the objects of one save, file by file."""
        return tuple(
            ObjectEntry(self.object_keys[index], StoredItem(bucket.file.name, offset, len(data)))
            for bucket, chosen in zip(buckets, self.objects, strict=True)
            for index, offset, data in zip(chosen, bucket.offsets, bucket.bytes_data, strict=True)
        )


def prepare_write_data(
    layout: RankLayout,
    objects: Sequence[memoryview],
    tensors: Sequence[torch.Tensor],
    pointers: Sequence[int],
    save_id: bytes,
) -> list[WriteBucket]:
    """Sort what a rank saves into its buckets, bytes_data apart from tensor_data. Expects that the objects have room.
    The names of the files carry the id of the save, so no name is used twice.
    """
    return [
        fill_bucket(
            of_file,
            with_id(of_file.file_name, save_id),
            save_id,
            [objects[index] for index in chosen],
            [tensors[index] for index in members],
            [pointers[index] for index in members],
        )
        for of_file, chosen, members in zip(layout.buckets, layout.objects, layout.members, strict=True)
    ]


def lay_out_rank(
    specs: Sequence[TensorSpec],
    object_keys: Sequence[str],
    object_bytes: Sequence[int],
    *,
    rank: int,
    thread_count: int,
    separation_hint: str | None = None,
) -> RankLayout:
    """Lay out what a rank writes: `thread_count` files at most, keys with the `separation_hint` apart."""
    keys = [spec.key for spec in specs]
    chosen = split_buckets(keys, [spec.nbytes for spec in specs], thread_count, separation_hint)
    prefixes = [prefix for prefix, _ in chosen]
    for prefix in _prefixes_of_objects(object_keys, separation_hint):
        if prefix not in prefixes:
            chosen.append((prefix, []))
            prefixes.append(prefix)
    names = [data_file_name(rank, i, prefix) for i, prefix in enumerate(prefixes)]
    objects_of_file = _spread(object_keys, names, separation_hint)
    buckets = []
    laid_out = []
    for name, objects, (_, indices) in zip(names, objects_of_file, chosen, strict=True):
        of_file = [specs[index] for index in indices]
        sizes = [object_bytes[index] for index in objects]
        bucket, columns = lay_out_file(name, of_file, [object_keys[index] for index in objects], sizes)
        buckets.append(bucket)
        laid_out.append((name, bucket.image.size_bytes, columns))
    return RankLayout(
        specs=tuple(specs),
        buckets=tuple(buckets),
        members=tuple(tuple(indices) for _, indices in chosen),
        objects=tuple(map(tuple, objects_of_file)),
        plan=LocalPlan.of(laid_out),
        object_keys=tuple(object_keys),
        separation_hint=separation_hint,
    )


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
