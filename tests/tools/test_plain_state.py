"""What is shown of objects and of the common state is what was saved, or it is refused as every load refuses it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.commands.cli import main
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.metadata_read import read_index
from tests.support.model_like import write_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, text: str, *, ours: bool) -> Path:
    writer = FileSystemWriterAsync(path) if ours else dcp.FileSystemWriter(path)
    dcp.save({"w": torch.ones(8), "thing": {"text": text}}, storage_writer=writer, no_dist=True)
    return path


def test_an_object_in_the_file_of_another_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = save(tmp_path / "one", "sunshine", ours=True), save(tmp_path / "two", "moonbeam", ours=True)
    item = read_index(one).objects["thing.text"].item
    shutil.copy(two / read_index(two).objects["thing.text"].item.file, one / item.file)
    assert main(["cat", str(one), "thing.text"]) == 2
    shown = capsys.readouterr()
    assert item.file in shown.err
    assert "moonbeam" not in shown.out


def test_a_flipped_bit_of_the_common_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a seal only the checksums of its own records tell."""
    write_model(tmp_path / "c", tp=1)
    torch.save({"iteration": 7, "text": "sunshine"}, tmp_path / "c" / "common.pt")
    assert main(["inspect", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    content = bytearray((tmp_path / "c" / "common.pt").read_bytes())
    content[content.index(b"sunshine")] ^= 2
    (tmp_path / "c" / "common.pt").write_bytes(content)
    assert main(["inspect", str(tmp_path / "c")]) == 2
    assert "CRC-32" in capsys.readouterr().err
