"""Which strategy serves an action, a backend and a version: this package's own registry.

Megatron-Core had a registry up to 0.16, refilled it at every look-up, and dropped it in 0.17. This one holds factories,
so that each look-up gets a strategy of its own: a strategy carries caches of the saves that it made, and a shared one
would leak them between unrelated checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from mcore_ckpt.core.errors import OptionError, StrategyNotFoundError

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
