"""What differs between two values, to the last bit: tensors, and objects of any nesting."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mcore_ckpt.core.crc import crc32


def unequal(stored: Any, held: Any, ignored: tuple[str, ...] = (), where: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, stored value and held value, of what differs in all that is stored."""
    if hasattr(held, "unwrap") or hasattr(held, "replica_id"):  # what is local to the rank, or compared as a shard
        return
    if isinstance(stored, dict) and isinstance(held, dict):
        for key, value in stored.items():
            if key in ignored or key == "params":  # (numbers of a rank's own parameters)
                continue
            if key in held:
                yield from unequal(value, held[key], ignored, f"{where}[{key!r}]")
            else:
                yield f"{where}[{key!r}]", _shown(value), "nothing"
    elif isinstance(stored, (list, tuple)) and isinstance(held, (list, tuple)):
        if where.endswith("['param_groups']"):  # the order of groups is a rank's own
            yield from _unequal_groups(stored, held, where, ignored)
        elif len(stored) != len(held):
            yield where, f"{len(stored)} values", f"{len(held)}"
        else:
            pairs = enumerate(zip(stored, held, strict=True))
            found = (list(unequal(value, own, ignored, f"{where}[{number}]")) for number, (value, own) in pairs)
            yield from next(filter(None, found), ())  # those of a generator may differ in hundreds of numbers
    elif not _is_equal(stored, held):
        yield where, _shown(stored), _shown(held)


def _unequal_groups(stored: Any, held: Any, where: str, ignored: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for number, group in enumerate(held):
        found = [list(unequal(one, group, ignored, f"{where}[{number}]")) for one in stored]
        if found and all(found):
            yield from min(found, key=len)


def _is_equal(stored: Any, held: Any) -> bool:
    # Trackers that are safe in CUDA graphs have generators where others have their states.
    stored, held = (one.get_state() if isinstance(one, torch.Generator) else one for one in (stored, held))
    if isinstance(stored, torch.Tensor) and isinstance(held, torch.Tensor):
        alike = stored.dtype == held.dtype and stored.shape == held.shape
        return alike and first_difference(stored, held) is None
    if isinstance(stored, np.ndarray) and isinstance(held, np.ndarray):
        return stored.dtype == held.dtype and stored.shape == held.shape and stored.tobytes() == held.tobytes()
    if isinstance(stored, io.BytesIO) and isinstance(held, io.BytesIO):
        return stored.getvalue() == held.getvalue()
    if type(stored) is type(held) and "__eq__" not in vars(type(stored)) and hasattr(stored, "__dict__"):
        return not any(unequal(vars(stored), vars(held)))
    try:
        return bool(stored == held) or (stored != stored and held != held)  # (NaN)
    except (TypeError, ValueError, RuntimeError):
        return False


def _shown(value: Any) -> str:
    content: Any = value
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(content, np.ndarray):
        return f"{value.dtype}{list(value.shape)} with CRC-32 {crc32(content.tobytes()):08x}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> tuple[int, str, str, str] | None:
    """Number of the first element in which two tensors of one dtype and number of elements differ by a bit, both there,
    and how many more do.
    """
    pair = [one.detach().cpu().contiguous().reshape(-1) for one in (expected, got)]
    first, second = (one.view(torch.uint8).view(-1, max(1, one.element_size())) for one in pair)
    if torch.equal(first, second):
        return None
    differing = (first != second).any(1).nonzero().view(-1)
    number = int(differing[0])
    more = f", and {len(differing) - 1} more elements differ" if len(differing) > 1 else ""
    return number, repr(pair[0][number].item()), repr(pair[1][number].item()), more
