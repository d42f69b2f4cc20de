"""Settings that several families share: `config.json` to sizes and Megatron's arguments, and back.

What Megatron-Core has no layer for is refused in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._rotary import rope_arguments, rope_config
from mcore_ckpt.models.families._table import Model
from mcore_ckpt.models.families._values import count, epsilon_of, expect, groups_of, layer_count, number, setting

DECODER_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""What `transformers` takes for settings that a `config.json` leaves out; a family has others for some."""


def decoder_model(config: Mapping[str, Any], **more: Any) -> Model:
    """Sizes of a decoder with rotary embedding; `more` are further fields of `Model`, `sizes` among them."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    groups = count(config, "num_key_value_heads", heads)
    head_dim = count(config, "head_dim", max(1, hidden // heads))
    sizes = {
        "vocab": count(config, "vocab_size"),
        "hidden": hidden,
        "ffn": count(config, "intermediate_size"),
        "q": heads * head_dim,
        "kv": groups * head_dim,
        "head": head_dim,
        **more.pop("sizes", {}),
    }
    holds = set(more.pop("holds", ())) | (set() if config.get("tie_word_embeddings", False) else {"untied"})
    layers = layer_count(config)
    return Model(layers, sizes, heads, groups, head_dim, holds=frozenset(holds), **more)


def decoder_arguments(config: Mapping[str, Any], **constants: Any) -> dict[str, Any]:
    """Megatron's arguments for a decoder with rotary embedding, RMS norms and a gated MLP; `constants` override."""
    expect(config, "hidden_act", "silu")
    model = decoder_model(config)
    return {
        **model_arguments(model, count(config, "max_position_embeddings"), number(config, "rms_norm_eps")),
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **rope_arguments(config),
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "swiglu": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "window_size": None,
        **constants,
    }


def model_arguments(model: Model, positions: int, epsilon: float) -> dict[str, Any]:
    """Megatron's arguments for sizes, and for what few families have."""
    grouped = model.groups != model.heads
    return {
        "num_layers": model.layers,
        "hidden_size": model.sizes["hidden"],
        "ffn_hidden_size": model.sizes["ffn"],
        "num_attention_heads": model.heads,
        "group_query_attention": grouped,
        "num_query_groups": model.groups if grouped else 1,
        "kv_channels": model.head_dim,
        "max_position_embeddings": positions,
        "seq_length": positions,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": "untied" in model.holds,
        "vocab_size": model.sizes["vocab"],
    }


_DECODER = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False}


def decoder_config(
    arguments: Mapping[str, Any], vocabulary: int, other: Mapping[str, Any] | None = None, /, **fields: Any
) -> dict[str, Any]:
    """A `config.json` for such arguments; `fields` are added, and `other` is what the family has unlike most. Raises
    `OptionError` where the arguments ask for what the family has not.
    """
    for name, wanted in {**_DECODER, **(other or {})}.items():
        # Positions that are stretched by YaRN are rotary, too.
        if setting(arguments, name) != wanted and (setting(arguments, name), wanted) != ("yarn", "rope"):
            raise OptionError(
                f"the stored argument {name}={arguments.get(name)!r:.80}: expected {wanted!r} in this family"
            )
    for name in (
        "apply_layernorm_1p",
        "squared_relu",
        "rotary_interleaved",
        "apply_residual_connection_post_layernorm",
    ):
        if arguments.get(name):
            raise OptionError(f"the stored argument {name}={arguments[name]!r}: this family has no such layers")
    if number(arguments, "rotary_percent", 1.0) != 1.0:
        raise OptionError(f"the stored argument rotary_percent={arguments['rotary_percent']!r}: expected 1.0")
    hidden, heads = count(arguments, "hidden_size"), count(arguments, "num_attention_heads")
    positions = count(arguments, "max_position_embeddings")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": count(arguments, "ffn_hidden_size"),
        "num_hidden_layers": count(arguments, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups_of(arguments),
        "head_dim": count(arguments, "kv_channels", max(1, hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": epsilon_of(arguments),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "attention_dropout": 0.0,
        **rope_config(arguments),
        **fields,
    }


def expect_no_windows(config: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless all layers of a model that may have windows look at everything."""
    expect(config, "use_sliding_window", False)
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected 'full_attention' for all layers of this family")


def window_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """A window of attention: Hugging Face counts the token itself, Megatron those before it."""
    if config.get("sliding_window") is None:
        return {}
    return {"window_size": (count(config, "sliding_window") - 1, 0)}


def window_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The window as Hugging Face counts it."""
    window = arguments.get("window_size")
    if window is None:
        return {"sliding_window": None}
    if not isinstance(window, (list, tuple)) or len(window) != 2 or window[1] not in (0, -1):
        raise OptionError(f"the stored argument window_size={window!r:.80}: expected (tokens before, 0)")
    return {"sliding_window": count({"window_size": window[0]}, "window_size") + 1}


_OTHER_LAYERS = (
    "num_experts",
    "multi_latent_attention",
    "qk_layernorm",
    "add_qkv_bias",
    "window_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)


def is_plain_decoder(arguments: Mapping[str, Any], *has: str, may_have: tuple[str, ...] = ()) -> bool:
    """Whether arguments are of a decoder with RMS norms and gated MLPs that has these features, and no others."""
    if arguments.get("moe_shared_expert_gate"):
        may_have = (*may_have, "moe_shared_expert_intermediate_size")
    return (
        arguments.get("normalization") == "RMSNorm"
        and bool(arguments.get("swiglu"))
        and all(arguments.get(name) for name in has)
        and not any(arguments.get(name) for name in _OTHER_LAYERS if name not in (*has, *may_have))
    )


def check_router(arguments: Mapping[str, Any], **wanted: Any) -> None:
    """Raise `OptionError` where a router does what a family's does not."""
    for name, value in {"moe_router_score_function": "softmax", **wanted}.items():
        if setting(arguments, name, default=value) != value:
            raise OptionError(f"the stored argument {name}={arguments[name]!r:.80}: expected {value!r} in this family")
    for name in ("moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_group_topk"):
        if arguments.get(name) and name not in wanted:
            raise OptionError(f"the stored argument {name}={arguments[name]!r:.80}: this family's router has none")


def expert_arguments(config: Mapping[str, Any], model: Model, **constants: Any) -> dict[str, Any]:
    """Megatron's arguments for layers of experts; `constants` override."""
    layers = model.expert_layers
    found = {
        "num_experts": model.experts,
        "moe_ffn_hidden_size": model.sizes["expert ffn"],
        "moe_router_topk": count(config, "num_experts_per_tok"),
        "moe_layer_freq": 1 if all(layers) else [int(kind) for kind in layers],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        **constants,
    }
    softmax = found["moe_router_score_function"] == "softmax"
    if softmax and found["moe_router_topk"] == 1 and not found["moe_router_pre_softmax"]:
        raise OptionError(
            "num_experts_per_tok=1: the weight of the one expert is always one in this family; Megatron-Core has no "
            "such router (with moe_router_pre_softmax the weight is the probability, without it there have to be more)"
        )
    return found
