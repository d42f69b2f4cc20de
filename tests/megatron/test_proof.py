"""A proof of a load compares what lies in memory with what is stored, whatever happened on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import LoadError, LoadOptions, SaveOptions, TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt import checkpoint_fingerprint as stored_fingerprint
from mcore_ckpt.megatron import _proof
from mcore_ckpt.megatron._proof import prove_load
from tests.megatron.trap_ranks import installed
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks

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


def flip(loaded: dict[str, torch.Tensor]) -> None:
    loaded["columns 0"].view(torch.uint8).view(-1)[5] ^= 1


def swap(loaded: dict[str, torch.Tensor]) -> None:
    loaded["columns 0"], loaded["columns 1"] = loaded["columns 1"], loaded["columns 0"]


def replace(loaded: dict[str, torch.Tensor]) -> None:
    loaded["columns 0"] = loaded["columns 0"].clone()
    loaded["columns 0"][7] += 1


@pytest.mark.parametrize("fault", [flip, swap, replace])
def test_what_changes_after_it_was_read_is_named(fault: Callable[[dict[str, torch.Tensor]], None], saved: Path) -> None:
    def load(*args: Any) -> Any:
        loaded = TorchDistLoadStrategy(options=OPTIONS).load(*args)
        fault(loaded)
        return loaded

    with pytest.raises(LoadError, match="1 of 3 tensors in memory are not what is stored: columns "):
        proven(load, saved)


def load_with_wrong_replica(rank: int, path: Path, wrapped: bool) -> tuple[list[str], str]:
    """What a proof says of two ranks with the same state, and what if the second one gets a wrong bit."""
    installed()
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    def replicas(fill: float) -> dict[str, Any]:
        return {
            key: ShardedTensor.from_rank_offsets(key, torch.full((64, 64), fill), replica_id=(0, 0, rank))
            for key in ("a", "b", "c")
        }

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcore_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    TorchDistSaveStrategy(options=SaveOptions()).save(replicas(1.0), path)
    strategy: Any = TorchDistLoadStrategy(options=OPTIONS)
    if wrapped:
        strategy = FullyParallelLoadStrategyWrapper(strategy)
    prove_load(strategy.load, OPTIONS, replicas(0.0), path)

    def load(*args: Any) -> Any:
        loaded = strategy.load(*args)
        if rank == 1:
            loaded["b"].view(torch.uint8).view(-1)[5] ^= 1
        return loaded

    with pytest.raises(LoadError) as caught:
        prove_load(load, OPTIONS, replicas(0.0), path)
    return [line for line in lines if "proven" in line], str(caught.value)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_replica_with_another_bit_is_named(wrapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (lines, said), (_, also) = run_ranks(load_with_wrong_replica, 2, path, wrapped)
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


@pytest.mark.parametrize("strict", ["return_all", "assume_ok_unexpected"])
def test_what_the_checkpoint_lacks_is_named(saved: Path, strict: str, caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor, load

    caplog.set_level(logging.INFO, "mcore_ckpt")
    asked = {name: shard for name, shard in state(1, empty=True).items() if name != "rows 0"}
    if strict != "assume_ok_unexpected":
        asked |= {key: ShardedTensor.from_rank_offsets(key, torch.zeros(3)) for key in ("new.bias", "new.weight")}
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({}, saved / "common.pt")
    strategy = TorchDistLoadStrategy(options=OPTIONS)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        prove_load(load, OPTIONS, asked, saved, sharded_strategy=strategy, strict=strict)
    finally:
        torch.distributed.destroy_process_group()
    (record,) = [record for record in caplog.records if "state proven" in record.getMessage()]
    said = record.getMessage()
    lacks = "; not in the checkpoint: 2 tensors (new.bias, new.weight)"
    assert (lacks in said) == (record.levelno == logging.WARNING) == (strict != "assume_ok_unexpected")


@pytest.mark.parametrize(("surrogate", "sharded"), [(0xD800, True), (0xDCFF, False)])
def test_a_sample_takes_keys_and_directories_of_any_name(
    surrogate: int, sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock keeps no id of its save: the name of the directory stands for it."""
    from megatron.core.dist_checkpointing import ShardedTensor

    caplog.set_level(logging.INFO, "mcore_ckpt")
    name = f"w{chr(surrogate)}"

    def tensors(value: float) -> dict[str, Any]:
        keys = [f"{name} {number}" for number in range(64)]
        return {key: ShardedTensor.from_rank_offsets(key, torch.full((2,), value)) for key in keys}

    path = tmp_path / (name if surrogate == 0xDCFF else "checkpoint")
    path.mkdir()
    if sharded:
        TorchDistSaveStrategy(options=SaveOptions()).save(tensors(1.0), path)
    else:
        dcp.save({key: each.data for key, each in tensors(1.0).items()}, checkpoint_id=path, no_dist=True)
    sample = LoadOptions(prove="sample")
    prove_load(TorchDistLoadStrategy(options=sample).load, sample, tensors(0.0), path)
    assert "state proven" in caplog.text
    assert caplog.text.encode()  # what a handler does, which surrogates would end


