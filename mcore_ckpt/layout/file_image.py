"""What a writer needs to know of a file: its length, its payloads, where their checksums go; and what became of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mcore_ckpt.core.errors import SaveError

__all__ = [
    "FileImage",
    "Fill",
    "ImageResult",
    "Window",
    "check_results",
    "plan_windows",
]


@dataclass(frozen=True, slots=True)
class FileImage:
    """What has to be known of a file to sum and write it; plain arrays, cheap to pickle.

    Attributes:
        file_name: of the file, for results and messages.
        size_bytes: of the file.
        payload_offsets: first byte of each payload in the file (`array('q')`), ascending, without overlap.
        payload_lengths: bytes of each payload (`array('q')`).
        crc_positions: file offsets of the uint32 (little endian) that take the CRC-32 of payload 0, then 1, ...
            (`array('q')`); the same number for each, and each behind the end of its payload.
    """

    file_name: str = field(compare=False)
    size_bytes: int
    payload_offsets: array[int]
    payload_lengths: array[int]
    crc_positions: array[int]

    def __post_init__(self) -> None:
        payloads, positions = len(self.payload_offsets), len(self.crc_positions)
        if len(self.payload_lengths) != payloads or (positions % payloads if payloads else positions):
            raise ValueError(
                f"{self.file_name}: {payloads} payload offsets, {len(self.payload_lengths)} lengths and {positions} "
                "CRC positions do not go together"
            )


@dataclass(frozen=True, slots=True)
class ImageResult:
    """What became of one image.

    Attributes:
        file_name: the image's.
        size_bytes: of the file, as finished.
        crcs: CRC-32 of each payload (`array('I')`).
        blocks: running CRC-32 at each block boundary inside each payload that is longer than a block (`array('I')`).
        fill_s: seconds in the caller's `fill`.
        crc_s: seconds of summing and patching, on the caller's thread.
        write_s: seconds of writing, summed over the I/O threads; they run beside the two above.
        fsync_s: seconds of finishing the file (truncate, fsync, close).
        sealed: the sums are known, and the file ends with its seal; not where somebody else has written it.
    """

    file_name: str
    size_bytes: int
    crcs: array[int]
    blocks: array[int]
    fill_s: float
    crc_s: float
    write_s: float
    fsync_s: float
    sealed: bool = True


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes `[start, stop)` of an image, and the items that may have a byte in there.

    Attributes:
        start: file offset, a multiple of the window size.
        stop: file offset of the end, exclusive; the image's end in the last window.
        first_item: the first item whose payload, or what follows its payload, reaches into the window.
        stop_item: one past the last item whose payload, or what precedes its payload, reaches into the window. At the
            two ends the range may hold one item too many: what lies between two payloads belongs to both neighbours.
    """

    start: int
    stop: int
    first_item: int
    stop_item: int


def plan_windows(image: FileImage, window_bytes: int = 8 * 1024 * 1024) -> Iterator[Window]:
    """Cut an image into windows of `window_bytes`, in file order; the last may be shorter."""
    offsets = image.payload_offsets
    for start in range(0, image.size_bytes, window_bytes):
        stop = min(start + window_bytes, image.size_bytes)
        first = max(0, bisect_right(offsets, start) - 1)
        yield Window(start, stop, first, min(len(offsets), bisect_left(offsets, stop, lo=first) + 1))


Fill = Callable[[Window, memoryview], None]


def check_results(images: Sequence[FileImage], results: Sequence[ImageResult]) -> None:
    """Compare what was written with what was planned: every file, of its planned length, every payload summed.

    Raises:
        SaveError: they differ.
    """
    planned = [(image.file_name, image.size_bytes, len(image.payload_offsets)) for image in images]
    written = [(result.file_name, result.size_bytes, len(result.crcs)) for result in results]
    if planned != written:
        raise SaveError(f"the writer's results are not what was planned: expected {planned}, got {written}")
