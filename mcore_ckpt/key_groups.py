"""What a tensor is, from its key: embedding, attention, experts, ..., or which state of the optimizer."""

from __future__ import annotations

from collections.abc import Callable

from mcore_ckpt.parallel_layout import is_optimizer_key

__all__ = ["group_of"]

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
