"""What is said of moments that stand still, and of replicas that have diverged."""

from __future__ import annotations

import functools
import pickle
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.core.crc import crc32_of_zeros
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.metadata_write import ChunkFactors
from mcore_ckpt.save import transaction
from mcore_ckpt.save.plan_check import ReplicaDigest, StateHistory, digest_of
from tests.support.gloo_ranks import run_megatron_ranks
from tests.support.kept_log import kept_log

MOMENTS = ((1, "exp_avg.w", crc32_of_zeros(16)), (2, "exp_avg.unused", crc32_of_zeros(8)))
FACTORS = ChunkFactors(array("I"), array("q"), array("I"), MOMENTS)
ZEROS = MOMENTS[1][2]


@pytest.mark.parametrize(
    ("saves", "stale"),
    [
        ([("iter_0000100", 1, 5), ("iter_0000200", 2, 5)], ["exp_avg.w"]),
        ([("iter_0000100", 1, 5), ("iter_0000200", 1, 5)], ["exp_avg.w"]),  # nothing at all has moved
        ([("iter_0000100", 1, 5), ("iter_0000200", 2, 6)], []),
        ([("iter_0000100", 1, 5), ("iter_0000100", 2, 5)], []),  # saved again
        ([("a", 1, 5), ("b", 1, 5)], []),  # no iteration, and nothing has moved
        ([("a", 1, 5), ("b", 2, 5)], ["exp_avg.w"]),
        ([("iter_0000100", 1, -1), ("iter_0000200", 2, -1)], []),  # without a fingerprint
    ],
)
def test_moments_that_stand_still_are_named(
    saves: list[tuple[str, int, int]], stale: list[str], tmp_path: Path
) -> None:
    history = StateHistory()
    for name, weight, moment in saves:
        history.begin(name, str(tmp_path))
        found = history.stale(FACTORS, array("q", [weight, moment, ZEROS]))
        history.published()
    assert found[1] == stale
    assert not stale or found[0] == saves[0][0]


