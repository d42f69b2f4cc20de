"""Tensor items by example: what is emitted, who can read it, and where the bytes of others' items are found."""

import io
import math
import os
import random
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format import item as item_template
from mcore_ckpt.format.item import (
    LocatedTensor,
    RecordSpan,
    element_bytes,
    locate_tensor,
    locate_tensor_in,
    tensor_template,
    verify_records,
)
from mcore_ckpt.format.tensor_pickle import DTYPES
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.state.shards import torch_dtype
from tests.support.stored_layouts import encode_tensor, rewritten
from tests.support.stored_layouts import stock_item as saved

pytestmark = pytest.mark.quick

OF_THIS_TORCH = [name for name in DTYPES if torch_dtype(name)]
GIB = 1024**3
CPU, CUDA = b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:1"  # as pickles hold these texts
SHAPES = [
    *((), (0,), (1,), (5,), (2, 3), (3, 0, 2), (300, 17), (2, 1, 3, 4), (1,) * 40),
    *((255, 257), (65_535,), (2, 1, 65_536)),  # on both sides of where the numbers in the pickle become longer
]


def payload_of(dtype: str, shape: tuple[int, ...]) -> bytes:
    content = random.Random(repr((dtype, shape))).randbytes(math.prod(shape) * element_bytes(dtype))
    return bytes(byte & 1 for byte in content) if dtype == "bool" else content


