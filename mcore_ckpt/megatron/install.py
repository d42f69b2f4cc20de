"""`install()` and `uninstall()`: this package in the place of Megatron-Core's own checkpointing, version by version.

Names are replaced, not behaviour of torch: the strategy classes and what hands them out, the writer for DCP, the
readers and writers of the common state and of `metadata.json`, and the methods of the async queue. docs/megatron.md
lists them. Behind `install()` and `uninstall()` stand, in this order: the calls of Megatron that are served here, this
package's registry of strategies, and `integrity.json`. `nvrx.py` has the async queues.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

from mcore_ckpt import __version__
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    OptionError,
    StrategyNotFoundError,
    UnsupportedMegatronError,
)
from mcore_ckpt.core.options import LoadOptions, SaveOptions, checkpoint_path, is_supported, unknown_variables
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.metadata_read import INTEGRITY_FILE, METADATA_FILE
from mcore_ckpt.megatron import nvrx
from mcore_ckpt.megatron._fully_parallel import replace_wrappers
from mcore_ckpt.megatron._joint_calls import replace_validation, sync_wrapped_loads
from mcore_ckpt.megatron._versions import (
    CHECKPOINTING,
    MODULES_CALLING_PRODUCT,
    MODULES_NAMING_CUDA,
    NEWEST_TESTED,
    TESTED_VERSIONS,
    Differences,
    MegatronErrors,
    differences,
    installed_version_text,
    let_bridge_name_its_manager,
    megatron_module,
    megatron_version,
    optional_module,
    patches,
    serve_with_numpy_2,
    serve_without_cuda,
)
from mcore_ckpt.megatron.contract import Name, missing
from mcore_ckpt.megatron.serialization import (
    around_load,
    around_save,
    config_in_place,
    load_common_in_place,
    load_common_state_dict,
    save_common,
    save_config,
)
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

logger = logger_of("mcore_ckpt")


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
    if not patches.replaced():
        # A value that cannot be is refused here: the first save may be hours away.
        SaveOptions.from_environment()
        LoadOptions.from_environment()
        for name, alike in unknown_variables().items():
            logger.warning("%s sets no option of mcore_ckpt%s", name, f"; {alike} would" if alike else "")
        if megatron_version()[:2] > NEWEST_TESTED:
            logger.warning(
                "megatron-core %s is newer than what this package was tested with (%s to %s); going on, since all "
                "that has to be replaced must be found, or install() fails",
                installed_version_text(),
                TESTED_VERSIONS[0],
                TESTED_VERSIONS[-1],
            )
        try:
            _replace_all(differences())
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
    if patches.replaced():
        nvrx.require_idle()
        patches.undo()


def _replace_all(megatron: Differences) -> None:
    # Here and not above: importing the strategies needs megatron-core, importing the name `install` must not.
    from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy

    _check_contract()
    torch_strategies, common = megatron_module("strategies.torch"), megatron_module("strategies.common")
    serialization, core = megatron_module("serialization"), megatron_module("core")
    patches.replace(torch_strategies, "TorchDistSaveShardedStrategy", TorchDistSaveStrategy)
    patches.replace(torch_strategies, "TorchDistLoadShardedStrategy", TorchDistLoadStrategy)
    if megatron.has_registry:
        # Called by Megatron at every look-up, to put the stock strategies into its registry.
        patches.replace(torch_strategies, "register_default_torch_strategies", _register_ours)
        patches.set(common.TorchCommonSaveStrategy, "save_common", _as_method(save_common))
        patches.set(common.TorchCommonLoadStrategy, "load_common", _as_method(load_common_in_place))
    else:
        patches.replace(common, "save_common", save_common)
        patches.replace(common, "load_common", load_common_in_place)
        patches.replace(serialization, "remove_sharded_tensors", _remove_sharded_tensors)
    if megatron.common_state_is_an_object:
        patches.replace(serialization, "load_common_state_dict", load_common_state_dict)
    patches.replace(core, "save_config", save_config)
    patches.replace(core, "maybe_load_config", config_in_place(core.maybe_load_config, core.CheckpointingConfig))
    replace_validation()
    _replace_integrity()
    replace_wrappers()
    sync_wrapped_loads()
    patches.replace(serialization, "save", around_save(serialization.save, TorchDistSaveStrategy))
    patches.replace(serialization, "load", around_load(serialization.load))
    _replace_async(torch_strategies)
    if megatron.calls_numpy_product:
        serve_with_numpy_2(patches, existing_modules(MODULES_CALLING_PRODUCT))
    serve_without_cuda(patches, existing_modules(MODULES_NAMING_CUDA))


def _replace_async(torch_strategies: Any) -> None:
    """Queues, requests and the writer for DCP, of Megatron and of nvidia-resiliency-ext: whichever there are."""
    nvrx.supply(patches)
    if hasattr(torch_strategies, "get_async_strategy"):
        patches.replace(torch_strategies, "get_async_strategy", nvrx.async_strategy_source(torch_strategies))
    queues = [optional_module("strategies.async_utils"), nvrx.core() if nvrx.is_installed() else None]
    for queue in {getattr(module, "AsyncCallsQueue", None) for module in queues} - {None}:
        nvrx.serve_queues(queue)
    writers = optional_module("strategies.filesystem_async")
    if writers is not None:
        patches.replace(writers, "FileSystemWriterAsync", FileSystemWriterAsync)


def _check_contract() -> None:
    """Raise `UnsupportedMegatronError` unless all is there that has to be replaced or called; log what else is not."""
    absent = list(missing(megatron_version()[:2], is_there))
    if needed := [str(name) for name in absent if not name.absence]:
        raise UnsupportedMegatronError(
            f"megatron-core {installed_version_text()}: {CHECKPOINTING} has no {', '.join(needed)}, so this "
            f"version cannot be served (tested: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}). Nothing was changed. "
            "Install a tested version of megatron-core, or a newer mcore-ckpt"
        )
    for name in absent:
        logger.info("megatron-core %s has no %s: %s", installed_version_text(), name, name.absence)


def is_there(name: Name) -> bool:
    """Whether the megatron-core that is installed has it."""
    found: Any = optional_module(name.module)
    for part in name.name.split("."):
        found = getattr(found, part, None)
    return found is not None


# --- what Megatron calls ----------------------------------------------------------------------------------------------


def existing_modules(module_names: Iterable[str]) -> Iterator[ModuleType]:
    """Those of Megatron's modules that can be imported: some need packages of their own, and are not in use then."""
    for name in module_names:
        with contextlib.suppress(ImportError):
            yield import_module(f"{CHECKPOINTING}.{name}")


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


