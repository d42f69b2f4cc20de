"""Checkpoints that DCP's own writer has compressed are read, and what is wrong with one is said."""

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt import FileSystemReader, SaveError
from mcore_ckpt.commands.cli import main
from mcore_ckpt.directory.commit import remove_tensors
from mcore_ckpt.format.metadata_read import read_index
from tests.support.command import output_of
from tests.support.local_files import flip

# DCP has stream transforms since torch 2.7.
extensions = pytest.importorskip("torch.distributed.checkpoint._extension")


def state() -> dict[str, Any]:
    return {
        "big": torch.arange(300_000.0).reshape(600, 500),
        "zeros": torch.zeros(4_000_000),  # 16 MB in less than 1 KB
        "small": torch.arange(7, dtype=torch.bfloat16),
        "of no dimension": torch.tensor(3),
        "step": 12,
        "args": "--lr 0.1",
    }


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    path = tmp_path / "iter_0000001"
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(path, _extensions=[extensions.ZStandard()]))
    assert sum(file.stat().st_size for file in path.iterdir()) < 2_000_000
    return path


def assert_holds_the_state(path: Path) -> None:
    loaded = {
        key: value.clone().fill_(1) if isinstance(value, torch.Tensor) else None for key, value in state().items()
    }
    dcp.load(loaded, storage_reader=FileSystemReader(path))
    for key, value in state().items():
        assert torch.equal(loaded[key], value) if torch.is_tensor(value) else loaded[key] == value


def test_a_compressed_checkpoint_is_loaded(compressed: Path) -> None:
    assert_holds_the_state(compressed)


def test_commands_take_a_compressed_checkpoint(compressed: Path, tmp_path: Path) -> None:
    copied, resharded, merged = (tmp_path / name / compressed.name for name in ("copy", "resharded", "merged"))
    assert main(["verify", "--state", str(compressed)]) == 0
    assert main(["inspect", str(compressed)]) == 0
    assert main(["copy", str(compressed), str(copied)]) == 0
    assert_holds_the_state(copied)
    assert main(["reshard", str(compressed), str(resharded), "--tp", "1", "--pp", "1"]) == 0
    assert_holds_the_state(resharded)
    assert main(["diff", str(compressed), str(resharded)]) == 0
    assert main(["merge", str(merged), str(compressed), str(resharded)]) == 0
    loaded = {"big": torch.zeros(600, 500)}
    dcp.load(loaded, storage_reader=FileSystemReader(merged))
    assert torch.equal(loaded["big"], state()["big"])


def change(path: Path, key: str, changed: Callable[[bytes], bytes]) -> None:
    """Store an item of a checkpoint of one file otherwise, behind the others."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (place,) = (place for index, place in metadata.storage_data.items() if index.fqn == key)
    file = path / place.relative_path
    stored = changed(file.read_bytes()[place.offset : place.offset + place.length])
    place.offset, place.length = file.stat().st_size, len(stored)
    file.write_bytes(file.read_bytes() + stored)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def in_two_frames(stored: bytes) -> bytes:
    content = zstandard.ZstdDecompressor().stream_reader(stored).read()
    return zstandard.compress(content[:999]) + zstandard.compress(content[999:])


@pytest.mark.parametrize("key", ["big", "step"])
def test_an_item_may_have_several_frames_and_nothing_else(key: str, compressed: Path) -> None:
    change(compressed, key, in_two_frames)
    assert_holds_the_state(compressed)
    assert main(["verify", str(compressed)]) == 0
    for changed in (lambda stored: stored[:-1], lambda stored: stored + bytes(3)):
        copied = compressed.with_name(f"{len(list(compressed.parent.iterdir()))}")
        shutil.copytree(compressed, copied)
        change(copied, key, changed)
        assert main(["verify", str(copied)]) == 1
        with pytest.raises(CheckpointException, match=f"{key} .*zstd"):
            assert_holds_the_state(copied)


def test_an_object_that_compresses_well_is_sound(tmp_path: Path) -> None:
    zeros = {"o": bytes(3_000_000), "n": 1}  # in 600 bytes
    dcp.save(zeros, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[extensions.ZStandard()]))
    loaded = {"o": b"", "n": 0}
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path))
    assert loaded == zeros
    assert main(["verify", str(tmp_path)]) == 0


def test_a_flipped_byte_is_found_by_loads_and_by_verify(compressed: Path) -> None:
    place = read_index(compressed).tensors["big"].chunks[0].item
    flip(compressed / place.file, place.offset + place.length // 2)
    with pytest.raises(CheckpointException, match=r"big .*has CRC-32"):
        assert_holds_the_state(compressed)
    assert "checksum: big " in output_of("verify", compressed, code=1)


def test_no_new_index_forgets_that_items_are_compressed(compressed: Path) -> None:
    with pytest.raises(SaveError, match="big: is compressed"):
        remove_tensors(compressed, "small")
    assert_holds_the_state(compressed)


def test_what_has_to_be_installed_is_named(compressed: Path) -> None:
    with (
        mock.patch.dict(sys.modules, zstandard=None),
        pytest.raises(CheckpointException, match=r"install zstandard .*\[zstd\]"),
    ):
        assert_holds_the_state(compressed)
