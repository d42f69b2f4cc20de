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
    as_loaded,
    count,
    decoder_arguments,
    decoder_config,
    expect,
    expert_arguments,
    expert_layers_of,
    gated_experts,
    in_layer,
    latent_rope_type,
    layer_count,
    number,
    rope_settings,
    setting,
    shared_experts,
    yarn_arguments,
    yarn_config,
    yarn_scales,
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


def _rotary_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(number(arguments, "rotary_base", 10000))
    if latent_rope_type(arguments) == "yarn":
        return {"rope_theta": theta, "rope_scaling": {"type": "yarn", **yarn_config(arguments, "")}}
    scale = yarn_scales(arguments, "")[1] ** 2
    if scale != 1:
        raise OptionError(
            f"the stored arguments rope_type={arguments.get('rope_type')!r}, mscale_all_dim="
            f"{arguments.get('mscale_all_dim')!r}, rotary_scaling_factor={arguments.get('rotary_scaling_factor')!r}: "
            f"Megatron-Core's latent attention scales softmax by {scale:.6g} for them, transformers by YaRN only"
        )
    return {"rope_theta": theta, "rope_scaling": None}


def _arguments(config: Mapping[str, Any], **router: Any) -> dict[str, Any]:
    if number(config, "routed_scaling_factor") == 0:
        raise OptionError("routed_scaling_factor=0: Megatron-Core takes zero for no factor at all")
    model = _model(config)
    plain = {**config, "num_key_value_heads": None, "head_dim": None, "rope_parameters": None, "rope_scaling": None}
    return {
        **decoder_arguments(plain, {"attention_bias": (False,), "mlp_bias": (False,)}),
        **_rotary_arguments(config),
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": model.sizes["kv rank"],
        "qk_head_dim": count(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": count(config, "qk_rope_head_dim"),
        "v_head_dim": count(config, "v_head_dim"),
        "moe_shared_expert_intermediate_size": model.sizes["shared ffn"],
        **expert_arguments(config, model, **router),
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor"),
    }


def _fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `config.json` beyond those of any decoder."""
    if not arguments.get("qk_layernorm"):
        raise OptionError("the stored arguments have no qk_layernorm: this family has norms of its latent vectors")
    layers = expert_layers_of(arguments)
    first = layers.index(True) if True in layers else len(layers)
    if not all(layers[first:]):
        raise OptionError("the stored argument moe_layer_freq: in this family all layers behind the first have experts")
    inner = count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size"))
    shared = count(arguments, "moe_shared_expert_intermediate_size")
    if shared % inner or arguments.get("moe_shared_expert_gate"):
        raise OptionError(f"shared experts of {shared}: expected a multiple of {inner}, and no gate, in this family")
    heads = count(arguments, "num_attention_heads")
    return {
        **_rotary_fields(arguments),
        "num_key_value_heads": heads,
        "head_dim": count(arguments, "qk_pos_emb_head_dim"),
        "q_lora_rank": arguments.get("q_lora_rank"),
        "kv_lora_rank": count(arguments, "kv_lora_rank"),
        "qk_nope_head_dim": count(arguments, "qk_head_dim"),
        "qk_rope_head_dim": count(arguments, "qk_pos_emb_head_dim"),
        "v_head_dim": count(arguments, "v_head_dim"),
        "n_routed_experts": count(arguments, "num_experts"),
        "n_shared_experts": shared // inner,
        "num_experts_per_tok": count(arguments, "moe_router_topk"),
        "moe_intermediate_size": inner,
        "first_k_dense_replace": first,
        "routed_scaling_factor": number(arguments, "moe_router_topk_scaling_factor", 1.0) or 1.0,
        "attention_bias": False,
    }


def _groups(name: str, groups: int, chosen: int, experts: int, best: int) -> dict[str, Any]:
    """Megatron's arguments for a router that looks for experts in the best groups only; raises `OptionError`. It rates
    a group by the sum of its best `experts // chosen` scores; each family has a number of its own.
    """
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


def _stored_groups(name: str, arguments: Mapping[str, Any], best: int) -> tuple[int, int]:
    """How many groups a router has, and how many it chooses; raises `OptionError` for a rating that is another."""
    if not arguments.get("moe_router_group_topk"):
        return 1, 1
    groups, chosen = count(arguments, "moe_router_num_groups", 1), count(arguments, "moe_router_group_topk")
    rated = count(arguments, "moe_router_topk") // chosen
    if chosen >= groups:
        return 1, 1
    if rated != best:
        raise OptionError(
            f"the stored argument moe_router_group_topk={chosen}: {name} rates a group by its best {best} experts, and "
            f"this checkpoint's router by its best {rated}"
        )
    return groups, chosen


def _v2_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "topk_method", "greedy", "group_limited_greedy")
    router: dict[str, Any] = {"moe_router_pre_softmax": True}
    if config.get("topk_method") == "group_limited_greedy":
        groups, chosen = count(config, "n_group"), count(config, "topk_group")
        router |= _groups("DeepSeek-V2", groups, chosen, count(config, "num_experts_per_tok"), 1)
    return _arguments(config, **router)


def _v2_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    if not arguments.get("moe_router_pre_softmax"):
        raise OptionError("the stored argument moe_router_pre_softmax: DeepSeek-V2's router takes the softmax first")
    if arguments.get("moe_router_enable_expert_bias"):
        raise OptionError("the stored argument moe_router_enable_expert_bias: DeepSeek-V2's router has no bias")
    groups, chosen = _stored_groups("DeepSeek-V2", arguments, 1)
    return {
        **decoder_config(arguments, vocabulary),
        **_fields(arguments),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": False,
        "n_group": groups if groups > 1 else None,
        "topk_group": chosen if groups > 1 else None,
    }


def _v3_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = count(config, "num_experts_per_tok")
    if bool(config.get("norm_topk_prob")) is not (experts > 1):
        raise OptionError(
            f"norm_topk_prob={config.get('norm_topk_prob')!r:.80}, num_experts_per_tok={experts}: Megatron-Core "
            "divides sigmoids by their sum where several experts are chosen, and only there"
        )
    expect(config, "rope_interleave", True)
    expect(config, "topk_method", "noaux_tc")
    groups, chosen = count(config, "n_group", 1), count(config, "topk_group", 1)
    router: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    router |= _groups("DeepSeek-V3", groups, chosen, experts, 2)
    return _arguments(config, **router)


def _v3_config(arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    if not arguments.get("moe_router_enable_expert_bias"):
        raise OptionError("the stored arguments have no moe_router_enable_expert_bias: DeepSeek-V3's router has a bias")
    groups, chosen = _stored_groups("DeepSeek-V3", arguments, 2)
    return {
        **decoder_config(arguments, vocabulary),
        **_fields(arguments),
        "norm_topk_prob": count(arguments, "moe_router_topk") > 1,
        "rope_interleave": True,
        "n_group": groups,
        "topk_group": chosen,
    }


def _remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    epsilon = number(config, "rms_norm_eps")
    text = (
        f"rms_norm_eps is {epsilon}: Megatron-Core's norms of latent vectors add it, too, those of transformers "
        f"(q_a_layernorm, kv_a_layernorm) add {_LATENT_EPSILON} to the variance always"
    )
    return () if epsilon == _LATENT_EPSILON else (text,)


def _is_latent(arguments: Mapping[str, Any], score_function: str) -> bool:
    return (
        bool(arguments.get("multi_latent_attention"))
        and bool(arguments.get("num_experts"))
        and setting(arguments, "moe_router_score_function", default="softmax") == score_function
    )


DEEPSEEK_V2 = Family(
    name="deepseek-v2",
    model_types=("deepseek_v2",),
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
    model_of=_model,
    arguments_of=_v2_arguments,
    config_of=_v2_config,
    recognizes=lambda arguments: _is_latent(arguments, "softmax"),
    remarks=_remarks,
)

DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    model_types=("deepseek_v3",),
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
    model_of=_model,
    arguments_of=_v3_arguments,
    config_of=_v3_config,
    recognizes=lambda arguments: _is_latent(arguments, "sigmoid"),
    remarks=_remarks,
    # Layers behind the last one predict further tokens; transformers loads the model without them.
    derived=(r"^model\.layers\.{layers}\.",),
)
