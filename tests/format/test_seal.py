"""Seals: what is written is read back, and nothing that was changed is believed."""

import pickle
import re
import struct
import zlib
from array import array
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    NO_FINGERPRINT,
    FileFooter,
    FooterPlan,
    Manifest,
    ManifestFile,
    TableColumns,
    check_footer,
    data_file_name,
    data_file_of,
    decode_footer,
    split_metadata,
    with_id,
    with_manifest,
)
from mcore_ckpt.format.metadata_read import parse_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load.checks import Items, TensorRow, decode_table

pytestmark = pytest.mark.quick

SAVE_ID = bytes(range(16))
names = st.text(max_size=30)
numbers = st.integers(0, 2**62)
boxes = st.integers(0, 4).flatmap(lambda ndim: st.tuples(*[st.tuples(*[numbers] * ndim)] * 3))
rows = st.builds(
    lambda key, dtype, box: TensorRow(key, dtype, *box), names, st.sampled_from(["float32", "bfloat16", "bool"]), boxes
)
tables = st.dictionaries(st.tuples(numbers, numbers), rows | names, max_size=9)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 10**6), st.integers(0, 10**30), names)
def test_a_name_tells_rank_number_and_save(save_id: bytes, rank: int, number: int, prefix: str) -> None:
    name = data_file_name(rank, number, prefix)
    of_save = with_id(name, save_id)
    found = data_file_of(of_save)
    assert found == (rank, number, save_id[:8].hex(), found.prefix)
    # As verl, SkyRL and Megatron-Core's own tests look for data files.
    assert re.search(r"__(\d+)_(\d+)\.distcp$", of_save)[1] == str(rank)


@pytest.mark.parametrize(
    ("name", "number", "save"),
    [
        ("__3_2.distcp", 2, None),
        ("__3_2.00000000000000ff.distcp", 2, "00000000000000ff"),  # as this package wrote before its first release
        ("__3_300000000000000000255.distcp", 2, "00000000000000ff"),
        ("__3_99999999999999999999.distcp", 99999999999999999999, None),  # no count before the digits
        ("__3_199999999999999999999.distcp", 199999999999999999999, None),  # more than eight bytes
    ],
)
def test_only_names_with_an_id_belong_to_a_save(name: str, number: int, save: str | None) -> None:
    assert data_file_of(name) == (3, number, save, "")


def sealed(table: Items, save_id: bytes = SAVE_ID, file_bytes: int = 10**6) -> tuple[bytes, int]:
    """The seal of a file that holds what `table` lists, and the CRC-32 of its table."""
    tensors = {place: row for place, row in table.items() if isinstance(row, TensorRow)}
    objects = {place: key for place, key in table.items() if isinstance(key, str)}
    columns = TableColumns.of(
        [row.key for row in tensors.values()],
        [row.dtype for row in tensors.values()],
        [(row.shape, row.offsets, row.sizes) for row in tensors.values()],
        [n for place in tensors for n in place],
        list(objects.values()),
    )
    plan = FooterPlan.of(columns)
    content, crc = plan.fill(save_id, file_bytes, list(objects))
    assert len(content) == plan.size_bytes
    return content, crc


def read_back(content: bytes) -> tuple[FileFooter, Items]:
    footer = decode_footer(content[-FOOTER_BYTES:], "file")
    assert footer is not None
    return footer, decode_table(content[:-FOOTER_BYTES], footer, "file")


TABLE: Items = {
    (4096, 900): TensorRow("layer.weight", "bfloat16", (4, 6), (2, 0), (2, 6)),
    (4996, 700): TensorRow("step", "int64", (), (), ()),
    (0, 451): "extra/shard_0_1",
}


@given(tables)
def test_a_table_is_read_back(table: Items) -> None:
    content, crc = sealed(table)
    footer, found = read_back(content)
    assert found == table
    assert (footer.save_id, footer.file_bytes, footer.table_crc32) == (SAVE_ID, 10**6, crc)
    assert zlib.crc32(content[:-FOOTER_BYTES]) == crc


def checked(content: bytes, expected: ManifestFile) -> Items:
    footer = decode_footer(content[-FOOTER_BYTES:], "file")
    check_footer(footer, 10**6, expected, "file")
    assert footer is not None
    return decode_table(content[:-FOOTER_BYTES], footer, "file")


def test_every_bit_of_a_file_seal_is_noticed() -> None:
    content, crc = sealed(TABLE)
    expected = ManifestFile(10**6, crc, SAVE_ID)
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptCheckpointError):
            checked(bytes(damaged), expected)


# ------------------------------------------------------------------------------------------------------- metadata seal

uint32 = st.integers(0, 2**32 - 1)


@st.composite
def metadata_seals(draw: st.DrawFn) -> Manifest:
    crcs = draw(st.lists(uint32, max_size=8))
    items = draw(st.lists(st.integers(0, max(0, len(crcs) - 1)), max_size=3, unique=True)) if crcs else []
    counts = [draw(st.integers(1, 4)) for _ in items]
    file = st.builds(ManifestFile, numbers, uint32, st.binary(min_size=16, max_size=16))
    return Manifest(
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.dictionaries(names, file, max_size=4)),
        array("I", crcs),
        array("Q", sorted(items)),
        array("I", counts),
        array("I", [draw(uint32) for _ in range(sum(counts))]),
        fingerprints=draw(st.none() | st.lists(st.just(NO_FINGERPRINT) | uint32, max_size=5).map(partial(array, "q"))),
    )


