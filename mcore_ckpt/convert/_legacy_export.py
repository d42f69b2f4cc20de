"""A `torch_dist` checkpoint as files of `--ckpt-format torch`, one for each rank: the other way of `legacy`.

    index -> which box of which tensor a rank has -> a view under the ranks' keys (`_pieces`) -> one file after another

For tools that know nothing else. The order in which Megatron's optimizers number parameters is that of its layers, and
is known here for the local ones of a decoder without experts; for others there is the model alone.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.convert._legacy_files import MODEL_FILE, OPTIMIZER_FILE, Arguments, owned
from mcore_ckpt.convert._legacy_import import LOCAL_NORMS
from mcore_ckpt.convert._legacy_optimizer import flat_places, group_members, likely_layout, main_parameter
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._pieces import PiecePayloads, Source, Wanted
from mcore_ckpt.convert._reshard_target import file_states
from mcore_ckpt.convert._shard_files import Exported, stream_tensor
from mcore_ckpt.convert.conversion import Export, ExportOptions, Made, PickledByName, write_directory
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, object_key, parse_object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.state_file import FileTensor, read_state_file
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.keys import is_optimizer_key
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.plain_state import read_object, stored_common_state, unwrapped
from mcore_ckpt.tools.regrid import Sink, Walk

__all__ = ["legacy_export"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_NUMBERED = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
# The order of the local layers' modules, and of the parameters in each.
_ORDER = (
    *("embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers"),
    *("decoder.final_layernorm", "output_layer"),
)
_LAYER_ORDER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
_PARAMETERS = ("weight", "bias")
_WINDOW_BYTES = 4 * 1024 * 1024


class _Local(NamedTuple):
    """A parameter of one rank: its key in the state dict, where it is in the whole model, and its shape."""

    stored: str
    chunk: int
    key: str
    tensor: FileTensor


@dataclass(slots=True)
class _Rank:
    """What one rank's files are made of: tensors of the view by number of the record, and what is around them."""

    tp: int
    pp: int
    folder: str
    parameters: list[_Local] = field(default_factory=list)


def legacy_export(index: CheckpointIndex, options: ExportOptions) -> Export:
    """The files that a launch with `--ckpt-format torch` loads at a tensor and pipeline parallel size.

    Raises:
        OptionError: the model cannot be divided so, or it is not known how it is.
        CheckpointNotFoundError, CorruptCheckpointError: the checkpoint is damaged.
    """
    keys = [key for key in index.tensors if not (options.drop_optimizer and is_optimizer_key(key))]
    check_tiled(index, keys)
    seen = file_states(index, keys)
    draft = _Draft(index, keys, options.tp, options.pp)
    payloads = PiecePayloads(StoredPayloads(index), draft.wanted)

    def make(target: Path, progress: bool | None) -> Made:
        def write(folder: Path, _: object) -> list[str]:
            files: list[str] = []
            with Progress("ranks", len(draft.ranks), shown=progress) as bar:
                for rank in draft.ranks:
                    files += _write_rank(draft, rank, payloads, folder)
                    bar.advance(1)
            return files

        files = write_directory(target, index, seen, payloads, write, keys=keys)
        return Made(files, len(draft.wanted), sum((target / file).stat().st_size for file in files))

    return Export(format="megatron-legacy", left_out=tuple(draft.left_out), payloads=payloads, make=make)


