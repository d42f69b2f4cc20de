"""What a strategy keeps from one save to the next, and what a rank tells of one save.

One save of all ranks, from the plan to the commit.

    prepare   coordinator opens the directory; if any rank's structure is new, all lay out and the coordinator checks
    write     in line, or `start`: snapshot into the stage, and a writer process goes on alone
    commit    every rank's results are compared with its plan; the coordinator publishes `.metadata`; or all raise

Layout and plan depend on the structure only and are kept in a `Structure`, so that a further save of the same model
costs one exchange of a few bytes in `prepare`, and none of the plans travels again.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.ranks import RankGroup, reached_every_rank
from mcore_ckpt.directory.commit import Target, abandon, discard, is_in_force, open_target, publish
from mcore_ckpt.format.index import ObjectEntry
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.layout.buckets import PlacedObjects, RankLayout, TensorSpec, lay_out_rank
from mcore_ckpt.layout.file_image import ImageResult
from mcore_ckpt.layout.plan_check import check_plans
from mcore_ckpt.layout.plans import LocalPlan, TensorPlans, encoded_beside
from mcore_ckpt.layout.shards import noted_shapes
from mcore_ckpt.layout.torch_classes import local_plans_as_dcp
from mcore_ckpt.save._async_save import AsyncSave, SkippedSave, WrittenSave, log_choice, start_writing
from mcore_ckpt.save._report import FileReport, SaveReport, Span, write_trace
from mcore_ckpt.save.async_queue import SaveCall
from mcore_ckpt.save.rank_state import RankState
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.writing.in_line import write_in_line
from mcore_ckpt.writing.stage_pool import is_busy
from mcore_ckpt.writing.staging import BucketSource

__all__ = [
    "BucketWriter",
    "Planned",
    "SaveTransaction",
    "Structure",
    "Written",
]


@dataclass(slots=True)
class Planned:
    """What the coordinator knows of all ranks' tensors.

    Attributes:
        plans: by rank, checked.
        tensors: what `.metadata` is made from.
        encoder: that, made; None until some save's writer, or commit, has done it.
    """

    plans: list[LocalPlan]
    tensors: TensorPlans
    encoder: MetadataEncoder | None = None

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and length in bytes of all ranks' files, by name."""
        return sorted(
            (name, size) for plan in self.plans for name, size in zip(plan.files, plan.file_bytes, strict=True)
        )

    @property
    def unencoded(self) -> TensorPlans | None:
        """What a writer has to make the encoder from; None if there is one."""
        return self.tensors if self.encoder is None else None

    def metadata_encoder(self, made: MetadataEncoder | None) -> MetadataEncoder:
        """The encoder: the one at hand, or `made` (by the save's writer), or made here and now."""
        if self.encoder is None:
            self.encoder = made or self.tensors.encoder()
        return self.encoder


@dataclass(slots=True)
class Structure:
    """What one strategy keeps between its saves.

    Attributes:
        layout: this rank's files.
        planned: on the coordinator, every rank's plan.
        reused: the last save needed no planning.
        shards: of each shard of the last save, in order, what its specification follows from, and that. To compare
            takes a fraction of the time of working it out.
        laid_out_for: rank and number of ranks when it was laid out: file names and plans are of those. A restart inside
            the process may give it another place.
    """

    layout: RankLayout | None = None
    planned: Planned | None = None
    reused: bool = False
    shards: list[tuple[tuple[Any, ...], TensorSpec]] = field(default_factory=list)
    laid_out_for: tuple[int, int] | None = None

    def layout_for(self, rank: int, ranks: int) -> RankLayout | None:
        """The layout, if there is one and it was made for this rank among this number of ranks."""
        return self.layout if self.laid_out_for == (rank, ranks) else None


@dataclass(slots=True)
class Written:
    """What one rank tells the coordinator after its writing."""

    objects: tuple[ObjectEntry, ...]
    files: tuple[FileReport, ...]
    phases_s: dict[str, float] = field(default_factory=dict)


_logger = logging.getLogger(__name__)


class BucketWriter(Protocol):
    """Somebody else's way of writing a rank's buckets (`megatron/_replaced.py`)."""

    def __call__(
        self, directory: Path, layout: RankLayout, placed: PlacedObjects, state: RankState, options: SaveOptions, /
    ) -> list[ImageResult]:
        """Write every bucket of `layout` into `directory`, and return what was written, in the layout's order."""
        ...


