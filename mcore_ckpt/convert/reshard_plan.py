"""What a reshard is going to do, decided before a byte moves: pure, from the index of the source alone.

    tensors -> partition -> target chunks -> owning rank -> worker and file -> offset in the file

Every rank has one data file for each worker, `__{rank}_{worker}.distcp`. A worker writes its files front to back, so
items lie in them in the order in which the worker comes by them, which is the order of the source's files.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_ckpt.convert._partition import Partition, Partitioner, divide
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry, parse_object_key
from mcore_ckpt.format.item_layout import TensorTemplate, element_bytes, place, tensor_template
from mcore_ckpt.format.seal import FileSealPlan
from mcore_ckpt.layout.buckets import TensorSpec, seal_plan
from mcore_ckpt.storage.base import align_up
from mcore_ckpt.tools.keys import is_optimizer_key, layer_number, model_key, stacked_axes
from mcore_ckpt.tools.parallel_layout import data_file_rank
from mcore_ckpt.tools.tilings import Block, blocks

__all__ = [
    "ObjectMove",
    "ReshardPlan",
    "TargetLayout",
    "TensorMove",
    "make_plan",
    "padded_vocabulary",
    "target_dtype",
    "token_count",
]

_FLOATING = ("float64", "float32", "float16", "bfloat16")
# A router's bias, by Megatron's name and by Hugging Face's: both keep it so whatever the model is in, as rounding it
# would let tokens go to other experts.
_ALWAYS_FLOAT32 = (".expert_bias", ".e_score_correction_bias")
_LAST_STAGE = re.compile(r"(?:^|\.)(?:output_layer|lm_head|final_layernorm|final_norm|ln_f|mtp)(?:\.|$)")
_NUMBERED_EXPERT = re.compile(r"\.experts\.(?:local_experts\.)?(\d{1,9})\.")
_MOST_RANKS = 1_000_000
# The objects of a bucket come first; a little room behind them keeps tensors on pages of their own.
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Parallel sizes of the target. Ranks count as Megatron's do: tensor parallel fastest, then data, then pipeline.

    Attributes:
        etp: tensor parallel ranks of experts.
        dp: data parallel ranks; chunks are spread over them if `spread`, as a fully parallel save does.
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
        return f"TP {self.tp} PP {self.pp} EP {self.ep}{etp} ({self.ranks} ranks)"


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor on its way.

    Attributes:
        entry: in the source.
        partition: how it is divided at the target, and who says so.
        dtype: at the target.
        boxes, ranks, files, offsets: of the target's chunks: what each holds, whose it is, where its item starts.
        blocks: positions of source and target chunks that belong together.
        target_fqn: its key at the target.
    """

    entry: TensorEntry
    partition: Partition
    dtype: str
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    offsets: tuple[int, ...]
    blocks: tuple[Block, ...]
    target_fqn: str

    @property
    def source_boxes(self) -> list[Box]:
        """The source's chunks, in the order of its index."""
        return [Box(chunk.offsets, chunk.sizes) for chunk in self.entry.chunks]

    def template(self, target: int) -> TensorTemplate:
        """Head and tail of a target chunk."""
        return tensor_template(self.dtype, self.boxes[target].sizes)

    @property
    def payload_bytes(self) -> int:
        """At the target."""
        return math.prod(self.entry.shape) * element_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class ObjectMove:
    """One object, whose item moves as it is."""

    entry: ObjectEntry
    rank: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Attributes: `work[w]` is what worker `w` does, in order; `sizes` and `seals` the length and end of each file."""

    layout: TargetLayout
    objects: tuple[tuple[ObjectMove, ...], ...]
    work: tuple[tuple[TensorMove, ...], ...]
    sizes: dict[str, int]
    seals: dict[str, FileSealPlan]
    index: CheckpointIndex
    notes: tuple[str, ...] = ()

    @property
    def moves(self) -> list[TensorMove]:
        """All tensors, in the order of the source."""
        order = {fqn: n for n, fqn in enumerate(self.index.tensors)}
        return sorted((move for moves in self.work for move in moves), key=lambda move: order[move.target_fqn])


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
            if expert := _NUMBERED_EXPERT.search(fqn):
                prefix = fqn[: expert.start()]
                self.expert_counts[prefix] = max(self.expert_counts.get(prefix, 0), int(expert.group(1)) + 1)

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

    def of_chunks(self, entry: TensorEntry, partition: Partition, boxes: Sequence[Box], dtype: str) -> list[int]:
        """The rank of each target chunk."""
        if partition.source == "like" and partition.boxes is not None and self.like is not None:
            return self._as_in(self.like.tensors.get(entry.fqn) or self.like.tensors[model_key(entry.fqn)], boxes)
        if partition.source == "stored":
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
            ranks.append(self._spread(stage, within, groups, math.prod(box.sizes) * element_bytes(dtype)))
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
        found = _NUMBERED_EXPERT.search(fqn)
        if found is None:
            return 0
        return int(found.group(1)) * self.layout.ep // self.expert_counts[fqn[: found.start()]]

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
    dtype: str | None = None,
    workers: int = 1,
    arguments: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> ReshardPlan:
    """Plan the whole target.

    Args:
        index: of the source.
        layout: of the target.
        partitioner: decides each tensor's axis.
        like: checkpoint whose chunks and owners the partitioner took over.
        keys, object_keys: what is carried; by default everything.
        dtype: floating-point tensors of the model are converted to it; the optimizer's stay as they are.
        workers: files for each rank, written in parallel.
        arguments: Megatron's, for the padded vocabulary.
        rename: new keys of tensors; those that are not in it stay.
    """
    if workers < 1:
        raise OptionError(f"workers={workers}: expected at least 1")
    owners = _Owners(index, layout, like)
    tensors = list(index.tensors if keys is None else keys)
    vocabulary = padded_vocabulary(arguments or {}, layout.tp)
    drafts = []
    for fqn in tensors:
        entry = index.tensors[fqn]
        partition = partitioner.decide(fqn)
        count = layout.expert_tp if partition.expert else layout.tp
        if count == 1:  # nothing is divided, so nothing hangs on the axis
            partition = replace(partition, guess=False)
        boxes = divide(fqn, entry.shape, partition, count, vocabulary)
        out = target_dtype(entry, dtype)
        drafts.append((entry, partition, out, boxes, owners.of_chunks(entry, partition, boxes, out)))
    shares = _share_out([draft[0] for draft in drafts], workers)

    sizes: dict[str, int] = {}
    objects: list[list[ObjectMove]] = [[] for _ in range(workers)]
    chosen = index.objects if object_keys is None else {key: index.objects[key] for key in object_keys}
    for obj in chosen.values():
        rank = owners.of_object(obj)
        file = f"__{rank}_0.distcp"
        offset = align_up(sizes.get(file, 0), 64)
        objects[0].append(ObjectMove(obj, rank, file, offset))
        sizes[file] = offset + obj.item.length
    sizes = {file: align_up(size, _PAGE_BYTES) for file, size in sizes.items()}

    work: list[list[TensorMove]] = [[] for _ in range(workers)]
    for worker, share in enumerate(shares):
        for position in share:
            name = (rename or {}).get(tensors[position], tensors[position])
            work[worker].append(_lay_out(*drafts[position], worker, sizes, name))
    moves = {move.entry.fqn: move for moves in work for move in moves}
    target = CheckpointIndex(
        path=index.path,
        tensors={moves[fqn].target_fqn: _target_entry(moves[fqn]) for fqn in tensors},
        objects={
            move.entry.fqn: ObjectEntry(
                move.entry.fqn,
                StoredItem(move.file, move.offset, move.entry.item.length, move.entry.item.transforms),
            )
            for move in objects[0]
        },
        planner_data=index.planner_data,
        mcore_data={moves[fqn].target_fqn: data for fqn, data in index.mcore_data.items() if fqn in moves},
        storage_meta=index.storage_meta,
        version=index.version,
    )
    notes = [
        f"{count} layers of {prefix}layers do not divide into {layout.pp} stages evenly; files may not match the ranks"
        for prefix, count in owners.layer_counts.items()
        if count % layout.pp
    ]
    seals = _seals(target, sizes)
    sizes = {file: size + seals[file].size_bytes for file, size in sizes.items()}
    return ReshardPlan(layout, tuple(map(tuple, objects)), tuple(map(tuple, work)), sizes, seals, target, tuple(notes))


def _seals(target: CheckpointIndex, files: Iterable[str]) -> dict[str, FileSealPlan]:
    """The seal of each target file."""
    tensors: dict[str, list[tuple[int, int, TensorSpec]]] = {file: [] for file in files}
    objects: dict[str, list[tuple[int, str]]] = {file: [] for file in tensors}
    for fqn, entry in target.tensors.items():
        for offsets, sizes, item in entry.chunks:
            nbytes = math.prod(sizes) * element_bytes(entry.dtype)
            spec = TensorSpec(fqn, entry.dtype, entry.shape, offsets, sizes, nbytes)
            tensors[item.file].append((item.offset, item.length, spec))
    for fqn, stored in target.objects.items():
        objects[stored.item.file].append((stored.item.offset, fqn))
    seals = {}
    for file, rows in tensors.items():
        rows.sort(key=operator.itemgetter(0))
        starts, lengths = [row[0] for row in rows], [row[1] for row in rows]
        keys = [fqn for _, fqn in sorted(objects[file])]
        seals[file] = seal_plan([row[2] for row in rows], starts, lengths, keys)
    return seals


def target_dtype(entry: TensorEntry, wanted: str | None) -> str:
    """A tensor's dtype at the target: `wanted` for floating-point tensors of the model; the optimizer's stay."""
    converted = wanted and entry.dtype in _FLOATING and not is_optimizer_key(entry.fqn)
    if entry.dtype == "float32" and entry.fqn.endswith(_ALWAYS_FLOAT32):
        return entry.dtype
    return wanted if wanted and converted else entry.dtype


def token_count(arguments: Mapping[str, Any]) -> int | None:
    """How many tokens a launch's vocabulary has; None if its arguments do not tell.

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


