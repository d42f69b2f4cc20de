"""FSDP2's DTensors: what plain DCP saves of them has the fingerprint of the same model undivided."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import FileSystemWriterAsync, checkpoint_fingerprint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.fingerprints import TensorFingerprint, state_of
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from tests.support.fsdp_ranks import MESHES, save_divided
from tests.support.gloo_ranks import run_ranks

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
        assert main(["verify", str(ours), "--state", "--expect-state", alone.total]) == 0
        for other in (stock, tmp_path / "fsdp-ours"):
            assert main(["diff", str(ours), str(other), "--state"]) == 0


def save(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    writer = FileSystemWriterAsync(path, thread_count=1)
    dcp.save({**tensors, "step": 3}, storage_writer=writer, no_dist=True)
    return dict(read_index(path).fingerprints)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_saves_store_them_and_other_bits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {**_model(), "long": torch.randn(700, 1000), "bytes": torch.arange(3, dtype=torch.uint8)}
    known = save(tmp_path / "a", tensors)
    assert known == {key: zlib.crc32(tensor.view(torch.uint8).numpy()) for key, tensor in tensors.items()}
    tensors["long"][3, 4] += 1
    assert save(tmp_path / "b", tensors)["long"] != known["long"]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--state"]) == 1
    assert "long" in capsys.readouterr().out
    index = read_index(tmp_path / "b")
    wrong = replace(index).with_fingerprints({**index.fingerprints, "bytes": 1})
    (tmp_path / "b" / ".metadata").write_bytes(encode_metadata(wrong))
    assert main(["verify", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "b"), "--state", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"]["not_as_saved"] == ["bytes"]
