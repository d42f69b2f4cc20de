"""One save of all ranks: a sharded state dict comes in, a published checkpoint goes out, or none at all.

    state      each rank's main replicas, as specifications (`rank_state.py`)
    directory  locked and opened by the coordinator
    plan       layout of every file, checked by the coordinator; or that of the save before (`_planning.py`)
    writing    by this process, or from a snapshot by another one (`save/staging.py`)
    commit     every rank's results are compared with its plan; the coordinator publishes `.metadata`; or all raise

`begin_save` goes as far as the writing; `SaveTransaction.commit` does the rest, later if the writing is asynchronous.
What fails on one rank alone is carried as a value to the next exchange, where all ranks raise it.
"""

from __future__ import annotations

import functools
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import PlanError, SaveError, attempt, value_of
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import collector_paused, interruptible, together
from mcore_ckpt.core.ranks import RankGroup, interrupts_wait_for_others, reached_every_rank
from mcore_ckpt.directory.commit import note_name
from mcore_ckpt.directory.in_force import is_in_force
from mcore_ckpt.directory.publish import (
    Target,
    check_files,
    common_file_of_save,
    discard,
    give_back,
    open_target,
    publish,
)
from mcore_ckpt.format.index import COMMON_STATE_KEY, ObjectEntry
from mcore_ckpt.format.integrity import ManifestFile, id_in_names, shown_id, with_id
from mcore_ckpt.save.async_queue import SaveCall
from mcore_ckpt.save.buckets import PlannedFile, WriteBucket, WrittenFile, check_results, prepare_write_data
from mcore_ckpt.save.child_processes import Job
from mcore_ckpt.save.commit import FileReport, LoadedCheckpoint, SaveReport, Span, Took, metadata_of_save, write_trace
from mcore_ckpt.save.plan_check import ReplicaDigest, ReplicaSums, held_slices, replica_sums
from mcore_ckpt.save.planner import Planned, RankState, SavePlan, agree, collect
from mcore_ckpt.save.planner import Structure as Structure
from mcore_ckpt.save.planner import Validation as Validation
from mcore_ckpt.save.staging import is_busy, log_choice, start_writing, write_in_process
from mcore_ckpt.save.upkeep import check_second_tier, checkpoint_published, note_drain
from mcore_ckpt.save.writer import JobResult, timed_result
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of(__name__)
_SHOWN = 10
T = TypeVar("T")


