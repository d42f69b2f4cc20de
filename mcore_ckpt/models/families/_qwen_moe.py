"""Qwen2-MoE, which has shared experts behind a gate, and Qwen3-MoE, which has none; layers may have an MLP instead."""

from __future__ import annotations

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
)
from mcore_ckpt.models.families._table import Family, Model
from mcore_ckpt.models.families._values import count, expect, expert_layers_of, layer_count

__all__ = ["QWEN2_MOE", "QWEN3_MOE"]

_DEFAULTS = {
    **DECODER_DEFAULTS,
    "decoder_sparse_step": 1,
    "layer_types": None,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "use_sliding_window": False,
}
_SHARED_EXPERT = (
    *shared_experts("mlp.shared_expert"),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight [1, hidden]", when="expert layer"),
)


def _expert_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    layers, step = layer_count(config), count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or len(dense) > layers:
        raise OptionError(f"mlp_only_layers={dense!r:.80}: expected a list of layers, of {layers}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _model(config: Mapping[str, Any], **sizes: int) -> Model:
    experts = count(config, "num_experts", config.get("num_local_experts"))
    inner = count(config, "moe_intermediate_size")
    sizes = {"experts": experts, "expert ffn": inner, "expert gate and up": 2 * inner, **sizes}
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=_expert_layers(config))


def _qwen2_model(config: Mapping[str, Any]) -> Model:
    return _model(config, **{"shared ffn": count(config, "shared_expert_intermediate_size")})


def _router(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without being normalized among the chosen, weights are those among all: the softmax comes before the choice."""
    return {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}


def _fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `config.json` for the experts."""
    check_router(arguments)
    experts, layers = count(arguments, "num_experts"), expert_layers_of(arguments)
    return {
        "num_experts": experts,
        "num_experts_per_tok": count(arguments, "moe_router_topk"),
        "moe_intermediate_size": count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size")),
        "norm_topk_prob": not arguments.get("moe_router_pre_softmax"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(layers) if not has_experts],
        "use_sliding_window": False,
    }


def _qwen2_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect_no_windows(config)
    expect(config, "qkv_bias", True)
    model = _qwen2_model(config)
    return decoder_arguments(
        config,
        add_qkv_bias=True,
        moe_shared_expert_intermediate_size=model.sizes["shared ffn"],
        moe_shared_expert_gate=True,
        **expert_arguments(config, model, **_router(config)),
    )


def _qwen2_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    shared = count(arguments, "moe_shared_expert_intermediate_size")
    return decoder_config(
        arguments, vocabulary, **_fields(arguments), shared_expert_intermediate_size=shared, qkv_bias=True
    )


def _is_qwen2_moe(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments, "num_experts", "add_qkv_bias", "moe_shared_expert_gate")


def _is_qwen3_moe(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments, "num_experts", "qk_layernorm")


_QWEN2_MOE_ROWS = (
    *EMBEDDING,
    *ATTENTION,
    *QKV_BIAS,
    *DENSE_MLP,
    *gated_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    *_SHARED_EXPERT,
)

QWEN2_MOE = Family(
    name="qwen2-moe",
    model_types=("qwen2_moe",),
    architecture="Qwen2MoeForCausalLM",
    rows=_QWEN2_MOE_ROWS,
    loaded=as_loaded(_QWEN2_MOE_ROWS),
    defaults={**_DEFAULTS, "num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True},
    model_of=_qwen2_model,
    arguments_of=_qwen2_arguments,
    config_of=_qwen2_config,
    recognizes=_is_qwen2_moe,
)


def _qwen3_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect_no_windows(config)
    expect(config, "attention_bias", False)
    return decoder_arguments(config, qk_layernorm=True, **expert_arguments(config, _model(config), **_router(config)))


def _qwen3_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return decoder_config(arguments, vocabulary, **_fields(arguments), attention_bias=False)


_QWEN3_MOE_ROWS = (
    *EMBEDDING,
    *ATTENTION,
    *QK_NORM,
    *DENSE_MLP,
    *gated_experts("mlp", "gate_proj", "up_proj", "down_proj"),
)

QWEN3_MOE = Family(
    name="qwen3-moe",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    rows=_QWEN3_MOE_ROWS,
    loaded=as_loaded(_QWEN3_MOE_ROWS),
    defaults={**_DEFAULTS, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    model_of=_model,
    arguments_of=_qwen3_arguments,
    config_of=_qwen3_config,
    recognizes=_is_qwen3_moe,
)
