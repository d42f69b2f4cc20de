"""Along which axis a tensor is divided among ranks: the decision for each tensor of a checkpoint, and who says so.

In this order: a checkpoint that has the layout already (`like`), a rules file, the chunks that the source itself has,
and a table of Megatron-Core's layers. A tensor that none of these knows is not divided. Optimizer state follows its
parameter. Pure: keys, shapes and chunks only.

Megatron-Core stacks: with homogeneous layers the leading axis counts layers (`decoder.layers.mlp...`), with experts the
next one counts experts (`...experts.experts...`). Such axes are stored one index a chunk, and say which pipeline stage
or expert rank a chunk belongs to; the tensor-parallel axis is one of the parameter's own, behind them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.reshard.names import is_expert_key
from mcore_ckpt.reshard.rules import PartitionRule
from mcore_ckpt.tools.keys import model_key, stacked_axes

Decider = Literal["like", "rules", "grid", "table", "whole", "stored"]


@dataclass(frozen=True, slots=True)
class Partition:
    """How one tensor is divided."""

    axis: int | None  # the tensor-parallel axis (counted in the global shape); None: every rank has the complete tensor
    # Equal parts along the axis, each divided by itself: 2 for the two halves of a gated MLP's first layer.
    parts: int = 1
    expert: bool = False  # divided among expert-tensor-parallel ranks rather than tensor-parallel ones
    decider: Decider = "whole"
    guess: bool = False  # the decision comes from a name or a shape alone
    note: str = ""
    # The chunks themselves, where they are taken over from another checkpoint or the source as they are.
    boxes: tuple[Box, ...] | None = None


_FLAT_BUCKETS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")


# What Megatron-Core divides, by the end of the key. Axes are those of the parameter itself.
_COLUMN = (  # the output of the layer: rows of the weight, and the bias
    r"linear_(?:qkv|qgkv|q|kv|k|v|fc1|q_proj|q_up_proj|kv_up_proj|k_up_proj|v_up_proj)\.(?:weight|bias)(?:_w|_v)?\d*",
    r"(?:word_embeddings|output_layer|lm_head)\.(?:weight|bias)",
    r"eh_proj\.(?:weight|bias)",
    r"mixer\.in_proj\.(?:weight|bias)(?:\.\w+)?",
    r"mixer\.conv1d\.(?:weight|bias)(?:\.\w+)?",
    r"mixer\.(?:A_log|dt_bias|D|norm\.weight)",
    r"self_attention\.(?:in_proj|conv1d)\.(?:weight|bias)(?:\.\w+)?",
    r"self_attention\.(?:A_log|dt_bias)",
    r"core_attention\.softmax_offset",
)
_ROW = (r"(?:linear_proj|linear_fc2|out_proj)\.weight\d*",)  # the input of the layer: columns of the weight
_WHOLE = (
    r"(?:linear_proj|linear_fc2|out_proj)\.bias\d*",
    r".*norm(?:\.|_)(?:weight|bias)",
    r"(?:position_embeddings|tokentype_embeddings)\.weight",
    r"router\.(?:weight|bias|expert_bias)",
    r"(?:gate_weight|expert_bias)",
    r"linear_(?:q_down_proj|kv_down_proj)\.(?:weight|bias)",
)
_TABLE: tuple[tuple[re.Pattern[str], int | None], ...] = (
    # Columns first: Mamba divides its own norm, unlike all others.
    (re.compile(rf"(?:^|\.)(?:{'|'.join(_COLUMN)})$"), 0),
    (re.compile(rf"(?:^|\.)(?:{'|'.join(_WHOLE)})$"), None),
    (re.compile(rf"(?:^|\.)(?:{'|'.join(_ROW)})$"), 1),
)
_GATED = re.compile(r"(?:^|\.)linear_fc1\.(?:weight|bias)\d*$")
_VOCABULARY = re.compile(r"(?:^|\.)(?:word_embeddings|output_layer)\.(?:weight|bias)$")


class Partitioner:
    """Decides for each tensor of one checkpoint, with Megatron's stored `arguments`; the first of `rules` that matches
    wins.

    `like` is the index of a checkpoint that has the requested layout, or shows the axes; `exact_like`: take its chunks
    over as they are. `chunks_tell`: whether the chunks of the source are those of ranks; of a view they are not.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        *,
        like: CheckpointIndex | None = None,
        rules: Iterable[PartitionRule] = (),
        arguments: Mapping[str, Any] | None = None,
        exact_like: bool = False,
        chunks_tell: bool = True,
    ) -> None:
        self._index = index
        self._like = like
        self._rules = tuple(rules)
        self._arguments = arguments or {}
        self._exact_like = exact_like
        self._chunks_tell = chunks_tell
        self._source_sizes = {expert: _group_size(index, expert) for expert in (False, True)}
        self._like_sizes = {expert: _group_size(like, expert) if like else None for expert in (False, True)}
        self._decided: dict[str, Partition] = {}

    def decide(self, fqn: str) -> Partition:
        """The partition of a tensor of the source."""
        known = self._decided.get(fqn)
        if known is None:
            known = self._decided[fqn] = self._decide(fqn)
        return known

    def _decide(self, fqn: str) -> Partition:
        entry = self._index.tensors[fqn]
        if self._index.mcore_data.get(fqn) or _FLAT_BUCKETS.match(fqn):
            boxes = tuple(Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks)
            return Partition(None, decider="stored", note="flattened shards keep their chunks", boxes=boxes)
        key = model_key(fqn)
        expert = is_expert_key(key)
        if self._like is not None:
            found = self._from_like(entry, expert)
            if found is not None:
                return found
        for rule in self._rules:
            if rule.pattern.search(fqn):
                return self._from_rule(entry, rule, expert)
        parameter = self._index.tensors.get(key)
        if key != fqn and parameter is not None and parameter.shape == entry.shape:
            return self.decide(key)
        found = self._from_grid(entry, self._source_sizes[expert], expert, "grid") if self._chunks_tell else None
        return found if found is not None else self._from_table(entry, expert)

    def _from_like(self, entry: TensorEntry, expert: bool) -> Partition | None:
        assert self._like is not None
        other = self._like.tensors.get(entry.fqn) or self._like.tensors.get(model_key(entry.fqn))
        if other is None:
            return None
        if self._exact_like and other.shape == entry.shape:
            boxes = tuple(Box(chunk.offsets, chunk.sizes) for chunk in other.chunks)
            return Partition(None, expert=expert, decider="like", boxes=boxes)
        if len(other.shape) != len(entry.shape):
            return None
        return self._from_grid(other, self._like_sizes[expert], expert, "like")

    def _from_rule(self, entry: TensorEntry, rule: PartitionRule, expert: bool) -> Partition:
        rank = len(entry.shape)
        if rule.axis is None:
            return Partition(None, expert=expert, decider="rules")
        axis = rule.axis + rank if rule.axis < 0 else rule.axis
        if not 0 <= axis < rank:
            raise OptionError(
                f"{entry.fqn}: the rule {rule.pattern.pattern!r} names axis {rule.axis}, but the tensor has {rank} axes"
            )
        return Partition(axis, rule.parts, expert, "rules")

    def _from_grid(
        self, entry: TensorEntry, group_size: int | None, expert: bool, decider: Decider
    ) -> Partition | None:
        """What the chunks show: an axis, or, where the others of its kind are divided, that this one is not."""
        stacked = stacked_axes(entry.fqn, entry.shape)
        divisions = _divisions(entry, stacked.own)
        divided = [axis for axis, count in divisions.items() if count > 1]
        if not divided:
            if group_size is not None and group_size > 1:
                return Partition(None, expert=expert, decider=decider)
            return None
        axis = max(divided, key=lambda axis: divisions[axis])
        parts, sure = 1, len(divided) == 1
        undivided_halves = divisions[axis] == 2 and group_size in (None, 1) and _GATED.search(model_key(entry.fqn))
        if undivided_halves or self._is_gated(entry, axis):
            parts = 2
        note = "" if sure else f"divided along axes {divided}; the most divided one is taken"
        return Partition(axis, parts, expert, decider, not sure, note)

    def _from_table(self, entry: TensorEntry, expert: bool) -> Partition:
        key = model_key(entry.fqn)
        stacked = stacked_axes(entry.fqn, entry.shape)
        for pattern, own_axis in _TABLE:
            if not pattern.search(key):
                continue
            if own_axis is None:
                return Partition(None, expert=expert, decider="table", guess=True)
            axis = stacked.own + own_axis
            if axis >= len(entry.shape):
                break
            parts = 2 if self._is_gated(entry, axis) else 1
            unsure = bool(_GATED.search(key)) and self._gated_size(entry) is None and "swiglu" not in self._arguments
            note = "whether it is stored in two halves is not known" if unsure else ""
            return Partition(axis, parts, expert, "table", True, note)
        return Partition(None, expert=expert, decider="whole", guess=True, note="nothing tells how it is divided")

    def _gated_size(self, entry: TensorEntry) -> int | None:
        """What the second layer of the MLP takes in: half of what a gated first layer puts out."""
        key = model_key(entry.fqn)
        second = self._index.tensors.get(re.sub(r"linear_fc1\.(?:weight|bias)", "linear_fc2.weight", key))
        return second.shape[-1] if second is not None and second.shape else None

    def _is_gated(self, entry: TensorEntry, axis: int) -> bool:
        if not _GATED.search(model_key(entry.fqn)) or entry.shape[axis] % 2:
            return False
        size = self._gated_size(entry)
        if size is not None:
            return entry.shape[axis] == 2 * size
        return bool(self._arguments.get("swiglu") or self._arguments.get("gated_linear_unit"))