class _Draft:
    """An export that is being thought through."""

    def rank_arguments(self) -> Namespace:
        """The arguments, of this division."""
        changed = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": None,
            "num_layers_per_virtual_pipeline_stage": None,
            "ckpt_format": "torch",
            "use_dist_ckpt": False,
        }
        return Namespace(**{**self.arguments.values, **changed})

    def states_of(self, rank: _Rank, parameter: _Local) -> dict[str, _Filled]:
        """The optimizer's tensors of a parameter."""
        found = {}
        for state, key in self.states.get(parameter.key, {}).items():
            part = _view_key(rank, state, parameter.stored)
            found[state] = _Filled(self.index.tensors[key].dtype, parameter.tensor.shape, (part,))
        return found

    def __init__(self, index: CheckpointIndex, keys: Sequence[str], tp: int, pp: int) -> None:
        if not (1 <= tp <= 4096 and 1 <= pp <= 4096):
            raise OptionError(f"tp={tp}, pp={pp}: expected sizes of 1 to 4096")
        self.index, self.tp, self.pp = index, tp, pp
        self.left_out: list[str] = []
        self.common = _common(index)
        given = self.common.get("args")
        if not isinstance(given, Namespace):
            raise OptionError(f"{index.path}: stores no arguments of Megatron, which the files have to hold")
        self.arguments = Arguments(vars(given), str(Path(index.path) / COMMON_FILE))
        if self.arguments.values.get("num_experts"):
            raise OptionError(f"{index.path}: layers of experts are not written in this format here")
        self.local = self.arguments.values.get("transformer_impl") == "local"
        self.layers = self.arguments.count("num_layers")
        if self.layers % pp:
            raise OptionError(f"{self.layers} layers do not divide into {pp} stages")
        self.tied = not self.arguments.flag("untie_embeddings_and_output_weights")
        self.partitioner = Partitioner(index, arguments=self.arguments.values)
        self.states: dict[str, dict[str, str]] = {}
        for key in keys:
            state = _STATE.fullmatch(key)
            if state is not None:
                self.states.setdefault(state.group(2), {})[state.group(1)] = key
            elif is_optimizer_key(key):
                raise OptionError(
                    f"{index.path}: {key}: the optimizer's state is not by parameter; make it so by `mcore-ckpt "
                    "reshard --optimizer fully_reshardable`, or leave it out (--drop optimizer)"
                )
        self.model = [key for key in keys if not is_optimizer_key(key)]
        if self.states and not self.local:
            raise OptionError(
                f"{index.path}: the order of the optimizer's parameters is known for local layers only "
                "(--transformer-impl local); leave the optimizer's state out (--drop optimizer)"
            )
        random = [key for key in index.objects if key.startswith("rng_state/")]
        kept = {object_key("rng_state", (p, t), (pp, tp)) for p in range(pp) for t in range(tp)}
        if random and not kept <= set(random):
            self.left_out.append("rng_state (of another number of ranks; a launch has to be given --no-load-rng)")
        self.wanted: dict[str, Wanted] = {}
        self.ranks = [self._rank(p, t) for p in range(pp) for t in range(tp)]

    def _rank(self, stage: int, rank: int) -> _Rank:
        folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")
        made = _Rank(rank, stage, folder)
        per_stage = self.layers // self.pp
        for key in self.model:
            stacked, numbered = _STACKED.fullmatch(key), _NUMBERED.fullmatch(key)
            if stacked is not None:
                for local in range(per_stage):
                    self._add(
                        made, f"decoder.layers.{local}.{self._own(stacked.group(1))}", key, stage * per_stage + local
                    )
            elif numbered is not None:
                number = int(numbered.group(1))
                if number // per_stage == stage:
                    self._add(made, f"decoder.layers.{number % per_stage}.{self._own(numbered.group(2))}", key, None)
            elif key.startswith("embedding."):
                if stage == 0:
                    self._add(made, key, key, None)
                if key == _EMBEDDING and self.tied and self.pp > 1 and stage == self.pp - 1:
                    self._add(made, _OUTPUT, key, None)
            elif key.startswith(("decoder.final_layernorm.", "output_layer.")):
                if stage == self.pp - 1:
                    self._add(made, key, key, None)
            else:
                raise OptionError(f"{self.index.path}: {key}: it is not known which rank has it in this format")
        made.parameters.sort(key=lambda parameter: _place_in_model(parameter.stored))
        return made

    def _own(self, rest: str) -> str:
        for local, other in LOCAL_NORMS if self.local else ():
            if rest.startswith(other):
                return local + rest.removeprefix(other)
        return rest

    def _add(self, rank: _Rank, stored: str, key: str, index: int | None) -> None:
        entry = self.index.tensors[key]
        partition = self.partitioner.decide(key)
        lead = 0 if index is None else 1
        if index is not None and entry.shape[0] != self.layers:
            raise CorruptCheckpointError(f"{key}: has {entry.shape[0]} layers, expected {self.layers}")
        own = list(entry.shape[lead:])
        if partition.source == "whole" and self.tp > 1:
            raise OptionError(f"{key}: nothing tells how it is divided among tensor parallel ranks")
        axis = None if partition.axis is None or self.tp == 1 else partition.axis - lead
        boxes = [(Box((0,) * len(own), tuple(own)), [0] * len(own))]
        if axis is not None:
            if own[axis] % (self.tp * partition.parts):
                raise OptionError(
                    f"{key}: {list(entry.shape)} cannot be divided among {self.tp} ranks along axis {axis}"
                )
            whole, step = own[axis] // partition.parts, own[axis] // (partition.parts * self.tp)
            own[axis] //= self.tp
            boxes = []
            for part in range(partition.parts):
                sizes, at, origin = list(own), [0] * len(own), [0] * len(own)
                sizes[axis], at[axis], origin[axis] = step, part * step, part * whole + rank.tp * step
                boxes.append((Box(tuple(at), tuple(sizes)), origin))
        shape = tuple(own)
        for state, stored_key in {"model": key, **self.states.get(key, {})}.items():
            if self.index.tensors[stored_key].shape != entry.shape:
                raise CorruptCheckpointError(f"{stored_key}: is not of the shape of {key}")
            sources = [
                Source(
                    box,
                    stored_key,
                    Box(((index,) if index is not None else ()) + tuple(origin), (1,) * lead + box.sizes),
                )
                for box, origin in boxes
            ]
            self.wanted[_view_key(rank, state, stored)] = Wanted(shape, tuple(sources))
        rank.parameters.append(_Local(stored, 0, key, FileTensor("", entry.dtype, 0, shape)))


