"""Checkpoints of `--ckpt-format torch`: a directory for each model-parallel rank, read and written.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     arguments, model, optimizer, random state of one model-parallel rank
    mp_rank_TT[_PPP][_EEE]/distrib_optim.pt       flat buffers of the distributed optimizer

Nothing is unpickled freely, and no tensor is read before it is copied: state dicts are read by `format/state_file.py`.

Of an export, the optimizer's state is not written: its order is that of the model's modules, which only a job has
(`--ckpt-convert-format torch`).
"""

from __future__ import annotations

import functools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError, UnsafePickleError
from mcore_ckpt.format.index import CheckpointIndex, object_key, parse_object_key
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.state_file import Opaque, StateFile, StateRecord, read_state_file
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.models.options import ExportOptions
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, SourceFiles
from mcore_ckpt.reshard.partition import (
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    Partitioner,
    Stacking,
    expert_of,
    holds_several,
    is_expert_key,
    layer_of,
    local_norms,
    pattern_of,
    shard_slices,
)
from mcore_ckpt.reshard.plan import padded_vocabulary, token_count
from mcore_ckpt.reshard.view import FileRange, Part, Record, TensorView, ViewPayloads
from mcore_ckpt.reshard.weight_files import SavedTensor, decode_state, plan_state_files, taken_over
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import is_optimizer_key, read_object, stored_common_state, unwrapped
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

_MAX_DEPTH = 100
# A tensor may be expanded (a row that stands for many): so far beyond what lies in the file.
_MAX_EXPANDED_BYTES = 1024**3


def read_state(storage: Storage, file: str) -> StateFile:
    """A state file; raises as `read_state_file`."""
    with storage.open_reader(file) as reader:
        return read_state_file(reader.read, reader.size_bytes, str(storage.path(file)))


def file_range(file: str, tensor: FileTensor, state: StateFile, *, strided: bool = False) -> FileRange:
    """Where the elements of one of its tensors lie; raises `CorruptCheckpointError` for unexpected strides."""
    if tensor.strides and not strided:
        raise CorruptCheckpointError(
            f"{file}: a tensor of {list(tensor.shape)} in steps of {list(tensor.strides)} elements; expected elements "
            "that follow one another, as Megatron saves them"
        )
    record = state.records[tensor.record]
    whole = Record(f"record data/{tensor.record}", record.start, record.nbytes, record.crc32)
    at = record.start + tensor.first_byte
    return FileRange(file, at, tensor.nbytes, tensor.dtype, tensor.shape, whole, tensor.strides)


def read_torch_file(storage: Storage, file: str) -> tuple[dict[str, FileRange], list[str]]:
    """The tensors of a torch file by key (nested dicts joined by dots), and the keys of what is none. Raises
    `UnsafePickleError` where it holds more than tensors and plain values.
    """
    path, size_bytes = storage.path(file), storage.size(file)
    state = read_state(storage, file)
    tensors: dict[str, FileRange] = {}
    others: list[str] = []
    # Nested dicts of a hostile file may contain one another: as many values as a file has bytes are enough.
    budget = max(100_000, size_bytes)

    def walk(value: Any, prefix: str, depth: int) -> None:
        nonlocal budget
        budget -= 1 + len(prefix) // 64
        if budget < 0 or depth > _MAX_DEPTH:
            raise CorruptCheckpointError(f"{path}: {prefix[:80]}: dicts are nested in one another without an end")
        if isinstance(value, Opaque) or (isinstance(value, type) and issubclass(value, Opaque)):
            raise UnsafePickleError(
                f"{path}: {prefix}: holds more than tensors and plain values: {value.name:.200}; load the file once "
                "with what has saved it, and save its tensors alone"
            )
        if type(value) is FileTensor:
            if prefix in tensors:
                raise CorruptCheckpointError(
                    f"{path}: two of its tensors would both be called {prefix}: of the keys of nested dicts, joined by "
                    "dots, each has to be another; one would be lost"
                )
            if value.nbytes > size_bytes + _MAX_EXPANDED_BYTES:
                raise CorruptCheckpointError(
                    f"{path}: {prefix}: {value.nbytes} bytes of elements, which are expanded from fewer; store a copy"
                )
            tensors[prefix] = file_range(file, value, state, strided=True)
        elif isinstance(value, dict):
            for key, part in value.items():
                if not isinstance(key, (str, int, float, bool, type(None))):
                    raise CorruptCheckpointError(f"{path}: {prefix}: a key of type {type(key).__name__}; expected text")
                walk(part, f"{prefix}.{key}" if prefix else str(key), depth + 1)
        elif hasattr(value, "element_size"):
            raise CorruptCheckpointError(
                f"{path}: {prefix}: expected a dense tensor of a plain dtype; convert it first"
            )
        else:
            others.append(prefix)

    walk(state.value, "", 0)
    return tensors, others


MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MOST_RANKS = 100_000

# What a count may be at most, and what it may always be, however small the files.
_MOST, FEWEST = 2**40, 2**16


class Arguments:
    """Megatron's arguments in the file `where`; of what needs bytes of its own there cannot be more than `most`."""

    def __init__(self, values: Mapping[str, Any], where: str, most: int = _MOST) -> None:
        self.values, self.where, self.most = values, where, most

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive number, by the first of some names that is there. Raises `CorruptCheckpointError` for other
        values, and for more ranks or layers than the files have bytes.
        """
        value = next((self.values[name] for name in names if self.values.get(name) is not None), default)
        most = _MOST if names[0].startswith("ddp_") else self.most
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= max(most, default or 0):
            raise CorruptCheckpointError(
                f"{self.where}: the stored argument {names[0]} is {value!r:.80}; expected a positive number"
                + (f", no greater than the {most} bytes that the checkpoint has" if most < _MOST else "")
            )
        return value

    def flag(self, name: str) -> bool:
        """Whether an argument is there and set."""
        return bool(self.values.get(name))


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one model-parallel rank has saved in `folder` (`mp_rank_...`): `model` is its `model_optim_rng.pt`,
    `optimizer` its `distrib_optim.pt`, if there is one.
    """

    tp: int
    pp: int
    ep: int
    folder: str
    model: StateFile
    optimizer: StateFile | None

    @property
    def state(self) -> dict[str, Any]:
        """The complete state dict."""
        found: dict[str, Any] = self.model.value
        return found

    @property
    def file(self) -> str:
        """Name of the model's file, in the directory."""
        return f"{self.folder}/{MODEL_FILE}"

    def taken(self, directory: Path, value: Any) -> Any:
        """A part of the model's file with its tensors; raises as `taken_over`."""
        return taken_over(value, reading(storage_at(directory), self.file), self.file, self.model.records)


def read_ranks(directory: Path) -> tuple[list[RankFiles], Arguments]:
    """All ranks' files, in the order of pipeline, expert and tensor parallel rank, and the first rank's arguments.
    Raises `CorruptCheckpointError` where one is missing or damaged, or they contradict one another.
    """
    storage = storage_at(directory)
    names = storage.folders() if storage.is_directory() else []
    folders = sorted(name for name in names if _FOLDER.fullmatch(name))
    if not folders:
        raise CheckpointNotFoundError(
            f"{directory}: expected directories mp_rank_00, ... with {MODEL_FILE}, as `--ckpt-format torch` saves them"
        )
    if len(folders) > _MOST_RANKS:
        raise CorruptCheckpointError(f"{directory}: {len(folders)} directories of ranks; no job has that many")
    found, shown = [], None
    for folder in folders:
        model = read_state(storage, f"{folder}/{MODEL_FILE}")
        where = str(directory / folder / MODEL_FILE)
        state = model.value
        if type(state) is not dict or not any(re.fullmatch(r"model\d*", str(key)) for key in state):
            raise CorruptCheckpointError(f"{where}: expected a state dict with `model`, as Megatron saves it")
        arguments = _arguments(state, where, max(FEWEST, storage.size(f"{folder}/{MODEL_FILE}")))
        sizes = _sizes(arguments)
        if shown is None:
            shown = arguments
        elif sizes != _sizes(shown):
            raise CorruptCheckpointError(
                f"{where}: its arguments are of TP, PP, EP {sizes}, those of {shown.where} of {_sizes(shown)}; the "
                "directories are of different checkpoints"
            )
        tp, pp, ep = _rank_of(folder, sizes, where)
        optimizer = None
        if storage.exists(f"{folder}/{OPTIMIZER_FILE}"):
            optimizer = read_state(storage, f"{folder}/{OPTIMIZER_FILE}")
        found.append(RankFiles(tp, pp, ep, folder, model, optimizer))
    assert shown is not None
    found.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    _check_complete(found, _sizes(shown), directory)
    iterations = {repr(rank.state.get("iteration")): rank for rank in found}
    if len(iterations) > 1:
        first, second = list(iterations.items())[:2]
        raise CorruptCheckpointError(
            f"{directory}: {first[1].file} is of iteration {first[0]:.40}, {second[1].file} of {second[0]:.40}; take "
            "one checkpoint's files"
        )
    return found, shown


