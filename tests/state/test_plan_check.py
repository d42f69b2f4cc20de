"""The check of whole columns against numpy, which counts for every element in how many chunks it lies."""

import functools
import operator
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.format.integrity import PlannedTable, RankPlan, TableColumns
from mcore_ckpt.megatron.certificate import crc_of_shard
from mcore_ckpt.state.plan_check import check_plans
from mcore_ckpt.state.shards import leaves
from tests.support.stored_layouts import tilings
from tests.support.stored_saves import shard

pytestmark = pytest.mark.quick

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
Tensors = dict[str, tuple[tuple[int, ...], list[Box]]]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that tile it; sometimes one is moved, lost or doubled."""
    shape = draw(SHAPES)
    boxes = draw(tilings(shape, empty=True).flatmap(st.permutations))
    damage = draw(st.sampled_from(["none", "none", "lost", "doubled", "moved"]))
    victim = draw(st.integers(0, len(boxes) - 1))
    if damage == "lost":
        del boxes[victim]
    elif damage == "doubled":
        boxes.append(boxes[victim])
    elif damage == "moved" and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        offsets = list(boxes[victim].offsets)
        offsets[axis] += draw(st.sampled_from([-1, 1]))
        boxes[victim] = Box(tuple(offsets), boxes[victim].sizes)
    return shape, boxes


def _tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    counts = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        if any(start < 0 or start + size > outer for start, size, outer in zip(offsets, sizes, shape, strict=True)):
            return False
        counts[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
    return bool((counts == 1).all())


def _plan(rank: int, chunks: list[tuple[str, str, tuple[int, ...], Box]]) -> RankPlan:
    keys, dtypes = ([chunk[n] for chunk in chunks] for n in range(2))
    columns = TableColumns.of(keys, dtypes, [(shape, *box) for _, _, shape, box in chunks])
    return [PlannedTable(f"__{rank}_0.distcp", 0, columns)]


def _plans(tensors: Tensors, ranks: int) -> list[RankPlan]:
    chunks = [(key, "float32", shape, box) for key, (shape, boxes) in tensors.items() for box in boxes]
    return [_plan(rank, chunks[rank::ranks]) for rank in range(ranks)]


@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(1, 3))
@example([((4, 4), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))])], 1)  # in a row, and a column is missing
@example([((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 3))])], 2)
def test_plans_pass_exactly_if_every_element_lies_in_one_chunk(
    drawn: list[tuple[tuple[int, ...], list[Box]]], ranks: int
) -> None:
    tensors = {f"t{n}": (shape, boxes) for n, (shape, boxes) in enumerate(drawn) if boxes}
    plans = _plans(tensors, ranks)
    wrong = [key for key, (shape, boxes) in tensors.items() if not _tiles(shape, boxes)]
    if not wrong:
        check_plans(plans)
        return
    with pytest.raises(PlanError) as caught:
        check_plans(plans)
    assert str(caught.value).split(":")[0] in wrong


@given(st.lists(tensors(), min_size=1, max_size=3), st.data())
def test_ranks_that_disagree_are_named(drawn: list[tuple[tuple[int, ...], list[Box]]], data: st.DataObject) -> None:
    tensors = {f"t{n}": (shape, [Box((0,) * len(shape), shape)]) for n, (shape, _) in enumerate(drawn)}
    key = data.draw(st.sampled_from(sorted(tensors)))
    shape = tensors[key][0]
    other_dtype = data.draw(st.booleans())
    other_shape = shape if other_dtype else (*shape, 1)
    dtype = "bfloat16" if other_dtype else "float32"
    other = _plan(1, [(key, dtype, other_shape, Box((0,) * len(other_shape), other_shape))])
    with pytest.raises(PlanError, match=rf"^{key}: rank 0 saves float32 of .*, rank 1 {dtype} of "):
        check_plans([*_plans(tensors, 1), other])


def test_a_gap_names_the_ranks_that_hold_chunks() -> None:
    whole, gap = ((4,), [Box((0,), (2,)), Box((2,), (2,))]), ((6,), [Box((0,), (2,)), Box((4,), (2,))])
    with pytest.raises(
        PlanError, match=r"^b: element \[2\] of \[6\] lies in 0 chunks.* chunks of it are on rank 1, 2$"
    ):
        check_plans([*_plans({"a": whole}, 1), *_plans({"b": gap}, 2)])


# --- the fingerprint of a state ---------------------------------------------------------------------------------------


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
