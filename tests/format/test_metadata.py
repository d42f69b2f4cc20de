"""The index: what is read from `.metadata` and written to it, and what is said when there is none."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    ObjectShard,
    StoredChunk,
    StoredItem,
    TensorEntry,
    object_key,
    parse_object_key,
)
from mcore_ckpt.format.metadata_read import parse_index, read_index
from mcore_ckpt.state.torch_classes import to_dcp_metadata


def sample_metadata() -> Metadata:
    """A tensor in two chunks, a scalar and an object, by torch's classes."""
    halves = (StoredChunk((row, 0), (2, 3), StoredItem(f"__{row}_0.distcp", 0, 1500)) for row in (0, 2))
    step = StoredChunk((), (), StoredItem("__0_0.distcp", 1500, 1400))
    tensors = {
        "weight": TensorEntry("weight", "float32", (4, 3), tuple(halves)),
        "step": TensorEntry("step", "float32", (), (step,)),
    }
    stored = {"extra/shard_0_1": ObjectEntry("extra/shard_0_1", StoredItem("__0_1.distcp", 0, 900))}
    return to_dcp_metadata(CheckpointIndex("ckpt", tensors, stored))


def test_a_tensor_may_be_called_like_the_plans() -> None:
    """Where the name of the plans is a key of the state dict, nothing may be cut."""
    metadata = sample_metadata()
    entries = {"all_local_plans": metadata.state_dict_metadata.pop("step"), **metadata.state_dict_metadata}
    metadata.state_dict_metadata = entries
    info = metadata.storage_data.pop(MetadataIndex("step", torch.Size([])))
    metadata.storage_data[MetadataIndex("all_local_plans", torch.Size([]))] = info
    assert list(parse_index(pickle.dumps(metadata), "ckpt").tensors) == ["all_local_plans", "weight"]


def test_missing_place_is_an_error_or_a_listed_problem() -> None:
    metadata = sample_metadata()
    del metadata.storage_data[MetadataIndex("weight", torch.Size([2, 0]))]
    del metadata.storage_data[MetadataIndex("extra/shard_0_1")]
    content = pickle.dumps(metadata)
    with pytest.raises(CorruptCheckpointError, match=r"ckpt/\.metadata: tensor 'weight': no file holds the chunk"):
        parse_index(content, "ckpt")
    index = parse_index(content, "ckpt", strict=False)
    assert len(index.tensors["weight"].chunks) == 1
    assert index.objects == {}
    assert [problem.split("'")[1] for problem in index.problems] == ["weight", "extra/shard_0_1"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], r"holds no \.metadata, so there is no finished checkpoint"),
        ([".mcore_ckpt_incomplete"], "a save into it was interrupted"),
        (["iter_0000010/.metadata", "iter_0000020/.metadata"], r"2 iterations; give one of them, .*iter_0000020"),
    ],
)
def test_where_there_is_no_index_it_is_said_what_there_is(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(CheckpointNotFoundError, match=words):
            read_index(path)


@pytest.mark.parametrize(
    ("key", "offset", "shape"), [("a.b", (0,), (1,)), ("rng_state", (1, 0), (2, 4)), ("with/slash", (3,), (4,))]
)
def test_keys_of_shards_of_objects_are_megatrons(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert parse_object_key(object_key(key, offset, shape)) == ObjectShard(key, offset, shape)
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    assert object_key(key, offset, shape) == mapping.ShardedObject(key, None, shape, offset).unique_key


@pytest.mark.parametrize("fqn", ["", "step", "a/b", "a/shard_0", "a/shard_0_1_2", "a/shard_x_1", "a/shard_-1_1"])
def test_other_keys_are_no_shards(fqn: str) -> None:
    assert parse_object_key(fqn) is None
