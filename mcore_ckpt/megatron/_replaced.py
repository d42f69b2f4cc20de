"""What somebody has put in the place of Megatron's own methods, honoured in saves and loads of ours.

Code written for Megatron patches `FileSystemWriterAsync.write_preloaded_data` (to inject faults, to write elsewhere
besides, to time it) and `MCoreLoadPlanner.create_local_plan` (to record what a rank reads, to drop items). Where the
first has been replaced, a save hands it every bucket, in line, and compares what it returns with the plan; where the
second has been, a load asks that planner for its plan and carries it out. Where neither has, nothing of this runs.
"""

from __future__ import annotations

import io
import queue
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.bucket_writer import WriteBucket, sums_of
from mcore_ckpt.dcp.planners import object_write_item, tensor_write_item
from mcore_ckpt.dcp.writer import replaced_write_function
from mcore_ckpt.layout.buckets import BucketLayout, PlacedObjects, RankLayout
from mcore_ckpt.layout.file_image import ImageResult
from mcore_ckpt.layout.shards import box_sizes
from mcore_ckpt.load.flattened import destination
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.megatron._versions import megatron_module
from mcore_ckpt.save.rank_state import RankState
from mcore_ckpt.save.transaction import BucketWriter

__all__ = [
    "read_through",
    "replaced_bucket_writer",
    "replaced_load_planner",
]


def replaced_bucket_writer() -> BucketWriter | None:
    """Writing through the replacement of `write_preloaded_data`; None if it has not been replaced."""
    write = replaced_write_function()
    return None if write is None else partial(_write_through, write)


def _write_through(
    write: Callable[..., Any],
    directory: Path,
    layout: RankLayout,
    placed: PlacedObjects,
    state: RankState,
    options: SaveOptions,
    save_id: bytes,
) -> list[ImageResult]:
    """Hand each bucket to `write`, as Megatron's writer does.

    `write` takes `(transforms, number, bucket, results queue, count queue, use_fsync)` and puts `(number, results or
    exception)` into the results queue.

    Raises:
        SaveError: the function reported an exception, or results that are not the plan's.
    """
    results = []
    for number, bucket in enumerate(layout.buckets):
        tensor_data = [
            (
                tensor_write_item(spec.key, getattr(torch, spec.dtype), spec.shape, spec.offsets, spec.sizes),
                state.tensors[i].detach().cpu(),
            )
            for i in layout.members[number]
            for spec in (layout.specs[i],)
        ]
        bytes_data = [
            (object_write_item(key), io.BytesIO(content))
            for key, content in (state.objects[i] for i in placed.buckets[number])
        ]
        planned = [*placed.offsets[number], *bucket.item_offsets]
        reports: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[Any] = queue.Queue()
        pending.put(number)
        path = str(directory / bucket.file_name)
        to_write = WriteBucket.of(path, bucket.file_name, bytes_data, tensor_data, save_id)
        write([], number, to_write, reports, pending, options.fsync)
        _, outcome = reports.get_nowait()
        if isinstance(outcome, BaseException):
            raise SaveError(f"{path}: {type(outcome).__name__}: {outcome}") from outcome
        if [result.storage_data.offset for result in outcome] != planned:
            raise SaveError(
                f"{path}: {len(planned)} items were planned, the writer reports {len(outcome)} or elsewhere"
            )
        results.append(_as_image(bucket, len(bytes_data), outcome, save_id))
    return results


def _as_image(bucket: BucketLayout, objects: int, outcome: Sequence[Any], save_id: bytes) -> ImageResult:
    """What a writer of buckets reports of one, as this package's own does; without sums if they are another's."""
    sums = [sums_of(result) for result in outcome]
    sealed = all(known is not None and known.file.save_id == save_id for known in sums)
    tensors = [known for known in sums[objects:] if known is not None and sealed]
    return ImageResult(
        file_name=bucket.file_name,
        size_bytes=bucket.image.size_bytes,
        crcs=array("I", [known.crc32 for known in tensors]),
        blocks=array("I", chain.from_iterable(known.blocks for known in tensors)),
        fill_s=0.0,
        crc_s=0.0,
        write_s=0.0,
        fsync_s=0.0,
        sealed=sealed,
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


def replaced_load_planner() -> Any:
    """Megatron's `MCoreLoadPlanner` if somebody has replaced its `create_local_plan`, otherwise None."""
    planner = getattr(megatron_module("strategies.torch"), "MCoreLoadPlanner", None)
    method = getattr(planner, "create_local_plan", None)
    return None if getattr(method, "__qualname__", "") == "MCoreLoadPlanner.create_local_plan" else planner


def read_through(planner_class: Any, reader: FileSystemReader, shards: Iterable[Any]) -> None:
    """Fill the data of `ShardedTensor`s by the plan of Megatron's load planner.

    Args:
        planner_class: Megatron's `MCoreLoadPlanner`.
        reader: of the checkpoint.
        shards: what to fill; those without data get some on the CPU.

    Raises:
        LoadError: see `FileSystemReader.read_data`.
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
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, False)  # with `state` it would look for tensors in it, and find none
    planner.state_dict = state
    planner.lookup_tensor = lambda index: state[index.fqn].__get_tensor_shard__(index)
    reader.set_up_storage_reader(metadata, False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
