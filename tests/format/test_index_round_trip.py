"""Any index: what we encode is what torch would have pickled, and reading either gives the index back."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import parse_index
from mcore_ckpt.format.metadata_write import FORMAT_VERSION, encode_metadata
from mcore_ckpt.state.torch_classes import from_dcp_metadata, to_dcp_metadata

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
