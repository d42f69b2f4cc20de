"""Megatron's save and load strategies for `torch_dist`: the two stories, from a sharded state dict and back.

save:  sharded_state_dict -> begin_save: main replicas, plan, writing -> commit
load:  sharded_state_dict -> read requests -> CheckpointReader -> the tensors, in the structure that came in

Transformer Engine's quantized tensors are read through a few wide ones at a time. Where optimizer state belongs to the
layout that saved it, the error says how to convert it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.core.console import line_level, logger_of
from mcore_ckpt.core.errors import KindMismatchError, LoadError, OptionError, StrategyNotFoundError
from mcore_ckpt.core.options import LoadOptions, SaveOptions, checkpoint_path, first_of_this_host
from mcore_ckpt.core.process import run_concurrently
from mcore_ckpt.core.ranks import RankGroup, coordination_group, own_rank, without_modes
from mcore_ckpt.directory.commit import remove_tensors
from mcore_ckpt.directory.in_force import iteration_of
from mcore_ckpt.format.index import is_flat_bucket
from mcore_ckpt.format.metadata_read import METADATA_FILE
from mcore_ckpt.load.ranges import batches
from mcore_ckpt.load.reader import CheckpointReader, ranks_that_load_here, read_shards
from mcore_ckpt.load.records import ReadStats, of_one_save
from mcore_ckpt.megatron.calls import (
    Identity,
    MegatronErrors,
    check_common,
    check_ranks,
    current_load,
    current_save,
    identity_of,
    noted_validation,
    opened_reader,
)
from mcore_ckpt.megatron.serialization import directory_to_read
from mcore_ckpt.megatron.versions import (
    TESTED_VERSIONS,
    differences,
    installed_version_text,
    mapping,
    nvrx_core,
    optional_module,
    own_version,
    parallel_layout,
    sharded_tensor_of,
    strategy_base,
)
from mcore_ckpt.save.async_queue import AsyncRequest
from mcore_ckpt.save.planner import SaveRequest, Structure, check_hint
from mcore_ckpt.save.staging import warm_up_buffer
from mcore_ckpt.save.transaction import SaveTransaction, begin_save
from mcore_ckpt.state.shards import filled, is_main_replica, is_sharded_tensor, leaves, leaves_by_kind
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)


_Path = str | os.PathLike[str]


class TorchDistSaveStrategy(strategy_base("Save")):  # type: ignore[misc]
    """Saves a sharded state dict in the `torch_dist` format, synchronously or asynchronously.

    Args:
        backend: name of the format, as in `metadata.json`.
        version: its version.
        keep_only_main_replica: accepted for Megatron's sake; of a replicated shard only the main replica is written.
        thread_count: files that each rank writes, at most; None takes it from `options`.
        cached_metadata: Megatron's name for "the structure stays"; accepted for its sake. Plans are reused whenever the
            structure has in fact not changed.
        separation_hint: tensors whose key starts with it go to files whose names start with it.
        cpu_shm_mode: accepted for Megatron's sake; device tensors are staged in shared host memory in any case.
        options: `SaveOptions`; None takes them from the environment.
        unknown: arguments of a Megatron that is newer than this package; each is named in a logged warning.

    Attributes:
        use_cached_ckpt_structure, cached_global_metadata, ckpt_metadata_create_path: for Megatron, which sets them; not
            used.
        validated_cache_reuse: the last save reused the plan of the one before.
        agreed_distribution: what the ranks of a fully parallel wrapper around this strategy have agreed on last.
        validated_loaded_metadata_reuse: False always; the first save after a load makes a plan of its own.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int | None = None,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
        *,
        options: SaveOptions | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(backend, version)
        _name_unknown(f"{type(self).__name__}(...)", unknown)
        self.options = SaveOptions.from_environment() if options is None else options
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = self.options.thread_count if thread_count is None else thread_count
        if separation_hint is not None:
            check_hint(separation_hint)
        self.separation_hint = separation_hint
        self.use_cached_ckpt_structure = cached_metadata
        self.cached_global_metadata: Any = None
        self.ckpt_metadata_create_path: Any = None
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self.agreed_distribution: Any = None
        self._structure = Structure()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects lie in the same files as tensors."""
        return True

    @without_modes()
    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path, async_strategy: str = "", **unknown: Any
    ) -> Any:
        """Take a snapshot of the state and begin to write it; training may continue as soon as this returns.

        Args:
            sharded_state_dict: nested dict/list of Megatron's sharded tensors and objects; shapes in elements.
            checkpoint_dir: directory to save into.
            async_strategy: accepted for the sake of Megatron from 0.17 on; any queue can finalize the request.
            unknown: as of the class.

        Returns:
            Megatron's `AsyncRequest`. Its finalization publishes the checkpoint, or raises on every rank.

        Raises:
            CheckpointError (as a `CheckpointingException`, too): the save cannot be done; nothing was changed.
        """
        if unknown:
            _name_unknown(f"{type(self).__name__}.async_save", unknown)
        with MegatronErrors(), self._begun(sharded_state_dict, checkpoint_dir, is_async=True) as transaction:
            # Training code extends Megatron's with callbacks, from 0.20 on NVRx's.
            module: Any = optional_module("strategies.async_utils") or nvrx_core()
            request_class = AsyncRequest if module is None else module.AsyncRequest
            return request_class(transaction, (), [_Commit(transaction)])

    @without_modes()
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path, **unknown: Any) -> None:
        """Write the state and publish the checkpoint; starts no process.

        Args and raises: as `async_save`.
        """
        if unknown:
            _name_unknown(f"{type(self).__name__}.save", unknown)
        with MegatronErrors(), self._begun(sharded_state_dict, checkpoint_dir, is_async=False) as transaction:
            _commit(transaction)

    @without_modes()
    def warm_up(self, sharded_state_dict: dict[str, Any]) -> None:
        """Start the writer process and take the memory that an async save of this state needs, ahead of the first.

        Args:
            sharded_state_dict: as `async_save` will get it; nothing of it is read but sizes.
        """
        shards = [leaf for leaf in leaves(sharded_state_dict) if is_sharded_tensor(leaf) and is_main_replica(leaf)]
        # Headers and alignment take a page for each tensor at most, objects a few.
        nbytes = sum(leaf.data.nbytes + 4096 for leaf in shards) + 16 * 4096
        with MegatronErrors():
            warm_up_buffer(nbytes, self.options)

    @contextlib.contextmanager
    def _begun(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path, *, is_async: bool
    ) -> Iterator[SaveTransaction]:
        """A save that has begun; it is given up where the block raises."""
        call = current_save()
        request = SaveRequest(
            directory=checkpoint_path(checkpoint_dir),
            options=self.options,
            thread_count=self.thread_count,
            separation_hint=self.separation_hint,
            is_async=is_async,
            validation=noted_validation(),
            layout=parallel_layout,
            has_common_file=not differences().common_state_is_an_object,
            earlier=None if call is None else call.commit,
        )
        # Ranks exchange or compare other things by other values.
        group = coordination_group(compare_replicas=self.options.compare_replicas)
        transaction = begin_save(sharded_state_dict, request, group, self._structure)
        try:
            if call is not None:
                call.transactions.append(transaction)
            if transaction.skipped:
                if call is not None and call.commit is not None and not call.commit.has_opened:
                    call.commit.give_up()
            else:
                if call is not None and call.location == transaction.directory.storage.location:
                    call.commit = transaction.directory.target
                self.validated_cache_reuse = transaction.plan.reused
            yield transaction
        except BaseException:
            transaction.abort()
            raise


class _Commit:
    """The finalize function of an async save."""

    def __init__(self, transaction: SaveTransaction) -> None:
        # The queue looks here for the save that this commits: Megatron may move callbacks to another request.
        self.save_call = transaction
        transaction.committer = weakref.ref(self)

    @without_modes()
    def __call__(self) -> None:
        with MegatronErrors():
            _commit(self.save_call)


def _commit(transaction: SaveTransaction) -> None:
    """Publish a checkpoint, and show what it took among the job's curves."""
    transaction.commit()
    took = transaction.figures
    scalars = {
        "mcore_ckpt/save/seconds_waited": took.waited_s,
        "mcore_ckpt/save/seconds_to_durable": took.durable_s,
        "mcore_ckpt/save/bytes": took.nbytes,
        "mcore_ckpt/save/bytes_per_second": took.nbytes / max(took.writing_s, 1e-9),
    }
    if took.differing is not None:
        scalars["mcore_ckpt/save/replicas_that_differ"] = took.differing
    show(transaction.path, scalars)


