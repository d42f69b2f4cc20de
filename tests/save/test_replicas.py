"""What is said of replicas that have diverged, and what it costs where they are equal."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from mcore_ckpt import SaveError, SaveOptions, TorchDistSaveStrategy, checkpoint_fingerprint
from tests.support.gloo_ranks import run_megatron_ranks
from tests.support.kept_log import kept_log

pytestmark = pytest.mark.quick


def save_diverged(rank: int, directory: Path) -> list[str]:
    """The warnings of each save, of which the second and the third find another element on rank 1."""
    from megatron.core.dist_checkpointing import ShardedTensor

    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="warn"))
    weight = torch.arange(12.0).reshape(3, 4)
    said = []
    for number in range(3):
        path = directory / f"iter_{100 * number:07d}"
        path.mkdir(exist_ok=True)
        torch.distributed.barrier()
        weight += 1
        if number and rank == 1:
            weight[1, 1] += 1
        shard = ShardedTensor.from_rank_offsets("w", weight, replica_id=rank)
        with kept_log() as warned:
            saver.save({"w": shard}, path)
        said.append("; ".join(line for line in warned if "differ between replicas" in line))
    return said


def test_diverged_replicas_are_named_and_the_checkpoint_is_published(tmp_path: Path) -> None:
    said, others = run_megatron_ranks(save_diverged, 2, tmp_path)
    assert others == [""] * 3
    assert said[0] == ""
    for number in (1, 2):
        assert "w: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [3, 4]" in said[number]
    assert len(list(tmp_path.glob("*/.metadata"))) == 3


def save_refused(rank: int, directory: Path, is_async: bool) -> list[str]:
    """What each rank raises where rank 1 holds another element; before and after it all hold the same."""
    from megatron.core.dist_checkpointing import ShardedTensor

    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="raise"))
    weight = torch.arange(12.0).reshape(3, 4)

    def save() -> None:
        state = {"w": ShardedTensor.from_rank_offsets("w", weight, replica_id=rank)}
        if is_async:
            request = saver.async_save(state, directory)
            request.async_fn(*request.async_fn_args)
            for finalize in request.finalize_fns:
                finalize()
        else:
            saver.save(state, directory)

    save()
    torch.distributed.barrier()
    before = sorted((entry.name, entry.inode()) for entry in os.scandir(directory))
    weight += 1 + rank
    with pytest.raises(SaveError) as caught:
        save()
    torch.distributed.barrier()
    assert sorted((entry.name, entry.inode()) for entry in os.scandir(directory)) == before
    weight -= rank
    save()
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_of_diverged_replicas_is_refused_on_all_ranks(tmp_path: Path, is_async: bool) -> None:
    for message in run_megatron_ranks(save_refused, 2, tmp_path, is_async):
        assert "w: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [3, 4]" in message
    saved = torch.arange(12.0).reshape(3, 4) + 1
    assert checkpoint_fingerprint(tmp_path).tensors["w"].crc32 == zlib.crc32(saved.numpy())
