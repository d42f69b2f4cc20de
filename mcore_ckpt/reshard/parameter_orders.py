"""Which parameters lie in the flat buckets of Megatron-Core's distributed optimizer (`reshard._buckets`), in order.

Nothing that is stored tells. So megatron-core builds the model of each rank on the meta device, from the stored
arguments: that gives the order, and which slice of which global tensor each parameter is. It happens in a process of
its own, since it takes Megatron's global state, and the process groups of a job of which no rank is running.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.reshard._buckets import FlatParameter, ParameterBox
from mcore_ckpt.reshard.gpt_model import gpt_chunk
from mcore_ckpt.reshard.names import expert_of, layer_of
from mcore_ckpt.reshard.own_process import ChildError, in_own_process

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
    """What each group of model-parallel ranks (Megatron's `data_parallel_group_idx`) holds, in the order of its
    buffers. Raises `OptionError` or `CorruptCheckpointError` if megatron-core is missing, or builds no such model.
    """
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
        groups = in_own_process(__name__, "all_groups", request, {"RANK": None, "WORLD_SIZE": None}, _DEADLINE_S)
    except ChildError as error:
        raise CorruptCheckpointError(
            f"megatron-core builds no model from the stored arguments: {error}. Nothing was written"
        ) from None
    return _read_answer(groups)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of arguments by name, those that are numbers, text, flags, None, and lists of such."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _read_answer(groups: list[Any]) -> dict[tuple[bool, int], list[list[FlatParameter]]]:
    return {
        (bool(experts), group): [
            [
                FlatParameter(
                    name,
                    numel,
                    own_bucket,
                    is_copy,
                    tuple(
                        ParameterBox(key, tuple(shape), Box(tuple(offsets), tuple(sizes)), first)
                        for key, shape, offsets, sizes, first in boxes
                    ),
                )
                for name, numel, own_bucket, is_copy, boxes in chunk
            ]
            for chunk in chunks
        ]
        for experts, group, chunks in groups
    }


# --- in the process that builds the model


def all_groups(request: Mapping[str, Any]) -> list[Any]:
    """The parameters of each group of ranks, in the form that `_read_answer` reads."""
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
    found: dict[tuple[bool, int], list[Any]] = {}
    for rank in range(stage * pipeline):
        with _as_rank(rank, stage * pipeline, arguments) as groups:
            missing = [key for key in groups if key not in found]
            if missing:
                chunks = _parameters(arguments, metadata)
                for experts, group in missing:
                    found[experts, group] = [
                        [row for row, is_expert in reversed(chunk) if is_expert == experts] for chunk in chunks
                    ]
    return [[experts, group, chunks] for (experts, group), chunks in sorted(found.items()) if any(chunks)]


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
    """What Megatron asks of a GPU while it builds a model is nothing that parameters without elements need."""
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


def _parameters(arguments: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[list[tuple[Any, bool]]]:
    """For each chunk of the model, its parameters in their order, and whether each is of a divided expert."""
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
        rows: list[tuple[Any, bool]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parts = shards[id(parameter)]
            boxes = [_box(part, name) for part in parts]
            is_copy = any(any(part.replica_id) for part in parts)
            own_bucket = bool(getattr(parameter, "shared_embedding", False))
            row = [name, parameter.numel(), own_bucket, is_copy, boxes]
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


def _as_transformer_engine(rows: list[tuple[Any, bool]], grouped_experts: bool) -> list[tuple[Any, bool]]:
    """Parameters of a chunk built of Megatron's own layers, as layers of Transformer Engine have and name them: a norm
    before the layer that holds it, the matrices of grouped experts by layer.
    """
    names = [row[0] for row, _ in rows]
    held: dict[str, list[tuple[Any, bool]]] = {}
    kept = []
    for row, is_expert in rows:
        layer, rest = _in_layer(row[0])
        norm = next((norm for norm in _HELD_NORMS if layer and rest.startswith(norm)), None)
        if norm is not None:
            holder = layer + _HELD_NORMS[norm]
            is_held = any(name.startswith(holder) for name in names)
            own = _HELD_NORMS[norm] + "layer_norm_" if is_held else norm
            for box in row[4]:
                box[0] = f"{_in_layer(box[0])[0]}{own}{rest.removeprefix(norm)}"
            if is_held:
                held.setdefault(holder, []).append((row, is_expert))
                continue
        kept.append((row, is_expert))
    ordered = []
    for row, is_expert in kept:
        for holder in [holder for holder in held if row[0].startswith(holder)]:
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


def _grouped(rows: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
    """With the experts of a layer where its first one was, sorted by matrix and then by expert."""
    groups: dict[str, list[tuple[Any, bool]]] = {}
    for row, is_expert in rows:
        expert = expert_of(row[0])
        groups.setdefault(expert.before if expert else row[0], []).append((row, is_expert))

    def place(row: tuple[Any, bool]) -> tuple[str, int]:
        expert = expert_of(row[0][0])
        # Sorting leaves weight before bias.
        return (expert.rest.partition(".")[0], expert.number or 0) if expert else ("", 0)

    return [row for group in groups.values() for row in sorted(group, key=place)]


def _box(part: Any, name: str) -> list[Any]:
    if not part.data.is_contiguous():
        raise NotImplementedError(f"{name}: its part {part.key} is no run of its elements")
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return [part.key, list(part.global_shape), list(part.global_offset), list(sizes), part.data.storage_offset()]


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
