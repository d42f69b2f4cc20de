"""A directory of `--ckpt-format torch`: which ranks' files there are, what they hold, and payloads of their tensors.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     arguments, model, optimizer, random state of one model-parallel rank
    mp_rank_TT[_PPP][_EEE]/distrib_optim.pt       flat buffers of the distributed optimizer

Nothing is unpickled freely, and no tensor is read before it is copied: state dicts are read by `format/state_file.py`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.state_file import StateFile, StateRecord
from mcore_ckpt.models._torch_files import read_state
from mcore_ckpt.reshard.weight_files import taken_over
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at

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


# --------------------------------------------------------------------------------------------- what is carried as it is


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
