"""A `.metadata` that is damaged, contradicts itself, or was made to do harm: refused, by name, and nothing is run."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, UnsafePickleError
from mcore_ckpt.format.index import CheckpointIndex, file_name_problem
from mcore_ckpt.format.index_pickle import PropertiesState
from mcore_ckpt.format.metadata_read import parse_index, read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.models._foreign import read_safetensors

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
SMALL = (GOLDEN / "dtensor-2.13.0" / ".metadata").read_bytes()
MEGATRON = (GOLDEN / "megatron-0.15.3" / ".metadata").read_bytes()
OURS = encode_metadata(read_index(GOLDEN / "dtensor-2.13.0"))
NAMES = {SMALL: "stock", MEGATRON: "megatron", OURS: "ours"}


def refused(content: bytes) -> LoadError:
    with pytest.raises(CorruptCheckpointError) as caught:
        parse_index(content, "/ckpt")
    message = str(caught.value)
    assert message.startswith("/ckpt/.metadata: ")
    assert len(message) < 1500
    return caught.value


class TestDamaged:
    @pytest.mark.parametrize("content", [SMALL, OURS], ids=["stock", "ours"])
    def test_truncated_anywhere(self, content: bytes) -> None:
        for length in range(len(content)):
            refused(content[:length])

    @pytest.mark.parametrize(
        ("content", "mask"),
        [
            *itertools.product([SMALL, OURS], [0x01, 0xFF]),
            pytest.param(MEGATRON, 0x80, marks=pytest.mark.long),
        ],
        ids=lambda value: NAMES[value] if isinstance(value, bytes) else hex(value),
    )
    def test_any_byte_changed(self, content: bytes, mask: int) -> None:
        """What is still accepted is a well-formed index: nothing else than our own errors ever comes out."""
        damaged = bytearray(content)
        for position in range(len(content)):
            damaged[position] ^= mask
            try:
                index = parse_index(bytes(damaged), "/ckpt")
            except CorruptCheckpointError:
                pass
            else:
                assert_well_formed(index)
            damaged[position] ^= mask

    @pytest.mark.parametrize(
        "content", [b"PK\x03\x04 a zip archive", bytes(100), *map(pickle.dumps, (None, {}, [], "x"))]
    )
    def test_something_else(self, content: bytes) -> None:
        refused(content)


def assert_well_formed(index: CheckpointIndex) -> None:
    for fqn, entry in index.tensors.items():
        assert type(fqn) is str
        assert type(entry.dtype) is str
        for chunk in entry.chunks:
            assert file_name_problem(chunk.item.file) is None
            assert chunk.item.offset >= 0
            assert chunk.item.length >= 0
            for start, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True):
                assert {type(start), type(size), type(whole)} == {int}
                assert 0 <= start <= start + size <= whole
    for entry in index.objects.values():
        assert file_name_problem(entry.item.file) is None


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class TestEvil:
    @pytest.mark.parametrize("function", [os.system, eval, torch.load, subprocess.Popen])
    @pytest.mark.parametrize("protocol", [0, 2, 4])
    def test_calls_are_refused_by_name(self, function: Callable[..., Any], protocol: int) -> None:
        error = refused(pickle.dumps(Calls(function, "touch /tmp/harm"), protocol))
        assert isinstance(error, UnsafePickleError)
        assert function.__name__ in str(error) or protocol == 0

    def test_a_call_among_the_plans_is_not_run(self) -> None:
        metadata = pickle.loads(OURS)
        metadata.all_local_plans = [Calls(os.abort)]
        assert parse_index(pickle.dumps(metadata), "/ckpt").tensors  # the plans are never looked at

    @pytest.mark.parametrize(
        "target", [("torch.distributed.checkpoint.metadata", "TensorProperties"), ("torch", "Size")]
    )
    def test_stand_ins_cannot_be_changed(self, target: tuple[str, str]) -> None:
        """BUILD with a slot state sets attributes on what is on the stack: here the class itself."""
        before = dict(vars(PropertiesState))
        module, name = target
        refused(b"\x80\x04" + _text(module) + _text(name) + b"\x93N}" + _text("__setstate__") + b"K\x01s\x86b.")
        assert dict(vars(PropertiesState)) == before


class TestBombs:
    """Few bytes that ask for much memory or time."""

    @pytest.mark.parametrize(
        "content",
        [
            b"\x80\x04Nr\xff\xff\xff\x7f.",  # memo number 2**31
            b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",  # bytes
            b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",  # bytearray
            b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",  # str
            b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",  # frame
        ],
    )
    def test_huge_lengths(self, content: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(content)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB

    def test_nested_references(self) -> None:
        """60 lists, each holding the last one twice: 2**60 elements to anyone who walks them."""
        value: Any = ["x"]
        for _ in range(60):
            value = [value, value]
        index = parse_index(pickle.dumps(Metadata({}, planner_data=value, storage_data={})), "/ckpt")
        assert index.planner_data[0] is index.planner_data[1]
        assert len(encode_metadata(index)) < 5000


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


SIZE = torch.Size


def an_index(**changes: Any) -> bytes:
    """A one-tensor index with one field changed; values that torch's classes take without looking."""
    field = {
        "fqn": "w",
        "dtype": torch.float32,
        "shape": SIZE([4]),
        "offsets": SIZE([0]),
        "sizes": SIZE([4]),
        "key": MetadataIndex("w", SIZE([0])),
        "file": "__0_0.distcp",
        "offset": 0,
        "length": 100,
        "transforms": None,
        **changes,
    }
    properties = TensorProperties(dtype=field["dtype"])
    chunk = ChunkStorageMetadata(field["offsets"], field["sizes"])
    chunks = field.get("chunks", [chunk])
    entry = field.get("entry", TensorStorageMetadata(field.get("properties", properties), field["shape"], chunks))
    info = _StorageInfo(field["file"], field["offset"], field["length"])
    info.transform_descriptors = field["transforms"]
    places = field.get("places", {field["key"]: field.get("info", info)})
    return pickle.dumps(Metadata(field.get("entries", {field["fqn"]: entry}), storage_data=places))


