"""What a load has summed where it lies: the sums are those of memory, and count only as long as nothing was written."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt import ChecksumError, SaveOptions
from mcore_ckpt.core.boxes import Box, Stretch
from mcore_ckpt.core.fingerprints import part_of
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.load import files
from mcore_ckpt.load.arrivals import Arrivals, noting
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import Storage

pytest.importorskip("megatron.core.dist_checkpointing", reason="the checkpoint is saved by Megatron's shards")

ROWS, COLUMNS, DEEP = (2048, 1600), (3000, 3072), (3, 512, 2048)
# Key -> global shape, and the axis that two shards divide.
STORED = {"rows": (ROWS, 0), "columns": (COLUMNS, 1), "deep": (DEEP, 1), "small": ((60, 50), 0)}


@pytest.fixture(autouse=True)
def several_reads_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WINDOW_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import TorchDistSaveStrategy

    path = tmp_path_factory.mktemp("arrivals") / "checkpoint"
    path.mkdir()
    generator = torch.Generator().manual_seed(3)
    whole = {key: torch.randn(shape, generator=generator) for key, (shape, _) in STORED.items()}
    state = {
        f"{key} {n}": ShardedTensor.from_rank_offsets(key, piece.contiguous(), (axis, n, 2))
        for key, (_, axis) in STORED.items()
        for n, piece in enumerate(whole[key].chunk(2, axis))
    }
    TorchDistSaveStrategy(options=SaveOptions()).save(state, path)
    return path, whole


def load(path: Path, key: str, box: Box, target: torch.Tensor, **options: Any) -> Arrivals:
    arrivals = Arrivals(lambda index, key: True)
    reader = FileSystemReader(path, options=LoadOptions(**options))
    with noting(arrivals):
        reader.read_items([ReadRequest(key, target, box.offsets, box.sizes)])
    return arrivals


def half_of(key: str, half: int) -> Box:
    shape, axis = STORED[key]
    sizes = tuple(n // 2 if at == axis else n for at, n in enumerate(shape))
    return Box(tuple(half * n if at == axis else 0 for at, n in enumerate(sizes)), sizes)


def cold(path: Path) -> None:
    os.sync()
    for file in path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(path: Path) -> None:
    for file in path.iterdir():
        file.read_bytes()


def added(whole: torch.Tensor, box: Box) -> int:
    inside = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))
    return part_of(np.ascontiguousarray(whole.numpy()[inside]), whole.shape, box, 4)


CASES = {
    "half of the rows, as stored": ("rows", half_of("rows", 1)),
    "all rows, of two chunks": ("rows", Box((0, 0), ROWS)),
    "some rows of both chunks": ("rows", Box((317, 0), (1400, ROWS[1]))),
    "columns, as stored": ("columns", half_of("columns", 1)),
    "the middle axis, as stored": ("deep", half_of("deep", 0)),
}


@pytest.mark.parametrize("page_cache", [cold, warm])
@pytest.mark.parametrize("name", CASES)
def test_what_a_load_has_summed_is_what_lies_there(
    name: str, page_cache: Callable[[Path], None], saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, whole = saved
    key, box = CASES[name]
    target = torch.zeros(box.sizes)
    stretch = Stretch(tuple(whole[key].shape), box, 0, target.numel(), 4)
    page_cache(path)
    arrivals = load(path, key, box, target)
    assert arrivals.part_of(target, stretch) == added(whole[key], box)
    assert arrivals.part_of(target.detach(), stretch) == added(whole[key], box)
    target.view(torch.uint8).view(-1)[77] ^= 1
    assert arrivals.part_of(target, stretch) is None


@pytest.mark.parametrize(("key", "box"), [("columns", Box((0, 10), (3000, 1700))), ("rows", Box((0, 0), (2048, 7)))])
def test_what_came_through_a_buffer_has_to_be_summed(
    key: str, box: Box, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, whole = saved
    target = torch.zeros(box.sizes)
    arrivals = load(path, key, box, target)
    assert arrivals.part_of(target, Stretch(tuple(whole[key].shape), box, 0, target.numel(), 4)) is None


def test_a_tensor_in_the_place_of_another_is_not_taken_for_it(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, whole = saved
    target = torch.zeros(half_of("columns", 0).sizes)
    arrivals = load(path, "columns", half_of("columns", 0), target)
    other = Stretch(COLUMNS, half_of("columns", 1), 0, target.numel(), 4)
    assert arrivals.part_of(target, other) is None
    rows = torch.zeros(half_of("rows", 0).sizes)
    arrivals = load(path, "rows", half_of("rows", 0), rows)
    other = Stretch(ROWS, half_of("rows", 1), 0, rows.numel(), 4)
    assert arrivals.part_of(rows, other) not in (None, added(whole["rows"], half_of("rows", 1)))


# Where a destination begins in a buffer, in bytes, behind the one that is loaded with it.
OVERLAPS = {"one element": -4, "half": -(6 << 20), "the same memory": None, "none": 0}


@pytest.mark.parametrize("other", ["rows", "small"])
@pytest.mark.parametrize("together", [True, False], ids=["one load", "two loads"])
@pytest.mark.parametrize("name", OVERLAPS)
def test_destinations_that_overlap_have_to_be_summed(
    name: str,
    together: bool,
    other: str,
    saved: tuple[Path, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, whole = saved
    box = half_of("rows", 0)
    nbytes = 4 * math.prod(box.sizes)
    other_box = half_of("rows", 1) if other == "rows" else Box((0, 0), (60, 50))  # the latter comes through a buffer
    overlap = OVERLAPS[name]
    memory = torch.zeros(2 * nbytes, dtype=torch.uint8)
    first = memory[:nbytes].view(torch.float32).view(box.sizes)
    start = 0 if overlap is None else nbytes + overlap
    second = memory.data[start:][: 4 * math.prod(other_box.sizes)].view(torch.float32).view(other_box.sizes)
    requests = [
        ReadRequest("rows", first, box.offsets, box.sizes),
        ReadRequest("rows" if other == "rows" else "small", second, other_box.offsets, other_box.sizes),
    ]
    arrivals = Arrivals(lambda index, key: True)
    # By one thread: a large record is summed where it lies, and another may write there meanwhile.
    monkeypatch.setattr(Storage, "reads_at_once", 1)
    reader = FileSystemReader(path)
    with noting(arrivals):
        for some in [requests] if together else [requests[:1], requests[1:]]:
            reader.read_items(some)
    expected = added(whole["rows"], box) if name == "none" else None
    assert arrivals.part_of(first, Stretch(ROWS, box, 0, first.numel(), 4)) == expected


@pytest.mark.parametrize("key", ["rows", "columns"])
def test_a_copy_that_goes_wrong_in_memory_is_noticed(
    key: str, saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    move = ctypes.memmove

    def spoil(address: int, nbytes: int) -> None:
        if nbytes > 4096:
            (ctypes.c_ubyte * nbytes).from_address(address)[nbytes // 2] ^= 4

    def spoiled_move(to: int, source: Any, nbytes: int) -> None:
        move(to, source, nbytes)
        spoil(to, nbytes)

    def spoiled_copy(destination: memoryview, source: memoryview) -> None:
        move(direct_io.address(destination), direct_io.address(source), len(source))
        spoil(direct_io.address(destination), len(source))

    monkeypatch.setattr(direct_io, "copy_bytes", spoiled_copy)
    monkeypatch.setattr(ctypes, "memmove", spoiled_move)
    cold(path)  # the kernel copies what is cached straight to where it belongs
    box = half_of(key, 0)
    with pytest.raises(ChecksumError, match=key):
        load(path, key, box, torch.zeros(box.sizes))
