"""What docs/format.md says of dtypes, limits and zip64 is what is written."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_ckpt.format import item_layout as item_template
from mcore_ckpt.format.item_layout import LARGE_TENSOR_BYTES, tensor_template
from mcore_ckpt.format.tensor_pickle import DTYPES
from mcore_ckpt.format.zip_records import END, END64, END64_LOCATOR

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def test_every_dtype_is_on_the_page_with_its_class_and_size() -> None:
    for dtype, entry in DTYPES.items():
        written = f"{dtype} {entry.storage_class or ''} {entry.element_bytes}".replace("  ", " ")
        assert re.search(rf"\b{written}\b", PAGE), dtype


def test_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"{LARGE_TENSOR_BYTES:,} bytes or more" in PAGE
    assert f"{item_template._ZIP64_FROM_BYTES:,} bytes" in PAGE


def test_the_zip64_records_are_those_on_the_page() -> None:
    template = tensor_template("uint8", (item_template._ZIP64_FROM_BYTES,))
    tail, payload_header = template.tail, template.head[template.head.rindex(b"PK\x03\x04") :]
    assert int.from_bytes(payload_header[4:6], "little") == 45
    end64 = tail[tail.index(b"PK\x06\x06") :]
    record = END64.unpack_from(end64)
    assert record[1:8] == (44, 45, 45, 0, 0, 4, 4)
    assert END64_LOCATOR.unpack_from(end64, END64.size)[1::2] == (0, 1)
    assert END.unpack_from(end64, END64.size + END64_LOCATOR.size)[1:] == (0, 0, 4, 4, record[8], 0xFFFFFFFF, 0)
    for written in ("length field 44, versions 45 and 45", "the offset 0xFFFFFFFF"):
        assert written in PAGE