@given(metadata_seals(), st.binary(max_size=200))
def test_a_metadata_seal_is_read_back(seal: Manifest, content: bytes) -> None:
    found, again = split_metadata(with_manifest(content, seal), ".metadata")
    assert (found, again) == (content, seal)


def an_index() -> CheckpointIndex:
    file = ManifestFile(123_456, 77, SAVE_ID)
    big = StoredItem("__1_0.distcp", 4096, 3 * BLOCK_BYTES, 4)
    seal = Manifest(
        SAVE_ID,
        {"__0_0.distcp": file, "__1_0.distcp": file},
        array("I", [3, 4, 5]),
        array("Q", [1]),
        array("I", [2]),
        array("I", [8, 9]),
    )
    chunks = (StoredChunk((0,), (2,), StoredItem("__0_0.distcp", 64, 900, 3)), StoredChunk((2,), (7,), big))
    return CheckpointIndex(
        "ckpt",
        {"w": TensorEntry("w", "float32", (9,), chunks)},
        {"o": ObjectEntry("o", StoredItem("__0_0.distcp", 0, 64, 5))},
        version="1.0.0",
        manifest=seal,
        blocks={("__1_0.distcp", 4096): array("I", [8, 9])},
    )


def test_every_bit_and_end_of_a_sealed_metadata_is_noticed_before_it_is_unpickled() -> None:
    content = encode_metadata(an_index())
    assert parse_index(content, "ckpt") == an_index()
    for end in range(len(content)):
        with pytest.raises(CorruptCheckpointError):
            parse_index(content[:end], "ckpt")
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptCheckpointError, match="the file is damaged"):
            parse_index(bytes(damaged), "ckpt")


def test_a_seal_of_other_items_or_files_is_refused() -> None:
    pickled, seal = split_metadata(encode_metadata(an_index()), "ckpt")
    assert seal is not None
    fewer = Manifest(seal.save_id, seal.files, seal.crcs[:2])
    other = Manifest(seal.save_id, seal.files, seal.crcs, array("Q", [2**40]), array("I", [1]), array("I", [1]))
    for wrong in (fewer, other, Manifest(seal.save_id, {}, seal.crcs)):
        with pytest.raises(CorruptCheckpointError):
            parse_index(with_manifest(pickled, wrong), "ckpt")


STATE = b"\x89mckSTAT"


def section(
    count: int = 1, without: int = 0, *numbers: int, version: int = 1, begin: bytes = STATE, short: int = 0
) -> bytes:
    body = begin + struct.pack(f"<IQQ{len(numbers)}I", version, count, without, *numbers)
    return body + struct.pack("<Q8s", len(body) + 16 - short, STATE)


def with_section(content: bytes) -> bytes:
    pickled, seal = split_metadata(encode_metadata(an_index()), "ckpt")
    assert seal is not None
    return with_manifest(pickled + content, seal)


def test_fingerprints_stand_where_no_unpickler_looks() -> None:
    for column, known in (([5], {"w": 5}), ([NO_FINGERPRINT], {})):
        index = an_index().with_fingerprints(dict(zip("w", column, strict=True)))
        content = with_section(section(1, 0, 5) if known else section(1, 1, 0, 0))
        assert parse_index(content, "ckpt").fingerprints == known
        assert pickle.loads(content) == pickle.loads(encode_metadata(an_index()))
        assert content == (encode_metadata(index) if known else content)
    assert parse_index(with_section(section(version=2)), "ckpt").fingerprints == {}


@pytest.mark.parametrize(
    "content",
    [
        section(2, 0, 5, 6),
        section(1),
        section(1, 0, 5, 6),
        section(1, 1, 5, 1),
        section(2**60, 0, 5),
        section(1, 0, 5, begin=STATE[::-1]),
        section(1, 0, 5, short=1),
        STATE,
    ],
)
def test_fingerprints_that_cannot_be_are_refused(content: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="fingerprints"):
        parse_index(with_section(content), "ckpt")


def test_what_is_taken_out_of_an_index_leaves_its_seal_too() -> None:
    index = an_index().with_fingerprints({"w": 7, "gone": 8})
    del index.objects["o"]
    found = parse_index(encode_metadata(index), "ckpt")
    assert found.fingerprints == {"w": 7}
    assert found.manifest is not None
    assert list(found.manifest.crcs) == [3, 4]
    assert found.blocks == index.blocks


@pytest.mark.parametrize(("said", "objects"), [(1000, 0), (2**40, 0), (1000, 2**31)])
def test_a_table_that_inflates_to_more_than_it_says_is_not_inflated(said: int, objects: int) -> None:
    bomb = zlib.compress(bytes(50 * 1024 * 1024), 9)
    with pytest.raises(CorruptCheckpointError, match=r"inflated|objects are said"):
        decode_table(bomb, FileFooter(SAVE_ID, 10**6, len(bomb), zlib.crc32(bomb), said, objects), "file")