def _arguments(state: Mapping[str, Any], where: str, most: int) -> Arguments:
    given = state.get("args")
    if not isinstance(given, Namespace):
        raise CorruptCheckpointError(
            f"{where}: holds no arguments of Megatron (`args`), which tell how the model is divided; got "
            f"{type(given).__name__}"
        )
    return Arguments(vars(given), where, most)


def _sizes(arguments: Arguments) -> tuple[int, int, int]:
    return (
        arguments.count("tensor_model_parallel_size", "model_parallel_size"),
        arguments.count("pipeline_model_parallel_size", default=1),
        arguments.count("expert_model_parallel_size", default=1),
    )


def _rank_of(folder: str, sizes: tuple[int, int, int], where: str) -> tuple[int, int, int]:
    """A folder's ranks: pipeline and expert parallel ones are in its name only where there are several."""
    matched = _FOLDER.fullmatch(folder)
    assert matched is not None
    numbers = [int(part) for part in matched.groups() if part is not None]
    kinds = [0, *(axis for axis in (1, 2) if sizes[axis] > 1)]
    if len(numbers) != len(kinds) and not (len(numbers) == 2 and kinds == [0] and numbers[1] == 0):
        raise CorruptCheckpointError(
            f"{where}: its arguments are of TP {sizes[0]}, PP {sizes[1]} and EP {sizes[2]}, for which a directory's "
            f"name has {len(kinds)} numbers; {folder} has {len(numbers)}"
        )
    ranks = [0, 0, 0]
    for axis, number in zip(kinds, numbers, strict=False):
        ranks[axis] = number
    if any(rank >= size for rank, size in zip(ranks, sizes, strict=True)):
        raise CorruptCheckpointError(f"{where}: there is no such rank at TP, PP, EP {sizes}")
    return ranks[0], ranks[1], ranks[2]


def _check_complete(found: list[RankFiles], sizes: tuple[int, int, int], directory: Path) -> None:
    """Each tensor rank and each expert rank of each stage; without tensor parallel experts not all pairs of them."""
    tp, pp, ep = sizes
    there = {(rank.pp, "tensor", rank.tp) for rank in found} | {(rank.pp, "expert", rank.ep) for rank in found}
    wanted = (
        (stage, kind, number)
        for stage in range(pp)
        for kind, count in (("tensor", tp), ("expert", ep))
        for number in range(count)
    )
    missing = next((place for place in wanted if place not in there), None)
    if missing is not None:
        stage, kind, number = missing
        raise CorruptCheckpointError(
            f"{directory}: the files of {kind} parallel rank {number} of pipeline stage {stage} are not there; the "
            f"arguments are of TP {tp}, PP {pp}, EP {ep}. The copy is incomplete"
        )


# --- what is carried as it is


