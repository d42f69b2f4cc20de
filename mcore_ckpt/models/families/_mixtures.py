"""Mixtral, Qwen2-MoE, Qwen3-MoE and GPT-OSS: layers with experts.

Mixtral has Mistral's attention; of its experts `w1` is the gate, `w3` goes through it. Qwen2-MoE has shared experts
behind a gate, Qwen3-MoE has none; layers of both may have an MLP instead of experts.

GPT-OSS has attention with a sink for each head, in a window in every other layer; experts with biases, and YaRN.
Hugging Face keeps all its experts of a layer in one tensor, inputs before outputs, gate and up side by side in pairs.
Its `sinks` are `softmax_offset` in Megatron-Core, and the clamped gate is `quick_geglu` with a limit and an offset.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._settings import (
    ATTENTION,
    DECODER,
    DECODER_DEFAULTS,
    DENSE_MLP,
    EMBEDDING,
    EXPERT_NORM,
    QK_NORM,
    QKV_BIAS,
    SILU,
    as_loaded,
    count,
    decoder_arguments,
    decoder_config,
    decoder_model,
    expert_arguments,
    expert_layers_of,
    experts_of,
    gated_experts,
    in_layer,
    layer_count,
    number,
    rope_settings,
    shared_experts,
    yarn_arguments,
    yarn_config,
)
from mcore_ckpt.models.families._table import Family, Model

_QWEN_DEFAULTS = {
    **DECODER_DEFAULTS,
    "decoder_sparse_step": 1,
    "layer_types": None,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "use_sliding_window": False,
}
_QWEN_EXPERTS = gated_experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_ROWS = (*EMBEDDING, *ATTENTION, *gated_experts("block_sparse_moe", "w1", "w3", "w2"))
_QWEN2_ROWS = (
    *EMBEDDING,
    *ATTENTION,
    *QKV_BIAS,
    *DENSE_MLP,
    *_QWEN_EXPERTS,
    *shared_experts("mlp.shared_expert"),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight [1, hidden]", when="expert layer"),
)
_QWEN3_ROWS = (*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, *_QWEN_EXPERTS)


def _mixtral_model(config: Mapping[str, Any]) -> Model:
    experts, inner = count(config, "num_local_experts"), count(config, "intermediate_size")
    sizes = {"experts": experts, "expert ffn": inner, "expert gate and up": 2 * inner}
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=(True,) * layer_count(config))


def _mixtral_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_arguments(family, config, **expert_arguments(config, family.model_of(config)))


def _mixtral_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    chosen, inner = experts_of(arguments)
    more = {"num_local_experts": count(arguments, "num_experts"), "num_experts_per_tok": chosen}
    return decoder_config(family, arguments, vocabulary, intermediate_size=inner, **more)


MIXTRAL = DECODER(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rows=_MIXTRAL_ROWS,
    loaded=as_loaded(_MIXTRAL_ROWS, "block_sparse_moe"),
    defaults={
        **DECODER_DEFAULTS,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    traits="RMSNorm swiglu num_experts",
    may_have="window_size",
    model_of=_mixtral_model,
    arguments_of=_mixtral_arguments,
    config_of=_mixtral_config,
)


def _expert_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    layers, step = layer_count(config), count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or len(dense) > layers:
        raise OptionError(f"mlp_only_layers={dense!r:.80}: expected a list of layers, of {layers}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _qwen_model(config: Mapping[str, Any], **more: int) -> Model:
    experts = count(config, "num_experts", config.get("num_local_experts"))
    inner = count(config, "moe_intermediate_size")
    sizes = {"experts": experts, "expert ffn": inner, "expert gate and up": 2 * inner}
    return decoder_model(config, sizes={**sizes, **more}, experts=experts, expert_layers=_expert_layers(config))


def _qwen2_model(config: Mapping[str, Any]) -> Model:
    return _qwen_model(config, **{"shared ffn": count(config, "shared_expert_intermediate_size")})


def _qwen_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that are not normalized are those among all experts: softmax before the choice."""
    model = family.model_of(config)
    experts = expert_arguments(config, model, moe_router_pre_softmax=not config.get("norm_topk_prob", False))
    shared = (
        {"moe_shared_expert_intermediate_size": model.sizes["shared ffn"]}
        if family.has("moe_shared_expert_gate")
        else {}
    )
    return decoder_arguments(family, config, **experts, **shared)


def _qwen_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    (chosen, inner), layers = experts_of(arguments), expert_layers_of(arguments)
    shared = count(arguments, "moe_shared_expert_intermediate_size") if family.has("moe_shared_expert_gate") else None
    return decoder_config(
        family,
        arguments,
        vocabulary,
        num_experts=count(arguments, "num_experts"),
        num_experts_per_tok=chosen,
        moe_intermediate_size=inner,
        norm_topk_prob=not arguments.get("moe_router_pre_softmax"),
        decoder_sparse_step=1,
        mlp_only_layers=[layer for layer, has_experts in enumerate(layers) if not has_experts],
        **({} if shared is None else {"shared_expert_intermediate_size": shared}),
    )


