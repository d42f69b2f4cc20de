"""Unpickling that runs nothing: the doors for each kind of pickle in a checkpoint, on one machine with one set of
limits.

    loads(data, allowed, where)    an index: every name is replaced by an inert stand-in
    load_object(source, ...)       a stored object or `common.pt`: the classes that checkpoints hold, tensors on the CPU
    read_plain(content, where)     the same to look at: every class is replaced by an inert `Opaque`; without torch
    read_described(content, where) the same to compare: with the bytes of its tensors

What the machine allows, and its limits, are in `_pickle_machine.py`; which classes a stored object may hold, and with
which arguments, in `_constructors.py`. `pickle.Unpickler` in C reads an index many times as fast (`_plain_index.py` has
the figures): it gets those that `plainly_built` has found to hold nothing for the machine to object to, which is nearly
all of them.
"""

from __future__ import annotations

import io
import logging
import operator
import pickle
import pickletools
import re
import signal
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    UnsafePickleError,
)
from mcore_ckpt.format._constructors import ALLOWED_OBJECT_CLASSES, ObjectRules, Unavailable
from mcore_ckpt.format._pickle_machine import (
    Budget,
    Maker,
    NotUnderstoodError,
    PickleRun,
    WrongArgumentsError,
    checked_size,
    inert_maker,
    name_today,
    unpickle,
)
from mcore_ckpt.format._plain_index import plainly_built
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.dtypes import DTYPE_OF_STORAGE, DTYPES
from mcore_ckpt.format.zip_records import ItemBytes, ItemStream, ZipRecord, read_directory, record_start

__all__ = [
    "ALLOWED_OBJECT_CLASSES",
    "Inflation",
    "Opaque",
    "StoredStorage",
    "TensorOutline",
    "Unavailable",
    "load_object",
    "loads",
    "read_described",
    "read_plain",
    "read_tensor_outline",
    "refuse_zip_bomb",
]

_logger = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------------- stand-ins


class _Table:
    """Rules by an exact table of names, for an index."""

    def __init__(self, allowed: Mapping[tuple[str, str], Any], where: str) -> None:
        self._allowed, self._where = allowed, where

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        value = self.value(module, name)
        return value, (_TABLE_MAKERS.get(value) or inert_maker(value)) if isinstance(value, type) else None

    def value(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            pass
        if _is_newer(module, name, self._allowed):
            known = sorted({name for home, name in self._allowed if home == module}) or ["another module"]
            raise NotUnderstoodError(f"it names {module:.200}.{name:.200}; expected {', '.join(known)}")
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for {module:.200}.{name:.200}, which is not among the classes that a "
            "checkpoint index may hold. Nothing was imported or run. The file is damaged, was tampered with, or "
            "was written by something other than Megatron-Core, torch.distributed.checkpoint or this package."
        )

    def referred(self, reference: Any) -> NoReturn:
        shown = repr(reference)[:80] if type(reference) in (str, int) else type(reference).__name__
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for an external object (persistent id {shown}); an index has none. "
            "The file is damaged or is not a checkpoint index."
        )


# Where classes of an index come from, and how dtypes are called.
_HOMES = re.compile(r"(torch\.distributed\.(checkpoint|tensor|_shard)|megatron\.core\.dist_checkpointing)\b[\w.]*")
_CLASS = re.compile(r"_*[A-Z]\w*", re.ASCII)
_DTYPE = re.compile(r"[a-z]*(complex|float|int|bits)\d\w*", re.ASCII)


def _is_newer(module: str, name: str, known: Iterable[tuple[str, str]]) -> bool:
    """Whether a name that is not known is one that a later torch or Megatron-Core may write.

    One that differs from a known name in one character is a damaged one.
    """
    if not (_DTYPE.fullmatch(name) if module == "torch" else _HOMES.fullmatch(module) and _CLASS.fullmatch(name)):
        return False
    return not any(_differ_in_one(f"{module}.{name}", ".".join(other)) for other in known)


def _differ_in_one(text: str, other: str) -> bool:
    return len(text) == len(other) and sum(map(operator.ne, text, other)) == 1