class SaveTransaction:
    """One save into one directory. Every rank of the group makes one and calls the same methods in the same order.

    Args:
        directory: of the checkpoint.
        group: the ranks that save.
        options: see `SaveOptions`.
        structure: what earlier saves of the same strategy found out; updated.
        bucket_writer: writes the buckets instead of this package, in line.
    """

    # Saves of this process that are not committed, by directory: two at once would take each other's files for rubbish.
    _running: weakref.WeakValueDictionary[str, SaveTransaction] = weakref.WeakValueDictionary()

    def __init__(
        self,
        directory: Path,
        group: RankGroup,
        options: SaveOptions,
        structure: Structure,
        bucket_writer: BucketWriter | None = None,
    ) -> None:
        self.directory = directory.absolute()  # the trainer may change its working directory before the commit
        self.options = options
        self.call: SaveCall | None = None
        self.skipped = False
        self._group = group
        self._structure = structure
        self._bucket_writer = bucket_writer
        self._planned: Planned | None = None
        self._storage = LocalStorage(self.directory)
        self._claim = os.path.realpath(directory)
        self._target: Target | None = None
        self._layout: RankLayout | None = None
        self._placed: PlacedObjects | None = None
        self._sources: list[BucketSource] = []
        self._results: Callable[[], Sequence[ImageResult]] | None = None
        self._write_buckets: Callable[[], list[ImageResult]] = self._write_sources
        self._spans: list[Span] = []
        self._files: tuple[FileReport, ...] = ()
        self._began = time.monotonic()
        self._commits = False
        self._publishes = False

    # -- plan ----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        collect: Callable[[], RankState],
        *,
        thread_count: int,
        separation_hint: str | None = None,
        may_skip: bool = False,
    ) -> RankState | None:
        """Plan the save on all ranks.

        Args:
            collect: tells what this rank writes; whatever it raises, all ranks hear of.
            thread_count: files to write, at most.
            separation_hint: prefix of keys that get files of their own.
            may_skip: an async save, which `when_busy="skip"` leaves out if any rank is still writing the one before.

        Returns:
            What this rank writes; None if the save is left out.

        Raises:
            CheckpointExistsError: see `SaveOptions.on_existing`.
            PlanError: the ranks' shards do not make up the tensors; nothing was written.
            SaveError: the directory cannot be used.
        """
        started = time.monotonic()
        known = self._structure.layout_for(self._group.rank, self._group.size)
        state: RankState | Exception
        try:
            state = collect()
        except Exception as error:  # noqa: BLE001  (raised in `look`, where the other ranks hear of it)
            state = error
        if may_skip and self.options.when_busy == "skip":
            # Asked before anything is touched: a save that is left out leaves no trace in its directory.
            nbytes = 0 if isinstance(state, Exception) else state.nbytes
            self.skipped = self._group.any(is_busy(nbytes, self.options))
            if self.skipped:
                return None

        def look() -> tuple[int, bool]:
            if isinstance(state, Exception):
                raise state
            if self._group.is_coordinator:
                self._claim_directory()
                self._target = open_target(self._storage, self.options)
            unchanged = (
                known is not None
                and known.separation_hint == separation_hint
                and known.specs == tuple(state.specs)
                and (placed := known.place_objects(state.object_keys, state.object_bytes)) is not None
            )
            if unchanged:
                self._placed = placed
            return (-1 if self._target is None else self._target.first_file), unchanged

        try:
            answers = self._group.run("prepare the save", look, wrap=SaveError)
            assert isinstance(state, RankState)
            first_file = answers[0][0]
            unchanged = all(same for _, same in answers) and known is not None and known.first_file == first_file
            if not unchanged:
                self._lay_out(state, first_file, thread_count, separation_hint)
        except BaseException:
            self._abandon()
            raise
        self._structure.reused = unchanged
        # Kept here too: the next save may lay out anew before this one is committed.
        self._layout = self._structure.layout
        self._planned = self._structure.planned
        assert self._layout is not None
        assert self._placed is not None
        self._sources = state.sources(self._layout, self._placed)
        self._took("plan", started)
        if self._bucket_writer is not None:
            self._write_buckets = partial(
                self._bucket_writer, self.directory, self._layout, self._placed, state, self.options
            )
        return state

    def _lay_out(self, state: RankState, first_file: int, thread_count: int, separation_hint: str | None) -> None:
        self._structure.layout = None
        specs, keys, sizes = state.specs, state.object_keys, state.object_bytes

        def plan() -> tuple[bytes, dict[str, tuple[int, ...]]]:
            layout = lay_out_rank(
                specs,
                keys,
                sizes,
                rank=self._group.rank,
                first_file=first_file,
                thread_count=thread_count,
                separation_hint=separation_hint,
            )
            self._placed = layout.place_objects(keys, sizes)
            if self._placed is None:
                raise PlanError(f"no room for the objects {keys[:5]} in the files planned for them")
            self._layout = layout
            own_shapes = {spec.key: spec.original_shape for spec in specs if spec.original_shape is not None}
            return layout.plan.encode(), own_shapes

        encoded = self._group.run_gather("plan the save", plan, wrap=SaveError)

        def check() -> None:
            assert encoded is not None
            plans = [LocalPlan.decode(data) for data, _ in encoded]
            check_plans(plans)
            notes = noted_shapes(own_shapes for _, own_shapes in encoded)
            self._structure.planned = Planned(plans, TensorPlans(tuple(data for data, _ in encoded), notes))

        self._group.run_on_coordinator("check the plan", check, wrap=SaveError)
        self._structure.layout = self._layout
        self._structure.laid_out_for = (self._group.rank, self._group.size)

    def _claim_directory(self) -> None:
        if self._claim in self._running:
            raise SaveError(
                f"{self.directory}: an earlier save into this directory is not finalized yet;"
                " call maybe_finalize_async_calls(blocking=True) before saving there again"
            )
        self._running[self._claim] = self

    def _release_directory(self) -> None:
        if self._running.get(self._claim) is self:  # a save that was refused must not release the one in progress
            del self._running[self._claim]

    # -- write ---------------------------------------------------------------------------------------------------

    def write_in_line(self) -> None:
        """Write this rank's files now. An error waits for `commit`, where every rank hears of it."""
        started = time.monotonic()
        outcome: list[ImageResult] | Exception
        try:
            outcome, made = encoded_beside(self._unencoded(), self._write_buckets)
            if self._planned is not None:
                self._planned.encoder = self._planned.encoder or made
        except Exception as error:  # noqa: BLE001  (raised by `commit`, where the other ranks hear of it)
            outcome = error
        self._sources = []
        self._took("write", started)

        def results() -> Sequence[ImageResult]:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        self._results = results

    def _unencoded(self) -> TensorPlans | None:
        """On the coordinator, what `.metadata` is still to be made from, beside the writing."""
        return None if self._planned is None else self._planned.unencoded

    def _write_sources(self) -> list[ImageResult]:
        return write_in_line(self._storage, self._sources, self.options)

    def start(self) -> SaveCall:
        """Take the snapshot, let a writer process go on alone, and return. An error waits for `commit`."""
        started = time.monotonic()
        if self.skipped:
            self.call = SkippedSave(str(self.directory))
            return self.call
        if self._bucket_writer is not None:
            self.write_in_line()
            assert self._results is not None
            self.call = WrittenSave(self._results, self.options, str(self.directory))
            return self.call
        if self._group.is_coordinator:
            log_choice(self._sources, self.options)
        # One bar on a terminal is enough: the coordinator's.
        options = replace(self.options, progress=self.options.progress and self._group.is_coordinator)
        writing = start_writing(self._storage, self._sources, options, str(self.directory), self._unencoded())
        writing.on_abort = self._abandon_uncommitted
        self._sources = []
        self._results = writing.results
        self.call = writing
        handed_over = writing.handed_over or (time.monotonic(), time.monotonic())
        self._spans += [Span("stage", started, handed_over[0]), Span("hand-over", *handed_over)]
        return writing

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self) -> SaveReport:
        """Wait for this rank's writing, then publish the checkpoint; on every rank, or on none.

        Returns:
            What the save took: on the coordinator of all ranks, elsewhere of this rank.

        Raises:
            SaveError: any rank failed; the same on every rank. Nothing was published.
        """
        if self.skipped:
            raise SaveError(f"{self.directory}: the save was skipped, the one before was still being written")
        self._commits = True
        started = time.monotonic()
        try:
            gathered = self._group.run_gather("write the data files", self._finished, wrap=SaveError)
            waited = time.monotonic()
            self._took("gather", started)
            self._publishes = True
            self._group.run_on_coordinator("publish the checkpoint", lambda: self._publish(gathered), wrap=SaveError)
        except BaseException as error:
            # Only when every rank knows that nothing was published may files go; a lost contact says nothing.
            if self._group.size == 1 or reached_every_rank(error):
                self._abandon()
            self._release_directory()
            raise
        self._took("commit", waited)
        self._release_directory()
        report = self._report(gathered)
        try:
            if self.options.trace_path is not None:
                path = Path(self.options.trace_path)
                write_trace(path, str(self.directory), self._group.rank, self._spans, self._files)
            if self.options.on_timings is not None:
                self.options.on_timings({**report.as_dict(), "rank": self._group.rank})
        except Exception:  # the checkpoint is published: one rank alone must not call that a failure
            _logger.exception("%s: the save was well done, but not all could be told of it", self.directory)
        if self._group.is_coordinator:
            _logger.log(report.log_level, "%s", report)
        return report

    def _took(self, name: str, started_s: float) -> None:
        self._spans.append(Span(name, started_s, time.monotonic()))

    def _report(self, gathered: list[Written] | None) -> SaveReport:
        """On the coordinator of all ranks, the slowest rank's phases; elsewhere of this rank alone."""
        phases_s = {span.name: span.seconds for span in self._spans}
        files = self._files
        if gathered is not None:
            for written in gathered:
                for name, seconds in written.phases_s.items():
                    phases_s[name] = max(phases_s.get(name, 0.0), seconds)
            files = tuple(file for written in gathered for file in written.files)
        return SaveReport(str(self.directory), time.monotonic() - self._began, phases_s, files)

    def _finished(self) -> Written:
        assert self._results is not None
        assert self._layout is not None
        assert self._placed is not None
        results = self._results()
        self._results = None
        files = []
        for bucket, result in zip(self._layout.buckets, results, strict=True):
            on_disk = self._storage.size(bucket.file_name)
            if on_disk != bucket.image.size_bytes:
                raise SaveError(
                    f"{self._storage.path(bucket.file_name)}: {bucket.image.size_bytes} bytes were planned,"
                    f" the file has {on_disk}"
                )
            files.append(
                FileReport(self._group.rank, result.file_name, result.size_bytes, result.write_s, result.fsync_s)
            )
        self._files = tuple(files)
        if isinstance(self.call, AsyncSave) and self.call.written_between is not None:
            self._spans.append(Span("writer", *self.call.written_between))
        return Written(self._placed.entries, self._files, {span.name: span.seconds for span in self._spans})

    def _publish(self, gathered: list[Written] | None) -> None:
        assert gathered is not None
        assert self._target is not None
        assert self._planned is not None
        objects: dict[str, ObjectEntry] = {}
        for rank, written in enumerate(gathered):
            for entry in written.objects:
                if entry.fqn in objects:
                    raise PlanError(f"{entry.fqn}: rank {rank} writes an object that another rank has written, too")
                objects[entry.fqn] = entry
        planned = self._planned.files
        done = sorted((file.file_name, file.size_bytes) for written in gathered for file in written.files)
        if planned != done:
            raise SaveError(f"{self.directory}: the files planned are {planned}, the files written {done}")
        local_plans = None
        if self.options.keep_local_plans:
            local_plans = local_plans_as_dcp(self._planned.plans, [[e.fqn for e in w.objects] for w in gathered])
        encoder = self._planned.metadata_encoder(self.call.encoder if isinstance(self.call, AsyncSave) else None)
        content = encoder.encode(
            objects,
            storage_meta={"checkpoint_id": str(self.directory), "save_id": str(uuid.uuid4())},
            local_plans=local_plans,
        )
        common = any(key.startswith("common_state/") for key in objects)
        publish(self._storage, self._target, content, has_common_state=common)

    def _abandon_uncommitted(self) -> None:
        """The queue gives the save up. Once `commit` has begun, only that knows whether the files may go: a callback
        that fails after the commit, or contact lost in the midst of it, must not take a published checkpoint apart.
        """
        if not self._commits:
            self._abandon(others_clean_up=self._group.size == 1)  # a queue may also be closed on one rank alone

    def _abandon(self, others_clean_up: bool = True) -> None:
        """Remove what this rank wrote of a save that has failed."""
        files = [] if self._layout is None else [bucket.file_name for bucket in self._layout.buckets]
        all_files = [name for name, _ in self._planned.files] if self._planned is not None else files
        if self._publishes and is_in_force(self._storage, all_files):
            _logger.warning("%s: the save was interrupted, but the checkpoint is published", self.directory)
        else:
            discard(self._storage, files)
            if self._target is not None:
                abandon(self._storage, self._target, others_clean_up=others_clean_up)
        self._release_directory()
