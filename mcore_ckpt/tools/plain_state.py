"""The common state of a checkpoint (iteration, Megatron's arguments, optimizer settings) for looking at: no torch.

It is a `torch.save` archive: `common.pt`, or from Megatron-Core 0.19 on an object `common_state` in the data files. Its
pickle is read with a stand-in for every class that it names, so nothing is imported or run, whatever it says.
Tensors and other objects come out as `Opaque`. To load the state for use, take `common_state.load_common`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.directory.in_force import common_file_in_force, read_common_file, with_common_files
from mcore_ckpt.format.index import COMMON_STATE_KEY, CheckpointIndex, ObjectEntry
from mcore_ckpt.format.safe_pickle import Opaque, read_plain
from mcore_ckpt.load.checksums import check_records, checksum_error
from mcore_ckpt.load.file_footers import FileFooters
from mcore_ckpt.storage.resolve import storage_at


def read_plain_state(index: CheckpointIndex) -> dict[str, Any]:
    """The common state as far as it is plain values; empty if there is none (plain DCP). Raises `LoadError`."""
    stored = stored_common_state(index)
    if stored is None or stored.transforms:
        return {}
    return _as_dict(unwrapped(read_plain(stored.content, stored.where)), stored.where)


class StoredState(NamedTuple):
    """The common state as it is stored, all checksums compared."""

    where: str  # file, or key and file, for messages
    content: bytes  # an archive of `torch.save`, unless it is stored through `transforms`
    transforms: tuple[str, ...] = ()


def stored_common_state(index: CheckpointIndex) -> StoredState | None:
    """The common state of a checkpoint; None if it has none. Raises as `read_plain_state`."""
    storage = storage_at(index.path)
    file = common_file_in_force(with_common_files(storage, storage.list(), index), index)
    if file is not None:
        where = storage.path(file)
        content = read_common_file(storage, file, index.manifest)
        _check_records(content, where)
        return StoredState(where, content)
    entry = index.objects.get(COMMON_STATE_KEY)
    if entry is None:
        return None
    return StoredState(f"{entry.fqn} ({entry.item.file})", read_object(index, entry), entry.item.transforms)


def unwrapped(value: Any) -> Any:
    """The common state out of what is stored: as an object, it is the only member of a list."""
    return value[0] if isinstance(value, list) and value else value


def read_plain_object(index: CheckpointIndex, entry: ObjectEntry) -> Any:
    """A stored object as plain values, for display: no torch, and no class that it names. Raises `LoadError`."""
    where = f"{entry.fqn} ({entry.item.file})"
    if entry.item.transforms:
        raise LoadError(f"{where}: stored through {', '.join(entry.item.transforms)}; open_checkpoint() can read it")
    return plain(read_plain(read_object(index, entry), where))


def read_object(index: CheckpointIndex, entry: ObjectEntry) -> bytes:
    """The bytes of a stored object, after its file's footer and all its checksums were compared. Raises `LoadError`."""
    item, where = entry.item, f"{entry.fqn} ({entry.item.file})"
    with storage_at(index.path).open_reader(item.file) as reader:
        FileFooters(lambda: index).check(item.file, reader)
        content = reader.read(item.offset, item.length)
    if item.crc32 is not None and (got := crc32(content)) != item.crc32:
        raise checksum_error(where, "its bytes have", got, item.crc32)
    if not item.transforms:
        _check_records(content, where)
    return content


def _check_records(content: bytes, where: str) -> None:
    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    view = memoryview(content)
    check_records(read, lambda offset, length: crc32(view[offset : offset + length]), len(content), where)


def _as_dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{where}: expected a dict, got {type(value).__name__}")
    return {str(key): plain(part) for key, part in value.items()}


# A few bytes of pickle can refer to one list or text many times over; no common state has that many values.
_MAX_VALUES = 1_000_000
_CHARACTERS_OF_A_VALUE = 64


def plain(value: Any) -> Any:
    """`value` for showing and for JSON: containers, numbers and strings; namespaces as dicts, the rest as text."""
    return _plain(value, 0, _Counter())


class _Counter:
    """How many values have been shown."""

    def __init__(self) -> None:
        self._count = 0

    def is_spent(self, value: Any) -> bool:
        self._count += 1 + (len(value) // _CHARACTERS_OF_A_VALUE if isinstance(value, str) else 0)
        return self._count > _MAX_VALUES


def _plain(value: Any, depth: int, counter: _Counter) -> Any:
    if depth > 20 or counter.is_spent(value):
        return "..."
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part, depth + 1, counter) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part, depth + 1, counter) for part in value]
    if isinstance(value, Opaque):
        if value.name in ("argparse.Namespace", "types.SimpleNamespace") and isinstance(value.state, dict):
            return _plain(value.state, depth + 1, counter)
        if value.name == "torch._utils._rebuild_tensor_v2" and len(value.arguments) > 2:
            return f"<tensor of shape {_plain(value.arguments[2], depth + 1, counter)}>"
        simple = [part for part in value.arguments if isinstance(part, (str, int, float))]
        return f"<{value.name}{' ' + repr(simple[0]) if simple else ''}>"
    if isinstance(value, type):  # a dtype or the like, named and not called
        return value.name if issubclass(value, Opaque) else value.__name__
    return f"<{type(value).__name__}>"
