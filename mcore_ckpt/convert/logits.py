"""The same model in Megatron-Core and in `transformers`: logits side by side, for the same random tokens.

Megatron's model is built from the arguments that a checkpoint stores, with its own ("local") layers, which run on a
CPU. `check_logits` does all of it in a process of its own, in float32: what Megatron-Core has to be told before it runs
without a GPU stays there, and so does an end for want of memory.

Where Megatron-Core's own layers lack something, the smallest stand-in that computes the same takes their place: its
core of attention is given the two sizes that latent attention has for it, its norm weights that are offsets of one, and
its embedding a factor.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import CheckpointError, LoadError, OptionError
from mcore_ckpt.core.host_memory import free_host_bytes
from mcore_ckpt.families.registry import family_named
from mcore_ckpt.families.table import Family
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.plain_state import read_plain_state

__all__ = ["LogitsReport", "build_gpt_model", "check_logits", "require_packages"]

TOLERANCE: Final = 1e-4
"""Of the largest logit: what is left of rounding in another order after a hundred layers of float32. A layer that
computes something else makes a hundredth and more."""

_BATCH, _MAX_TOKENS = 2, 24
_NEEDED = {"torch": "torch", "transformers": "transformers", "megatron.core": "megatron-core"}
_MARK = "logits-report: "
# Beside the parameters: the interpreter with its packages, and activations.
_BASE_BYTES = 1024**3
_LAYER = re.compile(r"\blayers\.(?:\d+\.)?")
_CONFIG_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization add_bias_linear "
    "add_qkv_bias qk_layernorm layernorm_epsilon attention_dropout hidden_dropout window_size window_attn_skip_freq "
    "softmax_type glu_linear_offset activation_func_clamp_value apply_query_key_layer_scaling rotary_interleaved "
    "apply_residual_connection_post_layernorm layernorm_zero_centered_gamma "
    "moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_router_score_function moe_router_pre_softmax "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base "
    "rotary_scaling_factor mscale mscale_all_dim rope_type original_max_position_embeddings beta_fast beta_slow"
).split()


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """How far logits are apart.

    Attributes:
        difference: the largest, absolute.
        scale: the largest logit, absolute.
        tokens: of each of two sequences; a window of attention that is longer than that is not seen to matter.
    """

    difference: float
    scale: float
    tokens: int

    @property
    def same(self) -> bool:
        """Whether they are those of one model."""
        return self.difference <= TOLERANCE * self.scale and math.isfinite(self.scale)

    def __str__(self) -> str:
        verdict = "the same model" if self.same else "NOT the same model"
        return (
            f"logits of megatron-core and transformers: {verdict}: largest difference {self.difference:.3g} at a scale "
            f"of {self.scale:.3g} (2 sequences of {self.tokens} random tokens, float32)"
        )


def check_logits(checkpoint: str | os.PathLike[str], model: str | os.PathLike[str], arch: str) -> LogitsReport:
    """Run both models, one after the other, in a process of its own.

    Args:
        checkpoint: a `torch_dist` checkpoint. Where it stores no arguments, they are taken from the model's settings.
        model: directory of a Hugging Face model.
        arch: the name of its family.

    Raises:
        OptionError: `transformers` or megatron-core is not installed, or the model does not fit in memory.
        LoadError: one of the two cannot be loaded or run.
    """
    require_packages()
    directory = checkpoint_directory(checkpoint)
    _require_memory(read_index(directory))
    job = json.dumps({"checkpoint": str(directory), "model": str(model), "arch": arch})
    code = f"import sys; sys.path[:] = {sys.path!r}; from mcore_ckpt.convert.logits import main; main()"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCHDYNAMO_DISABLE": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], input=job, capture_output=True, text=True, env=environment, check=False
    )
    for line in ended.stdout.splitlines():
        if line.startswith(_MARK):
            return LogitsReport(**json.loads(line.removeprefix(_MARK)))
    if ended.returncode == -9:
        raise OptionError(
            "the process that runs the models was killed, most likely for want of memory: each takes 4 bytes for a "
            "parameter. Check on a larger machine"
        )
    said = ended.stderr.strip().splitlines()
    raise LoadError(f"the models cannot be run: {said[-1] if said else f'exit code {ended.returncode}'}")


def require_packages() -> None:
    """Raise `OptionError` unless all is installed that a check needs."""
    missing = []
    for module, package in _NEEDED.items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            missing.append(package)
    if missing:
        raise OptionError(
            f"--check runs both models, and {' and '.join(missing)} is not installed: pip install {' '.join(missing)}"
        )


def _require_memory(index: CheckpointIndex) -> None:
    elements = sum(math.prod(entry.shape) for key, entry in index.tensors.items() if not is_optimizer_key(key))
    largest = max((math.prod(entry.shape) for entry in index.tensors.values()), default=0)
    needed, free = 4 * (elements + largest) + _BASE_BYTES, free_host_bytes()
    if needed > free:
        raise OptionError(
            f"the models run in float32, which takes {human_bytes(needed)} of memory; {human_bytes(free)} are free. "
            "Check on a larger machine"
        )


# --- in a process of its own


def main() -> None:
    """Read the job from standard input, and print the report."""
    job = json.load(sys.stdin)
    try:
        report = _compare(Path(job["checkpoint"]), Path(job["model"]), family_named(job["arch"]))
    except CheckpointError as error:
        sys.exit(" ".join(str(error).split()))
    sys.stdout.write(f"{_MARK}{json.dumps(asdict(report))}\n")


def _compare(checkpoint: Path, model: Path, family: Family) -> LogitsReport:
    index = read_index(checkpoint)
    arguments = read_plain_state(index).get("args")
    if not isinstance(arguments, dict):
        arguments = family.arguments(json.loads((model / "config.json").read_text()))
    engine_keys = {row.megatron: row.engine for row in family.rows if row.engine}
    narrow = _narrow_dtype(index, model)
    ids, theirs = _transformers_logits(model, narrow)
    ours = _megatron_logits(index, arguments, engine_keys, ids, narrow)[..., : theirs.shape[-1]]
    if ours.shape != theirs.shape:
        raise LoadError(f"logits {list(ours.shape)} of megatron-core, {list(theirs.shape)} of transformers")
    return LogitsReport(float((ours - theirs).abs().max()), float(theirs.abs().max()), ids.shape[1])


def _narrow_dtype(index: CheckpointIndex, model: Path) -> str | None:
    """The 16-bit floats that one of the two is stored in; a conversion may have rounded the other's to them."""
    config = json.loads((model / "config.json").read_text())
    found = {entry.dtype for key, entry in index.tensors.items() if not is_optimizer_key(key)}
    found |= {config[name] for name in ("dtype", "torch_dtype") if isinstance(config.get(name), str)}
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in found), None)


