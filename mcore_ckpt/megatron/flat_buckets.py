"""Where each parameter lies in the flat buckets of Megatron-Core's distributed optimizer.

The optimizer keeps its state in buffers, one for each chunk of the model and kind of element, cut into buckets. A
buffer holds the parameters of the chunk in the reverse order of `named_parameters()`, each from a multiple of 64
elements on. Nothing that is stored says which parameter lies where. So megatron-core builds the model of each rank on
the meta device, from the arguments that are stored beside the state: that gives the order, and which box of which
global tensor each parameter is. It happens in a process of its own, since it takes Megatron's global state, and the
process groups of a job of which no rank is running.

Where buckets begin follows from their stored sizes (`places_in_buckets`), whatever made them end there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.megatron.gpt_model import gpt_chunk

__all__ = ["FlatParameter", "ParameterBox", "Place", "parameter_orders", "places_in_buckets", "plain_values"]

_ALIGNMENT = 64
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


class ParameterBox(NamedTuple):
    """A part of a parameter, which is a box of a global tensor.

    Attributes:
        key: the tensor's in the model's state.
        shape: of the tensor.
        box: of it.
        first: of the flattened parameter, the element that the box begins with; it has them all in its own order.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    first: int


class FlatParameter(NamedTuple):
    """A parameter of one rank.

    Attributes:
        name: in the rank's chunk of the model.
        numel: its elements.
        own_bucket: it shares no bucket with others, as embeddings that two stages hold.
        is_copy: another rank's is the one that counts.
        boxes: which together are all of it.
    """

    name: str
    numel: int
    own_bucket: bool
    is_copy: bool
    boxes: tuple[ParameterBox, ...]


class Place(NamedTuple):
    """Where a parameter lies: number of the bucket, and its first element in it."""

    bucket: int
    first: int


def places_in_buckets(parameters: Sequence[FlatParameter], sizes: Sequence[int], where: str) -> list[Place]:
    """Lay parameters into buckets, as Megatron-Core does.

    Args:
        parameters: of one buffer, in its order.
        sizes: of its buckets, in elements, without what pads their ends.
        where: the buffer, for messages.

    Raises:
        CorruptCheckpointError: they do not fill buckets of these sizes.
    """
    places: list[Place] = []
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
        places.append(Place(bucket, start))
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


def parameter_orders(
    arguments: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
) -> dict[tuple[bool, int], list[list[FlatParameter]]]:
    """What each group of the model-parallel ranks holds, in the order of its buffers.

    Args:
        arguments: Megatron's, as stored, plain values.
        metadata: the content metadata that is stored beside them, which the model's keys depend on.

    Returns:
        (of experts that are divided among ranks, number of the group) -> for each chunk of the model (more than one
        with a virtual pipeline), its parameters in the order of the buffer. The number is Megatron's
        `data_parallel_group_idx`: the model-parallel rank.

    Raises:
        OptionError: megatron-core is not installed, or the model is of a kind that is not built here.
        CorruptCheckpointError: megatron-core builds no model from these arguments.
    """
    missing = [name for name in ("num_layers", "hidden_size", "padded_vocab_size") if not arguments.get(name)]
    if missing:
        raise OptionError(
            f"the stored arguments have no {', '.join(missing)}; expected those of a launch of Megatron, from which "
            "its model can be built. Where each parameter lies in the optimizer's buckets cannot be told without them"
        )
    refused = [name for name in _REFUSED if arguments.get(name)]
    if refused:
        raise OptionError(
            f"the stored arguments say {refused[0]}={arguments[refused[0]]!r}; the order of parameters in the "
            "optimizer's buckets is known for GPT models with layers of one kind or with experts, without it"
        )
    request = json.dumps({"arguments": plain_values(arguments), "metadata": plain_values(metadata or {})})
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.run(
        [sys.executable, "-m", "mcore_ckpt.megatron.flat_buckets"],
        input=request,
        capture_output=True,
        text=True,
        env=environment,
        timeout=_DEADLINE_S,
        check=False,
    )
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        answer = {"error": f"exit code {child.returncode}: {child.stderr[-500:]}"}
    if "missing" in answer:
        raise OptionError(
            f"megatron-core cannot be imported ({answer['missing']}): it builds the model that tells where each "
            f"parameter lies in the optimizer's buckets. Install it (pip install megatron-core) for {sys.executable}"
        )
    if "error" in answer:
        raise CorruptCheckpointError(
            f"megatron-core builds no model from the stored arguments: {answer['error']}. Nothing was written"
        )
    return _read_answer(answer["groups"])


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


