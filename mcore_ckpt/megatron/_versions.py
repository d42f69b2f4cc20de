"""Where versions of Megatron-Core differ, and what has to be asked of the one that is installed.

Megatron-Core has three shapes that matter here:

    0.12 - 0.16   a registry of strategies, refilled with the stock ones at every look-up; `common.pt` by a strategy
    0.17, 0.18    no registry: the classes are used by name; `common.pt` by a function
    0.19 -        the same, and the common state is an object inside the checkpoint

`Differences` says the rest; `install.py` turns it into what is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from mcore_ckpt.core.errors import UnsupportedMegatronError
from mcore_ckpt.megatron._patches import Patches

# The one list: scripts/test_matrix.sh reads this line, and a test compares it with README and docs/megatron.md.
TESTED_VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
_OLDEST, NEWEST_TESTED = (tuple(map(int, TESTED_VERSIONS[end].split(".")[:2])) for end in (0, -1))
CHECKPOINTING = "megatron.core.dist_checkpointing"


@dataclass(frozen=True, slots=True)
class Differences:
    """In what a version of megatron-core differs from the others, as far as it matters here."""

    # Strategies come from a registry, and derive from abstract classes. Later ones are constructed by name, and what is
    # not an instance of the stock class is replaced by one, without a word.
    has_registry: bool
    common_state_is_an_object: bool  # it lies in the data files; before that in `common.pt`
    # Every rank takes part in a load, so that an error can reach them all; later ones let some ranks load alone.
    all_ranks_load: bool
    calls_numpy_product: bool  # which numpy 2 does not have


def differences() -> Differences:
    """Those of the version that is installed."""
    version = megatron_version()[:2]
    return Differences(
        has_registry=version <= (0, 16),
        common_state_is_an_object=version >= (0, 19),
        all_ranks_load=version <= (0, 17),
        calls_numpy_product=version <= (0, 15),
    )


patches = Patches()
"""What `install()` has replaced; empty while it is not in force."""


def megatron_module(name: str = "") -> ModuleType:
    """Import `megatron.core.dist_checkpointing` or, by dotted name, one of its modules. `UnsupportedMegatronError`:
    there is none.
    """
    full_name = f"{CHECKPOINTING}.{name}" if name else CHECKPOINTING
    try:
        return import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == "megatron" or error.name == "megatron.core"):
            raise UnsupportedMegatronError(
                "megatron-core is not installed, and this needs it (the reader, the writer and the command do "
                "not). Install it with: pip install '.[megatron]' in a checkout of mcore_ckpt"
            ) from error
        raise UnsupportedMegatronError(
            f"megatron-core {installed_version_text()} has no module {error.name}; "
            f"tested versions: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"
        ) from error


def optional_module(name: str) -> ModuleType | None:
    """One of the modules of `dist_checkpointing`, by dotted name; None where this version has none of that name."""
    try:
        return import_module(f"{CHECKPOINTING}.{name}")
    except ModuleNotFoundError:
        return None


def megatron_version() -> tuple[int, int, int]:
    """Version of the megatron-core that would be imported; `UnsupportedMegatronError`: none, or older than 0.12."""
    megatron_module()
    facts = import_module("megatron.core.package_info")
    version = (int(facts.MAJOR), int(facts.MINOR), int(facts.PATCH))
    if version[:2] < _OLDEST:
        raise UnsupportedMegatronError(
            f"megatron-core {'.'.join(map(str, version))} is too old: expected {TESTED_VERSIONS[0]} or later "
            f"(tested up to {TESTED_VERSIONS[-1]}); upgrade it with: pip install -U megatron-core"
        )
    return version


def installed_version_text() -> str:
    """Version of megatron-core as it calls itself, for messages."""
    try:
        return str(import_module("megatron.core.package_info").__version__)
    except (ImportError, AttributeError):
        return "(of unknown version)"


def replaced_load_planner() -> Any:
    """Megatron's `MCoreLoadPlanner` if its `create_local_plan` has been replaced, otherwise None."""
    planner = getattr(megatron_module("strategies.torch"), "MCoreLoadPlanner", None)
    method = getattr(planner, "create_local_plan", None)
    return None if getattr(method, "__qualname__", "") == "MCoreLoadPlanner.create_local_plan" else planner


def mapping() -> Any:
    """Megatron's module `dist_checkpointing.mapping`: ShardedTensor, ShardedObject, ShardedBase and others."""
    return megatron_module("mapping")


def sharded_tensor_of(key: str, original_shape: tuple[int, ...] | None, stored: Any) -> Any:
    """A `ShardedTensor` without data that describes a stored tensor on the meta device. `original_shape`: that of the
    parameter, where it is stored flattened.
    """
    cls = mapping().ShardedTensor
    if original_shape is None:
        return cls.from_rank_offsets(key, stored).without_data()
    whole = stored.new_empty(original_shape)
    if not hasattr(cls, "from_rank_offsets_flat"):  # from 0.16 on; ours loads it unflattened
        return cls.from_rank_offsets(key, whole).without_data()
    everything = slice(0, whole.numel())
    return cls.from_rank_offsets_flat(key, whole.flatten(), whole.shape, flattened_range=everything).without_data()


def quantized_test() -> Callable[[Any], bool] | None:
    """Megatron's own test for Transformer Engine's quantized tensors; None where that is not installed."""
    try:
        module = import_module("megatron.core.fp8_utils")
    except ImportError:
        return None
    # The second is the name to 0.13.
    has_class = getattr(module, "HAVE_TE_FP8_TENSOR_CLASS", False) or getattr(module, "HAVE_TE_FLOAT8TENSOR", False)
    return module.is_float8tensor if has_class else None


def save_strategy_base() -> Any:
    """The class that a save strategy must derive from: abstract to 0.16. Later ones replace, without a word, whatever
    is not of their own class; of that, a method that is not overridden raises instead of running stock code.
    """
    if differences().has_registry:
        return megatron_module("strategies.base").AsyncSaveShardedStrategy
    return _closed_off(stock_class("TorchDistSaveShardedStrategy"))


def load_strategy_base() -> Any:
    """The class that a load strategy must derive from; see `save_strategy_base`."""
    if differences().has_registry:
        return megatron_module("strategies.base").LoadShardedStrategy
    return _closed_off(stock_class("TorchDistLoadShardedStrategy"))


def stock_class(name: str) -> Any:
    """Megatron's own class of that name in `strategies.torch`, also while `install()` has put ours in its place."""
    module = megatron_module("strategies.torch")
    return patches.original(module, name)


@functools.cache
def _closed_off(stock: type) -> type:
    """A subclass of `stock` in which every method of it raises, and whose constructor runs nothing of it."""

    def closed(method_name: str) -> Any:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedMegatronError(
                f"megatron-core {installed_version_text()} calls {stock.__name__}.{method_name}, which "
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
