"""Which parallel layout a checkpoint was written under: what Megatron's arguments say, and what its chunks show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.format.file_names import data_file_of
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry, is_flat_bucket
from mcore_ckpt.tools.keys import is_optimizer_key, layer_number, model_key, stacked_axes

_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel groups; None where nothing tells."""

    tp: int | None
    pp: int | None
    ep: int | None
    etp: int | None = None

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("PP", self.pp), ("EP", self.ep), ("ETP", self.etp))
        return " ".join(f"{name} {size}" for name, size in sizes if size is not None) or "unknown"


def data_file_rank(file: str) -> int | None:
    """The rank that wrote a data file, from its name; None for other names."""
    found = data_file_of(file)
    return None if found is None else found.rank


def optimizer_layout(index: CheckpointIndex, common: Mapping[str, Any]) -> str | None:
    """Megatron's name of the optimizer's layout, `"unknown"` if it is none of Megatron's, None without an optimizer.

    What is stored decides: a job with a layer-wise optimizer (Muon) declares `dp_reshardable`, and stores tensors of
    the parameters' shapes. The declaration counts where keys and shapes leave it open.
    """
    keys = [fqn for fqn in (*index.tensors, *index.objects) if is_optimizer_key(fqn)]
    if not keys:
        return None
    for fqn in keys:
        if is_flat_bucket(fqn):
            return "dp_reshardable"
        if ".optimizer_state" in fqn or "dp_zero" in fqn:
            return "dp_zero_gather_scatter"
    if any(fqn in index.mcore_data and index.mcore_data[fqn] for fqn in keys):
        return "fully_sharded_model_space"
    states = [
        (entry, index.tensors.get(model_key(fqn))) for fqn, entry in index.tensors.items() if model_key(fqn) != fqn
    ]
    parameters = [(entry, parameter) for entry, parameter in states if parameter is not None]
    if parameters and all(entry.shape == parameter.shape for entry, parameter in parameters):
        return "fully_reshardable"
    content = common.get("content_metadata")
    declared = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if isinstance(declared, str):
        return declared
    return "fully_reshardable" if states else "unknown"


def layout_of_arguments(common: Mapping[str, Any]) -> ParallelLayout | None:
    """The layout that Megatron's stored arguments name; None without them."""
    arguments = common.get("args")
    if not isinstance(arguments, dict) or not isinstance(arguments.get(_ARGUMENTS["tp"]), int):
        return None
    sizes = {name: arguments.get(argument) for name, argument in _ARGUMENTS.items()}
    return ParallelLayout(**{name: size if isinstance(size, int) else None for name, size in sizes.items()})


def layout_of_chunks(index: CheckpointIndex) -> ParallelLayout:
    """The layout that the chunks of the model and the names of their files show."""
    return ParallelLayout(_tensor_parallel(index), _pipeline_parallel(index), _expert_parallel(index))


def _tensor_parallel(index: CheckpointIndex) -> int | None:
    """What most weights of attention are divided into; those are never stored in halves or by expert."""
    votes: Counter[int] = Counter()
    for fqn, entry in index.tensors.items():
        if not is_optimizer_key(fqn) and fqn.endswith(("linear_qkv.weight", "linear_proj.weight")):
            votes[max(grid_of(entry)[-2:], default=1)] += 1
    return votes.most_common(1)[0][0] if votes else None


def grid_of(entry: TensorEntry) -> tuple[int, ...]:
    """The number of chunks along each axis."""
    return tuple(len({chunk.offsets[axis] for chunk in entry.chunks}) for axis in range(len(entry.shape)))


def _pipeline_parallel(index: CheckpointIndex) -> int | None:
    """Groups of layers that share no rank. A key without a number holds all layers, stacked along its first axis."""
    ranks_of_layer: dict[int, set[int]] = {}
    for fqn, entry in index.tensors.items():
        number = layer_number(fqn)
        stacked = number is None and stacked_axes(fqn, entry.shape).layer is not None
        if is_optimizer_key(fqn) or (number is None and not stacked):
            continue
        for chunk in entry.chunks:
            rank = data_file_rank(chunk.item.file)
            if rank is not None:
                layer = chunk.offsets[0] if number is None else number
                ranks_of_layer.setdefault(layer, set()).add(rank)
    groups: list[set[int]] = []
    for ranks in ranks_of_layer.values():
        touching = [group for group in groups if group & ranks]
        groups = [group for group in groups if not group & ranks]
        groups.append(set().union(ranks, *touching))
    return len(groups) or None


def _expert_parallel(index: CheckpointIndex) -> int | None:
    """Groups of experts (the axis before the last two, or the number in the key) that share no rank."""
    counts: Counter[int] = Counter()
    for fqn, entry in index.tensors.items():
        if ".experts." not in fqn or is_optimizer_key(fqn) or len(entry.shape) < 3:
            continue
        ranks: dict[int, set[int | None]] = {}
        for chunk in entry.chunks:
            ranks.setdefault(chunk.offsets[-3], set()).add(data_file_rank(chunk.item.file))
        counts[len({frozenset(group) for group in ranks.values()})] += 1
    return counts.most_common(1)[0][0] if counts else None
