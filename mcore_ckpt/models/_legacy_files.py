"""Checkpoints of `--ckpt-format torch`: a directory for each model-parallel rank.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     arguments, model, optimizer, random state of one model-parallel rank

Nothing is unpickled freely, and no tensor is read before it is copied: state dicts are read by `format/state_file.py`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError, UnsafePickleError
from mcore_ckpt.format.state_file import StateFile, StateRecord, read_state_file
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.reshard.plan import TargetLayout
from mcore_ckpt.reshard.view import FileRange, Record
from mcore_ckpt.reshard.weight_files import taken_over
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

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


MODEL_FILE = "model_optim_rng.pt"
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
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= max(self.most, default or 0):
            raise CorruptCheckpointError(
                f"{self.where}: the stored argument {name} is {value!r:.80}; expected a positive number"
                + (f", no greater than the {self.most} bytes that the checkpoint has" if self.most < _MOST else "")
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
        found.append(RankFiles(tp, pp, ep, folder, model))
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
