"""Checkpoints of `--ckpt-format torch`: a directory for each model-parallel rank, read and written.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     arguments, model, optimizer, random state of one model-parallel rank
    mp_rank_TT[_PPP][_EEE]/distrib_optim.pt       flat buffers of the distributed optimizer

Nothing is unpickled freely, and no tensor is read before it is copied: state dicts are read by `format/state_file.py`.

Of an export, the optimizer's state is not written: its order is that of the model's modules, which only a job has
(`--ckpt-convert-format torch`).
"""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError, UnsafePickleError
from mcore_ckpt.format.index import CheckpointIndex, object_key, parse_object_key
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.state_file import StateFile, StateRecord, read_state_file
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.format.unpickler import Opaque
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
from mcore_ckpt.reshard.plan import TargetLayout, padded_vocabulary
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

    def count(self, name: str, default: int | None = None) -> int:
        """A positive number; raises `CorruptCheckpointError` for others, and for more ranks or layers than the files
        have bytes.
        """
        value = default if self.values.get(name) is None else self.values[name]
        most = _MOST if name.startswith("ddp_") else self.most
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= max(most, default or 0):
            raise CorruptCheckpointError(
                f"{self.where}: the stored argument {name} is {value!r:.80}; expected a positive number"
                + (f", no greater than the {most} bytes that the checkpoint has" if most < _MOST else "")
            )
        return value

    def flag(self, name: str) -> bool:
        """Whether an argument is there and set."""
        return bool(self.values.get(name))

    @property
    def layout(self) -> TargetLayout:
        """The parallel sizes of the job that had them."""
        tp, pp, ep = (self.count(f"{kind}_model_parallel_size", default=1) for kind in ("tensor", "pipeline", "expert"))
        etp = self.count("expert_tensor_parallel_size", default=tp)
        return TargetLayout(tp, pp, ep, None if etp == tp else etp)


def stacks_layers(arguments: Mapping[str, Any]) -> bool:
    """Whether Megatron-Core saves these layers in one tensor for each kind of parameter."""

    def unlike(value: Any) -> bool:
        return isinstance(value, list) or (isinstance(value, int) and value > 1)

    return not (
        unlike(arguments.get("moe_layer_freq", 1))
        or unlike(arguments.get("linear_attention_freq"))
        or arguments.get("heterogeneous_layers_config_path")
        or arguments.get("heterogeneous_layers_config_encoded_json")
    )


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
        sizes = arguments.layout
        if shown is None:
            shown = arguments
        elif sizes != shown.layout:
            raise CorruptCheckpointError(
                f"{where}: its arguments are of {sizes}, those of {shown.where} of {shown.layout}; the "
                "directories are of different checkpoints"
            )
        tp, pp, ep = _rank_of(folder, sizes, where)
        optimizer = None
        if storage.exists(f"{folder}/{OPTIMIZER_FILE}"):
            optimizer = read_state(storage, f"{folder}/{OPTIMIZER_FILE}")
        found.append(RankFiles(tp, pp, ep, folder, model, optimizer))
    assert shown is not None
    found.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    _check_complete(found, shown.layout, directory)
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


def _rank_of(folder: str, layout: TargetLayout, where: str) -> tuple[int, int, int]:
    """A folder's ranks: pipeline and expert parallel ones are in its name only where there are several."""
    matched = _FOLDER.fullmatch(folder)
    assert matched is not None
    numbers = [int(part) for part in matched.groups() if part is not None]
    sizes = layout.tp, layout.pp, layout.ep
    kinds = [0, *(axis for axis in (1, 2) if sizes[axis] > 1)]
    if len(numbers) != len(kinds):
        raise CorruptCheckpointError(
            f"{where}: its arguments are of {layout}, for which a directory's name has {len(kinds)} numbers; {folder} "
            f"has {len(numbers)}"
        )
    ranks = [0, 0, 0]
    for axis, number in zip(kinds, numbers, strict=True):
        ranks[axis] = number
    if any(rank >= size for rank, size in zip(ranks, sizes, strict=True)):
        raise CorruptCheckpointError(f"{where}: there is no such rank at {layout}")
    return ranks[0], ranks[1], ranks[2]


