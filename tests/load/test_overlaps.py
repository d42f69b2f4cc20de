"""Of two destinations in one memory the one that was requested last stays, all of it, and no file is called damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from mcore_ckpt import SaveOptions
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from tests.support.local_files import drop_cached

pytestmark = pytest.mark.quick

# In elements of float32: an item of a few bytes, one below and one beyond what is read with its neighbours.
SIZES = {"small": (64, 8), "packed": (256, 256), "long": (512, 4096)}


def tied(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("embedding", "between", "output"), memory)


def crossing(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Columns of one buffer that overlap by halves."""
    rows, columns = memory.shape
    buffer = torch.zeros(rows, 2 * columns)
    parts = enumerate(("embedding", "between", "output"))
    return {key: buffer[:, at * columns // 2 :][:, :columns] for at, key in parts}


class OrderPlanner(DefaultLoadPlanner):
    """Keeps the order in which DCP requests tensors: it differs between versions of torch."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.order = [item.dest_index.fqn for item in plan.items]
        return plan


def save(path: Path, state: dict[str, Any], writer: str) -> None:
    if writer == "stock":
        storage_writer = dcp.FileSystemWriter(path, thread_count=2, single_file_per_rank=False)
    else:
        storage_writer = FileSystemWriterAsync(path, options=SaveOptions(thread_count=2))
    dcp.save(state, storage_writer=storage_writer, no_dist=True)


@pytest.mark.parametrize("writer", ["stock", "ours"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("placed", [tied, crossing])
def test_the_last_one_stays(
    tmp_path: Path, writer: str, size: str, placed: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    # The key that comes first may lie in the file of the one that comes last.
    state = {key: torch.full(SIZES[size], value) for key, value in (("output", 1.0), ("between", 2.0))}
    state |= {"a": torch.full(SIZES[size], 3.0), "embedding": torch.full(SIZES[size], 4.0)}
    save(tmp_path, {**state, "0": ["an object"]}, writer)
    for _ in range(3):
        for file in tmp_path.iterdir():
            drop_cached(file)
        found: dict[str, Any] = placed(torch.zeros(SIZES[size]))
        found |= {"a": torch.zeros(SIZES[size]), "0": []}
        planner = OrderPlanner()
        dcp.load(found, storage_reader=FileSystemReader(tmp_path), planner=planner, no_dist=True)
        expected = placed(torch.zeros(SIZES[size]))
        for key in planner.order:
            if key in expected:
                expected[key].copy_(state[key])
        assert all(found[key].equal(tensor) for key, tensor in expected.items())
        assert found["a"].equal(state["a"])
