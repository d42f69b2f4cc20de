"""Mixtral: Mistral's attention, and in each layer experts instead of an MLP; `w1` is the gate, `w3` goes through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.models.families._rows import ATTENTION, EMBEDDING, as_loaded, gated_experts
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    check_router,
    decoder_arguments,
    decoder_config,
    decoder_model,
    expert_arguments,
    is_plain_decoder,
    window_arguments,
    window_config,
)
from mcore_ckpt.models.families._table import Family, Model
from mcore_ckpt.models.families._values import count, layer_count

__all__ = ["MIXTRAL"]


def _model(config: Mapping[str, Any]) -> Model:
    experts, inner = count(config, "num_local_experts"), count(config, "intermediate_size")
    sizes = {"experts": experts, "expert ffn": inner, "expert gate and up": 2 * inner}
    return decoder_model(config, sizes=sizes, experts=experts, expert_layers=(True,) * layer_count(config))


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_arguments(config, **window_arguments(config), **expert_arguments(config, _model(config)))


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    check_router(arguments, moe_router_pre_softmax=False)
    return decoder_config(
        arguments,
        vocabulary,
        **window_config(arguments),
        intermediate_size=count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size")),
        num_local_experts=count(arguments, "num_experts"),
        num_experts_per_tok=count(arguments, "moe_router_topk"),
    )


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments, "num_experts", may_have=("window_size",))


_ROWS = (*EMBEDDING, *ATTENTION, *gated_experts("block_sparse_moe", "w1", "w3", "w2"))

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    rows=_ROWS,
    loaded=as_loaded(_ROWS, "block_sparse_moe"),
    defaults={
        **DECODER_DEFAULTS,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    model_of=_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
)
