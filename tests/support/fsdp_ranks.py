"""What the ranks of the tests of foreign checkpoints do: a model under FSDP2, saved by plain DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

__all__ = ["save_fsdp"]


def _module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A tree of modules whose parameters have these names."""
    root = torch.nn.Module()
    for key, tensor in tensors.items():
        *path, leaf = key.split(".")
        node = root
        for name in path:
            if name not in node._modules:
                node.add_module(name, torch.nn.Module())
            node = node.get_submodule(name)
        node.register_parameter(leaf, torch.nn.Parameter(tensor.clone()))
    return root


def save_fsdp(rank: int, root: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Shard a model with these parameters over all ranks, by layer, and save it in the ways that people do."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = _module_of(tensors)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    dcp.save(get_model_state_dict(model), checkpoint_id=root / "plain")
    dcp.save({"app": {"model": model.state_dict(), "epoch": 3}}, checkpoint_id=root / "wrapped")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=root / "trained")
