"""One call of Megatron's `save` or `load`: what the functions that Megatron calls within it have in common.

Megatron calls them one after the other, and hands nothing from one to the next. Each asks here for the call that it is
part of (`current_save`, `current_load`, `current_resume`), and takes from it, or notes in it, what its docstring says.

**Loads.** To Megatron-Core 0.17 all ranks load together. Later ones let some load alone, but not where Megatron's
`load` checks the access integrity, as it does by default, or looks for keys that no rank asks for, nor behind a fully
parallel wrapper: there it gathers from all ranks. So all come together there, and one exchange more says whether their
options agree. A rank that fails tells the others in the next exchange of this package (`RankGroup.tell_failure`). One
is made ahead of whatever Megatron gathers (`MegatronLoad.sync`), so that the others are never in a gather which this
rank does not reach.

**Validation.** Megatron gathers all shards of all ranks on every rank, at each save and load, and sends the common
state of rank 0 to all. Within a save of this package it is asked for here, and done when the strategy agrees with the
other ranks on the plan (`save/planner.py`). Within a load the ranks tell the coordinator in columns. Elsewhere (another
strategy, local checkpoints) Megatron's own functions run.

**One save.** Another save may replace the checkpoint at any moment. The common state is read ahead of the tensors, by
each rank for itself. What was read is known by the save's id, which the manifest of `.metadata` carries, and is
compared; that of stock has none, and is known by the file itself.

**Errors.** One that leaves a strategy is an instance of this package's, of Megatron's and of DCP's classes at once
(`MegatronErrors`).
"""

from __future__ import annotations

import functools
import hashlib
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointError, LoadError, PlanError, SaveError
from mcore_ckpt.core.options import LoadOptions, SaveOptions
from mcore_ckpt.core.ranks import RankGroup, coordination_group, own_rank, reached_every_rank
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.integrity import Manifest, shown_id
from mcore_ckpt.format.metadata_read import COMMON_FILE, METADATA_FILE, read_common_file
from mcore_ckpt.load.reader import BucketedParameters, CheckpointReader
from mcore_ckpt.load.records import replaced_error
from mcore_ckpt.megatron.versions import CHECKPOINTING, differences, megatron_module, own_version
from mcore_ckpt.save.planner import Validation
from mcore_ckpt.state.plan_check import Accesses, check_requests
from mcore_ckpt.state.shards import is_main_replica, leaves
from mcore_ckpt.storage.resolve import storage_at

if TYPE_CHECKING:
    from mcore_ckpt.directory.commit import Commit
    from mcore_ckpt.save.transaction import SaveTransaction

# --- the call in progress ---------------------------------------------------------------------------------------------

_Exchange = Literal["options", "sync", "check", "load"]

Identity = bytes | tuple[int, ...]
"""Which save something was read of: its id, or the version of `.metadata`, where that has no manifest."""


@dataclass(slots=True)
class MegatronSave:
    """A call of Megatron's `save`, or one of the callbacks at the end of an asynchronous one."""

    is_validated: bool = False  # here: all ranks have come with this package's strategy, and Megatron gathers nothing
    # The ranks of a wrapper's group, if an exchange between them comes ahead of any of all ranks, and is still to come.
    meets_in: Callable[[], RankGroup] | None = None
    accesses: Accesses | None = None  # what Megatron has asked to be validated
    common: Any = None  # and the common state
    mains_are_saved: bool = False  # a wrapper has chosen others to save its group's main replicas, each once
    distribution: Any = None  # the answer to Megatron's wrapper, by which rank each shard is saved; None: it finds out
    late_error: Exception | None = None  # of `metadata.json`, by the first rank; it is raised on all ranks afterwards
    location: str = ""  # of the directory; none in a callback
    transactions: list[SaveTransaction] = field(default_factory=list)  # that strategies of this package have begun
    commit: Commit | None = None  # on the first rank, once its directory is locked
    has_come: bool = False  # to an exchange of all ranks, in which they are told what fails on one

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process, that a request is sent to, calls no callback."""
        return MegatronSave, ()

    def give_up(self) -> None:
        """Leave nothing of it, after an error."""
        for transaction in self.transactions:
            transaction.abort()
        if self.commit is not None:
            self.commit.give_up()

    @contextmanager
    def within(self, group: RankGroup) -> Iterator[None]:
        """An exchange of a wrapper's group; ranks of other groups, on their way to that of all, are told its error."""
        self.meets_in = None
        try:
            yield
        except BaseException as error:
            if self.is_validated and group.size < (everyone := coordination_group()).size:
                everyone.tell_failure("save", error, wrap=SaveError)
            raise

    def tell(self, error: BaseException) -> None:
        """Tell the others, in the exchanges that they come to first, what this rank has raised before."""
        if not self.is_validated or self.has_come or reached_every_rank(error):
            return
        groups = [everyone := coordination_group()]
        if self.meets_in is not None:
            group = self.meets_in()
            groups = [group, everyone] if group.size < everyone.size else [group]
        for group in groups:
            group.tell_failure("save", error, wrap=SaveError)


