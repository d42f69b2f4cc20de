"""A directory of `--ckpt-format torch`: which ranks' files there are, what they hold, and payloads of their tensors.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     arguments, model, optimizer, random state of one model-parallel rank
    mp_rank_TT[_PPP][_EEE]/distrib_optim.pt       flat buffers of the distributed optimizer

Nothing is unpickled freely, and no tensor is read before it is copied: state dicts are read by `format/state_file.py`.
"""

from __future__ import annotations

import re
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    OptionError,
)
from mcore_ckpt.format.crc import crc32, crc32_combine
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.safe_pickle import Opaque, Unavailable
from mcore_ckpt.format.state_file import FileTensor, StateFile, StateRecord, read_state_file
from mcore_ckpt.items.checks import chunk_name
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads

__all__ = [
    "FEWEST",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "Arguments",
    "LegacyPayloads",
    "Place",
    "RankFiles",
    "carried_arguments",
    "owned",
    "read_ranks",
    "reading",
]

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MOST_RANKS = 100_000
_WINDOW_BYTES = 4 * 1024 * 1024
# Random states and what layers keep of their own (`_extra_state`) are small; what is larger is no such thing.
_MAX_OWNED_BYTES = 256 * 1024**2


# What a count may be at most, and what it may always be, however small the files.
_MOST, FEWEST = 2**40, 2**16


class Arguments:
    """Megatron's arguments as a file holds them.

    Attributes:
        values: by name.
        where: the file.
        most: of whatever each needs bytes of its own in the files, there cannot be more than this.
    """

    def __init__(self, values: Mapping[str, Any], where: str, most: int = _MOST) -> None:
        self.values, self.where, self.most = values, where, most

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive number, by the first of some names that is there.

        Raises:
            CorruptCheckpointError: it is none, or there are not as many bytes as there would be ranks, layers or
                experts.
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
    """What one model-parallel rank has saved.

    Attributes:
        tp, pp, ep: its tensor, pipeline and expert parallel rank.
        folder: `mp_rank_...`.
        model: its `model_optim_rng.pt`.
        optimizer: its `distrib_optim.pt`, if there is one.
    """

    tp: int
    pp: int
    ep: int
    folder: str
    model: StateFile
    optimizer: StateFile | None

    @property
    def state(self) -> dict[str, Any]:
        """The whole state dict."""
        found: dict[str, Any] = self.model.value
        return found

    @property
    def file(self) -> str:
        """Name of the model's file, in the directory."""
        return f"{self.folder}/{MODEL_FILE}"

    @property
    def optimizer_file(self) -> str:
        """Name of the distributed optimizer's file, in the directory."""
        return f"{self.folder}/{OPTIMIZER_FILE}"


def read_ranks(directory: Path) -> tuple[list[RankFiles], Arguments]:
    """All ranks' files, in the order of pipeline, expert and tensor parallel rank, and the first rank's arguments.

    Raises:
        CheckpointNotFoundError: there are none.
        CorruptCheckpointError: one is damaged, or they contradict one another.
        UnsafePickleError: one was made to do harm.
    """
    folders = (
        sorted(path.name for path in directory.iterdir() if _FOLDER.fullmatch(path.name)) if _is(directory) else []
    )
    if not folders:
        raise CheckpointNotFoundError(
            f"{directory}: expected directories mp_rank_00, ... with {MODEL_FILE}, as `--ckpt-format torch` saves them"
        )
    if len(folders) > _MOST_RANKS:
        raise CorruptCheckpointError(f"{directory}: {len(folders)} directories of ranks; no launch has that many")
    storage = storage_at(directory)
    found, shown = [], None
    for folder in folders:
        model = _read(storage, f"{folder}/{MODEL_FILE}")
        where = str(directory / folder / MODEL_FILE)
        state = model.value
        if type(state) is not dict or not any(re.fullmatch(r"model\d*", str(key)) for key in state):
            raise CorruptCheckpointError(f"{where}: expected a state dict with `model`, as Megatron saves it")
        arguments = _arguments(state, where, max(FEWEST, (directory / folder / MODEL_FILE).stat().st_size))
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
        if (directory / folder / OPTIMIZER_FILE).exists():
            optimizer = _read(storage, f"{folder}/{OPTIMIZER_FILE}")
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


def _is(directory: Path) -> bool:
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory}: no such directory")
    return True


def _read(storage: Storage, name: str) -> StateFile:
    with storage.open_reader(name) as reader:
        return read_state_file(reader.read, reader.size_bytes, storage.path(name))


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


# ------------------------------------------------------------------------------------------------------------ payloads


class Place(NamedTuple):
    """Elements in a record of a rank's file."""

    file: str
    record: str
    first_byte: int
    nbytes: int


