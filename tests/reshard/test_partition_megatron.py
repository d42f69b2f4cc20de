"""The table of partition axes against Megatron-Core itself: what its own modules shard, on ranks that have the layout.

No whole model: layers of Mamba and of experts, whose forward pass needs kernels that a CPU does not have, but whose
sharded state dict is what counts here. Every shard that a rank of the target would save has to be a chunk of the plan
for that target, made of a source in one piece, so that nothing but the table can have decided.
"""

import operator
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from mcore_ckpt.core.boxes import Box, covers, intersect
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools.keys import data_file_rank
from tests.support.gloo_ranks import run_stock_ranks as run_ranks
from tests.support.model_like import assert_same, read_all
from tests.support.models import megatron_version

pytestmark = pytest.mark.timeout(300)
HIDDEN = 64


class Shard(NamedTuple):
    """What a rank holds of a global tensor, as Megatron says."""

    key: str
    shape: tuple[int, ...]
    box: Box
    is_main: bool


def _hybrid(megatron: "_Megatron", layers: str) -> Any:
    """This rank's part of a hybrid, of the same number of layers on each stage. Layers are Megatron's own."""
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
    names = {"sharded_state_dict_keys_map": dense.sharded_state_dict_keys_map}
    attention = {"input_layernorm": dense.input_layernorm, "self_attention": dense.self_attention, **names}
    mlp = {"pre_mlp_layernorm": dense.pre_mlp_layernorm, "mlp": dense.mlp, **names}
    specs = submodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm, mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=linear)
            ),
        ),
        attention_layer=ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**attention)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(**mlp)),
    )
    stages = megatron.sizes.get(_PP, 1)
    if pattern == "hybrid_layer_pattern" and stages > 1:
        step = len(layers) // stages
        layers = "|".join(layers[at : at + step] for at in range(0, len(layers), step))
    return MambaModel(
        megatron.config(num_layers=4, is_hybrid_model=True, **_DENSE),
        ModuleSpec(stack, submodules=specs),
        128,
        32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        pg_collection=megatron.groups(),
        **{pattern: layers},
    )


def _gpt(megatron: "_Megatron") -> Any:
    """The layers of the hybrid `*-*-` as those of GPTModel, on one stage."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(megatron.config(num_layers=2, **_DENSE), spec, 128, 32, position_embedding_type="none")


def _gated_delta_net(megatron: "_Megatron") -> Any:
    """One layer with Megatron's own linear layers and norm."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    return GatedDeltaNet(
        megatron.config(linear_key_head_dim=8, linear_value_head_dim=16, **heads, **_DENSE),
        GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear),
        layer_number=1,
        pg_collection=megatron.groups(),
    )


_DENSE = {
    "sequence_parallel": False,  # which torch's norms have not
    "mamba_state_dim": 16,
    "mamba_head_dim": 8,
    "mamba_num_groups": 4,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "pipeline_dtype": torch.float32,
}
_BUILDERS: dict[str, tuple[Callable[..., Any], str]] = {
    "hybrid": (partial(_hybrid, layers="M-*M"), ""),
    "hybrid without Mamba": (partial(_hybrid, layers="*-*-"), ""),
    "gpt": (_gpt, ""),
    "gated delta net": (_gated_delta_net, "decoder.layers.0.self_attention."),
}
"""By name how a model is built, and the prefix of its keys."""
_PP = "pipeline_model_parallel_size"


def save(rank: int, name: str, sizes: dict[str, int], directory: Path) -> None:
    """A model of random weights."""
    from megatron.core import dist_checkpointing

    build, prefix = _BUILDERS[name]
    model = build(_start(**sizes))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    dist_checkpointing.save(model.sharded_state_dict(prefix), str(directory))


