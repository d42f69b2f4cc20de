"""The beginning of a save of all ranks: a sharded state dict comes in, its files are on their way when this returns.

    state      each rank's main replicas, as specifications (`collect`)
    directory  opened by the coordinator (`SaveDirectory`)
    agreement  one exchange: who can use the plan of the save before (`agree`); what claims to be equal is compared
    plan       that of the save before (`reuse`), or a layout of all files that the coordinator checks (`plan_together`)
    buckets    bytes_data apart from tensor_data, every offset known (`prepare_write_data`)
    writing    by this process, or from a snapshot by another one (`write_in_process`, `start_writing`)

`SaveTransaction.commit` does the rest (`commit.py`), later if the writing is asynchronous. What fails on one rank alone
is carried as an `Outcome` to the next exchange, where all ranks raise it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.process import Outcome, collector_paused
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.index import COMMON_STATE_KEY
from mcore_ckpt.save.buckets import prepare_write_data
from mcore_ckpt.save.commit import SaveDirectory, SaveTransaction, give_up_forgotten_saves
from mcore_ckpt.save.jobs import Job, timed_result
from mcore_ckpt.save.planner import (
    RankState,
    SavePlan,
    SaveRequest,
    Structure,
    agree,
    collect,
    compare_claimed,
    plan_together,
    propose,
    reuse,
)
from mcore_ckpt.save.report import Span
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
    directory, compare = SaveDirectory(request.directory, request.options), request.options.compare_replicas
    save = SaveTransaction(request, group, directory)
    try:
        with collector_paused():
            own = Outcome.of(partial(_collect, sharded_state_dict, directory, request, structure))
            # On this rank, and so on all, whatever their own option says.
            left_out = request.is_async and request.options.when_busy == "skip" and is_busy()
            agreement = agree(
                lambda: propose(own.value(), structure, group, request, left_out), group, open_directory=directory.open
            )
            if agreement is None:
                save.skip()
                return save
            state, agreement = compare_claimed(agreement, own.value(), structure, group, request)
            held = None if compare == "off" else partial(_held, sharded_state_dict)
            plan = reuse(structure, agreement) or plan_together(state, structure, agreement, group, request, held)
        if request.options.drain_to is not None:
            directory.meet(group, plan.save_id)
        structure.described = state.described
        save.follow_plan(plan, Span("plan", began, time.monotonic()))
        _write(save, plan, state, request, directory)
        if compare != "off":
            save.replicas = Outcome.of(partial(_replica_sums, sharded_state_dict, plan.save_id, compare == "sample"))
        save.return_to_training()
    except BaseException:
        save.abort()
        raise
    return save


def _collect(
    sharded_state_dict: Any, directory: SaveDirectory, request: SaveRequest, structure: Structure
) -> RankState:
    """What this rank saves; and where, since a directory that it alone refuses is told all ranks, too."""
    directory.find()
    state = collect(sharded_state_dict, structure.described)
    if request.has_common_file and COMMON_STATE_KEY in state.object_keys:
        raise PlanError(
            f"{COMMON_STATE_KEY}: an object of this key would be read as the common state, which megatron-core 0.19 "
            "and later keep under it; give the ShardedObject another key than 'common_state'"
        )
    return state


def _write(
    save: SaveTransaction, plan: SavePlan, state: RankState, request: SaveRequest, directory: SaveDirectory
) -> None:
    """Fill this rank's buckets, and write them now, or start to."""
    objects = [data for _, data in state.objects]
    buckets = prepare_write_data(plan.layout, objects, state.tensors, state.described.pointers, plan.save_id)
    save.files, save.objects = [bucket.file for bucket in buckets], plan.layout.object_entries(buckets)
    if request.is_async:
        with collector_paused():
            save.job = start_writing(
                directory.storage, buckets, request.options, save.what, plan.unencoded, started=save.follow_job
            )
    else:
        write = partial(write_in_process, directory.storage, buckets, request.options)
        save.job = Job.ended(save.what, Outcome.of(partial(timed_result, write, plan.unencoded)))


# Few saves compare replicas: the module is imported for those.


def _held(sharded_state_dict: Any) -> bytes:
    from mcore_ckpt.save.replicas import held_slices

    return held_slices(sharded_state_dict)


def _replica_sums(sharded_state_dict: Any, save_id: bytes, is_sample: bool) -> ReplicaSums:
    from mcore_ckpt.save.replicas import replica_sums

    return replica_sums(sharded_state_dict, save_id, sample=is_sample)
