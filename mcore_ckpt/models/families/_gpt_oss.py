"""GPT-OSS: attention with a sink for each head, in a window in every other layer; experts with biases, and YaRN.

Hugging Face keeps all experts of a layer in one tensor, inputs before outputs, gate and up side by side in pairs. Its
`sinks` are `softmax_offset` in Megatron-Core, and the clamped gate is `quick_geglu` with a limit and an offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._rotary import rope_settings, yarn_arguments, yarn_config
from mcore_ckpt.models.families._rows import ATTENTION, EMBEDDING, EXPERT_NORM, QKV_BIAS, in_layer
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    check_router,
    decoder_arguments,
    decoder_config,
    decoder_model,
    expert_arguments,
    window_arguments,
    window_config,
)
from mcore_ckpt.models.families._table import Family, Model
from mcore_ckpt.models.families._values import count, expect, layer_count, number, setting

_EXPERT = "mlp.experts.experts.{expert}."
_WINDOW, _WHOLE = "sliding_attention", "full_attention"
_ALPHA = 1.702  # of the gate's sigmoid: built into Megatron-Core's quick_gelu
# What the class takes without rotary settings.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_ROWS = (
    in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias [hidden]"),
    in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks [heads]"),
    EXPERT_NORM,
    in_layer("mlp.router.weight", "mlp.router.weight [experts, hidden]"),
    in_layer("mlp.router.bias", "mlp.router.bias [experts]"),
    in_layer(
        f"{_EXPERT}linear_fc1.weight",
        "mlp.experts.gate_up_proj [experts, hidden, expert ffn x 2]",
        how="pairs of all experts",
    ),
    in_layer(
        f"{_EXPERT}linear_fc1.bias",
        "mlp.experts.gate_up_proj_bias [experts, expert ffn x 2]",
        how="pairs of all experts",
    ),
    in_layer(
        f"{_EXPERT}linear_fc2.weight", "mlp.experts.down_proj [experts, expert ffn, hidden]", how="of all experts"
    ),
    in_layer(f"{_EXPERT}linear_fc2.bias", "mlp.experts.down_proj_bias [experts, hidden]", how="of all experts"),
)


def _model(config: Mapping[str, Any]) -> Model:
    experts = count(config, "num_local_experts", config.get("num_experts"))
    sizes = {
        "experts": experts,
        "expert ffn": count(config, "intermediate_size"),
        "heads": count(config, "num_attention_heads"),
    }
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=(True,) * layer_count(config))


def _rotary_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    found = rope_settings(config, "yarn", otherwise=_ROPE)
    return {"position_embedding_type": "yarn", "rotary_base": found["rope_theta"], **yarn_arguments(found, "yarn_")}


def _rotary_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(number(arguments, "rotary_base", 150000))
    return {"rope_theta": theta, "rope_scaling": yarn_config(arguments, "yarn_")}


def _window_layers(config: Mapping[str, Any], layers: int) -> int | list[int]:
    """Which layers have a window, as Megatron-Core says it."""
    usual = [_WHOLE if (layer + 1) % 2 == 0 else _WINDOW for layer in range(layers)]
    kinds = config.get("layer_types") or usual
    if kinds == usual:
        return 2
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_WINDOW, _WHOLE) for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected {_WINDOW!r} or {_WHOLE!r} for each of {layers} layers")
    return [int(kind == _WINDOW) for kind in kinds]


def _layer_types(arguments: Mapping[str, Any], layers: int) -> list[str]:
    frequency = arguments.get("window_attn_skip_freq")
    if type(frequency) is int and frequency > 0:
        return [_WINDOW if (layer + 1) % frequency else _WHOLE for layer in range(layers)]
    if isinstance(frequency, list) and len(frequency) == layers:
        return [_WINDOW if kind else _WHOLE for kind in frequency]
    if frequency is None:
        return [_WINDOW] * layers
    raise OptionError(f"the stored argument window_attn_skip_freq={frequency!r:.80}: expected a number, or one a layer")


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "attention_bias", True)
    expect(config, "swiglu_alpha", _ALPHA)
    model = _model(config)
    plain = {**config, "rope_parameters": None, "rope_scaling": None}
    return decoder_arguments(
        plain,
        **_rotary_arguments(config),
        **window_arguments({"sliding_window": count(config, "sliding_window")}),
        window_attn_skip_freq=_window_layers(config, model.layers),
        softmax_type="learnable",
        add_bias_linear=True,
        add_qkv_bias=True,
        swiglu=False,
        quick_geglu=True,
        activation_func_clamp_value=float(number(config, "swiglu_limit")),
        glu_linear_offset=1.0,
        **expert_arguments(config, model),
    )


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    check_router(arguments, moe_router_pre_softmax=False)
    for name, wanted in (
        ("softmax_type", "learnable"),
        ("quick_geglu", True),
        ("glu_linear_offset", 1.0),
    ):
        if arguments.get(name) != wanted:
            raise OptionError(
                f"the stored argument {name}={arguments.get(name)!r:.80}: expected {wanted!r} in this family"
            )
    layers = layer_count(arguments, "num_layers")
    usual = {"swiglu": False, "add_bias_linear": True, "position_embedding_type": "yarn"}
    return {
        **decoder_config(arguments, vocabulary, usual),
        **_rotary_fields(arguments),
        **window_config(arguments),
        "intermediate_size": count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size")),
        "num_local_experts": count(arguments, "num_experts"),
        "num_experts_per_tok": count(arguments, "moe_router_topk"),
        "layer_types": _layer_types(arguments, layers),
        "attention_bias": True,
        "swiglu_limit": number(arguments, "activation_func_clamp_value"),
    }


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    return (
        bool(arguments.get("quick_geglu"))
        and bool(arguments.get("num_experts"))
        and setting(arguments, "softmax_type") == "learnable"
    )


GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *_ROWS),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "head_dim": 64,
        "layer_types": None,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": 7.0,
    },
    model_of=_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
)
