"""Pickles that were made to do harm: each is refused with an error of ours, in bounded time and memory.

Each of these crashed the process, filled the memory, hung, or changed what all share, when `pickle` or torch read it.
"""

import io
import os
import pickle
import resource
import signal
import struct
import subprocess
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.format.index import CheckpointIndex, file_name_problem
from mcore_ckpt.format.index_pickle import PropertiesState
from mcore_ckpt.format.metadata_read import parse_index, read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.format.state_file import read_plain
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.models._foreign import read_safetensors
from mcore_ckpt.tools.keys import plain
from tests.support.processes import in_child
from tests.support.stored_layouts import stock_item as saved

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

INDEX_MODULE = "torch.distributed.checkpoint.metadata"


def container(pickled: bytes) -> bytes:
    """What `torch.save` makes around a pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return stream.getvalue()


def name(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


DEEP_KEY = b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."  # a tuple in a tuple in a tuple ..., as a key
# A pair of the same pair of the same pair ...: 2**60 values.
WIDE_KEY = b"\x80\x04})\x94" + b"".join(b"h%c\x86\x94" % number for number in range(60)) + b"Ns."

# References inside one another, and a set of two equal nests of sets: 2**40 comparisons.
DEEP_REFERENCE = b"\x80\x02}K\x01" + b"Q" * 1_000_000 + b"Ns."


def _nested_sets(first: int) -> bytes:
    return b"(K\x01\x91\x94" + b"".join(b"(h%ch%c\x85\x91\x94" % (n, n) for n in range(first, first + 40))


DEEP_SETS = b"\x80\x04](" + _nested_sets(0) + _nested_sets(41) + b"e(h\x28h\x51\x91."

OBJECTS = sorted((Path(__file__).parent / "corpus" / "object_pickle").iterdir())

DEEP = {
    "lists": b"]" * 50_000 + b"a" * 49_999 + b".",
    "tuples": b")" + b"\x85" * 50_000 + b".",
    "namespaces": (name("argparse.Namespace") + b")\x81}" + text("a")) * 5_000 + b"N" + b"sb" * 5_000 + b".",
    "lists by reference": b"]q\x000" + b"".join(
        b"]h%bar%b0" % (bytes((0,)), b"\x00\x00\x00\x00") for _ in range(10_000)) + b"h\x00.",
    "pairs of the same": b")" + b"2\x86" * 10_000 + b".",
}  # fmt: skip


class TestObjects:
    @pytest.mark.parametrize("pickled", DEEP.values(), ids=DEEP)
    def test_what_is_deep_is_refused(self, pickled: bytes) -> None:
        content = container(b"\x80\x02" + pickled)

        def read() -> None:
            for door in (load_object, lambda content: read_plain(content, "object")):
                with pytest.raises(CorruptCheckpointError):
                    door(content)

        in_child(read, deadline_s=60)

    @pytest.mark.parametrize("file", OBJECTS, ids=lambda path: path.name)
    def test_refused_and_nothing_that_all_share_is_changed(self, file: Path) -> None:
        before = repr(np.dtype("f8")), np.dtype("f8").itemsize
        with pytest.raises(CorruptCheckpointError):
            load_object(container(file.read_bytes()))
        assert (repr(np.dtype("f8")), np.dtype("f8").itemsize) == before
        assert (signal.SIGTERM.value, signal.Signals(15)) == (15, signal.SIGTERM)

    @pytest.mark.parametrize(
        "pickled", [DEEP_KEY, WIDE_KEY, DEEP_REFERENCE, DEEP_SETS], ids=["deep", "wide", "references", "sets"]
    )
    def test_keys_that_take_long_to_hash(self, pickled: bytes) -> None:
        with pytest.raises(UnsafePickleError, match="a key of a dict or set with tuples more than 2 deep"):
            load_object(container(pickled))
        with pytest.raises(UnsafePickleError, match="a key of a dict or set with tuples more than 2 deep"):
            read_plain(container(pickled), "object")


class TestVouched:
    def test_code_runs_only_where_it_is_asked_for(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class Harmful:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "ran",)

        content = saved([Harmful()])
        with pytest.raises(UnsafePickleError):
            load_object(content)
        assert not (tmp_path / "ran").exists()
        load_object(content, ["*"])
        assert (tmp_path / "ran").exists()
        assert "without any restriction" in caplog.text
        assert LoadOptions().allowed_classes == ()

    def test_tensors_that_share_a_storage_and_have_attributes_come_back(self) -> None:
        shared = torch.arange(12.0)
        tagged = torch.nn.Parameter(torch.ones(2))
        tagged.tensor_model_parallel = True  # type: ignore[attr-defined]
        view, part, turned, tagged_again = load_object(saved([shared, shared[2:6], shared.view(3, 4).t(), tagged]))
        assert torch.equal(turned, shared.view(3, 4).t())
        assert part.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        assert type(tagged_again) is torch.nn.Parameter
        assert tagged_again.tensor_model_parallel


def nested_behind_shapes(steps: int = 300) -> bytes:
    """A key that nests a tuple in each step, which looks like a shape: a class, an int, TUPLE3, TUPLE1, REDUCE."""
    content = name("torch.distributed.checkpoint.planner.SavePlan") + b"\x940)\x940"
    inner = 1
    for step in range(steps):
        content += b"h\x00j" + struct.pack("<I", inner) + b"h\x00K\x01\x87\x94\x85\x94R\x940"
        inner = 2 + 3 * step
    return b"}" + content + b"j" + struct.pack("<I", inner) + b"Ns"


def index_of(planner_data: bytes, protocol: bytes = b"\x80\x04") -> bytes:
    """A pickled index without tensors, but for its planner data."""
    return (
        protocol + b"c" + INDEX_MODULE.encode() + b"\nMetadata\n)\x81}(" + text("state_dict_metadata") + b"}"
        + text("storage_data") + b"}" + text("planner_data") + planner_data + b"ub."
    )  # fmt: skip


class TestIndex:
    @pytest.mark.parametrize(
        "planner_data",
        [
            b"}" + b")" + b"\x85" * 300_000 + b"Ns",
            b"})" + b"\x94h\x00\x94\x86" * 3 + b"2\x86" * 60 + b"Ns",
            b"}(" + b"".join(b"\x8c\x01k\x94j%b\x85\x94" % struct.pack("<I", max(0, 2 * n - 1)) for n in range(60_000))
            + b"j" + struct.pack("<I", 2 * 60_000 - 1) + b"Nu",
            b"](" + b"(K\x01K\x02K\x03K\x04t\x94"
            + b"".join(b"(" + b"h%c" % n * 8 + b"t\x94" for n in range(20)) + b"e}h\x14Ns0",
            b"}" + b"\x8c\x01k" + b"]" * 200_000 + b"a" * 199_999 + b"s",
            b"}" + text("k") + name("torch.Size") + b"(" + b"K\x01" * 400 + b"t\x85Rs",
            b"}" + text("k") + b"](" + b"K\x01" * 50_000 + b"e\x94(" + (name("torch.Size") + b"h\x00\x85R") * 60_000 + b"ts",  # noqa: E501
            b"}" + name("builtins.slice") + b")\x94h\x00\x94\x86)N\x87RNs",
            b"}" + text("k") + name("pathlib.PosixPath") + b"]\x94"
            + b"".join(b"](h%ch%ce\x94" % (n, n) for n in range(40)) + b"\x85Rs",
            nested_behind_shapes(),
        ],
        ids=["deep", "wide", "chain", "memoized", "lists", "axes", "copies", "slices", "path", "shapes"],
    )  # fmt: skip
    def test_refused(self, planner_data: bytes) -> None:
        with pytest.raises(CorruptCheckpointError):
            parse_index(index_of(planner_data), "/ckpt")

    def test_the_path_of_a_multi_storage_client(self) -> None:
        """What its writer puts into the checkpoint id makes no difference to reading."""
        path = (
            b"\x8c\x1amultistorageclient.pathlib\x8c\x10MultiStoragePath\x93)\x81}(" + text("_path") + text("msc://p/c")
        )
        path += text("_internal_path") + name("pathlib.PurePosixPath") + text("p") + text("c") + b"\x86Rub"
        meta = b"c" + INDEX_MODULE.encode() + b"\nStorageMeta\n)\x81}(" + text("checkpoint_id") + path + b"ub"
        content = index_of(b"}")[:-3] + text("storage_meta") + meta + b"ub."
        index = parse_index(content, "/ckpt")
        assert index.storage_meta is not None
        assert index.storage_meta["checkpoint_id"] == "msc://p/c"


class TestToLookAt:
    def test_classes_are_named_and_nothing_is_called(self) -> None:
        value = read_plain(saved({"args": Namespace(a=1), "kinds": [torch.float32, signal.SIGTERM]}), "common.pt")
        assert isinstance(value["args"], Opaque)
        assert plain(value) == {"args": {"a": 1}, "kinds": ["torch.float32", "<signal.Signals 15>"]}

    def test_signals_as_python_3_10_pickles_them(self) -> None:
        content = container(b"\x80\x02" + name("signal.SIGTERM") + name("signal.SIGINT") + b"\x86.")
        assert load_object(content) == (signal.SIGTERM, signal.SIGINT)
        assert plain(read_plain(content, "common.pt")) == ["<signal.Signals 15>", "<signal.Signals 2>"]
        with pytest.raises(UnsafePickleError):
            load_object(container(b"\x80\x02" + name("signal.raise_signal") + b"."))


# --- a `.metadata` that is damaged, contradicts itself, or was made to do harm ----------------------------------------

GOLDEN = Path(__file__).parent / "golden"
SMALL = (GOLDEN / "dtensor-2.13.0" / ".metadata").read_bytes()
OURS = encode_metadata(read_index(GOLDEN / "dtensor-2.13.0"))


def refused(content: bytes) -> LoadError:
    with pytest.raises(CorruptCheckpointError) as caught:
        parse_index(content, "/ckpt")
    message = str(caught.value)
    assert message.startswith("/ckpt/.metadata: ")
    assert len(message) < 1500
    return caught.value


class TestDamaged:
    """Without a seal; `test_seal.py` has one that is sealed."""

    def test_truncated_anywhere(self) -> None:
        for length in range(len(SMALL)):
            refused(SMALL[:length])

    @pytest.mark.parametrize("mask", [0x01, 0xFF])
    def test_any_byte_changed(self, mask: int) -> None:
        """What is still accepted is a well-formed index: nothing else than our own errors ever comes out."""
        damaged = bytearray(SMALL)
        for position in range(len(SMALL)):
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
