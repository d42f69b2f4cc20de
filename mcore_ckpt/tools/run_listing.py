"""A run at a glance: its checkpoints, and what the tracker file names."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.paths import PARTIAL
from mcore_ckpt.directory.iterations import (
    RunCheckpoint,
    directories_of_run,
    is_checkpoint_name,
    iteration_directories,
    look_at,
    tracked_name,
)
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.parallel_layout import ParallelLayout, layout_of_chunks


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One of a run's checkpoints, and the parallel layout that its chunks show; None where the index cannot be read."""

    checkpoint: RunCheckpoint
    layout: ParallelLayout | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run has.

    Attributes:
        path: its directory.
        tracked: name of the checkpoint that the tracker file names; None without one.
        tracker_problem: why the tracker file names nothing, or nothing that can be loaded.
        checkpoints: `release` first, then by iteration.
        unfinished: directories that `reshard` or another conversion is making, or has left when it was interrupted; the
            same command resumes them.
    """

    path: str
    tracked: str | None
    tracker_problem: str | None
    checkpoints: tuple[ListedCheckpoint, ...]
    unfinished: tuple[str, ...] = ()


def list_run(run: str | os.PathLike[str]) -> RunReport:
    """The checkpoints of a run: whether they are complete (by their structure), how large, how old, in which layout.

    Args:
        run: the directory that holds `iter_0000100` and the like.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint of any kind in it.
        LoadError: it cannot be listed.
    """
    unfinished = tuple(
        name
        for name in sorted(storage_at(run).folders())
        if name.endswith(PARTIAL) and is_checkpoint_name(name.removesuffix(PARTIAL))
    )
    tracked: str | None = None
    problem: str | None = None
    try:
        tracked = tracked_name(run)
    except LoadError as error:
        problem = str(error)
    found = []
    for directory in iteration_directories(run) if unfinished else directories_of_run(run):
        checkpoint, index = look_at(directory, tracked=tracked)
        found.append(ListedCheckpoint(checkpoint, None if index is None else layout_of_chunks(index)))
    named = next((listed.checkpoint for listed in found if listed.checkpoint.tracked), None)
    if tracked is not None and named is None:
        problem = f"it names {tracked}, which is not there"
    elif named is not None and named.newer:
        problem = f"it names {tracked}, which this version cannot read: {named.newer}"
    elif named is not None and not named.whole:
        problem = f"it names {tracked}, which is incomplete: {named.problems[0]}"
    return RunReport(str(run), tracked, problem, tuple(found), unfinished)
