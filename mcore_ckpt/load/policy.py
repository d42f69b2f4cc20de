"""How a load reads: every decision, with the numbers that it rests on. Pure; no files, no tensors.

    chunks that are read many at a time                   `max_small_bytes`
    items that are read with their neighbours             `is_packed`
    payloads that are read completely                     `reads_all`
    slices that are read so that they can be checked      `checks_slice`
    gaps that are read and thrown away                    `cheap_gap_bytes`, `is_worth_reading`
    parts that go straight into their destination         `straight_bytes`
    bytes that other ranks of this host read, too         `is_shared`
    how a file is opened, and who reads it in order       `mode`, `stream_bytes`

One decision is left to the storage: of a file that is opened with "auto", the kernel is asked which bytes lie in the
page cache; others are read by O_DIRECT (`LocalReader`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mcore_ckpt.core.options import PageCache
from mcore_ckpt.format.integrity import BLOCK_BYTES
from mcore_ckpt.storage.base import DirectIo

# Bytes of one read, and of the buffer of each thread: long enough for a disk's full speed.
WINDOW_BYTES = 8 * 1024 * 1024

# The longest gap between two requested ranges that is read and thrown away: about what a disk delivers meanwhile.
MAX_GAP_BYTES = 256 * 1024

# A read costs 20-100 us on a cold disk and 3 us from the page cache; at 1.5 and 8 GB/s that is 30-150 KB and 24 KB.
CHEAP_GAP_BYTES = 32 * 1024

# Bytes thrown away for each byte wanted, when gaps are not cheap each by itself.
MAX_WASTE = 0.25

# What so much of is requested, or is read anyway, is read completely.
_MOSTLY = 0.8

# Up to here, an item is read with its neighbours and copied out of the buffer: a copy at memory speed costs less than
# reads of its own for header and payload.
MAX_SMALL_BYTES = 1024 * 1024

# From here on a part goes straight into its destination rather than through a buffer that it shares with others.
STRAIGHT_BYTES = 1024 * 1024

# What one thread reads in order where the kernel reads ahead of it: a stream fills the page cache with large pages, at
# less than half of the CPU time of 4 KiB ones (seen on ext4, Linux 6.18), and begins with small ones.
STREAM_BYTES = 32 * 1024 * 1024

# For what need not stay in the page cache, and for what is to stay.
_MODES: dict[PageCache, tuple[DirectIo, DirectIo]] = {"auto": ("auto", "keep"), "on": ("off", "off")}


class _Storage(Protocol):
    """What a policy asks of a storage."""

    @property
    def request_bytes(self) -> int:
        """What it delivers in the time of one more request, where that is more than a disk does."""

    @property
    def open_ahead(self) -> int:
        """How many files are opened before they are read; 0 where that takes no request."""


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """How data files of one storage are read.

    Attributes:
        window_bytes: of one read, at most.
        max_gap_bytes: the longest gap that is read.
        cheap_gap_bytes: a gap that is always read.
        max_small_bytes: the largest item that is read with its neighbours.
        straight_bytes: the shortest part that is a read of its own, where its destination takes it as it is.
        modes: how a file is opened for bytes of this rank alone, and for bytes of several ranks.
        opens_ahead: files are opened before they are read: each open takes a request.
    """

    window_bytes: int = WINDOW_BYTES
    max_gap_bytes: int = MAX_GAP_BYTES
    cheap_gap_bytes: int = CHEAP_GAP_BYTES
    max_small_bytes: int = MAX_SMALL_BYTES
    straight_bytes: int = STRAIGHT_BYTES
    modes: tuple[DirectIo, DirectIo] = _MODES["auto"]
    opens_ahead: bool = False

    @classmethod
    def of(cls, storage: _Storage, page_cache: PageCache) -> ReadPolicy:
        """Where a request costs more, longer gaps are read."""
        max_gap_bytes = max(MAX_GAP_BYTES, storage.request_bytes)
        return cls(
            WINDOW_BYTES,
            max_gap_bytes,
            min(max(CHEAP_GAP_BYTES, storage.request_bytes), max_gap_bytes),
            min(MAX_SMALL_BYTES, WINDOW_BYTES),
            STRAIGHT_BYTES,
            _MODES[page_cache],
            storage.open_ahead > 0,
        )

    def is_worth_reading(self, gap_bytes: int, wasted_bytes: int, wanted_bytes: int) -> bool:
        """Whether a gap is read rather than skipped, in a read that wants and wastes so much already."""
        if gap_bytes > self.max_gap_bytes:
            return False
        return gap_bytes <= self.cheap_gap_bytes or wasted_bytes + gap_bytes <= MAX_WASTE * wanted_bytes

    def is_packed(self, item_bytes: int, needed_bytes: int, *, has_sum: bool) -> bool:
        """Whether an item is read with its neighbours, head and tail included. `has_sum`: all of it is checked then, a
        single block or less.
        """
        if item_bytes > self.max_small_bytes:
            return False
        return has_sum or item_bytes <= CHEAP_GAP_BYTES or needed_bytes >= _MOSTLY * item_bytes

    def reads_all(self, read_bytes: int, box_bytes: int, payload_bytes: int) -> bool:
        """Whether all of a payload is read where a slice of it, gaps included, takes `read_bytes`."""
        return read_bytes >= _MOSTLY * payload_bytes and read_bytes > box_bytes

    def checks_slice(self, part_bytes: int, needed_bytes: int) -> bool:
        """Whether a slice is read with what lies between its rows, to be checked. Columns of a wide matrix take a read
        of all of it, which is too much for a check.
        """
        return part_bytes <= (1 + MAX_WASTE) * needed_bytes + BLOCK_BYTES

    def is_shared(self, times_wanted: int, *, has_gaps: bool) -> bool:
        """Whether other ranks of this host are about to read the same; they want the gaps that this rank does not."""
        return times_wanted > (0 if has_gaps else 1)

    def mode(self, *, shared: bool) -> DirectIo:
        """How a file is opened. `shared`: its bytes are to stay in the page cache, if the options leave that open."""
        return self.modes[shared]

    def stream_bytes(self, *, shared: bool) -> int:
        """How much one thread should read in order; 0: any read by any thread."""
        return 0 if self.opens_ahead or self.modes[shared] == "auto" else STREAM_BYTES
