"""The only place that knows Megatron-Core versions: what a version offers, and `install()` / `uninstall()`.

Megatron-Core has three shapes that matter here:

    0.12 - 0.16   a registry of strategies, refilled with the stock ones at every look-up; `common.pt` by a strategy
    0.17, 0.18    no registry: the classes are used by name; `common.pt` by a function
    0.19 -        the same, and the common state is an object inside the checkpoint

`install()` replaces names, not behaviour of torch: the strategy classes, the reader and writer of the common state, and
the methods of the async queue (so that queues made before `install()` are served too). docs/megatron.md lists them.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from types import ModuleType
from typing import Any

from mcore_ckpt.errors import UnsupportedMegatronError
from mcore_ckpt.options import LoadOptions, SaveOptions

__all__ = [
    "TESTED_VERSIONS",
    "as_megatron_error",
    "async_request_class",
    "install",
    "load_strategy_base",
    "mapping",
    "megatron_version",
    "refuse_multi_storage_client",
    "save_strategy_base",
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
                "megatron-core is not installed, and this needs it (the reader, the writer and the mcore-ckpt command do "
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
    """Megatron's `dist_checkpointing.mapping` module: ShardedTensor, ShardedObject, ShardedBase, is_main_replica, ..."""
    return megatron_module("mapping")


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


def stock_class(name: str) -> Any:
    """Megatron's own class of that name in `strategies.torch`, also while `install()` has put ours in its place."""
    full_name = f"{_CHECKPOINTING}.strategies.torch.{name}"
    if full_name in _replaced:
        return _replaced[full_name]
    return getattr(megatron_module("strategies.torch"), name)


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


@functools.cache
def _both(ours: type[Exception], theirs: type[Exception]) -> type[Exception]:
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "__doc__": ours.__doc__})


def as_megatron_error(error: Exception) -> Exception:
    """The same error, as an instance of Megatron's `CheckpointingException` too.

    Training code and tests written for Megatron catch `CheckpointingException`; those written for this package catch
    its own classes. Message, attributes, cause, notes and traceback are those of `error`.
    """
    theirs = megatron_module("core").CheckpointingException
    if isinstance(error, theirs):
        return error
    cls = _both(type(error), theirs)
    same = cls.__new__(cls, *error.args)
    same.__dict__.update(error.__dict__)
    same.args = error.args
    same.__cause__ = error.__cause__
    same.__context__ = error.__context__
    same.__suppress_context__ = error.__suppress_context__
    return same.with_traceback(error.__traceback__)


def refuse_multi_storage_client() -> None:
    """Raise if `--enable-msc` is in force: its object stores cannot be reached through local file operations.

    Raises:
        UnsupportedMegatronError: Megatron's multi-storage client is switched on.
    """
    try:
        feature = import_module("megatron.core.msc_utils").MultiStorageClientFeature
    except (ImportError, AttributeError):
        return  # 0.12 has no such feature
    # Megatron switches it on by default where the package is installed; only a switch that can take effect counts.
    if feature.is_enabled():
        raise UnsupportedMegatronError(
            "Megatron's multi-storage client (--enable-msc) is switched on, and mcore_ckpt does not support it: it "
            "reads and writes directories of a file system. Start the job without --enable-msc, or leave "
            "mcore_ckpt.install() out for it"
        )


# What install() replaced: dotted name -> the original. Empty while nothing is installed.
_replaced: dict[str, Any] = {}


def install(
    *, save_options: SaveOptions | None = None, load_options: LoadOptions | None = None
) -> dict[str, Any]:
    """Stub."""
    raise NotImplementedError


def uninstall() -> None:
    """Stub."""
    raise NotImplementedError
