"""Saves of one rank in odd cases: state that cannot be saved, interruptions, directories that move or are shared."""

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import TorchDistSaveStrategy, checkpoint_fingerprint
from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from mcore_ckpt.save.planner import NOTHING, collect
from mcore_ckpt.state.shards import pointer_of
from tests.support.gloo_ranks import made, on_ranks
from tests.support.kept_log import kept_log

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from tests.save.test_owner import loaded, state, strategy

pytestmark = pytest.mark.quick

_QUIET = SaveOptions()


# --- state that cannot be saved ---------------------------------------------------------------------------------------


def replaced(data: torch.Tensor) -> Any:
    shard = state(1)["w"]
    shard.data = data
    return shard


def cut_memory(kind: str) -> torch.Tensor:
    """A tensor whose storage does not reach to its end any more."""
    whole = torch.ones(1 << 16)
    if kind == "offset":
        tensor = whole[-1000:]
        whole.untyped_storage().resize_(tensor.nbytes + 4096)  # as much as it needs, but not where it needs it
    elif kind == "strides":
        tensor = whole[: 64 * 1000].view(1000, 64)[:, 3]
        whole.untyped_storage().resize_(tensor.nbytes)
    else:
        tensor = whole[:1000]
        whole.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(10), "expected 1000 elements"),
        (torch.ones(1000).to_sparse(), "expected a dense tensor"),
        (torch.ones(1000, device="meta"), "expected a dense tensor"),
        *((cut_memory(kind), r"^w at offset .*given back \(\d+ bytes") for kind in ("offset", "strides", "all")),
    ],
    ids=["other size", "sparse", "meta", "cut at its offset", "cut by strides", "memory given back"],
)
def test_a_tensor_whose_bytes_are_not_there_is_refused(data: torch.Tensor, message: str, tmp_path: Path) -> None:
    for save in (strategy().save, strategy().async_save):
        with pytest.raises(PlanError, match=message):
            save({"w": replaced(data)}, tmp_path)
    assert not list(tmp_path.iterdir())
    strategy().save(state(1), tmp_path)
    assert loaded(tmp_path) == 1


class Offloaded:
    """Gives a tensor's memory back when it is serialized."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        self.tensor.untyped_storage().resize_(0)
        return dict, ()


def test_memory_that_goes_while_an_object_is_serialized_is_missed(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    with pytest.raises(PlanError, match="given back"):
        strategy().save({"w": replaced(tensor), "o": ShardedObject("o", Offloaded(tensor), (1,), (0,))}, tmp_path)


_OTHER = torch.ones(3)


def of_two(tensor: torch.Tensor) -> dict[str, Any]:
    return {"other": ShardedTensor.from_rank_offsets("other", _OTHER), "w": replaced(tensor)}


def turned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = tensor.new_zeros(1000, 2)[:, 1].copy_(tensor)
    return tensor


def resized(size_bytes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.untyped_storage().resize_(size_bytes)
        return tensor

    return change


class Own(torch.Tensor):
    """A class of the user's."""


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "moved": torch.Tensor.clone,
    "turned": turned,
    "negated": torch._neg_view,
    "of other bits": lambda tensor: tensor.view(torch.int32),
    "longer": resized(8000),
    "of another class": lambda tensor: tensor.as_subclass(Own),
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_save_knows_of_a_tensor_is_of_that_tensor_as_it_is(change: Any) -> None:
    tensor = torch.arange(1000.0)
    before = collect(of_two(tensor), NOTHING).described
    assert collect(of_two(tensor), before).described is before
    changed = change(tensor)
    anew, found = collect(of_two(changed), NOTHING), collect(of_two(changed), before)
    assert found.described.specs == anew.described.specs
    assert found.described.pointers[1] == pointer_of(found.tensors[1])
    assert all(map(torch.equal, found.tensors, anew.tensors))
    assert collect(of_two(tensor), found.described).described.pointers[1] == pointer_of(tensor)


@pytest.mark.parametrize(
    "change", [resized(3999), resized(0), torch.Tensor.to_sparse, lambda _: None, lambda _: torch.ones(9)]
)
def test_a_tensor_that_was_sound_in_the_save_before_is_refused_when_it_is_not(change: Any) -> None:
    tensor = torch.arange(1000.0)
    before = collect(of_two(tensor), NOTHING).described
    with pytest.raises(PlanError, match=r"^w at offset"):
        collect(of_two(change(tensor)), before)


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_save_in_progress_keeps_its_directory_however_often_another_is_refused(tmp_path: Path) -> None:
    queue, saver = AsyncCallsQueue(options=_QUIET), strategy()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    queue.schedule_async_request(saver.async_save(state(1), tmp_path / "real"))
    for _ in range(3):
        with pytest.raises(SaveError, match="not finalized yet"):
            saver.async_save(state(2), tmp_path / "link")
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert loaded(tmp_path / "real") == 1
    saver.save(state(2), tmp_path / "link")
    assert loaded(tmp_path / "real") == 2


def test_a_relative_path_means_what_it_meant_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("there", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    queue = AsyncCallsQueue(options=_QUIET)
    queue.schedule_async_request(strategy().async_save(state(1), "checkpoint"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert loaded(tmp_path / "there" / "checkpoint") == 1
    assert not list((tmp_path / "elsewhere").iterdir())


# --- replicas ---------------------------------------------------------------------------------------------------------


DIVERGED = "w: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [3, 4]"


@on_ranks(2)
def test_diverged_replicas_are_named_and_the_checkpoint_is_published(rank: int, tmp_path: Path) -> None:
    """The second and the third save find another element on rank 1."""
    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="warn"))
    weight = torch.arange(12.0).reshape(3, 4)
    for number in range(3):
        path = made(tmp_path / f"iter_{100 * number:07d}")
        weight += 1
        if number and rank == 1:
            weight[1, 1] += 1
        shard = ShardedTensor.from_rank_offsets("w", weight, replica_id=rank)
        with kept_log() as warned:
            saver.save({"w": shard}, path)
        said = [line for line in warned if "differ between replicas" in line]
        assert [DIVERGED in line for line in said] == [True] * (rank == 0 and number > 0)
    torch.distributed.barrier()
    assert len(list(tmp_path.glob("*/.metadata"))) == 3


def save_refused(rank: int, directory: Path, is_async: bool) -> None:
    """Rank 1 holds another element; before and after it all hold the same."""
    saver = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="raise"))
    weight = torch.arange(12.0).reshape(3, 4)
    made(directory)

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
    with pytest.raises(SaveError, match=re.escape(DIVERGED)):
        save()
    torch.distributed.barrier()
    assert sorted((entry.name, entry.inode()) for entry in os.scandir(directory)) == before
    weight -= rank
    save()
    torch.distributed.barrier()
    assert checkpoint_fingerprint(directory).tensors["w"].crc32 == zlib.crc32(weight.numpy())


@on_ranks(2)
def test_a_save_of_diverged_replicas_is_refused_on_all_ranks(rank: int, tmp_path: Path) -> None:
    for is_async in (False, True):
        save_refused(rank, tmp_path / str(is_async), is_async)
