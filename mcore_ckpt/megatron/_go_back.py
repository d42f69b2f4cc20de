"""Going back to an older checkpoint of the run where the one that is named is damaged (`LoadOptions.on_damaged`).

A job names a checkpoint by its directory, several times over: to see which format it has, to read the common state,
to load. All of it has to come from one checkpoint, and on all ranks from the same. So each of these asks here which
directory is to be read in the place of the one that it names:

- `dist_checkpointing.load` is called by all ranks. The coordinator looks at the checkpoint's structure and common state
  and chooses; if reading shows damage on any rank all the same, everything is loaded again from the next older one.
  What cannot be read since another save has replaced the checkpoint meanwhile is no damage: the new one is loaded.
- What may be called by one rank alone (the common state, what tensors there are) is answered by that rank, from the
  same structure, and remembered until the checkpoint that was named is another one.

The iteration that training resumes from is part of the common state, so it follows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    NewerFormatError,
    UnsafePickleError,
    attempt,
    value_of,
)
from mcore_ckpt.core.options import LoadOptions, checkpoint_path
from mcore_ckpt.core.ranks import coordination_group, without_modes, without_tracebacks
from mcore_ckpt.directory.iterations import is_megatrons, iteration_directories, iteration_of, look_at
from mcore_ckpt.format.metadata_read import CONFIG_FILE, METADATA_FILE, read_config, read_index
from mcore_ckpt.format.safe_pickle import NotRebuiltError
from mcore_ckpt.megatron._errors import MegatronErrors, is_first_rank
from mcore_ckpt.megatron._joint_load import JointLoad, join, joined_load
from mcore_ckpt.megatron._one_save import metadata_version, one_load
from mcore_ckpt.megatron._proof import prove_load
from mcore_ckpt.megatron._validation import validation_of_load
from mcore_ckpt.megatron._versions import patches
from mcore_ckpt.megatron.common_state import load_common
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of("mcore_ckpt")

_Version = tuple[int, ...]
# A checkpoint that is replaced during the load is read again, so often at most.
_READ_AGAIN = 5
# What is read in the place of a directory, and for which `.metadata` of that one this was found.
_chosen: dict[str, tuple[_Version, Path]] = {}
# Within a load whose directory has been chosen, nothing is chosen again: all that it reads must be of one checkpoint.
_is_settled: ContextVar[bool] = ContextVar("_is_settled", default=False)


def around_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `dist_checkpointing.load`, which goes back if its options say so."""
    names = list(inspect.signature(stock).parameters)[2:]  # versions have them in another order

    @functools.wraps(stock)
    @without_modes()
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        with MegatronErrors():
            directory = checkpoint_path(checkpoint_dir)
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            strategy = arguments.get("sharded_strategy")
            options = _options_of(strategy)
            goes_back = options.on_damaged == "go_back" and not _is_settled.get()
            call = stock if options.prove == "off" else partial(prove_load, stock, options, strategy)
            call = partial(_joined, call, options, join(options, goes_back, arguments))
            if not goes_back:
                with one_load(), storage_at(directory).in_use(METADATA_FILE):
                    return call(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            read = partial(_read_from, call, sharded_state_dict, args, kwargs)
            return _load_whole(read, directory, options, arguments.get("process_group"))

    return load


def _joined(call: Callable[..., Any], options: LoadOptions, joint: JointLoad | None, *args: Any, **kwargs: Any) -> Any:
    with joined_load(joint), validation_of_load():
        return call(*args, **kwargs)


def _read_from(
    stock: Callable[..., Any], sharded_state_dict: Any, args: tuple[Any, ...], kwargs: dict[str, Any], directory: Path
) -> Any:
    settled = _is_settled.set(True)
    try:
        with one_load(), storage_at(directory).in_use(METADATA_FILE):
            return stock(sharded_state_dict, str(directory), *args, **kwargs)
    finally:
        _is_settled.reset(settled)


def _load_whole(read: Callable[[Path], Any], named: Path, options: LoadOptions, process_group: Any) -> Any:
    """Read the checkpoint that is named, or the newest older one that can be read by all ranks of the group."""
    group = coordination_group(process_group)
    choose = partial(directory_to_read, named, options)
    directory = group.run_on_coordinator("choose a checkpoint to load", choose, wrap=LoadError)
    replaced = 0
    while True:
        _chosen[str(named.absolute())] = (metadata_version(named), directory)
        before = metadata_version(directory)
        outcome = attempt(partial(read, directory))
        replaced_meanwhile = metadata_version(directory) != before
        told = group.all_gather(
            "tell of a damaged checkpoint", (_damage(outcome), _fate(outcome), replaced_meanwhile), wrap=LoadError
        )
        fates = {fate for _, fate, _ in told}
        if "failed" in fates and "interrupted" not in fates and any(is_another for _, _, is_another in told):
            # No damage as far as is known: another checkpoint has replaced the one that was there.
            replaced += 1
            if replaced == _READ_AGAIN:
                failed = partial(_raise_replaced, directory, outcome)
                what = f"load {directory}, which others replace all the time"
                group.run(what, failed, wrap=LoadError, name="load what is replaced")
            if is_first_rank():
                _logger.warning("%s: replaced by another save while it was loaded; the new one is loaded", directory)
            continue
        damage = next((damage for damage, _, _ in told if damage is not None), None)
        if damage is None:
            return value_of(outcome)
        go_back = partial(_newest_older, directory, damage, options)
        directory = group.run_on_coordinator("go back to an older checkpoint", go_back, wrap=LoadError)


def directory_to_read(checkpoint_dir: Any, options: LoadOptions | None = None) -> Path:
    """The directory that one rank reads, alone, in the place of the named one; the same, if that is complete.
    `CorruptCheckpointError`: it is damaged, and the run has no older checkpoint that is complete.
    """
    named = checkpoint_path(checkpoint_dir)
    options = LoadOptions.from_environment() if options is None else options
    if options.on_damaged == "raise" or _is_settled.get() or not patches.replaced():
        return named
    known, directory = _chosen.get(str(named.absolute()), (None, named))
    if known != metadata_version(named):
        for _ in range(_READ_AGAIN):
            version = metadata_version(named)
            problem = None if _is_of_another_format(named) else _problem(named, options)
            if problem is None or version == metadata_version(named):
                break  # otherwise it was replaced meanwhile, and what was found is of neither
        directory = named if problem is None else _newest_older(named, problem, options)
        _chosen[str(named.absolute())] = (version, directory)
    return directory


def _options_of(strategy: Any) -> LoadOptions:
    """Those of a strategy of ours, also behind a fully parallel wrapper; of the environment for any other."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    options = getattr(strategy, "options", None)
    return options if isinstance(options, LoadOptions) else LoadOptions.from_environment()


def _fate(outcome: Any) -> Literal["read", "failed", "interrupted"]:
    """What became of a rank's load; an interrupted rank does not load again."""
    if isinstance(outcome, LoadError):
        return "failed"
    return "interrupted" if isinstance(outcome, BaseException) else "read"


def _raise_replaced(directory: Path, outcome: Any) -> None:
    said = f": {outcome}" if isinstance(outcome, LoadError) else ""
    raise LoadError(
        f"{directory}: another save replaced the checkpoint each of the {_READ_AGAIN} times that it was loaded; load "
        f"again, when no save is at work in this directory{said}"
    )


def _damage(outcome: Any) -> str | None:
    """What an outcome says of the checkpoint; None if that was read, or is not to blame. A class outside the allow-list
    is no damage, nor one that this process cannot rebuild, nor a newer format: an older checkpoint would have it, too.
    """
    if isinstance(outcome, UnsafePickleError) or not isinstance(
        outcome, CorruptCheckpointError | CheckpointNotFoundError
    ):
        return None
    return str(outcome)


def _is_of_another_format(directory: Path) -> bool:
    """Whether it is a checkpoint, but none of `torch_dist`, and so no damaged one: legacy, or DCP's alone."""
    try:
        storage = storage_at(directory)
        names = [*storage.list(), *storage.folders()]
        if CONFIG_FILE in names:
            return False
        if any(name.startswith("mp_rank_") for name in names):
            return True
        return not is_megatrons(directory, read_index(directory, strict=False), names)[0]
    except (LoadError, OSError):
        return False


def _problem(directory: Path, options: LoadOptions) -> str | None:
    """Why a checkpoint cannot be loaded, as far as its structure and its common state tell."""
    try:
        checkpoint, _ = look_at(directory)
        if checkpoint.problems:
            return checkpoint.problems[0]
        if read_config(directory) is None:
            return f"{directory}: there is no metadata.json"
        load_common(directory, options)
    except (LoadError, OSError) as error:
        if isinstance(error.__cause__, NotRebuiltError):
            return None
        return None if isinstance(error, UnsafePickleError | NewerFormatError) else str(error)
    return None


def _newest_older(damaged: Path, problem: str, options: LoadOptions) -> Path:
    """The newest checkpoint of the same run that is older than `damaged`, and whole as far as its structure tells.
    `CorruptCheckpointError`: there is none.
    """
    run = damaged.absolute().parent
    iteration = iteration_of(damaged.name)
    _logger.debug("%s is damaged: %s", damaged, problem)
    problem = " ".join(without_tracebacks(problem).split())
    if iteration is not None:
        for candidate in reversed(iteration_directories(run)):
            found = iteration_of(candidate.name)
            if found is None or found >= iteration or _is_of_another_format(candidate):
                continue
            if _problem(candidate, options) is not None:
                continue
            if is_first_rank():
                _logger.warning(
                    "going back to iteration %d, %s, as on_damaged='go_back' asks: tensors, common state and iteration "
                    "are those of that checkpoint. THE CHECKPOINT IS DAMAGED: %s (%s)",
                    found,
                    candidate,
                    damaged,
                    problem,
                )
            return candidate
    raise CorruptCheckpointError(
        f"{damaged}: the checkpoint is damaged ({problem}), and {run} holds no older one that is complete "
        '(on_damaged="go_back"); `mcore-ckpt list` shows what is there, `mcore-ckpt verify` what is wrong with it'
    )
