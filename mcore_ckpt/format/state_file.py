"""Files of `torch.save` that are looked at: nothing is imported for them, and their tensors are not made.

    read_state_file(read, ...)   a state dict; each tensor becomes a note of where its elements lie
    read_plain(content, ...)     a stored object; every class becomes an inert `Opaque`; without torch

A state dict may name what stored objects may (`safe_pickle.py`), but for one thing, since such files hold the arguments
of a job and anything that its user added: a class that is not known becomes an `Opaque` instead of an error; the caller
leaves it out. Classes of packages that are not imported become `Unavailable`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError, LoadError, UnsafePickleError
from mcore_ckpt.format.safe_pickle import ObjectRules, archive_of, plain_content
from mcore_ckpt.format.tensor_pickle import (
    TENSOR_NAMES,
    FileTensor,
    Maker,
    NotPlainTensorError,
    WrongArgumentsError,
    check_keys,
    inert_maker,
    stored_storage,
    unpickle,
)
from mcore_ckpt.format.zip_records import Archive, ItemBytes, ZipRecord


class Opaque:
    """Something in a pickle that is not a plain value; inert. Each class that a pickle names gets a subclass with its
    `name`. `arguments` is what it would have been called with, `state` its attributes, items or members.
    """

    name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(self.state, dict):
            self.state = {}
        self.state[key] = value

    def append(self, value: Any) -> None:
        """A member, if the class was a kind of list."""
        if not isinstance(self.state, list):
            self.state = []
        self.state.append(value)

    def __repr__(self) -> str:
        return f"<{self.name}>"


# ------------------------------------------------------------------------------------------------------- state dicts

# What describes the tensors of one rank: some hundred bytes for each.
_MAX_PICKLE_BYTES = 256 * 1024**2


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


class _Rules(ObjectRules):
    """As for stored objects; tensors are noted, and what is not known is inert."""

    def __init__(self, where: str, records: dict[str, StateRecord]) -> None:
        super().__init__(where, (), False, lambda _key, nbytes: bytearray(nbytes))
        self._records = records
        self._unknown: dict[str, tuple[Any, Maker | None]] = {}

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        full_name = f"{module}.{name}"
        known = TENSOR_NAMES.get(full_name) or self._unknown.get(full_name)
        if known is not None:
            return known
        try:
            return super().named(module, name)
        except UnsafePickleError:
            stand_in = type("StandIn", (Opaque,), {"name": full_name})
            self._unknown[full_name] = found = stand_in, inert_maker(stand_in)
            return found

    def referred(self, reference: Any) -> Any:
        storage = stored_storage(reference)
        record = self._records.get(storage.record)
        if record is None or record.nbytes != storage.nbytes:
            held = "none" if record is None else f"{record.nbytes} bytes"
            raise CorruptCheckpointError(
                f"{self._where}: storage {storage.record:.40} of {storage.nbytes} bytes: the archive holds {held}; the "
                "file is truncated or damaged. Restore it from another copy, or take an earlier checkpoint"
            )
        return storage


def read_state_file(read: Callable[[int, int], bytes], file_bytes: int, where: str) -> StateFile:
    """Read what `torch.save` wrote, all but the elements of its tensors; `read(offset, length)` gives bytes of it.
    Raises `UnsafePickleError` for what nobody saves, `CorruptCheckpointError` if it is damaged or no such file.
    """
    try:
        archive = Archive(ItemBytes(read, file_bytes, where))
        byte_order = archive.find("byteorder")
        if byte_order is not None and _content(archive, byte_order, 16) == b"big":
            raise CorruptCheckpointError(f"{where}: was written on a big-endian machine, which is not read here")
        records = {}
        for name, record in archive.records.items():
            _, data, number = name.partition("/data/")
            if data:
                crc = record.crc32 if archive.has_checksums else None
                records[number] = StateRecord(archive.start(record), record.stored_bytes, crc)
        pickled = _content(archive, archive.record("data.pkl"), _MAX_PICKLE_BYTES)
        return StateFile(unpickle(pickled, _Rules(where, records), where), records)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise CorruptCheckpointError(
            f"{where}: not a readable file of torch.save ({type(error).__name__}: {error!s:.200}); restore it from "
            "another copy"
        ) from error


def _content(archive: Archive, record: ZipRecord, at_most: int) -> bytes:
    if record.stored_bytes > at_most:
        raise archive.item.corrupt(
            f"expected at most {at_most} bytes in {record.name:.100}", f"got {record.stored_bytes}"
        )
    return archive.content(record)


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


# ----------------------------------------------------------------------------------------------------- stored objects


class _Opaques:
    """Rules under which every class becomes a subclass of `Opaque`, but for the few that are plain containers."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Maker | None]] = dict(_PLAIN_CONTAINERS)

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        full_name = f"{module}.{name}"
        if module == "signal" and name in signal.Signals.__members__:  # Python 3.10 pickles signals by their names
            return self.named(module, "Signals")[0](signal.Signals[name].value), None
        if full_name not in self._known:
            stand_in = type("StandIn", (Opaque,), {"name": full_name})
            self._known[full_name] = stand_in, inert_maker(stand_in)
        return self._known[full_name]

    def referred(self, reference: Any) -> Any:
        return "<storage>"


def _plain_members(kind: Any) -> Maker:
    def make(*arguments: Any) -> Any:
        members = arguments[0] if arguments else ()
        if type(members) not in (list, tuple, set, frozenset, dict):
            raise WrongArgumentsError(f"expected the members of a {kind.__name__}")
        if kind is not list and type(members) is not dict:
            check_keys(members if kind is not dict else (key for key, _ in members))
        return kind(members)

    return Maker(make, lambda made, _state: made)


_PLAIN_CONTAINERS = {
    "collections.OrderedDict": (dict, _plain_members(dict)),
    "builtins.dict": (dict, _plain_members(dict)),
    "builtins.list": (list, _plain_members(list)),
    "builtins.set": (set, _plain_members(set)),
    "builtins.frozenset": (frozenset, _plain_members(frozenset)),
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """What a stored tensor's elements lie in."""

    kind: str  # name of the class that the pickle gives it, which says the dtype
    content: bytes  # its bytes


class _Described(_Opaques):
    """As `_Opaques`; and a `StoredStorage` for each storage, of which all of one record share its bytes."""

    def __init__(self, archive: Archive) -> None:
        super().__init__()
        self._archive = archive
        self._contents: dict[str, bytes] = {}

    def referred(self, reference: Any) -> Any:
        if type(reference) is not tuple or len(reference) < 3 or reference[0] != "storage":
            raise WrongArgumentsError("a reference to something else than a storage")
        kind, key = reference[1:3]
        if not (isinstance(kind, type) and issubclass(kind, Opaque)) or type(key) is not str:
            raise WrongArgumentsError("a reference to no storage")
        if key not in self._contents:
            self._contents[key] = plain_content(self._archive, f"data/{key}")
        return StoredStorage(kind.name, self._contents[key])


def read_plain(content: bytes, where: str, *, with_storages: bool = False) -> Any:
    """What `torch.save` wrote, to look at: each class becomes an `Opaque`. Tensors are read to compare them only
    (`with_storages`). Raises `LoadError`.
    """
    try:
        archive = archive_of(content, where)
        rules = _Described(archive) if with_storages else _Opaques()
        return unpickle(plain_content(archive, "data.pkl"), rules, where)
    except LoadError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise CorruptCheckpointError(
            f"{where}: not a readable archive of torch.save ({type(error).__name__}: {error!s:.200}); restore it from "
            "another copy"
        ) from error
