"""Loading through a replacement of `MCoreLoadPlanner.create_local_plan`, Megatron's own.

Code written for Megatron's planner patches that method: to record what a rank reads from where, to drop items. Where it
has been replaced, a load asks that planner for its plan and carries it out; where it has not, nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from mcore_ckpt.errors import PlanError
from mcore_ckpt.reader import FileSystemReader
from mcore_ckpt.shards import box_sizes

__all__ = ["read_through"]


class _LocalShards:
    """All of a rank's shards of one tensor, as DCP's planners take them (the protocol `_Checkpointable`)."""

    def __init__(self) -> None:
        self._shards: dict[tuple[int, ...], torch.Tensor] = {}

    def add(self, shard: Any) -> None:
        self._shards[tuple(shard.global_offset)] = shard.data.detach().view(box_sizes(shard))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        raise PlanError(f"{fqn}: these shards are for loading")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), tensor.shape) for at, tensor in self._shards.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._shards[tuple(index.offset or ())]


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
        if shard.data is None:
            shard.init_data("cpu", torch.zeros if shard.allow_shape_mismatch else torch.empty)
        elif shard.allow_shape_mismatch:
            shard.data.detach().zero_()
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
