"""Mixtral, Qwen2-MoE and Qwen3-MoE: layers with experts.

Mixtral has Mistral's attention; of its experts `w1` is the gate, `w3` goes through it. Qwen2-MoE has shared experts
behind a gate, Qwen3-MoE has none; layers of both may have an MLP instead of experts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._rows import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    QK_NORM,
    QKV_BIAS,
    as_loaded,
    gated_experts,
    in_layer,
    shared_experts,
)
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    check_router,
    decoder_arguments,
    decoder_config,
    decoder_model,
    expect_no_windows,
    expert_arguments,
    is_plain_decoder,
    window_arguments,
    window_config,
)
from mcore_ckpt.models.families._table import Family, Model
from mcore_ckpt.models.families._values import count, expect, expert_layers_of, layer_count

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


def _experts_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts each token has, and the size of one inside."""
    inner = count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size"))
    return count(arguments, "moe_router_topk"), inner


# --- Mixtral


def _mixtral_model(config: Mapping[str, Any]) -> Model:
    experts, inner = count(config, "num_local_experts"), count(config, "intermediate_size")
    sizes = {"experts": experts, "expert ffn": inner, "expert gate and up": 2 * inner}
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=(True,) * layer_count(config))


def _mixtral_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = expert_arguments(config, _mixtral_model(config))
    return decoder_arguments(config, **window_arguments(config), **experts)


def _mixtral_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    check_router(arguments, moe_router_pre_softmax=False)
    chosen, inner = _experts_of(arguments)
    return decoder_config(
        arguments,
        vocabulary,
        **window_config(arguments),
        intermediate_size=inner,
        num_local_experts=count(arguments, "num_experts"),
        num_experts_per_tok=chosen,
    )


MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
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
    model_of=_mixtral_model,
    arguments_of=_mixtral_arguments,
    config_of=_mixtral_config,
    recognizes=lambda arguments: is_plain_decoder(arguments, "num_experts", may_have=("window_size",)),
)


# --- Qwen


def _expert_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    layers, step = layer_count(config), count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or len(dense) > layers:
        raise OptionError(f"mlp_only_layers={dense!r:.80}: expected a list of layers, of {layers}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _qwen_model(config: Mapping[str, Any], **sizes: int) -> Model:
    experts = count(config, "num_experts", config.get("num_local_experts"))
    inner = count(config, "moe_intermediate_size")
    sizes = {"experts": experts, "expert ffn": inner, "expert gate and up": 2 * inner, **sizes}
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=_expert_layers(config))


def _qwen2_model(config: Mapping[str, Any]) -> Model:
    return _qwen_model(config, **{"shared ffn": count(config, "shared_expert_intermediate_size")})


def _qwen_arguments(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Arguments of the experts. Weights that are not normalized are those among all: softmax before the choice."""
    expect_no_windows(config)
    return expert_arguments(config, model, moe_router_pre_softmax=not config.get("norm_topk_prob", False))


def _qwen2_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "qkv_bias", True)
    model = _qwen2_model(config)
    return decoder_arguments(
        config,
        add_qkv_bias=True,
        moe_shared_expert_intermediate_size=model.sizes["shared ffn"],
        moe_shared_expert_gate=True,
        **_qwen_arguments(config, model),
    )


def _qwen3_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "attention_bias", False)
    return decoder_arguments(config, qk_layernorm=True, **_qwen_arguments(config, _qwen_model(config)))


def _qwen_config(arguments: Mapping[str, Any], vocabulary: int, **fields: Any) -> dict[str, Any]:
    check_router(arguments)
    (chosen, inner), layers = _experts_of(arguments), expert_layers_of(arguments)
    return decoder_config(
        arguments,
        vocabulary,
        num_experts=count(arguments, "num_experts"),
        num_experts_per_tok=chosen,
        moe_intermediate_size=inner,
        norm_topk_prob=not arguments.get("moe_router_pre_softmax"),
        decoder_sparse_step=1,
        mlp_only_layers=[layer for layer, has_experts in enumerate(layers) if not has_experts],
        use_sliding_window=False,
        **fields,
    )


def _qwen2_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    shared = count(arguments, "moe_shared_expert_intermediate_size")
    return _qwen_config(arguments, vocabulary, shared_expert_intermediate_size=shared, qkv_bias=True)


QWEN2_MOE = Family(
    name="qwen2-moe",
    model_types=("qwen2_moe",),
    architecture="Qwen2MoeForCausalLM",
    rows=_QWEN2_ROWS,
    loaded=as_loaded(_QWEN2_ROWS),
    defaults={**_QWEN_DEFAULTS, "num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True},
    model_of=_qwen2_model,
    arguments_of=_qwen2_arguments,
    config_of=_qwen2_config,
    recognizes=lambda given: is_plain_decoder(given, "num_experts", "add_qkv_bias", "moe_shared_expert_gate"),
)

QWEN3_MOE = Family(
    name="qwen3-moe",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    rows=_QWEN3_ROWS,
    loaded=as_loaded(_QWEN3_ROWS),
    defaults={**_QWEN_DEFAULTS, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    model_of=_qwen_model,
    arguments_of=_qwen3_arguments,
    config_of=functools.partial(_qwen_config, attention_bias=False),
    recognizes=lambda given: is_plain_decoder(given, "num_experts", "qk_layernorm"),
)
