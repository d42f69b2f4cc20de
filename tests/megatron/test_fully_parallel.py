"""Fully parallel saves and loads by this package: who saves what is what Megatron says, and all hear of errors."""

import random
from copy import copy
from pathlib import Path
from typing import Any

import megatron.core.utils as core
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import exchange_utils
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

import mcore_ckpt
from mcore_ckpt import LoadError, LoadOptions, SaveOptions
from mcore_ckpt.format.integrity import data_file_of
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.megatron import serialization
from mcore_ckpt.megatron._fully_parallel import distributed, flags_of, tell
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
from tests.megatron.trap_ranks import counted, installed
from tests.support.gloo_ranks import made, on_ranks
from tests.support.kept_log import kept_log

RANKS = 4


def _saving(group: Any = None, *, caches: bool = False, **options: Any) -> Any:
    strategy = TorchDistSaveStrategy(options=SaveOptions.from_environment(**options))
    return fully_parallel.FullyParallelSaveStrategyWrapper(strategy, group, caches)


def _loading(group: Any = None, **options: Any) -> Any:
    strategy = TorchDistLoadStrategy(options=LoadOptions.from_environment(**options))
    return fully_parallel.FullyParallelLoadStrategyWrapper(strategy, group)


def _where(directory: Path) -> dict[tuple[str, tuple[int, ...]], int]:
    """Of each chunk of a checkpoint, the rank that has saved it."""
    found = {}
    for key, entry in read_index(directory).tensors.items():
        for chunk in entry.chunks:
            name = data_file_of(chunk.item.file)
            assert name is not None
            found[key, tuple(chunk.offsets)] = name.rank
    return found


# --- made-up states: what is exchanged, what changes, what fails ------------------------------------------------------


def _state(fill: float | None, *, more: int = 0, keys: int = 12) -> dict[str, Any]:
    """A layer's weights, divided between two ranks and replicated on two, a norm that all have, and an object."""
    rank = dist.get_rank()
    part, replica = rank % 2, rank // 2
    state: dict[str, Any] = {
        "norm": ShardedTensor.from_rank_offsets("norm", _data(8, fill), replica_id=(0, part, replica))
    }
    for number in range(keys + more):
        data = _data(4 * (number + 1), None if fill is None else fill + number + 100 * part)
        key = f"weight{number}"
        state[key] = ShardedTensor.from_rank_offsets(key, data, (0, part, 2), replica_id=(0, 0, replica))
    held = None if fill is None else {"part": part, "fill": fill}
    state["object"] = ShardedObject("object", held, (2,), (part,), replica_id=replica)
    return state


def _data(elements: int, fill: float | None) -> torch.Tensor:
    return torch.full((elements, 4), -1.0 if fill is None else fill)


def _check(loaded: dict[str, Any], fill: float, *, keys: int = 12) -> None:
    part = dist.get_rank() % 2
    assert bool((loaded["norm"] == fill).all())
    for number in range(keys):
        assert bool((loaded[f"weight{number}"] == fill + number + 100 * part).all()), number
    assert loaded["object"] == {"part": part, "fill": fill}


def _two_groups() -> Any:
    """Of ranks 0 and 2, which hold the first parts, and of 1 and 3; the one that this rank is in."""
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


_CHANGES = ("nothing", "nothing", "more on all", "more on two", "main replicas moved", "nothing")


