"""Replacing names in another package so that every holder of a name sees it, and taking it all back.

Two things that Megatron's `dist_checkpointing` may lack are replaced so: a CUDA device, and `numpy.product`. Nothing of
torch or numpy is changed for that: Megatron's modules get a `torch` and a `numpy` of their own, which differ from the
real ones in that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Change:
    owner: Any
    name: str
    original: Any
    replacement: Any


class Patches:
    """Replacements that have been made, in order."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._originals: dict[str, Any] = {}
        self._added: list[ModuleType] = []

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Set one attribute of a class or module."""
        original = vars(owner).get(name, _ABSENT)
        setattr(owner, name, replacement)
        self._changes.append(_Change(owner, name, original, replacement))
        self._originals[_dotted(owner, name)] = None if original is _ABSENT else original

    def replace(self, module: ModuleType, name: str, replacement: Any) -> None:
        """Replace a module's global, and the globals of all other modules that hold the same object."""
        original = vars(module)[name]
        self.set(module, name, replacement)
        for other, alias in _globals_holding(original):
            setattr(other, alias, replacement)
            self._changes.append(_Change(other, alias, original, replacement))

    def add_module(self, module: ModuleType) -> None:
        """Let an import of the module's name find it, which finds none now."""
        package, _, name = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        self._added.append(module)
        if package:
            setattr(sys.modules[package], name, module)

    def original(self, module: ModuleType, name: str) -> Any:
        """What a module's global was before it was replaced, or is if it was not."""
        return self._originals.get(_dotted(module, name), getattr(module, name, None))

    def replaced(self) -> dict[str, Any]:
        """Dotted name -> the original; one entry for each name, not for each module that has imported it."""
        return dict(self._originals)

    def undo(self) -> None:
        """Put back every original, also in modules that have imported a replacement since, under the same name."""
        for change in reversed(self._changes):
            if vars(change.owner).get(change.name, _ABSENT) is not change.replacement:
                continue  # replaced again since, by other code, which alone may remove that
            if change.original is _ABSENT:
                delattr(change.owner, change.name)
                continue
            setattr(change.owner, change.name, change.original)
            if isinstance(change.owner, ModuleType):
                for other, alias in _globals_holding(change.replacement):
                    # Under another name it may be an import from this package, which stays what it is.
                    if alias == change.name:
                        setattr(other, alias, change.original)
        for module in self._added:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
        self._added.clear()
        self._changes.clear()
        self._originals.clear()


def _dotted(owner: Any, name: str) -> str:
    prefix = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{prefix}.{name}"


def _globals_holding(value: Any) -> Iterator[tuple[ModuleType, str]]:
    """Globals of other packages' modules that are `value`. Looks into dictionaries only, so nothing lazy is loaded."""
    module: Any  # anything can be put into sys.modules
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "mcore_ckpt":
            continue
        for alias, held in list(vars(module).items()):
            if held is value:
                yield module, alias


# --- numpy 2 ----------------------------------------------------------------------------------------------------------


MODULES_CALLING_PRODUCT = ("exchange_utils", "mapping", "validation")


class _NumpyWithProduct(ModuleType):
    """`numpy`, with the function that it lost in 2.0 and that `dist_checkpointing` of 0.12 to 0.15 calls."""

    def __init__(self) -> None:
        super().__init__("numpy", numpy.__doc__)
        self.product = numpy.prod

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)


def serve_with_numpy_2(patches: Patches, modules: Iterable[ModuleType]) -> None:
    """Let Megatron's modules that call `np.product` run with a numpy that has none."""
    if not hasattr(numpy, "product"):
        for module in modules:
            if vars(module).get("np") is numpy:
                patches.set(module, "np", _NumpyWithProduct())


# --- no CUDA ----------------------------------------------------------------------------------------------------------

# What `dist_checkpointing` calls with a CUDA device, in 0.12 to 0.19, and the modules of it that do.
_FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros")
MODULES_NAMING_CUDA = (
    "exchange_utils",
    "strategies.async_utils",
    "strategies.filesystem_async",
    "strategies.fully_parallel",
    "strategies.state_dict_saver",
    "tensor_aware_state_dict",
)


class _CudaStandIn:
    """`torch.cuda` for code that synchronizes a device which is not there, or names the current one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs on a device that does not exist."""

    def current_device(self) -> str:
        """The device on which small tensors for collectives belong."""
        return "cpu"


class _TorchWithoutCuda(ModuleType):
    """`torch`, in which a CUDA device in a tensor factory means the CPU."""

    def __init__(self) -> None:
        super().__init__("torch", torch.__doc__)
        self.cuda = _CudaStandIn()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def serve_without_cuda(patches: Patches, modules: Iterable[ModuleType]) -> None:
    """Let the modules named in `MODULES_NAMING_CUDA` run without CUDA; does nothing where torch sees a CUDA device."""
    if torch.cuda.is_available():
        return
    stand_in = _TorchWithoutCuda()
    for module in modules:
        patches.set(module, "torch", stand_in)
        for name in ("exchange_loaded_tensors_broadcast", "exchange_loaded_tensors_gather_rounds"):
            # These move the tensors themselves, by a method; so the whole function is ours.
            if getattr(vars(module).get(name), "__module__", None) == module.__name__:
                patches.replace(module, name, exchange_on_host)


def exchange_on_host(
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
