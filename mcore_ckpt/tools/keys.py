"""Keys by pattern, in the one way that all commands understand: a shell pattern, or a part of the key.

Renaming keys by rules, for export and import.

What a tensor is, from its key: embedding, attention, experts, ..., or which state of the optimizer.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mcore_ckpt.core.errors import OptionError

__all__ = [
    "RenameRule",
    "StackedAxes",
    "group_of",
    "is_optimizer_key",
    "key_filter",
    "layer_number",
    "model_key",
    "parse_rename_rules",
    "rename_keys",
    "stacked_axes",
]


def key_filter(pattern: str | None) -> Callable[[str], bool]:
    """A test for keys.

    Args:
        pattern: with any of `*?[`, a shell pattern for the whole key (`*` also passes dots); otherwise a part of it.
            None and `""` match everything.
    """
    if not pattern:
        return lambda key: True
    if any(character in pattern for character in "*?["):
        match = re.compile(fnmatch.translate(pattern)).match
        return lambda key: match(key) is not None
    return lambda key: pattern in key


_DROP = "-"


class RenameRule(NamedTuple):
    """Keys in which the pattern is found get the replacement for it; None drops them."""

    pattern: re.Pattern[str]
    replacement: str | None


def parse_rename_rules(text: str, where: str) -> list[RenameRule]:
    r"""Rules from text, one a line: a regular expression, then what to put for it, or `-` to drop the key.

        ^decoder\.layers\.(\d+)\.     model.layers.\1.
        _extra_state                  -

    `#` starts a comment.

    Raises:
        OptionError: a line is none of that.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(" #", 1)[0].split() if not line.lstrip().startswith("#") else []
        if not words:
            continue
        if len(words) != 2:
            raise OptionError(f"{where}, line {number}: {line.strip()!r}: expected PATTERN REPLACEMENT, or PATTERN -")
        try:
            pattern = re.compile(words[0])
        except re.error as error:
            raise OptionError(f"{where}, line {number}: {words[0]!r} is no regular expression: {error}") from error
        rules.append(RenameRule(pattern, None if words[1] == _DROP else words[1]))
    return rules


def rename_keys(keys: Iterable[str], rules: Sequence[RenameRule]) -> dict[str, str]:
    """New names by old ones; dropped keys are left out. The first rule that finds something in a key applies.

    Raises:
        OptionError: two keys get the same name, or a replacement refers to a group that is not there.
    """
    renamed: dict[str, str] = {}
    origin: dict[str, str] = {}
    for key in keys:
        new: str | None = key
        for rule in rules:
            if rule.pattern.search(key):
                try:
                    new = None if rule.replacement is None else rule.pattern.sub(rule.replacement, key)
                except (re.error, IndexError) as error:
                    raise OptionError(
                        f"replacement {rule.replacement!r} of {rule.pattern.pattern!r}: {error}"
                    ) from error
                break
        if new is None:
            continue
        if new in origin:
            raise OptionError(f"{key} and {origin[new]} would both be called {new}; correct the rename rules")
        origin[new] = key
        renamed[key] = new
    return renamed


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


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_number(fqn: str) -> int | None:
    """The layer that a key names (`decoder.layers.3.mlp...`), or None."""
    found = _LAYER.search(fqn)
    return int(found.group(1)) if found else None


def is_optimizer_key(fqn: str) -> bool:
    """Whether a key belongs to the optimizer's state (Megatron's layouts, and DCP's `optim.` and `optimizer.`)."""
    first = fqn.split(".", 1)[0]
    return first in ("optimizer", "optim", "optimizers") or first.startswith("chained_")


class StackedAxes(NamedTuple):
    """Leading axes that count layers and experts; None where there is none. `own` is the parameter's first own axis."""

    layer: int | None
    expert: int | None
    own: int


_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")


_STACKED_EXPERTS = re.compile(r"\.experts\.(?!\d)(?:experts\.(?!\d))?")


_OPTIMIZER_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.[^.]+\.(?P<key>.+)$")


def model_key(fqn: str) -> str:
    """The parameter that an optimizer state belongs to (`optimizer.state.exp_avg.<key>`); other keys as they are."""
    found = _OPTIMIZER_STATE.match(fqn)
    return found.group("key") if found else fqn


def stacked_axes(fqn: str, shape: Sequence[int]) -> StackedAxes:
    """Which leading axes count layers and experts, from the key."""
    key = model_key(fqn)
    layer = 0 if _STACKED_LAYERS.search(key) and len(shape) > 1 else None
    at = 0 if layer is None else 1
    expert = at if _STACKED_EXPERTS.search(key) and ".shared_experts." not in key and len(shape) > at + 1 else None
    return StackedAxes(layer, expert, at + (expert is not None))
