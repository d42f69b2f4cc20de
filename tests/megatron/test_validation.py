"""Validation of access integrity by this package says what Megatron's own says, on every rank."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity

from mcore_ckpt.core.errors import CheckpointError, PlanError
from mcore_ckpt.state.plan_check import Accesses, check_requests
from tests.megatron.trap_ranks import counted, installed
from tests.support.gloo_ranks import made, on_ranks

# --- without ranks: any states, the two checks next to each other -----------------------------------------------------


def _state(chance: random.Random) -> list[list[Any]]:
    """What three ranks hold of a few tensors and objects, as a model's layers and a distributed optimizer would."""
    ranks: list[list[Any]] = [[], [], []]
    for number in range(4):
        kind = chance.choice(["rows", "columns", "replicas", "layers", "object"])
        for rank, held in enumerate(ranks):
            data, key = torch.zeros(2, 4), f"{kind}{number}"
            if kind == "object":
                held.append(ShardedObject(key, rank, (3,), (rank,)))
            elif kind == "replicas":
                held.append(ShardedTensor.from_rank_offsets(key, data, replica_id=(0, rank)))
            elif kind == "layers":
                held.append(ShardedTensor.from_rank_offsets(key, data, (0, rank, 3), prepend_axis_num=1))
            else:
                held.append(ShardedTensor.from_rank_offsets(key, data, (int(kind == "columns"), rank, 3)))
    return ranks


def _spoil(ranks: list[list[Any]], chance: random.Random) -> str:
    """Change what one rank holds of one tensor or object."""
    rank = chance.randrange(3)
    place = chance.randrange(len(ranks[rank]))
    leaf = ranks[rank][place]
    what = chance.choice(["nothing", "lost", "twice", "replica", "main", "moved", "dtype", "shape", "nobody's"])
    if what == "lost":
        del ranks[rank][place]
    elif what == "twice":
        ranks[rank].append(leaf)
    elif what == "replica":
        leaf.replica_id = 1
    elif what == "main":
        leaf.replica_id = (0, 0)
    elif what == "nobody's":
        for held in ranks:
            held[place].replica_id = (1, 0)
    elif what == "moved":
        leaf.global_offset = ranks[chance.randrange(3)][place].global_offset
    elif what == "dtype" and hasattr(leaf, "dtype"):
        leaf.dtype = torch.int32
    elif what == "shape" and hasattr(leaf, "dtype"):
        leaf.global_shape = (*leaf.global_shape[:-1], leaf.global_shape[-1] * 2)
    return what


def _refuses(check: Callable[[], None], *errors: type[BaseException]) -> bool:
    try:
        check()
    except errors:
        return True
    return False


def test_any_state_is_refused_by_both_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    logging.getLogger("megatron.core.dist_checkpointing.validation").disabled = True
    verdicts = set()
    for seed in range(200):
        chance = random.Random(seed)
        ranks = _state(chance)
        what = _spoil(ranks, chance)
        stock = _refuses(lambda ranks=ranks: validate_sharding_integrity(ranks), CheckpointingException, AssertionError)
        told = [Accesses.of(held).told() for held in ranks]
        ours = _refuses(lambda told=told: check_requests(told), PlanError)
        assert ours == stock, f"seed {seed}: {what}"
        verdicts.add((what, ours))
    logging.getLogger("megatron.core.dist_checkpointing.validation").disabled = False
    assert len(verdicts) > 12  # most changes are refused for some tensors, and change nothing of others


@pytest.mark.parametrize("case", ["both kinds of grid", "a tensor and an object"])
def test_what_ranks_may_not_mix(case: str) -> None:
    data = torch.zeros(2, 4)
    first, second = (ShardedTensor.from_rank_offsets("key", data, (0, rank, 2)) for rank in range(2))
    if case == "both kinds of grid":
        second.global_offset, second.axis_fragmentations = (0, 0), None  # so that nobody asks for the last rows
        expected = "key: rank 0 holds a shard of it on a regular grid"
    else:
        first = ShardedTensor.from_rank_offsets("key", data)
        second = ShardedObject("key", 0, (1,), (0,))
        expected = "key: an object on rank 1, and a tensor on rank 0"
    with pytest.raises(PlanError, match=expected):
        check_requests([Accesses.of([one]).told() for one in (first, second)])


# --- on ranks: real models, the whole of `save` and `load` ------------------------------------------------------------


FAULTS = ("no main replica", "two main replicas", "dtype", "missing")


@on_ranks(2)
def test_faults_are_refused_by_saves_and_loads_on_every_rank(rank: int, tmp_path: Path) -> None:
    """Each fault is in a tensor that both ranks hold."""
    dc = installed()

    def state(fault: str) -> dict[str, Any]:
        data = torch.ones(4, dtype=torch.float64 if fault == "dtype" and rank == 1 else torch.float32)
        replica = {"no main replica": 1, "two main replicas": 0}.get(fault, rank)
        held = (
            {}
            if fault == "missing" and rank == 0
            else {"w": ShardedTensor.from_rank_offsets("w", data, replica_id=replica)}
        )
        return {**held, "rows": ShardedTensor.from_rank_offsets("rows", torch.ones(2), (0, rank, 2))}

    good = made(tmp_path / "good")
    dc.save(state(""), good)
    said = []
    for number, fault in enumerate(FAULTS):
        path = made(tmp_path / str(number))
        for call, directory in ((dc.save, path), (dc.load, good)):
            with pytest.raises(CheckpointError) as caught:
                call(state(fault), directory)
            said.append(str(caught.value).removeprefix("Worker failure: ").splitlines()[0])
        assert not (tmp_path / str(number) / ".metadata").exists()
    assert all("w: " in line for line in said)
    assert "no rank the main one" in said[0]
    by_rank: list[Any] = [None] * 2
    dist.all_gather_object(by_rank, said)
    assert by_rank[0] == by_rank[1]


@on_ranks(2)
def test_nothing_is_gathered_and_a_differing_common_state_is_named(rank: int, tmp_path: Path) -> None:
    dc = installed()
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.dist_checkpointing.validation").addHandler(handler)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    said: list[Any] = []
    with counted(dist, "all_gather_object", "broadcast_object_list") as gathers:
        for number in range(2):
            path = made(tmp_path / str(number))
            state = {"a": ShardedTensor.from_rank_offsets("a", torch.ones(2), (0, rank, 2)), "rank": number * rank}
            dc.save(state, path, strategy)
            said.append((strategy.validated_cache_reuse, list(warned)))
            warned.clear()
        dc.load({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(2), (0, rank, 2))}, path)
    differs = (
        "Rank 1 common state dict differs from rank 0 common state dict. Keys only on rank 0: [], Keys only on 1: [], "
        "Mismatched keys: [(('rank',), <class 'int'>, <class 'int'>)]"
    )
    assert said == [(False, []), (True, [differs] * rank)]
    assert gathers == []
