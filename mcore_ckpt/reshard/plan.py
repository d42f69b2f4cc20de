"""The plan of a target, decided before a byte moves: pure, from the index of the source alone.

    tensors -> partition -> target chunks -> owning rank -> files, laid out as those of a save

A conversion is a number of imaginary ranks. A planner decides on the slices of tensors in each file, and on their
order; `weight_files` does so for other formats. The files of one part of the work are written together, front to back,
in the order of the moves.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from mcore_ckpt.core.boxes import Box, bounding
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import ChecksumError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import PlannedTable, TableColumns, data_file_name, shown_id
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.image.layout import (
    BucketLayout,
    FileImage,
    PlannedFile,
    TensorSpec,
    WrittenFile,
    chunk_factors,
    fill_bucket,
    index_tensors,
    lay_out_file,
    metadata_of,
    place_objects,
)
from mcore_ckpt.load.checks import global_shape
from mcore_ckpt.reshard.partition import Partition, Partitioner, divide, divides, expert_of, layer_of
from mcore_ckpt.reshard.target_directory import Journal
from mcore_ckpt.tools.keys import data_file_rank, is_optimizer_key, model_key, stacked_axes
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.regrid import SLAB_BYTES, Block, blocks

_T = TypeVar("_T")


class Division(NamedTuple):
    """A part of a tensor on its way: chunks of `entry` are read, and divided into `targets`, as `block` says."""

    entry: TensorEntry
    targets: Sequence[Box]
    block: Block

    @property
    def payload_bytes(self) -> int:
        """Length of all targets of the block."""
        return sum(math.prod(self.targets[n].sizes) for n in self.block.targets) * element_bytes(self.entry.dtype)


class Move(NamedTuple):
    """A division whose targets are the next payloads of these files; `key` is that of the tensor there."""

    key: str
    division: Division
    files: Sequence[str]


class TargetFile(NamedTuple):
    """A file of the target, laid out: its name there, and where its payloads are. Around them stand `runs`, which are
    known beforehand; or, in the file of an imaginary rank, frames, `objects` of the source and a footer.
    """

    name: str
    image: FileImage
    runs: Sequence[bytes] = ()
    layout: BucketLayout | None = None
    objects: tuple[ObjectEntry, ...] = ()

    def prepare(self, payloads: StoredPayloads, save_id: bytes) -> tuple[PlannedFile, Callable[[int], bytes]]:
        """The file for its writer, and what stands around its payloads (see `ImageStream`). Raises `LoadError`."""
        if self.layout is None:
            return PlannedFile(self.name, self.image), self.runs.__getitem__
        objects = [memoryview(payloads.object_bytes(entry)) for entry in self.objects]
        bucket = fill_bucket(self.layout, self.name, save_id, objects)
        return bucket.file, bucket.around

    def identity(self) -> bytes:
        """Tells from others of this name what stands around its payloads."""
        return b"".join((f"{self.name} {self.objects}\n".encode("utf-8", "surrogatepass"), *self.runs))


class Part(NamedTuple):
    """Work that one worker does at a stretch: files that belong to this part alone, and moves in their order."""

    files: Sequence[TargetFile]
    moves: Sequence[Move]

    @property
    def payload_bytes(self) -> int:
        """Length of all payloads."""
        return sum(move.division.payload_bytes for move in self.moves)


def all_in_one(entry: TensorEntry, key: str, file: str) -> list[Move]:
    """A tensor of which one file gets all; no move, if it is empty."""
    everything = Box((0,) * len(entry.shape), entry.shape)
    sources = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return [Move(key, Division(entry, [everything], block), [file]) for block in blocks(sources, [everything])]


def in_shares(items: Sequence[_T], size: Callable[[_T], int], count: int) -> tuple[tuple[_T, ...], ...]:
    """Items in their order, in shares of about the same number of bytes."""
    total, done = sum(map(size, items)), 0
    shares: tuple[list[_T], ...] = tuple([] for _ in range(count))
    for item in items:
        shares[min(count - 1, done * count // max(1, total))].append(item)
        done += size(item)
    return tuple(map(tuple, shares))


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """Everything that is written."""

    parts: tuple[Part, ...]
    tensors: int
    chunks: int
    index: CheckpointIndex | None = None  # of a target with `.metadata`
    order: array[int] | None = None  # for each chunk of the index, its payload's number among those of all files
    # Without `.metadata`: name and content of what is written last, from the results of the files.
    index_file: tuple[str, Callable[[Mapping[str, WrittenFile]], bytes]] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each file."""
        return {file.name: file.image.size_bytes for part in self.parts for file in part.files}

    @property
    def payload_bytes(self) -> int:
        """Length of all payloads."""
        return sum(part.payload_bytes for part in self.parts)

    def metadata(self, journal: Journal) -> bytes | None:
        """The content of `.metadata`, if the format has one, when all files have been written."""
        if self.index is None:
            return None
        # Another checkpoint than the source, and than other targets of the source: of another save.
        meta = {**(self.index.storage_meta or {}), "save_id": shown_id(journal.save_id)}
        return metadata_of(
            MetadataEncoder(self.index, self.order, chunk_factors(self.index)),
            [tuple(self.index.objects.values())],
            [[journal.written[name] for name in self.sizes]],
            save_id=journal.save_id,
            storage_meta=meta,
        )

    def fingerprint(self) -> str:
        """A sum of everything but the source that the target's bytes depend on."""
        found = hashlib.sha256(json.dumps(self.sizes, sort_keys=True).encode())
        entries = {}  # each once: a tensor of many chunks has many moves
        for part in self.parts:
            for file in part.files:
                found.update(file.identity())
            for key, (entry, targets, block), files in part.moves:
                entries[entry.fqn] = entry
                found.update(f"{key} {entry.fqn} {targets} {block} {files}\n".encode("utf-8", "surrogatepass"))
        found.update(f"{list(entries.values())}\n".encode("utf-8", "surrogatepass"))
        return found.hexdigest()


