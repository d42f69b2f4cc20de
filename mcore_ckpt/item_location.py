"""Where the payloads of large items lie: their headers are read once for each item and reader, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_ckpt.container import LocatedTensor, NotRangeable, locate_tensor
from mcore_ckpt.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.fetch import OpenFiles, ReadStats, in_parallel, naming
from mcore_ckpt.metadata import StoredItem
from mcore_ckpt.placement import dtype_name
from mcore_ckpt.read_requests import WantedItem
from mcore_ckpt.storage.base import RangeReader

__all__ = ["ItemLocations", "check_located"]

# Items located by one task, with nine small reads where they lie side by side.
_BATCH = 8

# What is read of the next item together with the end of this one, and up to which distance: our own items have up to a
# page of padding between them.
_HEAD_BYTES = 1024
_NEAR_BYTES = 4096


class ItemLocations:
    """What is known of where payloads lie, by file and offset of the item; kept as long as a reader's checkpoint."""

    def __init__(self) -> None:
        self._located: dict[tuple[str, int], LocatedTensor] = {}

    def __contains__(self, wanted: WantedItem) -> bool:
        return (wanted.item.file, wanted.item.offset) in self._located

    def of(self, wanted: WantedItem) -> LocatedTensor | None:
        """Where the payload of an item lies; None if that is not known."""
        return self._located.get((wanted.item.file, wanted.item.offset))

    def locate(
        self, items: Sequence[WantedItem], files: OpenFiles, stats: ReadStats, threads: int
    ) -> list[tuple[WantedItem, str]]:
        """Read the headers of items.

        Returns:
            The items that cannot be ranged, each with the reason.

        Raises:
            CorruptCheckpointError: an item is not what the index says, or its file is too short.
            LoadError: reading failed.
        """
        unranged: list[tuple[WantedItem, str]] = []

        def locate_batch(batch: Sequence[WantedItem]) -> None:
            headers = _Headers(stats)
            for wanted, following in zip(batch, [*batch[1:], None], strict=True):
                item = wanted.item
                try:
                    with files.reader(item.file) as reader:
                        reader.check_range(item.offset, item.length)
                        read = headers.of(reader, item, following.item if following else None)
                        located = locate_tensor(read, item.length, wanted.where)
                    check_located(wanted, located)
                except NotRangeable as reason:
                    unranged.append((wanted, str(reason).removeprefix(f"{wanted.where}: ")))
                except LoadError as error:
                    raise naming(error, wanted.where) from error
                else:
                    self._located[item.file, item.offset] = located

        in_parallel((items[at : at + _BATCH] for at in range(0, len(items), _BATCH)), locate_batch, threads)
        return unranged


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


def check_located(wanted: WantedItem, located: LocatedTensor) -> None:
    """Raise `CorruptCheckpointError` unless the item holds the tensor that the index says it does."""
    if located.shape != wanted.chunk.sizes or located.dtype != dtype_name(wanted.dtype):
        raise CorruptCheckpointError(
            f"the index says {dtype_name(wanted.dtype)} of shape {list(wanted.chunk.sizes)}, stored is {located.dtype}"
            f" of shape {list(located.shape)}; index and data file do not belong together"
        )
    if located.payload_bytes != wanted.payload_bytes:
        raise CorruptCheckpointError(f"expected {wanted.payload_bytes} bytes of elements, got {located.payload_bytes}")
