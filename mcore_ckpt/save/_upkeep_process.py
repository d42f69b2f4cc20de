"""The process that removes a run's old checkpoints during training: one task for each line that comes in. No torch."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointError
from mcore_ckpt.core.process import exit_with_parent, lower_priority
from mcore_ckpt.core.signals import leave_signals_to_parent
from mcore_ckpt.directory.iterations import tracked_name
from mcore_ckpt.directory.retention import prune_run

# Megatron writes the tracker file after the save has been published, a moment later. Before that, it names the
# checkpoint before, which therefore would stay.
_TRACKER_WITHIN_S: Final = 30.0
_LONGEST_PERIOD_S: Final = 4.0


def main(parent_pid: int, cpu_priority: int | None) -> None:
    """Work until the trainer closes the pipe and all is done; end at once when the trainer is gone."""
    leave_signals_to_parent()
    exit_with_parent(parent_pid)
    lower_priority(cpu_priority, None)
    tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    ends = threading.Event()
    threading.Thread(target=_receive, args=(tasks, ends), daemon=True).start()
    while (task := tasks.get()) is not None:
        _await_tracker(task["run"], task["name"], lambda period_s: ends.wait(period_s) or not tasks.empty())
        if tasks.empty() or ends.is_set():  # otherwise a later save asks for the same
            _remove_old(**task)


def _receive(tasks: queue.SimpleQueue[dict[str, Any] | None], ends: threading.Event) -> None:
    for line in sys.stdin:
        if (task := json.loads(line)) is None:
            break
        tasks.put(task)
    ends.set()
    tasks.put(None)


def _say(level: int, text: str) -> None:
    sys.stdout.write(json.dumps([level, text]) + "\n")
    sys.stdout.flush()


def _await_tracker(run: str, name: str, wait: Callable[[float], bool]) -> None:
    """Return when the tracker file names a checkpoint, or when `wait` says that it does not matter any more; or after
    some time, since not every trainer has such a file.
    """
    until_s = time.monotonic() + _TRACKER_WITHIN_S
    period_s = 0.1
    while time.monotonic() < until_s:
        try:
            if tracked_name(run) == name:
                return
        except CheckpointError:
            pass  # the removal says so
        if wait(period_s):
            return
        period_s = min(2 * period_s, _LONGEST_PERIOD_S)


def _remove_old(run: str, name: str, keep_last: int, keep_every: int | None) -> None:
    try:
        report = prune_run(run, keep_last=keep_last, keep_every=keep_every, remove=True, saved_last=name)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is for the log: the next save tries again)
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        _say(logging.WARNING, f"{run}: old checkpoints could not be removed after {name}: {kind}{error}")
        return
    gone = [decision.checkpoint.name for decision in report.decisions if not decision.keep]
    if gone:
        _say(logging.INFO, f"{run}: removed {', '.join(gone)} ({report.freed_bytes / 1e9:.2f} GB) after {name}")
