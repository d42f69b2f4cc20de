"""FileSystemReader: what arrives, what is read for it, and what it says of checkpoints that cannot be right."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import (
    ChecksumError,
    UnsafePickleError,
)
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.load import files, reads
from mcore_ckpt.load.placement import ReadBuffer
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage.base import Storage
from tests.support.stored_layouts import (
    column_chunks,
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


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.detach().reshape(-1).view(torch.uint8).equal(right.detach().reshape(-1).view(torch.uint8))
    else:
        assert left == right


def test_dcp_load_takes_a_checkpoint_of_stock_dcp(state: dict[str, Any], tmp_path: Path) -> None:
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    loaded = blank(state)
    reader = FileSystemReader(tmp_path)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    for key, value in state.items():
        assert_same(loaded[key], value)
    assert reader.stats.fallbacks == 0
    assert reader.stats.records_checked > 8


def test_dcp_load_fills_views_leaves_and_other_strides_in_place(state: dict[str, Any], tmp_path: Path) -> None:
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    leaf = torch.zeros(300, 200, requires_grad=True)
    transposed = torch.zeros(1024, 1500).t()
    dcp.load({"weight": leaf, "large": transposed}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert_same(leaf, state["weight"])
    assert_same(transposed.contiguous(), state["large"])


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


def test_reset_moves_to_another_checkpoint(tmp_path: Path) -> None:
    for number in (1, 2):
        write_checkpoint(tmp_path / str(number), {"w": whole(torch.full((4,), float(number)))})
    reader = FileSystemReader(str(tmp_path / "1"))
    assert load_box(reader, "w", torch.zeros(4)).tolist() == [1.0] * 4
    reader.reset(tmp_path / "2")
    assert reader.checkpoint_id == tmp_path / "2"
    assert load_box(reader, "w", torch.zeros(4)).tolist() == [2.0] * 4


def test_checkpoint_ids_are_paths_and_urls_of_known_stores(tmp_path: Path) -> None:
    assert FileSystemReader.validate_checkpoint_id(tmp_path)
    assert FileSystemReader.validate_checkpoint_id("checkpoints/iter_0000100")
    assert FileSystemReader.validate_checkpoint_id("s3://bucket/iter_0000100")
    assert not FileSystemReader.validate_checkpoint_id("abfss://bucket/iter_0000100")


# -------------------------------------------------------------------------------------------------- what is read


def test_small_tensors_share_few_reads(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": torch.randn(number % 7 + 1, 100) for number in range(500)}
    write_checkpoint(tmp_path, {fqn: whole(tensor) for fqn, tensor in tensors.items()}, files=2)
    reader = FileSystemReader(tmp_path)
    destinations = {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()}
    reader.read_items([ReadRequest(fqn, t, (0, 0), tuple(t.shape)) for fqn, t in destinations.items()])
    assert all(destinations[fqn].equal(tensor) for fqn, tensor in tensors.items())
    assert reader.stats.reads <= 4
    assert reader.stats.records_checked == 500


@pytest.mark.parametrize("shape", [(2048, 1024), (64, 65536), (512, 1024)])
def test_halves_of_row_parallel_chunks_with_rows_worth_a_read(shape: tuple[int, int], tmp_path: Path) -> None:
    """4 -> 8: each new shard is half of every row of a stored chunk."""
    tensor = torch.randn(shape)
    write_checkpoint(tmp_path, {"w": column_chunks(tensor, 4)})
    reader = FileSystemReader(tmp_path)
    half = shape[1] // 8
    box = Box((0, half), (shape[0], half))
    assert load_box(reader, "w", tensor, box).equal(tensor[:, half : 2 * half])
    if half * 4 > 32 * 1024:
        assert reader.stats.bytes_read <= 1.1 * reader.stats.bytes_needed
    else:
        assert reader.stats.reads <= 8, "short rows are not read one by one"


def test_halves_of_short_rows_that_are_cached_are_copied_exactly(tmp_path: Path) -> None:
    """4 -> 8 with rows of 2 KB: far too short for a read each, and reading them all would be twice what is needed."""
    tensor = torch.randn(2048, 1024)
    write_checkpoint(tmp_path, {"w": column_chunks(tensor, 2)}, padding=[5])
    for path in tmp_path.iterdir():
        path.read_bytes()
    reader = FileSystemReader(tmp_path)
    assert load_box(reader, "w", tensor, Box((0, 256), (2048, 256))).equal(tensor[:, 256:512])
    assert reader.stats.bytes_read <= 1.1 * reader.stats.bytes_needed
    through_buffers = FileSystemReader(tmp_path, options=LoadOptions(page_cache="on"))
    assert load_box(through_buffers, "w", tensor, Box((0, 256), (2048, 256))).equal(tensor[:, 256:512])
    assert through_buffers.stats.reads <= 12, "many rows at once"


def test_headers_of_large_items_are_read_once_for_each_reader(tmp_path: Path) -> None:
    tensor = torch.randn(1024, 1024)
    write_checkpoint(tmp_path, {"w": whole(tensor)})
    reader = FileSystemReader(tmp_path)
    load_box(reader, "w", tensor, Box((0, 0), (100, 1024)))
    before = reader.stats.reads
    load_box(reader, "w", tensor, Box((300, 0), (100, 1024)))
    assert reader.stats.reads == before + 1


def test_a_chunk_wanted_by_several_destinations_is_read_once(tmp_path: Path) -> None:
    tensor = torch.randn(2048, 1024)
    write_checkpoint(tmp_path, {"w": whole(tensor)})
    reader = FileSystemReader(tmp_path)
    first, second, part = torch.zeros(2048, 1024), torch.zeros(1024, 2048).t(), torch.zeros(2048, 10)
    reader.read_items(
        [
            ReadRequest("w", first, (0, 0), (2048, 1024)),
            ReadRequest("w", second, (0, 0), (2048, 1024)),
            ReadRequest("w", part, (0, 7), (2048, 10)),
        ]
    )
    assert first.equal(tensor)
    assert second.equal(tensor)
    assert part.equal(tensor[:, 7:17])
    assert reader.stats.bytes_read <= 1.01 * tensor.nbytes
    assert reader.stats.records_checked == 1


def test_read_buffers_stay_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(4 * MIB)
    write_checkpoint(tmp_path, {"w": whole(tensor), "v": whole(tensor[: 2 * MIB].bfloat16())})
    sizes: list[int] = []

    class Counted(ReadBuffer):
        __slots__ = ()

        def __init__(self, size_bytes: int, pinned: bool = False) -> None:
            sizes.append(size_bytes)
            super().__init__(size_bytes, pinned)

    monkeypatch.setattr(reads, "ReadBuffer", Counted)
    monkeypatch.setattr(files, "WINDOW_BYTES", MIB)
    monkeypatch.setattr(Storage, "reads_at_once", 2)
    destination = torch.zeros(4 * MIB, dtype=torch.float64)
    cast = torch.zeros(2 * MIB)
    FileSystemReader(tmp_path).read_items(
        [ReadRequest("w", destination, (0,), (4 * MIB,)), ReadRequest("v", cast, (0,), (2 * MIB,))]
    )
    assert destination.equal(tensor.double())
    assert cast.equal(tensor[: 2 * MIB].bfloat16().float())
    assert sum(sizes) <= 2 * MIB + 64 * 1024


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


def test_objects_that_lie_together_share_a_read(tmp_path: Path) -> None:
    objects = {f"state/shard_{rank}_100": [rank] for rank in range(100)}
    write_checkpoint(tmp_path, {}, objects)
    reader = FileSystemReader(tmp_path)
    assert reader.read_objects(objects) == objects
    assert reader.stats.reads == 1


class Intruder:
    pass


def test_an_object_outside_the_allow_list_is_refused_also_through_dcp(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"extra": Intruder()})
    reader = FileSystemReader(tmp_path)
    with pytest.raises(UnsafePickleError, match="Intruder"):
        reader.read_object("extra")
    with pytest.raises(CheckpointException, match=r"(?s)UnsafePickleError.*Intruder.*allowed_classes"):
        dcp.load({"extra": None}, storage_reader=reader, no_dist=True)


def test_a_damaged_object_is_refused(tmp_path: Path) -> None:
    index = write_checkpoint(tmp_path, {}, {"extra": {"bytes": b"x" * 5000}})
    item = index.objects["extra"].item
    path = tmp_path / item.file
    content = bytearray(path.read_bytes())
    content[content.index(b"xxxxx") + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"extra.*__0_0\.distcp"):
        FileSystemReader(tmp_path).read_object("extra")
