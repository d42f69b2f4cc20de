"""FSDP2's DTensors: what plain DCP saves of them has the fingerprint of the same model undivided."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from mcore_ckpt import checkpoint_fingerprint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.fingerprints import TensorFingerprint, state_of
from mcore_ckpt.format.metadata_read import read_index
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
        assert main(["verify", str(ours), "--state"]) == 0
        for other in (stock, tmp_path / "fsdp-ours"):
            assert main(["diff", str(ours), str(other), "--state"]) == 0
