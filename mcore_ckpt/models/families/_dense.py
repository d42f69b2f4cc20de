"""Decoders with one MLP in each layer.

Llama, Mistral, Qwen2 and Qwen3 have grouped attention, a gated MLP and rotary embedding. Attention of Mistral may be
limited to a window. Qwen2 and Qwen2.5 have biases of queries, keys and values, Qwen3 has norms of queries and keys.

Gemma (the first) has norms whose weights are offsets of one, and a gate of GELU. Its embedding is multiplied by the
square root of the hidden size. Megatron-Core has no such layer: what trains Gemma with it (Megatron-Bridge) scales what
the embedding gives, as Hugging Face does, so the stored weights are the same.

StarCoder2 has the attention of Llama, which may be limited to a window; norms, biases and an MLP as GPT-2.

GPT-2 has learned positions, biases everywhere, a tied embedding; its weights are stored inputs before outputs.
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
    QK_NORM,
    QKV_BIAS,
    SILU,
    count,
    decoder_arguments,
    decoder_config,
    epsilon_of,
    in_layer,
    layer_count,
    model_arguments,
    number,
    row,
    setting,
)
from mcore_ckpt.models.families._table import Family, Model

_QWEN_DEFAULTS = {**DECODER_DEFAULTS, "layer_types": None, "num_key_value_heads": 32, "use_sliding_window": False}
_BUFFERS = (r"\.rotary_emb\.inv_freq$",)

LLAMA = DECODER(
    name="llama",
    architecture="LlamaForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults=DECODER_DEFAULTS,
    settings={**SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    traits="RMSNorm swiglu",
    derived=_BUFFERS,
)

MISTRAL = DECODER(
    name="mistral",
    architecture="MistralForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults={**DECODER_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    traits="RMSNorm swiglu window_size",
)

QWEN2 = DECODER(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    defaults=_QWEN_DEFAULTS,
    settings={**SILU, "use_sliding_window": (False,)},
    constants={"add_qkv_bias": True},
    traits="RMSNorm swiglu add_qkv_bias",
)

QWEN3 = DECODER(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP),
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    settings={**SILU, "use_sliding_window": (False,), "attention_bias": (False,)},
    constants={"qk_layernorm": True},
    traits="RMSNorm swiglu qk_layernorm",
)


_GELU = "gelu_pytorch_tanh"

GEMMA = DECODER(
    name="gemma",
    architecture="GemmaForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults={
        **DECODER_DEFAULTS,
        "head_dim": 256,
        "hidden_act": _GELU,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    settings={
        "attention_bias": (False,),
        "hidden_act": (_GELU, "gelu", None),  # the first releases said "gelu", and meant the approximation
        "hidden_activation": (_GELU, None),
        "use_bidirectional_attention": (None, False),
    },
    constants={
        "swiglu": False,
        "gated_linear_unit": True,
        "apply_layernorm_1p": True,
        "layernorm_zero_centered_gamma": True,
        "scale_embeddings_by_hidden_size": True,
    },
    traits="RMSNorm gated_linear_unit layernorm_zero_centered_gamma scale_embeddings_by_hidden_size",
    derived=_BUFFERS,
)


_STARCODER2_ROWS = (
    *EMBEDDING,
    row("decoder.final_layernorm.bias", "model.norm.bias [hidden]"),
    *ATTENTION,
    *QKV_BIAS,
    in_layer("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias [hidden]"),
    in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias [hidden]"),
    in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight [hidden]"),
    in_layer("mlp.linear_fc1.layer_norm_bias", "post_attention_layernorm.bias [hidden]"),
    in_layer("mlp.linear_fc1.weight", "mlp.c_fc.weight [ffn, hidden]"),
    in_layer("mlp.linear_fc1.bias", "mlp.c_fc.bias [ffn]"),
    in_layer("mlp.linear_fc2.weight", "mlp.c_proj.weight [hidden, ffn]"),
    in_layer("mlp.linear_fc2.bias", "mlp.c_proj.bias [hidden]"),
)


def _gelu_of(arguments: Mapping[str, Any], approximate: str) -> str:
    """What Megatron-Core has fused of GELU is the approximation."""
    return approximate if setting(arguments, "bias_gelu_fusion", "bias_activation_fusion", default=True) else "gelu"


def _starcoder2_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_arguments(
        family,
        {**config, "rms_norm_eps": config["norm_epsilon"]},
        bias_gelu_fusion=config["hidden_act"] != "gelu",
        attention_dropout=number(config, "attention_dropout", 0.0),
        hidden_dropout=number(config, "residual_dropout", 0.0),
    )


def _starcoder2_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    found = decoder_config(family, arguments, vocabulary)
    dropout = number(arguments, "hidden_dropout", 0.1)
    epsilon = found.pop("rms_norm_eps")
    return {
        **found,
        "norm_epsilon": epsilon,
        "hidden_act": _gelu_of(arguments, _GELU),
        "attention_dropout": number(arguments, "attention_dropout", 0.1),
        "residual_dropout": dropout,
        "embedding_dropout": dropout,
    }


STARCODER2 = DECODER(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    rows=_STARCODER2_ROWS,
    defaults={
        "attention_dropout": 0.0,
        "head_dim": None,
        "hidden_act": _GELU,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "residual_dropout": 0.0,
        "rope_theta": DECODER_DEFAULTS["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    settings={"hidden_act": (_GELU, "gelu_new", "gelu"), "use_bias": (True,)},
    constants={"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False},
    traits="LayerNorm plain add_bias_linear",
    may_have="window_size add_qkv_bias",
    arguments_of=_starcoder2_arguments,
    config_of=_starcoder2_config,
    derived=_BUFFERS,
)


_in_gpt2_layer = functools.partial(in_layer, there="transformer.h.{layer}.")

_GPT2_ROWS = (
    row("embedding.word_embeddings.weight", "transformer.wte.weight [vocab, hidden]", how="vocabulary"),
    row("embedding.position_embeddings.weight", "transformer.wpe.weight [positions, hidden]"),
    row("decoder.final_layernorm.weight", "transformer.ln_f.weight [hidden]"),
    row("decoder.final_layernorm.bias", "transformer.ln_f.bias [hidden]"),
    row("output_layer.weight", "lm_head.weight [vocab, hidden]", how="vocabulary", when="untied"),
    _in_gpt2_layer("self_attention.linear_qkv.layer_norm_weight", "ln_1.weight [hidden]"),
    _in_gpt2_layer("self_attention.linear_qkv.layer_norm_bias", "ln_1.bias [hidden]"),
    _in_gpt2_layer("self_attention.linear_qkv.weight", "attn.c_attn.weight [hidden, qkv]", how="joined qkv transposed"),
    _in_gpt2_layer("self_attention.linear_qkv.bias", "attn.c_attn.bias [qkv]", how="joined qkv"),
    _in_gpt2_layer("self_attention.linear_proj.weight", "attn.c_proj.weight [hidden, hidden]", how="transposed"),
    _in_gpt2_layer("self_attention.linear_proj.bias", "attn.c_proj.bias [hidden]"),
    _in_gpt2_layer("mlp.linear_fc1.layer_norm_weight", "ln_2.weight [hidden]"),
    _in_gpt2_layer("mlp.linear_fc1.layer_norm_bias", "ln_2.bias [hidden]"),
    _in_gpt2_layer("mlp.linear_fc1.weight", "mlp.c_fc.weight [hidden, ffn]", how="transposed"),
    _in_gpt2_layer("mlp.linear_fc1.bias", "mlp.c_fc.bias [ffn]"),
    _in_gpt2_layer("mlp.linear_fc2.weight", "mlp.c_proj.weight [ffn, hidden]", how="transposed"),
    _in_gpt2_layer("mlp.linear_fc2.bias", "mlp.c_proj.bias [hidden]"),
)


def _gpt2_model(config: Mapping[str, Any]) -> Model:
    hidden, heads = count(config, "n_embd"), count(config, "n_head")
    if hidden % heads:
        raise OptionError(f"n_embd={hidden}: expected a multiple of n_head={heads}")
    sizes = {
        "vocab": count(config, "vocab_size"),
        "positions": count(config, "n_positions"),
        "hidden": hidden,
        "qkv": 3 * hidden,
        "ffn": count(config, "n_inner", 4 * hidden),
    }
    holds = frozenset() if config.get("tie_word_embeddings", True) else frozenset({"untied"})
    return Model(layer_count(config, "n_layer"), sizes, heads, heads, hidden // heads, holds=holds)


def _gpt2_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    model = _gpt2_model(config)
    return {
        **model_arguments(model, model.sizes["positions"], number(config, "layer_norm_epsilon")),
        "bias_gelu_fusion": config["activation_function"] != "gelu",
        "attention_dropout": number(config, "attn_pdrop", 0.1),
        "hidden_dropout": number(config, "resid_pdrop", 0.1),
    }


def _gpt2_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "n_positions": count(arguments, "max_position_embeddings"),
        "n_embd": count(arguments, "hidden_size"),
        "n_layer": count(arguments, "num_layers"),
        "n_head": count(arguments, "num_attention_heads"),
        "n_inner": count(arguments, "ffn_hidden_size"),
        "activation_function": _gelu_of(arguments, "gelu_new"),
        "layer_norm_epsilon": epsilon_of(arguments),
        "attn_pdrop": number(arguments, "attention_dropout", 0.1),
        "resid_pdrop": number(arguments, "hidden_dropout", 0.1),
        "embd_pdrop": number(arguments, "hidden_dropout", 0.1),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
    }


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    rows=_GPT2_ROWS,
    defaults={
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    settings={
        "activation_function": ("gelu_new", _GELU, "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    constants={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "swiglu": False,
    },
    traits="LayerNorm plain learned_absolute add_bias_linear",
    may_have="add_qkv_bias",
    model_of=_gpt2_model,
    arguments_of=_gpt2_arguments,
    config_of=_gpt2_config,
    derived=(r"^(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias$",),
    optional_prefix="transformer.",
)
