"""What may lie in a stranger's checkpoint instead of a data file is refused at once, by loads and commands alike."""

import io
import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import mcore_ckpt
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.metadata_read import encode_config
from mcore_ckpt.megatron.serialization import load_common
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.load.test_reshard_property import own_item
from tests.support.stored_layouts import StoredTensor, load_box, stock_item, whole, write_checkpoint

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


# --- what DCP's planner unpickles -------------------------------------------------------------------------------------

BENIGN = pickle.dumps({"lr": 1.0}, 2)


class Evil:
    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.made,)


def archive(records: list[tuple[str, bytes]], prefix: bytes = b"") -> bytes:
    """A zip archive whose first record stands behind `prefix`."""
    out = io.BytesIO(prefix)
    out.seek(0, io.SEEK_END)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_STORED) as archived:
        archived.start_dir = len(prefix)  # type: ignore[attr-defined]
        for name, content in records:
            archived.writestr(name, content)
    return out.getvalue()


BASE = [("archive/data.pkl", BENIGN), ("archive/version", b"3\n"), ("archive/byteorder", b"little")]


def load(directory: Path, item: bytes, options: LoadOptions | None = None) -> Any:
    (directory / "__0_0.distcp").write_bytes(item)
    place = {MetadataIndex("object"): _StorageInfo("__0_0.distcp", 0, len(item))}
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata({"object": BytesStorageMetadata()}, None, place)))
    state = {"object": {"lr": 0.0}}
    dcp.load(state, storage_reader=FileSystemReader(directory, options=options), no_dist=True)
    return state["object"]


@pytest.mark.parametrize("what", ["before the archive", "other case first", "other case last"])
def test_what_was_tried_is_what_is_loaded(tmp_path: Path, what: str) -> None:
    made = tmp_path / "made"
    evil = pickle.dumps(Evil(made), 2)
    item = {
        "before the archive": archive(BASE, evil),
        "other case first": archive([("archive/DATA.PKL", evil), *BASE]),
        "other case last": archive([*BASE, ("archive/DATA.PKL", evil)]),
    }[what]
    assert load(tmp_path, item) == {"lr": 1.0}
    assert not made.exists()


# --- items that say something else than the index ---------------------------------------------------------------------

ROWS = {"small": 32, "large": 1024}
DISGUISES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda tensor: tensor.view(torch.int32),
    "another shape": lambda tensor: tensor.view(tensor.shape[1], tensor.shape[0]),
}


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("item_of", [own_item, stock_item])
@pytest.mark.parametrize("disguised", DISGUISES.values(), ids=DISGUISES)
def test_no_item_is_taken_for_another_one(
    disguised: Callable[[torch.Tensor], torch.Tensor],
    item_of: Callable[[torch.Tensor], bytes],
    size: str,
    tmp_path: Path,
) -> None:
    """The last of three chunks has the same bytes as the others, but says that it is something else."""
    rows = ROWS[size]
    tensor = torch.randn(rows, 512).repeat(3, 1)
    written = 0

    def item(part: torch.Tensor) -> bytes:
        nonlocal written
        written += 1
        return item_of(disguised(part) if written == 3 else part)

    boxes = [Box((rows * n, 0), (rows, 512)) for n in range(3)]
    source = tmp_path / "checkpoint"
    write_checkpoint(source, {"w": StoredTensor(tensor, boxes)}, item_of=item)
    third = boxes[2]
    reader = FileSystemReader(source)
    says = r"w at \[\d+, 0\] .*the index says .*float32 of shape"
    assert load_box(reader, "w", tensor, Box((0, 0), (2 * rows, 512))).equal(tensor[: 2 * rows])
    for box in (None, third, Box((2 * rows + 3, 5), (7, 11)), third):
        with pytest.raises(CorruptCheckpointError, match=says):
            load_box(reader, "w", tensor, box)
    with mcore_ckpt.open_checkpoint(source) as opened, pytest.raises(CorruptCheckpointError, match=says):
        opened["w"].raw((slice(2 * rows, None), slice(0, 3)))
    assert main(["reshard", "--tp", "1", "--pp", "1", str(source), str(tmp_path / "copied")]) == 2
    assert not (tmp_path / "copied").exists()


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "on the meta device": lambda tensor: tensor.to("meta"),
    "coordinates": torch.Tensor.to_sparse,
    "compressed rows": torch.Tensor.to_sparse_csr,
    "another shape": lambda _: torch.arange(9.0).reshape(3, 3).t(),
    "another dtype": lambda tensor: tensor.double().t().contiguous().t(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_tensor_without_the_elements_that_the_index_says_is_refused_by_whatever_reads_it(
    kind: str, tmp_path: Path
) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    write_checkpoint(
        tmp_path,
        {"w": StoredTensor(tensor, [Box((0, 0), (2, 3))])},
        item_of=lambda part: stock_item(UNUSUAL[kind](part)),
    )
    with pytest.raises(CorruptCheckpointError, match=r"w at \[0, 0\]"):
        load_box(FileSystemReader(tmp_path), "w", tensor, None)
    with mcore_ckpt.open_checkpoint(tmp_path) as opened, pytest.raises(CorruptCheckpointError, match=r"w at \[0, 0\]"):
        opened["w"].raw((slice(0, 1), slice(0, 3)))
    assert [problem.fqn for problem in mcore_ckpt.verify_checkpoint(tmp_path).problems] == ["w"]
