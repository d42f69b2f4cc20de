"""Small items that are wanted as they are: read by the thousand, to the same values and errors as each by itself."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load import files
from mcore_ckpt.load.placement import Columns
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage.base import Storage

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


def load(directory: Path, into: dict[str, torch.Tensor], *, whole: bool) -> int:
    """Fill tensors, by columns or each by itself; returns how many were read by columns."""
    reader, taken = FileSystemReader(directory), []
    take = Columns.take

    def noted(columns: Columns, requests: Any) -> Any:
        left = take(columns, requests) if whole else list(requests)
        taken.append(len(columns))
        return left

    shapes = {key: tuple(tensor.shape) for key, tensor in into.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Columns, "take", noted)
        reader.read_items(ReadRequest(key, into[key], (0,) * len(shape), shape, shape) for key, shape in shapes.items())
    assert reader.stats.bytes_needed == sum(tensor.nbytes for tensor in into.values())
    assert reader.stats.records_checked == len(into)
    return sum(taken)


def outcome(directory: Path, *, whole: bool) -> str | dict[str, list[int]]:
    into = blank(state())
    try:
        load(directory, into, whole=whole)
    except LoadError as error:
        return f"{type(error).__name__}: {error}"
    return {key: tensor.reshape(-1).view(torch.uint8).tolist() for key, tensor in into.items() if "large" not in key}


@pytest.mark.parametrize("window_bytes", [64 * 1024, 8 * 1024 * 1024])
def test_they_arrive(saved: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WINDOW_BYTES", window_bytes)
    expected = state()
    into = blank(expected)
    assert load(saved, into, whole=True) == len(expected) - 1
    for key, tensor in expected.items():
        assert into[key].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), key


def test_what_is_damaged_is_found_and_named_as_each_by_itself(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "reads_at_once", 1)
    index = read_index(saved)
    chance = random.Random(1)
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    refused = 0
    for key in chance.sample(sorted(index.tensors.keys() - {"layer.60.large"}), 6):
        (chunk,) = index.tensors[key].chunks
        path = directory / chunk.item.file
        sound = path.read_bytes()
        for at in {chance.randrange(chunk.item.length), chance.randrange(64), chunk.item.length - 1}:
            content = bytearray(sound)
            content[chunk.item.offset + at] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            expected = outcome(directory, whole=False)
            assert outcome(directory, whole=True) == expected
            if isinstance(expected, str):
                refused += 1
                assert key in expected
        path.write_bytes(sound)
    assert refused > 5
