"""Saves into an object store, in this process and in others, whose state is told by one number."""

from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import FileSystemReader, FileSystemWriterAsync, SaveOptions
from tests.support.gloo_ranks import start_apart


def state(value: float = 1.0, rows: int = 600) -> dict[str, Any]:
    """20 KB a row, and two objects."""
    return {"weight": torch.full((rows, 5000), value), "step": torch.tensor(int(value)), "told": {"value": value}}


def save(url: str | Path, value: float = 1.0, rows: int = 600, **options: Any) -> None:
    writer = FileSystemWriterAsync(url, options=SaveOptions(**options))
    dcp.save(state(value, rows), storage_writer=writer, no_dist=True)


def loaded(url: str | Path, rows: int = 600, planner: Any = None) -> float:
    """The value that all of a checkpoint has."""
    found = state(0.0, rows)
    dcp.load(found, storage_reader=FileSystemReader(url), planner=planner, no_dist=True)
    value = float(found["told"]["value"])
    assert torch.equal(found["weight"], torch.full((rows, 5000), value))
    assert int(found["step"]) == int(value)
    return value


def start_saving(*arguments: Any, **options: Any) -> BaseProcess:
    """As `save`, in a process of its own, which ends with 1 if the save fails."""
    return start_apart(partial(save, *arguments, **options))


# --- shards as this package looks at them, where no Megatron is needed ------------------------------------------------


def shard(key: str, data: Any, shape: tuple[int, ...], offset: tuple[int, ...], replica: Any = 0, **more: Any) -> Any:
    """What this package looks at of Megatron's `ShardedTensor`."""
    fields = {
        "key": key,
        "data": data,
        "local_shape": tuple(data.shape) if isinstance(data, torch.Tensor) else shape,
        "global_shape": shape,
        "global_offset": offset,
        "replica_id": replica,
        "prepend_axis_num": 0,
        "flattened_range": None,
        "allow_shape_mismatch": False,
    }
    return SimpleNamespace(**{**fields, **more})
