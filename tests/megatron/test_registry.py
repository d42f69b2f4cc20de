"""The registry: what a look-up returns, and what it says when there is nothing to return."""

from __future__ import annotations

from enum import Enum

import pytest

from mcore_ckpt import OptionError, StrategyNotFoundError, get_strategy, register_strategy
from mcore_ckpt.megatron import install as registry


class Action(Enum):
    """As Megatron's `StrategyAction`."""

    SAVE_SHARDED = "save_sharded"


class Strategy:
    """Stands for a strategy; callable, to show that an instance is not mistaken for a factory."""

    def save(self) -> None:
        """Save nothing."""

    def __call__(self) -> None:
        raise AssertionError("a strategy was called as if it were a factory")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


def test_a_factory_is_called_at_each_look_up_and_an_instance_is_shared() -> None:
    register_strategy("save_sharded", "mine", 1, Strategy)
    first, second = get_strategy("save_sharded", "mine", 1), get_strategy(Action.SAVE_SHARDED, "mine", 1)
    assert isinstance(first, Strategy)
    assert isinstance(second, Strategy)
    assert first is not second
    register_strategy(Action.SAVE_SHARDED, "mine", 1, first)  # a later registration wins
    assert get_strategy("save_sharded", "mine", 1) is get_strategy(Action.SAVE_SHARDED, "mine", 1) is first
    register_strategy("load_sharded", "torch_dist", 1, lambda: ("made", 2))
    assert get_strategy("load_sharded", "torch_dist", 1) == ("made", 2)


def test_what_is_registered_is_named_when_the_look_up_fails() -> None:
    register_strategy("save_sharded", "mine", 3, Strategy)
    with pytest.raises(StrategyNotFoundError) as caught:
        get_strategy("save_sharded", "zarr", 1)
    message = str(caught.value)
    assert "save_sharded 'zarr' version 1" in message
    assert "save_sharded 'mine' version 3" in message
    assert "load_sharded 'torch_dist' version 1" in message
    assert isinstance(caught.value, LookupError)


def test_an_unknown_action_is_refused_by_both() -> None:
    with pytest.raises(OptionError, match="load_sharded"):
        register_strategy("save", "mine", 1, Strategy)
    with pytest.raises(OptionError, match="save_common"):
        get_strategy("save", "mine", 1)
