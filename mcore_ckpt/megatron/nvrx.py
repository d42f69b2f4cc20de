"""The async queues of Megatron and of nvidia-resiliency-ext (NVRx), and what is imported of NVRx where it is missing.

The methods of a queue class are replaced, not the class: training code makes queues when it is imported, frameworks
keep them as attributes, and all of them must be served. Each gets a queue of ours of its own at its first use.

From 0.20 on Megatron has no asynchronous saves of its own: its training code imports queue, request and writer from
NVRx, which is not to be had for every platform. `supply` puts modules of these names in place that hand out ours, for
the format `torch_dist` alone.
NVRx that is installed is never covered; its queue is then served like Megatron's.
"""

from __future__ import annotations

import functools
import sys
import weakref
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.megatron._versions import MegatronErrors, Patches, optional_module, patches
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest

_logger = logger_of("mcore_ckpt")
NVRX = "nvidia_resiliency_ext"
ASYNC = f"{NVRX}.checkpointing.async_ckpt"
# The version that Megatron takes for new enough: it asks for 0.6.
_VERSION = "0.7.0+mcore_ckpt"


def is_installed() -> bool:
    """Whether NVRx itself can be imported, not only the modules of `supply`."""
    is_supplied = getattr(sys.modules.get(NVRX), "__version__", None) == _VERSION
    return not is_supplied and find_spec(NVRX) is not None


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


class OtherFormats:
    """In the place of what saves in other formats than `torch_dist`: training code imports these names in any job."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise SaveError(
            "an asynchronous save in another format than torch_dist needs nvidia-resiliency-ext, which is missing: "
            "install it, or leave out --async-save"
        )

    @classmethod
    def clear_metadata_cache(cls, path: Any = None) -> None:
        """Nothing is kept between loads. Training code calls it when it starts again in the same process."""


def nothing_to_do(*_: Any, mp_mode: str = "spawn", **__: Any) -> None:
    """Called by a job ahead of its saves, for a cache and a queue of results: ours needs neither."""


def _names() -> dict[str, dict[str, Any]]:
    """Module of `async_ckpt` -> name -> what stands in for it."""
    return {
        "core": {"AsyncCallsQueue": AsyncCallsQueue, "AsyncRequest": AsyncRequest},
        "cached_metadata_filesystem_reader": {"CachedMetadataFileSystemReader": OtherFormats},
        "filesystem_async": {
            "FileSystemWriterAsync": FileSystemWriterAsync,
            "_results_queue": None,
            "get_write_results_queue": nothing_to_do,
        },
        "state_dict_saver": {
            "CheckpointMetadataCache": OtherFormats,
            "init_checkpoint_metadata_cache": nothing_to_do,
            "save_state_dict_async_plan": OtherFormats,
            "save_state_dict_async_finalize": OtherFormats,
        },
    }


_ATTRIBUTE = "_mcore_ckpt_queue"
_served: weakref.WeakSet[Any] = weakref.WeakSet()


def served_queue(queue: Any) -> AsyncCallsQueue:
    """The queue of ours that stands behind a queue of Megatron's; made at the first call."""
    ours: AsyncCallsQueue | None = vars(queue).get(_ATTRIBUTE)
    if ours is None:
        if queue.async_calls:
            raise SaveError(
                f"{len(queue.async_calls)} async saves were scheduled before mcore_ckpt.install(), which has replaced "
                "what would finish them; finalize them first, or call install() before the first save"
            )
        ours = AsyncCallsQueue()
        setattr(queue, _ATTRIBUTE, ours)
        _served.add(queue)
    return ours


def require_idle() -> None:
    """Raise `SaveError` unless every save of every served queue has been finalized."""
    waiting = sum(served_queue(queue).get_num_unfinalized_calls() for queue in list(_served))
    if waiting:
        raise SaveError(
            f"{waiting} async saves are not finalized yet, and the stock queue could not finish them; call "
            "maybe_finalize_async_calls(blocking=True) first"
        )
    for queue in list(_served):
        vars(queue).pop(_ATTRIBUTE, None)
    _served.clear()


def served(stock: Any) -> Any:
    """A queue class of which ours serves every instance, old and new, and those of subclasses: the same class."""

    def schedule_async_request(self: Any, async_request: Any) -> int:
        self.call_idx = served_queue(self).schedule_async_request(async_request)
        return int(self.call_idx)

    def maybe_finalize_async_calls(self: Any, blocking: bool = False, no_dist: bool = False) -> list[int]:
        with MegatronErrors():
            return served_queue(self).maybe_finalize_async_calls(blocking, no_dist)

    def get_num_unfinalized_calls(self: Any) -> int:
        return served_queue(self).get_num_unfinalized_calls()

    def close(self: Any, abort: bool = False) -> None:
        with MegatronErrors():
            served_queue(self).close(abort=abort)

    for method in (schedule_async_request, maybe_finalize_async_calls, get_num_unfinalized_calls, close):
        patches.set(stock, method.__name__, method)
    if "warmup_persistent_caller" in vars(stock):
        patches.set(stock, "warmup_persistent_caller", AsyncCallsQueue.warmup_persistent_caller)
    return stock


def async_strategy_source(stock: Any) -> Any:
    """A `get_async_strategy` (0.17 on) that serves `"nvrx"` with or without nvidia-resiliency-ext. The queue is always
    ours; so is the writer, unless NVRx brings one.
    """

    @functools.wraps(stock)
    def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
        try:
            name, modules = stock(async_strategy)
        except ModuleNotFoundError:  # an NVRx is installed that lacks some of the names
            if async_strategy != "nvrx":
                raise
            name, modules = "nvrx", {name: value for values in _names().values() for name, value in values.items()}
        modules = {**modules, "AsyncCallsQueue": AsyncCallsQueue, "get_write_results_queue": nothing_to_do}
        return name, modules if module is None else modules[module]

    return get_async_strategy
