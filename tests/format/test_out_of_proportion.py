"""A few bytes that would take much: refused."""

from __future__ import annotations

import pickle
import struct
import zlib
from array import array
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.integrity import FOOTER_BYTES, FooterPlan, TableColumns, decode_footer, decode_table
from mcore_ckpt.format.metadata_read import parse_index, read_index
from mcore_ckpt.models._sources import read_safetensors
from mcore_ckpt.tools.verify import verify_checkpoint

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def index_of(count: int, shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> bytes:
    """Tensors that share their chunks."""
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
    place, offsets = _StorageInfo("__0_0.distcp", 0, 10), torch.Size([0] * len(shape))
    places = {MetadataIndex(f"k{n}", offsets): place for n in range(count)}
    return pickle.dumps(Metadata({f"k{n}": entry for n in range(count)}, None, places))


@pytest.mark.parametrize("shape", [(2**40, 2**40, 0), (2**62, 4, 0), (0, 2**63 - 1, 2)])
def test_a_shape_without_elements_that_cannot_be_multiplied_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    offsets = torch.Size([0] * len(shape))
    with pytest.raises(CorruptCheckpointError, match="axes that can be multiplied"):
        parse_index(index_of(1, shape, [ChunkStorageMetadata(offsets, torch.Size(shape))]), "ckpt")
    header = f'{{"a": {{"dtype": "F32", "shape": {list(shape)}, "data_offsets": [0, 0]}}}}'.encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CorruptCheckpointError, match="axes that can be multiplied"):
        read_safetensors(tmp_path, "m.safetensors")


def test_a_table_is_not_inflated_beyond_what_its_file_can_hold() -> None:
    rows = 500_000
    parts = [struct.pack("<IIII", rows, 0, 1, 1), bytes(12 * rows), bytes(16 * rows), b"d"]
    table = b"".join(parts)
    packed = zlib.compress(table, 9)
    end, _ = FooterPlan(packed, len(table), 0).fill(b"x" * 16, 128 + len(packed) + FOOTER_BYTES, [])
    footer = decode_footer(end[-FOOTER_BYTES:], "file")
    assert footer is not None
    with pytest.raises(CorruptCheckpointError, match="would become 14000017 when inflated"):
        decode_table(end[:-FOOTER_BYTES], footer, "file")


def test_a_table_of_more_items_than_fit_is_refused() -> None:
    numbers = array("Q", range(300))
    columns = TableColumns(
        ["float32"], ["k"] * 100, array("I", [0] * 100), array("I", [0] * 100), array("Q"), numbers[:200], []
    )
    end, _ = FooterPlan.of(columns).fill(b"x" * 16, 6399, [])
    footer = decode_footer(end[-FOOTER_BYTES:], "file")
    assert footer is not None
    with pytest.raises(CorruptCheckpointError, match="100 items cannot lie in 6399 bytes"):
        decode_table(end[:-FOOTER_BYTES], footer, "file")


def test_an_object_is_shown_only_if_it_is_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        state = {"lr": [name, 0.5], "t": torch.ones(3)}
        dcp.save(state, storage_writer=FileSystemWriterAsync(tmp_path / name), no_dist=True)
    assert main(["cat", str(tmp_path / "a"), "lr"]) == 0
    item = read_index(tmp_path / "a").objects["lr"].item
    file = tmp_path / "a" / item.file
    sound = bytearray(file.read_bytes())
    damaged = sound.copy()
    damaged[item.offset + item.length // 2] ^= 1
    file.write_bytes(damaged)
    assert main(["cat", str(tmp_path / "a"), "lr"]) == 2
    assert "CRC-32" in capsys.readouterr().err
    file.write_bytes((tmp_path / "b" / read_index(tmp_path / "b").objects["lr"].item.file).read_bytes())
    assert main(["cat", str(tmp_path / "a"), "lr"]) == 2
    assert "two saves were mixed" in capsys.readouterr().err
    assert not verify_checkpoint(tmp_path / "a").whole