def _view_key(rank: _Rank, state: str, stored: str) -> str:
    return f"{rank.folder}/{state}/{stored}"


def _place_in_model(stored: str) -> tuple[Any, ...]:
    """For sorting: where a parameter stands among those of a rank, as Megatron's modules register them."""
    layer = _NUMBERED.fullmatch(stored)
    owner, _, leaf = (layer.group(2) if layer else stored).rpartition(".")
    order = _LAYER_ORDER if layer else _ORDER
    at = order.index(owner) if owner in order else len(order)
    leaf_at = _PARAMETERS.index(leaf) if leaf in _PARAMETERS else len(_PARAMETERS)
    inside = (int(layer.group(1)), at, owner, leaf_at, leaf) if layer else (0, 0, "", leaf_at, leaf)
    return (_ORDER.index("decoder.layers") if layer else at, *inside)


def _common(index: CheckpointIndex) -> dict[str, Any]:
    """The common state, with stand-ins for classes of packages that are not there."""
    stored = stored_common_state(index)
    if stored is None or stored.transforms:
        raise OptionError(f"{index.path}: stores no common state, which the files have to hold (arguments, iteration)")
    value = unwrapped(_object_in(stored.content, stored.where))
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{stored.where}: expected a dict, got {type(value).__name__}")
    return value


def _object_in(content: bytes, where: str) -> Any:
    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    state = read_state_file(read, len(content), where)
    return owned(state.value, read, where, state.records)


# --------------------------------------------------------------------------------------------------------------- a file


