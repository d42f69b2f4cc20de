"""A proof of a load compares what lies in memory with what is stored, whatever happened on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import LoadError, LoadOptions, SaveOptions, TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt import checkpoint_fingerprint as stored_fingerprint
from mcore_ckpt.megatron._proof import prove_load
from tests.megatron.trap_ranks import installed
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.kept_log import kept_log

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

SHAPES = {"rows": ((1024, 2048), 0), "columns": ((1024, 2048), 1), "stacked": ((2, 1024, 1024), 1)}
OPTIONS = LoadOptions(prove="always")


def state(pieces: int, *, empty: bool = False) -> dict[str, Any]:
    """All shards of every tensor, in so many pieces."""
    from megatron.core.dist_checkpointing import ShardedTensor

    generator = torch.Generator().manual_seed(1)
    found = {}
    for key, (shape, axis) in SHAPES.items():
        whole = torch.randn(shape, generator=generator)
        for number, piece in enumerate(whole.chunk(pieces, axis)):
            data = torch.zeros_like(piece.contiguous()) if empty else piece.contiguous()
            found[f"{key} {number}"] = ShardedTensor.from_rank_offsets(key, data, (axis, number, pieces))
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    TorchDistSaveStrategy(options=SaveOptions()).save(state(2), path)
    return path


def proven(load: Any, path: Path, pieces: int = 2) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = prove_load(load, OPTIONS, state(pieces, empty=True), path)
    return found


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_is_loaded_under_any_layout_is_proven(pieces: int, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcore_ckpt")
    loaded = proven(TorchDistLoadStrategy(options=OPTIONS).load, saved, pieces)
    assert all(loaded[name].equal(shard.data) for name, shard in state(pieces).items())
    assert f"state proven: {stored_fingerprint(saved).total} on 1 rank" in caplog.text


def swap(loaded: dict[str, torch.Tensor]) -> None:
    loaded["columns 0"], loaded["columns 1"] = loaded["columns 1"], loaded["columns 0"]


def replace(loaded: dict[str, torch.Tensor]) -> None:
    loaded["columns 0"] = loaded["columns 0"].clone()
    loaded["columns 0"][7] += 1


@pytest.mark.parametrize("fault", [swap, replace])
def test_what_changes_after_it_was_read_is_named(fault: Callable[[dict[str, torch.Tensor]], None], saved: Path) -> None:
    def load(*args: Any) -> Any:
        loaded = TorchDistLoadStrategy(options=OPTIONS).load(*args)
        fault(loaded)
        return loaded

    with pytest.raises(LoadError, match="1 of 3 tensors in memory are not what is stored: columns "):
        proven(load, saved)


def load_with_wrong_replica(rank: int, path: Path) -> tuple[list[str], str]:
    """What a proof says of two ranks with the same state, and what if the second one gets a wrong bit."""
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    def replicas(fill: float) -> dict[str, Any]:
        return {
            key: ShardedTensor.from_rank_offsets(key, torch.full((64, 64), fill), replica_id=(0, 0, rank))
            for key in ("a", "b", "c")
        }

    class Faulty(TorchDistLoadStrategy):
        def load(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load(*args, **kwargs)
            if rank == 1:
                loaded["b"].view(torch.uint8).view(-1)[5] ^= 1
            return loaded

    dist_checkpointing.save(replicas(1.0), str(path), TorchDistSaveStrategy(options=SaveOptions()))
    sound = FullyParallelLoadStrategyWrapper(TorchDistLoadStrategy(options=OPTIONS))
    with kept_log(logging.INFO) as lines:
        dist_checkpointing.load(replicas(0.0), str(path), sound)
    with pytest.raises(LoadError) as caught:
        dist_checkpointing.load(replicas(0.0), str(path), Faulty(options=OPTIONS))
    return [line for line in lines if "proven" in line], str(caught.value)


def test_a_replica_with_another_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (lines, said), (_, also) = run_ranks(load_with_wrong_replica, 2, path)
    assert len(lines) == 1
    assert lines[0].endswith(f"state proven: {stored_fingerprint(path).total} on 2 ranks")
    for text in (said, also):
        assert "1 of 3 tensors in memory are not what is stored: b (replica (0, 0, 1), CRC-32 " in text
        assert "on ranks 1, stored" in text


def test_a_state_of_which_nothing_can_be_compared_is_not_called_proven(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcore_ckpt")

    def converted() -> dict[str, Any]:
        found = state(1, empty=True)
        for shard in found.values():
            shard.data, shard.dtype = shard.data.bfloat16(), torch.bfloat16
        return found

    prove_load(TorchDistLoadStrategy(options=OPTIONS).load, OPTIONS, converted(), saved)
    assert "state proven" not in caplog.text
    (warning,) = [record for record in caplog.records if "state not proven" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "not proven: no tensor was compared on 1 rank; not compared: 3 tensors" in warning.getMessage()
    caplog.clear()
    some = {**converted(), "rows 0": state(1, empty=True)["rows 0"]}
    prove_load(TorchDistLoadStrategy(options=OPTIONS).load, OPTIONS, some, saved)
    assert "on 1 rank; not compared: 2 tensors" in caplog.text


def test_what_the_checkpoint_lacks_is_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor, load

    caplog.set_level(logging.INFO, "mcore_ckpt")
    asked = {name: shard for name, shard in state(1, empty=True).items() if name != "rows 0"}
    asked |= {key: ShardedTensor.from_rank_offsets(key, torch.zeros(3)) for key in ("new.bias", "new.weight")}
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({}, saved / "common.pt")
    strategy = TorchDistLoadStrategy(options=OPTIONS)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        prove_load(load, OPTIONS, asked, saved, sharded_strategy=strategy, strict="return_all")
    finally:
        torch.distributed.destroy_process_group()
    (record,) = [record for record in caplog.records if "state proven" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "; not in the checkpoint: 2 tensors (new.bias, new.weight)" in record.getMessage()


def held(*shares: tuple[Any, int, int], key: str = "w", fill: float = 0.0, size: int = 8) -> dict[str, Any]:
    """Rows of a tensor that are held together, each with its `replica_id`, its first row and its end."""
    from megatron.core.dist_checkpointing import ShardedTensor

    whole = torch.arange(float(size * 4)).view(size, 4) + 1
    found = {}
    for number, (replica, start, stop) in enumerate(shares):
        shard = ShardedTensor.from_rank_offsets(key, whole.clone(), replica_id=replica)
        shard.data = whole[start:stop].clone() if fill else torch.zeros(stop - start, 4)
        shard.local_shape, shard.global_offset = (stop - start, 4), (start, 0)
        found[f"{key} {number}"] = shard
    return found


MAINS = (0, 0, 4), (0, 4, 8)


def said_of(path: Path, shares: tuple[Any, ...], wrong: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> str:
    """What a proof says if these of them hold zeros: the last line of the log, or the error."""
    caplog.set_level(logging.INFO, "mcore_ckpt")
    path.mkdir()
    TorchDistSaveStrategy(options=SaveOptions()).save(held(*MAINS, fill=1.0), path)

    def load(*args: Any) -> Any:
        loaded = TorchDistLoadStrategy(options=OPTIONS).load(*args)
        for number in wrong:
            loaded[f"w {number}"].fill_(0.0)
        return loaded

    try:
        prove_load(load, OPTIONS, held(*shares), path)
    except LoadError as error:
        return str(error)
    return caplog.messages[-1]


WHOLE = ((1, 0, 8),)
HALVES = (1, 0, 4), (1, 4, 8)


@pytest.mark.parametrize(
    "shares",
    [
        MAINS + WHOLE * 3,
        MAINS + HALVES * 3,
        MAINS * 2,
    ],
    ids=str,
)
def test_replicas_of_one_id_are_each_compared(
    shares: tuple[Any, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only 0 is special for Megatron: several ranks may have the same other `replica_id`."""
    equal = said_of(tmp_path / "equal", shares, (), caplog)
    assert equal.endswith(f"state proven: {stored_fingerprint(tmp_path / 'equal').total} on 1 rank"), equal
    some = [number for number, (_, start, stop) in enumerate(shares) if start < stop]
    # One after the other, and all replicas alike, which must not cancel.
    for wrong in dict.fromkeys([*((number,) for number in some), tuple(some[2:] or some)]):
        said = said_of(tmp_path / str(wrong), shares, wrong, caplog)
        assert "1 of 1 tensors in memory are not what is stored: w (" in said, (wrong, said)


def test_a_slice_of_a_replica_that_nothing_tells_of_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins in the middle of a main one, and is not the whole tensor."""
    said = said_of(tmp_path / "checkpoint", (*MAINS, (1, 2, 6)), (2,), caplog)
    assert " on 1 rank; not compared: 1 tensor or slices" in said


def test_slices_that_overlap_are_no_copy_of_their_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their elements may add up, and what is wrong alike cancels by XOR."""
    said = said_of(tmp_path / "checkpoint", ((0, 0, 4), (0, 0, 2), (0, 2, 4)), (), caplog)
    assert "state not proven: no tensor was compared on 1 rank; not compared: 1 tensor" in said
