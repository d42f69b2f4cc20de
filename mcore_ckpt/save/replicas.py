"""The replicas that ranks hold without saving them, compared with the saved ones (`compare_replicas`).

**Tensors.** A replica is told by 8 bytes of a hash of its slice's key and place. What a rank has summed is told in one
number of a fixed size: the sum of a hash of slice and CRC-32 over its replicas. The coordinator knows how many ranks
hold each slice, and the CRC-32 of what is saved of it, so it knows what the numbers of all ranks have to come to. Only
if they do not, each rank sends 12 bytes for each replica, which say what differs.

**Objects** (`ShardedObject` with another `replica_id` than 0). Each rank tells a digest of every object in the exchange
that a save begins with (`planner.py`). Only if two of one key differ, ranks send what they hold. Of what really
differs, the rank that saves the main one keeps each version with it (`with_versions`), and the log names keys and
ranks before the checkpoint is published. Or the save is refused.
"""

from __future__ import annotations

import hashlib
import io
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcore_ckpt.core.console import counted, logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.integrity import decoded_plans
from mcore_ckpt.format.zip_records import with_versions
from mcore_ckpt.image.layout import GlobalPlan
from mcore_ckpt.state.shards import contents, is_dense, is_main_replica, is_sharded_tensor, leaves, stored_form
from mcore_ckpt.state.values import unequal

_logger = logger_of("mcore_ckpt")

_SAMPLE: Final = 16  # one slice in so many

_Ids = npt.NDArray[np.uint64]


class ReplicaDigest(NamedTuple):
    """Replicas of one rank, or of several: how many, and the sum of their hashes, modulo 2^64."""

    replicas: int
    total: int


class ReplicaSums(NamedTuple):
    """Replicas of one rank: the slice of each (`array('Q')`), and the CRC-32 of its elements (`array('I')`)."""

    slices: array[int]
    crcs: array[int]

    def digest(self) -> ReplicaDigest:
        """All of them in one number."""
        times = np.ones(len(self.slices), np.int64)
        return digest_of(np.array(self.slices, np.uint64), np.array(self.crcs, np.uint32), times)


