"""Random small models of the Hugging Face libraries, and Megatron's models for the same: their logits side by side.

`transformers` makes the models and reads what was exported; Megatron's are built from the arguments that an import has
stored, with its own layers, on the gloo ranks that there are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.support.cpu_megatron import pretend_cuda
from tests.support.models import Parallel

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = [
    "SMALL",
    "HfCase",
    "build_from_arguments",
    "hf_logits",
    "make_hf_model",
    "megatron_logits",
    "run_model",
    "tokens",
    "weights",
]

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
    """A model: the name of its configuration's class in `transformers`, and settings of it."""

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)


def make_hf_model(case: HfCase, directory: Path, **save: Any) -> None:
    """Save a random model, all of whose parameters differ from what they are initialized to."""
    transformers = _transformers()
    torch.manual_seed(sum(map(ord, case.name)))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, case.config)(**case.settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name or "ln_" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory, **save)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory of safetensors."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def tokens(vocabulary: int) -> torch.Tensor:
    """The same random tokens, everywhere."""
    return torch.randint(vocabulary, (_BATCH, _SEQUENCE), generator=torch.Generator().manual_seed(7))


def hf_logits(directory: Path, vocabulary: int) -> torch.Tensor:
    """What `transformers` computes, `[batch, sequence, vocabulary]`."""
    model = _transformers().AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(tokens(vocabulary)).logits
    return logits


def _transformers() -> Any:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def megatron_logits(checkpoint: Path, parallel: Parallel, vocabulary: int, strategy: Any = None) -> Any:
    """Load a checkpoint into a new Megatron model, strictly, and run it.

    Collective; returns `[batch, sequence, vocabulary]` on ranks of the last pipeline stage, None on others.
    """
    from megatron.core import dist_checkpointing

    arguments = dist_checkpointing.load_common_state_dict(str(checkpoint))["args"]
    model = build_from_arguments(arguments, parallel)
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load({"model": wanted}, str(checkpoint), strategy, strict="raise_all")
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
    pretend_cuda()
    from mcore_ckpt.convert.logits import build_gpt_model

    return build_gpt_model(vars(arguments), tensor=parallel.tensor, pipeline=parallel.pipeline, expert=parallel.expert)
