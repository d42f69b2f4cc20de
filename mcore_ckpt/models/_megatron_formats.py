"""Checkpoints of Megatron's other formats, as `torch_dist`. No model is built, and Megatron is not needed.

    model.module.decoder.layers.3.mlp.linear_fc1.weight_w        ->  decoder.layers.mlp.linear_fc1.weight

Files hold parameters under the names of Megatron's modules. Such names become those of `sharded_state_dict`: layers and
experts are stacked, halves of a gated layer joined, and the norms of Megatron's own layers are called as Transformer
Engine calls them.

`--ckpt-format torch` has one file for each model-parallel rank:

    state dict of each rank -> sharded key, layer and expert of each parameter -> the slice of the tensor that it is
    -> a view of the ranks' tensors under sharded keys -> a reshard like any other

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     arguments, model, optimizer, random state of one model-parallel rank

How a parameter is divided comes from the partition table. What ranks hold alike has to be alike; what is missing, too
much, or unknown is an error that names it. Nothing is unpickled freely, and no tensor is read before it is copied:
state dicts are read by `format/state_file.py`. The optimizer's state is left out, and random states are. The files have
it without names, in the order of the model's modules, which only a job has.

`--ckpt-format fsdp_dtensor` (Megatron-FSDP) has complete parameters in a DCP checkpoint, under names as
`preprocess_fsdp_dtensor_state_dict` (Megatron-LM 0.16, 0.19) makes them.
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, TensorEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.state_file import StateFile, StateRecord, read_state_file
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.models._foreign import (
    Opened,
    Training,
    file_range,
    import_conversion,
    is_foreign_optimizer_key,
    launch_state,
    layout_of,
    no_tensor,
    plan_optimizer,
    read_state,
    refuse_another,
    where_other,
    without_wrappers,
)
from mcore_ckpt.models._settings import expert_layers_of
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan
from mcore_ckpt.reshard.options import ImportOptions
from mcore_ckpt.reshard.parameter_orders import plain_values
from mcore_ckpt.reshard.partition import (
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    Partition,
    Partitioner,
    ShardedName,
    Stacking,
    expert_of,
    extra_states,
    is_expert_key,
    layer_of,
    local_norms,
    pattern_of,
    prefix_of,
    shard_slices,
    split_half,
)
from mcore_ckpt.reshard.plan import TargetLayout, padded_vocabulary, target_dtype
from mcore_ckpt.reshard.view import FilePayloads, FileRange, Part, TensorView
from mcore_ckpt.reshard.weight_files import encode_state, taken_over
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import read_object, read_plain_object

MODEL_FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MOST_RANKS = 100_000

# What may be counted at most: ranks, layers, experts.
_MOST = 2**20


class Arguments(NamedTuple):
    """Megatron's arguments in the file `where`."""

    values: Mapping[str, Any]
    where: str

    def number(self, name: str, default: int | None = None) -> int:
        """A positive number; raises `CorruptCheckpointError` for others, and for more than anything has."""
        value = default if self.values.get(name) is None else self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
            raise CorruptCheckpointError(
                f"{self.where}: the stored argument {name} is {value!r:.80}; expected a positive number up to {_MOST}"
            )
        return value

    @property
    def layout(self) -> TargetLayout:
        """The parallel sizes of the job that had them."""
        tp, pp, ep = (
            self.number(f"{kind}_model_parallel_size", default=1) for kind in ("tensor", "pipeline", "expert")
        )
        etp = self.number("expert_tensor_parallel_size", default=tp)
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
    """What one model-parallel rank has saved in `folder` (`mp_rank_...`): `model` is its `model_optim_rng.pt`."""

    tp: int
    pp: int
    ep: int
    folder: str
    model: StateFile

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
    """All ranks' files by pipeline, expert and tensor rank, and the first one's arguments; `CorruptCheckpointError`."""
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
        given = state.get("args")
        if not isinstance(given, Namespace):
            raise CorruptCheckpointError(
                f"{where}: holds no arguments of Megatron (`args`), which tell how the model is divided; got "
                f"{type(given).__name__}"
            )
        arguments = Arguments(vars(given), where)
        sizes = arguments.layout
        if shown is None:
            shown = arguments
        elif sizes != shown.layout:
            raise CorruptCheckpointError(
                f"{where}: its arguments are of {sizes}, those of {shown.where} of {shown.layout}; the "
                "directories are of different checkpoints"
            )
        tp, pp, ep = _rank_of(folder, sizes, where)
        found.append(RankFiles(tp, pp, ep, folder, model))
    assert shown is not None
    found.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    # Tensors tell which ranks of a stage are missing, but not that a stage without layers is.
    if lost := sorted({*range(shown.layout.pp)} - {rank.pp for rank in found}):
        raise CorruptCheckpointError(
            f"{directory}: the files of pipeline stage {lost[0]} are not there; the arguments are of {shown.layout}. "
            "The copy is incomplete"
        )
    iterations = {repr(rank.state.get("iteration")): rank for rank in found}
    if len(iterations) > 1:
        first, second = list(iterations.items())[:2]
        raise CorruptCheckpointError(
            f"{directory}: {first[1].file} is of iteration {first[0]:.40}, {second[1].file} of {second[0]:.40}; take "
            "one checkpoint's files"
        )
    return found, shown


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


