"""Which replicas a rank saves where a save is spread over all ranks that hold one (`SaveOptions.distribution="on"`).

The coordinator chooses (`layout/distribution.py`), and each rank is told of its own shards alone. It keeps that with a
description of what it held. As long as all ranks hold the same, a save exchanges nothing for it: a rank that does not
says so where all say whether they can use their plan again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.failures import attempt
from mcore_ckpt.core.process import host_identity
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.layout.distribution import (
    Columns,
    columns_of,
    flags_of,
    merged,
    own_of_each_rank,
    spread_owners,
    tell,
)
from mcore_ckpt.layout.shards import is_sharded_tensor, leaves


class Spread:
    """What one strategy keeps between its saves: which shards this rank held, and which of them it saves."""

    def __init__(self) -> None:
        self.is_known = False
        """Whether this rank holds what it held when the save was spread."""
        self._known: tuple[Columns, int, int] | None = None  # and the rank's number, and how many there were
        self._own: list[bool] = []
        self._shards: list[Any] = []
        self._replica_ids: list[Any] = []

    @contextmanager
    def over(self, sharded_state_dict: Any, group: RankGroup) -> Iterator[None]:
        """Within the block, main replicas are those that this rank saves, if that is known. Then they are as before."""
        self._shards = [leaf for leaf in leaves(sharded_state_dict) if is_sharded_tensor(leaf)]
        self._replica_ids = [shard.replica_id for shard in self._shards]
        try:
            self.is_known = attempt(lambda: self._described(group)) == self._known and self._known is not None
            if self.is_known:
                self._apply()
            yield
        finally:
            self._restore()
            self._shards, self._replica_ids = [], []

    def renew(self, group: RankGroup) -> None:
        """All ranks, within the block: spread what they hold. Raises on all ranks."""
        self._restore()
        what = "spread the save over the ranks"
        told = group.run_gather_parts(what, lambda: tell(self._shards, host=host_identity()), wrap=SaveError)

        def choose() -> list[bytes]:
            held = merged(told or ())
            return own_of_each_rank(held, spread_owners(held))

        bits = group.run_scattered(what, choose, wrap=SaveError)
        self._known, self._own = self._described(group), flags_of(bits, len(self._shards))
        self._apply()

    def _described(self, group: RankGroup) -> tuple[Columns, int, int]:
        return columns_of(self._shards), group.rank, group.size

    def _apply(self) -> None:
        for shard, is_own in zip(self._shards, self._own, strict=True):
            shard.replica_id = 0 if is_own else 1

    def _restore(self) -> None:
        for shard, replica_id in zip(self._shards, self._replica_ids, strict=True):
            shard.replica_id = replica_id