class TorchDistLoadStrategy(strategy_base("Load")):  # type: ignore[misc]
    """Loads a `torch_dist` checkpoint into a sharded state dict of any layout.

    Args:
        cache_metadata: accepted for Megatron's sake; an index is read again only when the checkpoint has changed.
        stream_ckpt_dequant: Megatron from 0.19 on leaves quantized tensors as they are, and `load` reads them through
            a few wide ones at a time; with False, Megatron makes wide copies of all of them ahead of the load.
        checkpoint_name: accepted for Megatron's sake; `load` is told the directory.
        replicate_local_replicas: accepted for Megatron's sake; tensors are read under their own keys.
        options: `LoadOptions`; None takes them from the environment.
        unknown: arguments of a Megatron that is newer than this package; each is named in a logged warning.

    Attributes:
        stream_ckpt_dequant: as the argument. Megatron asks for it.
        cached_global_metadata: None; Megatron's training code hands it on to the save strategy, which plans by itself.
        has_loaded: `load` has returned, behind a fully parallel wrapper since that was called: not a subclass's own.
    """

    def __init__(
        self,
        cache_metadata: bool = False,
        stream_ckpt_dequant: bool = True,
        checkpoint_name: Any = None,
        replicate_local_replicas: bool = False,
        *,
        options: LoadOptions | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        _name_unknown(f"{type(self).__name__}(...)", unknown)
        self.stream_ckpt_dequant = stream_ckpt_dequant
        self.options = LoadOptions.from_environment() if options is None else options
        self.cached_global_metadata = None
        self.has_loaded = False
        self._reader: CheckpointReader | None = None
        # To go back, all ranks have to be told of the damage that one has found.
        self._collective = differences().all_ranks_load or self.options.on_damaged == "go_back"

    can_handle_sharded_objects = TorchDistSaveStrategy.can_handle_sharded_objects

    @property
    def reader(self) -> CheckpointReader | None:
        """The reader of the last checkpoint, which knows the cost of the load (`stats`); None before the first load."""
        return self._reader

    @without_modes()
    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path, async_strategy: str = "", **unknown: Any
    ) -> dict[str, Any]:
        """Fill the sharded state dict's tensors from the checkpoint, reading only what this rank needs.

        Args:
            sharded_state_dict: nested dict/list of Megatron's sharded tensors and objects. Tensors with data are filled
                in place, quantized ones of Transformer Engine, too; the others are allocated on the CPU.
            checkpoint_dir: directory to load from.
            async_strategy: accepted for the sake of Megatron from 0.17 on; it says whose reader would read.
            unknown: as of the class.

        Returns:
            The same structure with tensors and objects in place of their sharded descriptions.

        Raises:
            LoadError (as a `CheckpointingException`, too): see `CheckpointReader.read_items`.
        """
        if unknown:
            _name_unknown(f"{type(self).__name__}.load", unknown)
        call = current_load()
        group = None if call is None else call.group
        if group is None:
            group = coordination_group() if self._collective else RankGroup(None)
        loaded: dict[str, Any] = {}

        def load() -> dict[Identity, int]:
            nonlocal loaded
            goes_back = self.options.on_damaged == "go_back"
            with self._one_save(directory_to_read(named, self.options) if goes_back else named) as reader:
                reader.ranks = 1 if call is not None and call.is_distributed else ranks_that_load_here()
                reader.parameters = None if call is None else call.buckets
                if call is not None:
                    call.filled_by = reader
                loaded = _load(reader, sharded_state_dict)
            return {identity_of(reader.index.manifest, ()): group.rank}

        with MegatronErrors():
            named = checkpoint_path(checkpoint_dir)
            check = partial(check_ranks, named)
            # The first rank that has opened a save stands for it: merged up the tree, the first has the lower ranks.
            group.run_merged("load", load, lambda first, second: {**second, **first}, check, wrap=LoadError)
            if call is not None:
                call.has_made("load")
        self.has_loaded = True
        return loaded

    @contextlib.contextmanager
    def _one_save(self, path: Path) -> Iterator[CheckpointReader]:
        """A reader of the checkpoint in that directory; raises at the end if that was, or may have been, replaced."""
        storage = storage_at(path)
        with contextlib.ExitStack() as load:
            begin = partial(load.enter_context, storage.in_use(METADATA_FILE))
            _, reader = run_concurrently(storage.asks_at_once, begin, partial(self._opened, path))
            load.enter_context(reader.other_tier_in_use())
            started_s, before = time.monotonic(), replace(reader.stats)
            with of_one_save(reader.index, reader.index_version):
                yield reader
            check_common(path, identity_of(reader.index.manifest, tuple(reader.index_version or ())), reader.index)
            if "MCORE_CKPT_DRAIN_TO" in os.environ and first_of_this_host(own_rank()):
                saving = SaveOptions.from_environment()
                if saving.drain_to is not None:
                    from mcore_ckpt.save.upkeep import run_loaded

                    run_loaded(path, saving, self.options.local_tier)
            _tell_load(reader, before, time.monotonic() - started_s)

    def _opened(self, path: Path) -> CheckpointReader:
        """A reader whose index is read again only when the checkpoint is another one, or has been replaced."""
        reader, self._reader = opened_reader(path, self.options, self._reader), None  # until the index is there
        _ = reader.index
        self._reader = reader
        return reader

    @without_modes()
    def load_tensors_metadata(self, checkpoint_dir: _Path, metadata: Any = None) -> dict[str, Any]:
        """What tensors the checkpoint holds: key -> Megatron `ShardedTensor` of the global shape, without data."""
        with MegatronErrors():
            index = (reader := self._opened(directory_to_read(checkpoint_dir, self.options))).index
            tensors = {key: (entry.dtype, entry.shape) for key, entry in index.tensors.items()}
            if _reads_buckets():
                from mcore_ckpt.format.parameter_table import stored_tables, tensors_of_buckets

                tensors = {key: form for key, form in tensors.items() if not is_flat_bucket(key)}
                tensors |= tensors_of_buckets(index, stored_tables(index, reader.object_bytes))
            found = {}
            for key, (dtype, shape) in tensors.items():
                stored = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                found[key] = sharded_tensor_of(key, index.original_shape(key), stored)
            return found

    @without_modes()
    def load_sharded_metadata(self, checkpoint_dir: _Path) -> dict[str, Any]:
        """What tensors and objects the checkpoint holds, as `load_tensors_metadata`; objects by their unique key."""
        with MegatronErrors():
            sharded_object = mapping().ShardedObject
            keys: Iterable[str] = self._opened(directory_to_read(checkpoint_dir, self.options)).index.objects
            if _reads_buckets():  # what a group of ranks has stored with its buckets, they stand for
                from mcore_ckpt.format.parameter_table import GROUP_OBJECT

                keys = [key for key in keys if GROUP_OBJECT.fullmatch(key) is None]
            objects = {key: sharded_object.empty_from_unique_key(key) for key in keys}
            return {**objects, **self.load_tensors_metadata(checkpoint_dir)}

    @without_modes()
    def remove_sharded_tensors(self, checkpoint_dir: _Path, key_prefix: str) -> None:
        """Remove all tensors and objects whose key starts with `key_prefix`, and the files that held only them.

        Raises:
            LoadError, SaveError (as a `CheckpointingException`, too): the checkpoint cannot be read or written.
        """
        with MegatronErrors():
            remove_tensors(checkpoint_path(checkpoint_dir), key_prefix)

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Any `torch_dist` checkpoint can be loaded."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Any version of `torch_dist` can be loaded; what cannot be read says so by key."""


