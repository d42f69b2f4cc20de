"""HybridModel's attention and MLP layers without Transformer Engine, for a job's `--spec`."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm

_DENSE = get_gpt_layer_local_spec().submodules
_ATTENTION = "input_layernorm self_attention self_attn_bda sharded_state_dict_keys_map".split()
_MLP = "pre_mlp_layernorm mlp mlp_bda sharded_state_dict_keys_map".split()


def _layer(kind: type, names: list[str]) -> ModuleSpec:
    return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**{name: getattr(_DENSE, name) for name in names}))


hybrid_block.TENorm = WrappedTorchNorm  # behind the last layer
hybrid_stack_spec = ModuleSpec(
    hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        attention_layer=_layer(TransformerLayer, _ATTENTION), mlp_layer=_layer(MLPLayer, _MLP)
    ),
)
