"""A state dict in a file of `torch.save`, read without its tensors: each becomes a note of where its elements lie.

What a file may name is what stored objects may (`_constructors.py`). Two things differ, since such files hold the
arguments of a launch and whatever its user put beside them: a class that is not known becomes an inert `Opaque`
instead of an error, for whoever takes the state to leave out, and an `OrderedDict` may carry what
`Module.state_dict` leaves on it, which is dropped. Classes of packages that are not imported become `Unavailable`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsafePickleError
from mcore_ckpt.format._constructors import ObjectRules
from mcore_ckpt.format._pickle_machine import (
    Budget,
    Maker,
    PickleRun,
    WrongArgumentsError,
    checked_size,
    inert_maker,
)
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.dtypes import DTYPES
from mcore_ckpt.format.safe_pickle import Opaque
from mcore_ckpt.format.tensor_pickle import contiguous_strides
from mcore_ckpt.format.zip_records import ItemBytes, ZipRecord, read_directory, record_start

__all__ = ["FileTensor", "StateFile", "StateRecord", "read_state_file"]

# What describes the tensors of one rank: some hundred bytes for each.
_MAX_PICKLE_BYTES = 256 * 1024**2


class StateRecord(NamedTuple):
    """Bytes of a storage in its file; `crc32` is what the archive states, None if it states none."""

    start: int
    nbytes: int
    crc32: int | None


class FileTensor(NamedTuple):
    """A tensor that stays in its file.

    Attributes:
        record: number of its storage, which other tensors may share.
        dtype: torch's name without `torch.`.
        offset: of the first element, in elements of the storage.
        shape: sizes, in elements.
        strides: in elements, where the elements do not follow one another in C order.
    """

    record: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].element_bytes

    @property
    def first_byte(self) -> int:
        """Of its elements, in the storage."""
        return self.offset * DTYPES[self.dtype].element_bytes


@dataclass(frozen=True, slots=True)
class StateFile:
    """Attributes: `value` is what was saved, `records` where the storages lie, by number."""

    value: Any
    records: dict[str, StateRecord]


class _Storage(NamedTuple):
    key: str
    dtype: str
    nbytes: int


class _Rules(ObjectRules):
    """As for stored objects; tensors are noted, and what is not known is inert."""

    def __init__(self, where: str, records: dict[str, StateRecord]) -> None:
        super().__init__(where, (), False, lambda _key, nbytes: bytearray(nbytes))
        self._records = records
        self._unknown: dict[str, tuple[Any, Maker | None]] = {}

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        full_name = f"{module}.{name}"
        if full_name in _MAKERS:
            return _MAKERS[full_name]
        if full_name in self._unknown:
            return self._unknown[full_name]
        try:
            return super().named(module, name)
        except UnsafePickleError:
            stand_in = type("StandIn", (Opaque,), {"name": full_name})
            self._unknown[full_name] = found = stand_in, inert_maker(stand_in)
            return found

    def referred(self, reference: Any) -> Any:
        if type(reference) is not tuple or len(reference) not in (5, 6) or reference[0] != "storage":
            raise WrongArgumentsError("a reference to something else than a storage")
        if len(reference) == 6 and reference[5] is not None:
            raise WrongArgumentsError("a storage that is a view of another")
        dtype, key, count = getattr(reference[1], "dtype", None), reference[2], reference[4]
        if dtype is None or type(key) is not str or type(count) is not int or count < 0:
            raise WrongArgumentsError("a reference to no storage")
        nbytes, record = count * dtype.itemsize, self._records.get(key)
        if record is None or record.nbytes != nbytes:
            held = "none" if record is None else f"{record.nbytes} bytes"
            raise CorruptCheckpointError(
                f"{self._where}: storage {key:.40} of {nbytes} bytes: the archive holds {held}; the file is truncated "
                "or damaged. Restore it from another copy, or take an earlier checkpoint"
            )
        return _Storage(key, str(dtype).removeprefix("torch."), nbytes)


def _noted(storage: Any, dtype: str, offset: Any, size: Any, stride: Any) -> FileTensor:
    if type(storage) is not _Storage or dtype not in DTYPES:
        raise WrongArgumentsError(f"a tensor of {dtype:.40} in a storage")
    (offset,), size, stride = checked_size((offset,)), checked_size(size), checked_size(stride)
    elements = math.prod(size)
    plain = contiguous_strides(size)
    if len(stride) != len(size):
        raise WrongArgumentsError(f"a tensor of {len(size)} axes in {len(stride)} steps")
    held = storage.nbytes // DTYPES[dtype].element_bytes
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if elements and last >= held:
        raise WrongArgumentsError(f"elements up to {last} inside a storage of {held}")
    strided = elements and any(n > 1 and a != b for n, a, b in zip(size, stride, plain, strict=True))
    return FileTensor(storage.key, dtype, offset if elements else 0, size, stride if strided else ())


def _tensor_v2(_: Budget, storage: Any, offset: Any, size: Any, stride: Any, *_rest: Any) -> FileTensor:
    _check_rest(_rest)
    return _noted(storage, getattr(storage, "dtype", "none"), offset, size, stride)


def _tensor_v3(
    _: Budget, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_rest: Any
) -> FileTensor:
    _check_rest((grad, hooks, *_rest))
    return _noted(storage, str(dtype).removeprefix("torch."), offset, size, stride)


def _check_rest(rest: tuple[Any, ...]) -> None:
    """Whether it requires a gradient, no hooks, and no flags (`conj`, `neg`) that change the elements."""
    if not 2 <= len(rest) <= 3 or type(rest[0]) is not bool or rest[1] or (len(rest) == 3 and rest[2]):
        raise WrongArgumentsError("a tensor without hooks and flags")


def _parameter(_: Budget, data: Any, *_rest: Any) -> FileTensor:
    if type(data) is not FileTensor:
        raise WrongArgumentsError("a parameter of a tensor")
    return data


def _with_attributes(budget: Budget, function: Any, _kind: Any, arguments: Any, _state: Any) -> FileTensor:
    """A tensor with attributes of Megatron's on it (`tensor_model_parallel`, ...), which are dropped."""
    made = {_tensor_v2: _tensor_v2, _tensor_v3: _tensor_v3, _parameter: _parameter}.get(function)
    if made is None or type(arguments) is not tuple:
        raise WrongArgumentsError("a tensor with attributes")
    found: FileTensor = made(budget, *arguments)  # type: ignore[operator]
    return found


