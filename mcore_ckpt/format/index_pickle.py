"""Stand-ins for the classes that the pickle of an index names: what is allowed, and under which names.

Found by reading the planners and writers of torch 2.1 to 2.15 and of megatron-core 0.12 to 0.19, and by loading what
they wrote (`tests/format`). A stand-in keeps what pickle puts into it and does nothing; it is built in C by pickle's
NEWOBJ and BUILD, so that it costs less than the class it stands for.

The pickle of an index, unpickled with inert stand-ins for all that it names.

`pickle.Unpickler`, the one in C, reads the index of 20,000 tensors ten times as fast as the one of `_unpickler.py`,
which can look at each step. It would hash a tuple that nests without end as the key of a dict, until the C stack
overflows; and number an object in its memo as asked, at 16 bytes for each number below. So it gets those indexes of
which a regular expression has seen, in about the time that unpickling takes, that they are built as every writer builds
them under protocol 4 and later:

- objects are numbered in their order (MEMOIZE);
- tuples hold ints, texts and references to what was memoized before, but to no tuple that has references itself;
- calls have ints or one text as arguments, or are of a path; instances are made without any;
- state is set from a dict or tuple that was made right there, and dicts and lists are filled where they were made.

For that it has to know the boundaries of all opcodes and the number of each tuple with references. Bytes 0x94 (MEMOIZE)
in a stretch of opcodes are counted at once, since arguments with such a byte are taken one by one. What does not fit is
no verdict: the other unpickler decides.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NoReturn

from mcore_ckpt.core.errors import UnsafePickleError
from mcore_ckpt.format._unpickler import (
    MAX_AXES,
    Maker,
    NotUnderstoodError,
    WrongArgumentsError,
    checked_size,
    inert_maker,
    unpickle,
)
from mcore_ckpt.format.tensor_pickle import DTYPE_NAMES


class _ReadOnly(type):
    """Metaclass whose classes cannot be changed: a pickle's BUILD can set attributes on any object it can name."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__} is read-only")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__} is read-only")


class MetadataState(metaclass=_ReadOnly):
    """`Metadata`; Megatron's `MCoreMetadata`."""

    state_dict_metadata: Any = None
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: Any = None
    mcore_data: Any = None


class IndexState(metaclass=_ReadOnly):
    """`MetadataIndex`. Hashed by identity: cheaper than by value, and a hostile value cannot make it slow."""

    fqn: Any = None
    offset: Any = None
    index: Any = None


class TensorEntryState(metaclass=_ReadOnly):
    """`TensorStorageMetadata`."""

    properties: Any = None
    size: Any = None
    chunks: Any = None


class BytesEntryState(metaclass=_ReadOnly):
    """`BytesStorageMetadata`."""


class ChunkState(metaclass=_ReadOnly):
    """`ChunkStorageMetadata`."""

    offsets: Any = None
    sizes: Any = None


class StorageInfoState(metaclass=_ReadOnly):
    """`_StorageInfo`; `transform_descriptors` came with torch 2.7, and None is left out of the state since."""

    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


class StorageMetaState(metaclass=_ReadOnly):
    """`StorageMeta`."""

    checkpoint_id: Any = None
    save_id: Any = None
    load_id: Any = None
    modules: Any = None


class PropertiesState(metaclass=_ReadOnly):
    """`TensorProperties`: pickled as (dtype, layout, requires_grad, memory format, pin_memory), and since torch 2.15
    its strides (a tuple, or None). What a later torch appends is read over if it is plain.
    """

    dtype: Any = None
    layout: Any = None
    requires_grad: Any = False

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            self.dtype, self.layout = state.get("dtype"), state.get("layout")
            self.requires_grad = state.get("requires_grad", False)
        else:
            self.dtype, self.layout, self.requires_grad, _memory_format, _pin_memory = first = state[:5]
            _refuse_nested(first)
            for value in state[5:]:
                if type(value) is tuple:
                    known = _INTS.issuperset(map(type, value)) and len(value) <= MAX_AXES
                else:
                    known = type(value) in _PLAIN
                if not known:
                    raise NotUnderstoodError(
                        f"tensor properties of {len(state)} values, one of them a {type(value).__name__} that is not "
                        "plain; expected 5, or 6 with the strides"
                    )


