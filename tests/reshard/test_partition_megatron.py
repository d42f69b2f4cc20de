"""The table of partition axes against Megatron-Core itself: what its own modules shard, on ranks that have the layout.

No whole model: layers of Mamba and of experts, whose forward pass needs kernels that a CPU does not have, but whose
sharded state dict is what counts here. Every shard that a rank of the target would save has to be a chunk of the plan
for that target, made of a source in one piece, so that nothing but the table can have decided.
"""

from __future__ import annotations

import operator
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from mcore_ckpt.core.boxes import Box, covers, intersect
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.reshard.partition import Partitioner, divide
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools.keys import data_file_rank
from tests.support.gloo_ranks import run_stock_ranks as run_ranks
from tests.support.model_like import assert_same

pytestmark = pytest.mark.timeout(300)
HIDDEN = 64


class Shard(NamedTuple):
    """What a rank holds of a global tensor, as Megatron says."""

    key: str
    shape: tuple[int, ...]
    box: Box
    is_main: bool


def _hybrid(megatron: _Megatron) -> Any:
    """This rank's part of a hybrid: Mamba, MLP, attention, Mamba. Layers are Megatron's own."""
    for name in ("triton", "triton.language"):
        sys.modules.setdefault(name, MagicMock())
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        from megatron.core.models.hybrid import hybrid_block as block

        stack, submodules, pattern = block.HybridStack, block.HybridStackSubmodules, "hybrid_layer_pattern"
    except ImportError:
        from megatron.core.ssm import mamba_block as block

        stack, submodules, pattern = block.MambaStack, block.MambaStackSubmodules, "hybrid_override_pattern"
    mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    block.TENorm = WrappedTorchNorm  # behind the last layer
    linear = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    dense = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = {"input_layernorm": dense.input_layernorm, "self_attention": dense.self_attention}
    mlp = {"pre_mlp_layernorm": dense.pre_mlp_layernorm, "mlp": dense.mlp}
    layers = submodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm, mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=linear)
            ),
        ),
        attention_layer=ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**attention)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(**mlp)),
    )
    config = megatron.config(
        num_layers=4,
        sequence_parallel=False,  # which torch's norms have not
        mamba_state_dim=16,
        mamba_head_dim=8,
        mamba_num_groups=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        is_hybrid_model=True,
        pipeline_dtype=torch.float32,
    )
    return MambaModel(
        config,
        ModuleSpec(stack, submodules=layers),
        128,
        32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        pg_collection=megatron.groups(),
        **{pattern: "M-*M" if pattern == "hybrid_override_pattern" or megatron.sizes.get(_PP, 1) == 1 else "M-|*M"},
    )


_PP = "pipeline_model_parallel_size"


def save_hybrid(rank: int, directory: Path) -> None:
    """At TP 2."""
    from megatron.core import dist_checkpointing

    model = _hybrid(_start(tensor_model_parallel_size=2))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    dist_checkpointing.save(model.sharded_state_dict(), str(directory))


def load_hybrid(rank: int, directories: list[Path]) -> list[dict[str, torch.Tensor]]:
    """What Megatron loads of each, at TP 1 x PP 2, by the names of this rank's modules."""
    from megatron.core import dist_checkpointing

    found = []
    model = _hybrid(_start(tensor_model_parallel_size=1, pipeline_model_parallel_size=2))
    for directory in directories:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(directory)))
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return found


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

        usual = {
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "ffn_hidden_size": 2 * HIDDEN,
            "sequence_parallel": self.sizes["tensor_model_parallel_size"] > 1,
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
        }
        return TransformerConfig(**{**usual, **self.sizes, **more})

    def groups(self) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection.use_mpu_process_groups()


def _start(**sizes: int) -> _Megatron:
    names = {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": _Norm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": _kernel,
            "mamba_split_conv1d_scan_combined": _kernel,
        },
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": _kernel},
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


def _kernel(*_: Any) -> None:
    """Whose parameters Megatron looks at, and which nobody calls."""


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


@pytest.mark.long
def test_a_hybrid_saved_at_tp_2_loads_at_pp_2_as_resharded_by_megatron_itself(tmp_path: Path) -> None:
    (tmp_path / "tp2").mkdir()
    run_ranks(save_hybrid, 2, tmp_path / "tp2", deadline_s=200)
    reshard_checkpoint(tmp_path / "tp2", tmp_path / "pp2", tp=1, pp=2)
    made = read_index(tmp_path / "pp2")
    assert all(len(entry.chunks) == 1 for key, entry in made.tensors.items() if ".linear_fc1." not in key)
    assert data_file_rank(made.tensors["decoder.layers.3.mixer.in_proj.weight.dt"].chunks[0].item.file) == 1
    for of_megatron, of_ours in run_ranks(load_hybrid, 2, [tmp_path / "tp2", tmp_path / "pp2"], deadline_s=200):
        assert any("mixer.in_proj" in name for name in of_ours)
        assert_same(of_ours, of_megatron)


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
