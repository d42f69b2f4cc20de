"""What is said of replicas that have diverged, and what it costs where they are equal."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import run_megatron_ranks
from tests.support.kept_log import kept_log


def save_diverged(rank: int, directory: Path) -> list[str]:
    """The warnings of each save, of which the second and the third find another element on rank 1."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="always"))
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


def save_replicas(
    rank: int, directory: Path, tensors: int, compare: str, validates: bool
) -> list[tuple[list[str], int]]:
    """Of each of four saves, of which the third has another element on the last rank: what was gathered, and how many
    bytes this rank said of its replicas.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    import mcore_ckpt
    from mcore_ckpt import SaveOptions, TorchDistSaveStrategy
    from mcore_ckpt.core.ranks import RankGroup
    from mcore_ckpt.save.commit import Written

    mcore_ckpt.install()
    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas=compare))  # type: ignore[arg-type]
    gather, gathered = RankGroup.gather, []
    told: list[int] = []

    def noted(self: RankGroup, what: str, fn: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            value = fn()
            told.extend(len(pickle.dumps(value.replicas)) for _ in range(isinstance(value, Written)))
            return value

        gathered.append(what)
        return gather(self, what, call, **kwargs)

    RankGroup.gather = noted  # type: ignore[method-assign]
    found = []
    for number in range(4):
        path = directory / f"iter_{100 * number:07d}"
        path.mkdir(exist_ok=True)
        torch.distributed.barrier()
        values = {f"w{n}": torch.full((8, 4), float(n + number)) for n in range(tensors)}
        if number == 2 and rank == 2:
            for value in values.values():
                value[3, 2] += 1
        # Each rank saves some of them, as behind the fully parallel wrapper, and a tied one has two on each rank.
        state = {
            key: ShardedTensor.from_rank_offsets(
                key, value, replica_id=(rank + at) % torch.distributed.get_world_size()
            )
            for at, (key, value) in enumerate(values.items())
        }
        state["tied"] = ShardedTensor.from_rank_offsets("w0", values["w0"], replica_id=9)
        dist_checkpointing.save(state, str(path), saver, validate_access_integrity=validates)
        found.append((list(gathered), told.pop()))
        gathered.clear()
    return found


@pytest.mark.parametrize("compare", ["always", "sample"])
@pytest.mark.parametrize("validates", [True, False])
def test_equal_replicas_are_told_in_a_fixed_size(compare: str, validates: bool, tmp_path: Path) -> None:
    lengths = set()
    for tensors in (3, 300):
        directory = tmp_path / str(tensors)
        directory.mkdir()
        for by_save in run_megatron_ranks(save_replicas, 3, directory, tensors, compare, validates):
            for number, (gathered, nbytes) in enumerate(by_save):
                lengths.add(nbytes)
                assert gathered[0] == "write the data files"
                if number != 2:
                    assert gathered[1:] == [], number
                elif compare == "always" or tensors == 300:  # a sample of a few may have none
                    assert gathered[1:] == ["compare the replicas"]
    assert max(lengths) - min(lengths) < 16, lengths


def test_diverged_replicas_are_named_and_the_checkpoint_is_published(tmp_path: Path) -> None:
    said, others = run_megatron_ranks(save_diverged, 2, tmp_path)
    assert others == [""] * 3
    assert said[0] == ""
    for number in (1, 2):
        assert "w: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [3, 4]" in said[number]
    assert len(list(tmp_path.glob("*/.metadata"))) == 3
