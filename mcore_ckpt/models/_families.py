"""The families of models that there are, and which one a model belongs to. A family is a table, of parameters and of
settings; `_rules` has what no row says: YaRN, windows, groups of experts.

What tensors and settings do not tell:

- Gemma's norms have weights that are offsets of one, and its embedding is multiplied by the square root of the hidden
  size. Megatron-Core has no such layer: what trains Gemma with it (Megatron-Bridge) scales what the embedding gives, as
  Hugging Face does, so the stored weights are the same.
- Of Mixtral's experts `w1` is the gate, `w3` goes through it.
- GPT-OSS has all its experts of a layer in one tensor, inputs before outputs, gate and up side by side in pairs. Its
  `sinks` are `softmax_offset` in Megatron-Core, and the clamped gate is `quick_geglu` with a limit and an offset.
- DeepSeek stores the dimensions that positions turn in pairs, as Megatron-Core does, so nothing is reordered.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import local_path
from mcore_ckpt.models._decoders import (
    ATTENTION,
    CHOSEN_EXPERTS,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_RULES,
    DECODER_SETTINGS,
    DENSE_MLP,
    EMBEDDING,
    EXPERT_NORM,
    EXPERTS,
    INNER_OF_EXPERTS,
    LATENT_ATTENTION,
    LATENT_MLP,
    LATENT_SETTINGS,
    QKV_BIAS,
    ROUTED_EXPERTS,
    ROUTER_BIAS,
    SILU,
    SIZES,
    TIED,
    as_loaded,
    epsilon,
    gated_experts,
    in_layer,
    predicting,
    row,
    with_bias,
)
from mcore_ckpt.models._family_files import SUFFIX, families_in, family_in, lacking_parser
from mcore_ckpt.models._rules import rules
from mcore_ckpt.models._settings import Setting, count, fused_gelu, layer_count, number, setting
from mcore_ckpt.models._table import Family

# --- families with one MLP in each layer


_WINDOWED = (*DECODER_RULES, *rules("window"))

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
    rules=_WINDOWED,
    traits="LayerNorm plain add_bias_linear",
    may_have="window_size add_qkv_bias",
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
        TIED,
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
    rules=rules("heads"),
    derived=(r"^(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias$",),
    optional_prefix="transformer.",
)


# --- families with experts

_MIXTRAL_ROWS = (*EMBEDDING, *ATTENTION, *gated_experts("block_sparse_moe", "w1", "w3", "w2"))
MIXTRAL = DECODER(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rows=_MIXTRAL_ROWS,
    loaded=as_loaded(_MIXTRAL_ROWS, "block_sparse_moe"),
    settings=(
        *DECODER_SETTINGS,
        Setting("num_local_experts", "num_experts", size="experts"),
        Setting("intermediate_size", "moe_ffn_hidden_size ffn_hidden_size", size="expert ffn"),
        CHOSEN_EXPERTS,
    ),
    defaults={
        **DECODER_DEFAULTS,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    rules=_WINDOWED,
    traits="RMSNorm swiglu num_experts",
    may_have="window_size",
)


_ALPHA = 1.702  # of the gate's sigmoid: built into Megatron-Core's quick_gelu

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
        f"{EXPERTS}linear_fc2.weight", "mlp.experts.down_proj [experts, expert ffn, hidden]", how="of all experts"
    ),
    in_layer(f"{EXPERTS}linear_fc2.bias", "mlp.experts.down_proj_bias [experts, hidden]", how="of all experts"),
)


GPT_OSS = DECODER(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    rows=(*EMBEDDING, *ATTENTION, *QKV_BIAS, *_GPT_OSS_ROWS),
    settings=(
        *DECODER_SETTINGS,
        Setting("num_local_experts num_experts", "num_experts", size="experts"),
        Setting("intermediate_size", "moe_ffn_hidden_size ffn_hidden_size", size="expert ffn"),
        CHOSEN_EXPERTS,
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
    rules=rules("decoder", "window of some layers", "yarn"),
)


# --- DeepSeek

_DEEPSEEK_DEFAULTS = {**DECODER_DEFAULTS, "q_lora_rank": 1536}
_V2_ROWS = (*EMBEDDING, *LATENT_ATTENTION, *LATENT_MLP)
_V3_ROWS = (*_V2_ROWS, ROUTER_BIAS)


_DEEPSEEK_SETTINGS = (*DECODER_SETTINGS, *LATENT_SETTINGS, ROUTED_EXPERTS, INNER_OF_EXPERTS, CHOSEN_EXPERTS)
_DEEPSEEK_ALLOWED = {**SILU, "attention_bias": (False,), "mlp_bias": (False,)}
_DEEPSEEK_CONSTANTS = {"qk_layernorm": True, "multi_latent_attention": True}
_DEEPSEEK_TRAITS = "RMSNorm swiglu multi_latent_attention num_experts qk_layernorm moe_shared_expert_intermediate_size"

_DEEPSEEK_RULES = rules(
    "decoder", "layers alike", "latent attention", "first dense layers", "shared experts", "scaled weights"
)

DEEPSEEK_V2 = Family(
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
    settings=_DEEPSEEK_SETTINGS,
    rules=(*_DEEPSEEK_RULES, *rules("softmax groups")),
)

DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    architecture="DeepseekV3ForCausalLM",
    others=("kimi_k2",),
    rows=predicting(_V3_ROWS),
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
    constants=_DEEPSEEK_CONSTANTS,
    traits=f"{_DEEPSEEK_TRAITS} sigmoid",
    settings=_DEEPSEEK_SETTINGS,
    rules=(*_DEEPSEEK_RULES, *rules("sigmoids", "multi-token prediction")),
)


# --- which family a model belongs to

FAMILIES: tuple[Family, ...] = (
    *(GPT2, GEMMA, STARCODER2, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
    *families_in(Path(__file__).parent / "families"),
)
"""In the order in which arguments are compared with them."""

_TRAITS = (
    "num_experts multi_latent_attention qk_layernorm add_qkv_bias add_bias_linear window_size moe_shared_expert_gate "
    "moe_shared_expert_intermediate_size layernorm_zero_centered_gamma scale_embeddings_by_hidden_size "
    "no_rope_freq rotary_interleaved"
).split()
_GATES = "swiglu quick_geglu gated_linear_unit squared_relu".split()


def traits_of(arguments: Mapping[str, Any]) -> set[str]:
    """Words in Megatron's arguments by which families differ; how experts are rated, unless by the usual softmax."""
    values = {name: arguments.get(name) for name in _TRAITS}
    found = {name for name, value in values.items() if (any(value) if isinstance(value, list) else value)}
    found |= {str(arguments.get("normalization")), next((name for name in _GATES if arguments.get(name)), "plain")}
    if arguments.get("position_embedding_type") == "learned_absolute":
        found.add("learned_absolute")
    rated = str(setting(arguments, "moe_router_score_function", default="softmax"))
    if arguments.get("multi_latent_attention") or (arguments.get("num_experts") and rated != "softmax"):
        found.add(rated)
    return found