@dataclass(slots=True)
class MegatronLoad:
    """A call of Megatron's `load`: all that it reads is of one directory and one save."""

    options: LoadOptions  # as the strategy has them
    process_group: Any = None  # as Megatron was given it
    group: RankGroup | None = None  # the ranks, where all have come to it; None: this one may load alone
    is_distributed: bool = False  # Megatron's fully parallel wrapper distributes the reads: one rank reads each byte
    last: _Exchange = "options"  # the last exchange of this package that the load is known to make
    asks_for_buckets: bool = False  # a rank asks for the state of a distributed optimizer
    directory: Path = Path()  # what is read
    version: tuple[int, ...] = ()  # its version of `.metadata`
    common: Identity | None = None  # which save the common state was read of; None before
    reader: CheckpointReader | None = None  # what has decoded the index for that
    filled_by: CheckpointReader | None = None  # by this a strategy of this package reads; None: another strategy loads
    buckets: BucketedParameters | None = None  # reads parameters of flat buckets, if the model is divided otherwise
    change_common: Callable[[Any], Any] | None = None  # makes of the stored common state the one that Megatron gets
    resume: MegatronResume | None = None  # the call of Megatron-LM's `load_checkpoint` that makes this one
    _is_over: bool = False

    def sync(self) -> None:
        """Come together ahead of a gather of Megatron's. Raises on all ranks what one has raised before."""
        if self.group is not None:
            ask = self.asks_for_buckets
            self.asks_for_buckets = self.group.run_merged("load", lambda: ask, operator.or_, bool, wrap=LoadError)
            self.has_made("sync")

    def has_made(self, exchange: _Exchange) -> None:
        """Note that all ranks have come to an exchange."""
        self._is_over |= exchange == self.last

    def tell(self, error: BaseException) -> None:
        """Tell the others what this rank alone has raised, if they still come to an exchange of this package."""
        if self.group is not None and not self._is_over and not reached_every_rank(error):
            self.group.tell_failure("load", error, wrap=LoadError)


@dataclass(slots=True)
class MegatronResume:
    """A call of Megatron-LM's `load_checkpoint`, which ends with a certificate."""

    load: MegatronLoad | None = None  # the call of `load` that it has made last
    # Arguments of the functions by which it makes its state dict, by their names.
    arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)


_Call = TypeVar("_Call", MegatronSave, MegatronLoad, MegatronResume)
_in_progress: ContextVar[MegatronSave | MegatronLoad | MegatronResume | None] = ContextVar("_in_progress", default=None)


@contextmanager
def in_progress(call: _Call) -> Iterator[_Call]:
    """Within the block this is Megatron's call. What a rank raises in a save or load, it tells the others."""
    before = _in_progress.get()
    try:  # (a Ctrl-C may come right behind the change)
        _in_progress.set(call)
        yield call
    except BaseException as error:
        if not isinstance(call, MegatronResume):
            call.tell(error)
        raise
    finally:
        _in_progress.set(before)


def current_save() -> MegatronSave | None:
    """The save in progress, of whatever strategy."""
    return call if isinstance(call := _in_progress.get(), MegatronSave) else None


def current_load() -> MegatronLoad | None:
    """The load in progress."""
    return call if isinstance(call := _in_progress.get(), MegatronLoad) else None