def test_a_checkpoint_that_is_replaced_meanwhile_is_no_wrong_memory(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    def of(fill: float) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8, 256), fill))}

    path = tmp_path / "checkpoint"
    path.mkdir()
    save = TorchDistSaveStrategy(options=SaveOptions()).save
    save(of(1.0), path)

    def load(*args: Any) -> Any:
        loaded = TorchDistLoadStrategy(options=OPTIONS).load(*args)
        save(of(2.0), path)
        return loaded

    with pytest.raises(LoadError, match="the checkpoint was replaced while it was loaded"):
        prove_load(load, OPTIONS, of(0.0), path)


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
        MAINS + WHOLE + HALVES[:1],
        MAINS * 2,
        (*MAINS, (1, 0, 0), (1, 0, 0), (0, 0, 0), (0, 0, 0)),
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


def test_so_they_are_in_a_job_of_which_not_all_slices_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three replicas with one id are wrong alike, which cancels by XOR."""
    monkeypatch.setattr(_proof, "_MOST_SLICES", 4)
    said = said_of(tmp_path / "checkpoint", MAINS + HALVES * 3, (2, 4), caplog)
    assert "1 of 1 tensors in memory are not what is stored: w (" in said


def test_a_slice_of_a_replica_that_nothing_tells_of_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins in the middle of a main one, and is not the whole tensor."""
    said = said_of(tmp_path / "checkpoint", (*MAINS, (1, 2, 6)), (2,), caplog)
    assert " on 1 rank; not compared: 1 tensor or slices" in said


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("shares", "said_of_rest"),
    [
        ((*MAINS, *HALVES, (1, 0, 2), (1, 2, 8)), "not compared: 2 tensors or slices"),
        (
            ((0, 0, 4), (0, 0, 2), (0, 2, 4)),
            "state not proven: no tensor was compared on 1 rank; not compared: 1 tensor",
        ),
    ],
    ids=str,
)
def test_slices_that_overlap_are_no_copy_of_their_tensor(
    shares: tuple[Any, ...], said_of_rest: str, wrong: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their elements may add up. Where they are all wrong alike, they cancel by XOR, and are not called equal."""
    of_replicas = tuple(number for number, (replica, _, _) in enumerate(shares) if replica)
    said = said_of(tmp_path / "checkpoint", shares, of_replicas if wrong else (), caplog)
    if wrong and any(share in HALVES for share in shares):  # of which main replicas hold the same slices
        assert "1 of 1 tensors in memory are not what is stored: w (" in said
    else:
        assert said_of_rest in said


def load_with_one_id(rank: int, path: Path, wrong: tuple[int, ...]) -> str:
    """What a proof says to a rank where all but the first have the `replica_id` 1."""
    installed()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    def replicas(fill: float) -> dict[str, Any]:
        return {
            key: ShardedTensor.from_rank_offsets(key, torch.full((8, 8), fill), replica_id=int(rank > 0))
            for key in ("a", "b")
        }

    class Strategy(TorchDistLoadStrategy):
        def load(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load(*args, **kwargs)
            if rank in wrong:
                loaded["b"].fill_(7.0)
            return loaded

    dist_checkpointing.save(replicas(1.0), str(path), TorchDistSaveStrategy(options=SaveOptions()))
    try:
        dist_checkpointing.load(replicas(0.0), str(path), Strategy(options=OPTIONS))
    except LoadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", [(1, 2)])
def test_ranks_with_one_replica_id_are_each_compared(wrong: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    for said in run_ranks(load_with_one_id, 3, path, wrong):
        assert "1 of 2 tensors in memory are not what is stored: " in said
        for rank in range(3):
            assert (f"on ranks {rank}, stored" in said) == (rank in wrong), said


def test_a_tensor_without_elements_that_ranks_divide_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    caplog.set_level(logging.INFO, "mcore_ckpt")
    path = tmp_path / "checkpoint"
    path.mkdir()

    def divided() -> dict[str, Any]:
        return {str(at): ShardedTensor.from_rank_offsets("e", torch.empty(0, 4), (0, at, 2)) for at in (0, 1)}

    TorchDistSaveStrategy(options=SaveOptions()).save(divided(), path)
    prove_load(TorchDistLoadStrategy(options=OPTIONS).load, OPTIONS, divided(), path)
    assert f"state proven: {stored_fingerprint(path).total} on 1 rank" in caplog.text


@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_list_has_left_is_compared_where_the_checkpoint_lacks_some_of_it(
    wrong: bool, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    caplog.set_level(logging.INFO, "mcore_ckpt")
    new = ShardedTensor.from_rank_offsets("new", torch.zeros(4))
    wanted = [new, *state(1, empty=True).values()]

    def load(tree: Any, *args: Any) -> Any:
        loaded = TorchDistLoadStrategy(options=OPTIONS).load({one.key: one for one in tree["all"][1:]}, *args)
        if wrong:
            loaded["columns"][7] = 7.0
        return {"all": list(loaded.values())}

    if wrong:
        with pytest.raises(LoadError, match="1 of 3 tensors in memory are not what is stored: columns "):
            prove_load(load, OPTIONS, {"all": wanted}, saved)
    else:
        prove_load(load, OPTIONS, {"all": wanted}, saved)
        assert f"state proven: {stored_fingerprint(saved).total} on 1 rank" in caplog.text
        assert "not compared" not in caplog.text
