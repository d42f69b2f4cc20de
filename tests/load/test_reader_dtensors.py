"""DTensors saved on real ranks, by stock DCP and by ours, and read under other placements and on other ranks.

What PyTorch's tests of DTensors, tensor parallelism and HSDP ask of a reader and a writer, and reads that follow it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.dcp.reader import FileSystemReader, MCoreLoadPlanner
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.gloo_ranks import run_ranks

SHAPES = {"large": (768, 1000), "odd": (7, 5), "vector": (1030,), "short": (2, 3)}


def global_tensor(fqn: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(fqn))
    return torch.randn(SHAPES[fqn], generator=generator)


# How a matrix lies on the ranks: the mesh (its last axis takes what ranks there are), and what each axis does to it.
LAYOUTS: dict[str, tuple[int, list[Placement]]] = {
    "rows": (1, [Shard(0)]),
    "columns": (1, [Shard(1)]),
    "copies": (1, [Replicate()]),
    "grid": (2, [Shard(0), Shard(1)]),
    "rows of rows": (2, [Shard(0), Shard(0)]),
    "copies of rows": (2, [Replicate(), Shard(0)]),
}
READERS: dict[str, type[StorageReader]] = {"ours": FileSystemReader, "stock": dcp.FileSystemReader}
WRITERS: dict[str, type[StorageWriter]] = {"ours": FileSystemWriterAsync, "stock": dcp.FileSystemWriter}


def mesh_and_placements(fqn: str, layout: str) -> tuple[DeviceMesh, list[Placement]]:
    axes, placed = LAYOUTS[layout]
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,) if axes == 1 else (2, world // 2))
    last = len(SHAPES[fqn]) - 1
    return mesh, [Shard(min(one.dim, last)) if isinstance(one, Shard) else one for one in placed]


def save_with_dcp(rank: int, path: str, layouts: list[str], writers: list[str]) -> None:
    """Save the tensors once for each layout and writer, below `path`."""
    for layout in layouts:
        state = {fqn: distribute_tensor(global_tensor(fqn), *mesh_and_placements(fqn, layout)) for fqn in SHAPES}
        for writer in writers:
            dcp.save({**state, "step": 7}, storage_writer=WRITERS[writer](f"{path}/{layout} by {writer}"))  # type: ignore[call-arg]


def load_with_reader(rank: int, path: str, layouts: list[str], reader_kind: str = "ours") -> list[tuple[int, int]]:
    """Load under each layout; returns bytes read and needed of each load, for ours."""
    costs = []
    for layout in layouts:
        state = {fqn: distribute_tensor(torch.zeros(SHAPES[fqn]), *mesh_and_placements(fqn, layout)) for fqn in SHAPES}
        reader: Any = READERS[reader_kind](path)  # type: ignore[call-arg]
        loaded = {**state, "step": 0}
        dcp.load(loaded, storage_reader=reader)
        for fqn, tensor in state.items():
            assert tensor.full_tensor().equal(global_tensor(fqn)), f"rank {rank}: {fqn} of {path} under {layout}"
        assert loaded["step"] == 7
        if reader_kind == "ours":
            costs.append((reader.stats.bytes_read, reader.stats.bytes_needed))
    return costs


def load_all(rank: int, root: str, layouts: list[str], each: bool) -> dict[str, tuple[int, int]]:
    """Load all that was saved below `root` under each layout, and under two of them what stock has written or reads."""
    costs = {}
    for path in sorted(Path(root).iterdir()):
        saved, _, writer = path.name.partition(" by ")
        some = [layouts[(list(LAYOUTS).index(saved) + 1) % len(layouts)], layouts[0]]
        wanted = layouts if each and writer == "ours" else some
        found = load_with_reader(rank, str(path), wanted)
        costs |= {f"{path.name} -> {layout}": cost for layout, cost in zip(wanted, found, strict=True)}
        if writer == "ours":
            load_with_reader(rank, str(path), some[:1], "stock")
    return costs


@pytest.mark.parametrize(
    ("saved", "worlds"),
    [
        (["columns", "grid"], (4, 3)),
        pytest.param(list(LAYOUTS), (4, 3, 1), marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_dtensors_reshard(saved: list[str], worlds: tuple[int, ...], tmp_path: Path) -> None:
    """Every layout to others (or to every other), on fewer ranks, too; both writers, both readers."""
    run_ranks(save_with_dcp, 4, str(tmp_path), saved, ["ours", "stock"], deadline_s=200)
    for path in tmp_path.iterdir():
        assert verify_checkpoint(path).problems == ()
    for world in worlds:
        layouts = [name for name, (axes, _) in LAYOUTS.items() if axes == 1 or world == 4]
        each = saved == list(LAYOUTS) and world == 4
        for costs in run_ranks(load_all, world, str(tmp_path), layouts, each, deadline_s=200):
            assert len(costs) >= 3 * len(saved)
            for name, (bytes_read, bytes_needed) in costs.items():
                # Rows are read and nothing else, where no sums of blocks are to be compared.
                if "by stock" in name and not name.endswith("-> columns") and world < 4:
                    assert bytes_read <= 1.4 * bytes_needed + 64 * 1024, name


def save_alone(rank: int, path: str) -> None:
    """Each rank saves a checkpoint of its own: its chunks of DTensors, and what no other rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {fqn: distribute_tensor(global_tensor(fqn), mesh, [Shard(0)]) for fqn in ("large", "vector")}
    own = {**state, "own": torch.full((5,), float(rank)), "step": 7 + rank}
    dcp.save(own, storage_writer=dcp.FileSystemWriter(path), use_collectives=False)


def load_alone(rank: int, path: str) -> None:
    """With either planner, under the layout of the save; another one is refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = r"(?s)(?=.*large: 384000 stored elements are requested).*hold 192000 of them"
    for planner in (None, MCoreLoadPlanner()):
        reader = FileSystemReader(path)
        for dim in (0, 0, 1):  # the second time the index is known
            shards = {"large": [Shard(dim)], "vector": [Shard(0)]}
            state = {fqn: distribute_tensor(torch.zeros(SHAPES[fqn]), mesh, placed) for fqn, placed in shards.items()}
            own = {**state, "own": torch.zeros(5), "step": 0}
            if dim == 1:
                with pytest.raises((CorruptCheckpointError, dcp.CheckpointException), match=said):
                    dcp.load(own, storage_reader=reader, planner=planner)
                continue
            dcp.load(own, storage_reader=reader, planner=planner)
            assert own["own"].tolist() == [rank] * 5
            assert own["step"] == 7 + rank
            for fqn, tensor in state.items():
                assert tensor.full_tensor().equal(global_tensor(fqn)), f"rank {rank}: {fqn}"


@pytest.mark.skipif(not hasattr(dcp.FileSystemWriter, "_get_metadata_path"), reason="this torch saves with collectives")
def test_ranks_that_saved_without_collectives_load_what_they_saved(tmp_path: Path) -> None:
    run_ranks(save_alone, 2, str(tmp_path))
    assert not (tmp_path / ".metadata").exists()
    run_ranks(load_alone, 2, str(tmp_path))
    for look in (open_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointNotFoundError, match=r"2 single ranks \(0 to 1\).*use `dcp.load` on 2 ranks"):
            look(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"holds no __2\.metadata, but"):
        FileSystemReader(tmp_path).read_metadata(rank=2)
