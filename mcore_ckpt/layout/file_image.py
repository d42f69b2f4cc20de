"""What a writer needs to know of a file: its length, its payloads, where their checksums go; and what became of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mcore_ckpt.core.boxes import Stretch
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.footer import BLOCK_BYTES, inner_blocks


@dataclass(frozen=True, slots=True)
class FileImage:
    """What has to be known of a file's structure to sum and write it; plain arrays, the same from save to save."""

    size_bytes: int  # of the file
    payload_offsets: array[int]  # first byte of each payload in the file (`array('q')`), ascending, without overlap
    payload_lengths: array[int]  # bytes of each payload (`array('q')`)
    # File offsets of the uint32 (little endian) that take the CRC-32 of payload 0, then 1, ... (`array('q')`); the same
    # number for each, and each behind the end of its payload.
    crc_positions: array[int]
    # Number of each payload whose elements are several runs of its tensor, and where they lie in that: what they add to
    # the tensor's fingerprint is summed, too. Of others it follows from the CRC-32.
    strided: tuple[tuple[int, Stretch], ...] = ()
    # Numbers of the payloads that are longer than a block (`array('I')`).
    long_payloads: array[int] = field(init=False, compare=False)
    # For each of those, how many block boundaries lie inside it (`array('I')`).
    inner_blocks: array[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        payloads, positions = len(self.payload_offsets), len(self.crc_positions)
        if len(self.payload_lengths) != payloads or (positions % payloads if payloads else positions):
            raise ValueError(
                f"{payloads} payload offsets, {len(self.payload_lengths)} lengths and {positions} CRC positions do not "
                "go together"
            )
        long = array("I", [number for number, nbytes in enumerate(self.payload_lengths) if nbytes > BLOCK_BYTES])
        object.__setattr__(self, "long_payloads", long)
        counts = array("I", [inner_blocks(self.payload_lengths[number]) for number in long])
        object.__setattr__(self, "inner_blocks", counts)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of one save, as its writer gets it."""

    name: str  # inside the checkpoint directory
    image: FileImage  # its structure
    table_crc32: int = 0  # of the table in its integrity footer
    # CRC-32 of each serialized object in it, in the order of the file (`array('I')`).
    object_crcs: array[int] = field(default_factory=lambda: array("I"))
    buffer_offset: int = 0  # where its bytes begin in the staging buffer, a multiple of 4096; without meaning elsewhere


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What became of one file, with all of its checksums: what its rank sends to the coordinator."""

    name: str  # of the file
    size_bytes: int  # of the file, as finished
    table_crc32: int  # of the table in its integrity footer
    object_crcs: array[int]  # CRC-32 of each serialized object, in the order of the file (`array('I')`)
    crcs: array[int]  # CRC-32 of each payload (`array('I')`)
    long_payloads: array[int]  # numbers of the payloads that have cumulative CRCs (`array('I')`)
    inner_blocks: array[int]  # for each of those, how many (`array('I')`)
    blocks: array[int]  # cumulative CRC-32 at each block boundary inside each of those (`array('I')`)
    # Number of each payload that is several runs of its tensor, and what it adds to that tensor's fingerprint.
    parts: tuple[tuple[int, int], ...] = ()
    fill_s: float = 0.0  # seconds in the caller's `fill`
    crc_s: float = 0.0  # seconds of summing and patching, on the caller's thread
    write_s: float = 0.0  # seconds of writing, summed over the I/O threads, which run during the two above
    fsync_s: float = 0.0  # seconds of finishing the file (truncate, fsync, close)
    # The checksums are known, and the file ends with its integrity footer; not so of a file that a third-party callback
    # has written.
    has_footer: bool = True


class Window(NamedTuple):
    """Bytes `[start, stop)` of a file; `start` is a multiple of the window size."""

    start: int
    stop: int


def plan_windows(size_bytes: int, window_bytes: int = 8 * 1024 * 1024) -> Iterator[Window]:
    """Cut a file into windows of `window_bytes`, in file order; the last may be shorter."""
    for start in range(0, size_bytes, window_bytes):
        yield Window(start, min(start + window_bytes, size_bytes))


Fill = Callable[[Window, memoryview], None]


def check_results(planned: Sequence[PlannedFile], written: Sequence[WrittenFile]) -> None:
    """Raise `SaveError` unless every planned file was written, of its planned length, every payload summed."""
    got = [(file.name, file.size_bytes, len(file.crcs)) for file in written]
    expected = [
        (file.name, file.image.size_bytes, len(file.image.payload_offsets if result.has_footer else ()))
        for file, result in zip(planned, written, strict=False)
    ]
    if expected != got or len(planned) != len(written):
        raise SaveError(f"the writer's results are not what was planned: expected {expected}, got {got}")
