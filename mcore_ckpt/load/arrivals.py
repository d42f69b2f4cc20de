"""Sums of what a load has put into memory, taken in that memory after its last byte had come.

A proof of the load (`LoadOptions.prove`) takes these instead of reading the memory again. One counts as long as nothing
of torch has written to the tensor since: the versions of what was filled and of what is asked for have not moved. Of
bytes that two destinations of the load have in common none counts: what fills them does not move versions.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from typing import Final, NamedTuple

import numpy as np
import torch

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.crc import crc32_combine
from mcore_ckpt.core.fingerprints import StridedSums, part_of_run, rows_to_sum
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.load.placement import WantedItem, memory_of
from mcore_ckpt.load.records import global_shape, stretch_of

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class _Filled(NamedTuple):
    """Bytes that one read has filled."""

    nbytes: int
    crc: int
    columns: Stretch | None  # the chunk that they belong to, if their rows were summed
    number: int  # of the read
    tensor: torch.Tensor  # the destination, which keeps the memory
    version: int


class Arrivals:
    """What loads have filled in one stretch each, by address; from several threads. `is_asked_for`: whether a key of
    the checkpoint will be. `saves`: ids of those that loads have read of (`save_id`).
    """

    def __init__(self, is_asked_for: Callable[[CheckpointIndex, str], bool]) -> None:
        self._is_asked_for = is_asked_for
        self._numbers = itertools.count()
        self._filled: dict[int, _Filled] = {}
        self._rows = StridedSums()
        self._parts: dict[int, int] | None = None
        self._ranges: list[tuple[int, int]] = []  # of memory that reads fill, or have filled
        self._shared: tuple[list[int], list[int]] | None = None  # begins and ends of what several of these share
        self.saves: set[bytes] = set()

    def expect(self, index: CheckpointIndex, tensors: Iterable[torch.Tensor]) -> None:
        """These are filled from that checkpoint from here on, in whatever way."""
        self.saves.add(save_id(index))
        self._ranges += [found for tensor in tensors if tensor.is_cpu and (found := memory_of(tensor)) is not None]
        self._shared = None

    def columns_of(self, index: CheckpointIndex, wanted: WantedItem) -> Stretch | None:
        """The place of a chunk in its tensor, if it is asked for and has rows there to be summed."""
        if not self._is_asked_for(index, wanted.fqn):
            return None
        entry = index.tensors[wanted.fqn]
        stretch = stretch_of(entry, wanted.chunk, global_shape(index, entry))
        return None if rows_to_sum(stretch) is None else stretch

    def new_read(self) -> int:
        """A number for a read that begins. (Two may fill the same memory.)"""
        return next(self._numbers)

    def feed_rows(self, read: int, columns: Stretch, content: memoryview, first_byte: int) -> None:
        """The next bytes of what a read fills; `first_byte`: in the chunk, at first of a row."""
        self._rows.feed_rows(read, columns, content, first_byte)

    def crc32_of_rows(self, read: int) -> int:
        """The CRC-32 of all that has been fed of a read."""
        return self._rows.crc32_of_rows(read)

    def note(
        self, read: int, tensor: torch.Tensor, address: int, nbytes: int, crc: int, columns: Stretch | None
    ) -> None:
        """A read is done, and its sums are of the memory that it has filled."""
        if not tensor.is_inference():  # those have no version
            self._filled[address] = _Filled(nbytes, crc, columns, read, tensor, tensor._version)  # noqa: SLF001

    def part_of(self, tensor: torch.Tensor, stretch: Stretch) -> int | None:
        """What a tensor adds as that stretch; None if it has to be summed again."""
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.is_inference() or not tensor.is_contiguous():
            return None
        is_run = stretch.bytes_behind() is not None
        at, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if self._is_shared(at, stop):
            return None
        crc = part = 0
        while at < stop:
            filled = self._filled.get(at)
            if filled is None or {filled.tensor._version, tensor._version} != {filled.version}:  # noqa: SLF001
                return None
            if is_run:
                crc = crc32_combine(crc, filled.crc, filled.nbytes)
            elif filled.columns == stretch:
                part ^= self._parts_of_rows()[filled.number]
            else:
                return None
            at += filled.nbytes
        if at != stop:
            return None
        return part_of_run(crc, stretch) if is_run else part

    def _is_shared(self, start: int, stop: int) -> bool:
        """Whether destinations overlap in this memory."""
        if self._shared is None:
            self._shared = _overlaps(self._ranges)
        starts, stops = self._shared
        at = bisect_right(stops, start)
        return at < len(starts) and starts[at] < stop

    def _parts_of_rows(self) -> dict[int, int]:
        if self._parts is None:
            self._parts = self._rows.finish()
        return self._parts


def save_id(index: CheckpointIndex) -> bytes:
    """By which the save that made a checkpoint is known; its directory's name where it has no manifest."""
    return os.fsencode(PurePath(index.path).name) if index.manifest is None else index.manifest.save_id


def _overlaps(ranges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """What several ranges have in common, as ranges that lie apart: begins and ends, both ascending."""
    of_ranges = np.array(sorted(ranges), np.int64).reshape(-1, 2)
    starts, before = of_ranges[1:, 0], np.maximum.accumulate(of_ranges[:, 1])[:-1]
    shared = starts < before
    begins: list[int] = []
    ends: list[int] = []
    stops = np.minimum(of_ranges[1:, 1], before)
    for start, stop in zip(starts[shared].tolist(), stops[shared].tolist(), strict=True):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], stop)
        else:
            begins.append(start)
            ends.append(stop)
    return begins, ends


_noted: ContextVar[Arrivals | None] = ContextVar("_noted", default=None)


@contextmanager
def noting(arrivals: Arrivals) -> Iterator[None]:
    """Within the block, loads of this thread note what they fill."""
    token = _noted.set(arrivals)
    try:
        yield
    finally:
        _noted.reset(token)


@contextmanager
def noting_nothing() -> Iterator[None]:
    """Within the block, loads of this thread fill scratch memory, which is not kept for a sum of it."""
    token = _noted.set(None)
    try:
        yield
    finally:
        _noted.reset(token)


def noted_now() -> Arrivals | None:
    """Where a load that begins here notes what it fills; None: nowhere."""
    return _noted.get()
