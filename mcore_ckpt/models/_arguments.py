"""Megatron's arguments of a model: where they contradict its family's, and what a job with them has to be given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models._settings import (
    MOST_LAYERS,
    YARN_DEFAULTS,
    YARN_SCALES,
    expert_layers_of,
    groups_of,
    latent_rope_type,
    setting,
    yarn_scales,
)
from mcore_ckpt.models._table import Family

_Arguments = Mapping[str, Any]


def _is_rotary(arguments: _Arguments) -> bool:
    return setting(arguments, "position_embedding_type", default="rope") in ("rope", "yarn", "mrope")


def _is_latent(arguments: _Arguments) -> bool:
    return bool(arguments.get("multi_latent_attention"))


def _is_plainly_rotary(arguments: _Arguments) -> bool:
    return _is_rotary(arguments) and not _is_latent(arguments)


def _has_experts(arguments: _Arguments) -> bool:
    return bool(arguments.get("num_experts"))


def _has_groups_of_experts(arguments: _Arguments) -> bool:
    """Whether a router leaves out groups: without a number of those to choose Megatron-Core looks at none."""
    groups, chosen = arguments.get("moe_router_num_groups"), arguments.get("moe_router_group_topk")
    return _has_experts(arguments) and bool(chosen) and chosen != groups


def _has_any(*names: str) -> Callable[[_Arguments], bool]:
    return lambda arguments: any(arguments.get(name) for name in names)


def _group(names: str, *neutral: Any) -> dict[str, tuple[Any, ...]]:
    """Arguments, each with the values by which it changes nothing."""
    return dict.fromkeys(names.split(), neutral)


# The models that read these arguments (a job stores all, whatever the model), and for each argument the values by which
# it changes nothing; without any, each value says something.
_READ: tuple[tuple[Callable[[_Arguments], bool], Mapping[str, tuple[Any, ...]]], ...] = (
    (
        lambda _: True,
        {
            **_group(
                "num_layers hidden_size normalization norm_epsilon layernorm_epsilon num_attention_heads "
                "position_embedding_type"
            ),
            **_group(
                "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json hybrid_layer_pattern "
                "hybrid_override_pattern softmax_scale window_size experimental_attention_variant "
                "linear_attention_freq linear_attention_type mrope_section",
                None,
            ),
            **_group(
                "apply_residual_connection_post_layernorm apply_layernorm_1p layernorm_zero_centered_gamma "
                "heterogeneous_block_specs is_hybrid_model use_mup scale_embeddings_by_hidden_size swiglu quick_geglu "
                "squared_relu qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention",
                False,
            ),
            "mtp_num_layers": (None, 0),
            "softmax_type": ("vanilla",),
        },
    ),
    # The fused kernel of GELU has the approximation.
    (
        lambda given: not _has_any("swiglu", "quick_geglu", "squared_relu")(given),
        {"gated_linear_unit": (False,), "bias_gelu_fusion": (True,), "use_te_activation_func": (False,)},
    ),
    (
        _has_any("swiglu", "quick_geglu", "gated_linear_unit"),
        {"glu_linear_offset": (0.0,), "activation_func_clamp_value": (None,)},
    ),
    (lambda given: not _is_latent(given), {"kv_channels": (), "num_query_groups": ()}),
    (lambda given: _window(given.get("window_size")) is not None, {"window_attn_skip_freq": (None,)}),
    (
        _is_rotary,
        {"no_rope_freq": (None, 0), "rotary_base": (), "rotary_percent": (1.0,), "rotary_interleaved": (False,)},
    ),
    (_is_plainly_rotary, {"rotary_seq_len_interpolation_factor": (None, 1), "use_rope_scaling": (False,)}),
    (lambda given: _is_plainly_rotary(given) and bool(given.get("use_rope_scaling")), {"rope_scaling_factor": ()}),
    (
        lambda given: given.get("position_embedding_type") == "yarn",
        _group(
            "yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
            "yarn_mscale yarn_correction_range_round_to_int"
        ),
    ),
    (lambda _: False, {"yarn_mscale_all_dim": ()}),  # but for its part in what `yarn_mscale` comes to
    # Softmax is scaled by `mscale_all_dim` whatever the kind of rotary embedding.
    (
        _is_latent,
        {
            **_group("q_lora_rank", None),
            **_group("kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type mscale_all_dim"),
        },
    ),
    (
        lambda given: _is_latent(given) and latent_rope_type(given) == "yarn",
        _group("rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale"),
    ),
    (
        _has_experts,
        {
            **_group("moe_layer_freq moe_router_topk"),
            "moe_router_score_function": ("softmax",),
            "moe_router_topk_scaling_factor": (None, 1.0, 0.0),  # zero is as none
            "moe_router_load_balancing_type": ("top-k",),
            **_group(
                "moe_router_topk_limited_devices moe_router_force_biased moe_latent_size moe_mlp_glu_interleave_size "
                "moe_shared_expert_glu_interleave_size",
                None,
            ),
            **_group(
                "moe_router_enable_expert_bias moe_router_force_load_balancing moe_apply_probs_on_input "
                "moe_shared_expert_gate",
                False,
            ),
        },
    ),
    (
        lambda given: _has_experts(given) and setting(given, "moe_router_score_function") in (None, "softmax"),
        {"moe_router_pre_softmax": (False,)},
    ),
    (_has_groups_of_experts, {"moe_router_num_groups": (None, 1), "moe_router_group_topk": (None,)}),
)

COMPUTATION: Mapping[str, tuple[Any, ...]] = {name: neutral for _, group in _READ for name, neutral in group.items()}
"""Megatron's arguments that change what a model computes, each with the values by which it changes nothing.

