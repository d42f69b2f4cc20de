"""What a reshard is going to do, decided before a byte moves: pure, from the index of the source alone.

tensors -> partition -> target chunks -> owning rank -> files and offsets (`target.torch_dist`)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, TensorEntry, parse_object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.reshard.names import expert_of
from mcore_ckpt.reshard.partition import Partition, Partitioner, divide, divides
from mcore_ckpt.reshard.slots import TargetPlan
from mcore_ckpt.reshard.torch_dist import DividedTensor, plan_torch_dist
from mcore_ckpt.tools.keys import is_optimizer_key, layer_number, model_key, stacked_axes
from mcore_ckpt.tools.parallel_layout import data_file_rank

_FLOATING = ("float64", "float32", "float16", "bfloat16")
# A router's bias, by Megatron's name and by Hugging Face's: both keep it so whatever the model is in, as rounding it
# would let tokens go to other experts.
_ALWAYS_FLOAT32 = (".expert_bias", ".e_score_correction_bias")
_LAST_STAGE = re.compile(r"(?:^|\.)(?:output_layer|lm_head|final_layernorm|final_norm|ln_f|mtp)(?:\.|$)")
_MOST_RANKS = 1_000_000
_SHOWN_KINDS = 5


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Parallel sizes of the target; `etp` are tensor-parallel ranks of experts.

    Ranks count as Megatron's do: tensor parallel fastest, then data, then pipeline. Chunks are spread over `dp` ranks.
    """

    tp: int
    pp: int
    ep: int = 1
    etp: int | None = None
    dp: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp", "dp"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_RANKS:
                raise OptionError(f"{name}={value}: expected at least 1, and at most {_MOST_RANKS}")
        if self.dp is not None and (self.tp * self.dp) % (self.expert_tp * self.ep):
            raise OptionError(
                f"tp={self.tp} x dp={self.dp} ranks in a pipeline stage cannot be divided into etp={self.expert_tp} x "
                f"ep={self.ep}; choose dp so that tp * dp is a multiple of {self.expert_tp * self.ep}"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks of experts: those of the other layers unless said otherwise, as in Megatron."""
        return self.tp if self.etp is None else self.etp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage; without `dp`, the fewest that hold both groupings."""
        if self.dp is not None:
            return self.tp * self.dp
        return math.lcm(self.tp, self.expert_tp * self.ep)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pp

    def __str__(self) -> str:
        etp = "" if self.etp is None else f" ETP {self.etp}"
        return f"TP {self.tp} PP {self.pp} EP {self.ep}{etp} ({counted(self.ranks, 'rank')})"


@dataclass(frozen=True, slots=True)
class Decision:
    """How one tensor is divided at the target, by key at the target, and the ranks of its chunks there."""

    entry: TensorEntry
    key: str
    partition: Partition
    slices: tuple[Box, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Decisions in the order of the source, what is good to know, and the plan that follows from them."""

    layout: TargetLayout
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    target: TargetPlan

    @property
    def guesses(self) -> int:
        """How many tensors are divided by a guess."""
        return sum(decision.partition.guess for decision in self.decisions)


@dataclass(slots=True)
class _Owners:
    """Which rank owns what."""

    index: CheckpointIndex
    layout: TargetLayout
    like: CheckpointIndex | None
    layer_counts: dict[str, int] = field(default_factory=dict)
    expert_counts: dict[str, int] = field(default_factory=dict)
    loads: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fqn in self.index.tensors:
            number = layer_number(model_key(fqn))
            if number is not None:
                prefix = _layers_prefix(fqn)
                self.layer_counts[prefix] = max(self.layer_counts.get(prefix, 0), number + 1)
            expert = expert_of(fqn)
            if expert is not None and expert.number is not None:
                known = self.expert_counts.get(expert.before, 0)
                self.expert_counts[expert.before] = max(known, expert.number + 1)

    def stage(self, fqn: str, stacked_layer: int | None, stacked_layers: int) -> int:
        """The pipeline stage of a layer, or of what stands before or behind all layers."""
        key = model_key(fqn)
        if _LAST_STAGE.search(key):
            return self.layout.pp - 1
        if stacked_layer is not None:
            return stacked_layer * self.layout.pp // max(1, stacked_layers)
        number = layer_number(key)
        if number is None:
            return 0
        return number * self.layout.pp // self.layer_counts.get(_layers_prefix(fqn), number + 1)

    def of_chunks(self, entry: TensorEntry, partition: Partition, boxes: Sequence[Box]) -> list[int]:
        """The rank of each target chunk."""
        if partition.decider == "like" and partition.boxes is not None and self.like is not None:
            return self._as_in(self.like.tensors.get(entry.fqn) or self.like.tensors[model_key(entry.fqn)], boxes)
        if partition.decider == "stored":
            return self._as_in(entry, boxes)
        stacked = stacked_axes(entry.fqn, entry.shape)
        experts = None if stacked.expert is None else entry.shape[stacked.expert]
        tensor_ranks = self.layout.expert_tp if partition.expert else self.layout.tp
        along: list[int] = [] if partition.axis is None else sorted({box.offsets[partition.axis] for box in boxes})
        per_part = max(1, len(along) // partition.parts)
        position = {offset: n for n, offset in enumerate(along)}
        ranks = []
        for box in boxes:
            layer = None if stacked.layer is None else box.offsets[stacked.layer]
            stage = self.stage(entry.fqn, layer, 0 if layer is None else entry.shape[0])
            tensor_rank = 0
            if partition.axis is not None and len(along) > partition.parts:
                tensor_rank = min(position[box.offsets[partition.axis]] % per_part, tensor_ranks - 1)
            expert_rank = 0
            if stacked.expert is not None and experts:
                expert_rank = box.offsets[stacked.expert] * self.layout.ep // experts
            elif partition.expert:
                expert_rank = self._expert_of_key(entry.fqn)
            within = tensor_rank + tensor_ranks * expert_rank if partition.expert else tensor_rank
            groups = self.layout.stage_ranks // (tensor_ranks * (self.layout.ep if partition.expert else 1))
            ranks.append(self._spread(stage, within, groups, math.prod(box.sizes) * element_bytes(entry.dtype)))
        return ranks

    def _spread(self, stage: int, within: int, groups: int, nbytes: int) -> int:
        """Of the data parallel ranks that could write a chunk, the first, or with `dp` the one that has least."""
        first = stage * self.layout.stage_ranks + within
        if self.layout.dp is None or groups == 1:
            choice = first
        else:
            step = self.layout.stage_ranks // groups
            choice = min((first + step * n for n in range(groups)), key=lambda rank: (self.loads.get(rank, 0), rank))
        self.loads[choice] = self.loads.get(choice, 0) + nbytes
        return choice

    def _as_in(self, other: TensorEntry, boxes: Sequence[Box]) -> list[int]:
        ranks = {chunk.offsets: data_file_rank(chunk.item.file) or 0 for chunk in other.chunks}
        return [ranks.get(box.offsets, 0) % self.layout.ranks for box in boxes]

    def _expert_of_key(self, fqn: str) -> int:
        found = expert_of(fqn)
        if found is None or found.number is None:
            return 0
        return found.number * self.layout.ep // self.expert_counts[found.before]

    def of_object(self, entry: ObjectEntry) -> int:
        """Objects of a layer go where the layer goes; others to the rank that had them, if there still is one."""
        shard = parse_object_key(entry.fqn)
        key = entry.fqn if shard is None else shard.key
        stacked = shard is not None and ".layers." in key and layer_number(key + ".") is None and shard.shape[0] > 0
        if layer_number(key + ".") is not None or stacked or _LAST_STAGE.search(key):
            layer = shard.offset[0] if stacked and shard is not None else None
            count = shard.shape[0] if stacked and shard is not None else 1
            return self.stage(key + ".", layer, count) * self.layout.stage_ranks
        rank = data_file_rank(entry.item.file) or 0
        return rank if rank < self.layout.ranks else 0


def _layers_prefix(fqn: str) -> str:
    key = model_key(fqn)
    return key[: key.index("layers.")]


def make_plan(
    index: CheckpointIndex,
    layout: TargetLayout,
    partitioner: Partitioner,
    *,
    like: CheckpointIndex | None = None,
    keys: Iterable[str] | None = None,
    object_keys: Iterable[str] | None = None,
    workers: int = 1,
    arguments: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> ReshardPlan:
    """Plan the complete target. `like` is the checkpoint whose chunks the partitioner took over, `keys` and
    `object_keys` what is carried, `workers` the files of each rank, `rename` new keys of tensors; others stay.
    """
    if workers < 1:
        raise OptionError(f"workers={workers}: expected at least 1")
    owners = _Owners(index, layout, like)
    vocabulary = padded_vocabulary(arguments or {}, layout.tp)
    decisions = []
    for fqn in index.tensors if keys is None else keys:
        entry = index.tensors[fqn]
        partition = partitioner.decide(fqn)
        count = layout.expert_tp if partition.expert else layout.tp
        if count == 1:  # nothing is divided, so nothing depends on the axis
            partition = replace(partition, guess=False)
        slices = tuple(divide(fqn, entry.shape, partition, count, vocabulary))
        ranks = tuple(owners.of_chunks(entry, partition, slices))
        decisions.append(Decision(entry, (rename or {}).get(fqn, fqn), partition, slices, ranks))
    notes = (*_uneven_layers(owners, layout), *_undivided(decisions, layout, arguments or {}, vocabulary))
    chosen = index.objects if object_keys is None else {key: index.objects[key] for key in object_keys}
    target = plan_torch_dist(
        index,
        [DividedTensor(one.entry, one.key, one.slices, one.ranks) for one in decisions],
        [(entry, owners.of_object(entry)) for entry in chosen.values()],
        workers,
    )
    return ReshardPlan(layout, tuple(decisions), notes, target)


def _uneven_layers(owners: _Owners, layout: TargetLayout) -> Iterator[str]:
    for prefix, count in owners.layer_counts.items():
        if count % layout.pp:
            yield (
                f"{count} layers of {prefix}layers do not divide into {layout.pp} stages evenly; files may not match "
                "the ranks"
            )


def _undivided(
    decisions: Iterable[Decision], layout: TargetLayout, arguments: Mapping[str, Any], vocabulary: int | None
) -> Iterator[str]:
    """What the target's tensor-parallel ranks do not divide evenly."""
    heads = arguments.get("num_attention_heads")
    if isinstance(heads, int) and heads % layout.tp:
        yield f"{heads} attention heads do not divide among TP {layout.tp}: no job of Megatron-Core has this layout"
    kinds: dict[str, int] = {}
    for one in decisions:
        partition, entry = one.partition, one.entry
        count = layout.expert_tp if partition.expert else layout.tp
        if partition.axis is not None and not divides(entry.fqn, entry.shape, partition, count, vocabulary):
            kinds[".".join(model_key(entry.fqn).split(".")[-2:])] = entry.shape[partition.axis]
    if kinds:
        shown = ", ".join(f"{kind} (axis of {size})" for kind, size in [*kinds.items()][:_SHOWN_KINDS])
        more = f" and {len(kinds) - _SHOWN_KINDS} more" if len(kinds) > _SHOWN_KINDS else ""
        yield f"in one piece, since tensor-parallel ranks do not divide them: {shown}{more}"


def target_dtype(entry: TensorEntry, wanted: str | None) -> str:
    """A tensor's dtype at the target: `wanted` for floating-point tensors of the model; the optimizer's stay."""
    converted = wanted and entry.dtype in _FLOATING and not is_optimizer_key(entry.fqn)
    if entry.dtype == "float32" and entry.fqn.endswith(_ALWAYS_FLOAT32):
        return entry.dtype
    return wanted if wanted and converted else entry.dtype


def token_count(arguments: Mapping[str, Any]) -> int | None:
    """How many tokens a job's vocabulary has; None if its arguments do not tell.

    A `NullTokenizer` of most versions of Megatron-Core has one more than it was given, the end of document.
    """
    size = arguments.get("vocab_size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return None
    padded = arguments.get("padded_vocab_size")
    has_more = arguments.get("tokenizer_type") == "NullTokenizer" and not (isinstance(padded, int) and padded <= size)
    return size + has_more


def padded_vocabulary(arguments: Mapping[str, Any], tp: int) -> int | None:
    """Rows of the embedding at `tp` ranks, as Megatron pads them; None if the arguments do not tell."""
    size, multiple = token_count(arguments), arguments.get("make_vocab_size_divisible_by")
    if size is None or isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        return None
    unit = multiple * tp
    return -(-size // unit) * unit