class _Filled(NamedTuple):
    """A tensor of a file by its parts, one after another: keys of the view, counts of zeros, or bytes of elements."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str | int | bytes, ...]


def _write_rank(draft: _Draft, rank: _Rank, payloads: PiecePayloads, folder: Path) -> list[str]:
    (folder / rank.folder).mkdir()
    state, flat = _state_of(draft, rank)
    contents = {f"{rank.folder}/{MODEL_FILE}": state}
    if flat is not None:
        contents[f"{rank.folder}/{OPTIMIZER_FILE}"] = flat
    for name, content in contents.items():
        _write_file(folder / name, content, payloads)
    LocalStorage(folder / rank.folder).sync_directory()
    return list(contents)


def _write_file(path: Path, content: Any, payloads: PiecePayloads) -> None:
    import torch

    from mcore_ckpt.convert._torch_files import write_torch_file

    tensors: list[_Filled] = []

    def number(value: Any) -> Any:
        """`value` with a number for each tensor, in the order in which a pickle comes by them."""
        if isinstance(value, torch.Tensor):
            plain = value.detach().contiguous()
            elements = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            value = _Filled(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), (elements,))
        if isinstance(value, _Filled):
            tensors.append(value)
            return _Number(len(tensors) - 1)
        return _mapped(value, number)

    numbered = number(content)

    def around(made: Sequence[Any]) -> Any:
        def put(value: Any) -> Any:
            return made[value.number] if isinstance(value, _Number) else _mapped(value, put)

        return put(numbered)

    walk = Walk()

    def fill(at: int, sink: Sink) -> None:
        filled = tensors[at]
        width = element_bytes(filled.dtype)
        for part in filled.parts:
            if isinstance(part, str):
                stream_tensor(payloads, Exported(part, payloads.index.tensors[part], filled.dtype), sink, walk)
            else:
                _give(sink, part if isinstance(part, bytes) else bytes(part * width))

    described = [(f"{path.name} {n}", getattr(torch, one.dtype), one.shape) for n, one in enumerate(tensors)]
    write_torch_file(path, described, fill, around=around, pickle_module=PickledByName())


class _Number(NamedTuple):
    """Stands for a tensor while a state dict is laid out."""

    number: int


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with changed members; anything else as it is."""
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(part) for part in value)
    return value


def _give(sink: Sink, content: bytes) -> None:
    left = memoryview(content)
    while left:
        view = sink.space(min(len(left), _WINDOW_BYTES))
        view[:] = left[: len(view)]
        sink.filled(view)
        left = left[len(view) :]


# ------------------------------------------------------------------------------------------------------ what it holds


def _state_of(draft: _Draft, rank: _Rank) -> tuple[dict[str, Any], Any]:
    """A rank's state dict, and what its file of flat buffers holds (None: it has none)."""
    model: dict[str, Any] = {
        parameter.stored: _Filled(
            parameter.tensor.dtype, parameter.tensor.shape, (_view_key(rank, "model", parameter.stored),)
        )
        for parameter in rank.parameters
    }
    model |= _extra_states(draft, rank)
    state: dict[str, Any] = {}
    flat = None
    for key, value in draft.common.items():
        if key == "args":
            state["args"] = draft.rank_arguments()
        elif key == "optimizer":
            if draft.states:
                state["optimizer"], flat = _optimizer_of(draft, rank, value)
        elif key != "content_metadata":
            state[key] = value
    state["model"] = model
    random = object_key("rng_state", (rank.pp, rank.tp), (draft.pp, draft.tp))
    if random in draft.index.objects:
        state["rng_state"] = _stored_object(draft.index, random)
    return state, flat


def _stored_object(index: CheckpointIndex, key: str) -> Any:
    return unwrapped(_object_in(read_object(index, index.objects[key]), f"{key} ({index.objects[key].item.file})"))


def _extra_states(draft: _Draft, rank: _Rank) -> dict[str, Any]:
    """What layers keep of their own; the output layer's is in these files alone."""
    found: dict[str, Any] = {}
    per_stage = draft.layers // draft.pp
    for full in draft.index.objects:
        shard = parse_object_key(full)
        if shard is None or not shard.key.endswith("._extra_state"):
            continue
        stacked, numbered = _STACKED.fullmatch(shard.key), _NUMBERED.fullmatch(shard.key)
        if stacked is None and numbered is None:
            raise OptionError(f"{draft.index.path}: {full}: it is not known which rank has it in this format")
        number = shard.offset[0] if stacked is not None else int(numbered.group(1)) if numbered is not None else 0
        rest = stacked.group(1) if stacked is not None else numbered.group(2) if numbered is not None else ""
        if number // per_stage == rank.pp:
            found[f"decoder.layers.{number % per_stage}.{rest}"] = _stored_object(draft.index, full)
    if rank.pp == draft.pp - 1 and found:
        found["output_layer._extra_state"] = None
    return found


