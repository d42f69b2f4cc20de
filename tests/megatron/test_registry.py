"""The registry: what a look-up returns, and what it says when there is nothing to return."""

from enum import Enum

import pytest

pytest.importorskip("megatron.core", reason="the strategies derive from Megatron's")

from mcore_ckpt import OptionError, StrategyNotFoundError, get_strategy, register_strategy
from mcore_ckpt.megatron import strategy as registry

pytestmark = pytest.mark.quick


class Action(Enum):
    """As Megatron's `StrategyAction`."""

    SAVE_SHARDED = "save_sharded"


class Strategy:
    """Stands for a strategy; callable, to show that an instance is not mistaken for a factory."""

    def save(self) -> None:
        """Save nothing."""

    def __call__(self) -> None:
        raise AssertionError("a strategy was called as if it were a factory")


def test_a_factory_is_called_at_each_look_up_and_an_instance_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    register_strategy("save_sharded", "mine", 3, Strategy)
    first, second = get_strategy("save_sharded", "mine", 3), get_strategy(Action.SAVE_SHARDED, "mine", 3)
    assert isinstance(first, Strategy)
    assert first is not second
    register_strategy(Action.SAVE_SHARDED, "mine", 3, first)  # a later registration wins
    assert get_strategy("save_sharded", "mine", 3) is get_strategy(Action.SAVE_SHARDED, "mine", 3) is first
    with pytest.raises(StrategyNotFoundError) as caught:
        get_strategy("save_sharded", "zarr", 1)
    for named in (
        "save_sharded 'zarr' version 1",
        "save_sharded 'mine' version 3",
        "load_sharded 'torch_dist' version 1",
    ):
        assert named in str(caught.value)
    with pytest.raises(OptionError, match="load_sharded"):
        register_strategy("save", "mine", 1, Strategy)
