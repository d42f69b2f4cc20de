"""Universal checkpoints of DeepSpeed (`ds_to_universal`): a folder for each parameter, a file for each state of it.

    DIR/zero/NAME/fp32.pt            the parameter in float32: {"param": tensor, "cat_dim": ...}; of ZeRO 3 the elements
    DIR/zero/NAME/exp_avg.pt         alone, one after another; the moments likewise
    DIR/zero/NAME/exp_avg_sq.pt
    DIR/zero/NAME/step.pt            a number, or a tensor of one
    DIR/zero/optimizer_state.pt      groups of parameters
    DIR/*model_states.pt             ranks' files: shapes, arguments, random states, weights in 16 bits
    DIR/../latest_universal          which DIR it is

By `deepspeed/checkpoint/ds_to_universal.py` and `universal_checkpoint.py` (DeepSpeed 0.19). Every file is read as a
state file: nothing of DeepSpeed's is imported, and elements are read where they are wanted.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._foreign import OptimizerSettings
from mcore_ckpt.convert._legacy_files import LegacyPayloads, Place
from mcore_ckpt.convert.rules import RenameRule, rename_keys
from mcore_ckpt.core.errors import CheckpointNotFoundError, ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.metadata_read import read_small_file
from mcore_ckpt.format.state_file import FileTensor, StateFile, read_state_file
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.dtype_cast import as_numbers

__all__ = ["is_universal", "open_universal", "rank_state", "universal_directory"]

_ZERO, _LATEST = "zero", "latest_universal"
_MAX_NAME_BYTES = 4096
_STATES = {"fp32": "{}", "exp_avg": "optim.state.{}.exp_avg", "exp_avg_sq": "optim.state.{}.exp_avg_sq"}
_MODEL_STATES = "_model_states.pt"


def universal_directory(source: Path) -> Path:
    """`source`, or the checkpoint in it that `latest_universal` names."""
    if not (source / _ZERO).is_dir() and (source / _LATEST).is_file():
        content = read_small_file(source, _LATEST, _MAX_NAME_BYTES).decode(errors="replace").strip()
        if re.fullmatch(r"[\w.-]+", content) and not content.startswith("."):
            return source / content
    return source


def is_universal(source: Path) -> bool:
    """Whether a directory is a universal checkpoint; raises `OptionError` for another one of DeepSpeed's."""
    universal = (source / _ZERO).is_dir()
    if not universal and any(source.glob("*_optim_states.pt")):
        raise OptionError(
            f"{source}: a checkpoint of DeepSpeed's as its ranks have saved it; make a universal one of it "
            f"(`ds_to_universal.py --input_folder {source} --output_folder ...`), and import that"
        )
    return universal


def open_universal(source: Path, rename: Sequence[RenameRule]) -> tuple[LegacyPayloads, list[str], OptimizerSettings]:
    """Parameters by their names, moments as `optim.state.NAME.exp_avg`; what is left out; settings of the optimizer.

    Raises:
        CheckpointNotFoundError: there are no parameters.
        CorruptCheckpointError, ChecksumError, UnsafePickleError: a file is damaged, or not what DeepSpeed writes.
        OptionError: a parameter has no shape.
    """
    storage = LocalStorage(source)
    places: dict[str, tuple[Place, str, tuple[int, ...]]] = {}
    records: dict[str, Mapping[str, Any]] = {}
    left_out: list[str] = []
    steps: list[float] = []
    shapes: dict[str, tuple[int, ...]] | None = None
    for name in _parameters(source):
        for path in sorted((source / _ZERO / name).iterdir()):
            file, state = f"{_ZERO}/{name}/{path.name}", path.name.removesuffix(".pt")
            if state == "step":
                steps.append(_number(storage, file))
                continue
            if state not in _STATES or not path.name.endswith(".pt"):
                left_out.append(f"{file} (no state of Adam's)")
                continue
            read = _read(storage, file)
            tensor = read.value.get("param") if isinstance(read.value, dict) else read.value
            if type(tensor) is not FileTensor:
                raise CorruptCheckpointError(
                    f"{storage.path(file)}: expected a tensor, or a dict with one as `param`; got "
                    f"{type(tensor).__name__}"
                )
            shape = tensor.shape
            if type(read.value) is FileTensor and len(shape) == 1:
                shapes = _shapes(storage, source) if shapes is None else shapes
                shape = shapes.get(name, shape)
                if math.prod(shape) != math.prod(tensor.shape):
                    raise CorruptCheckpointError(
                        f"{storage.path(file)}: {tensor.shape[0]} elements; the ranks' files say that {name} has the "
                        f"shape {list(shape)}"
                    )
            records[file] = read.records
            place = Place(file, tensor.record, tensor.first_byte, tensor.nbytes)
            places[_STATES[state].format(name)] = place, tensor.dtype, shape
    ranks = sorted(path.name for path in source.glob(f"*{_MODEL_STATES}"))
    left_out += [f"{name} (a rank's file: random states, schedules, the weights in 16 bits)" for name in ranks]
    names = rename_keys(places, rename)
    if not any(not key.startswith("optim.state.") for key in names.values()):
        raise OptionError(f"{source}: no parameter is left to import")
    settings = OptimizerSettings(tuple(steps), tuple(_groups(storage, source, steps)))
    if settings.groups and not steps:
        settings = _with_inner_step(storage, settings)
    return LegacyPayloads(source, {new: places[old] for old, new in names.items()}, records), left_out, settings


