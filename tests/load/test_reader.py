"""FileSystemReader: what arrives, what is read for it, and what it refuses: the refusal names key, file and bytes."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

import mcore_ckpt
from mcore_ckpt import SaveOptions
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    KindMismatchError,
    MissingKeyError,
    ShapeMismatchError,
)
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.index import ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load.reader import read_shards
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.local_files import drop_cached
from tests.support.stored_layouts import (
    StoredTensor,
    flip_item,
    load_box,
    row_chunks,
    stock_item,
    whole,
    write_checkpoint,
)
from tests.support.stored_saves import shard

pytestmark = pytest.mark.quick

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
    monkeypatch.setattr("mcore_ckpt.dcp.reader._BATCH_BYTES", 4 * MIB)
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
    flip_item(index, "w")
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


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture
def reader(tmp_path: Path) -> FileSystemReader:
    write_checkpoint(
        tmp_path,
        {"decoder.layers.mlp.weight": row_chunks(torch.randn(8, 4), 2), "large": whole(torch.randn(1024, 1024))},
        {"decoder.extra": [1]},
    )
    return FileSystemReader(tmp_path)


def test_a_missing_key_names_similar_ones(reader: FileSystemReader) -> None:
    with pytest.raises(MissingKeyError, match=r"decoder\.layers\.mlp\.wieght.*decoder\.layers\.mlp\.weight"):
        load_box(reader, "decoder.layers.mlp.wieght", torch.zeros(8, 4))
    with pytest.raises(MissingKeyError, match="nothing_like_it"):
        reader.read_object("nothing_like_it")


def test_objects_and_tensors_are_not_mixed_up(reader: FileSystemReader) -> None:
    with pytest.raises(KindMismatchError, match=r"decoder\.extra: a tensor is requested"):
        load_box(reader, "decoder.extra", torch.zeros(8, 4))
    with pytest.raises(KindMismatchError, match="large: an object is requested"):
        reader.read_object("large")


@pytest.mark.parametrize(
    ("offsets", "sizes", "global_shape"),
    [((0, 0), (9, 4), None), ((6, 0), (4, 4), None), ((0,), (8,), None), ((0, 0), (8, 4), (16, 4))],
)
def test_shapes_have_to_agree(
    reader: FileSystemReader, offsets: tuple[int, ...], sizes: tuple[int, ...], global_shape: tuple[int, ...] | None
) -> None:
    request = ReadRequest("decoder.layers.mlp.weight", torch.zeros(sizes), offsets, sizes, global_shape)
    with pytest.raises(ShapeMismatchError, match=r"decoder\.layers\.mlp\.weight.*\[8, 4\]"):
        reader.read_items([request])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_partial_request_takes_the_overlap_and_leaves_the_rest(reader: FileSystemReader, dtype: torch.dtype) -> None:
    stored = load_box(reader, "decoder.layers.mlp.weight", torch.zeros(8, 4)).to(dtype)
    destination = torch.full((10, 4), 7, dtype=dtype)
    reader.read_items([ReadRequest("decoder.layers.mlp.weight", destination, (4, 0), (10, 4), allow_partial=True)])
    assert destination[:4].equal(stored[4:])
    assert destination[4:].eq(7.0).all()
    outside = ReadRequest("decoder.layers.mlp.weight", destination, (8, 0), (10, 4), allow_partial=True)
    reader.read_items([outside])
    assert destination[4:].eq(7.0).all()


def test_a_box_that_no_chunk_holds_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tensor = torch.randn(8, 4)
    write_checkpoint(tmp_path, {"w": StoredTensor(tensor, [Box((0, 0), (3, 4)), Box((5, 0), (3, 4))])})
    reader = FileSystemReader(tmp_path)
    for request in (
        ReadRequest("w", torch.zeros(8, 4), (0, 0), (8, 4)),
        ReadRequest("w", torch.zeros(10, 4), (2, 0), (10, 4), allow_partial=True),
    ):
        with pytest.raises(CorruptCheckpointError, match="w: the stored chunks do not hold the wanted box"):
            reader.read_items([request])
    assert reader.stats.reads == 0
    destination = torch.zeros(10, 4)
    reader.read_items([ReadRequest("w", destination, (5, 0), (10, 4), allow_partial=True)])
    assert destination[:3].equal(tensor[5:])


@pytest.mark.parametrize(("start", "length"), [(0, 1), (-1, 2), (-100, 5000)])
def test_overlapping_items_are_refused(start: int, length: int, tmp_path: Path) -> None:
    tensors = {"a": row_chunks(torch.randn(8, 4), 2), "b": whole(torch.randn(4))}
    index = write_checkpoint(tmp_path, tensors, {"o": [1]}, padding=[200])
    assert load_box(FileSystemReader(tmp_path), "b", torch.zeros(4)).equal(tensors["b"].tensor)
    second = index.tensors["a"].chunks[1].item
    index.objects["o"] = ObjectEntry("o", StoredItem(second.file, second.offset + start, length))
    (tmp_path / ".metadata").write_bytes(encode_metadata(index))
    with pytest.raises(CorruptCheckpointError, match=r"a at \[4, 0\] .* the same bytes"):
        load_box(FileSystemReader(tmp_path), "b", torch.zeros(4))


@pytest.mark.parametrize("empty", [(8, 0), (0, 0)])
def test_chunks_without_elements_may_share_an_item(empty: tuple[int, int], tmp_path: Path) -> None:
    """DCP knows chunks by their offsets: of all shards that are empty, `.metadata` has the place of one."""
    tensor = torch.randn(8, 4)
    boxes = [Box(empty, (0, 4)), Box((0, 0), (8, 4)), Box(empty, (0, 4))]
    index = write_checkpoint(tmp_path / "a", {"w": StoredTensor(tensor, boxes)})
    if empty == (0, 0):  # the place of the one with elements is the one that is known
        last = index.tensors["w"].chunks[1]
        chunks = tuple(StoredChunk(offsets, sizes, last.item) for offsets, sizes in boxes)
        index.tensors["w"] = TensorEntry("w", "float32", (8, 4), chunks)
        (tmp_path / "a" / ".metadata").write_bytes(encode_metadata(index))
    planned = torch.zeros(8, 4)
    dcp.load({"w": planned}, storage_reader=FileSystemReader(tmp_path / "a"), no_dist=True)
    assert planned.equal(tensor)
    assert load_box(FileSystemReader(tmp_path / "a"), "w", torch.zeros(8, 4)).equal(tensor)
    assert verify_checkpoint(tmp_path / "a").problems == ()
    with mcore_ckpt.open_checkpoint(tmp_path / "a") as opened:
        assert opened["w"].torch().equal(tensor)
    assert main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "1", "--pp", "1"]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


# -------------------------------------------------------------------------------------------------- damaged checkpoints


def test_a_missing_data_file_is_named_with_the_key(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": whole(torch.zeros(4))})
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"w at \[0\].*__0_0\.distcp"):
        load_box(FileSystemReader(tmp_path), "w", torch.zeros(4))


def test_more_cells_than_any_save_makes_chunks_of_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    count = 3_000_000
    index = write_checkpoint(tmp_path, {"w": whole(torch.zeros(count, 1))})
    note = {"w": {"nd_reformulated_orig_global_shape": (count,)}}
    (tmp_path / ".metadata").write_bytes(encode_metadata(replace(index, mcore_data=note)))
    with pytest.raises(CorruptCheckpointError, match=r"w: stored as a grid \[3000000\] .* in 1 chunks"):
        read_shards(FileSystemReader(tmp_path), [shard("w", torch.empty(count), (count,), (0,))])


@pytest.mark.parametrize(
    "boxes", [[(0, 8)], [(0, 8), (8, 8), (12, 4)], [(0, 0)]], ids=["missing", "twice", "chunk without elements"]
)
def test_dcp_does_not_leave_a_part_of_a_tensor_as_it_was(tmp_path: Path, boxes: list[tuple[int, int]]) -> None:
    """DCP plans the overlaps that it finds, and asks no further."""
    stored = StoredTensor(torch.randn(16, 4), [Box((start, 0), (size, 4)) for start, size in boxes])
    write_checkpoint(tmp_path, {"w": stored})
    with pytest.raises(CheckpointException, match=r"w: 64 stored elements .* hold (32|80|0) of them"):
        dcp.load({"w": torch.zeros(16, 4)}, storage_reader=FileSystemReader(tmp_path), no_dist=True)


# --- destinations in one memory ---------------------------------------------------------------------------------------

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
