"""Items told by comparison with one that was parsed: everything but payload, checksums and id has to be the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mcore_ckpt.format.item_reading import ItemForm, LocatedTensor, form_of, locate_tensor_in
from tests.support.encoded_items import encode_tensor
from tests.support.stored_layouts import stock_item as stock


def own(tensor: torch.Tensor) -> bytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return encode_tensor(dtype, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())


def learn(item: bytes) -> tuple[ItemForm, LocatedTensor]:
    located = locate_tensor_in(memoryview(item), "here")
    assert located.crc32 is not None
    form = form_of(memoryview(item), located.payload_offset, located.payload_bytes, located.crc32)
    assert form is not None
    return form, located


WRITERS = [own, stock]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "other", [torch.zeros(5, 3), torch.zeros(15), torch.zeros(3, 5, dtype=torch.int32)], ids=["turned", "flat", "int32"]
)
def test_an_item_of_the_same_length_but_other_shape_or_dtype_has_not(
    write: Callable[[torch.Tensor], bytes], other: torch.Tensor
) -> None:
    form, _ = learn(write(torch.zeros(3, 5)))
    assert form.payload_crc32(memoryview(write(other))) is None


@pytest.mark.parametrize("write", WRITERS)
def test_a_change_of_any_byte_is_seen_but_in_payload_and_id(write: Callable[[torch.Tensor], bytes]) -> None:
    item = write(torch.arange(15.0).reshape(3, 5))
    form, located = learn(item)
    unseen = []
    for position in range(len(item)):
        damaged = bytearray(item)
        damaged[position] ^= 0x20
        if form.payload_crc32(memoryview(damaged)) == located.crc32:
            unseen.append(position)
    payload = range(len(form.head), form.payload_stop)
    # The id: 40 digits and twice their CRC-32.
    assert len(set(unseen) - set(payload)) == (0 if write is own else 48)
    assert set(payload) <= set(unseen)


def test_what_states_another_checksum_has_no_form() -> None:
    item = own(torch.zeros(3, 5))
    located = locate_tensor_in(memoryview(item), "here")
    assert form_of(memoryview(item), located.payload_offset, located.payload_bytes, 1) is None
    assert form_of(memoryview(bytes(100)), 10, 20, 0) is None
