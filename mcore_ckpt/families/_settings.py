"""Settings that several families share: `config.json` to sizes and Megatron's arguments, and back.

A `config.json` comes from a file that nobody vouches for: each number is looked at before it is used. What
Megatron-Core has no layer for is refused, in both directions: a model that computes something else is worse than none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.families.table import Model

__all__ = [
    "COMPUTATION",
    "DECODER_DEFAULTS",
    "TRAINED_WITH",
    "check_router",
    "contradictions",
    "count",
    "decoder_arguments",
    "decoder_config",
    "decoder_model",
    "epsilon_of",
    "expect",
    "expect_no_windows",
    "expert_arguments",
    "expert_layers_of",
    "groups_of",
    "is_plain_decoder",
    "latent_rope_type",
    "layer_count",
    "number",
    "rope_arguments",
    "rope_config",
    "rope_settings",
    "setting",
    "window_arguments",
    "window_config",
    "yarn_arguments",
    "yarn_config",
    "yarn_scales",
]

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

_MOST = 2**40
_MOST_LAYERS = 100_000
# What Megatron-Core's scaled rotary embedding has fixed, by the names of Hugging Face.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


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
    if layers > _MOST_LAYERS:
        raise OptionError(f"{name}={layers}: no model has that many")
    return layers


def expect(config: Mapping[str, Any], name: str, *values: Any) -> None:
    """Raise `OptionError` unless a setting has one of these values, the first of which is what its absence means."""
    value = config.get(name, values[0])
    if value not in values:
        shown = " or ".join(map(repr, values))
        raise OptionError(f"{name}={value!r:.80}: this family's layers in Megatron-Core have {shown} only")


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


def decoder_arguments(config: Mapping[str, Any], **constants: Any) -> dict[str, Any]:
    """Megatron's arguments for a decoder with rotary embedding, RMS norms and a gated MLP; `constants` override."""
    expect(config, "hidden_act", "silu")
    model = decoder_model(config)
    grouped = model.groups != model.heads
    epsilon = number(config, "rms_norm_eps")
    positions = count(config, "max_position_embeddings")
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
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **rope_arguments(config),
        "normalization": "RMSNorm",
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "squared_relu": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": "untied" in model.holds,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": model.sizes["vocab"],
        "window_size": None,
        **constants,
    }


_DECODER = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False}


