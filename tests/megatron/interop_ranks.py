"""What the ranks of the interop tests do; each function runs in processes of its own (see gloo_ranks)."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from tests.support.models import ModelShape, Parallel, build_training
from tests.support.shared_groups import share_groups
from tests.support.state_compare import Comparison, Reference, write_reference
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
        return self.directory / "reference"


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a rank found after a load, and which strategy methods had run."""

    before: Comparison
    after: Comparison
    iteration: int
    strategies: tuple[str, ...]


def _prepare(ours: bool) -> None:
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    share_groups()
    if ours:
        import mcore_ckpt

        mcore_ckpt.install()
    else:
        assert "mcore_ckpt" not in sys.modules


def save_all(rank: int, jobs: list[Job], ours: bool, asynchronous: bool = False) -> dict[str, tuple[str, ...]]:
    """Train each job's model, keep the reference, save; returns the strategy methods that ran, by job."""
    _prepare(ours)
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    ran = {}
    for seed, job in enumerate(jobs, start=1):
        training = build_training(job.shape, job.layout, seed)
        training.train(STEPS)
        state_dict = training.sharded_state_dict()
        write_reference(job.reference, rank, state_dict)
        if job.flat_buckets:
            state_dict = training.sharded_state_dict(flat_buckets=True)
        if rank == 0:
            job.checkpoint.mkdir()
        dist.barrier()
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
    """Load each job's checkpoint into a fresh model of the job's layout and compare with its reference."""
    _prepare(ours)
    from megatron.core import dist_checkpointing

    found = {}
    for job in jobs:
        training = build_training(job.shape, job.layout, seed=100)
        reference = Reference.read(job.reference)
        before = reference.compare(training.sharded_state_dict(is_loading=True))
        with record_strategies() as strategies:
            training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), job.checkpoint))
        after = reference.compare(training.sharded_state_dict())
        found[job.name] = LoadedState(before, after, training.step, tuple(strategies))
    assert ours or "mcore_ckpt" not in sys.modules
    return found
