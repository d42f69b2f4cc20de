"""Python's garbage collector, out of the way while many lasting objects are made.

A plan or an index is hundreds of thousands of small objects that all stay alive and hold no cycles. Each full
collection meanwhile would walk through every object of the training process, and free nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection starts within the block; may be nested."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
