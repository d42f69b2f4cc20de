"""What a writer does for one save: all files of a rank, or none. As plain data, and done.

The persistent writer process does jobs that arrive in a message, a forked child one that it was forked with. Imports
neither torch nor numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mcore_ckpt.core.threads import Crew
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.layout.file_image import FileImage, Fill, ImageResult
from mcore_ckpt.layout.plans import TensorPlans
from mcore_ckpt.storage.base import DirectIo, Storage, align_up
from mcore_ckpt.writing._image_writer import write_files

__all__ = ["FileJob", "JobResult", "Ring", "WriterJob", "run_job", "timed_result"]


@dataclass(frozen=True, slots=True)
class Ring:
    """Part of a stage through which a save that is larger than the stage is passed, window by window.

    Windows are numbered through all files of the job, in order; window k lies in slot `k % slots`.

    Attributes:
        offset: of slot 0 in the stage, bytes.
        slot_bytes: size of a slot and of a window, a multiple of 4096.
        slots: how many.
    """

    offset: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class FileJob:
    """One file to write.

    Attributes:
        image: its layout.
        stage_offset: where its bytes begin in the stage, a multiple of 4096; without meaning in a job with a `Ring`.
    """

    image: FileImage
    stage_offset: int = 0


@dataclass(frozen=True, slots=True)
class WriterJob:
    """What a writer process does for one save: all files, or none.

    Attributes:
        storage: where to; pickled, so it holds paths and not open files.
        files: what.
        ring: set if the files do not lie in the stage as a whole.
        direct: O_DIRECT, as in `SaveOptions.direct_io`.
        fsync: make each file durable.
        io_threads: writes in flight at once.
        piece_bytes: size of one write from the stage.
        deadline_s: seconds without progress after which the writer counts as stuck; None waits for ever.
        plans: of a new structure, on the coordinator: `.metadata` is to be put together beside the writing.
    """

    storage: Storage
    files: tuple[FileJob, ...]
    ring: Ring | None = None
    direct: DirectIo = "auto"
    fsync: bool = True
    io_threads: int = 2
    piece_bytes: int = 8 * 1024 * 1024
    deadline_s: float | None = None
    plans: TensorPlans | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job.

    Attributes:
        files: by the order of the job.
        started_s: when the writer began with it, on the clock of `time.monotonic()`, which all processes share.
        finished_s: when the last file was durable, on the same clock.
        encoder: of the job's `plans`.
    """

    files: tuple[ImageResult, ...]
    started_s: float
    finished_s: float
    encoder: MetadataEncoder | None = None


def run_job(
    job: WriterJob, stage: memoryview, on_written: Callable[[int], None], fill: Fill | None = None
) -> JobResult:
    """Do a job, in the process that calls.

    Args:
        job: what to write.
        stage: this process's mapping of the stage.
        on_written: called with a number of bytes after each write, on an I/O thread.
        fill: of a job with a `Ring`: puts the next window there.

    Raises:
        SaveError: the device or file system failed; names the file and the errno. No file stays.
    """

    def write() -> list[ImageResult]:
        files: list[tuple[FileImage, Fill | memoryview]] = []
        for file in job.files:
            stop = file.stage_offset + align_up(file.image.size_bytes)
            files.append((file.image, fill or stage[file.stage_offset : stop]))
        return write_files(
            job.storage,
            files,
            window_bytes=job.piece_bytes if job.ring is None else job.ring.slot_bytes,
            io_threads=job.io_threads,
            direct=job.direct,
            fsync=job.fsync,
            on_written=on_written,
        )

    return timed_result(write, job.plans)


def timed_result(write: Callable[[], Sequence[ImageResult]], plans: TensorPlans | None) -> JobResult:
    """Write, put `.metadata` together beside it if there are plans, and say when that was."""
    started_s = time.monotonic()
    files, encoder = encoded_beside(plans, write)
    return JobResult(tuple(files), started_s, time.monotonic(), encoder)


T = TypeVar("T")


def encoded_beside(plans: TensorPlans | None, write: Callable[[], T]) -> tuple[T, MetadataEncoder | None]:
    """Call `write`, and make the encoder of `plans`, if there are any, on another thread meanwhile.

    Raises:
        Exception: what `write` raises, or else what making the encoder does.
    """
    if plans is None:
        return write(), None
    with Crew(1, "mcore_ckpt-metadata") as crew:
        encoder = crew.submit(plans.encoder)
        return write(), crew.result(encoder)
