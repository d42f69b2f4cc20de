"""What a program may have switched on around a save or a load, and what would change the tensors made within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_modes() -> Iterator[None]:
    """Within the block no mode of this thread is on: a default device, fake tensors, a counter of operations."""
    modes: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]  # noqa: SLF001
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]
