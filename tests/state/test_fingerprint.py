"""What shards in memory add up to under any division: the CRC-32 of their tensor."""

from __future__ import annotations

import functools
import operator
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import PlanError
from mcore_ckpt.megatron.certificate import crc_of_shard
from mcore_ckpt.state.shards import leaves
from tests.support.shards import shard

pytestmark = pytest.mark.quick


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def summed(state: Any) -> tuple[int, int]:
    """What all shards of one tensor add up to, and how many have its first element."""
    found = [crc_of_shard(one) for one in leaves(state)]
    return functools.reduce(operator.xor, [crc for crc, _ in found]), sum(is_first for _, is_first in found)


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
        assert summed(division) == (crc(whole), 1)


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
    found = summed([shard("x", tensor, tuple(tensor.shape), (0,) * tensor.ndim)])
    assert found == (crc(tensor.detach().resolve_conj()), tensor.numel() > 0)


def test_a_shard_without_the_data_that_it_describes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"w: .* has data of shape .2, 4., expected 16"):
        crc_of_shard(shard("w", torch.ones(2, 4), (4, 4), (0, 0), local_shape=(4, 4)))
