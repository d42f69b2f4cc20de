"""`on_damaged="go_back"`: a launch whose newest checkpoint is damaged goes on from an older one, whole, on all ranks.

What a launch does is done here as its training code does it: the tracker file names an iteration, its directory is
asked for its format, the common state is read, and then everything is loaded.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import serialization as megatrons
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from mcore_ckpt import CorruptCheckpointError, LoadOptions, NewerFormatError
from mcore_ckpt.format.integrity import split_metadata
from mcore_ckpt.megatron import serialization
from tests.megatron.trap_ranks import check, installed, state
from tests.support.gloo_ranks import made, on_ranks, run_megatron_ranks
from tests.support.kept_log import kept_log

GO_BACK = {"MCORE_CKPT_ON_DAMAGED": "go_back"}
TRACKER = "latest_checkpointed_iteration.txt"


def directory_of(run: Path, iteration: int) -> Path:
    return run / f"iter_{iteration:07d}"


def train(rank: int, run: Path, iterations: int) -> None:
    """A run of so many checkpoints, the tracker at the last."""
    dist_checkpointing = installed()
    for iteration in range(1, iterations + 1):
        dist_checkpointing.save(state(iteration), made(directory_of(run, iteration)))
    by_first(rank, lambda: (run / TRACKER).write_text(str(iterations)))


def by_first(rank: int, change: Callable[[], object]) -> None:
    """One rank changes files, and all go on."""
    if rank == 0:
        change()
    dist.barrier()


def resume(run: Path, fully_parallel: bool = False) -> tuple[int, int, list[str]]:
    """Load as a launch does: iteration of the common state that it reads first, and of all that it loads; warnings."""
    dist_checkpointing = installed()
    with kept_log() as said:
        name = str(directory_of(run, int((run / TRACKER).read_text())))
        assert dist_checkpointing.check_is_distributed_checkpoint(name)
        first = dist_checkpointing.load_common_state_dict(name)["common"]["iteration"]
        find = getattr(megatrons, "get_default_load_sharded_strategy", None)
        strategy = strategies.TorchDistLoadShardedStrategy() if find is None else find(name)
        if fully_parallel:
            strategy = FullyParallelLoadStrategyWrapper(strategy)
        loaded = dist_checkpointing.load(state(0), name, strategy)
    iteration: int = loaded["common"]["iteration"]
    check(loaded, iteration)
    return first, iteration, [text for text in said if "DAMAGED" in text]


def flip_payload(checkpoint: Path) -> None:
    """What no structure shows: a byte of a tensor that every rank reads."""
    iteration = int(checkpoint.name.removeprefix("iter_"))
    payload = (torch.arange(100.0) * iteration).numpy().tobytes()
    for file in checkpoint.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        at = content.find(payload)
        if at >= 0:
            content[at + 101] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError("no file holds the tensor")


def truncate(checkpoint: Path) -> None:
    file = sorted(checkpoint.glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil_common_state(checkpoint: Path) -> None:
    if (checkpoint / "common.pt").exists():
        (checkpoint / "common.pt").write_bytes(b"PK nothing")
    else:
        truncate(checkpoint)  # 0.19 and later keep it in the data files


DAMAGES: dict[str, Callable[[Path], object]] = {
    "payload": flip_payload,
    "truncated": truncate,
    "index": lambda checkpoint: (checkpoint / ".metadata").write_bytes(b"nothing"),
    "no index": lambda checkpoint: (checkpoint / ".metadata").unlink(),
    "config": lambda checkpoint: (checkpoint / "metadata.json").write_text("{"),
    "common state": spoil_common_state,
}


def damage_and_resume(rank: int, run: Path) -> dict[str, Any]:
    """In one world: each kind of damage to the newest of three checkpoints, and what is loaded then."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, damage in DAMAGES.items():
        for fully_parallel in (False, True) if name in ("payload", "truncated") else (False,):
            of_damage = run / f"{name} {fully_parallel}"
            train(rank, of_damage, 3)
            by_first(rank, partial(damage, directory_of(of_damage, 3)))
            found[f"{name} {fully_parallel}"] = resume(of_damage, fully_parallel)
    with mock.patch.object(serialization, "read_config", side_effect=OSError("stale handle")):  # of a sound one
        assert serialization._problem(directory_of(run / "payload False", 1), LoadOptions()) is None
    return found


def test_all_that_is_loaded_is_of_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    outcomes = run_megatron_ranks(damage_and_resume, 2, tmp_path, environment=GO_BACK)
    assert outcomes[0].keys() == outcomes[1].keys()
    for name in outcomes[0]:
        for rank, of_rank in enumerate(outcomes):
            first, iteration, told = of_rank[name]
            assert iteration == 2, name
            # Before everything was read, nobody could know of a flipped bit in a payload.
            assert first == (3 if name.startswith("payload") else 2), name
            assert len(told) == (1 if rank == 0 else 0), (name, told)
            if rank == 0:
                assert told[0].startswith("going back to iteration 2, ")
                assert "iter_0000003" in told[0]
                assert "iter_0000002" in told[0]
                assert "Traceback" not in told[0]
                assert "--- on rank" not in told[0]
                if name.startswith("payload"):
                    assert "the file was damaged after it was written" in told[0]


