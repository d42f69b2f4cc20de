"""The optimizer's state alone: resharded, without the rest of the checkpoint being read."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mcore_ckpt import (
    LoadError,
    MissingKeyError,
    ShapeMismatchError,
    TorchDistSaveStrategy,
    load_sharded_optimizer_state,
)
from mcore_ckpt.load.reader import CheckpointReader
from tests.support.gloo_ranks import on_ranks, run_ranks
from tests.support.meanwhile import behind


def whole(seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + 48, dtype=torch.float32).view(8, 6)


def trained(rank: int = 0) -> dict[str, Any]:
    return {
        "model": {"linear.weight": whole(0), "linear.bias": torch.arange(8.0)},
        "optimizer": {
            "state": {
                "linear.weight": {"exp_avg": whole(100), "exp_avg_sq": whole(200), "step": torch.tensor(7.0)},
                "linear.bias": {"exp_avg": torch.arange(8.0) + 300, "step": torch.tensor(7.0)},
            },
            "param_groups": [{"lr": 0.1, "params": ["linear.weight", "linear.bias"]}],
        },
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(trained(), checkpoint_id=tmp_path)
    return tmp_path


def test_plain_tensors_whole_and_nested_as_saved(saved: Path) -> None:
    model = {"linear.weight": torch.empty(8, 6), "linear.bias": torch.empty(8)}
    loaded = load_sharded_optimizer_state(model, saved)
    assert set(loaded) == {"optimizer"}
    weight = loaded["optimizer"]["state"]["linear.weight"]
    assert torch.equal(weight["exp_avg"], whole(100))
    assert torch.equal(weight["exp_avg_sq"], whole(200))
    assert weight["step"] == 7
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert loaded["optimizer"]["param_groups"][0]["params"] == ["linear.weight", "linear.bias"]


PLACES: dict[str, Any] = {
    "a list as a part": ("optimizer", ["x"], 1),
    "the place of another key": ("optimizer", "state", "linear.weight", "exp_avg_sq"),
    "a position that takes all memory": ("optimizer", "l", 99_999_999_999),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_is_not_that_of_the_key_is_refused(place: str, saved: Path) -> None:
    key, file = "optimizer.state.linear.weight.exp_avg", saved / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    assert key in metadata.planner_data
    metadata.planner_data[key] = PLACES[place]
    file.write_bytes(pickle.dumps(metadata))
    model = {"linear.weight": torch.empty(8, 6), "linear.bias": torch.empty(8)}
    with pytest.raises(LoadError, match=key.replace(".", r"\.") + ".*planner_data"):
        load_sharded_optimizer_state(model, saved)


@pytest.mark.parametrize(
    ("shape", "offset", "part"),
    [
        ((4, 3), (2, 3), lambda state: state[2:6, 3:6]),
        *(
            ((count,), start, lambda state, at=slice(start, start + count): state.view(-1)[at])
            for start, count in ((0, 48), (5, 20), (13, 1), (40, 8))
        ),
    ],
)
def test_a_box_or_a_flat_shard_at_an_offset(shape: Any, offset: Any, part: Any, saved: Path) -> None:
    loaded = load_sharded_optimizer_state(
        {"linear.weight": torch.empty(shape)}, saved, offsets={"linear.weight": offset}
    )
    state = loaded["optimizer"]["state"]["linear.weight"]
    assert torch.equal(state["exp_avg"], part(whole(100)))
    assert torch.equal(state["exp_avg_sq"], part(whole(200)))


def test_what_cannot_be_is_named(saved: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=saved / "model")
    with pytest.raises(MissingKeyError, match="optimizer"):
        load_sharded_optimizer_state({"w": torch.empty(3)}, saved / "model")
    for tensor, offset in ((torch.empty(40), 20), (torch.empty(9, 6), (0, 0))):
        with pytest.raises(ShapeMismatchError, match=r"linear\.weight"):
            load_sharded_optimizer_state({"linear.weight": tensor}, saved, offsets={"linear.weight": offset})


def dtensors(rank: int, path: Path, world: int, save: bool) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def spread(tensor: torch.Tensor, axis: int = 0) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(axis)])

    if save:
        state = trained()
        state["model"] = {key: spread(value) for key, value in state["model"].items()}
        for values in state["optimizer"]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in values:
                    values[name] = spread(values[name])
        dcp.save(state, checkpoint_id=path)
        return
    model = {"linear.weight": spread(torch.zeros(8, 6), 1), "linear.bias": spread(torch.zeros(8))}
    loaded = load_sharded_optimizer_state(model, path)["optimizer"]["state"]
    assert loaded["linear.weight"]["exp_avg"].placements == model["linear.weight"].placements
    assert torch.equal(loaded["linear.weight"]["exp_avg"].full_tensor(), whole(100))
    assert torch.equal(loaded["linear.weight"]["exp_avg_sq"].full_tensor(), whole(200))
    assert torch.equal(loaded["linear.bias"]["exp_avg"].full_tensor(), torch.arange(8.0) + 300)


def test_dtensors_get_the_layout_of_their_parameters(tmp_path: Path) -> None:
    run_ranks(dtensors, 2, tmp_path, 2, True)
    run_ranks(dtensors, 4, tmp_path, 4, False)


@on_ranks(2)
def test_megatron_reads_the_optimizers_part_only(rank: int, tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        shard = ShardedTensor.from_rank_offsets
        return {
            "model": {"w": shard("decoder.w", torch.full((1000, 100), fill), (0, rank, 2))},
            "optimizer": {
                "exp_avg": shard("optimizer.state.exp_avg.decoder.w", torch.full((9, 3), fill), (0, rank, 2))
            },
        }

    save(state(5.0), str(tmp_path), TorchDistSaveStrategy())
    dist.barrier()
    read: list[int] = []
    with behind(CheckpointReader, "read_items", lambda self, _: read.append(self.stats.bytes_read)):
        loaded = load_sharded_optimizer_state(state(0.0), tmp_path)
    assert (loaded["optimizer"]["exp_avg"] == 5.0).all()
    assert set(loaded) == {"optimizer"}
    assert read
    assert max(read) < 100_000, "the model's 400 kB were read, too"
