"""Small items that are wanted as they are: read by the thousand, to the same values and errors as each by itself."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions, SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load._whole_items import WholeWant, spans_of
from mcore_ckpt.load.read_requests import ReadRequest
from mcore_ckpt.load.reader import FileSystemReader
from tests.support.local_files import drop_cached

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((), (7,), (3, 50), (2, 1, 600), (40, 40))


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    found = {}
    for n in range(120):
        bits = torch.randint(0, 2, (*SHAPES[n % 5], 8), dtype=torch.uint8)
        dtype = DTYPES[n % 4 if n % 7 else 4]
        found[f"layer.{n}"] = bits[..., : dtype.itemsize].contiguous().view(dtype)[..., 0].clone()
    found["layer.60.large"] = torch.randn(700, 1000)  # beyond what is read with its neighbours
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "c"
    dcp.save(
        state(), storage_writer=FileSystemWriterAsync(directory, options=SaveOptions(thread_count=2)), no_dist=True
    )
    return directory


def blank(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in expected.items()}


def load(directory: Path, into: dict[str, torch.Tensor], *, whole: bool, options: LoadOptions | None = None) -> int:
    """Fill tensors, by columns or each by itself; returns how many were taken as they are."""
    reader = FileSystemReader(directory, options=options or LoadOptions(io_threads=1))
    items, requests = reader.whole_items(), []
    for key, tensor in into.items():
        shape = tuple(tensor.shape)
        if not whole or not items.take([(key, tensor, (0,) * len(shape), shape, shape)])[0]:
            requests.append(ReadRequest(key, tensor, (0,) * len(shape), shape))
    reader.read_items(requests, items)
    assert reader.stats.bytes_needed == sum(tensor.nbytes for tensor in into.values())
    assert reader.stats.records_checked == (len(into) if reader.options.verify_crc else 0)
    return len(items)


def outcome(directory: Path, *, whole: bool, options: LoadOptions | None = None) -> str | dict[str, list[int]]:
    into = blank(state())
    try:
        load(directory, into, whole=whole, options=options)
    except LoadError as error:
        return f"{type(error).__name__}: {error}"
    return {key: tensor.reshape(-1).view(torch.uint8).tolist() for key, tensor in into.items() if "large" not in key}


@pytest.mark.parametrize("window_bytes", [64 * 1024, 8 * 1024 * 1024])
def test_they_arrive(saved: Path, window_bytes: int) -> None:
    expected = state()
    into = blank(expected)
    options = LoadOptions(window_bytes=window_bytes, buffer_bytes=32 * 1024 * 1024)
    assert load(saved, into, whole=True, options=options) == len(expected) - 1
    for key, tensor in expected.items():
        assert into[key].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), key


def test_others_are_left_to_others(saved: Path) -> None:
    items = FileSystemReader(saved).whole_items()
    there = torch.zeros(40, 40, dtype=torch.bool)
    key = next(key for key, tensor in state().items() if tensor.shape == (40, 40) and tensor.dtype is torch.bool)
    whole = (0, 0), (40, 40), (40, 40)
    refused: list[WholeWant] = [
        ("nowhere", there, *whole),
        (key, there.float(), *whole),
        (key, there.T, *whole),
        (key, torch.zeros(40, 41, dtype=torch.bool), *whole),
        (key, there[:39], (0, 0), (39, 40), (40, 40)),
        (key, there, (0, 0), (40, 40), (40, 41)),
        ("layer.60.large", torch.zeros(700, 1000), (0, 0), (700, 1000), (700, 1000)),
    ]
    assert items.take(refused) == [False] * len(refused)
    assert len(items) == 0
    assert items.take([refused[0], (key, there, *whole)]) == [False, True]


def test_two_destinations_of_one_item_are_both_filled(saved: Path) -> None:
    expected = state()
    reader = FileSystemReader(saved)
    items = reader.whole_items()
    first, second = blank(expected), blank(expected)
    for into in (first, second):
        for key, tensor in into.items():
            items.take([(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape), tuple(tensor.shape))])
    reader.read_items([], items)
    for into in (first, second):
        for key in expected.keys() - {"layer.60.large"}:
            assert into[key].reshape(-1).view(torch.uint8).equal(expected[key].reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("verify_crc", [True, False])
def test_what_is_damaged_is_found_and_named_as_each_by_itself(saved: Path, tmp_path: Path, verify_crc: bool) -> None:
    index = read_index(saved)
    options = LoadOptions(io_threads=1, verify_crc=verify_crc)
    chance = random.Random(1)
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    refused = 0
    for key in chance.sample(sorted(index.tensors.keys() - {"layer.60.large"}), 12):
        (chunk,) = index.tensors[key].chunks
        path = directory / chunk.item.file
        sound = path.read_bytes()
        for at in {chance.randrange(chunk.item.length), chance.randrange(64), chunk.item.length - 1}:
            content = bytearray(sound)
            content[chunk.item.offset + at] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            expected = outcome(directory, whole=False, options=options)
            assert outcome(directory, whole=True, options=options) == expected
            if isinstance(expected, str):
                refused += 1
                assert key in expected
        path.write_bytes(sound)
    assert refused > 10


LARGE = "layer.60.large"


@pytest.mark.parametrize("page_cache", ["on", "off"])
@pytest.mark.parametrize("strided", [False, True])
def test_a_large_item_takes_no_reads_but_those_of_its_payload(
    saved: Path, strided: bool, page_cache: Literal["on", "off"]
) -> None:
    expected = state()[LARGE]
    into = torch.zeros(1000, 700).t() if strided else torch.zeros(700, 1000)
    reader = FileSystemReader(saved, options=LoadOptions(window_bytes=1024 * 1024, page_cache=page_cache))
    for file in saved.glob("*.distcp"):
        drop_cached(file)
    reader.read_items([ReadRequest(LARGE, into, (0, 0), (700, 1000))])
    assert into.equal(expected)
    assert (reader.stats.reads, reader.stats.records_checked) == (3, 1)


@pytest.mark.parametrize("rows", [(0, 700), (200, 100)])
def test_what_stands_around_a_large_item_is_compared_with_what_should(
    saved: Path, tmp_path: Path, rows: tuple[int, int]
) -> None:
    (chunk,) = read_index(saved).tensors[LARGE].chunks
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    path, item = directory / chunk.item.file, chunk.item
    sound, expected = path.read_bytes(), state()[LARGE][rows[0] : sum(rows)]
    sizes, options = (rows[1], 1000), LoadOptions(page_cache="on")
    found = []
    for at in (10, 40, 1_000_000, item.length - 100, item.length - 4):
        content = bytearray(sound)
        content[item.offset + at] ^= 1
        path.write_bytes(content)
        into = torch.zeros(sizes)
        try:
            FileSystemReader(directory, options=options).read_items([ReadRequest(LARGE, into, (rows[0], 0), sizes)])
        except LoadError as error:
            found.append(f"{type(error).__name__} {LARGE in str(error)}")
        else:  # the time of a record, say: of no importance, but not what this package writes
            assert into.equal(expected)
            found.append("")
    assert found == ["", "CorruptCheckpointError True", "ChecksumError True", "", "CorruptCheckpointError True"]
    path.write_bytes(sound[: item.offset + item.length - 1])
    with pytest.raises(CorruptCheckpointError):
        FileSystemReader(directory, options=options).read_items([ReadRequest(LARGE, into, (rows[0], 0), sizes)])


def test_spans_are_those_of_the_planner(saved: Path) -> None:
    items = FileSystemReader(saved).whole_items()
    into = blank(state())
    for key, tensor in into.items():
        items.take([(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape), tuple(tensor.shape))])
    for window_bytes in (1, 5000, 10**7):
        spans, shared = spans_of(items, window_bytes=window_bytes, max_gap_bytes=10**6)
        assert not shared
        found = [row for span in spans for row in span.items.items()]
        taken = [items.item(at) for at in range(len(items))]
        assert sorted(row.fqn for row in found) == sorted(row.fqn for row in taken)
        assert {row.fqn for row in taken} == into.keys() - {"layer.60.large"}
        assert [(row.file, row.offset) for row in found] == sorted((row.file, row.offset) for row in taken)
        for span in spans:
            rows = span.items.items()
            assert len(rows) == 1 or span.stop - span.start <= window_bytes
            assert span.start == rows[0].offset
            assert span.stop == rows[-1].offset + rows[-1].chunk.item.length
