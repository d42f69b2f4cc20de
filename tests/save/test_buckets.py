"""Buckets, layouts and the bytes that fill them, against a plain reference."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.save.buckets import (
    PlannedFile,
    WrittenFile,
    balance,
    check_results,
    fill_bucket,
    lay_out_file,
    lay_out_rank,
    place_objects,
)
from mcore_ckpt.save.staging import BucketSource, StagingBuffer
from tests.support.tensor_specs import specs_of


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 7))
def test_balance_loses_nothing_and_is_even(sizes: list[int], buckets: int) -> None:
    chosen = balance(sizes, buckets)
    assert sorted(index for indices in chosen for index in indices) == list(range(len(sizes)))
    assert all(indices == sorted(indices) for indices in chosen)
    totals = [sum(sizes[index] for index in indices) for indices in chosen]
    # Largest first to the emptiest: no bucket exceeds another by more than the largest item.
    assert max(totals) - min(totals) <= max(sizes, default=0)


def test_results_that_are_not_the_plan_are_refused() -> None:
    image: Any = SimpleNamespace(size_bytes=4096, payload_offsets=[0, 64])
    planned = [PlannedFile(name, image) for name in ("a", "b")]
    none: array[int] = array("I")

    def written(name: str, size_bytes: int = 4096, crcs: int = 2) -> WrittenFile:
        return WrittenFile(name, size_bytes, 0, none, array("I", [7] * crcs), none, none, none)

    right = [written("a"), written("b")]
    check_results(planned, right)
    wrong = ([written("a")], [*right, written("c")], [right[0], written("b", 4095)], [right[0], written("b", crcs=1)])
    for results in wrong:
        with pytest.raises(SaveError, match="not what was planned"):
            check_results(planned, results)


@st.composite
def bucket_tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    tensors = []
    for seed in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if draw(st.booleans()):
            shape = [*shape, draw(st.integers(1, 400))]
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
        if tensor.dim() > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, 1)
        tensors.append(tensor)
    if draw(st.booleans()):
        tensors.insert(0, torch.arange(300_000, dtype=torch.float32))  # large: page-aligned
    return tensors


SAVE_ID = bytes(range(16))


def payload(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def source_of(tensors: list[torch.Tensor], objects: list[bytes]) -> tuple[BucketSource, bytes]:
    """A source, and the file it must make, checksums left zero."""
    keys = [f"object {number}" for number in range(len(objects))]
    layout, _ = lay_out_file("f", specs_of(tensors), keys, [len(data) for data in objects])
    offsets = place_objects([len(data) for data in objects])
    expected = bytearray(layout.image.size_bytes)
    for offset, data in zip(offsets, objects, strict=True):
        expected[offset : offset + len(data)] = data
    for template, offset, tensor in zip(layout.templates, layout.item_offsets, tensors, strict=True):
        item = template.head + payload(tensor) + template.tail
        expected[offset : offset + len(item)] = item
    places = zip(offsets, map(len, objects), strict=True)
    expected[layout.footer_offset :], _ = layout.footer.fill(SAVE_ID, len(expected), places)
    bucket = fill_bucket(layout, "f", SAVE_ID, [memoryview(data) for data in objects], tensors)
    return BucketSource(bucket), bytes(expected)


@given(bucket_tensors(), st.lists(st.binary(max_size=300), max_size=4), st.sampled_from([4096, 8192, 65536]))
def test_any_window_of_a_file_is_filled_right_over_dirty_memory(
    tensors: list[torch.Tensor], objects: list[bytes], window_bytes: int
) -> None:
    source, expected = source_of(tensors, objects)
    made = bytearray()
    for start in range(0, len(expected), window_bytes):
        stop = min(start + window_bytes, len(expected))
        buffer = bytearray(b"\xee" * (stop - start))
        source.fill(start, stop, memoryview(buffer))
        made += buffer
    assert bytes(made) == expected


@given(bucket_tensors(), st.lists(st.binary(max_size=300), max_size=4))
def test_a_buffer_is_filled_right_first_and_again(tensors: list[torch.Tensor], objects: list[bytes]) -> None:
    source, expected = source_of(tensors, objects)
    buffer = StagingBuffer()
    view = buffer.reserve(max(len(expected), 1))
    view[:] = b"\xee" * len(view)
    source.fill_buffer(view, laid_out=False)
    assert bytes(view[: len(expected)]) == expected
    assert not any(view[len(expected) :])
    again = [torch.zeros_like(tensor) for tensor in tensors]
    source, expected = source_of(again, [bytes(len(data)) for data in objects])
    source.fill_buffer(view, laid_out=True)
    assert bytes(view[: len(expected)]) == expected
    del view
    buffer.close()


def test_objects_that_outgrow_their_region_ask_for_a_new_layout() -> None:
    layout = lay_out_rank([], ["x/shard_0_1"], [100], rank=0, thread_count=2)
    assert layout.has_room(["x/shard_0_1"], [4000])
    assert not layout.has_room(["x/shard_0_1"], [5000])
    assert not lay_out_rank([], [], [], rank=0, thread_count=2).has_room(["x"], [1])