def _check_complete(found: list[RankFiles], layout: TargetLayout, directory: Path) -> None:
    """Each tensor rank and each expert rank of each stage; without tensor parallel experts not all pairs of them."""
    there = {(rank.pp, "tensor", rank.tp) for rank in found} | {(rank.pp, "expert", rank.ep) for rank in found}
    wanted = (
        (stage, kind, number)
        for stage in range(layout.pp)
        for kind, count in (("tensor", layout.tp), ("expert", layout.ep))
        for number in range(count)
    )
    missing = next((place for place in wanted if place not in there), None)
    if missing is not None:
        stage, kind, number = missing
        raise CorruptCheckpointError(
            f"{directory}: the files of {kind} parallel rank {number} of pipeline stage {stage} are not there; the "
            f"arguments are of {layout}. The copy is incomplete"
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

_shown = functools.lru_cache(maxsize=100_000)(pattern_of)  # ranks have most names in common


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
    sizes = TargetLayout(options.tp, options.pp, options.ep, options.etp)
    if sizes.expert_tp not in (1, sizes.tp):
        raise OptionError(
            f"etp={sizes.etp}, tp={sizes.tp}: experts are divided among as many ranks as other layers, or not at all, "
            "in this format here"
        )
    if options.vpp > 1 and sizes.pp == 1:
        raise OptionError(f"vpp={options.vpp}: a pipeline of one stage has no virtual stages; give pp")
    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    optimizer = sum(map(is_optimizer_key, (*index.tensors, *index.objects)))
    check_tiled(index, keys)
    files = SourceFiles(index, keys)
    ranks = _Ranks(index, keys, sizes, options.vpp)
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
            target_layout=f"{sizes}" + (f" VPP {options.vpp}" if options.vpp > 1 else ""),
            notes=tuple(ranks.notes),
            left_out=tuple(ranks.left_out),
        ),
    )


