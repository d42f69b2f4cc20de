"""Tables of families: complete on both sides for every model, and settings that come back from Megatron's arguments."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.families.registry import FAMILIES, family_named, family_of_arguments, family_of_config
from mcore_ckpt.families.table import Family, Naming, extra_state_keys, relate

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_experts_per_tok": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "head_dim": 16, "rope_theta": 500000.0},
    "mistral": {**SMALL, "sliding_window": 16},
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "qwen3": {**SMALL, "head_dim": 16},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2-moe": {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3-moe": {**SMALL, **EXPERTS, "norm_topk_prob": True},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 64, "n_inner": 40},
    "deepseek-v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0},
    "gemma": {**SMALL, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"},
    "gpt-oss": {
        **SMALL,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "deepseek-v3": {**LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
}
NAMINGS = [
    Naming(),
    Naming("transformer_engine"),
    Naming(stacked_layers=False),
    Naming(stacked_layers=False, stacked_experts=False, halves_apart=True),
]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.mark.parametrize("naming", NAMINGS, ids=str)
def test_every_element_has_one_place_on_either_side(family: Family, naming: Naming) -> None:
    model = family.model(CONFIGS[family.name])
    if naming.stacked_layers and len(set(model.expert_layers)) > 1:
        with pytest.raises(OptionError, match="cannot be stacked"):
            relate(family, model, naming, 128)
        return
    relation = relate(family, model, naming, 128)  # raises where links do not tile both sides
    assert {link.megatron for link in relation.links} == relation.megatron.keys()
    assert {link.hf for link in relation.links} == relation.hf.keys()
    assert relation.megatron["embedding.word_embeddings.weight"] == (128, 32)
    numbered = [key for key in relation.megatron if ".layers.0." in key]
    assert bool(numbered) is not naming.stacked_layers
    halves = [key for key in relation.megatron if key.endswith("weight_w")]
    assert bool(halves) is (naming.halves_apart and family.name != "gpt2")
    objects = extra_state_keys(family, model, naming)
    assert len(set(objects)) == len(objects)
    assert all(offset < shape for _, offsets, shapes in objects for offset, shape in zip(offsets, shapes, strict=True))


def test_settings_come_back_from_arguments(family: Family) -> None:
    config = CONFIGS[family.name]
    arguments = family.arguments(config)
    assert family_of_arguments(arguments, "here") is family
    back = family.config(arguments, config["vocab_size"])
    assert family.model(back) == family.model(config)
    assert family.arguments(back) == arguments
    assert {name: back[name] for name in config if name in back} == config
    assert family_of_config({"model_type": family.model_types[0]}, "here") is family
    assert family_named(family.name) is family


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_that_leaves_elements_out_is_an_error(name: str) -> None:
    family = family_named(name)
    model = family.model(CONFIGS[name])
    wrong = replace(model, head_dim=model.head_dim // 2)  # shapes go on saying what they did
    with pytest.raises(OptionError, match=r"linear_qkv\.weight .* lies in 0 chunks"):
        relate(family, wrong, Naming(), 128)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_hidden_layers": 2**50}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "no model has that many"),
        ({"num_attention_heads": 2**30}, "no model has that many"),
        ({"num_key_value_heads": 3}, "3 groups"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"vocab_size": 1000}, "128 rows"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    llama = family_named("llama")
    with pytest.raises(OptionError, match=words):
        relate(llama, llama.model({**SMALL, **settings}), Naming(), 128)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "best 2 experts"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        ("gpt-oss", {"rope_scaling": None}, "'default'"),
        ("gpt-oss", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek-v3", {"n_group": 4, "topk_group": 1}, "best 4 experts"),
    ],
)
def test_what_megatron_has_no_layer_for_is_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        family_named(name).arguments({**CONFIGS[name], **settings})


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("llama", {"rotary_percent": 0.5}, "rotary_percent"),
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved"),
        ("llama", {"add_bias_linear": True}, "add_bias_linear"),
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
        ("qwen3-moe", {"moe_router_score_function": "sigmoid"}, "sigmoid"),
        ("gpt2", {"group_query_attention": True}, "GPT-2"),
        ("deepseek-v2", {"moe_router_pre_softmax": False}, "softmax first"),
        ("deepseek-v3", {"moe_router_enable_expert_bias": False}, "has a bias"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 0]}, "moe_layer_freq"),
        ("deepseek-v2", {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "its best expert"),
        ("gpt-oss", {"softmax_type": "vanilla"}, "softmax_type"),
        ("gpt-oss", {"window_attn_skip_freq": [1]}, "window_attn_skip_freq"),
        ("gemma", {"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma"),
    ],
)
def test_arguments_that_a_family_has_no_layer_for_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    family = family_named(name)
    with pytest.raises(OptionError, match=words):
        family.config({**family.arguments(CONFIGS[name]), **arguments}, 100)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_SCALING = "factor low_freq_factor original_max_position_embeddings mscale rope_theta rope_type type".split()


@given(data=st.data())
def test_settings_from_anywhere_are_taken_or_refused(data: st.DataObject) -> None:
    """A `config.json`, and stored arguments, with anything in the place of any setting: no other error comes of it."""
    family = data.draw(st.sampled_from(FAMILIES))
    config = dict(CONFIGS[family.name])
    names = st.sampled_from([*config, "rope_scaling", "rope_parameters", "sliding_window", "mlp_only_layers"])
    scaling = st.dictionaries(st.sampled_from(_SCALING), st.just("yarn") | st.just("llama3") | _ANYTHING, max_size=4)
    config |= data.draw(st.dictionaries(names, _ANYTHING | scaling, max_size=2))
    with suppress(OptionError):
        model = family.model(config)
        if model.layers * max(1, model.experts) * model.heads < 10_000:
            relate(family, model, Naming(stacked_layers=False), 128)
    with suppress(OptionError):
        family.arguments(config)
    arguments = family.arguments(CONFIGS[family.name])
    arguments |= data.draw(st.dictionaries(st.sampled_from(sorted(arguments)), _ANYTHING, max_size=2))
    with suppress(OptionError):
        family_of_arguments(arguments, "here")
    with suppress(OptionError):
        family.model(family.config(arguments, 100))


def test_rotary_settings_of_transformers_4_and_5() -> None:
    llama = family_named("llama")
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = llama.arguments({**SMALL, "rope_theta": 500000.0, "rope_scaling": scaling})
    new = llama.arguments({**SMALL, "rope_parameters": {**scaling, "rope_theta": 500000.0}})
    assert old == new
    assert (new["rotary_base"], new["use_rope_scaling"], new["rope_scaling_factor"]) == (500000, True, 8.0)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="llama, mistral"):
        family_named("bert")
    with pytest.raises(OptionError, match="'bert' is not known"):
        family_of_config({"model_type": "bert"}, "config.json")
    with pytest.raises(OptionError, match="--arch"):
        family_of_arguments({"normalization": "LayerNorm"}, "ckpt")