def reading(storage: Storage, file: str) -> Callable[[int, int], bytes]:
    """What reads bytes of a file, opened for each time."""

    def read(offset: int, length: int) -> bytes:
        with storage.open_reader(file) as reader:
            return reader.read(offset, length)

    return read


def carried_arguments(
    values: Mapping[str, Any], read: Callable[[int, int], bytes], where: str, records: Mapping[str, StateRecord]
) -> tuple[dict[str, Any], list[str]]:
    """Arguments as they go into another checkpoint, and the left out ones of unknown classes, each named."""
    carried, left_out = {}, []
    for name, value in values.items():
        try:
            carried[name] = taken_over(value, read, where, records)
        except (OptionError, KeyError):
            left_out.append(f"the argument {name[:200]} (of a class that is not known here)")
    return carried, left_out


# --- export

# Arguments by which the stages of a pipeline get different numbers of layers, and what they are where none does.
_UNEVEN = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
# Parts of the common state that a rank's file does not have.
_LEFT = ("args", "optimizer", "content_metadata")
_MOST_RANKS_ALONG = 4096

_shown = functools.lru_cache(maxsize=100_000)(pattern_of)  # ranks have most names in common


class _Sizes(NamedTuple):
    """Parallel sizes of the target; `vpp` is how many chunks of the model a pipeline stage has."""

    tp: int
    pp: int
    ep: int
    etp: int
    vpp: int

    @property
    def stage_ranks(self) -> int:
        """The fewest ranks of a stage that hold both groupings."""
        return math.lcm(self.tp, self.etp * self.ep)

    def __str__(self) -> str:
        etp = "" if self.etp == self.tp else f" ETP {self.etp}"
        vpp = "" if self.vpp == 1 else f" VPP {self.vpp}"
        return f"TP {self.tp} PP {self.pp}{vpp} EP {self.ep}{etp}"


@dataclass(slots=True)
class _Rank:
    """A rank with files of its own; `number` is that of the first such rank in its pipeline stage."""

    tp: int
    pp: int
    ep: int
    etp: int
    number: int
    folder: str
    chunks: list[dict[str, Any]] = field(default_factory=list)


def legacy_export(index: CheckpointIndex, options: ExportOptions) -> Conversion:
    """The files that a job with `--ckpt-format torch` loads at some parallel sizes."""
    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    optimizer = sum(map(is_optimizer_key, (*index.tensors, *index.objects)))
    check_tiled(index, keys)
    files = SourceFiles(index, keys)
    ranks = _Ranks(index, keys, _target_sizes(options))
    payloads = ViewPayloads(StoredPayloads(index), ranks.views)
    if optimizer:
        ranks.left_out.append(
            f"{optimizer} keys of the optimizer's state (a job with --ckpt-convert-format torch writes it; "
            "without it, a job is given --no-load-optim)"
        )
    return Conversion(
        payloads=payloads,
        source=files,
        plan=plan_state_files(
            {f"{rank.folder}/{MODEL_FILE}": ranks.state(rank) for rank in ranks.ranks}, payloads.index, options.workers
        ),
        keys=ranks.rows.values,
        report=ConversionReport(
            format="megatron-legacy",
            target_layout=str(ranks.sizes),
            notes=tuple(ranks.notes),
            left_out=tuple(ranks.left_out),
        ),
    )


def _target_sizes(options: ExportOptions) -> _Sizes:
    etp = options.tp if options.etp is None else options.etp
    sizes = _Sizes(options.tp, options.pp, options.ep, etp, options.vpp)
    if not all(1 <= size <= _MOST_RANKS_ALONG for size in sizes):
        named = ", ".join(f"{name}={size}" for name, size in sizes._asdict().items())
        raise OptionError(f"{named}: expected sizes of 1 to {_MOST_RANKS_ALONG}")
    if sizes.etp not in (1, sizes.tp):
        raise OptionError(
            f"etp={sizes.etp}, tp={sizes.tp}: experts are divided among as many ranks as other layers, or not at all, "
            "in this format here"
        )
    if sizes.vpp > 1 and sizes.pp == 1:
        raise OptionError(f"vpp={sizes.vpp}: a pipeline of one stage has no virtual stages; give pp")
    return sizes


