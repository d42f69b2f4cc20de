"""Mistral: as Llama, and attention may be limited to a window."""

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
    window_arguments,
    window_config,
)
from mcore_ckpt.models.families._table import Family

__all__ = ["MISTRAL"]


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_arguments(config, **window_arguments(config))


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return decoder_config(arguments, vocabulary, **window_config(arguments))


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    return is_plain_decoder(arguments, "window_size")


MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults={**DECODER_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    model_of=decoder_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
)
