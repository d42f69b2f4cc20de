"""Tensors that are stored as a whole, and items in memory, for tests that lay out files without planning a save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.integrity import NO_SAVE_ID
from mcore_ckpt.format.item import TensorTemplate, tensor_template
from mcore_ckpt.image.layout import TensorSpec, WriteBucket, fill_bucket, lay_out_file
from mcore_ckpt.save.staging import BucketSource


def specs_of(tensors: Iterable[torch.Tensor]) -> list[TensorSpec]:
    """Each tensor as the whole of a global tensor, under keys `0`, `1`, ..."""
    specs = []
    for number, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(str(number), dtype, shape, (0,) * len(shape), shape, tensor.nbytes))
    return specs


def bucket_of(*tensors: torch.Tensor, name: str = "__0_0.distcp") -> WriteBucket:
    """What is written into a file that holds these tensors."""
    return fill_bucket(lay_out_file(name, specs_of(tensors))[0], name, NO_SAVE_ID, [], tensors)


def source_of(*tensors: torch.Tensor) -> BucketSource:
    """The bytes of a file that holds these tensors."""
    return BucketSource(bucket_of(*tensors))


def encode_tensor(dtype: str, shape: tuple[int, ...], payload: Any) -> bytes:
    """A complete item, from any bytes-like payload."""
    template = tensor_template(dtype, shape)
    payload = memoryview(payload).cast("B")
    assert len(payload) == template.payload_bytes
    return b"".join((template.head, payload, tail_with(template, crc32(payload))))


def tail_with(template: TensorTemplate, crc: int) -> bytes:
    """What stands behind a payload that has this CRC-32."""
    tail = bytearray(template.tail)
    for position in template.crc_positions:
        tail[position : position + 4] = crc.to_bytes(4, "little")
    return bytes(tail)
