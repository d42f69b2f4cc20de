"""What a user says: options of a save and of a load, sizes, and paths; the only place that reads the environment.

Each field of the options can be set for a job by `MCORE_CKPT_<FIELD>` (upper case), such as `MCORE_CKPT_WRITER=fork`; a
number of bytes also as `512M` or `5GiB`. An explicit argument wins over the environment.

Checkpoints may be in a file system or in an object store, so their paths go through `checkpoint_path`. Paths of files
go through `local_path`, which refuses URLs: otherwise a folder called `s3:` would appear in the working directory.
"""

from __future__ import annotations

import functools
import numbers
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PosixPath
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import OptionError

_logger = logger_of("mcore_ckpt")

_PREFIXES: Final = "KMGT"


def parse_size(given: str | int, *, at_least: int = 1, what: str = "size ") -> int:
    """Bytes, from `2G` or `2GB` (1000**3), `2Gi` or `2GiB` (1024**3) or a number; raises `OptionError`."""
    text = str(given)
    number, base = text.strip().upper().removesuffix("B"), 1000
    if number.endswith("I"):
        number, base = number[:-1], 1024
    power = _PREFIXES.find(number[-1:]) + 1 if number else 0
    try:
        value = int(float(number[:-1] if power or base == 1024 else number) * base**power)
    except (ValueError, OverflowError):
        value = -1
    if value < at_least:
        raise OptionError(
            f"{what}{text!r}: expected a number such as 512M (512 * 1000**2) or 512MiB (512 * 1024**2), and at least "
            f"{at_least} bytes"
        )
    return value


STORE_SCHEMES: Final = ("s3", "gs", "az", "msc")
"""Of object stores that can be read and written."""

PARTIAL: Final = ".partial"
"""Behind the name of a directory that a conversion is making, or was making when it was interrupted."""

# Two letters at least; of what has been a `Path`, one of the two slashes is left, and none where nothing comes after.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/(/?)|\Z)")
# User names, passwords and keys in front of a host, and signatures in a query; no bucket's name has the first two, and
# a secret may hold slashes.
_SECRET = {True: re.compile(r"[^/]*[:@]|.*\?.*="), False: re.compile(r".*:.*@|.*\?.*=")}
_NO_TEXT = re.compile(r"[\0-\x1f\x7f-\x9f\ud800-\udfff]")