# A third-party way of writing a rank's buckets into a directory, for the save of an id (`megatron/_replaced.py`).
BucketWriter = Callable[[Path, Sequence[WriteBucket], SaveOptions, bytes], list[WrittenFile]]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is asked of a save, the same on all ranks."""

    directory: Path  # of the checkpoint
    options: SaveOptions  # see `SaveOptions`
    thread_count: int  # files that each rank writes, at most
    separation_hint: str | None = None  # prefix of keys that get files of their own
    is_async: bool = False  # take a snapshot, which another process writes during training
    bucket_writer: BucketWriter | None = None  # writes the buckets instead of this package, before the call returns
    validation: Validation | None = None  # what is to be checked besides the plan
    has_common_file: bool = False  # the common state is a file: no object may have the key that it has where it is none
    loaded: LoadedCheckpoint | None = None  # what this job has loaded, if the strategy has been told


def begin_save(
    sharded_state_dict: Any, request: SaveRequest, group: RankGroup, structure: Structure
) -> SaveTransaction:
    """Plan a save on all ranks and write it, or start to; all of them call this. When it returns, the trainer may
    change its state. An error of the writing waits for the commit; any other is raised on every rank.
    """
    begun: list[SaveTransaction] = []
    try:
        with interrupts_wait_for_others():
            begun.append(_begin(sharded_state_dict, request, group, structure))
        return begun[0]
    except BaseException:
        # A signal that has waited is raised when the save has been begun: only this function can give it up.
        for transaction in begun:
            transaction.abort()
        raise


def _begin(sharded_state_dict: Any, request: SaveRequest, group: RankGroup, structure: Structure) -> SaveTransaction:
    began = time.monotonic()
    _give_up_forgotten_saves()
    # What this rank alone refuses, all ranks are told of.
    made = attempt(partial(SaveDirectory, request.directory, request.options))
    started: list[Job] = []
    try:
        with collector_paused():
            own_state = interruptible()(partial(_collect, sharded_state_dict, request, structure))

            agreed = agree(
                structure,
                made if isinstance(made, BaseException) else attempt(own_state),
                group,
                interruptible()(lambda: value_of(made).open()),
                partial(_is_left_out, request),
                name=request.directory.absolute().name,
                thread_count=request.thread_count,
                separation_hint=request.separation_hint,
                drain_to=request.options.drain_to,
                loaded=request.loaded,
                validation=request.validation,
                fingerprints=request.options.fingerprints and request.bucket_writer is None,
                held=None if request.options.compare_replicas == "off" else partial(held_slices, sharded_state_dict),
            )
            directory = value_of(made)
            if agreed is None:
                directory.abandon()
                return SaveTransaction(request, group, directory)
            plan, rank_state = agreed
            if request.options.drain_to is not None:
                directory.meet(group, plan.save_id)
    except BaseException:
        if isinstance(made, SaveDirectory):
            made.abandon()
        raise
    try:
        structure.described = rank_state.described
        planned = time.monotonic()
        objects = [data for _, data in rank_state.objects]
        pointers = rank_state.described.pointers
        buckets = prepare_write_data(plan.layout, objects, rank_state.tensors, pointers, plan.save_id)
        interrupted: BaseException | None = None
        try:
            with interruptible():
                job = _write(buckets, plan, request, group, directory, started.append)
        except BaseException as interrupt:
            if group.size == 1:
                raise
            for begun in started:
                begun.abort()
            interrupted, job = interrupt, _interrupted(interrupt, directory)
        options, replicas = request.options, None
        if options.compare_replicas != "off":
            sample = options.compare_replicas == "sample"
            replicas = attempt(partial(replica_sums, sharded_state_dict, plan.save_id, sample=sample))
        written = time.monotonic()
        spans = [Span("plan", began, planned)]
        if request.is_async and request.bucket_writer is None:
            spans += [Span("stage", planned, job.submitted_s), Span("dispatch", job.submitted_s, written)]
        else:
            spans.append(Span("write", planned, written))
        files, entries = [bucket.file for bucket in buckets], plan.layout.object_entries(buckets)
        transaction = SaveTransaction(request, group, directory, plan, job, files, entries, spans, replicas)
        transaction.interrupted = interrupted
        return transaction
    except BaseException:
        # Interrupted. A writer must not continue in a directory that has been released.
        try:
            for begun in started:
                begun.abort()
        finally:
            directory.abandon()
        raise


def _collect(sharded_state_dict: Any, request: SaveRequest, structure: Structure) -> RankState:
    state = collect(sharded_state_dict, structure.described)
    if request.has_common_file and COMMON_STATE_KEY in state.object_keys:
        raise PlanError(
            f"{COMMON_STATE_KEY}: an object of this key would be read as the common state, which megatron-core 0.19 "
            "and later keep under it; give the ShardedObject another key than 'common_state'"
        )
    return state


def _is_left_out(request: SaveRequest, state: RankState) -> bool:
    """Whether `when_busy="skip"` leaves this save out on this rank, and so on all, whatever their own option says."""
    options = request.options
    return request.is_async and options.when_busy == "skip" and is_busy()


def _write(
    buckets: Sequence[WriteBucket],
    plan: SavePlan,
    request: SaveRequest,
    group: RankGroup,
    directory: SaveDirectory,
    started: Callable[[Job], None],
) -> Job:
    """Write this rank's files now, or start to: `started` is called with a job in progress before all else."""
    what, options, storage = str(directory.path), request.options, directory.storage
    if request.bucket_writer is not None:
        write = partial(request.bucket_writer, directory.path, buckets, options, plan.save_id)
        return Job.ended(what, attempt(partial(timed_result, write, plan.unencoded)))
    if not request.is_async:
        write = partial(write_in_process, storage, buckets, options)
        return Job.ended(what, attempt(partial(timed_result, write, plan.unencoded)))
    if group.is_coordinator:
        log_choice(buckets, options)
    with collector_paused():
        return start_writing(storage, buckets, options, what, plan.unencoded, started)


def _interrupted(interrupt: BaseException, directory: SaveDirectory) -> Job:
    """Writing that this rank does not do. The others are on their way to the commit, where they are notified of it."""
    what = str(directory.path)
    error = SaveError(f"{what}: this rank was interrupted ({type(interrupt).__name__}) when its writing was to start")
    error.__cause__ = interrupt
    _logger.warning("%s; that is raised when the save is finalized, on all ranks", error)
    return Job.ended(what, error)


