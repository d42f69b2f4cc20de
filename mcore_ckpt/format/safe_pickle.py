"""The door for what `torch.save` wrote: stored objects and `common.pt`, unpickled without running anything.

    load_object(source, ...)   for use: the classes that checkpoints hold, tensors on the CPU
    read_plain(content, ...)   to look at: every class is replaced by an inert `Opaque`; without torch

Which classes a stored object may hold, and with which arguments, is in `_constructors.py`. The other door is that of
`index_pickle.py`; behind both is the unpickler of `_unpickler.py`.
"""

from __future__ import annotations

import io
import pickletools
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    UnsafePickleError,
)
from mcore_ckpt.format._constructors import ObjectRules
from mcore_ckpt.format._constructors import Unavailable as Unavailable
from mcore_ckpt.format._unpickler import (
    Maker,
    WrongArgumentsError,
    check_keys,
    inert_maker,
    name_today,
    unpickle,
)
from mcore_ckpt.format._unpickler import NotRebuiltError as NotRebuiltError
from mcore_ckpt.format.zip_records import Archive, ItemBytes

_logger = logger_of(__name__)


# -------------------------------------------------------------------------------------------------------- stand-ins


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
            self._contents[key] = _plain_content(self._archive, f"data/{key}")
        return StoredStorage(kind.name, self._contents[key])


def read_plain(content: bytes, where: str, *, with_storages: bool = False) -> Any:
    """What `torch.save` wrote, to look at: each class becomes an `Opaque`. Tensors are read to compare them only
    (`with_storages`). Raises `LoadError`.
    """
    try:
        archive = _archive_of(content, where)
        rules = _Described(archive) if with_storages else _Opaques()
        return unpickle(_plain_content(archive, "data.pkl"), rules, where)
    except LoadError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise CorruptCheckpointError(
            f"{where}: not a readable archive of torch.save ({type(error).__name__}: {error!s:.200}); restore it from "
            "another copy"
        ) from error


def _archive_of(content: bytes, where: str) -> Archive:
    return Archive(ItemBytes(lambda offset, length: content[offset : offset + length], len(content), where))


def _plain_content(archive: Archive, name: str) -> bytes:
    """A record's content, its CRC-32 not compared."""
    record = archive.record(name)
    return archive.item.get(archive.start(record), record.stored_bytes)


# -------------------------------------------------------------------------------------------------------------- objects

_ANY_OBJECT = "a stored object"
# Among the classes that are allowed: a pickle may call whatever it names.
ANY_CLASS = "*"


def load_object(
    source: bytes | bytearray | memoryview | str | Path | BinaryIO,
    extra_allowed: Iterable[str] = (),
    *,
    where: str = _ANY_OBJECT,
    import_classes: bool = True,
    verify_crc: bool = True,
) -> Any:
    """Unpickle what `torch.save` wrote (bytes, file or path), building nothing outside the allow-list. Tensors land on
    the CPU.

    `extra_allowed` classes (`"module.qualified_name"`) are imported when a pickle names them; `ANY_CLASS`: let it call
    whatever it names. Without `import_classes`, classes of packages that are not imported yet become `Unavailable`.
    `verify_crc`: compare every CRC-32 before anything is unpickled. Raises `UnsafePickleError`,
    `CorruptCheckpointError`, `LoadError` if code that is allowed fails, or `OptionError` if a class of `extra_allowed`
    cannot be imported.
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
    extra_allowed = tuple(extra_allowed)
    try:
        if ANY_CLASS in extra_allowed:
            return _run_anything(content, where)
        archive = _archive_of(content, where)
        if verify_crc:
            for record in archive.records.values():
                archive.content(record)
        return _load(archive, where, extra_allowed, import_classes)
    except OptionError:
        raise
    # Damaged archives and the objects that are built of them can fail in any way at all.
    except Exception as error:
        if isinstance(error, LoadError) and type(error) is not CorruptCheckpointError:
            raise
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CorruptCheckpointError(
            f"{where}: cannot be read as a torch.save container of plain data ({type(error).__name__}: {reason:.300}). "
            "The bytes are damaged or incomplete; restore them from another copy, or load an earlier checkpoint."
        ) from error


def _load(archive: Archive, where: str, extra_allowed: tuple[str, ...], import_classes: bool) -> Any:
    swapped = archive.find("byteorder") is not None and _plain_content(archive, "byteorder") == b"big"

    def storage_bytes(key: str, nbytes: int) -> bytearray:
        content = bytearray(_plain_content(archive, f"data/{key}"))
        if len(content) != nbytes or swapped:
            problem = (
                "written on a big-endian machine" if swapped else f"{len(content)} bytes, its pickle says {nbytes}"
            )
            raise CorruptCheckpointError(f"storage {key:.40}: {problem}")
        return content

    rules = ObjectRules(where, extra_allowed, import_classes, storage_bytes)
    return _run(_plain_content(archive, "data.pkl"), rules, where)


def _run(data: bytes, rules: ObjectRules, where: str) -> Any:
    try:
        return unpickle(data, rules, where)
    except UnsafePickleError as error:
        if isinstance(error.__cause__, WrongArgumentsError):
            raise UnsafePickleError(
                f"{error} If you trust the origin of this checkpoint, load it with "
                "LoadOptions(allowed_classes=('*',)), which lets it run code as you"
            ) from error.__cause__
        if not rules.refused:
            raise
        refused = _refused_names(data, rules)
        shown = ", ".join(f"{name:.200}" for name in refused[:5]) + (", ..." if len(refused) > 5 else "")
        raise UnsafePickleError(
            f"{where}: contains {shown}, which is not among the classes that checkpoints may hold; nothing was loaded. "
            "If you trust the origin of this checkpoint, allow it with "
            f"LoadOptions(allowed_classes=({', '.join(f'{name!r:.200}' for name in refused[:5])},))"
        ) from error


def _refused_names(data: bytes, rules: ObjectRules) -> list[str]:
    """All names in a pickle that the rules refuse, as far as they stand in it in full."""
    names = set(rules.refused)
    try:
        for opcode, argument, _ in pickletools.genops(data):
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
        "%s is unpickled without any restriction, because allowed_classes holds '*': it can do whatever you can do",
        where,
    )
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is raised as the cause)
        archive = _archive_of(content, where)
        for record in archive.records.values():
            archive.content(record)
        failed = NotRebuiltError.of(error, "what is stored")
        failed.__cause__ = error
        raise failed.as_load_error(where) from failed
