"""Small items that are wanted as they are: read by the thousand, and each is compared with its sum."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.item import locate_tensor_in
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load import ranges
from mcore_ckpt.load.requests import ReadRequest
from tests.support.local_files import flip

pytestmark = pytest.mark.quick

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


def load(directory: Path, into: dict[str, torch.Tensor]) -> None:
    reader = FileSystemReader(directory)
    shapes = {key: tuple(tensor.shape) for key, tensor in into.items()}
    reader.read_items(ReadRequest(key, into[key], (0,) * len(shape), shape, shape) for key, shape in shapes.items())
    assert reader.stats.bytes_needed == sum(tensor.nbytes for tensor in into.values())
    assert reader.stats.records_checked == len(into)


@pytest.mark.parametrize("window_bytes", [64 * 1024, 8 * 1024 * 1024])
def test_they_arrive(saved: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "WINDOW_BYTES", window_bytes)
    expected = state()
    into = blank(expected)
    load(saved, into)
    for key, tensor in expected.items():
        assert into[key].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), key


def test_what_is_damaged_is_found_and_named(saved: Path, tmp_path: Path) -> None:
    index = read_index(saved)
    chance = random.Random(1)
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    for key in chance.sample(sorted(index.tensors.keys() - {"layer.60.large"}), 12):
        (chunk,) = index.tensors[key].chunks
        path = directory / chunk.item.file
        sound = path.read_bytes()
        item = sound[chunk.item.offset : chunk.item.offset + chunk.item.length]
        located = locate_tensor_in(memoryview(item), key)
        flip(path, chunk.item.offset + located.payload_offset + chance.randrange(located.payload_bytes))
        with pytest.raises(ChecksumError, match=key):
            load(directory, blank(state()))
        path.write_bytes(sound)
