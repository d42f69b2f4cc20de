"""Pickles that were made to do harm: each is refused with an error of ours, in bounded time and memory.

Each of these crashed the process, filled the memory, hung, or changed what all share, when `pickle` or torch read it.
"""

from __future__ import annotations

import io
import signal
import struct
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.core.errors import CorruptCheckpointError, UnsafePickleError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.format.metadata_read import parse_index
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.format.state_file import read_plain
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.tools.keys import plain
from tests.support.forked import in_child
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
