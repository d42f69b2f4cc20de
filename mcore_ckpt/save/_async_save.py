"""One rank's writing: in the trainer, or from a snapshot by another process during training.

The snapshot is a copy of the tensors in a staging buffer. `SaveOptions.writer` says which process writes it: one that
is kept for all saves and maps the buffer, or a child forked for this save.

A save that does not fit into the staging budget is passed through it window by window, which blocks the trainer for
the part that does not fit, at the disk's speed (`writer="persistent"` only).
"""

from __future__ import annotations

import logging
import mmap
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from mcore_ckpt.core.console import WaitingBar
from mcore_ckpt.core.errors import OptionError, SaveError
from mcore_ckpt.core.failures import attempt, value_of
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.layout.file_image import FileImage, ImageResult, check_results, plan_windows
from mcore_ckpt.layout.plans import TensorPlans
from mcore_ckpt.save.async_queue import SaveCall
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, Storage, align_up
from mcore_ckpt.writing.forked_call import fork_writer, report_progress
from mcore_ckpt.writing.persistent_writer import shared_writer
from mcore_ckpt.writing.stage_pool import StageLease, lease_stage
from mcore_ckpt.writing.staging import BucketSource
from mcore_ckpt.writing.supervised_child import Job
from mcore_ckpt.writing.writer_job import FileJob, JobResult, Ring, WriterJob, run_job, timed_result

__all__ = ["AsyncSave", "EndedWriting", "SkippedSave", "Writing", "log_choice", "start_writing", "write_now"]

_logger = logging.getLogger(__name__)
# A ring of fewer windows would make the trainer and the device wait for each other.
_LEAST_SLOTS = 2
_told: set[str] = set()
# How often a person who waits sees the bar move.
_BAR_PERIOD_S = 0.2


class Writing(SaveCall):
    """One rank's writing, in progress or done; the transaction that began it commits it.

    Attributes:
        on_abort: called when the queue gives the save up.
        failure: what `results` has raised; None if it has not, or has not been asked.
        handed_over: when the snapshot was handed to the writer, or the writer forked: begin and end; None where the
            two cannot be told apart.
    """

    def __init__(self, options: SaveOptions, what: str) -> None:
        self.on_failure = options.on_failure
        self.what = what
        self.on_abort: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self.handed_over: tuple[float, float] | None = None

    @abstractmethod
    def results(self) -> JobResult:
        """What was written; waits for it.

        Raises:
            SaveError: the writing failed, the writer died, or what it wrote is not what was planned.
        """

    def abort(self) -> None:
        if self.on_abort is not None:
            self.on_abort()


class AsyncSave(Writing):
    """Writing by another process."""

    def __init__(
        self,
        handle: Job,
        images: Sequence[FileImage],
        lease: StageLease | None,
        options: SaveOptions,
        what: str,
    ) -> None:
        super().__init__(options, what)
        self._handle = handle
        self._images = list(images)
        self._lease = lease
        self._progress = WaitingBar(what, sum(image.size_bytes for image in images), options.progress)

    def poll(self) -> bool:
        return self._look(self._handle.poll())

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._progress:
            until_s = None if timeout_s is None else time.monotonic() + timeout_s
            while True:
                left_s = _BAR_PERIOD_S if until_s is None else min(_BAR_PERIOD_S, until_s - time.monotonic())
                ended = self._handle.wait(max(0.0, left_s))
                self._progress.show(self._handle.written_bytes())
                if ended or (until_s is not None and time.monotonic() >= until_s):
                    return self._look(ended)

    def _look(self, ended: bool) -> bool:
        if ended:
            self.results()
        return ended

    def results(self) -> JobResult:
        self._handle.wait()
        if self._lease is not None:
            self._lease.give_back()
        try:
            result: JobResult = self._handle.result()
            check_results(self._images, result.files)
        except BaseException as error:
            self.failure = error
            raise
        return result

    def abort(self) -> None:
        self._handle.abort()
        if self._lease is not None:
            self._lease.give_back()
        super().abort()

    def elsewhere(self) -> Callable[[], None]:
        return self._handle.watch().wait


