"""FSDP2's DTensors: the fingerprint is that of the same model undivided, and of what plain DCP saves."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import FileSystemWriterAsync, checkpoint_fingerprint, fingerprint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from tests.support.fsdp_ranks import MESHES, take_fingerprints
from tests.support.gloo_ranks import run_megatron_ranks, run_ranks

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
        ours, stock = tmp_path / f"{name}-ours", tmp_path / f"{name}-stock"
        stored = {f"model.{key}": zlib.crc32(tensor.numpy()) for key, tensor in tensors.items()}
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


def take_of_replicas(rank: int) -> list[Any]:
    """With and without names, of a state of plain tensors of which rank 1 alone holds another bit."""
    state = {key: torch.arange(512.0).reshape(64, 8) for key in "abcd"}
    if rank == 1:
        state["b"][3, 3] += 1
    named = fingerprint(state, names=True)
    return [named.diverged, [str(one) for one in named.diverged], named.total == fingerprint(state).total]


def test_no_rank_is_named_as_the_one_whose_replica_dcp_will_save() -> None:
    for diverged, said, is_total in run_ranks(take_of_replicas, 4):
        (found,) = diverged
        assert (found.key, found.saved_by, found.ranks, found.compared_with) == ("b", None, (1,), 0)
        (text,) = said
        assert text.startswith("b: ranks 1 hold other bits than rank 0 in the slice at [0, 0] of sizes [64, 8]; ")
        assert text.endswith("DCP chooses which one is saved")
        assert is_total


def take_with_a_rank_that_has_no_shard(rank: int, path: Path) -> list[Any]:
    """Fingerprints with and without names, and that of what is saved."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import TorchDistSaveStrategy

    path.mkdir(exist_ok=True)
    torch.distributed.barrier()
    # DCP could not flatten this: two keys would be the same.
    state: dict[str, Any] = {"rng": torch.ones(2), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    if rank == 1:
        state["w"] = ShardedTensor.from_rank_offsets("w", torch.arange(64.0).reshape(8, 8))
    found = [fingerprint(state), fingerprint(state, names=True)]
    dist_checkpointing.save(state, str(path), TorchDistSaveStrategy())
    torch.distributed.barrier()
    return [*found, checkpoint_fingerprint(path)]


def test_tensors_of_a_rank_without_a_shard_do_not_count(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing")
    for taken, named, stored in run_megatron_ranks(take_with_a_rank_that_has_no_shard, 2, tmp_path / "c"):
        assert taken.total == named.total == stored.total
        assert named.tensors == stored.tensors
        assert list(stored.tensors) == ["w"]
