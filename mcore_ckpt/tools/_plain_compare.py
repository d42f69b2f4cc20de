"""Are two plain values the same? Values as `read_plain` gives them: containers, numbers, stand-ins, storages.

Nothing is left out: tensors are compared element by element, bit for bit, wherever their elements lie; arrays, dates
and all other objects by what they are made from. Two objects that are made from the same are the same, whatever their
class. Without recursion, since values may lie in one another as deep as a file has bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mcore_ckpt.format.dtypes import DTYPE_OF_STORAGE, DTYPES
from mcore_ckpt.format.safe_pickle import Opaque, StoredStorage

Verdict = Literal["same", "different", "unknown"]

SIMPLE_KEYS: Final = frozenset((str, int, float, bool, bytes, type(None)))
"""Types of keys and members of sets that are told apart at once."""

# A file may refer to one value from many places, so that there are more pairs to look at than either has values.
_MAX_PAIRS: Final = 10_000_000
_BATCH_ELEMENTS: Final = 1 << 20


def compare(a: Any, b: Any) -> Verdict:
    """Whether two values are the same; `"unknown"` where that cannot be told. The order of a dict's keys is no matter,
    nor are the device and the strides of a tensor. A NaN is the same as itself.
    """
    known = True
    compared: set[tuple[int, int, bool]] = set()
    # With each pair, whether the two values differ if the pair does: where keys are matched by their order, they may
    # be the same in another one.
    waiting: list[tuple[Any, Any, bool]] = [(a, b, True)]
    count = 0
    while waiting:
        left, right, decides = waiting.pop()
        pair = id(left), id(right), decides  # of what lives as long as the two values
        if left is right or pair in compared:
            continue
        parts, in_order = _parts(left, right)
        if parts == "different" and decides:
            return "different"
        if isinstance(parts, str):
            known = False
            continue
        if parts:
            compared.add(pair)
            count += len(parts)
            if count > _MAX_PAIRS:
                return "unknown"
            waiting += [(x, y, decides and not in_order) for x, y in parts]
    return "same" if known else "unknown"


_Parts = list[tuple[Any, Any]] | Literal["different", "unknown"]


def _parts(a: Any, b: Any) -> tuple[_Parts, bool]:
    """The pairs on which it depends whether two values are the same, none if they are; and whether only their order
    has made them pairs.
    """
    if isinstance(a, dict) and type(a) is type(b) and len(a) == len(b):
        if not all(type(key) in SIMPLE_KEYS for key in (*a, *b)):
            # To find out which of these keys are equal may take for ever.
            return [pair for items in zip(a.items(), b.items(), strict=True) for pair in zip(*items, strict=True)], True
        # 1, 1.0 and True are one key to a dict, and are not the same here.
        others = {(type(key), key): value for key, value in b.items()}
        if any((type(key), key) not in others for key in a):
            return "different", False
        return [(value, others[type(key), key]) for key, value in a.items()], False
    return _pairs(a, b), False


def _pairs(a: Any, b: Any) -> _Parts:
    if isinstance(a, Opaque) and isinstance(b, Opaque):
        if a.name != b.name or len(a.arguments) != len(b.arguments):
            return "different"
        rest = [*zip(a.arguments, b.arguments, strict=True), (a.state, b.state)]
        if a.name.startswith("torch._utils._rebuild_tensor_v") and len(a.arguments) >= 4:
            verdict = _same_elements(a, b)
            return rest[4:] if verdict == "same" else verdict
        return rest
    if isinstance(a, type) and isinstance(b, type):
        return [] if _name_of(a) == _name_of(b) else "different"
    if type(a) is not type(b):
        return "different"
    if isinstance(a, list | tuple):
        return [*zip(a, b, strict=True)] if len(a) == len(b) else "different"
    if isinstance(a, StoredStorage):
        same = (a.kind, a.content) == (b.kind, b.content)
    elif isinstance(a, float):
        same = a == b or (math.isnan(a) and math.isnan(b))
    elif isinstance(a, set | frozenset):
        if len(a) == len(b) and not all(type(member) in SIMPLE_KEYS for member in (*a, *b)):
            return "unknown"
        same = len(a) == len(b) and {(type(member), member) for member in a} == {(type(member), member) for member in b}
    elif isinstance(a, str | int | bytes | bytearray | complex | dict):
        same = not isinstance(a, dict) and a == b  # (two dicts get here if their lengths differ)
    else:
        return "unknown"
    return [] if same else "different"


def _name_of(kind: type) -> str:
    return kind.name if issubclass(kind, Opaque) else kind.__name__


def _same_elements(a: Opaque, b: Opaque) -> Verdict:
    """Whether two tensors, made from storage, offset, sizes and strides in elements, have the same bits."""
    places = [_strided(tensor) for tensor in (a, b)]
    storages = [tensor.arguments[0] for tensor in (a, b)]
    if None in places or not all(isinstance(storage, StoredStorage) for storage in storages):
        return "unknown"
    place_a, place_b = places
    assert place_a is not None
    assert place_b is not None
    if place_a.sizes != place_b.sizes or storages[0].kind != storages[1].kind:
        return "different"
    if place_a == place_b and storages[0].content == storages[1].content:
        return "same"
    left, right = _elements(a, place_a), _elements(b, place_b)
    if left is None or right is None:
        return "unknown"
    batches = zip(_batches(left), _batches(right), strict=True)
    return "same" if all(x.tobytes() == y.tobytes() for x, y in batches) else "different"


class _Strided(NamedTuple):
    """Where a tensor's elements lie in its storage, in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _strided(tensor: Opaque) -> _Strided | None:
    """None if that cannot be told."""
    _, offset, sizes, strides = tensor.arguments[:4]
    if not all(type(each) is tuple and all(type(n) is int and n >= 0 for n in each) for each in (sizes, strides)):
        return None
    if type(offset) is not int or offset < 0 or len(sizes) != len(strides):
        return None
    return _Strided(offset, sizes, strides)


def _elements(tensor: Opaque, view: _Strided) -> np.ndarray[Any, Any] | None:
    """The elements where they lie; None if that cannot be told, or there are more of them than the storage holds."""
    storage: StoredStorage = tensor.arguments[0]
    # An untyped storage comes with a dtype.
    named = tensor.arguments[6] if len(tensor.arguments) > 6 and storage.kind.endswith("UntypedStorage") else None
    kind = _name_of(named) if isinstance(named, type) else storage.kind
    name = kind.rpartition(".")[2]
    entry = DTYPES.get(DTYPE_OF_STORAGE.get(name, name))
    if entry is None or math.prod(view.sizes) * entry.element_bytes > len(storage.content):
        return None
    width = entry.element_bytes
    try:
        return np.ndarray(
            view.sizes,
            np.dtype((np.void, width)),
            buffer=storage.content,
            offset=view.offset * width,
            strides=tuple(stride * width for stride in view.strides),
        )
    except (ValueError, TypeError, OverflowError):
        return None


def _batches(elements: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """All elements in C order, some at a time."""
    flat = elements.reshape(-1)  # a copy, unless they lie so
    for start in range(0, len(flat), _BATCH_ELEMENTS):
        yield flat[start : start + _BATCH_ELEMENTS]
