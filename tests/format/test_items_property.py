"""Tensor items round trip with torch both ways, for every dtype and shape; their pickles are read as pickle reads."""

from __future__ import annotations

import io
import math
import zipfile

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.item_reading import locate_tensor_in
from mcore_ckpt.format.tensor_pickle import (
    DTYPES,
    MalformedPickleError,
    NotPlainTensorError,
    PickledTensor,
    _run,
    read_tensor_pickle,
    tensor_pickle,
)
from mcore_ckpt.format.zip_records import NotRangeable

# Sizes on both sides of where the pickle's ints become longer (256, 65536), never all of them large.
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.sampled_from([1, 255, 256, 257, 300]), min_size=1, max_size=2),
    st.sampled_from([[65535], [65536], [1, 65537], [70000, 2], [2, 1, 70001]]),
).map(tuple)
ANY_SHAPE = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 40)), max_size=8).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], bytes]:
    dtype, shape = draw(st.sampled_from(sorted(name for name in DTYPES if hasattr(torch, name)))), draw(SHAPES)
    size = math.prod(shape) * DTYPES[dtype].element_bytes
    block = draw(st.binary(min_size=1, max_size=64))
    payload = (block * (size // len(block) + 1))[:size]
    return dtype, shape, bytes(byte & 1 for byte in payload) if dtype == "bool" else payload


@given(st.data())
def test_views_are_located_where_they_lie_or_not_at_all(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    whole = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    view = whole.permute(data.draw(st.permutations(range(len(shape)))))
    for axis in range(len(shape)):
        start = data.draw(st.integers(0, view.shape[axis]))
        view = view.narrow(axis, start, data.draw(st.integers(0, view.shape[axis] - start)))
    buffer = io.BytesIO()
    torch.save(view, buffer)
    item = buffer.getvalue()
    try:
        located = locate_tensor_in(memoryview(item), "w")
    except NotRangeable:
        assert not view.is_contiguous()
        return
    content = item[located.payload_offset : located.payload_offset + located.payload_bytes]
    assert located.shape == tuple(view.shape)
    assert content == view.contiguous().numpy().tobytes()
    assert located.crc32 in (None, crc32(content))


@given(st.sampled_from(sorted(DTYPES)), ANY_SHAPE)
def test_descriptions_say_what_went_into_them(dtype: str, shape: tuple[int, ...]) -> None:
    """Of tensors of any size that torch can describe: nothing of that size is made."""
    assume(math.prod(size or 1 for size in shape) < 1 << 60)  # torch itself refuses larger strides
    count = math.prod(shape)
    pickle = tensor_pickle(dtype, shape, count)
    size = count * DTYPES[dtype].element_bytes
    assert read_tensor_pickle(pickle) == PickledTensor(dtype, shape, "0", size, 0, size)


@given(st.data())
def test_mutated_descriptions_are_parsed_alike_or_refused(data: st.DataObject) -> None:
    buffer = io.BytesIO()
    torch.save(torch.zeros(data.draw(SHAPES), dtype=torch.int8), buffer)
    pickle = bytearray(zipfile.ZipFile(buffer).read("archive/data.pkl"))
    for _ in range(data.draw(st.integers(0, 3))):
        pickle[data.draw(st.integers(0, len(pickle) - 1))] = data.draw(
            st.sampled_from(b"KMJ\x8a\x85\x86\x87()tRQqh.\x00\xff")
        )
    try:
        tensor = read_tensor_pickle(bytes(pickle))
    except (NotPlainTensorError, MalformedPickleError):
        return
    assert tensor == _run(bytes(pickle))
    assert 0 <= tensor.first_byte <= tensor.first_byte + tensor.payload_bytes <= max(tensor.storage_bytes, 0)
