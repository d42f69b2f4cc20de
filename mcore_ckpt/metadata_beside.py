"""`.metadata` of a new structure, put together while the files are being written.

It is about half a second's work for 20,000 tensors of two ranks, grows with the number of ranks, and needs nothing but
the ranks' plans. So the coordinator's writer process does it, on a second thread, and no training waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcore_ckpt.checkpoint_index import CheckpointIndex
from mcore_ckpt.local_plan import LocalPlan, index_tensors
from mcore_ckpt.metadata_write import MetadataEncoder

__all__ = ["TensorPlans", "encoded_beside"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorPlans:
    """What `.metadata` says of tensors, before it is put together. Cheap to pickle.

    Attributes:
        encoded: every rank's `LocalPlan`, encoded; checked before (`plan_check.py`).
        mcore_data: as in `CheckpointIndex`.
    """

    encoded: tuple[bytes, ...]
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)

    def encoder(self) -> MetadataEncoder:
        """Put it together."""
        tensors = index_tensors(map(LocalPlan.decode, self.encoded))
        return MetadataEncoder(CheckpointIndex("", tensors, {}, mcore_data=self.mcore_data))


def encoded_beside(plans: TensorPlans | None, write: Callable[[], T]) -> tuple[T, MetadataEncoder | None]:
    """Call `write`, and make the encoder of `plans`, if there are any, on another thread meanwhile.

    Raises:
        Exception: what `write` raises, or else what making the encoder does.
    """
    if plans is None:
        return write(), None
    outcome: list[MetadataEncoder | Exception] = []

    def encode() -> None:
        try:
            outcome.append(plans.encoder())
        except Exception as error:  # noqa: BLE001  (raised below, on the thread that waits for it)
            outcome.append(error)

    thread = threading.Thread(target=encode, name="mcore_ckpt-metadata", daemon=True)
    thread.start()
    try:
        written = write()
    finally:
        thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return written, outcome[0]
