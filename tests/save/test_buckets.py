"""Buckets, layouts and the bytes that fill them, against a plain reference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.image.layout import fill_bucket, lay_out_file, place_objects
from mcore_ckpt.image.writer import ImageWriter, WindowPool
from mcore_ckpt.save.planner import lay_out_rank
from mcore_ckpt.save.staging import BucketSource, StagingBuffer
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.stored_layouts import specs_of, tail_with

pytestmark = pytest.mark.quick


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


def source_of(tensors: list[torch.Tensor], objects: list[bytes], *, summed: bool = False) -> tuple[BucketSource, bytes]:
    """A source, and the file it must make, with checksums, or with zeros for them."""
    keys = [f"object {number}" for number in range(len(objects))]
    layout, _ = lay_out_file("f", specs_of(tensors), keys, [len(data) for data in objects])
    offsets = place_objects([len(data) for data in objects])
    expected = bytearray(layout.image.size_bytes)
    for offset, data in zip(offsets, objects, strict=True):
        expected[offset : offset + len(data)] = data
    for template, offset, tensor in zip(layout.templates, layout.item_offsets, tensors, strict=True):
        content = payload(tensor)
        item = template.head + content + (tail_with(template, crc32(content)) if summed else template.tail)
        expected[offset : offset + len(item)] = item
    places = zip(offsets, map(len, objects), strict=True)
    expected[layout.footer_offset :], _ = layout.footer.fill(SAVE_ID, len(expected), places)
    bucket = fill_bucket(layout, "f", SAVE_ID, [memoryview(data) for data in objects], tensors)
    return BucketSource(bucket), bytes(expected)


@given(
    bucket_tensors(),
    st.lists(st.binary(max_size=300), max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_file_that_is_written_by_windows_holds_its_items_and_their_sums(
    tensors: list[torch.Tensor], objects: list[bytes], window_pages: int, windows: int, io_threads: int
) -> None:
    source, expected = source_of(tensors, objects, summed=True)
    pool = WindowPool(4096 * window_pages, windows)
    for dirty in [pool.take() for _ in range(windows)]:
        assert dirty is not None
        dirty[:] = b"\xee" * len(dirty)
        pool.give_back(dirty)
    with tempfile.TemporaryDirectory() as directory:
        with ImageWriter(pool, io_threads=io_threads) as images:
            file = LocalStorage(directory).open_writer("f", source.bucket.file.image.size_bytes, direct="off")
            stream = images.open(file, source.bucket.file)
            stream.fill(source.fill)
            stream.close()
        assert Path(directory, "f").read_bytes() == expected
    assert list(images.results[0].crcs) == [crc32(payload(tensor)) for tensor in tensors]


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
