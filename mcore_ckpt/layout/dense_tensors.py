"""Where the bytes of a dense tensor lie, and whether they are there: a save reads them by address."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcore_ckpt.core.errors import PlanError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def pointer_of(tensor: torch.Tensor) -> int:
    """Where a tensor's bytes lie in order in host memory; 0 if they cannot be copied from where they are."""
    return tensor.data_ptr() if tensor.is_cpu and tensor.is_contiguous() else 0


def check_memory(tensor: torch.Tensor, where: Callable[[], str]) -> None:
    """Raise `PlanError` unless all of a dense tensor's memory is there, since it is read by address.

    A storage can be cut under its tensors (`untyped_storage().resize_`), which is how some libraries offload. Meta and
    fake tensors have none, nor have those that hold others. `where` tells key and offset.
    """
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        raise PlanError(
            f"{where()}: the tensor ({type(tensor).__name__}) is on the meta device and has no elements to save; put it"
            " on a device and give it values before the save"
        )
    if type(tensor) not in _PLAIN and tensor.numel() and not tensor.data_ptr():
        parts = getattr(tensor, "__tensor_flatten__", lambda: ((), None))()[0]
        raise PlanError(
            f"{where()}: a tensor of class {type(tensor).__module__}.{type(tensor).__qualname__} holds other tensors"
            f" ({', '.join(parts)}) and has no elements of its own, by which a checkpoint is loaded under any layout;"
            " save it as a plain tensor (`dequantize()`), or save what it holds under keys of their own"
        )
    held_bytes = storage.nbytes()
    last = tensor.storage_offset() + tensor.numel() - 1
    if not tensor.is_contiguous():
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if (last + 1) * tensor.itemsize > held_bytes and tensor.numel():
        raise PlanError(
            f"{where()}: the tensor's memory was given back ({held_bytes} bytes are left of"
            f" {(last + 1) * tensor.itemsize}); bring it back, from where it was offloaded to, before the save"
        )
