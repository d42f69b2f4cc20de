"""Any save layout, read in any load layout, against numpy: the bytes that arrive are those that were stored.

The thresholds that choose between the reader's ways (items read whole, pieces through a buffer, straight reads) are
drawn as well, so that tensors of a few hundred bytes exercise all of them.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.load import ranges
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage.base import Storage
from tests.support.stored_layouts import StoredTensor, boxes_in, encode_tensor, stock_item, tilings, write_checkpoint

_DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.float16),
]


def own_item(tensor: torch.Tensor) -> bytes:
    payload = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return encode_tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), payload)


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor, as [*shape, element bytes]."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(*tensor.shape, tensor.dtype.itemsize)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    content = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).reshape(shape)


def destination(kind: str, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of those sizes: contiguous, transposed, a window of a larger one, or a leaf that needs grad."""
    if kind == "transposed":
        return torch.zeros(tuple(reversed(sizes)), dtype=dtype).permute(tuple(reversed(range(len(sizes)))))
    if kind == "window":
        larger = torch.zeros(tuple(size + 2 for size in sizes), dtype=dtype)
        return larger[tuple(slice(1, 1 + size) for size in sizes)]
    tensor = torch.zeros(sizes, dtype=dtype)
    if kind == "requires_grad" and (dtype.is_floating_point or dtype.is_complex):
        tensor.requires_grad_()
    return tensor


@st.composite
def thresholds(draw: st.DrawFn) -> list[tuple[object, str, int]]:
    """Other sizes than those that the package takes, so that small tensors are cut; with where they stand."""
    return [
        (Storage, "reads_at_once", draw(st.sampled_from([1, 2, 3]))),
        (ranges, "WINDOW_BYTES", draw(st.sampled_from([64, 200, 4096, 1 << 23]))),
        (ranges, "MAX_GAP_BYTES", draw(st.sampled_from([0, 8, 100, 262_144]))),
        (ranges, "MAX_SMALL_BYTES", draw(st.sampled_from([0, 2000, 1 << 20]))),
        (ranges, "STRAIGHT_BYTES", draw(st.sampled_from([1, 64, 1 << 20]))),
        (ranges, "CHEAP_GAP_BYTES", draw(st.sampled_from([0, 16, 32_768]))),
    ]


shapes = st.lists(st.integers(1, 12), max_size=4).map(tuple)


@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(_DTYPES),
    tuning=thresholds(),
    item_of=st.sampled_from([stock_item, own_item]),
    files=st.integers(1, 3),
    padding=st.lists(st.sampled_from([0, 1, 7, 64, 4096]), min_size=1, max_size=3),
)
def test_any_layout_loads_in_any_other(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tuning: list[tuple[object, str, int]],
    item_of: Any,
    files: int,
    padding: list[int],
) -> None:
    tensor = random_tensor(shape, dtype, seed=len(shape))
    other = random_tensor((5, 3), torch.float32, seed=1)
    stored = {
        "w": StoredTensor(tensor, data.draw(tilings(shape))),
        "other": StoredTensor(other, [Box((0, 0), (5, 3))]),
    }
    # A load layout is any tiling, and boxes besides that overlap it: some bytes are wanted twice.
    boxes = data.draw(tilings(shape)) + data.draw(st.lists(boxes_in(shape), max_size=3))
    kinds = [data.draw(st.sampled_from(["plain", "transposed", "window", "requires_grad"])) for _ in boxes]
    requests = [
        ReadRequest("w", destination(kind, box.sizes, dtype), *box) for kind, box in zip(kinds, boxes, strict=True)
    ]
    requests.append(ReadRequest("other", torch.zeros(5, 3), (0, 0), (5, 3)))
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for owner, name, value in tuning:
            patch.setattr(owner, name, value)
        write_checkpoint(Path(directory), stored, item_of=item_of, files=files, padding=padding)
        reader = FileSystemReader(directory)
        reader.read_items(requests)
    expected = raw(tensor)
    for request, box in zip(requests, boxes, strict=False):
        slices = tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))
        np.testing.assert_array_equal(raw(request.tensor), expected[slices])
    np.testing.assert_array_equal(raw(requests[-1].tensor), raw(other))
    assert reader.stats.fallbacks == 0
