"""A part of a record is checked as the whole is: by the sums of the blocks that it lies in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.item import locate_tensor
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.tools.checkpoint import open_checkpoint
from tests.support.local_files import drop_cached, has_direct_io

pytestmark = pytest.mark.quick

LARGE = torch.arange(3 * 1024 * 1000, dtype=torch.int32).view(3072, 1000)  # 12.3 MB
SMALL = torch.arange(60_000, dtype=torch.int32).view(300, 200)  # 240 KB


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("slices") / "c"
    dcp.save({"large": LARGE, "small": SMALL}, storage_writer=FileSystemWriterAsync(directory), no_dist=True)
    return directory


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "c"))


def flip(directory: Path, key: str, elem: int) -> None:
    """Change one bit of an element as it is stored."""
    (chunk,) = read_index(directory).tensors[key].chunks
    path, item = directory / chunk.item.file, chunk.item
    content = bytearray(path.read_bytes())
    located = locate_tensor(lambda at, n: bytes(content[item.offset + at : item.offset + at + n]), item.length, key)
    content[item.offset + located.payload_offset + 4 * elem] ^= 4
    path.write_bytes(content)


def load(directory: Path, part: Part, *, strided: bool) -> torch.Tensor:
    rows, columns = part.box.sizes
    out = torch.zeros(columns, rows, dtype=torch.int32).T if strided else torch.zeros(rows, columns, dtype=torch.int32)
    FileSystemReader(directory).read_items([ReadRequest(part.key, out, *part.box)])
    return out


class Part(NamedTuple):
    key: str
    box: Box
    element: int
    is_cached: bool = True


PARTS = [
    Part("large", Box((0, 0), (1536, 1000)), 5),  # half of the rows: straight to where they belong
    Part("large", Box((1000, 0), (1072, 1000)), 1_500_000),
    Part("large", Box((1000, 0), (3, 1000)), 1_001_000),  # a few rows
    Part("large", Box((3071, 990), (1, 10)), 3_071_999),  # a piece of the last one
    Part("large", Box((0, 100), (3072, 300)), 1_536_110, is_cached=False),  # all of it is read for the columns
    Part("small", Box((0, 0), (150, 200)), 100),
    Part("small", Box((0, 50), (300, 50)), 30_060),  # columns of what is read whole anyway
    Part("small", Box((7, 7), (1, 1)), 1407),
]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_inside_a_slice_is_noticed(checkpoint: Path, part: Part, strided: bool) -> None:
    whole = LARGE if part.key == "large" else SMALL
    (a, b), (rows, columns) = part.box.offsets, part.box.sizes
    wanted = whole[a : a + rows, b : b + columns]
    assert torch.equal(load(checkpoint, part, strided=strided), wanted)
    flip(checkpoint, part.key, part.element)
    if not part.is_cached:
        if not has_direct_io(checkpoint):
            pytest.skip("this file system has no O_DIRECT")
        for file in checkpoint.glob("*.distcp"):
            drop_cached(file)
    with pytest.raises(ChecksumError, match=r"the bytes \[\d+, \d+\) of __0_\d\S*\.distcp have CRC-32"):
        load(checkpoint, part, strided=strided)
    with open_checkpoint(checkpoint) as opened, pytest.raises(ChecksumError, match="of its elements have CRC-32"):
        opened[part.key][a : a + rows, b : b + columns]
