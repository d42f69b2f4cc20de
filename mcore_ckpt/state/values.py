"""What differs between two values, to the last bit: tensors, and objects of any nesting."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import io
import reprlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.state.shards import is_sharded_object, is_sharded_tensor

# These have no parts to compare.
_SIMPLE: Final = (bool, int, str, bytes, bytearray, type(None))
_NOTHING: Final = object()

_Differences = list[tuple[str, str, str]]


def unequal(
    stored: Any,
    held: Any,
    ignored: tuple[str, ...] = (),
    *,
    exact: bool = False,
    groups: dict[str, bool] | None = None,
) -> _Differences:
    """Path, stored value and held value, of what differs in all that is stored; of a list, what differs in the first
    element that does. `exact`: what is held besides differs, too, as do 1 and True, a list and a tuple of the same
    values, or the order of parameter groups. Into `groups` goes, by path, whether a stored parameter group is held.
    """
    try:
        return _Comparison(ignored, exact, {} if groups is None else groups).differences(stored, held)
    except RecursionError:
        return [("", "a value", "one that nests too deep to be compared")]


class _Comparison:
    """The comparison of two values; a part that occurs in them more than once, or in itself, is compared once."""

    def __init__(self, ignored: tuple[str, ...], exact: bool, groups: dict[str, bool]) -> None:
        self._ignored, self._exact, self._groups = ignored, exact, groups
        self._inside = self if exact else _Comparison((), True, {})  # compares the parts of objects
        # By their ids pairs, and whether they are alike, as far as is known. (No other value has an id of a live one.)
        self._known: dict[tuple[Any, ...], tuple[Any, Any, bool]] = {}

    def differences(self, stored: Any, held: Any, where: str = "") -> _Differences:
        if type(stored) in _SIMPLE and type(stored) is type(held):
            return [] if stored == held else [(where, _shown(stored), _shown(held))]
        # What is left out of parameter groups counts elsewhere.
        in_groups = not self._exact and "['param_groups']" in where
        pair = id(stored), id(held), where.rpartition("['param_groups']")[2] if in_groups else ""
        if pair in self._known:
            is_alike = self._known[pair][2]
            return [] if is_alike else [(where, _shown(stored), _shown(held))]
        known_before = len(self._known)
        self._known[pair] = stored, held, True
        found = [(where, "a value", "one that cannot be compared")]
        try:
            found = self._found(stored, held, where)
        finally:
            if found:  # what was found alike meanwhile may be so only if these are
                since = [self._known.popitem() for _ in range(len(self._known) - known_before)]
                self._known |= {one: kept for one, kept in since if not kept[2]} | {pair: (stored, held, False)}
        return found

    def _found(self, stored: Any, held: Any, where: str) -> _Differences:
        # Megatron's `LocalNonpersistentObject` is a rank's own; shards are compared as such.
        is_own = hasattr(type(held), "unwrap") and hasattr(held, "obj")
        is_left = is_own or is_sharded_tensor(held) or is_sharded_object(held)
        if is_left and not (self._exact or isinstance(held, dict)):
            return []
        for kind, compare in ((dict, self._of_dicts), ((list, tuple), self._of_lists)):
            if isinstance(stored, kind) and isinstance(held, kind):
                if not self._exact:
                    return compare(stored, held, where)
                if type(stored) is not type(held):
                    return [(where, f"a {type(stored).__name__}", f"a {type(held).__name__}")]
                if type(stored) in (dict, list, tuple):
                    return compare(stored, held, where)
        return [] if self._is_equal(stored, held) else [(where, _shown(stored), _shown(held))]

    def _of_dicts(self, stored: Any, held: Any, where: str) -> _Differences:
        found: _Differences = []
        own_keys, matched = {key: key for key in held}, set[Any]()
        for key, value in stored.items():
            own = own_keys.get(key, _NOTHING)
            if own is _NOTHING or (self._exact and self.differences(key, own)):  # NaN, objects, or True for 1
                others = () if _is_plain(key) else held
                left = (other for other in others if other not in matched)
                own = next((other for other in left if not self.differences(key, other)), _NOTHING)
            matched.add(own)
            is_numbers = key == "params" and "['param_groups'][" in where and not self._exact  # of a rank's own
            if is_numbers or key in self._ignored:
                continue
            if own is not _NOTHING:
                found += self.differences(value, held[own], f"{where}[{_text(key)}]")
            else:
                found.append((f"{where}[{_text(key)}]", _shown(value), "nothing"))
        others = held.keys() - matched if self._exact else ()
        return [*found, *((f"{where}[{_text(key)}]", "nothing", _shown(held[key])) for key in others)]

    def _of_lists(self, stored: Any, held: Any, where: str) -> _Differences:
        if where.endswith("['param_groups']") and not self._exact:  # the order of groups is a rank's own
            return self._of_groups(stored, held, where)
        if len(stored) != len(held):
            return [(where, f"{len(stored)} values", f"{len(held)}")]
        for number, pair in enumerate(zip(stored, held, strict=True)):
            if found := self.differences(*pair, f"{where}[{number}]"):
                return found  # the first alone: those of a generator may differ in hundreds of numbers
        return []

    def _of_groups(self, stored: Sequence[Any], held: Sequence[Any], where: str) -> _Differences:
        """What differs between parameter groups, in any order; a stage of the pipeline may have fewer."""
        left, compared, differing = dict(enumerate(stored)), set[int](), list[tuple[str, str, str]]()
        for number, group in enumerate(held):
            found = {n: self.differences(one, group, f"{where}[{number}]") for n, one in left.items()}
            # Where several fit, the one without other settings: additional settings are no difference.
            nearest = min(found, key=lambda n: (len(found[n]), len(set(left[n]) ^ set(group))), default=None)
            if nearest is None:
                differing.append((f"{where}[{number}]", "nothing", _shown(group)))
                continue
            differing += found[nearest]
            compared.add(nearest)
            if not found[nearest]:
                del left[nearest]
        self._groups.update({f"{where}[{n}]": n in compared for n in range(len(stored))})
        return differing

    def _is_equal(self, stored: Any, held: Any) -> bool:
        # Trackers that are safe in CUDA graphs have generators where others have their states.
        stored, held = (one.get_state() if isinstance(one, torch.Generator) else one for one in (stored, held))
        is_alike = type(stored) is type(held)
        if self._exact and not is_alike:
            return False
        if isinstance(stored, torch.Tensor) and isinstance(held, torch.Tensor):
            if not (_has_bytes(stored) and _has_bytes(held)):
                return self._is_same(*map(_parts_of_tensor, (stored, held)))
            is_comparable = stored.dtype == held.dtype and stored.shape == held.shape
            return is_comparable and first_difference(stored, held) is None
        plain = [stored, held] if is_alike else [_plain(one) for one in (stored, held)]
        if plain[0] is not stored or plain[1] is not held:  # a number may be held as a tensor, but not rounded
            return not self.differences(*plain)
        if type(stored) is np.ndarray and type(held) is np.ndarray:
            pair = stored, held
            stored, held = (one if one.dtype.isnative else one.astype(one.dtype.newbyteorder("=")) for one in pair)
            if stored.dtype != held.dtype or stored.shape != held.shape:
                return False
            if stored.dtype.hasobject or stored.dtype.kind == "T":
                return self._is_same(stored.tolist(), held.tolist())
            return bool(stored.tobytes() == held.tobytes())
        if isinstance(stored, np.ma.MaskedArray) and is_alike:  # to pickle one gives it a fill value
            return self._is_same(*([one.data, np.ma.getmaskarray(one)] for one in (stored, held)))
        if isinstance(stored, io.BytesIO) and isinstance(held, io.BytesIO):
            return stored.getvalue() == held.getvalue()
        if _is_inexact(stored) and _is_inexact(held):  # 0.0 and -0.0 differ, NaN and NaN do not
            return repr(stored) == repr(held) if is_alike else repr(complex(stored)) == repr(complex(held))
        if isinstance(stored, (set, frozenset)) and is_alike:
            return self._is_same_set(stored, held)
        with contextlib.suppress(Exception):  # of third-party classes, whose `==` may leave parts out
            if is_alike:
                return self._is_same(*map(_parts, (stored, held)))
        with contextlib.suppress(Exception):
            if not self._exact and stored == held:
                return True
        return stored is held

    def _is_same(self, stored: Any, held: Any) -> bool:
        return not self._inside.differences(stored, held)

    def _is_same_set(self, stored: Any, held: Any) -> bool:
        left = sorted(held, key=_text)  # (most have an order by it; others are looked for)
        for one in sorted(stored, key=_text, reverse=True):
            at = next((n for n in reversed(range(len(left))) if not self.differences(one, left[n])), None)
            if at is None:
                return False
            del left[at]
        return not left


def _is_inexact(value: Any) -> bool:
    return type(value) in (float, complex) or isinstance(value, np.inexact)


def _is_plain(key: Any) -> bool:
    """Whether a key is equal to all keys that are like it."""
    return type(key) in _SIMPLE or (type(key) is tuple and all(map(_is_plain, key)))


def _plain(value: Any) -> Any:
    """The numbers of a tensor or an array as Python's, which compare exactly; all else as it is."""
    with contextlib.suppress(NotImplementedError):  # torch cannot show some dtypes
        if isinstance(value, (np.ndarray, np.generic)) or (isinstance(value, torch.Tensor) and _has_bytes(value)):
            return value.tolist()
    return value