def current_resume() -> MegatronResume | None:
    """The `load_checkpoint` in progress, before and during its load."""
    call = _in_progress.get()
    return call.resume if isinstance(call, MegatronLoad) else call if isinstance(call, MegatronResume) else None


# --- loads ------------------------------------------------------------------------------------------------------------


def joined_load(
    options: LoadOptions, goes_back: bool, arguments: dict[str, Any], asks_for_buckets: bool = False
) -> MegatronLoad:
    """A call of `load` with these `arguments`, to which all ranks have come, unless ranks may load alone. `goes_back`:
    to an older checkpoint, and has not begun to. `OptionError`: on all ranks, if options differ; `LoadError`: one is
    gone.
    """
    validation = megatron_module("validation")
    strict = validation.parse_strict_flag(arguments.get("strict", validation.StrictHandling.ASSUME_OK_UNEXPECTED))
    validates = bool(arguments.get("validate_access_integrity", True))
    gathers = validation.StrictHandling.requires_global_app_metadata(strict)
    strategy: Any = arguments.get("sharded_strategy")
    is_wrapped = hasattr(strategy, "base_strategy")
    call = MegatronLoad(
        options, arguments.get("process_group"), asks_for_buckets=asks_for_buckets, resume=current_resume()
    )
    if not (differences().all_ranks_load or validates or gathers or goes_back or is_wrapped):
        return call
    # Ranks that go back or certify otherwise exchange other things, and one alone would wait for ever.
    on_damaged = "go_back" if goes_back else "raise"
    call.group = coordination_group(call.process_group, on_damaged=on_damaged, certify=options.certify)
    if validates or gathers:
        call.last = "check" if validates else "sync"
    if is_ours(strategy) and getattr(type(unwrapped(strategy)), "load", is_ours).__module__.startswith("mcore_ckpt."):
        call.last = "load"  # not where a subclass loads by itself
    call.is_distributed = is_wrapped and dist.get_world_size(strategy.parallelization_group) > 1
    call.sync()
    call.has_made("options")
    return call