def _round(model: Any, narrow: str | None) -> None:
    """Let parameters have the values that they would have in 16 bits, so that both models have the same ones."""
    import torch

    if narrow is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, narrow)))


def _transformers_logits(directory: Path, narrow: str | None) -> tuple[Any, Any]:
    """Random tokens, `[batch, sequence]`, and what `transformers` makes of them, `[batch, sequence, vocabulary]`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    _round(model, narrow)
    length = min(_MAX_TOKENS, model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (_BATCH, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return ids, model(ids).logits.float()


def _megatron_logits(
    index: CheckpointIndex,
    arguments: Mapping[str, Any],
    engine_keys: Mapping[str, str],
    ids: Any,
    narrow: str | None,
) -> Any:
    """What Megatron-Core makes of them, `[batch, sequence, padded vocabulary]`."""
    import torch

    # Nothing is compiled here, and importing the compiler takes as long as all the rest.
    torch.compile = lambda model=None, **_: (lambda function: function) if model is None else model  # type: ignore[assignment]
    with _without_gpu(), _one_process():
        rows = index.tensors["embedding.word_embeddings.weight"].shape[0]
        model = build_gpt_model(arguments, padded_vocabulary=rows)
        _fill(model, index, engine_keys)
        _round(model.eval(), narrow)
        positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
        with torch.no_grad():
            return model(ids, positions, mask)


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """Megatron-Core says "cuda", and asks for a GPU's current device and generators of random numbers; here is none."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    CudaRNGStatesTracker.add = lambda *_, **__: None

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    with OnCpu():
        yield


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fill(model: Any, index: CheckpointIndex, engine_keys: Mapping[str, str]) -> None:
    """Fill all parameters from the checkpoint, by Megatron's own names for them; raises `LoadError`.

    Not by Megatron's load, which wants the parameters to have the stored dtypes.
    """
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    metadata = {
        "non_homogeneous_layers": any(re.search(r"\blayers\.\d+\.", key) for key in keys),
        "singleton_local_shards": any(re.search(r"\.weight_[wv]$|\.experts\.experts\.\d+\.", key) for key in keys),
    }
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        state = model.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        taken = set()
        with StoredPayloads(index) as payloads:
            for shard in nested_values(state):
                if isinstance(shard, ShardedTensor):
                    taken.add(_fill_shard(shard, index, payloads, engine_keys))
    left = sorted(set(keys) - taken)
    if left:
        raise LoadError(f"{index.path}: {left[0]} (and {len(left) - 1} more) has no place in megatron-core's model")
    for name, parameter in model.named_parameters():
        if parameter.isnan().any():
            raise LoadError(f"{index.path}: {name} of megatron-core's model is stored nowhere, or holds NaN")