def _main() -> None:
    """Read a request from standard input, and write the answer to standard output; all else goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        import megatron.core  # noqa: F401
        import torch.distributed  # noqa: F401
    except ImportError as error:
        answer = {"missing": str(error)}
    else:
        try:
            answer = {"groups": _all_groups(request["arguments"], request["metadata"])}
        except Exception as error:  # noqa: BLE001  (what Megatron raises about other versions' arguments: anything)
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error!s:.400}"}
    json.dump(answer, output)
    output.flush()


def _all_groups(arguments: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Any]:
    """The parameters of each group of ranks, in the form that `_read_answer` reads."""
    import math

    _without_cuda()
    tensor, pipeline, expert, expert_tensor = _sizes(arguments)
    stage = math.lcm(tensor, expert_tensor * expert)
    found: dict[tuple[bool, int], list[Any]] = {}
    for rank in range(stage * pipeline):
        with _AsRank(rank, stage * pipeline, arguments) as groups:
            wanted = [key for key in groups if key not in found]
            if wanted:
                chunks = _parameters(arguments, metadata)
                for experts, group in wanted:
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


class _AsRank:
    """This process as one rank of a job; gives which groups of the optimizer it stands for."""

    def __init__(self, rank: int, world: int, arguments: Mapping[str, Any]) -> None:
        self._rank, self._world, self._arguments = rank, world, arguments

    def __enter__(self) -> list[tuple[bool, int]]:
        import torch.distributed as dist
        from megatron.core import parallel_state
        from torch.testing._internal.distributed.fake_pg import FakeStore

        tensor, pipeline, expert, expert_tensor = _sizes(self._arguments)
        dist.init_process_group("fake", rank=self._rank, world_size=self._world, store=FakeStore())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=self._arguments.get("virtual_pipeline_model_parallel_size"),
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
        return groups

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _parameters(arguments: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[list[tuple[Any, bool]]]:
    """For each chunk of the model, its parameters in their order, and whether each is of a divided expert."""
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
            if isinstance(getattr(leaf, "data", None), _tensor_type()):
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


_LAYER = re.compile(r"(?P<layer>.*layers\.\d+\.(?:transformer_layer\.)?)(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<experts>.+\.experts\.)local_experts\.(?P<number>\d+)\.(?P<linear>\w+)\.(?P<kind>\w+)")
# Norms that layers of Transformer Engine hold themselves, and the layers that hold them.
_HELD_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
}


def _as_transformer_engine(rows: list[tuple[Any, bool]], grouped_experts: bool) -> list[tuple[Any, bool]]:
    """Parameters of a chunk that is built of Megatron's own layers, as layers of Transformer Engine have and name them.

    A layer that holds a norm has its parameters before its own. Where experts are grouped, one layer holds the first
    matrices of all of them, and another the second ones.

    Args:
        rows: the parameters, and whether each is of a divided expert.
        grouped_experts: as `--moe-grouped-gemm`.
    """
    names = [row[0] for row, _ in rows]
    held: dict[str, list[tuple[Any, bool]]] = {}
    kept = []
    for row, is_expert in rows:
        found = _LAYER.fullmatch(row[0])
        norm = next((norm for norm in _HELD_NORMS if found and found["rest"].startswith(norm)), None)
        if found and norm is not None:
            holder = found["layer"] + _HELD_NORMS[norm]
            is_held = any(name.startswith(holder) for name in names)
            if is_held:
                held.setdefault(holder, []).append((row, is_expert))
            own = _HELD_NORMS[norm] + "layer_norm_" if is_held else norm
            for box in row[4]:
                box[0] = _renamed_norm(box[0], own, found["rest"].removeprefix(norm))
            if is_held:
                continue
        kept.append((row, is_expert))
    ordered = []
    for row, is_expert in kept:
        for holder in [holder for holder in held if row[0].startswith(holder)]:
            ordered += held.pop(holder)
        ordered.append((row, is_expert))
    return _grouped(ordered) if grouped_experts else ordered


def _renamed_norm(key: str, own: str, kind: str) -> str:
    """A norm's key with the name that it has in its layer: `decoder.layers.[3.]` before, `weight` behind it."""
    layer = re.match(r".*layers\.(?:\d+\.)?(?:transformer_layer\.)?", key)
    return f"{layer.group() if layer else ''}{own}{kind}"


def _grouped(rows: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
    """With the experts of a layer where its first one was, sorted by matrix and then by expert."""
    groups: dict[str, list[tuple[Any, bool]]] = {}
    for row, is_expert in rows:
        found = _EXPERT.fullmatch(row[0])
        groups.setdefault(found["experts"] if found else row[0], []).append((row, is_expert))

    def place(row: tuple[Any, bool]) -> tuple[str, int]:
        found = _EXPERT.fullmatch(row[0][0])
        return (found["linear"], int(found["number"])) if found else ("", 0)  # sorting leaves weight before bias

    return [row for group in groups.values() for row in sorted(group, key=place)]


def _tensor_type() -> type:
    import torch

    return torch.Tensor


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


if __name__ == "__main__":
    _main()
