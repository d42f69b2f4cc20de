"""FSDP2's DTensors: the fingerprint is that of the same model undivided, and of what plain DCP saves."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_ckpt import checkpoint_fingerprint, fingerprint
from tests.support.fsdp_ranks import MESHES, take_fingerprints
from tests.support.gloo_ranks import run_ranks

# Rows that no number of ranks divides, and fewer rows than ranks.
_SHAPES = {"mlp.up_proj.weight": (10, 6), "mlp.down_proj.weight": (6, 10), "norm.weight": (6,), "gate.weight": (3, 4)}


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in _SHAPES.items()}
    return {key: torch.randn(shape, generator=generator) for key, shape in {**shapes, "head.weight": (13, 6)}.items()}


def test_fsdp2_has_the_fingerprint_of_the_undivided_model(tmp_path: Path) -> None:
    tensors = _model()
    alone = fingerprint({"model": tensors})
    first, *others = run_ranks(take_fingerprints, 4, tmp_path, tensors)
    assert others == [first] * 3
    damaged = {key: first.pop(key) for key in list(first) if key.endswith("damaged")}
    assert first == dict.fromkeys(first, alone.total)
    assert {key.partition(",")[0] for key in first} == {"plain", *MESHES}
    key = "model.model.layers.1.mlp.up_proj.weight"
    for name in MESHES:
        # Of replicas, the first one is that which counts.
        expected = ([], [(key, (3,))]) if name == "hsdp" else ([key], [])
        assert damaged[f"{name}, damaged"] == expected
        for side in ("ours", "stock"):
            assert checkpoint_fingerprint(tmp_path / f"{name}-{side}").total == alone.total
