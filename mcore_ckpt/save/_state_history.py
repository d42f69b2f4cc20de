"""What a coordinator notices of a state from save to save: replicas that have diverged, moments that stand still.

Both are silent otherwise: training continues, and each checkpoint is what was written. A replica that differs from the
one that is saved is a rank that trains another model. Moments that stay as they are while the iteration moves are those
of a state dict that the optimizer has left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mcore_ckpt.core.fingerprints import DivergedReplica
from mcore_ckpt.directory.iterations import iteration_of
from mcore_ckpt.format.manifest import NO_FINGERPRINT
from mcore_ckpt.format.metadata_write import ChunkFactors
from mcore_ckpt.layout.plans import GlobalPlan
from mcore_ckpt.layout.replicas import ReplicaSums, slice_ids

_NEVER: Final = -1


class StateHistory:
    """Of the saves of one structure, in the order of their commits; on the coordinator."""

    def __init__(self) -> None:
        self._items: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None  # ids, sorted, and their order
        self._compared_in: list[str] = []  # names of the saves in which replicas were compared
        self._agreed: npt.NDArray[np.int64] | None = None  # of each item, the last of these in which they were equal
        self._last: tuple[str, npt.NDArray[np.int64]] | None = None  # name of the last save, and its fingerprints
        self._loaded: tuple[str, Mapping[str, int]] | None = None  # what was loaded before the first save

    def diverged(
        self, name: str, plan: GlobalPlan, crcs: Sequence[int], replicas: Sequence[ReplicaSums]
    ) -> list[tuple[DivergedReplica, str]]:
        """Slices that ranks hold with other bits than they were saved with, and since when, in words; `name`: of the
        directory, `crcs`: of all items in the order of the plan, `replicas`: of each rank.
        """
        if self._items is None or self._agreed is None:
            ids = np.array(slice_ids(plan.decoded()), np.uint64)
            order = np.argsort(ids, kind="stable")
            self._items, self._agreed = (ids[order], order), np.full(len(ids), _NEVER, np.int64)
        ids, order = self._items
        saved = np.array(crcs, np.uint32)
        self._compared_in.append(name)
        others: dict[int, list[int]] = {}
        equal = []
        for rank, (slices, sums) in enumerate(replicas):
            wanted = np.array(slices, np.uint64)
            at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
            known = ids[at] == wanted if len(ids) else np.zeros(len(wanted), bool)
            items = order[at[known]]
            differs = saved[items] != np.array(sums, np.uint32)[known]
            equal.append(items[~differs])
            for item in items[differs].tolist():
                others.setdefault(item, []).append(rank)
        found = self._named(plan, others)
        compared = np.concatenate([np.zeros(0, np.int64), *equal])
        self._agreed[np.setdiff1d(compared, np.array(list(others), np.int64))] = len(self._compared_in) - 1
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
                    diverged = DivergedReplica(key, tuple(offsets), tuple(sizes), rank, tuple(others[number]))
                    found.append((diverged, self._since(int(self._agreed[number]))))
                at += 3 * ndim
                number += 1
        return found

    def _since(self, agreed: int) -> str:
        if agreed == _NEVER:
            return "they were not seen equal before"
        before, now = self._compared_in[agreed], self._compared_in[-1]
        steps = [iteration_of(name) for name in (before, now)]
        if steps[0] is not None and steps[1] is not None:
            return f"they were equal in {before}, {steps[1] - steps[0]} steps before"
        return f"they were equal in {before}"

    def expect(self, name: str, fingerprints: Mapping[str, int]) -> None:
        """The checkpoint that was loaded before the first save: its directory's name, and its fingerprints by key."""
        self._loaded = name, fingerprints

    def stale(self, name: str, factors: ChunkFactors, fingerprints: Sequence[int]) -> tuple[str, list[str]]:
        """Name of the last save (for the first one, of the checkpoint that was loaded), and keys of the moments that
        are what they were in it, though training has moved.
        """
        column, last = np.array(fingerprints, np.int64), self._last
        if last is None and self._loaded is not None and iteration_of(self._loaded[0]) is not None:
            # Of moments alone: the iterations say whether training has moved.
            loaded = np.full(len(column), NO_FINGERPRINT, np.int64)
            for number, key, _ in factors.moments:
                loaded[number] = self._loaded[1].get(key, NO_FINGERPRINT)
            last = self._loaded[0], loaded
        self._loaded = None
        self._last = name, column
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
