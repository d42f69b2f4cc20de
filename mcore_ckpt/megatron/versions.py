"""What is known of Megatron-Core's insides: where versions differ, and what has been replaced in it.

Megatron-Core has three shapes that matter here:

    0.12 - 0.16   a registry of strategies, refilled with the stock ones at every look-up; `common.pt` by a strategy
    0.17, 0.18    no registry: the classes are used by name; `common.pt` by a function
    0.19 -        the same, and the common state is an object inside the checkpoint

`CONTRACT` in `install.py` says which names each has; they are replaced by `Patches`.

Up to 0.15 Megatron calls `numpy.product`, which numpy 2 does not have. Its modules get a `numpy` of their own then.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy
import torch.distributed as dist

from mcore_ckpt.core.errors import UnsupportedMegatronError
from mcore_ckpt.core.ranks import own_rank
from mcore_ckpt.format.zip_records import version_of

# The one list: scripts/test_matrix.sh reads this line, and a test compares it with README and docs/megatron.md.
TESTED_VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
_OLDEST, NEWEST_TESTED = (tuple(map(int, TESTED_VERSIONS[end].split(".")[:2])) for end in (0, -1))
CHECKPOINTING = "megatron.core.dist_checkpointing"
# Its module of distributed optimizers.
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
VERL = "verl.utils.checkpoint.megatron_checkpoint_manager"
SKYRL = "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy"
NVRX = "nvidia_resiliency_ext"
NVRX_ASYNC = f"{NVRX}.checkpointing.async_ckpt"


@dataclass(frozen=True, slots=True)
class Differences:
    """In what a version of megatron-core differs from the others, as far as it matters here."""

    # Strategies come from a registry, and derive from abstract classes. Later ones are constructed by name, and what is
    # not an instance of the stock class is replaced by one, without a word.
    has_registry: bool
    common_state_is_an_object: bool  # it lies in the data files; before that in `common.pt`
    # Every rank takes part in a load, so that an error can reach them all; later ones let some ranks load alone.
    all_ranks_load: bool


@functools.cache
def differences() -> Differences:
    """Differences of the version that is installed."""
    version = megatron_version()[:2]
    return Differences(
        has_registry=version <= (0, 16), common_state_is_an_object=version >= (0, 19), all_ranks_load=version <= (0, 17)
    )


# --- replacing names -------------------------------------------------------------------------------------------------

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Change:
    owner: Any
    name: str
    original: Any
    replacement: Any


class Patches:
    """Replacements that have been made, in order."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._originals: dict[str, Any] = {}
        self._added: list[ModuleType] = []

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Set one attribute of a class or module."""
        original = vars(owner).get(name, _ABSENT)
        setattr(owner, name, replacement)
        self._changes.append(_Change(owner, name, original, replacement))
        self._originals[_dotted(owner, name)] = None if original is _ABSENT else original

    def replace_all(self, replacements: Iterable[tuple[Any, str, Any]]) -> None:
        """Set each (owner, name, replacement); of modules, also all other globals that hold one of the originals."""
        replaced: dict[int, _Change] = {}
        for owner, name, replacement in replacements:
            self.set(owner, name, replacement)
            if isinstance(owner, ModuleType):
                replaced[id(self._changes[-1].original)] = self._changes[-1]
        for other, alias, held in _globals_holding(replaced):
            replacement = replaced[id(held)].replacement
            setattr(other, alias, replacement)
            self._changes.append(_Change(other, alias, held, replacement))

    def add_module(self, module: ModuleType) -> None:
        """Let an import of the module's name find it, which finds none now."""
        package, _, name = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        self._added.append(module)
        if package:
            setattr(sys.modules[package], name, module)

    def original(self, module: ModuleType, name: str) -> Any:
        """What a module's global was before it was replaced, or is if it was not."""
        return self._originals.get(_dotted(module, name), getattr(module, name, None))

    def replaced(self) -> dict[str, Any]:
        """Dotted name -> the original; one entry for each name, not for each module that has imported it."""
        return dict(self._originals)

    def undo(self) -> None:
        """Put back every original, also in modules that have imported a replacement since, under the same name."""
        originals: dict[int, dict[str, Any]] = {}  # by name, of each replacement
        for change in reversed(self._changes):
            if vars(change.owner).get(change.name, _ABSENT) is not change.replacement:
                continue  # replaced again since, by other code, which alone may remove that
            if change.original is _ABSENT:
                delattr(change.owner, change.name)
                continue
            setattr(change.owner, change.name, change.original)
            if isinstance(change.owner, ModuleType):
                originals.setdefault(id(change.replacement), {})[change.name] = change.original
        for other, alias, held in _globals_holding(originals):
            # Under another name it may be an import from this package, which stays what it is.
            setattr(other, alias, originals[id(held)].get(alias, held))
        for module in self._added:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
        self._added.clear()
        self._changes.clear()
        self._originals.clear()


