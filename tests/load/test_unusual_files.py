"""What may lie in a stranger's checkpoint instead of a data file is refused at once, by loads and commands alike."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.metadata_read import encode_config
from mcore_ckpt.megatron.serialization import load_common
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.stored_layouts import load_box, whole, write_checkpoint

pytestmark = pytest.mark.timeout(30)

TENSOR = torch.arange(64.0).reshape(8, 8)
DATA = "__0_0.distcp"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    write_checkpoint(path, {"w": whole(TENSOR)}, {"extra": [1]})
    torch.save({"iteration": 7}, path / "common.pt")
    (path / "metadata.json").write_bytes(encode_config())
    return path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _link_out_of_the_directory(path: Path) -> None:
    (path.parent.parent / path.name).write_bytes(b"")
    path.symlink_to(f"../{path.name}")


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "a pipe"),
    "directory": (os.mkdir, "a directory"),
    "socket": (_socket, "a socket"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
    "link out of it": (_link_out_of_the_directory, "a symbolic link"),
    "link in it": (lambda path: path.symlink_to("metadata.json"), "a symbolic link"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(kind: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put, named = KINDS[kind]
    for name in (DATA, "common.pt"):
        (checkpoint / name).unlink()
        put(checkpoint / name)
    reader = FileSystemReader(checkpoint)
    with pytest.raises(CorruptCheckpointError, match=rf"{DATA}: expected a regular file.* it is {named}"):
        load_box(reader, "w", torch.zeros(8, 8))
    with pytest.raises(CorruptCheckpointError, match=named):
        reader.read_object("extra")
    with mcore_ckpt.open_checkpoint(checkpoint) as opened, pytest.raises(CorruptCheckpointError, match=named):
        opened["w"].numpy()
    report = verify_checkpoint(checkpoint)
    assert any(problem.file == DATA and named in problem.message for problem in report.problems)
    with pytest.raises(LoadError):
        load_common(checkpoint)
    assert named == "a directory" or any(problem.file == "common.pt" for problem in report.problems)
    assert main(["inspect", str(checkpoint)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_no_folder_on_the_way_may_be_a_link(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    shutil.move(checkpoint / DATA, tmp_path / "outside" / "00000.dat")
    index = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(index.replace(DATA.encode(), b"su/00000.dat"))
    (checkpoint / "su").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptCheckpointError, match="behind the symbolic link 'su'"):
        load_box(FileSystemReader(checkpoint), "w", torch.zeros(8, 8))
    (checkpoint / "su").unlink()
    shutil.copytree(tmp_path / "outside", checkpoint / "su")
    assert load_box(FileSystemReader(checkpoint), "w", torch.zeros(8, 8)).equal(TENSOR)


def test_the_checkpoint_itself_may_be_reached_through_links(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("checkpoint")
    assert load_box(FileSystemReader(tmp_path / "latest"), "w", torch.zeros(8, 8)).equal(TENSOR)
    assert load_common(tmp_path / "latest") == {"iteration": 7}
    assert verify_checkpoint(tmp_path / "latest").whole
