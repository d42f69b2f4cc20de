"""Which parameters lie in the flat buckets of Megatron-Core's distributed optimizer, and where.

The optimizer keeps its state in buffers, one for each chunk of the model and kind of element, cut into buckets. A
buffer holds the parameters of the chunk in the reverse order of `named_parameters()`, each from a multiple of 64
elements on. Where buckets begin follows from their stored sizes, whatever made them end there.

No stored file tells the order of the parameters. Megatron-Core builds the model of each rank on the meta device, from
the stored arguments: that gives the order, and the slice of a global tensor of each parameter. It does so in a process
of its own, since it takes Megatron's global state, and the process groups of a job of which no rank is running.

The model is GPT with Megatron's own ("local") layers, which need no GPU; `models/logits.py` runs it on a CPU. Where
those layers lack something, the smallest stand-in that computes the same takes their place: the core of attention is
given the two sizes that latent attention has for it, the norm weights that are offsets of one, and the embedding a
factor.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError, OptionError
from mcore_ckpt.reshard.partition import expert_of, layer_of

_ALIGNMENT = 64


class ParameterBox(NamedTuple):
    """A slice of the global tensor `key`: the elements of a flattened parameter from `first` on, in C order."""

    key: str
    shape: tuple[int, ...]
    box: Box
    first: int


class FlatParameter(NamedTuple):
    """A parameter of one rank's chunk of the model, and its slices. `is_copy`: another rank has the original."""

    name: str
    numel: int
    is_copy: bool
    boxes: tuple[ParameterBox, ...]


class BucketOffset(NamedTuple):
    """Where a parameter begins: number of the bucket, and its first element in it."""

    bucket: int
    first: int


def places_in_buckets(parameters: Sequence[FlatParameter], sizes: Sequence[int], where: str) -> list[BucketOffset]:
    """Lay parameters into buckets of `sizes` elements, as Megatron-Core does; `CorruptCheckpointError`: they do not
    fit.
    """
    places: list[BucketOffset] = []
    bucket, at = 0, 0
    for parameter in parameters:
        start = _aligned(at)
        # A bucket before an embedding that gets one of its own ends where that would have begun.
        if bucket < len(sizes) and at and sizes[bucket] in (at, start):
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + parameter.numel > sizes[bucket]:
            raise CorruptCheckpointError(
                f"{where}: the parameters of the model do not fill the buckets that are stored: {parameter.name} of "
                f"{parameter.numel} elements would end at element {start + parameter.numel} of bucket {bucket}, "
                + (f"which has {sizes[bucket]}" if bucket < len(sizes) else f"and there are {len(sizes)}")
                + ". The stored arguments are not those of the model that was saved. Nothing was written"
            )
        places.append(BucketOffset(bucket, start))
        at = start + parameter.numel
    if bucket != len(sizes) - 1 or (sizes and sizes[bucket] not in (at, _aligned(at))):
        raise CorruptCheckpointError(
            f"{where}: the {len(parameters)} parameters of the model end at element {at} of bucket {bucket}, expected "
            f"{len(sizes)} buckets of {list(sizes)[:8]} elements to be filled; the stored arguments are not those of "
            "the model that was saved. Nothing was written"
        )
    return places


