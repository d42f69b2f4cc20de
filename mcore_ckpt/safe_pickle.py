"""Unpickling that can run nothing: exact allow-lists, and failures mapped to this package's exceptions.

Two doors, one for each kind of pickle in a checkpoint:

    loads(data, allowed, where)            an index: every global is replaced by an inert stand-in, nothing is imported
    load_object(file, extra_allowed, ...)  a stored object or `common.pt`: `torch.load(weights_only=True)`

`pickle.Unpickler` in C does the work, so that a large index costs microseconds an entry; its only openings to the
outside are `find_class` and `persistent_load`, and both are closed here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

from mcore_ckpt.errors import CorruptCheckpointError, UnsafePickleError

__all__ = ["loads"]


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes | bytearray, allowed: Mapping[tuple[str, str], Any], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise UnsafePickleError(
                f"{self._where}: the pickle asks for {module}.{name}, which is not among the classes that a checkpoint "
                "index may hold. Nothing was imported or run. The file is damaged, was tampered with, or was written "
                "by something other than Megatron-Core, torch.distributed.checkpoint or this package."
            ) from None

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for an external object (persistent id {pid!r:.80}); an index has none. "
            "The file is damaged or is not a checkpoint index."
        )


def loads(data: bytes | bytearray, allowed: Mapping[tuple[str, str], Any], where: str) -> Any:
    """Unpickle `data`, with `allowed[module, name]` standing in for each global that the pickle names.

    Args:
        data: the pickle; bytes after its end are ignored.
        allowed: what each (module, qualified name) is replaced by. The replacements must be inert when called, and
            must not be mutable through attributes (a pickle can set attributes of what it holds).
        where: the file, for error messages.

    Raises:
        UnsafePickleError: the pickle names something else, or an external object.
        CorruptCheckpointError: the bytes are no pickle, are truncated, or build something that cannot be.
    """
    try:
        return _Restricted(data, allowed, where).load()
    except UnsafePickleError:
        raise
    # A damaged pickle can fail in any way that object construction can (UnpicklingError, EOFError, TypeError,
    # ValueError, UnicodeDecodeError, RecursionError, MemoryError, OverflowError ...): all of them mean the same here.
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where}: not a readable pickle of {len(data)} bytes ({type(error).__name__}: {error}). The file is "
            "truncated or damaged; restore it from another copy, or load an earlier checkpoint."
        ) from error
