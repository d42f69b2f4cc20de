"""What is said of moments that stand still, and of replicas that have diverged."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.core.crc import crc32_of_zeros
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.format.metadata_write import ChunkFactors
from mcore_ckpt.save._state_history import StateHistory
from tests.support.gloo_ranks import run_megatron_ranks

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
def test_moments_that_stand_still_are_named(saves: list[tuple[str, int, int]], stale: list[str]) -> None:
    history = StateHistory()
    for name, weight, moment in saves:
        found = history.stale(name, FACTORS, array("q", [weight, moment, ZEROS]))
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
    for number, path in enumerate((first, second)):
        path.mkdir(parents=True)
        if number:
            TorchDistLoadStrategy().load(state(0.0, 0.0), first)
        options = SaveOptions(progress=False)
        TorchDistSaveStrategy(options=options).save(
            state(1.0 + number, 1.0 + number * step, number * (pieces - 1) + 1), path
        )
    said = [record.getMessage() for record in caplog.records if "bit for bit" in record.getMessage()]
    assert len(said) == stale
    assert not stale or f"1 of 1 moments of the optimizer are bit for bit what they were in {saved}" in said[0]
    assert not stale or "exp_avg.w" in said[0]


def save_diverged(rank: int, directory: Path) -> list[str]:
    """The error of each save, of which the second and the third find another element on rank 1."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

    options: dict[str, Any] = {"compare_replicas": "always", "on_diverged": "raise"}
    saver = TorchDistSaveStrategy(options=SaveOptions(progress=False, **options))
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
        try:
            saver.save({"w": shard}, path)
            said.append("")
        except SaveError as error:
            said.append(str(error).splitlines()[0])
    return said


def test_a_diverged_replica_can_fail_the_save(tmp_path: Path) -> None:
    for said in run_megatron_ranks(save_diverged, 2, tmp_path):
        assert said[0] == ""
        for number, steps in ((1, 100), (2, 200)):
            assert "w: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [3, 4]" in said[number]
            assert f"they were equal in iter_0000000, {steps} steps before" in said[number]
    assert [path.parent.name for path in tmp_path.glob("*/.metadata")] == ["iter_0000000"]
    assert len(list(tmp_path.glob("*/*.distcp"))) == len(list(tmp_path.glob("iter_0000000/*.distcp"))) > 0
