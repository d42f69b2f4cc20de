"""Parameters that are stored flattened, in grids that no save has made: time and memory in proportion, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load import reader
from mcore_ckpt.load.reader import FileSystemReader
from tests.support.stored_layouts import whole, write_checkpoint

pytestmark = pytest.mark.timeout(60)


def in_cells_of_one_element(directory: Path, count: int) -> Any:
    """A parameter of `count` elements, stored as one chunk that is said to be as many cells, and a shard to fill."""
    index = write_checkpoint(directory, {"w": whole(torch.arange(float(count)).view(count, 1))})
    note = {"w": {"nd_reformulated_orig_global_shape": (count,)}}
    (directory / ".metadata").write_bytes(encode_metadata(replace(index, mcore_data=note)))
    return SimpleNamespace(
        key="w",
        data=torch.empty(count),
        global_offset=(0,),
        local_shape=(count,),
        global_shape=(count,),
        prepend_axis_num=0,
        allow_shape_mismatch=False,
        flattened_range=None,
    )


def test_cells_of_one_element_are_read_so_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BATCH_BYTES", 512 * 1024)
    shard = in_cells_of_one_element(tmp_path, 600)
    asked: list[int] = []

    class Reader(FileSystemReader):
        def read_items(self, requests: Sequence[Any]) -> None:  # type: ignore[override]
            asked.append(len(requests))
            super().read_items(requests)

    reader.read_shards(Reader(tmp_path), [shard])
    assert shard.data.equal(torch.arange(600.0))
    assert max(asked) <= 512


def test_more_cells_than_any_save_makes_chunks_of_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    shard = in_cells_of_one_element(tmp_path, 3_000_000)
    with pytest.raises(CorruptCheckpointError, match=r"w: stored as a grid \[3000000\] .* in 1 chunks"):
        reader.read_shards(FileSystemReader(tmp_path), [shard])
