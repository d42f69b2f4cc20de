"""What the ranks of the tests of foreign checkpoints do: a model under FSDP2, saved by plain DCP."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


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


def save_megatron_fsdp(
    rank: int, target: Path, tensors: dict[str, torch.Tensor], arguments: dict[str, Any], progress: dict[str, Any]
) -> None:
    """Save what Megatron-LM does with `--ckpt-format fsdp_dtensor`: its keys, DTensors whose shards are uneven."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def shard(tensor: torch.Tensor) -> DTensor:
        cut = (tensor.shape[0] * 2) // 3
        part = tensor[:cut] if rank == 0 else tensor[cut:]
        sharded = DTensor.from_local(
            part.clone(), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        update_uneven_dtensor_chunk_metadata(sharded)
        return sharded

    from argparse import Namespace

    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    meta = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "step": 4}
    state = {
        "model": {f"module.{key}": shard(tensor) for key, tensor in tensors.items()},
        "optimizer": {
            "state": {
                f"module.module.{key}": {"exp_avg": shard(2 * tensor), "exp_avg_sq": shard(tensor * tensor)}
                for key, tensor in tensors.items()
            },
            "param_to_group_meta": {f"module.module.{key}": dict(meta) for key in tensors},
        },
        "args": Namespace(**arguments),
        "iteration": 9,
        "checkpoint_version": 3.0,
        **progress,
    }
    dcp.save(state, checkpoint_id=target)


MESHES = {"fsdp": ("shard",), "hsdp": ("replicate", "shard"), "fsdp-tp": ("shard", "tp")}
if torch.__version__ < "2.7":  # 2.6 divides no tensor twice whose rows it cannot divide evenly
    del MESHES["fsdp-tp"]


def save_divided(rank: int, root: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The same tensors under several divisions, saved by plain DCP with this package's writer and with stock's."""
    import mcore_ckpt

    world = torch.distributed.get_world_size()
    for name, axes in MESHES.items():
        shape = (world,) if len(axes) == 1 else (world // 2, 2)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=axes)
        model = _module_of(tensors)
        if "tp" in axes:
            for owner in model.modules():
                for key, value in list(owner.named_parameters(recurse=False)):
                    divided = torch.nn.Parameter(distribute_tensor(value.detach(), mesh["tp"], [Shard(value.ndim - 1)]))
                    owner.register_parameter(key, divided)
            mesh = mesh["shard"]
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        for side, writer in (("ours", mcore_ckpt.FileSystemWriterAsync), ("stock", dcp.FileSystemWriter)):
            dcp.save(state, storage_writer=writer(root / f"{name}-{side}"))
