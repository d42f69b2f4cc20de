"""The index: what is read from `.metadata` and written to it, and what is said when there is none; any index is what
torch would have pickled, and read back the same.
"""

import dataclasses
import hashlib
import json
import math
import pickle
import struct
import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mcore_ckpt import open_checkpoint
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.dcp.reader import from_dcp_metadata, to_dcp_metadata
from mcore_ckpt.format import index_pickle
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
from mcore_ckpt.format.integrity import Manifest, ManifestFile, split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import parse_index, read_config, read_index
from mcore_ckpt.format.metadata_write import FORMAT_VERSION, MetadataEncoder, encode_metadata
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.checks import pickle_differs
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.command import output_of

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
items = st.builds(StoredItem, files, numbers, numbers, st.none(), st.just(value=False))
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


# --- checkpoints that other systems wrote: what the index says of them, and that what it says is where it says --------

GOLDEN = Path(__file__).parent / "golden"
ALL = sorted(path.name for path in GOLDEN.iterdir())
MEGATRON = [name for name in ALL if name.startswith("megatron")]
THROUGH_MEGATRON = [*MEGATRON, *(name for name in ALL if name.startswith("ours"))]


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
        assert (config.sharded_backend, config.sharded_backend_version) == ("torch_dist", 1)
        assert all(parse_object_key(fqn) for fqn in index.objects)


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


# --- the index in columns, behind the pickle: says the same as that, is checked like that, and is what is read --------

SAVE_ID = bytes(range(16))


def sealed(index: CheckpointIndex) -> bytes:
    items = [chunk.item for entry in index.tensors.values() for chunk in entry.chunks]
    items += [entry.item for entry in index.objects.values()]
    seal = Manifest(
        SAVE_ID,
        {item.file: ManifestFile(2**62, 5, SAVE_ID) for item in items},
        array("I", range(len(items))),
        *((array("Q", [1]), array("I", [2]), array("I", [7, 8])) if len(items) > 1 else ()),
    )
    encoder = MetadataEncoder(index)
    return encoder.encode(index.objects, storage_meta=index.storage_meta, manifest=seal)


