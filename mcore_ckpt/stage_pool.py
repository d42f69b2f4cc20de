"""The stages of this process: how many there are, how large they may be, and who waits when all are in use.

The budget is one for all stages of a rank together. Saves are in flight at once only while they fit into it together; a
save that fits only alone waits for those before it, and one that does not even then is passed through what there is.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from mcore_ckpt.job_handle import JobHandle
from mcore_ckpt.options import SaveOptions, ranks_of_this_host
from mcore_ckpt.process import shared_writer
from mcore_ckpt.stage_memory import Stage, free_host_bytes

__all__ = ["StageLease", "is_busy", "lease_stage", "warm_up_stage"]

_logger = logging.getLogger(__name__)

# Share of the host's free memory that the stages of all its ranks may take together by default. The state itself, the
# page cache and the optimizer's peaks need the rest.
_DEFAULT_SHARE = 0.25
# Even on a host without free memory: a save has to pass through something.
_LEAST_BYTES = 1024 * 1024

_free: list[Stage] = []
_in_use: list[StageLease] = []


@dataclass(slots=True, eq=False)
class StageLease:
    """A stage that a save may use, until it gives it back.

    Attributes:
        stage: the memory.
        budget_bytes: how much of it may be reserved: what other saves of this rank in flight have left.
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


def _forget() -> None:
    """In a process forked from the trainer: the memory is shared, so a save there must not take the trainer's."""
    _free.clear()
    _in_use.clear()


os.register_at_fork(after_in_child=_forget)


def _collect() -> None:
    for lease in [lease for lease in _in_use if lease.ended()]:
        lease.give_back()


def _has_room(nbytes: int, options: SaveOptions) -> bool:
    """Whether a save of `nbytes` can begin beside those in flight."""
    if not _in_use:
        return True
    return len(_in_use) < options.max_in_flight and _taken_bytes() + nbytes <= _budget_bytes(options)


def _taken_bytes() -> int:
    return sum(lease.stage.capacity_bytes for lease in _in_use)


def is_busy(nbytes: int, options: SaveOptions) -> bool:
    """Whether an async save of `nbytes` would have to wait for one of this rank to be written."""
    _collect()
    return not _has_room(nbytes, options)


def lease_stage(nbytes: int, options: SaveOptions) -> StageLease:
    """A stage for a save of `nbytes`; waits for saves of this rank that are in the writing and leave it no room."""
    _collect()
    while not _has_room(nbytes, options):
        oldest = _in_use[0]
        oldest.wait()
        oldest.give_back()
    budget_bytes = max(_budget_bytes(options) - _taken_bytes(), _LEAST_BYTES)
    _free.sort(key=lambda stage: stage.capacity_bytes)
    stage = _free.pop() if _free else Stage()
    if stage.capacity_bytes > budget_bytes:  # of a time when the budget was larger
        _drop(stage)
        stage = Stage()
    # Idle stages may keep only what this save leaves of the budget.
    left_bytes = budget_bytes - max(stage.capacity_bytes, min(nbytes, budget_bytes))
    while _free and sum(idle.capacity_bytes for idle in _free) > left_bytes:
        _drop(_free.pop())
    lease = StageLease(stage, budget_bytes)
    _in_use.append(lease)
    return lease


def _drop(stage: Stage) -> None:
    """Give a stage's memory back to the host; the writer's mapping would keep it."""
    shared_writer().forget_stage(stage.fd)
    stage.close()


def _budget_bytes(options: SaveOptions) -> int:
    """What all stages of this rank may take together."""
    if options.staging_budget_bytes is not None:
        return options.staging_budget_bytes
    share = int(free_host_bytes() * _DEFAULT_SHARE) // ranks_of_this_host()
    # What the stages hold already is no longer free memory, and needs no new leave.
    return max(share, _taken_bytes() + sum(stage.capacity_bytes for stage in _free))


def warm_up_stage(nbytes: int, options: SaveOptions) -> None:
    """Allocate and touch a stage of `nbytes`, within the budget, and start the writer, ahead of the first save."""
    lease = lease_stage(nbytes, options)
    try:
        if options.stage == "copy":
            lease.stage.reserve(min(nbytes, lease.budget_bytes))
        if options.writer == "persistent":
            shared_writer().warm_up(stage_fd=lease.stage.fd)
    finally:
        lease.give_back()