class EndedWriting(Writing):
    """Writing that was done, or had failed, when the call returned. Its error waits until all ranks hear of it."""

    def __init__(self, outcome: JobResult | BaseException, options: SaveOptions, what: str) -> None:
        super().__init__(options, what)
        self._outcome = outcome
        self.failure = outcome if isinstance(outcome, BaseException) else None

    def poll(self) -> bool:
        self.results()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.poll()

    def results(self) -> JobResult:
        return value_of(self._outcome)


class SkippedSave(SaveCall):
    """A save that is not made, since the one before is still in the writing (`when_busy="skip"`)."""

    skipped = True

    def __init__(self, what: str) -> None:
        self.what = what

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def abort(self) -> None:
        """There is nothing to stop."""


def write_now(
    write: Callable[[], Sequence[ImageResult]], options: SaveOptions, what: str, plans: TensorPlans | None
) -> EndedWriting:
    """Write this rank's files before the call returns; args and errors as in `start_writing`."""
    return EndedWriting(attempt(partial(timed_result, write, plans)), options, what)


def log_choice(sources: Sequence[BucketSource], options: SaveOptions) -> None:
    """Say once where the tensors are and which process writes them."""
    where = "on a device, copied through pinned memory" if any(s.on_device for s in sources) else "in host memory"
    writer = "one writer process for all saves" if options.writer == "persistent" else "one forked child for each save"
    choice = f"async saves: tensors are {where}; snapshot: a reused staging buffer in shared memory; {writer}"
    if choice not in _told:
        _told.add(choice)
        _logger.info('%s (option: writer="%s")', choice, options.writer)


def start_writing(
    storage: Storage,
    sources: Sequence[BucketSource],
    options: SaveOptions,
    what: str,
    plans: TensorPlans | None = None,
    started: Callable[[Writing], None] = lambda _: None,
) -> Writing:
    """Take the snapshot and start the writing. When this returns, the trainer may change its state.

    Args:
        storage: the checkpoint's directory.
        sources: this rank's buckets.
        options: see `SaveOptions`.
        what: the save, for messages.
        plans: of a new structure, on the coordinator, for the writer to put `.metadata` together.
        started: called with the save in progress as soon as it is one, so that whoever is interrupted can give it up.

    Returns:
        The save in progress. An error is kept for its `results`, where all ranks hear of it.
    """
    try:
        return _stage_and_start(storage, sources, options, what, plans, started)
    except Exception as error:  # noqa: BLE001  (the other ranks are on their way to the commit and have to hear of it)
        wrapped = (
            error if isinstance(error, SaveError) else SaveError(f"{what}: the writing could not be started: {error}")
        )
        if wrapped is not error:
            wrapped.__cause__ = error
        return EndedWriting(wrapped, options, what)


