"""Random small models of the Hugging Face libraries, and Megatron's models for the same: their logits side by side.

`transformers` makes the models and reads what was exported; Megatron's are built from the arguments that an import has
stored, with its own layers, on the gloo ranks that there are.
"""

import json
import os
import re
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt.format.metadata_read import read_index
from tests.support.models import Parallel
from tests.support.shared_groups import share_groups
from tests.support.stock import LISTS_TENSORS

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
    """A model: the name of its configuration's class in `transformers`, settings of it, and how it is quantized."""

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    quantized: Literal["fp8", "mxfp4"] | None = None


def make_hf_model(case: HfCase, directory: Path) -> None:
    """Save a random model, all of whose parameters differ from what they are initialized to."""
    transformers = the_transformers()
    torch.manual_seed(sum(map(ord, case.name)))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, case.config)(**case.settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name or "ln_" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    if case.quantized:
        _quantize(directory, case.quantized)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory of safetensors; those in blocks as `transformers` makes plain ones of them."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    for key in list(found):
        if key.endswith("_scale_inv"):
            from transformers.integrations.finegrained_fp8 import Fp8Dequantize

            values = key.removesuffix("_scale_inv")
            found[values] = Fp8Dequantize(None)._dequantize_one(found[values], found.pop(key), torch.float32)
        elif key.endswith("_scales"):
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            values = key.removesuffix("_scales")
            found[values] = convert_moe_packed_tensors(
                found.pop(f"{values}_blocks"), found.pop(key), dtype=torch.float32
            )
    return found


_FP8_BLOCK = [4, 8]
# 4-bit floats by their codes, of which those from 8 on are negative.
_FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _quantize(directory: Path, how: str) -> None:
    """Store a model's large weights in few bits, with a scale for each block, as DeepSeek and OpenAI do."""
    from safetensors.torch import save_file

    tensors = weights(directory)
    generator = torch.Generator().manual_seed(11)
    for key, tensor in list(tensors.items()):
        if how == "fp8" and (key.endswith("_proj.weight") or "kv_a_proj" in key):
            rows, columns = (size // block for size, block in zip(tensor.shape, _FP8_BLOCK, strict=True))
            scales = (torch.rand(rows, columns, generator=generator) + 0.5) / 100
            scales = scales if "kv_b_proj" in str(tensors.keys()) else scales.bfloat16()  # DeepSeek's, and Qwen's
            spread = scales.float().repeat_interleave(_FP8_BLOCK[0], 0).repeat_interleave(_FP8_BLOCK[1], 1)
            tensors |= {key: (tensor / spread).to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}
        elif (how == "mxfp4" and key.endswith("experts.gate_up_proj")) or key.endswith("experts.down_proj"):
            blocks = tensors.pop(key).transpose(1, 2)
            blocks = blocks.reshape(*blocks.shape[:2], -1, 32)  # [experts, outputs, blocks, 32]
            exponents = torch.randint(-4, -2, blocks.shape[:-1], generator=generator)
            codes = (blocks.abs() / 2.0 ** exponents.unsqueeze(-1)).unsqueeze(-1).sub(_FLOAT4).abs().argmin(-1)
            codes = codes + 8 * (blocks < 0)
            tensors[f"{key}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
            tensors[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = (
        {"quant_method": "fp8", "weight_block_size": _FP8_BLOCK, "dequantize": True}
        if how == "fp8"
        else {"quant_method": "mxfp4", "dequantize": True}
    )
    (directory / "config.json").write_text(json.dumps(config))


def tokens(vocabulary: int) -> torch.Tensor:
    """The same random tokens, everywhere."""
    return torch.randint(vocabulary, (_BATCH, _SEQUENCE), generator=torch.Generator().manual_seed(7))


def hf_logits(directory: Path, vocabulary: int) -> torch.Tensor:
    """What `transformers` computes, `[batch, sequence, vocabulary]`."""
    model = the_transformers().AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(tokens(vocabulary)).logits
    return logits


def the_transformers() -> Any:
    """The library, silent and without a network."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    import transformers
    import transformers.quantizers.quantizer_finegrained_fp8

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Asked for before 8-bit floats are made plain ones, which does without it.
    transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available = lambda: True
    return transformers


def megatron_logits(checkpoint: Path, parallel: Parallel, vocabulary: int, strategy: Any = None) -> Any:
    """Load a checkpoint into a new Megatron model, strictly, and run it.

    Collective; returns `[batch, sequence, vocabulary]` on ranks of the last pipeline stage, None on others.
    """
    from megatron.core import dist_checkpointing

    arguments = dist_checkpointing.load_common_state_dict(str(checkpoint))["args"]
    model = build_from_arguments(arguments, parallel)
    numbered = any(re.search(r"\blayers\.\d", key) for key in read_index(checkpoint).tensors)
    wanted = model.sharded_state_dict(metadata={"non_homogeneous_layers": numbered})
    strict = "raise_all" if strategy or LISTS_TENSORS else "assume_ok_unexpected"
    loaded = dist_checkpointing.load({"model": wanted}, str(checkpoint), strategy, strict=strict)
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
    from mcore_ckpt.reshard.parameter_orders import build_gpt_model

    return build_gpt_model(vars(arguments), tensor=parallel.tensor, pipeline=parallel.pipeline, expert=parallel.expert)


def load_and_run(
    rank: int, jobs: dict[tuple[str, str], tuple[Path, Parallel]], vocabulary: int
) -> dict[tuple[str, str, str], torch.Tensor]:
    """Logits of each checkpoint, loaded by stock and by us, on ranks that have them; by name, layout and strategy."""
    share_groups()
    from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy

    found: dict[tuple[str, str, str], torch.Tensor] = {}
    for (name, layout), (checkpoint, parallel) in jobs.items():
        for strategy in (None, TorchDistLoadStrategy()):
            logits = megatron_logits(checkpoint, parallel, vocabulary, strategy)
            if logits is not None:
                found[name, layout, "stock" if strategy is None else "ours"] = logits
    return found


def save_and_run(
    rank: int, jobs: dict[tuple[str, str], tuple[Path, Parallel, Path]], vocabulary: int
) -> dict[tuple[str, str], torch.Tensor]:
    """Save a new, random model for the arguments of each checkpoint with stock Megatron-Core; its logits."""
    share_groups()
    from megatron.core import dist_checkpointing

    found: dict[tuple[str, str], torch.Tensor] = {}
    for (name, naming), (arguments_from, parallel, target) in jobs.items():
        common = dist_checkpointing.load_common_state_dict(str(arguments_from))
        model = build_from_arguments(common["args"], parallel)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.mul_(5.0 if "norm" not in key else 1.0)
        numbered = naming == "numbered"
        metadata: dict[str, Any] = {"non_homogeneous_layers": numbered, "singleton_local_shards": numbered}
        state = {"model": model.sharded_state_dict(metadata=metadata), "args": common["args"], "iteration": 3}
        if naming == "nemo":  # `module.` before all keys, and no arguments
            state = {"global_step": 3, "sharded": model.sharded_state_dict(prefix="module.")}
        dist_checkpointing.save(state, str(target))
        logits = run_model(model, common["args"], vocabulary)
        if logits is not None:
            found[name, naming] = logits
    return found


def keys_of(rank: int, arguments: list[dict[str, Any]]) -> list[dict[str, tuple[int, ...]]]:
    """Sharded keys, with global shapes, of Megatron's models for some arguments, layers that predict included."""
    share_groups()
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from mcore_ckpt.reshard.parameter_orders import build_gpt_model

    found = []
    for given in arguments:
        model = build_gpt_model(given, mtp_num_layers=given["mtp_num_layers"])
        state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        apply_factories(state)
        found.append({leaf.key: leaf.global_shape for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)})
    return found


def further_logits(rank: int, checkpoint: Path, vocabulary: int) -> torch.Tensor:
    """What Megatron's layer for the next but one token makes of `tokens`, `[batch, sequence, vocabulary]`."""
    share_groups()
    from megatron.core import dist_checkpointing

    from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy
    from mcore_ckpt.reshard.parameter_orders import build_gpt_model

    arguments = vars(dist_checkpointing.load_common_state_dict(str(checkpoint))["args"])
    model = build_gpt_model(arguments, mtp_num_layers=1).eval()
    wanted = {"model": model.sharded_state_dict()}
    loaded = dist_checkpointing.load(wanted, str(checkpoint), TorchDistLoadStrategy(), strict="raise_all")
    model.load_state_dict(loaded["model"])
    found: list[torch.Tensor] = []  # of the decoder, and of the layer behind it
    model.mtp.register_forward_hook(lambda _, __, hidden: found.extend(hidden.chunk(2)))
    ids = tokens(vocabulary)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
    positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
    with torch.no_grad():
        model(ids, positions, mask, labels=ids)
        logits: torch.Tensor = model.output_layer(found[1])[0]
    return logits.transpose(0, 1)[..., :vocabulary].contiguous()


def fsdp_to_megatron(
    rank: int, jobs: dict[str, tuple[Path, Path, Parallel]], vocabulary: int
) -> dict[str, torch.Tensor]:
    """Load each directory of `transformers`, shard the model by FSDP2 and save it by plain DCP; then let rank 0 import
    that, and all ranks load the checkpoint into Megatron's model. Its logits, on ranks that have them."""
    share_groups()
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    from mcore_ckpt.models.conversions import import_checkpoint

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found: dict[str, torch.Tensor] = {}
    for name, (source, target, parallel) in jobs.items():
        model = the_transformers().AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers:
                for layer in module:
                    fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dcp.save({"model": model.state_dict()}, checkpoint_id=target / "fsdp")
        if rank == 0:
            import_checkpoint(
                target / "fsdp",
                target / "megatron",
                kind="hf",
                hf_config=source,
                transformer_impl="local",
                tp=parallel.tensor,
                pp=parallel.pipeline,
                ep=parallel.expert,
            )
        torch.distributed.barrier()
        logits = megatron_logits(target / "megatron", parallel, vocabulary)
        if logits is not None:
            found[name] = logits
    return found
