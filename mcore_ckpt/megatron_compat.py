"""The only place that knows Megatron-Core versions: what a version offers, and `install()` / `uninstall()`.

Megatron-Core has three shapes that matter here:

    0.12 - 0.16   a registry of strategies, refilled with the stock ones at every look-up; `common.pt` by a strategy
    0.17, 0.18    no registry: the classes are used by name; `common.pt` by a function
    0.19 -        the same, and the common state is an object inside the checkpoint

`install()` replaces names, not behaviour of torch: the strategy classes, the reader and writer of the common state, and
the methods of the async queue (so that queues made before `install()` are served too). docs/megatron.md lists them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import mcore_ckpt
from mcore_ckpt import common_state, megatron_queue
from mcore_ckpt.errors import UnsupportedMegatronError
from mcore_ckpt.megatron_errors import MegatronErrors, as_megatron_error
from mcore_ckpt.megatron_patches import (
    MODULES_CALLING_PRODUCT,
    MODULES_NAMING_CUDA,
    Patches,
    serve_with_numpy_2,
    serve_without_cuda,
)
from mcore_ckpt.options import LoadOptions, SaveOptions, unknown_variables
from mcore_ckpt.registry import get_strategy, registered_strategies

__all__ = [
    "TESTED_VERSIONS",
    "MegatronErrors",
    "as_megatron_error",
    "async_request_class",
    "install",
    "load_strategy_base",
    "mapping",
    "megatron_version",
    "refuse_multi_storage_client",
    "save_strategy_base",
    "sharded_tensor_of",
    "uninstall",
]

logger = logging.getLogger("mcore_ckpt")

TESTED_VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
_OLDEST = (0, 12)
_NEWEST = (0, 19)
_CHECKPOINTING = "megatron.core.dist_checkpointing"


def megatron_module(name: str = "") -> ModuleType:
    """Import `megatron.core.dist_checkpointing` or, by dotted name, one of its modules.

    Raises:
        UnsupportedMegatronError: megatron-core is not installed, or has no such module.
    """
    full_name = f"{_CHECKPOINTING}.{name}" if name else _CHECKPOINTING
    try:
        return import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == "megatron" or error.name == "megatron.core"):
            raise UnsupportedMegatronError(
                "megatron-core is not installed, and this needs it (the reader, the writer and the command do "
                "not). Install it with: pip install 'mcore-ckpt[megatron]'"
            ) from error
        raise UnsupportedMegatronError(
            f"megatron-core {_installed_version_text()} has no module {error.name}; "
            f"tested versions: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"
        ) from error


def megatron_version() -> tuple[int, int, int]:
    """Version of the megatron-core that would be imported, as (major, minor, patch).

    Raises:
        UnsupportedMegatronError: megatron-core is not installed, or older than 0.12.
    """
    megatron_module()
    facts = import_module("megatron.core.package_info")
    version = (int(facts.MAJOR), int(facts.MINOR), int(facts.PATCH))
    if version[:2] < _OLDEST:
        raise UnsupportedMegatronError(
            f"megatron-core {'.'.join(map(str, version))} is too old: expected {TESTED_VERSIONS[0]} or later "
            f"(tested up to {TESTED_VERSIONS[-1]}); upgrade it with: pip install -U megatron-core"
        )
    return version


def _installed_version_text() -> str:
    try:
        return str(import_module("megatron.core.package_info").__version__)
    except (ImportError, AttributeError):
        return "(of unknown version)"


def mapping() -> Any:
    """Megatron's module `dist_checkpointing.mapping`: ShardedTensor, ShardedObject, ShardedBase and others."""
    return megatron_module("mapping")


def sharded_tensor_of(key: str, original_shape: tuple[int, ...] | None, stored: Any) -> Any:
    """A `ShardedTensor` without data that describes a stored tensor.

    Args:
        key: of the tensor.
        original_shape: where it is stored as stretches of a flattened tensor, that tensor's global shape, in elements.
        stored: a tensor on the meta device, of the stored shape and dtype.
    """
    cls = mapping().ShardedTensor
    if original_shape is None:
        return cls.from_rank_offsets(key, stored).without_data()
    whole = stored.new_empty(original_shape)
    if not hasattr(cls, "from_rank_offsets_flat"):  # from 0.16 on; ours loads it unflattened
        return cls.from_rank_offsets(key, whole).without_data()
    everything = slice(0, whole.numel())
    return cls.from_rank_offsets_flat(key, whole.flatten(), whole.shape, flattened_range=everything).without_data()


def async_request_class() -> Any:
    """Megatron's `AsyncRequest` named tuple, which its training code extends with finalize callbacks."""
    return megatron_module("strategies.async_utils").AsyncRequest


