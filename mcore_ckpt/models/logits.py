"""One model in Megatron-Core and in `transformers`: logits side by side, for the same random tokens.

Megatron's model is built from the arguments that a checkpoint stores, with its own ("local") layers, which run on a
CPU. `check_logits` does all of it in a process of its own, in float32: what Megatron-Core has to be told before it runs
without a GPU stays there, and so does an end for want of memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import LoadError, OptionError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.models._families import family_named
from mcore_ckpt.reshard.parameter_orders import ChildError, build_gpt_model, in_own_process
from mcore_ckpt.reshard.partition import EMBEDDING, expert_of, layer_of, prefix_of, split_half
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.keys import is_optimizer_key, read_plain_state
from mcore_ckpt.tools.payloads import StoredPayloads, read_box

TOLERANCE: Final = 1e-4
"""Of the largest logit: what is left of rounding in another order after a hundred layers of float32. A layer that
computes something else makes a hundredth and more."""

_ENVIRON: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHDYNAMO_DISABLE": "1",
}
_BATCH, _MAX_TOKENS = 2, 24
# What `compare` uses: a package that does not fit the others fails here, not when it is imported itself.
_NEEDED = ("torch", "transformers.models.auto.modeling_auto", "megatron.core.models.gpt")


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """How far logits of two sequences of so many tokens are apart: the largest difference, and the largest logit."""

    difference: float
    scale: float
    tokens: int

    @property
    def same(self) -> bool:
        """Whether they are those of one model."""
        return self.difference <= TOLERANCE * self.scale and math.isfinite(self.scale)

    def __str__(self) -> str:
        verdict = "the same model" if self.same else "NOT the same model"
        return (
            f"logits of megatron-core and transformers: {verdict}: largest difference {self.difference:.3g} at a scale "
            f"of {self.scale:.3g} (2 sequences of {self.tokens} random tokens, float32)"
        )


def check_logits(checkpoint: str | os.PathLike[str], model: str | os.PathLike[str], arch: str) -> LogitsReport:
    """Run both models in a process of its own, one after the other. Raises `OptionError` and `LoadError`."""
    directory = checkpoint_directory(checkpoint)
    job = {"checkpoint": str(directory), "model": str(model), "arch": arch}
    try:
        return LogitsReport(**in_own_process(__name__, "compare", job, _ENVIRON))
    except ChildError as error:
        if error.exit_code == -9:
            raise OptionError(
                "the process that runs the models was killed, most likely for want of memory: each takes 4 bytes for "
                "a parameter. Check on a larger machine"
            ) from None
        raise LoadError(f"the models cannot be run: {error}") from None


def require_packages() -> None:
    """Raise `OptionError` unless all that a check needs can be imported."""
    try:
        in_own_process(__name__, "import_packages", list(_NEEDED), _ENVIRON)
    except ChildError as error:
        raise OptionError(
            "--check-logits runs both models with torch, transformers and megatron-core, and these cannot be imported: "
            f"{error}. Nothing was written"
        ) from None


def import_packages(modules: Sequence[str]) -> None:
    """Import them, as `compare` is going to."""
    for module in modules:
        importlib.import_module(module)


def compare(job: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `LogitsReport`."""
    checkpoint, model, family = Path(job["checkpoint"]), Path(job["model"]), family_named(job["arch"])
    index = read_index(checkpoint)
    arguments = read_plain_state(index).get("args")
    prefix = prefix_of(index.tensors) or ""
    tensors = {key.removeprefix(prefix): entry for key, entry in index.tensors.items() if not is_optimizer_key(key)}
    tensors = {key: entry for key, entry in tensors.items() if not key.startswith("mtp.")}  # no logits depend on it
    index = replace(index, tensors=tensors)
    if not isinstance(arguments, dict):
        arguments = family.arguments(json.loads((model / "config.json").read_text()))
    engine_keys = {row.megatron: row.engine for row in family.rows if row.engine}
    narrow = _narrow_dtype(index, model)
    ids, theirs = _transformers_logits(model, narrow)
    ours = _megatron_logits(index, arguments, engine_keys, ids, narrow)[..., : theirs.shape[-1]]
    if ours.shape != theirs.shape:
        raise LoadError(f"logits {list(ours.shape)} of megatron-core, {list(theirs.shape)} of transformers")
    return asdict(LogitsReport(float((ours - theirs).abs().max()), float(theirs.abs().max()), ids.shape[1]))