_QWEN_MOE = functools.partial(DECODER, model_of=_qwen_model, arguments_of=_qwen_arguments, config_of=_qwen_config)

QWEN2_MOE = _QWEN_MOE(
    name="qwen2-moe",
    architecture="Qwen2MoeForCausalLM",
    rows=_QWEN2_ROWS,
    loaded=as_loaded(_QWEN2_ROWS),
    defaults={**_QWEN_DEFAULTS, "num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True},
    settings={**SILU, "use_sliding_window": (False,), "qkv_bias": (True,)},
    constants={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    model_of=_qwen2_model,
    traits="RMSNorm swiglu num_experts add_qkv_bias moe_shared_expert_gate moe_shared_expert_intermediate_size",
)

QWEN3_MOE = _QWEN_MOE(
    name="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    rows=_QWEN3_ROWS,
    loaded=as_loaded(_QWEN3_ROWS),
    defaults={**_QWEN_DEFAULTS, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    settings={**SILU, "use_sliding_window": (False,), "attention_bias": (False,)},
    constants={"qk_layernorm": True},
    traits="RMSNorm swiglu num_experts qk_layernorm",
)


_GPT_OSS_EXPERT = "mlp.experts.experts.{expert}."
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

_GPT_OSS_ROWS = (
    in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias [hidden]"),
    in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks [heads]"),
    EXPERT_NORM,
    in_layer("mlp.router.weight", "mlp.router.weight [experts, hidden]"),
    in_layer("mlp.router.bias", "mlp.router.bias [experts]"),
    in_layer(
        f"{_GPT_OSS_EXPERT}linear_fc1.weight",
        "mlp.experts.gate_up_proj [experts, hidden, expert ffn x 2]",
        how="pairs of all experts",
    ),
    in_layer(
        f"{_GPT_OSS_EXPERT}linear_fc1.bias",
        "mlp.experts.gate_up_proj_bias [experts, expert ffn x 2]",
        how="pairs of all experts",
    ),
    in_layer(
        f"{_GPT_OSS_EXPERT}linear_fc2.weight",
        "mlp.experts.down_proj [experts, expert ffn, hidden]",
        how="of all experts",
    ),
    in_layer(f"{_GPT_OSS_EXPERT}linear_fc2.bias", "mlp.experts.down_proj_bias [experts, hidden]", how="of all experts"),
)


def _gpt_oss_model(config: Mapping[str, Any]) -> Model:
    experts = count(config, "num_local_experts", config.get("num_experts"))
    sizes = {
        "experts": experts,
        "expert ffn": count(config, "intermediate_size"),
        "heads": count(config, "num_attention_heads"),
    }
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=(True,) * layer_count(config))


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


def _gpt_oss_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    model, rope = _gpt_oss_model(config), rope_settings(config, "yarn", otherwise=_ROPE)
    return decoder_arguments(
        family,
        {**config, "rope_parameters": None, "rope_scaling": None, "layer_types": None},
        rotary_base=rope["rope_theta"],
        **yarn_arguments(rope, "yarn_"),
        window_size=(count(config, "sliding_window") - 1, 0),
        window_attn_skip_freq=_window_layers(config, model.layers),
        activation_func_clamp_value=float(number(config, "swiglu_limit")),
        **expert_arguments(config, model),
    )


def _gpt_oss_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    chosen, inner = experts_of(arguments)
    return decoder_config(
        family,
        arguments,
        vocabulary,
        rope_theta=float(number(arguments, "rotary_base", 150000)),
        rope_scaling=yarn_config(arguments, "yarn_"),
        intermediate_size=inner,
        num_local_experts=count(arguments, "num_experts"),
        num_experts_per_tok=chosen,
        layer_types=_layer_types(arguments, layer_count(arguments, "num_layers")),
        swiglu_limit=number(arguments, "activation_func_clamp_value"),
    )


GPT_OSS = DECODER(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *_GPT_OSS_ROWS),
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
    settings={**SILU, "attention_bias": (True,), "swiglu_alpha": (_ALPHA,)},
    constants={
        "position_embedding_type": "yarn",
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "bias_gelu_fusion": False,  # fused, Megatron-Core (0.16, 0.19) clamps before it adds the bias
    },
    traits="RMSNorm quick_geglu num_experts add_qkv_bias add_bias_linear window_size",
    model_of=_gpt_oss_model,
    arguments_of=_gpt_oss_arguments,
    config_of=_gpt_oss_config,
)