def _divisions(entry: TensorEntry, stacked_count: int) -> dict[int, int]:
    """For each axis of the parameter itself, at how many offsets chunks start."""
    return {
        axis: len({chunk.offsets[axis] for chunk in entry.chunks}) for axis in range(stacked_count, len(entry.shape))
    }


def _group_size(index: CheckpointIndex, expert: bool) -> int | None:
    """Into how many the source divides weights of that kind; None if it has none. Gated first layers count twice."""
    votes: Counter[int] = Counter()
    for fqn, entry in index.tensors.items():
        if is_expert_key(fqn) == expert and fqn.endswith(
            ("linear_qkv.weight", "linear_proj.weight", "linear_fc2.weight")
        ):
            votes[max(_divisions(entry, stacked_axes(fqn, entry.shape).own).values(), default=1)] += 1
    return votes.most_common(1)[0][0] if votes else None


def divides(fqn: str, shape: Sequence[int], partition: Partition, count: int, vocabulary: int | None = None) -> bool:
    """Whether `divide` divides a tensor among `count` ranks as its partition says, if that is to be divided at all."""
    if partition.boxes is not None or partition.axis is None:
        return True
    padded = vocabulary if vocabulary and _VOCABULARY.search(model_key(fqn)) else None
    return _is_even(shape[partition.axis], partition.parts, count, padded)


