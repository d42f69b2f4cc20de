"""StarCoder2: the attention of Llama, which may be limited to a window; norms, biases and an MLP as GPT-2 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.models.families._rows import ATTENTION, EMBEDDING, QKV_BIAS, in_layer, row
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    decoder_arguments,
    decoder_config,
    decoder_model,
    window_arguments,
    window_config,
)
from mcore_ckpt.models.families._table import Family
from mcore_ckpt.models.families._values import expect, number, setting

_ROWS = (
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


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "hidden_act", "gelu_pytorch_tanh", "gelu_new", "gelu")
    expect(config, "use_bias", True)
    plain = {**config, "hidden_act": "silu", "rms_norm_eps": config["norm_epsilon"]}
    return decoder_arguments(
        plain,
        normalization="LayerNorm",
        add_bias_linear=True,
        swiglu=False,
        # What Megatron-Core has fused of it is the approximation.
        bias_gelu_fusion=config["hidden_act"] != "gelu",
        attention_dropout=number(config, "attention_dropout", 0.0),
        hidden_dropout=number(config, "residual_dropout", 0.0),
        **window_arguments(config),
    )


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    usual = {"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False}
    found = decoder_config(arguments, vocabulary, usual, **window_config(arguments))
    fused = setting(arguments, "bias_gelu_fusion", "bias_activation_fusion", default=True)
    dropout = number(arguments, "hidden_dropout", 0.1)
    epsilon = found.pop("rms_norm_eps")
    return {
        **found,
        "norm_epsilon": epsilon,
        "hidden_act": "gelu_pytorch_tanh" if fused else "gelu",
        "attention_dropout": number(arguments, "attention_dropout", 0.1),
        "residual_dropout": dropout,
        "embedding_dropout": dropout,
        "use_bias": True,
    }


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    others = (
        "swiglu",
        "quick_geglu",
        "gated_linear_unit",
        "squared_relu",
        "num_experts",
        "multi_latent_attention",
        "qk_layernorm",
    )
    return (
        arguments.get("normalization") == "LayerNorm"
        and arguments.get("position_embedding_type") in ("rope", "yarn")
        and bool(arguments.get("add_bias_linear"))
        and not any(arguments.get(name) for name in others)
    )


STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    architecture="Starcoder2ForCausalLM",
    rows=_ROWS,
    defaults={
        "attention_dropout": 0.0,
        "head_dim": None,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "residual_dropout": 0.0,
        "rope_theta": DECODER_DEFAULTS["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    model_of=decoder_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
    derived=(r"\.rotary_emb\.inv_freq$",),
)
