"""The beginning of a save of all ranks: a sharded state dict comes in, its files are on their way when this returns.

    state      each rank's main replicas, as specifications (`collect`)
    directory  opened by the coordinator (`SaveDirectory`)
    plan       the layout of every file, checked by the coordinator; or that of the save before (`agree`)
    buckets    bytes_data apart from tensor_data, every offset known (`prepare_write_data`)
    writing    by this process, or from a snapshot by another one (`write_in_process`, `start_writing`)

`SaveTransaction.commit` does the rest (`commit.py`), later if the writing is asynchronous. What fails on one rank alone
is carried as an `Outcome` to the next exchange, where all ranks raise it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.process import Outcome, collector_paused
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.index import COMMON_STATE_KEY
from mcore_ckpt.save.buckets import WriteBucket, prepare_write_data
from mcore_ckpt.save.commit import SaveDirectory, SaveTransaction, Span, Writing, give_up_forgotten_saves
from mcore_ckpt.save.jobs import Job, timed_result
from mcore_ckpt.save.planner import RankState, SavePlan, SaveRequest, Structure, agree, collect
from mcore_ckpt.save.staging import is_busy, start_writing, write_in_process

if TYPE_CHECKING:
    from mcore_ckpt.save.replicas import ReplicaSums


def begin_save(
    sharded_state_dict: Any, request: SaveRequest, group: RankGroup, structure: Structure
) -> SaveTransaction:
    """Plan a save on all ranks and write it, or start to; all of them call this. When it returns, the trainer may
    change its state. An error of the writing waits for the commit; any other is raised on every rank.
    """
    began = time.monotonic()
    give_up_forgotten_saves()
    # What this rank alone refuses, all ranks are told of.
    opened = Outcome.of(partial(SaveDirectory, request.directory, request.options))
    started: list[Job] = []
    try:
        with collector_paused():
            own_state = partial(_collect, sharded_state_dict, request, structure)
            agreed = agree(
                structure,
                Outcome.of(own_state) if opened.error is None else Outcome(error=opened.error),
                group,
                request,
                lambda: opened.value().open(),
                # On this rank, and so on all, whatever their own option says.
                left_out=request.is_async and request.options.when_busy == "skip" and is_busy(),
                held=None if request.options.compare_replicas == "off" else partial(_held, sharded_state_dict),
            )
        directory = opened.value()
        if agreed is None:
            directory.abandon()
            return SaveTransaction(request, group, directory)
        plan, state = agreed
        if request.options.drain_to is not None:
            directory.meet(group, plan.save_id)
        structure.described = state.described
        writing = _start(sharded_state_dict, state, plan, request, directory, began, started)
        return SaveTransaction(request, group, directory, plan, writing)
    except BaseException:
        # A writer must not continue in a directory that has been released.
        try:
            for job in started:
                job.abort()
        finally:
            if opened.error is None:
                opened.value().abandon()
        raise


def _held(sharded_state_dict: Any) -> bytes:
    from mcore_ckpt.save.replicas import held_slices  # (few saves compare them)

    return held_slices(sharded_state_dict)


def _collect(sharded_state_dict: Any, request: SaveRequest, structure: Structure) -> RankState:
    state = collect(sharded_state_dict, structure.described)
    if request.has_common_file and COMMON_STATE_KEY in state.object_keys:
        raise PlanError(
            f"{COMMON_STATE_KEY}: an object of this key would be read as the common state, which megatron-core 0.19 "
            "and later keep under it; give the ShardedObject another key than 'common_state'"
        )
    return state


def _start(
    sharded_state_dict: Any,
    state: RankState,
    plan: SavePlan,
    request: SaveRequest,
    directory: SaveDirectory,
    began: float,
    started: list[Job],
) -> Writing:
    """Write this rank's buckets, or start to; sum the replicas that are to be compared."""
    planned = time.monotonic()
    objects = [data for _, data in state.objects]
    buckets = prepare_write_data(plan.layout, objects, state.tensors, state.described.pointers, plan.save_id)
    job = _write(buckets, plan, request, directory, started.append)
    compare = request.options.compare_replicas
    replicas: Outcome[ReplicaSums | None] = Outcome()
    if compare != "off":
        from mcore_ckpt.save.replicas import replica_sums

        sample = compare == "sample"
        replicas = Outcome.of(partial(replica_sums, sharded_state_dict, plan.save_id, sample=sample))
    written = time.monotonic()
    spans = [Span("plan", began, planned)]
    if request.is_async:
        spans += [Span("stage", planned, job.submitted_s), Span("dispatch", job.submitted_s, written)]
    else:
        spans.append(Span("write", planned, written))
    entries = plan.layout.object_entries(buckets)
    return Writing(job, [bucket.file for bucket in buckets], entries, spans, replicas)


def _write(
    buckets: Sequence[WriteBucket],
    plan: SavePlan,
    request: SaveRequest,
    directory: SaveDirectory,
    started: Callable[[Job], None],
) -> Job:
    """Write this rank's files now, or start to: `started` is called with a job in progress before all else."""
    what, options, storage = str(directory.path), request.options, directory.storage
    if request.is_async:
        with collector_paused():
            return start_writing(storage, buckets, options, what, plan.unencoded, started)
    write = partial(write_in_process, storage, buckets, options)
    return Job.ended(what, Outcome.of(partial(timed_result, write, plan.unencoded)))
