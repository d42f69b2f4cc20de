"""What families share: settings of a `config.json` and of Megatron's arguments, and rows of their tables.

Both come from files that are not trusted: each number is checked before it is used. What Megatron-Core has no layer
for is refused. The other direction only translates: `compare_settings` translates what it gives back, and compares.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._table import Family, Model, Part, Row, expect

_MOST = 2**40
MOST_LAYERS = 100_000


def count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive whole number of a configuration; raises `OptionError`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise OptionError(f"{name}={value!r:.80}: expected a positive whole number in the model's configuration")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number of a configuration; raises `OptionError`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST < value < _MOST:
        raise OptionError(f"{name}={value!r:.80}: expected a number in the model's configuration")
    return value


def layer_count(config: Mapping[str, Any], name: str = "num_hidden_layers") -> int:
    """How many layers; raises `OptionError` for more than any model has, before something is made for each."""
    layers = count(config, name)
    if layers > MOST_LAYERS:
        raise OptionError(f"{name}={layers}: no model has that many")
    return layers


def setting(arguments: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first of some arguments that is there and not None: versions of Megatron call some things differently."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), default)


def epsilon_of(arguments: Mapping[str, Any]) -> float:
    """What norms add to the variance."""
    return number(
        {"norm_epsilon": setting(arguments, "norm_epsilon", "layernorm_epsilon", default=1e-5)}, "norm_epsilon"
    )


def groups_of(arguments: Mapping[str, Any]) -> int:
    """Groups of keys and values; without grouped attention each head has its own."""
    heads = count(arguments, "num_attention_heads")
    return count(arguments, "num_query_groups", heads) if arguments.get("group_query_attention") else heads


def expert_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer, whether it has experts, as Megatron's arguments say."""
    layers, frequency = count(arguments, "num_layers"), arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0 and layers <= MOST_LAYERS:
        return tuple(layer % frequency == 0 for layer in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(kind) for kind in frequency)
    raise OptionError(f"the stored argument moe_layer_freq={frequency!r:.80}: expected a number, or one for each layer")


def experts_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts each token has, and the size of one inside, as Megatron's arguments say."""
    inner = count(arguments, "moe_ffn_hidden_size", count(arguments, "ffn_hidden_size"))
    return count(arguments, "moe_router_topk"), inner


