"""GPT-2: learned positions, biases everywhere, a tied embedding; weights are stored inputs before outputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._rows import in_layer, row
from mcore_ckpt.models.families._settings import model_arguments
from mcore_ckpt.models.families._table import Family, Model
from mcore_ckpt.models.families._values import count, epsilon_of, expect, layer_count, number, setting

_in_layer = functools.partial(in_layer, there="transformer.h.{layer}.")

_ROWS = (
    row("embedding.word_embeddings.weight", "transformer.wte.weight [vocab, hidden]", how="vocabulary"),
    row("embedding.position_embeddings.weight", "transformer.wpe.weight [positions, hidden]"),
    row("decoder.final_layernorm.weight", "transformer.ln_f.weight [hidden]"),
    row("decoder.final_layernorm.bias", "transformer.ln_f.bias [hidden]"),
    row("output_layer.weight", "lm_head.weight [vocab, hidden]", how="vocabulary", when="untied"),
    _in_layer("self_attention.linear_qkv.layer_norm_weight", "ln_1.weight [hidden]"),
    _in_layer("self_attention.linear_qkv.layer_norm_bias", "ln_1.bias [hidden]"),
    _in_layer("self_attention.linear_qkv.weight", "attn.c_attn.weight [hidden, qkv]", how="joined qkv transposed"),
    _in_layer("self_attention.linear_qkv.bias", "attn.c_attn.bias [qkv]", how="joined qkv"),
    _in_layer("self_attention.linear_proj.weight", "attn.c_proj.weight [hidden, hidden]", how="transposed"),
    _in_layer("self_attention.linear_proj.bias", "attn.c_proj.bias [hidden]"),
    _in_layer("mlp.linear_fc1.layer_norm_weight", "ln_2.weight [hidden]"),
    _in_layer("mlp.linear_fc1.layer_norm_bias", "ln_2.bias [hidden]"),
    _in_layer("mlp.linear_fc1.weight", "mlp.c_fc.weight [hidden, ffn]", how="transposed"),
    _in_layer("mlp.linear_fc1.bias", "mlp.c_fc.bias [ffn]"),
    _in_layer("mlp.linear_fc2.weight", "mlp.c_proj.weight [ffn, hidden]", how="transposed"),
    _in_layer("mlp.linear_fc2.bias", "mlp.c_proj.bias [hidden]"),
)


def _model(config: Mapping[str, Any]) -> Model:
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


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    expect(config, "scale_attn_weights", True)
    expect(config, "scale_attn_by_inverse_layer_idx", False)
    expect(config, "add_cross_attention", False)
    model = _model(config)
    return {
        **model_arguments(model, model.sizes["positions"], number(config, "layer_norm_epsilon")),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "swiglu": False,
        # What Megatron-Core has fused of it is the approximation.
        "bias_gelu_fusion": config["activation_function"] != "gelu",
        "attention_dropout": number(config, "attn_pdrop", 0.1),
        "hidden_dropout": number(config, "resid_pdrop", 0.1),
    }


def _config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    hidden, heads = count(arguments, "hidden_size"), count(arguments, "num_attention_heads")
    if arguments.get("group_query_attention") or count(arguments, "kv_channels", hidden // heads) * heads != hidden:
        raise OptionError("the stored arguments ask for attention that GPT-2 has not: grouped, or wider than the model")
    if arguments.get("apply_layernorm_1p") or arguments.get("squared_relu"):
        raise OptionError("the stored arguments apply_layernorm_1p and squared_relu: GPT-2 has no such layers")
    fused = setting(arguments, "bias_gelu_fusion", "bias_activation_fusion", default=True)
    return {
        "vocab_size": vocabulary,
        "n_positions": count(arguments, "max_position_embeddings"),
        "n_embd": hidden,
        "n_layer": count(arguments, "num_layers"),
        "n_head": heads,
        "n_inner": count(arguments, "ffn_hidden_size"),
        "activation_function": "gelu_new" if fused else "gelu",
        "layer_norm_epsilon": epsilon_of(arguments),
        "attn_pdrop": number(arguments, "attention_dropout", 0.1),
        "resid_pdrop": number(arguments, "hidden_dropout", 0.1),
        "embd_pdrop": number(arguments, "hidden_dropout", 0.1),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
    }


def _recognizes(arguments: Mapping[str, Any]) -> bool:
    return (
        arguments.get("normalization") == "LayerNorm"
        and arguments.get("position_embedding_type") == "learned_absolute"
        and not any(arguments.get(name) for name in ("swiglu", "num_experts", "multi_latent_attention", "qk_layernorm"))
    )


GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    architecture="GPT2LMHeadModel",
    rows=_ROWS,
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
    model_of=_model,
    arguments_of=_arguments,
    config_of=_config,
    recognizes=_recognizes,
    derived=(r"^(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias$",),
    optional_prefix="transformer.",
)
