"""Signals that have waited for the end of a step are answered, however that ends."""

from __future__ import annotations

import os
import signal

import pytest

from mcore_ckpt.core.process import interruptible, interrupts_wait


def step_that_fails(*numbers: signal.Signals) -> None:
    with interrupts_wait():
        for number in numbers:
            os.kill(os.getpid(), number)
        raise ValueError("the save failed")


def test_signals_that_have_waited_are_answered_though_the_step_fails_and_a_ctrl_c_comes_last() -> None:
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(ValueError, match="the save failed"):
            step_that_fails(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        with interrupts_wait(), interruptible():
            with pytest.raises(ValueError, match="the save failed"):
                step_that_fails(signal.SIGUSR1)
            assert came == [signal.SIGUSR1] * 2
        with pytest.raises(KeyboardInterrupt):
            step_that_fails(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        assert came[2:] == [signal.SIGTERM, signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