def _parts(value: Any) -> Any:
    """What pickle makes a value of. Raises `TypeError` for functions and classes, which have a name only."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return [getattr(value, "__module__", None), reduced]
    function, arguments, attributes, items, pairs = (*reduced, None, None, None)[:5]
    is_ordered = isinstance(value, collections.OrderedDict)
    return [function, arguments, attributes, list(items or ()), list(pairs or ()) if is_ordered else dict(pairs or ())]


def _parts_of_tensor(tensor: torch.Tensor) -> Any:
    """Parts of a tensor without strided memory (sparse, nested, quantized, meta device), or on several ranks."""
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if (local := getattr(tensor, "to_local", None)) is not None:
        return [local(), getattr(tensor, "placements", None), tuple(tensor.shape)]
    return _parts(tensor.detach())


def _shown(value: Any) -> str:
    content: Any = value
    if isinstance(value, torch.Tensor) and _has_bytes(value):
        content = _elements(value).view(torch.uint8).numpy()
    if isinstance(content, np.ndarray):
        return f"{value.dtype}{list(value.shape)} with CRC-32 {crc32(content.tobytes()):08x}"
    text = reprlib.repr(value) if isinstance(value, (dict, list, tuple, set)) else _text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  (of third-party classes)
        return f"a {type(value).__name__}"


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> tuple[int, str, str, str] | None:
    """The first element in which two tensors alike in form differ by a bit, both there, and how many more do."""
    pair = [_elements(one) for one in (expected, got)]
    first, second = (one.view(torch.uint8).view(-1, max(1, one.element_size())) for one in pair)
    if torch.equal(first, second):
        return None
    differing = (first != second).any(1).nonzero().view(-1)
    number = int(differing[0])
    more = f", and {len(differing) - 1} more elements differ" if len(differing) > 1 else ""
    try:
        expected_text, got_text = (repr(one[number].item()) for one in pair)
    except NotImplementedError:  # of dtypes that torch cannot show
        expected_text, got_text = (bytes(one[number].tolist()).hex() for one in (first, second))
    return number, expected_text, got_text, more


def _has_bytes(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    return is_strided and not hasattr(tensor, "to_local")


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,))  # one element is contiguous in any stride
