"""What a newer torch, Megatron-Core or mcore_ckpt has written: read where it is plain, and never called damaged. What
is written under a newer torch is readable by an older one.
"""

import pickle
import re
import shutil
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt import FileSystemWriterAsync, NewerFormatError, list_run, prune_run, verify_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.integrity import Manifest, with_manifest
from mcore_ckpt.format.metadata_read import parse_index

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
PLAIN = [None, 5, 0.5, True, "text", (4, 1), ()]


GETSTATE = TensorProperties.__getstate__


def appending(*values: Any) -> Any:
    """A `TensorProperties.__getstate__` that pickles these behind what torch 2.6 has."""
    return lambda self: (*GETSTATE(self)[:5], *values)


def pickled(tensors: int = 1, protocol: int = 4) -> bytes:
    """An index of tensors of 4 rows, pickled by torch's classes as they are at the moment."""
    entries, places = {}, {}
    for number in range(tensors):
        key, size, start = f"layer.{number}.weight", torch.Size([4, 2]), torch.Size([0, 0])
        entries[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, [ChunkStorageMetadata(start, size)])
        places[MetadataIndex(key, start, 0)] = _StorageInfo("__0_0.distcp", 1000 * number, 900)
    metadata = Metadata(entries, storage_data=places, storage_meta=StorageMeta("x", "save"))
    return pickle.dumps(metadata, protocol)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("tensors", [1, 300])
def test_plain_values_behind_a_tensors_properties_are_read_over(
    protocol: int, tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorProperties, "__getstate__", appending())
    usual = parse_index(pickled(tensors, protocol), "x")
    for appended in (*((value,) for value in PLAIN), ((4, 1), None, "more"), (tuple(range(64)),)):
        monkeypatch.setattr(TensorProperties, "__getstate__", appending(*appended))
        assert parse_index(pickled(tensors, protocol), "x") == usual, appended


@pytest.mark.parametrize("kind", [MetadataIndex, ChunkStorageMetadata, StorageMeta, Metadata, _StorageInfo])
@pytest.mark.parametrize("value", [None, (4, 1), {"a": [1]}, torch.Size([3])])
def test_fields_that_others_of_its_classes_have_more_are_read_over(
    kind: type, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = parse_index(pickled(), "x")
    monkeypatch.setattr(kind, "__getstate__", lambda self: {**vars(self), "appended": value}, raising=False)
    assert parse_index(pickled(), "x") == wanted
    monkeypatch.setattr(kind, "__getstate__", lambda self: (None, {**vars(self), "appended": value}))  # with slots
    assert parse_index(pickled(), "x") == wanted


class Shiny:
    """A class that torch does not have yet."""


Shiny.__module__, Shiny.__qualname__ = dcp_metadata.__name__, "Shiny"


def of_a_new_class(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(dcp_metadata, "Shiny", Shiny, raising=False)
    monkeypatch.setattr(StorageMeta, "__getstate__", lambda self: {**vars(self), "more": Shiny()}, raising=False)
    return pickled()


def with_properties_of_objects(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(TensorProperties, "__getstate__", appending({"layout": "tiled"}))
    return pickled()


def of_a_new_dtype(_: pytest.MonkeyPatch) -> bytes:
    return pickled().replace(b"\x8c\x07float32", b"\x8c\x0bfloat6_e3m2")


def with_a_seal_of_tomorrow(_: pytest.MonkeyPatch) -> bytes:
    content = bytearray(with_manifest(pickled(), Manifest(bytes(16), {}, array("I", [1]))))
    at = content.rindex(b"mckSUMS") + len(b"mckSUMS")
    content[at : at + 4] = struct.pack("<I", 99)
    content[-12:-8] = struct.pack("<I", crc32(bytes(content[:-12])))
    return bytes(content)


NEWER = {
    "metadata.Shiny; expected": of_a_new_class,
    "tensor properties of 6 values": with_properties_of_objects,
    "torch.float6_e3m2": of_a_new_dtype,
    "format has version 99": with_a_seal_of_tomorrow,
}


@pytest.mark.parametrize("said", NEWER)
def test_what_is_not_understood_is_not_called_damaged(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = NEWER[said](monkeypatch)
    with pytest.raises(NewerFormatError, match=re.escape(said)) as raised:
        parse_index(content, "x")
    assert "written by a newer" in str(raised.value)
    run = tmp_path / "run"
    for iteration in (1, 2):
        shutil.copytree(GOLDEN / "ours-0.1.0", run / f"iter_{iteration:07d}")
    newest = run / "iter_0000002"
    (newest / ".metadata").write_bytes(content)
    (run / "latest_checkpointed_iteration.txt").write_text("2")

    with pytest.raises(NewerFormatError):
        verify_checkpoint(newest)
    assert main(["verify", str(newest)]) == 2
    shown = "".join(capsys.readouterr())
    assert "DAMAGED" not in shown

    report = list_run(run)
    assert [listed.checkpoint.whole for listed in report.checkpoints] == [True, False]
    assert report.checkpoints[1].checkpoint.problems == ()
    assert said in (report.checkpoints[1].checkpoint.newer or "")
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    assert all(decision.keep for decision in prune_run(run, keep_last=1).decisions)


def of_torch_2_14(self: TensorProperties, state: tuple[Any, ...]) -> None:
    self.dtype, self.layout, self.requires_grad, _memory_format, self.pin_memory = state


def test_older_versions_of_torch_read_what_is_written_under_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorProperties, "__getstate__", appending((1,)))
    dcp.save({"w": torch.arange(4.0)}, storage_writer=FileSystemWriterAsync(tmp_path))
    monkeypatch.setattr(TensorProperties, "__setstate__", of_torch_2_14)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert metadata.state_dict_metadata["w"].properties.dtype == torch.float32