def slice_id(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """By which ranks know a slice of a tensor, as it is stored."""
    text = f"{key}\0{','.join(map(str, offsets))}\0{','.join(map(str, sizes))}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _written_slices(plan: GlobalPlan) -> Iterator[tuple[int, tuple[str, list[int], list[int]]]]:
    """Rank, and key, offsets and sizes of the slice, of all items that ranks write, in the order of the plan."""
    tables = ((rank, file.columns) for rank, files in enumerate(decoded_plans(plan.encoded)) for file in files)
    for rank, columns in tables:
        numbers, at = columns.boxes.tolist(), 0
        for key, ndim in zip(columns.keys, columns.ndims, strict=True):
            offsets, sizes = at + ndim, at + 2 * ndim
            at += 3 * ndim
            yield rank, (key, numbers[offsets:sizes], numbers[sizes:at])


def digest_of(slices: _Ids, crcs: npt.NDArray[np.uint32], times: npt.NDArray[np.int64]) -> ReplicaDigest:
    """Digest of replicas of these slices, each so many times, with these CRC-32s."""
    mixed = slices ^ (crcs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return ReplicaDigest(int(times.sum()), int((mixed * times.astype(np.uint64)).sum(dtype=np.uint64)))


def _sampled(save_id: bytes) -> int:
    """The remainder of the slices that are compared where one in 16 is; another one in each save."""
    return int.from_bytes(save_id[:8], "little") % _SAMPLE


def held_slices(tree: Any) -> bytes:
    """The slices that this rank holds, 8 bytes each; data-parallel ranks say the same, which travels once."""
    return array("Q", (number for number, _ in _comparable(tree))).tobytes()


def replica_sums(tree: Any, save_id: bytes, *, sample: bool) -> ReplicaSums:
    """Sum the replicas that this rank holds and another one saves; `sample`: one slice in 16."""
    found, chosen = ReplicaSums(array("Q"), array("I")), _sampled(save_id)
    for number, shard in _comparable(tree):
        if is_main_replica(shard) or (sample and number % _SAMPLE != chosen):
            continue
        found.slices.append(number)
        found.crcs.append(_crc_of(str(shard.key), shard.data))
    return found


def _comparable(tree: Any) -> Iterator[tuple[int, Any]]:
    """The sharded tensors whose elements can be summed, and the slice of each."""
    for shard in leaves(tree):
        if not is_sharded_tensor(shard):
            continue
        if is_dense(shard.data):
            form = stored_form(shard)
            yield slice_id(shard.key, form.offsets, form.sizes), shard


def _crc_of(key: str, data: torch.Tensor) -> int:
    """CRC-32 of the elements in C order."""
    value = 0
    for content, _ in contents(key, data, tuple(data.shape), (0, data.numel())):
        value = crc32(content, value)
    return value


class DivergedReplica(NamedTuple):
    """A slice, in elements, that `ranks` hold with other bits than rank `saved_by` saves."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    saved_by: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.key}: ranks {', '.join(map(str, self.ranks))} hold other bits than rank {self.saved_by} in the "
            f"slice at {list(self.offsets)} of sizes {list(self.sizes)}"
        )


class ReplicaCheck:
    """On the coordinator, compares replicas with what is saved. `held`: what each rank holds (`held_slices`)."""

    def __init__(self, plan: GlobalPlan, held: Sequence[bytes]) -> None:
        self._plan = plan
        ids = np.array([slice_id(*item) for _, item in _written_slices(plan)], np.uint64)
        self._order = np.argsort(ids, kind="stable")  # items of the plan
        self._ids = ids[self._order]
        holders = np.zeros(len(ids), np.int64)
        for slices, ranks in Counter(held).items():
            at, known = self._found(np.frombuffer(slices, np.uint64))
            np.add.at(holders, at[known], ranks)
        self._replicas = np.maximum(holders - 1, 0)  # of each id, how many there are besides the one that is saved

    def _found(self, ids: _Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where each of these ids stands in `_ids`, and whether it does."""
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return at, self._ids[at] == ids

    def are_equal(self, crcs: Sequence[int], digests: Sequence[ReplicaDigest], sampled_in: bytes | None) -> bool:
        """Whether all digests are those of what is saved (`crcs`, in the plan's order); False says nothing."""
        digest = ReplicaDigest(sum(each.replicas for each in digests), sum(each.total for each in digests) % 2**64)
        times = self._replicas
        if sampled_in is not None:
            times = np.where(self._ids % np.uint64(_SAMPLE) == np.uint64(_sampled(sampled_in)), times, 0)
        return digest_of(self._ids, np.array(crcs, np.uint32)[self._order], times) == digest

    def diverged(self, crcs: Sequence[int], replicas: Sequence[ReplicaSums | None]) -> list[DivergedReplica]:
        """Slices that ranks hold with other bits than they were saved with; `replicas`: of each rank, if it has any."""
        saved = np.array(crcs, np.uint32)
        others: dict[int, list[int]] = {}
        for rank, of_rank in enumerate(replicas):
            if of_rank is None:
                continue
            at, known = self._found(np.array(of_rank.slices, np.uint64))
            items = self._order[at[known]]
            for item in items[saved[items] != np.array(of_rank.crcs, np.uint32)[known]].tolist():
                others.setdefault(item, []).append(rank)
        return [
            DivergedReplica(key, tuple(offsets), tuple(sizes), rank, tuple(others[number]))
            for number, (rank, (key, offsets, sizes)) in enumerate(_written_slices(self._plan) if others else ())
            if number in others
        ]


# --- objects ----------------------------------------------------------------------------------------------------------

_SHOWN_OBJECTS: Final = 5
_Objects = Mapping[str, Any]


class _Kept(NamedTuple):
    ranks: dict[int, int]  # of each that has another object than the main one, which
    versions: list[bytes]


def keep_versions(
    keys: Collection[str],
    mains: _Objects,
    replicas: _Objects,
    layout: str,
    group: RankGroup,
    what: str,
    *,
    refused: bool,
) -> dict[str, memoryview]:
    """The main objects of this rank, with the versions that other ranks have of them; all ranks call this. `keys`: of
    what differs; `what`: the save, for the log; `refused`: raise `SaveError` on all ranks instead.
    """

    def own() -> tuple[dict[str, bytes], dict[str, bytes]]:
        mine, others = (
            {key: bytes(content) for key, content in some.items() if key in keys} for some in (mains, replicas)
        )
        return mine, others

    step = "compare objects that are replicas"
    gathered = group.gather(step, own, wrap=SaveError)

    def compare() -> list[dict[str, _Kept]]:
        assert gathered is not None
        kept: list[dict[str, _Kept]] = [{} for _ in gathered]
        saved_by = {key: rank for rank, (mine, _) in enumerate(gathered) for key in mine}
        for rank, (_, others) in enumerate(gathered):
            for key, content in others.items():
                main = saved_by.get(key)
                if main is None or _is_same(gathered[main][0][key], content):
                    continue
                of_key = kept[main].setdefault(key, _Kept({}, []))
                if content not in of_key.versions:
                    of_key.versions.append(content)
                of_key.ranks[rank] = of_key.versions.index(content)
        _tell_objects({key: one for of_rank in kept for key, one in of_rank.items()}, what, refused)
        return kept

    kept = group.scatter(step, compare, wrap=SaveError)

    def with_others() -> dict[str, memoryview]:
        objects = {}
        for key, content in mains.items():
            ranks, versions = kept.get(key, ({}, []))
            others = {rank: number for rank, number in ranks.items() if rank != group.rank}
            record = memoryview(with_versions(bytes(content), layout, others, versions)) if others else content
            objects[key] = record
        return objects

    return group.each("keep objects that differ", with_others, wrap=SaveError)


def _is_same(first: bytes, second: bytes) -> bool:
    """Equal objects may be serialized in several ways. (Both are of this job.)"""
    if first == second:
        return True
    try:
        pair = [torch.load(io.BytesIO(content), map_location="cpu", weights_only=False) for content in (first, second)]
        return not any(unequal(*pair, exact=True))
    except Exception:  # noqa: BLE001 (of third-party classes; a save keeps both, and does not fail)
        return False


def _tell_objects(kept: Mapping[str, _Kept], what: str, refused: bool) -> None:
    if not kept:
        return
    named = (f"{key} on ranks {', '.join(map(str, one.ranks))}" for key, one in list(kept.items())[:_SHOWN_OBJECTS])
    message = (
        f"{what}: {counted(len(kept), 'object')}, of which ranks hold others than the one that is saved though they "
        f"claim to hold a replica: {'; '.join(named)}{', ...' if len(kept) > _SHOWN_OBJECTS else ''}. "
    )
    if refused:
        raise SaveError(f'{message}With compare_replicas="warn" it is kept')
    _logger.warning(
        "%sWhat other ranks hold is kept for loads under this layout; stock gives these ranks the saved one", message
    )
