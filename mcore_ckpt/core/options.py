"""Options of a save and of a load, and the only place that reads the environment.

Each field can be set for a job by `MCORE_CKPT_<FIELD>` (upper case), for example `MCORE_CKPT_WRITER=fork`; a number of
bytes also as `512M` or `5GiB`.
An explicit argument wins over the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.sizes import parse_size, shown_size

_MIB = 1024 * 1024
# The kernel's clocks take no more than they can count.
_LONGEST_DEADLINE_S = 366 * 86400.0
_ENVIRONMENT_PREFIX = "MCORE_CKPT_"

# What the usual launchers call the number of processes of a job on this host: torchrun, Open MPI, MPICH, Slurm.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")

# And the number of a process among those.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# And its number among all of the job.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

PageCache = Literal["auto", "on"]


# By class: the values that its fields may have which are `Literal`.
_allowed: dict[type, dict[str, tuple[str, ...]]] = {}


def _check_choices(options: SaveOptions | LoadOptions) -> None:
    kind = type(options)
    if kind not in _allowed:
        hints = get_type_hints(kind)
        _allowed[kind] = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    for name, allowed in _allowed[kind].items():
        if (value := getattr(options, name)) not in allowed:
            raise OptionError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not value >= minimum:  # NaN is no number of anything
        shown = shown_size(int(minimum)) if name.endswith("_bytes") else str(minimum)
        raise OptionError(f"{name}={value!r}: expected at least {minimum}" + f" ({shown})" * (shown != str(minimum)))


def _check_directory(name: str, path: str | None) -> None:
    if path is not None:
        try:
            checkpoint_path(path)
        except OptionError as error:
            raise OptionError(f"{name}={path!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        on_existing: what to do when the directory already holds a checkpoint: `"replace"` it (safely: the old one stays
            whole until the new one is published) or raise `CheckpointExistsError` (`"error"`), for jobs
            that never save to one directory twice.
        writer: which process writes an async save: `"persistent"`, one long-lived process that maps the staging
            buffers, or `"fork"`, one forked child for each save; into an object store by the former. A synchronous save
            is written by the trainer itself. Fork where no second Python may be started next to the trainer.
        thread_count: files each rank writes, at most (Megatron's and DCP's name for it). Lower it where a file system
            counts files, raise it where it serves several files faster than one.
        staging_budget_bytes: memory that the staging buffers of this rank may take together; None: a quarter of the
            host's free memory, divided among the ranks of the host. A larger save is pipelined through it. Set it
            where other programs need the memory, or where a save does not fit and training waits.
        when_busy: what an async save does while another one of this rank is being written: `"wait"`, or
            `"skip"` with a warning, so that training never waits.
        on_failure: what a failed async save does when it is finalized: `"raise"` or `"warn"`, for jobs that rather
            train on than end. Its finalize callbacks are never run.
        write_deadline_s: seconds after which a write without any progress counts as stuck; so long at most a request to
            an object store takes. None waits for ever, for a store 300 s. Set it where a
            device that hangs should end the save rather than hold the job.
        keep_last: checkpoints of the run that stay, the newest complete ones; older ones are removed in the background
            when a save has been published, as `prune_run` does, so that the disk does not fill. None removes nothing.
        keep_every: with `keep_last`, iterations that are multiples of it stay, too, to evaluate them or go back to.
        drain_to: directory or URL of the run in a second tier, such as `s3://bucket/run`: each checkpoint is copied
            there in the background when it has been published, and committed there. Ranks may then save to disks of
            their own nodes.
        compare_replicas: compare the replicas of tensors that ranks hold (data-parallel ranks, tied weights) with those
            that are saved: `"always"` all, `"sample"` one in 16, which depend on the save, `"off"` none. Each rank
            sums its own before the call returns, so training waits longer. Rank 0 warns of each that differs, before
            the checkpoint is published.
        fingerprints: store the fingerprint of each tensor, which a load with `prove`, `verify --state` and
            `diff --state` compare with, without reading the tensor. False saves the CPU time of
            the sums, which is most for tensors that ranks divide by columns.
        trace_path: directory for Chrome trace files, one for each rank and save, to see what a save waits for; None
            writes none.
    """

    on_existing: Literal["replace", "error"] = "replace"
    writer: Literal["persistent", "fork"] = "persistent"
    thread_count: int = 2
    staging_budget_bytes: int | None = None
    when_busy: Literal["wait", "skip"] = "wait"
    on_failure: Literal["raise", "warn"] = "raise"
    write_deadline_s: float | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    drain_to: str | None = None
    compare_replicas: Literal["always", "sample", "off"] = "off"
    fingerprints: bool = True
    trace_path: str | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        _at_least("thread_count", self.thread_count, 1)
        _at_least("keep_last", self.keep_last, 1)
        _at_least("keep_every", self.keep_every, 1)
        if self.keep_every is not None and self.keep_last is None:
            raise OptionError(f"keep_every={self.keep_every}: without keep_last nothing is removed; set keep_last, too")
        _check_directory("drain_to", self.drain_to)
        _at_least("staging_budget_bytes", self.staging_budget_bytes, _MIB)
        _at_least("write_deadline_s", self.write_deadline_s, 0.001)
        if self.write_deadline_s is not None and self.write_deadline_s > _LONGEST_DEADLINE_S:
            raise OptionError(
                f"write_deadline_s={self.write_deadline_s!r}: expected at most {_LONGEST_DEADLINE_S:.0f}, a year; "
                "None waits for ever"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **explicit: Any) -> SaveOptions:
        """Options from `MCORE_CKPT_*` variables, with `explicit` keyword arguments on top."""
        return _from_environment(cls, environment, explicit)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is read.

    Attributes:
        page_cache: `"auto"` takes from the page cache what it holds, and reads the rest with O_DIRECT, which leaves
            nothing there. `"on"` reads everything through the page cache, where it stays for the other ranks of this
            host and for the next load: for programs that load one checkpoint again and again. A file system without
            O_DIRECT serves both through the page cache.
        drain_to: as of `SaveOptions`: data files of the checkpoint that are missing are read in this second tier.
        local_tier: directory of the run on fast local storage: data files of the checkpoint that lie there, too, are
            read there. For jobs that load from the second tier on nodes that may still have the files.
        on_dtype_mismatch: what to do with a tensor that is stored in another dtype than its destination's: `"convert"`
            as `torch.Tensor.copy_` does, as Megatron-Core and DCP do, with one warning for the load on rank 0; or
            `"raise"` `DtypeMismatchError` before anything is read, for runs that must not change precision.
        allowed_classes: classes that stored objects may contain, beyond the built-in allow-list, as
            `"module.qualified_name"`. `"*"`: any, so that the maker of the checkpoint can run code as you. For old
            checkpoints of your own only, if nothing else helps.
        on_damaged: what a load by Megatron-Core does, after `install()`, if the checkpoint that is named is damaged:
            `"raise"`, or `"go_back"` to the newest older one of the run that is complete, with a warning on rank 0. All
            ranks must load together then.
        prove: after a load by Megatron-Core, after `install()`, compare the fingerprint of what is in memory with the
            checkpoint's: `"always"`, of all tensors; `"sample"`, of one in 16, which depend on the save; `"off"`. All
            ranks must load together then. Tensors that differ are named in a `LoadError` on all ranks.
    """

    page_cache: PageCache = "auto"
    drain_to: str | None = None
    local_tier: str | None = None
    on_dtype_mismatch: Literal["convert", "raise"] = "convert"
    allowed_classes: tuple[str, ...] = field(default=())
    on_damaged: Literal["raise", "go_back"] = "raise"
    prove: Literal["always", "sample", "off"] = "off"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_directory("drain_to", self.drain_to)
        _check_directory("local_tier", self.local_tier)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **explicit: Any) -> LoadOptions:
        """Options from `MCORE_CKPT_*` variables, with `explicit` keyword arguments on top."""
        return _from_environment(cls, environment, explicit)


_Options = TypeVar("_Options", SaveOptions, LoadOptions)


def _from_environment(cls: type[_Options], environment: Mapping[str, str] | None, explicit: dict[str, Any]) -> _Options:
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for option in fields(cls):
        text = source.get(_variable(option.name))
        if text is not None and option.name not in explicit:
            values[option.name] = _parse(option.name, str(option.type), text)
    try:
        return cls(**{**values, **explicit})
    except OptionError as error:
        # Each check begins with the field's name; the user has written that of the variable.
        name, _, rest = str(error).partition("=")
        if name not in values:
            raise
        raise OptionError(f"{_variable(name)}={rest}") from None


def _variable(name: str) -> str:
    return _ENVIRONMENT_PREFIX + name.upper()


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`MCORE_CKPT_*` variables that set no option, as a misspelled one does not; each with the one most like it, or "".

    Those of this package's own tests (`MCORE_CKPT_TEST*`) are left out.
    """
    import difflib  # (half of what importing this module would cost)

    source = os.environ if environment is None else environment
    known = {option.name.upper() for cls in (SaveOptions, LoadOptions) for option in fields(cls)}
    unknown: dict[str, str] = {}
    for variable in source:
        name = variable.removeprefix(_ENVIRONMENT_PREFIX)
        if name != variable and name not in known and not name.startswith("TEST"):
            alike = difflib.get_close_matches(name, sorted(known), n=1)
            unknown[variable] = _ENVIRONMENT_PREFIX + alike[0] if alike else ""
    return unknown