def read(data: bytes) -> CheckpointIndex:
    """By the columns alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_pickle, "unpickle_index", None)
        return parse_index(data, "a")


def unpickled(data: bytes) -> CheckpointIndex:
    """By the pickle, with what else the manifest says."""
    pickled, seal = split_metadata(data, "a")
    assert seal is not None
    return parse_index(with_manifest(pickled, replace(seal, columns=None)), "a")


def sayable(index: CheckpointIndex, has_paths: bool) -> CheckpointIndex:
    """The index without what columns cannot say."""
    paths = {key: tuple(key.split(".")) for key in (*index.tensors, *index.objects)}
    note: dict[str, Any] = {"nd_reformulated_orig_global_shape": (6, 10)}
    notes = dict(zip(index.tensors, (note, {}), strict=False))
    return replace(index, planner_data=(has_paths and paths) or None, mcore_data=notes)


@given(indexes(), st.booleans())
def test_columns_say_what_the_pickle_says(index: CheckpointIndex, has_paths: bool) -> None:
    data = sealed(sayable(index, has_paths))
    found = read(data)
    assert found == unpickled(data)
    assert found.planner_data == sayable(index, has_paths).planner_data
    assert (list(found.tensors), list(found.objects)) == (list(index.tensors), list(index.objects))


@given(indexes())
def test_what_columns_cannot_say_is_in_the_pickle(index: CheckpointIndex) -> None:
    data = sealed(index)
    assert parse_index(data, "a") == unpickled(data)
    assert parse_index(data, "a").planner_data == index.planner_data


# --------------------------------------------------------------------------------------------------------- not trusted


def with_sections(data: bytes, change: Callable[[bytearray, bytearray], Any]) -> bytes:
    """`data` with its two sections changed as they are when inflated, and all lengths and checksums made good."""
    pickled, seal = split_metadata(data, "a")
    assert seal is not None
    assert seal.columns is not None
    sections = [bytearray(zlib.decompress(packed)) for packed, _ in seal.columns]
    change(*sections)
    first, second = ((zlib.compress(section), len(section)) for section in sections)
    return with_manifest(pickled, replace(seal, columns=(first, second)))


def one_tensor() -> CheckpointIndex:
    """In columns, behind 40 bytes: of its kind 8, of its key and form 8, of its chunk 20, its form, the names."""
    chunk = StoredChunk((0, 0), (4, 3), StoredItem("__0_0.distcp", 0, 700, 0))
    stored = {"o": ObjectEntry("o", StoredItem("__0_0.distcp", 9000, 7, 9))}
    return CheckpointIndex("a", {"w": TensorEntry("w", "float32", (4, 3), (chunk,))}, stored)


def number(at: int, value: int, code: str = "<Q", section: int = 0) -> Callable[[bytearray, bytearray], Any]:
    return lambda *sections: struct.pack_into(code, sections[section], at, value)


FORM = 40 + 8 + 8 + 20  # of one tensor of one chunk, where its form begins
HOSTILE = {
    "tensors that are not there": number(0, 2**40),
    "chunks that are not there": number(16, 2**62),
    "forms that are not there": number(24, 2**50),
    "key longer than all": number(48, 2**31, "<I"),
    "no such form": number(52, 1, "<I"),
    "no such file": number(56, 7, "<I"),
    "end beyond 2**63": lambda first, _: struct.pack_into("<QQ", first, 60, 1, 2**63 - 1),
    "no such kind": number(FORM, 1),
    "axes without end": number(FORM + 8, 2**62),
    "shape beyond 2**63": number(FORM + 24, 2**64 - 1),
    "chunk outside": number(FORM + 40, 2),
    "bytes behind the end": lambda first, _: first.extend(b"\0"),
    "unknown dtype": lambda first, _: first.__setitem__(slice(-8, -1), b"float33"),
    "name that is no text": lambda first, _: first.__setitem__(-1, 0xFF),
    "object of no file": number(28, 9, "<I", 1),
    "an object called as a tensor": lambda _, more: more.__setitem__(48, ord("w")),
    "details nested without end": lambda _, more: (
        struct.pack_into("<Q", more, 16, 10**5),
        more.__setitem__(slice(49, None), b"[" * 10**5),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_columns_that_cannot_be_are_refused(name: str) -> None:
    data = sealed(one_tensor())
    read(data)
    with pytest.raises(CorruptCheckpointError):
        parse_index(with_sections(data, HOSTILE[name]), "a")


@pytest.mark.parametrize("unpacked_bytes", [10, 2**50])
def test_sections_are_not_inflated_beyond_what_they_say(unpacked_bytes: int) -> None:
    pickled, seal = split_metadata(sealed(one_tensor()), "a")
    assert seal is not None
    assert seal.columns is not None
    bomb = zlib.compress(bytes(50 * 1024 * 1024), 9)
    for columns in (((bomb, unpacked_bytes), seal.columns[1]), (seal.columns[0], (bomb, unpacked_bytes))):
        with pytest.raises(CorruptCheckpointError, match="inflated"):
            parse_index(with_manifest(pickled, replace(seal, columns=columns)), "a")


# ------------------------------------------------------------------------------------------------- columns and pickle


def test_verify_names_what_columns_and_pickle_say_differently(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "ours-0.1.0"
    for file in golden.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = (tmp_path / ".metadata").read_bytes()
    assert pickle_differs(tmp_path) is None
    assert verify_checkpoint(tmp_path).whole

    def rename(section: bytearray, _: bytearray) -> None:
        at = section.index(b"mask")
        section[at : at + 4] = b"mark"

    (tmp_path / ".metadata").write_bytes(with_sections(data, rename))
    assert "tensor 'mark': its columns say TensorEntry" in (pickle_differs(tmp_path) or "")
    assert "tensor 'mark': its columns say" in output_of("verify", tmp_path, code=1)
