"""What the key of a tensor says: which kind it is, of which layer, which state of the optimizer, what its axes count.

And which keys a pattern names, in the one way that all commands understand.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple


def key_filter(pattern: str | None) -> Callable[[str], bool]:
    """A test for keys: with any of `*?[` by a shell pattern for the complete key, otherwise by a part of it."""
    if not pattern:
        return lambda key: True
    if any(character in pattern for character in "*?["):
        match = re.compile(fnmatch.translate(pattern)).match
        return lambda key: match(key) is not None
    return lambda key: pattern in key


def is_optimizer_key(fqn: str) -> bool:
    """Whether a key belongs to the optimizer's state (Megatron's layouts, and DCP's `optim.` and `optimizer.`)."""
    first = fqn.split(".", 1)[0]
    return first in ("optimizer", "optim", "optimizers") or first.startswith("chained_")


_OPTIMIZER_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.[^.]+\.(?P<key>.+)$")


def model_key(fqn: str) -> str:
    """The parameter that an optimizer state belongs to (`optimizer.state.exp_avg.<key>`); other keys as they are."""
    found = _OPTIMIZER_STATE.match(fqn)
    return found.group("key") if found else fqn


# What a key is about, most telling first.
_GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("embedding", lambda key: "embedding" in key),
    ("output layer", lambda key: "output_layer" in key or "lm_head" in key),
    ("norm", lambda key: "norm" in key.rsplit(".", 2)[-2:][0] or "norm" in key.rsplit(".", 1)[-1]),
    ("router", lambda key: ".router." in key),
    ("shared experts", lambda key: "shared_experts." in key),
    ("experts", lambda key: ".experts." in key),
    ("attention", lambda key: "attention." in key or "attn." in key),
    ("mamba", lambda key: ".mixer." in key),
    ("mlp", lambda key: ".mlp." in key),
)
_STATES = ("exp_avg_sq", "exp_avg", "momentum_buffer", "fp32_param", "param")


def group_of(fqn: str) -> str:
    """The kind of tensor that a key names: `"attention"`, `"mlp"`, `"optimizer exp_avg"`, ..."""
    if is_optimizer_key(fqn):
        parts = fqn.split(".")
        state = next((state for state in _STATES if state in parts), None)
        return f"optimizer {state}" if state else "optimizer"
    return next((group for group, matches in _GROUPS if matches(fqn)), "other")


_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def layer_number(fqn: str) -> int | None:
    """The layer that a key names (`decoder.layers.3.mlp...`), or None."""
    found = _LAYER.search(fqn)
    return int(found.group(1)) if found else None


_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_STACKED_EXPERTS = re.compile(r"\.experts\.(?!\d)(?:experts\.(?!\d))?")


class StackedAxes(NamedTuple):
    """Leading axes that count layers and experts; None where there is none. `own` is the parameter's first own axis."""

    layer: int | None
    expert: int | None
    own: int


def stacked_axes(fqn: str, shape: Sequence[int]) -> StackedAxes:
    """Which leading axes count layers and experts, from the key."""
    key = model_key(fqn)
    layer = 0 if _STACKED_LAYERS.search(key) and len(shape) > 1 else None
    at = 0 if layer is None else 1
    expert = at if _STACKED_EXPERTS.search(key) and ".shared_experts." not in key and len(shape) > at + 1 else None
    return StackedAxes(layer, expert, at + (expert is not None))