class StoredModel:
    """A `torch_dist` checkpoint that is exported under the names of Megatron's modules, by its stored arguments."""

    def __init__(self, index: CheckpointIndex, keys: Sequence[str]) -> None:
        self.index = index
        stored = stored_common_state(index)
        if stored is None or stored.transforms:
            raise OptionError(f"{index.path}: stores no common state (arguments, iteration), which this format has")
        # Complete, with stand-ins for classes of packages that are not there.
        self.common: Any = unwrapped(decode_state(stored.content, stored.where))
        if not isinstance(self.common, dict):
            raise CorruptCheckpointError(f"{stored.where}: expected a dict, got {type(self.common).__name__}")
        given = self.common.get("args")
        if not isinstance(given, Namespace):
            raise OptionError(f"{index.path}: stores no arguments of Megatron, which say what the modules are called")
        stored_bytes = sum(chunk.item.length for key in keys for chunk in index.tensors[key].chunks)
        where = str(Path(index.path) / COMMON_FILE)
        self.arguments = Arguments(vars(given), where, max(FEWEST, stored_bytes))
        self.layers = self.arguments.count("num_layers")
        self.experts = self.arguments.count("num_experts") if self.arguments.values.get("num_experts") else 0
        self.is_grouped = self.experts > 0 and self.arguments.flag("moe_grouped_gemm")
        self.is_tied = not self.arguments.flag("untie_embeddings_and_output_weights")
        local = self.arguments.values.get("transformer_impl") == "local"
        if self.is_grouped and (local or self.arguments.flag("moe_use_legacy_grouped_gemm")):
            raise OptionError(
                f"{index.path}: experts of the grouped GEMM before Transformer Engine's (--moe-grouped-gemm with local "
                "layers, --moe-use-legacy-grouped-gemm) are not written in this format here"
            )
        self.stacking = Stacking(self.layers, self.experts, True, local and local_norms((), vars(given)))

    def own_shape(self, key: str, lead: int) -> tuple[int, ...]:
        """The shape of a parameter behind `lead` axes that count layers and experts; `CorruptCheckpointError`."""
        shape, is_expert = self.index.tensors[key].shape, is_expert_key(key)
        counts = (self.layers,) * (lead - is_expert) + (self.experts,) * min(lead, is_expert)
        if shape[:lead] != counts:
            raise CorruptCheckpointError(
                f"{self.index.path}: {key} has the shape {list(shape)}, expected {list(counts)} first, by the stored "
                "arguments"
            )
        return shape[lead:]