def refuse_other_fingerprints(plan: TargetPlan, source: CheckpointIndex, target: CheckpointIndex) -> None:
    """Raise `ChecksumError` for a tensor that is not what the source says it is."""
    for key, stored in {move.key: move.division.entry.fqn for part in plan.parts for move in part.moves}.items():
        known, found = source.fingerprints.get(stored), target.fingerprints.get(key)
        if known is not None and found is not None and known != found:
            raise ChecksumError(
                f"{key}: what was written has the fingerprint {found:08x}, the source says {known:08x}: its chunks are "
                "not where they were when it was saved. Compare it with another copy (`mcore-ckpt verify --state`)"
            )


# A worker makes the files of so many bytes complete before it begins others, so that a run that ends early can be
# resumed there. Each rank may have so many files.
_PART_BYTES = 4 * 1024**3
_MOST_PARTS = 32
# What a chunk costs besides its bytes: many small ones are not to end up with one worker.
_CHUNK_BYTES = 64 * 1024


class DividedTensor(NamedTuple):
    """A tensor with its key at the target, the slices that its target chunks hold, the rank of each, and the reason."""

    entry: TensorEntry
    key: str
    slices: Sequence[Box]
    ranks: Sequence[int]
    partition: Partition = Partition(None)


class _Contents:
    """Tensors and objects of the files of one part of the work, as they are planned."""

    def __init__(self, source: CheckpointIndex, number: int, parts: int, name_of: Callable[[str], str]) -> None:
        self._source, self._number, self._parts, self._name_of = source, number, parts, name_of
        self.specs: dict[str, list[TensorSpec]] = {}
        self.objects: dict[str, list[ObjectEntry]] = {}

    def file_of(self, rank: int, again: int = 0) -> str:
        """The name of a rank's file, or of one more for what does not come `again` in the order of the first."""
        return self._name_of(data_file_name(rank, self._number + self._parts * again))

    def add(self, tensor: DividedTensor, target: int, file: str) -> None:
        """Put a slice of a tensor behind what a file holds."""
        entry, box = tensor.entry, tensor.slices[target]
        nbytes = math.prod(box.sizes) * element_bytes(entry.dtype)
        own_shape = self._source.original_shape(entry.fqn)
        spec = TensorSpec(tensor.key, entry.dtype, entry.shape, box.offsets, box.sizes, nbytes, own_shape)
        self.specs.setdefault(file, []).append(spec)

    def move(self, tensor: DividedTensor, block: Block) -> Move:
        """Put the slices of a block where they come in order, slab by slab (`tools.regrid`)."""
        around = bounding([tensor.slices[target] for target in block.targets])
        is_one_slab = math.prod(around.sizes) * element_bytes(tensor.entry.dtype) <= SLAB_BYTES
        last: dict[str, Box] = {}
        boxes, files = [tensor.slices[target] for target in block.targets], []
        for target, box in zip(block.targets, boxes, strict=True):
            names = (self.file_of(tensor.ranks[target], again) for again in range(len(boxes)))
            files.append(next(name for name in names if name not in last or is_one_slab or _is_behind(box, last[name])))
            last[files[-1]] = box
            self.add(tensor, target, files[-1])
        division = Division(tensor.entry, boxes, Block(block.sources, list(range(len(boxes)))))
        return Move(tensor.key, division, files)

    def lay_out(self) -> Iterator[tuple[TargetFile, TableColumns]]:
        """The files."""
        for name in sorted(self.specs.keys() | self.objects.keys()):
            objects = self.objects.get(name, ())
            layout, columns = lay_out_file(
                name, self.specs.get(name, ()), [one.fqn for one in objects], [one.item.length for one in objects]
            )
            yield TargetFile(name, layout.image, layout=layout, objects=tuple(objects)), columns


