"""The fingerprint of what is in memory: equal under all divisions, and every fault named, in a world of one."""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import PlanError, fingerprint
from mcore_ckpt.core.fingerprints import state_of

TRIALS = 200


def shard(key: str, data: Any, shape: tuple[int, ...], offset: tuple[int, ...], replica: Any = 0, **more: Any) -> Any:
    """What this package looks at of Megatron's `ShardedTensor`."""
    fields = {
        "key": key,
        "data": data,
        "local_shape": tuple(data.shape) if isinstance(data, torch.Tensor) else shape,
        "global_shape": shape,
        "global_offset": offset,
        "replica_id": replica,
        "prepend_axis_num": 0,
        "flattened_range": None,
    }
    return SimpleNamespace(**{**fields, **more})


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_any_division_of_any_memory_is_the_tensor() -> None:
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    rows = [shard("w", part, (6, 8), (3 * n, 0)) for n, part in enumerate(whole.clone().chunk(2))]
    columns = [shard("w", part, (6, 8), (0, 2 * n)) for n, part in enumerate(whole.clone().chunk(4, 1))]
    transposed = [shard("w", whole.t().contiguous().t(), (6, 8), (0, 0))]
    flat = whole.reshape(-1)
    stretches = [
        shard("w", flat[a:b], (6, 8), (0, 0), local_shape=(6, 8), flattened_range=slice(a, b))
        for a, b in ((0, 0), (0, 13), (13, 14), (14, 48))
    ]
    stacked = [shard("w", whole[n].clone(), (6, 8), (n, 0), local_shape=(8,), prepend_axis_num=1) for n in range(6)]
    factory = SimpleNamespace(build_fn=None, build=lambda: {"a": rows[0], "b": [rows[1]]})
    for division in (rows, columns, transposed, stretches, stacked, {"model": (factory,)}):
        found = fingerprint(division, names=True)
        assert found.tensors is not None
        assert found.tensors["w"] == ("float32", (6, 8), crc(whole))
        assert found.total == fingerprint(division).total == state_of(found.tensors).total


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.arange(5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.arange(16).float().to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_any_dtype(tensor: torch.Tensor) -> None:
    found = fingerprint([shard("x", tensor, tuple(tensor.shape), (0,) * tensor.ndim)], names=True)
    assert found.tensors is not None
    assert found.tensors["x"].crc32 == crc(tensor.detach().resolve_conj())


def test_each_flipped_bit_and_each_swap_is_named() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    wholes = {f"layer.{n}.weight": torch.randn(8, 12, generator=generator) for n in range(4)}
    state = []
    for n, (key, whole) in enumerate(wholes.items()):
        parts = whole.clone().chunk(4, n % 2)
        step = whole.shape[n % 2] // 4
        state += [
            shard(key, part.contiguous(), (8, 12), (at * step, 0) if n % 2 == 0 else (0, at * step))
            for at, part in enumerate(parts)
        ]
    sound = fingerprint(state, names=True)
    assert fingerprint(state).total == sound.total
    for _ in range(TRIALS):
        victim = rng.randrange(len(state))
        if rng.random() < 0.5:
            memory = state[victim].data.view(-1).view(torch.uint8)
            at, bit = rng.randrange(len(memory)), 1 << rng.randrange(8)
            memory[at] ^= bit
            found = fingerprint(state, names=True)
            memory[at] ^= bit
        else:
            other = rng.choice([n for n in range(len(state)) if n // 4 == victim // 4 and n != victim])
            state[victim].data, state[other].data = state[other].data, state[victim].data
            found = fingerprint(state, names=True)
            state[victim].data, state[other].data = state[other].data, state[victim].data
        assert sound.differing(found) == [state[victim].key]
        assert found.total != sound.total
    assert fingerprint(state).total == sound.total


def test_a_replica_that_has_diverged_is_named() -> None:
    whole = torch.randn(4, 4)
    state = [shard("w", whole, (4, 4), (0, 0)), shard("w", whole.clone(), (4, 4), (0, 0), (0, 1, 0))]
    sound = fingerprint(state, names=True)
    assert sound.diverged == ()
    state[1].data[1, 2] += 1
    (found,) = fingerprint(state, names=True).diverged
    assert (found.key, found.sizes) == ("w", (4, 4))
    assert fingerprint(state).total == sound.total


def test_a_tensor_without_elements_that_ranks_divide_is_one() -> None:
    """Each of them may hold its first element, for all that it knows."""
    state = [shard("e", torch.empty(0, 4), (0, 4), (0, 0)) for _ in range(2)]
    named = fingerprint(state, names=True)
    assert fingerprint(state).total == named.total == fingerprint(state[:1]).total


def test_what_cannot_be_a_state_is_refused() -> None:
    half = torch.ones(2, 4)
    for state, message in (
        ([shard("w", None, (4, 4), (0, 0))], "w: the shard at .* has no data"),
        ([shard("w", half, (4, 4), (0, 0))], "w: ranks .0. hold main replicas of 8 elements, expected 16"),
        ([shard("w", half, (4, 4), (0, 0), local_shape=(4, 4))], "w: .* has data of shape .2, 4., expected 16"),
        ([shard("w", half, (2, 4), (0, 0)), shard("w", half.int(), (2, 4), (0, 0))], "holds float32 .* int32"),
    ):
        with pytest.raises(PlanError, match=message):
            fingerprint(state, names=True)
