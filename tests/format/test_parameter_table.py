"""The table of parameters of flat buckets: read by two readers, and refused where it cannot be right."""

import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.parameter_table import TABLE_MEMBER, Form, ParameterTable, Region, encode_parameters
from mcore_ckpt.format.zip_records import member_of, with_members
from tests.format import independent_reader as independent
from tests.support.stored_layouts import UncheckedTable, stock_item

pytestmark = pytest.mark.quick

GROUP = "optimizer.distributed.dp_group_idx_0."
BUCKETS = [("gbuf_idx_0.dtype_x.bucket_idx_0", 370), ("gbuf_idx_0.dtype_x.bucket_idx_1", 160)]
ROWS = Form((8, 5), (4, 5), (5, 1))
STACKED = Form((3, 6, 4), (1, 6, 4), (0, 4, 1))
LEFT, RIGHT = Form((24, 2), (24, 2), (6, 1)), Form((24, 4), (24, 4), (6, 1))  # of one parameter, [24, 6]
REGIONS = (
    Region(0, "rows", ROWS, (4, 0), 0, False),
    Region(0, "layers.größe", STACKED, (2, 0, 0), 64, False),
    Region(0, "scalar", Form((), (), ()), (), 128, True),
    Region(0, "left", LEFT, (0, 0), 192, False),
    Region(0, "right", RIGHT, (0, 0), 194, False),
    Region(0, "tail", Form((34,), (34,), (1,)), (0,), 336, False),
    Region(1, "gate", Form((80, 1), (80, 1), (1, 1)), (0, 0), 0, False),
    Region(1, "up", Form((80, 1), (80, 1), (1, 1)), (0, 0), 80, False),
)


def record(table: bytes) -> bytes:
    return with_members(stock_item([1, 2]), {TABLE_MEMBER: table})


def test_both_readers_read_what_the_writer_writes() -> None:
    table = encode_parameters(BUCKETS, REGIONS)
    assert member_of(record(table), TABLE_MEMBER) == table
    assert member_of(stock_item([1]), TABLE_MEMBER) is None
    assert list(ParameterTable(table, "here").regions()) == list(REGIONS)
    stored = {GROUP + name: elems for name, elems in BUCKETS}
    found = independent.parameter_regions(record(table), GROUP, stored)
    assert found is not None
    for own, read in zip(REGIONS, found, strict=True):
        place = GROUP + BUCKETS[own.bucket][0], own.key, own.form.shape, own.offsets, own.form.sizes
        assert read == (*place, own.form.strides, own.first, own.is_copy)


def table_of(regions: Sequence[Region] = REGIONS, **padding: int) -> UncheckedTable:
    return UncheckedTable(BUCKETS, regions, **padding)


def changed(number: int, **fields: Any) -> UncheckedTable:
    regions = list(REGIONS)
    regions[number] = regions[number]._replace(**fields)
    return table_of(regions)


RUN = Form((128,), (64,), (1,))
HOSTILE = {
    "moved by one": changed(0, first=1),
    "moved behind padding": changed(1, first=65),
    "moved into another": changed(1, first=32),
    "moved inside a parameter": changed(4, first=195),
    "moved to the other half": changed(7, first=79),
    "left out": table_of(REGIONS[1:]),
    "left out in the middle": table_of(REGIONS[:1] + REGIONS[2:]),
    "left out of a parameter": table_of(REGIONS[:4] + REGIONS[5:]),
    "left out at the end": table_of(REGIONS[:7]),
    "twice": table_of([*REGIONS, REGIONS[1]]),
    "leaves its bucket": changed(5, first=337),
    "far away": changed(5, first=2**64 - 1),
    "of no bucket": changed(5, bucket=2),
    "leaves its parameter": changed(0, offsets=(5, 0)),
    "before its parameter": changed(0, offsets=(2**64 - 4, 0)),
    "another number of axes": changed(0, offsets=(4,)),
    "empty": changed(0, form=Form((8, 5), (0, 5), (5, 1))),
    "in itself": changed(0, form=Form((8, 5), (4, 5), (4, 1))),
    "in itself at all": changed(0, form=Form((8, 5), (4, 5), (0, 1))),
    "endless": changed(0, form=Form((2**63, 5), (4, 5), (2**62, 1))),
    "no buckets": replace(table_of(), buckets=[]),
    "other lengths": replace(table_of(), buckets=[(BUCKETS[0][0], 371), BUCKETS[1]]),
    "buckets that are too long": replace(table_of(), buckets=[(BUCKETS[0][0], 2**63), (BUCKETS[1][0], 2**63)]),
    "one bucket twice": UncheckedTable([("b", 64)] * 2, [Region(n, "w", RUN, (64 * n,), 0, False) for n in (0, 1)]),
    "unaligned": table_of(alignment=63),
    "less padding": table_of(longest=40),
}


def test_what_is_compared_is_right_before_it_is_changed() -> None:
    ParameterTable(table_of().encoded(), "here")


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    encoded = HOSTILE[name].encoded()
    if name != "other lengths":  # which only the stored buckets contradict
        with pytest.raises(CorruptCheckpointError, match="here is damaged"):
            ParameterTable(encoded, "here")
    with pytest.raises((independent.CorruptError, ValueError, OverflowError, MemoryError)):
        independent.parameter_regions(record(encoded), GROUP, {GROUP + name: n for name, n in BUCKETS})


def test_numbers_that_are_too_large_take_no_memory() -> None:
    head, table = struct.Struct("<8sIQ"), encode_parameters(BUCKETS, REGIONS)
    for magic, version, length in ((b"\x89mckFLAT", 1, 2**40), (b"\x89mckFLAT", 2, 100), (b"\x89mckflat", 1, 100)):
        with pytest.raises(CorruptCheckpointError, match="at most"):
            ParameterTable(head.pack(magic, version, length) + table[20:], "here")
    content = np.array([1, 1, 10**7, 4, 0, 0, 0], "<u8").tobytes()
    with pytest.raises(CorruptCheckpointError, match="10000000 regions"):
        ParameterTable(head.pack(b"\x89mckFLAT", 1, len(content)) + zlib.compress(content), "here")


def test_damaged_bytes_are_refused_or_change_nothing() -> None:
    table, draw = encode_parameters(BUCKETS, REGIONS), random.Random(1)
    content = zlib.decompress(table[20:])
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 1, 7, 127, 255, draw.randrange(256)))
        encoded = struct.pack("<8sIQ", b"\x89mckFLAT", 1, len(damaged)) + zlib.compress(
            bytes(damaged[: draw.choice((None, -3))])
        )
        try:
            found = ParameterTable(encoded, "here")
        except CorruptCheckpointError:
            continue
        assert all(one.slice.sizes == one.form.sizes for one in found.regions())
