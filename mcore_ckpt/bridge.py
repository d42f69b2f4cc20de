"""Megatron-Bridge's checkpoints: `CheckpointConfig.custom_manager_class = "mcore_ckpt.bridge.CheckpointManager"`.

Written for the protocol of Megatron-Bridge 0.6.2. Naming the class is all that a user does; the launcher or `install()`
must have run in the process, so that Bridge's list of allowed classes lets it in.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from megatron.bridge.training.checkpointing import DefaultCheckpointManager

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointError, LoadError
from mcore_ckpt.core.options import SaveOptions, store_url
from mcore_ckpt.core.ranks import coordination_group
from mcore_ckpt.directory.iterations import iteration_directories, look_at
from mcore_ckpt.format.metadata_read import TRACKER_FILE
from mcore_ckpt.megatron.install import install
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of("mcore_ckpt")
_STATE, _CONFIG, _LATEST = "train_state.pt", "run_config.yaml", "latest_train_state.pt"


class CheckpointManager(DefaultCheckpointManager):  # type: ignore[misc]
    """Bridge's own manager, on strategies and queues of this package. Besides:

    - A checkpoint counts when its side files are there, too. What a crash between `.metadata`, tracker, train state and
      `run_config.yaml` has left is passed over: the tracker files then name the checkpoint before it.
    - `most_recent_k` is served by `keep_last`: the newest complete checkpoint is never removed, also while an
      asynchronous save is in flight.
    - With `MCORE_CKPT_ON_FAILURE=warn` training survives a save that has failed.

    Attributes:
        failed_saves: synchronous saves that training has survived; the queue counts the asynchronous ones.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        install()
        super().__init__(checkpoint_config)
        self.failed_saves = 0
        self._on_failure = SaveOptions.from_environment().on_failure
        if checkpoint_config.most_recent_k > 0:
            os.environ.setdefault("MCORE_CKPT_KEEP_LAST", str(checkpoint_config.most_recent_k))
        runs = [run for run in dict.fromkeys((checkpoint_config.load, checkpoint_config.save)) if run is not None]
        for run in runs:  # in one order on all ranks
            if store_url(run) is None:
                look = partial(fall_back, Path(run))
                coordination_group().run_on_coordinator("look at the tracker files of a run", look, wrap=LoadError)

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save a checkpoint; see `DefaultCheckpointManager.save`."""
        config = ctx.state.cfg.checkpoint
        keep, config.most_recent_k = config.most_recent_k, -1  # ours removes the older ones
        try:
            super().save(ctx, callback_manager)
        except CheckpointError as error:
            if self._on_failure == "raise":
                raise
            self.failed_saves += 1
            _logger.warning("a save has failed, and training continues: %s", error)
        finally:
            config.most_recent_k = keep


def fall_back(run: Path) -> int | None:
    """Let the tracker files of a run of Bridge name a checkpoint that is complete with its side files.

    Returns:
        The iteration that they name now, if they were changed; None if they were right, or there are none.
    """
    tracker, latest = run / TRACKER_FILE, run / _LATEST
    if not tracker.is_file() and not latest.is_file():
        return None
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    named = int(text) if text.isdecimal() else None
    whole = {int(path.name[5:]): path for path in iteration_directories(run) if _is_whole(path)}
    if named in whole and latest.is_file() and latest.read_bytes() == (whole[named] / _STATE).read_bytes():
        return None
    older = [number for number in whole if named is None or number <= named]
    if not older:
        return None  # nothing better: Bridge says what is missing
    number = max(older)
    storage = storage_at(run)
    storage.publish(_LATEST, (whole[number] / _STATE).read_bytes())
    storage.publish(TRACKER_FILE, str(number).encode())
    _logger.warning(
        "%s: the checkpoint that %s names (%s) is not complete with %s and %s; they name iteration %d now",
        run,
        TRACKER_FILE,
        text or "nothing",
        _STATE,
        _CONFIG,
        number,
    )
    return number


def _is_whole(directory: Path) -> bool:
    side_files = [directory / name for name in (_STATE, _CONFIG)]
    return all(path.is_file() and path.stat().st_size > 0 for path in side_files) and look_at(directory)[0].whole