def tensor_of(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not math.prod(shape):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(bytearray(payload_of(dtype, shape)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    return whole[start : start + tensor.numel() * tensor.element_size()].numpy().tobytes()


def locate_both_ways(item: bytes) -> LocatedTensor:
    reads: list[int] = []

    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(item)
        reads.append(length)
        return item[offset : offset + length]

    by_reading = locate_tensor(read, len(item), "here")
    assert locate_tensor_in(memoryview(item), "here", (by_reading.dtype, by_reading.shape)) == by_reading
    assert sum(reads) <= 8192
    return by_reading


def content_of(item: bytes) -> bytes:
    located = locate_both_ways(item)
    content = item[located.payload_offset : located.payload_offset + located.payload_bytes]
    if located.crc32 is not None:
        assert located.crc32 == crc32(content)
    if located.record_crc32 is not None:
        assert located.record_crc32 == crc32(item[located.record_offset :][: located.record_bytes])
    return content


# --------------------------------------------------------------------------------------------------------- emitting


@pytest.mark.parametrize("dtype", OF_THIS_TORCH)
def test_own_items_hold_what_torch_and_zip_tools_read(dtype: str) -> None:
    for shape in SHAPES:
        payload = payload_of(dtype, shape)
        item = encode_tensor(dtype, shape, payload)
        expected = tensor_of(dtype, shape)
        for weights_only in (True, False):
            loaded = torch.load(io.BytesIO(item), weights_only=weights_only)
            assert (loaded.dtype, loaded.shape, loaded.stride()) == (expected.dtype, shape, expected.stride())
            assert bytes_of(loaded) == payload
            assert loaded.requires_grad is False
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == payload
        assert content_of(item) == payload


def test_the_table_has_every_dtype_that_torch_saves_as_plain_bytes() -> None:
    """And some more, where this torch is not the newest."""
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    quantized = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
    savable = {*torch.storage._new_dtypes(), *torch.storage._dtype_to_storage_type_map()} & dtypes - quantized
    assert {f"torch.{name}" for name in OF_THIS_TORCH} == {str(dtype) for dtype in savable}
    for name in OF_THIS_TORCH:
        assert DTYPES[name].element_bytes == getattr(torch, name).itemsize


# ------------------------------------------------------------------------------------------------------ 4 GiB and more


@pytest.mark.parametrize(
    "payload_bytes", [item_template._ZIP64_FROM_BYTES - 1, item_template._ZIP64_FROM_BYTES, (1 << 32) - 1, 6 * GIB + 5]
)
def test_sparse_files_around_four_gibibytes(tmp_path: Path, payload_bytes: int) -> None:
    """Head, an enormous hole and tail: nothing of it is read but what the test touches."""
    template = tensor_template("uint8", (payload_bytes,))
    path = tmp_path / "sparse.pt"
    with path.open("wb") as file:
        file.write(template.head + b"\x01\x02")
        file.seek(len(template.head) + payload_bytes - 2)
        file.write(b"\x03\x04" + template.tail)
    assert path.stat().st_size == template.item_bytes

    loaded = torch.load(path, mmap=True)
    assert loaded.shape == (payload_bytes,)
    assert [loaded[0], loaded[1], loaded[2], loaded[-3], loaded[-2], loaded[-1]] == [1, 2, 0, 0, 3, 4]

    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == payload_bytes

    with path.open("rb") as file:
        fd = file.fileno()
        located = locate_tensor(lambda offset, length: os.pread(fd, length, offset), template.item_bytes, "x")
        spans = list(verify_records(lambda offset, length: os.pread(fd, length, offset), template.item_bytes, "x"))
    assert (located.payload_offset, located.payload_bytes) == (len(template.head), payload_bytes)
    assert RecordSpan("archive/data/0", len(template.head), payload_bytes, 0) in spans


# --------------------------------------------------------------------------------------------------- others' items


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (rewritten(saved(torch.arange(5000)), lambda _, content: content), torch.arange(5000)),
        (saved(torch.ones(3, requires_grad=True)), torch.ones(3)),
        (saved(torch.nn.Parameter(torch.ones(3, 2))), torch.ones(3, 2)),
        (rewritten(saved(torch.arange(6)), lambda _, old: old.replace(CPU, CUDA)), torch.arange(6)),
        (saved(torch.arange(12).as_strided((3, 1, 4), (4, 77, 1))), torch.arange(12)),
    ],
    ids="rewritten gradient parameter gpu stride-of-one-element".split(),
)
def test_tensors_of_every_kind_are_located(item: bytes, expected: torch.Tensor) -> None:
    assert content_of(item) == bytes_of(expected)


def test_an_item_without_checksums_says_so() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        item = saved(torch.arange(6))
    finally:
        torch.serialization.set_crc32_options(True)
    located = locate_both_ways(item)
    assert (located.crc32, located.record_crc32) == (None, None)
    assert content_of(item) == bytes_of(torch.arange(6))
    assert {span.crc32 for span in verify_records(lambda at, n: item[at : at + n], len(item), "x")} == {None}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (saved(torch.arange(12).view(3, 4).t()), "strides"),
        (saved(torch.arange(12).view(3, 4)[:, :2]), "strides"),
        (saved(torch.ones(1).expand(5)), "strides"),
        (saved(torch.ones(3, dtype=torch.complex64).conj()), "flags"),
        (saved({"a": torch.ones(3)}), "holds dict"),
        (saved([1, "two"]), "holds list"),
        (saved((torch.ones(1), torch.ones(1))), "tuple"),
        (saved(torch.ones(3).to_sparse()), "_rebuild_sparse_tensor"),
        (rewritten(saved(torch.ones(3)), lambda name, old: b"big" if name == "byteorder" else old), "big-endian"),
    ],
    ids="transposed sliced expanded conjugated dict list two-tensors sparse big-endian".split(),
)
def test_what_is_not_plain_bytes_is_left_to_torch(item: bytes, reason: str) -> None:
    with pytest.raises(NotRangeable, match=reason):
        locate_both_ways(item)


@given(st.data())
def test_views_are_located_where_they_lie_or_not_at_all(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    view = (
        torch.arange(math.prod(shape), dtype=torch.int32)
        .view(shape)
        .permute(data.draw(st.permutations(range(len(shape)))))
    )
    for axis in range(len(shape)):
        start = data.draw(st.integers(0, view.shape[axis]))
        view = view.narrow(axis, start, data.draw(st.integers(0, view.shape[axis] - start)))
    item = saved(view)
    try:
        located = locate_tensor_in(memoryview(item), "w")
    except NotRangeable:
        assert not view.is_contiguous()
        return
    content = item[located.payload_offset : located.payload_offset + located.payload_bytes]
    assert located.shape == tuple(view.shape)
    assert content == view.contiguous().numpy().tobytes()
    assert located.crc32 in (None, crc32(content))
