"""Files of `torch.save` that are looked at: nothing is imported for them, and their tensors are not made.

    read_state_file(read, ...)   a state dict; each tensor becomes a note of where its elements lie
    read_tensor_outline(...)     an item that holds one tensor, of any form
    read_plain(content, ...)     a stored object; every class stays an inert `Opaque`; without torch

A state dict may name what stored objects may (`safe_pickle.py`), but for one thing, since such files hold the arguments
of a job and anything that its user added: what is not known, or not imported, stays an `Opaque` instead of an error;
the caller leaves it out.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError
from mcore_ckpt.format.safe_pickle import BESIDE_TENSORS, TensorNotes, plain_content
from mcore_ckpt.format.tensor_pickle import (
    STORAGE_KINDS,
    FileTensor,
    NotPlainTensorError,
    StorageReference,
    WrongArgumentsError,
    contiguous,
)
from mcore_ckpt.format.unpickler import Maker, Opaque, Rules, check_hashable, opaque_kind, unpickle
from mcore_ckpt.format.zip_records import Archive, ItemBytes, archive_of


class StateRecord(NamedTuple):
    """Bytes of a storage in its file; `crc32` is what the archive states, None if it states none."""

    start: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class StateFile:
    """Attributes: `value` is what was saved, `records` where the storages lie, by number."""

    value: Any
    records: dict[str, StateRecord]


class _OfFile(TensorNotes):
    """Each tensor has its storage in the file."""

    def __init__(self, where: str, records: dict[str, StateRecord]) -> None:
        super().__init__()
        self._where, self._records = where, records

    def referred(self, reference: Any) -> StorageReference:
        storage = super().referred(reference)
        record = self._records.get(storage.record)
        if record is None or record.nbytes != storage.nbytes:
            held = "none" if record is None else f"{record.nbytes} bytes"
            raise CorruptCheckpointError(
                f"{self._where}: storage {storage.record:.40} of {storage.nbytes} bytes: the archive holds {held}; "
                "the file is truncated or damaged. Restore it from another copy, or take an earlier checkpoint"
            )
        return storage


def read_state_file(read: Callable[[int, int], bytes], file_bytes: int, where: str) -> StateFile:
    """Read what `torch.save` wrote, all but the elements of its tensors; `read(offset, length)` gives bytes of it.
    Raises `UnsafePickleError` for what nobody saves, `CorruptCheckpointError` if it is damaged or no such file.
    """
    with _archive_errors(where):
        archive = Archive(ItemBytes(read, file_bytes, where))
        byte_order = archive.find("byteorder")
        if byte_order is not None and archive.content(byte_order) == b"big":
            raise CorruptCheckpointError(f"{where}: was written on a big-endian machine, which is not read here")
        records = {}
        for name, record in archive.records.items():
            _, data, number = name.partition("/data/")
            if data:
                crc = record.crc32 if archive.has_checksums else None
                records[number] = StateRecord(archive.start(record), record.stored_bytes, crc)
        pickled = archive.content(archive.record("data.pkl"))
        return StateFile(unpickle(pickled, _OfFile(where, records), where), records)


@contextmanager
def _archive_errors(where: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise CorruptCheckpointError(
            f"{where}: not a readable file of torch.save ({type(error).__name__}: {error!s:.200}); restore it from "
            "another copy"
        ) from error


def read_tensor_outline(read: Callable[[int, int], bytes], item_bytes: int, where: str) -> FileTensor | None:
    """The tensor of an item that has to be decoded completely, by its pickle alone; None if only decoding can tell.

    Raises `CorruptCheckpointError` if the item is damaged, or holds no tensor with an element at each place.
    """
    try:
        value = read_state_file(read, item_bytes, where).value
    except CorruptCheckpointError as error:
        if isinstance(error.__cause__, NotPlainTensorError):
            return None
        raise
    if type(value) is FileTensor:
        return value
    if isinstance(value, Opaque) and not value.name.startswith("torch._utils."):
        return None
    stored = value.name if isinstance(value, Opaque) else type(value).__name__
    raise CorruptCheckpointError(
        f"{where}: expected a tensor with an element at each place, stored is {stored:.200}; load another copy or an "
        "earlier checkpoint"
    )


class _OneTensor(TensorNotes):
    """Rules for the pickle of one tensor, without torch."""

    def named(self, full_name: str) -> tuple[Any, Maker | None] | None:
        if full_name in self._functions or full_name in STORAGE_KINDS:
            return super().named(full_name)
        if full_name not in BESIDE_TENSORS:
            raise NotPlainTensorError(f"call of {full_name:.200}")
        return BESIDE_TENSORS[full_name]


@lru_cache(maxsize=4096)
def tensor_of(pickle: bytes) -> FileTensor:
    """The tensor of a pickle of any form; `NotPlainTensorError`: decoding may help; else it cannot be."""
    try:
        tensor = unpickle(pickle, _OneTensor(), "its pickle")
    except CheckpointError as error:
        if isinstance(error.__cause__, WrongArgumentsError):
            raise error.__cause__ from None
        raise
    if type(tensor) is not FileTensor:
        raise NotPlainTensorError(f"it holds {type(tensor).__name__}, not a tensor")
    return contiguous(tensor)


def _plain_members(kind: Any) -> Maker:
    def make(*arguments: Any) -> Any:
        members = arguments[0] if arguments else ()
        if type(members) not in (list, tuple, set, frozenset, dict):
            raise WrongArgumentsError(f"expected the members of a {kind.__name__}")
        if kind is not list and type(members) is not dict:
            check_hashable(members if kind is not dict else (key for key, _ in members))
        return kind(members)

    return Maker(make, lambda made, _state: made, takes_members=True)


_PLAIN_CONTAINERS: Final[dict[str, tuple[Any, Maker | None]]] = {
    "collections.OrderedDict": (dict, _plain_members(dict)),
    **{f"builtins.{kind.__name__}": (kind, _plain_members(kind)) for kind in (dict, list, set, frozenset)},
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """What a stored tensor's elements lie in."""

    kind: str  # name of the class that the pickle gives it, which says the dtype
    content: bytes  # its bytes


