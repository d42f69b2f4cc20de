"""Write a rank's buckets, in the process that calls: the trainer's in a synchronous save, or a forked child."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.layout.file_image import FileImage, ImageResult, Window
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.writing.image_writer import ImageWriter, WindowPool
from mcore_ckpt.writing.staging import BucketSource

__all__ = [
    "check_results",
    "write_in_line",
]


# Three windows: one is being filled, one written, one waits; more would not make the device busier.
_WINDOWS = 3


_free_pools: dict[int, list[WindowPool]] = {}


_pools_lock = threading.Lock()


@contextmanager
def _window_pool(window_bytes: int) -> Iterator[WindowPool]:
    """A pool of window buffers, kept for the next save of this process."""
    with _pools_lock:
        kept = _free_pools.setdefault(window_bytes, [])
        pool = kept.pop() if kept else WindowPool(window_bytes, _WINDOWS)
    try:
        yield pool
    finally:
        with _pools_lock:
            kept.append(pool)


def write_in_line(
    storage: Storage,
    sources: Sequence[BucketSource],
    options: SaveOptions,
    on_written: Callable[[int], None] | None = None,
) -> list[ImageResult]:
    """Write the files of a rank and make them durable; all of them, or none stays.

    Args:
        storage: the checkpoint's directory.
        sources: the buckets.
        options: `io_threads`, `window_bytes`, `direct_io` and `fsync` matter here.
        on_written: called with a number of bytes after each write, on an I/O thread.

    Raises:
        SaveError: the device or file system failed; names the file and the errno.
    """
    with (
        _window_pool(options.window_bytes) as pool,
        ImageWriter(
            io_threads=options.io_threads,
            pool=pool,
            fsync=options.fsync,
            on_written=on_written,
            deadline_s=options.write_deadline_s,
        ) as images,
    ):
        for source in sources:
            image = source.layout.image
            writer = storage.open_writer(image.file_name, size_bytes=image.size_bytes, direct=options.direct_io)
            images.write_windows(writer, image, _filler(source))
    check_results([source.layout.image for source in sources], images.results)
    return images.results


def _filler(source: BucketSource) -> Callable[[Window, memoryview], None]:
    def fill(window: Window, view: memoryview) -> None:
        source.fill(window.start, window.stop, view)

    return fill


def check_results(images: Sequence[FileImage], results: Sequence[ImageResult]) -> None:
    """Compare what was written with what was planned: every file, of its planned length, every payload summed.

    Raises:
        SaveError: they differ.
    """
    planned = [(image.file_name, image.size_bytes, len(image.payload_offsets)) for image in images]
    written = [(result.file_name, result.size_bytes, len(result.crcs)) for result in results]
    if planned != written:
        raise SaveError(f"the writer's results are not what was planned: expected {planned}, got {written}")
