"""The stages of this process: how many there are, how large they may be, and who waits when all are in use."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from mcore_ckpt.job_handle import JobHandle
from mcore_ckpt.options import SaveOptions
from mcore_ckpt.process import shared_writer
from mcore_ckpt.staging import Stage, free_host_bytes

__all__ = ["StageLease", "is_busy", "lease_stage", "warm_up_stage"]

_logger = logging.getLogger(__name__)

# Share of the host's free memory that the stages of all its ranks may take together by default. The state itself, the
# page cache and the optimizer's peaks need the rest.
_DEFAULT_SHARE = 0.25

_free: list[Stage] = []
_in_use: list[StageLease] = []


@dataclass(slots=True, eq=False)
class StageLease:
    """A stage that a save may use, until it gives it back.

    Attributes:
        stage: the memory.
        budget_bytes: how much of it may be reserved.
    """

    stage: Stage
    budget_bytes: int
    _job: JobHandle | None = None
    _given_back: bool = False

    def stage_is_used_by(self, job: JobHandle) -> None:
        """From now on the stage is free as soon as this job has ended, whether anybody asks for its result or not."""
        self._job = job

    def give_back(self, reusable: bool = True) -> None:
        """The save needs the stage no more; twice is harmless.

        Args:
            reusable: False for memory that a stuck writer may still read.
        """
        if self._given_back:
            return
        self._given_back = True
        _in_use.remove(self)
        if reusable:
            _free.append(self.stage)
        else:
            self.stage.close()

    def ended(self) -> bool:
        """Whether the job that reads the stage has ended."""
        return self._job is not None and self._job.poll()

    def wait(self) -> None:
        """Wait until the job that reads the stage has ended, well or not."""
        if self._job is not None:
            self._job.wait()


def _collect() -> None:
    for lease in _in_use:
        if lease.ended():
            lease.give_back()


def is_busy(options: SaveOptions) -> bool:
    """Whether another async save would have to wait for one of this rank to be written."""
    _collect()
    return len(_in_use) >= options.max_in_flight


def lease_stage(nbytes: int, options: SaveOptions) -> StageLease:
    """A stage for a save of `nbytes`; waits while `max_in_flight` saves of this rank are in the writing."""
    _collect()
    while len(_in_use) >= options.max_in_flight:
        oldest = _in_use[0]
        oldest.wait()
        oldest.give_back()
    stage = _free.pop() if _free else Stage()
    lease = StageLease(stage, max(_budget_bytes(options, stage), options.window_bytes))
    _in_use.append(lease)
    return lease


def _budget_bytes(options: SaveOptions, stage: Stage) -> int:
    if options.staging_budget_bytes is not None:
        return options.staging_budget_bytes
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    share = int(free_host_bytes() * _DEFAULT_SHARE) // local_ranks
    # What the stage holds already is no longer free memory, and needs no new leave.
    return max(share, stage.capacity_bytes)


def warm_up_stage(nbytes: int, options: SaveOptions) -> None:
    """Allocate and touch a stage of `nbytes`, within the budget, and start the writer, ahead of the first save."""
    lease = lease_stage(nbytes, options)
    try:
        view = lease.stage.reserve(min(nbytes, lease.budget_bytes))
        lease.stage.contents = None
        for offset in range(0, len(view), 4096):
            view[offset] = 0
        if options.writer == "persistent":
            shared_writer().warm_up(stage_fd=lease.stage.fd)
    finally:
        lease.give_back()
