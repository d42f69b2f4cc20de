"""What families of decoders share, by groups: rows of parameters, settings, and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models._settings import (
    Setting,
    count,
    expert_layers_of,
    groups_of,
    if_any,
    latent_rope_type,
    layer_count,
    negated,
    number,
    rope_arguments,
    rope_config,
    rope_settings,
    window_of,
    yarn_arguments,
    yarn_config,
)
from mcore_ckpt.models._table import PREDICTING, Model, Part, Row, Rule

_HERE, _THERE = "decoder.layers.{layer}.", "model.layers.{layer}."
EXPERTS = "mlp.experts.experts.{expert}."


def row_of(megatron: str, *parts: str, how: str = "same", when: str = "", engine: str | None = None) -> Row:
    """A row of what Megatron calls `megatron`, and of parts of Hugging Face: `lm_head.weight [vocab, hidden]`, or
    `[experts, expert ffn x 2]`. `when` are words with commas.
    """
    return Row(megatron, tuple(map(_part, parts)), how, tuple(filter(None, when.split(", "))), engine)


def _part(text: str) -> Part:
    key, _, shape = text.removesuffix("]").partition(" [")
    axes = [[int(word) if word.isdigit() else word for word in axis.split(" x ")] for axis in shape.split(", ")]
    return Part(key, tuple(tuple(sizes) if len(sizes) > 1 else sizes[0] for sizes in axes))


def in_layer(megatron: str, *parts: str, how: str = "same", when: str = "", engine: str | None = None) -> Row:
    """A row of each layer; keys begin in the layer."""
    keys = [_THERE + part for part in parts]
    return row_of(_HERE + megatron, *keys, how=how, when=when, engine=None if engine is None else _HERE + engine)


EMBEDDING = (
    row_of("embedding.word_embeddings.weight", "model.embed_tokens.weight [vocab, hidden]", how="vocabulary"),
    row_of("decoder.final_layernorm.weight", "model.norm.weight [hidden]"),
    row_of("output_layer.weight", "lm_head.weight [vocab, hidden]", how="vocabulary", when="untied"),
)
"""A model with a tied embedding has no output layer of its own."""

ATTENTION = (
    in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight [hidden]"),
    in_layer(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight [q, hidden]",
        "self_attn.k_proj.weight [kv, hidden]",
        "self_attn.v_proj.weight [kv, hidden]",
        how="grouped qkv",
    ),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight [hidden, q]"),
)

QKV_BIAS = (
    in_layer(
        "self_attention.linear_qkv.bias",
        "self_attn.q_proj.bias [q]",
        "self_attn.k_proj.bias [kv]",
        "self_attn.v_proj.bias [kv]",
        how="grouped qkv",
    ),
)

QK_NORM = (
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight [head]"),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight [head]"),
)


def gated(megatron: str, there: str, size: str, when: str) -> tuple[Row, ...]:
    """A gated MLP of inner `size`; keys on both sides begin so."""
    halves = f"{there}gate_proj.weight [{size}, hidden]", f"{there}up_proj.weight [{size}, hidden]"
    return (
        in_layer(f"{megatron}linear_fc1.weight", *halves, how="halves", when=when),
        in_layer(f"{megatron}linear_fc2.weight", f"{there}down_proj.weight [hidden, {size}]", when=when),
    )


DENSE_MLP = (
    in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight [hidden]", when="dense layer"),
    *gated("mlp.", "mlp.", "ffn", "dense layer"),
)

EXPERT_NORM = in_layer(
    "mlp.linear_fc1.layer_norm_weight",
    "post_attention_layernorm.weight [hidden]",
    when="expert layer",
    engine="pre_mlp_layernorm.weight",
)
"""Megatron's own layers name the norm before experts as that of a dense MLP; Transformer Engine's cannot fuse it."""


def predicting(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, and those of layers behind the last one, which predict further tokens as DeepSeek-V3's do: each is as a
    layer of the decoder, and has copies of embedding and output layer.
    """
    layer = f"{PREDICTING}transformer_layer."
    own = (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm"))
    return (
        *rows,
        *(row_of(f"{PREDICTING}{name}.weight", f"{_THERE}{there}.weight [hidden]") for name, there in own),
        row_of(f"{PREDICTING}eh_proj.weight", f"{_THERE}eh_proj.weight [hidden, embedding and hidden]"),
        row_of("embedding.word_embeddings.weight", f"{_THERE}embed_tokens.weight [vocab, hidden]", how="copy"),
        row_of("output_layer.weight", f"{_THERE}shared_head.head.weight [vocab, hidden]", how="copy", when="untied"),
        *(
            replace(
                one, megatron=one.megatron.replace(_HERE, layer), engine=one.engine and one.engine.replace(_HERE, layer)
            )
            for one in rows
            if one.megatron.startswith(_HERE)
        ),
    )


def as_loaded(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a model as `transformers` 5 holds it: gated experts of a layer in two tensors, in its `mlp`. None
    where files have no tensor for each expert.
    """
    keys = [part.key for one in rows for part in one.parts if "{expert}" in part.key]
    if not keys:
        return ()
    block = keys[0].partition("experts.")[0]
    return (
        *(
            replace(one, parts=tuple(replace(part, key=part.key.replace(block, f"{_THERE}mlp.")) for part in one.parts))
            for one in rows
            if "{expert}" not in one.megatron
        ),
        in_layer(
            f"{EXPERTS}linear_fc1.weight",
            "mlp.experts.gate_up_proj [experts, expert gate and up, hidden]",
            how="halves of all experts",
            when="expert layer",
        ),
        in_layer(
            f"{EXPERTS}linear_fc2.weight",
            "mlp.experts.down_proj [experts, hidden, expert ffn]",
            how="each of all experts",
            when="expert layer",
        ),
    )


TIED = Setting("tie_word_embeddings", "untie_embeddings_and_output_weights", negated, size="untied")

SIZES = (
    Setting("vocab_size", "vocab_size", size="vocab"),
    Setting("hidden_size", "hidden_size", size="hidden"),
    Setting("intermediate_size", "ffn_hidden_size", size="ffn"),
    Setting("num_hidden_layers", "num_layers", layer_count, size="layers"),
    Setting("num_attention_heads", "num_attention_heads", size="heads"),
    Setting("max_position_embeddings", "seq_length max_position_embeddings"),
    Setting("max_position_embeddings", "max_position_embeddings"),
    TIED,
)


# What norms add to the variance, which versions of Megatron call differently.
EPSILON = (
    Setting("rms_norm_eps", "layernorm_epsilon norm_epsilon", number, 1e-5),
    Setting("rms_norm_eps", "norm_epsilon layernorm_epsilon", number, 1e-5),
)
DECODER_SETTINGS = (*SIZES, *EPSILON)

DECODER_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""What `transformers` takes for settings that a `config.json` leaves out; a family has others for some."""


GATED_EXPERTS = (
    EXPERT_NORM,
    in_layer("mlp.router.weight", "mlp.gate.weight [experts, hidden]", when="expert layer"),
    *gated(EXPERTS, "mlp.experts.{expert}.", "expert ffn", "expert layer"),
)
CHOSEN_EXPERTS = Setting("num_experts_per_tok", "moe_router_topk")
INNER_OF_EXPERTS = Setting("moe_intermediate_size", "moe_ffn_hidden_size ffn_hidden_size", size="expert ffn")
ROUTED_EXPERTS = Setting("n_routed_experts num_local_experts", "num_experts", size="experts")
SHARED_EXPERTS = gated("mlp.shared_experts.", "mlp.shared_experts.", "shared ffn", "expert layer")
ROUTER_BIAS = in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias [experts]", when="expert layer")

LATENT_ATTENTION = (
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

LATENT_MLP = (
    # Megatron's own layers name this norm as it is, where attention is latent.
    in_layer(
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight [hidden]",
        when="dense layer",
        engine="mlp.linear_fc1.layer_norm_weight",
    ),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight [hidden]", when="expert layer"),
    *DENSE_MLP[1:],
    *GATED_EXPERTS[1:],
)

LATENT_SETTINGS = (
    Setting("q_lora_rank", "q_lora_rank", if_any, size="q rank"),
    Setting("kv_lora_rank", "kv_lora_rank", size="kv rank"),
    Setting("qk_nope_head_dim", "qk_head_dim", size="head without positions"),
    Setting("qk_rope_head_dim", "qk_pos_emb_head_dim", size="positions"),
    Setting("v_head_dim", "v_head_dim", size="value"),
)

BUFFERS = (r"\.rotary_emb\.inv_freq$",)
SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}


# --- rules

_Settings = Mapping[str, Any]


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


# --- attention


def _heads(config: _Settings, model: Model) -> dict[str, Any]:
    """Megatron's arguments for heads, and for what few families have."""
    grouped = model.groups != model.heads
    return {
        "group_query_attention": grouped,
        "num_query_groups": model.groups if grouped else 1,
        "kv_channels": model.head_dim,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "squared_relu": False,
    }


def _decoder(config: _Settings, model: Model) -> dict[str, Any]:
    """A decoder with RMS norms and a gated MLP, or gated experts whose router takes the softmax of the chosen."""
    layers = model.expert_layers
    experts = {
        "moe_layer_freq": 1 if all(layers) else [int(kind) for kind in layers],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
    }
    return {
        **_heads(config, model),
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "swiglu": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "window_size": None,
        **(experts if model.experts else {}),
    }


def _decoder_config(arguments: _Settings) -> dict[str, Any]:
    hidden, heads = count(arguments, "hidden_size"), count(arguments, "num_attention_heads")
    return {
        "num_key_value_heads": groups_of(arguments),
        "head_dim": count(arguments, "kv_channels", max(1, hidden // heads)),
        "attention_dropout": 0.0,
    }


_WINDOW, _WHOLE = "sliding_attention", "full_attention"


def _alike(config: _Settings, model: Model) -> dict[str, Any]:
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != _WHOLE for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected 'full_attention' for all layers of this family")
    return {}


def _window(config: _Settings, model: Model) -> dict[str, Any]:
    """Hugging Face counts the token itself in a window, Megatron those before it."""
    has_window = config.get("sliding_window") is not None
    return {"window_size": (count(config, "sliding_window") - 1, 0) if has_window else None}


def _window_of_some(config: _Settings, model: Model) -> dict[str, Any]:
    """Which layers have a window, as Megatron-Core says it."""
    layers = model.layers
    usual = [_WHOLE if (layer + 1) % 2 == 0 else _WINDOW for layer in range(layers)]
    kinds = config.get("layer_types") or usual
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_WINDOW, _WHOLE) for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected {_WINDOW!r} or {_WHOLE!r} for each of {layers} layers")
    frequency = 2 if kinds == usual else [int(kind == _WINDOW) for kind in kinds]
    return {"window_size": (count(config, "sliding_window") - 1, 0), "window_attn_skip_freq": frequency}


def _marked_layers(arguments: _Settings, name: str, otherwise: bool) -> list[bool]:
    """The layers that an argument marks: each one with its own mark, or all but (`otherwise`), or only, each n-th."""
    layers, given = layer_count(arguments, "num_layers"), arguments.get(name)
    if type(given) is int and given > 0:
        return [((layer + 1) % given == 0) is not otherwise for layer in range(layers)]
    if isinstance(given, list) and len(given) == layers:
        return [bool(kind) for kind in given]
    if given is None:
        return [otherwise] * layers
    raise OptionError(f"the stored argument {name}={given!r:.80}: expected a number, or one a layer")


def _window_of_some_config(arguments: _Settings) -> dict[str, Any]:
    marked = _marked_layers(arguments, "window_attn_skip_freq", True)
    return {"sliding_window": window_of(arguments), "layer_types": [_WINDOW if kind else _WHOLE for kind in marked]}


# --- positions

_NO_SCALING = {"position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_interleaved": False}
# What the class takes without rotary settings.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _rotary(config: _Settings, model: Model) -> dict[str, Any]:
    return {**_NO_SCALING, **rope_arguments(config)}


_PART = "partial_rotary_factor"


def _partly_rotary(config: _Settings, model: Model) -> dict[str, Any]:
    """Positions turn the first part of each head: as `transformers` has it, of the rotary settings, or else of all."""
    places = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    scaling: Any = next(iter(places.values()), {})
    place = scaling if isinstance(scaling, Mapping) and _PART in scaling else config
    percent = number(place, _PART, 1.0)
    if not 0 < percent <= 1 or percent * model.head_dim % 2:
        raise OptionError(f"{_PART}={percent}: expected a part of a head's {model.head_dim} elements, in pairs")
    for name, value in places.items():
        if isinstance(value, Mapping):
            places[name] = {key: value[key] for key in value if key != _PART}
    found = _rotary({**config, **places, _PART: None}, model)
    if percent != 1 and (found["use_rope_scaling"] or found["position_embedding_type"] == "yarn"):
        raise OptionError(f"{_PART}={percent}: expected no scaled rotary embedding with it, or a linear one")
    return {**found, "rotary_percent": percent}


def _partly_rotary_config(arguments: _Settings) -> dict[str, Any]:
    return {**rope_config(arguments), _PART: number(arguments, "rotary_percent", 1.0)}


def _scaled_rotary(config: _Settings, model: Model) -> dict[str, Any]:
    return _rotary({**config, "rope_scaling": rope_settings(config, "yarn", otherwise=_GPT_OSS_ROPE)}, model)


def _without_rotary(config: _Settings, model: Model) -> dict[str, Any]:
    """Layers that do not see positions; Hugging Face marks the others."""
    given, every = config.get("no_rope_layers"), count(config, "no_rope_layer_interval", 4)
    if given is None:
        given = [int((layer + 1) % every != 0) for layer in range(model.layers)]
    if not isinstance(given, list) or len(given) != model.layers or any(kind not in (0, 1) for kind in given):
        raise OptionError(f"no_rope_layers={given!r:.80}: expected 0 or 1 for each of {model.layers} layers")
    return {"no_rope_freq": None if all(given) else [1 - int(kind) for kind in given]}


def _latent(config: _Settings, model: Model) -> dict[str, Any]:
    found = rope_settings(config, "default", "yarn")
    arguments = {
        **_NO_SCALING,
        "use_rope_scaling": False,
        "rotary_base": found["rope_theta"],
        "kv_channels": max(1, model.sizes["hidden"] // model.heads),
    }
    if found["rope_type"] == "default":
        return {**arguments, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    return {**arguments, "rope_type": "yarn", **yarn_arguments(found, "")}


def _latent_config(arguments: _Settings) -> dict[str, Any]:
    is_yarn = latent_rope_type(arguments) == "yarn"
    return {
        **rope_config(arguments),
        "rope_scaling": {"type": "yarn", **yarn_config(arguments, "")} if is_yarn else None,
        "num_key_value_heads": count(arguments, "num_attention_heads"),
        "head_dim": count(arguments, "qk_pos_emb_head_dim"),
    }


# The norms of latent vectors have it in `transformers`, whatever the configuration says of the others.
_LATENT_EPSILON = 1e-6


def _latent_remarks(config: _Settings) -> tuple[str, ...]:
    epsilon = number(config, "rms_norm_eps")
    text = (
        f"rms_norm_eps is {epsilon}: Megatron-Core's norms of latent vectors add it, too, those of transformers "
        f"(q_a_layernorm, kv_a_layernorm) add {_LATENT_EPSILON} to the variance always"
    )
    return () if epsilon == _LATENT_EPSILON else (text,)


# --- experts


def _listed_dense_layers_config(arguments: _Settings) -> dict[str, Any]:
    layers = enumerate(expert_layers_of(arguments))
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, has_experts in layers if not has_experts]}


def _first_dense_layers_config(arguments: _Settings) -> dict[str, Any]:
    layers = expert_layers_of(arguments)
    return {"first_k_dense_replace": layers.index(True) if True in layers else len(layers)}


def _shared_experts(config: _Settings, model: Model) -> dict[str, Any]:
    if "shared ffn" not in model.sizes:
        raise OptionError("config.json does not tell n_shared_experts, and so not how large shared experts are")
    return {"moe_shared_expert_intermediate_size": model.sizes["shared ffn"]}


def _shared_experts_config(arguments: _Settings) -> dict[str, Any]:
    inner = count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size"))
    return {"n_shared_experts": count(arguments, "moe_shared_expert_intermediate_size") // inner}


def _scaled_weights(config: _Settings, model: Model) -> dict[str, Any]:
    if number(config, "routed_scaling_factor") == 0:
        raise OptionError("routed_scaling_factor=0: Megatron-Core takes zero for no factor at all")
    return {"moe_router_topk_scaling_factor": number(config, "routed_scaling_factor")}


def _groups(config: _Settings, name: str, best: int, **usual: int) -> dict[str, Any]:
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


def _groups_config(arguments: _Settings) -> dict[str, Any]:
    if not arguments.get("moe_router_group_topk"):
        return {"n_group": 1, "topk_group": 1}
    return {
        "n_group": count(arguments, "moe_router_num_groups", 1),
        "topk_group": count(arguments, "moe_router_group_topk"),
    }


def _softmax_groups(config: _Settings, model: Model) -> dict[str, Any]:
    has_groups = config.get("topk_method") == "group_limited_greedy"
    return _groups(config, "DeepSeek-V2", 1) if has_groups else {}


def _softmax_groups_config(arguments: _Settings) -> dict[str, Any]:
    found = _groups_config(arguments)
    if found["n_group"] > 1:
        return {**found, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    return {"n_group": None, "topk_group": None, "norm_topk_prob": False}


def _sigmoids(config: _Settings, model: Model) -> dict[str, Any]:
    experts = count(config, "num_experts_per_tok")
    if bool(config.get("norm_topk_prob")) is not (experts > 1):
        raise OptionError(
            f"norm_topk_prob={config.get('norm_topk_prob')!r:.80}, num_experts_per_tok={experts}: Megatron-Core "
            "divides sigmoids by their sum where several experts are chosen, and only there"
        )
    groups = _groups(config, "this family", 2, n_group=1, topk_group=1)
    return {**groups, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def _sigmoids_config(arguments: _Settings) -> dict[str, Any]:
    return {**_groups_config(arguments), "norm_topk_prob": count(arguments, "moe_router_topk") > 1}


RULES: Mapping[str, Rule] = {
    "heads": Rule(_heads, _nothing),
    "decoder": Rule(_decoder, _decoder_config),
    "layers alike": Rule(_alike, _nothing),
    "window": Rule(_window, lambda arguments: {"sliding_window": window_of(arguments)}),
    "window of some layers": Rule(_window_of_some, _window_of_some_config),
    "rotary": Rule(_rotary, rope_config),
    "partly rotary": Rule(_partly_rotary, _partly_rotary_config),
    "yarn": Rule(_scaled_rotary, rope_config),
    "layers without positions": Rule(
        _without_rotary,
        lambda given: {"no_rope_layers": [int(not marked) for marked in _marked_layers(given, "no_rope_freq", False)]},
    ),
    "latent attention": Rule(_latent, _latent_config, _latent_remarks),
    "listed dense layers": Rule(_nothing, _listed_dense_layers_config),
    "first dense layers": Rule(_nothing, _first_dense_layers_config),
    "shared experts": Rule(_shared_experts, _shared_experts_config),
    "scaled weights": Rule(
        _scaled_weights,
        lambda given: {"routed_scaling_factor": number(given, "moe_router_topk_scaling_factor", 1.0) or 1.0},
    ),
    "multi-token prediction": Rule(
        lambda config, model: {"mtp_num_layers": model.predicting or None},
        lambda given: {"num_nextn_predict_layers": given.get("mtp_num_layers") or 0},
    ),
    "softmax groups": Rule(_softmax_groups, _softmax_groups_config),
    "sigmoids": Rule(_sigmoids, _sigmoids_config),
}
"""Settings that no row says, because several belong together: each a rule, which is read both ways. A later rule's
settings go before those of an earlier one.
"""


def rules(*names: str) -> tuple[Rule, ...]:
    """Rules by name."""
    return tuple(RULES[name] for name in names)


# --- groups


class Group(NamedTuple):
    """Rows, settings and rules that go together; `defaults` of a decoder, whose activation is SiLU unless said."""

    rows: tuple[Row, ...] = ()
    settings: tuple[Setting, ...] = ()
    rules: tuple[Rule, ...] = ()
    defaults: Mapping[str, Any] = {}


GROUPS: Mapping[str, Group] = {
    **{name: Group(rules=(rule,)) for name, rule in RULES.items()},
    "decoder": Group((), DECODER_SETTINGS, rules("decoder", "layers alike"), DECODER_DEFAULTS),
    "sizes": Group((), SIZES),
    "rms norm": Group((), EPSILON),
    "decoder layers": Group((), (), rules("decoder"), DECODER_DEFAULTS),
    "embedding": Group(EMBEDDING),
    "attention": Group(ATTENTION),
    "latent attention": Group(LATENT_ATTENTION, LATENT_SETTINGS, rules("latent attention")),
    "qkv bias": Group(QKV_BIAS),
    "qk norm": Group(QK_NORM),
    "mlp": Group(DENSE_MLP),
    "experts": Group(GATED_EXPERTS, (INNER_OF_EXPERTS, CHOSEN_EXPERTS)),
    "latent mlp": Group(LATENT_MLP, (INNER_OF_EXPERTS, CHOSEN_EXPERTS)),
    "shared experts": Group(SHARED_EXPERTS, (), rules("shared experts")),
    "sigmoids": Group((ROUTER_BIAS,), (ROUTED_EXPERTS,), rules("scaled weights", "sigmoids")),
}
"""What a file names in `groups`; each rule that no other group has is one."""
