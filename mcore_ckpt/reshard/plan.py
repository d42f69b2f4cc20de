"""What is going to be written, decided before a byte moves: pure, from the index of the source alone.

    tensors -> partition -> target chunks -> owning rank -> files and offsets
    slot:      head | the slice's elements, C order | tail, which may hold their CRC-32

A planner decides all slots; `weight_files` has those of other formats. Formats differ in where slots lie and what
frames them; the writer is one for all.

In a `torch_dist` checkpoint every rank has one data file for each worker, `__{rank}_{worker}.distcp`. A worker writes
its files front to back, so items lie in them in the order in which the worker takes its tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry, parse_object_key
from mcore_ckpt.format.integrity import NO_FINGERPRINT, SAVE_ID_BYTES, FooterPlan, Manifest, ManifestFile, shown_id
from mcore_ckpt.format.item_layout import TensorTemplate, element_bytes, place, tensor_template
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.image.layout import TensorSpec, footer_plan
from mcore_ckpt.load.checks import fingerprint_from_sums
from mcore_ckpt.reshard.partition import Partition, Partitioner, divide, divides, expert_of
from mcore_ckpt.reshard.target_files import Journal, TargetFiles
from mcore_ckpt.storage.base import align_up
from mcore_ckpt.tools.keys import data_file_rank, is_optimizer_key, layer_number, model_key, stacked_axes
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.regrid import Block, blocks

_T = TypeVar("_T")


class Frame(Protocol):
    """What stands around the elements in a slot."""

    @property
    def head(self) -> bytes:
        """Before the elements."""

    def tail_with(self, payload_crc32: int, /) -> bytes:
        """Behind elements that have this CRC-32."""


class _Bare:
    head = b""

    def tail_with(self, _: int) -> bytes:
        return b""


BARE: Frame = _Bare()
"""Nothing around the elements."""


class Slot(NamedTuple):
    """Where a slice of a tensor goes: `offset` in the file is that of the slot's head."""

    file: str
    offset: int
    slice: Box


class Blob(NamedTuple):
    """Bytes that are no tensor's: given here, or those of a stored object."""

    file: str
    offset: int
    content: bytes | ObjectEntry


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor: `entry` is that of the payloads, `key` the target's; its slots hold every element once.

    `blocks` are the positions of source chunks and slots that belong together.
    """

    entry: TensorEntry
    key: str
    slots: tuple[Slot, ...]
    blocks: tuple[Block, ...]

    @property
    def source_boxes(self) -> list[Box]:
        """The source's chunks, in the order of its index."""
        return [Box(chunk.offsets, chunk.sizes) for chunk in self.entry.chunks]

    @property
    def payload_bytes(self) -> int:
        """Of all elements."""
        return _payload_bytes(self.entry)


def _payload_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * element_bytes(entry.dtype)


def all_in_one(entry: TensorEntry, key: str, file: str, offset: int) -> TensorMove:
    """A tensor that gets one slot for all of it."""
    everything = Box((0,) * len(entry.shape), entry.shape)
    sources = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return TensorMove(entry, key, (Slot(file, offset, everything),), tuple(blocks(sources, [everything])))


