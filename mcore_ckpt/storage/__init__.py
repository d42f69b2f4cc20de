"""Where checkpoints live: put, read a range, list, delete, publish. Knows nothing of what the bytes mean."""

from __future__ import annotations

from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, RangeReader, RangeWriter, Storage, align_up, check_name
from mcore_ckpt.storage.local import LocalStorage

__all__ = [
    "ALIGNMENT_BYTES",
    "DirectIo",
    "LocalStorage",
    "RangeReader",
    "RangeWriter",
    "Storage",
    "align_up",
    "check_name",
]
