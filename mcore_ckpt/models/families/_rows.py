"""Rows that several families share. A family's own table is put together of these, and of what is its alone."""

from __future__ import annotations

from dataclasses import replace

from mcore_ckpt.models.families._table import Part, Row

_HERE, _THERE = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERTS = "mlp.experts.experts.{expert}."


def row(megatron: str, *parts: str, how: str = "same", when: str = "", engine: str | None = None) -> Row:
    """A row of what Megatron calls `megatron`, and of parts of Hugging Face: `lm_head.weight [vocab, hidden]`, or
    `[experts, expert ffn x 2]`. `when` are words with commas.
    """
    return Row(megatron, tuple(map(_part, parts)), how, tuple(filter(None, when.split(", "))), engine)


def _part(text: str) -> Part:
    key, _, shape = text.removesuffix("]").partition(" [")
    return Part(key, tuple(_axis(axis.split(" x ")) for axis in shape.split(", ")))


def _axis(words: list[str]) -> str | int | tuple[str | int, ...]:
    sizes = tuple(int(word) if word.isdigit() else word for word in words)
    return sizes if len(sizes) > 1 else sizes[0]


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

DENSE_MLP = (
    in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight [hidden]", when="dense layer"),
    in_layer(
        "mlp.linear_fc1.weight",
        "mlp.gate_proj.weight [ffn, hidden]",
        "mlp.up_proj.weight [ffn, hidden]",
        how="halves",
        when="dense layer",
    ),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight [hidden, ffn]", when="dense layer"),
)

EXPERT_NORM = in_layer(
    "mlp.linear_fc1.layer_norm_weight",
    "post_attention_layernorm.weight [hidden]",
    when="expert layer",
    engine="pre_mlp_layernorm.weight",
)
"""Megatron's own layers name the norm before experts as that of a dense MLP; Transformer Engine's cannot fuse it."""


def gated_experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """The router, and gated experts; `block` is their module's name in a layer, the others' are those in an expert."""
    expert = f"{block}.experts.{{expert}}."
    return (
        EXPERT_NORM,
        in_layer("mlp.router.weight", f"{block}.gate.weight [experts, hidden]", when="expert layer"),
        in_layer(
            f"{_EXPERTS}linear_fc1.weight",
            f"{expert}{gate}.weight [expert ffn, hidden]",
            f"{expert}{up}.weight [expert ffn, hidden]",
            how="halves",
            when="expert layer",
        ),
        in_layer(f"{_EXPERTS}linear_fc2.weight", f"{expert}{down}.weight [hidden, expert ffn]", when="expert layer"),
    )


def shared_experts(block: str) -> tuple[Row, ...]:
    """Experts that every token goes through, as one gated MLP; `block` is their module's name in a layer."""
    return (
        in_layer(
            "mlp.shared_experts.linear_fc1.weight",
            f"{block}.gate_proj.weight [shared ffn, hidden]",
            f"{block}.up_proj.weight [shared ffn, hidden]",
            how="halves",
            when="expert layer",
        ),
        in_layer(
            "mlp.shared_experts.linear_fc2.weight",
            f"{block}.down_proj.weight [hidden, shared ffn]",
            when="expert layer",
        ),
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
            f"{_EXPERTS}linear_fc1.weight",
            "mlp.experts.gate_up_proj [experts, expert gate and up, hidden]",
            how="halves of all experts",
            when="expert layer",
        ),
        in_layer(
            f"{_EXPERTS}linear_fc2.weight",
            "mlp.experts.down_proj [experts, hidden, expert ffn]",
            how="each of all experts",
            when="expert layer",
        ),
    )
