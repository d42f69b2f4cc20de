"""Third-party replacements of Megatron's own methods, honoured in saves and loads of this package.

Code written for Megatron patches `FileSystemWriterAsync.write_preloaded_data` (to inject faults, to write a second
copy, to time it) and `MCoreLoadPlanner.create_local_plan` (to record what a rank reads, to drop items). If the first
has been replaced, a save hands it every bucket, in the trainer, and compares what it returns with the plan. If the
second has been, a load asks that planner for its plan and carries it out. Otherwise nothing of this runs.
"""

from __future__ import annotations

import io
import queue
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.bucket_writer import ItemBucket, sums_of
from mcore_ckpt.dcp.planners import object_write_item, tensor_write_item
from mcore_ckpt.image.layout import PlannedFile, WrittenFile
from mcore_ckpt.load.reader import FileSystemReader, destination
from mcore_ckpt.save.buckets import WriteBucket
from mcore_ckpt.state.shards import box_sizes


def write_through(
    write: Callable[..., Any], directory: Path, buckets: Sequence[WriteBucket], options: SaveOptions, save_id: bytes
) -> list[WrittenFile]:
    """Hand each bucket to `write(transforms, number, bucket, results queue, count queue, use_fsync)`, as Megatron's
    writer does. It puts `(number, results or exception)` into the results queue.
    """
    results = []
    for number, bucket in enumerate(buckets):
        layout, name = bucket.layout, bucket.file.name
        tensor_data = [
            (
                tensor_write_item(spec.key, getattr(torch, spec.dtype), spec.shape, spec.offsets, spec.sizes),
                tensor.detach().cpu(),
            )
            for spec, tensor in zip(layout.specs, bucket.tensor_data, strict=True)
        ]
        bytes_data = [
            (object_write_item(key), io.BytesIO(content))
            for key, content in zip(layout.object_keys, bucket.bytes_data, strict=True)
        ]
        planned = [*bucket.offsets, *layout.item_offsets]
        reports: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[Any] = queue.Queue()
        pending.put(number)
        path = str(directory / name)
        to_write = ItemBucket.of(path, name, bytes_data, tensor_data, save_id)
        write([], number, to_write, reports, pending, True)
        _, outcome = reports.get_nowait()
        if isinstance(outcome, BaseException):
            raise SaveError(f"{path}: {type(outcome).__name__}: {outcome}") from outcome
        if [result.storage_data.offset for result in outcome] != planned:
            raise SaveError(
                f"{path}: {len(planned)} items were planned, the writer reports {len(outcome)} or elsewhere"
            )
        results.append(_written(bucket.file, len(bytes_data), outcome, save_id))
    return results


def _written(planned: PlannedFile, objects: int, outcome: Sequence[Any], save_id: bytes) -> WrittenFile:
    """What a third-party writer reports of a bucket, objects first; without sums if it has not called this package."""
    sums = [sums_of(result) for result in outcome]
    is_own = all(item is not None and item.file.save_id == save_id for item in sums)
    tensors = [item for item in sums[objects:] if item is not None and is_own]
    return WrittenFile(
        name=planned.name,
        size_bytes=planned.image.size_bytes,
        table_crc32=planned.table_crc32,
        object_crcs=planned.object_crcs,
        crcs=array("I", [item.crc32 for item in tensors]),
        long_payloads=planned.image.long_payloads,
        inner_blocks=planned.image.inner_blocks,
        blocks=array("I", chain.from_iterable(item.blocks for item in tensors)),
        has_footer=is_own,
    )


class _LocalShards:
    """All of a rank's shards of one tensor, as DCP's planners take them (the protocol `_Checkpointable`)."""

    def __init__(self) -> None:
        self._shards: dict[tuple[int, ...], torch.Tensor] = {}

    def add(self, shard: Any) -> None:
        self._shards[tuple(shard.global_offset)] = destination(shard).view(box_sizes(shard))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        raise PlanError(f"{fqn}: these shards are for loading")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), tensor.shape) for at, tensor in self._shards.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._shards[tuple(index.offset or ())]


def read_through(planner_class: Any, reader: FileSystemReader, shards: Iterable[Any]) -> None:
    """Fill the data of `ShardedTensor`s by the plan of Megatron's `MCoreLoadPlanner`; those without data get some on
    the CPU.
    """
    state: dict[str, _LocalShards] = {}
    exact, flexible = [], {}
    for shard in shards:
        if shard.allow_shape_mismatch:
            flexible[shard.key] = shard
        else:
            exact.append(shard)
        state.setdefault(shard.key, _LocalShards()).add(shard)
    planner = planner_class(
        shapes_validation_sharded_tensors=exact,
        allow_shape_mismatch_sharded_tensors=flexible,
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    metadata = reader.dcp_metadata()
    planner.set_up_planner({}, metadata, False)  # with `state` it would look for tensors in it, and find none
    planner.state_dict = state
    planner.lookup_tensor = lambda index: state[index.fqn].__get_tensor_shard__(index)
    reader.set_up_storage_reader(metadata, False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
