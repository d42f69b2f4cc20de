"""Record which strategy classes really did a save or a load, whatever a registry says."""

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tests.support.meanwhile import ahead_of

_STOCK = ("TorchDistSaveShardedStrategy", "TorchDistLoadShardedStrategy")
_METHODS = ("save", "async_save", "load")


@contextlib.contextmanager
def record_strategies() -> Iterator[list[str]]:
    """Collect `"package.Class.method"` for each strategy method of Megatron's or ours that is entered in the block.

    Ours are watched only where `mcore_ckpt` has been imported already, so that a stock process stays stock.
    """
    calls: list[str] = []
    with contextlib.ExitStack() as patches:
        for cls in _classes():
            for method in _METHODS:
                if method in vars(cls):
                    name = f"{cls.__module__.split('.')[0]}.{cls.__name__}.{method}"
                    patches.enter_context(ahead_of(cls, method, lambda *_, name=name, **__: calls.append(name)))
        yield calls


def _classes() -> list[Any]:
    stock_module = import_module("megatron.core.dist_checkpointing.strategies.torch")
    if "mcore_ckpt" not in sys.modules:
        return [getattr(stock_module, name) for name in _STOCK]
    ours = import_module("mcore_ckpt")
    compat = import_module("mcore_ckpt.megatron.versions")
    return [compat.stock_class(name) for name in _STOCK] + [ours.TorchDistSaveStrategy, ours.TorchDistLoadStrategy]
