"""Who saves and who loads a shard that several ranks hold: as Megatron-Core chooses, or spread over ranks and hosts."""

from __future__ import annotations

import random
from copy import copy
from typing import Any

import pytest

from mcore_ckpt.layout.distribution import (
    Held,
    flags_of,
    megatrons_owners,
    merged,
    own_of_each_rank,
    size_of,
    spread_owners,
    tell,
)

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.dist_checkpointing", reason="its shards, and its choice")


def _held_by_ranks(chance: random.Random, ranks: int, *, odd: bool = True) -> list[list[Any]]:
    """What ranks hold: the shards of a model that is divided and replicated in any way, each with its main replica on
    one of them, on none of them (a rank of another group has it), or, if they may be `odd`, on several.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

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
            mains = chance.choice([[holders[0]], [chance.choice(holders)], [], holders if odd else []])
            for rank in holders:
                shard = ShardedTensor.from_rank_offsets(
                    f"layer{number}.weight",
                    torch.zeros(dims, dtype=dtype),
                    *([(0, part, parts)] if parts > 1 else []),
                    replica_id=chance.choice([0, (0, 0)]) if rank in mains else chance.choice([1, (0, rank + 1)]),
                )
                held[rank].append(shard)
                if odd and chance.random() < 0.03:
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


def _megatrons(held: list[list[Any]], *, ignore_groups: bool) -> Any:
    """The distribution that Megatron's own function makes of it; the same on all ranks."""
    import megatron.core.utils as core
    from megatron.core.dist_checkpointing import exchange_utils

    def gather(target: list[Any], own: Any, group: Any) -> None:
        target[:] = [[shard.without_data() for shard in of_rank] for of_rank in held]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "all_gather_object", gather)
        patched.setattr(torch.distributed, "get_world_size", lambda *_, **__: len(held))
        for module in (core, exchange_utils):
            patched.setattr(module, "get_pg_size", lambda *_, **__: len(held), raising=False)
        state = {str(number): shard for number, shard in enumerate(held[0])}
        return exchange_utils.determine_main_replica_uniform_distribution(state, _Group(len(held)), ignore_groups)


def _told(held: list[list[Any]], hosts: list[str] | None = None) -> Held:
    return merged([tell(of_rank, host=hosts[rank] if hosts else "") for rank, of_rank in enumerate(held)])


def _shard_id(shard: Any) -> Any:
    from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

    return _sharded_tensor_shard_id(shard)


@pytest.mark.parametrize("ranks", [2, 3, 8, 17])
def test_owners_are_those_that_megatron_chooses(ranks: int) -> None:
    seed = random.randrange(10**6)
    for round_seed in range(seed, seed + 25):
        chance = random.Random(round_seed)
        held = _held_by_ranks(chance, ranks)
        told = _told(held)

        stock = _megatrons(held, ignore_groups=False)
        answers = own_of_each_rank(told, megatrons_owners(told))
        for rank, (of_rank, bits) in enumerate(zip(held, answers, strict=True)):
            expected = [stock.main_rank_for_shard.get(_shard_id(shard)) == rank for shard in of_rank]
            assert flags_of(bits, len(of_rank)) == expected, f"seed {round_seed}, rank {rank}"


def _bytes_of_ranks(held: list[list[Any]], chosen: list[list[bool]]) -> list[int]:
    return [
        sum(size_of(shard) for shard, is_own in zip(of_rank, own, strict=True) if is_own)
        for of_rank, own in zip(held, chosen, strict=True)
    ]


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_a_spread_save_has_each_main_replica_once_and_is_as_even_as_megatrons(ranks: int) -> None:
    seed = random.randrange(10**6)
    for round_seed in range(seed, seed + 25):
        chance = random.Random(round_seed)
        held = _held_by_ranks(chance, ranks, odd=False)
        told = _told(held, ["one host"] * ranks)
        chosen = [
            flags_of(bits, len(of_rank))
            for bits, of_rank in zip(own_of_each_rank(told, spread_owners(told)), held, strict=True)
        ]
        saved = [
            _shard_id(shard)
            for of_rank, own in zip(held, chosen, strict=True)
            for shard, is_own in zip(of_rank, own, strict=True)
            if is_own
        ]
        mains = [_shard_id(shard) for of_rank in held for shard in of_rank if not _is_replica(shard)]
        assert sorted(saved) == sorted(mains), f"seed {round_seed}"
        stock = _megatrons(held, ignore_groups=False).main_rank_for_shard
        theirs = [[stock.get(_shard_id(shard)) == rank for shard in of_rank] for rank, of_rank in enumerate(held)]
        assert _bytes_of_ranks(held, chosen) == _bytes_of_ranks(held, theirs), f"seed {round_seed}"


def _is_replica(shard: Any) -> bool:
    return shard.replica_id not in (0, (0, 0))


def _shard(key: str, rows: int, *, main: bool, **changes: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found = ShardedTensor.from_rank_offsets(key, torch.zeros(rows), replica_id=0 if main else 1)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("second", "third"),
    [
        ({"main": True}, {"main": False}),
        ({"main": False, "dtype": torch.int32}, {"main": False}),
        ({"main": False, "data": None}, {"main": False}),
    ],
    ids=["two main replicas", "another dtype", "no data"],
)
def test_what_is_not_alike_stays_with_its_main_replicas(second: dict[str, Any], third: dict[str, Any]) -> None:
    held = [
        [_shard("large", 100, main=True), _shard("odd", 10, main=True)],
        [_shard("large", 100, main=False), _shard("odd", 10, **second)],
        [_shard("large", 100, main=False), _shard("odd", 10, **third)],
    ]
    told = _told(held, ["host"] * 3)
    chosen = [flags_of(bits, 2) for bits in own_of_each_rank(told, spread_owners(told))]
    assert [own for _, own in chosen] == [True, second["main"], False]
    assert sum(own for own, _ in chosen) == 1
    assert not chosen[0][0]  # it has the odd one already
    assert not told.is_each_main_once


def test_hosts_save_as_much_as_each_other() -> None:
    """Half of the tensors are held by one host alone, and the other half by both: that goes to the second one."""
    hosts = ["a", "a", "b", "b"]
    held = [
        [_shard(f"here{n}", 8, main=rank == 0) for n in range(8) if rank < 2]
        + [_shard(f"both{n}", 8, main=rank == 0) for n in range(8)]
        for rank in range(4)
    ]
    told = _told(held, hosts)
    bits = own_of_each_rank(told, spread_owners(told))
    chosen = [flags_of(own, len(of_rank)) for own, of_rank in zip(bits, held, strict=True)]
    assert _bytes_of_ranks(held, chosen) == [8 * 8 * 4 // 2] * 4
    crowded = ["a", "a", "a", "b"]  # three ranks share a host: what each of them saves counts for its host, too
    held = [[_shard(f"both{n}", 8, main=rank == 0) for n in range(60)] for rank in range(4)]
    told = _told(held, crowded)
    bits = own_of_each_rank(told, spread_owners(told))
    saved = _bytes_of_ranks(held, [flags_of(own, 60) for own in bits])
    assert max(saved) - min(saved) <= 8 * 4