def divide(
    fqn: str, shape: Sequence[int], partition: Partition, count: int, vocabulary: int | None = None
) -> list[Box]:
    """The chunks of a tensor for `count` ranks, in the order of their offsets; together they tile it.

    An axis that does not divide is not divided. `vocabulary` is the number of rows that embedding and output layer have
    at the target, padding included: each rank's rows are one chunk although the stored tensor is shorter or longer.
    """
    if partition.boxes is not None:
        return sorted(partition.boxes)
    if 0 in shape:
        return [Box((0,) * len(shape), tuple(shape))]
    stacked = stacked_axes(fqn, shape)
    intervals: list[list[tuple[int, int]]] = []
    for axis, size in enumerate(shape):
        if axis < stacked.own:
            intervals.append([(index, 1) for index in range(size)])
        elif axis == partition.axis:
            padded = vocabulary if vocabulary and _VOCABULARY.search(model_key(fqn)) else None
            intervals.append(_cut(size, partition.parts, count, padded))
        else:
            intervals.append([(0, size)])
    boxes = [Box((), ())]
    for choices in intervals:
        boxes = [Box((*box.offsets, start), (*box.sizes, size)) for box in boxes for start, size in choices]
    return boxes


def _is_even(size: int, parts: int, count: int, padded: int | None) -> bool:
    return (padded is not None and padded % count == 0) or size % (parts * count) == 0


def _cut(size: int, parts: int, count: int, padded: int | None) -> list[tuple[int, int]]:
    if padded is not None and padded % count == 0:
        step = padded // count
        return [(start, min(step, size - start)) for start in range(0, size, step)]
    if not _is_even(size, parts, count, padded):
        # Parts that do not divide stay as they are, but never cross the boundary between two halves.
        count = 1
        if size % parts:
            return [(0, size)]
    slices = [there for rank in range(count) for _, there in shard_slices((size,), 0, parts, count, rank)]
    return sorted((part.offsets[0], part.sizes[0]) for part in slices)


def shard_slices(shape: Sequence[int], axis: int | None, parts: int, count: int, rank: int) -> list[tuple[Box, Box]]:
    """What one rank has of a tensor that is divided: slices of the rank's shard, and of the tensor that they are.

    `axis` is cut into equal `parts`, and each part among `count` ranks. None: each rank has everything.
    """
    if axis is None:
        everything = Box((0,) * len(shape), tuple(shape))
        return [(everything, everything)]
    step = shape[axis] // (parts * count)
    found = []
    for part in range(parts):
        sizes, own, there = list(shape), [0] * len(shape), [0] * len(shape)
        sizes[axis], own[axis], there[axis] = step, part * step, (part * count + rank) * step
        found.append((Box(tuple(own), tuple(sizes)), Box(tuple(there), tuple(sizes))))
    return found
