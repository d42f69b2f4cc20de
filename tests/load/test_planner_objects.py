"""What DCP's planner unpickles, without restraint, are bytes of our own: never those that a checkpoint brings along."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.reader import FileSystemReader

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
