"""Write items -> balanced buckets -> the layout of each bucket's file.

A bucket is what goes into one file. Its file holds two halves: first **bytes_data**, the serialized objects, in a
region with some room to grow, then **tensor_data**, each tensor in the zip that `torch.save` writes. Sizes of tensors
are known when a save is planned, so every offset is, too; and because objects have a region of their own, tensors do
not move when an object changes its size, and the layout of one save serves the next.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt.container import TensorTemplate, place
from mcore_ckpt.file_image import FileImage

__all__ = ["FILE_SUFFIX", "BucketLayout", "balance", "lay_out", "place_objects", "region_bytes", "split_buckets"]

FILE_SUFFIX = ".distcp"
_PAGE_BYTES = 4096
_OBJECT_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where everything lies in one bucket's file. All offsets are bytes from the start of the file.

    Attributes:
        file_name: name inside the checkpoint directory.
        region_bytes: length of the bytes_data region, which starts at 0 and is a multiple of 4096.
        templates: for each tensor, its item without the payload.
        item_offsets: for each tensor, where its item starts.
        image: what a writer needs: the file's size, the payloads and the places of their checksums.
    """

    file_name: str
    region_bytes: int
    templates: tuple[TensorTemplate, ...]
    item_offsets: array[int]
    image: FileImage


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


def lay_out(file_name: str, templates: Sequence[TensorTemplate], bytes_region: int) -> BucketLayout:
    """Lay out a bucket's file.

    Args:
        file_name: name inside the checkpoint directory.
        templates: the bucket's tensors, in the order in which they are written.
        bytes_region: length of the region for objects, a multiple of 4096, at the start of the file.
    """
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
    image = FileImage(
        file_name=file_name,
        size_bytes=position,
        payload_offsets=payload_offsets,
        payload_lengths=payload_lengths,
        crc_positions=crc_positions,
    )
    return BucketLayout(file_name, bytes_region, tuple(templates), item_offsets, image)
