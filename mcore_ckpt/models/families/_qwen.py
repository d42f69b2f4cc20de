"""Qwen2 and Qwen2.5, which have biases of queries, keys and values, and Qwen3, which has norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.models.families._rows import ATTENTION, DENSE_MLP, EMBEDDING, QK_NORM, QKV_BIAS
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    decoder_arguments,
    decoder_config,
    decoder_model,
    expect_no_windows,
    is_plain_decoder,
)
from mcore_ckpt.models.families._table import Family
from mcore_ckpt.models.families._values import expect

__all__ = ["QWEN2", "QWEN3"]

_DEFAULTS = {**DECODER_DEFAULTS, "layer_types": None, "num_key_value_heads": 32, "use_sliding_window": False}


def _qwen2_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect_no_windows(config)
    return decoder_arguments(config, add_qkv_bias=True)


def _qwen2_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return decoder_config(arguments, vocabulary, use_sliding_window=False)


def _is_qwen2(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments, "add_qkv_bias")


QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    defaults=_DEFAULTS,
    model_of=decoder_model,
    arguments_of=_qwen2_arguments,
    config_of=_qwen2_config,
    recognizes=_is_qwen2,
)


def _qwen3_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect_no_windows(config)
    expect(config, "attention_bias", False)
    return decoder_arguments(config, qk_layernorm=True)


def _qwen3_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return decoder_config(arguments, vocabulary, use_sliding_window=False, attention_bias=False)


def _is_qwen3(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments, "qk_layernorm")


QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP),
    defaults={
        **DECODER_DEFAULTS,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "layer_types": None,
        "use_sliding_window": False,
    },
    model_of=decoder_model,
    arguments_of=_qwen3_arguments,
    config_of=_qwen3_config,
    recognizes=_is_qwen3,
)
