"""Saves of one rank in odd cases: state that cannot be saved, interruptions, directories that move or are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from mcore_ckpt.save.planner import NOTHING, collect
from mcore_ckpt.state.torch_classes import pointer_of

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

_QUIET = SaveOptions()


def single_shard(key: str, data: torch.Tensor, global_shape: tuple[int, ...] | None = None) -> Any:
    """A shard at the beginning of its global tensor; the whole of it unless `global_shape` says otherwise."""
    from megatron.core.dist_checkpointing import ShardedTensor

    shape, zeros = tuple(data.shape), (0,) * data.ndim
    return ShardedTensor(key, data, data.dtype, shape, global_shape or shape, zeros, (1,) * data.ndim)


def strategy(**options: Any) -> TorchDistSaveStrategy:
    return TorchDistSaveStrategy(options=SaveOptions(**options))


def ones(scale: float = 1.0) -> dict[str, Any]:
    return {"w": single_shard("w", torch.ones(1000) * scale)}


def loaded(directory: Path) -> torch.Tensor:
    tensor: torch.Tensor = TorchDistLoadStrategy().load(ones(0), directory)["w"]
    return tensor


# --- state that cannot be saved ---------------------------------------------------------------------------------------


def replaced(data: torch.Tensor) -> Any:
    shard = single_shard("w", torch.ones(1000))
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
    strategy().save(ones(), tmp_path)
    assert torch.equal(loaded(tmp_path), torch.ones(1000))


_OTHER = torch.ones(3)


def of_two(tensor: torch.Tensor, **fields: Any) -> dict[str, Any]:
    state = {"other": single_shard("other", _OTHER), "w": single_shard("w", torch.ones(1000))}
    state["w"].data = tensor
    for name, value in fields.items():
        setattr(state["w"], name, value)
    return state


def moved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def turned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = tensor.new_zeros(1000, 2)[:, 1].copy_(tensor)
    return tensor


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


def of_other_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(8000)
    return tensor


def cut(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(3999)
    return tensor


def given_back(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def of_another_class(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(type("Own", (torch.Tensor,), {}))


@pytest.mark.parametrize(
    "change", [moved, turned, negated, of_other_bits, longer, of_another_class, torch.nn.Parameter]
)
def test_what_a_save_knows_of_a_tensor_is_of_that_tensor_as_it_is(change: Any) -> None:
    tensor = torch.arange(1000.0)
    before = collect(of_two(tensor), NOTHING).described
    assert collect(of_two(tensor), before).described is before
    changed = change(tensor)
    anew, state = collect(of_two(changed), NOTHING), collect(of_two(changed), before)
    assert state.specs == anew.specs
    assert state.described.pointers[1] == pointer_of(state.tensors[1])
    assert all(map(torch.equal, state.tensors, anew.tensors))
    assert collect(of_two(tensor), state.described).described.pointers[1] == pointer_of(tensor)


@pytest.mark.parametrize("change", [cut, given_back, torch.Tensor.to_sparse, lambda _: None, lambda _: torch.ones(9)])
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
    queue.schedule_async_request(saver.async_save(ones(), tmp_path / "real"))
    for _ in range(3):
        with pytest.raises(SaveError, match="not finalized yet"):
            saver.async_save(ones(2), tmp_path / "link")
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert torch.equal(loaded(tmp_path / "real"), torch.ones(1000))
    saver.save(ones(2), tmp_path / "link")
    assert torch.equal(loaded(tmp_path / "real"), torch.ones(1000) * 2)


def test_a_relative_path_means_what_it_meant_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("there", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    queue = AsyncCallsQueue(options=_QUIET)
    queue.schedule_async_request(strategy().async_save(ones(), "checkpoint"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert torch.equal(loaded(tmp_path / "there" / "checkpoint"), torch.ones(1000))
    assert not list((tmp_path / "elsewhere").iterdir())
