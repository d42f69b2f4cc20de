"""What the ranks of the interop tests do; each function runs in processes of its own (see gloo_ranks)."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from tests.support.gloo_ranks import made
from tests.support.models import ModelShape, Parallel, build_training
from tests.support.shared_groups import fork_results_queue, share_groups
from tests.support.state_compare import differing, read_state, write_state
from tests.support.who_ran import record_strategies

STEPS = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One model to save or load: where, under which layout; whether the optimizer's state is saved in flat buckets."""

    name: str
    shape: ModelShape
    layout: Parallel
    directory: Path
    flat_buckets: bool = False

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def reference(self) -> Path:
        """What was saved; `before` and `after`: what a load found, and left."""
        return self.directory / "reference"


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a rank found after a load, and which strategy methods had run."""

    iteration: int
    strategies: tuple[str, ...]
    own: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # its main replicas: keys, offsets, sizes


def _prepare(ours: bool) -> None:
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    share_groups()
    if ours:
        import mcore_ckpt

        mcore_ckpt.install()
    else:
        fork_results_queue()
        assert "mcore_ckpt" not in sys.modules


def save_all(rank: int, jobs: list[Job], ours: bool, asynchronous: bool = False) -> dict[str, tuple[str, ...]]:
    """Train each job's model, keep the reference, save; returns the strategy methods that ran, by job."""
    _prepare(ours)
    ran = {}
    for seed, job in enumerate(jobs, start=1):
        training = build_training(job.shape, job.layout, seed)
        training.train(STEPS)
        state_dict = training.sharded_state_dict()
        write_state(job.reference, rank, state_dict)
        if job.flat_buckets:
            state_dict = training.sharded_state_dict(flat_buckets=True)
        made(job.checkpoint)
        with record_strategies() as strategies:
            if asynchronous:
                import mcore_ckpt

                queue = mcore_ckpt.AsyncCallsQueue()
                queue.schedule_async_request(
                    dist_checkpointing.save(state_dict, job.checkpoint, async_sharded_save=True)
                )
                training.train(1)  # what is saved must not be this
                queue.maybe_finalize_async_calls(blocking=True)
                queue.close()
            else:
                dist_checkpointing.save(state_dict, job.checkpoint)
        ran[job.name] = tuple(strategies)
    assert ours or "mcore_ckpt" not in sys.modules
    return ran


def load_all(rank: int, jobs: list[Job], ours: bool) -> dict[str, LoadedState]:
    """Load each job's checkpoint into a fresh model of the job's layout, and write the state before and after."""
    _prepare(ours)
    found = {}
    for job in jobs:
        training = build_training(job.shape, job.layout, seed=100)
        wanted = training.sharded_state_dict(is_loading=True)
        write_state(job.directory / "before", rank, wanted["model"])  # (Megatron does not fill what a load fills)
        own = _main_replicas(wanted)
        with record_strategies() as strategies:
            training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), job.checkpoint))
        write_state(job.directory / "after", rank, training.sharded_state_dict())
        found[job.name] = LoadedState(training.step, tuple(strategies), own)
    assert ours or "mcore_ckpt" not in sys.modules
    return found


def _main_replicas(state_dict: dict[str, Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    apply_factories(state_dict)
    shards = [value for value in nested_values(state_dict) if isinstance(value, ShardedTensor)]
    return [
        (shard.key, tuple(shard.global_offset), (*(1,) * shard.prepend_axis_num, *shard.local_shape))
        for shard in shards
        if is_main_replica(shard.replica_id)
    ]


def assert_loaded(job: Job, loaded: list[LoadedState], package: str) -> None:
    """Every byte of model and optimizer is as it was saved, and the named package's strategy did it on every rank."""
    for state in loaded:
        assert state.strategies
        assert all(ran.startswith(f"{package}.") for ran in state.strategies), state.strategies
        assert state.iteration == STEPS
    saved = read_state(job.reference)
    # The fresh model differs from the saved one in most tensors, so that the same afterwards means something.
    before = read_state(job.directory / "before")
    assert len(differing(before, {key: saved[key] for key in before})) > len(before) / 2
    assert differing(read_state(job.directory / "after"), saved) == []
