"""Items in memory, as saves put them into files."""

from __future__ import annotations

from typing import Any

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.item_layout import tensor_template


def encode_tensor(dtype: str, shape: tuple[int, ...], payload: Any) -> bytes:
    """A complete item, from any bytes-like payload."""
    template = tensor_template(dtype, shape)
    payload = memoryview(payload).cast("B")
    assert len(payload) == template.payload_bytes
    return b"".join((template.head, payload, template.tail_with(crc32(payload))))
