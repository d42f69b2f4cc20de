"""The bytes that docs/format.md shows are the bytes that are written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from mcore_ckpt.format import item_layout as item_template
from mcore_ckpt.format.item_layout import LARGE_TENSOR_BYTES, encode_tensor
from mcore_ckpt.format.tensor_pickle import DTYPES

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def test_the_example_is_what_is_written() -> None:
    payload = torch.arange(600).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    item = encode_tensor("bfloat16", (20, 30), payload)
    example = PAGE.partition("### An example")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (\d+) \| ((?:[0-9a-f]{2} ?)+) \|", example, re.MULTILINE)
    assert len(rows) >= 15
    for offset, shown in rows:
        expected = bytes.fromhex(shown)
        assert item[int(offset) :][: len(expected)] == expected, f"at {offset}"
    last_offset, last_shown = rows[-1]
    assert int(last_offset) + len(bytes.fromhex(last_shown)) == len(item)


def test_every_dtype_is_on_the_page_with_its_class() -> None:
    for dtype, entry in DTYPES.items():
        if entry.storage_class is None:
            assert re.search(rf"\b{dtype}\b", PAGE), dtype
        else:
            assert f"| {dtype} | {entry.storage_class} |" in PAGE, dtype


def test_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"{LARGE_TENSOR_BYTES:,} bytes or more" in PAGE
    assert f"{item_template._ZIP64_FROM_BYTES:,} bytes" in PAGE
