"""An exception as a value, as plain data, and back: how a failure travels between steps, processes and ranks.

Exceptions themselves do not travel well: they may not pickle, their class may not exist where they arrive, and their
traceback never survives. What arrives here is the class (if it is one of ours), the message, the traceback as text,
and what an `OSError` knows.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mcore_ckpt.core import errors
from mcore_ckpt.core.errors import CheckpointError

T = TypeVar("T")


class RemoteError(Exception):
    """Stands for an exception that was raised elsewhere; its text is the traceback there.

    It is only ever a `__cause__`, so that a traceback printed here shows the one from there above it.
    """


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What is known about an exception, in a form that pickles anywhere."""

    class_name: str  # name of its class; of one in `errors` without a module
    message: str  # `str(exception)`, with the class in front unless the class is one of ours
    traceback_text: str  # as Python prints it, causes included
    error_number: int | None = None  # `errno` of an `OSError`
    path: str | None = None  # `filename` of an `OSError`
    interrupted: bool = False  # it is no failure but a request to end (Ctrl-C, an exit), or that is the cause


def attempt(step: Callable[[], T]) -> T | BaseException:
    """The value of a step, or what it raised: one rank's step, whose failure waits until the others can be told.

    The exception is a value until `value_of` raises it, inside an exchange of all ranks.
    """
    try:
        return step()
    except BaseException as error:  # noqa: BLE001  (also on Ctrl-C the others must not wait for us; raised again)
        return error


def value_of(outcome: T | BaseException) -> T:
    """The value that `attempt` got; raises what it caught."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


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
    path = None if system_error is None else _path_of(system_error)
    return FailureReport(
        class_name=name,
        message=message,
        traceback_text=traceback_text,
        error_number=None if system_error is None else system_error.errno,
        path=path,
        interrupted=any(not isinstance(each, Exception) for each in _causes(error)),
    )


def _path_of(error: OSError) -> str | None:
    name = error.filename
    return os.fsdecode(name) if isinstance(name, str | bytes) else None if name is None else f"{name!r:.200}"


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
    found = getattr(errors, report.class_name, None)
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