@pytest.mark.parametrize(
    ("saved", "step", "pieces", "stale"),
    [
        ("iter_0000100", 0.0, 1, True),
        ("iter_0000100", 0.0, 2, True),  # under another layout
        ("iter_0000100", 1.0, 1, False),
        ("iter_0000200", 0.0, 1, False),  # of the same iteration: a copy
        ("release", 0.0, 1, False),
    ],
)
def test_the_first_save_after_a_restart_is_compared_with_what_was_loaded(
    saved: str, step: float, pieces: int, stale: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import SaveOptions, TorchDistLoadStrategy, TorchDistSaveStrategy

    def state(weight: float, moment: float, pieces: int = 1) -> dict[str, Any]:
        """Two tensors, each in so many pieces of rows."""
        values = {"w": torch.full((4, 4), weight), "exp_avg.w": torch.full((4, 4), moment)}
        return {
            f"{key} {n}": ShardedTensor.from_rank_offsets(key, piece, (0, n, pieces))
            for key, value in values.items()
            for n, piece in enumerate(value.chunk(pieces))
        }

    first, second = tmp_path / "before" / saved, tmp_path / "after" / "iter_0000200"
    loading = TorchDistLoadStrategy()
    for number, path in enumerate((first, second)):
        path.mkdir(parents=True)
        if number:
            loading.load(state(0.0, 0.0), first)
        saving = TorchDistSaveStrategy(options=SaveOptions())
        saving.cached_global_metadata = loading.cached_global_metadata
        saving.save(state(1.0 + number, 1.0 + number * step, number * (pieces - 1) + 1), path)
    said = [record.getMessage() for record in caplog.records if "bit for bit" in record.getMessage()]
    assert len(said) == stale
    assert not stale or f"1 of 1 moments of the optimizer are bit for bit what they were in {saved}" in said[0]
    assert not stale or "exp_avg.w" in said[0]


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
    from mcore_ckpt.save.transaction import Written

    mcore_ckpt.install()
    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas=compare))  # type: ignore[arg-type]
    gather, gathered = RankGroup.run_gather, []
    told: list[int] = []

    def noted(self: RankGroup, what: str, fn: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            value = fn()
            told.extend(len(pickle.dumps(value.replicas)) for _ in range(isinstance(value, Written)))
            return value

        gathered.append(what)
        return gather(self, what, call, **kwargs)

    RankGroup.run_gather = noted  # type: ignore[method-assign]
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


def test_a_digest_counts_each_replica() -> None:
    slices, crcs = np.arange(5, dtype=np.uint64) * np.uint64(2**61 - 1), np.arange(5, dtype=np.uint32) * 7
    times = np.array([0, 1, 2, 3, 1])
    one_by_one = [digest_of(slices[n : n + 1], crcs[n : n + 1]) for n in range(5) for _ in range(times[n])]
    assert functools.reduce(ReplicaDigest.added, one_by_one) == digest_of(slices, crcs, times)
    others = [np.array([0, 7, 14, 22, 28]), np.array([0, 14, 7, 21, 28])]
    for other in others:
        assert digest_of(slices, other.astype(np.uint32), times) != digest_of(slices, crcs, times)


def test_a_diverged_replica_is_named_with_the_save_in_which_it_was_equal(tmp_path: Path) -> None:
    said, others = run_megatron_ranks(save_diverged, 2, tmp_path)
    assert others == [""] * 3
    assert said[0] == ""
    for number, steps in ((1, 100), (2, 200)):
        assert "w: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [3, 4]" in said[number]
        assert f"they were equal in iter_0000000, {steps} steps before" in said[number]
    assert len(list(tmp_path.glob("*/.metadata"))) == 3


@pytest.mark.parametrize("kept", [True, False], ids=["one strategy", "a strategy for each save"])
@pytest.mark.parametrize("moves", [True, False])
def test_moments_are_compared_whatever_plans_the_save(
    kept: bool, moves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By one strategy whose saves are planned again, since an object has outgrown its room; or by another one."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

    options = SaveOptions()
    savers = {run: TorchDistSaveStrategy(options=options) for run in ("run", "other")}
    for number in (1, 2, 3):
        # Another run, which has nothing to do with this one.
        for run in savers:
            path = tmp_path / run / f"iter_{number:07d}"
            path.mkdir(parents=True)
            moment = torch.full((4,), float(number if moves else 1) + (run == "other") * 0.5)
            state = {
                "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(number))),
                "moment": ShardedTensor.from_rank_offsets("exp_avg.w", moment),
                "object": ShardedObject("o", "x" * 10 ** (3 + number), (1,), (0,)),
            }
            (savers[run] if kept else TorchDistSaveStrategy(options=options)).save(state, path)
    said = [record.getMessage() for record in caplog.records if "bit for bit" in record.getMessage()]
    assert [message.split("though")[0].rsplit("in ", 1)[1] for message in said] == (
        [] if moves else [f"iter_{number:07d}, " for number in (1, 1, 2, 2)]
    )


def test_a_save_that_has_failed_is_not_what_later_ones_are_compared_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="always"))
    publish = transaction.SaveDirectory.publish

    def refuse(*_: Any, **__: Any) -> None:
        raise SaveError("no space left")

    def save(iteration: int, replica: float, moment: float) -> None:
        path = tmp_path / f"iter_{iteration:07d}"
        path.mkdir(exist_ok=True)
        weight = torch.full((4, 4), float(iteration))
        state = {
            "w": ShardedTensor.from_rank_offsets("w", weight),
            "tied": ShardedTensor.from_rank_offsets("w", weight + replica, replica_id=1),
            "moment": ShardedTensor.from_rank_offsets("exp_avg.w", torch.full((4, 4), moment)),
        }
        saver.save(state, path)

    save(100, 0.0, 1.0)
    monkeypatch.setattr(transaction.SaveDirectory, "publish", refuse)
    with pytest.raises(SaveError, match="no space left"):
        save(200, 0.0, 2.0)
    monkeypatch.setattr(transaction.SaveDirectory, "publish", publish)
    save(300, 1.0, 2.0)  # the moments are those of the save that has failed, which nobody can resume from
    (diverged,) = [record.getMessage() for record in caplog.records if "other bits" in record.getMessage()]
    assert "they were equal in iter_0000100, 200 steps before" in diverged
    assert "bit for bit" not in caplog.text
    caplog.clear()
    save(200, 0.0, 2.0)  # again, where it had failed
    assert "gone" not in caplog.text
    assert "1 of 1 moments of the optimizer are bit for bit what they were in iter_0000300" in caplog.text
