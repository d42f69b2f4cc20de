"""Fingerprints of what all writers wrote, against whole tensors, and of FSDP2's DTensors, against the undivided model;
damage in what has to be read is found.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_ckpt import ChecksumError, checkpoint_fingerprint, diff_checkpoints, open_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.fingerprints import TensorFingerprint, state_of
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from tests.support.fsdp_ranks import MESHES, save_divided
from tests.support.gloo_ranks import run_ranks
from tests.support.local_files import flip
from tests.support.model_like import model_tensors, write_model

GOLDEN = Path(__file__).parents[1] / "format" / "golden"
ROWS = "decoder.layers.1.mlp.linear_fc1.weight"
COLUMNS = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_whole_tensors_have_the_same_crc32(name: str) -> None:
    found = checkpoint_fingerprint(GOLDEN / name).tensors
    assert found is not None
    index = read_index(GOLDEN / name)
    with open_checkpoint(GOLDEN / name) as checkpoint:
        assert found.keys() == index.tensors.keys()
        for key, (dtype, shape, crc) in found.items():
            raw, original = checkpoint.tensors[key].raw(), index.original_shape(key)
            assert (dtype, shape) == (index.tensors[key].dtype, original or raw.shape)
            if original is not None:  # rows of a grid of flattened cells
                grid = raw.shape[:-1]
                cell = [size // count for size, count in zip(original, grid, strict=True)]
                axes = [axis for n in range(len(grid)) for axis in (n, len(grid) + n)]
                raw = raw.reshape(*grid, *cell).transpose(axes).reshape(original)
            assert crc == zlib.crc32(np.ascontiguousarray(raw)), key


def test_a_changed_element_and_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = model_tensors()
    write_model(tmp_path / "a", tp=2, tensors=tensors)
    write_model(tmp_path / "b", tp=1, tensors=tensors)
    assert checkpoint_fingerprint(tmp_path / "a") == checkpoint_fingerprint(tmp_path / "b")
    assert checkpoint_fingerprint(tmp_path / "a", only="*fc1*").tensors.keys() < tensors.keys()  # type: ignore[union-attr]
    changed = {**tensors, ROWS: tensors[ROWS].clone()}
    changed[ROWS].view(-1)[5] += 1
    write_model(tmp_path / "c", tp=1, tensors=changed)
    report = diff_checkpoints(tmp_path / "a", tmp_path / "c", state=True)
    assert [tensor.fqn for tensor in report.tensors if not tensor.same] == [ROWS]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c"), "--state"]) == 1
    assert "other bits (" in capsys.readouterr().out

    item = read_index(tmp_path / "a").tensors[COLUMNS].chunks[0].item
    flip(tmp_path / "a" / item.file, item.offset + item.length // 2)
    with pytest.raises(ChecksumError, match=COLUMNS):
        checkpoint_fingerprint(tmp_path / "a")
    assert main(["verify", str(tmp_path / "a"), "--state"]) == 1
    assert "the state has no fingerprint: other things are wrong" in capsys.readouterr().out
    assert torch.equal(tensors[COLUMNS], model_tensors()[COLUMNS])


def test_a_comparison_of_stored_fingerprints_says_that_it_has_read_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "columns", tp=2)
    reshard_checkpoint(tmp_path / "columns", tmp_path / "a", tp=1, pp=1)
    shutil.copytree(tmp_path / "a", tmp_path / "damaged")
    item = read_index(tmp_path / "damaged").tensors[COLUMNS].chunks[0].item
    flip(tmp_path / "damaged" / item.file, item.offset + item.length // 2)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "damaged"), "--state"]) == 0
    said = "; fingerprints compared as they are stored, without reading that data (mcore-ckpt verify does)"
    assert said in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "damaged")]) == 1


# Rows that no number of ranks divides, and fewer rows than ranks.
_SHAPES = {"mlp.up_proj.weight": (10, 6), "mlp.down_proj.weight": (6, 10), "norm.weight": (6,), "gate.weight": (3, 4)}


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in _SHAPES.items()}
    return {key: torch.randn(shape, generator=generator) for key, shape in {**shapes, "head.weight": (13, 6)}.items()}


def test_fsdp2_has_the_fingerprint_of_the_undivided_model(tmp_path: Path) -> None:
    tensors = _model()
    stored = {f"model.{key}": zlib.crc32(tensor.numpy()) for key, tensor in tensors.items()}
    of_tensors = {f"model.{key}": tuple(tensor.shape) for key, tensor in tensors.items()}
    alone = state_of({key: TensorFingerprint("float32", shape, stored[key]) for key, shape in of_tensors.items()})
    run_ranks(save_divided, 4, tmp_path, tensors)
    for name in MESHES:
        for side in ("ours", "stock"):
            assert checkpoint_fingerprint(tmp_path / f"{name}-{side}").total == alone.total
        ours, stock = tmp_path / f"{name}-ours", tmp_path / f"{name}-stock"
        assert read_index(ours).fingerprints == stored
        assert read_index(stock).fingerprints == {}
        assert main(["verify", str(ours), "--state"]) == 0
        for other in (stock, tmp_path / "fsdp-ours"):
            assert main(["diff", str(ours), str(other), "--state"]) == 0