def unwrapped(strategy: Any) -> Any:
    """A strategy without the fully parallel wrappers around it."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy


def is_ours(strategy: Any) -> bool:
    """Whether a strategy of this package loads, behind a wrapper or not; None: the one that Megatron takes."""
    strategy = unwrapped(strategy)
    return strategy is None or isinstance(getattr(strategy, "options", None), LoadOptions)


def synced_load(stock: Any) -> Any:
    """`load` of Megatron's fully parallel wrapper, ahead of which the ranks come together: it gathers. Of objects, the
    versions that ranks have of them (`format/zip_records.py`) take the place of what it gathers.
    """

    @functools.wraps(stock)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self):
            return stock(self, *args, **kwargs)
        if (call := current_load()) is not None:
            call.sync()
        base = unwrapped(self)
        base.has_loaded = False

        def fill(state: Any, gathered: dict[Any, Any]) -> None:
            if base.has_loaded:  # a subclass may load by itself
                id_of = megatron_module("utils")._sharded_object_id  # noqa: SLF001
                keys = {id_of(one): one.unique_key for one in leaves(state) if not is_main_replica(one)}
                stored = base.reader.read_objects(keys.values(), own_version)
                gathered |= {name: stored[key][0] for name, key in keys.items() if isinstance(stored[key], list)}
            type(self).fill_in_deferred_sharded_objects(state, gathered)

        self.fill_in_deferred_sharded_objects = fill
        try:
            return stock(self, *args, **kwargs)
        finally:
            del self.fill_in_deferred_sharded_objects

    return load


# --- validation -------------------------------------------------------------------------------------------------------

# Under this name Megatron warns of a common state that differs.
_logger = logger_of(f"{CHECKPOINTING}.validation")


@contextmanager
def one_save(strategy: Any, strategy_class: type, location: str) -> Iterator[MegatronSave]:
    """A call of Megatron's `save`: what it asks to be validated is noted; early errors reach all ranks, and nothing of
    it stays.
    """
    # To 0.18 Megatron writes the common state ahead, on all ranks.
    is_first = differences().common_state_is_an_object and dist.is_initialized()
    meets_in, strategy = wrapper_group(strategy) if is_first else None, unwrapped(strategy)
    is_validated = strategy is None or type(strategy) is strategy_class
    call = MegatronSave(is_validated, location=location)
    call.meets_in = meets_in if is_validated else None
    with in_progress(call):
        try:
            yield call
        except BaseException:
            call.give_up()
            raise


def wrapper_group(wrapper: Any) -> Callable[[], RankGroup] | None:
    """The ranks over which a fully parallel wrapper distributes saves of this package, if there are several."""
    if not isinstance(getattr(getattr(wrapper, "base_strategy", None), "options", None), SaveOptions):
        return None
    group = wrapper.parallelization_group
    return None if dist.get_world_size(group) == 1 else functools.partial(coordination_group, group)


def noted_validation() -> Validation | None:
    """What the save in progress has to validate in the exchange that comes next; None if nothing, or Megatron has."""
    call = current_save()
    if call is None or not call.is_validated:
        return None
    call.has_come = True
    if call.accesses is None:
        return None
    found = Validation(call.accesses, mains_are_saved=call.mains_are_saved)
    if call.common is None:
        return found
    compare = functools.partial(_compare_common, call.common)
    return found._replace(common_digest=_digest(call.common), compare_common=compare)


def _digest(common: Any) -> bytes:
    try:
        return hashlib.blake2b(pickle.dumps(common), digest_size=16).digest()
    except Exception:  # noqa: BLE001  (anything may be in there; the comparison tells what cannot be sent)
        return b""


def _compare_common(common: Any, group: RankGroup) -> None:
    """Warn on each rank whose common state is not that of the first, of which alone it is saved."""
    sent = group.run_on_coordinator("compare the common state", lambda: pickle.dumps(common), wrap=SaveError)
    if group.is_coordinator:
        return
    try:
        # Within the exchange, what does not unpickle would end it on this rank, and the others would wait.
        only_first, only_here, mismatch = megatron_module("dict_utils").diff(pickle.loads(sent), common)
    except Exception:  # on this rank alone: the others continue the save
        _logger.exception("Rank %d common state dict cannot be compared with that of rank 0", group.rank)
        return
    if only_first or only_here or mismatch:
        _logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank 0: %s, "
            "Keys only on %d: %s, Mismatched keys: %s",
            group.rank,
            only_first,
            group.rank,
            only_here,
            mismatch,
        )


class _Ungathered:
    """What all ranks hold, in the place of Megatron's list: gathered where it is iterated over, on all ranks then."""

    def __init__(self, accesses: Accesses, gather: Callable[[], Any], group: Any) -> None:
        self.accesses = accesses
        self.group = group
        self._gather = gather

    def __iter__(self) -> Iterator[Any]:
        if (call := current_load()) is not None:
            call.sync()
        return iter(self._gather()[1])


