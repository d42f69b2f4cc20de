"""Stored objects: what checkpoints really hold loads, and nothing else does."""

import argparse
import collections
import datetime
import io
import pathlib
import signal
import sys
import types
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, UnsafePickleError
from mcore_ckpt.format.safe_pickle import load_object, refusals
from mcore_ckpt.format.state_file import read_plain
from tests.support.stored_layouts import rewritten
from tests.support.stored_layouts import stock_item as saved

pytestmark = pytest.mark.quick


class Plain:
    """A user's own class, which a checkpoint may hold if the user says so."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True], "b": (b"bytes", "text")},
        ["cposix\nsystem\nq", {"cos\n": 1}],  # words that look like names
        argparse.Namespace(lr=1e-4, path=pathlib.Path("/data"), signal=signal.SIGTERM, dtype=torch.bfloat16),
        types.SimpleNamespace(a=1),
        collections.OrderedDict(a=1, b=2),
        *({1, 2, 3}, frozenset({1}), slice(1, 2), range(3), complex(1, 2), b"", bytearray()),
        *(torch.Size([1, 2]), torch.float8_e4m3fn, torch.device("cpu")),
        datetime.timedelta(seconds=3),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        *(np.float64(1.5), np.int32(7), np.bool_(True), np.bytes_(b"")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_back(value: object) -> None:
    loaded = load_object(saved([value]))
    assert loaded == [value]
    assert type(loaded[0]) is type(value)
    assert refusals(saved([value]), "it") == {}


@pytest.mark.parametrize("value", [Plain, Plain(1), {"a": [torch.ones(3), Plain(1)]}, ["cposix\nsystem\nq", Plain]])
def test_what_a_load_will_refuse_is_found_before(value: object) -> None:
    (name,) = refusals(saved([value]), "it")
    with pytest.raises(UnsafePickleError, match=name):
        load_object(saved([value]))
    load_object(saved([value]), [name])


class OwnTensor(torch.Tensor):
    """A user's own kind of tensor."""


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, "a"], dtype=object),
        np.zeros(1, dtype=[("a", [("b", "i4")])]),  # records in records
        *(1 << 2039, {(((1,),),): 1}, torch.optim.SGD([torch.ones(1)])),
        torch.ones(2).as_subclass(OwnTensor),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_load_refuses_whatever_class_is_allowed_is_found_before(value: object) -> None:
    content = saved([value])
    found = refusals(content, "it")
    assert "*" in found
    with pytest.raises(UnsafePickleError) as refused:
        load_object(content, [*found][:-1])
    assert "damaged" not in str(refused.value)
    load_object(content, found)


def test_tensors_that_loads_take_are_not_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.shared = True  # type: ignore[attr-defined]
    tensors = [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(3, 2).t(), torch.ones(2).to(torch.float8_e5m2)]
    assert refusals(saved([parameter, torch.nn.Buffer(torch.ones(1)), *tensors]), "it") == {}
    load_object(saved([parameter, *tensors]))


def test_named_tuples_of_megatron_come_back_and_nest_no_deeper_than_keys_may() -> None:
    machine = pytest.importorskip("megatron.core.rerun_state_machine")
    call = machine.Call(machine.Caller("loss", 0), 2)
    assert load_object(saved([call])) == [call]
    with pytest.raises(UnsafePickleError, match="more than 2 deep"):
        load_object(saved([machine.Call(machine.Call(call, 1), 0)]))


def test_classes_of_optimizers_come_back_and_are_not_called() -> None:
    """As `--optimizer-cpu-offload` keeps them in its groups."""
    classes = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]
    assert load_object(saved({"classes": classes})) == {"classes": classes}
    with pytest.raises(UnsafePickleError):
        load_object(saved([torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)]))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "u4", "i8", "?", "c8", "U3", "S3", "M8[s]", ">f4"])
def test_numpy_arrays_of_every_kind_come_back(dtype: str) -> None:
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.zeros((0, 3), dtype)):
        loaded = load_object(saved({"array": array}))["array"]
        assert loaded.dtype == array.dtype.newbyteorder("=")  # numpy itself swaps to the machine's order
        assert loaded.shape == array.shape
        assert (loaded == array).all()


