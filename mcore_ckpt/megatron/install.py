"""`install()` and `uninstall()`: this package in the place of Megatron-Core's own checkpointing, version by version.

Names are replaced, not behaviour of torch: the strategy classes and what hands them out, the writer for DCP, the
readers and writers of the common state and of `metadata.json`, and the methods of the async queue.

`CONTRACT` names all that is replaced or called: since when, and what its absence costs. `install()` asks it before it
changes anything, and a test looks for all of it in each version. Without a name whose row says of no loss `install()`
refuses. `mcore-ckpt doctor` prints it.

**Async queues** of Megatron and of nvidia-resiliency-ext (NVRx): the methods of a queue class are replaced, not the
class. Training code makes queues when it is imported, frameworks keep them as attributes, and all of them must be
served. Each gets a queue of ours of its own at its first use. From 0.20 on Megatron has no asynchronous saves of its
own: its training code imports queue, request and writer from NVRx, which is not to be had for every platform. `supply`
puts modules of these names in place that hand out ours, for the format `torch_dist` alone. NVRx that is installed is
never covered; its queue is then served like Megatron's.

Training code is imported later: then loads of Megatron-LM, Megatron-Bridge, ms-swift, verl and SkyRL are made to end
with a certificate, and the distributed optimizer to say what lies where in its buckets.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Final

from mcore_ckpt import __version__
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import SaveError, UnsupportedMegatronError
from mcore_ckpt.core.options import LoadOptions, SaveOptions, checkpoint_path
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory.commit import remove_tensors
from mcore_ckpt.megatron._fully_parallel import as_agreed, distributing
from mcore_ckpt.megatron.calls import (
    MegatronErrors,
    MegatronResume,
    checking,
    current_resume,
    in_progress,
    noting,
    synced_load,
)
from mcore_ckpt.megatron.serialization import (
    TRAINING,
    around_load,
    around_save,
    config_in_place,
    load_common_in_place,
    load_common_state_dict,
    save_common,
    save_config,
    with_own_files,
)
from mcore_ckpt.megatron.versions import (
    CHECKPOINTING,
    NEWEST_TESTED,
    NVRX,
    NVRX_ASYNC,
    OPTIMIZER,
    SKYRL,
    TESTED_VERSIONS,
    VERL,
    installed_version_text,
    let_bridge_name_its_manager,
    megatron_module,
    megatron_version,
    nvrx_core,
    optional_module,
    patches,
    serve_with_numpy_2,
)
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest

logger = logger_of("mcore_ckpt")


def install() -> dict[str, Any]:
    """Make Megatron-Core save and load `torch_dist` checkpoints with this package, wherever it would use its own code.

    Strategies that Megatron looks up or constructs by name are ours from then on, in modules that have imported the
    names already, too; so are the reader and writer of the common state, and every `AsyncCallsQueue`, including those
    that exist. Options come from `MCORE_CKPT_*` variables (`SaveOptions.from_environment`).

    A second call changes nothing. `uninstall()` takes everything back.

    Returns:
        What was replaced: dotted name -> Megatron's own object.

    Raises:
        OptionError: a `MCORE_CKPT_*` variable has a value that cannot be.
        UnsupportedMegatronError: megatron-core is missing, too old, or lacks a name that has to be replaced. Nothing
            is changed then: a job never runs half on stock code.
    """
    if not patches.replaced():
        # A value that cannot be is refused here: the first save may be hours away.
        SaveOptions.from_environment()
        LoadOptions.from_environment()
        if megatron_version()[:2] > NEWEST_TESTED:
            logger.warning(
                "megatron-core %s is newer than what this package was tested with (%s to %s); going on, since all "
                "that has to be replaced must be found, or install() fails",
                installed_version_text(),
                TESTED_VERSIONS[0],
                TESTED_VERSIONS[-1],
            )
        try:
            _replace_all()
        except BaseException:
            patches.undo()
            raise
        let_bridge_name_its_manager()
        announce(
            "mcore_ckpt %s: TorchDistSaveStrategy and TorchDistLoadStrategy are in force for megatron-core %s",
            __version__,
            installed_version_text(),
        )
    return patches.replaced()


def uninstall() -> None:
    """Put back everything that `install()` replaced; does nothing where it is not in force.

    Raises:
        SaveError: a queue of Megatron's or of nvidia-resiliency-ext still holds a save; finalize it first. Queues of
            this package finalize theirs afterwards, too.
    """
    if not patches.replaced():
        return
    waiting = sum(served_queue(queue).get_num_unfinalized_calls() for queue in list(_served))
    if waiting:
        raise SaveError(
            f"{waiting} async saves are not finalized yet, and the stock queue could not finish them; call "
            "maybe_finalize_async_calls(blocking=True) first"
        )
    for queue in list(_served):
        vars(queue).pop(_ATTRIBUTE, None)
    _served.clear()
    patches.undo()


# Methods of Megatron's own that code written for it patches, and that saves and loads of this package do not call.
_NOT_CALLED: Final = (
    ("strategies.filesystem_async", "FileSystemWriterAsync", "write_preloaded_data"),
    ("strategies.torch", "MCoreLoadPlanner", "create_local_plan"),
)


def _warn_of_patched_methods() -> None:
    """Name methods that are patched, as verl patches `write_preloaded_data` of older versions, and are not called."""
    for module, class_name, method in _NOT_CALLED:
        owner = getattr(optional_module(module), class_name, None)
        patched = getattr(owner, method, None)
        if patched is not None and getattr(patched, "__module__", None) != owner.__module__:
            logger.warning(
                "%s.%s is replaced by code of %s: saves and loads of mcore_ckpt do not call it. Leave the patch out, "
                "or mcore_ckpt.install(), if the job needs what it does",
                class_name,
                method,
                getattr(patched, "__module__", "an unknown module"),
            )


def _replace_all() -> None:
    _check_contract()
    _warn_of_patched_methods()
    supply()
    found = []
    for name in CONTRACT:
        if name.made is None or not name.belongs_to(megatron_version()[:2]) or (owner := owner_of(name)) is None:
            continue
        attribute = name.name.rpartition(".")[2]
        found.append((owner, attribute, name.made(getattr(owner, attribute))))
    patches.replace_all(found)
    _change_modules()
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)
    if has_nvrx() and (core := nvrx_core()) is not None:
        served(core.AsyncCallsQueue)
    serve_with_numpy_2(patches)


def _check_contract() -> None:
    """Raise `UnsupportedMegatronError` unless all is there that has to be replaced or called; log what else is not."""
    absent = [name for name in CONTRACT if name.belongs_to(megatron_version()[:2]) and owner_of(name) is None]
    if needed := [str(name) for name in absent if not name.absence]:
        raise UnsupportedMegatronError(
            f"megatron-core {installed_version_text()}: {CHECKPOINTING} has no {', '.join(needed)}, so this "
            f"version cannot be served (tested: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}). Nothing was changed. "
            "Install a tested version of megatron-core, or a newer mcore-ckpt"
        )
    for name in absent:
        logger.info("megatron-core %s has no %s: %s", installed_version_text(), name, name.absence)


def owner_of(name: Name) -> Any:
    """The module or class of the megatron-core that is installed that has it; None: it has no such name."""
    *classes, attribute = name.name.split(".")
    owner: Any = optional_module(name.module)
    for part in classes:
        owner = getattr(owner, part, None)
    return owner if hasattr(owner, attribute) else None


def _remove_sharded_tensors(checkpoint_dir: Any, key_prefix: str) -> None:
    # From 0.17 on Megatron asks the save strategy, which has no such method.
    megatron_module("validation").verify_checkpoint(str(checkpoint_dir))
    with MegatronErrors():
        remove_tensors(checkpoint_path(checkpoint_dir), key_prefix)


# --- async queues -----------------------------------------------------------------------------------------------------

# The version that Megatron takes for new enough: it asks for 0.6.
_VERSION = "0.7.0+mcore_ckpt"


def has_nvrx() -> bool:
    """Whether NVRx itself can be imported, not only the modules of `supply`."""
    is_supplied = getattr(sys.modules.get(NVRX), "__version__", None) == _VERSION
    return not is_supplied and find_spec(NVRX) is not None


def supply() -> None:
    """Put the modules in place unless NVRx is installed; all else of it stays missing."""
    if has_nvrx():
        return
    contents: dict[str, dict[str, Any]] = {
        NVRX: {"__version__": _VERSION},
        f"{NVRX}.checkpointing": {},
        NVRX_ASYNC: {},
        **{f"{NVRX_ASYNC}.{module}": values for module, values in _names().items()},
    }
    for name, values in contents.items():
        module = ModuleType(name, "Supplied by mcore_ckpt: nvidia-resiliency-ext is not installed.")
        vars(module).update(values)
        is_package = any(other.startswith(f"{name}.") for other in contents)
        module.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []  # nothing else is found in it
        patches.add_module(module)
    logger.info("nvidia-resiliency-ext is not installed: mcore_ckpt supplies the names of it that save asynchronously")


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
    """A `get_async_strategy` (0.17 on) that serves `nvrx` without NVRx, too. The queue is always ours."""

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


# --- training code, when it is imported -------------------------------------------------------------------------------

# Modules made like Megatron-LM's, with their functions for the random states, for the state dict, for loads, and, if
# there is one, for what becomes of the state dict ahead of a load.
_CERTIFIED: Final = {
    TRAINING: ("get_rng_state", "generate_state_dict", "load_checkpoint"),
    "megatron.bridge.training.checkpointing": ("get_rng_state", "generate_state_dict", "_load_checkpoint_from_path"),
    "swift.megatron.utils.megatron_lm_utils": (
        *("_get_rng_state", "_generate_state_dict", "load_mcore_checkpoint"),
        "_filter_adapter_state_dict",
    ),
}
# Classes whose `load_checkpoint` loads by itself, and what of `certificate.py` tells the parts that it loads.
_MANAGERS: Final = {
    VERL: ("MegatronCheckpointManager", "parts_of_verl"),
    SKYRL: ("MegatronStrategy", "parts_of_skyrl"),
}
# Methods of the distributed optimizer, from 0.15 on, and what of `flat_buckets.py` stands in for each.
_OF_OPTIMIZER: Final = {
    "sharded_param_state_dp_reshardable": "with_table",
    "sharded_param_state_fully_reshardable": "asking_for_own_ranges",
    "load_parameter_state_from_fully_reshardable": "setting_own_ranges",
}


class _AfterImport:
    """Finds nothing by itself. Asked for one of the modules, it changes that when it has been imported; where another
    finder was asked first, it does so at the next import of any module.
    """

    _asked: ClassVar[set[str]] = set()  # modules for which the other finders are being asked; some may ask this one

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As of `importlib.abc.MetaPathFinder`."""
        if not patches.replaced():
            return None
        _change_modules()
        if name not in {*_CERTIFIED, *_MANAGERS, OPTIMIZER} - cls._asked:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in list(sys.meta_path))
        cls._asked.add(name)
        try:
            spec = next(filter(None, (find(name, path, target) for find in finders if find)), None)
        finally:
            cls._asked.discard(name)
        loader: Any = getattr(spec, "loader", None)
        if (execute := getattr(loader, "exec_module", None)) is not None:

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _change_modules()

            loader.exec_module = execute_and_change
        return spec