def save_strategy_base() -> Any:
    """The class that a save strategy must derive from, so that `dist_checkpointing.save` takes it.

    To 0.16 that is the abstract `AsyncSaveShardedStrategy`. From 0.17 on Megatron replaces whatever is not an instance
    of its own `TorchDistSaveShardedStrategy` by a new stock one, without a word; so the base is that class, with each
    of its methods closed off: one that is not overridden raises instead of running stock code.
    """
    if megatron_version()[:2] <= (0, 16):
        return megatron_module("strategies.base").AsyncSaveShardedStrategy
    return _closed_off(stock_class("TorchDistSaveShardedStrategy"))


def load_strategy_base() -> Any:
    """The class that a load strategy must derive from; see `save_strategy_base`."""
    if megatron_version()[:2] <= (0, 16):
        return megatron_module("strategies.base").LoadShardedStrategy
    return _closed_off(stock_class("TorchDistLoadShardedStrategy"))


def replaced_load_planner() -> Any:
    """Megatron's `MCoreLoadPlanner` if somebody has replaced its `create_local_plan`, otherwise None."""
    planner = getattr(megatron_module("strategies.torch"), "MCoreLoadPlanner", None)
    method = getattr(planner, "create_local_plan", None)
    return None if getattr(method, "__qualname__", "") == "MCoreLoadPlanner.create_local_plan" else planner


def stock_class(name: str) -> Any:
    """Megatron's own class of that name in `strategies.torch`, also while `install()` has put ours in its place."""
    module = megatron_module("strategies.torch")
    if _patches is not None:
        return _patches.original(module, name)
    return getattr(module, name)