class _Ranks:
    """All ranks' files, as they are going to be: `views` are the ranks' tensors, `rows` are for showing."""

    def __init__(self, index: CheckpointIndex, keys: Sequence[str], sizes: _Sizes) -> None:
        self._index, self.sizes, self._model = index, sizes, StoredModel(index, keys)
        self.left_out: list[str] = []
        self.notes: list[str] = []
        self.views: dict[str, TensorView] = {}
        self.rows: dict[tuple[str, str], KeyPlan] = {}
        self._stored, self._layers, self._experts = self._model.arguments, self._model.layers, self._model.experts
        self._per_chunk = self._checked_sizes()
        self._vocabulary = self._padded_rows()
        self._partitioner = Partitioner(index, arguments=self._stored.values)
        self.ranks = [rank for stage in range(sizes.pp) for rank in self._stage(stage, keys)]
        random = [key for key in index.objects if key.startswith("rng_state/")]
        self._has_random = bool(random) and all(self._random_state(rank) for rank in self.ranks)
        if random and not self._has_random:
            self.left_out.append("rng_state (of another number of ranks; a job has to be given --no-load-rng)")

    def _checked_sizes(self) -> int:
        """Layers of one chunk of the model; raises `OptionError` for what cannot be divided so."""
        sizes, stored, path = self.sizes, self._stored, self._index.path
        per_chunk, left = divmod(self._layers, sizes.pp * sizes.vpp)
        if left:
            chunks = f"{sizes.pp} stages" + (f" of {sizes.vpp} chunks" if sizes.vpp > 1 else "")
            raise OptionError(f"{self._layers} layers do not divide into {chunks}")
        if (self._experts or 1) % sizes.ep:
            raise OptionError(f"{self._experts} experts do not divide among {sizes.ep} expert parallel ranks")
        uneven = [name for name, default in _UNEVEN.items() if stored.values.get(name) not in (None, default)]
        if sizes.pp > 1 and uneven:
            raise OptionError(
                f"{path}: the stored argument {uneven[0]} is {stored.values[uneven[0]]!s:.80}: stages with different "
                "numbers of layers are not written in this format here; take one stage (--pp 1)"
            )
        return per_chunk

    def _padded_rows(self) -> int:
        """Rows of the embedding, with those by which a job pads it."""
        entry = self._index.tensors.get(EMBEDDING)
        if entry is None or len(entry.shape) != 2:
            return 0
        padded = _rows_at(self._stored, entry.shape[0], self.sizes.tp)
        if padded is None:
            self.notes.append(
                f"the stored arguments do not tell the vocabulary's size: its {entry.shape[0]} rows stay; a job at "
                "this size that pads it to fewer needs --use-checkpoint-args"
            )
        return entry.shape[0] if padded is None else padded

    def _arguments(self) -> Namespace:
        """The arguments of a job that saves such files."""
        sizes = self.sizes
        changed: dict[str, Any] = {
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
            "num_layers_per_virtual_pipeline_stage": self._per_chunk if sizes.vpp > 1 else None,
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.etp,
            "ckpt_format": "torch",
            "use_dist_ckpt": False,
            **{name: default for name, default in _UNEVEN.items() if name in self._stored.values},
            **({"padded_vocab_size": self._vocabulary} if self._vocabulary else {}),
        }
        return Namespace(**{**self._stored.values, **changed})

    def state(self, rank: _Rank) -> dict[str, Any]:
        """What a rank's file holds."""
        state = {"args": self._arguments(), **{k: v for k, v in self._model.common.items() if k not in _LEFT}}
        several = len(rank.chunks) > 1
        state |= {f"model{number}" if several else "model": chunk for number, chunk in enumerate(rank.chunks)}
        random = self._random_state(rank)
        if random is not None and self._has_random:
            state["rng_state"] = self._object(random)
        return state

    def _random_state(self, rank: _Rank) -> str | None:
        """The object with a rank's random state, if it is stored for such ranks."""
        sizes, objects = self.sizes, self._index.objects
        if sizes.ep == 1:
            key = object_key("rng_state", (rank.pp, rank.tp), (sizes.pp, sizes.tp))
            return key if key in objects else None
        # With experts on several ranks, there is one for each data parallel rank.
        for full in objects:
            shard = parse_object_key(full)
            if shard is not None and shard.key == "rng_state" and len(shard.shape) == 3:
                place = (rank.pp, rank.tp, rank.number // sizes.tp)
                key = object_key("rng_state", place, (sizes.pp, sizes.tp, shard.shape[2]))
                return key if key in objects else None
        return None

    def _stage(self, stage: int, keys: Sequence[str]) -> Iterator[_Rank]:
        """The ranks of a stage that have files of their own."""
        sizes, known = self.sizes, set()
        for number in range(sizes.stage_ranks):
            tp, ep, etp = number % sizes.tp, number // sizes.etp % sizes.ep, number % sizes.etp
            if (tp, ep) in known:
                continue
            known.add((tp, ep))
            folder = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if sizes.pp > 1 else "")
            folder += f"_{ep:03d}" if sizes.ep > 1 else ""
            rank = _Rank(tp, stage, ep, etp, number, folder, [{} for _ in range(sizes.vpp)])
            for key in keys:
                for chunk, stored, place in self._names(rank, key, key, None):
                    self._add(rank, chunk, stored, key, place)
            self._add_extra_states(rank)
            yield rank

    def _names(
        self, rank: _Rank, key: str, where: str, index: tuple[int, ...] | None
    ) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """What a rank has of a sharded key: chunk of the model, name there, and index along counting axes. `index` is
        that of an object's shard; of a tensor, all indexes count. `where` is for messages.
        """
        last = (self.sizes.pp - 1, self.sizes.vpp - 1)
        layer = layer_of(key)
        if layer is not None and layer.before == "decoder.layers.":
            if holds_several(layer.rest):
                raise OptionError(
                    f"{self._index.path}: {where}: layers of Mamba and of linear attention are not written in this "
                    "format here: ranks' files have this together with others in one tensor"
                )
            lead = () if layer.number is not None else (0,)
            numbers = [layer.number] if layer.number is not None else range(self._layers)
            for number in numbers if index is None or not lead else [index[0]]:
                block, local = divmod(number, self._per_chunk)
                chunk, stage = divmod(block, self.sizes.pp)  # chunk after chunk, layers go through all stages
                if stage != rank.pp:
                    continue
                expert = None if index is None or len(index) == len(lead) else index[-1]
                for own, place in self._expert_names(rank, layer.rest, where, expert):
                    yield chunk, f"decoder.layers.{local}.{own}", (*((number,) if lead else ()), *place)
        elif key.startswith("embedding."):
            if rank.pp == 0:
                yield 0, key, ()
            if key == EMBEDDING and self._model.is_tied and self.sizes.pp > 1 and rank.pp == last[0]:
                yield last[1], OUTPUT, ()
        elif key.startswith(("decoder.final_layernorm.", "output_layer.")):
            if rank.pp == last[0]:
                yield last[1], key, ()
        else:
            raise OptionError(f"{self._index.path}: {where}: it is not known which rank has it in this format")

    def _expert_names(
        self, rank: _Rank, rest: str, where: str, number: int | None
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What a rank calls a layer's parameter, or those of its experts (of one alone: `number`)."""
        expert = expert_of(rest)
        if expert is None and not is_expert_key(f".{rest}"):
            yield self._model.stacking.of_module(rest), ()
            return
        linear, _, leaf = ("", "", "") if expert is None else expert.rest.partition(".")
        if expert is None or expert.number is not None or linear not in ("linear_fc1", "linear_fc2") or "." in leaf:
            raise OptionError(f"{self._index.path}: {where}: experts in this form are not written in this format here")
        count = self._experts // self.sizes.ep
        for own in range(count) if number is None else [number - rank.ep * count]:
            place = (rank.ep * count + own,)
            if not 0 <= own < count:
                continue
            if not self._model.is_grouped:
                yield f"{expert.before}.local_experts.{own}.{expert.rest}", place
            elif leaf != EXTRA_STATE:
                yield f"{expert.before}.{expert.rest}{own}", place
            elif own == 0:  # one for all of them
                yield f"{expert.before}.{expert.rest}", place

    def _add(self, rank: _Rank, chunk: int, stored: str, key: str, index: tuple[int, ...]) -> None:
        """A rank's shard of a tensor."""
        entry, lead = self._index.tensors[key], len(index)
        partition, own = self._partitioner.decide(key), list(self._model.own_shape(key, lead))
        if key in (EMBEDDING, OUTPUT) and entry.shape[0] == self._index.tensors[EMBEDDING].shape[0]:
            own[0] = self._vocabulary
        count, number = (self.sizes.etp, rank.etp) if partition.expert else (self.sizes.tp, rank.tp)
        if partition.decider == "whole" and count > 1:
            raise OptionError(f"{key}: nothing tells how it is divided among tensor parallel ranks")
        axis = None if partition.axis is None or count == 1 else partition.axis - lead
        if axis is not None and own[axis] % (count * partition.parts):
            raise OptionError(f"{key}: {list(entry.shape)} cannot be divided among {count} ranks along axis {axis}")
        slices = shard_slices(own, axis, partition.parts, count, number)
        if axis is not None:
            own[axis] //= count
        parts = [part for mine, there in slices for part in _parts(mine, key, index, there, entry.shape[lead:])]
        view_key = f"{rank.folder}/{chunk}/{stored}"
        self.views[view_key] = TensorView(tuple(own), tuple(parts), entry.dtype)
        rank.chunks[chunk][stored] = SavedTensor(entry.dtype, tuple(own), view_key)
        self._note_row(stored, key, tuple(own), axis, lead, partition.parts)

    def _note_row(self, stored: str, key: str, shape: tuple[int, ...], axis: int | None, lead: int, parts: int) -> None:
        pattern = _shown(stored)
        known = self.rows.get((key, pattern))
        if known is not None:
            self.rows[key, pattern] = replace(known, parts=known.parts + 1)
            return
        how = []
        if axis is not None:
            how.append(f"divided along axis {axis}" + (", each half by itself" if parts > 1 else ""))
        if lead:
            how.append("taken apart")
        dtype = self._index.tensors[key].dtype
        self.rows[key, pattern] = KeyPlan(key, 1, ", ".join(how) or "as it is", pattern, shape, dtype)

    def _add_extra_states(self, rank: _Rank) -> None:
        """What layers keep for themselves; the output layer's is in these files alone."""
        in_layers = False
        for full in self._index.objects:
            shard = parse_object_key(full)
            if shard is None or not shard.key.endswith(f".{EXTRA_STATE}"):
                continue
            for chunk, stored, place in self._names(rank, shard.key, full, shard.offset):
                if self._model.is_grouped and is_expert_key(stored) and place and self._stored.values.get("fp8"):
                    raise OptionError(
                        f"{self._index.path}: {full}: scales of grouped experts in FP8 are not joined here"
                    )
                rank.chunks[chunk][stored] = self._object(full)
                in_layers |= layer_of(shard.key) is not None
        if rank.pp == self.sizes.pp - 1 and in_layers:
            rank.chunks[-1][f"output_layer.{EXTRA_STATE}"] = None

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (lives as long as the export)
    def _object(self, key: str) -> Any:
        entry = self._index.objects[key]
        return unwrapped(decode_state(read_object(self._index, entry), f"{key} ({entry.item.file})"))


def _parts(mine: Box, key: str, index: tuple[int, ...], there: Box, stored: tuple[int, ...]) -> Iterator[Part]:
    """A slice of a rank's shard, of a stored tensor that has this shape behind `index`; zeros behind its last row."""
    lead = (1,) * len(index)
    left = max(0, stored[0] - there.offsets[0]) if stored else 0
    if not stored or mine.sizes[0] <= left:
        yield Part(mine, key, Box((*index, *there.offsets), (*lead, *mine.sizes)))
        return
    if left:
        sizes = (left, *mine.sizes[1:])
        yield Part(Box(mine.offsets, sizes), key, Box((*index, *there.offsets), (*lead, *sizes)))
    yield Part(Box((mine.offsets[0] + left, *mine.offsets[1:]), (mine.sizes[0] - left, *mine.sizes[1:])), None)


def _rows_at(arguments: Arguments, rows: int, tp: int) -> int | None:
    """To how many rows a job at `tp` pads a vocabulary, of which `rows` are stored; None if that is not known."""
    stored_tp, values = arguments.count("tensor_model_parallel_size", default=1), arguments.values
    if token_count(values) is not None:
        # A job that was given another number of rows is given it again.
        return padded_vocabulary(values, tp) if padded_vocabulary(values, stored_tp) == rows else rows
    if not values.get("make_vocab_size_divisible_by"):
        return rows
    multiple = arguments.count("make_vocab_size_divisible_by")
    unit, stored_unit = multiple * tp, multiple * stored_tp
    if rows % stored_unit:
        return rows
    # The tokens end in the last unit that is stored.
    fewest, most = (-(-tokens // unit) * unit for tokens in (rows - stored_unit + 1, rows))
    return most if fewest == most else None
