"""DTensors saved by stock DCP on real ranks, read by FileSystemReader under other placements and on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, zeros

from mcore_ckpt.core.errors import CheckpointNotFoundError, ChecksumError, CorruptCheckpointError
from mcore_ckpt.dcp.planners import MCoreLoadPlanner
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.gloo_ranks import rank_outcomes, run_ranks

SHAPES = {"large": (768, 1000), "odd": (7, 5), "vector": (1030,), "short": (2, 3)}


def global_tensor(fqn: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(fqn))
    return torch.randn(SHAPES[fqn], generator=generator)


def placements(fqn: str, dim: int) -> list[Placement]:
    return [Shard(min(dim, len(SHAPES[fqn]) - 1))]


def save_with_dcp(rank: int, path: str, dim: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {fqn: distribute_tensor(global_tensor(fqn), mesh, placements(fqn, dim)) for fqn in SHAPES}
    dcp.save({**state, "step": 7}, checkpoint_id=path)


def load_with_reader(rank: int, path: str, dim: int | None) -> tuple[int, int]:
    """Loads under `Shard(dim)` (None: replicated); returns bytes read and needed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        fqn: zeros(*shape, device_mesh=mesh, placements=[Replicate()] if dim is None else placements(fqn, dim))
        for fqn, shape in SHAPES.items()
    }
    reader = FileSystemReader(path)
    loaded = {**state, "step": 0}
    dcp.load(loaded, storage_reader=reader)
    for fqn, tensor in state.items():
        assert tensor.full_tensor().equal(global_tensor(fqn)), f"rank {rank}: {fqn}"
    assert loaded["step"] == 7
    return reader.stats.bytes_read, reader.stats.bytes_needed


@pytest.mark.parametrize(("save_dim", "load_dim"), [(0, 1), (1, 0), (1, None)])
def test_dtensors_reshard(save_dim: int, load_dim: int | None, tmp_path: Path) -> None:
    run_ranks(save_with_dcp, 4, str(tmp_path), save_dim)
    assert verify_checkpoint(tmp_path).problems == ()
    for world_size in (1, 3):
        for bytes_read, bytes_needed in run_ranks(load_with_reader, world_size, str(tmp_path), load_dim):
            assert bytes_read <= 1.4 * bytes_needed + 64 * 1024


def test_a_damaged_file_fails_every_rank(tmp_path: Path) -> None:
    run_ranks(save_with_dcp, 2, str(tmp_path), 0)
    path = tmp_path / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outcomes = rank_outcomes(load_with_reader, 2, str(tmp_path), 0)
    assert [outcome.ok for outcome in outcomes] == [False, False]
    assert all(ChecksumError.__name__ in outcome.error_text for outcome in outcomes)
    assert all("large" in outcome.error_text and path.name in outcome.error_text for outcome in outcomes)


def save_alone(rank: int, path: str, ours: bool) -> None:
    """Each rank saves a checkpoint of its own: its chunks of DTensors, and what no other rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {fqn: distribute_tensor(global_tensor(fqn), mesh, [Shard(0)]) for fqn in ("large", "vector")}
    own = {**state, "own": torch.full((5,), float(rank)), "step": 7 + rank}
    writer = FileSystemWriterAsync(path) if ours else dcp.FileSystemWriter(path)
    dcp.save(own, storage_writer=writer, use_collectives=False)


def load_alone(rank: int, path: str) -> list[str]:
    """Loads with either planner under the layout of the save; returns why another layout is refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    refused = []
    for planner in (None, MCoreLoadPlanner()):
        reader = FileSystemReader(path)
        for dim in (0, 0, 1):  # the second time the index is known
            state = {
                fqn: zeros(*SHAPES[fqn], device_mesh=mesh, placements=placements(fqn, dim))
                for fqn in ("large", "vector")
            }
            own = {**state, "own": torch.zeros(5), "step": 0}
            try:
                dcp.load(own, storage_reader=reader, planner=planner)
            except (CorruptCheckpointError, dcp.CheckpointException) as error:
                refused.append(str(error))
                continue
            assert own["own"].tolist() == [rank] * 5
            assert own["step"] == 7 + rank
            for fqn, tensor in state.items():
                assert tensor.full_tensor().equal(global_tensor(fqn)), f"rank {rank}: {fqn}"
    return refused


@pytest.mark.skipif(not hasattr(dcp.FileSystemWriter, "_get_metadata_path"), reason="this torch saves with collectives")
@pytest.mark.parametrize("ours", [False, True])
def test_ranks_that_saved_without_collectives_load_what_they_saved(ours: bool, tmp_path: Path) -> None:
    run_ranks(save_alone, 2, str(tmp_path), ours)
    assert not (tmp_path / ".metadata").exists()
    for refused in run_ranks(load_alone, 2, str(tmp_path)):
        assert len(refused) == 2
        assert all("large: 384000 stored elements are wanted" in text for text in refused)
        assert all("hold 192000 of them" in text for text in refused)
    for look in (open_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointNotFoundError, match=r"2 single ranks \(0 to 1\).*use `dcp.load` on 2 ranks"):
            look(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"holds no __2\.metadata, but"):
        FileSystemReader(tmp_path).read_metadata(rank=2)