class PathState(metaclass=_ReadOnly):
    """`pathlib` paths, as the checkpoint id in `StorageMeta`."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class OtherPathState(metaclass=_ReadOnly):
    """The path of a multi-storage client, which is pickled as its attributes: its text, and a path in the storage."""

    text = ""

    def __setstate__(self, state: Any) -> None:
        text = state.get("_path") if type(state) is dict else None
        if type(text) is not str:
            raise TypeError("a path without its text")
        self.text = text


class DtypeName(str):
    """A `torch.dtype`, as its name without `torch.`."""

    __slots__ = ()


class _Inert(metaclass=_ReadOnly):
    """What is allowed to be there but is not used: takes any arguments and any state."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _refuse_nested(state)


class _Slice(metaclass=_ReadOnly):
    """`slice`, of ints only: whatever else it held could be hashed without end."""

    def __new__(cls, *bounds: Any) -> Any:
        if not all(bound is None or type(bound) is int for bound in bounds):
            raise TypeError("a slice of something else than ints")
        return slice(*bounds)


_INTS = frozenset((int,))
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _refuse_nested(state: Any) -> None:
    # `_plain_index` lets such states pass because they are looked at here.
    if type(state) is tuple and tuple in map(type, state):
        raise TypeError("a tuple in the state of an object")


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): MetadataState,
    (_MEGATRON, "MCoreMetadata"): MetadataState,
    (_METADATA, "MetadataIndex"): IndexState,
    (_METADATA, "TensorStorageMetadata"): TensorEntryState,
    (_METADATA, "BytesStorageMetadata"): BytesEntryState,
    (_METADATA, "ChunkStorageMetadata"): ChunkState,
    (_METADATA, "StorageMeta"): StorageMetaState,
    (_METADATA, "TensorProperties"): PropertiesState,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Inert,
    # Up to torch 2.2, DCP took these two from the older sharded tensors.
    (_SHARDED_TENSOR, "TensorProperties"): PropertiesState,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): _Inert,
    (_FILESYSTEM, "_StorageInfo"): StorageInfoState,
    (_FILESYSTEM, "_StoragePrefix"): _Inert,
    # `all_local_plans`: every rank's plan, which Megatron keeps for its own reuse.
    (_PLANNER, "SavePlan"): _Inert,
    (_MEGATRON, "MCoreSavePlan"): _Inert,
    (_PLANNER, "WriteItem"): _Inert,
    (_PLANNER, "WriteItemType"): _Inert,
    (_PLANNER, "TensorWriteData"): _Inert,
    (_PLANNER, "BytesIOWriteData"): _Inert,
    # torch.Size is a tuple of ints; `tuple` returns a tuple argument as it is.
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Inert,
    # Python 3.11.0 to 3.11.2 and 3.12 alphas pickle an enum member as getattr(class, name).
    ("builtins", "getattr"): _Inert,
    ("builtins", "slice"): _Slice,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): PathState
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    },
    # NVIDIA's multi-storage client writes its own paths into the checkpoint id.
    ("multistorageclient.pathlib", "MultiStoragePath"): OtherPathState,
    **{("torch", name): DtypeName(name) for name in DTYPE_NAMES},
}


# To look through one takes a pattern that is compiled in 11 ms, once in a process; so few bytes take 1 to 3 ms without.
_SHORT_PICKLE_BYTES = 4096


class _Restricted(pickle.Unpickler):
    """The unpickler in C, for pickles that `plainly_built` has looked through."""

    def __init__(self, data: bytes, table: _Table) -> None:
        super().__init__(io.BytesIO(data))
        self.find_class = table.value  # type: ignore[method-assign]
        self.persistent_load = table.referred  # type: ignore[method-assign]


def unpickle_index(data: bytes, where: str) -> Any:
    """The stand-in for what an index is pickled from; no other name than those of `ALLOWED_GLOBALS` is known. Raises
    `UnsafePickleError`, `NewerFormatError` or `CorruptCheckpointError`.
    """
    table = _Table(where)
    if len(data) < _SHORT_PICKLE_BYTES or not plainly_built(data):
        return unpickle(data, table, where)
    try:
        return _Restricted(data, table).load()
    except UnsafePickleError:
        raise
    # What passes `plainly_built` and is damaged still fails in any way that building objects can.
    except Exception:  # noqa: BLE001  (the other unpickler says what it is)
        return unpickle(data, table, where)


# --------------------------------------------------------------------------------------------------------------- names


