"""The common state of a checkpoint, Megatron's files next to it, and which checkpoint of a run a load reads.

The common state is what is not sharded (arguments, schedules, iteration), the same for all ranks. To 0.18 Megatron-Core
keeps it in `common.pt`, from 0.19 on in an object `common_state` inside the data files. Either is read here, whichever
version is installed, and the one that belongs to the `.metadata` in force is taken: a `common.pt` may be the rest of an
older checkpoint, or be waiting under its pending name (see `in_force`).

Where the checkpoint that is named is damaged, a load may go back to an older one (`LoadOptions.on_damaged`). A job
names a checkpoint by its directory, several times over: to see which format it has, to read the common state, to load.
All of it has to come from one checkpoint, and on all ranks from the same. So each of these asks here which directory to
read:

- `dist_checkpointing.load` is called by all ranks. The coordinator looks at the checkpoint's structure and common state
  and chooses; if reading shows damage on any rank all the same, everything is loaded again from the next older one.
- Calls by one rank alone (the common state, the names of tensors) are answered by that rank, from the same structure,
and remembered until another checkpoint is named.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    MissingKeyError,
    SaveError,
    UnsafePickleError,
    without_tracebacks,
)
from mcore_ckpt.core.options import LoadOptions, checkpoint_path, is_supported
from mcore_ckpt.core.process import Outcome
from mcore_ckpt.core.ranks import coordination_group, own_rank, without_modes
from mcore_ckpt.directory.commit import Commit, common_file_in_force, write_config
from mcore_ckpt.directory.in_force import iteration_of
from mcore_ckpt.format.index import COMMON_STATE_KEY
from mcore_ckpt.format.integrity import Manifest, split_metadata
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    INTEGRITY_FILE,
    METADATA_FILE,
    read_common_file,
    read_config,
    read_index,
    read_small_file,
)
from mcore_ckpt.format.safe_pickle import load_object, warn_of_refused
from mcore_ckpt.format.unpickler import NotRebuiltError
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.load.records import replaced_error
from mcore_ckpt.megatron.calls import (
    MegatronErrors,
    MegatronLoad,
    MegatronSave,
    current_load,
    current_resume,
    current_save,
    identity_of,
    in_progress,
    is_ours,
    joined_load,
    metadata_version,
    note_common,
    one_save,
    opened_reader,
    unwrapped,
)
from mcore_ckpt.megatron.versions import megatron_module, patches
from mcore_ckpt.save.transaction import give_up_forgotten_saves
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of("mcore_ckpt")


_PENDING_SUFFIX = ".pending"


def around_save(strategy_class: type, stock: Any) -> Any:
    """Megatron's `save`, which leaves nothing behind if it ends early, and tells all ranks what fails on the first."""

    @functools.wraps(stock)
    @without_modes()
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        with MegatronErrors():
            # The directory that it names now: what is written at the end of an async save must not follow a `chdir`.
            directory = checkpoint_path(checkpoint_dir).absolute()
            checkpoint_dir, storage = type(checkpoint_dir)(directory), storage_at(directory)
            give_up_forgotten_saves()
            earlier = current_save()
            if earlier is not None and earlier.location == storage.location:  # a signal handler comes between
                raise SaveError(
                    f"{storage}: an earlier call of `save` for this directory has not returned yet; nothing was changed"
                )
            strategy = args[0] if args else kwargs.get("sharded_strategy")
            with one_save(strategy, strategy_class, storage.location) as call:
                request = stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)
                if request is None:  # else nothing is written yet
                    _tell_late_error(call)
                else:
                    finalize = partial(_finalize, MegatronSave(commit=call.commit))
                    callbacks = request.finalize_fns
                    callbacks[:] = [fn if hasattr(fn, "save_call") else partial(finalize, fn) for fn in callbacks]
                return request

    return save


