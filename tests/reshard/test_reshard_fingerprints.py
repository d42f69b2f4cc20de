"""Stored fingerprints go through a reshard, and tell what no checksum does: chunks in each other's place."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from tests.support.model_like import model_tensors, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "iter_0000007"
    write_model(directory, tp=2)
    return directory


@pytest.fixture(scope="module")
def fingerprinted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In columns, with fingerprints, which the sums of columns alone do not tell."""
    directory = tmp_path_factory.mktemp("fingerprinted")
    reshard_checkpoint(source, directory / "one", tp=1, pp=1)
    reshard_checkpoint(directory / "one", directory / "two", tp=2, pp=1)
    assert read_index(directory / "two").fingerprints.keys() == model_tensors().keys()
    return directory / "two"


class TestChunksInEachOthersPlace:
    """Every checksum holds, and so does the layout; only the fingerprints that were stored tell."""

    COLUMNS = "decoder.layers.1.mlp.linear_fc2.weight"
    ROWS = "decoder.layers.1.self_attention.linear_qkv.weight"

    def swapped(self, fingerprinted: Path, path: Path, key: str) -> Path:
        shutil.copytree(fingerprinted, path)
        index = read_index(path)
        entry = index.tensors[key]
        first, second = entry.chunks
        chunks = (first._replace(item=second.item), second._replace(item=first.item))
        tensors = {**index.tensors, key: entry._replace(chunks=chunks)}
        changed = replace(index, tensors=tensors).with_fingerprints(index.fingerprints)
        (path / ".metadata").write_bytes(encode_metadata(changed))
        return path

    @pytest.mark.parametrize(("key", "tp"), [(ROWS, 4), (COLUMNS, 1)])
    def test_are_refused(self, key: str, tp: int, fingerprinted: Path, tmp_path: Path) -> None:
        damaged = self.swapped(fingerprinted, tmp_path / "s", key)
        with pytest.raises(ChecksumError, match=f"{key}: what was written has the fingerprint"):
            reshard_checkpoint(damaged, tmp_path / "t", tp=tp, pp=1)
        assert not (tmp_path / "t").exists()
        report = reshard_checkpoint(fingerprinted, tmp_path / "t", tp=tp, pp=1)
        assert report.verified
        assert read_index(tmp_path / "t").fingerprints == read_index(fingerprinted).fingerprints

    def test_without_a_comparison_no_fingerprint_of_columns_is_passed_on(
        self, fingerprinted: Path, tmp_path: Path
    ) -> None:
        damaged = self.swapped(fingerprinted, tmp_path / "s", self.COLUMNS)
        reshard_checkpoint(damaged, tmp_path / "t", tp=4, pp=1, verify=False)
        found = read_index(tmp_path / "t").fingerprints
        assert self.COLUMNS not in found
        assert found[self.ROWS] == read_index(fingerprinted).fingerprints[self.ROWS]
