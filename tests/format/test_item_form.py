"""Items told by comparison with one that was parsed: everything but payload, checksums and id has to be the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.format import item_reading
from mcore_ckpt.format.item_reading import Forms, LocatedTensor, locate_tensor_in
from tests.support.encoded_items import encode_tensor
from tests.support.stored_layouts import stock_item as stock

KIND = "float32", (3, 5)


def own(tensor: torch.Tensor) -> bytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return encode_tensor(dtype, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("write", [own, stock])
def test_a_change_of_any_byte_is_seen_but_in_payload_and_id(
    write: Callable[[torch.Tensor], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: Forms = {}
    item = write(torch.arange(15.0).reshape(3, 5))
    located = locate_tensor_in(memoryview(item), "here", KIND, forms)
    assert len(forms) == (write is stock)

    def parsed(item: item_reading.ItemBytes) -> LocatedTensor:
        raise LoadError("parsed")

    monkeypatch.setattr(item_reading, "_parsed", parsed)
    other = write(torch.zeros(3, 5))
    assert locate_tensor_in(memoryview(other), "here", KIND, forms).crc32 != located.crc32
    unseen = []
    for position in range(len(item)):
        damaged = bytearray(item)
        damaged[position] ^= 0x20
        try:
            assert locate_tensor_in(memoryview(damaged), "here", KIND, forms) == located
        except LoadError:
            continue
        unseen.append(position)
    payload = set(range(located.payload_offset, located.payload_offset + located.payload_bytes))
    # The id: 40 digits and twice their CRC-32.
    assert len(set(unseen) - payload) == (0 if write is own else 48)
    assert payload <= set(unseen)


@pytest.mark.parametrize("write", [own, stock])
@pytest.mark.parametrize(
    "other", [torch.zeros(5, 3), torch.zeros(15), torch.zeros(3, 5, dtype=torch.int32)], ids=["turned", "flat", "int32"]
)
def test_an_item_of_the_same_length_but_other_shape_or_dtype_is_told(
    write: Callable[[torch.Tensor], bytes], other: torch.Tensor
) -> None:
    forms: Forms = {}
    locate_tensor_in(memoryview(write(torch.zeros(3, 5))), "here", KIND, forms)
    found = locate_tensor_in(memoryview(write(other)), "here", KIND, forms)
    assert (found.dtype, found.shape) == (str(other.dtype).removeprefix("torch."), tuple(other.shape))
