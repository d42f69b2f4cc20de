"""The families of models that there are, and which one a model belongs to. A family is a table, of parameters and of
settings; code is left for what no row says: YaRN, windows, groups of experts.

Llama, Mistral, Qwen2 and Qwen3 have grouped attention, a gated MLP and rotary embedding. Attention of Mistral may be
limited to a window. Qwen2 and Qwen2.5 have biases of queries, keys and values, Qwen3 has norms of queries and keys.

Gemma (the first) has norms whose weights are offsets of one, and a gate of GELU. Its embedding is multiplied by the
square root of the hidden size. Megatron-Core has no such layer: what trains Gemma with it (Megatron-Bridge) scales what
the embedding gives, as Hugging Face does, so the stored weights are the same.

StarCoder2 has the attention of Llama, which may be limited to a window; norms, biases and an MLP as GPT-2.

GPT-2 has learned positions, biases everywhere, a tied embedding; its weights are stored inputs before outputs.

Mixtral has Mistral's attention; of its experts `w1` is the gate, `w3` goes through it. Qwen2-MoE has shared experts
behind a gate, Qwen3-MoE has none; layers of both may have an MLP instead of experts.

GPT-OSS has attention with a sink for each head, in a window in every other layer; experts with biases, and YaRN.
Hugging Face keeps all its experts of a layer in one tensor, inputs before outputs, gate and up side by side in pairs.
Its `sinks` are `softmax_offset` in Megatron-Core, and the clamped gate is `quick_geglu` with a limit and an offset.

DeepSeek-V2 and V3 have latent attention, shared experts, and a first few layers without experts. Both have the same
parameters; V3's router adds a bias to its scores, which are sigmoids. The dimensions that positions turn are stored in
pairs on either side, so nothing is reordered.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models._decoders import (
    ATTENTION,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_SETTINGS,
    DENSE_MLP,
    EMBEDDING,
    EXPERT_NORM,
    EXPERTS,
    QK_NORM,
    QKV_BIAS,
    SILU,
    SIZES,
    as_loaded,
    attention_arguments,
    decoder_arguments,
    decoder_config,
    decoder_model,
    epsilon,
    gated,
    gated_experts,
    in_layer,
    row,
    with_bias,
)
from mcore_ckpt.models._settings import (
    Setting,
    count,
    expert_layers_of,
    fused_gelu,
    if_any,
    latent_rope_type,
    layer_count,
    negated,
    number,
    rope_settings,
    setting,
    yarn_arguments,
    yarn_config,
)
from mcore_ckpt.models._table import Family, Model

# --- families with one MLP in each layer

_QWEN_DEFAULTS = {**DECODER_DEFAULTS, "layer_types": None, "num_key_value_heads": 32, "use_sliding_window": False}
_BUFFERS = (r"\.rotary_emb\.inv_freq$",)

LLAMA = DECODER(
    name="llama",
    architecture="LlamaForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *DENSE_MLP),
    defaults=DECODER_DEFAULTS,
    allowed={**SILU, "attention_bias": (False,), "mlp_bias": (False,)},
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
    allowed={**SILU, "use_sliding_window": (False,)},
    constants={"add_qkv_bias": True},
    traits="RMSNorm swiglu add_qkv_bias",
)

QWEN3 = DECODER(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP),
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    allowed={**SILU, "use_sliding_window": (False,), "attention_bias": (False,)},
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
    allowed={
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
    *with_bias("mlp.linear_fc1.layer_norm_", "post_attention_layernorm", "hidden", "hidden"),
    *with_bias("mlp.linear_fc1.", "mlp.c_fc", "ffn, hidden", "ffn"),
    *with_bias("mlp.linear_fc2.", "mlp.c_proj", "hidden, ffn", "hidden"),
)


STARCODER2 = DECODER(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    rows=_STARCODER2_ROWS,
    settings=(
        *SIZES,
        *epsilon("norm_epsilon"),
        Setting("hidden_act", "bias_gelu_fusion bias_activation_fusion", fused_gelu(_GELU), True),
        Setting("attention_dropout", "attention_dropout", number, 0.1),
        Setting("embedding_dropout", "hidden_dropout", number, 0.1),
        Setting("residual_dropout", "hidden_dropout", number, 0.1),
    ),
    defaults={
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
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
    allowed={"hidden_act": (_GELU, "gelu_new", "gelu"), "use_bias": (True,)},
    constants={"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False},
    traits="LayerNorm plain add_bias_linear",
    may_have="window_size add_qkv_bias",
    derived=_BUFFERS,
)


_in_gpt2 = functools.partial(with_bias, layer="transformer.h.{layer}.")

_GPT2_ROWS = (
    row("embedding.word_embeddings.weight", "transformer.wte.weight [vocab, hidden]", how="vocabulary"),
    row("embedding.position_embeddings.weight", "transformer.wpe.weight [positions, hidden]"),
    row("decoder.final_layernorm.weight", "transformer.ln_f.weight [hidden]"),
    row("decoder.final_layernorm.bias", "transformer.ln_f.bias [hidden]"),
    row("output_layer.weight", "lm_head.weight [vocab, hidden]", how="vocabulary", when="untied"),
    *_in_gpt2("self_attention.linear_qkv.layer_norm_", "ln_1", "hidden", "hidden"),
    *_in_gpt2("self_attention.linear_qkv.", "attn.c_attn", "hidden, qkv", "qkv", how="joined qkv transposed"),
    *_in_gpt2("self_attention.linear_proj.", "attn.c_proj", "hidden, hidden", "hidden", how="transposed"),
    *_in_gpt2("mlp.linear_fc1.layer_norm_", "ln_2", "hidden", "hidden"),
    *_in_gpt2("mlp.linear_fc1.", "mlp.c_fc", "hidden, ffn", "ffn", how="transposed"),
    *_in_gpt2("mlp.linear_fc2.", "mlp.c_proj", "ffn, hidden", "hidden", how="transposed"),
)


def _gpt2_inner(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The size of the MLP inside: four times the hidden size, where nothing is said."""
    return count(config, name, 4 * count(config, "n_embd" if "n_embd" in config else "hidden_size"))