def _fill_shard(shard: Any, index: CheckpointIndex, payloads: StoredPayloads, engine_keys: Mapping[str, str]) -> str:
    """Fill one tensor of Megatron's from what is stored; returns the stored key."""
    import torch

    key: str = shard.key
    if key not in index.tensors:
        found = _LAYER.search(key)
        layer = found.group() if found else ""
        key = engine_keys.get(_LAYER.sub("layers.{layer}.", key, count=1), key).replace("layers.{layer}.", layer)
    entry = index.tensors.get(key)
    if entry is None:
        raise LoadError(f"{index.path}: {shard.key} of megatron-core's model is not stored")
    sizes = ((1,) * shard.prepend_axis_num) + tuple(shard.local_shape)
    if len(sizes) != len(entry.shape):
        raise LoadError(f"{key}: megatron-core's model has {len(sizes)} axes where {len(entry.shape)} are stored")
    content = read_box(payloads, entry, shard.global_offset, sizes)
    values = torch.frombuffer(content, dtype=getattr(torch, entry.dtype)).reshape(shard.data.shape)
    shard.data.copy_(values)
    return key


# --- Megatron-Core's model


def build_gpt_model(
    arguments: Mapping[str, Any],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    padded_vocabulary: int | None = None,
) -> Any:
    """Megatron-Core's `GPTModel` as a launch makes one from such arguments, with its own layers, in float32.

    Collective: the process group is there, and as large as the parallel sizes make it.

    Args:
        arguments: Megatron's, by name.
        tensor, pipeline, expert: parallel sizes; expert tensor parallel size is 1.
        padded_vocabulary: rows of the embedding; by default as the arguments pad it.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
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
    latent = bool(arguments.get("multi_latent_attention"))
    kind = MLATransformerConfig if latent else TransformerConfig
    known = getattr(kind, "__dataclass_fields__")  # noqa: B009
    settings: dict[str, Any] = {name: arguments[name] for name in _CONFIG_FIELDS if name in known and name in arguments}
    if settings.get("rope_type", "") is None:
        del settings["rope_type"]  # as a launch does: the class has a default
    if "layernorm_epsilon" not in arguments and arguments.get("norm_epsilon") is not None:
        settings["layernorm_epsilon"] = arguments["norm_epsilon"]
    if arguments.get("num_experts"):
        settings |= {
            "num_moe_experts": arguments["num_experts"],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": 1,
        }
    config = kind(
        num_query_groups=arguments["num_query_groups"] if arguments.get("group_query_attention") else None,
        **_activation(arguments),
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
        **settings,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=arguments["normalization"])
    for name, value in arguments.items():
        if name.startswith("yarn_"):
            setattr(config, name, value)  # no field of the class: whoever asks for YaRN puts them there
    # A table of YaRN's is made where parameters are; there is no GPU.
    config.use_cpu_initialization = arguments["position_embedding_type"] == "yarn"
    if config.layernorm_zero_centered_gamma:
        _let_norms_be_offsets(spec)
    if latent:
        _let_latent_attention_run()
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _latent_core()
    unit = arguments.get("make_vocab_size_divisible_by", 128) * tensor
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary or -(-arguments["vocab_size"] // unit) * unit,
        max_sequence_length=arguments["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not arguments.get("untie_embeddings_and_output_weights"),
        position_embedding_type=arguments["position_embedding_type"],
        rotary_percent=arguments.get("rotary_percent", 1.0),
        rotary_base=arguments.get("rotary_base", 10000),
        rope_scaling=arguments.get("use_rope_scaling", False),
        rope_scaling_factor=arguments.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=arguments.get("rotary_seq_len_interpolation_factor"),
    )
    if arguments.get("scale_embeddings_by_hidden_size") and parallel_state.is_pipeline_first_stage():
        scale = math.sqrt(config.hidden_size)
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
    # What Megatron's fused kernel computes, which a launch uses unless it is told not to.
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
