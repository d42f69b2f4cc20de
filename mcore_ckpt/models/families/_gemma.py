"""Gemma (the first): Llama's parameters, norms whose weights are offsets of one, and a gate of GELU.

Its embedding is multiplied by the square root of the hidden size. Megatron-Core has no such layer: what trains Gemma
with it (Megatron-Bridge) scales what the embedding gives, as Hugging Face does, so the stored weights are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.models.families._rows import ATTENTION, DENSE_MLP, EMBEDDING
from mcore_ckpt.models.families._settings import DECODER_DEFAULTS, decoder_arguments, decoder_config, decoder_model
from mcore_ckpt.models.families._table import Family
from mcore_ckpt.models.families._values import expect

_NORMS_BEHIND = "a norm behind attention and one behind the MLP (post_attention_layernorm, post_feedforward_layernorm)"
LATER_GEMMAS: Mapping[str, str] = {
    "gemma2": (
        f"{_NORMS_BEHIND}, a cap on what softmax gets (attn_logit_softcapping), and one on the logits "
        "(final_logit_softcapping)"
    ),
    "gemma3_text": f"{_NORMS_BEHIND}, and two rotary bases, one of which the layers with a window have",
    "gemma3": f"{_NORMS_BEHIND}, two rotary bases, one of which the layers with a window have, and a tower for images",
}
"""What Megatron-Core's layers and its `GPTModel` have not, up to 0.19, by the `model_type` of those that need it."""

_SCALE = "scale_embeddings_by_hidden_size"


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "attention_bias", False)
    # The first releases said "gelu", and meant the approximation.
    expect(config, "hidden_act", "gelu_pytorch_tanh", "gelu", None)
    expect(config, "hidden_activation", "gelu_pytorch_tanh", None)
    expect(config, "use_bidirectional_attention", None, False)
    plain = {**config, "hidden_act": "silu"}
    return decoder_arguments(
        plain,
        swiglu=False,
        gated_linear_unit=True,
        apply_layernorm_1p=True,
        layernorm_zero_centered_gamma=True,
        **{_SCALE: True},
    )


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    usual = {"swiglu": False, "gated_linear_unit": True, "layernorm_zero_centered_gamma": True}
    plain = {**arguments, "apply_layernorm_1p": False}
    return {
        **decoder_config(plain, vocabulary, usual),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    return (
        arguments.get("normalization") == "RMSNorm"
        and bool(arguments.get("layernorm_zero_centered_gamma"))
        and bool(arguments.get("gated_linear_unit"))
        and bool(arguments.get(_SCALE))
    )


GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    architecture="GemmaForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults={
        **DECODER_DEFAULTS,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    model_of=decoder_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
    derived=(r"\.rotary_emb\.inv_freq$",),
)