def _gpt2_model(family: Family, config: Mapping[str, Any]) -> Model:
    hidden, heads = count(config, "n_embd"), count(config, "n_head")
    if hidden % heads:
        raise OptionError(f"n_embd={hidden}: expected a multiple of n_head={heads}")
    return decoder_model(family, {**config, "num_key_value_heads": None, "head_dim": None})


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    rows=_GPT2_ROWS,
    settings=(
        Setting("vocab_size", "vocab_size", size="vocab"),
        Setting("n_embd", "hidden_size", size="hidden"),
        Setting("n_inner", "ffn_hidden_size", _gpt2_inner, size="ffn"),
        Setting("n_layer", "num_layers", layer_count, size="layers"),
        Setting("n_head", "num_attention_heads", size="heads"),
        Setting("n_positions", "seq_length max_position_embeddings"),
        Setting("n_positions", "max_position_embeddings", size="positions"),
        Setting("tie_word_embeddings", "untie_embeddings_and_output_weights", negated),
        *epsilon("layer_norm_epsilon"),
        Setting("activation_function", "bias_gelu_fusion bias_activation_fusion", fused_gelu("gelu_new"), True),
        Setting("attn_pdrop", "attention_dropout", number, 0.1),
        Setting("embd_pdrop", "hidden_dropout", number, 0.1),
        Setting("resid_pdrop", "hidden_dropout", number, 0.1),
    ),
    defaults={
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    allowed={
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
    arguments_of=attention_arguments,
    config_of=lambda family, arguments: {},
    derived=(r"^(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias$",),
    optional_prefix="transformer.",
)


# --- families with experts

_QWEN_MOE_DEFAULTS = {
    **DECODER_DEFAULTS,
    "decoder_sparse_step": 1,
    "layer_types": None,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "use_sliding_window": False,
}
_GATED_EXPERTS = gated_experts("mlp")
_CHOSEN_EXPERTS = Setting("num_experts_per_tok", "moe_router_topk")
_INNER_OF_EXPERTS = Setting("moe_intermediate_size", "moe_ffn_hidden_size ffn_hidden_size", size="expert ffn")
_QWEN_MOE_SETTINGS = (
    *DECODER_SETTINGS,
    Setting("num_experts num_local_experts", "num_experts", size="experts"),
    _INNER_OF_EXPERTS,
    _CHOSEN_EXPERTS,
    # Weights that are not normalized are those among all experts: softmax before the choice.
    Setting("norm_topk_prob", "moe_router_pre_softmax", negated),
)
_MIXTRAL_ROWS = (*EMBEDDING, *ATTENTION, *gated_experts("block_sparse_moe", "w1", "w3", "w2"))
_QWEN2_MOE_ROWS = (
    *EMBEDDING,
    *ATTENTION,
    *QKV_BIAS,
    *DENSE_MLP,
    *_GATED_EXPERTS,
    *gated("mlp.shared_experts.", "mlp.shared_expert.", "shared ffn", "expert layer"),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight [1, hidden]", when="expert layer"),
)
_QWEN3_MOE_ROWS = (*EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, *_GATED_EXPERTS)

MIXTRAL = DECODER(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rows=_MIXTRAL_ROWS,
    loaded=as_loaded(_MIXTRAL_ROWS, "block_sparse_moe"),
    settings=(
        *DECODER_SETTINGS,
        Setting("num_local_experts", "num_experts", size="experts"),
        Setting("intermediate_size", "moe_ffn_hidden_size ffn_hidden_size", size="expert ffn"),
        _CHOSEN_EXPERTS,
    ),
    defaults={
        **DECODER_DEFAULTS,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    traits="RMSNorm swiglu num_experts",
    may_have="window_size",
)


QWEN2_MOE = DECODER(
    name="qwen2-moe",
    architecture="Qwen2MoeForCausalLM",
    rows=_QWEN2_MOE_ROWS,
    loaded=as_loaded(_QWEN2_MOE_ROWS),
    settings=(
        *_QWEN_MOE_SETTINGS,
        Setting("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", size="shared ffn"),
    ),
    defaults={**_QWEN_MOE_DEFAULTS, "num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True},
    allowed={**SILU, "use_sliding_window": (False,), "qkv_bias": (True,)},
    constants={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    traits="RMSNorm swiglu num_experts add_qkv_bias moe_shared_expert_gate moe_shared_expert_intermediate_size",
)

QWEN3_MOE = DECODER(
    name="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    rows=_QWEN3_MOE_ROWS,
    loaded=as_loaded(_QWEN3_MOE_ROWS),
    settings=_QWEN_MOE_SETTINGS,
    defaults={**_QWEN_MOE_DEFAULTS, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    allowed={**SILU, "use_sliding_window": (False,), "attention_bias": (False,)},
    constants={"qk_layernorm": True},
    traits="RMSNorm swiglu num_experts qk_layernorm",
)


_WINDOW, _WHOLE = "sliding_attention", "full_attention"
_ALPHA = 1.702  # of the gate's sigmoid: built into Megatron-Core's quick_gelu
# What the class takes without rotary settings.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_GPT_OSS_ROWS = (
    in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias [hidden]"),
    in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks [heads]"),
    EXPERT_NORM,
    in_layer("mlp.router.weight", "mlp.router.weight [experts, hidden]"),
    in_layer("mlp.router.bias", "mlp.router.bias [experts]"),
    in_layer(
        f"{EXPERTS}linear_fc1.weight",
        "mlp.experts.gate_up_proj [experts, hidden, expert ffn x 2]",
        how="pairs of all experts",
    ),
    in_layer(
        f"{EXPERTS}linear_fc1.bias",
        "mlp.experts.gate_up_proj_bias [experts, expert ffn x 2]",
        how="pairs of all experts",
    ),
    in_layer(
        f"{EXPERTS}linear_fc2.weight",
        "mlp.experts.down_proj [experts, expert ffn, hidden]",
        how="of all experts",
    ),
    in_layer(f"{EXPERTS}linear_fc2.bias", "mlp.experts.down_proj_bias [experts, hidden]", how="of all experts"),
)


def _window_layers(config: Mapping[str, Any], layers: int) -> int | list[int]:
    """Which layers have a window, as Megatron-Core says it."""
    usual = [_WHOLE if (layer + 1) % 2 == 0 else _WINDOW for layer in range(layers)]
    kinds = config.get("layer_types") or usual
    if kinds == usual:
        return 2
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_WINDOW, _WHOLE) for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected {_WINDOW!r} or {_WHOLE!r} for each of {layers} layers")
    return [int(kind == _WINDOW) for kind in kinds]


def _layer_types(arguments: Mapping[str, Any], layers: int) -> list[str]:
    frequency = arguments.get("window_attn_skip_freq")
    if type(frequency) is int and frequency > 0:
        return [_WINDOW if (layer + 1) % frequency else _WHOLE for layer in range(layers)]
    if isinstance(frequency, list) and len(frequency) == layers:
        return [_WINDOW if kind else _WHOLE for kind in frequency]
    if frequency is None:
        return [_WINDOW] * layers
    raise OptionError(f"the stored argument window_attn_skip_freq={frequency!r:.80}: expected a number, or one a layer")


def _gpt_oss_arguments(family: Family, config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    rope = rope_settings(config, "yarn", otherwise=_ROPE)
    return {
        **decoder_arguments(family, {**config, "layer_types": None, "rope_scaling": rope}, model),
        "window_size": (count(config, "sliding_window") - 1, 0),
        "window_attn_skip_freq": _window_layers(config, model.layers),
    }


def _gpt_oss_config(family: Family, arguments: Mapping[str, Any]) -> dict[str, Any]:
    layers = layer_count(arguments, "num_layers")
    return {**decoder_config(family, arguments), "layer_types": _layer_types(arguments, layers)}


GPT_OSS = DECODER(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *_GPT_OSS_ROWS),
    settings=(
        *DECODER_SETTINGS,
        Setting("num_local_experts num_experts", "num_experts", size="experts"),
        Setting("intermediate_size", "moe_ffn_hidden_size ffn_hidden_size", size="expert ffn"),
        _CHOSEN_EXPERTS,
        Setting("swiglu_limit", "activation_func_clamp_value", number),
    ),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "head_dim": 64,
        "layer_types": None,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": 7.0,
    },
    allowed={**SILU, "attention_bias": (True,), "swiglu_alpha": (_ALPHA,)},
    constants={
        "position_embedding_type": "yarn",
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "bias_gelu_fusion": False,  # fused, Megatron-Core (0.16, 0.19) clamps before it adds the bias
    },
    traits="RMSNorm quick_geglu num_experts add_qkv_bias add_bias_linear window_size",
    arguments_of=_gpt_oss_arguments,
    config_of=_gpt_oss_config,
)


# --- DeepSeek

_DEEPSEEK_DEFAULTS = {**DECODER_DEFAULTS, "q_lora_rank": 1536}
# The norms of latent vectors have it in `transformers`, whatever the configuration says of the others.
_LATENT_EPSILON = 1e-6
_LATENT_ATTENTION = (
    in_layer("input_layernorm.weight", "input_layernorm.weight [hidden]"),
    in_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight [q, hidden]", when="whole queries"),
    in_layer(
        "self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight [q rank, hidden]", when="latent queries"
    ),
    in_layer(
        "self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight [q rank]",
        when="latent queries",
        engine="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    in_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight [q, q rank]", when="latent queries"),
    in_layer(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight [kv rank and positions, hidden]",
    ),
    in_layer(
        "self_attention.kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight [kv rank]",
        engine="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    in_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight [kv, kv rank]"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight [hidden, values]"),
)

_LATENT_MLP = (
    # Megatron's own layers name this norm as it is, where attention is latent.
    in_layer(
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight [hidden]",
        when="dense layer",
        engine="mlp.linear_fc1.layer_norm_weight",
    ),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight [hidden]", when="expert layer"),
    *DENSE_MLP[1:],
    *_GATED_EXPERTS[1:],
    *gated("mlp.shared_experts.", "mlp.shared_experts.", "shared ffn", "expert layer"),
)
_ROUTER_BIAS = in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias [experts]", when="expert layer")

_V2_ROWS = (*EMBEDDING, *_LATENT_ATTENTION, *_LATENT_MLP)
_V3_ROWS = (*_V2_ROWS, _ROUTER_BIAS)


_DEEPSEEK_SETTINGS = (
    *DECODER_SETTINGS,
    Setting("q_lora_rank", "q_lora_rank", if_any, size="q rank"),
    Setting("kv_lora_rank", "kv_lora_rank", size="kv rank"),
    Setting("qk_nope_head_dim", "qk_head_dim", size="head without positions"),
    Setting("qk_rope_head_dim", "qk_pos_emb_head_dim", size="positions"),
    Setting("v_head_dim", "v_head_dim", size="value"),
    Setting("n_routed_experts num_local_experts", "num_experts", size="experts"),
    _INNER_OF_EXPERTS,
    _CHOSEN_EXPERTS,
)


def _deepseek_model(family: Family, config: Mapping[str, Any]) -> Model:
    sizes = family.sizes(config)
    layers, heads, first = sizes["layers"], sizes["heads"], config.get("first_k_dense_replace", 0)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= layers:
        raise OptionError(f"first_k_dense_replace={first!r}: expected a number of layers, of {layers}")
    head_dim = sizes["head without positions"] + sizes["positions"]
    sizes |= {
        "q": heads * head_dim,
        "kv rank and positions": sizes["kv rank"] + sizes["positions"],
        "kv": heads * (sizes["head without positions"] + sizes["value"]),
        "values": heads * sizes["value"],
        "expert gate and up": 2 * sizes["expert ffn"],
        "shared ffn": sizes["expert ffn"] * count(config, "n_shared_experts"),
    }
    holds = {"latent queries" if "q rank" in sizes else "whole queries"}
    holds |= set() if config.get("tie_word_embeddings") else {"untied"}
    expert_layers = tuple(layer >= first for layer in range(layers))
    return Model(layers, sizes, heads, heads, head_dim, sizes["experts"], expert_layers, frozenset(holds))


def _latent_rope_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    found = rope_settings(config, "default", "yarn")
    base = {"rotary_base": found["rope_theta"]}
    if found["rope_type"] == "default":
        return {**base, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    return {**base, "rope_type": "yarn", **yarn_arguments(found, "")}


def _groups(config: Mapping[str, Any], name: str, best: int, **usual: int) -> dict[str, Any]:
    """Megatron's arguments for a router that looks for experts in the best groups only; raises `OptionError`. It rates
    a group by the sum of its best `experts // chosen` scores; each family has a number of its own.
    """
    groups, chosen = (count(config, field, usual.get(field)) for field in ("n_group", "topk_group"))
    experts = count(config, "num_experts_per_tok")
    if chosen >= groups:
        return {}
    rated = experts // chosen
    if rated != best:
        raise OptionError(
            f"n_group={groups}, topk_group={chosen}, num_experts_per_tok={experts}: {name} rates a group of experts by "
            f"its best {best}, Megatron-Core by its best {rated} (moe_router_topk over moe_router_group_topk), so that "
            "it would choose other experts"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _deepseek_arguments(family: Family, config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    if number(config, "routed_scaling_factor") == 0:
        raise OptionError("routed_scaling_factor=0: Megatron-Core takes zero for no factor at all")
    return {
        **decoder_arguments(family, {**config, "rope_parameters": None, "rope_scaling": None}, model),
        **_latent_rope_arguments(config),
        "kv_channels": max(1, model.sizes["hidden"] // model.heads),
        "moe_shared_expert_intermediate_size": model.sizes["shared ffn"],
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor"),
    }


def _deepseek_config(family: Family, arguments: Mapping[str, Any]) -> dict[str, Any]:
    layers = expert_layers_of(arguments)
    inner = count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size"))
    has_groups = bool(arguments.get("moe_router_group_topk"))
    is_yarn = latent_rope_type(arguments) == "yarn"
    return {
        **decoder_config(family, arguments),
        "rope_scaling": {"type": "yarn", **yarn_config(arguments, "")} if is_yarn else None,
        "num_key_value_heads": count(arguments, "num_attention_heads"),
        "head_dim": count(arguments, "qk_pos_emb_head_dim"),
        "n_shared_experts": count(arguments, "moe_shared_expert_intermediate_size") // inner,
        "first_k_dense_replace": layers.index(True) if True in layers else len(layers),
        "routed_scaling_factor": number(arguments, "moe_router_topk_scaling_factor", 1.0) or 1.0,
        "n_group": count(arguments, "moe_router_num_groups", 1) if has_groups else 1,
        "topk_group": count(arguments, "moe_router_group_topk") if has_groups else 1,
    }


def _v2_arguments(family: Family, config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    has_groups = config.get("topk_method") == "group_limited_greedy"
    return {**_deepseek_arguments(family, config, model), **(_groups(config, "DeepSeek-V2", 1) if has_groups else {})}


def _v2_config(family: Family, arguments: Mapping[str, Any]) -> dict[str, Any]:
    found = _deepseek_config(family, arguments)
    if found["n_group"] > 1:
        return {**found, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    return {**found, "n_group": None, "topk_group": None, "norm_topk_prob": False}


def _v3_arguments(family: Family, config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    experts = count(config, "num_experts_per_tok")
    if bool(config.get("norm_topk_prob")) is not (experts > 1):
        raise OptionError(
            f"norm_topk_prob={config.get('norm_topk_prob')!r:.80}, num_experts_per_tok={experts}: Megatron-Core "
            "divides sigmoids by their sum where several experts are chosen, and only there"
        )
    groups = _groups(config, "DeepSeek-V3", 2, n_group=1, topk_group=1)
    return {**_deepseek_arguments(family, config, model), **groups}


def _v3_config(family: Family, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**_deepseek_config(family, arguments), "norm_topk_prob": count(arguments, "moe_router_topk") > 1}


def _latent_remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    epsilon = number(config, "rms_norm_eps")
    text = (
        f"rms_norm_eps is {epsilon}: Megatron-Core's norms of latent vectors add it, too, those of transformers "
        f"(q_a_layernorm, kv_a_layernorm) add {_LATENT_EPSILON} to the variance always"
    )
    return () if epsilon == _LATENT_EPSILON else (text,)


_DEEPSEEK_ALLOWED = {**SILU, "attention_bias": (False,), "mlp_bias": (False,)}
_DEEPSEEK_CONSTANTS = {"qk_layernorm": True, "multi_latent_attention": True}
_DEEPSEEK_TRAITS = "RMSNorm swiglu multi_latent_attention num_experts qk_layernorm moe_shared_expert_intermediate_size"

_DEEPSEEK = functools.partial(Family, settings=_DEEPSEEK_SETTINGS, model_of=_deepseek_model, remarks=_latent_remarks)

DEEPSEEK_V2 = _DEEPSEEK(
    name="deepseek-v2",
    architecture="DeepseekV2ForCausalLM",
    rows=_V2_ROWS,
    loaded=as_loaded(_V2_ROWS),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
    },
    allowed={**_DEEPSEEK_ALLOWED, "topk_method": ("greedy", "group_limited_greedy")},
    constants={**_DEEPSEEK_CONSTANTS, "moe_router_pre_softmax": True},
    traits=f"{_DEEPSEEK_TRAITS} softmax",
    arguments_of=_v2_arguments,
    config_of=_v2_config,
)

DEEPSEEK_V3 = _DEEPSEEK(
    name="deepseek-v3",
    architecture="DeepseekV3ForCausalLM",
    rows=_V3_ROWS,
    loaded=as_loaded(_V3_ROWS),
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    allowed={**_DEEPSEEK_ALLOWED, "rope_interleave": (True,), "topk_method": ("noaux_tc",)},
    constants={
        **_DEEPSEEK_CONSTANTS,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    },
    traits=f"{_DEEPSEEK_TRAITS} sigmoid",
    arguments_of=_v3_arguments,
    config_of=_v3_config,
    # Layers behind the last one predict further tokens; transformers loads the model without them.
    derived=(r"^model\.layers\.{layers}\.",),
)


# --- which family a model belongs to

_DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GEMMA, STARCODER2)
_WITH_EXPERTS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
FAMILIES: tuple[Family, ...] = (*_DENSE, *_WITH_EXPERTS)
"""In the order in which arguments are compared with them."""

_TRAITS = (
    "num_experts multi_latent_attention qk_layernorm add_qkv_bias add_bias_linear window_size moe_shared_expert_gate "
    "moe_shared_expert_intermediate_size layernorm_zero_centered_gamma scale_embeddings_by_hidden_size"
).split()
_GATES = "swiglu quick_geglu gated_linear_unit squared_relu".split()


def traits_of(arguments: Mapping[str, Any]) -> set[str]:
    """What tells families apart in Megatron's arguments; of experts under latent attention also what rates them."""
    found = {name for name in _TRAITS if arguments.get(name)}
    found |= {str(arguments.get("normalization")), next((name for name in _GATES if arguments.get(name)), "plain")}
    if arguments.get("position_embedding_type") == "learned_absolute":
        found.add("learned_absolute")
    if arguments.get("multi_latent_attention"):
        found.add(str(setting(arguments, "moe_router_score_function", default="softmax")))
    return found


def family_named(name: str) -> Family:
    """A family by its name; raises `OptionError`."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise OptionError(f"arch {name!r}: expected one of auto, {', '.join(family.name for family in FAMILIES)}")


def family_of_config(config: Mapping[str, Any], where: str, name: str = "auto") -> Family:
    """The family that a `config.json` names, unless it has another `name`; raises `OptionError`."""
    if name != "auto":
        return family_named(name)
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind == family.model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise OptionError(
        f"{where}: model_type {kind!r:.80} is not known here; expected one of {known} (docs/huggingface.md)"
    )


def family_of_arguments(arguments: Mapping[str, Any], where: str, name: str = "auto") -> Family:
    """The family that Megatron's arguments describe, unless it has another `name`; raises `OptionError`."""
    if name != "auto":
        return family_named(name)
    found = traits_of(arguments)
    for family in FAMILIES:
        if {*family.traits.split()} <= found <= {*family.traits.split(), *family.may_have.split()}:
            return family
    raise OptionError(
        f"{where}: its stored arguments are those of no family known here; name one (--arch) or give the model's "
        "config.json (--hf-config)"
    )