@functools.cache
def _closed_off(stock: type) -> type:
    """A subclass of `stock` in which every method of it raises, and whose constructor runs nothing of it."""

    def closed(method_name: str) -> Any:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedMegatronError(
                f"megatron-core {_installed_version_text()} calls {stock.__name__}.{method_name}, which "
                f"{type(self).__name__} does not serve; running the stock method in its place would mix two strategies"
            )

        return refuse

    def construct(self: Any, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend = backend
        self.version = version

    members: dict[str, Any] = {
        name: closed(name)
        for name, member in vars(stock).items()
        if callable(member) and not (name.startswith("__") and name.endswith("__"))
    }
    members["__init__"] = construct
    return type(stock.__name__, (stock,), members)


def refuse_multi_storage_client() -> None:
    """Raise if `--enable-msc` is in force: its object stores cannot be reached through local file operations.

    Raises:
        UnsupportedMegatronError: Megatron's multi-storage client is switched on.
    """
    try:
        feature = import_module("megatron.core.msc_utils").MultiStorageClientFeature
    except (ImportError, AttributeError):
        return  # 0.12 has no such feature
    if feature.is_enabled():
        # To 0.16 it is on wherever its package is installed, and has to be switched off; later it is the other way.
        remedy = "with --disable-msc" if megatron_version()[:2] <= (0, 16) else "without --enable-msc"
        raise UnsupportedMegatronError(
            "Megatron's multi-storage client (MSC) is switched on, and mcore_ckpt does not support it: it reads and "
            "writes directories of a file system, while MSC may keep any path in an object store. Start the job "
            f"{remedy}, or without mcore_ckpt.install()"
        )


# What install() has changed; None while it is not in force.
_patches: Patches | None = None


def install() -> dict[str, Any]:
    """Make Megatron-Core save and load `torch_dist` checkpoints with this package, wherever it would use its own code.

    Strategies that Megatron looks up or constructs by name are ours from then on, in modules that have imported the
    names already, too; so are the reader and writer of the common state, and every `AsyncCallsQueue`, including those
    that exist. Where torch sees no CUDA device, the parts of `dist_checkpointing` that name one are served on the CPU.
    Options come from `MCORE_CKPT_*` variables (`SaveOptions.from_environment`).

    A second call changes nothing. `uninstall()` takes everything back.

    Returns:
        What was replaced: dotted name -> Megatron's own object.

    Raises:
        OptionError: a `MCORE_CKPT_*` variable has a value that cannot be.
        UnsupportedMegatronError: megatron-core is missing, too old, or lacks a name that has to be replaced. Nothing
            is changed then: a job never runs half on stock code.
    """
    global _patches
    if _patches is None:
        # A value that cannot be is refused here: the first save may be hours away.
        SaveOptions.from_environment()
        LoadOptions.from_environment()
        for name, alike in unknown_variables().items():
            logger.warning("%s sets no option of mcore_ckpt%s", name, f"; {alike} would" if alike else "")
        version = megatron_version()
        if version[:2] > _NEWEST:
            logger.warning(
                "megatron-core %s is newer than what this package was tested with (%s to %s); going on, since all "
                "that has to be replaced must be found, or install() fails",
                _installed_version_text(),
                TESTED_VERSIONS[0],
                TESTED_VERSIONS[-1],
            )
        patches = Patches()
        try:
            _replace_all(patches, version)
        except BaseException:
            patches.undo()
            raise
        _patches = patches
        _announce()
    return _patches.replaced()


def uninstall() -> None:
    """Put back everything that `install()` replaced; does nothing where it is not in force.

    Raises:
        SaveError: an async queue still holds a save that was not finalized; finalize it first.
    """
    global _patches
    if _patches is not None:
        megatron_queue.require_idle()
        _patches.undo()
        _patches = None


def _replace_all(patches: Patches, version: tuple[int, int, int]) -> None:
    from mcore_ckpt.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
    from mcore_ckpt.writer import FileSystemWriterAsync

    torch_strategies = _required("strategies.torch", "TorchDistSaveShardedStrategy", "TorchDistLoadShardedStrategy")
    async_utils = _required("strategies.async_utils", "AsyncCallsQueue", "AsyncRequest")
    common = _required("strategies.common")
    serialization = _required("serialization", "save", "load", "load_common_state_dict")

    patches.replace(torch_strategies, "TorchDistSaveShardedStrategy", TorchDistSaveStrategy)
    patches.replace(torch_strategies, "TorchDistLoadShardedStrategy", TorchDistLoadStrategy)
    filesystem_async = _required("strategies.filesystem_async", "FileSystemWriterAsync")
    patches.replace(filesystem_async, "FileSystemWriterAsync", FileSystemWriterAsync)
    if version[:2] <= (0, 16):
        # Called by Megatron at every look-up, to put the stock strategies into its registry.
        _required("strategies.torch", "register_default_torch_strategies")
        patches.replace(torch_strategies, "register_default_torch_strategies", _register_ours)
        _required("strategies.common", "TorchCommonSaveStrategy", "TorchCommonLoadStrategy")
        patches.set(common.TorchCommonSaveStrategy, "save_common", _as_method(common_state.save_common))
        patches.set(common.TorchCommonLoadStrategy, "load_common", _as_method(_load_common))
    else:
        _required("strategies.common", "save_common", "load_common")
        patches.replace(common, "save_common", common_state.save_common)
        patches.replace(common, "load_common", _load_common)
        patches.replace(serialization, "remove_sharded_tensors", _remove_sharded_tensors)
        _required("strategies.torch", "get_async_strategy")
        patches.replace(torch_strategies, "get_async_strategy", megatron_queue.async_strategy_source(torch_strategies))
    if version[:2] >= (0, 19):
        patches.replace(serialization, "load_common_state_dict", _load_common_state_dict)
    patches.replace(_required("core", "save_config"), "save_config", common_state.save_config)
    megatron_queue.replace_methods(patches, async_utils.AsyncCallsQueue, MegatronErrors)
    if version[:2] <= (0, 15):
        serve_with_numpy_2(patches, existing_modules(MODULES_CALLING_PRODUCT))
    serve_without_cuda(patches, existing_modules(MODULES_NAMING_CUDA))


def _required(module_name: str, *names: str) -> Any:
    module = megatron_module(module_name)
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise UnsupportedMegatronError(
            f"megatron-core {_installed_version_text()}: {module.__name__} has no {', '.join(missing)}, so this "
            f"version cannot be served (tested: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}). Nothing was changed. "
            "Install a tested version of megatron-core, or a newer mcore-ckpt"
        )
    return module


def existing_modules(module_names: Iterable[str]) -> Iterator[ModuleType]:
    """Those of Megatron's modules that can be imported: some need packages of their own, and are not in use then."""
    for name in module_names:
        with contextlib.suppress(ImportError):
            yield import_module(f"{_CHECKPOINTING}.{name}")


def _register_ours() -> None:
    """Fill Megatron's registry (0.12 - 0.16) from ours: new strategies for each look-up that it serves."""
    registry = megatron_module("strategies.base")
    for action, backend, version in registered_strategies():
        registry.register_default_strategy(
            registry.StrategyAction(action), backend, version, get_strategy(action, backend, version)
        )


def _as_method(function: Any) -> Any:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def _load_common(checkpoint_dir: Any) -> Any:
    with MegatronErrors():
        return common_state.load_common(checkpoint_dir)


def _load_common_state_dict(checkpoint_dir: Any) -> Any:
    megatron_module("validation").verify_checkpoint(str(checkpoint_dir))
    return _load_common(checkpoint_dir)


def _remove_sharded_tensors(checkpoint_dir: Any, key_prefix: str) -> None:
    # 0.17 and 0.18 ask the save strategy, which has no such method; the load strategy has had it since 0.12.
    megatron_module("validation").verify_checkpoint(str(checkpoint_dir))
    get_strategy("load_sharded", "torch_dist", 1).remove_sharded_tensors(checkpoint_dir, key_prefix)


def _announce() -> None:
    """Say on rank 0 what is in force; also where no logging has been set up, since a silent swap helps nobody."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    # Only for this line: how much is logged later, and where, is for the program to say.
    level = logger.level
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    own = None if logger.hasHandlers() else logging.StreamHandler()
    if own is not None:
        logger.addHandler(own)
    logger.info(
        "mcore_ckpt %s: TorchDistSaveStrategy and TorchDistLoadStrategy are in force for megatron-core %s",
        mcore_ckpt.__version__,
        _installed_version_text(),
    )
    if own is not None:
        logger.removeHandler(own)
    logger.setLevel(level)