def noting(stock: Any) -> Any:
    """A `determine_global_metadata` that gathers nothing within a save or load of this package, but notes."""

    @functools.wraps(stock)
    def determine_global_metadata(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        call = current_save()
        if current_load() is None and (call is None or not call.is_validated):
            return stock(sharded_state_dict, *args, **kwargs)
        accesses = None if call is None else call.accesses
        if accesses is None:
            accesses = Accesses.of(sharded_state_dict)
        gather = functools.partial(stock, sharded_state_dict, *args, **kwargs)
        return None, _Ungathered(accesses, gather, args[0] if args else kwargs.get("process_group"))

    return determine_global_metadata


def checking(stock: Any) -> Any:
    """A `validate_sharding_integrity` that checks in the way of this package what was noted so."""

    @functools.wraps(stock)
    def validate_sharding_integrity(global_metadata: Any, common_state_dict: Any = None) -> None:
        if not isinstance(global_metadata, _Ungathered):
            stock(global_metadata, common_state_dict)
        elif (call := current_save()) is None:
            with MegatronErrors():
                group, what = coordination_group(global_metadata.group), "check what is loaded"
                told = group.gather_parts(what, global_metadata.accesses.told, wrap=PlanError)
                group.run_on_coordinator(what, functools.partial(check_requests, told or ()), wrap=PlanError)
                if (load := current_load()) is not None:
                    load.has_made("check")
        elif call.accesses is None:
            call.accesses, call.common = global_metadata.accesses, common_state_dict
        # A fully parallel wrapper asks again, of the distribution that it has made: that is the plan, which is checked.

    return validate_sharding_integrity


# --- one save ---------------------------------------------------------------------------------------------------------


def identity_of(manifest: Manifest | None, version: tuple[int, ...]) -> Identity:
    """Identity of a checkpoint that was read by a `.metadata` of this manifest and version."""
    return version if manifest is None or not manifest.save_id else manifest.save_id


def _shown(save: Identity) -> str:
    return f"save {shown_id(save)}" if isinstance(save, bytes) else "a .metadata without a manifest"


def metadata_version(directory: Path) -> tuple[int, ...]:
    """Changes when the checkpoint in that directory is replaced; empty if there is none."""
    try:
        found = storage_at(directory).version(METADATA_FILE)
    except LoadError:
        return ()
    return () if found is None else tuple(found)


def note_common(directory: Path, source: Identity, reader: CheckpointReader | None = None) -> None:
    """The common state was read, by that reader if the index was decoded, and is of that save."""
    if (call := current_load()) is not None and directory.absolute() == call.directory.absolute():
        call.common, call.reader = source, reader or call.reader


def opened_reader(directory: Path, options: LoadOptions, known: CheckpointReader | None = None) -> CheckpointReader:
    """A reader of a checkpoint: `known`, or that of the load in progress, if the index is still that of its save."""
    call = current_load()
    for reader in (known, None if call is None else call.reader):
        if reader is None or (reader.path, reader.options) != (directory, options):
            continue
        if tuple(reader.index_version or ()) == metadata_version(directory):
            return reader
    return CheckpointReader(directory, options=options)


def check_common(directory: Path, source: Identity, index: CheckpointIndex) -> None:
    """Raise `LoadError` if tensors and the common state that the same load has read are of two saves. Without
    `install()` Megatron-Core has read `common.pt` by itself: then that file is compared with the manifest.
    """
    call = current_load()
    if call is None:
        if index.manifest is not None and COMMON_FILE in index.manifest.files:
            read_common_file(storage_at(directory), COMMON_FILE, index.manifest)
    elif call.common is not None and call.common != source:
        said = f"the common state was read of {_shown(call.common)}, the tensors of {_shown(source)}"
        named = call.directory
        if directory.absolute() != named.absolute():
            raise LoadError(f"{directory}: {said}, by a strategy that loads from {named}: one load is of one save")
        raise replaced_error(directory, said)


def check_ranks(directory: Path, first_ranks: Mapping[Identity, int]) -> None:
    """Raise `LoadError` if ranks have opened several saves; of each the first rank that has."""
    if len(first_ranks) > 1:
        (rank, save), (other, another) = sorted((rank, save) for save, rank in first_ranks.items())[:2]
        raise replaced_error(directory, f"rank {rank} has read {_shown(save)}, rank {other} {_shown(another)}")


# --- errors ----------------------------------------------------------------------------------------------------------


class MegatronErrors(AbstractContextManager[None]):
    """A context in which our exceptions leave as Megatron's, too."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, CheckpointError) and not isinstance(error, _checkpointing_exception()):
            if isinstance(error, SaveError) and own_rank() == 0:
                # Rank 0's log is where people and scripts look for these words of Megatron's.
                error.args = (f"Worker failure: {error}",)
            as_megatron_error(error)


def as_megatron_error(error: Exception) -> Exception:
    """Make the error one of Megatron's and DCP's classes, too. It stays what it was, and pickles."""
    own: Any = type(error)
    if not isinstance(error, theirs := _checkpointing_exception()):
        error.__class__ = _in_all_trees(own, theirs)
    return error


def _checkpointing_exception() -> Any:
    return megatron_module("core").CheckpointingException


@functools.cache
def _in_all_trees(ours: Any, theirs: Any) -> Any:
    members = {
        "__module__": ours.__module__,
        "__doc__": ours.__doc__,
        "__str__": ours.__str__,  # that of CheckpointException lists ranks, and nothing else
        "__reduce__": lambda self: (as_megatron_error, (ours(*self.args),)),
        "_failures": {},
    }
    return type(ours.__name__, (ours, theirs, CheckpointException), members)
