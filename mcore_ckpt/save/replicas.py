"""The replicas of a state that a rank does not save, summed, to compare them with those that are saved.

A slice is told by 8 bytes of a hash of its key and place. What a rank has summed is told in one number of a fixed size:
the sum of a hash of slice and CRC-32 over its replicas. The coordinator knows how many ranks hold each slice, and the
CRC-32 of what is saved of it, so it knows what the numbers of all ranks have to come to. Only if they do not, each rank
sends 12 bytes for each replica, which say what differs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.fingerprints import DivergedReplica
from mcore_ckpt.directory.iterations import iteration_of
from mcore_ckpt.format.index import parse_shadow_key
from mcore_ckpt.format.manifest import NO_FINGERPRINT
from mcore_ckpt.format.metadata_write import ChunkFactors
from mcore_ckpt.save.plans import GlobalPlan, LocalPlan
from mcore_ckpt.state.shards import is_main_replica, is_sharded_tensor, leaves, stored_form
from mcore_ckpt.state.torch_classes import check_memory, pointer_of

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


_NEVER: Final = -1
_RUNS: Final = 16

# Of runs that this process has saved to: name of the last published checkpoint, and fingerprints of its moments by key.
# A strategy may be made for each save, and a structure may change.
_last_of_runs: dict[str, tuple[str, Mapping[str, int]]] = {}


class _Noticed:
    """Of the save that is being committed, which counts only when that is published."""

    def __init__(self, name: str, run: str) -> None:
        self.name = name  # of its directory
        self.run = run  # the directory of that
        self.agreed: npt.NDArray[np.int64] | None = None  # items of which all replicas are equal
        self.fingerprints: npt.NDArray[np.int64] | None = None
        self.moments: Mapping[str, int] = {}  # their fingerprints by key


class StateHistory:
    """Of the published saves of one structure, in the order of their commits; on the coordinator. What is noticed of a
    save lies between `begin` and `published`.
    """

    def __init__(self) -> None:
        self._items: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None  # ids, sorted, and their order
        self._replicas: npt.NDArray[np.int64] | None = None  # of each id, how many ranks hold it besides its saver
        self._compared_in: list[str] = []  # names of the saves in which replicas were compared
        self._agreed: npt.NDArray[np.int64] | None = None  # of each item, the last of these in which they were equal
        self._last: tuple[str, npt.NDArray[np.int64]] | None = None  # name of the last one, and its fingerprints
        self._loaded: tuple[str, Mapping[str, int]] | None = None  # what was loaded before the first save
        self._noticed = _Noticed("", "")

    def begin(self, name: str, run: str) -> None:
        """A save is being committed; `name`: of its directory, in the directory `run`."""
        self._noticed = _Noticed(name, run)

    def published(self) -> None:
        """The save is published: later ones may be compared with it."""
        noticed = self._noticed
        if noticed.agreed is not None and self._agreed is not None:
            self._agreed[noticed.agreed] = len(self._compared_in)
            self._compared_in.append(noticed.name)
        if noticed.fingerprints is not None:
            self._last, self._loaded = (noticed.name, noticed.fingerprints), None
            _last_of_runs.pop(noticed.run, None)
            _last_of_runs[noticed.run] = noticed.name, noticed.moments
            while len(_last_of_runs) > _RUNS:
                del _last_of_runs[next(iter(_last_of_runs))]

    def are_equal(
        self,
        plan: GlobalPlan,
        crcs: Sequence[int],
        held: Sequence[bytes],
        digest: ReplicaDigest,
        sampled_in: bytes | None,
    ) -> bool:
        """Whether all replicas are what is saved, as far as their digest tells; False says nothing. `held`: what each
        rank holds (`held_slices`); `digest`: of what all of them have summed, in the save of that id one slice in 16.
        """
        ids, order = self._ids_of(plan)
        if self._replicas is None:
            holders = np.zeros(len(ids), np.int64)
            for slices, ranks in Counter(held).items():
                wanted = np.frombuffer(slices, np.uint64)
                at = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
                known = at[ids[at] == wanted] if len(ids) else at[:0]
                np.add.at(holders, known, ranks)
            self._replicas = np.maximum(holders - 1, 0)
        times = self._replicas
        if sampled_in is not None:
            times = np.where(is_sampled(ids, sampled_in), times, 0)
        if digest_of(ids, np.array(crcs, np.uint32)[order], times) != digest:
            return False
        self._noticed.agreed = order[times > 0]
        return True

    def _ids_of(self, plan: GlobalPlan) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Of all slices that are saved, sorted, and which item of the plan each one is."""
        if self._items is None:
            ids = np.array(slice_ids(plan.decoded()), np.uint64)
            order = np.argsort(ids, kind="stable")
            self._items, self._agreed = (ids[order], order), np.full(len(ids), _NEVER, np.int64)
        return self._items

    def diverged(
        self, plan: GlobalPlan, crcs: Sequence[int], replicas: Sequence[ReplicaSums], *, are_all: bool
    ) -> list[tuple[DivergedReplica, str]]:
        """Slices that ranks hold with other bits than they were saved with, and since when, in words; `crcs`: of all
        items in the order of the plan, `replicas`: of each rank, all or a sample.
        """
        ids, order = self._ids_of(plan)
        saved = np.array(crcs, np.uint32)
        others: dict[int, list[int]] = {}
        equal = []
        counts = np.zeros(len(ids), np.int64)
        for rank, (slices, sums) in enumerate(replicas):
            wanted = np.array(slices, np.uint64)
            at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
            known = ids[at] == wanted if len(ids) else np.zeros(len(wanted), bool)
            np.add.at(counts, at[known], 1)
            items = order[at[known]]
            differs = saved[items] != np.array(sums, np.uint32)[known]
            equal.append(items[~differs])
            for item in items[differs].tolist():
                others.setdefault(item, []).append(rank)
        if are_all:
            self._replicas = counts
        found = self._named(plan, others)
        compared = np.concatenate([np.zeros(0, np.int64), *equal])
        self._noticed.agreed = np.setdiff1d(compared, np.array(list(others), np.int64))
        return found

    def _named(self, plan: GlobalPlan, others: Mapping[int, list[int]]) -> list[tuple[DivergedReplica, str]]:
        assert self._agreed is not None
        if not others:
            return []
        found, number = [], 0
        for rank, of_rank in enumerate(plan.decoded()):
            boxes, at = of_rank.boxes.tolist(), 0
            for key, ndim in zip(of_rank.keys, of_rank.ndims, strict=True):
                if number in others:
                    offsets, sizes = boxes[at + ndim : at + 2 * ndim], boxes[at + 2 * ndim : at + 3 * ndim]
                    diverged = DivergedReplica(key, tuple(offsets), tuple(sizes), rank, tuple(others[number]), rank)
                    found.append((diverged, self._since(int(self._agreed[number]))))
                at += 3 * ndim
                number += 1
        return found

    def _since(self, agreed: int) -> str:
        if agreed == _NEVER:
            return "they were not seen equal before"
        before, now = self._compared_in[agreed], self._noticed.name
        steps = [iteration_of(name) for name in (before, now)]
        if steps[0] is not None and steps[1] is not None:
            return f"they were equal in {before}, {steps[1] - steps[0]} steps before"
        return f"they were equal in {before}"

    def expect(self, name: str, fingerprints: Mapping[str, int]) -> None:
        """The checkpoint that was loaded before the first save: its directory's name, and its fingerprints by key."""
        self._loaded = name, fingerprints

    def stale(self, factors: ChunkFactors, fingerprints: Sequence[int]) -> tuple[str, list[str]]:
        """Name of the last published save (for the first one of a structure, of the checkpoint that was loaded, or else
        of the last one of this process in the run), and keys of the moments that are what they were in it, though
        training has moved.
        """
        name, column, last = self._noticed.name, np.array(fingerprints, np.int64), self._last
        before = self._loaded or _last_of_runs.get(self._noticed.run)
        if last is None and before is not None and iteration_of(before[0]) is not None:
            # Of moments alone: the iterations say whether training has moved.
            of_before = np.full(len(column), NO_FINGERPRINT, np.int64)
            for number, key, _ in factors.moments:
                of_before[number] = before[1].get(key, NO_FINGERPRINT)
            last = before[0], of_before
        self._noticed.fingerprints = column
        self._noticed.moments = {key: int(column[number]) for number, key, _ in factors.moments}
        if last is None or last[0] == name or len(last[1]) != len(column):
            return name, []
        same = (column == last[1]) & (column != NO_FINGERPRINT)
        iterations = [iteration_of(one) for one in (last[0], name)]
        if None in iterations:
            moments = {number for number, _, _ in factors.moments}
            moved = any(number not in moments for number in np.flatnonzero(~same).tolist())
        else:
            moved = iterations[0] != iterations[1]
        # Zeros are what moments begin with, and what those of a parameter without gradients stay.
        return last[0], [
            key for number, key, of_zeros in factors.moments if moved and same[number] and column[number] != of_zeros
        ]
