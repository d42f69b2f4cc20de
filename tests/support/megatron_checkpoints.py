"""What the ranks of the reshard tests do; each function runs in processes of its own (see gloo_ranks)."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.keys import data_file_rank
from tests.megatron.interop_ranks import Job, LoadedState
from tests.support.cpu_megatron import pretend_cuda
from tests.support.models import ModelShape, Parallel, build_training
from tests.support.state_compare import Reference


def load_and_locate(rank: int, jobs: list[Job]) -> dict[str, tuple[LoadedState, list[str]]]:
    """Load each job with stock Megatron-Core, and list the shards that are not one chunk in a file of this rank.

    The shards are Megatron's own: those of which this rank holds the main replica.
    """
    pretend_cuda()
    from megatron.core import dist_checkpointing

    found = {}
    for job in jobs:
        training = build_training(job.shape, job.layout, seed=100)
        reference = Reference.read(job.reference)
        before = reference.compare(training.sharded_state_dict(is_loading=True))
        elsewhere = _not_in_own_file(rank, training.sharded_state_dict(is_loading=True), job.checkpoint)
        training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), str(job.checkpoint)))
        after = reference.compare(training.sharded_state_dict())
        found[job.name] = LoadedState(before, after, training.step, ()), elsewhere
    return found


def save_in_buckets(rank: int, jobs: dict[Path, int | None]) -> None:
    """Train a model for a step and let stock Megatron-Core save it, with buckets of so many elements, or one."""
    pretend_cuda()
    from megatron.core import dist_checkpointing

    for path, elements in jobs.items():
        training = build_training(ModelShape(layers=1, hidden=32), Parallel(), bucket_elements=elements)
        training.train(1)
        dist_checkpointing.save(training.sharded_state_dict(), str(path))


def _not_in_own_file(rank: int, state_dict: dict[str, object], checkpoint: Path) -> list[str]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    apply_factories(state_dict)
    index = read_index(checkpoint)
    wrong = []
    shards = [value for value in nested_values(state_dict) if isinstance(value, ShardedTensor)]
    assert shards
    for shard in shards:
        if not is_main_replica(shard.replica_id):
            continue
        box = tuple(shard.global_offset), (*(1,) * shard.prepend_axis_num, *shard.local_shape)
        chunks = {(chunk.offsets, chunk.sizes): chunk.item.file for chunk in index.tensors[shard.key].chunks}
        file = chunks.get(box)
        if file is None or data_file_rank(file) != rank:
            wrong.append(f"{shard.key} {box}: {file or sorted(chunks)}")
    return wrong