def ranks_of_this_host(environment: Mapping[str, str] | None = None) -> int:
    """How many ranks share this host's memory, as far as the launcher tells: the world's size at worst, 1 at least."""
    source = os.environ if environment is None else environment
    for name in (*_LOCAL_SIZES, "WORLD_SIZE"):
        text = source.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return 1


def rank_of_this_process() -> str:
    """For messages: `rank 3: `, as the usual launchers tell a process and what it starts; or nothing."""
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "")
    return f"rank {rank}: " if rank else ""


def first_of_this_host(rank: int, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a rank is the first of its host, as far as the launcher tells; else whether it is the first of all."""
    source = os.environ if environment is None else environment
    for name in _LOCAL_RANKS:
        text = source.get(name, "")
        if text.isdecimal():
            return int(text) == 0
    return rank == 0


def _parse(name: str, annotation: str, text: str) -> Any:
    """Turn an environment variable's text into the type that the field's annotation names."""
    variable = _variable(name)
    if "None" in annotation and text.lower() in ("", "none"):
        return None
    if annotation == "bool":
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise OptionError(f"{variable}={text!r}: expected one of 1, 0, true, false, yes, no, on, off")
    if annotation.startswith("tuple"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name.endswith("_bytes"):
        return parse_size(text, at_least=0, what=f"{variable}=")
    convert: Callable[[str], Any] = str
    if annotation.startswith("int"):
        convert = int
    elif annotation.startswith("float"):
        convert = float
    try:
        return convert(text)
    except ValueError as error:
        raise OptionError(f"{variable}={text!r}: expected a number") from error
