"""The index: what is read from `.metadata` and written to it, and what is said when there is none; any index is what
torch would have pickled, and read back the same.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from mcore_ckpt.format.metadata_write import FORMAT_VERSION, encode_metadata
from mcore_ckpt.state.torch_classes import from_dcp_metadata, to_dcp_metadata

pytestmark = pytest.mark.quick


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
        (["iter_0000010/.metadata", "iter_0000020/.metadata"], r"2 checkpoints; give one of them, .*iter_0000020"),
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


names = st.text(min_size=0, max_size=300)
numbers = st.one_of(st.integers(0, 300), st.integers(2**16 - 2, 2**16 + 2), st.integers(2**31 - 2, 2**62))
files = st.sampled_from(["__0_0.distcp", "__1_0.distcp", "model__11_2.distcp", "sub/x.distcp", "größe.distcp"])
items = st.builds(StoredItem, files, numbers, numbers, st.none())
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=10,
)


def has_strides(shape: list[int]) -> bool:
    """Of a tensor without elements, too: others are refused."""
    return 0 not in shape or math.prod(filter(None, shape)) < 2**63


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[StoredChunk, ...]]:
    """A shape, and boxes inside it with different offsets (an index holds one place for each offset)."""
    shape = tuple(draw(st.lists(numbers, max_size=4).filter(has_strides)))
    chunks = {}
    for _ in range(draw(st.integers(0, 3))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - start)) for start, size in zip(offsets, shape, strict=True))
        chunks[offsets] = StoredChunk(offsets, sizes, draw(items))
    return shape, tuple(chunks.values())


@st.composite
def indexes(draw: st.DrawFn) -> CheckpointIndex:
    keys = draw(st.lists(names, max_size=6, unique=True))
    cut = draw(st.integers(0, len(keys)))
    tensors = {}
    for key in keys[:cut]:
        shape, chunks = draw(chunk_lists())
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"]))
        tensors[key] = TensorEntry(key, dtype, shape, chunks, draw(st.booleans()))
    objects = {key: ObjectEntry(key, draw(items)) for key in keys[cut:]}
    mcore_data = draw(st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=5), plain), max_size=2))
    meta: dict[str, Any] | None = draw(
        st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {
                    "checkpoint_id": st.one_of(st.none(), names),
                    "save_id": st.one_of(st.none(), names),
                    "load_id": st.none(),
                    "modules": st.lists(names, max_size=2),
                }
            ),
        )
    )
    return CheckpointIndex("ckpt", tensors, objects, draw(plain), mcore_data, meta, FORMAT_VERSION)


@given(indexes(), st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_an_index_is_the_same_from_our_bytes_as_from_torchs_classes(index: CheckpointIndex, protocol: int) -> None:
    content = encode_metadata(index)
    assert parse_index(content, "ckpt") == index
    ours, metadata = pickle.loads(content), to_dcp_metadata(index)
    back = from_dcp_metadata(metadata, "ckpt")
    assert dataclasses.replace(back, storage_meta=index.storage_meta) == index
    if index.storage_meta is None:
        metadata.storage_meta = None
    assert vars(ours) == vars(metadata)
    assert [key.index for key in ours.storage_data] == [key.index for key in metadata.storage_data]
    assert parse_index(pickle.dumps(metadata, protocol), "ckpt") == index
