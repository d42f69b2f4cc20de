"""Two destinations in one memory get what stock gives them: the last one, all of it, and no file is called damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.load import files
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage import direct_io

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# In elements of float32: an item of a few bytes, one below and one beyond what is read with its neighbours.
SIZES = {"small": (64, 8), "packed": (256, 256), "long": (512, 4096)}


def tied(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("embedding", "between", "output"), memory)


def crossing(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Columns of one buffer that overlap by halves."""
    rows, columns = memory.shape
    buffer = torch.zeros(rows, 2 * columns)
    parts = enumerate(("embedding", "between", "output"))
    return {key: buffer[:, at * columns // 2 :][:, :columns] for at, key in parts}


def cold(path: Path) -> None:
    for file in path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def save(path: Path, state: dict[str, Any], writer: str) -> None:
    if writer == "stock":
        storage_writer = dcp.FileSystemWriter(path, thread_count=2, single_file_per_rank=False)
    else:
        storage_writer = FileSystemWriterAsync(path, options=SaveOptions(thread_count=2))
    dcp.save(state, storage_writer=storage_writer, no_dist=True)


@pytest.mark.parametrize("writer", ["stock", "ours"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("placed", [tied, crossing])
def test_the_last_one_stays_as_with_stock(
    tmp_path: Path, writer: str, size: str, placed: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    # The key that comes first may lie in the file of the one that comes last, which stock then reads before others.
    state = {key: torch.full(SIZES[size], value) for key, value in (("output", 1.0), ("between", 2.0))}
    state |= {"a": torch.full(SIZES[size], 3.0), "embedding": torch.full(SIZES[size], 4.0)}
    save(tmp_path, {**state, "0": ["an object"]}, writer)

    def loaded(reader: Any) -> dict[str, Any]:
        asked: dict[str, Any] = placed(torch.zeros(SIZES[size]))
        asked |= {"a": torch.zeros(SIZES[size]), "0": []}
        dcp.load(asked, storage_reader=reader, no_dist=True)
        return asked

    expected = loaded(dcp.FileSystemReader(tmp_path))
    for _ in range(3):
        cold(tmp_path)
        found = loaded(FileSystemReader(tmp_path))
        assert all(found[key].equal(expected[key]) for key in state)


@pytest.fixture
def writes_after_first_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Something else writes into the memory of the first long read, before its sum is taken; which reads these were."""
    original = direct_io.LocalReader.read_into
    disturbed: list[int] = []

    def read_into(self: Any, offset: int, view: memoryview, arrived: Any = None) -> None:
        def seen(part: memoryview) -> None:
            if not disturbed and len(view) == 1 << 20:
                disturbed.append(offset)
                part[100] ^= 0xFF
            arrived(part)

        original(self, offset, view, arrived and seen)

    monkeypatch.setattr(direct_io.LocalReader, "read_into", read_into)
    return disturbed


def test_a_sum_that_does_not_fit_is_taken_again_in_memory_of_our_own(
    tmp_path: Path,
    writes_after_first_read: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 300
    state = {"w": torch.randn(SIZES["long"])}
    save(tmp_path, state, "ours")
    cold(tmp_path)
    memory = torch.zeros(rows, 4096)
    monkeypatch.setattr(files, "WINDOW_BYTES", 1 << 20)
    reader = FileSystemReader(tmp_path)
    reader.read_items([ReadRequest("w", memory, (0, 0), (rows, 4096))])
    assert len(writes_after_first_read) == 1
    assert memory.equal(state["w"][:rows])
    assert "w at [0, 0]" in caplog.text
    assert "is sound" in caplog.text
