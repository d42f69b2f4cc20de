"""The families that there are, and which one a model belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._computation import TRAINED_WITH, contradictions
from mcore_ckpt.models.families._deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mcore_ckpt.models.families._dense import LLAMA, MISTRAL, QWEN2, QWEN3
from mcore_ckpt.models.families._gemma import GEMMA, LATER_GEMMAS
from mcore_ckpt.models.families._gpt2 import GPT2
from mcore_ckpt.models.families._gpt_oss import GPT_OSS
from mcore_ckpt.models.families._mixtures import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from mcore_ckpt.models.families._starcoder2 import STARCODER2
from mcore_ckpt.models.families._table import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    GPT2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    GPT_OSS,
    STARCODER2,
)
"""In the order in which arguments are compared with them."""

# Megatron's arguments that `--use-checkpoint-args` does not take from a checkpoint (Megatron-LM 0.16, 0.19), with what
# a job has without the option, which is called as they are but for this one.
_OPTION_NAMES = {"layernorm_epsilon": "norm_epsilon"}
_LAUNCH_DEFAULTS: Mapping[str, Any] = {
    "layernorm_epsilon": 1e-5,
    "qk_layernorm": False,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_shared_expert_gate": False,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
# Those for which a job has no option, with what Megatron-Core takes.
_FIXED_IN_LAUNCHES: Mapping[str, Any] = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def launch_notes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """What has to be said to who launches a model with these arguments: options that it has to be given, and others."""
    options = []
    for name, default in _LAUNCH_DEFAULTS.items():
        value = arguments.get(name, default)
        if value != default:
            option = f"--{_OPTION_NAMES.get(name, name).replace('_', '-')}"
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "")
            options.append(option if value is True else f"{option} {shown}")
    notes = []
    if options:
        notes.append(f"--use-checkpoint-args does not take all: give the job {' '.join(options)}, too")
    notes += [
        f"pretrain_gpt.py has no option for {name}={arguments[name]!r}, and builds the model with {fixed}, which is "
        "another one; a job has to set it in the model's configuration"
        for name, fixed in _FIXED_IN_LAUNCHES.items()
        if arguments.get(name, fixed) != fixed
    ]
    if arguments.get("position_embedding_type") == "yarn":
        notes.append(
            "pretrain_gpt.py has no options for YaRN outside of latent attention: a job has to set the stored "
            "arguments yarn_* in the model's configuration"
        )
    return tuple(notes)


def family_named(name: str) -> Family:
    """A family by its name; raises `OptionError`."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise OptionError(f"arch {name!r}: expected one of auto, {', '.join(family.name for family in FAMILIES)}")


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """The family that a `config.json` names; raises `OptionError`."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    if isinstance(kind, str) and kind in LATER_GEMMAS:
        raise OptionError(
            f"{where}: model_type {kind!r}: such a model has {LATER_GEMMAS[kind]}; Megatron-Core has no layers "
            "for that, so that whatever it made of these weights would be another model"
        )
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise OptionError(f"{where}: model_type {kind!r:.80} is not known here; expected one of {known}")


def family_of_arguments(arguments: Mapping[str, Any], where: str) -> Family:
    """The family that Megatron's arguments describe; raises `OptionError`."""
    for family in FAMILIES:
        if family.recognizes(arguments):
            return family
    raise OptionError(
        f"{where}: its stored arguments are those of no family known here; name one (--arch) or give the model's "
        "config.json (--hf-config)"
    )


def compare_settings(
    family: Family, config: Mapping[str, Any], arguments: Mapping[str, Any], where: str, *, given: bool
) -> tuple[str, ...]:
    """Compare stored arguments with the model that `config.json` (`config`, from `where`) describes; what is to be said
    of harmless differences. Raises `OptionError` where the two compute something else.
    """
    if not arguments:
        return family.remarks(family.complete(config))
    found = contradictions(arguments, family.arguments(config))
    if found:
        name, value, other = found[0]
        more = f" (and {', '.join(name for name, _, _ in found[1:])})" if found[1:] else ""
        has = "nothing of the kind" if other is None else f"{other!r:.80}"
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