class _Ranks:
    """All ranks' files, as they are going to be: `views` are the ranks' tensors, `rows` are for showing."""

    def __init__(self, index: CheckpointIndex, keys: Sequence[str], sizes: TargetLayout, vpp: int) -> None:
        self._index, self._sizes, self._vpp = index, sizes, vpp
        self.left_out: list[str] = []
        self.notes: list[str] = []
        self.views: dict[str, TensorView] = {}
        self.rows: dict[tuple[str, str], KeyPlan] = {}
        self._common = self._common_state()
        stored_bytes = sum(chunk.item.length for key in keys for chunk in index.tensors[key].chunks)
        where = str(Path(index.path) / COMMON_FILE)
        self._stored = stored = Arguments(vars(self._common["args"]), where, max(FEWEST, stored_bytes))
        self._layers = stored.count("num_layers")
        self._experts = stored.count("num_experts") if stored.values.get("num_experts") else 0
        self._is_grouped = self._experts > 0 and stored.flag("moe_grouped_gemm")
        local = stored.values.get("transformer_impl") == "local"
        if self._is_grouped and (local or stored.flag("moe_use_legacy_grouped_gemm")):
            raise OptionError(
                f"{index.path}: experts of the grouped GEMM before Transformer Engine's (--moe-grouped-gemm with local "
                "layers, --moe-use-legacy-grouped-gemm) are not written in this format here"
            )
        self._stacking = Stacking(self._layers, self._experts, True, local and local_norms((), stored.values))
        self._per_chunk = self._layers_of_chunk()
        self._vocabulary = self._padded_rows()
        self._partitioner = Partitioner(index, arguments=stored.values)
        self.ranks = [rank for stage in range(sizes.pp) for rank in self._stage(stage, keys)]
        random = [shard for full in index.objects if (shard := parse_object_key(full)) and shard.key == "rng_state"]
        self._random = random[0].shape if random else ()
        self._has_random = bool(random) and all(self._random_state(rank) in index.objects for rank in self.ranks)
        if random and not self._has_random:
            self.left_out.append("rng_state (of another number of ranks; a job has to be given --no-load-rng)")

    def _common_state(self) -> dict[str, Any]:
        """Complete, with arguments, and stand-ins for classes of packages that are not there."""
        stored = stored_common_state(self._index)
        common = None if stored is None else decode_state(stored.content, stored.where)
        common = unwrapped(common)
        if not isinstance(common, dict) or not isinstance(common.get("args"), Namespace):
            raise OptionError(f"{self._index.path}: stores no arguments of Megatron, which say what the modules are")
        return common

    def _layers_of_chunk(self) -> int:
        """Layers of one chunk of the model; raises `OptionError` for what cannot be divided so."""
        sizes, stored, path = self._sizes, self._stored, self._index.path
        per_chunk, left = divmod(self._layers, sizes.pp * self._vpp)
        if left:
            chunks = f"{sizes.pp} stages" + (f" of {self._vpp} chunks" if self._vpp > 1 else "")
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
        entry, values = self._index.tensors.get(EMBEDDING), self._stored.values
        rows = entry.shape[0] if entry is not None and len(entry.shape) == 2 else 0
        padded = padded_vocabulary(values, self._sizes.tp)
        if padded is None:
            if rows:
                self.notes.append(
                    f"the stored arguments do not tell the vocabulary's size: its {rows} rows stay; a job at this "
                    "size that pads it to fewer needs --use-checkpoint-args"
                )
            return rows
        # A job that was given another number of rows is given it again.
        stored_tp = self._stored.count("tensor_model_parallel_size", default=1)
        return padded if padded_vocabulary(values, stored_tp) == rows else rows

    def state(self, rank: _Rank) -> dict[str, Any]:
        """What a rank's file holds."""
        sizes, vpp = self._sizes, self._vpp
        arguments: dict[str, Any] = {
            **self._stored.values,
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
            "num_layers_per_virtual_pipeline_stage": self._per_chunk if vpp > 1 else None,
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.expert_tp,
            "ckpt_format": "torch",
            "use_dist_ckpt": False,
            **{name: default for name, default in _UNEVEN.items() if name in self._stored.values},
            **({"padded_vocab_size": self._vocabulary} if self._vocabulary else {}),
        }
        state = {"args": Namespace(**arguments), **{k: v for k, v in self._common.items() if k not in _LEFT}}
        state |= {f"model{number}" if vpp > 1 else "model": chunk for number, chunk in enumerate(rank.chunks)}
        if self._has_random:
            state["rng_state"] = self._object(self._random_state(rank))
        return state

    def _random_state(self, rank: _Rank) -> str:
        """The object with a rank's random state; with experts on several ranks, one for each data parallel rank."""
        sizes = self._sizes
        shape = (sizes.pp, sizes.tp, *(self._random[2:] or (0,))) if sizes.ep > 1 else (sizes.pp, sizes.tp)
        return object_key("rng_state", (rank.pp, rank.tp, rank.number // sizes.tp)[: len(shape)], shape)

    def _stage(self, stage: int, keys: Sequence[str]) -> Iterator[_Rank]:
        """The ranks of a stage that have files of their own."""
        sizes, known = self._sizes, set()
        for number in range(sizes.stage_ranks):
            tp, ep, etp = number % sizes.tp, number // sizes.expert_tp % sizes.ep, number % sizes.expert_tp
            if (tp, ep) in known:
                continue
            known.add((tp, ep))
            folder = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if sizes.pp > 1 else "")
            folder += f"_{ep:03d}" if sizes.ep > 1 else ""
            rank = _Rank(tp, stage, ep, etp, number, folder, [{} for _ in range(self._vpp)])
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
        last = (self._sizes.pp - 1, self._vpp - 1)
        is_tied = not self._stored.flag("untie_embeddings_and_output_weights")
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
                chunk, stage = divmod(block, self._sizes.pp)  # chunk after chunk, layers go through all stages
                if stage != rank.pp:
                    continue
                expert = None if index is None or len(index) == len(lead) else index[-1]
                for own, place in self._expert_names(rank, layer.rest, where, expert):
                    yield chunk, f"decoder.layers.{local}.{own}", (*((number,) if lead else ()), *place)
        elif key.startswith("embedding."):
            if rank.pp == 0:
                yield 0, key, ()
            if key == EMBEDDING and is_tied and self._sizes.pp > 1 and rank.pp == last[0]:
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
            yield self._stacking.of_module(rest), ()
            return
        linear, _, leaf = ("", "", "") if expert is None else expert.rest.partition(".")
        if expert is None or expert.number is not None or linear not in ("linear_fc1", "linear_fc2") or "." in leaf:
            raise OptionError(f"{self._index.path}: {where}: experts in this form are not written in this format here")
        count = self._experts // self._sizes.ep
        for own in range(count) if number is None else [number - rank.ep * count]:
            place = (rank.ep * count + own,)
            if not 0 <= own < count:
                continue
            if not self._is_grouped:
                yield f"{expert.before}.local_experts.{own}.{expert.rest}", place
            elif leaf != EXTRA_STATE:
                yield f"{expert.before}.{expert.rest}{own}", place
            elif own == 0:  # one for all of them
                yield f"{expert.before}.{expert.rest}", place

    def _add(self, rank: _Rank, chunk: int, stored: str, key: str, index: tuple[int, ...]) -> None:
        """A rank's shard of a tensor."""
        entry, lead = self._index.tensors[key], len(index)
        counts = (self._layers,) * (lead - is_expert_key(key)) + (self._experts,) * min(lead, is_expert_key(key))
        if entry.shape[:lead] != counts:
            raise CorruptCheckpointError(
                f"{self._index.path}: {key} has the shape {list(entry.shape)}, expected {list(counts)} first, by the "
                "stored arguments"
            )
        partition, own = self._partitioner.decide(key), list(entry.shape[lead:])
        if key in (EMBEDDING, OUTPUT) and entry.shape[0] == self._index.tensors[EMBEDDING].shape[0]:
            own[0] = self._vocabulary
        count, number = (self._sizes.expert_tp, rank.etp) if partition.expert else (self._sizes.tp, rank.tp)
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
                if self._is_grouped and is_expert_key(stored) and place and self._stored.values.get("fp8"):
                    raise OptionError(
                        f"{self._index.path}: {full}: scales of grouped experts in FP8 are not joined here"
                    )
                rank.chunks[chunk][stored] = self._object(full)
                in_layers |= layer_of(shard.key) is not None
        if rank.pp == self._sizes.pp - 1 and in_layers:
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
