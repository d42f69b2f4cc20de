"""What Megatron and frameworks import of nvidia-resiliency-ext (NVRx) for checkpoints, supplied where it is missing.

From 0.20 on Megatron has no asynchronous saves of its own: its training code imports queue, request and writer from
NVRx, which is not to be had for every platform. `supply` puts modules of these names in place that hand out ours.
NVRx that is installed is never covered; its queue is then served like Megatron's (`install.py`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.megatron._patches import Patches
from mcore_ckpt.megatron._versions import optional_module
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest

_logger = logger_of("mcore_ckpt")
NVRX = "nvidia_resiliency_ext"
ASYNC = f"{NVRX}.checkpointing.async_ckpt"
# The version that Megatron takes for new enough: it asks for 0.6.
_VERSION = "0.7.0+mcore_ckpt"


def is_installed() -> bool:
    """Whether NVRx itself can be imported."""
    return is_supplied() is False and find_spec(NVRX) is not None


def is_supplied() -> bool:
    """Whether the modules of its name are those of `supply`."""
    return getattr(sys.modules.get(NVRX), "__version__", None) == _VERSION


def core() -> Any:
    """Module `core` of NVRx, or that of `supply`; None where neither can be imported."""
    try:
        return import_module(f"{ASYNC}.core")
    except (ImportError, OSError):  # OSError: a library that its wheel was built for is missing
        return None


def async_request_class() -> Any:
    """The `AsyncRequest` named tuple that training code extends with finalize callbacks: Megatron's, from 0.20 on that
    of nvidia-resiliency-ext, or ours where there is neither.
    """
    module: Any = optional_module("strategies.async_utils") or core()
    return AsyncRequest if module is None else module.AsyncRequest


def supply(patches: Patches) -> None:
    """Put the modules in place unless NVRx is installed; all else of it stays missing."""
    if is_installed():
        return
    contents: dict[str, dict[str, Any]] = {
        NVRX: {"__version__": _VERSION},
        f"{NVRX}.checkpointing": {},
        ASYNC: {},
        **{f"{ASYNC}.{module}": values for module, values in _names().items()},
    }
    for name, values in contents.items():
        module = ModuleType(name, "Supplied by mcore_ckpt: nvidia-resiliency-ext is not installed.")
        vars(module).update(values)
        is_package = any(other.startswith(f"{name}.") for other in contents)
        module.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []  # nothing else is found in it
        patches.add_module(module)
    _logger.info("nvidia-resiliency-ext is not installed: mcore_ckpt supplies the names of it that save asynchronously")


def strategy_modules() -> dict[str, Any]:
    """What Megatron's `get_async_strategy` returns of NVRx, by name: ours."""
    return {name: value for values in _names().values() for name, value in values.items()}


class CachedMetadataFileSystemReader(FileSystemReader):
    """Ours under NVRx's name. Each load reads the index of what is there now: nothing is cached between loads."""

    def __init__(self, path: Any, cache_metadata: bool = True) -> None:
        super().__init__(path)

    @classmethod
    def clear_metadata_cache(cls, path: Any = None) -> None:
        """Nothing to clear."""


class CheckpointMetadataCache:
    """Accepted where NVRx takes one: a plan is made for each save."""

    def set_cached_global_metadata(self, cached_global_metadata: Metadata) -> None:
        """Nothing is kept."""


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Nothing is kept."""


def results_queue_is_made_when_needed(mp_mode: str = "spawn") -> None:
    """Called by a job ahead of its first save; ours needs no such queue."""


_Planned = tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> _Planned:
    """Plan a save of DCP's items on all ranks, ready for `storage_writer.get_save_function_and_args()`.

    Returns:
        The arguments of `save_state_dict_async_finalize`; the metadata is the coordinator's alone.
    """
    ranks = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), coordinator_rank)
    planner = DefaultSavePlanner() if planner is None else planner
    global_metadata: Metadata | None = None

    def local_plan() -> SavePlan:
        planner.set_up_planner(state_dict, is_coordinator=ranks.is_coordinator)
        storage_writer.set_up_storage_writer(ranks.is_coordinator)
        return storage_writer.prepare_local_plan(planner.create_local_plan())

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal global_metadata
        plans, global_metadata = planner.create_global_plan(plans)
        return storage_writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.reduce_scatter("plan", local_plan, global_plan))
    storage_writer.prepare_write_data(plan, planner)
    return storage_writer, global_metadata, ranks


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: _DistWrapper
) -> None:
    """Publish what all ranks have written.

    Raises:
        CheckpointException: on all ranks, if a rank could not write, or the coordinator not publish.
    """

    def publish(results: list[Any]) -> None:
        assert global_metadata is not None
        storage_writer.finish(global_metadata, results)

    dist_wrapper.all_reduce("write", storage_writer.retrieve_write_results, publish)


def _names() -> dict[str, dict[str, Any]]:
    """Module of `async_ckpt` -> name -> what stands in for it."""
    return {
        "core": {"AsyncCallsQueue": AsyncCallsQueue, "AsyncRequest": AsyncRequest},
        "cached_metadata_filesystem_reader": {"CachedMetadataFileSystemReader": CachedMetadataFileSystemReader},
        "filesystem_async": {
            "FileSystemWriterAsync": FileSystemWriterAsync,
            "_results_queue": None,
            "get_write_results_queue": results_queue_is_made_when_needed,
        },
        "state_dict_saver": {
            "CheckpointMetadataCache": CheckpointMetadataCache,
            "init_checkpoint_metadata_cache": init_checkpoint_metadata_cache,
            "save_state_dict_async_plan": save_state_dict_async_plan,
            "save_state_dict_async_finalize": save_state_dict_async_finalize,
        },
    }