def _narrow_dtype(index: CheckpointIndex, model: Path) -> str | None:
    """The 16-bit floats that one of the two is stored in; a conversion may have rounded the other's to them."""
    config = json.loads((model / "config.json").read_text())
    found = {entry.dtype for key, entry in index.tensors.items() if not is_optimizer_key(key)}
    found |= {config[name] for name in ("dtype", "torch_dtype") if isinstance(config.get(name), str)}
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in found), None)


def _round(model: Any, narrow: str | None) -> None:
    """Let parameters have the values that they would have in 16 bits, so that both models have the same ones."""
    import torch

    if narrow is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, narrow)))


def _transformers_logits(directory: Path, narrow: str | None) -> tuple[Any, Any]:
    """Random tokens, `[batch, sequence]`, and what `transformers` makes of them, `[batch, sequence, vocabulary]`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    _round(model, narrow)
    length = min(_MAX_TOKENS, model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (_BATCH, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return ids, model(ids).logits.float()


def _megatron_logits(
    index: CheckpointIndex, arguments: Mapping[str, Any], engine_keys: Mapping[str, str], ids: Any, narrow: str | None
) -> Any:
    """What Megatron-Core makes of them, `[batch, sequence, padded vocabulary]`."""
    import torch

    # Nothing is compiled here, and importing the compiler takes as long as all the rest.
    torch.compile = lambda model=None, **_: (lambda function: function) if model is None else model  # type: ignore[assignment]
    with _without_gpu(), _one_process():
        rows = index.tensors[EMBEDDING].shape[0]
        model = build_gpt_model(arguments, padded_vocabulary=rows)
        _fill(model, index, engine_keys)
        _round(model.eval(), narrow)
        positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
        with torch.no_grad():
            return model(ids, positions, mask)


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """Megatron-Core says "cuda", and asks for a GPU's current device and generators of random numbers; here is none."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    CudaRNGStatesTracker.add = lambda *_, **__: None

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    with OnCpu():
        yield


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fill(model: Any, index: CheckpointIndex, engine_keys: Mapping[str, str]) -> None:
    """Fill all parameters, by Megatron's names; its load wants the stored dtypes. Raises `LoadError`."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    metadata = {
        "non_homogeneous_layers": any(layer is not None and layer.number is not None for layer in map(layer_of, keys)),
        "singleton_local_shards": any(split_half(key)[1] for key in keys)
        or any(expert is not None and expert.number is not None for expert in map(expert_of, keys)),
    }
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        state = model.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        taken = set()
        with StoredPayloads(index) as payloads:
            for shard in nested_values(state):
                if isinstance(shard, ShardedTensor):
                    taken.add(_fill_shard(shard, index, payloads, engine_keys))
    left = sorted(set(keys) - taken)
    if left:
        raise LoadError(f"{index.path}: {left[0]} (and {len(left) - 1} more) has no place in megatron-core's model")
    for name, parameter in model.named_parameters():
        if parameter.isnan().any():
            raise LoadError(f"{index.path}: {name} of megatron-core's model is stored nowhere, or holds NaN")


def _fill_shard(shard: Any, index: CheckpointIndex, payloads: StoredPayloads, engine_keys: Mapping[str, str]) -> str:
    """Fill one tensor of Megatron's from what is stored; returns the stored key."""
    import torch

    key: str = shard.key
    if key not in index.tensors:
        layer = layer_of(key)
        if layer is not None:
            number = "" if layer.number is None else f"{layer.number}."
            row = engine_keys.get(f"{layer.before}{{layer}}.{layer.rest}", key)
            key = row.replace("{layer}.", number)
    entry = index.tensors.get(key)
    if entry is None:
        raise LoadError(f"{index.path}: {shard.key} of megatron-core's model is not stored")
    sizes = ((1,) * shard.prepend_axis_num) + tuple(shard.local_shape)
    if len(sizes) != len(entry.shape):
        raise LoadError(f"{key}: megatron-core's model has {len(sizes)} axes where {len(entry.shape)} are stored")
    content = read_box(payloads, entry, shard.global_offset, sizes)
    values = torch.frombuffer(content, dtype=getattr(torch, entry.dtype)).reshape(shard.data.shape)
    shard.data.copy_(values)
    return key
