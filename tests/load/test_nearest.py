"""Loads whose data files lie in two places, of which one is damaged, or pruned meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import ChecksumError, FileSystemReader, FileSystemWriterAsync, LoadOptions, SaveOptions
from mcore_ckpt.directory.retention import prune_run
from mcore_ckpt.load.requests import ReadRequest

NAME = "iter_0000001"


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one checkpoint, equal in both."""
    near, far = tmp_path / "near", tmp_path / "far"
    state = {"weight": torch.ones(3000), "told": {"value": 1.0}}
    dcp.save(state, storage_writer=FileSystemWriterAsync(near / NAME, options=SaveOptions()), no_dist=True)
    shutil.copytree(near, far)
    return near, far


def of_tiers(near: Path, far: Path, home: str) -> FileSystemReader:
    """A reader of the first checkpoint, by the index of either tier."""
    if home == "near":
        return FileSystemReader(near / NAME, options=LoadOptions(drain_to=str(far)))
    return FileSystemReader(far / NAME, options=LoadOptions(local_tier=str(near)))


def loaded(reader: FileSystemReader) -> list[float]:
    found: dict[str, Any] = {"weight": torch.zeros(3000), "told": {"value": 0.0}}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return [*found["weight"].unique().tolist(), found["told"]["value"]]


def damage(directory: Path) -> None:
    """Zeros in the midst of all data files, which keep their lengths."""
    for file in directory.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[64 : len(content) // 2] = bytes(len(content) // 2 - 64)
        file.write_bytes(content)


@pytest.mark.parametrize("home", ["near", "far"])
def test_a_damaged_file_of_the_first_tier_is_refused_and_both_are_named(tiers: tuple[Path, Path], home: str) -> None:
    near, far = tiers
    damage(near / NAME)
    with pytest.raises(ChecksumError) as error:
        of_tiers(near, far, home).read_items([ReadRequest("weight", torch.zeros(3000), (0,), (3000,))])
    assert str(error.value).startswith(f"{near / NAME} (or {far / NAME}, for files that are not there): weight")
    for file in (near / NAME).glob("*.distcp"):
        file.unlink()
    assert loaded(of_tiers(near, far, home)) == [1.0, 1.0]


@pytest.mark.parametrize("home", ["near", "far"])
def test_neither_tier_is_pruned_under_a_load_that_reads_there(tiers: tuple[Path, Path], home: str) -> None:
    near, far = tiers
    other = far if home == "near" else near
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriterAsync(other / "iter_0000002"), no_dist=True)
    if home == "near":
        next((near / NAME).glob("*.distcp")).unlink()

    def pruned() -> str:
        decisions = prune_run(other, keep_last=1, remove=True).decisions
        return next(each.reason for each in decisions if each.checkpoint.name == NAME)

    reader = of_tiers(near, far, home)
    read_data, reasons = reader.read_data, []

    def after_a_prune(*args: Any) -> Any:
        reasons.append(pruned())
        return read_data(*args)

    reader.read_data = after_a_prune  # type: ignore[method-assign]
    assert loaded(reader) == [1.0, 1.0]
    assert reasons == ["a load is reading it"]
    assert pruned() == "removed"
