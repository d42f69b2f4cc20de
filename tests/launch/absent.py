"""Stand-ins for packages that frameworks import at their head, that a CPU does not have, and that Megatron-Core does
without.
"""

import builtins
import types
from functools import cache
from typing import Any

from torch import nn


class _Absent(types.ModuleType):
    """A module of a package that is not installed: its classes are empty modules of torch."""

    __path__: list[str] = []

    def __call__(self, *_: Any, **__: Any) -> None:
        """As a function: a predicate that says no, or a factory that has nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (nn.Module,), {}) if name[0].isupper() else _absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


@cache
def _absent(name: str) -> _Absent:
    return _Absent(name)


def stand_in(packages: tuple[str, ...], importers: tuple[str, ...]) -> None:
    """Let modules whose name begins with one of `importers` import `packages`, which are not installed."""
    stock = builtins.__import__

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = (globals or {}).get("__name__", "")
        if level or name.split(".")[0] not in packages or not importer.startswith(importers):
            return stock(name, globals, locals, fromlist, level)
        if name == "transformer_engine.pytorch.optimizers":
            raise ModuleNotFoundError(name)  # Bridge has a class of its own in their place
        return _absent(name if fromlist else name.split(".")[0])

    builtins.__import__ = import_