class _Table:
    """Rules by the exact table of names that an index may hold."""

    def __init__(self, where: str) -> None:
        self._where = where

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        value = self.value(module, name)
        return value, (_TABLE_MAKERS.get(value) or inert_maker(value)) if isinstance(value, type) else None

    def value(self, module: str, name: str) -> Any:
        try:
            return ALLOWED_GLOBALS[module, name]
        except KeyError:
            pass
        if _is_newer(module, name, ALLOWED_GLOBALS):
            known = sorted({name for home, name in ALLOWED_GLOBALS if home == module}) or ["another module"]
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
    """Whether a later torch or Megatron-Core may write that name; one character off a known name is damage."""
    if not (_DTYPE.fullmatch(name) if module == "torch" else _HOMES.fullmatch(module) and _CLASS.fullmatch(name)):
        return False
    return not any(_differ_in_one(f"{module}.{name}", ".".join(other)) for other in known)


def _differ_in_one(text: str, other: str) -> bool:
    return len(text) == len(other) and sum(map(operator.ne, text, other)) == 1


def _table_size(values: Any = ()) -> Any:
    size = checked_size(values)
    return values if type(values) is tuple else size


def _ordered(*pairs: Any) -> Any:
    if pairs and pairs != ([],):
        raise WrongArgumentsError("expected an empty OrderedDict")
    return OrderedDict()


_TABLE_MAKERS: dict[Any, Maker] = {
    tuple: Maker(_table_size),
    OrderedDict: Maker(_ordered, lambda made, _state: made),
}


# ----------------------------------------------------------------------------------------------------- what fits to C

_MEMOIZE, _MARK, _GET, _LONG_GET, _FRAME = 0x94, 0x28, 0x68, 0x6A, 0x95
_MAX_ITEMS = 255
# The items of a tuple are looked for in so many stretches of opcodes before it, of at most so many opcodes each.
_STRETCHES = 3
_STRETCH_OPCODES = 200


def _lengths(stop: int, suffix: bytes = b"") -> bytes:
    """A length of less than `stop` in one byte, `suffix`, and as many bytes other than MEMOIZE."""
    return b"|".join(re.escape(bytes((size,))) + suffix + b"[^\x94]{%d}" % size for size in range(stop))


@functools.cache  # compiled on first use, which takes milliseconds
def _stretch() -> re.Pattern[bytes]:
    """As many usual opcodes as possible, none with a byte 0x94 in its argument."""
    part = {
        b"m": b"\x94?",
        b"mp": b"(?:\x940?)?",  # names are memoized, and perhaps popped
        b"int": b"(?:K[^\x94]|M[^\x94]{2}|J[^\x94]{4}|\x8a(?:%b))" % _lengths(9),
        b"get": b"(?:h[^\x94]|j[^\x94]{4})",
        b"text": b"(?:\x8c(?:%b)|X(?:%b))" % (_lengths(128), _lengths(128, b"\0\0\0")),
        b"name": b"(?:\x8c(?:%b))" % _lengths(40),
    }
    part[b"ints"] = b"(?:%(int)b(?:\x85|%(int)b(?:\x86|%(int)b\x87))|\\((?:%(int)b){0,64}t)" % part
    opcodes = (
        # The most frequent first, in forms that begin with one byte: what does not is left out by that alone.
        b"h[^\x94]",
        b"j[^\x94]{4}",
        b"K[^\x94]K[^\x94]\x86%(m)b(?:\x85%(m)bR%(m)b)?",
        b"\\)\x81%(m)b",
        b"[}\\]]%(m)b\\(?",
        b"u(?:b%(mp)b|\\()?",
        # A shape, or a tuple of ints that something is called with.
        b"%(ints)b%(m)b(?:(?:\x85%(m)b)?R%(m)b)?",
        b"%(int)b",
        b"\\)(?:\x81%(m)b|(?:\x85%(m)b)?R%(m)b)?",
        b"%(text)b(?:%(m)b\x85%(m)bR%(m)b|%(mp)b)",
        b"\x93%(mp)b",
        b"e\\(?|[aN\x88\x89]|s(?!b)|G[^\x94]{8}",
        # The state of a tensor's properties, whose stand-in takes no tuple in it but one of ints behind the rest.
        (
            b"\\((?:%(get)b|[\x88\x89N]|%(name)b%(m)b|(?:%(int)b|%(name)b%(m)b)\x85%(m)bR%(m)b|\x93%(m)b){1,24}"
            b"(?:\\)|%(ints)b%(m)b)?t%(m)bb%(mp)b"
        ),
    )
    return re.compile(b"(?:%b){1,%d}" % (b"|".join(opcodes) % part, _STRETCH_OPCODES), re.DOTALL)


