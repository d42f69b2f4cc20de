"""The common state of a checkpoint (iteration, Megatron's arguments, optimizer settings) for looking at: no torch.

It is a `torch.save` archive: `common.pt`, or from Megatron-Core 0.19 on an object `common_state` in the data files. Its
pickle is read with a stand-in for every class that it names, so nothing is imported or run, whatever it says.
Tensors and other objects come out as `Opaque`. To load the state for use, take `common_state.load_common`.
"""

from __future__ import annotations

import io
import itertools
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.directory.commit import common_file_in_force
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredItem, object_key
from mcore_ckpt.format.safe_pickle import check_memo
from mcore_ckpt.storage.local import LocalStorage

__all__ = ["Opaque", "plain", "read_plain_object", "read_plain_state"]

# Optimizer settings and arguments are kilobytes; 1 GiB of them is something else.
_MAX_PICKLE_BYTES = 1024**3
_COMMON_OBJECT = object_key("common_state", (0,), (1,))


class Opaque:
    """Something in a pickle that is not a plain value; inert. Each class that a pickle names gets a subclass.

    Attributes:
        name: of the class or function that the pickle names.
        arguments: what it would have been called with.
        state: what would have been its attributes, items or members.
    """

    name = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Opaque:
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    def __init__(self, *arguments: Any, **_: Any) -> None:
        """Nothing: `__new__` has kept the arguments, and some pickles never come here."""

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


_PLAIN_CLASSES = {
    "collections.OrderedDict": dict,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
}


class _StandInUnpickler(pickle.Unpickler):
    """Every class becomes a subclass of `Opaque`, but for the few that are plain containers."""

    def find_class(self, module: str, name: str, /) -> Any:
        full_name = f"{module}.{name}"
        return _PLAIN_CLASSES.get(full_name) or type("StandIn", (Opaque,), {"name": full_name})

    def persistent_load(self, pid: Any, /) -> str:
        return "<storage>"


def read_plain_state(index: CheckpointIndex) -> dict[str, Any]:
    """The common state of the checkpoint, as far as it is plain values; empty if there is none (plain DCP).

    Raises:
        CorruptCheckpointError: it is there, and is no archive of `torch.save`.
    """
    directory = Path(index.path)
    names = [path.name for path in directory.iterdir() if path.is_file()]
    file = common_file_in_force(names, index)
    if file is not None and (directory / file).is_file():
        return _as_dict(_read_archive(LocalStorage(directory).read(file), str(directory / file)), str(directory / file))
    entry = index.objects.get(_COMMON_OBJECT)
    if entry is None or entry.item.transforms:
        return {}
    where = f"{entry.fqn} ({entry.item.file})"
    content = _read_archive(_item_bytes(directory, entry.item), where)
    return _as_dict(content[0] if isinstance(content, list) and content else content, where)


def read_plain_object(index: CheckpointIndex, entry: ObjectEntry) -> Any:
    """A stored object as plain values, without torch and whatever classes it names; for looking at.

    Raises:
        CorruptCheckpointError: it is no archive of `torch.save`.
        LoadError: it is stored through a transform.
    """
    where = f"{entry.fqn} ({entry.item.file})"
    if entry.item.transforms:
        raise LoadError(f"{where}: stored through {', '.join(entry.item.transforms)}; open_checkpoint() can read it")
    return plain(_read_archive(_item_bytes(Path(index.path), entry.item), where))


def _item_bytes(directory: Path, item: StoredItem) -> bytes:
    return LocalStorage(directory).read(item.file, item.offset, item.length)


def _read_archive(content: bytes, where: str) -> Any:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl")
            if archive.getinfo(name).file_size > _MAX_PICKLE_BYTES:
                raise CorruptCheckpointError(f"{where}: its pickle unpacks to more than {_MAX_PICKLE_BYTES} bytes")
            pickled = archive.read(name)
        check_memo(pickled, where)
        return _StandInUnpickler(io.BytesIO(pickled)).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way that building objects can
        raise CorruptCheckpointError(
            f"{where}: not a readable archive of torch.save ({type(error).__name__}: {error}); restore it from another "
            "copy"
        ) from error


def _as_dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{where}: expected a dict, got {type(value).__name__}")
    return {str(key): plain(part) for key, part in value.items()}


# A few bytes of pickle can nest one list in itself many times over; no common state has that many values.
_MAX_VALUES = 1_000_000


def plain(value: Any) -> Any:
    """`value` for showing and for JSON: containers, numbers and strings; namespaces as dicts, the rest as text."""
    return _plain(value, 0, itertools.count())


def _plain(value: Any, depth: int, counter: Iterator[int]) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if depth > 20 or next(counter) > _MAX_VALUES:
        return "..."
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