def _stage_and_start(
    storage: Storage,
    sources: Sequence[BucketSource],
    options: SaveOptions,
    what: str,
    plans: TensorPlans | None,
    started: Callable[[Writing], None],
) -> AsyncSave:
    images = [source.layout.image for source in sources]
    offsets = []
    total_bytes = 0
    for image in images:
        offsets.append(total_bytes)
        total_bytes += align_up(image.size_bytes)
    lease = lease_stage(total_bytes, options)
    try:
        if lease.budget_bytes < total_bytes:
            save = _stream(storage, sources, options, what, lease, total_bytes, plans)
            started(save)
            return save
        on_device = any(source.on_device for source in sources)
        view = lease.stage.reserve(max(total_bytes, 1), touch=on_device)
        if on_device:
            lease.stage.pin()
        layouts = [source.layout for source in sources]
        laid_out = lease.stage.contents == layouts
        lease.stage.contents = None
        for source, offset in zip(sources, offsets, strict=True):
            piece = view[offset : offset + align_up(source.layout.image.size_bytes)]
            source.fill_stage(piece, laid_out, None if lease.stage.is_touched else lease.stage.write)
        lease.stage.contents = layouts
        files = tuple(FileJob(image, offset) for image, offset in zip(images, offsets, strict=True))
        job = _job(storage, files, options, plans)
        handle: Job
        staged = time.monotonic()
        if options.writer == "fork":
            with lease.stage.lent() as fd:
                write = partial(_run_staged, job, fd, lease.stage.capacity_bytes)
                handle = fork_writer(write, what, options.write_deadline_s, lease.stage_is_used_by)
        else:
            handle = shared_writer().submit(job, lease.stage.fd, lease.stage_is_used_by)
        save = AsyncSave(handle, images, lease, options, what)
        save.handed_over = (staged, time.monotonic())
        started(save)
        lease.stage.touch_meanwhile()
        return save
    except BaseException:
        lease.abort()
        raise


def _run_staged(job: WriterJob, fd: int, nbytes: int) -> JobResult:
    # Mapped anew: pages that are pinned for a device are not inherited by a forked child.
    return run_job(job, memoryview(mmap.mmap(fd, nbytes)), report_progress)


def _job(
    storage: Storage,
    files: tuple[FileJob, ...],
    options: SaveOptions,
    plans: TensorPlans | None,
    ring: Ring | None = None,
) -> WriterJob:
    return WriterJob(
        storage=storage,
        files=files,
        ring=ring,
        direct=options.direct_io,
        fsync=options.fsync,
        io_threads=options.io_threads,
        piece_bytes=options.window_bytes,
        deadline_s=options.write_deadline_s,
        plans=plans,
    )


def _stream(
    storage: Storage,
    sources: Sequence[BucketSource],
    options: SaveOptions,
    what: str,
    lease: StageLease,
    total_bytes: int,
    plans: TensorPlans | None,
) -> AsyncSave:
    """Pass a save that is larger than its budget through a ring of windows."""
    if options.writer == "fork":
        raise OptionError(
            f"the save has {total_bytes} bytes, the staging budget {lease.budget_bytes}: a forked writer cannot be"
            ' fed piece by piece; raise staging_budget_bytes, or use writer="persistent"'
        )
    started = time.perf_counter()
    slot_bytes = min(options.window_bytes, lease.budget_bytes // _LEAST_SLOTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    slots = lease.budget_bytes // slot_bytes
    ring = Ring(0, slot_bytes, slots)
    view = lease.stage.reserve(slots * slot_bytes)
    if any(source.on_device for source in sources):
        lease.stage.pin()
    lease.stage.contents = None
    images = [source.layout.image for source in sources]
    files = tuple(FileJob(image) for image in images)
    job = _job(storage, files, options, plans, ring)
    handle = shared_writer().submit(job, lease.stage.fd, lease.stage_is_used_by)
    number = 0
    try:
        for source in sources:
            for window in plan_windows(source.layout.image, slot_bytes):
                handle.acquire_window(number)
                slot = number % slots * slot_bytes
                source.fill(window.start, window.stop, view[slot : slot + window.stop - window.start])
                handle.window_ready(number)
                number += 1
    except BaseException as error:
        # Where the job has failed, its own error says why, and `results` will raise it.
        if not (isinstance(error, SaveError) and handle.poll()):
            raise  # and the job is given up, or it would wait for ever for windows that nobody fills
    blocked_s = time.perf_counter() - started
    _logger.warning(
        "%s: %d bytes do not fit into the staging budget of %d bytes; training was blocked for %.2f s (%.2f GB/s)",
        what,
        total_bytes,
        lease.budget_bytes,
        blocked_s,
        total_bytes / 1e9 / max(blocked_s, 1e-9),
    )
    return AsyncSave(handle, images, lease, options, what)
