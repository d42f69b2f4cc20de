"""Tables of families: complete on both sides for every model, and settings that come back from Megatron's arguments.

Rotary embeddings are read as `transformers` reads them, kept by Megatron's arguments, and refused where these cannot.
"""

import ast
import copy
import importlib.util
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models import _families
from mcore_ckpt.models._arguments import as_built, compare_settings, launch_notes
from mcore_ckpt.models._families import FAMILIES, family_named, family_of_arguments, family_of_config
from mcore_ckpt.models._settings import yarn_scales
from mcore_ckpt.models._table import Family, Naming, relate

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
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_experts_per_tok": 4,
}
LATENT = {**SMALL, **LATENT_ATTENTION, "head_dim": 8}
SIGMOIDS = {
    **{name: LATENT_ATTENTION[name] for name in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size")},
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.0,
}
YARN_32: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
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
        "rope_scaling": YARN_32,
    },
    "starcoder2": {
        **{name: value for name, value in SMALL.items() if name != "rms_norm_eps"},
        "norm_epsilon": 1e-6,
        "sliding_window": 16,
    },
    "deepseek-v3": {**LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "arcee": {**SMALL, "hidden_act": "relu2"},
    "dots1": {**SMALL, **SIGMOIDS, "norm_topk_prob": True},
    "ernie4-5": {**SMALL, "head_dim": 16},
    "glm4-moe": {**SMALL, **SIGMOIDS, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "phi3": {**SMALL, "sliding_window": 16},
    "seed-oss": {**SMALL, "head_dim": 16},
    "smollm3": {**SMALL, "no_rope_layers": [1, 0, 1]},
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
NAMINGS = [
    Naming(),
    Naming("transformer_engine"),
    Naming(stacked_layers=False),
    Naming(stacked_layers=False, stacked_experts=False, halves_apart=True),
]


def _without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.mark.parametrize("naming", NAMINGS, ids=str)
@pytest.mark.parametrize("loaded", [False, True], ids=["files", "loaded"])
def test_every_element_has_one_place_on_either_side(family: Family, naming: Naming, loaded: bool) -> None:
    if loaded:
        if not family.loaded:
            return
        family = family.of_keys(["any.model.layers.0.mlp.experts.gate_up_proj"])
        assert family.rows is family.loaded
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
    settings = family.arguments(CONFIGS[family.name])
    gated = any(settings.get(name) for name in ("swiglu", "gated_linear_unit", "quick_geglu"))
    assert bool(halves) is (naming.halves_apart and gated)


def test_settings_come_back_from_arguments(family: Family) -> None:
    config = CONFIGS[family.name]
    arguments = family.arguments(config)
    if family.traits:  # others have the arguments of a family before them
        assert family_of_arguments(arguments, "here") is family
    back = family.config(arguments, config["vocab_size"])
    assert family.model(back) == family.model(config)
    assert family.arguments(back) == arguments
    assert {name: back[name] for name in config if name in back} == config
    for kind in (family.model_type, *family.others):
        assert family_of_config({"model_type": kind}, "here") is family
    assert family_named(family.name) is family


_SETTING = "[[settings]]\nconfig = 'n'\nmegatron = "


@pytest.mark.parametrize(
    ("text", "replaced", "words"),
    [
        (
            "defaults = ",
            "default = ",
            r"'default' is not known; expected name, architecture, groups, and perhaps traits,",
        ),
        ("architecture = ", "# ", "'architecture' is missing"),
        ('"window"', '"windows"', "group 'windows': expected one of heads, decoder"),
        ('"window"', '["window"]', "expected a table of group, when"),
        ('"embedding", ', '{ group = "embedding", when = "gold" }, ', "when = 'gold': no setting has this"),
        ('"decoder", ', "", "no setting has the size heads, hidden, layers, vocab"),
        ("joined qkv", "joined qqv", "tensors.0.: transform 'joined qqv': expected one of same, "),
        ("[qkv, hidden]", "qkv, hidden", "expected a key and a shape"),
        ("{layer}.self_attn.qkv", "{block}.self_attn.qkv", "expected a key and a shape"),
        ("rms_norm_eps = 1e-5", "rms_norm_eps = ", "no TOML: "),
        (
            "[[tensors]]",
            f"{_SETTING}'hidden_size'\n[[tensors]]",
            "two settings give hidden_size",
        ),
        ("[[tensors]]", f"{_SETTING}'m'\nkind = 'sum'\n[[tensors]]", "kind 'sum': expected"),
        ("defaults = ", "allowed = { use_cache = true }\ndefaults = ", "allowed.use_cache: expected a list"),
        ("defaults = ", "constants = { num_layers = 99 }\ndefaults = ", "constants.num_layers: a setting gives it"),
        ('"mlp"', '"mlp", "shared experts"', "shared experts need a setting with the size 'exp"),
        ('name = "phi3"', 'name = ""', "name='': expected text"),
        ("[[tensors]]", f"{_SETTING}' '\n[[tensors]]", "expected a name on either side"),
        ("how = ", 'engine = "{zz}{0}"\nhow = ', "engine='{zz}.0.': expected a key"),
    ],
)
def test_a_table_that_cannot_be_is_refused_when_it_is_read(
    tmp_path: Path, text: str, replaced: str, words: str
) -> None:
    table = (Path(_families.__file__).parent / "families" / "phi3.toml").read_text()
    assert text in table
    (tmp_path / "own.toml").write_text(table.replace(text, replaced, 1))
    with pytest.raises(OptionError, match=rf"own\.toml.*{words}"):
        family_named(str(tmp_path / "own.toml"))


@pytest.mark.parametrize(
    ("text", "replaced", "words"),
    [
        ("[qkv, hidden]", "[qqq, hidden]", "a shape with 'qqq'; its settings give .*gate and up"),
        ('qkv_proj.weight [qkv, hidden]"', 'a.weight [q, hidden]", "b.weight [kv, hidden]"', "'joined qkv' makes no"),
        ("mlp.gate_up_proj.weight [gate and up", "self_attn.qkv_proj.weight [qkv", r"qkv_proj\.weight .* cover"),
    ],
)
def test_a_table_that_does_not_cover_a_model_is_refused(tmp_path: Path, text: str, replaced: str, words: str) -> None:
    table = (Path(_families.__file__).parent / "families" / "phi3.toml").read_text()
    assert text in table
    (tmp_path / "own.toml").write_text(table.replace(text, replaced, 1))
    family = family_named(str(tmp_path / "own.toml"))
    with pytest.raises(OptionError, match=words):
        relate(family, family.model(CONFIGS["phi3"]), Naming(halves_apart=True), 128)


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
        ({"num_hidden_layers": 10**9}, "no model has that many"),
        ({"num_key_value_heads": 3}, "3 groups"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
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
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "orignal_max_position_embeddings": 32}},
            "'orignal_max_position_emb.*=32",
        ),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}, "'full_attention'"),
        # What stands beside the settings goes before what stands in them, and the model's length is the last resort.
        (
            "llama",
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
            "original_max_position_embeddings=32",
        ),
        (
            "deepseek-v3",
            {"rope_scaling": {**YARN, "attention_factor": 2.0}},
            r"attention_factor=2\.0: .* by 2 .* by 1 ",
        ),
        ("deepseek-v3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate=False"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("gpt2", {"per_layer_config": {"1": {"n_head": 2}}}, "per_layer_config"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method"),
        (  # as the largest one
            "deepseek-v2",
            {
                "topk_method": "group_limited_greedy",
                "n_group": 8,
                "topk_group": 3,
                "num_experts_per_tok": 6,
                "n_routed_experts": 160,
            },
            r"n_group=8, topk_group=3, num_experts_per_tok=6: DeepSeek-V2 .* best 1, Megatron-Core by its best 2 ",
        ),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        ("gpt-oss", {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "'default': expected 'yarn'"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob=False, num_experts_per_tok=4"),
        ("qwen3-moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ],
)
def test_what_megatron_has_no_layer_for_is_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        family_named(name).arguments({**CONFIGS[name], **settings})


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_SCALING = """
attention_factor beta_fast factor low_freq_factor mscale mscale_all_dim original_max_position_embeddings rope_theta
rope_type truncate type
""".split()

_BESIDE = ("original_max_position_embeddings", "layer_types", "is_causal")


@given(data=st.data())
def test_settings_from_anywhere_are_taken_or_refused(data: st.DataObject) -> None:
    """A `config.json`, and stored arguments, with anything in the place of any setting: no other error comes of it."""
    family = data.draw(st.sampled_from(FAMILIES))
    config = dict(CONFIGS[family.name])
    names = st.sampled_from([*config, "rope_scaling", "rope_parameters", "sliding_window", "mlp_only_layers", *_BESIDE])
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


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama", {"rms_norm_eps": 1e-5}, ()),
        ("qwen3", {}, ("give the job --norm-epsilon 1e-06 --qk-layernorm, too",)),
        ("mistral", {}, ("--window-size 15,0",)),
        ("starcoder2", {"hidden_act": "gelu"}, ("--no-bias-gelu-fusion",)),
        (
            "gemma",
            {},
            ("--apply-layernorm-1p", "has to set gated_linear_unit=True, .*, embeddings times"),
        ),
        (
            "gpt-oss",
            {},
            ("--no-bias-gelu-fusion .* --no-yarn-correction-range-round-to-int,", r"yarn_\*"),
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "factor": 32.0}},
            (
                "--use-rope-scaling --rope-scaling-factor 32.0, too",
                r"to 0\.19 parses --rope-scaling-factor 32\.0, and builds GPTModel with rope_scaling_factor=8\.0 all ",
            ),
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            (
                "--rotary-seq-len-interpolation-factor 4, too",  # the parser refuses 4.0
                r"up to 0\.18 parses .*seq_len_interpolation_factor=None .* args\.rotary_seq_len_interpolation_factor",
            ),
        ),
        (
            "deepseek-v3",
            {"rope_scaling": YARN},
            (
                "--moe-router-score-function sigmoid .*--rope-type yarn --rotary-scaling-factor 40.0 --mscale-all-dim",
                "has to set original_max_position_embeddings=16 in",
            ),
        ),
        ("deepseek-v2", {}, ("--rope-type rope, too", r"builds this model up to 0\.18")),
    ],
)
def test_what_a_launch_does_not_take_from_a_checkpoint_is_said(
    name: str, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    """That these options have the effect is shown by tests/launch."""
    notes = launch_notes(family_named(name).arguments({**CONFIGS[name], **settings}))
    assert len(notes) == len(words)
    for note, text in zip(notes, words, strict=True):
        assert re.search(text, note), note


_JOB = {"world_size": 8, "position_embedding_type": "rope", "multi_latent_attention": False}
_NEW = {"yarn_beta_fast": None}  # as jobs of Megatron-LM 0.19 store it


@pytest.mark.parametrize(
    ("stored", "forwarded", "built"),
    [
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0, **_JOB}, False, {"factor": 8.0}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0, **_JOB, **_NEW}, False, {"factor": 8.0}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0, **_JOB}, True, {"factor": 32.0}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, False, {"factor": 32.0}),  # of an import
        ({"rotary_seq_len_interpolation_factor": 4, **_JOB}, False, None),
        ({"rotary_seq_len_interpolation_factor": 4, **_JOB}, True, {"rope_type": "linear", "factor": 4.0}),
        ({"rotary_seq_len_interpolation_factor": 4, **_JOB, **_NEW}, False, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                **_JOB,
                **_NEW,
                "position_embedding_type": "yarn",
                "rotary_scaling_factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "yarn_original_max_position_embeddings": 16,
            },
            False,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0},
        ),
    ],
)
def test_a_jobs_arguments_are_those_that_its_model_has(
    stored: dict[str, Any], forwarded: bool, built: dict[str, Any] | None
) -> None:
    llama = family_named("llama")
    arguments = {**llama.arguments(CONFIGS["llama"]), **stored}
    scaling = llama.config(as_built(arguments, forwarded=forwarded), 100)["rope_scaling"]
    assert (scaling is None) is (built is None)
    assert not built or built.items() <= scaling.items()


