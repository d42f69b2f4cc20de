"""Checkpoints that other systems wrote: what the index says of them, and that what it says is where it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from mcore_ckpt import open_checkpoint
from mcore_ckpt.format.index import StoredItem, parse_object_key
from mcore_ckpt.format.metadata_read import read_config, read_index
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.tools.verify import verify_checkpoint

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
ALL = sorted(path.name for path in GOLDEN.iterdir())
MEGATRON = [name for name in ALL if name.startswith("megatron")]
THROUGH_MEGATRON = [*MEGATRON, *(name for name in ALL if name.startswith("ours"))]
FLATTENED = [name for name in MEGATRON if name < "megatron-0.16"]


def item_bytes(name: str, item: StoredItem) -> bytes:
    with (GOLDEN / name / item.file).open("rb") as stream:
        stream.seek(item.offset)
        content = stream.read(item.length)
    assert len(content) == item.length
    return content


@pytest.mark.parametrize("name", ALL)
def test_index_and_items_are_what_was_saved(name: str) -> None:
    index, wanted = read_index(GOLDEN / name), json.loads((GOLDEN / name / "expected.json").read_text())
    assert sorted(index.objects) == wanted["objects"]
    found = {}
    checkpoint = open_checkpoint(GOLDEN / name)
    for fqn, entry in index.tensors.items():
        whole = checkpoint[fqn].torch()
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        found[fqn] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "chunks": sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
    assert found == wanted["tensors"]
    assert verify_checkpoint(GOLDEN / name).whole
    assert (index.manifest is not None) == name.startswith("ours")
    if name in THROUGH_MEGATRON:
        config = read_config(GOLDEN / name)
        assert config is not None
        assert (config.backend, config.version) == ("torch_dist", 1)
        assert all(parse_object_key(fqn) for fqn in index.objects)


@pytest.mark.parametrize("name", FLATTENED)
def test_flattened_tensors_keep_their_first_shape(name: str) -> None:
    index = read_index(GOLDEN / name)
    shapes = {fqn: kept for fqn, kept in index.mcore_data.items() if kept}
    assert shapes == {"optimizer.exp_avg.weight": {"nd_reformulated_orig_global_shape": (6, 10)}}
    assert index.tensors["optimizer.exp_avg.weight"].shape == (1, 1, 60)


@pytest.mark.parametrize("name", THROUGH_MEGATRON)
def test_objects_load_safely(name: str) -> None:
    index = read_index(GOLDEN / name)
    for rank in range(2):
        fqn = f"decoder.layers._extra_state/shard_{rank}_2"
        assert load_object(item_bytes(name, index.objects[fqn].item)) == [{"rank": rank, "amax": [1.5, 1.5, 1.5]}]
    (random_states,) = load_object(item_bytes(name, index.objects["rng_state/shard_0.0_1.1"].item))
    kind, keys, *_ = random_states[0]["np_rng_state"]
    assert (kind, keys.dtype, len(keys)) == ("MT19937", "uint32", 624)
    assert random_states[0]["random_rng_state"][0] == 3


@pytest.mark.parametrize("name", THROUGH_MEGATRON)
def test_common_state_loads_safely(name: str) -> None:
    file = GOLDEN / name / "common.pt"
    if file.exists():
        common = load_object(file.read_bytes())
    else:
        (common,) = load_object(item_bytes(name, read_index(GOLDEN / name).objects["common_state/shard_0_1"].item))
    assert common["iteration"] == 7
    assert common["args"].hidden_size == 12
    assert common["args"].params_dtype == torch.bfloat16
    assert common["args"].save == Path("checkpoints")