def _reads_buckets() -> bool:
    """Whether the load in progress asks for parameters where flat buckets are stored."""
    return (call := current_load()) is not None and call.buckets is not None


def _tell_load(reader: CheckpointReader, before: ReadStats, took_s: float) -> None:
    """One line for each load of rank 0, and what this rank's took among the job's curves."""
    stats = reader.stats
    loaded_bytes, checked = stats.bytes_needed - before.bytes_needed, stats.records_checked - before.records_checked
    if _GLOBALS in sys.modules:
        scalars = {
            "mcore_ckpt/load/seconds": took_s,
            "mcore_ckpt/load/bytes": loaded_bytes,
            "mcore_ckpt/load/bytes_per_second": loaded_bytes / max(took_s, 1e-9),
        }
        show(reader.path, scalars)
    if own_rank() != 0:
        return
    _logger.log(
        line_level(loaded_bytes),
        "rank 0 loaded %.3f GB from %s in %.3f s at %.2f GB/s, %.3f GB of it read from files; "
        "checksums of %d records compared",
        loaded_bytes / 1e9,
        reader.path,
        took_s,
        loaded_bytes / 1e9 / max(took_s, 1e-9),
        (stats.bytes_read - before.bytes_read) / 1e9,
        checked,
    )


def _name_unknown(where: str, arguments: Mapping[str, Any]) -> None:
    """Warn of arguments that only a newer Megatron knows: what it wants by them, it does not get."""
    for name in arguments:
        _logger.warning(
            "%s: mcore_ckpt does not know the argument %r of megatron-core %s (tested: %s to %s), and ignores it",
            where,
            name,
            installed_version_text(),
            TESTED_VERSIONS[0],
            TESTED_VERSIONS[-1],
        )


