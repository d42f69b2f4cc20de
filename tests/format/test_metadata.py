"""The index: what is read from `.metadata` and written to it, and what is said when there is none."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

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
from mcore_ckpt.format.metadata_read import (
    CheckpointConfig,
    encode_config,
    parse_index,
    read_config,
    read_index,
)
from mcore_ckpt.format.metadata_write import FORMAT_VERSION, MetadataEncoder, encode_metadata
from mcore_ckpt.format.tensor_pickle import DTYPE_NAMES
from mcore_ckpt.state.torch_classes import from_dcp_metadata, storage_info, to_dcp_metadata


def sample_metadata() -> Metadata:
    """What stock writers make: two chunks, a whole tensor, a scalar, an object; hints, planner data, storage meta."""
    floats, halves = TensorProperties(dtype=torch.float32), TensorProperties(dtype=torch.bfloat16, requires_grad=True)
    size = torch.Size
    rows = [ChunkStorageMetadata(size([0, 0]), size([2, 3])), ChunkStorageMetadata(size([2, 0]), size([2, 3]))]
    metadata = Metadata(
        {
            "layer.weight": TensorStorageMetadata(floats, size([4, 3]), rows),
            "bias": TensorStorageMetadata(halves, size([7]), [ChunkStorageMetadata(size([0]), size([7]))]),
            "step": TensorStorageMetadata(floats, size([]), [ChunkStorageMetadata(size([]), size([]))]),
            "extra/shard_0_1": BytesStorageMetadata(),
        },
        planner_data={"layer.weight": ("layer", "weight"), "bias": ("bias",), "n": ("list", 0)},
        storage_data={
            MetadataIndex("layer.weight", size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 1500),
            MetadataIndex("layer.weight", size([2, 0]), 1): _StorageInfo("__1_0.distcp", 2**40, 1500),
            MetadataIndex("bias", size([0]), 0): storage_info("__0_0.distcp", 1500, 70_000, ["zstd"]),
            MetadataIndex("step", size([]), 0): _StorageInfo("__0_0.distcp", 80_000, 1400),
            MetadataIndex("extra/shard_0_1"): _StorageInfo("__0_1.distcp", 0, 900),
        },
        storage_meta=StorageMeta("checkpoints/7", "save-1"),
    )
    metadata.version = FORMAT_VERSION  # no argument of torch 2.6
    return metadata


SAMPLE = CheckpointIndex(
    "ckpt",
    tensors={
        "layer.weight": TensorEntry(
            "layer.weight",
            "float32",
            (4, 3),
            (
                StoredChunk((0, 0), (2, 3), StoredItem("__0_0.distcp", 0, 1500)),
                StoredChunk((2, 0), (2, 3), StoredItem("__1_0.distcp", 2**40, 1500)),
            ),
        ),
        "bias": TensorEntry(
            "bias",
            "bfloat16",
            (7,),
            (StoredChunk((0,), (7,), StoredItem("__0_0.distcp", 1500, 70_000, ("zstd",))),),
            requires_grad=True,
        ),
        "step": TensorEntry("step", "float32", (), (StoredChunk((), (), StoredItem("__0_0.distcp", 80_000, 1400)),)),
    },
    objects={"extra/shard_0_1": ObjectEntry("extra/shard_0_1", StoredItem("__0_1.distcp", 0, 900))},
    planner_data={"layer.weight": ("layer", "weight"), "bias": ("bias",), "n": ("list", 0)},
    storage_meta={"checkpoint_id": "checkpoints/7", "save_id": "save-1", "load_id": None, "modules": []},
    version=FORMAT_VERSION,
)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_reads_what_torch_pickles(protocol: int) -> None:
    assert parse_index(pickle.dumps(sample_metadata(), protocol), "ckpt") == SAMPLE


def test_reads_a_path_as_checkpoint_id() -> None:
    metadata = sample_metadata()
    metadata.storage_meta = StorageMeta(Path("/data") / "run")
    metadata.storage_meta.modules = ["a"]
    meta = parse_index(pickle.dumps(metadata), "ckpt").storage_meta
    assert meta == {"checkpoint_id": "/data/run", "save_id": None, "load_id": None, "modules": ["a"]}


def test_a_tensor_may_be_called_like_the_plans() -> None:
    """Where the name of the plans is a key of the state dict, nothing may be cut."""
    metadata = sample_metadata()
    entries = {"all_local_plans": metadata.state_dict_metadata.pop("step"), **metadata.state_dict_metadata}
    metadata.state_dict_metadata = entries
    info = metadata.storage_data.pop(MetadataIndex("step", torch.Size([])))
    metadata.storage_data[MetadataIndex("all_local_plans", torch.Size([]))] = info
    assert list(parse_index(pickle.dumps(metadata), "ckpt").tensors) == ["all_local_plans", "layer.weight", "bias"]


def test_encoded_hints_are_the_positions_of_the_chunks() -> None:
    hints = {(key.fqn, key.offset): key.index for key in pickle.loads(encode_metadata(SAMPLE)).storage_data}
    stock = {(key.fqn, key.offset): key.index for key in sample_metadata().storage_data}
    assert hints == stock


def test_encoded_index_names_classes_of_torch_only() -> None:
    named = {module for module, _ in _globals_of(encode_metadata(SAMPLE))}
    assert {module.split(".")[0] for module in named} == {"torch"}


def test_every_dtype_of_this_torch_survives() -> None:
    names = sorted(name for name in DTYPE_NAMES if hasattr(torch, name))
    known = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert known == set(names)
    tensors = {
        name: TensorEntry(name, name, (1,), (StoredChunk((0,), (1,), StoredItem("__0_0.distcp", 0, 1)),))
        for name in names
    }
    index = CheckpointIndex("ckpt", tensors, {}, version=FORMAT_VERSION)
    metadata = pickle.loads(encode_metadata(index))
    assert {fqn: entry.properties.dtype for fqn, entry in metadata.state_dict_metadata.items()} == {
        name: getattr(torch, name) for name in names
    }
    assert parse_index(pickle.dumps(metadata), "ckpt") == dataclasses.replace(index, planner_data=None)


def test_encodes_the_plans_last_and_whole() -> None:
    plans = [SavePlan([], planner_data={"a": ("b",)}), SavePlan([], storage_data=torch.Size([3]))]
    content = MetadataEncoder(SAMPLE).encode(SAMPLE.objects, local_plans=plans)
    metadata = pickle.loads(content)
    assert metadata.all_local_plans == plans
    assert list(vars(metadata))[-1] == "all_local_plans"
    assert parse_index(content, "ckpt").has_local_plans


def test_encodes_names_of_any_length_and_script() -> None:
    for name in ("x" * 255, "x" * 256, "ключ.权重", "a\ud800b", ""):
        tensors = {name: SAMPLE.tensors["step"]._replace(fqn=name)}
        content = encode_metadata(CheckpointIndex("ckpt", tensors, {}))
        assert list(parse_index(content, "ckpt").tensors) == [name]
        assert list(pickle.loads(content).state_dict_metadata) == [name]


def test_from_dcp_names_what_has_no_place() -> None:
    metadata = sample_metadata()
    del metadata.storage_data[MetadataIndex("layer.weight", torch.Size([2, 0]))]
    with pytest.raises(CorruptCheckpointError, match=r"'layer.weight', chunk at \[2, 0\],"):
        from_dcp_metadata(metadata, "ckpt")


def test_dtype_that_torch_lacks_is_named() -> None:
    entry = SAMPLE.tensors["step"]._replace(dtype="float3_e1m1")
    with pytest.raises(CorruptCheckpointError, match=r"'step' is stored as float3_e1m1"):
        to_dcp_metadata(CheckpointIndex("ckpt", {"step": entry}, {}))


def test_missing_place_is_an_error_or_a_listed_problem() -> None:
    metadata = sample_metadata()
    del metadata.storage_data[MetadataIndex("layer.weight", torch.Size([2, 0]))]
    del metadata.storage_data[MetadataIndex("extra/shard_0_1")]
    content = pickle.dumps(metadata)
    with pytest.raises(
        CorruptCheckpointError, match=r"ckpt/\.metadata: tensor 'layer.weight': no file holds the chunk"
    ):
        parse_index(content, "ckpt")
    index = parse_index(content, "ckpt", strict=False)
    assert len(index.tensors["layer.weight"].chunks) == 1
    assert index.objects == {}
    assert [problem.split("'")[1] for problem in index.problems] == ["layer.weight", "extra/shard_0_1"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], r"holds no \.metadata, so there is no finished checkpoint"),
        ([".mcore_ckpt_incomplete"], "a save into it was interrupted"),
        (["__0.metadata"], "checkpoints of 1 single ranks"),
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


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, words in (("absent", "no such directory"), ("file", "is a file")):
        with pytest.raises(CheckpointNotFoundError, match=words):
            read_index(tmp_path / name)


class TestConfig:
    def test_round_trip(self, tmp_path: Path) -> None:
        (tmp_path / "metadata.json").write_bytes(encode_config())
        assert read_config(tmp_path) == CheckpointConfig("torch_dist", 1)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"[]",
            b"{}",
            b"null",
            b'{"sharded_backend": 3, "sharded_backend_version": 1}',
            b'{"sharded_backend": NaN}',
            b"1e999999",
            b"[" * 100_000,
            b'{"a": ' * 5000,
            b"\x80",
            b"\xff\xfe",
        ],
        ids=lambda content: content[:40],
    )
    def test_damaged(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "metadata.json").write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.json"):
            read_config(tmp_path)


class TestObjectKeys:
    @pytest.mark.parametrize(
        ("key", "offset", "shape"), [("a.b", (0,), (1,)), ("rng_state", (1, 0), (2, 4)), ("with/slash", (3,), (4,))]
    )
    def test_round_trip(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        assert parse_object_key(object_key(key, offset, shape)) == ObjectShard(key, offset, shape)

    def test_is_megatrons_form(self) -> None:
        mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
        stock = mapping.ShardedObject("a.b", None, (2, 4), (1, 0))
        assert object_key("a.b", (1, 0), (2, 4)) == stock.unique_key

    def test_old_form_lacks_the_last_size(self) -> None:
        assert parse_object_key("k/shard_0.1_2") == ObjectShard("k", (0, 1), (2, -1))

    @pytest.mark.parametrize(
        "fqn", ["", "step", "a/b", "a/shard_0", "a/shard_0_1_2", "a/shard_x_1", "a/shard_0.0_1.1.1", "a/shard_-1_1"]
    )
    def test_other_forms_are_not_shards(self, fqn: str) -> None:
        assert parse_object_key(fqn) is None


def _globals_of(content: bytes) -> set[tuple[str, str]]:
    named: set[tuple[str, str]] = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            named.add((module, name))
            return super().find_class(module, name)

    Recording(io.BytesIO(content)).load()
    return named
