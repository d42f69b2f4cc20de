"""Specifications of tensors that are stored whole, for tests that lay out files without planning a save."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mcore_ckpt.layout.buckets import TensorSpec


def specs_of(tensors: Iterable[torch.Tensor]) -> list[TensorSpec]:
    """Each tensor as the whole of a global tensor, under keys `0`, `1`, ..."""
    specs = []
    for number, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(str(number), dtype, shape, (0,) * len(shape), shape, tensor.nbytes))
    return specs