def _optimizer_of(draft: _Draft, rank: _Rank, settings: Any) -> tuple[dict[str, Any], Any]:
    if not isinstance(settings, dict) or set(settings) & {0, 1}:
        raise OptionError(f"{draft.index.path}: several optimizers are not written in this format here")
    found = {key: value for key, value in settings.items() if key != "param_state_sharding_type"}
    distributed = "param_state_sharding_type" in settings
    inner = dict(found.get("optimizer", found))
    groups = [dict(group) for group in inner["param_groups"]]
    members = group_members(rank.folder, groups, rank.parameters, draft.arguments)
    missing = set(range(len(rank.parameters))) - {number for group in members for number in group}
    if missing:
        raise OptionError(
            f"{draft.index.path}: no group of the optimizer has {rank.parameters[min(missing)].key}, by what tells its "
            "groups apart; leave the optimizer's state out (--drop optimizer)"
        )
    inner["param_groups"] = groups
    flat = _flat_of(draft, rank) if distributed else None
    if not distributed:
        step = inner.pop("state", {}).get("common_step")
        state: dict[int, Any] = {}
        copies = []
        for group, numbers in zip(groups, members, strict=True):
            group["params"] = list(range(len(state), len(state) + len(numbers)))
            mains = []
            for number in numbers:
                given = draft.states_of(rank, rank.parameters[number])
                main = given.pop(main_parameter(distributed=False), None)
                mains += [] if main is None else [main]
                state[len(state)] = given if step is None else {**given, "step": step}
            copies.append(mains)
        inner = {"state": state, **inner}
        if "optimizer" in found:
            found["fp32_from_fp16_params"] = copies
    if "optimizer" in found:
        return {**found, "optimizer": inner}, flat
    return inner, flat


def _flat_of(draft: _Draft, rank: _Rank) -> dict[Any, Any]:
    """The buffers of a rank, as the first data parallel rank gathers them."""
    import torch

    by_dtype: dict[str, list[int]] = {}
    for number, parameter in enumerate(rank.parameters):
        by_dtype.setdefault(parameter.tensor.dtype, []).append(number)
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for at, (dtype, numbers) in enumerate(by_dtype.items()):
        sizes = {number: math.prod(rank.parameters[number].tensor.shape) for number in numbers}
        shared = draft.tied and draft.pp > 1
        alone = {n for n in numbers if shared and rank.parameters[n].stored in (_EMBEDDING, _OUTPUT)}
        starts, total = flat_places(sizes, alone, likely_layout(rank.pp, draft.arguments, sum(sizes.values())))
        tensors: dict[str, Any] = {}
        for state in (main_parameter(distributed=True), "exp_avg", "exp_avg_sq"):
            parts: list[str | int | bytes] = []
            position = 0
            for number in sorted(numbers, key=lambda n: starts[n]):
                given = draft.states_of(rank, rank.parameters[number]).get(state)
                if given is None or given.dtype != "float32":
                    raise OptionError(
                        f"{draft.index.path}: {rank.parameters[number].key}: its {state} is not there in float32, as "
                        "the distributed optimizer's files have it; leave the optimizer's state out (--drop optimizer)"
                    )
                parts += [starts[number] - position, *given.parts]
                position = starts[number] + sizes[number]
            tensors[state] = _Filled("float32", (total,), (*parts, total - position))
        tensors["numel_unpadded"] = total
        wide = dtype == "float32" or draft.arguments.flag("accumulate_allreduce_grads_in_fp32")
        gradient = torch.float32 if wide else getattr(torch, dtype)
        found[at] = {(getattr(torch, dtype), gradient): tensors}
    return found
