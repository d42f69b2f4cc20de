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


def test_a_signal_that_has_waited_is_answered_though_the_step_fails() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with pytest.raises(ValueError, match="the save failed"):
            step_that_fails(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        with interrupts_wait(), interruptible():
            with pytest.raises(ValueError, match="the save failed"):
                step_that_fails(signal.SIGUSR1)
            assert came == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_ctrl_c_does_not_take_the_place_of_other_signals_that_have_waited() -> None:
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(KeyboardInterrupt):
            step_that_fails(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        assert came == [signal.SIGTERM, signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