def family_named(name: str) -> Family:
    """A family by its name, or by the file that has its table; raises `OptionError`."""
    if name.endswith(SUFFIX):
        return family_in(local_path(name))
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise OptionError(f"arch {name!r}: expected auto, FILE{SUFFIX} with a table, or one of {known}")


def family_of_config(config: Mapping[str, Any], where: str, name: str = "auto") -> Family:
    """The family that a `config.json` names, unless it has another `name`; raises `OptionError`."""
    if name != "auto":
        return family_named(name)
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind == family.model_type or kind in family.others:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise OptionError(
        f"{where}: model_type {kind!r:.80} is not known here; expected one of {known}, or a table "
        f"of its own (--arch FILE{SUFFIX}; docs/huggingface.md){lacking_parser()}"
    )


def family_of_arguments(arguments: Mapping[str, Any], where: str, name: str = "auto") -> Family:
    """The family that Megatron's arguments describe, unless it has another `name`; raises `OptionError`."""
    if name != "auto":
        return family_named(name)
    found = traits_of(arguments)
    for family in FAMILIES:
        if family.traits and {*family.traits.split()} <= found <= {*family.traits.split(), *family.may_have.split()}:
            return family
    raise OptionError(
        f"{where}: its stored arguments are those of no family known here; name one (--arch) or give the model's "
        f"config.json (--hf-config){lacking_parser()}"
    )
