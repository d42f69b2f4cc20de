"""FileSystemReader: what arrives, what is read for it, and what it says of checkpoints that cannot be right."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import (
    ChecksumError,
)
from mcore_ckpt.load.reader import FileSystemReader
from tests.support.stored_layouts import (
    flip_byte,
    load_box,
    row_chunks,
    stock_item,
    whole,
    write_checkpoint,
)

MIB = 1024 * 1024


# ------------------------------------------------------------------------------------------------------ through DCP


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(300, 200),
        "large": torch.randn(1500, 1024),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(50, 70).bfloat16(),
        "mask": torch.rand(7, 9) > 0.5,
        "fp8": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "complex": torch.randn(9, 3, dtype=torch.complex64),
        "rng": {"seed": 1234, "states": [1, 2, 3]},
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else {"seed": 0, "states": [0, 0, 0]}
        for k, v in state.items()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_dcp_load_takes_a_checkpoint_of_stock_dcp(state: dict[str, Any], tmp_path: Path) -> None:
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    leaf, transposed = torch.zeros(300, 200, requires_grad=True), torch.zeros(1024, 1500).t()
    for loaded in (blank(state), {"weight": leaf, "large": transposed}):
        dcp.load(loaded, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        for key, value in loaded.items():
            same = bits(value).equal(bits(state[key])) if isinstance(value, torch.Tensor) else value == state[key]
            assert same, key


class Dequantizing(DefaultLoadPlanner):
    """Makes a buffer for each destination, and keeps it until the commit."""

    live_bytes = peak_bytes = 0

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        buffer = torch.empty(read_item.lengths)
        self.live_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.live_bytes -= tensor.nbytes
        super().resolve_tensor(read_item).copy_(tensor * 2)


def test_a_planner_with_buffers_of_its_own_holds_few_of_them_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_ckpt.load.reader._BATCH_BYTES", 4 * MIB)
    state = {f"w{number}": torch.randn(512, 1024) for number in range(12)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    planner = Dequantizing()
    reader = FileSystemReader(tmp_path)
    dcp.load(loaded, storage_reader=reader, planner=planner, no_dist=True)
    assert all(loaded[fqn].equal(tensor * 2) for fqn, tensor in state.items())
    assert planner.peak_bytes <= 4 * MIB


# -------------------------------------------------------------------------------------------------- what is read


def test_files_are_closed_after_the_load_and_after_an_error(tmp_path: Path) -> None:
    tensor = torch.randn(512, 512)
    index = write_checkpoint(tmp_path, {"w": row_chunks(tensor, 4)}, files=4)

    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.exists(link) and str(tmp_path) in os.readlink(link)]

    reader = FileSystemReader(tmp_path)
    assert load_box(reader, "w", tensor).equal(tensor)
    assert open_files() == []
    flip_byte(index, "w", at_fraction=0.5)
    with pytest.raises(ChecksumError):
        load_box(FileSystemReader(tmp_path), "w", tensor)
    assert open_files() == []


# -------------------------------------------------------------------------------------- what cannot be read by ranges


def test_a_tensor_stored_with_strides_is_decoded_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {f"w{number}": torch.randn(30, 20) for number in range(3)}
    write_checkpoint(
        tmp_path, {k: whole(v) for k, v in tensors.items()}, item_of=lambda t: stock_item(t.t().contiguous().t())
    )
    reader = FileSystemReader(tmp_path)
    with caplog.at_level(logging.WARNING, logger="mcore_ckpt"):
        for fqn, tensor in tensors.items():
            assert load_box(reader, fqn, tensor, Box((3, 2), (20, 11))).equal(tensor[3:23, 2:13])
    assert reader.stats.fallbacks == 3
    assert len([record for record in caplog.records if "decoded completely" in record.message]) == 1


# ---------------------------------------------------------------------------------------------------------- objects


def test_a_damaged_object_is_refused(tmp_path: Path) -> None:
    index = write_checkpoint(tmp_path, {}, {"extra": {"bytes": b"x" * 5000}})
    item = index.objects["extra"].item
    path = tmp_path / item.file
    content = bytearray(path.read_bytes())
    content[content.index(b"xxxxx") + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"extra.*__0_0\.distcp"):
        FileSystemReader(tmp_path).read_object("extra")