# What Megatron-Core's scaled rotary embedding has fixed, by the names of Hugging Face.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What `transformers` reads of each kind of scaling.
_YARN_FIELDS = (
    "attention_factor beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings truncate"
)
_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *_LLAMA3_SCALING}),
    "yarn": frozenset(_YARN_FIELDS.split()),
}
_LENGTH = "original_max_position_embeddings"
YARN_SCALES = ("mscale", "mscale_all_dim")
# What Megatron-Core takes where a job says nothing, by what arguments begin with: those of latent attention, others.
YARN_DEFAULTS: Mapping[str, Mapping[str, float | None]] = {
    "": {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn_": {"rotary_scaling_factor": None, "mscale": None, "mscale_all_dim": None},
}
_TRUNCATED = "yarn_correction_range_round_to_int"


def rope_settings(config: Mapping[str, Any], *kinds: str, otherwise: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `transformers` 5 makes of all places of rotary settings, `rope_scaling` before `rope_parameters`:
    `rope_type` and what that kind reads. `kinds`, `otherwise`: the family's. `OptionError`: another kind or setting.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling is None:
        scaling = otherwise or {}
    if not isinstance(scaling, Mapping):
        raise OptionError(f"rope_parameters={scaling!r:.80}: expected settings by name")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        expected = " or ".join("none" if kind == "default" else repr(kind) for kind in kinds)
        raise OptionError(f"rotary scaling {kind!r:.80}: expected {expected} for this family")
    for settings in (config, scaling):
        expect(settings, "partial_rotary_factor", 1.0, None)
    read = _ROPE_FIELDS[kind]
    for name, value in scaling.items():
        if value is not None and name not in {"rope_type", "type", "rope_theta", "partial_rotary_factor", *read}:
            known = f"it has {', '.join(sorted(read))}" if read else "it has none"
            raise OptionError(
                f"rotary settings of the kind {kind!r} with {name!r:.80}={value!r:.80}: no library reads it "
                f"({known}), so that the model may be meant otherwise than it is computed"
            )
    theta = number(scaling if "rope_theta" in scaling else config, "rope_theta")
    found = {"rope_type": kind, "rope_theta": int(theta) if theta == int(theta) else theta}
    for name in sorted(read - {_LENGTH, "truncate"}):
        optional = kind == "yarn" and name != "factor"
        found[name] = None if optional and scaling.get(name) is None else number(scaling, name)
    if _LENGTH in read:
        place = next((place for place in (config, scaling) if _LENGTH in place), None)
        found[_LENGTH] = count(config, "max_position_embeddings") if place is None else count(place, _LENGTH)
    if kind == "yarn":
        found["truncate"] = bool(scaling.get("truncate", True))
        found["beta_fast"], found["beta_slow"] = found["beta_fast"] or 32, found["beta_slow"] or 1
    return found


def rope_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's rotary arguments; `transformers` 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    found = rope_settings(config, "default", "linear", "llama3", "yarn")
    base = {"rotary_base": found["rope_theta"], "use_rope_scaling": found["rope_type"] == "llama3"}
    if found["rope_type"] == "linear":
        return {**base, "rotary_seq_len_interpolation_factor": found["factor"]}
    if found["rope_type"] == "default":
        return base
    if found["rope_type"] == "yarn":
        return {**base, "position_embedding_type": "yarn", **yarn_arguments(found, "yarn_")}
    for name, fixed in _LLAMA3_SCALING.items():
        if found[name] != fixed:
            raise OptionError(f"rotary scaling with {name}={found[name]!r}: Megatron-Core has {fixed} built in")
    return {**base, "rope_scaling_factor": found["factor"]}


def rope_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as any `transformers` reads them."""
    theta = float(number(arguments, "rotary_base", 10000))
    scaling: dict[str, Any] | None = None
    if arguments.get("position_embedding_type") == "yarn":
        scaling = yarn_config(arguments, "yarn_")
    elif arguments.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": number(arguments, "rope_scaling_factor", 8.0), **_LLAMA3_SCALING}
    elif number(arguments, "rotary_seq_len_interpolation_factor", 1) != 1:
        scaling = {"rope_type": "linear", "factor": float(number(arguments, "rotary_seq_len_interpolation_factor"))}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies by, in either library: softmax's scale by its square, cosines by a quotient of two."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _quotient(factor: float, mscale: float, mscale_all_dim: float) -> float:
    below = _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, mscale) / below if below else math.inf


def _transformers_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What `transformers` multiplies cosines and sines by, without an `attention_factor`."""
    return _quotient(factor, mscale, mscale_all_dim) if mscale and mscale_all_dim else _magnitude(factor)


def _megatron_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What Megatron-Core (0.16, 0.19) multiplies cosines and sines by."""
    if mscale is None or mscale_all_dim is None:
        return _magnitude(factor)
    return _quotient(factor, mscale, mscale_all_dim)


def _yarn_numbers(arguments: Mapping[str, Any], prefix: str) -> tuple[float, float | None, float | None]:
    """Megatron's factor, mscale and mscale_all_dim, with its defaults; raises `OptionError`."""
    defaults = YARN_DEFAULTS[prefix]
    factor = number(arguments, f"{prefix}rotary_scaling_factor", defaults["rotary_scaling_factor"])
    mscale, mscale_all_dim = (
        None
        if setting(arguments, prefix + name, default=defaults[name]) is None
        else number(arguments, prefix + name, defaults[name])
        for name in YARN_SCALES
    )
    return factor, mscale, mscale_all_dim


def yarn_scales(arguments: Mapping[str, Any], prefix: str) -> tuple[float, float]:
    """What cosines and sines are multiplied by, and what softmax's scale is: with the square of the second. `prefix` is
    what arguments of YaRN begin with: `yarn_`, or nothing, those of latent attention.
    """
    factor, mscale, mscale_all_dim = _yarn_numbers(arguments, prefix)
    return _megatron_magnitude(factor, mscale, mscale_all_dim), _magnitude(factor, mscale_all_dim or 0.0)


def latent_rope_type(arguments: Mapping[str, Any]) -> str:
    """What kind of rotary embedding latent attention has; YaRN by a factor of one is none. Raises `OptionError`."""
    kind = setting(arguments, "rope_type", default="yarn")
    if kind not in ("rope", "yarn"):
        raise OptionError(f"the stored argument rope_type={kind!r:.80}: expected 'rope' or 'yarn'")
    return "rope" if _yarn_numbers(arguments, "")[0] == 1 else str(kind)


def yarn_arguments(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Megatron's arguments of YaRN, of what `rope_settings` found; `prefix` as for `yarn_scales`. Raises `OptionError`
    where Megatron-Core computes something else, and has no argument for that.
    """
    factor = found["factor"]
    mscale, mscale_all_dim = (
        YARN_DEFAULTS[prefix][name] if found[name] is None else found[name] for name in YARN_SCALES
    )
    theirs = found["attention_factor"]
    if theirs is None:
        theirs = _transformers_magnitude(factor, found["mscale"], found["mscale_all_dim"])
    ours = _megatron_magnitude(factor, mscale, mscale_all_dim)
    if not math.isclose(theirs, ours, rel_tol=1e-9):
        given = ", ".join(f"{name}={found[name]}" for name in ("factor", *YARN_SCALES, "attention_factor"))
        raise OptionError(
            f"YaRN with {given}: transformers multiplies cosines and sines by {theirs:.6g} (attention_factor; or else "
            "a quotient of mscale by mscale_all_dim where neither is zero; or else by factor alone), Megatron-Core by "
            f"{ours:.6g} (always the quotient), and it has no other argument for that"
        )
    settings = {
        f"{prefix}rotary_scaling_factor": factor,
        f"{prefix}{_LENGTH}": found[_LENGTH],
        **{f"{prefix}{name}": found[name] for name in ("beta_fast", "beta_slow")},
        f"{prefix}mscale": mscale,
        f"{prefix}mscale_all_dim": mscale_all_dim,
    }
    if prefix:
        return {**settings, _TRUNCATED: found["truncate"]}
    if not found["truncate"]:
        raise OptionError(
            "YaRN with truncate=False: Megatron-Core's latent attention always rounds the range of dimensions between "
            "beta_fast and beta_slow to whole numbers"
        )
    return settings


def yarn_config(arguments: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """YaRN's settings for Megatron's arguments, with which `transformers` computes the same; raises `OptionError`."""
    factor, mscale, mscale_all_dim = _yarn_numbers(arguments, prefix)
    scales = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    ours = _megatron_magnitude(factor, mscale, mscale_all_dim)
    if not math.isclose(ours, _transformers_magnitude(factor, mscale, mscale_all_dim), rel_tol=1e-9):
        scales["attention_factor"] = ours  # which goes before the other two
    return {
        "rope_type": "yarn",
        "factor": factor,
        _LENGTH: count(arguments, prefix + _LENGTH, 4096),
        "beta_fast": number(arguments, f"{prefix}beta_fast", 32.0),
        "beta_slow": number(arguments, f"{prefix}beta_slow", 1.0),
        **{name: value for name, value in scales.items() if value is not None},
        **({"truncate": bool(setting(arguments, _TRUNCATED, default=True))} if prefix else {}),
    }


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


def decoder_model(config: Mapping[str, Any], **more: Any) -> Model:
    """Sizes of a decoder with rotary embedding; `more` are further fields of `Model`, `sizes` among them."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    groups = count(config, "num_key_value_heads", heads)
    head_dim = count(config, "head_dim", max(1, hidden // heads))
    sizes = {
        "vocab": count(config, "vocab_size"),
        "hidden": hidden,
        "ffn": count(config, "intermediate_size"),
        "q": heads * head_dim,
        "kv": groups * head_dim,
        "head": head_dim,
        **more.pop("sizes", {}),
    }
    holds = set(more.pop("holds", ())) | (set() if config.get("tie_word_embeddings", False) else {"untied"})
    layers = layer_count(config)
    return Model(layers, sizes, heads, groups, head_dim, holds=frozenset(holds), **more)


def decoder_arguments(family: Family, config: Mapping[str, Any], /, **more: Any) -> dict[str, Any]:
    """Megatron's arguments for a decoder with rotary embedding, RMS norms and a gated MLP; `more` override."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected 'full_attention' for all layers of this family")
    model = decoder_model(config)
    # Hugging Face counts the token itself in a window, Megatron those before it.
    windowed = family.has("window_size") and config.get("sliding_window") is not None
    return {
        **model_arguments(model, count(config, "max_position_embeddings"), number(config, "rms_norm_eps")),
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
        **more,
    }


def model_arguments(model: Model, positions: int, epsilon: float) -> dict[str, Any]:
    """Megatron's arguments for sizes, and for what few families have."""
    grouped = model.groups != model.heads
    return {
        "num_layers": model.layers,
        "hidden_size": model.sizes["hidden"],
        "ffn_hidden_size": model.sizes["ffn"],
        "num_attention_heads": model.heads,
        "group_query_attention": grouped,
        "num_query_groups": model.groups if grouped else 1,
        "kv_channels": model.head_dim,
        "max_position_embeddings": positions,
        "seq_length": positions,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": "untied" in model.holds,
        "vocab_size": model.sizes["vocab"],
    }


def decoder_config(family: Family, arguments: Mapping[str, Any], vocabulary: int, /, **more: Any) -> dict[str, Any]:
    """A `config.json` for such arguments; `more` override."""
    hidden, heads = count(arguments, "hidden_size"), count(arguments, "num_attention_heads")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": count(arguments, "ffn_hidden_size"),
        "num_hidden_layers": count(arguments, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups_of(arguments),
        "head_dim": count(arguments, "kv_channels", max(1, hidden // heads)),
        "max_position_embeddings": count(arguments, "max_position_embeddings"),
        "rms_norm_eps": epsilon_of(arguments),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "attention_dropout": 0.0,
        **rope_config(arguments),
        **({"sliding_window": _window(arguments)} if family.has("window_size") else {}),
        **more,
    }


def _window(arguments: Mapping[str, Any]) -> int | None:
    """The window as Hugging Face counts it."""
    window = arguments.get("window_size")
    if window is None:
        return None
    if not isinstance(window, (list, tuple)) or len(window) != 2 or window[1] not in (0, -1):
        raise OptionError(f"the stored argument window_size={window!r:.80}: expected (tokens before, 0)")
    return count({"window_size": window[0]}, "window_size") + 1


SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
DECODER = functools.partial(
    Family, model_of=decoder_model, arguments_of=decoder_arguments, config_of=decoder_config, settings=SILU
)
"""A family of decoders with rotary embedding, RMS norms and a gated MLP, but for what it says otherwise."""

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


def expert_arguments(config: Mapping[str, Any], model: Model, **constants: Any) -> dict[str, Any]:
    """Megatron's arguments for layers of experts; `constants` override."""
    layers = model.expert_layers
    found = {
        "num_experts": model.experts,
        "moe_ffn_hidden_size": model.sizes["expert ffn"],
        "moe_router_topk": count(config, "num_experts_per_tok"),
        "moe_layer_freq": 1 if all(layers) else [int(kind) for kind in layers],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        **constants,
    }
    softmax = found["moe_router_score_function"] == "softmax"
    if softmax and found["moe_router_topk"] == 1 and not found["moe_router_pre_softmax"]:
        raise OptionError(
            "num_experts_per_tok=1: the weight of the one expert is always one in this family; Megatron-Core has no "
            "such router (with moe_router_pre_softmax the weight is the probability, without it there have to be more)"
        )
    return found