def _table_size(budget: Budget, values: Any = ()) -> Any:
    size = checked_size(values)
    if type(values) is tuple:
        return values
    budget.charge(len(size))
    return size


def _ordered(_: Budget, *pairs: Any) -> Any:
    if pairs and pairs != ([],):
        raise WrongArgumentsError("expected an empty OrderedDict")
    return OrderedDict()


_TABLE_MAKERS: dict[Any, Maker] = {
    tuple: Maker(_table_size),
    OrderedDict: Maker(_ordered, lambda _b, made, _state: made),
}


# To look through one takes a pattern that is compiled in 11 ms, once in a process; so few bytes take 1 to 3 ms without.
_SHORT_PICKLE_BYTES = 4096


class _Restricted(pickle.Unpickler):
    """The machine in C, for pickles that `plainly_built` has looked through."""

    def __init__(self, data: bytes, table: _Table) -> None:
        super().__init__(io.BytesIO(data))
        self.find_class = table.value  # type: ignore[method-assign]
        self.persistent_load = table.referred  # type: ignore[method-assign]


def loads(data: bytes, allowed: Mapping[tuple[str, str], Any], where: str) -> Any:
    """Unpickle `data`, with `allowed[module, name]` standing in for each global that the pickle names.

    Args:
        data: the pickle; bytes after its end are ignored.
        allowed: what each (module, qualified name) is replaced by. The replacements must be inert when called, and
            must not be mutable through attributes.
        where: the file, for error messages.

    Raises:
        UnsafePickleError: the pickle names something else, or an external object, or passes a limit.
        NewerFormatError: it names what a later torch or Megatron-Core may write, or sets states in forms not known.
        CorruptCheckpointError: the bytes are no pickle, are truncated, or build something that cannot be.
    """
    table = _Table(allowed, where)
    if len(data) < _SHORT_PICKLE_BYTES or not plainly_built(data):
        return unpickle(data, table, where)
    try:
        return _Restricted(data, table).load()
    except UnsafePickleError:
        raise
    # What passes `plainly_built` and is damaged still fails in any way that building objects can.
    except Exception:  # noqa: BLE001  (the other machine says what it is)
        return unpickle(data, table, where)


