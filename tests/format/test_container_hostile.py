"""Damaged and malicious tensor items: wrong bytes are never taken for right ones, and only our own errors come out.

Also items that old versions of torch and of this package wrote, frozen: those must stay readable.
"""

import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError
from mcore_ckpt.format.item import LocatedTensor, locate_tensor, locate_tensor_in, verify_records
from mcore_ckpt.format.state_file import tensor_of
from mcore_ckpt.format.tensor_pickle import FileTensor, WrongArgumentsError, tensor_pickle
from mcore_ckpt.format.zip_records import NotRangeable
from tests.support.stored_layouts import encode_tensor, rewritten
from tests.support.stored_layouts import stock_item as saved

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

FROZEN = Path(__file__).parent / "items"
PAYLOAD = torch.arange(24, dtype=torch.int16).view(torch.uint8).numpy().tobytes()
SHAPE = (4, 6)


TENSOR = torch.arange(24, dtype=torch.int16).view(SHAPE)
ITEMS = {
    "own": encode_tensor("int16", SHAPE, PAYLOAD),
    "torch": saved(TENSOR),
    "zipfile": rewritten(saved(TENSOR), lambda _, content: content),
    "view": saved(torch.arange(-8, 32, dtype=torch.int16)[8:32].view(SHAPE)),
}


def locations(item: bytes) -> Iterator[LocatedTensor | CheckpointError]:
    """What both ways of locating find, with and without what an index says, or the error of ours that they raise."""

    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(item), "read outside the item"
        return item[offset : offset + length]

    said = "int16", SHAPE
    for locate in (lambda: locate_tensor(read, len(item), "w", said), lambda: locate_tensor_in(memoryview(item), "w")):
        try:
            yield locate()
        except CheckpointError as error:
            yield error


def is_taken_for_right_only_if_it_is(item: bytes) -> bool:
    """Judge a damaged item as the reader does: located and its checksum compared, or verified and left to torch."""
    return all(_is_right_or_refused(item, outcome) for outcome in locations(item))


def _is_right_or_refused(item: bytes, outcome: LocatedTensor | CheckpointError) -> bool:
    if isinstance(outcome, LocatedTensor):
        content = item[outcome.payload_offset : outcome.payload_offset + outcome.payload_bytes]
        if outcome.crc32 is not None and crc32(content) != outcome.crc32:
            return True  # the reader raises ChecksumError
        return (outcome.dtype, outcome.shape, content) == ("int16", SHAPE, PAYLOAD)
    if isinstance(outcome, NotRangeable):
        return _decodes_right_or_not_at_all(item)
    return isinstance(outcome, CorruptCheckpointError)


def _decodes_right_or_not_at_all(item: bytes) -> bool:
    try:
        for span in verify_records(lambda at, n: item[at : at + n], len(item), "w"):
            if span.crc32 is not None and crc32(item[span.offset : span.offset + span.nbytes]) != span.crc32:
                return True
    except NotRangeable:
        pass
    except CorruptCheckpointError:
        return True
    try:
        loaded = torch.load(io.BytesIO(item), weights_only=True)
    except Exception:  # noqa: BLE001  (whatever torch makes of it, it is not a wrong tensor)
        return True
    return isinstance(loaded, torch.Tensor) and loaded.dtype == TENSOR.dtype and torch.equal(loaded, TENSOR)


@pytest.mark.parametrize("name", ITEMS)
def test_a_part_of_an_item_is_corrupt(name: str) -> None:
    """Its begin, as in a truncated file, and its end, as when an index gives offsets of another file."""
    item = ITEMS[name]
    for at in range(1, len(item)):
        for outcome in (*locations(item[:at]), *locations(item[at:])):
            assert isinstance(outcome, CorruptCheckpointError), f"cut at byte {at}"
            assert "w: " in str(outcome)


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("flipped", [0x08, 0xFF])
def test_no_flipped_byte_makes_wrong_bytes_right(name: str, flipped: int) -> None:
    item = ITEMS[name]
    for position in range(len(item)):
        if name == "view" and 0 <= position - item.find(PAYLOAD) < len(PAYLOAD):
            continue  # of part of a record there is no checksum; the reader that reads it whole compares the record's
        damaged = bytearray(item)
        damaged[position] ^= flipped
        assert is_taken_for_right_only_if_it_is(bytes(damaged)), f"byte {position}"


# ------------------------------------------------------------------------------------- directories that claim too much


@pytest.mark.parametrize("item_bytes", [1 << 40, (1 << 63) - 1])
def test_an_enormous_directory_is_not_read(item_bytes: int) -> None:
    end64_at = item_bytes - 98
    directory_bytes = end64_at // 2
    count, start = directory_bytes // 46, end64_at - directory_bytes
    ends = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, directory_bytes, start)
    ends += struct.pack("<4sIQI", b"PK\x06\x07", 0, end64_at, 1)
    ends += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)

    def read(offset: int, length: int) -> bytes:
        assert length <= 4096
        return (bytes(length) + ends)[-length:] if offset + length == item_bytes else bytes(length)

    with pytest.raises(CorruptCheckpointError, match="directory"):
        locate_tensor(read, item_bytes, "w")


