"""What the ranks of the Hugging Face tests do; each function runs in processes of its own (see gloo_ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.hf_models import build_from_arguments, megatron_logits, run_model, the_transformers
from tests.support.models import Parallel
from tests.support.shared_groups import share_groups


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
