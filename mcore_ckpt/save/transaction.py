"""A save of all ranks, from the sharded state dict to the checkpoint in force. Its steps, in order:

    begin_save   1 collect                     each rank: what it saves (`planner.py`)
                 2 agree                       one exchange; the coordinator locks the directory
                 3 plan_together               only where a rank cannot use the plan of the save before
                 4 prepare_write_data          each rank: its files, as buckets
                 5 start_writing               asynchronous: a snapshot, written by another process (`staging.py`)
                   or write_in_process         synchronous: written before the call returns
    commit       6 _finished                   each rank: wait for its files
                 7 _compare_replicas           if the options ask for it
                 8 _describe, check_files      coordinator: make `.metadata`, and look for the files of all ranks
                 9 publish                     coordinator: put it in force (`directory/commit.py`)

What fails on one rank alone is carried as an `Outcome` to the next exchange, where all ranks raise it. A save that
fails leaves nothing: each rank removes its files when all know that nothing was published. What a save took (phases,
bytes, the slowest file) is a line in the log, and a trace that browsers show.
"""

from __future__ import annotations

import json
import os
import platform
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mcore_ckpt.core.console import counted, line_level, logger_of
from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.process import Outcome, collector_paused, run_concurrently
from mcore_ckpt.core.ranks import RankGroup, reached_every_rank
from mcore_ckpt.directory.commit import NOTE, Commit, begun_ahead, check_files, discard, open_target, sum_of_file
from mcore_ckpt.directory.in_force import is_in_force
from mcore_ckpt.format.index import COMMON_STATE_KEY, ObjectEntry
from mcore_ckpt.format.integrity import ManifestFile, id_in_names, shown_id, with_id
from mcore_ckpt.format.metadata_read import COMMON_FILE, INTEGRITY_FILE
from mcore_ckpt.image.layout import PlannedFile, WriteBucket, WrittenFile, metadata_of
from mcore_ckpt.save.jobs import Job, JobResult, timed_result
from mcore_ckpt.save.planner import (
    RankState,
    SavePlan,
    SaveRequest,
    Structure,
    agree,
    collect,
    compare_claimed,
    plan_together,
    prepare_write_data,
)
from mcore_ckpt.save.staging import is_busy, start_writing, write_in_process
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

if TYPE_CHECKING:
    from mcore_ckpt.save.replicas import ReplicaDigest, ReplicaSums


def begin_save(
    sharded_state_dict: Any, request: SaveRequest, group: RankGroup, structure: Structure
) -> SaveTransaction:
    """Plan a save on all ranks and write it, or start to; all of them call this. When it returns, the trainer may
    change its state. An error of the writing waits for the commit; any other is raised on every rank.
    """
    began = time.monotonic()
    if _begun:
        give_up_forgotten_saves()
    directory, compare = SaveDirectory(request), request.options.compare_replicas
    held = None
    if compare != "off":
        from mcore_ckpt.save.replicas import held_slices, replica_sums  # (few saves compare them)

        held = partial(held_slices, sharded_state_dict)
    save = SaveTransaction(request, group, directory)
    try:
        with collector_paused():
            own = Outcome.of(partial(_collect, sharded_state_dict, directory, request, structure))
            # On this rank, and so on all, whatever their own option says.
            left_out = request.is_async and request.options.when_busy == "skip" and is_busy()
            agreement = agree(own, structure, group, request, left_out, directory.open)
            if agreement is None:
                save.skipped, save.phase = True, "over"
                directory.abandon()
                return save
            state = own.value()
            if agreement.common_differs or agreement.objects_differ:
                state, agreement = compare_claimed(agreement, state, structure, group, request)
            if agreement.plan and structure.layout is not None:  # all ranks can use that of the save before
                plan = SavePlan(structure.layout, structure.planned, agreement.save_id, reused=True)
            else:
                plan = plan_together(state, structure, agreement, group, request, held)
        if request.options.drain_to is not None:
            directory.meet(group, plan.save_id)
        structure.described = state.described
        save.plan, save.phase, planned = plan, "writing", time.monotonic()
        _begun.add(save)  # from now on the directory is taken until the save is committed or aborted
        objects = list(state.objects.values())
        buckets = prepare_write_data(plan.layout, objects, state.tensors, state.described.pointers, plan.save_id)
        save.files, save.objects = [bucket.file for bucket in buckets], plan.layout.object_entries(buckets)
        save.job = _write(save, directory.storage, buckets, request)
        if compare != "off":
            sums = partial(replica_sums, sharded_state_dict, plan.save_id, sample=compare == "sample")
            save.replicas = Outcome.of(sums)
        ended = time.monotonic()
        save.spans = [Span("plan", began, planned)]
        if request.is_async:
            save.spans += [Span("stage", planned, save.job.submitted_s), Span("dispatch", save.job.submitted_s, ended)]
        else:
            save.spans += [Span("write", planned, ended)]
        return save
    except BaseException:
        save.abort()
        raise