def _aligned(element: int) -> int:
    return -(-element // _ALIGNMENT) * _ALIGNMENT


# What a job calls as Megatron-Core's configuration does, but not what only says how fast it runs, or asks for a GPU.
_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization add_bias_linear "
    "add_qkv_bias qk_layernorm layernorm_epsilon attention_dropout hidden_dropout window_size window_attn_skip_freq "
    "softmax_type glu_linear_offset activation_func_clamp_value apply_query_key_layer_scaling rotary_interleaved "
    "no_rope_freq "
    "apply_residual_connection_post_layernorm layernorm_zero_centered_gamma attention_output_gate "
    "moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_router_score_function moe_router_pre_softmax "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_latent_size mtp_num_layers "
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
    """This rank's part of the model. `stage`: its chunk of a virtual pipeline; `more`: fields, if there are such."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    config = _config(arguments, more)
    chunk = {} if stage is None else {"vp_stage": stage}
    how = {"use_transformer_engine": False, "normalization": config.normalization}
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, **how, **chunk)
    ahead, layers = {}, list(spec.layer_specs)
    if getattr(config, "mtp_num_layers", None):
        layers.append(gpt_layer_specs.get_gpt_decoder_layer_specs(config, **how)[-1])
    if config.layernorm_zero_centered_gamma:
        _let_norms_be_offsets(spec)
    if config.multi_latent_attention:
        _let_latent_attention_run()
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = _latent_core()
    if getattr(config, "mtp_num_layers", None):
        ahead["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layers[-1], use_transformer_engine=False, **chunk
        )
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
    mtp_num_layers: int | None = None,
) -> Any:
    """Megatron-Core's `GPTModel` in float32, to be run without a GPU; expert tensor parallel size is 1. Collective."""
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
        mtp_num_layers=mtp_num_layers,
        # A table of YaRN's is made where parameters are; there is no GPU.
        use_cpu_initialization=arguments["position_embedding_type"] == "yarn",
        **settings,
    )
    if arguments.get("scale_embeddings_by_hidden_size") and parallel_state.is_pipeline_first_stage():
        scale = math.sqrt(model.config.hidden_size)
        model.embedding.register_forward_hook(lambda module, given, found: found * scale)
    return model


def _activation(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The activation between the two matrices of an MLP."""
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


_CODE = "import sys; sys.path[:] = {!r}; from mcore_ckpt.reshard.parameter_orders import answer; answer({!r}, {!r})"


class ChildError(Exception):
    """The function has raised what is no error of `mcore_ckpt`, or its interpreter has ended; `exit_code` of that."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def in_own_process(
    module: str, name: str, request: Any, environ: Mapping[str, str | None], deadline_s: float | None = None
) -> Any:
    """Call `module.name(request)` in another interpreter; raises `CheckpointError` as that does, else `ChildError`."""
    ended = subprocess.run(
        [sys.executable, "-c", _CODE.format(sys.path, module, name)],
        input=pickle.dumps(request),
        capture_output=True,
        env={key: value for key, value in {**os.environ, **environ}.items() if value is not None},
        timeout=deadline_s,
        check=False,
    )
    try:
        value, error = pickle.loads(ended.stdout)
    except (EOFError, pickle.UnpicklingError):
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ChildError(last[0] if last else f"exit code {ended.returncode}", ended.returncode) from None
    if isinstance(error, CheckpointError):
        raise error
    if error is not None:
        raise ChildError(error, ended.returncode)
    return value