Sizes that shapes of tensors show, and biases and norms that have tensors of their own, are not here; nor is what only
rounds otherwise.
"""

TRAINED_WITH: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "moe_expert_capacity_factor": ((None,), "an expert takes no tokens beyond its capacity"),
    "moe_expert_rank_capacity_factor": ((None,), "a rank takes no tokens beyond the capacity of its experts"),
    "moe_input_jitter_eps": ((None, 0.0), "what a router sees is multiplied by noise"),
    "spec": ((None,), "the layers are what that function makes of them"),
}
"""Arguments of a job that no model of Hugging Face has, and that its weights may do without: they are named."""


def _window(value: Any) -> Any:
    """A window; nothing for an infinite one."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return value
    return None if value[0] == -1 else (value[0], 0 if value[1] == -1 else value[1])


def _layers_of(value: Any, layers: Any, *, last: bool) -> Any:
    """A pattern of layers, given as one for each, or by how often a layer is another; None: all are as most are."""
    if type(value) is int and value > 0 and type(layers) is int and 0 < layers <= MOST_LAYERS:
        value = [((layer + 1) % value == 0) is last for layer in range(layers)]
    if not isinstance(value, (list, tuple)):
        return value
    pattern = tuple(map(bool, value))
    return None if all(kind is not last for kind in pattern) else pattern


def _meaning(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that change what is computed, in one way of saying it; without those that nothing asks for."""
    read = [name for reads, group in _READ if reads(arguments) for name in group]
    found = {name: arguments[name] for name in read if name in arguments}
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
    for prefix in YARN_DEFAULTS:
        scales = {prefix + name for name in YARN_SCALES} & found.keys()
        if prefix and arguments.get(f"{prefix}rotary_scaling_factor") is None:
            found = {name: value for name, value in found.items() if name not in scales}
        elif scales:
            values = zip(YARN_SCALES, yarn_scales(arguments, prefix), strict=True)
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
    """Stored arguments with which something else is computed than the family's: name, what is stored, what it has."""
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


# Megatron's arguments that some Megatron-LM from 0.12 to 0.19 does not take with `--use-checkpoint-args`, with what a
# job has without the option. `yarn_*` are of YaRN outside of latent attention, and options from 0.19 on.
_DEFAULTS: Mapping[str, Any] = {
    "norm_epsilon": 1e-5,
    "rope_scaling_factor": 8.0,
    "kv_lora_rank": 32,
    **dict.fromkeys(("qk_head_dim", "v_head_dim"), 128),
    "qk_pos_emb_head_dim": 64,
    **dict.fromkeys(("rotary_scaling_factor", "mscale", "yarn_rotary_scaling_factor"), 1.0),
    "mscale_all_dim": 0.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32,
    "yarn_beta_slow": 1,
    "yarn_correction_range_round_to_int": True,
}
_LAUNCH_DEFAULTS: Mapping[str, Any] = {
    name: _DEFAULTS.get(name, next(iter(COMPUTATION[name]), None))  # mostly a value that changes nothing
    for name in (
        "norm_epsilon apply_layernorm_1p bias_gelu_fusion qk_layernorm window_size window_attn_skip_freq softmax_type "
        "quick_geglu glu_linear_offset activation_func_clamp_value rotary_seq_len_interpolation_factor "
        "use_rope_scaling rope_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_score_function "
        "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_shared_expert_gate mtp_num_layers "
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
        "rotary_scaling_factor mscale mscale_all_dim yarn_rotary_scaling_factor yarn_original_max_position_embeddings "
        "yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int"
    ).split()
}
# Settings whose option `pretrain_gpt.py` parses without giving it to `GPTModel`, up to this Megatron-LM: with what it
# builds, and with what the model calls it.
_PARSED_ONLY: Mapping[str, tuple[Any, str, str]] = {
    "rope_scaling_factor": (8.0, "rope_scaling_factor", "0.19"),
    "rotary_seq_len_interpolation_factor": (None, "seq_len_interpolation_factor", "0.18"),
}
# Settings without an option: with what `pretrain_gpt.py` builds, and with what a script has to set otherwise.
_FIXED_IN_LAUNCHES: Mapping[str, tuple[Any, str]] = {
    "original_max_position_embeddings": (4096, "original_max_position_embeddings={}"),
    "beta_fast": (32, "beta_fast={}"),
    "beta_slow": (1, "beta_slow={}"),
    "gated_linear_unit": (False, "gated_linear_unit={}, activation_func=partial(gelu, approximate='tanh')"),
    "scale_embeddings_by_hidden_size": (False, "embeddings times the square root of hidden_size"),
}


def _option(name: str, value: Any) -> str:
    """The option by which a job gets an argument. Some of YaRN are called as those of latent attention."""
    latent = name.removeprefix("yarn_")
    option = f"--{'no_' * (value is False)}{latent if latent in _LAUNCH_DEFAULTS else name}".replace("_", "-")
    if name == "rotary_seq_len_interpolation_factor" and value == int(value):
        value = int(value)  # which is all that its parser takes
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "")
    return option if isinstance(value, bool) else f"{option} {shown}"