def _write(save: SaveTransaction, storage: Storage, buckets: Sequence[WriteBucket], request: SaveRequest) -> Job:
    """Write this rank's files; of an asynchronous save, take the snapshot and have them written."""
    planned = save.plan.planned
    # During the writing `.metadata` is put together, on the coordinator, unless that was done for this plan before.
    unencoded = None if planned is None or planned.encoder is not None else planned.plan
    if request.is_async:
        take_charge = partial(setattr, save, "job")  # the writing is stopped if the save is aborted
        with collector_paused():
            return start_writing(storage, buckets, request.options, save.what, unencoded, started=take_charge)
    write = partial(write_in_process, storage, buckets, request.options)
    written = Outcome.of(partial(timed_result, write, unencoded))
    return Job(save.what, None if written.error else written.value(), written.error)


def _collect(
    sharded_state_dict: Any, directory: SaveDirectory, request: SaveRequest, structure: Structure
) -> RankState:
    """What this rank saves; and where, since a directory that it alone refuses is told all ranks, too."""
    options = request.options
    if options.drain_to or options.export_to:
        from mcore_ckpt.save.upkeep import check_places

        check_places(directory.path, options)
    directory.storage = storage_at(directory.path, deadline_s=options.write_deadline_s)
    state = collect(sharded_state_dict, structure.described)
    if request.has_common_file and COMMON_STATE_KEY in state.objects:
        raise PlanError(
            f"{COMMON_STATE_KEY}: an object of this key would be read as the common state, which megatron-core 0.19 "
            "and later keep under it; give the ShardedObject another key than 'common_state'"
        )
    return state


_logger = logger_of(__name__)
_SHOWN: Final = 10