def _hint(**fields: Any) -> MetadataIndex:
    """A `MetadataIndex` with fields of any type."""
    key = MetadataIndex("w", SIZE([0]))
    for name, value in fields.items():
        object.__setattr__(key, name, value)
    return key


@pytest.mark.parametrize(
    "changes",
    [
        *({"offset": value} for value in (-1, 1.0, True, 2**63 - 50, 2**80)),
        *({"length": value} for value in (-1, None, "5", 2**63)),
        *({"shape": value} for value in ((4.0,), (-4,), [4], (True,), 4, (2**70,), (1,) * 65, ((4,),))),
        *({"sizes": value} for value in (SIZE([5]), SIZE([4, 1]), (4, None), (-1,), None)),
        *({"offsets": value} for value in (SIZE([1]), (-1,), (), (0.5,))),
        *({"dtype": value} for value in ("float32", None, torch.Size([1]))),
        *({"properties": value} for value in (None, BytesStorageMetadata())),
        *({"chunks": value} for value in (None, "abc", [None], [(0, 4)])),
        *({"entry": value} for value in (None, ChunkStorageMetadata(SIZE([0]), SIZE([4])))),
        *({"fqn": value} for value in (7, b"w")),
        *({"entries": value} for value in (None, [])),
        *({"places": value} for value in (None, {"w": _StorageInfo("a", 0, 1)})),
        *({"info": value} for value in (None, ("__0_0.distcp", 0, 1))),
        *({"key": value} for value in (_hint(fqn=7), _hint(offset=0), _hint(offset=(-1,)))),
        *({"file": value} for value in (None, b"__0_0.distcp")),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(changes: dict[str, Any]) -> None:
    refused(an_index(**changes))


@pytest.mark.parametrize(
    "transforms", ["zstd", ["zstd/1"], [7], {"a": 1}, ["x" * 10**6]], ids=lambda value: str(value)[:9]
)
def test_stream_transforms_are_refused(transforms: Any) -> None:
    with pytest.raises(LoadError, match="stream transforms") as caught:
        parse_index(an_index(transforms=transforms), "/ckpt")
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "a/./b"),
        *("a\\b", "..\\x", "C:x", "C:\\x", "a\0b", "a\nb", "\x7f", "a\ud800", "x" * 5000, "a\u202eb"),
    ],
)
def test_files_outside_the_checkpoint(name: str) -> None:
    assert file_name_problem(name)
    error = refused(an_index(file=name))
    assert "'w'" in str(error)
    assert "file" in str(error)


@pytest.mark.parametrize("shape", [(2**40, 2**40, 0), (2**62, 4, 0), (0, 2**63 - 1, 2)])
def test_a_shape_without_elements_that_cannot_be_multiplied_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    zeros = SIZE([0] * len(shape))
    assert "axes that can be multiplied" in str(
        refused(an_index(shape=SIZE(shape), sizes=SIZE(shape), offsets=zeros, key=MetadataIndex("w", zeros)))
    )
    header = f'{{"a": {{"dtype": "F32", "shape": {list(shape)}, "data_offsets": [0, 0]}}}}'.encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CorruptCheckpointError, match="axes that can be multiplied"):
        read_safetensors(tmp_path, "m.safetensors")
