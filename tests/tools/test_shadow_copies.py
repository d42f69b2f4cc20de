"""Shadow copies (`__shadow_<rank>__<fqn>`), which the code of Megatron-LM's pull request 5556 wrote."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt import (
    diff_checkpoints,
    export_checkpoint,
    open_checkpoint,
    reshard_checkpoint,
    summarize_checkpoint,
    verify_checkpoint,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata

SAMPLE = Path(__file__).parent / "shadow_copies"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "shadow", ignore=shutil.ignore_patterns("writer.txt")))


def diverge(directory: Path, key: str) -> None:
    """Put another tensor's item in the place of a copy: sound by its checksums, and other elements."""
    index = read_index(directory)
    entry, other = index.tensors[key], index.tensors["linear.weight"].chunks
    (chunk,) = entry.chunks
    wrong = next(one for one in other if one.offsets != chunk.offsets)
    source, target = directory / wrong.item.file, directory / chunk.item.file
    content = bytearray(target.read_bytes())
    item = source.read_bytes()[wrong.item.offset : wrong.item.offset + wrong.item.length]
    content[chunk.item.offset : chunk.item.offset + chunk.item.length] = item
    target.write_bytes(content)


def test_commands_take_copies_for_what_they_are(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_checkpoint(checkpoint).problems == ()
    summary = summarize_checkpoint(checkpoint)
    assert (summary.tensors, summary.chunks, summary.model_elements) == (2, 3, 20)
    assert summary.shadow_copies == 3
    assert main(["inspect", str(checkpoint)]) == 0
    assert "2 tensors in 3 chunks, 1 objects; 3 shadow copies, " in capsys.readouterr().out

    whole = tmp_path / "whole"
    report = reshard_checkpoint(checkpoint, whole, tp=1, pp=1)
    assert report.tensors == 2
    assert any(note.startswith("3 shadow copies") for note in report.notes)
    assert verify_checkpoint(whole).whole
    assert not read_index(whole).shadow_copies()
    assert not list(whole.glob("__[23]_*"))  # files that hold nothing but copies
    assert torch.equal(
        open_checkpoint(whole)["linear.weight"].torch(), open_checkpoint(checkpoint)["linear.weight"].torch()
    )
    assert diff_checkpoints(checkpoint, whole).identical
    assert main(["diff", str(checkpoint), str(whole)]) == 0
    assert "3 shadow copies are left out" in capsys.readouterr().out

    report = export_checkpoint(checkpoint, tmp_path / "exported", to="safetensors")
    assert any(note.startswith("3 shadow copies") for note in report.notes)
    assert set(load_file(tmp_path / "exported" / report.files[0])) == {"linear.weight", "rmsnorm.weight"}


@pytest.mark.parametrize("key", ["__shadow_2__linear.weight", "__shadow_3__linear.weight"])
def test_a_copy_that_differs_is_named(checkpoint: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    diverge(checkpoint, key)
    assert main(["verify", str(checkpoint), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["kind"], problem["fqn"]) == ("copy", key)
    assert f"rank {key[9]} holds other bits than linear.weight" in problem["message"]


def test_a_tensor_itself_still_has_to_be_complete(checkpoint: Path) -> None:
    index = read_index(checkpoint)
    entry = index.tensors["linear.weight"]
    tensors = {**index.tensors, "linear.weight": entry._replace(chunks=entry.chunks[:1])}
    (checkpoint / ".metadata").write_bytes(encode_metadata(replace(index, tensors=tensors)))
    assert [problem.fqn for problem in verify_checkpoint(checkpoint).problems] == ["linear.weight"]
