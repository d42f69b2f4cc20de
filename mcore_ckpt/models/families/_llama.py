"""Llama 2 and 3: grouped attention, gated MLP, rotary embedding with or without Llama 3's scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.models.families._rows import ATTENTION, DENSE_MLP, EMBEDDING
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    decoder_arguments,
    decoder_config,
    decoder_model,
    is_plain_decoder,
)
from mcore_ckpt.models.families._table import Family
from mcore_ckpt.models.families._values import expect

__all__ = ["LLAMA"]


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "attention_bias", False)
    expect(config, "mlp_bias", False)
    return decoder_arguments(config)


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return decoder_config(arguments, vocabulary, attention_bias=False, mlp_bias=False)


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments)


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults=DECODER_DEFAULTS,
    model_of=decoder_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
    derived=(r"\.rotary_emb\.inv_freq$",),
)
