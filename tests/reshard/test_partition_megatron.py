"""The table of partition axes against Megatron-Core itself: what its own modules shard, on ranks that have the layout.

No whole model: layers of Mamba and of experts, whose forward pass needs kernels that a CPU does not have, but whose
sharded state dict is what counts here. Every shard that a rank of the target would save has to be a chunk of the plan
for that target, made of a source in one piece, so that nothing but the table can have decided.
"""

from __future__ import annotations

import operator
import sys
import types
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from mcore_ckpt.core.boxes import Box, covers, intersect
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.reshard.partition import Partitioner, divide
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.tools.keys import data_file_rank
from tests.support.gloo_ranks import run_stock_ranks as run_ranks

pytestmark = pytest.mark.timeout(300)
HIDDEN = 64


class Shard(NamedTuple):
    """What a rank holds of a global tensor, as Megatron says."""

    key: str
    shape: tuple[int, ...]
    box: Box
    is_main: bool


def shards_of_mamba(rank: int, tensor: int) -> list[Shard]:
    """A Mamba mixer with Megatron's own linear layers; the package of its kernels is replaced by a norm and names."""
    megatron = _start(tensor_model_parallel_size=tensor)
    for name in ("triton", "triton.language"):  # kernels are defined when the mixer is imported, and never called
        sys.modules.setdefault(name, MagicMock())
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if not hasattr(mamba_mixer, "HAVE_MAMBA_SSM"):
        return []
    mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True  # for the forward pass, which nobody calls
    mixer = mamba_mixer.MambaMixer(
        megatron.config(mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=4),
        mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        HIDDEN,
        layer_number=1,
        pg_collection=megatron.groups(),
    )
    return _shards(mixer.sharded_state_dict("decoder.layers.0.mixer."))


def shards_of_experts(rank: int, tensor: int, expert: int, expert_tensor: int) -> list[Shard]:
    """A layer of experts, grouped and one by one, divided among experts' own tensor parallel ranks."""
    megatron = _start(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import build_module
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    found = []
    for number, grouped in enumerate((False, True)):
        config = megatron.config(
            num_moe_experts=4,
            moe_ffn_hidden_size=2 * HIDDEN,
            moe_grouped_gemm=grouped,
            moe_token_dispatcher_type="alltoall",
            gated_linear_unit=not grouped,
            activation_func=torch.nn.functional.silu if not grouped else torch.nn.functional.gelu,
            add_bias_linear=False,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=grouped)
        layer = build_module(spec, config=config)
        if hasattr(layer, "set_layer_number"):
            layer.set_layer_number(1)
        found += _shards(layer.sharded_state_dict(f"decoder.layers.{number}.mlp."))
    return found


class _Megatron(NamedTuple):
    sizes: dict[str, int]

    def config(self, **more: Any) -> Any:
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=2 * HIDDEN,
            sequence_parallel=self.sizes["tensor_model_parallel_size"] > 1,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            **self.sizes,
            **more,
        )

    def groups(self) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection.use_mpu_process_groups()


def _start(**sizes: int) -> _Megatron:
    names = {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": _Norm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": None,
        },
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
    }
    for name, contents in names.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))
            module.__path__ = []
        vars(module).update(contents)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return _Megatron(sizes)


class _Norm(torch.nn.Module):
    """What Megatron derives its norm from: a weight for each channel."""

    def __init__(self, channels: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels))


def _shards(state_dict: dict[str, Any]) -> list[Shard]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    apply_factories(state_dict)
    return [
        Shard(
            value.key,
            tuple(value.global_shape),
            Box(tuple(value.global_offset), (*(1,) * value.prepend_axis_num, *value.local_shape)),
            is_main_replica(value.replica_id),
        )
        for value in nested_values(state_dict)
        if isinstance(value, ShardedTensor)
    ]


def in_one_piece(shards: list[Shard]) -> CheckpointIndex:
    """The same tensors as a source without any parallelism."""
    item = StoredItem("__0_0.distcp", 0, 2**40)
    entries = {
        shard.key: TensorEntry(
            shard.key, "float32", shard.shape, (StoredChunk((0,) * len(shard.shape), shard.shape, item),)
        )
        for shard in shards
    }
    return CheckpointIndex("source", entries, {})


def test_mamba() -> None:
    per_rank = run_ranks(shards_of_mamba, 2, 2, deadline_s=200)
    shards = [shard for found in per_rank for shard in found]
    if not shards:
        pytest.skip("this megatron-core has no Mamba mixer of that form")
    index = in_one_piece(shards)
    assert {key.partition("mixer.")[2] for key in index.tensors} >= {
        *(f"in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")),
        *(f"conv1d.weight.{part}" for part in ("x", "B", "C")),
        *("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"),
    }
    partitioner = Partitioner(index)
    for shard in shards:
        boxes = divide(shard.key, shard.shape, partitioner.decide(shard.key), 2)
        assert shard.box in boxes, shard
    assert any(shard.box.sizes != shard.shape for shard in shards)


def test_experts_with_tensor_parallel_ranks_of_their_own() -> None:
    """ETP 2 x EP 2 on four ranks: each shard is made up of whole chunks, in a file of a rank that holds it."""
    per_rank = run_ranks(shards_of_experts, 4, 2, 2, 2, deadline_s=200)
    index = in_one_piece([shard for found in per_rank for shard in found])
    made = make_plan(index, TargetLayout(2, 1, ep=2, etp=2), Partitioner(index)).target.index
    assert made is not None
    chunks = {
        key: [(Box(chunk.offsets, chunk.sizes), data_file_rank(chunk.item.file)) for chunk in entry.chunks]
        for key, entry in made.tensors.items()
    }
    for rank, found in enumerate(per_rank):
        assert found
        for shard in found:
            inside = [(box, owner) for box, owner in chunks[shard.key] if intersect(box, shard.box)]
            boxes = [Box(tuple(map(operator.sub, box.offsets, shard.box.offsets)), box.sizes) for box, _ in inside]
            assert covers(shard.box.sizes, boxes) is None, f"rank {rank}: {shard} is not made up of {inside}"
            if shard.is_main and ".experts." in shard.key:
                assert {owner for _, owner in inside} == {rank}, shard
