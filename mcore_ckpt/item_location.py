"""Where the payloads of large items lie: their headers are read once for each item and reader, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_ckpt.container import LocatedTensor, NotRangeable, locate_tensor
from mcore_ckpt.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.fetch import OpenFiles, ReadStats, in_parallel, naming
from mcore_ckpt.placement import dtype_name
from mcore_ckpt.read_requests import WantedItem
from mcore_ckpt.storage.base import RangeReader

__all__ = ["ItemLocations", "check_located"]

# Items located by one task; each takes two small reads.
_BATCH = 8


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
            for wanted in batch:
                item = wanted.item
                try:
                    with files.reader(item.file) as reader:
                        reader.check_range(item.offset, item.length)
                        located = locate_tensor(_header_bytes(reader, item.offset, stats), item.length, wanted.where)
                    check_located(wanted, located)
                except NotRangeable as reason:
                    unranged.append((wanted, str(reason).removeprefix(f"{wanted.where}: ")))
                except LoadError as error:
                    raise naming(error, wanted.where) from error
                else:
                    self._located[item.file, item.offset] = located

        in_parallel((items[at : at + _BATCH] for at in range(0, len(items), _BATCH)), locate_batch, threads)
        return unranged


def _header_bytes(reader: RangeReader, item_offset: int, stats: ReadStats) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        stats.add(reads=1, bytes_read=length)
        return reader.read(item_offset + offset, length)

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