class StorePath(PosixPath):
    """A directory in a store: joined as a path, shown as the URL that it is; nothing in any file system."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    def __fspath__(self) -> str:
        return str(self)

    @property
    def parent(self) -> StorePath:
        """The parent directory; a bucket is its own."""
        return StorePath(super().parent) if len(self.parts) > 2 else self

    def absolute(self) -> StorePath:
        return self

    def is_absolute(self) -> bool:
        return True


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint's directory, as given, or shown as a URL. `OptionError`: it can be neither."""
    url = store_url(path)
    return local_path(path) if url is None else StorePath(url)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file, as given; `OptionError` for an empty one, no `is_path_text`, an object store, a URL."""
    text, scheme = _named(path)
    if not text:
        raise OptionError("the path is empty; `.` names the working directory")
    if not is_path_text(text):
        raise OptionError(f"{text!r}: holds a NUL character, or one that cannot be encoded, which no path may have")
    if scheme is None:
        return Path(text)
    if scheme == "file":
        raise OptionError(f"{text}: this is a URL, and a path is needed; leave out file://")
    if scheme in STORE_SCHEMES:
        raise OptionError(f"{text}: a path in a file system is needed here, not one in an object store")
    known = ", ".join(f"{each}://" for each in STORE_SCHEMES)
    raise OptionError(
        f"{text}: this names an object store ({scheme}) that mcore_ckpt does not know; nothing was read or written. "
        f"Checkpoints are kept in directories, local or mounted, or at {known}"
    )


def is_path_text(text: str) -> bool:
    """Whether the operating system takes this text as a path. (Bytes that are no UTF-8 are text to `os.fsdecode`.)"""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_supported(path: str | os.PathLike[str]) -> bool:
    """Whether `checkpoint_path` takes this path."""
    try:
        checkpoint_path(path)
    except OptionError:
        return False
    return True


def store_url(path: str | os.PathLike[str]) -> str | None:
    """The URL of a directory in a supported store; None for all else. `OptionError`: no bucket, `..`, or no text."""
    text, scheme = _named(path)
    if scheme not in STORE_SCHEMES:
        return None
    rest = text[len(scheme) + 1 :]
    # (What is not set leaves nothing behind in `s3://$BUCKET/run`.)
    if not rest.strip("/") or rest.startswith("///"):
        name = "profile" if scheme == "msc" else "bucket"
        raise OptionError(f"{text}: names no {name}: expected {scheme}://{name}/prefix; nothing was read or written")
    if _NO_TEXT.search(text):
        raise OptionError(f"{text!r}: holds a control character, or bytes that are no UTF-8, which no URL may have")
    if ".." in rest.split("/"):
        raise OptionError(f"{text}: has `..` in it, which stores do not resolve; name the directory without it")
    return f"{scheme}://{rest.lstrip('/')}"


def _named(path: Any) -> tuple[str, str | None]:
    """What a path names, as text, and the scheme of a URL; what `__fspath__` of a client's path gives may be a copy."""
    text = ""
    for as_text in (str, os.fsdecode):
        text = as_text(path)
        if (found := _SCHEME.match(text)) is None:
            continue
        scheme, second_slash = found[1].lower(), found[2]
        if second_slash is None and scheme not in STORE_SCHEMES:
            continue
        if not second_slash and os.path.lexists(f"{found[1]}:"):  # a directory of that name, which is meant
            continue
        if _SECRET[scheme in STORE_SCHEMES].match(text[found.end() :].lstrip("/")):
            raise OptionError(
                f"{scheme}://...: the URL has user info, a port or a token in it, and is not shown here. Credentials "
                "are taken from the environment (AZURE_STORAGE_SAS_TOKEN) and the files of the store's own tools; "
                f"expected {scheme}://NAME/prefix"
            )
        return text, scheme
    return text, None


_MIB = 1024 * 1024
# The kernel's clocks take no more than they can count.
_LONGEST_DEADLINE_S = 366 * 86400.0
_ENVIRONMENT_PREFIX = "MCORE_CKPT_"

# What the usual launchers call the number of processes of a job on this host: torchrun, Open MPI, MPICH, Slurm.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")

# And the number of a process among those.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

PageCache = Literal["auto", "on"]


# By class: the values of its fields that are `Literal`, and the classes of its numbers.
_allowed: dict[type, dict[str, tuple[Any, ...]]] = {}


def _check_choices(options: SaveOptions | LoadOptions) -> None:
    kind = type(options)
    if kind not in _allowed:
        hints = get_type_hints(kind)
        _allowed[kind] = {name: get_args(hint) or (hint,) for name, hint in hints.items()}
    for name, allowed in _allowed[kind].items():
        value = getattr(options, name)
        if isinstance(allowed[0], str):
            if value not in allowed:
                raise OptionError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        elif Ellipsis in allowed and isinstance(value, str):  # each of its characters would be a name
            raise OptionError(f"{name}={value!r}: expected a tuple of names")
        elif allowed[0] in (int, float) and (value is not None or type(None) not in allowed):
            whole = allowed[0] is int
            if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
                raise OptionError(f"{name}={value!r}: expected {'an int' if whole else 'a number'}")


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not value >= minimum:  # NaN is no number of anything
        raise OptionError(f"{name}={value!r}: expected at least {minimum}")


def _check_directory(name: str, path: str | None, check: Callable[[str], Path] = checkpoint_path) -> None:
    if path is not None:
        try:
            check(path)
        except OptionError as error:
            shown = "" if path else f"{path!r}: "  # the error shows a path, unless a secret is part of it
            raise OptionError(f"{name}={shown}{error}") from None


_Options = TypeVar("_Options", bound="_FromEnvironment")