def _remove_sharded_tensors(checkpoint_dir: Any, key_prefix: str) -> None:
    # 0.17 and 0.18 ask the save strategy, which has no such method; the load strategy has had it since 0.12.
    megatron_module("validation").verify_checkpoint(str(checkpoint_dir))
    get_strategy("load_sharded", "torch_dist", 1).remove_sharded_tensors(checkpoint_dir, key_prefix)


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


# --- strategies by action, backend and version -----------------------------------------------------------------------

# Megatron-Core had a registry up to 0.16, refilled it at every look-up, and dropped it in 0.17. This one holds
# factories, so that each look-up gets a strategy of its own: a shared one would leak its caches between unrelated
# checkpoints.

ACTIONS = ("load_common", "load_sharded", "save_common", "save_sharded")

_Key = tuple[str, str, int]


# The strategies are imported when one is looked up: they need torch and Megatron-Core, registering others does not.
def _default_save() -> Any:
    from mcore_ckpt.megatron.strategy import TorchDistSaveStrategy

    return TorchDistSaveStrategy()


def _default_load() -> Any:
    from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy

    return TorchDistLoadStrategy()


_factories: dict[_Key, Callable[[], Any]] = {
    ("save_sharded", "torch_dist", 1): _default_save,
    ("load_sharded", "torch_dist", 1): _default_load,
}