class _Opaques(Rules):
    """Every class stays an `Opaque`, but for the few that are plain containers; with an archive, each storage becomes a
    `StoredStorage`, and all of one record share its bytes.
    """

    def __init__(self, archive: Archive | None) -> None:
        self._archive = archive
        self._contents: dict[str, bytes] = {}

    def named(self, full_name: str) -> tuple[Any, Maker | None] | None:
        module, _, name = full_name.rpartition(".")
        if module == "signal" and name in signal.Signals.__members__:  # Python 3.10 pickles signals by their names
            return opaque_kind("signal.Signals")(signal.Signals[name].value), None
        return _PLAIN_CONTAINERS.get(full_name)

    def referred(self, reference: Any) -> Any:
        if self._archive is None:
            return "<storage>"
        if type(reference) is not tuple or len(reference) < 3 or reference[0] != "storage":
            raise WrongArgumentsError("a reference to something else than a storage")
        kind, key = reference[1:3]
        if not (isinstance(kind, type) and issubclass(kind, Opaque)) or type(key) is not str:
            raise WrongArgumentsError("a reference to no storage")
        if key not in self._contents:
            self._contents[key] = plain_content(self._archive, f"data/{key}")
        return StoredStorage(kind.name, self._contents[key])


def read_plain(content: bytes, where: str, *, with_storages: bool = False) -> Any:
    """What `torch.save` wrote, each class an `Opaque`; tensors only `with_storages`. Raises `LoadError`."""
    with _archive_errors(where):
        archive = archive_of(content, where)
        return unpickle(plain_content(archive, "data.pkl"), _Opaques(archive if with_storages else None), where)