class _FromEnvironment:
    """Options that the environment may set."""

    __slots__ = ()

    @classmethod
    def from_environment(
        cls: type[_Options], environment: Mapping[str, str] | None = None, **explicit: Any
    ) -> _Options:
        """Options from `MCORE_CKPT_*` variables, with `explicit` keyword arguments on top."""
        if environment is None:
            tell_unknown_variables()
        source = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for option in fields(cls):  # type: ignore[arg-type]
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


@dataclass(frozen=True, slots=True)
class SaveOptions(_FromEnvironment):
    """How a checkpoint is written.

    Attributes:
        on_existing: what to do when the directory already holds a checkpoint: `"replace"` it (safely: the old one stays
            whole until the new one is published) or raise `CheckpointExistsError` (`"error"`), for jobs
            that never save to one directory twice. With `"error"` nothing is replaced in the second tier, either.
        writer: which process writes an async save: `"persistent"`, one long-lived process that maps the staging
            buffers, or `"fork"`, one forked child for each save; into an object store by the former. A synchronous save
            is written by the trainer itself. Fork where no second Python may be started next to the trainer.
        thread_count: files each rank writes, at most (Megatron's and DCP's name for it). Lower it where a file system
            counts files, raise it where it serves several files faster than one.
        staging_budget_bytes: memory that the staging buffer of this rank may take; None: a quarter of the host's free
            memory, divided among the ranks of the host. The trainer writes a larger save itself. Set it where other
            programs need the memory, or where a save does not fit and training waits.
        when_busy: what an async save does while another one of this rank is being written: `"wait"`, or
            `"skip"` with a warning, so that training never waits.
        on_failure: what a failed async save does when it is finalized: `"raise"` or `"warn"`, for jobs that rather
            train on than end. Its finalize callbacks are never run.
        write_deadline_s: seconds after which a write without any progress counts as stuck; so long at most a request to
            an object store takes. None waits for ever, for a store 300 s. Set it where a
            device that hangs should end the save rather than hold the job.
        keep_last: checkpoints of the run that stay, the newest complete ones; older ones are removed in the background
            when a save has been published, as `prune_run` does, so that the disk does not fill; with `drain_to` when
            they are in the second tier. None removes nothing.
        keep_every: with `keep_last` or `keep_optimizer_last`, iterations that are multiples of it stay as they are.
        keep_optimizer_last: checkpoints of the run that keep the optimizer's state, the newest complete ones; older
            ones become model-only in the background, in place, to evaluate or export them. None keeps it in all.
        drain_to: directory or URL of the run in a second tier, such as `s3://bucket/run`: each checkpoint is copied
            there in the background when it has been published, and committed there. Ranks may then save to disks of
            their own nodes.
        export_to: directory or URL that gets the model of each checkpoint for Hugging Face, as `iter_0000100`, in the
            background when the checkpoint has been published: the newest first, and those that wait when a newer one
            comes not at all.
        export_config: with `export_to`, directory of config.json and tokenizer files, as `hf_config` of an export.
        compare_replicas: compare the replicas of tensors on all ranks (data-parallel ranks, tied weights) with the
            saved ones: `"sample"` one in 16, which depend on the save; `"warn"` all. Rank 0 warns of each that differs,
            before the checkpoint is published; or nothing is, and all ranks raise `SaveError` (`"raise"`, all). `"off"`
            compares none. Each rank sums its own before the call returns, so training waits longer. (Replicas of
            objects are compared by every save, and raise with `"raise"`.)
        trace_path: directory for Chrome trace files, one for each rank and save, to see what a save waits for; None
            or "" writes none.
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
    keep_optimizer_last: int | None = None
    drain_to: str | None = None
    export_to: str | None = None
    export_config: str | None = None
    compare_replicas: Literal["sample", "warn", "raise", "off"] = "off"
    trace_path: str | None = None

    @property
    def has_upkeep(self) -> bool:
        """Whether something is to be done when a checkpoint has been published."""
        return any((self.keep_last, self.keep_optimizer_last, self.drain_to, self.export_to))

    def __post_init__(self) -> None:
        _check_choices(self)
        _at_least("thread_count", self.thread_count, 1)
        _at_least("keep_last", self.keep_last, 1)
        _at_least("keep_every", self.keep_every, 1)
        _at_least("keep_optimizer_last", self.keep_optimizer_last, 1)
        if self.keep_every is not None and (self.keep_last, self.keep_optimizer_last) == (None, None):
            raise OptionError(
                f"keep_every={self.keep_every}: without keep_last or keep_optimizer_last nothing is removed"
            )
        _check_directory("drain_to", self.drain_to)
        _check_directory("export_to", self.export_to)
        _check_directory("export_config", self.export_config, local_path)
        if self.export_config is not None and self.export_to is None:
            raise OptionError(f"export_config={self.export_config!r}: without export_to nothing is exported; set it")
        _check_directory("trace_path", self.trace_path or None, local_path)
        _at_least("staging_budget_bytes", self.staging_budget_bytes, _MIB)
        _at_least("write_deadline_s", self.write_deadline_s, 0.001)
        if self.write_deadline_s is not None and self.write_deadline_s > _LONGEST_DEADLINE_S:
            raise OptionError(
                f"write_deadline_s={self.write_deadline_s!r}: expected at most {_LONGEST_DEADLINE_S:.0f}, a year; "
                "None waits for ever"
            )


@dataclass(frozen=True, slots=True)
class LoadOptions(_FromEnvironment):
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
        certify: at the end of Megatron-LM's `load_checkpoint`, after `install()`, and by `mcore_ckpt.certify`, compare
            what the job is with the checkpoint: `"sample"`, one tensor in 32, which depend on the save, and all
            objects and random states; `"warn"`, all tensors. Rank 0 warns of each difference; or all ranks raise
            `LoadError` (`"raise"`, all tensors). `"off"` compares nothing.
    """

    page_cache: PageCache = "auto"
    drain_to: str | None = None
    local_tier: str | None = None
    on_dtype_mismatch: Literal["convert", "raise"] = "convert"
    allowed_classes: tuple[str, ...] = field(default=())
    on_damaged: Literal["raise", "go_back"] = "raise"
    certify: Literal["sample", "warn", "raise", "off"] = "sample"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_directory("drain_to", self.drain_to)
        _check_directory("local_tier", self.local_tier)


