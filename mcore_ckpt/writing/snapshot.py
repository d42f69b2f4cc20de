"""One rank's writing during training: a snapshot is taken, and another process writes it.

The snapshot is a copy of the tensors in a staging buffer. `SaveOptions.writer` says which process writes it: one that
is kept for all saves and maps the buffer, or a child forked for this save.

A save that does not fit into the staging budget is passed through it window by window, which blocks the trainer for
the part that does not fit, at the disk's speed (`writer="persistent"` only).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import OptionError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.layout.buckets import WriteBucket
from mcore_ckpt.layout.file_image import PlannedFile, Window, plan_windows
from mcore_ckpt.layout.plans import GlobalPlan
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, Storage, align_up
from mcore_ckpt.writing.persistent_writer import fill_ring, shared_writer
from mcore_ckpt.writing.staging import BucketSource
from mcore_ckpt.writing.staging_buffers import BufferLease, StagingBuffer, lease_buffer
from mcore_ckpt.writing.supervised_child import Job
from mcore_ckpt.writing.writer_job import JobResult, Ring, WriterJob, run_job

_logger = logger_of(__name__)
# A ring of fewer windows would make the trainer and the device wait for each other.
_LEAST_SLOTS = 2
_told: set[str] = set()


def log_choice(buckets: Sequence[WriteBucket], options: SaveOptions) -> None:
    """Say once where the tensors are and which process writes them."""
    on_device = not all(tensor.is_cpu for bucket in buckets for tensor in bucket.tensor_data)
    where = "on a device, copied through pinned memory" if on_device else "in host memory"
    writer = "one writer process for all saves" if options.writer == "persistent" else "one forked child for each save"
    choice = f"async saves: tensors are {where}; snapshot: a reused staging buffer in shared memory; {writer}"
    if choice not in _told:
        _told.add(choice)
        _logger.info('%s (option: writer="%s")', choice, options.writer)


def start_writing(
    storage: Storage,
    buckets: Sequence[WriteBucket],
    options: SaveOptions,
    what: str,
    plan: GlobalPlan | None = None,
    started: Callable[[Job], None] = lambda _: None,
) -> Job:
    """Take the snapshot and start the writing; when this returns, the trainer may change its state. An error waits for
    `Job.result`, where all ranks are notified of it. `started` gets the job as soon as there is one.
    """
    try:
        return _copy_and_dispatch(storage, buckets, options, what, plan, started)
    except SaveError as error:  # the other ranks are on their way to the commit, where they are notified of it
        return Job.ended(what, error)
    except Exception as error:  # noqa: BLE001  (see above)
        wrapped = SaveError(f"{what}: the writing could not be started: {error}")
        wrapped.__cause__ = error
        return Job.ended(what, wrapped)


def _copy_and_dispatch(
    storage: Storage,
    buckets: Sequence[WriteBucket],
    options: SaveOptions,
    what: str,
    plan: GlobalPlan | None,
    started: Callable[[Job], None],
) -> Job:
    files = []
    total_bytes = 0
    for bucket in buckets:
        files.append(replace(bucket.file, buffer_offset=total_bytes))
        total_bytes += align_up(bucket.file.image.size_bytes)
    writer_job = WriterJob(
        storage=storage,
        files=tuple(files),
        direct=options.direct_io,
        fsync=options.fsync,
        io_threads=options.io_threads,
        piece_bytes=options.window_bytes,
        deadline_s=options.write_deadline_s,
        plan=plan,
    )
    lease = lease_buffer(total_bytes, options)
    try:
        if lease.budget_bytes < total_bytes:
            return _stream(writer_job, buckets, lease, total_bytes, options, what, started)
        preload_tensors(files, buckets, lease.buffer, total_bytes)
        job = _dispatch(writer_job, lease, options, what)
        started(job)
        lease.buffer.touch_meanwhile(lease.buffer.capacity_bytes)  # while the writer is busy with the device
        return job
    except BaseException:
        lease.abort()
        raise


def preload_tensors(
    files: Sequence[PlannedFile], buckets: Sequence[WriteBucket], buffer: StagingBuffer, total_bytes: int
) -> None:
    """Copy all buckets into a staging buffer, laid out as their files; where the last ones there had the same layout,
    objects and tensors only.
    """
    sources = [BucketSource(bucket) for bucket in buckets]
    on_device = any(source.on_device for source in sources)
    view = buffer.reserve(max(total_bytes, 1), touch=on_device)
    if on_device:
        buffer.pin()
    layouts = [bucket.layout for bucket in buckets]
    laid_out = buffer.contents == layouts
    buffer.contents = None
    for source, file in zip(sources, files, strict=True):
        part = view[file.buffer_offset : file.buffer_offset + align_up(file.image.size_bytes)]
        source.fill_buffer(part, laid_out, None if buffer.is_touched else buffer.write)
    buffer.contents = layouts


def _dispatch(writer_job: WriterJob, lease: BufferLease, options: SaveOptions, what: str) -> Job:
    if options.writer == "persistent":
        return shared_writer().submit(writer_job, lease.buffer.fd, lease.is_used_by)
    from mcore_ckpt.writing.forked_call import fork_writer

    with lease.buffer.lent() as fd:
        write = partial(_run_in_child, writer_job, fd, lease.buffer.capacity_bytes)
        return fork_writer(write, what, options.write_deadline_s, lease.is_used_by)


def _run_in_child(job: WriterJob, fd: int, nbytes: int) -> JobResult:
    from mcore_ckpt.writing.forked_call import report_progress

    # Mapped again: pages that are pinned for a device are not inherited by a forked child.
    return run_job(job, memoryview(mmap.mmap(fd, nbytes)), report_progress)


def _stream(
    writer_job: WriterJob,
    buckets: Sequence[WriteBucket],
    lease: BufferLease,
    total_bytes: int,
    options: SaveOptions,
    what: str,
    started: Callable[[Job], None],
) -> Job:
    """Pass a save that is larger than its budget through a ring of windows."""
    if options.writer == "fork":
        raise OptionError(
            f"the save has {total_bytes} bytes, the staging budget {lease.budget_bytes}: a forked writer cannot be"
            ' fed piece by piece; raise staging_budget_bytes, or use writer="persistent"'
        )
    began_s = time.perf_counter()
    sources = [BucketSource(bucket) for bucket in buckets]
    slot_bytes = min(options.window_bytes, lease.budget_bytes // _LEAST_SLOTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    ring = Ring(0, slot_bytes, lease.budget_bytes // slot_bytes)
    view = lease.buffer.reserve(ring.slots * slot_bytes)
    if any(source.on_device for source in sources):
        lease.buffer.pin()
    lease.buffer.contents = None
    job = _dispatch(replace(writer_job, ring=ring), lease, options, what)
    started(job)
    windows = (
        partial(_fill_slot, source, view, window)
        for source in sources
        for window in plan_windows(source.bucket.file.image.size_bytes, slot_bytes)
    )
    try:
        fill_ring(job, ring, windows)
    except BaseException as error:
        # Where the job has failed, its own error says why, and `Job.result` will raise it.
        if not (isinstance(error, SaveError) and job.poll()):
            raise  # and the job is given up, or it would wait for ever for windows that are not filled
    blocked_s = time.perf_counter() - began_s
    _logger.warning(
        "%s: %d bytes do not fit into the staging budget of %d bytes; training was blocked for %.2f s (%.2f GB/s)",
        what,
        total_bytes,
        lease.budget_bytes,
        blocked_s,
        total_bytes / 1e9 / max(blocked_s, 1e-9),
    )
    job.submitted_s = time.monotonic()  # the snapshot is complete only now
    return job


def _fill_slot(source: BucketSource, view: memoryview, window: Window, offset: int) -> None:
    source.fill(window.start, window.stop, view[offset : offset + window.stop - window.start])
