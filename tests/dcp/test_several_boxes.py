"""Tensors that say more than their sizes do: several slices in one, other tensors inside, or no memory at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from mcore_ckpt import load_sharded_optimizer_state
from mcore_ckpt.core.errors import LoadError, PlanError
from mcore_ckpt.dcp.reader import FileSystemReader, MCoreLoadPlanner
from mcore_ckpt.dcp.writer import FileSystemWriterAsync, MCoreSavePlanner
from mcore_ckpt.load.requests import ReadRequest

FULL = torch.arange(24.0).view(4, 6)
# Two boxes of columns, and two of rows, which differ in their count: a sum of sizes says something else.
BOXES = {
    "columns": [(slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 6))],
    "rows": [(slice(0, 1), slice(0, 6)), (slice(1, 4), slice(0, 6))],
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Boxes(LocalShardsWrapper):
    """Tells the size of all of it, as a DTensor around it does."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return FULL.shape

    def size(self, *_: Any) -> torch.Size:  # type: ignore[override]
        return FULL.shape


def boxes_of(full: torch.Tensor, kind: str) -> Boxes:
    offsets = [tuple(axis.start for axis in box) for box in BOXES[kind]]
    return Boxes([full[box].clone() for box in BOXES[kind]], offsets)  # type: ignore[return-value]


def wrapped(full: torch.Tensor, kind: str) -> DTensor:
    """What TorchRec makes of an embedding table that is divided."""
    if torch.__version__.startswith("2.6."):
        pytest.skip("its DTensor takes the view of a tensor of several slices, which is none")
    mesh, local = init_device_mesh("cpu", (1,)), boxes_of(full, kind)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def is_full(tensor: Any, kind: str) -> bool:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return all(part.equal(FULL[box]) for part, box in zip(local.local_shards(), BOXES[kind], strict=True))


def checkpointable(full: torch.Tensor) -> torch.Tensor:
    """A plain tensor that stands for the columns 1 to 4 of `FULL`, with two columns of padding between."""
    local = torch.zeros(4, 6)
    local[:, :2], local[:, 4:] = full[:, 1:3], full[:, 3:5]
    local.global_shape, local.global_offsets = (4, 6), ((0, 1), (0, 3))  # type: ignore[attr-defined]
    local.local_offsets, local.local_sizes = ((0, 0), (0, 4)), ((4, 2), (4, 2))  # type: ignore[attr-defined]
    return local


@pytest.mark.parametrize(
    ("planner", "make", "kind"),
    [
        (dcp.DefaultLoadPlanner, boxes_of, "columns"),
        (MCoreLoadPlanner, wrapped, "columns"),
        (MCoreLoadPlanner, boxes_of, "rows"),
    ],
)
def test_several_slices_are_loaded(tmp_path: Path, planner: Any, make: Any, kind: str) -> None:
    dcp.save({"model": {"w": FULL}}, checkpoint_id=tmp_path)
    tensor = make(torch.zeros(4, 6), kind)
    dcp.load({"model": {"w": tensor}}, storage_reader=FileSystemReader(tmp_path), planner=planner())
    assert is_full(tensor, kind)


def test_several_slices_are_saved(tmp_path: Path) -> None:
    writer, tensor = FileSystemWriterAsync(tmp_path), wrapped(FULL, "columns")
    dcp.async_save({"w": tensor}, storage_writer=writer, planner=MCoreSavePlanner()).result()
    for reader in (FileSystemReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        whole = torch.zeros(4, 6)
        dcp.load({"w": whole}, storage_reader=reader)
        assert whole.equal(FULL)


def test_optimizer_state_of_several_slices(tmp_path: Path) -> None:
    dcp.save({"optimizer": {"exp_avg": {"w": FULL}}}, checkpoint_id=tmp_path)
    state = load_sharded_optimizer_state({"w": wrapped(torch.ones(4, 6), "rows")}, tmp_path)
    assert is_full(state["optimizer"]["exp_avg"]["w"], "rows")


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no CheckpointableTensor")
def test_slices_that_a_plain_tensor_stands_for(tmp_path: Path) -> None:
    dcp.save({"w": FULL, "optimizer": {"exp_avg": {"w": FULL}}}, checkpoint_id=tmp_path / "f")
    for planner in (dcp.DefaultLoadPlanner(), MCoreLoadPlanner()):
        local = checkpointable(torch.zeros(4, 6))
        dcp.load({"w": local}, storage_reader=FileSystemReader(tmp_path / "f"), planner=planner)
        assert local.equal(checkpointable(FULL))
    state = load_sharded_optimizer_state({"w": checkpointable(torch.zeros(4, 6))}, tmp_path / "f")
    assert state["optimizer"]["exp_avg"]["w"].equal(checkpointable(FULL))
    # What is staged stands for the same slices: columns 1 to 4, which DCP's own planner does not ask to be all.
    planner = dcp.DefaultSavePlanner()
    writer = FileSystemWriterAsync(tmp_path / "s")
    staged = writer.stage({"w": checkpointable(FULL)})
    planner.set_up_planner(staged, is_coordinator=True)
    items = planner.create_local_plan().items
    assert [tuple(item.tensor_data.chunk.offsets) for item in items] == [(0, 1), (0, 3)]


class Quantized(torch.Tensor):
    """Holds codes and a scale, as torchao's classes do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        return cls(func(args[0].codes, *args[1:]), func(args[0].scale, *args[1:]))


def fake(_: object = None) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4, 6)


UNSAVED = {
    "quantized": (lambda: Quantized(torch.ones(4, dtype=torch.int8), torch.ones(1)), r"Quantized holds other tensors"),
    "meta": (lambda: torch.empty(4, 6, device="meta"), "on .*meta"),
}


def _save(path: Path, tensor: torch.Tensor) -> None:
    dcp.save({"layer": {"weight": tensor}}, storage_writer=FileSystemWriterAsync(path))


def _async_save(path: Path, tensor: torch.Tensor) -> None:
    dcp.async_save({"layer": {"weight": tensor}}, storage_writer=FileSystemWriterAsync(path)).result()


@pytest.mark.parametrize(("kind", "save"), [("quantized", _save), ("meta", _async_save)])
def test_what_has_no_elements_is_refused_by_its_key(tmp_path: Path, kind: str, save: Any) -> None:
    make, said = UNSAVED[kind]
    with pytest.raises((PlanError, dcp.CheckpointException), match=rf"layer\.weight.*{said}"):
        save(tmp_path, make())
    assert not (tmp_path / ".metadata").exists()


def test_a_destination_without_memory_is_refused_by_its_key(tmp_path: Path) -> None:
    dcp.save({"w": FULL}, storage_writer=FileSystemWriterAsync(tmp_path))
    with pytest.raises(LoadError, match=r"w: the destination .* is on the meta device"):
        FileSystemReader(tmp_path).read_items([ReadRequest("w", fake(), (0, 0), (4, 6))])