def _ordered(budget: Budget, *arguments: Any) -> Any:
    if arguments and arguments != ([],):
        pairs = arguments[0]
        if len(arguments) != 1 or type(pairs) is not list or not all(type(pair) is list for pair in pairs):
            raise WrongArgumentsError("the pairs of an OrderedDict")
        budget.charge(len(pairs))
        budget.check_keys(pair[0] for pair in pairs)
        return OrderedDict(pairs)
    return OrderedDict()


def _ordered_built(_: Budget, made: Any, state: Any) -> Any:
    if type(state) is not dict or set(state) != {"_metadata"}:
        raise WrongArgumentsError("the attributes of an OrderedDict")
    return made


_MAKERS: dict[str, tuple[Any, Maker | None]] = {
    "collections.OrderedDict": (OrderedDict, Maker(_ordered, _ordered_built)),
    "torch._utils._rebuild_tensor_v2": (_tensor_v2, Maker(_tensor_v2)),
    "torch._utils._rebuild_tensor_v3": (_tensor_v3, Maker(_tensor_v3)),
    "torch._utils._rebuild_parameter": (_parameter, Maker(_parameter)),
    "torch._utils._rebuild_parameter_with_state": (_parameter, Maker(_parameter)),
    "torch._tensor._rebuild_from_type_v2": (_with_attributes, Maker(_with_attributes)),
}


def read_state_file(read: Callable[[int, int], bytes], file_bytes: int, where: str) -> StateFile:
    """Read what `torch.save` wrote, all but the elements of its tensors.

    Args:
        read: `read(offset, length)` returns exactly these bytes of the file.
        file_bytes: its size.
        where: the file, for messages.

    Raises:
        UnsafePickleError: the pickle makes something that nobody saves.
        ChecksumError: the pickle is not what was written.
        CorruptCheckpointError: it is no such file, or is damaged.
    """
    try:
        item = ItemBytes(read, file_bytes, where)
        directory = read_directory(item)
        folder = next(iter(directory)).partition("/")[0]
        stated = any(record.crc32 for record in directory.values())
        if _content(item, directory, f"{folder}/byteorder", 16) == b"big":
            raise CorruptCheckpointError(f"{where}: was written on a big-endian machine, which is not read here")
        records = {}
        prefix = f"{folder}/data/"
        for name, record in directory.items():
            if name.startswith(prefix):
                _refuse_packed(record, where)
                crc = record.crc32 if stated else None
                records[name.removeprefix(prefix)] = StateRecord(record_start(item, record), record.stored_bytes, crc)
        pickled = _content(item, directory, f"{folder}/data.pkl", _MAX_PICKLE_BYTES)
        if pickled is None:
            raise item.corrupt(f"expected a record {folder}/data.pkl", f"got {', '.join(list(directory)[:8]):.400}")
        return StateFile(PickleRun(pickled, _Rules(where, records), where).load(), records)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise CorruptCheckpointError(
            f"{where}: not a readable file of torch.save ({type(error).__name__}: {error!s:.200}); restore it from "
            "another copy"
        ) from error


def _refuse_packed(record: ZipRecord, where: str) -> None:
    if record.method or record.flags & 1:
        raise CorruptCheckpointError(
            f"{where}: record {record.name:.100} is compressed or encrypted; torch.save writes records as they are. "
            "Unpack the file, or load it and save it again"
        )


def _content(item: ItemBytes, directory: dict[str, ZipRecord], name: str, at_most: int) -> bytes | None:
    record = directory.get(name)
    if record is None:
        return None
    _refuse_packed(record, item.where)
    if record.stored_bytes > at_most:
        raise item.corrupt(f"expected at most {at_most} bytes in {name:.100}", f"got {record.stored_bytes}")
    content = item.get(record_start(item, record), record.stored_bytes)
    if record.crc32 and crc32(content) != record.crc32:
        raise ChecksumError(
            f"{item.where}: record {name:.100} has CRC-32 {crc32(content):#010x}, expected {record.crc32:#010x}: the "
            "file was damaged after it was written; take another copy or an earlier checkpoint"
        )
    return bytes(content)
