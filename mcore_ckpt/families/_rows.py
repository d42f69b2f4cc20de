"""Rows that several families share. A family's own table is put together of these, and of what is its alone."""

from __future__ import annotations

from dataclasses import replace

from mcore_ckpt.families.table import Part, Row

__all__ = [
    "ATTENTION",
    "DENSE_MLP",
    "EMBEDDING",
    "EXPERT_NORM",
    "QKV_BIAS",
    "QK_NORM",
    "as_loaded",
    "gated_experts",
    "shared_experts",
]

_HERE = "decoder.layers.{layer}."
_THERE = "model.layers.{layer}."

EMBEDDING = (
    Row("embedding.word_embeddings.weight", (Part("model.embed_tokens.weight", ("vocab", "hidden")),), "vocabulary"),
    Row("decoder.final_layernorm.weight", (Part("model.norm.weight", ("hidden",)),)),
    Row("output_layer.weight", (Part("lm_head.weight", ("vocab", "hidden")),), "vocabulary", when=("untied",)),
)
"""A model with a tied embedding has no output layer of its own."""

ATTENTION = (
    Row(
        f"{_HERE}self_attention.linear_qkv.layer_norm_weight",
        (Part(f"{_THERE}input_layernorm.weight", ("hidden",)),),
    ),
    Row(
        f"{_HERE}self_attention.linear_qkv.weight",
        (
            Part(f"{_THERE}self_attn.q_proj.weight", ("q", "hidden")),
            Part(f"{_THERE}self_attn.k_proj.weight", ("kv", "hidden")),
            Part(f"{_THERE}self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        "grouped qkv",
    ),
    Row(f"{_HERE}self_attention.linear_proj.weight", (Part(f"{_THERE}self_attn.o_proj.weight", ("hidden", "q")),)),
)

QKV_BIAS = (
    Row(
        f"{_HERE}self_attention.linear_qkv.bias",
        (
            Part(f"{_THERE}self_attn.q_proj.bias", ("q",)),
            Part(f"{_THERE}self_attn.k_proj.bias", ("kv",)),
            Part(f"{_THERE}self_attn.v_proj.bias", ("kv",)),
        ),
        "grouped qkv",
    ),
)

QK_NORM = (
    Row(f"{_HERE}self_attention.q_layernorm.weight", (Part(f"{_THERE}self_attn.q_norm.weight", ("head",)),)),
    Row(f"{_HERE}self_attention.k_layernorm.weight", (Part(f"{_THERE}self_attn.k_norm.weight", ("head",)),)),
)

DENSE_MLP = (
    Row(
        f"{_HERE}mlp.linear_fc1.layer_norm_weight",
        (Part(f"{_THERE}post_attention_layernorm.weight", ("hidden",)),),
        when=("dense layer",),
    ),
    Row(
        f"{_HERE}mlp.linear_fc1.weight",
        (
            Part(f"{_THERE}mlp.gate_proj.weight", ("ffn", "hidden")),
            Part(f"{_THERE}mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "halves",
        when=("dense layer",),
    ),
    Row(
        f"{_HERE}mlp.linear_fc2.weight",
        (Part(f"{_THERE}mlp.down_proj.weight", ("hidden", "ffn")),),
        when=("dense layer",),
    ),
)

EXPERT_NORM = Row(
    f"{_HERE}mlp.linear_fc1.layer_norm_weight",
    (Part(f"{_THERE}post_attention_layernorm.weight", ("hidden",)),),
    when=("expert layer",),
    engine=f"{_HERE}pre_mlp_layernorm.weight",
)
"""Megatron's own layers name the norm before experts as that of a dense MLP; Transformer Engine's cannot fuse it."""


def gated_experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """The router, and gated experts; `block` is their module's name in a layer, the others' are those in an expert."""
    expert = f"{_THERE}{block}.experts.{{expert}}."
    here = f"{_HERE}mlp.experts.experts.{{expert}}."
    return (
        EXPERT_NORM,
        Row(
            f"{_HERE}mlp.router.weight",
            (Part(f"{_THERE}{block}.gate.weight", ("experts", "hidden")),),
            when=("expert layer",),
        ),
        Row(
            f"{here}linear_fc1.weight",
            (
                Part(f"{expert}{gate}.weight", ("expert ffn", "hidden")),
                Part(f"{expert}{up}.weight", ("expert ffn", "hidden")),
            ),
            "halves",
            when=("expert layer",),
        ),
        Row(
            f"{here}linear_fc2.weight",
            (Part(f"{expert}{down}.weight", ("hidden", "expert ffn")),),
            when=("expert layer",),
        ),
    )


def shared_experts(block: str) -> tuple[Row, ...]:
    """Experts that every token goes through, as one gated MLP; `block` is their module's name in a layer."""
    here, there = f"{_HERE}mlp.shared_experts.", f"{_THERE}{block}."
    return (
        Row(
            f"{here}linear_fc1.weight",
            (
                Part(f"{there}gate_proj.weight", ("shared ffn", "hidden")),
                Part(f"{there}up_proj.weight", ("shared ffn", "hidden")),
            ),
            "halves",
            when=("expert layer",),
        ),
        Row(
            f"{here}linear_fc2.weight",
            (Part(f"{there}down_proj.weight", ("hidden", "shared ffn")),),
            when=("expert layer",),
        ),
    )


def as_loaded(rows: tuple[Row, ...], block: str = "mlp") -> tuple[Row, ...]:
    """The rows of a model with gated experts as `transformers` 5 has it in memory: one tensor for all of a layer.

    Args:
        rows: as its files have it.
        block: what these call the module that is called `mlp` in memory.
    """
    here, there = f"{_HERE}mlp.experts.experts.{{expert}}.", f"{_THERE}mlp.experts."
    plain = tuple(
        replace(row, parts=tuple(replace(part, key=part.key.replace(f".{block}.", ".mlp.")) for part in row.parts))
        for row in rows
        if "{expert}" not in row.megatron
    )
    return (
        *plain,
        Row(
            f"{here}linear_fc1.weight",
            (Part(f"{there}gate_up_proj", ("experts", "expert gate and up", "hidden")),),
            "halves of all experts",
            when=("expert layer",),
        ),
        Row(
            f"{here}linear_fc2.weight",
            (Part(f"{there}down_proj", ("experts", "hidden", "expert ffn")),),
            "each of all experts",
            when=("expert layer",),
        ),
    )
