"""Megatron's `dist_checkpointing` on a machine without CUDA, once this module is imported: it gets the CPU where it
names a CUDA device.

Nothing poses as CUDA, unlike under `pretend_cuda`: code under test sees the machine as it is. Nothing of torch is
changed: Megatron's modules get a `torch` of their own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

_CHECKPOINTING = "megatron.core.dist_checkpointing"
# Modules that name a CUDA device, and the functions that they hand it to.
_NAMING_CUDA = (
    "exchange_utils",
    "strategies.async_utils",
    "strategies.filesystem_async",
    "strategies.fully_parallel",
    "strategies.state_dict_saver",
    "tensor_aware_state_dict",
)
_FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros")


class _Instead(ModuleType):
    """A module, but for the names that are given."""

    def __init__(self, real: ModuleType, **names: Any) -> None:
        super().__init__(real.__name__, real.__doc__)
        vars(self).update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _serve() -> None:
    cuda = _Instead(torch.cuda, synchronize=lambda *_: None, current_device=lambda: "cpu")
    instead = _Instead(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    for name in _NAMING_CUDA:
        with contextlib.suppress(ImportError):  # some need packages of their own, and are not in use without these
            vars(import_module(f"{_CHECKPOINTING}.{name}"))["torch"] = instead
    # These move the tensors themselves, by a method; so the functions are ours.
    exchanges = import_module(f"{_CHECKPOINTING}.exchange_utils")
    for name in ("exchange_loaded_tensors_broadcast", "exchange_loaded_tensors_gather_rounds"):
        stock = vars(exchanges)[name]
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is stock:
                setattr(module, name, _exchange_on_host)


def _exchange_on_host(
    loaded_tensors: dict[Any, torch.Tensor],
    unloaded_shards: dict[Any, Any],
    shard_distribution: Any,
    parallelization_group: Any = None,
) -> dict[Any, torch.Tensor]:
    """Send each shard from the rank that has loaded it to those of the group that need it, in host memory. Takes and
    returns what Megatron's `exchange_loaded_tensors_broadcast` does.
    """
    owner_of_shard, _, sharded_tensors, ranks_needing = shard_distribution
    rank = dist.get_rank(parallelization_group)
    tensors = dict(loaded_tensors)
    for shard_id, owner in owner_of_shard.items():
        if len(ranks_needing[shard_id]) == 1:
            continue  # only the rank that has loaded it needs it
        source = owner if parallelization_group is None else dist.get_global_rank(parallelization_group, owner)
        if owner == rank:
            _broadcast(tensors[shard_id], source, parallelization_group)
        elif shard_id in unloaded_shards:
            wanted = unloaded_shards[shard_id]
            wanted.init_data("cpu")  # keeps what is allocated
            _broadcast(wanted.data, source, parallelization_group)
            tensors[shard_id] = wanted.data
        else:
            passing = sharded_tensors[shard_id].without_data()
            passing.init_data("cpu")
            _broadcast(passing.data, source, parallelization_group)
    return tensors


def _broadcast(tensor: torch.Tensor, source: int, group: Any) -> None:
    # As bytes: gloo knows fewer dtypes than torch.
    buffer = tensor.detach().contiguous()
    dist.broadcast(buffer.reshape(-1).view(torch.uint8), src=source, group=group)
    if buffer.data_ptr() != tensor.data_ptr() and dist.get_rank() != source:
        tensor.detach().copy_(buffer)


if not torch.cuda.is_available():
    _serve()
