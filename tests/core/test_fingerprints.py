"""Fingerprints against the CRC-32 of whole tensors, whatever the slices; the vectors of docs/format.md; CRC-32s."""

import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from mcore_ckpt.core import crc as sums
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.core.fingerprints import TensorFingerprint, state_of

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def test_keys_dtypes_shapes_and_bytes_all_count() -> None:
    assert state_of({}).total == "0" * 32
    base = {"a": TensorFingerprint("float32", (2, 3), 5), "b": TensorFingerprint("float32", (2, 3), 6)}
    others = [
        {"a": base["b"], "b": base["a"]},
        {"a": base["a"]},
        {**base, "c": TensorFingerprint("float32", (0,), 0)},
        {**base, "b": TensorFingerprint("int32", (2, 3), 6)},
        {**base, "b": TensorFingerprint("float32", (3, 2), 6)},
        {**base, "b": TensorFingerprint("float32", (2, 3), 7)},
        {"a": base["a"], "x": base["b"]},
    ]
    totals = {state_of(tensors).total for tensors in (base, *others)}
    assert len(totals) == 1 + len(others)
    assert state_of(base).differing(state_of(others[0])) == ["a", "b"]
    assert state_of(base).differing(state_of(others[-1])) == ["b", "x"]


def test_the_vectors_on_the_page() -> None:
    page = PAGE.read_text()
    page = page[page.index("## Fingerprints") :]
    rows = re.findall(r"^    (\S+) +(\w+) +\[([\d, ]*)\] +(.+?) +([0-9a-f]{8})$", page, re.MULTILINE)
    assert len(rows) >= 4
    tensors = {}
    for key, dtype, sizes, elements, crc in rows:
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        values = np.arange(np.prod(shape, dtype=int)) if "0, 1, 2" in elements else np.full(shape, float(elements))
        assert zlib.crc32(values.astype(dtype).tobytes()) == int(crc, 16), key
        tensors[key] = TensorFingerprint(dtype, shape, int(crc, 16))
    (total,) = re.findall(r"^The fingerprint of these [a-z]+ tensors is `([0-9a-f]{32})`", page, re.MULTILINE)
    assert state_of(tensors).total == total


@pytest.mark.parametrize("has_its_own", [True, False])
@pytest.mark.parametrize("size", [0, 1, 7, 64, 4095, 100_003])
def test_parts_summed_apart_combine(size: int, has_its_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_its_own:
        monkeypatch.setattr(sums, "_combine", None)
    content = random.Random(size).randbytes(size)
    for cut in {0, size // 3, size}:
        assert crc32_combine(crc32(content[:cut]), crc32(content[cut:]), size - cut) == zlib.crc32(content)