# --- from ranks to tensors

_MODEL_CHUNK = re.compile(r"model(\d{0,4})")
_CARRIED = ("checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of one rank: its key in the state dict of a chunk of the model, and its sharded name."""

    rank: RankFiles
    chunk: int
    stored: str
    name: ShardedName
    tensor: FileTensor

    @property
    def where(self) -> str:
        return f"{self.rank.file}: {self.stored}"

    @property
    def base(self) -> str:
        """Its key in the payloads of all ranks' files."""
        return f"{self.rank.folder}/model{self.chunk}/{self.stored}"


@dataclass(slots=True)
class _Tensor:
    """A tensor of the target while its shards are collected: sizes of counting axes, shape and dtype of one shard."""

    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    pattern: str
    shards: list[_Parameter] = field(default_factory=list)


@dataclass(slots=True)
class _Model:
    """What the ranks' files hold, while it is collected."""

    directory: Path
    ranks: list[RankFiles]
    arguments: Arguments
    ranges: dict[str, FileRange] = field(default_factory=dict)
    tensors: dict[str, _Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, shard: _Parameter) -> None:
        """One more shard of a tensor."""
        at, counts = file_range(shard.rank.file, shard.tensor, shard.rank.model), shard.name.counts
        self.ranges[shard.base] = at
        tensor = _Tensor(counts, at.shape, at.dtype, pattern_of(shard.stored))
        known = self.tensors.setdefault(shard.name.key, tensor)
        if (known.shape, known.dtype, known.counts) != (at.shape, at.dtype, counts):
            raise CorruptCheckpointError(
                f"{shard.where}: {at.dtype} of {list(at.shape)}, but {known.shards[0].where} of the same tensor is "
                f"{known.dtype} of {list(known.shape)}; the files are of different checkpoints"
            )
        known.shards.append(shard)

    def shard_count(self, partition: Partition) -> int:
        """Among how many ranks a tensor is divided."""
        if not partition.expert:
            return self.arguments.layout.tp
        tp, etp = self.arguments.layout.tp, self.arguments.layout.expert_tp
        if etp not in (1, tp):
            raise OptionError(
                f"{self.arguments.where}: experts are divided among {etp} ranks, other layers among {tp}; only the "
                "same number, or one, is put together here"
            )
        return etp


# --- parameters


def _chunks(rank: RankFiles) -> list[tuple[int, Mapping[str, Any]]]:
    """A rank's model, or its chunks where pipelines are virtual, in their order."""
    found: list[tuple[int, Mapping[str, Any]]] = []
    state: dict[Any, Any] = rank.state
    for key, value in state.items():
        matched = _MODEL_CHUNK.fullmatch(key) if isinstance(key, str) else None
        if matched is None:
            continue
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise CorruptCheckpointError(f"{rank.file}: {key}: expected parameters by name")
        found.append((int(matched.group(1) or 0), value))
    found.sort(key=lambda chunk: chunk[0])
    if [number for number, _ in found] != list(range(len(found))):
        raise CorruptCheckpointError(f"{rank.file}: chunks {[number for number, _ in found]} of the model")
    return found


def _first_layers(model: _Model) -> tuple[dict[tuple[int, int], int], int]:
    """The number of the first layer of each stage's chunk: stages follow one another, chunk after chunk."""
    counts: dict[tuple[int, int], tuple[int, str]] = {}
    for rank in model.ranks:
        for chunk, state in _chunks(rank):
            numbers = set(_by_layer(state))
            if numbers != set(range(len(numbers))):
                raise CorruptCheckpointError(f"{rank.file}: layers {sorted(numbers)[:20]}; some are missing")
            known = counts.setdefault((chunk, rank.pp), (len(numbers), rank.file))
            if known[0] != len(numbers):
                raise CorruptCheckpointError(
                    f"{rank.file}: {len(numbers)} layers, {known[1]} of the same pipeline stage has {known[0]}"
                )
    found: dict[tuple[int, int], int] = {}
    total = 0
    for place in sorted(counts):
        found[place] = total
        total += counts[place][0]
    layers = model.arguments.number("num_layers")
    if total != layers:
        raise CorruptCheckpointError(
            f"{model.directory}: the files hold {total} layers, the stored arguments say {layers}; files are missing, "
            "or it is no decoder alone"
        )
    return found, total


def _read_model(model: _Model) -> None:
    """Find all parameters, and the shards of the model's tensors that they are."""
    arguments = model.arguments
    first_layers, layers = _first_layers(model)
    experts = 0 if arguments.values.get("num_experts") is None else arguments.number("num_experts")
    local_experts, uneven = divmod(experts or 1, model.arguments.layout.ep)
    if uneven:
        raise CorruptCheckpointError(f"{arguments.where}: {experts} experts do not divide among expert ranks")
    keys = [key for rank in model.ranks for _, state in _chunks(rank) for key in state]
    stacking = Stacking(layers, experts, stacks_layers(arguments.values), local_norms(keys, arguments.values))
    tied = not arguments.values.get("untie_embeddings_and_output_weights")
    for rank in model.ranks:
        where = str(model.directory / rank.file)
        for chunk, state in _chunks(rank):
            for stored, value in state.items():
                if value is None or stored.endswith(f".{EXTRA_STATE}"):
                    continue
                if type(value) is not FileTensor:
                    raise OptionError(
                        f"{where}: {stored}: expected a tensor, got {type(value).__name__}; it is not known how the "
                        "ranks' parts of it belong together"
                    )
                if not experts and expert_of(stored) is not None:
                    raise CorruptCheckpointError(f"{where}: {stored}: the stored arguments know of no experts")
                try:
                    name = stacking.sharded(stored, first_layers[chunk, rank.pp], rank.ep * local_experts)
                except OptionError as error:
                    raise OptionError(f"{where}: {error}") from error
                if stored == OUTPUT and tied:
                    name = ShardedName(EMBEDDING, (), ())
                model.add(_Parameter(rank, chunk, stored, name, value))
    if arguments.values.get("fp8"):
        model.left_out.append("scales of FP8 (a job finds its own)")


# --- tensors


def _partitions(model: _Model) -> dict[str, Partition]:
    """How each tensor is divided, by the table; raises `OptionError` for one that the table does not know."""
    entries = {
        key: TensorEntry(key, tensor.dtype, (*tensor.counts, *tensor.shape), ())
        for key, tensor in model.tensors.items()
    }
    index = CheckpointIndex(str(model.directory), entries, {})
    partitioner = Partitioner(index, arguments=model.arguments.values, chunks_tell=False)
    found = {key: partitioner.decide(key) for key in entries}
    for key, partition in found.items():
        if partition.decider == "whole" and model.shard_count(partition) > 1:
            raise OptionError(
                f"{model.tensors[key].shards[0].where}: nothing tells how {key} is divided among tensor parallel "
                "ranks; load the checkpoint once with Megatron, and save it as torch_dist"
            )
    return found


def _put_together(
    model: _Model, partitions: Mapping[str, Partition]
) -> tuple[dict[str, TensorView], list[tuple[_Parameter, _Parameter, str]]]:
    """The tensors of the target from their shards, and pairs of shards that have to be the same."""
    views: dict[str, TensorView] = {}
    pairs: list[tuple[_Parameter, _Parameter, str]] = []
    for key, tensor in model.tensors.items():
        partition, lead = partitions[key], len(tensor.counts)
        axis = None if partition.axis is None else partition.axis - lead
        count = 1 if axis is None else model.shard_count(partition)
        parts = partition.parts if count > 1 else 1
        chosen: dict[tuple[tuple[int, ...], int], _Parameter] = {}
        for shard in tensor.shards:
            first = chosen.setdefault((shard.name.offsets, shard.rank.tp if count > 1 else 0), shard)
            if first is not shard:
                pairs.append((first, shard, key))
        places = itertools.product(itertools.product(*map(range, tensor.counts)), range(count))
        missing = next((place for place in places if place not in chosen), None)
        if missing is not None:
            raise CorruptCheckpointError(
                f"{model.directory}: no rank holds the part {missing[1]} of {count} of {key}"
                + (f" at {list(missing[0])}" if missing[0] else "")
                + f"; {tensor.shards[0].where} is another part of it. Files are missing"
            )
        shape = list(tensor.shape)
        if axis is not None:
            if shape[axis] % parts:
                raise CorruptCheckpointError(f"{tensor.shards[0].where}: {shape} has no {parts} halves")
            shape[axis] *= count
        found = [
            Part(Box((*index, *there.offsets), (*(1,) * lead, *there.sizes)), shard.base, own)
            for (index, number), shard in sorted(chosen.items(), key=lambda item: item[0])
            for own, there in shard_slices(shape, axis, parts, count, number)
        ]
        views[key] = TensorView((*tensor.counts, *shape), tuple(found))
    return views, pairs


def _check_same(payloads: FilePayloads, pairs: Iterable[tuple[_Parameter, _Parameter, str]]) -> None:
    """Raise `CorruptCheckpointError` where ranks differ in what all of them hold."""
    for first, other, key in pairs:
        if differs := where_other(payloads, first.base, other.base):
            raise CorruptCheckpointError(
                f"{payloads.index.path}: {key} is the same on all ranks that hold it, but {first.where} and "
                f"{other.where} differ, {differs}. One of the files is of another checkpoint, or the job has let its "
                "ranks drift apart; nothing was written"
            )


# --- common state


def _common_state(model: _Model) -> dict[str, Any]:
    """What all ranks share, of the first of them."""
    first = model.ranks[0]
    read = reading(storage_at(model.directory), "")
    carried, left_out = carried_arguments(model.arguments.values, read, model.arguments.where, {})
    model.left_out += left_out
    # Without the optimizer nothing goes on as it would have; so said, a job does not look for random states.
    more = {"ckpt_format": "torch_dist", "use_dist_ckpt": True, "no_save_rng": True}
    common: dict[str, Any] = {"args": Namespace(**{**carried, **more})}
    for key, value in first.state.items():
        if key in ("args", "optimizer", "rng_state") or _MODEL_CHUNK.fullmatch(str(key)):
            continue
        if key in _CARRIED:
            common[key] = first.taken(model.directory, value)
        else:
            model.left_out.append(f"{str(key)[:200]} (of each rank, and not known how it belongs together)")
    common["content_metadata"] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return common


# --- the import


def legacy_import(directory: Path, options: ImportOptions) -> Conversion:
    """A checkpoint of `--ckpt-format torch`. Reads indexes, small files, and what ranks hold alike."""
    ranks, arguments = read_ranks(directory)
    model = _Model(directory, ranks, arguments)
    _read_model(model)
    common = _common_state(model)
    if "optimizer" in ranks[0].state:
        model.left_out.append(
            "the optimizer's state and random states (a job with --ckpt-format torch --ckpt-convert-format torch_dist "
            "converts them; without, a job is given --no-load-optim)"
        )
    partitions = _partitions(model)
    views, pairs = _put_together(model, partitions)
    payloads = FilePayloads(directory, model.ranges)
    try:
        _check_same(payloads, pairs)
        return import_conversion(
            payloads,
            options,
            layout_of(options, model.arguments.layout),
            lambda _: encode_state(common),
            ConversionReport(
                format="megatron-legacy",
                arguments=vars(common["args"]),
                source_layout=str(model.arguments.layout),
                left_out=tuple(model.left_out),
            ),
            keys=lambda: (_row(model, key, partitions[key], view, options) for key, view in views.items()),
            tensors=views,
            objects=extra_states(
                (shard.name for tensor in model.tensors.values() for shard in tensor.shards),
                engine=arguments.values.get("transformer_impl") == "transformer_engine",
            ),
        )
    except BaseException:
        payloads.close()
        raise


def _row(model: _Model, key: str, partition: Partition, view: TensorView, options: ImportOptions) -> KeyPlan:
    tensor, how = model.tensors[key], []
    count = 1 if partition.axis is None else model.shard_count(partition)
    if count > 1 and partition.axis is not None:
        halves = ", each half by itself" if partition.parts > 1 else ""
        how.append(f"joined along axis {partition.axis - len(tensor.counts)}{halves}")
    if tensor.counts:
        how.append("stacked")
    dtype = target_dtype(TensorEntry(key, tensor.dtype, view.shape, ()), options.dtype)
    parts = len({part.key for part in view.parts})
    return KeyPlan(tensor.pattern, parts, ", ".join(how) or "as it is", key, view.shape, dtype)


# --- Megatron-FSDP

_MOST_LAYERS = 100_000
_SCHEDULE = "opt_param_scheduler"
_HALVES = {"w": "first half", "v": "second half", "": "as it is"}


class _Whole(NamedTuple):
    """A parameter of a module, and which slice of a tensor of the target it is; `whole` is that tensor's shape."""

    place: ShardedName
    half: str  # "w", "v", or nothing
    shape: tuple[int, ...]
    slice: Box
    whole: tuple[int, ...]


def import_fsdp(opened: Opened, options: ImportOptions) -> Conversion:
    """A model of Megatron's, in a DCP checkpoint under the names of its modules, as a checkpoint."""
    index, layout, where = opened.payloads.index, layout_of(options), str(opened.directory)
    names, left_out = _module_names(index)
    arguments, training, carried, unknown = _launch(read_index(opened.directory))
    if arguments.get("untie_embeddings_and_output_weights") is False and OUTPUT in names:
        copy = names.pop(OUTPUT)
        refuse_another(opened.payloads, copy, names[EMBEDDING], "the stored arguments do not untie them")
        left_out.append(f"{copy} (tied to the embedding)")
    layers, experts = _counts(names, arguments, where)
    _check_layers(names, {**arguments, "num_layers": layers}, where)
    stacking = Stacking(layers, experts, stacks_layers(arguments), local_norms(names, arguments))
    parameters = {name: _parameter(name, index.tensors[key].shape, stacking) for name, key in names.items()}
    vocabulary = padded_vocabulary(arguments, layout.tp) or arguments.get("padded_vocab_size")
    apart = {name: one.place.key for name, one in parameters.items() if is_expert_key(one.place.key)}
    optimizer = plan_optimizer(index, names, opened.settings, apart if layout.ep > 1 else {})
    states = {"": names, **{f"optimizer.state.{state}.": keys for state, keys in optimizer.states.items()}}
    views = {
        prefix + key: view for prefix, keys in states.items() for key, view in _views(parameters, keys, vocabulary)
    }
    arguments = {
        **arguments,
        **layout.arguments,
        "ckpt_format": "torch_dist",
        **({"padded_vocab_size": views[EMBEDDING].shape[0]} if "padded_vocab_size" in arguments else {}),
    }
    state, more, notes = launch_state(optimizer, training, arguments, options.global_batch_size)
    taken = {no_tensor(key) for key in carried if _SCHEDULE in state or not key.startswith(_SCHEDULE)}
    left_out += [*optimizer.left_out, *(what for what in opened.left_out if what not in taken), *unknown]

    def row(prefix: str, name: str, key: str) -> KeyPlan:
        one = parameters[name]
        dtype = "float32" if prefix else target_dtype(index.tensors[key], options.dtype)
        target = f"{prefix}{one.place.key}{list(one.place.offsets) or ''}"
        return KeyPlan(key, 1, _HALVES[one.half], target, one.shape, dtype)

    return import_conversion(
        opened.payloads,
        options,
        layout,
        lambda _: encode_state({"args": Namespace(**{**arguments, **more}), **state}),
        ConversionReport(
            format=opened.kind,
            family="Megatron's own names",
            arguments=arguments,
            notes=notes,
            left_out=tuple(left_out),
        ),
        keys=lambda: (row(prefix, name, key) for prefix, named in states.items() for name, key in named.items()),
        tensors=views,
        objects=extra_states(one.place for one in parameters.values()),
    )


def _module_names(index: CheckpointIndex) -> tuple[dict[str, str], list[str]]:
    """Stored keys by names of Megatron-Core's modules, and what is none; raises `OptionError`."""
    plain = {key: without_wrappers(key) for key in index.tensors if not is_foreign_optimizer_key(key)}
    prefix = prefix_of(plain.values())
    if prefix is None:
        raise OptionError(
            f"{index.path}: has no {EMBEDDING} of Megatron's under any prefix. Of a model with Hugging Face's names, "
            "give the config.json (--hf-config DIR)"
        )
    names: dict[str, str] = {}
    left_out = []
    for key, name in plain.items():
        if not name.startswith(prefix):
            left_out.append(f"{key} (not of the model, whose keys begin with {prefix or 'its modules'})")
        elif name.removeprefix(prefix) in names:
            raise OptionError(f"{index.path}: {key} and {names[name.removeprefix(prefix)]} are the same parameter")
        else:
            names[name.removeprefix(prefix)] = key
    return names, left_out


def _launch(index: CheckpointIndex) -> tuple[dict[str, Any], Training, list[str], list[str]]:
    """Megatron's arguments; how far the job was; the objects that say so; arguments of no class known here."""
    arguments: dict[str, Any] = {}
    schedule: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    carried: list[str] = []
    unknown: list[str] = []
    for key, entry in index.objects.items():
        if key == "args":
            arguments, unknown = _stored_arguments(index, entry)
        elif key in ("iteration", "num_floating_point_operations_so_far"):
            counts[key] = read_plain_object(index, entry)
        elif key.startswith(f"{_SCHEDULE}."):  # DCP takes dicts apart
            schedule[key.removeprefix(f"{_SCHEDULE}.")] = read_plain_object(index, entry)
        else:
            continue
        carried.append(key)
    iteration, operations = counts.get("iteration"), counts.get("num_floating_point_operations_so_far")
    training = Training(
        iteration if type(iteration) is int else 0,
        plain_values(schedule),
        operations if isinstance(operations, (int, float)) else 0,
    )
    return arguments, training, carried, unknown


def _stored_arguments(index: CheckpointIndex, entry: ObjectEntry) -> tuple[dict[str, Any], list[str]]:
    """The arguments in an object of a DCP checkpoint, and those of classes that are not known."""
    content, where = read_object(index, entry), f"{entry.fqn} ({entry.item.file})"

    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    state = read_state_file(read, len(content), where)
    given = vars(state.value) if isinstance(state.value, Namespace) else {}
    return carried_arguments(given, read, where, state.records)


def _by_layer(names: Iterable[str]) -> dict[int, set[str]]:
    """What each layer of the decoder has, by its number."""
    found: dict[int, set[str]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None and layer.before == "decoder.layers." and layer.number is not None:
            found.setdefault(layer.number, set()).add(layer.rest)
    return found


def _counts(names: Iterable[str], arguments: Mapping[str, Any], where: str) -> tuple[int, int]:
    """How many layers and experts there are: as many as the arguments say, if they do, and none is missing."""
    named = [expert_of(split_half(name)[0]) for name in names]
    experts = {expert.number for expert in named if expert is not None and expert.number is not None}
    found = []
    for what, there, said in (
        ("layers", set(_by_layer(names)), arguments.get("num_layers")),
        ("experts", experts, arguments.get("num_experts")),
    ):
        last = max(there, default=-1)
        count = said if type(said) is int else last + 1
        if not len(there) == last + 1 == count or count > _MOST_LAYERS:
            raise CorruptCheckpointError(
                f"{where}: expected {count} {what}, by the stored arguments or the last number, and parameters are "
                f"there of {len(there)}, the last number {last}. The checkpoint is incomplete, or not of one model. "
                "Nothing was written"
            )
        found.append(count)
    return found[0], found[1]


def _check_layers(names: Collection[str], arguments: Mapping[str, Any], where: str) -> None:
    """Raise `CorruptCheckpointError` where a layer lacks what its like have, or the model what every model has."""
    lacking = [] if any(name.startswith("decoder.final_") for name in names) else ["decoder.final_layernorm.weight"]
    for name, is_needed in (
        (OUTPUT, arguments.get("untie_embeddings_and_output_weights")),
        ("embedding.position_embeddings.weight", arguments.get("position_embedding_type") == "learned_absolute"),
    ):
        lacking += [name] if is_needed and name not in names else []
    if not any(arguments.get(f"heterogeneous_layers_config_{kind}") for kind in ("path", "encoded_json")):
        layers, kinds = _by_layer(names), expert_layers_of(arguments)
        alike: dict[bool, set[str]] = {}
        for number, own in layers.items():
            alike.setdefault(kinds[number], set()).update(own)
        for number, own in sorted(layers.items()):
            lacking += [f"decoder.layers.{number}.{rest}" for rest in sorted(alike[kinds[number]] - own)]
    if lacking:
        raise CorruptCheckpointError(
            f"{where}: {lacking[0]} is not there{f' (nor {len(lacking) - 1} others)' if lacking[1:] else ''}, by the "
            "stored arguments and by what other layers have. The checkpoint is incomplete. Nothing was written"
        )


def _parameter(name: str, shape: tuple[int, ...], stacking: Stacking) -> _Whole:
    name, half = split_half(name)
    place = stacking.sharded(name)
    first, *inner = shape or (1,)
    own = (*(1,) * len(place.counts), *shape)
    offsets = (*place.offsets, first if half == "v" else 0, *(0 for _ in inner))[: len(own)]
    total = ((2 if half else 1) * first, *inner) if shape else ()
    return _Whole(place, half, shape, Box(offsets, own), (*place.counts, *total))


def _views(
    parameters: Mapping[str, _Whole], keys: Mapping[str, str], vocabulary: Any
) -> Iterable[tuple[str, TensorView]]:
    """Tensors of the target by their keys, of stored ones with these keys by name; the vocabulary padded to so many."""
    groups: dict[str, list[str]] = {}
    for name in keys:
        groups.setdefault(parameters[name].place.key, []).append(name)
    for key, members in groups.items():
        whole = parameters[members[0]].whole
        problem = covers(whole, [parameters[name].slice for name in members])
        if problem or any(parameters[name].whole != whole for name in members):
            raise CorruptCheckpointError(
                f"{key}: {len(members)} parameters are stored, the first {members[0]}; expected one for each layer, "
                f"expert and half of {list(whole)}: {problem or 'they differ in shape'}. The checkpoint is incomplete. "
                "Nothing was written"
            )
        parts = [
            Part(parameters[name].slice, keys[name], Box((0,) * len(parameters[name].shape), parameters[name].shape))
            for name in members
        ]
        if key in (EMBEDDING, OUTPUT) and isinstance(vocabulary, int) and whole and whole[0] < vocabulary:
            more = Box((whole[0], *(0 for _ in whole[1:])), (vocabulary - whole[0], *whole[1:]))
            parts.append(Part(more, None))
            whole = (vocabulary, *whole[1:])
        yield key, TensorView(whole, tuple(parts))