def test_the_table_that_the_page_shows_is_the_packages(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    (tmp_path / "own.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert family_named(str(tmp_path / "own.toml")) == family_named("phi3")


def test_a_list_of_layers_that_marks_none_is_of_no_other_family() -> None:
    qwen = family_named("qwen3")
    arguments = qwen.arguments(CONFIGS["qwen3"])
    assert family_of_arguments({**arguments, "no_rope_freq": [0, 0, 0]}, "ckpt") is qwen
    with pytest.raises(OptionError, match="those of no family"):
        family_of_arguments({**arguments, "no_rope_freq": [0, 1, 0]}, "ckpt")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="llama, mistral"):
        family_named("bert")
    with pytest.raises(OptionError, match="'bert' is not known"):
        family_of_config({"model_type": "bert"}, "config.json")
    with pytest.raises(OptionError, match="--arch"):
        family_of_arguments({"normalization": "LayerNorm"}, "ckpt")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("llama", {"rotary_percent": 0.5}, "rotary_percent"),
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved"),
        ("llama", {"no_rope_freq": 3}, "no_rope_freq=3"),
        ("llama", {"softmax_scale": 0.5}, "softmax_scale"),
        ("llama", {"use_mup": True, "hybrid_layer_pattern": "M*"}, "hybrid_layer_pattern='M.'.*and use_mup"),
        ("mistral", {"window_attn_skip_freq": 2}, "window_attn_skip_freq"),
        ("gpt2", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ("gpt2", {"group_query_attention": True}, "num_query_groups"),
        ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
        ("qwen3-moe", {"moe_router_score_function": "sigmoid"}, "sigmoid"),
        ("deepseek-v2", {"moe_router_pre_softmax": False}, "moe_router_pre_softmax"),
        ("deepseek-v2", {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "by its best 1, Megatron-Core"),
        ("deepseek-v2", {"rope_type": "rope", "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0}, "mscale_all_dim"),
        ("deepseek-v3", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 0]}, "moe_layer_freq"),
        ("gpt-oss", {"softmax_type": "vanilla"}, "softmax_type"),
        ("gpt-oss", {"window_attn_skip_freq": [1]}, "window_attn_skip_freq"),
        ("starcoder2", {"squared_relu": True}, "squared_relu"),
        ("gemma", {"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma"),
    ],
)
def test_arguments_that_change_the_computation_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    """None of them changes a shape, or the family that arguments are of."""
    family = family_named(name)
    stored = {**family.arguments(CONFIGS[name]), **arguments}
    with pytest.raises(OptionError, match=words):
        compare_settings(family, family.config(stored, 100), stored, "ckpt", given=False)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        # What a launch stores of models that it does not train, and other ways to say the same.
        ("llama", {"window_size": (-1, 0), "window_attn_skip_freq": 2, "no_rope_freq": [0, 0, 0], "v_head_dim": 128}),
        ("mistral", {"window_size": [15, -1], "window_attn_skip_freq": [1, 1, 1], "bias_gelu_fusion": False}),
        ("mixtral", {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_layer_freq": [1, 1, 1]}),
        ("deepseek-v3", {"kv_channels": 128, "num_query_groups": 1, "use_rope_scaling": True}),
    ],
)
def test_arguments_that_say_the_same_otherwise_are_taken(name: str, arguments: dict[str, Any]) -> None:
    family = family_named(name)
    stored = {**family.arguments(CONFIGS[name]), **arguments}
    assert compare_settings(family, family.config(stored, 100), stored, "ckpt", given=False) == ()
    assert compare_settings(family, CONFIGS[name], stored, "ckpt", given=True) == ()


def test_what_weights_may_do_without_is_named() -> None:
    mixtral, deepseek = family_named("mixtral"), family_named("deepseek-v3")
    stored = {**mixtral.arguments(CONFIGS["mixtral"]), "moe_expert_capacity_factor": 1.25}
    (note,) = compare_settings(mixtral, CONFIGS["mixtral"], stored, "ckpt", given=True)
    assert "moe_expert_capacity_factor is 1.25" in note
    (note,) = compare_settings(deepseek, {**CONFIGS["deepseek-v3"], "rms_norm_eps": 1e-5}, {}, "ckpt", given=True)
    assert "q_a_layernorm" in note


def _fields_of_megatron() -> dict[str, Any]:
    """Fields of the installed Megatron-Core's configuration of layers with their defaults, where these are plain."""
    found = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    if found is None or not found.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    path = Path(found.submodule_search_locations[0]) / "transformer" / "transformer_config.py"
    fields: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in ("TransformerConfig", "MLATransformerConfig"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = ast.literal_eval(field.value) if isinstance(field.value, ast.Constant) else None
                    fields.setdefault(field.target.id, value)
    assert len(fields) > 100
    return fields


def test_megatrons_defaults_contradict_no_family(family: Family) -> None:
    """What a launch stores of all that it does not use."""
    config = CONFIGS[family.name]
    stored = {**_fields_of_megatron(), **family.arguments(config)}
    assert compare_settings(family, family.config(stored, 100), stored, "ckpt", given=False) == ()
    assert compare_settings(family, config, stored, "ckpt", given=True) == ()


@pytest.mark.long
def test_defaults_are_those_of_transformers(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    there = getattr(transformers, family.architecture.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config"))
    known = {name: field.default for name, field in there.__dataclass_fields__.items()}
    known["rope_theta"] = getattr(there, "default_theta", None)
    shared = family.defaults.keys() & known.keys()
    # An instance has an empty list where its class says None.
    filled = {name: [] if family.defaults[name] == [] and known[name] is None else known[name] for name in shared}
    assert {name: family.defaults[name] for name in shared} == filled


# --- rotary embeddings


_ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 2e4}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 2e4}, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 8192},
    {"rope_parameters": _without(LLAMA3, "original_max_position_embeddings"), "max_position_embeddings": 8192},
    {"rope_scaling": YARN},
    {"rope_parameters": YARN, "original_max_position_embeddings": 48},
    {"rope_parameters": _without(YARN, "original_max_position_embeddings", "beta_fast", "beta_slow")},
    {"rope_scaling": _without(YARN, "mscale", "mscale_all_dim")},
    {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": 0, "mscale": 0.707}},
    {"rope_scaling": {**_without(YARN, "mscale"), "mscale_all_dim": 0.0}},
    {"rope_scaling": {**YARN, "mscale_all_dim": 0.0}},
    {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.0, "attention_factor": 0.0707 * math.log(40) + 1}},
    {"rope_scaling": {**YARN, "truncate": False}},
    {"rope_scaling": {**YARN, "truncate": None}},
    {"rope_scaling": {**YARN, "factor": 0.5}},
)


@pytest.mark.parametrize("name", ["llama", "deepseek-v2", "deepseek-v3", "gpt-oss"])
def test_rotary_embeddings_are_those_that_transformers_computes(name: str) -> None:
    """Frequencies and scales of its own functions, and those of what Megatron-Core makes of the arguments."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    family = family_named(name)
    compared = 0
    for rope in _ROPES:
        config = {**_without(CONFIGS[name], "rope_theta", "rope_scaling"), **copy.deepcopy(rope)}
        try:
            arguments = family.arguments(config)
        except OptionError:
            continue
        assert family.arguments(family.config(arguments, 100)) == arguments
        there = AutoConfig.for_model(family.model_type, **copy.deepcopy(config))
        exponents = np.arange(0, there.head_dim, 2) / there.head_dim
        frequencies = 1 / arguments["rotary_base"] ** exponents
        cosines, softmax = 1.0, 1.0
        kind = there.rope_parameters["rope_type"]
        expected = frequencies
        if kind != "default":
            found, attention = ROPE_INIT_FUNCTIONS[kind](there)
            expected = found.numpy()
            if kind == "linear":
                frequencies /= arguments["rotary_seq_len_interpolation_factor"]
            elif kind == "llama3":
                assert arguments["use_rope_scaling"]
                scaled = dict(there.rope_parameters)
                assert {name: scaled.pop(name) for name in LLAMA3} == LLAMA3
                assert scaled == {"rope_theta": arguments["rotary_base"]}
                frequencies = expected
            else:
                prefix = "" if name.startswith("deepseek") else "yarn_"
                frequencies = _yarn_frequencies(arguments, prefix, frequencies, exponents)
                cosines, softmax = yarn_scales(arguments, prefix)
            assert attention == pytest.approx(cosines, rel=1e-9)
        assert there.rope_parameters["rope_theta"] == arguments["rotary_base"]
        assert np.allclose(frequencies, expected, rtol=1e-6, atol=0)
        if name.startswith("deepseek"):  # others leave softmax's scale as it is
            assert yarn_apply_mscale(there.rope_parameters, 1.0) == pytest.approx(softmax**2, rel=1e-9)
        compared += 1
    assert compared >= 7, name


def _yarn_frequencies(arguments: Mapping[str, Any], prefix: str, plain: Any, exponents: Any) -> Any:
    """YaRN's, of Megatron's arguments: between two numbers of turns within the first length they go over."""
    base, length = arguments["rotary_base"], arguments[f"{prefix}original_max_position_embeddings"]
    dim = 2 * len(exponents)
    low, high = (
        dim * math.log(length / (arguments[prefix + name] * 2 * math.pi)) / (2 * math.log(base))
        for name in ("beta_fast", "beta_slow")
    )
    if arguments.get("yarn_correction_range_round_to_int", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return plain / arguments[f"{prefix}rotary_scaling_factor"] * ramp + plain * (1 - ramp)