class SaveDirectory:
    """The directory of one save, as one rank sees it: locked and opened, then published or abandoned."""

    def __init__(self, request: SaveRequest) -> None:
        self.path = request.directory.absolute()
        self.storage: Storage  # once it is found
        self.target: Commit | None = None  # on the coordinator, once it is open
        self.places: list[str] = []  # where each rank writes, if there is a second tier
        self.is_divided = False  # those are several: directories of this path on disks of the nodes
        self._common: ManifestFile | None = None  # what it was when it was opened
        self._options = request.options
        self._earlier = request.earlier

    def meet(self, group: RankGroup, save_id: bytes) -> None:
        """All ranks, with a second tier: find out who writes to one place; the first rank of each locks it."""

        def look() -> str:
            self.storage.ensure()
            own = self.storage.exists(NOTE + id_in_names(save_id))
            return "" if own else f"{platform.node()} {self.storage.location}"

        self.places = group.run("look for the coordinator's lock", look, wrap=SaveError)
        self.is_divided = len(set(self.places)) > 1

        def lock_own() -> None:
            own = self.places[group.rank]
            if own and self.places.index(own) == group.rank:
                self.target = open_target(self.storage, self._options)

        if self.is_divided:
            group.run("lock the directories of all nodes", lock_own, wrap=SaveError)

    def open(self) -> bytes:
        """Coordinator: lock the directory; returns the save's id. Raises where another save holds it."""
        self.target = target = open_target(self.storage, self._options, self._earlier)
        if not self.storage.is_store:  # in a file system stock may have written it already
            self._common = target.common_file or sum_of_file(self.storage, target.save_id)
        return target.save_id

    def common_file(self) -> ManifestFile | None:
        """Coordinator: the file that holds the common state of this save, where no object does; None: there is none."""
        assert self.target is not None
        found = self.target.common_file or sum_of_file(self.storage, self.target.save_id)
        if not self.storage.is_store and found != self._common:
            raise SaveError(f"{self.storage}: another save has replaced {COMMON_FILE} since this one began")
        return found

    def publish(self, described: _Described, save_id: bytes, names: Sequence[str], rank: int) -> None:
        """Make the checkpoint this place's own; what is to be copied to the second tier is noted before."""
        assert self.target is not None
        if self._options.drain_to is not None:
            from mcore_ckpt.save.upkeep import note_drain

            own = [*names] if self.is_divided else None
            note_drain(self.path, self._options, save_id, own, commits=rank == 0)
        # Megatron sums up the files after the save: what is there now are the sums of another checkpoint.
        stale = (COMMON_FILE, INTEGRITY_FILE) if described.has_common_state else (INTEGRITY_FILE,)
        # (On the other nodes the names show another id than the commit's.)
        self.target.publish(described.content, needed=names, stale=stale)

    def abandon(self) -> None:
        """Put the directory back as it was before; the files of the save have been removed."""
        if self.target is None and hasattr(self, "storage"):
            self.target = begun_ahead(self.storage)
        if self.target is not None:
            self.target.give_up()


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank tells the coordinator after its writing: index entries of its objects, its files, seconds."""

    objects: tuple[ObjectEntry, ...]
    files: tuple[WrittenFile, ...]
    took_s: dict[str, float]  # each of its phases, what training `waited`, until the files were `durable`
    replicas: ReplicaDigest | None = None  # of those that it does not write, where they are to be compared


class SaveTransaction:
    """A save that has been begun; every rank commits it, or gives it up.

    As the function of an async request it only waits for its writing: Megatron's own queue calls it, in whatever
    process. The commit tells all ranks how that has ended.
    """

    def __init__(self, request: SaveRequest, group: RankGroup, directory: SaveDirectory) -> None:
        self.path = directory.path
        self.what = str(directory.path)  # for messages
        self.skipped = False  # left out (`when_busy="skip"`), on all ranks: nothing to wait for, nothing to commit
        self.on_failure = request.options.on_failure
        self.waited_s = 0.0  # so long this rank's training has waited for it, since it was begun
        self.job = Job(self.what)  # this rank's writing
        self.files: Sequence[PlannedFile] = ()  # of this rank
        self.objects: tuple[ObjectEntry, ...] = ()  # in those
        self.replicas: Outcome[ReplicaSums | None] = Outcome()  # of those that it does not save, if they are compared
        self.plan: SavePlan
        self.figures: SaveFigures  # on all ranks, once it is published
        self.spans: list[Span] = []  # phases that have ended
        self._options = request.options
        self._group = group
        self.directory = directory
        self._is_async = request.is_async
        self.pid = os.getpid()
        # When the object that commits it is gone (its request was lost before it came into a queue), it is given up.
        self.committer: weakref.ref[object] | None = None
        self.phase: Literal["planning", "writing", "committing", "publishing", "over"] = "planning"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the writing, in this process or in a fork of it."""
        if os.getpid() == self.pid:
            asked = time.monotonic()
            self.job.wait()
            self.waited_s += time.monotonic() - asked
        else:
            self.job.watch()()

    def __reduce__(self) -> tuple[Any, ...]:
        """In a process that it is sent to, it is what waits for its job."""
        return partial, (self.job.watch(),)

    def commit(self) -> None:
        """Wait for this rank's writing, then publish on every rank, or (with the same `SaveError`) on none."""
        if self.skipped:
            raise SaveError(f"{self.what}: the save was skipped, the one before was still being written")
        self.phase = "committing"
        _begun.discard(self)
        started = time.monotonic()
        group, directory = self._group, self.directory
        try:
            mine = Outcome.of(self._finished)
            gathered = group.gather("write the data files", mine.value, wrap=SaveError)
            waited = time.monotonic()
            self.spans.append(Span("gather", started, waited))
            differing = self._compare_replicas(gathered) if self._options.compare_replicas != "off" else None
            self.phase = "publishing"
            described = self._publish_on_other_nodes(gathered) if directory.is_divided else None
            publish = partial(self._publish, gathered or [], described, started, differing)
            self.figures = group.run_on_coordinator("publish the checkpoint", publish, wrap=SaveError)
        except BaseException as error:
            # Only when every rank knows that nothing was published may files go; a lost contact says nothing.
            if group.size == 1 or reached_every_rank(error):
                self._remove_files()
            directory.abandon()
            raise
        self.spans.append(Span("commit", waited, time.monotonic()))
        if self._options.trace_path:
            write_trace(Path(self._options.trace_path), self.what, group.rank, self.spans, mine.value().files)
        if gathered is not None:
            log_save(self.what, self.figures, gathered, self.spans)
        if directory.target is not None and self._options.has_upkeep:
            from mcore_ckpt.save.upkeep import checkpoint_published

            checkpoint_published(directory.path, self._options, is_coordinator=gathered is not None)

    def _finished(self) -> Written:
        """Wait for this rank's files."""
        result: JobResult = self.job.result()
        if self._is_async:
            self.spans.append(Span("writer", result.started_s, result.finished_s))
        if self.plan.planned is not None:
            self.plan.planned.encoder = self.plan.planned.encoder or result.encoder
        took_s = {name: stop_s - start_s for name, start_s, stop_s in self.spans}
        took_s["waited"] = self.waited_s + sum(seconds for name, seconds in took_s.items() if name != "writer")
        took_s["durable"] = result.finished_s - self.spans[0].start_s
        took_s["writing"] = result.finished_s - result.started_s
        sums = self.replicas.value()
        return Written(self.objects, result.files, took_s, None if sums is None else sums.digest())

    def _publish(
        self, gathered: list[Written], described: _Described | None, committing_s: float, differing: int | None
    ) -> SaveFigures:
        """Coordinator. After an error the note goes before files do, unless it may yet be published."""
        directory, seen = self.directory, self._files_of_place(gathered)
        assert directory.target is not None
        try:
            describe, check = partial(self._describe, gathered), partial(check_files, directory.target, seen)
            if described is None:
                made, _ = run_concurrently(directory.storage.asks_at_once, describe, check)
            else:
                check()
                made = described
            directory.publish(made, self.plan.save_id, [*seen], self._group.rank)
        except BaseException:
            directory.abandon()
            raise
        return SaveFigures.of(gathered, self.spans[0].start_s, committing_s, differing)

    def _files_of_place(self, gathered: Sequence[Written]) -> dict[str, int]:
        """Names and lengths of the files of the ranks that write where this one does."""
        places = self.directory.places or [""] * len(gathered)
        seen = [written for written, place in zip(gathered, places, strict=True) if place == places[self._group.rank]]
        return {file.name: file.size_bytes for written in seen for file in written.files}

    def _publish_on_other_nodes(self, gathered: list[Written] | None) -> _Described:
        """All ranks: before the coordinator publishes, whose place counts."""

        def describe() -> tuple[_Described, list[Written]]:
            assert gathered is not None
            return self._describe(gathered), gathered

        described, written = self._group.run_on_coordinator("describe the checkpoint", describe, wrap=SaveError)

        def publish_own() -> None:
            if self.directory.target is not None and not self._group.is_coordinator:
                seen = self._files_of_place(written)
                check_files(self.directory.target, seen)
                self.directory.publish(described, self.plan.save_id, [*seen], self._group.rank)

        self._group.run("publish on all nodes", publish_own, wrap=SaveError)
        return described

    def _describe(self, gathered: list[Written]) -> _Described:
        """Coordinator: the state to be published, if the written files are as planned."""
        planned, save_id = self.plan.planned, self.plan.save_id
        assert planned is not None
        done = sorted((file.name, file.size_bytes) for written in gathered for file in written.files)
        files = sorted((with_id(name, save_id), size_bytes) for name, size_bytes in planned.plan.files)
        if files != done:
            raise SaveError(f"{self.what}: the files planned are {files}, the files written {done}")
        objects = [written.objects for written in gathered]
        common = any(entry.fqn == COMMON_STATE_KEY for of_rank in objects for entry in of_rank)
        planned.encoder = planned.encoder or planned.plan.encoder()
        content = metadata_of(
            planned.encoder,
            objects,
            [written.files for written in gathered],
            save_id=save_id,
            storage_meta={"checkpoint_id": self.what, "save_id": shown_id(save_id)},
            common=None if common else self.directory.common_file(),
            names={name: with_id(name, save_id) for name, _ in planned.plan.files},
        )
        return _Described(content, common)

    def _compare_replicas(self, gathered: list[Written] | None) -> int:
        """All ranks: name replicas that differ from the saved ones, or raise (`"raise"`); how many slices do. Only if
        their digests do not tell that all are equal, ranks send the sum of each.
        """

        def are_equal() -> bool:
            assert gathered is not None
            assert self.plan.planned is not None
            digests = [written.replicas for written in gathered if written.replicas is not None]
            if not digests:
                return True
            sampled_in = self.plan.save_id if self._options.compare_replicas == "sample" else None
            return self.plan.planned.replicas.are_equal(_crcs_of(gathered), digests, sampled_in)

        def tell() -> int:
            assert gathered is not None
            assert self.plan.planned is not None
            assert sums is not None
            found = self.plan.planned.replicas.diverged(_crcs_of(gathered), sums)
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            message = (
                f"{self.what}: {len(found)} slices differ between replicas that should be equal: "
                f"{'; '.join(map(str, found[:_SHOWN]))}{more}. Ranks train different models: resume from a checkpoint "
                "in which they were equal"
            )
            if found and self._options.compare_replicas == "raise":
                raise SaveError(message)
            if found:
                _logger.warning("%s", message)
            return len(found)

        step = "compare the replicas"
        if self._group.run_on_coordinator(step, are_equal, wrap=SaveError):
            return 0
        sums = self._group.gather(step, self.replicas.value, wrap=SaveError)
        return self._group.run_on_coordinator(step, tell, wrap=SaveError)

    def abort(self) -> None:
        """Stop writing and remove files, without collectives; what `commit` has begun is for that to remove."""
        self.job.abort()
        if self.pid != os.getpid():
            return  # (forked from the trainer, whose save it is)
        _begun.discard(self)
        if self.phase == "writing":
            self._remove_files()
        elif self.phase == "planning":
            self.directory.abandon()
        if self.phase in ("planning", "writing"):
            self.phase = "over"

    def _remove_files(self) -> None:
        """Remove what this rank wrote of a save that has failed."""
        storage, save_id, may_be_published = self.directory.storage, self.plan.save_id, self.phase == "publishing"
        # As long as the note is there, it may come into force. In this order: what is decided in between is then.
        if may_be_published and storage.exists(NOTE + id_in_names(save_id)):
            _logger.warning("%s: not published, but it may be yet: its files stay", self.what)
        elif may_be_published and is_in_force(storage, save_id):
            _logger.warning("%s: the save was interrupted, but the checkpoint is published", self.what)
        else:
            discard(storage, [file.name for file in self.files])
            self.directory.abandon()


