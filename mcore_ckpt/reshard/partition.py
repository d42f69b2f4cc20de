"""Along which axis a tensor is divided among ranks: the decision for each tensor of a checkpoint, and who says so.

In this order: a rules file, the chunks that the source itself has, and a table of Megatron-Core's layers. A tensor that
none of these knows is not divided. Optimizer state follows its parameter. Pure: keys, shapes and chunks only.

Megatron-Core stacks: with homogeneous layers the leading axis counts layers (`decoder.layers.mlp...`), with experts the
next one counts experts (`...experts.experts...`). Such axes are stored one index a chunk, and say which pipeline stage
or expert rank a chunk belongs to; the tensor-parallel axis is one of the parameter's own, behind them.

What a parameter's name says about layers and experts:

    decoder.layers.3.mlp.linear_fc1.weight                    a layer by number: a module's name, or a sharded key
    decoder.layers.mlp.linear_fc1.weight                      a sharded key of all layers, stacked on the first axis
    ...mlp.experts.local_experts.5.linear_fc1.weight          an expert in a module of its own
    ...mlp.experts.linear_fc1.weight5                         an expert in a grouped layer
    ...mlp.experts.experts.5.linear_fc1.weight                an expert in a sharded key
    ...mlp.experts.experts.linear_fc1.weight                  all experts, stacked on the next axis
    ...mlp.linear_fc1.weight_w                                the first half of a gated layer; `weight_v` is the second

Names of modules become sharded keys as `sharded_state_dict` of Megatron-Core makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry, object_key
from mcore_ckpt.reshard.options import PartitionRule
from mcore_ckpt.tools.keys import grid_of, model_key, stacked_axes, tensor_parallel

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT: Final = "output_layer.weight"
EXTRA_STATE: Final = "_extra_state"
"""Last part of the key of an object that a layer keeps for itself."""

_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d{1,9})\.(?P<rest>.+)")
_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?!\d)(?P<rest>.+)")
_EXPERT = re.compile(
    r"(?P<before>(?:.*\.)?mlp\.experts)\.(?:"
    r"local_experts\.(?P<local>\d{1,6})\.(?P<local_rest>.+)"
    r"|experts\.(?:(?P<sharded>\d{1,6})\.)?(?P<sharded_rest>.+)"
    r"|(?P<grouped_rest>linear_fc[12]\.(?:weight|bias))(?P<grouped>\d{1,6}))"
)
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias)\d*)_([wv])")
# Mamba and linear attention: `torch_dist` has what is in these in several tensors (`in_proj.weight.z`, `.x`, ...).
_SEVERAL = re.compile(r"(?:^|\.)(?:mixer|self_attention\.(?:in_proj|conv1d))\.")

# Norms of the local layers get the names that Transformer Engine's have, which the layer behind holds.
_LOCAL_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


class NumberedName(NamedTuple):
    """A name in a layer or an expert: what stands before its number (None: all of them, stacked), and behind it."""

    before: str
    number: int | None
    rest: str


def layer_of(name: str) -> NumberedName | None:
    """The layer in a name; None outside of layers."""
    if found := _LAYER.fullmatch(name):
        return NumberedName(found["before"], int(found["number"]), found["rest"])
    if found := _STACKED.fullmatch(name):
        return NumberedName(found["before"], None, found["rest"])
    return None


def expert_of(name: str) -> NumberedName | None:
    """The expert in a name, in any of the four forms; None for everything else."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    form = next(form for form in ("local", "grouped", "sharded") if found[f"{form}_rest"] is not None)
    number = found[form]
    return NumberedName(found["before"], None if number is None else int(number), found[f"{form}_rest"])


def is_expert_key(key: str) -> bool:
    """Whether a key belongs to experts that are divided among ranks (not to shared ones)."""
    return ".experts." in key


def split_half(name: str) -> tuple[str, str]:
    """A name without the mark of a half of a gated layer, and that mark: `w`, `v`, or nothing."""
    found = _HALF.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def prefix_of(keys: Iterable[str]) -> str | None:
    """The prefix that wrappers of the model put before all its keys (`module.` of NeMo); None: no embedding."""
    return min((key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING)), key=len, default=None)


def pattern_of(name: str) -> str:
    """A name with `*` for the numbers of layers and experts, for showing."""
    name = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", name)
    return re.sub(r"(\.experts\.linear_fc[12]\.[a-z]+)\d+$", r"\1*", name)


