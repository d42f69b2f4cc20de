"""The replicas of a state that a rank does not save, summed, to compare them with those that are saved.

A slice is told by 8 bytes of a hash of its key and place, so that a rank sends 12 bytes for each to the coordinator.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.index import parse_shadow_key
from mcore_ckpt.layout.dense_tensors import check_memory, pointer_of
from mcore_ckpt.layout.plans import LocalPlan
from mcore_ckpt.layout.shards import is_main_replica, is_sharded_tensor, leaves, stored_form

_SAMPLE: Final = 16  # one slice in so many
_WINDOW_BYTES: Final = 32 * 1024 * 1024
# What the storage of a subclass holds is not known.
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class ReplicaSums(NamedTuple):
    """Of the replicas of one rank: the slice of each (`array('Q')`), and the CRC-32 of its elements (`array('I')`)."""

    slices: array[int]
    crcs: array[int]

    @classmethod
    def none(cls) -> ReplicaSums:
        """Of a rank that has none."""
        return cls(array("Q"), array("I"))


def slice_id(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """By which ranks know a slice of a tensor, as it is stored."""
    text = f"{key}\0{','.join(map(str, offsets))}\0{','.join(map(str, sizes))}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def slice_ids(plans: Iterable[LocalPlan]) -> array[int]:
    """Of all items that ranks write, in the order of their plans."""
    found = array("Q")
    for plan in plans:
        numbers, at = plan.boxes.tolist(), 0
        for key, ndim in zip(plan.keys, plan.ndims, strict=True):
            found.append(slice_id(key, numbers[at + ndim : at + 2 * ndim], numbers[at + 2 * ndim : at + 3 * ndim]))
            at += 3 * ndim
    return found


def replica_sums(tree: Any, save_id: bytes, *, sample: bool) -> ReplicaSums:
    """Sum the replicas in a nested dict/list that this rank holds and another one saves; `sample`: one slice in 16,
    which depend on the save. Raises `PlanError` if the memory of one is not there.
    """
    found = ReplicaSums.none()
    chosen = int.from_bytes(save_id[:8], "little") % _SAMPLE
    for shard in leaves(tree):
        if not is_sharded_tensor(shard) or is_main_replica(shard) or parse_shadow_key(shard.key) is not None:
            continue
        data = shard.data
        if type(data) not in _PLAIN or data.layout is not torch.strided or data.is_meta:
            continue
        form = stored_form(shard)
        number = slice_id(shard.key, form.offsets, form.sizes)
        if sample and number % _SAMPLE != chosen:
            continue
        check_memory(data, partial(str, shard.key))
        found.slices.append(number)
        found.crcs.append(_crc_of(data))
    return found


@torch.no_grad()
def _crc_of(data: torch.Tensor) -> int:
    """Of the elements in C order; what cannot be read where it lies is copied in windows."""
    flat = data.detach().reshape(-1)
    if pointer_of(flat) and not flat.is_conj() and not flat.is_neg():
        return crc32(flat.view(torch.uint8).numpy())
    value, step = 0, max(1, _WINDOW_BYTES // data.element_size())
    for at in range(0, flat.numel(), step):
        some = flat[at : at + step]
        copied = torch.empty(some.shape, dtype=data.dtype, device="cpu").copy_(some)
        value = crc32(copied.view(torch.uint8).numpy(), value)
    return value
