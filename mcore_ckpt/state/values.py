"""What differs between two values, to the last bit: tensors, and objects of any nesting."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.state.shards import is_sharded_object, is_sharded_tensor

# Of these, no parts are compared.
_SIMPLE: Final = (bool, int, float, complex, str, bytes, bytearray, range, slice, type(None))
_INEXACT: Final = (float, complex, np.inexact)


def unequal(
    stored: Any,
    held: Any,
    ignored: tuple[str, ...] = (),
    where: str = "",
    *,
    exact: bool = False,
    groups: dict[str, bool] | None = None,
) -> Iterator[tuple[str, str, str]]:
    """Path, stored value and held value, of what differs in all that is stored. `exact`: what is held besides differs,
    too, as do 1 and True, a list and a tuple of the same values, or the order of parameter groups. Into `groups` goes,
    by path, whether a stored parameter group is held.
    """
    inside = functools.partial(unequal, ignored=ignored, exact=exact, groups=groups)
    # Megatron's `LocalNonpersistentObject` is a rank's own; shards are compared as such.
    is_own = hasattr(type(held), "unwrap") and hasattr(held, "obj")
    if not isinstance(held, dict) and (is_own or is_sharded_tensor(held) or is_sharded_object(held)):
        return
    if isinstance(stored, dict) and isinstance(held, dict):
        if exact and type(stored) is not type(held):
            yield where, f"a {type(stored).__name__}", f"a {type(held).__name__}"
        for key, value in stored.items():
            is_numbers = key == "params" and "['param_groups'][" in where and not exact  # numbers of a rank's own
            if is_numbers or key in ignored:
                continue
            if key in held:
                yield from inside(value, held[key], where=f"{where}[{key!r}]")
            else:
                yield f"{where}[{key!r}]", _shown(value), "nothing"
        for key in held.keys() - stored.keys() if exact else ():
            yield f"{where}[{key!r}]", "nothing", _shown(held[key])
    elif isinstance(stored, (list, tuple)) and isinstance(held, (list, tuple)):
        if exact and type(stored) is not type(held):
            yield where, f"a {type(stored).__name__}", f"a {type(held).__name__}"
        elif where.endswith("['param_groups']") and not exact:  # the order of groups is a rank's own
            yield from _unequal_groups(stored, held, inside, where, {} if groups is None else groups)
        elif len(stored) != len(held):
            yield where, f"{len(stored)} values", f"{len(held)}"
        else:
            pairs = enumerate(zip(stored, held, strict=True))
            found = (list(inside(value, own, where=f"{where}[{n}]")) for n, (value, own) in pairs)
            yield from next(filter(None, found), ())  # those of a generator may differ in hundreds of numbers
    elif not _is_equal(stored, held, exact):
        yield where, _shown(stored), _shown(held)


def _unequal_groups(
    stored: Sequence[Any],
    held: Sequence[Any],
    compare: Callable[..., Iterator[tuple[str, str, str]]],
    where: str,
    groups: dict[str, bool],
) -> Iterator[tuple[str, str, str]]:
    """What differs between groups, each compared with one of its own. A stage of the pipeline may have fewer than are
    stored.
    """
    left, compared = dict(enumerate(stored)), set[int]()
    for number, group in enumerate(held):
        found = {n: list(compare(one, group, where=f"{where}[{number}]")) for n, one in left.items()}
        # Of several that fit, the one that has no other settings: what is held besides is no difference.
        nearest = min(found, key=lambda n: (len(found[n]), len(set(left[n]) ^ set(group))), default=None)
        if nearest is None:
            yield f"{where}[{number}]", "nothing", _shown(group)
            continue
        yield from found[nearest]
        compared.add(nearest)
        if not found[nearest]:
            del left[nearest]
    groups.update({f"{where}[{n}]": n in compared for n in range(len(stored))})


def _is_equal(stored: Any, held: Any, exact: bool) -> bool:
    # Trackers that are safe in CUDA graphs have generators where others have their states.
    stored, held = (one.get_state() if isinstance(one, torch.Generator) else one for one in (stored, held))
    if exact and type(stored) is not type(held):
        return False
    if isinstance(stored, torch.Tensor) and isinstance(held, torch.Tensor):
        if _has_bytes(stored) and _has_bytes(held):
            is_comparable = stored.dtype == held.dtype and stored.shape == held.shape
            return is_comparable and first_difference(stored, held) is None
        with contextlib.suppress(Exception):  # (there is no such comparison of most)
            return torch.equal(stored, held)
        return False
    if isinstance(stored, np.ndarray) and isinstance(held, np.ndarray):
        stored, held = (one.astype(one.dtype.newbyteorder("="), copy=False) for one in (stored, held))  # as pickle does
        if stored.dtype != held.dtype or stored.shape != held.shape:
            return False
        if stored.dtype.hasobject:
            return _is_same(stored.tolist(), held.tolist())
        return bool(stored.tobytes() == held.tobytes())
    if isinstance(stored, io.BytesIO) and isinstance(held, io.BytesIO):
        return stored.getvalue() == held.getvalue()
    is_alike = type(stored) is type(held)
    has_parts = is_alike and type(stored) not in _SIMPLE
    with contextlib.suppress(Exception):  # of third-party classes
        if stored == held and isinstance(stored, _INEXACT) and isinstance(held, _INEXACT):
            return repr(complex(stored)) == repr(complex(held))  # 0.0 and -0.0
        if stored == held and not (has_parts and (exact or "__eq__" not in vars(type(stored)))):
            return True
        if stored != stored and held != held:  # NaN
            return True
    if is_alike and isinstance(stored, (set, frozenset)):
        return _is_same(sorted(stored, key=repr), sorted(held, key=repr))
    if has_parts:
        with contextlib.suppress(Exception):
            return _is_same(*map(_parts, (stored, held)))
    return stored is held


def _is_same(stored: Any, held: Any) -> bool:
    return not any(unequal(stored, held, exact=True))


def _parts(value: Any) -> Any:
    """What pickle makes a value of. Raises `TypeError` for functions and classes, which have a name only."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return reduced
    function, arguments, attributes, items, pairs = (*reduced, None, None, None)[:5]
    return [function, arguments, attributes, list(items or ()), list(pairs or ())]


def _shown(value: Any) -> str:
    content: Any = value
    if isinstance(value, torch.Tensor) and _has_bytes(value):
        content = _elements(value).view(torch.uint8).numpy()
    if isinstance(content, np.ndarray):
        return f"{value.dtype}{list(value.shape)} with CRC-32 {crc32(content.tobytes()):08x}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> tuple[int, str, str, str] | None:
    """Number of the first element in which two tensors of one dtype and number of elements differ by a bit, both there,
    and how many more do.
    """
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
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,))  # one element is contiguous in any stride