def local_norms(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    """Whether modules are Megatron's own ("local") layers, whose norms get other names in sharded keys."""
    if arguments.get("multi_latent_attention"):
        return False
    if arguments.get("transformer_impl") is not None:
        return bool(arguments["transformer_impl"] == "local")
    return not any("linear_qkv.layer_norm_weight" in name for name in names)


class ShardedName(NamedTuple):
    """A sharded key; where it is along its axes that count layers and experts, and the sizes of those axes."""

    key: str
    offsets: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stacking:
    """How modules' names and sharded keys of a model belong together. `stacked`: one tensor has a parameter of all
    layers; `local_norms`: modules are Megatron's own layers.
    """

    layers: int
    experts: int
    stacked: bool
    local_norms: bool

    def sharded(self, name: str, first_layer: int = 0, first_expert: int = 0) -> ShardedName:
        """The sharded key of a module's parameter, whose numbers count from the first ones. Raises `OptionError`."""
        layer = layer_of(name)
        if layer is None:
            if "experts." in name:
                raise _unknown(name, "experts outside of layers")
            return ShardedName(name, (), ())
        if layer.before != "decoder.layers." or layer.number is None:
            raise _unknown(name, "layers other than those of a decoder (`decoder.layers.N`)")
        number, rest = first_layer + layer.number, layer.rest
        if _SEVERAL.search(rest):
            raise _unknown(name, "layers of Mamba and of linear attention")
        for local, fused in _LOCAL_NORMS if self.local_norms else ():
            if rest.startswith(local):
                rest = fused + rest.removeprefix(local)
        index, counts = ((number,), (self.layers,)) if self.stacked else ((), ())
        expert = expert_of(rest)
        if expert is not None and expert.number is not None:
            index, counts = (*index, first_expert + expert.number), (*counts, self.experts)
            rest = f"{expert.before}.experts.{expert.rest}"
        elif is_expert_key(f".{rest}"):
            raise _unknown(
                name,
                "experts in this form (expected `mlp.experts.local_experts.N`, or `mlp.experts.linear_fc1.weightN` of "
                "a grouped layer)",
            )
        return ShardedName(
            f"decoder.layers.{rest}" if self.stacked else f"decoder.layers.{number}.{rest}", index, counts
        )


def extra_states(parameters: Iterable[ShardedName], *, engine: bool = False) -> dict[str, list[None]]:
    """The `_extra_state` objects, empty without FP8, that Megatron's layers ask for, by full key. `engine`: Transformer
    Engine's layers, where norms and the core of attention have some, too.
    """
    found, nothing = dict[str, list[None]](), [None]
    for key, offsets, counts in parameters:
        owner, _, leaf = key.rpartition(".")
        name = owner.rpartition(".")[2]
        if leaf == "weight" and (name.startswith(("linear_", "eh_proj")) or (engine and name.endswith("norm"))):
            found[object_key(f"{owner}.{EXTRA_STATE}", offsets or (0,), counts or (1,))] = nothing
        if engine and key.endswith(".self_attention.linear_proj.weight"):
            core = owner.removesuffix("linear_proj") + "core_attention"
            found[object_key(f"{core}.{EXTRA_STATE}", offsets or (0,), counts or (1,))] = nothing
    return found


def _unknown(name: str, what: str) -> OptionError:
    return OptionError(
        f"{name}: {what} are not put together here. Load the checkpoint once with Megatron, and save it as torch_dist"
    )


Decider = Literal["rules", "grid", "table", "whole", "stored"]


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
    # The chunks themselves, where they stay as they are in the source.
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
    """Decides for each tensor; the first of `rules` that matches wins. `chunks_tell`: they are those of ranks."""

    def __init__(
        self,
        index: CheckpointIndex,
        *,
        rules: Iterable[PartitionRule] = (),
        arguments: Mapping[str, Any] | None = None,
        chunks_tell: bool = True,
    ) -> None:
        self._index = index
        self._rules = tuple(rules)
        self._arguments = arguments or {}
        self._chunks_tell = chunks_tell
        self._group_sizes = {expert: tensor_parallel(index, of_experts=expert) for expert in (False, True)}
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
        for rule in self._rules:
            if rule.pattern.search(fqn):
                return self._from_rule(entry, rule, expert)
        parameter = self._index.tensors.get(key)
        if key != fqn and parameter is not None and parameter.shape == entry.shape:
            return self.decide(key)
        found = self._from_grid(entry, expert) if self._chunks_tell else None
        return found if found is not None else self._from_table(entry, expert)

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

    def _from_grid(self, entry: TensorEntry, expert: bool) -> Partition | None:
        """Decide by the chunks: an axis, or none where the others of its kind are divided and this one is not."""
        group_size = self._group_sizes[expert]
        stacked = stacked_axes(entry.fqn, entry.shape)
        divisions = grid_of(entry)
        divided = [axis for axis, count in enumerate(divisions) if count > 1 and axis >= stacked.own]
        if not divided:
            if group_size is not None and group_size > 1:
                return Partition(None, expert=expert, decider="grid")
            return None
        axis = max(divided, key=lambda axis: divisions[axis])
        parts, sure = 1, len(divided) == 1
        undivided_halves = divisions[axis] == 2 and group_size in (None, 1) and _GATED.search(model_key(entry.fqn))
        if undivided_halves or self._is_gated(entry, axis):
            parts = 2
        note = "" if sure else f"divided along axes {divided}; the most divided one is taken"
        return Partition(axis, parts, expert, "grid", not sure, note)

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
        """Input size of the second layer of the MLP: half of the output size of a gated first layer."""
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


def divides(fqn: str, shape: Sequence[int], partition: Partition, count: int, vocabulary: int | None = None) -> bool:
    """Whether `divide` divides a tensor among `count` ranks as its partition says, if that is to be divided at all."""
    if partition.boxes is not None or partition.axis is None:
        return True
    padded = vocabulary if vocabulary and _VOCABULARY.search(model_key(fqn)) else None
    return _is_even(shape[partition.axis], partition.parts, count, padded)


def divide(
    fqn: str, shape: Sequence[int], partition: Partition, count: int, vocabulary: int | None = None
) -> list[Box]:
    """The chunks of a tensor for `count` ranks, in order, which tile it; an axis that does not divide is not divided.
    `vocabulary`: the padded rows of the target's embedding, where each rank's rows are one chunk.
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
    """Slices of one rank's shard, each with the slice of the tensor that it is: `axis` (None: all) in equal `parts`,
    each of them divided among `count` ranks.
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