def decoder_config(
    arguments: Mapping[str, Any], vocabulary: int, other: Mapping[str, Any] | None = None, /, **fields: Any
) -> dict[str, Any]:
    """A `config.json` for such arguments; `fields` are added, and `other` is what the family has unlike most.

    Raises:
        OptionError: the arguments ask for what the family has not.
    """
    for name, wanted in {**_DECODER, **(other or {})}.items():
        # Positions that are stretched by YaRN are rotary, too.
        if setting(arguments, name) != wanted and (setting(arguments, name), wanted) != ("yarn", "rope"):
            raise OptionError(
                f"the stored argument {name}={arguments.get(name)!r:.80}: expected {wanted!r} in this family"
            )
    for name in (
        "apply_layernorm_1p",
        "squared_relu",
        "rotary_interleaved",
        "apply_residual_connection_post_layernorm",
    ):
        if arguments.get(name):
            raise OptionError(f"the stored argument {name}={arguments[name]!r}: this family has no such layers")
    if number(arguments, "rotary_percent", 1.0) != 1.0:
        raise OptionError(f"the stored argument rotary_percent={arguments['rotary_percent']!r}: expected 1.0")
    hidden, heads = count(arguments, "hidden_size"), count(arguments, "num_attention_heads")
    positions = count(arguments, "max_position_embeddings")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": count(arguments, "ffn_hidden_size"),
        "num_hidden_layers": count(arguments, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups_of(arguments),
        "head_dim": count(arguments, "kv_channels", max(1, hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": epsilon_of(arguments),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "attention_dropout": 0.0,
        **rope_config(arguments),
        **fields,
    }


# --- positions that turn

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
_SCALES = ("mscale", "mscale_all_dim")
# What Megatron-Core takes where a launch says nothing, by what arguments begin with: those of latent attention, others.
_YARN_DEFAULTS: Mapping[str, Mapping[str, float | None]] = {
    "": {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn_": {"rotary_scaling_factor": None, "mscale": None, "mscale_all_dim": None},
}
_TRUNCATED = "yarn_correction_range_round_to_int"


def rope_settings(config: Mapping[str, Any], *kinds: str, otherwise: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `transformers` 5 makes of all places where rotary settings may stand: `rope_type` and what that kind reads.

    `rope_scaling` goes before `rope_parameters`, and a length that the model had first beside them before one in them.

    Args:
        config: of a model, with the defaults of its class.
        kinds: that the family can have.
        otherwise: what its class takes where there are no rotary settings.

    Raises:
        OptionError: another kind; a setting that cannot be, or that nobody reads.
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
                f"rotary settings of the kind {kind!r} with {name!r:.80}={value!r:.80}: nobody reads that of this kind "
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
    defaults = _YARN_DEFAULTS[prefix]
    factor = number(arguments, f"{prefix}rotary_scaling_factor", defaults["rotary_scaling_factor"])
    mscale, mscale_all_dim = (
        None
        if setting(arguments, prefix + name, default=defaults[name]) is None
        else number(arguments, prefix + name, defaults[name])
        for name in _SCALES
    )
    return factor, mscale, mscale_all_dim


def yarn_scales(arguments: Mapping[str, Any], prefix: str) -> tuple[float, float]:
    """What cosines and sines are multiplied by, and what softmax's scale is: with the square of the second.

    Args:
        arguments: Megatron's.
        prefix: what those of YaRN begin with: `yarn_`, or nothing, those of latent attention.

    Raises:
        OptionError: they are no numbers.
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
    """Megatron's arguments of YaRN.

    Args:
        found: of `rope_settings`.
        prefix: what its arguments begin with: `yarn_`, or nothing, those of latent attention.

    Raises:
        OptionError: Megatron-Core computes something else with these settings, and has no argument for that.
    """
    factor = found["factor"]
    mscale, mscale_all_dim = (_YARN_DEFAULTS[prefix][name] if found[name] is None else found[name] for name in _SCALES)
    theirs = found["attention_factor"]
    if theirs is None:
        theirs = _transformers_magnitude(factor, found["mscale"], found["mscale_all_dim"])
    ours = _megatron_magnitude(factor, mscale, mscale_all_dim)
    if not math.isclose(theirs, ours, rel_tol=1e-9):
        given = ", ".join(f"{name}={found[name]}" for name in ("factor", *_SCALES, "attention_factor"))
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


def expect_no_windows(config: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless all layers of a model that may have windows look at everything."""
    expect(config, "use_sliding_window", False)
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise OptionError(f"layer_types={kinds!r:.80}: expected 'full_attention' for all layers of this family")


def window_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """A window of attention: Hugging Face counts the token itself, Megatron those before it."""
    if config.get("sliding_window") is None:
        return {}
    return {"window_size": (count(config, "sliding_window") - 1, 0)}


def window_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The window as Hugging Face counts it."""
    window = arguments.get("window_size")
    if window is None:
        return {"sliding_window": None}
    if not isinstance(window, (list, tuple)) or len(window) != 2 or window[1] not in (0, -1):
        raise OptionError(f"the stored argument window_size={window!r:.80}: expected (tokens before, 0)")
    return {"sliding_window": count({"window_size": window[0]}, "window_size") + 1}


_OTHER_LAYERS = (
    "num_experts",
    "multi_latent_attention",
    "qk_layernorm",
    "add_qkv_bias",
    "window_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)


def is_plain_decoder(arguments: Mapping[str, Any], *has: str, may_have: tuple[str, ...] = ()) -> bool:
    """Whether arguments are of a decoder with RMS norms and gated MLPs that has these features, and no others."""
    if arguments.get("moe_shared_expert_gate"):
        may_have = (*may_have, "moe_shared_expert_intermediate_size")
    return (
        arguments.get("normalization") == "RMSNorm"
        and bool(arguments.get("swiglu"))
        and all(arguments.get(name) for name in has)
        and not any(arguments.get(name) for name in _OTHER_LAYERS if name not in (*has, *may_have))
    )


def expert_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer, whether it has experts, as Megatron's arguments say."""
    layers, frequency = count(arguments, "num_layers"), arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0 and layers <= _MOST_LAYERS:
        return tuple(layer % frequency == 0 for layer in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(kind) for kind in frequency)
    raise OptionError(f"the stored argument moe_layer_freq={frequency!r:.80}: expected a number, or one for each layer")


def check_router(arguments: Mapping[str, Any], **wanted: Any) -> None:
    """Raise `OptionError` where a router does what a family's does not."""
    for name, value in {"moe_router_score_function": "softmax", **wanted}.items():
        if setting(arguments, name, default=value) != value:
            raise OptionError(f"the stored argument {name}={arguments[name]!r:.80}: expected {value!r} in this family")
    for name in ("moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_group_topk"):
        if arguments.get(name) and name not in wanted:
            raise OptionError(f"the stored argument {name}={arguments[name]!r:.80}: this family's router has none")


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


# --- what changes the computation

COMPUTATION: Mapping[str, tuple[Any, ...]] = {
    # the layers
    "num_layers": (),
    "hidden_size": (),
    "apply_residual_connection_post_layernorm": (False,),
    "normalization": (),
    "norm_epsilon": (),
    "layernorm_epsilon": (),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "heterogeneous_block_specs": (False,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "is_hybrid_model": (False,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "mtp_num_layers": (None, 0),
    "use_mup": (False,),
    "scale_embeddings_by_hidden_size": (False,),
    # what is between the matrices of an MLP
    "swiglu": (False,),
    "quick_geglu": (False,),
    "squared_relu": (False,),
    "gated_linear_unit": (False,),
    "bias_gelu_fusion": (True,),  # the fused kernel has the approximation
    "use_te_activation_func": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    # attention
    "num_attention_heads": (),
    "num_query_groups": (),
    "kv_channels": (),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "window_size": (None,),
    "window_attn_skip_freq": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "linear_attention_type": (None,),
    # positions
    "position_embedding_type": (),
    "no_rope_freq": (None, 0),
    "mrope_section": (None,),
    "rotary_base": (),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False,),
    "rope_scaling_factor": (),
    "yarn_rotary_scaling_factor": (),
    "yarn_original_max_position_embeddings": (),
    "yarn_beta_fast": (),
    "yarn_beta_slow": (),
    "yarn_mscale": (),
    "yarn_mscale_all_dim": (),
    "yarn_correction_range_round_to_int": (),
    # latent attention
    "multi_latent_attention": (False,),
    "q_lora_rank": (None,),
    "kv_lora_rank": (),
    "qk_head_dim": (),
    "qk_pos_emb_head_dim": (),
    "v_head_dim": (),
    "rope_type": (),
    "rotary_scaling_factor": (),
    "original_max_position_embeddings": (),
    "beta_fast": (),
    "beta_slow": (),
    "mscale": (),
    "mscale_all_dim": (),
    # experts
    "moe_layer_freq": (),
    "moe_router_topk": (),
    "moe_router_score_function": ("softmax",),
    "moe_router_pre_softmax": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0, 0.0),  # zero is as none
    "moe_router_num_groups": (None, 1),
    "moe_router_group_topk": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_load_balancing_type": ("top-k",),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_shared_expert_gate": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
}
"""Megatron's arguments that change what a model computes, each with the values by which it changes nothing.

Without any, each value says something. Sizes that shapes of tensors show, and biases and norms that have tensors of
their own, are not here; nor is what only rounds otherwise.
"""

TRAINED_WITH: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "moe_expert_capacity_factor": ((None,), "an expert takes no tokens beyond its capacity"),
    "moe_expert_rank_capacity_factor": ((None,), "a rank takes no tokens beyond the capacity of its experts"),
    "moe_input_jitter_eps": ((None, 0.0), "what a router sees is multiplied by noise"),
    "spec": ((None,), "the layers are what that function makes of them"),
}
"""Arguments of a launch that no model of Hugging Face has, and that its weights may do without: they are named."""


def _is_rotary(arguments: Mapping[str, Any]) -> bool:
    return setting(arguments, "position_embedding_type", default="rope") in ("rope", "yarn", "mrope")


def _is_latent(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("multi_latent_attention"))


def _is_plainly_rotary(arguments: Mapping[str, Any]) -> bool:
    return _is_rotary(arguments) and not _is_latent(arguments)


def _has_yarn(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("position_embedding_type") == "yarn"


def _has_latent_yarn(arguments: Mapping[str, Any]) -> bool:
    return _is_latent(arguments) and latent_rope_type(arguments) == "yarn"


def _has_gelu(arguments: Mapping[str, Any]) -> bool:
    return not any(arguments.get(name) for name in ("swiglu", "quick_geglu", "squared_relu"))


def _is_gated(arguments: Mapping[str, Any]) -> bool:
    return any(arguments.get(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit"))


def _has_experts(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("num_experts"))


def _has_groups_of_experts(arguments: Mapping[str, Any]) -> bool:
    """Whether a router leaves out groups: without a number of those to choose Megatron-Core looks at none."""
    groups, chosen = arguments.get("moe_router_num_groups"), arguments.get("moe_router_group_topk")
    return _has_experts(arguments) and bool(chosen) and chosen != groups


def _has_softmax_router(arguments: Mapping[str, Any]) -> bool:
    return _has_experts(arguments) and setting(arguments, "moe_router_score_function", default="softmax") == "softmax"


_ASKED: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("gated_linear_unit bias_gelu_fusion use_te_activation_func", _has_gelu),
    ("glu_linear_offset activation_func_clamp_value", _is_gated),
    ("kv_channels num_query_groups", lambda arguments: not _is_latent(arguments)),
    ("window_attn_skip_freq", lambda arguments: _window(arguments.get("window_size")) is not None),
    ("no_rope_freq rotary_base rotary_percent rotary_interleaved", _is_rotary),
    ("rotary_seq_len_interpolation_factor use_rope_scaling", _is_plainly_rotary),
    (
        "rope_scaling_factor",
        lambda arguments: _is_plainly_rotary(arguments) and bool(arguments.get("use_rope_scaling")),
    ),
    (" ".join(name for name in COMPUTATION if name.startswith("yarn_")), _has_yarn),
    ("yarn_mscale_all_dim", lambda _: False),  # but for its part in what `yarn_mscale` comes to
    ("q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type", _is_latent),
    (
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale",
        _has_latent_yarn,
    ),
    ("mscale_all_dim", _is_latent),  # softmax is scaled by it whatever the kind of rotary embedding
    (" ".join(name for name in COMPUTATION if name.startswith("moe_")), _has_experts),
    ("moe_router_pre_softmax", _has_softmax_router),
    ("moe_router_num_groups moe_router_group_topk", _has_groups_of_experts),
)
"""Arguments that are asked for in some models only: a launch stores all that there are, whatever the model."""


def _window(value: Any) -> Any:
    """A window; nothing for an infinite one."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return value
    return None if value[0] == -1 else (value[0], 0 if value[1] == -1 else value[1])


def _layers_of(value: Any, layers: Any, *, last: bool) -> Any:
    """A pattern of layers, given as one for each, or by how often a layer is another; None: all are as most are."""
    if type(value) is int and value > 0 and type(layers) is int and 0 < layers <= _MOST_LAYERS:
        value = [((layer + 1) % value == 0) is last for layer in range(layers)]
    if not isinstance(value, (list, tuple)):
        return value
    pattern = tuple(map(bool, value))
    return None if all(kind is not last for kind in pattern) else pattern


def _meaning(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that change what is computed, in one way of saying it; without those that nothing asks for."""
    found = {name: arguments[name] for name in COMPUTATION if name in arguments}
    for names, asked in _ASKED:
        if not asked(arguments):
            for name in names.split():
                found.pop(name, None)
    layers = arguments.get("num_layers")
    for name, meaning in (
        ("window_size", _window),
        ("window_attn_skip_freq", functools.partial(_layers_of, layers=layers, last=False)),
        ("no_rope_freq", functools.partial(_layers_of, layers=layers, last=True)),
        ("moe_router_load_balancing_type", _selection),
    ):
        if name in found:
            found[name] = meaning(found[name])
    if "group_query_attention" not in arguments or arguments.get("num_attention_heads") is None:
        found.pop("num_query_groups", None)
    elif "num_query_groups" in found:
        found["num_query_groups"] = groups_of(arguments)
    if "rope_type" in found:
        found["rope_type"] = latent_rope_type(arguments)
    for prefix in _YARN_DEFAULTS:
        scales = {prefix + name for name in _SCALES} & found.keys()
        if prefix and arguments.get(f"{prefix}rotary_scaling_factor") is None:
            found = {name: value for name, value in found.items() if name not in scales}
        elif scales:
            values = zip(_SCALES, yarn_scales(arguments, prefix), strict=True)
            found |= {prefix + name: round(value, 9) for name, value in values if prefix + name in scales}
    if "moe_layer_freq" in found:
        if layers is None:
            del found["moe_layer_freq"]
        else:
            found["moe_layer_freq"] = expert_layers_of(arguments)
    return found


def _selection(value: Any) -> Any:
    """How experts are chosen, for a way to balance their load: most ways leave that as it is."""
    kinds = value if isinstance(value, (list, tuple)) else [value]
    return next((kind for kind in kinds if kind in ("sinkhorn", "quantile_balancing")), "top-k")


def contradictions(stored: Mapping[str, Any], family: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Stored arguments that change what is computed, where a model of the family computes something else.

    Args:
        stored: a launch's arguments; what is absent, or None without meaning anything by it, is not compared.
        family: all that the family has to say of a model, as `Family.arguments` does.

    Returns:
        For each the name, what is stored, and what the family has; None: nothing.

    Raises:
        OptionError: a stored argument says nothing that can be understood.
    """
    ours, theirs = _meaning(stored), _meaning(family)
    found = []
    for name, value in ours.items():
        neutral = COMPUTATION[name]
        if (value is None and None not in neutral) or (name not in theirs and not neutral):
            continue
        other = theirs.get(name, neutral[0] if neutral else None)
        if value != other and not (value in neutral and other in neutral):
            found.append((name, stored[name], family.get(name)))
    return found
