"""Rotary embeddings: read as `transformers` reads them, kept by Megatron's arguments, refused where these cannot."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models.families._registry import compare_settings, family_named
from mcore_ckpt.models.families._settings import yarn_scales
from tests.models.test_table import CONFIGS, LLAMA3, YARN, _without


@pytest.mark.parametrize(("name", "prefix"), [("deepseek-v2", ""), ("deepseek-v3", ""), ("gpt-oss", "yarn_")])
@pytest.mark.parametrize("scales", [(1.0, 0.0), (0.707, 0.0), (0.707, 0.707), (0.0, 0.0), (0.0, 1.0), (1.0, 0.5)])
def test_scales_of_yarn_come_back_from_arguments(name: str, prefix: str, scales: tuple[float, float]) -> None:
    """Where `transformers` would make something else of them, the factor itself is written, which goes before them."""
    family = family_named(name)
    stored = {
        **family.arguments({**CONFIGS[name], "rope_scaling": YARN}),
        **dict(zip((f"{prefix}mscale", f"{prefix}mscale_all_dim"), scales, strict=True)),
    }
    config = family.config(stored, 100)
    by_default = scales in [(1.0, 0.0), (0.707, 0.707), (1.0, 0.5)]
    assert ("attention_factor" in config["rope_scaling"]) is not by_default
    assert family.arguments(config) == stored
    assert compare_settings(family, config, stored, "ckpt", given=False) == ()
    config["rope_scaling"]["attention_factor"] = 1.5
    with pytest.raises(OptionError, match=r"attention_factor=1\.5"):
        compare_settings(family, config, stored, "ckpt", given=True)


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