def _load(reader: CheckpointReader, sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Fill a state dict's tensors, and return it with tensors and objects in place of their descriptions."""
    tensors, sharded_objects = leaves_by_kind(sharded_state_dict)
    plain, quantized, is_quantized = tensors, list[Any](), _quantized_test()
    if is_quantized is not None:
        quantized = [shard for shard in tensors if shard.data is not None and is_quantized(shard.data)]
        plain = [shard for shard in tensors if shard.data is None or not is_quantized(shard.data)]
    try:
        with reader.conversions.of_one_load(), reader.files_stay_open():
            read_shards(reader, plain)
            if quantized:
                _read_quantized(reader, quantized)
            stored = reader.read_objects((leaf.unique_key for leaf in sharded_objects), own_version)
    except LoadError as error:
        error.args = (f"{error}{_advice_on(reader, tensors, sharded_objects)}",)
        raise
    # Objects that were saved together under one key are given one by one, in their order.
    left = {key: iter(value if isinstance(value, list) else [value]) for key, value in stored.items()}

    def object_of(leaf: Any) -> Any:
        for value in left[leaf.unique_key]:
            return value
        raise KindMismatchError(f"{leaf.unique_key}: more objects are requested than are stored under this key")

    loaded: dict[str, Any] = filled(sharded_state_dict, object_of)
    return loaded


def _advice_on(reader: CheckpointReader, shards: Iterable[Any], objects: Iterable[Any]) -> str:
    """What a load's error says, too, if the state of another layout than the stored was requested; or nothing."""
    from mcore_ckpt.megatron.other_division import advice_on_other_buckets

    if advice := advice_on_other_buckets(reader, shards):
        return advice
    keys = {leaf.unique_key for leaf in objects if leaf.key.endswith("rng_state")} - reader.index.objects.keys()
    if keys and any("rng_state/" in key for key in reader.index.objects):
        stored = ". Random states are stored for another division of the ranks, and cannot follow"
        return f"{stored}: add --no-load-rng (verl: no `extra` in load_contents)"
    return ""


# --- strategies by action, backend and version -----------------------------------------------------------------------

# Megatron-Core had a registry up to 0.16, and refilled it at every look-up. This one holds factories, so that each
# look-up gets a strategy of its own: a shared one would leak its caches between unrelated checkpoints.

_Key = tuple[str, str, int]
_ACTIONS = ("load_common", "load_sharded", "save_common", "save_sharded")
_factories: dict[_Key, Callable[[], Any]] = {
    ("save_sharded", "torch_dist", 1): TorchDistSaveStrategy,
    ("load_sharded", "torch_dist", 1): TorchDistLoadStrategy,
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
    # A strategy that happens to be callable is still a strategy.
    is_strategy = not isinstance(strategy, type) and (hasattr(strategy, "save") or hasattr(strategy, "load"))
    _factories[_key(action, backend, version)] = (lambda: strategy) if is_strategy else strategy


def get_strategy(action: str | Enum, backend: str, version: int) -> Any:
    """The strategy for this action, backend and version; a new one where a factory was registered.

    Raises:
        OptionError: there is no such action.
        StrategyNotFoundError: nothing is registered for it; the message lists what is.
    """
    key = _key(action, backend, version)
    if key not in _factories:
        registered = "; ".join(f"{a} {b!r} version {v}" for a, b, v in sorted(_factories))
        raise StrategyNotFoundError(
            f"no strategy is registered for {key[0]} {backend!r} version {version}; registered: {registered}. "
            "Add one with mcore_ckpt.register_strategy(action, backend, version, strategy)"
        )
    return _factories[key]()


def _key(action: str | Enum, backend: str, version: int) -> _Key:
    name = action.value if isinstance(action, Enum) else action
    if name not in _ACTIONS:
        raise OptionError(f"action {action!r}: expected one of {', '.join(_ACTIONS)}, or Megatron's StrategyAction")
    return name, backend, version


def register_in_megatron() -> None:
    """Fill Megatron's registry (0.12 - 0.16) from ours: new strategies for each look-up that it serves."""
    registry = import_module("megatron.core.dist_checkpointing.strategies.base")  # which asks for them here
    for key in _factories:
        registry.register_default_strategy(registry.StrategyAction(key[0]), *key[1:], get_strategy(*key))


# --- quantized tensors ------------------------------------------------------------------------------------------------

# One of Transformer Engine looks like one of bfloat16, but holds FP8 (or narrower) elements and their scales; a
# checkpoint holds the wide elements. They are read into scratch memory of the wide dtype and copied over, which
# quantizes. Megatron before 0.19 makes a wide copy of every quantized tensor ahead of the load; from 0.19 on it leaves
# that to a strategy which says `stream_ckpt_dequant`, and the peak is a few tensors instead of the whole model.

# Scratch that is held at once, in bytes; more only where a single tensor is larger.
_SCRATCH_BYTES = 64 * 1024 * 1024


def _quantized_test() -> Callable[[Any], bool] | None:
    """Megatron's own test for Transformer Engine's quantized tensors; None where that is not installed."""
    try:
        module = import_module("megatron.core.fp8_utils")
    except ImportError:
        return None
    # The second is the name to 0.13.
    has_class = getattr(module, "HAVE_TE_FP8_TENSOR_CLASS", False) or getattr(module, "HAVE_TE_FLOAT8TENSOR", False)
    return module.is_float8tensor if has_class else None


def _read_quantized(reader: CheckpointReader, shards: Sequence[Any]) -> None:
    """Fill `ShardedTensor`s whose data are quantized, each at once. The running maxima of delayed scaling (`amax`)
    stay: what is loaded is not what was trained on.
    """
    for batch in batches(shards, lambda shard: shard.data.numel() * shard.data.dtype.itemsize, _SCRATCH_BYTES):
        scratches = [copy.copy(shard) for shard in batch]
        for scratch, wide in zip(scratches, (shard.data for shard in batch), strict=True):
            scratch.data = torch.empty(tuple(wide.shape), dtype=wide.dtype, device=wide.device)
        read_shards(reader, scratches)
        for shard, scratch in zip(batch, scratches, strict=True):
            amax = getattr(getattr(shard.data, "_quantizer", None), "amax", None)
            kept = amax.detach().clone() if isinstance(amax, torch.Tensor) else None
            with torch.no_grad():
                shard.data.copy_(scratch.data)
                if amax is not None and kept is not None:
                    amax.copy_(kept)


# --- curves -----------------------------------------------------------------------------------------------------------

# Megatron-LM's training code makes writers of TensorBoard and of Weights and Biases on its last rank; on others, and in
# other loops, nothing happens here.
_GLOBALS = "megatron.training.global_vars"
# Saves and loads that wait for a writer; of more, nothing is shown.
_MOST_WAITING = 16


class Curves:
    """Hands scalars to the writers, a save or load at a time, in a thread: one that hangs keeps no save waiting."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._is_at_work = self._has_warned = False

    def show(self, directory: Path, scalars: Mapping[str, float]) -> None:
        """Hand over the scalars of a save or load of that checkpoint. Never raises, and never waits for a writer."""
        try:
            module: Any = sys.modules.get(_GLOBALS)
            board, wandb = (getattr(module, f"get_{name}_writer", lambda: None)() for name in ("tensorboard", "wandb"))
            if board is not None or wandb is not None:
                self._enqueue(partial(_hand_over, board, wandb, iteration_of(directory.name), scalars))
        except Exception as error:  # noqa: BLE001  (at the end of the interpreter no thread starts)
            self._warn(f"cannot be given those of {directory} ({type(error).__name__}: {error!s:.300})")

    def _enqueue(self, hand_over: Callable[[], None]) -> None:
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                self._warn(f"has not taken those of {_MOST_WAITING} saves and loads")
                return
            if not self._is_at_work:
                threading.Thread(target=self._work, daemon=True).start()
                self._is_at_work = True
            self._waiting.append(hand_over)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._is_at_work = bool(self._waiting)
                if not self._is_at_work:
                    return
                hand_over = self._waiting.pop(0)
            try:
                hand_over()
            except Exception as error:  # noqa: BLE001  (of a writer nothing may reach training)
                self._warn(f"fails ({type(error).__name__}: {error!s:.300})")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("curves of checkpoints are incomplete: a writer of TensorBoard or wandb %s", problem)


def _hand_over(board: Any, wandb: Any, iteration: int | None, scalars: Mapping[str, float]) -> None:
    if board is not None:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb is not None:  # into the step that it is at: it drops what belongs to an earlier one
        wandb.log(dict(scalars), commit=False)


show = Curves().show
