"""Writing through a replacement of `FileSystemWriterAsync.write_preloaded_data`.

Code written for Megatron's writer overrides or patches that function: to inject faults, to write elsewhere besides, to
time it. Where it has been replaced, a save hands it every bucket, in line, and compares what it returns with the plan;
where it has not, nothing of this runs.
"""

from __future__ import annotations

import io
import queue
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mcore_ckpt.bucket_writer import WriteBucket
from mcore_ckpt.errors import SaveError
from mcore_ckpt.file_image import ImageResult
from mcore_ckpt.rank_layout import PlacedObjects, RankLayout, TensorSpec

__all__ = ["write_through"]


def write_through(
    write: Callable[..., Any],
    directory: Path,
    layout: RankLayout,
    placed: PlacedObjects,
    tensors: Sequence[torch.Tensor],
    objects: Sequence[tuple[str, memoryview]],
    use_fsync: bool,
) -> list[ImageResult]:
    """Hand each bucket to `write`, as Megatron's writer does.

    Args:
        write: takes `(transforms, number, bucket, results queue, count queue, use_fsync)` and puts `(number, results or
            exception)` into the results queue.
        directory: of the checkpoint.
        layout: this rank's files.
        placed: where the objects lie in them.
        tensors: in the layout's order.
        objects: key and serialized form.
        use_fsync: make files durable.

    Raises:
        SaveError: the function reported an exception, or results that are not the plan's.
    """
    results = []
    for number, bucket in enumerate(layout.buckets):
        tensor_data = [(_item(layout.specs[i]), tensors[i].cpu()) for i in layout.members[number]]
        bytes_data = [
            (WriteItem(MetadataIndex(objects[i][0]), WriteItemType.BYTE_IO), io.BytesIO(objects[i][1]))
            for i in placed.buckets[number]
        ]
        planned = [*placed.offsets[number], *bucket.item_offsets]
        reports: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[Any] = queue.Queue()
        pending.put(number)
        path = str(directory / bucket.file_name)
        write([], number, WriteBucket.of(path, bucket.file_name, bytes_data, tensor_data), reports, pending, use_fsync)
        _, outcome = reports.get_nowait()
        if isinstance(outcome, BaseException):
            raise SaveError(f"{path}: {type(outcome).__name__}: {outcome}") from outcome
        if [result.storage_data.offset for result in outcome] != planned:
            raise SaveError(
                f"{path}: {len(planned)} items were planned, the writer reports {len(outcome)} or elsewhere"
            )
        crcs = array("I", bytes(4 * len(bucket.templates)))
        results.append(ImageResult(bucket.file_name, bucket.image.size_bytes, crcs, 0.0, 0.0, 0.0, 0.0))
    return results


def _item(spec: TensorSpec) -> WriteItem:
    offsets = torch.Size(spec.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(spec.sizes)),
        properties=TensorProperties(dtype=getattr(torch, spec.dtype)),
        size=torch.Size(spec.shape),
    )
    return WriteItem(MetadataIndex(spec.key, offsets), WriteItemType.SHARD, tensor_data=data)
