"""What saves and loads cost, as scalars in the TensorBoard and Weights-and-Biases writers that a Megatron-LM job has.

Megatron-LM's training code makes both on its last rank; on others, and in other loops, nothing happens here. A thread
hands the scalars over: a writer that hangs keeps no save waiting, and one that fails is warned of once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.directory.in_force import iteration_of

_logger = logger_of(__name__)

_GLOBALS = "megatron.training.global_vars"


# Saves and loads that wait for a writer; of more, nothing is shown.
_MOST_WAITING = 16


class Curves:
    """Hands scalars to the writers, a save or load at a time."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._is_at_work = self._has_warned = False

    def show(self, directory: Path, scalars: Mapping[str, float]) -> None:
        """Hand over the scalars of a save or load of that checkpoint. Never raises, and never waits for a writer."""
        try:
            module: Any = sys.modules.get(_GLOBALS)
            board, wandb = (getattr(module, f"get_{name}_writer", lambda: None)() for name in ("tensorboard", "wandb"))
            if board is not None or wandb is not None:
                self._enqueue(partial(_hand_over, board, wandb, iteration_of(directory.name), scalars))
        except Exception as error:  # noqa: BLE001  (at the end of the interpreter no thread starts)
            self._warn(f"cannot be given those of {directory} ({type(error).__name__}: {error!s:.300})")

    def _enqueue(self, hand_over: Callable[[], None]) -> None:
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                self._warn(f"has not taken those of {_MOST_WAITING} saves and loads")
                return
            if not self._is_at_work:
                threading.Thread(target=self._work, daemon=True).start()
                self._is_at_work = True
            self._waiting.append(hand_over)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._is_at_work = bool(self._waiting)
                if not self._is_at_work:
                    return
                hand_over = self._waiting.pop(0)
            try:
                hand_over()
            except Exception as error:  # noqa: BLE001  (of a writer nothing may reach training)
                self._warn(f"fails ({type(error).__name__}: {error!s:.300})")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("curves of checkpoints are incomplete: a writer of TensorBoard or wandb %s", problem)


def _hand_over(board: Any, wandb: Any, iteration: int | None, scalars: Mapping[str, float]) -> None:
    if board is not None:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb is not None:  # into the step that it is at: it drops what belongs to an earlier one
        wandb.log(dict(scalars), commit=False)


show = Curves().show
