"""What of a run stands still, appears or disappears is named at the save in which it first does."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import FileSystemWriterAsync, SaveOptions, TorchDistSaveStrategy
from mcore_ckpt.commands.cli import main
from mcore_ckpt.tools.runs import lineage_of_run
from tests.support.command import document_of, output_of
from tests.support.gloo_ranks import made, on_ranks
from tests.support.local_files import flip

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

W, FROZEN, NORM = "decoder.linear.weight", "frozen.weight", "decoder.norm.weight"
MASTER, MOMENT = (f"optimizer.state.{kind}.{W}" for kind in ("param", "exp_avg"))


def state(step: int, rank: int = 0, **held: Any) -> dict[str, Any]:
    """After so many steps; a weight that is frozen, and one that rounds to what it was."""
    tensors = {
        **{key: torch.full((64, 64), step + 1.0) for key in (W, MASTER, MOMENT)},
        FROZEN: torch.ones(64, 64),
        NORM: torch.ones(64, dtype=torch.bfloat16),
        f"optimizer.state.param.{NORM}": torch.full((64,), 1 + step * 1e-5),
    }
    tensors = {**tensors, **{key: value for key, value in held.items() if "state" not in key or "optim" in key}}
    found: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, value, replica_id=rank)
        for key, value in tensors.items()
        if value is not None
    }
    for number in range(2):
        drawn = held.get(f"rng_state {number}", step)
        key = f"rng_state {number}"
        found[key] = ShardedObject("rng_state", [drawn], (2,), (number,), replica_id=rank)
    found["kept"] = ShardedObject("kept", held.get("kept state", {"a": 1}), (1,), (0,), replica_id=rank)
    return found


def save(run: Path, *states: dict[str, Any]) -> None:
    for number, held in enumerate(states):
        path = run / f"iter_{number + 1:07d}"
        path.mkdir(parents=True)
        TorchDistSaveStrategy(options=SaveOptions()).save(held, path)


def named(run: Path) -> list[tuple[int, str, str]]:
    return [(int(one.checkpoint[-1]), one.key, one.what) for one in lineage_of_run(run).departures]


# As after one step.
STUCK = {
    **{key: torch.full((64, 64), 2.0) for key in (W, MASTER, MOMENT)},
    **{f"rng_state {number}": 1 for number in range(2)},
    f"optimizer.state.param.{NORM}": torch.full((64,), 1 + 1e-5),
}
RNG = [f"rng_state/shard_{number}_2" for number in range(2)]
STILL, STOPS = "stands still while others of its kind change", "stands still, and did change before"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{}, {}, {}], []),
        ([{}, {MOMENT: torch.ones(64, 64)}, {MOMENT: torch.ones(64, 64)}], [(2, MOMENT, STILL)]),
        ([{}, {}, {W: torch.full((64, 64), 2.0)}, {W: torch.full((64, 64), 2.0)}], [(3, W, STILL)]),
        ([{}, {}, {"rng_state 1": 1}], [(3, "rng_state/shard_1_2", STILL)]),
        ([{}, {}, {"rng_state 0": 1, "rng_state 1": 1}], [(3, f"rng_state/shard_{n}_2", STOPS) for n in (0, 1)]),
        ([{}, {}, STUCK], [(3, key, STOPS) for key in (W, MASTER, MOMENT, f"optimizer.state.param.{NORM}", *RNG)]),
        ([{}, {MOMENT: None}, {}], [(2, MOMENT, "disappears"), (3, MOMENT, "appears")]),
        ([{}, {W: torch.ones(2)}], [(2, W, "was float32 [64, 64], is float32 [2]")]),
    ],
    ids=["as it should be", "moment", "weight", "one random state", "all random states", "all", "key", "shape"],
)
def test_what_left_its_lineage_is_named_once(
    states: list[dict[str, Any]], expected: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    save(tmp_path, *(state(step, **held) for step, held in enumerate(states)))
    assert sorted(named(tmp_path)) == sorted(expected)


def test_one_state_that_is_saved_twice_left_nothing(tmp_path: Path) -> None:
    save(tmp_path, state(1), state(1), state(2))
    assert "nothing left its lineage in 3 checkpoints" in output_of("diff", "--state", tmp_path)
    assert main(["diff", str(tmp_path)]) == 2  # of one run, only the states are compared
    assert main(["diff", "--state", str(tmp_path / "iter_0000001")]) == 2
    save(tmp_path / "other", state(1), state(2, **{MOMENT: torch.full((64, 64), 2.0)}))
    assert [one["key"] for one in document_of("diff", "--state", tmp_path / "other", code=1)["departures"]] == [MOMENT]


def test_objects_of_a_plain_run_that_stay_as_they_are_left_nothing(tmp_path: Path) -> None:
    for step, best in enumerate((1, 2, 2)):
        held = {
            "w": torch.full((4, 4), step * 1.0),
            "config": {"hidden": 4},
            "step": {"n": step},
            "best": {"loss": best},
        }
        dcp.save(held, storage_writer=FileSystemWriterAsync(tmp_path / f"iter_{step + 1:07d}"), no_dist=True)
    assert named(tmp_path) == []


@on_ranks(2)
def test_a_save_whose_ranks_held_other_objects_is_named(rank: int, tmp_path: Path) -> None:
    for step in range(2):
        held = {"kept state": {"a": rank * step}}
        strategy = TorchDistSaveStrategy(options=SaveOptions())
        strategy.save(state(step, rank, **held), made(tmp_path / f"iter_{step + 1:07d}"))
    torch.distributed.barrier()
    key = "kept/shard_0_1"
    assert (2, key, "ranks that claim to hold replicas hold other objects") in named(tmp_path)


def test_a_damaged_object_does_not_hide_what_else_left_its_lineage(tmp_path: Path) -> None:
    kept = {"kept state": {"a": "to be damaged"}}
    save(tmp_path, state(1, **kept), state(2, **kept), state(3, **{MOMENT: None}))
    for number in (1, 2):
        for file in (tmp_path / f"iter_{number:07d}").glob("*.distcp"):
            if (at := file.read_bytes().find(b"to be damaged")) >= 0:
                flip(file, at)
    damaged, also, gone = named(tmp_path)
    assert [damaged[:2], also[:2]] == [(1, "kept/shard_0_1"), (2, "kept/shard_0_1")]
    assert damaged[2].startswith("cannot be read: kept/shard_0_1")
    assert gone == (3, MOMENT, "disappears")


def test_each_checkpoint_of_a_run_is_verified(tmp_path: Path) -> None:
    save(tmp_path, state(1), state(2, **{MASTER: torch.full((64, 64), 4.0)}), state(3))
    (tmp_path / "iter_0000003" / ".metadata").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    found = document_of("verify", "--all", "--check-optimizer", tmp_path, code=1)
    assert [one["whole"] for one in found.values()] == [True, False, False, False]
    assert found["tracker"]["error"] == "it names iter_0000004, which is not there"
    assert [problem["fqn"] for problem in found["iter_0000002"]["problems"]] == [MASTER]
    save(tmp_path / "cut", state(1), state(2), state(3))
    for file in (tmp_path / "cut" / "iter_0000002").glob("*.distcp"):
        os.truncate(file, 10)
    assert named(tmp_path / "cut") == [(2, ".metadata", "of a checkpoint that is not complete: left out")]
