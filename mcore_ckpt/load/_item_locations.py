"""Where the payloads of large items lie: their headers are read once for each item and reader, several at a time, and
a little ahead of the payloads, so that nothing waits for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.process import Crew, Task
from mcore_ckpt.format.index import StoredItem
from mcore_ckpt.format.item_reading import LocatedTensor, locate_tensor
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.load._wanted_items import WantedItem
from mcore_ckpt.load.open_files import OpenFiles, ReadStats, naming, using
from mcore_ckpt.storage.base import RangeReader

# Items located by one task, with nine small reads where they lie side by side.
_BATCH = 8

# What is read of the next item together with the end of this one, and up to which distance: our own items have up to a
# page of padding between them.
_HEAD_BYTES = 1024
_NEAR_BYTES = 4096


class ItemLocations:
    """Where payloads lie, as far as known; kept as long as a reader's checkpoint. By the item, and by what the index
    says it holds: that was checked for that dtype and shape alone.
    """

    def __init__(self) -> None:
        self._located: dict[tuple[StoredItem, torch.dtype, tuple[int, ...]], LocatedTensor] = {}

    def __contains__(self, wanted: WantedItem) -> bool:
        return _kind(wanted) in self._located

    def of(self, wanted: WantedItem) -> LocatedTensor | None:
        """Where the payload of an item lies; None if that is not known."""
        return self._located.get(_kind(wanted))

    @contextmanager
    def ahead(
        self,
        items: Sequence[WantedItem],
        files: OpenFiles,
        stats: ReadStats,
        threads: int,
        unranged: Callable[[WantedItem, str], None],
    ) -> Iterator[Callable[[WantedItem], LocatedTensor | None]]:
        """Read the headers of items by threads that stay a few items ahead. Yields a function that tells, in order,
        where each payload lies; None for one that cannot be ranged, of which `unranged` gets the reason.
        """
        if not items:
            yield self.of
            return
        batches = iter([items[at : at + _BATCH] for at in range(0, len(items), _BATCH)])
        pending: deque[Task[None]] = deque()
        with Crew(threads, "mcore_ckpt-locate") as crew:

            def begin_next() -> None:
                for batch in batches:
                    pending.append(crew.submit(partial(self.locate, batch, files, stats, unranged)))
                    return

            def located(wanted: WantedItem) -> LocatedTensor | None:
                while wanted not in self and pending:
                    begin_next()
                    crew.result(pending.popleft())
                return self.of(wanted)

            for _ in range(threads):
                begin_next()
            yield located

    def locate(
        self,
        batch: Sequence[WantedItem],
        files: OpenFiles,
        stats: ReadStats,
        unranged: Callable[[WantedItem, str], None],
    ) -> None:
        """Read the headers of items. Arguments and errors as of `ahead`."""
        headers = _Headers(stats)
        for wanted, following in zip(batch, [*batch[1:], None], strict=True):
            item = wanted.item
            try:
                with using(item.file), files.reader(item.file) as reader:
                    reader.check_range(item.offset, item.length)
                    read = headers.of(reader, item, following.item if following else None)
                    located = locate_tensor(read, item.length, wanted.where, wanted.expected)
                    wanted.check(located)
            except NotRangeable as reason:
                unranged(wanted, str(reason).removeprefix(f"{wanted.where}: "))
            except LoadError as error:
                raise naming(error, wanted.where) from error
            else:
                self._located[_kind(wanted)] = located


def _kind(wanted: WantedItem) -> tuple[StoredItem, torch.dtype, tuple[int, ...]]:
    return wanted.item, wanted.dtype, wanted.chunk.sizes


class _Headers:
    """Reads headers of items that follow one another: the end of one with the beginning of the next."""

    def __init__(self, stats: ReadStats) -> None:
        self._stats = stats
        self._file, self._start, self._content = "", 0, b""

    def of(self, reader: RangeReader, item: StoredItem, following: StoredItem | None) -> Callable[[int, int], bytes]:
        """Reads bytes of `item` by offset in it and length; `following` is the item whose turn is next."""
        end = item.offset + item.length
        ahead = 0
        if following is not None and following.file == item.file and 0 <= following.offset - end <= _NEAR_BYTES:
            ahead = following.offset + min(_HEAD_BYTES, following.length) - end

        def read(offset: int, length: int) -> bytes:
            start = item.offset + offset
            if item.file != self._file or not self._start <= start <= start + length <= self._start + len(
                self._content
            ):
                extra = ahead if start + length == end else 0
                extra = max(0, min(extra, reader.size_bytes - end))
                self._content = reader.read(start, length + extra)
                self._file, self._start = item.file, start
                self._stats.add(reads=1, bytes_read=length + extra)
            return self._content[start - self._start : start - self._start + length]

        return read