class LegacyPayloads(StoredPayloads):
    """Payloads of tensors that lie in records, each alone in one, or many of them in one after another.

    Args:
        directory: of the checkpoint.
        places: where the elements of each tensor are, with dtype and shape.
        records: of each file.
    """

    def __init__(
        self,
        directory: Path,
        places: Mapping[str, tuple[Place, str, tuple[int, ...]]],
        records: Mapping[str, Mapping[str, StateRecord]],
    ) -> None:
        tensors = {}
        for key, (place, dtype, shape) in places.items():
            start = records[place.file][place.record].start + place.first_byte
            chunk = StoredChunk((0,) * len(shape), shape, StoredItem(place.file, start, place.nbytes))
            tensors[key] = TensorEntry(key, dtype, shape, (chunk,))
        super().__init__(CheckpointIndex(str(directory), tensors, {}), storage_at(directory))
        self._places, self._records = places, records
        self._seen: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        self._seeing = threading.Lock()

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        place = self._places[entry.fqn][0]
        record = self._records[place.file][place.record]
        where, crc = chunk_name(entry.fqn, chunk), record.crc32 if place.nbytes == record.nbytes else None
        return StoredPayload(where, place.file, record.start + place.first_byte, place.nbytes, crc)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        """Note the CRC-32 of a tensor that is a part of its record."""
        place = self._places[entry.fqn][0]
        if place.nbytes and place.nbytes != self._records[place.file][place.record].nbytes:
            with self._seeing:
                self._seen.setdefault((place.file, place.record), {})[place.first_byte] = place.nbytes, value

    def check_rest(self) -> None:
        """Read what nobody wanted of records that were read in part (padding), and compare their checksums.

        Raises:
            ChecksumError: one is damaged.
        """
        for (file, number), seen in self._seen.items():
            record = self._records[file][number]
            if record.crc32 is None:
                continue
            value = at = 0
            for first, (nbytes, part) in [*sorted(seen.items()), (record.nbytes, (0, 0))]:
                if first < at:  # tensors that share elements
                    value, at = self._sum(file, record, 0, record.nbytes, 0), record.nbytes
                    break
                value = self._sum(file, record, at, first, value)
                value = crc32_combine(value, part, nbytes) if nbytes else value
                at = first + nbytes
            if value != record.crc32:
                raise ChecksumError(
                    f"{Path(self.index.path) / file}: record data/{number} has CRC-32 {value:#010x}, expected "
                    f"{record.crc32:#010x}: the file was damaged after it was written; take a sound copy"
                )
        self._seen.clear()

    def _sum(self, file: str, record: StateRecord, start: int, stop: int, value: int) -> int:
        with self.files.reader(file) as reader:
            while start < stop:
                content = reader.read(record.start + start, min(_WINDOW_BYTES, stop - start))
                value = crc32(content, value)
                start += len(content)
        return value

    def same(self, first: str, second: str) -> int | None:
        """The first element in which two tensors differ; None if there is none. Both have one dtype and shape."""
        one, other = (
            self.locate(self.index.tensors[key], self.index.tensors[key].chunks[0]) for key in (first, second)
        )
        if one.crc32 is not None and one.crc32 == other.crc32:
            return None
        width = max(1, one.nbytes // max(1, _elements(self.index.tensors[first].shape)))
        for start in range(0, one.nbytes, _WINDOW_BYTES):
            views = [memoryview(bytearray(min(_WINDOW_BYTES, one.nbytes - start))) for _ in range(2)]
            self.read_into(one, start, views[0])
            self.read_into(other, start, views[1])
            if views[0] != views[1]:
                at = next(n for n, (a, b) in enumerate(zip(*views, strict=True)) if a != b)
                return (start + at) // width
        return None


def _elements(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# --------------------------------------------------------------------------------------------- what is carried as it is


def reading(storage: Storage, file: str) -> Callable[[int, int], bytes]:
    """What reads bytes of a file, opened for each time."""

    def read(offset: int, length: int) -> bytes:
        with storage.open_reader(file) as reader:
            return reader.read(offset, length)

    return read


def owned(value: Any, read: Callable[[int, int], bytes], file: str, records: Mapping[str, StateRecord]) -> Any:
    """`value` with its tensors read from the file: for random states, and what else is small and no parameter.

    Raises:
        OptionError: it holds something of a class that is not known.
        CorruptCheckpointError: its tensors are larger than such things are.
        ChecksumError: one is damaged.
    """
    left = _MAX_OWNED_BYTES

    def tensor(given: FileTensor) -> Any:
        nonlocal left
        import torch

        record = records[given.record]
        left -= record.nbytes
        if left < 0:
            raise CorruptCheckpointError(f"{file}: more than {_MAX_OWNED_BYTES} bytes of tensors outside the model")
        content = bytearray(read(record.start, record.nbytes))
        if record.crc32 is not None and crc32(content) != record.crc32:
            raise ChecksumError(
                f"{file}: record data/{given.record} has CRC-32 {crc32(content):#010x}, expected "
                f"{record.crc32:#010x}; take a sound copy"
            )
        part = content[given.first_byte : given.first_byte + given.nbytes]
        dtype = getattr(torch, given.dtype)
        flat = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).reshape(given.shape)

    def own(part: Any) -> Any:
        if type(part) is FileTensor:
            return tensor(part)
        if isinstance(part, Opaque) or (isinstance(part, type) and issubclass(part, Opaque)):
            raise OptionError(f"{file}: holds a {part.name:.200}, a class that is not known here")
        if isinstance(part, dict):
            return type(part)((own(key) if type(key) is tuple else key, own(item)) for key, item in part.items())
        if type(part) in (list, tuple):
            return type(part)(own(item) for item in part)
        if isinstance(part, Namespace):
            return Namespace(**{name: own(item) for name, item in vars(part).items()})
        if isinstance(part, Unavailable):
            part.arguments, part.state = own(part.arguments), own(part.state)
        return part

    return own(value)


def carried_arguments(
    values: Mapping[str, Any], read: Callable[[int, int], bytes], where: str, records: Mapping[str, StateRecord]
) -> tuple[dict[str, Any], list[str]]:
    """Arguments as they go into another checkpoint, and those of classes that are not known, which do not, each named.

    Raises:
        CorruptCheckpointError, ChecksumError: as for `owned`.
    """
    carried, left_out = {}, []
    for name, value in values.items():
        try:
            carried[name] = owned(value, read, where, records)
        except (OptionError, KeyError):
            left_out.append(f"the argument {name[:200]} (of a class that is not known here)")
    return carried, left_out