class SaveDirectory:
    """The directory of one save, as one rank sees it: locked and opened, then published or abandoned. `target`: on the
    coordinator, once it is open, what was found in it.
    """

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.path = path.absolute()
        check_second_tier(self.path, options)
        self.storage = storage_at(self.path).within(options.write_deadline_s)
        self.target: Target | None = None
        self.places: list[str] = []
        self._options = options

    @property
    def is_divided(self) -> bool:
        """Whether the ranks write to several places, each a directory of this path on a disk of its own node."""
        return len(set(self.places)) > 1

    def meet(self, group: RankGroup, save_id: bytes) -> None:
        """All ranks, of a save that has a second tier: find out who writes to one place. The coordinator has locked its
        own; in each other one the first rank does. Raises `SaveError` on all ranks.
        """

        def look() -> str:
            self.storage.ensure()
            own = self.storage.exists(note_name(id_in_names(save_id)))
            return "" if own else f"{platform.node()} {self.storage.location}"

        self.places = group.run("look for the coordinator's lock", look, wrap=SaveError)
        if self.is_divided:
            group.run("lock the directories of all nodes", partial(self._lock_own, group.rank), wrap=SaveError)

    def _lock_own(self, rank: int) -> None:
        if self.places[rank] and self.places.index(self.places[rank]) == rank:
            self.target = open_target(self.storage, self._options)

    def is_seen_from(self, rank: int, other: int) -> bool:
        """Whether two ranks write to one place."""
        return not self.places or self.places[rank] == self.places[other]

    def note(self, save_id: bytes, files: Sequence[WrittenFile], rank: int) -> None:
        """Where this place publishes these files: leave word of what is to be copied to the second tier."""
        note_drain(
            self.path,
            self._options,
            save_id,
            [file.name for file in files] if self.is_divided else None,
            commits=rank == 0,
        )

    def open(self) -> bytes:
        """Coordinator: lock the directory; returns the save's id. Raises where another save holds it."""
        self.target = open_target(self.storage, self._options)
        return self.target.save_id

    def common_file(self, *, has_common_state: bool) -> ManifestFile | None:
        """Coordinator: the file that holds the common state of this save; None if an object does, or nothing."""
        assert self.target is not None
        return common_file_of_save(self.storage, self.target, has_common_state=has_common_state)

    def check(self, files: Sequence[WrittenFile]) -> None:
        """Coordinator: raise `SaveError` unless these files are there, and the directory is this save's if not."""
        assert self.target is not None
        planned = sorted((file.name, file.size_bytes) for file in files)
        check_files(self.storage, planned, missing=self.target.commit.check)

    def publish(self, metadata: bytes, files: Sequence[WrittenFile], *, has_common_state: bool) -> None:
        """Coordinator: make the new checkpoint the one that the directory holds."""
        assert self.target is not None
        names = [file.name for file in files]  # of another id than the commit's, on the other nodes
        publish(self.storage, self.target, metadata, has_common_state=has_common_state, needed=names)

    def abandon(self) -> None:
        """Put the directory back as it was before; the files of the save have been removed."""
        if self.target is None:
            give_back(self.storage)
        else:
            self.target.commit.give_up()


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank tells the coordinator after its writing: index entries of its objects, its files, seconds."""

    objects: tuple[ObjectEntry, ...]
    files: tuple[WrittenFile, ...]
    phases_s: dict[str, float]
    took: Took
    replicas: ReplicaDigest | None = None  # of those that it does not write, where they are to be compared

    def reports(self, rank: int) -> tuple[FileReport, ...]:
        """What its files took."""
        return tuple(FileReport(rank, file.name, file.size_bytes, file.write_s, file.fsync_s) for file in self.files)


class SaveTransaction(SaveCall):
    """A save that has been begun; every rank commits it, or the queue gives it up. Without a `plan` it is left out
    (`when_busy="skip"`).
    """

    def __init__(
        self,
        request: SaveRequest,
        group: RankGroup,
        directory: SaveDirectory,
        plan: SavePlan | None = None,
        job: Job | None = None,
        files: Sequence[PlannedFile] = (),
        objects: tuple[ObjectEntry, ...] = (),
        spans: Sequence[Span] = (),
        replicas: ReplicaSums | BaseException | None = None,
    ) -> None:
        what, on_failure = str(directory.path), request.options.on_failure
        super().__init__(job or Job.ended(what), what, skipped=plan is None, on_failure=on_failure)
        self.plan = plan
        self._files = files
        self._objects = objects
        self._options = request.options
        self._group = group
        self._directory = directory
        self._is_async = request.is_async and request.bucket_writer is None
        self._spans = list(spans)
        self._replicas = replicas
        self._gathered_sums: list[ReplicaSums | None] | None = None  # on the coordinator, by rank
        self._commits = False
        self._publishes = False
        self._described: tuple[bytes, bool] | None = None
        if plan is not None:
            # One bar on a terminal is enough: the coordinator's.
            self.bar_bytes = plan.layout.file_bytes if group.is_coordinator else 0
            # As long as the writing may continue, the directory is locked, even if the caller has lost this object.
            _begun.add(self)

    @property
    def directory(self) -> Path:
        """Of the checkpoint."""
        return self._directory.path

    def is_committed_by(self, committer: object) -> None:
        """When this object is gone, the save cannot be committed any more: it is given up when the next one begins."""
        weakref.finalize(committer, _note_forgotten, self).atexit = False

    def commit(self) -> SaveReport:
        """Wait for this rank's writing, then publish the checkpoint; on every rank, or (with the same `SaveError`) on
        none. Reports what it took: on the coordinator of all ranks, elsewhere of this rank.
        """
        if self.plan is None:
            raise SaveError(f"{self._directory.path}: the save was skipped, the one before was still being written")
        self._commits = True
        _begun.discard(self)
        with interrupts_wait_for_others():
            return self._commit(self.plan)

    def _commit(self, plan: SavePlan) -> SaveReport:
        started = time.monotonic()
        try:
            mine = attempt(interruptible()(partial(self._finished, plan)))
            gathered = self._group.run_gather("write the data files", partial(value_of, mine), wrap=SaveError)
            waited = time.monotonic()
            self._spans.append(Span("gather", started, waited))
            self._publishes = True
            if self._directory.is_divided:
                self._publish_on_other_nodes(plan, gathered)
            self._ask("publish the checkpoint", partial(self._publish, plan, gathered))
        except BaseException as error:
            # Only when every rank knows that nothing was published may files go; a lost contact says nothing.
            if self._group.size == 1 or reached_every_rank(error):
                self._abandon()
            self._directory.abandon()
            if self.interrupted is not None:
                raise self.interrupted from error
            raise
        self._spans.append(Span("commit", waited, time.monotonic()))
        report = self._report(value_of(mine), gathered)
        self._tell(report, value_of(mine))
        return report

    def _ask(self, what: str, fn: Callable[[], T | None]) -> T:
        """What the coordinator makes of the results. Where digests of replicas leave it open whether all are equal, it
        says None, gets the sums of all of them, and is asked again.
        """
        found = self._group.run_on_coordinator(what, fn, wrap=SaveError)
        if found is None:
            mine = partial(value_of, self._replicas)
            self._gathered_sums = self._group.run_gather("compare the replicas", mine, wrap=SaveError)
            found = self._group.run_on_coordinator(what, fn, wrap=SaveError)
        assert found is not None
        return found

    def _finished(self, plan: SavePlan) -> Written:
        """Wait for this rank's files, and compare what was written with the plan."""
        result: JobResult = self.job.result()
        check_results(self._files, result.files)
        if self._is_async:
            self._spans.append(Span("writer", result.started_s, result.finished_s))
        if plan.planned is not None:
            plan.planned.encoder = plan.planned.encoder or result.encoder
        phases_s = {span.name: span.seconds for span in self._spans}
        began = self._spans[0].start_s
        call_s = sum(span.seconds for span in self._spans if span.name != "writer")
        took = Took(call_s + self.waited_s, result.finished_s - began, result.finished_s - result.started_s)
        sums = value_of(self._replicas)
        return Written(self._objects, result.files, phases_s, took, None if sums is None else sums.digest())

    def _publish(self, plan: SavePlan, gathered: list[Written] | None) -> bool | None:
        """Coordinator: True when it is done; None: not done, as `_ask` has it. After an error the note is gone before
        any rank removes its files, unless it may yet be published.
        """
        assert gathered is not None
        try:
            return self._publish_now(plan, gathered)
        except BaseException:
            self._directory.abandon()
            raise

    def _publish_now(self, plan: SavePlan, gathered: list[Written]) -> bool | None:
        directory, seen = self._directory, self._files_of_place(gathered)
        described, _ = together(
            directory.storage.asks_at_once, partial(self._metadata, plan, gathered), partial(directory.check, seen)
        )
        if described is None:
            return None
        content, common = described
        self._directory.note(plan.save_id, seen, self._group.rank)
        self._directory.publish(content, seen, has_common_state=common)
        assert plan.planned is not None
        plan.planned.history.published()
        return True

    def _files_of_place(self, gathered: Sequence[Written]) -> list[WrittenFile]:
        """Files of the ranks that write where this one does."""
        ranks = [rank for rank in range(len(gathered)) if self._directory.is_seen_from(self._group.rank, rank)]
        return [file for rank in ranks for file in gathered[rank].files]

    def _publish_on_other_nodes(self, plan: SavePlan, gathered: list[Written] | None) -> None:
        """All ranks: before the coordinator publishes, whose place counts."""

        def described() -> tuple[bytes, bool, list[Written]] | None:
            assert gathered is not None
            found = self._metadata(plan, gathered)
            return None if found is None else (*found, gathered)

        content, common, written = self._ask("describe the checkpoint", described)

        def publish_own() -> None:
            if self._directory.target is not None and not self._group.is_coordinator:
                seen = self._files_of_place(written)
                self._directory.check(seen)
                self._directory.note(plan.save_id, seen, self._group.rank)
                self._directory.publish(content, seen, has_common_state=common)

        self._group.run("publish on all nodes", publish_own, wrap=SaveError)

    def _metadata(self, plan: SavePlan, gathered: list[Written]) -> tuple[bytes, bool] | None:
        """Coordinator: what `.metadata` is to hold, if what was written is what was planned; and whether the common
        state is an object. None: as `_ask` has it.
        """
        if self._described is not None:
            return self._described
        assert plan.planned is not None
        done = sorted((file.name, file.size_bytes) for written in gathered for file in written.files)
        files = sorted((with_id(name, plan.save_id), size_bytes) for name, size_bytes in plan.planned.plan.files)
        if files != done:
            raise SaveError(f"{self._directory.path}: the files planned are {files}, the files written {done}")
        objects = [written.objects for written in gathered]
        common = any(entry.fqn == COMMON_STATE_KEY for of_rank in objects for entry in of_rank)
        plan.planned.encoder = plan.planned.encoder or plan.planned.plan.encoder()
        path = self._directory.path.absolute()
        plan.planned.history.begin(path.name, str(path.parent))
        if not self._compare_replicas(plan, plan.planned, gathered):
            return None
        content, manifest = metadata_of_save(
            plan.planned.plan,
            plan.planned.encoder,
            objects,
            [written.files for written in gathered],
            save_id=plan.save_id,
            storage_meta={"checkpoint_id": str(self._directory.path), "save_id": shown_id(plan.save_id)},
            common=self._directory.common_file(has_common_state=common),
        )
        if manifest is not None and manifest.fingerprints is not None:
            self._look_for_stale_moments(plan.planned, manifest.fingerprints)
        self._described = (content, common)
        return self._described

    def _compare_replicas(self, plan: SavePlan, planned: Planned, gathered: list[Written]) -> bool:
        """Warn of replicas that are not what is saved. False: nothing can be said without the sums of all."""
        digests = [written.replicas for written in gathered if written.replicas is not None]
        files = [file for written in gathered for file in written.files]
        if not digests or not all(file.has_footer for file in files):
            return True
        crcs = [crc for file in files for crc in file.crcs]
        is_sample = self._options.compare_replicas == "sample"
        if self._gathered_sums is None:
            digest = functools.reduce(ReplicaDigest.added, digests)
            sampled_in = plan.save_id if is_sample else None
            return planned.history.are_equal(planned.plan, crcs, planned.held, digest, sampled_in)
        replicas = [sums or ReplicaSums.none() for sums in self._gathered_sums]
        found = planned.history.diverged(planned.plan, crcs, replicas, are_all=not is_sample)
        if not found:
            return True
        named = "; ".join(f"{one}; {since}" for one, since in found[:_SHOWN])
        message = (
            f"{self._directory.path}: {len(found)} slices differ between replicas that should be equal: {named}"
            + (f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            + ". Ranks train different models: resume from a checkpoint in which they were equal"
        )
        _logger.warning("%s", message)
        return True

    def _look_for_stale_moments(self, planned: Planned, fingerprints: Sequence[int]) -> None:
        assert planned.encoder is not None
        assert planned.encoder.factors is not None
        history, factors = planned.history, planned.encoder.factors
        before, stale = history.stale(factors, fingerprints)
        if stale:
            more = f", and {len(stale) - _SHOWN} more" if len(stale) > _SHOWN else ""
            _logger.warning(
                "%s: %d of %d moments of the optimizer are bit for bit what they were in %s, though training has moved "
                "since: %s%s. The state dict may be one that the optimizer has left behind",
                self._directory.path,
                len(stale),
                len(factors.moments),
                before,
                ", ".join(stale[:_SHOWN]),
                more,
            )

    def abort(self) -> None:
        """See `SaveCall`. Once `commit` has begun, only that knows whether the files may go: a callback that fails
        after it, or contact lost in the midst of it, must not take a published checkpoint apart.
        """
        self.job.abort()
        if self._pid != os.getpid() or self.skipped:
            return  # (forked from the trainer, whose save it is)
        _begun.discard(self)
        if not self._commits:
            self._commits = True
            self._abandon()

    def _abandon(self) -> None:
        """Remove what this rank wrote of a save that has failed."""
        assert self.plan is not None
        storage, save_id = self._directory.storage, self.plan.save_id
        # As long as the note is there, it may come into force. In this order: what is decided in between is then.
        if self._publishes and storage.exists(note_name(id_in_names(save_id))):
            _logger.warning("%s: not published, but it may be yet: its files stay", self._directory.path)
        elif self._publishes and is_in_force(storage, save_id):
            _logger.warning("%s: the save was interrupted, but the checkpoint is published", self._directory.path)
        else:
            discard(storage, [file.name for file in self._files])
            self._directory.abandon()

    def _report(self, mine: Written, gathered: list[Written] | None) -> SaveReport:
        """On the coordinator of all ranks, the slowest rank's phases; elsewhere of this rank alone."""
        phases_s = {span.name: span.seconds for span in self._spans}
        files, took = mine.reports(self._group.rank), mine.took
        if gathered is not None:
            for written in gathered:
                took = took.slower(written.took)
                for name, seconds in written.phases_s.items():
                    phases_s[name] = max(phases_s.get(name, 0.0), seconds)
            files = tuple(file for rank, written in enumerate(gathered) for file in written.reports(rank))
        took = replace(took, waited_s=took.waited_s + phases_s["gather"] + phases_s["commit"])
        published_s = time.monotonic() - self._spans[0].start_s
        path = str(self._directory.path)
        return SaveReport(path, took, published_s, phases_s, files)

    def _tell(self, report: SaveReport, mine: Written) -> None:
        """Write the trace, log a line."""
        path, rank = self._directory.path, self._group.rank
        if self._options.trace_path is not None:
            write_trace(Path(self._options.trace_path), str(path), rank, self._spans, mine.reports(rank))
        if self._group.is_coordinator:
            _logger.log(report.log_level, "%s", report)
        if self._directory.target is not None:
            checkpoint_published(path, self._options)


# Saves in progress; and of these, those that cannot be committed any more.
_begun: set[SaveTransaction] = set()
_forgotten: list[SaveTransaction] = []


def saves_in_progress(directory: Path) -> frozenset[SaveTransaction]:
    """The saves of this process into a directory that have been begun, and neither committed nor given up."""
    directory = directory.absolute()
    return frozenset(begun for begun in tuple(_begun) if begun.directory.absolute() == directory)


def _note_forgotten(transaction: SaveTransaction) -> None:
    # Nothing more: this may be called from within anything at all.
    if transaction in _begun:
        _forgotten.append(transaction)


def _give_up_forgotten_saves() -> None:
    """A save whose request was lost before it came into a queue (an exception, a Ctrl-C) is in the way of the next."""
    while _forgotten:
        transaction = _forgotten.pop()
        if transaction in _begun:
            _logger.warning("%s: this save cannot be committed any more; it is given up", transaction.what)
            transaction.abort()


def _forget_the_parents() -> None:
    """In a forked process: what the trainer has begun is the trainer's."""
    _begun.clear()
    _forgotten.clear()


os.register_at_fork(after_in_child=_forget_the_parents)
