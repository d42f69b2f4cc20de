"""What families of decoders share: rows of parameters, settings, and the code for those that no row says."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models._settings import (
    Setting,
    count,
    expert_layers_of,
    groups_of,
    layer_count,
    negated,
    number,
    rope_arguments,
    rope_config,
    window_of,
)
from mcore_ckpt.models._table import Family, Model, Part, Row

_HERE, _THERE = "decoder.layers.{layer}.", "model.layers.{layer}."
EXPERTS = "mlp.experts.experts.{expert}."


def row(megatron: str, *parts: str, how: str = "same", when: str = "", engine: str | None = None) -> Row:
    """A row of what Megatron calls `megatron`, and of parts of Hugging Face: `lm_head.weight [vocab, hidden]`, or
    `[experts, expert ffn x 2]`. `when` are words with commas.
    """
    return Row(megatron, tuple(map(_part, parts)), how, tuple(filter(None, when.split(", "))), engine)


def _part(text: str) -> Part:
    key, _, shape = text.removesuffix("]").partition(" [")
    axes = [[int(word) if word.isdigit() else word for word in axis.split(" x ")] for axis in shape.split(", ")]
    return Part(key, tuple(tuple(sizes) if len(sizes) > 1 else sizes[0] for sizes in axes))


def in_layer(
    megatron: str, *parts: str, how: str = "same", when: str = "", engine: str | None = None, there: str = _THERE
) -> Row:
    """A row of each layer; keys begin in the layer. `there` is what Hugging Face calls a layer."""
    keys = [there + part for part in parts]
    return row(_HERE + megatron, *keys, how=how, when=when, engine=None if engine is None else _HERE + engine)


EMBEDDING = (
    row("embedding.word_embeddings.weight", "model.embed_tokens.weight [vocab, hidden]", how="vocabulary"),
    row("decoder.final_layernorm.weight", "model.norm.weight [hidden]"),
    row("output_layer.weight", "lm_head.weight [vocab, hidden]", how="vocabulary", when="untied"),
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


def gated(megatron: str, there: str, size: str, when: str, *names: str) -> tuple[Row, ...]:
    """A gated MLP of inner `size`; keys on both sides begin so, and `names` are those of gate, up and down."""
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    halves = f"{there}{gate}.weight [{size}, hidden]", f"{there}{up}.weight [{size}, hidden]"
    return (
        in_layer(f"{megatron}linear_fc1.weight", *halves, how="halves", when=when),
        in_layer(f"{megatron}linear_fc2.weight", f"{there}{down}.weight [hidden, {size}]", when=when),
    )


def with_bias(
    megatron: str, there: str, shape: str, bias: str, how: str = "same", layer: str = _THERE
) -> tuple[Row, ...]:
    """A layer or a norm: its weight of a shape, and its bias, which is as it is also where weights are transposed."""
    how_bias = how.replace("transposed", "").strip() or "same"
    return (
        in_layer(f"{megatron}weight", f"{there}.weight [{shape}]", how=how, there=layer),
        in_layer(f"{megatron}bias", f"{there}.bias [{bias}]", how=how_bias, there=layer),
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


def gated_experts(block: str, *names: str) -> tuple[Row, ...]:
    """The router, and gated experts; `block` is their module's name in a layer, `names` those of an expert's layers."""
    return (
        EXPERT_NORM,
        in_layer("mlp.router.weight", f"{block}.gate.weight [experts, hidden]", when="expert layer"),
        *gated(EXPERTS, f"{block}.experts.{{expert}}.", "expert ffn", "expert layer", *names),
    )


def as_loaded(rows: tuple[Row, ...], block: str = "mlp") -> tuple[Row, ...]:
    """The rows of a model with gated experts as `transformers` 5 has it in memory: one tensor for all of a layer.
    `block` is what the files call the module that is called `mlp` in memory.
    """
    return (
        *(
            replace(one, parts=tuple(replace(part, key=part.key.replace(f".{block}.", ".mlp.")) for part in one.parts))
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


SIZES = (
    Setting("vocab_size", "vocab_size", size="vocab"),
    Setting("hidden_size", "hidden_size", size="hidden"),
    Setting("intermediate_size", "ffn_hidden_size", size="ffn"),
    Setting("num_hidden_layers", "num_layers", layer_count, size="layers"),
    Setting("num_attention_heads", "num_attention_heads", size="heads"),
    Setting("max_position_embeddings", "seq_length max_position_embeddings"),
    Setting("max_position_embeddings", "max_position_embeddings"),
    Setting("tie_word_embeddings", "untie_embeddings_and_output_weights", negated),
)


def epsilon(name: str) -> tuple[Setting, ...]:
    """What norms add to the variance, which versions of Megatron call differently."""
    return (
        Setting(name, "layernorm_epsilon norm_epsilon", number, 1e-5),
        Setting(name, "norm_epsilon layernorm_epsilon", number, 1e-5),
    )


DECODER_SETTINGS = (*SIZES, *epsilon("rms_norm_eps"))

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


def decoder_model(family: Family, config: Mapping[str, Any]) -> Model:
    """Sizes of a decoder, with experts where a row of its settings counts some."""
    sizes = family.sizes(config)
    hidden, heads, layers = sizes["hidden"], sizes["heads"], sizes["layers"]
    groups = count(config, "num_key_value_heads", heads)
    head_dim = count(config, "head_dim", max(1, hidden // heads))
    queries, keys, experts = heads * head_dim, groups * head_dim, sizes.get("experts", 0)
    sizes |= {"q": queries, "kv": keys, "qkv": queries + 2 * keys, "head": head_dim}
    if experts:
        sizes["expert gate and up"] = 2 * sizes["expert ffn"]
    holds = frozenset() if config.get("tie_word_embeddings") else frozenset({"untied"})
    return Model(layers, sizes, heads, groups, head_dim, experts, _expert_layers(family, config, layers), holds)


def _expert_layers(family: Family, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts: all have in families without a setting for it."""
    if "mlp_only_layers" not in family.defaults:
        return (True,) * layers if family.has("num_experts") else ()
    step, dense = count(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or len(dense) > layers:
        raise OptionError(f"mlp_only_layers={dense!r:.80}: expected a list of layers, of {layers}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def attention_arguments(family: Family, config: Mapping[str, Any], model: Model) -> dict[str, Any]:
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


def decoder_arguments(family: Family, config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Megatron's arguments for a decoder with rotary embedding, RMS norms and a gated MLP, or gated experts."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected 'full_attention' for all layers of this family")
    # Hugging Face counts the token itself in a window, Megatron those before it.
    windowed = family.has("window_size") and config.get("sliding_window") is not None
    return {
        **attention_arguments(family, config, model),
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **rope_arguments(config),
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "swiglu": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "window_size": (count(config, "sliding_window") - 1, 0) if windowed else None,
        **(_expert_arguments(model) if model.experts else {}),
    }


def _expert_arguments(model: Model) -> dict[str, Any]:
    """Megatron's arguments for which layers have experts, and for a router that takes the softmax of the chosen."""
    layers = model.expert_layers
    return {
        "moe_layer_freq": 1 if all(layers) else [int(kind) for kind in layers],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
    }


def decoder_config(family: Family, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of such a decoder that no row gives."""
    hidden, heads = count(arguments, "hidden_size"), count(arguments, "num_attention_heads")
    found = {
        "num_key_value_heads": groups_of(arguments),
        "head_dim": count(arguments, "kv_channels", max(1, hidden // heads)),
        "attention_dropout": 0.0,
        **rope_config(arguments),
    }
    if family.has("window_size"):
        found["sliding_window"] = window_of(arguments)
    if "mlp_only_layers" in family.defaults:
        layers = enumerate(expert_layers_of(arguments))
        found |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, has_experts in layers if not has_experts],
        }
    return found


SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
DECODER = functools.partial(
    Family,
    settings=DECODER_SETTINGS,
    model_of=decoder_model,
    arguments_of=decoder_arguments,
    config_of=decoder_config,
    allowed=SILU,
)
"""A family of decoders with rotary embedding, RMS norms and a gated MLP, but for what it says otherwise."""
