"""The families of models that there are, and which one a model belongs to. A family is a table, of parameters and of
settings; `_rules` has what no row says: YaRN, windows, groups of experts.

What tensors and settings do not tell:

- Gemma's norms have weights that are offsets of one, and its embedding is multiplied by the square root of the hidden
  size. Megatron-Core has no such layer: what trains Gemma with it (Megatron-Bridge) scales what the embedding gives, as
  Hugging Face does, so the stored weights are the same.
- DeepSeek stores the dimensions that positions turn in pairs, as Megatron-Core does, so nothing is reordered.
"""

from __future__ import annotations

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
    DECODER_SETTINGS,
    DENSE_MLP,
    EMBEDDING,
    INNER_OF_EXPERTS,
    LATENT_ATTENTION,
    LATENT_MLP,
    LATENT_SETTINGS,
    ROUTED_EXPERTS,
    ROUTER_BIAS,
    SILU,
    as_loaded,
    predicting,
)
from mcore_ckpt.models._family_files import SUFFIX, families_in, family_in, lacking_parser
from mcore_ckpt.models._rules import rules
from mcore_ckpt.models._settings import setting
from mcore_ckpt.models._table import Family

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
    *(GEMMA, DEEPSEEK_V2, DEEPSEEK_V3),
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
