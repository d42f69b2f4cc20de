"""What counts as a difference between what is stored and what a job holds."""

import argparse
import cmath
import collections
import functools
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.state.values import unequal

pytestmark = pytest.mark.quick


class _CannotCompare:
    def __eq__(self, other: object) -> bool:
        raise AttributeError

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AttributeError


class _Slots:
    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own


class _Number(int):
    own: Any = None


class _Seconds(float):
    def __repr__(self) -> str:
        return "about a second"


@dataclass
class _Fields:
    own: Any = field(compare=False)


def _numbered(own: Any) -> _Number:
    number = _Number(3)
    number.own = own
    return number


class _Named(dict[str, Any]):
    own: Any = None


def _named(own: Any) -> _Named:
    values = _Named(a=1)
    values.own = own
    return values


def _in_itself(own: Any) -> Any:
    value = SimpleNamespace(own=own)
    value.value = [value, {"value": value}]
    plain: dict[str, Any] = {"own": own}
    plain["plain"] = [plain]
    return [value, [value], plain]


def _shared(own: Any, depth: int = 30) -> Any:
    value: Any = [own]
    plain: Any = [own]
    for _ in range(depth):
        value, plain = _Slots([value, value]), [plain, plain]
    return [value, plain]


def _quantized(own: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        return torch.quantize_per_tensor(torch.ones(1), 0.5 + own, 0, torch.qint8)


# Values that are alike where `own` is, though many of them say so in no comparison of theirs.
KINDS: dict[str, Callable[[Any], Any]] = {
    "generator": lambda own: np.random.default_rng(own),
    "slots": lambda own: _Slots(torch.full((2,), own)),
    "attributes": lambda own: SimpleNamespace(own=torch.full((2,), own)),
    "fields": lambda own: _Fields(torch.full((2,), own)),
    "subclass": _numbered,
    "set": lambda own: {float("nan"), own},
    "big endian": lambda own: np.full(3, own, ">i4"),
    "objects": lambda own: np.array([own, "a", torch.ones(1)], object),
    "function": lambda own: (math.sqrt, cmath.sqrt)[own],
    "partial": lambda own: functools.partial(sum, own),
    "deque": lambda own: collections.deque([torch.full((2,), own)]),
    "attribute of a dict": lambda own: _Slots(_named(own)),
    "order": lambda own: _Slots(collections.OrderedDict([("a", 1), ("b", 1)][:: (-1, 1)[own]])),
    "masked": lambda own: np.ma.masked_array([1, 2], mask=[own, 0]),
    "key": lambda own: _Slots({(1, True)[own]: 2}),
    "keys": lambda own: _Slots({float("nan"): own, _Slots(own): 1, _Slots(own): 1, (own, True): 2}),
    "numbers of its own": lambda own: _Seconds(1.01 + own / 100),
    "text": lambda own: np.array(["a" * own], getattr(np.dtypes, "StringDType", lambda: "U1")()),
    "set of objects": lambda own: {_Slots(own), _Slots(2), _Slots(3)},
    "complex": lambda own: complex(float("nan"), own),
    "in itself": _in_itself,
    "shared": _shared,
    "sparse": lambda own: torch.tensor([0.0, 1.0 + own]).to_sparse(),
    "nested": lambda own: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), float(own))]),
    "quantized": _quantized,
    "meta": lambda own: torch.empty(2 + own, device="meta"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_classes_are_compared_by_what_is_pickled_of_them(kind: str) -> None:
    stored = pickle.loads(pickle.dumps(KINDS[kind](1)))
    assert not any(unequal(stored, KINDS[kind](1)))
    assert any(unequal(stored, KINDS[kind](0)))


def _groups(*rates: int) -> dict[str, Any]:
    return {"param_groups": [{"lr": rate, "params": [rate]} for rate in rates]}


@pytest.mark.parametrize(
    ("stored", "held", "where"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "['a'][1]"),
        ({"params": {"x": 1}}, {"params": {"x": 2}}, "['params']['x']"),
        (_groups(1, 2), {"param_groups": [{"lr": 2, "params": [7]}, {"lr": 1, "params": [8]}]}, None),
        (_groups(1, 2), _groups(1, 1), "['param_groups'][1]['lr']"),
        (
            *({"param_groups": [group], "b": group} for group in ({"params": [0]}, {"params": [1]})),
            "['b']['params'][0]",
        ),
        (_groups(1), _groups(1, 1), "['param_groups'][1]"),
        (_groups(1, 2), _groups(2), None),  # of another pipeline stage
        ({"param_groups": [{"a": 1}, {"a": 1, "b": 2}]}, {"param_groups": [{"a": 1, "b": 2}, {"a": 1}]}, None),
        (torch.arange(6.0).view(2, 3)[1:, 2], torch.tensor([5.0]), None),  # one element is contiguous in any stride
        (torch.arange(6.0).view(2, 3)[1:, 2], torch.tensor([4.0]), ""),
        ({"a": torch.tensor(2.0**24)}, {"a": 2**24}, None),
        ({"a": torch.tensor(2.0**24)}, {"a": 2**24 + 1}, "['a']"),  # which it is, rounded
        ({"a": np.float16(2048)}, {"a": 2049}, "['a']"),
        ({"a": 0.0}, {"a": -0.0}, "['a']"),
        (complex(0.0, 0.0), complex(0.0, -0.0), ""),
        (np.float32(0.0), np.float32(-0.0), ""),
        (argparse.Namespace(replica_id=1), argparse.Namespace(replica_id=2), ""),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        (torch.zeros(2), -torch.zeros(2), ""),
        (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj(), None),
        (
            argparse.Namespace(a=torch.ones(3), b=float("nan")),
            argparse.Namespace(a=torch.ones(3), b=float("nan")),
            None,
        ),
        (argparse.Namespace(a=1), argparse.Namespace(a=1, b=2), ""),
        (_CannotCompare(), _CannotCompare(), ""),
    ],
)
def test_differences_have_their_place(stored: Any, held: Any, where: str | None) -> None:
    found = [place for place, _, _ in unequal(stored, held)]
    assert found == ([] if where is None else [where])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((1, True), ([1], (1,)), (b"1", bytearray(b"1")), (np.float32(1), np.float64(1))),
        ({"b": 1}, {"b": 1, "c": 2}),
        ({"b": 1}, collections.OrderedDict(b=1)),
        (_groups(1, 2), _groups(2)),
        (_groups(1, 2), {"param_groups": _groups(1, 2)["param_groups"][::-1]}),
        ({"param_groups": [{"params": [1]}]}, {"param_groups": [{"params": [2]}]}),
        ({1}, {True}),
    ],
)
def test_types_and_what_only_one_has_differ_where_all_is_state(first: Any, second: Any) -> None:
    assert not any(unequal({"a": first}, {"a": second}))
    assert any(unequal({"a": first}, {"a": second}, exact=True))