@functools.cache
def tell_unknown_variables() -> None:
    """Warn, once in a process, of `MCORE_CKPT_*` variables that set no option."""
    for name, alike in unknown_variables().items():
        _logger.warning("%s sets no option of mcore_ckpt%s", name, f"; {alike} would" if alike else "")


def _variable(name: str) -> str:
    return _ENVIRONMENT_PREFIX + name.upper()


def unknown_variables() -> dict[str, str]:
    """`MCORE_CKPT_*` variables that set no option, but those of tests; each with the one most like it, or ""."""
    known = {option.name.upper() for cls in (SaveOptions, LoadOptions) for option in fields(cls)}
    unknown: dict[str, str] = {}
    for variable in os.environ:
        name = variable.removeprefix(_ENVIRONMENT_PREFIX)
        if name != variable and name not in known and not name.startswith("TEST"):
            import difflib  # (half of what importing this module would cost)

            alike = difflib.get_close_matches(name, sorted(known), n=1)
            unknown[variable] = _ENVIRONMENT_PREFIX + alike[0] if alike else ""
    return unknown


def ranks_of_this_host() -> int:
    """How many ranks share this host's memory, as far as the launcher tells: the world's size at worst, 1 at least."""
    for name in (*_LOCAL_SIZES, "WORLD_SIZE"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return 1


def first_of_this_host(rank: int) -> bool:
    """Whether a rank is the first of its host, as far as the launcher tells; else whether it is the first of all."""
    for name in _LOCAL_RANKS:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text) == 0
    return rank == 0


def _parse(name: str, annotation: str, text: str) -> Any:
    """Turn an environment variable's text into the type that the field's annotation names."""
    variable = _variable(name)
    if "None" in annotation and text.lower() in ("", "none"):
        return None
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