@on_ranks(RANKS)
def test_a_structure_that_changes_is_distributed_again(rank: int, tmp_path: Path) -> None:
    dc = installed()
    part, replica = rank % 2, rank // 2
    group = _two_groups()
    saving = _saving(group)
    has_plan_of_the_one_before = []
    for number, change in enumerate(_CHANGES):
        state = _state(float(number), more=3 if change == "more on all" else 0)
        if change == "more on two" and part == 1:
            state["more"] = ShardedTensor.from_rank_offsets("more", _data(9, number), replica_id=(0, 0, replica))
        if change == "main replicas moved":
            state["weight3"].replica_id = (0, 0, 1 - replica)
        path = made(tmp_path / str(number))
        with counted(dist, "all_gather_object") as gathers:
            dc.save(state, path, saving)
        assert not gathers
        has_plan_of_the_one_before.append(getattr(saving, "base_strategy", saving).validated_cache_reuse)
        _check(dc.load(_state(None), path, _loading(group)), float(number))
        where = _where(Path(path))
        assert set(where.values()) == set(range(RANKS))
        if change == "more on two":
            assert where["more", (0, 0)] in (1, 3)
        assert mcore_ckpt.verify_checkpoint(path).whole
    assert has_plan_of_the_one_before == [False, True, False, False, False, False]
    # A wrapper that keeps the distribution: Megatron's own code gathers, once.
    strategy, gathered = _saving(group, caches=True), []
    for _ in range(2):
        with counted(dist, "all_gather_object") as gathers:
            dc.save(_state(3.0), path, strategy)
        gathered.append(len(gathers))
    assert gathered == [1, 0]


@on_ranks(RANKS)
def test_what_fails_on_one_rank_is_raised_on_all_of_all_groups(rank: int, tmp_path: Path) -> None:
    """Two ranks hold the main replica of one shard, which a distribution would hide; one cannot describe a shard of a
    save, or read the common state, before its group has distributed the load, or what its group has given it to read.
    """
    dc = installed()
    group = _two_groups()
    saving = _saving(group)
    path, loading = made(tmp_path / "saved"), _loading(group)
    dc.save(_state(1.0), path, saving)
    odd, twice, failed = _state(1.0), _state(6.0), made(tmp_path / "failed")
    if rank in (0, 2):
        twice["weight5"].replica_id = (0, 0, 0)
    if rank == 3:
        odd["weight3"].global_shape = None
    with pytest.raises(mcore_ckpt.CheckpointError, match="weight5"):
        dc.save(twice, failed, _saving(group))
    with pytest.raises(mcore_ckpt.CheckpointError, match="'NoneType' object is not iterable"):
        dc.save(odd, failed, saving, validate_access_integrity=False)
    dc.save(_state(2.0), path, saving)

    def cannot_read(*args: Any) -> Any:
        raise LoadError("this is not here")

    for owner, name in ((serialization, "load_common"), (CheckpointReader, "read_items")):
        with pytest.MonkeyPatch.context() as patched:
            if rank == 3:
                patched.setattr(owner, name, cannot_read)
            for checks in (True, False):
                with pytest.raises(LoadError, match="this is not here"):
                    dc.load(_state(None), path, loading, validate_access_integrity=checks)
    _check(dc.load(_state(None), path, loading), 2.0)
    assert not (tmp_path / "failed" / ".metadata").exists()


@on_ranks(RANKS)
def test_a_strategy_that_loads_by_itself_is_asked_for_nothing_of_this_package(rank: int, tmp_path: Path) -> None:
    """A third-party subclass of the strategy has a `load` of its own, which then fails on one rank."""
    dc = installed()

    class Own(TorchDistLoadShardedStrategy):  # type: ignore[misc]
        def load(self, state: Any, *_: Any) -> Any:
            if fails and rank == 1:
                raise ValueError("a mistake of its own")
            return dict_list_map_outplace(lambda shard: shard.data, state)

    path, fails = made(tmp_path / "saved"), False
    dc.save(_state(1.0), path)
    for strategy in (fully_parallel.FullyParallelLoadStrategyWrapper(Own()), Own()):
        if fails and rank == 1:
            with pytest.raises(ValueError, match="a mistake of its own"):
                dc.load(_state(7.0), path, strategy)
        else:
            _check(dc.load(_state(7.0), path, strategy), 7.0)
        fails = True
    dc.save(_state(2.0), path)  # which finds all ranks in step
    _check(dc.load(_state(None), path, _loading()), 2.0)


