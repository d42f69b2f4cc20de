"""A plan is used again only where all ranks can use it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import TorchDistSaveStrategy
from mcore_ckpt.save.planner import lay_out_rank
from tests.support.gloo_ranks import made, on_ranks, run_megatron_ranks

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedTensor

_ROWS = 4
# A tensor in three parts, of which each has the value of its number; further tensors are saved by one rank.
_A, _B, _C = ("a", 0), ("a", 1), ("a", 2)


def _part(key: str, part: int, value: float) -> Any:
    return ShardedTensor.from_rank_offsets(key, torch.full((_ROWS,), value), (0, part, 3))


def _save_all(rank: int, directory: Path, saves: list[list[list[tuple[str, int]]]]) -> list[bool]:
    """Save after save, what each rank holds; whether the plan was used again."""
    strategy = TorchDistSaveStrategy()
    outcomes = []
    for number, held in enumerate(saves):
        state = {f"{key}{part}": _part(key, part, 10 * number + part) for key, part in held[rank]}
        strategy.save(state, made(directory / str(number)))
        outcomes.append(strategy.validated_cache_reuse)
    return outcomes


def _check(directory: Path, number: int, keys: str) -> None:
    with mcore_ckpt.open_checkpoint(directory / str(number)) as checkpoint:
        assert sorted(checkpoint.tensors) == sorted(keys)
        for key in keys:
            values = [10.0 * number + part for part in range(3) for _ in range(_ROWS)]
            assert checkpoint[key][:].tolist() == values
    assert mcore_ckpt.verify_checkpoint(directory / str(number)).whole


# What each rank holds in each save, and whether the plan is used again.
CASES = {
    "nothing changes": ([[[_A], [_B], [_C]]] * 3, [False, True, True]),
    "two ranks swap what they hold": (
        [[[_A], [_B], [_C]], [[_A], [_C], [_B]], [[_A], [_C], [_B]]],
        [False, False, True],
    ),
    "one rank has more": (
        [[[_A], [_B], [_C]], [[_A], [_B], [_C, ("x", 0), ("x", 1), ("x", 2)]], [[_A], [_B], [_C]]],
        [False, False, False],
    ),
    "one rank gives to one that had nothing": (
        [[[_A, _B], [_C], []], [[_A], [_C], [_B]], [[_A], [_C], [_B]]],
        [False, False, True],
    ),
}


def _save_each(rank: int, directory: Path) -> dict[str, list[bool]]:
    return {name: _save_all(rank, directory / name, saves) for name, (saves, _) in CASES.items()}


def test_a_plan_is_used_again_if_it_is_that_of_every_rank(tmp_path: Path) -> None:
    expected = {name: used_again for name, (_, used_again) in CASES.items()}
    assert run_megatron_ranks(_save_each, 3, tmp_path) == [expected] * 3
    for name, (saves, _) in CASES.items():
        for number, held in enumerate(saves):
            _check(tmp_path / name, number, "".join(sorted({key for of_rank in held for key, _ in of_rank})))


@on_ranks(3)
def test_plans_of_different_saves_are_not_mixed(rank: int, tmp_path: Path) -> None:
    """Two strategies have made plans of their own; then the ranks differ in which one they use."""
    strategies = {key: TorchDistSaveStrategy() for key in "ab"}
    for number, chosen in enumerate(("aaa", "bbb", "aba")):
        key = chosen[rank]
        # Both plans have the same files of the same lengths; every rank has a tensor of its own.
        tensor = ShardedTensor.from_rank_offsets(f"{key}{rank}", torch.full((_ROWS,), 10.0 * number + rank))
        strategies[key].save({"w": tensor}, made(tmp_path / str(number)))
    with mcore_ckpt.open_checkpoint(tmp_path / "2") as checkpoint:
        found = {key: checkpoint[key][:].tolist() for key in checkpoint.tensors}
    assert found == {"a0": [20.0] * _ROWS, "b1": [21.0] * _ROWS, "a2": [22.0] * _ROWS}
    assert mcore_ckpt.verify_checkpoint(tmp_path / "2").whole


@on_ranks(1)
def test_another_number_of_files_is_laid_out_again(rank: int, tmp_path: Path) -> None:
    strategy = TorchDistSaveStrategy()
    for number, strategy.thread_count in enumerate((1, 3, 3)):
        path = made(tmp_path / str(number))
        strategy.save({k: ShardedTensor.from_rank_offsets(k, torch.ones(_ROWS)) for k in "abcd"}, path)
        assert len(list((tmp_path / str(number)).glob("*.distcp"))) == strategy.thread_count


def test_objects_that_outgrow_their_region_ask_for_a_new_layout() -> None:
    layout = lay_out_rank([], ["x/shard_0_1"], [100], rank=0, thread_count=2)
    assert layout.has_room(["x/shard_0_1"], [4000])
    assert not layout.has_room(["x/shard_0_1"], [5000])
    assert not lay_out_rank([], [], [], rank=0, thread_count=2).has_room(["x"], [1])