def launch_notes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """What has to be said to who launches a model with these arguments: options that it has to be given, and others."""
    options, notes = {}, []
    for name, default in _LAUNCH_DEFAULTS.items():
        value, alike = arguments.get(name, default), COMPUTATION.get(name, ())
        if value != default and not (value in alike and default in alike):
            options[name] = _option(name, value)
    if options:
        notes.append(f"--use-checkpoint-args does not take all: give the job {' '.join(options.values())}, too")
    notes += [
        f"pretrain_gpt.py of Megatron-LM up to {last} parses {options[name]}, and builds GPTModel with {parameter}="
        f"{built} all the same: the job's script has to give it args.{name}, and exports then need --rope-forwarded"
        for name, (built, parameter, last) in _PARSED_ONLY.items()
        if name in options
    ]
    settings = [
        text.format(arguments[name])
        for name, (built, text) in _FIXED_IN_LAUNCHES.items()
        if arguments.get(name, built) != built
    ]
    if arguments.get("position_embedding_type") == "yarn":
        settings.append("the stored arguments yarn_* (for which Megatron-LM has options from 0.19 on)")
    if settings:
        notes.append(
            "pretrain_gpt.py has no option for what this model has, and builds another one: the job's script has to "
            f"set {', '.join(settings)} in the model's configuration"
        )
    if _is_latent(arguments) and arguments.get("q_lora_rank") is None:
        notes.append(
            "Megatron-Core builds this model up to 0.18. Later ones put a norm that it has not ahead of its queries "
            "(q_lora_rank is None), or refuse it where they have no Transformer Engine"
        )
    return tuple(notes)


def as_built(arguments: Mapping[str, Any], *, forwarded: bool = False) -> dict[str, Any]:
    """Stored arguments as the model has them: of a job, as `pretrain_gpt.py` builds it, or (`forwarded`) a script that
    gives it all its rotary options; those stored by an import describe the model.
    """
    found = dict(arguments)
    is_new = "yarn_beta_fast" in arguments  # of Megatron-LM from 0.19 on
    if "world_size" in arguments:
        for name in () if forwarded else _PARSED_ONLY.keys() & arguments.keys():
            built, _, last = _PARSED_ONLY[name]
            found[name] = arguments[name] if is_new and last != "0.19" else built
        if is_new and arguments.get("position_embedding_type") == "yarn" and not _is_latent(arguments):
            found |= {f"yarn_{name}": setting(arguments, f"yarn_{name}", name) for name in YARN_DEFAULTS[""]}
    return found


def compare_settings(
    family: Family, config: Mapping[str, Any], arguments: Mapping[str, Any], where: str, *, given: bool
) -> tuple[str, ...]:
    """Compare stored arguments with a `config.json`, from `where`; notes, or `OptionError` for another model."""
    if not arguments:
        return family.remarks(family.complete(config))
    found = contradictions(arguments, family.arguments(config))
    if found:
        name, value, other = found[0]
        more = f" (and {', '.join(name for name, _, _ in found[1:])})" if found[1:] else ""
        has = "nothing of the kind" if other is None else f"{other!r:.80}"
        if name in _PARSED_ONLY:
            more += " (what pretrain_gpt.py builds; --rope-forwarded if this job's script passes its options on)"
        if given:
            raise OptionError(
                f"{where}: says {has} where the checkpoint's stored argument {name} is {value!r:.80}{more}; it belongs "
                "to another model. Nothing was written"
            )
        raise OptionError(
            f"{where}: {name}={value!r:.80} changes what the model computes, and the family {family.name} has {has}"
            f"{more}: transformers would compute something else. Nothing was written"
        )
    notes = [
        f"the stored argument {name} is {arguments[name]!r:.80}: {what}; nothing of this is in transformers' model"
        for name, (neutral, what) in TRAINED_WITH.items()
        if name in arguments and arguments[name] not in neutral
    ]
    return (*notes, *family.remarks(family.complete(config)))
