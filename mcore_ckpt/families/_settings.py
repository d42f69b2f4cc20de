"""Settings that several families share: `config.json` to sizes and Megatron's arguments, and back.

A `config.json` comes from a file that nobody vouches for: each number is looked at before it is used. What
Megatron-Core has no layer for is refused, in both directions: a model that computes something else is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.families.table import Model

__all__ = [
    "check_router",
    "count",
    "decoder_arguments",
    "decoder_config",
    "decoder_model",
    "epsilon_of",
    "expect",
    "expert_arguments",
    "groups_of",
    "number",
    "rope_arguments",
    "rope_config",
    "setting",
    "window_arguments",
    "window_config",
]

_MOST = 2**40
_MOST_LAYERS = 100_000
# What Megatron-Core's scaled rotary embedding has fixed, by the names of Hugging Face.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


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
    if layers > _MOST_LAYERS:
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
    grouped = model.groups != model.heads
    epsilon = number(config, "rms_norm_eps", 1e-6)
    positions = count(config, "max_position_embeddings")
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
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **rope_arguments(config),
        "normalization": "RMSNorm",
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "squared_relu": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": "untied" in model.holds,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": model.sizes["vocab"],
        **constants,
    }


_DECODER = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False}


def decoder_config(
    arguments: Mapping[str, Any], vocabulary: int, other: Mapping[str, Any] | None = None, /, **fields: Any
) -> dict[str, Any]:
    """A `config.json` for such arguments; `fields` are added, and `other` is what the family has unlike most.

    Raises:
        OptionError: the arguments ask for what the family has not.
    """
    for name, wanted in {**_DECODER, **(other or {})}.items():
        if setting(arguments, name) != wanted:
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


def rope_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's rotary arguments; `transformers` 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise OptionError(f"rope_parameters={scaling!r:.80}: expected settings by name")
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    base = int(theta) if theta == int(theta) else theta
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {"rotary_base": base, "use_rope_scaling": False}
    if kind == "linear":
        return {
            "rotary_base": base,
            "use_rope_scaling": False,
            "rotary_seq_len_interpolation_factor": number(scaling, "factor"),
        }
    if kind != "llama3":
        raise OptionError(f"rotary scaling {kind!r}: expected none, 'linear' or 'llama3' for this family")
    for name, fixed in _LLAMA3_SCALING.items():
        if number(scaling, name, fixed) != fixed:
            raise OptionError(f"rotary scaling with {name}={scaling[name]!r}: Megatron-Core has {fixed} built in")
    return {"rotary_base": base, "use_rope_scaling": True, "rope_scaling_factor": number(scaling, "factor")}


def rope_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as any `transformers` reads them."""
    theta = float(number(arguments, "rotary_base", 10000))
    scaling: dict[str, Any] | None = None
    if arguments.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": number(arguments, "rope_scaling_factor", 8.0), **_LLAMA3_SCALING}
    elif number(arguments, "rotary_seq_len_interpolation_factor", 1) != 1:
        scaling = {"rope_type": "linear", "factor": float(number(arguments, "rotary_seq_len_interpolation_factor"))}
    return {"rope_theta": theta, "rope_scaling": scaling}


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


def expert_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer, whether it has experts, as Megatron's arguments say."""
    layers, frequency = count(arguments, "num_layers"), arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0 and layers <= _MOST_LAYERS:
        return tuple(layer % frequency == 0 for layer in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(kind) for kind in frequency)
    raise OptionError(f"the stored argument moe_layer_freq={frequency!r:.80}: expected a number, or one for each layer")


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
    return {
        "num_experts": model.experts,
        "moe_ffn_hidden_size": model.sizes["expert ffn"],
        "moe_router_topk": count(config, "num_experts_per_tok"),
        "moe_layer_freq": 1 if all(layers) else [int(kind) for kind in layers],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        **constants,
    }
