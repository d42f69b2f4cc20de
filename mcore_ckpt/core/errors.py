"""Every exception that this package raises on purpose, and how a failure travels between steps, processes and ranks.

    CheckpointError
    |-- OptionError                 an option has a value that cannot work (also a ValueError)
    |-- UnsupportedMegatronError    the installed megatron-core is missing, too old, or changed under us
    |-- StrategyNotFoundError       no strategy is registered under that name (also a LookupError)
    |-- PlanError                   the shards do not add up: a chunk twice, missing, or out of bounds
    |-- SaveError                   a save failed; nothing was published
    |   |-- CheckpointExistsError   `on_existing="error"` and there is a checkpoint already (also a RuntimeError)
    |   |-- WriterDiedError         the writer process ended by signal or exit code
    |   `-- WriteTimeoutError       a write passed its deadline
    `-- LoadError
        |-- CheckpointNotFoundError no such directory, or no `.metadata` in it (also a FileNotFoundError)
        |-- MissingKeyError         the checkpoint has no tensor or object of that key (also a KeyError)
        |-- ShapeMismatchError      global shape stored and wanted differ
        |-- DtypeMismatchError      dtype stored and wanted differ
        |-- KindMismatchError       an object where a tensor is requested, or vice versa
        |-- NewerFormatError        written by a newer torch, Megatron-Core or mcore_ckpt than this one reads; no damage
        `-- CorruptCheckpointError  what lies on the disk cannot be right
            |-- ChecksumError       the CRC-32 stored with a record is not that of its bytes
            `-- UnsafePickleError   a pickle names something outside the allow-list

Messages give the event, its place (rank, key, file, byte range), the expected and the found value, and the next step.
Errors of third parties are mapped once, where they enter; the original stays as `__cause__`. DCP's `save` and `load`
wrap what fails in them: catch its `CheckpointException`, no `Exception`, whose `failures` have these by rank.

Exceptions themselves do not travel well: they may not pickle, their class may not exist where they arrive, and their
traceback never survives. A `FailureReport` has the class (if it is one of ours), the message, the traceback as text,
and what an `OSError` knows.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "KindMismatchError",
    "LoadError",
    "MissingKeyError",
    "NewerFormatError",
    "OptionError",
    "PlanError",
    "SaveError",
    "ShapeMismatchError",
    "StrategyNotFoundError",
    "UnsafePickleError",
    "UnsupportedMegatronError",
    "WriteTimeoutError",
    "WriterDiedError",
]


IF_DAMAGED: Final = (
    "`mcore-ckpt repair --from` takes the bytes from another copy, and a job with MCORE_CKPT_ON_DAMAGED=go_back loads "
    "an earlier checkpoint"
)
"""How the message of a damaged file ends: what to do next."""


class CheckpointError(Exception):
    """Root of this package's exceptions."""


class OptionError(CheckpointError, ValueError):
    """An option, or a combination of options, that cannot work."""


class UnsupportedMegatronError(CheckpointError):
    """megatron-core is not installed, or is a version that this package cannot serve."""


class StrategyNotFoundError(CheckpointError, LookupError):
    """No strategy is registered for that action, backend and version."""


class PlanError(CheckpointError):
    """The shards of the ranks do not make up the global tensors exactly."""


class SaveError(CheckpointError):
    """A save failed on some rank; the checkpoint was not published."""


class CheckpointExistsError(SaveError, RuntimeError):
    """The directory holds a checkpoint and `on_existing="error"` was asked for. DCP raises a `RuntimeError` there."""


class WriterDiedError(SaveError):
    """The writer process ended before its work was done."""


class WriteTimeoutError(SaveError):
    """A write did not finish within `write_deadline_s`."""


class LoadError(CheckpointError):
    """A load cannot be done as asked."""


class CheckpointNotFoundError(LoadError, FileNotFoundError):
    """There is no checkpoint at that path."""


