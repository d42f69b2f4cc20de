"""Checkpoint strategies for Megatron-Core's `torch_dist` format, on torch.distributed.checkpoint.

The public names are resolved on first use, so that `import mcore_ckpt` costs nothing and imports neither torch nor
megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_ckpt.errors import *  # noqa: F403  (errors.__all__ is the exception tree)
from mcore_ckpt.errors import __all__ as _error_names
from mcore_ckpt.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from mcore_ckpt.async_calls import AsyncCallsQueue
    from mcore_ckpt.checkpoint import open_checkpoint
    from mcore_ckpt.load_planner import MCoreLoadPlanner
    from mcore_ckpt.megatron_install import install, uninstall
    from mcore_ckpt.optimizer_state import load_sharded_optimizer_state
    from mcore_ckpt.planner import MCoreSavePlanner
    from mcore_ckpt.reader import FileSystemReader
    from mcore_ckpt.registry import get_strategy, register_strategy
    from mcore_ckpt.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
    from mcore_ckpt.writer import FileSystemWriterAsync

__version__ = "0.1.0"

_HOME = {
    "AsyncCallsQueue": "async_calls",
    "FileSystemReader": "reader",
    "FileSystemWriterAsync": "writer",
    "MCoreLoadPlanner": "load_planner",
    "MCoreSavePlanner": "planner",
    "TorchDistLoadStrategy": "strategy",
    "TorchDistSaveStrategy": "strategy",
    "get_strategy": "registry",
    "install": "megatron_install",
    "load_sharded_optimizer_state": "optimizer_state",
    "open_checkpoint": "checkpoint",
    "register_strategy": "registry",
    "uninstall": "megatron_install",
}

__all__ = [
    "AsyncCallsQueue",
    "FileSystemReader",
    "FileSystemWriterAsync",
    "LoadOptions",
    "MCoreLoadPlanner",
    "MCoreSavePlanner",
    "SaveOptions",
    "TorchDistLoadStrategy",
    "TorchDistSaveStrategy",
    "__version__",
    "get_strategy",
    "install",
    "load_sharded_optimizer_state",
    "open_checkpoint",
    "register_strategy",
    "uninstall",
    *_error_names,
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
