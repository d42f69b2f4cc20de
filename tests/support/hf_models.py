"""Random small models of the Hugging Face libraries, and Megatron's models for the same: their logits side by side.

`transformers` makes the models and reads what was exported; Megatron's are built from the arguments that an import has
stored, with its own layers, on the gloo ranks that there are.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.support.cpu_megatron import pretend_cuda
from tests.support.models import Parallel

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = [
    "SMALL",
    "HfCase",
    "build_from_arguments",
    "hf_logits",
    "make_hf_model",
    "megatron_logits",
    "run_model",
    "tokens",
    "weights",
]

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
_SEQUENCE, _BATCH = 24, 2


@dataclass(frozen=True)
class HfCase:
    """A model: the name of its configuration's class in `transformers`, and settings of it."""

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)


def make_hf_model(case: HfCase, directory: Path, **save: Any) -> None:
    """Save a random model, all of whose parameters differ from what they are initialized to."""
    transformers = _transformers()
    torch.manual_seed(sum(map(ord, case.name)))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, case.config)(**case.settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name or "ln_" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory, **save)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory of safetensors."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def tokens(vocabulary: int) -> torch.Tensor:
    """The same random tokens, everywhere."""
    return torch.randint(vocabulary, (_BATCH, _SEQUENCE), generator=torch.Generator().manual_seed(7))


def hf_logits(directory: Path, vocabulary: int) -> torch.Tensor:
    """What `transformers` computes, `[batch, sequence, vocabulary]`."""
    model = _transformers().AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(tokens(vocabulary)).logits
    return logits


def _transformers() -> Any:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def megatron_logits(checkpoint: Path, parallel: Parallel, vocabulary: int, strategy: Any = None) -> Any:
    """Load a checkpoint into a new Megatron model, strictly, and run it.

    Collective; returns `[batch, sequence, vocabulary]` on ranks of the last pipeline stage, None on others.
    """
    from megatron.core import dist_checkpointing

    arguments = dist_checkpointing.load_common_state_dict(str(checkpoint))["args"]
    model = build_from_arguments(arguments, parallel)
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load({"model": wanted}, str(checkpoint), strategy, strict="raise_all")
    model.load_state_dict(loaded["model"])
    return run_model(model, arguments, vocabulary)


def run_model(model: Any, arguments: Namespace, vocabulary: int) -> Any:
    """Logits of a Megatron model for `tokens`, as `megatron_logits` returns them; collective."""
    from megatron.core import parallel_state

    model.eval()
    ids = tokens(vocabulary)
    positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    with torch.no_grad():
        if first:
            output = model(ids, positions, mask)
            if last:
                return output[..., :vocabulary]
        hidden = output if first else torch.empty(ids.shape[1], ids.shape[0], arguments.hidden_size)
        torch.distributed.broadcast(
            hidden,
            parallel_state.get_pipeline_model_parallel_first_rank(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        if first:
            return None
        model.set_input_tensor(hidden)
        return model(ids, positions, mask)[..., :vocabulary]


def build_from_arguments(arguments: Namespace, parallel: Parallel) -> Any:
    """Megatron's model, as its launch makes one from such arguments; collective."""
    pretend_cuda()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    values = vars(arguments)
    gelu = torch.nn.functional.gelu
    settings: dict[str, Any] = {
        name: values[name]
        for name in (
            "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization add_bias_linear "
            "add_qkv_bias qk_layernorm layernorm_epsilon attention_dropout hidden_dropout window_size "
            "moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_router_score_function moe_router_pre_softmax "
            "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
            "moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base "
            "rotary_scaling_factor mscale mscale_all_dim rope_type original_max_position_embeddings beta_fast beta_slow"
        ).split()
        if name in values
    }
    if values.get("num_experts"):
        settings |= {
            "num_moe_experts": values["num_experts"],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": 1,
        }
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    if kind is TransformerConfig:
        settings.pop("rotary_base", None)
    config = kind(
        num_query_groups=values["num_query_groups"] if values["group_query_attention"] else None,
        gated_linear_unit=values["swiglu"],
        activation_func=torch.nn.functional.silu if values["swiglu"] else (lambda x: gelu(x, approximate="tanh")),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **settings,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=values["normalization"])
    if values.get("multi_latent_attention"):
        _let_latent_attention_run()
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _latent_core()
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-values["vocab_size"] // (128 * parallel.tensor)) * 128 * parallel.tensor,
        max_sequence_length=values["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        position_embedding_type=values["position_embedding_type"],
        rotary_percent=values.get("rotary_percent", 1.0),
        rotary_base=values.get("rotary_base", 10000),
        rope_scaling=values.get("use_rope_scaling", False),
        rope_scaling_factor=values.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=values.get("rotary_seq_len_interpolation_factor"),
    )


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