class _Described(NamedTuple):
    """What the coordinator publishes."""

    content: bytes  # of `.metadata`
    has_common_state: bool  # as an object


def _crcs_of(gathered: Sequence[Written]) -> list[int]:
    """CRC-32s of all items, in the order of the plan."""
    return [crc for written in gathered for file in written.files for crc in file.crcs]


# Saves that have been begun, and neither committed nor given up: as long as the writing may continue, the directory is
# locked, even if the caller has lost the save.
_begun: set[SaveTransaction] = set()


def give_up_forgotten_saves() -> None:
    """A save whose request was lost before it came into a queue (an exception, a Ctrl-C) is in the way of the next."""
    for save in tuple(_begun):
        is_own = save.pid == os.getpid()  # not that of a trainer that forked this
        if is_own and save.committer is not None and save.committer() is None:
            _logger.warning("%s: this save cannot be committed any more; it is given up", save.what)
            save.abort()


# --- what a save took, as figures, as a line and as a trace -----------------------------------------------------------

_GB: Final = 1e9


class Span(NamedTuple):
    """A phase of a save, in seconds on the clock of `time.monotonic()`, which all processes of a host share."""

    name: str
    start_s: float
    stop_s: float


_PHASES: Final = ("plan", "stage", "dispatch", "write", "writer", "gather", "commit")


class SaveFigures(NamedTuple):
    """What a save that is published took: bytes of all ranks, seconds of the slowest."""

    nbytes: int  # of the data files
    waited_s: float  # that training waited, until the checkpoint was published
    writing_s: float  # from the first byte to the last
    durable_s: float  # from the beginning of the save until its last file was durable
    published_s: float  # from there until the checkpoint was published
    differing: int | None  # slices that differ between replicas; None: they were not compared

    @classmethod
    def of(cls, gathered: Sequence[Written], began_s: float, committing_s: float, differing: int | None) -> SaveFigures:
        """On the coordinator, when the checkpoint is published; times as of `time.monotonic()`."""
        now_s = time.monotonic()
        waited, writing, durable = (
            max(written.took_s[name] for written in gathered) for name in ("waited", "writing", "durable")
        )
        nbytes = sum(file.size_bytes for written in gathered for file in written.files)
        return cls(nbytes, waited + now_s - committing_s, writing, durable, now_s - began_s, differing)


def log_save(what: str, figures: SaveFigures, gathered: Sequence[Written], spans: Sequence[Span]) -> None:
    """Log the line of a published save, with its phases on the slowest ranks; `spans`: this rank's."""
    slowest: dict[str, float] = {}
    for written in gathered:
        for name, seconds in written.took_s.items():
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    slowest |= {name: stop_s - start_s for name, start_s, stop_s in spans[-2:]}  # gather and commit
    files = [(rank, file) for rank, written in enumerate(gathered) for file in written.files]
    phases = ", ".join(f"{name} {slowest[name]:.3f} s" for name in _PHASES if name in slowest)
    straggler = ""
    if files:
        rank, file = max(files, key=lambda each: each[1].write_s + each[1].fsync_s)
        straggler = (
            f"; slowest file {file.name} of rank {rank} ({file.write_s + file.fsync_s:.3f} s: write "
            f"{file.write_s:.3f} s, fsync {file.fsync_s:.3f} s)"
        )
    synchronous = " (a synchronous save)" if "write" in slowest else ""
    rate = f" at {figures.nbytes / _GB / figures.writing_s:.2f} GB/s" if figures.writing_s else ""
    _logger.log(
        line_level(figures.nbytes),
        "saved %.3f GB in %s to %s: training waited %.3f s%s, files durable after %.3f s%s, published after %.3f s "
        "(%s)%s",
        figures.nbytes / _GB,
        counted(len(files), "file"),
        what,
        figures.waited_s,
        synchronous,
        figures.durable_s,
        rate,
        figures.published_s,
        phases,
        straggler,
    )


def write_trace(path: Path, save: str, rank: int, spans: Sequence[Span], files: Sequence[WrittenFile]) -> None:
    """Write this rank's phases as a trace for Chrome and Perfetto. A failure is a warning: it is published."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "trainer"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "writer process"}},
    ]
    wrote = [
        {"file_name": file.name, "size_bytes": file.size_bytes, "write_s": file.write_s, "fsync_s": file.fsync_s}
        for file in files
    ]
    events += [
        {
            "ph": "X",
            "cat": "save",
            "name": phase,
            "pid": rank,
            "tid": int(phase == "writer"),
            "ts": start_s * 1e6,
            "dur": (stop_s - start_s) * 1e6,
            "args": {"files": wrote} if phase in ("write", "writer") else {"checkpoint": save},
        }
        for phase, start_s, stop_s in spans
    ]
    name = f"{Path(save).name or 'save'}_rank{rank}.trace.json"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may fail its save)
        _logger.warning("%s: the trace of a save cannot be written: %s", path, error)