@without_modes()
def save_common(common_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the common state of the save that follows, and lock the directory for it; every rank calls this. Next to an
    older checkpoint it waits under a name of its own.
    """
    call = current_save()

    def write(_: None) -> None:
        storage, content = storage_at(checkpoint_dir), io.BytesIO()
        torch.save(common_state_dict, content)
        warn_of_refused(COMMON_FILE, content.getvalue())
        storage.ensure()
        commit = Commit.begin(storage, common=content.getvalue())
        if call is None or call.location != storage.location:
            commit.place_common()
        else:
            call.commit = commit

    if call is not None:
        call.has_come = True
    group = coordination_group()
    group.run_merged("write the common state", lambda: None, lambda first, _: first, write, wrap=SaveError)


def save_config(config: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write `metadata.json` of a published checkpoint, by a rename; not where another save has published since."""
    call, storage = current_save(), storage_at(checkpoint_dir)
    try:
        written = write_config(storage, json.dumps(asdict(config)).encode(), None if call is None else call.commit)
    except Exception as error:
        if call is None:
            raise
        call.late_error = error
        return
    if not written:
        _logger.warning("%s: another save has the directory by now; %s stays as it is", storage, CONFIG_FILE)


def _finalize(call: MegatronSave, callback: Callable[[], Any]) -> None:
    """A callback at the end of an asynchronous save, in which the first rank may write `metadata.json`."""
    with in_progress(call):
        try:
            callback()
        except BaseException:
            call.give_up()
            raise
    _tell_late_error(call)


def _tell_late_error(call: MegatronSave) -> None:
    """Raise on all ranks what `save_config` has met on the first, while the others waited for it."""

    def tell() -> None:
        if call.late_error is not None:
            raise call.late_error

    with MegatronErrors():
        coordination_group().run_on_coordinator("write metadata.json", tell, wrap=SaveError)


@without_modes()
def load_common(checkpoint_dir: str | os.PathLike[str], options: LoadOptions | None = None) -> Any:
    """The common state, tensors on the CPU. Damage, classes not allowed, and that of another save are refused."""
    directory = checkpoint_path(checkpoint_dir)
    version = metadata_version(directory)
    try:
        return _load_common(directory, LoadOptions.from_environment() if options is None else options, version)
    except LoadError as error:
        if metadata_version(directory) != version:
            raise replaced_error(directory, str(error)) from error
        raise


def _load_common(directory: Path, options: LoadOptions, version: tuple[int, ...]) -> Any:
    storage = storage_at(directory)
    names = storage.list()
    for known in (COMMON_FILE, METADATA_FILE):  # which the listing of a network file system may not show yet
        if known not in names and storage.exists(known):
            names.append(known)
    file: str | None = COMMON_FILE if COMMON_FILE in names else None
    manifest: Manifest | None = None
    if METADATA_FILE in names:
        content = read_small_file(directory, METADATA_FILE)
        pickled, manifest = split_metadata(content, str(directory / METADATA_FILE))
        waits = any(name.startswith(COMMON_FILE) and name.endswith(_PENDING_SUFFIX) for name in names)
        # Decoding the index takes seconds for many ranks. Most have only `common.pt`, and no such object.
        if file is None or waits or COMMON_STATE_KEY.encode() in pickled:
            reader = opened_reader(directory, options)
            manifest = reader.index.manifest
            file = common_file_in_force(storage, reader.index)
            if file is None and COMMON_STATE_KEY in reader.index.objects:
                stored = common_object(reader)
                note_common(directory, identity_of(manifest, version), reader)
                return stored
    if file is None:
        is_lost = manifest is not None and COMMON_FILE in manifest.files
        raise (CorruptCheckpointError if is_lost else CheckpointNotFoundError)(
            f"{directory / COMMON_FILE}: Common file does not exist, nor does .metadata name an object "
            f"{COMMON_STATE_KEY}; expected one of them in a checkpoint of Megatron-Core. The directory holds "
            f"{', '.join(sorted(names)[:8]) or 'nothing'}{', ...' if len(names) > 8 else ''}"
        )
    # Small, and read by every rank: all of it is compared with its checksums before anything is unpickled.
    loaded = load_object(
        read_common_file(storage, file, manifest), options.allowed_classes, where=str(directory / file)
    )
    note_common(directory, identity_of(manifest, version))
    return _without_leaked_state(loaded)


def common_object(reader: CheckpointReader) -> Any:
    """The common state that is an object, as from megatron-core 0.19 on."""
    stored = reader.read_object(COMMON_STATE_KEY)
    return _without_leaked_state(stored[0] if isinstance(stored, list) else stored)


def _without_leaked_state(common: Any) -> Any:
    """The common state without `param_state` of an optimizer whose state is flat buckets. A Megatron-LM without pull
    request 2874 left the `step` of rank 0's parameters there, which no other rank can merge with its own.
    """
    content = common.get("content_metadata") if isinstance(common, dict) else None
    if isinstance(content, dict) and content.get("distrib_optim_sharding_type") == "dp_reshardable":
        optimizer = common.get("optimizer")
        for part in (optimizer, *(optimizer.values() if isinstance(optimizer, dict) else ())):
            if isinstance(part, dict):
                part.pop("param_state", None)
    return common


# --- going back to an older checkpoint --------------------------------------------------------------------------------

_Version = tuple[int, ...]
# The directory that is read in the place of another, and the `.metadata` of the other for which it was found.
_chosen: dict[str, tuple[_Version, Path]] = {}


TRAINING: Final = "megatron.training.checkpointing"


def _name_uncertified(directory: Path, options: LoadOptions) -> None:
    """Say that a load, which notes nothing, is not certified, if a `load_checkpoint` of Megatron-LM's own calls it."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == "load_checkpoint" and frame.f_globals.get("__name__") == TRAINING:
            why = f"the caller has taken `load_checkpoint` from {TRAINING} where mcore_ckpt could not replace it. "
            advice = "Call mcore_ckpt.install() earlier, or mcore_ckpt.certify() after the load"
            return tell_uncertified(directory, options, why + advice)
    return None


def tell_uncertified(directory: str | Path, options: LoadOptions, why: object) -> None:
    """Warn that a resume ends without a certificate, or raise `LoadError`, as `certify` says."""
    said = f"what is resumed from {directory} is not certified: {why}"
    if options.certify == "raise":
        raise LoadError(said)
    if own_rank() == 0:
        _logger.warning("%s", said)


def around_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `dist_checkpointing.load`, which goes back if its options say so."""
    names = list(inspect.signature(stock).parameters)[2:]  # versions have them in another order

    @functools.wraps(stock)
    @without_modes()
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        with MegatronErrors():
            directory = checkpoint_path(checkpoint_dir)
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            options = getattr(unwrapped(arguments.get("sharded_strategy")), "options", None)
            if not isinstance(options, LoadOptions):
                options = LoadOptions.from_environment()
            if (resume := current_resume()) is None and options.certify != "off":
                _name_uncertified(directory, options)
            goes_back = options.on_damaged == "go_back" and current_load() is None
            is_own, asks_for_buckets = is_ours(arguments.get("sharded_strategy")), False
            if is_own and isinstance(sharded_state_dict, dict) and "optimizer" in sharded_state_dict:
                from mcore_ckpt.megatron.other_division import has_flat_state

                asks_for_buckets = has_flat_state(sharded_state_dict)
            joined = joined_load(options, goes_back, arguments, asks_for_buckets)

            def read(read_directory: Any) -> Any:
                path = checkpoint_path(read_directory)
                # A load that goes back begins again.
                with storage_at(path).in_use(METADATA_FILE), in_progress(replace(joined, directory=path)) as call:
                    if resume is not None:
                        call.version, resume.load = metadata_version(path), call
                    state = sharded_state_dict
                    if is_own:
                        _refuse_removed(state, call)
                    if call.asks_for_buckets:
                        from mcore_ckpt.megatron.other_division import under_this_division  # (few loads do)

                        state = under_this_division(state, call)
                    return stock(state, read_directory, *args, **kwargs)

            if not goes_back:
                return read(checkpoint_dir)
            return _load_whole(lambda chosen: read(str(chosen)), directory, options, joined.process_group)

    return load


def _refuse_removed(state: Any, call: MegatronLoad) -> None:
    """Raise `MissingKeyError` if the optimizer's state is asked for, and was removed: Megatron may fail later."""
    if isinstance(state, dict) and state.get("optimizer"):
        call.reader = opened_reader(call.directory, call.options)
        if (removed := call.reader.index.removed) is not None:
            raise MissingKeyError(
                f"{call.directory}: {removed.said}, and this job asks for it. Start from the model alone "
                "(--no-load-optim or --finetune), or bring it back from a full copy (mcore-ckpt repair --from)"
            )


def _load_whole(read: Callable[[Path], Any], named: Path, options: LoadOptions, process_group: Any) -> Any:
    """Read the checkpoint that is named, or the newest older one that can be read by all ranks of the group."""
    group = coordination_group(process_group)
    choose = partial(directory_to_read, named, options)
    directory = group.run_on_coordinator("choose a checkpoint to load", choose, wrap=LoadError)
    while True:
        _chosen[str(named.absolute())] = (metadata_version(named), directory)
        before = metadata_version(directory)
        outcome = Outcome.of(partial(read, directory))
        own = (_damage(outcome.error), metadata_version(directory) != before)
        told = group.run("tell of a damaged checkpoint", lambda: own, wrap=LoadError)  # noqa: B023  (called at once)
        damage = next((damage for damage, _ in told if damage is not None), None)
        # What another save has replaced meanwhile is not damaged: the error says so.
        if damage is None or any(is_another for _, is_another in told):
            return outcome.value()
        go_back = partial(_newest_older, directory, damage, options)
        directory = group.run_on_coordinator("go back to an older checkpoint", go_back, wrap=LoadError)


def directory_to_read(checkpoint_dir: Any, options: LoadOptions | None = None) -> Path:
    """The directory that one rank reads in the place of the named one. `CorruptCheckpointError`: none is complete."""
    named = checkpoint_path(checkpoint_dir)
    options = LoadOptions.from_environment() if options is None else options
    if options.on_damaged == "raise" or current_load() is not None or not patches.replaced():
        return named
    known, directory = _chosen.get(str(named.absolute()), (None, named))
    if known != (version := metadata_version(named)) or not metadata_version(directory):
        problem = None if _is_of_another_format(named) else _problem(named, options)
        # If it was replaced meanwhile, what was found is of neither.
        is_sound = problem is None or version != metadata_version(named)
        directory = named if is_sound else _newest_older(named, problem or "", options)
        _chosen[str(named.absolute())] = (version, directory)
    return directory


def load_common_in_place(checkpoint_dir: Any) -> Any:
    """The common state of the checkpoint that is read in the place of the named one."""
    call = current_load()
    with MegatronErrors():
        directory = directory_to_read(checkpoint_dir)
        common = load_common(directory, None if call is None else call.options)
        if call is not None and call.change_common is not None:
            return call.change_common(common)
        if call is not None or current_resume() is None:
            return common
        from mcore_ckpt.megatron.other_division import declared_reshardable

        return declared_reshardable(common, directory)


def load_common_state_dict(checkpoint_dir: Any) -> Any:
    """Megatron's function of that name."""
    with MegatronErrors():
        directory = directory_to_read(checkpoint_dir)
    megatron_module("validation").verify_checkpoint(str(directory))
    return load_common_in_place(directory)


def config_in_place(stock: Any) -> Any:
    """Megatron's `maybe_load_config`, but the file is read here: Megatron would wait for ever for a pipe."""

    @functools.wraps(stock)
    def maybe_load_config(checkpoint_dir: Any) -> Any:
        with MegatronErrors():
            if not is_supported(checkpoint_dir):
                return stock(str(checkpoint_dir))
            directory = directory_to_read(checkpoint_dir)
            found = read_config(directory)
        if found is None:
            if own_rank() == 0 and metadata_version(directory) and not _is_of_another_format(directory):
                _logger.warning(
                    "%s: missing, so that Megatron takes %s for no checkpoint of its own; `mcore-ckpt repair --from` "
                    "restores it from a copy",
                    CONFIG_FILE,
                    directory,
                )
            return None
        config_class = megatron_module("core").CheckpointingConfig  # which no longer has the last two in 0.19
        known = {field.name for field in fields(config_class)}
        return config_class(**{name: value for name, value in asdict(found).items() if name in known})

    return maybe_load_config


def _damage(error: BaseException | None) -> str | None:
    """What an error says of the checkpoint; None if that was read, or is not to blame. A class outside the allow-list
    is no damage, nor one that this process cannot rebuild, nor a newer format: an older checkpoint would have it, too.
    """
    if isinstance(error, UnsafePickleError) or not isinstance(error, CorruptCheckpointError | CheckpointNotFoundError):
        return None
    return str(error)


def _is_of_another_format(directory: Path) -> bool:
    """Whether it is a checkpoint, but none of `torch_dist`, and so no damaged one: legacy, or DCP's alone."""
    from mcore_ckpt.directory.iterations import is_megatrons

    try:
        storage = storage_at(directory)
        names = [*storage.list(), *storage.folders()]
        if CONFIG_FILE in names:
            return False
        if any(name.startswith("mp_rank_") for name in names):
            return True
        return not is_megatrons(directory, read_index(directory, strict=False))[0]
    except (LoadError, OSError):
        return False


def _problem(directory: Path, options: LoadOptions) -> str | None:
    """Why a checkpoint cannot be loaded, as far as its structure and its common state tell."""
    from mcore_ckpt.directory.iterations import look_at

    try:
        checkpoint, _ = look_at(directory)
        if checkpoint.problems:
            return checkpoint.problems[0]
        if read_config(directory) is None:
            return f"{directory}: there is no metadata.json"
        load_common(directory, options)
    except (LoadError, OSError) as error:
        # What cannot be read at the moment is not damaged: the load itself says why.
        return None if isinstance(error.__cause__, NotRebuiltError) else _damage(error)
    return None


def _newest_older(damaged: Path, problem: str, options: LoadOptions) -> Path:
    """The newest older checkpoint of the run that looks whole, with all tensors of `damaged` in the same shapes: what
    was read already would stay. `CorruptCheckpointError`: there is none.
    """
    from mcore_ckpt.directory.iterations import iteration_directories, look_at

    run = damaged.absolute().parent
    iteration, wanted = iteration_of(damaged.name), _shapes(damaged)
    _logger.debug("%s is damaged: %s", damaged, problem)
    problem = " ".join(without_tracebacks(problem).split())
    if iteration is not None:
        for candidate in reversed(iteration_directories(run)):
            found = iteration_of(candidate.name)
            if found is None or found >= iteration or _is_of_another_format(candidate):
                continue
            if _problem(candidate, options) is not None or not wanted.items() <= _shapes(candidate).items():
                continue
            if not wanted and look_at(candidate)[0].removed is not None:  # it may lack what the damaged one had
                continue
            if own_rank() == 0:
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
        f"{damaged}: the checkpoint is damaged ({problem}), and {run} holds no older one that is complete and has the "
        'same tensors (on_damaged="go_back"); `mcore-ckpt list` shows what is there, `mcore-ckpt verify` what is wrong '
        "with it"
    )


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors; none where its index cannot be read."""
    try:
        return {key: entry.shape for key, entry in read_index(directory, strict=False).tensors.items()}
    except (LoadError, OSError):
        return {}


def with_own_files(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Megatron's `save_integrity_manifest` (0.17 on): `integrity.json` of the files that belong to the checkpoint. Its
    own sums up whatever lies there, and later loads fail where that has changed.
    """

    @functools.wraps(stock)
    def save_integrity_manifest(checkpoint_dir: Any) -> None:
        from mcore_ckpt.directory.copying import own_files  # (few trainers need it)

        with MegatronErrors():
            if not is_supported(checkpoint_dir):
                return stock(checkpoint_dir)
            directory = checkpoint_path(checkpoint_dir)
            storage = storage_at(directory)
            version = storage.version(METADATA_FILE)
            try:
                names = own_files(directory)
            except CheckpointNotFoundError:
                return stock(checkpoint_dir)
            sums = {}
            for name in sorted({*names} - {INTEGRITY_FILE}):
                found = hashlib.sha256()
                with storage.open_reader(name, direct="off") as reader:
                    for content in reader.pieces():
                        found.update(content)
                sums[name] = found.hexdigest()
            if storage.version(METADATA_FILE) == version:  # else they are of a checkpoint that was replaced
                document = json.dumps({"algorithm": "sha256", "files": sums}, indent=2)
                storage.publish(INTEGRITY_FILE, document.encode())
            return None

    return save_integrity_manifest
