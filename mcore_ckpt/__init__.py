"""Checkpoint strategies for Megatron-Core's `torch_dist` format, on torch.distributed.checkpoint.

The public names are resolved on first use, so that `import mcore_ckpt` costs nothing and imports neither torch nor
megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_ckpt.core.errors import *  # noqa: F403  (errors.__all__ is the exception tree)
from mcore_ckpt.core.errors import __all__ as _error_names
from mcore_ckpt.core.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from mcore_ckpt.core.fingerprints import StateFingerprint
    from mcore_ckpt.dcp.reader import FileSystemReader, MCoreLoadPlanner
    from mcore_ckpt.dcp.writer import FileSystemWriterAsync, MCoreSavePlanner
    from mcore_ckpt.directory.retention import PruneReport, prune_run
    from mcore_ckpt.megatron.certificate import Certificate, certify
    from mcore_ckpt.megatron.install import install, uninstall
    from mcore_ckpt.megatron.optimizer_state import load_sharded_optimizer_state
    from mcore_ckpt.megatron.strategy import (
        TorchDistLoadStrategy,
        TorchDistSaveStrategy,
        get_strategy,
        register_strategy,
    )
    from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint, merge_checkpoints
    from mcore_ckpt.reshard.conversion import ConversionReport
    from mcore_ckpt.reshard.reshard import reshard_checkpoint
    from mcore_ckpt.save.async_queue import AsyncCallsQueue
    from mcore_ckpt.tools.checkpoint import Checkpoint, LazyTensor, open_checkpoint
    from mcore_ckpt.tools.diff import DiffReport, checkpoint_fingerprint, diff_checkpoints
    from mcore_ckpt.tools.inspection import CheckpointSummary, summarize_checkpoint
    from mcore_ckpt.tools.runs import CopyReport, RunReport, copy_checkpoint, list_run
    from mcore_ckpt.tools.verify import VerifyReport, repair_checkpoint, verify_checkpoint

__version__ = "0.1.0"

_NAMES_OF = {
    "core.fingerprints": "StateFingerprint",
    "dcp.reader": "FileSystemReader MCoreLoadPlanner",
    "dcp.writer": "FileSystemWriterAsync MCoreSavePlanner",
    "directory.retention": "PruneReport prune_run",
    "megatron.certificate": "Certificate certify",
    "megatron.install": "install uninstall",
    "megatron.optimizer_state": "load_sharded_optimizer_state",
    "megatron.strategy": "TorchDistLoadStrategy TorchDistSaveStrategy get_strategy register_strategy",
    "models.conversions": "export_checkpoint import_checkpoint merge_checkpoints",
    "reshard.conversion": "ConversionReport",
    "reshard.reshard": "reshard_checkpoint",
    "save.async_queue": "AsyncCallsQueue",
    "tools.checkpoint": "Checkpoint LazyTensor open_checkpoint",
    "tools.diff": "DiffReport checkpoint_fingerprint diff_checkpoints",
    "tools.inspection": "CheckpointSummary summarize_checkpoint",
    "tools.runs": "CopyReport RunReport copy_checkpoint list_run",
    "tools.verify": "VerifyReport repair_checkpoint verify_checkpoint",
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = [
    "AsyncCallsQueue",
    "Certificate",
    "Checkpoint",
    "CheckpointSummary",
    "ConversionReport",
    "CopyReport",
    "DiffReport",
    "FileSystemReader",
    "FileSystemWriterAsync",
    "LazyTensor",
    "LoadOptions",
    "MCoreLoadPlanner",
    "MCoreSavePlanner",
    "PruneReport",
    "RunReport",
    "SaveOptions",
    "StateFingerprint",
    "TorchDistLoadStrategy",
    "TorchDistSaveStrategy",
    "VerifyReport",
    "__version__",
    "certify",
    "checkpoint_fingerprint",
    "copy_checkpoint",
    "diff_checkpoints",
    "export_checkpoint",
    "get_strategy",
    "import_checkpoint",
    "install",
    "list_run",
    "load_sharded_optimizer_state",
    "merge_checkpoints",
    "open_checkpoint",
    "prune_run",
    "register_strategy",
    "repair_checkpoint",
    "reshard_checkpoint",
    "summarize_checkpoint",
    "uninstall",
    "verify_checkpoint",
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


def homes() -> dict[str, str]:
    """The module of each public name that is resolved on first use, within the package."""
    return dict(_HOME)