def answer(module: str, name: str) -> None:
    """In that interpreter: a request from standard input, the result to standard output, all else to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    value: Any = None
    error: CheckpointError | str | None = None
    try:
        value = getattr(importlib.import_module(module), name)(pickle.load(sys.stdin.buffer))
    except CheckpointError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001  (what Megatron raises about arguments of other versions: anything)
        error = f"{type(caught).__name__}: {caught!s:.400}"
    with output:
        pickle.dump((value, error), output)


_DEADLINE_S = 3600.0
# What decides which of the parameters are a rank's.
_DIVISION = (
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split pipeline_model_parallel_layout"
).split()
# Models and optimizers that are not built here, by the argument that tells.
_REFUSED = (
    "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json is_hybrid_model "
    "hybrid_override_pattern experimental_attention_variant spec yaml_cfg use_legacy_models modelopt_enabled "
    "moe_use_legacy_grouped_gemm fp8_param_gather fp4_param overlap_param_gather_with_optimizer_step use_megatron_fsdp"
).split()


def parameter_orders(
    arguments: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
) -> dict[tuple[bool, int], list[list[FlatParameter]]]:
    """The parameters of each `data_parallel_group_idx`, in the order of its buffers. `CorruptCheckpointError`: none."""
    missing = [name for name in ("num_layers", "hidden_size", "padded_vocab_size") if not arguments.get(name)]
    if missing:
        raise OptionError(
            f"the stored arguments have no {', '.join(missing)}; expected those of a job of Megatron, from which "
            "its model can be built. Where each parameter lies in the optimizer's buckets cannot be told without them"
        )
    refused = [name for name in _REFUSED if arguments.get(name)]
    if refused:
        raise OptionError(
            f"the stored arguments say {refused[0]}={arguments[refused[0]]!r}; the order of parameters in the "
            "optimizer's buckets is known for GPT models with layers of one kind or with experts, without it"
        )
    request = {"arguments": plain_values(arguments), "metadata": plain_values(metadata or {})}
    try:
        groups: dict[tuple[bool, int], list[list[FlatParameter]]] = in_own_process(
            __name__, "all_groups", request, {"RANK": None, "WORLD_SIZE": None}, _DEADLINE_S
        )
    except ChildError as error:
        raise CorruptCheckpointError(
            f"megatron-core builds no model from the stored arguments: {error}. Nothing was written"
        ) from None
    return groups


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, by name, that are numbers, text, flags, None, and lists of such."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


# --- in the process that builds the model


_Row = tuple[FlatParameter, bool]
"""A parameter, and whether it is of a divided expert."""


def all_groups(request: Mapping[str, Any]) -> dict[tuple[bool, int], list[list[FlatParameter]]]:
    """As `parameter_orders`."""
    try:
        import megatron.core  # noqa: F401
        import torch.distributed  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"megatron-core cannot be imported ({error}): it builds the model that tells where each parameter lies in "
            f"the optimizer's buckets. Install it (pip install megatron-core) for {sys.executable}"
        ) from error
    _without_cuda()
    arguments, metadata = request["arguments"], request["metadata"]
    tensor, pipeline, expert, expert_tensor = _sizes(arguments)
    stage = math.lcm(tensor, expert_tensor * expert)
    found: dict[tuple[bool, int], list[list[FlatParameter]]] = {}
    for rank in range(stage * pipeline):
        with _as_rank(rank, stage * pipeline, arguments) as groups:
            missing = [key for key in groups if key not in found]
            if missing:
                chunks = _parameters(arguments, metadata)
                for experts, group in missing:
                    found[experts, group] = [
                        [row for row, is_expert in reversed(chunk) if is_expert == experts] for chunk in chunks
                    ]
    return {key: chunks for key, chunks in sorted(found.items()) if any(chunks)}


def _sizes(arguments: Mapping[str, Any]) -> tuple[int, int, int, int]:
    tensor = arguments.get("tensor_model_parallel_size") or 1
    expert_tensor = arguments.get("expert_tensor_parallel_size") or tensor
    return (
        tensor,
        arguments.get("pipeline_model_parallel_size") or 1,
        arguments.get("expert_model_parallel_size") or 1,
        expert_tensor,
    )


def _without_cuda() -> None:
    """Answer for a GPU while Megatron builds a model: parameters without elements need none."""
    import torch
    import torch.distributed as dist

    meta = torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    # Two stages agree on the first values of an embedding that both hold.
    dist.all_reduce = lambda *_, **__: None


@contextmanager
def _as_rank(rank: int, world: int, arguments: Mapping[str, Any]) -> Iterator[list[tuple[bool, int]]]:
    """This process as one rank of a job; gives which groups of the optimizer it stands for."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tensor, pipeline, expert, expert_tensor = _sizes(arguments)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=arguments.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        create_gloo_process_groups=False,
    )
    groups = []
    if parallel_state.get_data_parallel_rank() == 0:
        groups.append((False, dist.get_rank(parallel_state.get_model_parallel_group())))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        groups.append((True, dist.get_rank(experts)))
    yield groups
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _parameters(arguments: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[list[_Row]]:
    """For each chunk of the model, its parameters in their order."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    virtual = arguments.get("virtual_pipeline_model_parallel_size")
    chunks = []
    for stage in range(virtual or 1):
        if virtual:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        model = _model(arguments, stage if virtual else None)
        shards = {}
        content = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for leaf in nested_values(model.sharded_state_dict(metadata=content)):
            if isinstance(getattr(leaf, "data", None), torch.Tensor):
                parts = list(nested_values(leaf.build())) if isinstance(leaf, ShardedTensorFactory) else [leaf]
                shards[id(leaf.data)] = parts
        rows: list[_Row] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parts = shards[id(parameter)]
            is_copy = any(any(part.replica_id) for part in parts)
            row = FlatParameter(name, parameter.numel(), is_copy, tuple(_box(part, name) for part in parts))
            rows.append((row, not getattr(parameter, "allreduce", True)))
        if arguments.get("transformer_impl") == "transformer_engine":
            rows = _as_transformer_engine(rows, grouped_experts=bool(arguments.get("moe_grouped_gemm")))
        chunks.append(rows)
    return chunks


# Norms that layers of Transformer Engine hold themselves, and the layers that hold them.
_HELD_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
}


def _as_transformer_engine(rows: list[_Row], grouped_experts: bool) -> list[_Row]:
    """Rows of Megatron's layers as Transformer Engine's have them: norms in their holders, experts grouped."""
    names = [row.name for row, _ in rows]
    held: dict[str, list[_Row]] = {}
    kept = []
    for row, is_expert in rows:
        layer, rest = _in_layer(row.name)
        norm = next((norm for norm in _HELD_NORMS if layer and rest.startswith(norm)), None)
        if norm is not None:
            holder = layer + _HELD_NORMS[norm]
            is_held = any(name.startswith(holder) for name in names)
            own = _HELD_NORMS[norm] + "layer_norm_" if is_held else norm
            keys = [f"{_in_layer(box.key)[0]}{own}{rest.removeprefix(norm)}" for box in row.boxes]
            boxes = tuple(box._replace(key=key) for box, key in zip(row.boxes, keys, strict=True))
            row = row._replace(boxes=boxes)
            if is_held:
                held.setdefault(holder, []).append((row, is_expert))
                continue
        kept.append((row, is_expert))
    ordered = []
    for row, is_expert in kept:
        for holder in [holder for holder in held if row.name.startswith(holder)]:
            ordered += held.pop(holder)
        ordered.append((row, is_expert))
    return _grouped(ordered) if grouped_experts else ordered


def _in_layer(name: str) -> tuple[str, str]:
    """A name's layer, as `decoder.layers.3.`, and what it is called there; no layer: nothing, and all of it."""
    layer = layer_of(name)
    if layer is None:
        return "", name
    rest = layer.rest.removeprefix("transformer_layer.")  # of layers that predict further tokens
    return name.removesuffix(rest), rest


def _grouped(rows: list[_Row]) -> list[_Row]:
    """With the experts of a layer where its first one was, sorted by matrix and then by expert."""
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        expert = expert_of(row[0].name)
        groups.setdefault(expert.before if expert else row[0].name, []).append(row)

    def place(row: _Row) -> tuple[str, int]:
        expert = expert_of(row[0].name)
        # Sorting leaves weight before bias.
        return (expert.rest.partition(".")[0], expert.number or 0) if expert else ("", 0)

    return [row for group in groups.values() for row in sorted(group, key=place)]


def _box(part: Any, name: str) -> ParameterBox:
    if not part.data.is_contiguous():
        raise NotImplementedError(f"{name}: its part {part.key} is no run of its elements")
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return ParameterBox(
        part.key, tuple(part.global_shape), Box(tuple(part.global_offset), sizes), part.data.storage_offset()
    )


def _model(arguments: Mapping[str, Any], stage: int | None) -> Any:
    """This rank's chunk of the model, on the meta device."""
    import torch

    sizes = {name: arguments[name] for name in _DIVISION if arguments.get(name) is not None}
    with torch.device("meta"):
        return gpt_chunk(
            arguments,
            vocabulary=arguments["padded_vocab_size"],
            stage=stage,
            num_layers_in_first_pipeline_stage=arguments.get("decoder_first_pipeline_num_layers"),
            num_layers_in_last_pipeline_stage=arguments.get("decoder_last_pipeline_num_layers"),
            use_cpu_initialization=True,
            perform_initialization=False,
            pipeline_dtype=torch.float32,
            **sizes,
        )
