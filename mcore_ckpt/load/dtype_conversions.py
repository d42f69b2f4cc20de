"""Tensors whose stored dtype is not the destination's: converted as `torch.Tensor.copy_` does, or refused.

DCP and Megatron-Core convert without a word. A load here warns once, with counts and dtypes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import DtypeMismatchError

OnDtypeMismatch = Literal["convert", "raise"]

_logger = logger_of(__name__)


def check_dtype(fqn: str, where: str, stored: torch.dtype, requested: torch.dtype, policy: OnDtypeMismatch) -> None:
    """Raise `DtypeMismatchError` if a tensor may not be converted, by `LoadOptions.on_dtype_mismatch`, or cannot."""
    if stored is requested:
        return
    what = f"{fqn}: {where} holds {_name(stored)}, the destination is {_name(requested)}"
    if policy == "raise":
        raise DtypeMismatchError(f'{what}; LoadOptions(on_dtype_mismatch="convert") converts')
    if not _converts(stored, requested):
        raise DtypeMismatchError(f"{what}, and torch cannot convert between the two; load into {_name(stored)}")


class DtypeConversions:
    """Collects the conversions of a load, by the policy `LoadOptions.on_dtype_mismatch`."""

    def __init__(self, policy: OnDtypeMismatch, path: str) -> None:
        self._policy: OnDtypeMismatch = policy
        self._path = path
        self._keys: dict[tuple[torch.dtype, torch.dtype], dict[str, None]] = {}
        self._nested = 0

    def note(self, fqn: str, stored: torch.dtype, requested: torch.dtype) -> None:
        """A tensor is about to be converted. Raises `DtypeMismatchError` as `check_dtype`."""
        check_dtype(fqn, f"the checkpoint {self._path}", stored, requested, self._policy)
        self._keys.setdefault((stored, requested), {})[fqn] = None

    @contextmanager
    def of_one_load(self) -> Iterator[None]:
        """Warn at the end of the outermost of these contexts of what was converted inside."""
        self._nested += 1
        try:
            yield
        except BaseException:
            self._keys.clear()
            raise
        finally:
            self._nested -= 1
        if self._nested == 0 and self._keys:
            self._warn()
            self._keys.clear()

    def _warn(self) -> None:
        pairs = []
        for (stored, requested), keys in self._keys.items():
            some = [*keys][:2] + ["..."] * (len(keys) > 2)
            pairs.append(f"{len(keys)} from {_name(stored)} to {_name(requested)} ({', '.join(some)})")
        count = len({key for keys in self._keys.values() for key in keys})
        text = (
            f"{self._path}: {count} tensors are converted to the dtypes of their destinations: {'; '.join(pairs)}."
            ' LoadOptions(on_dtype_mismatch="raise") refuses'
        )
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            _logger.info("%s", text)  # rank 0 warns for all
        else:
            _logger.warning("%s", text)


@lru_cache(maxsize=256)
def _converts(stored: torch.dtype, requested: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex numbers that lose their imaginary part: the load itself warns
        try:
            torch.empty(1, dtype=requested).copy_(torch.empty(1, dtype=stored))
        except (RuntimeError, TypeError, NotImplementedError):
            return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
