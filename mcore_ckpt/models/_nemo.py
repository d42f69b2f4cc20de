"""Megatron's arguments of a NeMo 2 directory, which has every field of its model's configuration, defaults included:

DIR/weights/              a torch_dist checkpoint; its keys begin with `module.`, and no arguments are stored
DIR/context/model.yaml    {_target_: ...LlamaModel, config: {_target_: ...Llama31Config8B, num_layers: 32, ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.metadata_read import NEMO_CONTEXT, NEMO_WEIGHTS, read_small_file
from mcore_ckpt.storage.resolve import storage_at

_MAX_YAML_BYTES = 16 * 1024**2
# NeMo's and Megatron-Core's name of what a job calls otherwise.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "bias_activation_fusion": "bias_gelu_fusion",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "seq_length": "max_position_embeddings",
}
_PLAIN = (bool, int, float, str)
# What Megatron-Core's `rope_scaling` has built in, by NeMo's names.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}


def nemo_arguments(checkpoint: Path) -> dict[str, Any]:
    """Megatron's arguments for the model of a NeMo directory, whose `weights` are `checkpoint`; empty without a
    `context/model.yaml`. Raises `OptionError` for what no job has arguments for, or `CorruptCheckpointError`.
    """
    path = checkpoint.parent / NEMO_CONTEXT / "model.yaml"
    if checkpoint.name != NEMO_WEIGHTS or not storage_at(path.parent, follow_links=True).exists(path.name):
        return {}
    document = _parse(read_small_file(path.parent, path.name, _MAX_YAML_BYTES, follow_links=True), path)
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("num_layers"), int):
        raise CorruptCheckpointError(f"{path}: expected a model with a `config` that says how many layers it has")
    plain = {name: _said(value) for name, value in config.items() if value is not None}
    arguments = {**plain, **{new: plain[old] for old, new in _RENAMED.items() if old in plain}}
    groups = plain.get("num_query_groups")
    arguments |= {
        "group_query_attention": groups is not None and groups != plain.get("num_attention_heads"),
        "untie_embeddings_and_output_weights": not plain.get("share_embeddings_and_output_weights", True),
        **_activation(config, path),
        **_rope_scaling(plain, path),
    }
    return arguments


def _said(value: Any) -> Any:
    """A setting; for what is no plain value, its name in brackets, which no model's computation is described by."""
    if isinstance(value, dict) and value.get("_target_") in ("builtins.tuple", "builtins.list"):
        parts = value.get("_args_")
        value = parts[0] if isinstance(parts, list) and len(parts) == 1 else value
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value):
        return value
    return f"<{value.get('_target_', 'settings')}>" if isinstance(value, dict) else f"<{type(value).__name__}>"


def _parse(content: bytes, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise OptionError(
            f"{path}: reading it takes PyYAML, which is not installed (pip install pyyaml); or give the model's "
            "config.json (--hf-config DIR)"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Plain values only: what a tag would build is its name."""

    Loader.add_multi_constructor("", lambda loader, tag, node: f"<{tag}>")
    Loader.add_constructor(
        "tag:yaml.org,2002:python/tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
    )
    try:
        return yaml.load(content, Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise CorruptCheckpointError(f"{path}: is no YAML ({type(error).__name__}: {error!s:.200})") from error


def _activation(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    function = config.get("activation_func")
    name = function.get("_target_") if isinstance(function, dict) else function
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    gated = bool(config.get("gated_linear_unit"))
    if gated and last == "silu":
        return {"swiglu": True, "squared_relu": False}
    if gated and last == "quick_gelu":
        return {"swiglu": False, "squared_relu": False, "quick_geglu": True}
    if last in ("gelu", "fast_gelu", "openai_gelu"):
        # All but the first are the approximation, and so is what Megatron-Core has fused of that.
        approximate = last != "gelu" or bool(config.get("bias_activation_fusion"))
        return {"swiglu": False, "squared_relu": False, "gated_linear_unit": gated, "bias_gelu_fusion": approximate}
    if not gated and last == "squared_relu":
        return {"swiglu": False, "squared_relu": True}
    raise OptionError(
        f"{path}: activation {name!r:.120}, {'gated' if gated else 'not gated'}: expected a gated silu or "
        "quick_gelu, or gelu; give the model's config.json (--hf-config DIR)"
    )


def _rope_scaling(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """NeMo's Llama 3.1 has fields of its own for what Megatron-Core calls `rope_scaling`."""
    if config.get("scale_factor") is None or "old_context_len" not in config:
        scaling = bool(config.get("rope_scaling"))
        return {"use_rope_scaling": scaling, "rope_scaling_factor": config.get("rope_scaling_factor") or 8.0}
    for name, fixed in _LLAMA3_SCALING.items():
        if config.get(name) != fixed:
            raise OptionError(f"{path}: rotary scaling with {name}={config.get(name)!r:.40}: expected {fixed}")
    return {"use_rope_scaling": True, "rope_scaling_factor": float(config["scale_factor"])}