# Bytes of the argument of each opcode that a stretch may consist of; those with a length before them are negative.
_ARGUMENT_BYTES = dict.fromkeys(b"()}]tNRabesu0\x81\x85\x86\x87\x88\x89\x93\x94", 0) | {
    **dict.fromkeys(b"hK\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"jJ", 4),
    **dict.fromkeys(b"G\x95", 8),
    **dict.fromkeys(b"\x8c\x8a", -1),
    **dict.fromkeys(b"X", -4),
}
_TEXTS = frozenset(b"X\x8c")
_ITEMS = _TEXTS | frozenset(b"hjKMJNG\x8a\x88\x89")
_ALONE = _ITEMS | frozenset(b"\x80\x95")


def plainly_built(data: bytes) -> bool:
    """Whether the unpickler in C may have `data`; False if that is not evident."""
    try:
        return data[:1] == b"\x80" and _Scan(data).through()
    except (IndexError, KeyError):  # an opcode that no writer uses, or the end
        return False


class _Scan:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._memoized = 0  # objects so far
        self._nested: set[int] = set()  # numbers of the tuples that have references
        self._starts: list[int] = []  # of stretches since the last tuple with references

    def through(self) -> bool:
        data, starts, match = self._data, self._starts, _stretch().match
        at = 0
        while True:
            found = match(data, at)
            if found is not None:
                start, at = at, found.end()
                self._memoized += data.count(b"\x94", start, at)
                starts.append(start)
                if len(starts) > 2 * _STRETCHES:
                    del starts[:-_STRETCHES]
            opcode = data[at]
            if opcode == 0x2E:  # STOP
                return True
            if opcode == _MARK and found is not None and at - start >= _STRETCH_OPCODES:
                continue  # the stretch may have ended here because it was long enough
            if opcode == _MARK or 0x85 <= opcode <= 0x87:
                at = self._tuple(at)
                if not at:
                    return False
                starts.clear()
            elif opcode in _ALONE:
                starts.append(at)
                at = self._end_of(at)
                if opcode in _TEXTS:
                    at = self._memoize(at)
            elif found is None:
                return False

    def _end_of(self, at: int) -> int:
        """Where the opcode at `at` ends."""
        argument_bytes = _ARGUMENT_BYTES[self._data[at]]
        at += 1
        if argument_bytes < 0:
            length_at, at = at, at - argument_bytes
            argument_bytes = int.from_bytes(self._data[length_at:at], "little")
        at += argument_bytes
        if at > len(self._data):
            raise IndexError(at)
        return at

    def _memoize(self, at: int, *, nested: bool = False) -> int:
        """After the MEMOIZE at `at`, if there is one."""
        if self._data[at] != _MEMOIZE:
            return at
        if nested:
            self._nested.add(self._memoized)
        self._memoized += 1
        return at + 1

    def _tuple(self, at: int) -> int:
        """Where a tuple with references at `at`, and the call that it is the argument of, ends; 0 if it is not
        usual.
        """
        data = self._data
        opcode = data[at]
        items: list[int] = []
        if opcode == _MARK:
            at += 1
            while (data[at] in _ITEMS or data[at] == _FRAME) and len(items) <= _MAX_ITEMS:
                if data[at] != _FRAME:
                    items.append(at)
                at = self._memoize(self._end_of(at))
            if data[at] != 0x74:  # TUPLE
                return 0
        else:
            # Mostly the last stretch has them all; those before it are looked through only if it has not.
            for start in reversed(self._starts[-_STRETCHES:]):
                items = self._last_items(start, at)[0x84 - opcode :]
                if len(items) == opcode - 0x84:
                    break
            else:
                return 0
        gets = [data[item + 1 : self._end_of(item)] for item in items if data[item] in (_GET, _LONG_GET)]
        if any(int.from_bytes(number, "little") in self._nested for number in gets):
            return 0
        at = self._memoize(at + 1, nested=True)
        if data[at] == 0x85:  # the arguments of a shape
            at = self._memoize(at + 1, nested=True)
            return self._memoize(at + 1, nested=True) if data[at] == 0x52 else 0
        if data[at] == 0x52:  # a path is made of it
            return self._memoize(at + 1, nested=True) if len(items) > 1 else 0
        if opcode == _MARK and data[at] == 0x62:  # the state of a tensor's properties
            return at + 1
        return at

    def _last_items(self, start: int, stop: int) -> list[int]:
        """Where what lies on the stack above everything but items starts, of the opcodes between `start` and `stop`."""
        items: list[int] = []
        data, at = self._data, start
        while at < stop:
            kind = data[at]
            if kind in _ITEMS:
                items.append(at)
            elif kind not in (_MEMOIZE, _FRAME):
                items.clear()
            at = self._end_of(at)
        return items if at == stop else []
