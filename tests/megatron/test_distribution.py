"""Who saves a shard that several ranks hold: as Megatron-Core chooses."""

from __future__ import annotations

import random
from copy import copy
from typing import Any

import pytest

from mcore_ckpt.megatron._fully_parallel import distributed, flags_of, tell

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.dist_checkpointing", reason="its shards, and its choice")


def _held_by_ranks(chance: random.Random, ranks: int) -> list[list[Any]]:
    """What ranks hold: the shards of a model that is divided and replicated in any way, each with its main replica on
    one of them, on none of them (a rank of another group has it), or on several.
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
        return exchange_utils.determine_main_replica_uniform_distribution(state, _Group(len(held)))


def _shard_id(shard: Any) -> Any:
    from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

    return _sharded_tensor_shard_id(shard)


@pytest.mark.parametrize("ranks", [2, 17])
def test_owners_are_those_that_megatron_chooses(ranks: int) -> None:
    seed = random.randrange(10**6)
    for round_seed in range(seed, seed + 25):
        chance = random.Random(round_seed)
        held = _held_by_ranks(chance, ranks)
        stock = _megatrons(held)
        answers, _ = distributed([tell(of_rank) for of_rank in held])
        for rank, (of_rank, bits) in enumerate(zip(held, answers, strict=True)):
            expected = [stock.main_rank_for_shard.get(_shard_id(shard)) == rank for shard in of_rank]
            assert flags_of(bits, len(of_rank)).tolist() == expected, f"seed {round_seed}, rank {rank}"