def rank_state(source: Path) -> Mapping[str, Any]:
    """The state of the first rank's file that has Megatron's arguments; empty where none has."""
    storage = LocalStorage(source)
    for path in sorted(source.glob(f"*{_MODEL_STATES}")):
        value = _read(storage, path.name).value
        if isinstance(value, dict) and isinstance(value.get("args"), Namespace):
            return {**value, "args": vars(value["args"])}
    return {}


def _parameters(source: Path) -> list[str]:
    found = sorted(path.name for path in (source / _ZERO).iterdir() if path.is_dir() and not path.is_symlink())
    if not found:
        raise CheckpointNotFoundError(
            f"{source / _ZERO}: holds no folders of parameters; make a universal checkpoint of DeepSpeed's by its "
            "`ds_to_universal.py`"
        )
    return found


def _read(storage: LocalStorage, file: str) -> StateFile:
    with storage.open_reader(file) as reader:
        return read_state_file(reader.read, reader.size_bytes, str(storage.path(file)))


def _number(storage: LocalStorage, file: str) -> float:
    """A number in a file, or in a tensor of one element in it."""
    read = _read(storage, file)
    number = _plain_number(storage, file, read, read.value)
    if number is None:
        raise CorruptCheckpointError(f"{storage.path(file)}: expected a number, got {type(read.value).__name__}")
    return number


def _plain_number(storage: LocalStorage, file: str, read: StateFile, value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if type(value) is not FileTensor or math.prod(value.shape) != 1 or value.nbytes > 8:
        return None
    record = read.records[value.record]
    if record.nbytes > 4096:
        return None
    with storage.open_reader(file) as reader:
        content = reader.read(record.start, record.nbytes)
    if record.crc32 is not None and crc32(content) != record.crc32:
        raise ChecksumError(
            f"{storage.path(file)}: record data/{value.record} has CRC-32 {crc32(content):#010x}, expected "
            f"{record.crc32:#010x}; take a sound copy"
        )
    numbers = as_numbers(memoryview(content)[value.first_byte : value.first_byte + value.nbytes], value.dtype)
    return None if numbers is None else float(numbers[0])


def _shapes(storage: LocalStorage, source: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters, from the ranks' files: ZeRO 3 writes elements without any."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(source.glob(f"*{_MODEL_STATES}")):
        value = _read(storage, path.name).value
        stated = value.get("param_shapes") if isinstance(value, dict) else None
        for group in stated if isinstance(stated, list) else [stated]:
            for name, shape in group.items() if isinstance(group, dict) else ():
                if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
                    found[str(name)] = tuple(shape)
    return found


def _groups(storage: LocalStorage, source: Path, steps: Sequence[float]) -> Iterator[Mapping[str, Any]]:
    file = f"{_ZERO}/optimizer_state.pt"
    if not (source / file).is_file():
        return
    value = _read(storage, file).value
    for group in value.get("param_groups") or () if isinstance(value, dict) else ():
        if isinstance(group, dict):
            yield {name: group[name] for name in ("lr", "betas", "eps", "weight_decay") if name in group}


def _with_inner_step(storage: LocalStorage, settings: OptimizerSettings) -> OptimizerSettings:
    """ZeRO 3 writes no steps beside its parameters; they stay in the optimizer's own state, for each flat group."""
    file = f"{_ZERO}/optimizer_state.pt"
    read = _read(storage, file)
    inner = read.value.get("optimizer_state_dict") if isinstance(read.value, dict) else None
    states = inner.get("state") if isinstance(inner, dict) else None
    found = []
    for state in states.values() if isinstance(states, dict) else ():
        number = _plain_number(storage, file, read, state.get("step")) if isinstance(state, dict) else None
        found += [] if number is None else [number]
    return OptimizerSettings(tuple(found), settings.groups)
