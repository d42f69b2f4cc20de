"""What a writer does for one save, as plain data, and doing it: all files of a rank, or none.

The persistent writer process gets its jobs in messages, a forked child has one from its fork. Imports neither torch nor
numpy.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt.core.threads import Crew
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.layout.file_image import FileImage, Fill, PlannedFile, WrittenFile
from mcore_ckpt.layout.plans import GlobalPlan
from mcore_ckpt.storage.base import DirectIo, Storage, align_up
from mcore_ckpt.writing._image_writer import write_files


@dataclass(frozen=True, slots=True)
class Ring:
    """Part of a staging buffer through which a larger save is passed, window by window.

    Windows are numbered through all files of the job, in order; window k lies in slot `k % slots`.
    """

    offset: int  # of slot 0 in the staging buffer, bytes
    slot_bytes: int  # size of a slot and of a window, a multiple of 4096
    slots: int  # how many


@dataclass(frozen=True, slots=True)
class WriterJob:
    """What a writer process does for one save: all files, or none."""

    storage: Storage  # where to; pickled, so it holds paths and not open files
    files: tuple[PlannedFile, ...]  # what
    ring: Ring | None = None  # set if the files do not lie in the staging buffer as a whole
    direct: DirectIo = "auto"  # O_DIRECT, as in `SaveOptions.direct_io`
    fsync: bool = True  # make each file durable
    io_threads: int | None = None  # writes in flight at once; None: as many as the storage wants
    piece_bytes: int = 8 * 1024 * 1024  # size of one write from the staging buffer
    # Seconds without progress after which the writer counts as stuck; None waits for ever.
    deadline_s: float | None = None
    # Of a new structure, on the coordinator: its index is to be put together during the writing.
    plan: GlobalPlan | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job."""

    files: tuple[WrittenFile, ...]  # in the order of the job
    started_s: float  # when the writer began with it, on the clock of `time.monotonic()`, which all processes share
    finished_s: float  # when the last file was durable, on the same clock
    encoder: MetadataEncoder | None = None  # of the job's `plan`


def without_images(job: WriterJob) -> tuple[WriterJob, tuple[FileImage, ...]]:
    """A job without the structure of its files, which is the same from save to save; and that structure."""
    files = tuple(replace(file, image=_NO_IMAGE) for file in job.files)
    return replace(job, files=files), tuple(file.image for file in job.files)


def with_images(job: WriterJob, images: Sequence[FileImage]) -> WriterJob:
    """The inverse of `without_images`."""
    files = tuple(replace(file, image=image) for file, image in zip(job.files, images, strict=True))
    return replace(job, files=files)


_NO_IMAGE = FileImage(0, array("q"), array("q"), array("q"))


def run_job(
    job: WriterJob, buffer: memoryview, on_written: Callable[[int], None], fill: Fill | None = None
) -> JobResult:
    """Do a job, in the process that calls; `fill` puts the next window of a `Ring` into place, `on_written` is called
    on an I/O thread. `SaveError` names the file and the errno; no file stays then.
    """

    def write() -> list[WrittenFile]:
        files: list[tuple[PlannedFile, Fill | memoryview]] = []
        for file in job.files:
            stop = file.buffer_offset + align_up(file.image.size_bytes)
            files.append((file, fill or buffer[file.buffer_offset : stop]))
        return write_files(
            job.storage,
            files,
            window_bytes=(job.storage.write_bytes or job.piece_bytes) if job.ring is None else job.ring.slot_bytes,
            io_threads=job.io_threads,
            direct=job.direct,
            fsync=job.fsync,
            on_written=on_written,
        )

    return timed_result(write, job.plan)


def timed_result(write: Callable[[], Sequence[WrittenFile]], plan: GlobalPlan | None) -> JobResult:
    """Write, put the index of a new plan together meanwhile, and say when that was."""
    started_s = time.monotonic()
    if plan is None:
        return JobResult(tuple(write()), started_s, time.monotonic())
    with Crew(1, "mcore_ckpt-metadata") as crew:
        encoder = crew.submit(plan.encoder)
        files = tuple(write())
        return JobResult(files, started_s, time.monotonic(), crew.result(encoder))