def _share_out(entries: Sequence[TensorEntry], workers: int) -> list[list[int]]:
    """Positions of tensors for each worker: about the same bytes, and in each the order of the source's files."""

    def size(entry: TensorEntry) -> int:
        return math.prod(entry.shape) * element_bytes(entry.dtype)

    loads = [0] * workers
    shares: list[list[int]] = [[] for _ in range(workers)]
    for position in sorted(range(len(entries)), key=lambda n: -size(entries[n])):
        worker = min(range(workers), key=lambda w: loads[w])
        shares[worker].append(position)
        # A tensor costs something even if it is small: many small ones are not to end up with one worker.
        loads[worker] += size(entries[position]) + 64 * 1024

    def place_in_source(position: int) -> tuple[str, int]:
        chunks = entries[position].chunks
        return (chunks[0].item.file, chunks[0].item.offset) if chunks else ("", 0)

    for share in shares:
        share.sort(key=place_in_source)
    return shares


def _lay_out(
    entry: TensorEntry,
    partition: Partition,
    dtype: str,
    boxes: Sequence[Box],
    ranks: Sequence[int],
    worker: int,
    sizes: dict[str, int],
    target_fqn: str,
) -> TensorMove:
    """Give each target chunk its place, in the order in which it is going to be written."""
    found = tuple(blocks([Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks], boxes))
    files = [f"__{rank}_{worker}.distcp" for rank in ranks]
    offsets = [0] * len(boxes)
    in_blocks = [target for block in found for target in block.targets]
    empty = sorted(set(range(len(boxes))) - set(in_blocks))
    for target in (*in_blocks, *empty):
        template = tensor_template(dtype, boxes[target].sizes)
        offsets[target] = place(sizes.get(files[target], 0), template)
        sizes[files[target]] = offsets[target] + template.item_bytes
    return TensorMove(
        entry, partition, dtype, tuple(boxes), tuple(ranks), tuple(files), tuple(offsets), found, target_fqn
    )


def _target_entry(move: TensorMove) -> TensorEntry:
    chunks = tuple(
        StoredChunk(
            box.offsets,
            box.sizes,
            StoredItem(file, offset, tensor_template(move.dtype, box.sizes).item_bytes),
        )
        for box, file, offset in zip(move.boxes, move.files, move.offsets, strict=True)
    )
    return TensorEntry(move.target_fqn, move.dtype, move.entry.shape, chunks, move.entry.requires_grad)
