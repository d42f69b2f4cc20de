"""The replicas of a state that a rank does not save, summed, to compare them with those that are saved.

A slice is told by 8 bytes of a hash of its key and place. What a rank has summed is told in one number of a fixed size:
the sum of a hash of slice and CRC-32 over its replicas. The coordinator knows how many ranks hold each slice, and the
CRC-32 of what is saved of it, so it knows what the numbers of all ranks have to come to. Only if they do not, each rank
sends 12 bytes for each replica, which say what differs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
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


_Ids = npt.NDArray[np.uint64]


class ReplicaDigest(NamedTuple):
    """Of the replicas of one rank, or of several: how many, and the sum of their hashes, modulo 2^64."""

    replicas: int
    total: int

    def added(self, other: ReplicaDigest) -> ReplicaDigest:
        """Of the replicas of both."""
        return ReplicaDigest(self.replicas + other.replicas, (self.total + other.total) % 2**64)


class ReplicaSums(NamedTuple):
    """Of the replicas of one rank: the slice of each (`array('Q')`), and the CRC-32 of its elements (`array('I')`)."""

    slices: array[int]
    crcs: array[int]

    @classmethod
    def none(cls) -> ReplicaSums:
        """Of a rank that has none."""
        return cls(array("Q"), array("I"))

    def digest(self) -> ReplicaDigest:
        """All of them in one number."""
        return digest_of(np.array(self.slices, np.uint64), np.array(self.crcs, np.uint32))


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


def digest_of(slices: _Ids, crcs: npt.NDArray[np.uint32], times: npt.NDArray[np.int64] | None = None) -> ReplicaDigest:
    """Of replicas of these slices, each so many times (None: once), with these CRC-32s."""
    mixed = slices ^ (crcs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    if times is None:
        return ReplicaDigest(len(slices), int(mixed.sum(dtype=np.uint64)))
    return ReplicaDigest(int(times.sum()), int((mixed * times.astype(np.uint64)).sum(dtype=np.uint64)))


def is_sampled(slices: _Ids, save_id: bytes) -> npt.NDArray[np.bool_]:
    """Which of these slices are compared where one in 16 is; others in each save."""
    found: npt.NDArray[np.bool_] = slices % np.uint64(_SAMPLE) == np.uint64(_sampled(save_id))
    return found


def _sampled(save_id: bytes) -> int:
    return int.from_bytes(save_id[:8], "little") % _SAMPLE


def held_slices(tree: Any) -> bytes:
    """The slices in a nested dict/list that this rank holds, saved by itself or by others: 8 bytes for each.
    Data-parallel ranks say the same, and so it travels once.
    """
    return array("Q", (number for number, _ in _comparable(tree))).tobytes()


def replica_sums(tree: Any, save_id: bytes, *, sample: bool) -> ReplicaSums:
    """Sum the replicas in a nested dict/list that this rank holds and another one saves; `sample`: those of slices that
    `is_sampled`. Raises `PlanError` if the memory of one is not there.
    """
    found, chosen = ReplicaSums.none(), _sampled(save_id)
    for number, shard in _comparable(tree):
        if is_main_replica(shard) or (sample and number % _SAMPLE != chosen):
            continue
        check_memory(shard.data, partial(str, shard.key))
        found.slices.append(number)
        found.crcs.append(_crc_of(shard.data))
    return found


def _comparable(tree: Any) -> Iterator[tuple[int, Any]]:
    """The sharded tensors whose elements can be summed, and the slice of each."""
    for shard in leaves(tree):
        if not is_sharded_tensor(shard) or parse_shadow_key(shard.key) is not None:
            continue
        data = shard.data
        if type(data) in _PLAIN and data.layout is torch.strided and not data.is_meta:
            form = stored_form(shard)
            yield slice_id(shard.key, form.offsets, form.sizes), shard


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