class MissingKeyError(LoadError, KeyError):
    """The checkpoint holds nothing under a key that was asked for."""

    def __str__(self) -> str:
        # KeyError shows repr(message); a message meant for people is shown as it is.
        return Exception.__str__(self)


class ShapeMismatchError(LoadError):
    """A stored tensor has another global shape than the one asked for."""


class DtypeMismatchError(LoadError):
    """A stored tensor has another dtype than the one asked for."""


class KindMismatchError(LoadError):
    """An object is stored where a tensor is requested, or vice versa."""


class NewerFormatError(LoadError):
    """Something newer wrote the checkpoint; this version cannot read it. Nothing says that it is damaged."""


class CorruptCheckpointError(LoadError):
    """Stored bytes contradict the format: truncated, overlapping, out of bounds, or not what they claim to be."""


class ChecksumError(CorruptCheckpointError):
    """A record's bytes do not have the CRC-32 that is stored with them."""


class UnsafePickleError(CorruptCheckpointError):
    """A pickle asks for a class or function outside the allow-list."""


class RemoteError(Exception):
    """The traceback of an exception that was raised elsewhere, as text; only ever a `__cause__`."""


TRACEBACK: Final = "\n--- on rank "
"""Stands between a message and the traceback of the rank that failed."""


def without_tracebacks(message: str) -> str:
    """The message of an error that was raised on all ranks, without the tracebacks behind it, however nested."""
    return message.partition(TRACEBACK)[0]


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What is known about an exception, in a form that pickles anywhere."""

    class_name: str  # name of its class; of one of ours without a module
    message: str  # `str(exception)`, with the class in front unless the class is one of ours
    traceback_text: str  # as Python prints it, causes included
    error_number: int | None = None  # `errno` of an `OSError`
    path: str | None = None  # `filename` of an `OSError`
    interrupted: bool = False  # it is no failure but a request to end (Ctrl-C, an exit), or that is the cause


def describe(error: BaseException) -> FailureReport:
    """Turn an exception into data. Looks through the causes for an `OSError`, whose number and path are worth most."""
    kind = type(error)
    ours = isinstance(error, CheckpointError)
    name = kind.__name__ if ours or kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = text_of(error)
    message = text if ours else f"{name}: {text}" if text else name
    traceback_text = _traceback_of(error)
    system_error = next(
        (each for each in _causes(error) if isinstance(each, OSError) and type(each.errno) is int), None
    )
    path = None if system_error is None else system_error.filename
    return FailureReport(
        class_name=name,
        message=message,
        traceback_text=traceback_text,
        error_number=None if system_error is None else system_error.errno,
        path=os.fsdecode(path) if isinstance(path, str | bytes) else None if path is None else f"{path!r:.200}",
        interrupted=any(not isinstance(each, Exception) for each in _causes(error)),
    )


def text_of(error: BaseException) -> str:
    """`str(error)`; where that raises, as code of third parties may, what it raised."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001  (whatever it is, the others have to be told)
        return f"<no text: {type(failed).__name__} in __str__>"


def _traceback_of(error: BaseException) -> str:
    """As Python prints it. Python itself may fail: on names and notes that an exception makes up."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    except Exception as failed:  # noqa: BLE001  (whatever it is, the others have to be told)
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{type(error).__name__}: {text_of(error)} (not printed in full: {type(failed).__name__})"


def same_class(report: FailureReport, otherwise: type[CheckpointError]) -> type[CheckpointError]:
    """The class in our tree that the reported exception had; `otherwise` for any other exception."""
    found = globals().get(report.class_name)
    if isinstance(found, type) and issubclass(found, CheckpointError):
        return found
    return otherwise


def remote_cause(report: FailureReport) -> Exception:
    """An exception to use as `__cause__`: the remote traceback, under the `OSError` again where there was one."""
    remote = RemoteError(f"\n{report.traceback_text}")
    if report.error_number is None:
        return remote
    system_error = OSError(report.error_number, os.strerror(report.error_number), report.path)
    system_error.__cause__ = remote
    return system_error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and what it came of, back to the first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
