"""Single settings of a `config.json` or of Megatron's arguments.

Both come from files that are not trusted: each number is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError

_MOST = 2**40
MOST_LAYERS = 100_000


def count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive whole number of a configuration; raises `OptionError`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise OptionError(f"{name}={value!r:.80}: expected a positive whole number in the model's configuration")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number of a configuration; raises `OptionError`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST < value < _MOST:
        raise OptionError(f"{name}={value!r:.80}: expected a number in the model's configuration")
    return value


def layer_count(config: Mapping[str, Any], name: str = "num_hidden_layers") -> int:
    """How many layers; raises `OptionError` for more than any model has, before something is made for each."""
    layers = count(config, name)
    if layers > MOST_LAYERS:
        raise OptionError(f"{name}={layers}: no model has that many")
    return layers


def expect(config: Mapping[str, Any], name: str, *values: Any) -> None:
    """Raise `OptionError` unless a setting has one of these values, the first of which is what its absence means."""
    value = config.get(name, values[0])
    if value not in values:
        shown = " or ".join(map(repr, values))
        raise OptionError(f"{name}={value!r:.80}: this family's layers in Megatron-Core have {shown} only")


def setting(arguments: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first of some arguments that is there and not None: versions of Megatron call some things differently."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), default)


def epsilon_of(arguments: Mapping[str, Any]) -> float:
    """What norms add to the variance."""
    return number(
        {"norm_epsilon": setting(arguments, "norm_epsilon", "layernorm_epsilon", default=1e-5)}, "norm_epsilon"
    )


def groups_of(arguments: Mapping[str, Any]) -> int:
    """Groups of keys and values; without grouped attention each head has its own."""
    heads = count(arguments, "num_attention_heads")
    return count(arguments, "num_query_groups", heads) if arguments.get("group_query_attention") else heads


def expert_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer, whether it has experts, as Megatron's arguments say."""
    layers, frequency = count(arguments, "num_layers"), arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0 and layers <= MOST_LAYERS:
        return tuple(layer % frequency == 0 for layer in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(kind) for kind in frequency)
    raise OptionError(f"the stored argument moe_layer_freq={frequency!r:.80}: expected a number, or one for each layer")
