"""DeepSeek-V2 and V3: latent attention, shared experts, and a first few layers without experts.

Both have the same parameters; V3's router adds a bias to its scores, which are sigmoids. The dimensions that positions
turn are stored in pairs on either side, so nothing is reordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._settings import (
    DECODER_DEFAULTS,
    DENSE_MLP,
    EMBEDDING,
    SILU,
    as_loaded,
    count,
    decoder_arguments,
    decoder_config,
    expert_arguments,
    expert_layers_of,
    experts_of,
    gated_experts,
    in_layer,
    latent_rope_type,
    layer_count,
    number,
    rope_settings,
    shared_experts,
    yarn_arguments,
    yarn_config,
)
from mcore_ckpt.models.families._table import Family, Model

_DEFAULTS = {**DECODER_DEFAULTS, "q_lora_rank": 1536}
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

_MLP = (
    # Megatron's own layers name this norm as it is, where attention is latent.
    in_layer(
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight [hidden]",
        when="dense layer",
        engine="mlp.linear_fc1.layer_norm_weight",
    ),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight [hidden]", when="expert layer"),
    *DENSE_MLP[1:],
    *gated_experts("mlp", "gate_proj", "up_proj", "down_proj")[1:],
    *shared_experts("mlp.shared_experts"),
)
_ROUTER_BIAS = in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias [experts]", when="expert layer")

_V2_ROWS = (*EMBEDDING, *_LATENT_ATTENTION, *_MLP)
_V3_ROWS = (*_V2_ROWS, _ROUTER_BIAS)


def _model(config: Mapping[str, Any]) -> Model:
    layers, heads = layer_count(config), count(config, "num_attention_heads")
    nope, positions = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
    values, rank = count(config, "v_head_dim"), count(config, "kv_lora_rank")
    experts = count(config, "n_routed_experts", config.get("num_local_experts"))
    first = config.get("first_k_dense_replace", 0)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= layers:
        raise OptionError(f"first_k_dense_replace={first!r}: expected a number of layers, of {layers}")
    inner = count(config, "moe_intermediate_size")
    sizes = {
        "vocab": count(config, "vocab_size"),
        "hidden": count(config, "hidden_size"),
        "ffn": count(config, "intermediate_size"),
        "q": heads * (nope + positions),
        "kv rank": rank,
        "kv rank and positions": rank + positions,
        "kv": heads * (nope + values),
        "values": heads * values,
        "experts": experts,
        "expert ffn": inner,
        "expert gate and up": 2 * inner,
        "shared ffn": inner * count(config, "n_shared_experts"),
    }
    holds = set() if config.get("tie_word_embeddings", False) else {"untied"}
    if config.get("q_lora_rank") is None:
        holds.add("whole queries")
    else:
        holds.add("latent queries")
        sizes["q rank"] = count(config, "q_lora_rank")
    expert_layers = tuple(layer >= first for layer in range(layers))
    return Model(layers, sizes, heads, heads, nope + positions, experts, expert_layers, frozenset(holds))


def _rotary_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
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


def _arguments(family: Family, config: Mapping[str, Any], **router: Any) -> dict[str, Any]:
    if number(config, "routed_scaling_factor") == 0:
        raise OptionError("routed_scaling_factor=0: Megatron-Core takes zero for no factor at all")
    model = _model(config)
    plain = {**config, "num_key_value_heads": None, "head_dim": None, "rope_parameters": None, "rope_scaling": None}
    return {
        **decoder_arguments(family, plain),
        **_rotary_arguments(config),
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": model.sizes["kv rank"],
        "qk_head_dim": count(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": count(config, "qk_rope_head_dim"),
        "v_head_dim": count(config, "v_head_dim"),
        "moe_shared_expert_intermediate_size": model.sizes["shared ffn"],
        **expert_arguments(config, model, **router),
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor"),
    }


def _config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    layers, (chosen, inner) = expert_layers_of(arguments), experts_of(arguments)
    has_groups = bool(arguments.get("moe_router_group_topk"))
    is_yarn = latent_rope_type(arguments) == "yarn"
    return {
        **decoder_config(family, arguments, vocabulary),
        "rope_scaling": {"type": "yarn", **yarn_config(arguments, "")} if is_yarn else None,
        "num_key_value_heads": count(arguments, "num_attention_heads"),
        "head_dim": count(arguments, "qk_pos_emb_head_dim"),
        "q_lora_rank": arguments.get("q_lora_rank"),
        "kv_lora_rank": count(arguments, "kv_lora_rank"),
        "qk_nope_head_dim": count(arguments, "qk_head_dim"),
        "qk_rope_head_dim": count(arguments, "qk_pos_emb_head_dim"),
        "v_head_dim": count(arguments, "v_head_dim"),
        "n_routed_experts": count(arguments, "num_experts"),
        "n_shared_experts": count(arguments, "moe_shared_expert_intermediate_size") // inner,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": layers.index(True) if True in layers else len(layers),
        "routed_scaling_factor": number(arguments, "moe_router_topk_scaling_factor", 1.0) or 1.0,
        "n_group": count(arguments, "moe_router_num_groups", 1) if has_groups else 1,
        "topk_group": count(arguments, "moe_router_group_topk") if has_groups else 1,
    }


def _v2_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    has_groups = config.get("topk_method") == "group_limited_greedy"
    groups = _groups(config, "DeepSeek-V2", 1) if has_groups else {}
    return _arguments(family, config, moe_router_pre_softmax=True, **groups)


def _v2_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    found = _config(family, arguments, vocabulary)
    if found["n_group"] > 1:
        return {**found, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    return {**found, "n_group": None, "topk_group": None, "norm_topk_prob": False}


def _v3_arguments(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = count(config, "num_experts_per_tok")
    if bool(config.get("norm_topk_prob")) is not (experts > 1):
        raise OptionError(
            f"norm_topk_prob={config.get('norm_topk_prob')!r:.80}, num_experts_per_tok={experts}: Megatron-Core "
            "divides sigmoids by their sum where several experts are chosen, and only there"
        )
    sigmoid = {"moe_router_score_function": "sigmoid"}
    return _arguments(family, config, **sigmoid, **_groups(config, "DeepSeek-V3", 2, n_group=1, topk_group=1))


def _v3_config(family: Family, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    found = _config(family, arguments, vocabulary)
    return {**found, "norm_topk_prob": found["num_experts_per_tok"] > 1}


def _remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    epsilon = number(config, "rms_norm_eps")
    text = (
        f"rms_norm_eps is {epsilon}: Megatron-Core's norms of latent vectors add it, too, those of transformers "
        f"(q_a_layernorm, kv_a_layernorm) add {_LATENT_EPSILON} to the variance always"
    )
    return () if epsilon == _LATENT_EPSILON else (text,)


_SETTINGS = {**SILU, "attention_bias": (False,), "mlp_bias": (False,)}
_CONSTANTS = {"qk_layernorm": True, "multi_latent_attention": True}
_TRAITS = "RMSNorm swiglu multi_latent_attention num_experts qk_layernorm moe_shared_expert_intermediate_size"

DEEPSEEK_V2 = Family(
    name="deepseek-v2",
    architecture="DeepseekV2ForCausalLM",
    rows=_V2_ROWS,
    loaded=as_loaded(_V2_ROWS),
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
    },
    settings={**_SETTINGS, "topk_method": ("greedy", "group_limited_greedy")},
    constants=_CONSTANTS,
    traits=f"{_TRAITS} softmax",
    model_of=_model,
    arguments_of=_v2_arguments,
    config_of=_v2_config,
    remarks=_remarks,
)

DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    architecture="DeepseekV3ForCausalLM",
    rows=_V3_ROWS,
    loaded=as_loaded(_V3_ROWS),
    defaults={
        **_DEFAULTS,
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
    settings={**_SETTINGS, "rope_interleave": (True,), "topk_method": ("noaux_tc",)},
    constants={**_CONSTANTS, "moe_router_enable_expert_bias": True},
    traits=f"{_TRAITS} sigmoid",
    model_of=_model,
    arguments_of=_v3_arguments,
    config_of=_v3_config,
    remarks=_remarks,
    # Layers behind the last one predict further tokens; transformers loads the model without them.
    derived=(r"^model\.layers\.{layers}\.",),
)