def _change_modules() -> None:
    """Let loads end with a certificate, and buckets say what lies in them, as far as their modules are imported."""
    for module, names in _CERTIFIED.items():
        _certify_module(module, names)
    for module, (name, parts) in _MANAGERS.items():
        manager: Any = getattr(sys.modules.get(module), name, None)
        if hasattr(manager, "load_checkpoint") and not hasattr(manager.load_checkpoint, "__wrapped__"):
            patches.set(manager, "load_checkpoint", _certified_parts(manager.load_checkpoint, parts))
    optimizer = getattr(sys.modules.get(OPTIMIZER), "DistributedOptimizer", None)
    for name, ours in _OF_OPTIMIZER.items():
        is_replaced = f"{OPTIMIZER}.DistributedOptimizer.{name}" in patches.replaced()
        if name in getattr(optimizer, "__dict__", ()) and not is_replaced:
            patches.set(optimizer, name, _by_flat_buckets(ours, vars(optimizer)[name]))


def _by_flat_buckets(ours: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        from mcore_ckpt.megatron import flat_buckets  # (a job without a distributed optimizer has none)

        return getattr(flat_buckets, ours)(stock, *args, **kwargs)

    return method


def _certify_module(name: str, names: tuple[str, ...]) -> None:
    """Replace a module's functions, if they are there by now and have not been replaced yet."""
    module: Any = sys.modules.get(name)
    load = names[2]
    if f"{name}.{load}" in patches.replaced() or not all(hasattr(module, one) for one in names):
        return
    keys = (*_CERTIFIED[TRAINING], "change_state_dict")
    stock = dict(zip(keys, (getattr(module, one) for one in names), strict=False))
    changes = [(module, one, _noting(key, stock[key])) for key, one in zip(stock, names, strict=True) if one != load]
    changes.append((module, load, _certified(stock, module)))
    for other in list(sys.modules.values()):  # its own, where the module has another by now
        held: Any = getattr(other, "__dict__", {}).get(load)
        if getattr(held, "__globals__", None) is vars(module) and held is not stock["load_checkpoint"]:
            changes.append((other, load, _certified({**stock, "load_checkpoint": held}, module)))
    patches.replace_all(changes)


def _noting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (resume := current_resume()) is not None:
            resume.arguments[name] = args, kwargs
        return stock(*args, **kwargs)

    return call


def _certified(stock: Mapping[str, Callable[..., Any]], module: Any) -> Callable[..., Any]:
    @functools.wraps(stock["load_checkpoint"])
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if current_resume() is not None:  # a third-party function, which is certified, has called it
            return stock["load_checkpoint"](*args, **kwargs)
        with in_progress(MegatronResume()) as resume:
            result = stock["load_checkpoint"](*args, **kwargs)
        if (load := resume.load) is not None:
            from mcore_ckpt.megatron.certificate import certify_resume  # (a job that loads nothing does not need it)

            named = {**inspect.signature(stock["load_checkpoint"]).bind(*args, **kwargs).arguments, **kwargs}
            optimizer, results = named.get("optimizer", *args[1:2]), result if isinstance(result, tuple) else (result,)
            certify_resume(stock, load, resume.arguments, module, optimizer, results)
        return result

    return load_checkpoint


def _certified_parts(stock: Callable[..., Any], parts: str) -> Callable[..., Any]:
    """A `load_checkpoint` of which `parts` tell, of the same arguments, what is to be certified."""

    @functools.wraps(stock)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        from mcore_ckpt.megatron import certificate

        for part in getattr(certificate, parts)(*args, **kwargs):
            certificate.certify_loaded(*part)
        return result

    return load_checkpoint


def announce(text: str, *values: object) -> None:
    """Say on rank 0 what is in force; also where no logging has been set up: the swap must not be silent."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    # Only for this line: how much is logged later, and where, is for the program to say.
    named = logging.getLogger("mcore_ckpt")
    level = named.level
    if level == logging.NOTSET:
        named.setLevel(logging.INFO)
    own = None if named.hasHandlers() else logging.StreamHandler()
    if own is not None:
        named.addHandler(own)
    logger.info(text, *values)
    if own is not None:
        named.removeHandler(own)
    named.setLevel(level)


Version = tuple[int, int]
_ALWAYS: Version = (99, 0)


@dataclass(frozen=True, slots=True)
class Name:
    """One name of Megatron."""

    module: str  # below `megatron.core.dist_checkpointing`
    name: str  # of a function, class, or method (`Class.method`)
    made: Callable[[Any], Any] | None = None  # makes what replaces it; None: this package calls it
    since: Version = (0, 12)  # first version of megatron-core, major and minor, of which it is used
    until: Version = _ALWAYS  # last one
    absence: str = ""  # what is lost without it; empty if it is needed

    def belongs_to(self, version: Version) -> bool:
        """Whether it is used of that version of megatron-core."""
        return self.since <= version <= self.until

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _strategy(name: str) -> Any:
    from mcore_ckpt.megatron import strategy  # (which imports Megatron)

    return getattr(strategy, name)


_REGISTRY: Version = (0, 16)  # the last version with a registry of strategies
_OURS = "asynchronous saves use the queue and the requests of mcore_ckpt"

CONTRACT: tuple[Name, ...] = (
    Name("strategies.torch", "TorchDistSaveShardedStrategy", lambda _: _strategy("TorchDistSaveStrategy")),
    Name("strategies.torch", "TorchDistLoadShardedStrategy", lambda _: _strategy("TorchDistLoadStrategy")),
    Name(
        "strategies.torch",
        "register_default_torch_strategies",
        lambda _: _strategy("register_in_megatron"),
        until=_REGISTRY,
    ),
    Name("strategies.base", "register_default_strategy", until=_REGISTRY),
    Name("strategies.base", "StrategyAction", until=_REGISTRY),
    Name("strategies.base", "AsyncSaveShardedStrategy", until=_REGISTRY),
    Name("strategies.base", "LoadShardedStrategy", until=_REGISTRY),
    Name(
        "strategies.common", "TorchCommonSaveStrategy.save_common", lambda _: staticmethod(save_common), until=_REGISTRY
    ),
    Name(
        "strategies.common",
        "TorchCommonLoadStrategy.load_common",
        lambda _: staticmethod(load_common_in_place),
        until=_REGISTRY,
    ),
    Name("strategies.common", "save_common", lambda _: save_common, since=(0, 17)),
    Name("strategies.common", "load_common", lambda _: load_common_in_place, since=(0, 17)),
    Name("serialization", "save", lambda stock: around_save(_strategy("TorchDistSaveStrategy"), stock)),
    Name("serialization", "load", around_load),
    Name("serialization", "load_common_state_dict", lambda _: load_common_state_dict, since=(0, 19)),
    Name("serialization", "remove_sharded_tensors", lambda _: _remove_sharded_tensors, since=(0, 17)),
    Name("core", "save_config", lambda _: save_config),
    Name("core", "maybe_load_config", config_in_place),
    Name("core", "CheckpointingConfig"),
    Name("core", "CheckpointingException"),
    Name("validation", "verify_checkpoint", since=(0, 17)),
    Name("validation", "determine_global_metadata", noting),
    Name("validation", "validate_sharding_integrity", checking),
    Name(
        "validation",
        "save_integrity_manifest",
        with_own_files,
        since=(0, 17),
        absence="integrity.json of --verify-integrity is written by Megatron, of all files of the directory",
    ),
    Name("strategies.fully_parallel", "FullyParallelSaveStrategyWrapper.apply_saving_parallelization", distributing),
    Name("strategies.fully_parallel", "FullyParallelLoadStrategyWrapper.load", synced_load),
    Name("strategies.fully_parallel", "FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_objects"),
    Name("exchange_utils", "determine_main_replica_uniform_distribution", as_agreed),
    Name("exchange_utils", "ShardDistribution"),
    Name("exchange_utils", "_shard_size"),
    Name("utils", "_sharded_tensor_shard_id"),
    Name("utils", "_sharded_object_id"),
    Name("dict_utils", "diff"),
    Name("mapping", "ShardedTensor"),
    Name("mapping", "ShardedObject"),
    Name(
        "strategies.torch",
        "get_async_strategy",
        async_strategy_source,
        since=(0, 17),
        absence="training code that imports nvidia-resiliency-ext by itself finds its names, which are supplied",
    ),
    Name("strategies.async_utils", "AsyncCallsQueue", served, absence=_OURS),
    Name("strategies.async_utils", "AsyncRequest", absence=_OURS),
    Name(
        "strategies.filesystem_async",
        "FileSystemWriterAsync",
        lambda _: FileSystemWriterAsync,
        absence="code that writes through DCP finds the writer in mcore_ckpt or in nvidia-resiliency-ext",
    ),
)