def in_shares(items: Sequence[_T], size: Callable[[_T], int], workers: int) -> tuple[tuple[_T, ...], ...]:
    """Items in their order, for workers of about the same number of bytes: one reads while another arranges."""
    total, done = sum(map(size, items)), 0
    shares: tuple[list[_T], ...] = tuple([] for _ in range(workers))
    for item in items:
        shares[min(workers - 1, done * workers // max(1, total))].append(item)
        done += size(item)
    return tuple(map(tuple, shares))


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """Everything that is written; a format is a subclass."""

    work: tuple[tuple[TensorMove, ...], ...]  # `work[w]` are the tensors of worker `w`, in its order
    blobs: tuple[Blob, ...]  # written by the first worker, before its tensors
    sizes: Mapping[str, int]  # length of each file
    files_at_once: int | None = None  # between how many files a worker alternates; None: all
    filled_gaps: bool = False  # the bytes between the slots of a file are unused, and may be filled with zeros
    index: CheckpointIndex | None = None  # of the target, for formats that are read back and compared
    index_file: tuple[str, bytes] | None = None  # without `.metadata`: name and content of what is written last

    def frame(self, move: TensorMove, number: int) -> Frame:
        """What is around the elements of one of a tensor's slots."""
        return BARE

    def finish(
        self, files: TargetFiles, journal: Journal, payloads: StoredPayloads, *, is_compared: bool
    ) -> bytes | None:
        """Write durably what depends on checksums; returns the content of `.metadata`, if the format has one.
        `is_compared`: the target is compared with the source before it appears.
        """
        return None

    @property
    def moves(self) -> Iterator[TensorMove]:
        """All tensors."""
        return (move for moves in self.work for move in moves)

    @property
    def payload_bytes(self) -> int:
        """Of all tensors."""
        return sum(move.payload_bytes for move in self.moves)

    def fingerprint(self) -> str:
        """Of everything that the target's bytes depend on but the source's."""
        found = hashlib.sha256(json.dumps(dict(self.sizes), sort_keys=True).encode())
        for worker in self.work:
            found.update(b"worker")
            for move in worker:
                found.update(f"{move.entry} {move.key} {move.slots}\n".encode("utf-8", "surrogatepass"))
        for blob in self.blobs:
            content = blob.content if isinstance(blob.content, bytes) else repr(blob.content).encode()
            found.update(f"{blob.file} {blob.offset}\n".encode("utf-8", "surrogatepass") + content)
        return found.hexdigest()


def source_sums(move: TensorMove, journal: Journal, payloads: StoredPayloads) -> Sequence[int | None]:
    """The CRC-32s of a tensor's chunks in the source: stored, or as they were read."""
    found = journal.written[move.key].crcs
    return [payloads.locate(move.entry, chunk).crc32 for chunk in move.entry.chunks] if found is None else found


def another_fingerprint(key: str, found: int, known: int) -> ChecksumError:
    """The error for a tensor that is not what the source says it is."""
    return ChecksumError(
        f"{key}: what was written has the fingerprint {found:08x}, the source says {known:08x}: its chunks are not "
        "where they were when it was saved. Compare it with another copy (`mcore-ckpt verify --state`)"
    )


# Objects come first in a file; a little room behind them keeps tensors on pages of their own.
_PAGE_BYTES = 4096
# What a tensor costs besides its bytes: many small ones are not to end up with one worker.
_TENSOR_BYTES = 64 * 1024


class DividedTensor(NamedTuple):
    """A tensor with its key at the target, the slices that its target chunks hold, the rank of each, and the reason."""

    entry: TensorEntry
    key: str
    slices: Sequence[Box]
    ranks: Sequence[int]
    partition: Partition = Partition(None)


@dataclass(frozen=True, kw_only=True)
class _TorchDistPlan(TargetPlan):
    index: CheckpointIndex
    footers: Mapping[str, FooterPlan]

    def frame(self, move: TensorMove, number: int) -> TensorTemplate:
        return tensor_template(move.entry.dtype, move.slots[number].slice.sizes)

    def finish(self, files: TargetFiles, journal: Journal, payloads: StoredPayloads, *, is_compared: bool) -> bytes:
        """As `TargetPlan.finish`: the footers of the data files, and `.metadata` with its manifest."""
        save_id = secrets.token_bytes(SAVE_ID_BYTES)
        objects: dict[str, list[tuple[int, int]]] = {file: [] for file in self.sizes}
        for stored in self.index.objects.values():
            objects[stored.item.file].append((stored.item.offset, stored.item.length))
        listed = {}
        for name, size_bytes in sorted(self.sizes.items()):
            end, table_crc = self.footers[name].fill(save_id, size_bytes, sorted(objects[name]))
            files.write_end(name, end)
            listed[name] = ManifestFile(size_bytes, table_crc, save_id)
        sums = [known for key in self.index.tensors for known in journal.written[key].sums]
        crcs = array("I", [crc for crc, _ in sums])
        crcs.extend(crc32(payloads.object_bytes(payloads.index.objects[key])) for key in self.index.objects)
        running = [(number, sums_of) for number, (_, sums_of) in enumerate(sums) if sums_of]
        manifest = Manifest(
            save_id,
            listed,
            crcs,
            array("Q", [number for number, _ in running]),
            array("I", [len(sums_of) for _, sums_of in running]),
            array("I", chain.from_iterable(sums_of for _, sums_of in running)),
            fingerprints=self._fingerprints(journal, payloads, is_compared),
        )
        # Another checkpoint than the source, and than other targets of the source: of another save.
        meta = {**(self.index.storage_meta or {}), "save_id": shown_id(save_id)}
        return encode_metadata(self.index, storage_meta=meta, manifest=manifest)

    def _fingerprints(self, journal: Journal, payloads: StoredPayloads, is_compared: bool) -> array[int]:
        """Those of the target's tensors: stored with the source, and told by sums of the target or of the source. Where
        both are there, they have to agree. Where no sums tell, of columns, the comparison sums up what was written;
        without one, what the source says is not passed on.
        """
        fingerprints = {}
        for move in self.moves:
            entry = self.index.tensors[move.key]
            told = fingerprint_from_sums(self.index, entry, [crc for crc, _ in journal.written[move.key].sums])
            if told is None:
                told = fingerprint_from_sums(payloads.index, move.entry, source_sums(move, journal, payloads))
            known = payloads.index.fingerprints.get(move.entry.fqn)
            if known is not None and told is not None and known != told:
                raise another_fingerprint(move.key, told, known)
            fingerprints[move.key] = known if told is None and is_compared else told
        found = (fingerprints[key] for key in self.index.tensors)
        return array("q", [NO_FINGERPRINT if value is None else value for value in found])


def plan_torch_dist(
    index: CheckpointIndex, tensors: Sequence[DividedTensor], objects: Iterable[tuple[ObjectEntry, int]], workers: int
) -> TargetPlan:
    """Give each target chunk its slot, and each object (with its rank) its place; objects are copied as they are.

    `tensors` come in the order of the target's index. Each rank has `workers` files.
    """
    sizes: dict[str, int] = {}
    blobs: list[Blob] = []
    for entry, rank in objects:
        file = f"__{rank}_0.distcp"
        blobs.append(Blob(file, align_up(sizes.get(file, 0), 64), entry))
        sizes[file] = blobs[-1].offset + entry.item.length
    sizes = {file: align_up(size, _PAGE_BYTES) for file, size in sizes.items()}
    in_source = sorted(tensors, key=lambda tensor: [chunk.item[:2] for chunk in tensor.entry.chunks[:1]])
    shares = in_shares(in_source, lambda tensor: _payload_bytes(tensor.entry) + _TENSOR_BYTES, workers)
    work = [[_lay_out(tensor, worker, sizes) for tensor in share] for worker, share in enumerate(shares)]
    moves = {move.entry.fqn: move for worker in work for move in worker}
    keys = {tensor.entry.fqn: tensor.key for tensor in tensors}
    stored = {}
    for blob in blobs:
        assert isinstance(blob.content, ObjectEntry)
        item = StoredItem(blob.file, blob.offset, blob.content.item.length)
        stored[blob.content.fqn] = ObjectEntry(blob.content.fqn, item)
    target = replace(
        CheckpointIndex(index.path, {tensor.key: _target_entry(moves[tensor.entry.fqn]) for tensor in tensors}, stored),
        planner_data=index.planner_data,
        mcore_data={keys[fqn]: data for fqn, data in index.mcore_data.items() if fqn in keys},
        storage_meta=index.storage_meta,
        version=index.version,
    )
    footers = _footers(target, sizes)
    return _TorchDistPlan(
        work=tuple(map(tuple, work)),
        blobs=tuple(blobs),
        sizes={file: size + footers[file].size_bytes for file, size in sizes.items()},
        filled_gaps=True,
        index=target,
        footers=footers,
    )


def _lay_out(tensor: DividedTensor, worker: int, sizes: dict[str, int]) -> TensorMove:
    """Give each target chunk its place, in the order in which it is going to be written."""
    entry, key, slices, ranks, _ = tensor
    found = tuple(blocks([Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks], slices))
    slots: list[Slot] = [Slot(f"__{rank}_{worker}.distcp", 0, part) for rank, part in zip(ranks, slices, strict=True)]
    in_blocks = [target for block in found for target in block.targets]
    for target in (*in_blocks, *sorted(set(range(len(slices))) - set(in_blocks))):
        template = tensor_template(entry.dtype, slices[target].sizes)
        file = slots[target].file
        slots[target] = slots[target]._replace(offset=place(sizes.get(file, 0), template))
        sizes[file] = slots[target].offset + template.item_bytes
    return TensorMove(entry, key, tuple(slots), found)


def _target_entry(move: TensorMove) -> TensorEntry:
    dtype = move.entry.dtype
    chunks = tuple(
        StoredChunk(part.offsets, part.sizes, StoredItem(file, offset, tensor_template(dtype, part.sizes).item_bytes))
        for file, offset, part in move.slots
    )
    return TensorEntry(move.key, dtype, move.entry.shape, chunks, move.entry.requires_grad)


def _footers(target: CheckpointIndex, files: Iterable[str]) -> dict[str, FooterPlan]:
    """The integrity footer of each target file."""
    tensors: dict[str, list[tuple[int, int, TensorSpec]]] = {file: [] for file in files}
    objects: dict[str, list[tuple[int, str]]] = {file: [] for file in tensors}
    for fqn, entry in target.tensors.items():
        for offsets, sizes, item in entry.chunks:
            nbytes = math.prod(sizes) * element_bytes(entry.dtype)
            spec = TensorSpec(fqn, entry.dtype, entry.shape, offsets, sizes, nbytes)
            tensors[item.file].append((item.offset, item.length, spec))
    for fqn, stored in target.objects.items():
        objects[stored.item.file].append((stored.item.offset, fqn))
    footers = {}
    for file, rows in tensors.items():
        rows.sort(key=operator.itemgetter(0))
        starts, lengths = [row[0] for row in rows], [row[1] for row in rows]
        keys = [fqn for _, fqn in sorted(objects[file])]
        footers[file] = footer_plan([row[2] for row in rows], starts, lengths, keys)
    return footers


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

    Ranks count as Megatron's do: tensor parallel fastest, then data, then pipeline.
    """

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
            number, stacked = layer_number(model_key(fqn)), stacked_axes(fqn, entry.shape)
            if number is not None or stacked.layer is not None:
                prefix = _layers_prefix(fqn)
                layers = entry.shape[0] if number is None else number + 1
                self.layer_counts[prefix] = max(self.layer_counts.get(prefix, 0), layers)
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
        number = layer_number(key)
        if number is None:
            return 0
        return number * self.layout.pp // self.layer_counts.get(_layers_prefix(fqn), number + 1)

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
            elif partition.expert:
                expert_rank = self._expert_of_key(entry.fqn)
            within = tensor_rank + tensor_ranks * expert_rank if partition.expert else tensor_rank
            ranks.append(stage * self.layout.stage_ranks + within)
        return ranks

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
    keys: Iterable[str] | None = None,
    object_keys: Iterable[str] | None = None,
    workers: int = 1,
    arguments: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    allow_whole: bool = True,
) -> ReshardPlan:
    """Plan the complete target. `keys` and `object_keys` are what is carried, `workers` the files of each rank,
    `rename` new keys of tensors; others stay. Without `allow_whole` raises `OptionError` for what is not divided as
    `layout` asks.
    """
    owners = _Owners(index, layout)
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
        decisions.append(DividedTensor(entry, (rename or {}).get(fqn, fqn), slices, ranks, partition))
    undivided = tuple(_undivided(decisions, owners, layout, vocabulary))
    if undivided and not allow_whole:
        raise OptionError(
            f"{index.path} cannot be divided as {layout}: {'; '.join(undivided)}. Give sizes that divide it, say by "
            "--rules along which axes, or keep all of this whole by --allow-whole. Nothing was written"
        )
    notes = (*_uneven(owners, layout, arguments or {}), *undivided)
    chosen = [index.objects[key] for key in (index.objects if object_keys is None else object_keys)]
    target = plan_torch_dist(index, decisions, [(entry, owners.of_object(entry)) for entry in chosen], workers)
    return ReshardPlan(layout, tuple(decisions), notes, target, is_divided=not undivided)


def _uneven(owners: _Owners, layout: TargetLayout, arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is divided in another way than most jobs do."""
    for prefix, count in owners.layer_counts.items():
        if count % layout.pp:
            yield (
                f"{count} layers of {prefix}layers do not divide into {layout.pp} stages evenly; files may not match "
                "the ranks"
            )
    heads = arguments.get("num_attention_heads")
    if isinstance(heads, int) and heads % layout.tp:
        yield f"{heads} attention heads do not divide among TP {layout.tp}: no job of Megatron-Core has this layout"


def _undivided(
    decisions: Sequence[DividedTensor], owners: _Owners, layout: TargetLayout, vocabulary: int | None
) -> Iterator[str]:
    """What the layout asks to divide, and is not divided."""
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
