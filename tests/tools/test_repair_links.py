"""A repair of a stranger's directories: neither reads nor writes what links in them lead to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools.repair import repair_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.local_files import data_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILE = "__0_0.distcp"
PRECIOUS = b"precious" * 1000


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "file"
    path.write_bytes(PRECIOUS)
    return path


def make(tmp_path: Path, writer: Callable[[Path], object]) -> tuple[Path, Path]:
    damaged, copy = tmp_path / "damaged", tmp_path / "copy"
    damaged.mkdir()
    dcp.save({"w": torch.arange(6.0)}, storage_writer=writer(damaged), no_dist=True)
    shutil.copytree(damaged, copy)
    return damaged, copy


def test_what_lies_under_the_name_of_the_temporary_file_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    damaged, copy = make(tmp_path, dcp.FileSystemWriter)
    (damaged / FILE).unlink()
    (damaged / f".{FILE}.repair").symlink_to(outside)
    assert repair_checkpoint(verify_checkpoint(damaged), copy).whole
    assert outside.read_bytes() == PRECIOUS
    assert not (damaged / FILE).is_symlink()


def test_a_link_in_the_copy_is_not_followed(tmp_path: Path, outside: Path) -> None:
    damaged, copy = make(tmp_path, dcp.FileSystemWriter)
    (damaged / FILE).unlink()
    (copy / FILE).unlink()
    (copy / FILE).symlink_to(outside)
    assert not repair_checkpoint(verify_checkpoint(damaged), copy).whole
    assert PRECIOUS not in [path.read_bytes() for path in damaged.iterdir()]


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FileSystemWriterAsync])
def test_a_data_file_that_is_a_link_is_not_mended(
    tmp_path: Path, outside: Path, writer: Callable[[Path], object]
) -> None:
    damaged, copy = make(tmp_path, writer)
    file = data_file(damaged)
    file.unlink()
    file.symlink_to(outside)
    assert not repair_checkpoint(verify_checkpoint(damaged), copy).whole
    assert outside.read_bytes() == PRECIOUS


def test_nothing_is_written_or_removed_behind_a_link_to_a_folder(tmp_path: Path, outside: Path) -> None:
    storage = LocalStorage(tmp_path / "checkpoint")
    storage.ensure()
    (tmp_path / "checkpoint" / "folder").symlink_to(outside.parent)
    name = f"folder/{outside.name}"
    for change in (
        lambda: storage.delete(name),
        lambda: storage.publish(name, b""),
        lambda: storage.create("folder/new", b""),
        lambda: storage.move(name, "stolen"),
        lambda: storage.open_writer("folder/new"),
    ):
        with pytest.raises(SaveError, match="behind the symbolic link"):
            change()
    assert [path.name for path in outside.parent.iterdir()] == [outside.name]
    assert outside.read_bytes() == PRECIOUS