@pytest.mark.parametrize("fields", [[("a", ">i8"), ("text", "U3"), ("b", "f4", (2, 3))], [("a", "i1"), ("b", "f8")]])
def test_records_of_numpy_come_back(fields: Any) -> None:
    array = np.arange(2).astype(np.dtype(fields, align=True))
    loaded, record, raw = load_object(saved([array, array[1], np.void(b"abc")]))
    assert (loaded == array).all()
    assert loaded.dtype.fields == array.dtype.newbyteorder("=").fields
    assert record == array[1]
    assert raw.tobytes() == b"abc"
    record[fields[0][0]] = 5  # its own memory, which can be written
    overlapping = np.dtype({"names": ["a", "b"], "formats": [">i4", "<i2"], "offsets": [0, 2]})
    with pytest.raises(UnsafePickleError, match="fields that do not overlap"):
        load_object(saved(np.zeros(2, overlapping)))


def test_the_state_dict_of_a_module_comes_back() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3)).state_dict()
    loaded = load_object(saved(state))
    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(loaded) == list(state)
    torch.nn.Sequential(torch.nn.Linear(2, 3)).load_state_dict(loaded)
    state.note = "x"  # type: ignore[attr-defined]
    with pytest.raises((UnsafePickleError, CorruptCheckpointError), match="attributes of an OrderedDict"):
        load_object(saved(state))


class Meter:
    """A class of the user's own, whose code takes no state of an earlier version."""

    def __reduce__(self) -> Any:
        return Meter, (), {"value": 1}

    def __setstate__(self, state: Any) -> None:
        raise KeyError("window")


METER = f"{__name__}.Meter"


@pytest.mark.parametrize("allowed", [[METER], ["*"]], ids=str)
def test_what_allowed_code_raises_is_no_damage(allowed: list[str]) -> None:
    content = saved([Meter()])
    with pytest.raises(
        LoadError, match=r"cannot rebuild .*KeyError: 'window'.*Nothing shows that the file is d"
    ) as found:
        load_object(content, allowed)
    assert type(found.value) is LoadError
    with pytest.raises(CorruptCheckpointError):
        load_object(content.replace(b"value", b"valve"), allowed)


def _legacy(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


class TestUnusual:
    """What no save of Megatron-Core, DCP or this package writes: refused, with a way out."""

    @pytest.mark.parametrize(
        "content",
        [lambda value: rewritten(saved(value), lambda _, record: record, zipfile.ZIP_DEFLATED), _legacy],
        ids=["compressed", "from before zip archives"],
    )
    def test_archives(self, content: Callable[[object], bytes]) -> None:
        for read in (load_object, lambda item: read_plain(item, "x")):
            with pytest.raises(CorruptCheckpointError, match="load it with torch and save it again") as raised:
                read(content({"a": [0] * 1000}))
            assert content is not _legacy or read is load_object or "damage" not in str(raised.value)

    @pytest.mark.filterwarnings("ignore:.*quantiz")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize(
        "tensor",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.quint8),
            lambda: torch.empty(3, device="meta"),
        ],
        ids=["sparse", "quantized", "meta"],
    )
    def test_tensors(self, tensor: Callable[[], torch.Tensor]) -> None:
        content = saved([tensor()])
        with pytest.raises(UnsafePickleError, match=r"allowed_classes=\('\*',\)"):
            load_object(content)
        assert load_object(content, ["*"])[0].shape == tensor().shape


NUMPY = [b"numpy._core.multiarray", b"numpy.core.multiarray"]
PATHS = [b"cpathlib._local\n", b"cpathlib\n"]


@pytest.mark.parametrize(
    ("value", "modules", "ours"),
    [(np.float64(3.0), NUMPY, np.__version__ < "2"), (pathlib.Path("b"), PATHS, sys.version_info[:2] != (3, 13))],
    ids=["of numpy 1 and 2", "of Python 3.13 and all others"],
)
def test_what_others_call_otherwise_comes_back(value: Any, modules: list[bytes], ours: int) -> None:
    """Either file is read under either."""
    assert load_object(_renamed(saved([value]), {modules[ours]: modules[not ours]})) == [value]


def _renamed(content: bytes, names: dict[bytes, bytes]) -> bytes:
    """The archive with bytes replaced in its pickle."""

    def change(name: str, record: bytes) -> bytes:
        for before, after in names.items() if name == "data.pkl" else ():
            assert before in record
            record = record.replace(before, after)
        return record

    return rewritten(content, change)