def _is_behind(box: Box, other: Box) -> bool:
    """Whether all elements of a box come behind all of the other, in C order."""
    for offset, size, other_offset, other_size in zip(*box, *other, strict=True):
        if offset >= other_offset + other_size:
            return True
        if size != 1 or other_size != 1:
            return False
    return False


def plan_torch_dist(
    index: CheckpointIndex,
    tensors: Sequence[DividedTensor],
    objects: Iterable[tuple[ObjectEntry, int]],
    workers: int,
    name_of: Callable[[str], str] = str,
) -> TargetPlan:
    """Plan what imaginary ranks would save: blocks of tensors in the order of the source, in parts, with a file of each
    rank for each. Objects, each with its rank, stay as they are. `name_of`: the name of a file, by its usual one.
    """
    found, empty = [], []
    for tensor in tensors:
        global_shape(index, tensor.entry)  # refuses one that cannot be
        of_tensor = list(blocks([Box(chunk.offsets, chunk.sizes) for chunk in tensor.entry.chunks], tensor.slices))
        found += [(tensor, block) for block in of_tensor]
        empty += [(tensor, n) for n in set(range(len(tensor.slices))).difference(*(b.targets for b in of_tensor))]
    found.sort(key=lambda one: one[0].entry.chunks[one[1].sources[0]].item[:2])
    nbytes = sum(_cost(one) for one in found)
    number = min(_MOST_PARTS, max(workers, nbytes // _PART_BYTES))
    contents = [_Contents(index, n, number, name_of) for n in range(number)]
    for entry, rank in objects:
        contents[0].objects.setdefault(contents[0].file_of(rank), []).append(entry)
    for tensor, n in empty:
        contents[0].add(tensor, n, contents[0].file_of(tensor.ranks[n]))
    moves = [
        [of_part.move(*one) for one in share]
        for of_part, share in zip(contents, in_shares(found, _cost, number), strict=True)
    ]
    files = [list(of_part.lay_out()) for of_part in contents]
    parts = [Part([file for file, _ in some], its) for some, its in zip(files, moves, strict=True) if some]
    target, order = _index_of(index, tensors, list(chain.from_iterable(files)))
    return TargetPlan(
        parts=tuple(parts),
        tensors=len(tensors),
        chunks=sum(len(tensor.slices) for tensor in tensors),
        index=target,
        order=order,
    )


def _cost(one: tuple[DividedTensor, Block]) -> int:
    tensor, (_, targets) = one
    nbytes = sum(math.prod(tensor.slices[n].sizes) for n in targets) * element_bytes(tensor.entry.dtype)
    return nbytes + _CHUNK_BYTES * len(targets)


def _index_of(
    source: CheckpointIndex, tensors: Iterable[DividedTensor], files: Sequence[tuple[TargetFile, TableColumns]]
) -> tuple[CheckpointIndex, array[int]]:
    """The index of the target, and the order of its chunks."""
    plan = [PlannedTable(file.name, file.image.size_bytes, columns) for file, columns in files]
    entries, order = index_tensors([plan])
    for tensor in tensors:
        entries[tensor.key] = entries[tensor.key]._replace(requires_grad=tensor.entry.requires_grad)
    objects = {}
    for file, _ in files:
        lengths = [entry.item.length for entry in file.objects]
        for entry, offset, length in zip(file.objects, place_objects(lengths), lengths, strict=True):
            objects[entry.fqn] = ObjectEntry(entry.fqn, StoredItem(file.name, offset, length))
    keys = {tensor.entry.fqn: tensor.key for tensor in tensors}
    paths = source.planner_data
    if isinstance(paths, dict):  # of what was left out, none: the index would have no columns
        paths = {key: path for key, path in paths.items() if key in keys or key in objects}
    return CheckpointIndex(
        source.path,
        entries,
        objects,
        planner_data=paths,
        mcore_data={keys[fqn]: data for fqn, data in source.mcore_data.items() if fqn in keys},
        storage_meta=source.storage_meta,
        version=source.version,
    ), order


_FLOATING = ("float64", "float32", "float16", "bfloat16")
# A router's bias, by Megatron's name and by Hugging Face's: both keep it so whatever the model is in, as rounding it
# would let tokens go to other experts.
_ALWAYS_FLOAT32 = (".expert_bias", ".e_score_correction_bias")
_LAST_STAGE = re.compile(r"(?:^|\.)(?:output_layer|lm_head|final_layernorm|final_norm|ln_f|mtp)(?:\.|$)")
_MOST_RANKS = 1_000_000
_SHOWN_KINDS = 5


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Parallel sizes of the target. Ranks count as Megatron's do: tensor parallel fastest, then data, then pipeline."""

    tp: int
    pp: int
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_RANKS:
                raise OptionError(f"{name}={value}: expected at least 1, and at most {_MOST_RANKS}")

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks of experts: those of the other layers unless said otherwise, as in Megatron."""
        return self.tp if self.etp is None else self.etp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage: the fewest that hold both groupings."""
        return math.lcm(self.tp, self.expert_tp * self.ep)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pp

    @property
    def arguments(self) -> dict[str, int]:
        """The sizes as arguments of Megatron."""
        sizes = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        named = {f"{kind}_model_parallel_size": size for kind, size in sizes.items()}
        return {**named, "expert_tensor_parallel_size": self.expert_tp}

    def __str__(self) -> str:
        etp = "" if self.etp is None else f" ETP {self.etp}"
        return f"TP {self.tp} PP {self.pp} EP {self.ep}{etp} ({counted(self.ranks, 'rank')})"


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Decisions in the order of the source, what is good to know, and the plan that follows from them."""

    layout: TargetLayout
    decisions: tuple[DividedTensor, ...]
    notes: tuple[str, ...]
    target: TargetPlan
    is_divided: bool = True  # as the layout asks

    def __str__(self) -> str:
        return f"{self.layout}{'' if self.is_divided else ', not all of it divided'}"

    @property
    def guesses(self) -> int:
        """How many tensors are divided by a guess."""
        return sum(decision.partition.guess for decision in self.decisions)


@dataclass(slots=True)
class _Owners:
    """Which rank owns what."""

    index: CheckpointIndex
    layout: TargetLayout
    layer_counts: dict[str, int] = field(default_factory=dict)
    expert_counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fqn, entry in self.index.tensors.items():
            layer, stacked = layer_of(model_key(fqn)), stacked_axes(fqn, entry.shape)
            if layer is not None and (layer.number is not None or stacked.layer is not None):
                layers = entry.shape[0] if layer.number is None else layer.number + 1
                self.layer_counts[layer.before] = max(self.layer_counts.get(layer.before, 0), layers)
            expert = expert_of(fqn)
            if expert is not None and expert.number is not None:
                known = self.expert_counts.get(expert.before, 0)
                self.expert_counts[expert.before] = max(known, expert.number + 1)
            elif stacked.expert is not None:
                self.expert_counts[fqn] = entry.shape[stacked.expert]

    def stage(self, fqn: str, stacked_layer: int | None, stacked_layers: int) -> int:
        """The pipeline stage of a layer, or of what stands before or behind all layers."""
        key = model_key(fqn)
        if _LAST_STAGE.search(key):
            return self.layout.pp - 1
        if stacked_layer is not None:
            return stacked_layer * self.layout.pp // max(1, stacked_layers)
        layer = layer_of(key)
        if layer is None or layer.number is None:
            return 0
        return layer.number * self.layout.pp // self.layer_counts.get(layer.before, layer.number + 1)

    def of_chunks(self, entry: TensorEntry, partition: Partition, boxes: Sequence[Box]) -> list[int]:
        """The rank of each target chunk."""
        if partition.decider == "stored":
            stored = {chunk.offsets: data_file_rank(chunk.item.file) or 0 for chunk in entry.chunks}
            return [stored[box.offsets] % self.layout.ranks for box in boxes]
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
            elif partition.expert and (found := expert_of(entry.fqn)) and found.number is not None:
                expert_rank = found.number * self.layout.ep // self.expert_counts[found.before]
            within = tensor_rank + tensor_ranks * expert_rank if partition.expert else tensor_rank
            ranks.append(stage * self.layout.stage_ranks + within)
        return ranks


def make_plan(
    index: CheckpointIndex,
    layout: TargetLayout,
    partitioner: Partitioner,
    *,
    keys: Mapping[str, str] | None = None,
    object_keys: Iterable[str] | None = None,
    workers: int = 1,
    arguments: Mapping[str, Any] | None = None,
    allow_whole: bool = True,
) -> ReshardPlan:
    """Plan the complete target of `keys`, with their keys there, and `object_keys`; `workers`: the least number of
    files of each rank. Without `allow_whole` raises `OptionError` for what is not divided as `layout` asks.
    """
    owners = _Owners(index, layout)
    vocabulary = padded_vocabulary(arguments or {}, layout.tp)
    decisions = []
    for fqn, key in {fqn: fqn for fqn in index.tensors}.items() if keys is None else keys.items():
        entry = index.tensors[fqn]
        partition = partitioner.decide(fqn)
        ranks_of_axis = layout.expert_tp if partition.expert else layout.tp
        if ranks_of_axis == 1:  # nothing is divided, so nothing depends on the axis
            partition = replace(partition, guess=False)
        slices = tuple(divide(fqn, entry.shape, partition, ranks_of_axis, vocabulary))
        ranks = tuple(owners.of_chunks(entry, partition, slices))
        decisions.append(DividedTensor(entry, key, slices, ranks, partition))
    undivided = tuple(_undivided(decisions, owners, layout, vocabulary))
    if undivided and not allow_whole:
        raise OptionError(
            f"{index.path} cannot be divided as {layout}: {'; '.join(undivided)}. Give sizes that divide it, say by "
            "--rules along which axes, or keep all of this whole by --allow-whole. Nothing was written"
        )
    notes = (*_uneven(owners, layout, arguments or {}), *undivided)
    chosen = [index.objects[key] for key in (index.objects if object_keys is None else object_keys)]
    # Objects stay with the rank that had them, if there still is one.
    objects = [(entry, (data_file_rank(entry.item.file) or 0) % layout.ranks) for entry in chosen]
    target = plan_torch_dist(index, decisions, objects, workers)
    return ReshardPlan(layout, tuple(decisions), notes, target, is_divided=not undivided)


def _uneven(owners: _Owners, layout: TargetLayout, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Notes on divisions that most jobs do not have."""
    for prefix, count in owners.layer_counts.items():
        if count % layout.pp:
            what = f"{count} layers of {prefix.removesuffix('.')}"
            yield f"{what} do not divide into {layout.pp} stages evenly; files may not match the ranks"
    heads = arguments.get("num_attention_heads")
    if isinstance(heads, int) and heads % layout.tp:
        yield f"{heads} attention heads do not divide among TP {layout.tp}: no job of Megatron-Core has this layout"


def _undivided(
    decisions: Sequence[DividedTensor], owners: _Owners, layout: TargetLayout, vocabulary: int | None
) -> Iterator[str]:
    """Kinds of tensors that the layout asks to divide, and that are not divided."""
    layers, experts = max(owners.layer_counts.values(), default=0), set(owners.expert_counts.values())
    if layers < layout.pp != 1:
        yield f"{layers or 'no'} layers for PP {layout.pp}"
    if layout.ep != 1 and (not experts or any(count % layout.ep for count in experts)):
        yield f"{', '.join(map(str, sorted(experts))) or 'no'} experts for EP {layout.ep}"
    kinds: dict[str, str] = {}
    unknown: dict[str, str] = {}
    is_divided = layout.tp == 1
    for one in decisions:
        partition, entry = one.partition, one.entry
        kind = ".".join(model_key(entry.fqn).split(".")[-2:])
        count = layout.expert_tp if partition.expert else layout.tp
        if partition.decider == "whole":
            unknown[kind] = kind
        elif partition.axis is not None and divides(entry.fqn, entry.shape, partition, count, vocabulary):
            is_divided = True
        elif partition.axis is not None:
            kinds[kind] = f"{kind} (axis of {entry.shape[partition.axis]})"
    if kinds:
        yield f"in one piece, since tensor-parallel ranks do not divide them: {_some(kinds)}"
    elif unknown and not is_divided:
        yield f"in one piece, since nothing tells how they are divided: {_some(unknown)}"


def _some(kinds: Mapping[str, str]) -> str:
    more = f" and {len(kinds) - _SHOWN_KINDS} more" if len(kinds) > _SHOWN_KINDS else ""
    return ", ".join([*kinds.values()][:_SHOWN_KINDS]) + more


def target_dtype(entry: TensorEntry, wanted: str | None) -> str:
    """A tensor's dtype at the target: `wanted` for floating-point tensors of the model; the optimizer's stay."""
    converted = wanted and entry.dtype in _FLOATING and not is_optimizer_key(entry.fqn)
    if entry.dtype == "float32" and entry.fqn.endswith(_ALWAYS_FLOAT32):
        return entry.dtype
    return wanted if wanted and converted else entry.dtype


def token_count(arguments: Mapping[str, Any]) -> int | None:
    """How many tokens a job's vocabulary has, if known: `NullTokenizer` adds the end of document to what was given."""
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
