"""Our exceptions as Megatron's, and as torch.distributed.checkpoint's: callers written for those catch them.

An error that leaves a strategy is an instance of all three at once, with one message, one cause and one traceback.
"""

from __future__ import annotations

import contextlib
import functools
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from mcore_ckpt.core.errors import CheckpointError, SaveError


class MegatronErrors(contextlib.AbstractContextManager[None]):
    """A context in which our exceptions leave as Megatron's, too."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, CheckpointError) and not isinstance(error, _checkpointing_exception()):
            if isinstance(error, SaveError) and is_first_rank():
                # Rank 0's log is where people and scripts look for these words of Megatron's.
                error.args = (f"Worker failure: {error}",)
            raise as_megatron_error(error) from error.__cause__


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only one."""
    # Not by `coordination_group`: to make one is a collective, and an error may be one rank's alone.
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def as_megatron_error(error: Exception) -> Exception:
    """The same error, as an instance of Megatron's `CheckpointingException` and of DCP's `CheckpointException`, too. It
    pickles.
    """
    theirs: Any = _checkpointing_exception()
    kind: Any = type(error)
    if issubclass(kind, theirs):
        return error
    cls = _in_all_trees(kind, theirs)
    same: Exception = cls.__new__(cls, *error.args)
    same.__dict__.update(error.__dict__)
    if isinstance(error, OSError) and isinstance(same, OSError):
        for name in ("errno", "strerror", "filename", "filename2"):
            # A file name that is set to None is shown as "None", in place of the message.
            if (value := getattr(error, name)) is not None:
                setattr(same, name, value)
    same.args = error.args
    same.__cause__ = error.__cause__
    same.__context__ = error.__context__
    same.__suppress_context__ = error.__suppress_context__
    same.__traceback__ = error.__traceback__
    return same


def _checkpointing_exception() -> Any:
    return import_module("megatron.core.dist_checkpointing.core").CheckpointingException


@functools.cache
def _in_all_trees(ours: Any, theirs: Any) -> Any:
    def reduce(self: Any) -> tuple[Any, ...]:
        return as_megatron_error, (ours(*self.args),)

    members = {
        "__module__": ours.__module__,
        "__doc__": ours.__doc__,
        "__str__": ours.__str__,  # that of CheckpointException lists ranks, and nothing else
        "__reduce__": reduce,
        "_failures": {},
    }
    return type(ours.__name__, (ours, theirs, CheckpointException), members)