def load(
    rank: int, name: str, sizes: dict[str, int], directories: list[Path], again: Path | None = None
) -> list[dict[str, torch.Tensor]]:
    """What Megatron loads of each, by the names of this rank's modules; the last one is saved `again`."""
    from megatron.core import dist_checkpointing

    found = []
    build, prefix = _BUILDERS[name]
    model = build(_start(**sizes))
    for directory in directories:
        asked = model.sharded_state_dict(prefix)
        if name == "hybrid without Mamba" and directory.name == "gpt":
            from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

            interop.retarget_sharded_state_dict_to_gpt_checkpoint(asked, interop.gpt_compatible_layer_maps("*-*-"))
        loaded = dist_checkpointing.load(asked, str(directory))
        model.load_state_dict({key.removeprefix(prefix): value for key, value in loaded.items()})
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    if again is not None:
        dist_checkpointing.save(model.sharded_state_dict(prefix), str(again))
    return found


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
        layer = spec(config=config) if isinstance(spec, partial) else build_module(spec, config=config)
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
        "fla.modules.convolution": {"causal_conv1d": _kernel},
        "fla.modules.l2norm": {"l2norm": _kernel},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _kernel},
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


_TP = "tensor_model_parallel_size"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "saved", "tp", "pp", "cut"),
    [
        ("hybrid", 2, 1, 2, "decoder.layers.3.mixer.in_proj.weight.dt"),
        ("gated delta net", 2, 1, 1, "decoder.layers.0.self_attention.in_proj.weight.alpha"),
        ("gated delta net", 1, 2, 1, "decoder.layers.0.self_attention.conv1d.weight.value"),
    ],
)
def test_layers_are_loaded_as_resharded_by_megatron_itself(
    tmp_path: Path, name: str, saved: int, tp: int, pp: int, cut: str
) -> None:
    (tmp_path / "saved").mkdir()
    run_ranks(save, saved, name, {_TP: saved}, tmp_path / "saved", deadline_s=200)
    reshard_checkpoint(tmp_path / "saved", tmp_path / "made", tp=tp, pp=pp)
    made = read_index(tmp_path / "made")
    assert all(len(entry.chunks) in (1, tp) for key, entry in made.tensors.items() if ".linear_fc1." not in key)
    ranks = sorted(data_file_rank(chunk.item.file) or 0 for chunk in made.tensors[cut].chunks)
    assert ranks == ([*range(tp)] if tp > 1 else [pp - 1])
    both = [tmp_path / "saved", tmp_path / "made"]
    for of_megatron, of_ours in run_ranks(load, tp * pp, name, {_TP: tp, _PP: pp}, both, deadline_s=200):
        assert any(".in_proj" in f".{parameter}" for parameter in of_ours)
        assert_same(of_ours, of_megatron)


@pytest.mark.long
def test_a_hybrid_model_loads_and_saves_what_was_a_gpt_model(tmp_path: Path) -> None:
    """As Megatron's own translation at a load has it, where there is one."""
    for directory in ("gpt", "again"):
        (tmp_path / directory).mkdir()
    run_ranks(save, 2, "gpt", {_TP: 2}, tmp_path / "gpt", deadline_s=200)
    reshard_checkpoint(tmp_path / "gpt", tmp_path / "made", tp=1, pp=2, convert_model="gpt-to-hybrid")
    places = [tmp_path / name for name in ("gpt", "made") if name == "made" or megatron_version() >= (0, 19)]
    sizes, again = {_TP: 1, _PP: 2}, tmp_path / "again"
    for found in run_ranks(load, 2, "hybrid without Mamba", sizes, places, again, deadline_s=200):
        assert found[-1]
        assert_same(found[0], found[-1])
    reshard_checkpoint(again, tmp_path / "back", tp=2, convert_model="hybrid-to-gpt")
    assert_same(read_all(tmp_path / "back"), read_all(tmp_path / "gpt"))
    assert read_index(tmp_path / "back").objects.keys() == read_index(tmp_path / "gpt").objects.keys()


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
