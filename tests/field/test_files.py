"""Reports of files: what was written is not what was to be, or what is read is not what was written."""

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from mcore_ckpt import FileSystemReader, FileSystemWriterAsync, UnsafePickleError
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.local_files import flip


def state(fill: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 8), float(fill)), "b": torch.full((64, 8), float(fill))}


def load(path: Path, reader: Any = None) -> dict[str, torch.Tensor]:
    wanted = state(0)
    dcp.load(wanted, storage_reader=reader or dcp.FileSystemReader(path))
    return wanted


@pytest.mark.field("pytorch/pytorch#191391", "refused", silent=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_in_a_writer_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP publishes a checkpoint without what that thread was to write."""
    full = OSError(28, "No space left on device")
    stock = dcp.FileSystemWriter(tmp_path / "stock", thread_count=2)
    create_stream = stock.fs.create_stream
    others = threading.Event()

    def fail_in_threads(path: Any, mode: str) -> Any:
        if threading.current_thread() is not threading.main_thread():
            others.set()
            raise full
        assert mode != "wb" or others.wait(60)
        return create_stream(path, mode)

    monkeypatch.setattr(stock.fs, "create_stream", fail_in_threads)
    dcp.save(state(1), storage_writer=stock)
    assert (tmp_path / "stock" / ".metadata").exists()
    with pytest.raises(CheckpointException):
        load(tmp_path / "stock")

    def fail(*_: Any, **__: Any) -> None:
        raise full

    monkeypatch.setattr(LocalStorage, "open_writer", fail)
    with pytest.raises(CheckpointException, match=r"(?s)RANK 0.*No space left on device"):
        dcp.save(state(1), storage_writer=FileSystemWriterAsync(tmp_path / "ours"))
    assert not (tmp_path / "ours" / ".metadata").exists()


@pytest.mark.field("pytorch/pytorch#126952", "refused", silent=True)
def test_a_flipped_bit(tmp_path: Path) -> None:
    """The CRC-32 is in each file, and torch does not compare it."""
    dcp.save(state(1), checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    flip(file, file.read_bytes().index(torch.ones(64).numpy().tobytes()) + 10)
    assert not all(torch.equal(one, torch.ones(64, 8)) for one in load(tmp_path).values())
    with pytest.raises(CheckpointException, match=r"(?s)RANK 0.*ChecksumError: .* [ab] at \[0, 0\] .*CRC-32"):
        load(tmp_path, FileSystemReader(tmp_path))
    assert not verify_checkpoint(tmp_path).whole


class Harmful:
    """Calls a function when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.field("pytorch/pytorch#189308", "refused", silent=True)
def test_code_in_an_index(tmp_path: Path) -> None:
    """DCP reads `.metadata` by `pickle.load`, which calls what a file from elsewhere names."""
    dcp.save(state(1), checkpoint_id=tmp_path)
    index, ran = tmp_path / ".metadata", tmp_path / "ran"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = Harmful(ran)
    index.write_bytes(pickle.dumps(metadata))
    assert torch.equal(load(tmp_path)["a"], torch.ones(64, 8))
    assert ran.exists()
    ran.unlink()
    with pytest.raises(UnsafePickleError, match=r"pathlib\.Path\.touch.*Nothing was imported or run"):
        FileSystemReader(tmp_path).read_metadata()
    assert not ran.exists()