@on_ranks(RANKS)
def test_replicas_are_compared_with_what_others_save_in_their_place(rank: int, tmp_path: Path) -> None:
    dc = installed()
    strategy = _saving(_two_groups(), compare_replicas="warn")
    for number in range(2):
        request = dc.save(_state(5.0), made(tmp_path / str(number)), strategy, async_sharded_save=True)
        for finalize in request.finalize_fns:
            finalize()
    state = _state(5.0)
    if rank == 2:
        state["weight4"].data += 1
    with kept_log() as warned:
        dc.save(state, made(tmp_path / "diverged"), strategy)
    said = [line for line in warned if "differ between replicas" in line]
    assert ["weight4" in line for line in said] == [True] * (rank == 0)
    assert mcore_ckpt.verify_checkpoint(tmp_path / "1").whole
    assert set(_where(tmp_path / "1").values()) == set(range(RANKS))


# --- any states: who saves a shard that several ranks hold is as Megatron chooses


def _held_by_ranks(chance: random.Random, ranks: int) -> list[list[Any]]:
    """What ranks hold: the shards of a model that is divided and replicated in any way, each with its main replica on
    one of them, on none of them (a rank of another group has it), or on several.
    """
    held: list[list[Any]] = [[] for _ in range(ranks)]
    for number in range(chance.randrange(1, 25)):
        parts, rows = chance.choice([1, 1, 2, 3]), chance.choice([0, 1, 1, 2, 8, 8, 64])
        dtype = chance.choice([torch.float32, torch.bfloat16])
        dims = chance.choice([(), (rows,), (rows, 3)]) if parts == 1 else (rows, 3)
        for part in range(parts):
            if chance.random() < 0.4:
                holders = list(range(ranks))
            else:
                holders = sorted(chance.sample(range(ranks), chance.randrange(1, ranks + 1)))
            mains = chance.choice([[holders[0]], [chance.choice(holders)], [], holders])
            for rank in holders:
                shard = ShardedTensor.from_rank_offsets(
                    f"layer{number}.weight",
                    torch.zeros(dims, dtype=dtype),
                    *([(0, part, parts)] if parts > 1 else []),
                    replica_id=chance.choice([0, (0, 0)]) if rank in mains else chance.choice([1, (0, rank + 1)]),
                )
                held[rank].append(shard)
                if chance.random() < 0.03:
                    held[rank].append(copy(shard))
    for of_rank in held:
        if chance.random() < 0.3:
            chance.shuffle(of_rank)
    return held


class _Group:
    """A process group of so many ranks, in one process."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def _megatrons(held: list[list[Any]]) -> Any:
    """The distribution that Megatron's own function makes of it; the same on all ranks."""

    def gather(target: list[Any], own: Any, group: Any) -> None:
        target[:] = [[shard.without_data() for shard in of_rank] for of_rank in held]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "all_gather_object", gather)
        patched.setattr(torch.distributed, "get_world_size", lambda *_, **__: len(held))
        for module in (core, exchange_utils):
            patched.setattr(module, "get_pg_size", lambda *_, **__: len(held), raising=False)
        state = {str(number): shard for number, shard in enumerate(held[0])}
        return exchange_utils.determine_main_replica_uniform_distribution(state, _Group(len(held)))


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 25), (17, 5)])
def test_owners_are_those_that_megatron_chooses(ranks: int, rounds: int) -> None:
    seed = random.randrange(10**6)
    for round_seed in range(seed, seed + rounds):
        chance = random.Random(round_seed)
        held = _held_by_ranks(chance, ranks)
        stock = _megatrons(held)
        answers, _ = distributed([tell(of_rank) for of_rank in held])
        for rank, (of_rank, bits) in enumerate(zip(held, answers, strict=True)):
            expected = [stock.main_rank_for_shard.get(_sharded_tensor_shard_id(shard)) == rank for shard in of_rank]
            assert flags_of(bits, len(of_rank)).tolist() == expected, f"seed {round_seed}, rank {rank}"