def register_strategy(action: str | Enum, backend: str, version: int, strategy: Any) -> None:
    """Let `strategy` serve this action, backend and version, in place of what served it before.

    Args:
        action: `"save_sharded"`, `"load_sharded"`, `"save_common"`, `"load_common"`, or Megatron's `StrategyAction`.
        backend: the format's name, as in `metadata.json`; for example `"torch_dist"`.
        version: the format's version.
        strategy: a class or function that is called without arguments at each look-up, or an instance that every
            look-up then shares, caches included.

    Raises:
        OptionError: there is no such action.
    """
    _factories[_key(action, backend, version)] = strategy if _is_factory(strategy) else lambda: strategy


def get_strategy(action: str | Enum, backend: str, version: int) -> Any:
    """The strategy for this action, backend and version; a new one where a factory was registered.

    Raises:
        OptionError: there is no such action.
        StrategyNotFoundError: nothing is registered for it; the message lists what is.
    """
    key = _key(action, backend, version)
    try:
        factory = _factories[key]
    except KeyError:
        registered = "; ".join(f"{a} {b!r} version {v}" for a, b, v in sorted(_factories))
        raise StrategyNotFoundError(
            f"no strategy is registered for {key[0]} {backend!r} version {version}; registered: {registered}. "
            "Add one with mcore_ckpt.register_strategy(action, backend, version, strategy)"
        ) from None
    return factory()


def registered_strategies() -> tuple[_Key, ...]:
    """What can be looked up, as (action, backend, version), sorted."""
    return tuple(sorted(_factories))


def _key(action: str | Enum, backend: str, version: int) -> _Key:
    name = action.value if isinstance(action, Enum) else action
    if name not in ACTIONS:
        raise OptionError(f"action {action!r}: expected one of {', '.join(ACTIONS)}, or Megatron's StrategyAction")
    return name, backend, version


def _is_factory(strategy: Any) -> bool:
    # A strategy that happens to be callable is still a strategy: what can save or load is an instance.
    if isinstance(strategy, type):
        return True
    return callable(strategy) and not hasattr(strategy, "save") and not hasattr(strategy, "load")


# --- integrity.json --------------------------------------------------------------------------------------------------

# From 0.19 on (`--verify-integrity`): the SHA-256 of each file of a checkpoint. Megatron sums up whatever lies in the
# directory. Some of that is no part of the checkpoint: it changes later, goes, or is in no copy, and each of these
# would make every later load fail.

_NAME = "save_integrity_manifest"
_PIECE_BYTES = 8 * 1024 * 1024


def _replace_integrity() -> None:
    """Where this version of Megatron-Core has such a file."""
    validation = megatron_module("validation")
    if hasattr(validation, _NAME):
        patches.replace(validation, _NAME, _of_what_belongs_to_it(getattr(validation, _NAME)))


def _of_what_belongs_to_it(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def save_integrity_manifest(checkpoint_dir: Any) -> None:
        with MegatronErrors():
            if not is_supported(checkpoint_dir):
                return stock(checkpoint_dir)
            from mcore_ckpt.directory.copying import own_files

            directory = checkpoint_path(checkpoint_dir)
            storage = storage_at(directory)
            version = storage.version(METADATA_FILE)
            try:
                names = own_files(directory)
            except CheckpointNotFoundError:  # of another format
                return stock(checkpoint_dir)
            sums = {name: _sha256(storage, name) for name in sorted(names) if name != INTEGRITY_FILE}
            if storage.version(METADATA_FILE) == version:  # else they are of a checkpoint that was replaced
                content = json.dumps({"algorithm": "sha256", "files": sums}, indent=2)
                storage.publish(INTEGRITY_FILE, content.encode())
            return None

    return save_integrity_manifest


def _sha256(storage: Storage, name: str) -> str:
    found = hashlib.sha256()
    with storage.open_reader(name, direct="off") as reader:
        for at in range(0, reader.size_bytes, _PIECE_BYTES):
            found.update(reader.read(at, min(_PIECE_BYTES, reader.size_bytes - at)))
    return found.hexdigest()