@on_ranks(2, environment=GO_BACK)
def test_no_older_checkpoint_is_read_into_half_of_a_newer_one(rank: int, tmp_path: Path) -> None:
    """The first checkpoint lacks a tensor, which the damaged third has filled in by then: there would be a mix."""

    def grown(fill: int) -> dict[str, Any]:
        return {
            **state(fill),
            "later": ShardedTensor.from_rank_offsets("later", torch.full((9,), fill), replica_id=rank),
        }

    train(rank, tmp_path, 3)
    newest = str(directory_of(tmp_path, 3))
    for iteration in (2, 3):
        installed().save(grown(iteration), str(directory_of(tmp_path, iteration)))
    for damaged, expected in ((3, 2), (2, None)):
        by_first(rank, partial(flip_payload, directory_of(tmp_path, damaged)))
        if expected is not None:
            loaded = installed().load(grown(0), newest, strict="log_all")
            assert (loaded["common"]["iteration"], loaded["later"].unique().tolist()) == (expected, [expected])
    with pytest.raises(CorruptCheckpointError, match="no older one that is complete and has the same tensors"):
        installed().load(grown(0), newest, strict="log_all")


@on_ranks(2, environment=GO_BACK)
def test_as_far_back_as_need_be_and_forward_again(rank: int, tmp_path: Path) -> None:
    """Something newer has written the third, which is no damage. Two in a row are damaged; training goes on from the
    first and saves the third again; then all are damaged.
    """
    run = tmp_path
    train(rank, run, 4)
    by_first(rank, lambda: truncate(directory_of(run, 4)))
    assert [resume(run)[:2], resume(run)[:2]] == [(3, 3), (3, 3)]  # the third is remembered, and lost
    by_first(rank, lambda: shutil.move(directory_of(run, 3), run / "lost"))
    assert resume(run)[1] == 2
    dist.barrier()
    if rank == 0:
        shutil.move(run / "lost", directory_of(run, 3))
        shutil.rmtree(directory_of(run, 4))
        (run / TRACKER).write_text("3")
    dist.barrier()
    index = directory_of(run, 3) / ".metadata"
    content = index.read_bytes()
    dist.barrier()
    if rank == 0:
        pickled, _ = split_metadata(content, "x")
        index.write_bytes(pickled.replace(b"TensorProperties", b"TensorLayoutInfo"))
    dist.barrier()
    for use in (lambda: resume(run), lambda: installed().load(state(0), str(directory_of(run, 3)))):
        with pytest.raises(NewerFormatError, match=r"metadata\.TensorLayoutInfo"):
            use()
    dist.barrier()
    if rank == 0:
        index.write_bytes(content)
        flip_payload(directory_of(run, 3))
        flip_payload(directory_of(run, 2))
    dist.barrier()
    assert [resume(run)[:2], resume(run)[:2]] == [(3, 1), (1, 1)]  # what was found is remembered
    installed().save(state(3), str(directory_of(run, 3)))
    dist.barrier()
    assert resume(run)[:2] == (3, 3)
    if rank == 0:
        for iteration in (1, 2, 3):
            (directory_of(run, iteration) / ".metadata").write_bytes(b"nothing")
    dist.barrier()
    for use in (lambda: resume(run), lambda: installed().load(state(0), str(directory_of(run, 3)))):
        with pytest.raises(CorruptCheckpointError, match=r"no older one that is complete"):
            use()


@on_ranks(2)
def test_by_default_a_damaged_checkpoint_ends_the_load(rank: int, tmp_path: Path) -> None:
    train(rank, tmp_path, 2)
    by_first(rank, lambda: truncate(directory_of(tmp_path, 2)))
    with pytest.raises(CorruptCheckpointError, match="iter_0000002"):
        resume(tmp_path)
    if rank == 1:
        return
    # Megatron takes a checkpoint without its `metadata.json` for one of DCP: what is lost is said before that.
    checkpoint = directory_of(tmp_path, 1)
    for name in ("common.pt", "metadata.json"):
        (checkpoint / name).unlink(missing_ok=True)
    with kept_log() as said, pytest.raises(Exception, match="is not a distributed checkpoint"):
        installed().load_common_state_dict(str(checkpoint))
    assert any(text.startswith("metadata.json: missing") for text in said), said
    # A launch asks one rank what the newest checkpoint is: of a sound one of another format it has to hear that.
    os.environ.update(GO_BACK)
    legacy, of_dcp = directory_of(tmp_path, 3), directory_of(tmp_path, 4)
    (legacy / "mp_rank_00").mkdir(parents=True)
    torch.save({"iteration": 3}, legacy / "mp_rank_00" / "model_optim_rng.pt")
    torch.distributed.checkpoint.save({"w": torch.ones(4)}, checkpoint_id=of_dcp, no_dist=True)
    for directory in (legacy, of_dcp):
        assert not dist_checkpointing.check_is_distributed_checkpoint(str(directory))
