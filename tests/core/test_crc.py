"""One value whatever library computes it, in one call or in pieces."""

from __future__ import annotations

import random
import zlib

import pytest

from mcore_ckpt.core import crc
from mcore_ckpt.core.crc import crc32, crc32_combine

SIZES = [0, 1, 7, 64, 4095, 100_003]


@pytest.mark.parametrize("has_its_own", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_parts_summed_apart_combine(size: int, has_its_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_its_own:
        monkeypatch.setattr(crc, "_combine", None)
    content = random.Random(size).randbytes(size)
    for cut in {0, size // 3, size}:
        assert crc32_combine(crc32(content[:cut]), crc32(content[cut:]), size - cut) == zlib.crc32(content)