def _dotted(owner: Any, name: str) -> str:
    prefix = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{prefix}.{name}"


def _globals_holding(ids: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Globals of other packages' modules that are objects of these ids; in dictionaries only: nothing lazy loads."""
    module: Any  # anything can be put into sys.modules
    for module in list(sys.modules.values()) if ids else ():
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "mcore_ckpt":
            continue
        for alias, held in list(vars(module).items()):
            if id(held) in ids:
                yield module, alias, held


patches = Patches()
"""What `install()` has replaced; empty while it is not in force."""


# --- what the installed version has -----------------------------------------------------------------------------------


def megatron_module(name: str = "") -> ModuleType:
    """Import `megatron.core.dist_checkpointing`, or one of its modules; raises `UnsupportedMegatronError`."""
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


def nvrx_core() -> Any:
    """Module `core` of NVRx, or that of `supply`; None where neither can be imported."""
    try:
        return import_module(f"{NVRX_ASYNC}.core")
    except (ImportError, OSError):  # OSError: a library that its wheel was built for is missing
        return None


def let_bridge_name_its_manager() -> None:
    """Megatron-Bridge makes no class of a configuration that is not on its list (`custom_manager_class`)."""
    if find_spec("megatron.bridge") is not None:
        with contextlib.suppress(ImportError, AttributeError):
            module = import_module("megatron.training.config.instantiate_utils")
            module.target_allowlist.add_exact("mcore_ckpt.bridge.CheckpointManager")


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


def mapping() -> Any:
    """Megatron's module `dist_checkpointing.mapping`: ShardedTensor, ShardedObject, ShardedBase and others."""
    return megatron_module("mapping")


def sharded_tensor_of(key: str, original_shape: tuple[int, ...] | None, stored: Any) -> Any:
    """A `ShardedTensor` without data for a stored tensor; `original_shape`: the parameter's, if that is flattened."""
    cls = mapping().ShardedTensor
    if original_shape is None:
        return cls.from_rank_offsets(key, stored).without_data()
    whole = stored.new_empty(original_shape)
    if not hasattr(cls, "from_rank_offsets_flat"):  # from 0.16 on; ours loads it unflattened
        return cls.from_rank_offsets(key, whole).without_data()
    everything = slice(0, whole.numel())
    return cls.from_rank_offsets_flat(key, whole.flatten(), whole.shape, flattened_range=everything).without_data()


def parallel_layout() -> str:
    """Sizes of the job and its groups, and how far apart ranks are: where alike, a rank holds what its number did."""
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sizes: list[tuple[str, Any]] = [("world", world)]
    if groups is not None and groups.model_parallel_is_initialized():
        sizes.append(("virtual pipeline", groups.get_virtual_pipeline_model_parallel_world_size()))
        for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
            if (group_of := getattr(groups, f"get_{name}_parallel_group", None)) is not None:
                ranks = dist.get_process_group_ranks(group_of())
                sizes.append((name, f"{len(ranks)} over {ranks[-1] - ranks[0]}"))
    return ", ".join(f"{name} {size}" for name, size in sizes)


def parallel_sizes() -> tuple[int, int] | None:
    """Tensor and pipeline parallel size of the job; None before its groups are made."""
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return None
    return groups.get_tensor_model_parallel_world_size(), groups.get_pipeline_model_parallel_world_size()


def parameter_group_identifiers() -> tuple[str, ...]:
    """What parameter groups of an optimizer are known by in this version."""
    keys: tuple[str, ...] = import_module("megatron.core.optimizer.optimizer").param_group_identifier_keys
    return keys


def own_version(_: str, content: bytes) -> bytes:
    """The version of an object that this rank has saved, from the object's record; else the main one."""
    return version_of(content, parallel_layout(), own_rank())


def strategy_base(kind: Literal["Save", "Load"]) -> Any:
    """The class that a strategy must derive from: abstract to 0.16. Later ones replace, without a word, whatever is not
    of their own class; of that, a method that is not overridden raises instead of running stock code.
    """
    if differences().has_registry:
        base = megatron_module("strategies.base")
        return base.AsyncSaveShardedStrategy if kind == "Save" else base.LoadShardedStrategy
    return _closed_off(stock_class(f"TorchDist{kind}ShardedStrategy"))


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


# --- numpy 2 ----------------------------------------------------------------------------------------------------------

# Modules of `dist_checkpointing` of 0.12 to 0.15 that call a function which numpy lost in 2.0.
_CALLING_PRODUCT = ("exchange_utils", "mapping", "validation")


def serve_with_numpy_2(patches: Patches) -> None:
    """Let Megatron to 0.15 run with a numpy that has no `product`."""
    if megatron_version() < (0, 16) and not hasattr(numpy, "product"):
        for module in _CALLING_PRODUCT:
            patches.set(megatron_module(module), "np", SimpleNamespace(**vars(numpy), product=numpy.prod))
