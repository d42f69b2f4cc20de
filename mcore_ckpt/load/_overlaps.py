"""Destinations of one load that share memory: tied weights that were saved as several tensors, views of one buffer.

Reads run at once, and each sums what it has put into memory. So destinations that overlap are found before anything is
read, by their address ranges, and are read one after the other, all others before them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mcore_ckpt.load._placement import memory_of

_Array = np.ndarray[Any, np.dtype[Any]]
Destination = tuple[str, torch.Tensor, tuple[int, ...]]
"""A slice of a global tensor: its key, where it goes, and its offsets, in elements."""


def may_overlap(starts: _Array, stops: _Array) -> bool:
    """Whether any two of the ranges `[start, stop)` have a byte in common."""
    order = np.argsort(starts)
    reach = np.maximum.accumulate(stops[order])
    return bool((starts[order][1:] < reach[:-1]).any())


def overlapping(destinations: Sequence[Destination]) -> set[int]:
    """Numbers of those that share memory with another one, which may get other values there."""
    ranges = [(*found, number) for number, (_, tensor, _) in enumerate(destinations) if (found := memory_of(tensor))]
    shared: set[int] = set()
    for group in _touching(sorted(ranges)):
        tensors = {number: _global_tensor(*destinations[number]) for number in group}
        if len(set(tensors.values())) == 1:
            continue  # parts of one destination, as a plan of many stored chunks has them
        memory = {number: _bytes_of(destinations[number][1]) for number in group}
        for number in group:
            others = (other for other in group if tensors[other] != tensors[number])
            if number not in shared:
                shared.update(
                    pair
                    for other in others
                    if np.shares_memory(memory[number], memory[other])
                    for pair in (number, other)
                )
    return shared


def _touching(ranges: Sequence[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Numbers of ranges that touch, directly or by others, in order of their starts."""
    group: list[int] = []
    reach = 0
    for start, stop, number in ranges:
        if start >= reach:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        reach = max(reach, stop)
    if len(group) > 1:
        yield group


def _global_tensor(fqn: str, tensor: torch.Tensor, offsets: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
    """The key, and where all of the global tensor would lie if the memory went on: slices that have these alike get the
    same values where they overlap.
    """
    strides = tensor.stride()
    behind = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return fqn, tensor.data_ptr() - behind * tensor.element_size(), strides


def _bytes_of(tensor: torch.Tensor) -> _Array:
    """An array in the same memory, to compare addresses alone: a device's cannot be looked at."""
    found = memory_of(tensor)
    assert found is not None
    start, stop = found
    size = tensor.element_size()
    memory: Any = (ctypes.c_ubyte * (stop - start)).from_address(start)
    strides = [stride * size for stride in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), f"V{size}", memory, strides=strides)
