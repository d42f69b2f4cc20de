"""What people hand to torch.distributed.checkpoint beside plain tensors, and what DCP's own tests ask of its storage.

Each case is saved and read by ours, saved by ours and read by stock, and the other way round: FSDP models with their
optimizers, parts of a checkpoint.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from mcore_ckpt import FileSystemReader, FileSystemWriterAsync
from tests.support.gloo_ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated", "ignore:Detected an existing checkpoint")
Make = Callable[..., Any]
SIDES: dict[str, tuple[Make, Make]] = {
    "ours": (FileSystemWriterAsync, FileSystemReader),
    "read by stock": (FileSystemWriterAsync, dcp.FileSystemReader),
    "written by stock": (dcp.FileSystemWriter, FileSystemReader),
}
sides = pytest.mark.parametrize("side", list(SIDES))


# --- models and optimizers


def a_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(9, 14), torch.nn.LayerNorm(14), torch.nn.ReLU(), torch.nn.Linear(14, 5))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The same batch on every rank, so that a model on one rank trains as one on two does."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 9, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def fsdp(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard  # not in the oldest torch, nor is what a test below imports

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]
    return fully_shard(model, mesh=mesh)


def train_and_save(rank: int, root: str) -> list[float]:
    model = fsdp(a_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    for name, (write, _) in SIDES.items():
        dcp.save({"model": weights, "optim": states, "epoch": 3}, storage_writer=write(f"{root}/{name}"))
    return train(model, optimizer, range(3, 6))


def load_and_train(rank: int, root: str) -> dict[str, list[float]]:
    losses = {}
    for name, (_, read) in SIDES.items():
        torch.manual_seed(0)
        model = a_model()
        torch.nn.init.zeros_(model[0].weight)  # type: ignore[index, arg-type]
        model = fsdp(model) if dist.get_world_size() > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": states, "epoch": 0}
        dcp.load(state, storage_reader=read(f"{root}/{name}"))
        assert state["model"] is weights, "filled in place"
        assert state["epoch"] == 3
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        assert optimizer.param_groups[0]["lr"] == 0.05
        losses[name] = train(model, optimizer, range(3, 6))
    return losses


def test_a_model_under_fsdp_trains_on_as_if_it_had_never_ended(tmp_path: Path) -> None:
    """With its optimizer; on more ranks, and on one without FSDP."""
    expected = run_ranks(train_and_save, 2, str(tmp_path), deadline_s=200)[0]
    for ranks in (3, 1):
        for losses in run_ranks(load_and_train, ranks, str(tmp_path), deadline_s=200):
            assert losses == {name: pytest.approx(expected, rel=1e-6) for name in SIDES}, ranks


# --- one process


@sides
def test_parts_of_a_checkpoint_are_loaded_by_key(tmp_path: Path, side: str) -> None:
    write, read = SIDES[side]
    model = {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.ones(4, dtype=torch.bfloat16)}}
    dcp.save({"model": model, "optimizer": {"state": {"a": torch.ones(2)}, "lr": 0.5}}, storage_writer=write(tmp_path))
    found = _load_state_dict_from_keys("model", storage_reader=read(tmp_path))
    assert found["model"]["a"].equal(model["a"])
    assert found["model"]["b"]["c"].equal(model["b"]["c"])
    assert found["model"]["b"]["c"].dtype is torch.bfloat16
    assert "optimizer" not in found
    assert _load_state_dict_from_keys(storage_reader=read(tmp_path))["optimizer"]["lr"] == 0.5

    more = {"model": {"a": torch.zeros(2, 3), "new": torch.full((2,), 9.0)}}
    dcp.load(more, storage_reader=read(tmp_path), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert more["model"]["a"].equal(model["a"])
    assert more["model"]["new"].tolist() == [9, 9]
    with pytest.raises(dcp.CheckpointException, match=r"model\.new"):
        dcp.load(more, storage_reader=read(tmp_path))
    with pytest.raises(dcp.CheckpointException, match=r"(?i)size mismatch.*model\.a|model\.a.*(?i:size mismatch)"):
        dcp.load({"model": {"a": torch.zeros(3, 3)}}, storage_reader=read(tmp_path))


class Making(dict[str, Any]):
    """Makes its values when they are asked for."""

    def items(self) -> Any:
        for key, number in super().items():
            yield key, torch.full((4,), number)


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_dcp_saves_asynchronously_in_a_thread_and_in_a_process(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        writer = FileSystemWriterAsync(tmp_path / "0")
        made = Making(zip("abcdef", range(6), strict=True))
        state: dict[str, Any] = {"w": torch.zeros(50, 30), "step": [0], "made": made}
        for step in range(2):
            state["w"].fill_(step)
            state["step"][0] = step
            writer.reset(tmp_path / str(step))
            saving = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType(kind))
            state["w"].fill_(-1)
            saving.result()  # type: ignore[union-attr]
            loaded: dict[str, Any] = {
                "w": torch.full((50, 30), 9.0),
                "step": [9],
                "made": {key: torch.zeros(4) for key in made},
            }
            dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / str(step)))
            assert loaded["w"].unique().tolist() == [step]
            assert loaded["step"] == [step]
            assert [value[0].item() for value in loaded["made"].values()] == [*range(6)]
    finally:
        dist.destroy_process_group()
