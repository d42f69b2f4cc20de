"""Llama, Mistral, Qwen2 and Qwen3: decoders with grouped attention, a gated MLP and rotary embedding.

Attention of Mistral may be limited to a window. Qwen2 and Qwen2.5 have biases of queries, keys and values, Qwen3 has
norms of queries and keys.
"""

from __future__ import annotations

import functools
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
    window_arguments,
    window_config,
)
from mcore_ckpt.models.families._table import Family
from mcore_ckpt.models.families._values import expect

_QWEN_DEFAULTS = {**DECODER_DEFAULTS, "layer_types": None, "num_key_value_heads": 32, "use_sliding_window": False}


def _llama_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "attention_bias", False)
    expect(config, "mlp_bias", False)
    return decoder_arguments(config)


def _mistral_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return decoder_config(arguments, vocabulary, **window_config(arguments))


def _qwen2_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect_no_windows(config)
    return decoder_arguments(config, add_qkv_bias=True)


def _qwen3_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect_no_windows(config)
    expect(config, "attention_bias", False)
    return decoder_arguments(config, qk_layernorm=True)


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults=DECODER_DEFAULTS,
    model_of=decoder_model,
    arguments_of=_llama_arguments,
    config_of=functools.partial(decoder_config, attention_bias=False, mlp_bias=False),
    recognizes=is_plain_decoder,
    derived=(r"\.rotary_emb\.inv_freq$",),
)

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults={**DECODER_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    model_of=decoder_model,
    arguments_of=lambda config: decoder_arguments(config, **window_arguments(config)),
    config_of=_mistral_config,
    recognizes=lambda arguments: is_plain_decoder(arguments, "window_size"),
)

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    defaults=_QWEN_DEFAULTS,
    model_of=decoder_model,
    arguments_of=_qwen2_arguments,
    config_of=functools.partial(decoder_config, use_sliding_window=False),
    recognizes=lambda arguments: is_plain_decoder(arguments, "add_qkv_bias"),
)

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP),
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    model_of=decoder_model,
    arguments_of=_qwen3_arguments,
    config_of=functools.partial(decoder_config, use_sliding_window=False, attention_bias=False),
    recognizes=lambda arguments: is_plain_decoder(arguments, "qk_layernorm"),
)
