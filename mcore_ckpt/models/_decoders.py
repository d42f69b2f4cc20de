"""What families of decoders share, by groups: rows of parameters, settings, and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mcore_ckpt.models._rules import rules
from mcore_ckpt.models._settings import Setting, if_any, layer_count, negated, number
from mcore_ckpt.models._table import PREDICTING, Part, Row, Rule

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
    *SHARED_EXPERTS,
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


class Group(NamedTuple):
    """Rows, settings and rules that go together; `defaults` of a decoder, whose activation is SiLU unless said."""

    rows: tuple[Row, ...] = ()
    settings: tuple[Setting, ...] = ()
    rules: tuple[Rule, ...] = ()
    defaults: Mapping[str, Any] = {}


GROUPS: Mapping[str, Group] = {
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
    "shared experts": Group(SHARED_EXPERTS, (), rules("shared experts")),
    "sigmoids": Group((ROUTER_BIAS,), (ROUTED_EXPERTS,), rules("scaled weights", "sigmoids")),
    **{
        name: Group(rules=rules(name))
        for name in (
            *("rotary", "partly rotary", "yarn", "layers without positions", "window", "window of some layers"),
            *("heads", "layers alike", "first dense layers", "listed dense layers", "multi-token prediction"),
        )
    },
}
"""What a file names in `groups`. Groups that depend on others stand behind them."""
