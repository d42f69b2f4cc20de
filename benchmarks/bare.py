"""What a load costs at least: the same bytes read, summed and put into the same tensors by bare threads.

No index, no checks, no planning: where each payload lies is found out outside the measured time. What this takes longer
than the raw device is the price of having the bytes in the tensors, with their CRC-32 known; what `mcore_ckpt` takes
longer than this is its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.adapters import Adapter
from benchmarks.state import Shard
from mcore_ckpt.core.boxes import Box, intersect
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item import tensor_template
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, align_up
from mcore_ckpt.storage.direct_io import address, aligned_buffer, copy_bytes

__all__ = ["BARE", "Bare", "BareLoop"]

_THREADS = 4
_PIECE_BYTES = 8 * 1024 * 1024
_SLICE_BYTES = 1024 * 1024
_ROWS_BYTES = 512 * 1024
_PLACES_AT_ONCE = 4


class _Place(NamedTuple):
    """Bytes of one stored chunk, and what of them goes where."""

    file: str
    offset: int  # of the payload, or of the part of it that is wanted, in bytes
    destination: np.ndarray[Any, Any]  # flat bytes, when they lie there as in the file; else rows x elements
    columns: int = 0  # of the chunk, in elements; 0 if `destination` is flat
    first_column: int = 0  # the first that is wanted


class Bare(Adapter):
    """Reads by bare threads; of checkpoints that this package wrote, of float32 in rows or columns."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._cold = False
        self._buffers = [aligned_buffer(_PIECE_BYTES + 2 * ALIGNMENT_BYTES) for _ in range(_THREADS)]

    def look(self, state: list[Shard], path: Path, cold: bool) -> None:
        self._cold = cold
        index = FileSystemReader(path).index
        self._places = [place for shard in state for place in _places(shard, index)]

    def load(self, state: list[Shard], path: Path) -> None:
        # Rows are read with what lies between them, which another rank wants: through the page cache.
        direct = self._cold and not any(place.columns for place in self._places)
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        # Through the page cache each thread reads in order, by descriptors of its own: the kernel reads ahead by these.
        at_once = 1 if direct else _PLACES_AT_ONCE
        pieces = [piece for place in sorted(self._places, key=itemgetter(0, 1)) for piece in _pieces(place)]
        tasks = iter([pieces[start : start + at_once] for start in range(0, len(pieces), at_once)])
        lock = threading.Lock()

        def drain(buffer: memoryview) -> None:
            fds = {name: os.open(path / name, flags) for name in {place.file for place in self._places}}
            while True:
                with lock:
                    places = next(tasks, ())
                for place in places:
                    read_one(fds, place, buffer)
                if not places:
                    break
            for fd in fds.values():
                os.close(fd)

        def read_one(fds: dict[str, int], place: _Place, buffer: memoryview) -> None:
            if place.columns:
                _read_rows(fds[place.file], place, buffer)
            elif direct:
                _read_direct(fds[place.file], place, buffer)
            else:
                _read_cached(fds[place.file], place)

        threads = [threading.Thread(target=drain, args=(buffer,)) for buffer in self._buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _SmallSpan(NamedTuple):
    """Bytes of a file that are read at once, and payloads in them: where, how long, and the address each goes to."""

    file: str
    start: int
    nbytes: int
    payloads: list[tuple[int, int, int]]


class BareLoop(Bare):
    """Many small tensors, by one thread: what lies together is read at once, then each payload is summed and copied."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[_SmallSpan] = []

    def look(self, state: list[Shard], path: Path, cold: bool) -> None:
        super().look(state, path, cold)
        # A device wants long reads; what comes out of the page cache is at hand while it is in the CPU's.
        self._spans = list(_small_spans(self._places, _PIECE_BYTES if cold else _SLICE_BYTES))

    def load(self, state: list[Shard], path: Path) -> None:
        flags = os.O_RDONLY | (os.O_DIRECT if self._cold else 0)
        fds = {name: os.open(path / name, flags) for name in {span.file for span in self._spans}}
        buffer, memmove = self._buffers[0], ctypes.memmove
        base = address(buffer)
        for span in self._spans:
            _read(fds[span.file], buffer[: span.nbytes], span.start)
            for at, nbytes, destination in span.payloads:
                crc32(buffer[at : at + nbytes])
                memmove(destination, base + at, nbytes)
        for fd in fds.values():
            os.close(fd)


def _small_spans(places: list[_Place], span_bytes: int) -> Iterator[_SmallSpan]:
    """Payloads in the order of the files, in aligned spans; each has to be shorter than a span."""
    at_once: list[_Place] = []
    for place in [*sorted(places, key=lambda place: (place.file, place.offset)), None]:
        if at_once:
            first, last = at_once[0], at_once[-1]
            start = first.offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if place is None or place.file != first.file or place.offset + len(place.destination) > start + span_bytes:
                payloads = [(p.offset - start, len(p.destination), p.destination.ctypes.data) for p in at_once]
                end = align_up(last.offset + len(last.destination))
                yield _SmallSpan(first.file, start, end - start, payloads)
                at_once = []
        if place is not None:
            at_once.append(place)


def _places(shard: Shard, index: CheckpointIndex) -> Iterator[_Place]:
    entry = index.tensors[shard.key]
    rows, columns = shard.tensor.shape
    for chunk in entry.chunks:
        payload = chunk.item.offset + len(tensor_template(entry.dtype, chunk.sizes).head)
        shared = intersect(Box(shard.offsets, (rows, columns)), Box(chunk.offsets, chunk.sizes))
        if shared is None:
            continue
        low = shared.offsets
        row, column = (start - own for start, own in zip(low, shard.offsets, strict=True))
        part = shard.tensor[row : row + shared.sizes[0], column : column + shared.sizes[1]]
        first_row = payload + 4 * (low[0] - chunk.offsets[0]) * chunk.sizes[1]
        if part.is_contiguous() and part.shape[1] == chunk.sizes[1]:
            yield _Place(chunk.item.file, first_row, part.view(-1).view(torch.uint8).numpy())
        else:
            yield _Place(chunk.item.file, first_row, part.numpy(), chunk.sizes[1], low[1] - chunk.offsets[1])


def _pieces(place: _Place) -> Iterator[_Place]:
    if place.columns:
        yield place
        return
    for start in range(0, len(place.destination), _PIECE_BYTES):
        part = place.destination[start : start + _PIECE_BYTES]
        yield place._replace(offset=place.offset + start, destination=part)


def _read_cached(fd: int, place: _Place) -> None:
    view, crc = place.destination.data, 0
    for start in range(0, len(view), _SLICE_BYTES):
        part = view[start : start + _SLICE_BYTES]
        _read(fd, part, place.offset + start)
        crc = crc32(part, crc)


def _read_direct(fd: int, place: _Place, buffer: memoryview) -> None:
    view, crc = place.destination.data, 0
    start = place.offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    skip = place.offset - start
    _read(fd, buffer[: align_up(skip + len(view))], start)
    for done in range(0, len(view), _SLICE_BYTES):
        part = buffer[skip + done : skip + min(done + _SLICE_BYTES, len(view))]
        crc = crc32(part, crc)
        copy_bytes(view[done : done + len(part)], part)


def _read_rows(fd: int, place: _Place, buffer: memoryview) -> None:
    """A few rows at a time."""
    row_bytes = 4 * place.columns
    at_once = max(1, _ROWS_BYTES // row_bytes)
    rows, wanted = place.destination.shape
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        part = buffer[: count * row_bytes]
        _read(fd, part, place.offset + row * row_bytes)
        table = np.frombuffer(part, dtype=np.float32).reshape(count, place.columns)
        place.destination[row : row + count] = table[:, place.first_column : place.first_column + wanted]


def _read(fd: int, view: memoryview, offset: int) -> None:
    if os.preadv(fd, [view], offset) < 1:
        raise OSError(f"nothing to read at {offset}")


BARE: dict[str, type[Adapter]] = {"bare": Bare, "bare loop": BareLoop}