# ------------------------------------------------------------------------------------------------------ evil pickles

HEAD = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nShortStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
)
UNTYPED = (
    HEAD.replace(b"_v2", b"_v3").replace(b"torch\nShortStorage", b"torch.storage\nUntypedStorage")
    + b"K\x30tQK\0K\x18\x85K\x01\x85\x89ccollections\nOrderedDict\n)R"
)
HOOKS = b"\x89ccollections\nOrderedDict\n)RtR."


def tensor_program(
    length: bytes = b"K\x18", offset: bytes = b"K\0", sizes: bytes = b"K\x18\x85", strides: bytes = b"K\x01\x85"
) -> bytes:
    return HEAD + length + b"tQ" + offset + sizes + strides + HOOKS


def interpreted(program: bytes) -> tuple[FileTensor | None, str]:
    try:
        return tensor_of(program), ""
    except (WrongArgumentsError, CorruptCheckpointError) as error:
        return None, str(error)


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\nX\x04\0\0\0true\x85R.",
        b"\x80\x02c__builtin__\neval\nX\x01\0\0\x001\x85R.",
        b"cbuiltins\ngetattr\n(ctorch\nload\nX\x01\0\0\0xtR.",
        tensor_program(sizes=b"J\xff\xff\xff\xff\x85"),
        tensor_program(sizes=b"\x8a\xff" + b"\x7f" * 255 + b"\x85"),
        tensor_program(sizes=b"(" + b"K\x02" * 5000 + b"t", strides=b"(" + b"K\x01" * 5000 + b"t"),
        tensor_program(strides=b"K\0\x85"),
        tensor_program(sizes=b"N\x85"),
        tensor_program(offset=b"K\x01"),
        tensor_program(length=b"\x8a\x08" + b"\xff" * 7 + b"\x7f"),
        tensor_program().replace(b"X\x01\0\0\x000", b"X\x08\0\0\0../../et"),
        tensor_program().replace(b"ShortStorage", b"FloatStorage"),
        # Tuples of tuples of ...: a few bytes that would print, compare or hash as 2**60 elements.
        b"K\0K\0\x86q\0" + b"h\0h\0\x86q\0" * 60 + b".",
        UNTYPED + b"K\0K\0\x86q\0" + b"0h\0h\0\x86q\0" * 60 + b"tR.",
        b"(" * 5000 + b"t" * 5000 + b".",
        b"X\xff\xff\xff\xff.",
    ],
)
def test_programs_that_are_not_a_tensors_are_refused_and_never_run(program: bytes) -> None:
    tensor, problem = interpreted(program)
    assert len(problem) < 1000
    assert tensor is None or (tensor.record, tensor.storage_bytes) != ("0", 48), "it fits the record"
    item = rewritten(ITEMS["torch"], lambda name, old: program if name == "data.pkl" else old)
    for outcome in locations(item):
        assert isinstance(outcome, NotRangeable | CorruptCheckpointError)
        assert len(str(outcome)) < 2000


def test_two_records_of_one_name_are_corrupt() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        pickled = tensor_pickle("int16", (24,), 24)
        for name, content in [("data.pkl", pickled), ("data/0", PAYLOAD), ("data/1", PAYLOAD)]:
            new.writestr(f"archive/{name}", content)
    item = buffer.getvalue()
    assert all(isinstance(outcome, LocatedTensor) for outcome in locations(item))
    for outcome in locations(item.replace(b"data/1", b"data/0")):
        assert isinstance(outcome, CorruptCheckpointError)
        assert "different names" in str(outcome)


# ----------------------------------------------------------------------------------------------------- frozen items


@pytest.mark.parametrize("path", sorted(FROZEN.glob("*.pt")), ids=lambda path: path.stem)
def test_items_written_long_ago_are_located(path: Path) -> None:
    """Each holds `torch.arange(600).to(torch.bfloat16).view(20, 30)`; `torch.save(tensor, open(path, "wb"))` made those
    of torch."""
    item = path.read_bytes()
    expected = torch.arange(600).to(torch.bfloat16)
    for outcome in locations(item):
        assert isinstance(outcome, LocatedTensor)
        content = item[outcome.payload_offset : outcome.payload_offset + outcome.payload_bytes]
        assert (outcome.dtype, outcome.shape) == ("bfloat16", (20, 30))
        assert outcome.crc32 == crc32(content)
        assert content == expected.view(torch.uint8).numpy().tobytes()
    assert torch.equal(torch.load(path, weights_only=True), expected.view(20, 30))