class Opaque:
    """Something in a pickle that is not a plain value; inert. Each class that a pickle names gets a subclass.

    Attributes:
        name: of the class or function that the pickle names.
        arguments: what it would have been called with.
        state: what would have been its attributes, items or members.
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
    def make(budget: Budget, *arguments: Any) -> Any:
        members = arguments[0] if arguments else ()
        if type(members) not in (list, tuple, set, frozenset, dict):
            raise WrongArgumentsError(f"expected the members of a {kind.__name__}")
        budget.charge(len(members))
        if kind in (set, frozenset) and any(type(member) in (tuple, frozenset) for member in members):
            return [*members]  # to be shown only; hashing it might not end
        if kind is not list and type(members) is not dict:
            budget.check_keys(members if kind is not dict else (key for key, _ in members))
        return kind(members)

    return Maker(make, lambda _budget, made, _state: made)


_PLAIN_CONTAINERS = {
    "collections.OrderedDict": (dict, _plain_members(dict)),
    "builtins.dict": (dict, _plain_members(dict)),
    "builtins.list": (list, _plain_members(list)),
    "builtins.set": (set, _plain_members(set)),
    "builtins.frozenset": (frozenset, _plain_members(frozenset)),
}


def read_plain(content: bytes, where: str, inflation: Inflation | None = None) -> Any:
    """What `torch.save` wrote, to look at: no class is imported, and each is an `Opaque` instead. Tensors are not read.

    Raises:
        CorruptCheckpointError: it is no archive of `torch.save`, or is damaged.
    """
    try:
        return unpickle(_Container(content, where, inflation or Inflation()).read("data.pkl"), _Opaques(), where)
    except LoadError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where}: not a readable archive of torch.save ({type(error).__name__}: {error!s:.200}); restore it from "
        "another copy"
    )


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """What a stored tensor's elements lie in.

    Attributes:
        kind: name of the class that the pickle gives it, which says the dtype.
        content: its bytes.
    """

    kind: str
    content: bytes


class _Referred(NamedTuple):
    """A storage that is referred to: the stand-in of its class, and which of the records it is."""

    kind: type
    key: str


class _KindsOfStorages(_Opaques):
    """As `_Opaques`; and a `_Referred` for each storage."""

    def referred(self, reference: Any) -> Any:
        kind, key = reference[1:3] if type(reference) is tuple and len(reference) > 2 else (None, None)
        if not (isinstance(kind, type) and issubclass(kind, Opaque)) or type(key) is not str:
            raise WrongArgumentsError("a reference to no storage")
        return _Referred(kind, key)


def read_tensor_outline(read: Callable[[int, int], bytes], item_bytes: int, where: str) -> TensorOutline | None:
    """Dtype and shape of the tensor of an archive that has to be decoded as a whole, by its pickle alone.

    Args:
        read: `read(offset, length)` returns exactly these bytes, offsets relative to the item.
        item_bytes: size of the item.
        where: key and file, for messages.

    Returns:
        None if something makes the tensor that only decoding tells the result of.

    Raises:
        CorruptCheckpointError: it is no tensor, or one without an element at each place (sparse, or a meta tensor).
    """
    try:
        with zipfile.ZipFile(ItemStream(read, item_bytes)) as archive:
            name = next(name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > _MAX_INFLATION * item_bytes:
                raise WrongArgumentsError(f"a pickle that would be inflated to {archive.getinfo(name).file_size} bytes")
            made = unpickle(archive.read(name), _KindsOfStorages(), where)
            folder = name.partition("/")[0]
            return _outline(made, lambda key: archive.getinfo(f"{folder}/data/{key}").file_size, where)
    except LoadError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise _unreadable(where, error) from error


def _outline(made: Any, storage_bytes: Callable[[str], int], where: str) -> TensorOutline | None:
    if not isinstance(made, Opaque):
        raise CorruptCheckpointError(f"{where}: expected a tensor, stored is {type(made).__name__}")
    function, arguments = made.name, made.arguments
    while function in _WRAPPERS or function == "torch._tensor._rebuild_from_type_v2":
        inner = arguments[0] if arguments else None
        if function in _WRAPPERS and isinstance(inner, Opaque):
            function, arguments = inner.name, inner.arguments
        elif function not in _WRAPPERS and len(arguments) > 2 and type(arguments[2]) is tuple:
            function, arguments = getattr(inner, "name", ""), arguments[2]
        else:
            raise CorruptCheckpointError(f"{where}: expected a tensor, stored is a call of {function:.200}")
    if function in _WITHOUT_ELEMENTS:
        raise CorruptCheckpointError(
            f"{where}: expected a tensor with an element at each place, stored is what {function} makes; load another "
            "copy or an earlier checkpoint"
        )
    typed = function in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_qtensor")
    if not typed and function != "torch._utils._rebuild_tensor_v3":
        return None
    storage: Any = arguments[0]
    kind: Any = storage.kind if typed else arguments[6]
    name = getattr(kind, "name", "").removeprefix("torch.") if isinstance(kind, type) else ""
    dtype: str | None = DTYPE_OF_STORAGE.get(name) if typed else name or None
    start, sizes, strides = arguments[1], checked_size(arguments[2]), checked_size(arguments[3])
    if dtype is not None and dtype in DTYPES and 0 not in sizes:
        last = start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        stored = storage_bytes(storage.key) // DTYPES[dtype].element_bytes
        if not 0 <= start <= last < stored:
            raise CorruptCheckpointError(
                f"{where}: expected the elements [{start}, {last}] of a storage, which has {stored}; load another copy "
                "or an earlier checkpoint"
            )
    return TensorOutline(dtype, sizes)


_WRAPPERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_WITHOUT_ELEMENTS = ("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_meta_tensor_no_storage")


class TensorOutline(NamedTuple):
    """What a pickle says of its tensor.

    Attributes:
        dtype: torch's name without `torch.`; None if it is none that ranges are read of.
        shape: sizes, in elements.
    """

    dtype: str | None
    shape: tuple[int, ...]


class _Described(_Opaques):
    """As `_Opaques`; and a `StoredStorage` for each storage, of which all of one record share its bytes."""

    def __init__(self, container: _Container) -> None:
        super().__init__()
        self._container = container
        self._contents: dict[str, bytes] = {}

    def referred(self, reference: Any) -> Any:
        if type(reference) is not tuple or len(reference) < 3 or reference[0] != "storage":
            raise WrongArgumentsError("a reference to something else than a storage")
        kind, key = reference[1:3]
        if not (isinstance(kind, type) and issubclass(kind, Opaque)) or type(key) is not str:
            raise WrongArgumentsError("a reference to no storage")
        if key not in self._contents:
            self._contents[key] = self._container.read(f"data/{key}")
        return StoredStorage(kind.name, self._contents[key])


def read_described(content: bytes, where: str) -> Any:
    """As `read_plain`, to compare: with the bytes of all tensors. Raises as that does."""
    try:
        container = _Container(content, where, Inflation())
        return unpickle(container.read("data.pkl"), _Described(container), where)
    except LoadError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise _unreadable(where, error) from error


# ------------------------------------------------------------------------------------------------ containers of objects

# torch.save never compresses; what others have compressed is inflated in memory, so up to this much, or ratio, only.
_MAX_INFLATED_BYTES = 1024**3
_MAX_INFLATION = 20


class Inflation:
    """How much the compressed records of one load have been inflated to, all items together."""

    def __init__(self) -> None:
        self._inflated_bytes = self._stored_bytes = 0
        self._lock = threading.Lock()

    def add(self, stored_bytes: int, inflated_bytes: int, where: str) -> None:
        """Note an item; `UnsafePickleError` if it, or all items so far, would fill the memory."""
        with self._lock:
            self._stored_bytes += stored_bytes
            self._inflated_bytes += inflated_bytes
            for stored, inflated in ((stored_bytes, inflated_bytes), (self._stored_bytes, self._inflated_bytes)):
                if inflated > max(_MAX_INFLATED_BYTES, _MAX_INFLATION * stored):
                    raise UnsafePickleError(
                        f"{where}: {stored} bytes would become {inflated} when inflated; torch.save never compresses. "
                        "The file was made to do harm, or damaged; do not load it."
                    )


def refuse_zip_bomb(content: bytes, where: str, inflation: Inflation) -> None:
    """Refuse a container whose compressed records would fill the memory.

    Raises:
        UnsafePickleError: they would.
        CorruptCheckpointError: it is no zip archive.
    """
    try:
        _Container(content, where, inflation)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise CorruptCheckpointError(f"{where}: its compressed records cannot be read ({error!s:.200})") from error


class _Container:
    """The records of an archive of `torch.save` that is in memory, plain or compressed."""

    def __init__(self, content: bytes, where: str, inflation: Inflation) -> None:
        self._content, self._where = content, where
        self._item = ItemBytes(lambda offset, length: content[offset : offset + length], len(content), where)
        self._records = read_directory(self._item)
        self._folder = next(iter(self._records)).partition("/")[0]
        self._inflated: dict[str, bytes] = {}
        if any(record.method for record in self._records.values()):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                inflated_bytes = sum(record.file_size for record in archive.infolist())
            inflation.add(len(content), inflated_bytes, where)

    def check(self) -> None:
        """Compare the CRC-32 of every record; `ChecksumError` if one is not that of its content.

        There is nothing to compare where torch was told to write no checksums: all are zero then.
        """
        if any(record.crc32 for record in self._records.values()):
            for record in self._records.values():
                got = crc32(self._bytes_of(record))
                if got != record.crc32:
                    raise ChecksumError(
                        f"{self._where}: record {record.name:.100} has CRC-32 {got:#010x}, expected "
                        f"{record.crc32:#010x}: the file was damaged after it was written; load "
                        "another copy or an earlier checkpoint"
                    )

    def read(self, name: str) -> bytes:
        """The content of a record; `CorruptCheckpointError` if there is none of that name."""
        record = self._records.get(f"{self._folder}/{name}")
        if record is None:
            raise self._item.corrupt(f"expected a record {name:.100}", f"got {', '.join(list(self._records)[:8]):.400}")
        return bytes(self._bytes_of(record))

    def has(self, name: str) -> bool:
        """Whether there is a record of that name."""
        return f"{self._folder}/{name}" in self._records

    def _bytes_of(self, record: ZipRecord) -> bytes | memoryview:
        start = record_start(self._item, record)
        if record.flags & 1:
            raise self._item.corrupt("expected records that are not encrypted", record.name[:100])
        if not record.method:
            return memoryview(self._content)[start : start + record.stored_bytes]
        if record.name not in self._inflated:
            with zipfile.ZipFile(io.BytesIO(self._content)) as archive:
                self._inflated[record.name] = archive.read(record.name)
        return self._inflated[record.name]


# -------------------------------------------------------------------------------------------------------------- objects

_ANY_OBJECT = "a stored object"


def load_object(
    source: bytes | bytearray | memoryview | str | Path | BinaryIO,
    extra_allowed: Iterable[str] = (),
    *,
    where: str = _ANY_OBJECT,
    import_classes: bool = True,
    verify_crc: bool = True,
    run_code: bool = False,
    inflation: Inflation | None = None,
) -> Any:
    """Unpickle what `torch.save` wrote, building nothing outside the allow-list. Tensors land on the CPU.

    Args:
        source: the container's bytes, a file, or a path.
        extra_allowed: further classes, as `"module.qualified_name"`; they are imported when a pickle names them.
        where: what is being loaded, for error messages (a path is added by itself).
        import_classes: import the packages of allowed classes. Otherwise classes of packages that are not imported yet
            are replaced by `Unavailable`, as are those of packages that are not installed.
        verify_crc: compare the CRC-32 of every record before anything is unpickled.
        run_code: let the pickle import and call whatever it names (`LoadOptions.run_code_from_checkpoint`).
        inflation: of the load that this is a part of.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UnsafePickleError: the pickle names a class outside the allow-list, or passes a limit.
        ChecksumError: a record is not what was written.
        CorruptCheckpointError: the bytes are not what `torch.save` writes, or are damaged.
        OptionError: a class of `extra_allowed` cannot be imported.
    """
    if isinstance(source, str | Path):
        where = str(source) if where == _ANY_OBJECT else f"{where} ({source})"
        try:
            content = Path(source).read_bytes()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{where}: there is no such file; is the checkpoint complete?") from error
        except OSError as error:
            raise LoadError(f"{where}: cannot be read: {error.strerror or error}") from error
    else:
        content = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else source.read()
    try:
        if run_code:
            return _run_anything(content, where)
        if content.startswith(_LEGACY_MAGIC):
            return _Legacy(content, where, tuple(extra_allowed), import_classes).load()
        container = _Container(content, where, inflation or Inflation())
        if verify_crc:
            container.check()
        return _load(container, where, tuple(extra_allowed), import_classes)
    except (UnsafePickleError, ChecksumError, OptionError):
        raise
    # Damaged archives and the objects that are built of them can fail in any way at all.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CorruptCheckpointError(
            f"{where}: cannot be read as a torch.save container of plain data ({type(error).__name__}: {reason:.300}). "
            "The bytes are damaged or incomplete; restore them from another copy, or load an earlier checkpoint."
        ) from error


def _load(container: _Container, where: str, extra_allowed: tuple[str, ...], import_classes: bool) -> Any:
    swapped = container.has("byteorder") and container.read("byteorder") == b"big"

    def storage_bytes(key: str, nbytes: int) -> bytearray:
        content = bytearray(container.read(f"data/{key}"))
        if len(content) != nbytes or swapped:
            problem = (
                "written on a big-endian machine" if swapped else f"{len(content)} bytes, its pickle says {nbytes}"
            )
            raise CorruptCheckpointError(f"storage {key:.40}: {problem}")
        return content

    rules = ObjectRules(where, extra_allowed, import_classes, storage_bytes)
    return _run(container.read("data.pkl"), rules, where)


def _run(data: bytes, rules: ObjectRules, where: str, position: int = 0) -> Any:
    try:
        return PickleRun(data, rules, where, position).load()
    except UnsafePickleError as error:
        if not rules.refused:
            raise
        refused = _refused_names(data, position, rules)
        shown = ", ".join(f"{name:.200}" for name in refused[:5]) + (", ..." if len(refused) > 5 else "")
        raise UnsafePickleError(
            f"{where}: contains {shown}, which is not among the classes that checkpoints may hold; nothing was loaded. "
            "If you trust the origin of this checkpoint, allow it with "
            f"LoadOptions(allowed_classes=({', '.join(f'{name!r:.200}' for name in refused[:5])},))"
        ) from error


def _refused_names(data: bytes, position: int, rules: ObjectRules) -> list[str]:
    """All names in a pickle that the rules refuse, as far as they stand in it in full."""
    names = set(rules.refused)
    try:
        for opcode, argument, _ in pickletools.genops(data[position:]):
            if opcode.name == "GLOBAL" and isinstance(argument, str):
                module, name = name_today(*argument.partition(" ")[::2])
                try:
                    rules.named(module, name)
                except UnsafePickleError:
                    names.add(f"{module}.{name}")
    except (ValueError, UnicodeDecodeError, OptionError):
        pass  # damaged further on
    return sorted(names)


def _run_anything(content: bytes, where: str) -> Any:
    import torch

    _logger.warning(
        "%s is unpickled without any restriction, because of run_code_from_checkpoint: it can do whatever you can do",
        where,
    )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how torch.save began before it wrote zip archives


class _Legacy:
    """What `torch.save` wrote before zip archives: five pickles, and the storages behind them, each with its length."""

    def __init__(self, content: bytes, where: str, extra_allowed: tuple[str, ...], import_classes: bool) -> None:
        self._content, self._where = content, where
        self._options = extra_allowed, import_classes
        self._elements: dict[str, int] = {}

    def load(self) -> Any:
        position = len(_LEGACY_MAGIC)
        for _ in range(2):  # the version of the protocol, the sizes of C's types
            position = self._skipped(position)
        object_at = position
        keys_run = PickleRun(self._content, self, self._where, self._skipped(object_at))
        keys = keys_run.load()
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise WrongArgumentsError("expected the keys of storages")
        places: dict[str, tuple[int, int]] = {}
        position = keys_run.position
        for key in keys:
            count = int.from_bytes(self._content[position : position + 8], "little")
            nbytes = count * self._elements.get(key, 1)
            places[key] = position + 8, nbytes
            position += 8 + nbytes
        if position > len(self._content):
            raise EOFError(f"storages up to byte {position} of {len(self._content)}")

        def storage_bytes(key: str, nbytes: int) -> bytearray:
            start, held = places[key]
            if held != nbytes:
                raise CorruptCheckpointError(f"storage {key:.40}: {held} bytes, its pickle says {nbytes}")
            return bytearray(self._content[start : start + nbytes])

        return _run(self._content, ObjectRules(self._where, *self._options, storage_bytes), self._where, object_at)

    def _skipped(self, position: int) -> int:
        run = PickleRun(self._content, self, self._where, position)
        run.load()
        return run.position

    # What the pickles name is of no interest while they are skipped, but for the storages' elements.

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        stand_in = type("StandIn", (Opaque,), {"name": f"{module}.{name}"})
        return stand_in, inert_maker(stand_in)

    def referred(self, reference: Any) -> Any:
        rules = ObjectRules(self._where, (), False, lambda _key, nbytes: bytearray(nbytes))
        kind = getattr(reference[1], "name", "")
        value, _ = rules.named(*kind.rpartition(".")[::2])
        self._elements[reference[2]] = value.dtype.itemsize
        return "<storage>"
