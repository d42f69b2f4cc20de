"""Megatron-Core's GPT model as a job makes it, built from the arguments that a checkpoint stores.

With Megatron's own ("local") layers, which need no GPU: on the meta device, where only the parameters are asked for
(`flat_buckets`), or to be run on a CPU (`models/logits.py`). The caller has set up Megatron's process groups, or lets
it be done here.

Where those layers lack something, the smallest stand-in that computes the same takes their place: the core of attention
is given the two sizes that latent attention has for it, the norm weights that are offsets of one, and the embedding a
factor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

# Fields of Megatron-Core's configuration that a job calls the same; what only says how fast it runs is left alone.
_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization add_bias_linear "
    "add_qkv_bias qk_layernorm layernorm_epsilon attention_dropout hidden_dropout window_size window_attn_skip_freq "
    "softmax_type glu_linear_offset activation_func_clamp_value apply_query_key_layer_scaling rotary_interleaved "
    "apply_residual_connection_post_layernorm layernorm_zero_centered_gamma attention_output_gate "
    "moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_router_score_function moe_router_pre_softmax "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_token_dispatcher_type moe_latent_size mtp_num_layers "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base "
    "rotary_scaling_factor mscale mscale_all_dim rope_type original_max_position_embeddings beta_fast beta_slow"
).split()


def gpt_chunk(
    arguments: Mapping[str, Any],
    *,
    vocabulary: int,
    stage: int | None = None,
    parallel_output: bool = True,
    **more: Any,
) -> Any:
    """This rank's part of the model; `vocabulary` is the rows of the embedding, `stage` the chunk where the pipeline is
    virtual. `more`: further fields of the configuration; one that this Megatron-Core lacks is left out.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    config = _config(arguments, more)
    chunk = {} if stage is None else {"vp_stage": stage}
    how = {"use_transformer_engine": False, "normalization": config.normalization}
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, **how, **chunk)
    ahead = {}
    if getattr(config, "mtp_num_layers", None):
        everything = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **how)
        ahead["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, everything[-1], use_transformer_engine=False, **chunk
        )
    if config.layernorm_zero_centered_gamma:
        _let_norms_be_offsets(spec)
    if config.multi_latent_attention:
        _let_latent_attention_run()
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _latent_core()
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=arguments.get("max_position_embeddings") or 1,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, **chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, **chunk),
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=not arguments.get("untie_embeddings_and_output_weights"),
        position_embedding_type=arguments.get("position_embedding_type") or "learned_absolute",
        rotary_percent=arguments.get("rotary_percent") or 1.0,
        rotary_base=arguments.get("rotary_base") or 10000,
        rope_scaling=bool(arguments.get("use_rope_scaling")),
        rope_scaling_factor=arguments.get("rope_scaling_factor") or 8.0,
        seq_len_interpolation_factor=arguments.get("rotary_seq_len_interpolation_factor"),
        **ahead,
        **chunk,
    )


def _config(arguments: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    settings = {name: arguments[name] for name in _FIELDS if name in known and name in arguments}
    if settings.get("rope_type", "") is None:
        del settings["rope_type"]  # as a job does: the class has a default
    if "layernorm_epsilon" not in arguments and arguments.get("norm_epsilon") is not None:
        settings["layernorm_epsilon"] = arguments["norm_epsilon"]
    settings |= {
        "num_moe_experts": arguments.get("num_experts"),
        "num_query_groups": arguments.get("num_query_groups") if arguments.get("group_query_attention") else None,
        **_activation(arguments),
        **{name: value for name, value in more.items() if name in known},
    }
    config = kind(**settings)
    for name, value in arguments.items():
        if name.startswith("yarn_"):
            setattr(config, name, value)  # no field of the class: a job that asks for YaRN puts them there
    return config


def build_gpt_model(
    arguments: Mapping[str, Any],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    padded_vocabulary: int | None = None,
) -> Any:
    """Megatron-Core's `GPTModel` in float32, to be run without a GPU; expert tensor parallel size is 1. Collective: the
    process group is there, and as large as the parallel sizes make it.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 asks for it where Transformer Engine is not installed
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    settings: dict[str, Any] = {}
    if arguments.get("num_experts"):
        settings = {
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": 1,
        }
    unit = arguments.get("make_vocab_size_divisible_by", 128) * tensor
    model = gpt_chunk(
        arguments,
        vocabulary=padded_vocabulary or -(-arguments["vocab_size"] // unit) * unit,
        parallel_output=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        mtp_num_layers=None,
        # A table of YaRN's is made where parameters are; there is no GPU.
        use_cpu_initialization=arguments["position_embedding_type"] == "yarn",
        **settings,
    )
    if arguments.get("scale_embeddings_by_hidden_size") and parallel_state.is_pipeline_first_stage():
        scale = math.sqrt(model.config.hidden_size)
        model.embedding.register_forward_hook(lambda module, given, found: found * scale)
    return model


def _activation(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is between the two matrices of an MLP."""
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    if arguments.get("swiglu"):
        return {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if arguments.get("quick_geglu"):
        return {"gated_linear_unit": True, "activation_func": quick_gelu}
    if arguments.get("squared_relu"):
        from megatron.core.activations import squared_relu

        return {"activation_func": squared_relu, "gated_linear_unit": bool(arguments.get("gated_linear_unit"))}
    # What Megatron's fused kernel computes, which a job uses unless it is told not to.
    fused = arguments.get("bias_gelu_fusion", True)
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh" if fused else "none")
    return {"activation_func": gelu, "gated_linear_unit": bool(arguments.get("gated_linear_unit"))}


def _let_norms_be_offsets(spec: Any) -> None:
    """Megatron-Core's own norm refuses weights that are offsets of one; Transformer Engine's takes them."""
    import torch

    class OffsetNorm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
            self.eps = eps

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(given, self.weight.shape, 1 + self.weight, self.eps)

    spec.layer_norm = OffsetNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = OffsetNorm


def _let_latent_attention_run() -> None:
    """Latent attention takes a stand-in of Transformer Engine for the real one, and tables of positions for CUDA's."""
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = False
    if not isinstance(multi_latent_attention.YarnRotaryEmbedding, functools.partial):
        multi_latent_attention.YarnRotaryEmbedding = functools.partial(
            multi_latent_attention.YarnRotaryEmbedding, use_cpu_initialization=True
        )


def _latent_core() -> Any:
    """Megatron's own core of attention, taking the sizes that latent attention gives it: it has none for those yet."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentCore(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # It is made twice, at first without the sizes.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentCore
