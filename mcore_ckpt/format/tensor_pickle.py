"""The pickles of `torch.save`: the restricted unpickler, the dtypes of torch, and the one pickle that most items have.

**The unpickler** builds plain values, and calls nothing but the constructors that it is given. What a pickle names is
looked up by `Rules`, which hand out a value and, if it may be called, its `Maker`: a constructor that checks its
arguments. What no rule knows is refused, and so is every opcode that nothing saved under protocol 2 or later has. State
is set, once, on objects that this pickle has made. It is `pickle._Unpickler`, the one in Python, of which each opcode
can be replaced. The one in C, which indexes go through (`index_pickle.py`), asks `find_class` and nothing else: BUILD
would change objects that the process shares, and a deeply nested tuple as a key would overflow the C stack.

**A tensor's** pickle (`data.pkl`) is a short program that calls `_rebuild_tensor_v2` (dtypes that have a legacy storage
class) or `_rebuild_tensor_v3` (all newer ones) with the storage, offset, sizes and strides. To emit it is
concatenation. A regular expression reads the usual one; the unpickler runs any other, with constructors that note the
arguments (`TENSOR_NAMES`). Nothing of torch is imported or called.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from mcore_ckpt.core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadError,
    NewerFormatError,
    UnsafePickleError,
    text_of,
)

MAX_AXES: Final = 64
"""Axes of a shape; torch and numpy have no more."""

MAX_SIZE: Final = 2**63 - 1
"""The largest size, stride or offset."""

MAX_KEY_DEPTH: Final = 2
"""Tuples inside one another in a key of a dict or a member of a set: each is hashed by the C stack."""


class Maker(NamedTuple):
    """What a pickle may do with something that it names."""

    # Called with the pickled arguments, for REDUCE and NEWOBJ; checks them.
    make: Callable[..., Any]
    # Called with the object and its pickled state, once, for BUILD; returns the object that takes its place. Only an
    # object that `make` has returned in this run, and has not shared, is built.
    build: Callable[[Any, Any], Any] | None = None
    takes_members: bool = False  # instances have `append` or `__setitem__`
    new: Callable[..., Any] | None = None  # called instead for NEWOBJ, if that is something else
    is_vouched: bool = False  # the user has allowed the class: what it raises says nothing of the bytes


class WrongArgumentsError(Exception):
    """Raised by a constructor for arguments that nothing that was saved has; the message says which."""


class NotUnderstoodError(Exception):
    """Raised for what only a newer writer can have written; the message says what it is, and what was expected."""


class NotRebuiltError(Exception):
    """Raised for what code that the user allows has raised; the message says what that was."""

    @classmethod
    def of(cls, error: Exception, what: str) -> NotRebuiltError:
        """For an error of that code, which rebuilds `what`."""
        return cls(f"this process cannot rebuild {what:.200} ({type(error).__name__}: {text_of(error):.200})")

    def as_load_error(self, where: str) -> LoadError:
        """What is raised to the caller of a load."""
        return LoadError(
            f"{where}: {self}. Nothing shows that the file is damaged. Load it with the code that saved it, or with "
            "one that takes what that code has saved"
        )


class Rules(Protocol):
    """What names and references in a pickle stand for."""

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        """The value that a name stands for, and what may be done with it; `UnsafePickleError` if it is not allowed."""

    def referred(self, reference: Any) -> Any:
        """The value of a persistent id."""


@contextmanager
def rebuilding(cls: Any) -> Iterator[None]:
    """Code of a class that the user allows runs within: what it raises becomes a `NotRebuiltError`."""
    try:
        yield
    except Exception as error:
        name = f"{cls.__module__}.{getattr(cls, '__qualname__', cls)}"
        raise NotRebuiltError.of(error, f"an object of {name}") from error


def name_today(module: str, name: str) -> tuple[str, str]:
    """The name that Python 3 has for what a pickle of protocol 2 or below names as Python 2 did."""
    if (module, name) in NAME_MAPPING:
        return NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


def checked_size(values: Any) -> tuple[int, ...]:
    """`values` as sizes, strides or offsets: at most 64 ints from 0 to 2**63 - 1; raises `WrongArgumentsError`."""
    if not isinstance(values, (tuple, list)) or len(values) > MAX_AXES:
        raise WrongArgumentsError(f"expected at most {MAX_AXES} sizes")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise WrongArgumentsError("expected sizes from 0 to 2**63 - 1")
    return tuple(values)


def check_keys(keys: Iterable[Any], depth: int = 0) -> None:
    """Refuse keys of a dict, or members of a set, that nest tuples so deep that to hash them takes long, or crashes."""
    for key in keys:
        if isinstance(key, tuple):
            if depth == MAX_KEY_DEPTH:
                raise WrongArgumentsError(f"a key of a dict or set with tuples more than {MAX_KEY_DEPTH} deep in it")
            check_keys(key, depth + 1)


def inert_maker(cls: type) -> Maker:
    """For a class whose instances only keep what is put into them."""

    def build(instance: Any, state: Any) -> Any:
        setter = getattr(instance, "__setstate__", None)
        if setter is not None:
            setter(state)
        elif type(state) is list:  # of a frozen dataclass with slots: the values alone
            raise NotUnderstoodError(f"a {cls.__name__} of {len(state)} values; expected its attributes by name")
        else:
            if type(state) is tuple and len(state) == 2 and state[0] is None:  # of a dataclass with slots
                state = state[1]
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise WrongArgumentsError(f"expected the attributes of a {cls.__name__}")
            instance.__dict__.update(state)
        return instance

    return Maker(lambda *arguments: cls(*arguments), build, takes_members=hasattr(cls, "append"))


_DICTS = (dict, OrderedDict, Counter)
# Opcodes of protocols 2 to 5. Missing: those of protocols 0 and 1, copyreg's registry of extensions, buffers.
_OPCODES: Final = frozenset(
    getattr(pickle, name)[0]
    for name in (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINSTRING", "SHORT_BINSTRING"),
        *("TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"),
        *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "FROZENSET", "GLOBAL", "STACK_GLOBAL"),
        *("REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "BINPERSID"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    )
)


class _Unpickler(pickle._Unpickler):  # noqa: SLF001  (the standard unpickler in Python, which can be extended)
    """One run of a pickle; bytes after its end are not looked at."""

    dispatch: ClassVar[dict[int, Any]] = {}
    stack: list[Any]
    memo: dict[int, Any]
    proto: int
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, rules: Rules, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._rules, self._where, self._length = rules, where, len(data)
        # By identity; the values are kept alive as well, so that an identity stays theirs.
        self._makers: dict[int, Maker] = {}
        self._fresh: dict[int, Maker] = {}
        self._kept: list[Any] = []

    def persistent_load(self, reference: Any) -> Any:
        """The value of a persistent id."""
        return self._rules.referred(reference)

    def find_class(self, module: Any, name: Any) -> Any:
        """What a name stands for."""
        if self.proto < 3:
            module, name = name_today(module, name)
        value, maker = self._rules.named(module, name)
        if maker is not None:
            self._makers[id(value)] = maker
            self._kept.append(value)
        return value

    # ------------------------------------------------------------------------------------------------ calls and states

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], arguments, new=False)

    def _load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], arguments, new=True)

    def _load_newobj_ex(self) -> None:
        keywords, arguments = self.stack.pop(), self.stack.pop()
        maker = self._makers.get(id(self.stack[-1]))
        if keywords and (maker is None or not maker.takes_members or maker.is_vouched):
            raise WrongArgumentsError("a call with keywords")
        self.stack[-1] = self._made(self.stack[-1], arguments, new=True)

    def _made(self, function: Any, arguments: Any, *, new: bool) -> Any:
        maker = self._makers.get(id(function))
        if maker is None or type(arguments) is not tuple:
            raise UnsafePickleError(
                f"{self._where}: the pickle calls a {type(function).__name__}, which is not among the constructors "
                "that a checkpoint may use; nothing was called. The file is damaged, was made to do harm, or was "
                "written by something else; do not load it."
            )
        value = (maker.new if new and maker.new is not None else maker.make)(*arguments)
        if maker.build is not None or maker.takes_members:
            self._fresh[id(value)] = maker
            self._kept.append(value)
        return value

    def _load_build(self) -> None:
        state = self.stack.pop()
        instance = self.stack[-1]
        maker = self._fresh.pop(id(instance), None)
        if maker is None or maker.build is None:
            raise UnsafePickleError(
                f"{self._where}: the pickle sets the state of a {type(instance).__name__}, which does not belong to "
                "the checkpoint alone; nothing was changed. The file is damaged or was made to do harm; do not load it."
            )
        built = maker.build(instance, state)
        if built is not instance:
            self.stack[-1] = built
            # It was numbered when it was made, and its state since then.
            for slot in itertools.islice(reversed(self.memo), 64):
                if self.memo[slot] is instance:
                    self.memo[slot] = built
                    break

    # ------------------------------------------------------------------------------------------------------- containers

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key], [value])

    def _load_setitems(self) -> None:
        pairs = self.pop_mark()
        self._set_items(pairs[::2], pairs[1::2])

    def _set_items(self, keys: list[Any], values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _DICTS and not self._takes_members(target):
            raise TypeError(f"items of a {type(target).__name__}")
        check_keys(keys)
        with self._rebuilding(target):
            for key, value in zip(keys, values, strict=True):
                target[key] = value

    def _load_append(self) -> None:
        member = self.stack.pop()
        self._append([member])

    def _load_appends(self) -> None:
        self._append(self.pop_mark())

    def _append(self, members: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(members)
        elif self._takes_members(target):
            with self._rebuilding(target):
                for member in members:
                    target.append(member)
        else:
            raise TypeError(f"members of a {type(target).__name__}")

    def _load_additems(self) -> None:
        members = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise TypeError("members of something that is no set")
        check_keys(members)
        self.stack[-1].update(members)

    def _load_frozenset(self) -> None:
        members = self.pop_mark()
        check_keys(members)
        self.stack.append(frozenset(members))

    def _takes_members(self, target: Any) -> bool:
        maker = self._fresh.get(id(target))
        return maker is not None and maker.takes_members

    def _rebuilding(self, instance: Any) -> AbstractContextManager[None]:
        maker = self._fresh.get(id(instance))
        return rebuilding(type(instance)) if maker is not None and maker.is_vouched else nullcontext()

    def _load_bytearray8(self) -> None:
        length = int.from_bytes(self.read(8), "little")
        if length > self._length:
            raise EOFError(f"{length} bytes in a pickle of {self._length}")
        self.stack.append(bytearray(self.read(length)))

    def _refuse_opcode(self) -> None:
        raise UnsafePickleError(
            f"{self._where}: the pickle has an opcode that nothing has which is saved under protocol 2 or later. The "
            "file is damaged or was made to do harm; do not load it."
        )

    dispatch |= dict.fromkeys(range(256), _refuse_opcode)
    dispatch |= {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _OPCODES}  # noqa: SLF001
    dispatch |= {
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_newobj,
        pickle.NEWOBJ_EX[0]: _load_newobj_ex,
        pickle.BUILD[0]: _load_build,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.FROZENSET[0]: _load_frozenset,
        pickle.BYTEARRAY8[0]: _load_bytearray8,
    }


def unpickle(data: bytes, rules: Rules, where: str) -> Any:
    """The value of the pickle in `data`; bytes after its end are ignored. `UnsafePickleError`: it names what no rule
    allows. `NewerFormatError`, `CorruptCheckpointError`: a newer writer's, or no pickle.
    """
    with as_read_errors(where, len(data)):
        return _Unpickler(data, rules, where).load()


@contextmanager
def as_read_errors(where: str, nbytes: int) -> Iterator[None]:
    """A pickle of `nbytes` bytes is unpickled within: whatever fails becomes one of our errors."""
    try:
        yield
    except CheckpointError:
        raise
    except WrongArgumentsError as error:
        raise UnsafePickleError(
            f"{where}: the pickle makes what is not read: {error}. The file is damaged, was made to do harm, or holds "
            "an object of a kind that checkpoints may not hold."
        ) from error
    except NotUnderstoodError as error:
        raise NewerFormatError(
            f"{where}: written by a newer torch, Megatron-Core or mcore_ckpt: {error}. Nothing shows that the file is "
            "damaged. Load it with a newer mcore_ckpt, or save it again with an older torch."
        ) from error
    except NotRebuiltError as error:
        raise error.as_load_error(where) from error
    # Damaged bytes fail in any way that an unpickler and constructors can.
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where}: not a readable pickle of {nbytes} bytes ({type(error).__name__}: {error!s:.200}). The file "
            "is truncated or damaged; restore it from another copy, or load an earlier checkpoint."
        ) from error


class UnsupportedDtypeError(CheckpointError, ValueError):
    """No tensor item can be made by hand for that dtype (quantized dtypes among them: they carry scales)."""


class DtypeEntry(NamedTuple):
    """How a dtype lies in a tensor item."""

    element_bytes: int  # bytes of one element
    # Name of the legacy class `torch.<storage_class>`; None if the dtype is newer than those, and is stored as an
    # untyped storage counted in bytes.
    storage_class: str | None = None
    numpy: str | None = None  # numpy's name for the same elements; None if it has none
    safetensors: str | None = None  # the name in safetensors files; None if that format has none


DTYPES: Final[Mapping[str, DtypeEntry]] = MappingProxyType(
    {
        "float64": DtypeEntry(8, "DoubleStorage", "float64", "F64"),
        "float32": DtypeEntry(4, "FloatStorage", "float32", "F32"),
        "float16": DtypeEntry(2, "HalfStorage", "float16", "F16"),
        "bfloat16": DtypeEntry(2, "BFloat16Storage", None, "BF16"),
        "int64": DtypeEntry(8, "LongStorage", "int64", "I64"),
        "int32": DtypeEntry(4, "IntStorage", "int32", "I32"),
        "int16": DtypeEntry(2, "ShortStorage", "int16", "I16"),
        "int8": DtypeEntry(1, "CharStorage", "int8", "I8"),
        "uint8": DtypeEntry(1, "ByteStorage", "uint8", "U8"),
        "bool": DtypeEntry(1, "BoolStorage", "bool", "BOOL"),
        "complex64": DtypeEntry(8, "ComplexFloatStorage", "complex64", "C64"),
        "complex128": DtypeEntry(16, "ComplexDoubleStorage", "complex128"),
        "complex32": DtypeEntry(4),
        "bcomplex32": DtypeEntry(4),  # two bfloat16; since torch 2.15
        "uint16": DtypeEntry(2, None, "uint16", "U16"),
        "uint32": DtypeEntry(4, None, "uint32", "U32"),
        "uint64": DtypeEntry(8, None, "uint64", "U64"),
        "float8_e4m3fn": DtypeEntry(1, None, None, "F8_E4M3"),
        "float8_e4m3fnuz": DtypeEntry(1),
        "float8_e5m2": DtypeEntry(1, None, None, "F8_E5M2"),
        "float8_e5m2fnuz": DtypeEntry(1),
        "float8_e8m0fnu": DtypeEntry(1, None, None, "F8_E8M0"),
        "float4_e2m1fn_x2": DtypeEntry(1),
        "bits8": DtypeEntry(1),
        "bits16": DtypeEntry(2),
        "bits1x8": DtypeEntry(1),
        "bits2x4": DtypeEntry(1),
        "bits4x2": DtypeEntry(1),
    }
)
"""torch's dtype names, without `torch.`, of every dtype that is plain bytes in `torch.save`."""

DTYPE_NAMES: Final = (
    *DTYPES,
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u")),
)
"""Every dtype that torch has had since 2.1: an index may name them all."""

DTYPE_OF_STORAGE: Final = {entry.storage_class: dtype for dtype, entry in DTYPES.items() if entry.storage_class}
"""Dtype by legacy storage class."""


def dtype_entry(dtype: str) -> DtypeEntry:
    """The row of `DTYPES` for a dtype name without `torch.`; raises `UnsupportedDtypeError`."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(
            f"dtype {dtype!r} has no tensor item made by hand (expected one of {', '.join(DTYPES)}); "
            "save such a tensor as an object, or convert it"
        ) from None


# --------------------------------------------------------------------------------------------------------- written

# Opcodes of protocol 2, as `pickletools` names them.
_PROTO_2, _GLOBAL, _MARK, _STOP = b"\x80\x02", b"c", b"(", b"."
_BINUNICODE, _BININT1, _BININT2, _BININT, _LONG1 = b"X", b"K", b"M", b"J", b"\x8a"
_EMPTY_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3, _TUPLE = b")", b"\x85", b"\x86", b"\x87", b"t"
_BINPERSID, _REDUCE, _NEWFALSE = b"Q", b"R", b"\x89"

_SMALL_INTS = tuple(_BININT1 + bytes((value,)) for value in range(256))


def _int(value: int) -> bytes:
    """A non-negative int, in the shortest form that pickle protocol 2 has."""
    if value < 256:
        return _SMALL_INTS[value]
    if value < 1 << 16:
        return _BININT2 + value.to_bytes(2, "little")
    if value < 1 << 31:
        return _BININT + value.to_bytes(4, "little")
    length = (value.bit_length() >> 3) + 1
    return _LONG1 + bytes((length,)) + value.to_bytes(length, "little", signed=True)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def _name(module: str, name: str) -> bytes:
    return _GLOBAL + f"{module}\n{name}\n".encode()


class _Program(NamedTuple):
    """The parts of a tensor's pickle that depend on the dtype alone."""

    before_count: bytes
    storage_element_bytes: int
    after_strides: bytes


def _program(dtype: str, entry: DtypeEntry) -> _Program:
    untyped = entry.storage_class is None
    storage = ("torch.storage", "UntypedStorage") if entry.storage_class is None else ("torch", entry.storage_class)
    no_hooks = _NEWFALSE + _name("collections", "OrderedDict") + _EMPTY_TUPLE + _REDUCE  # requires_grad=False, hooks
    return _Program(
        before_count=b"".join(
            (
                _PROTO_2,
                _name("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2"),
                _MARK,
                _MARK,
                _text("storage"),
                _name(*storage),
                _text("0"),
                _text("cpu"),
            )
        ),
        storage_element_bytes=entry.element_bytes if untyped else 1,
        after_strides=no_hooks + (_name("torch", dtype) if untyped else b"") + _TUPLE + _REDUCE + _STOP,
    )


_PROGRAMS = {dtype: _program(dtype, entry) for dtype, entry in DTYPES.items()}
_AFTER_COUNT = _TUPLE + _BINPERSID + _int(0)  # ends the storage's id; the tensor starts at offset 0 of it


def tensor_pickle(dtype: str, shape: Sequence[int], element_count: int) -> bytes:
    """The `data.pkl` of a C-contiguous tensor that fills storage `0`; `element_count` is the product of `shape`."""
    before_count, scale, after_strides = _PROGRAMS[dtype]
    rank = len(shape)
    layout: tuple[bytes, ...]
    count = _int(element_count * scale)
    if rank == 1:
        size = shape[0]
        layout = (_int(size), b"\x85K\x01\x85")
    elif rank == 2:
        rows, columns = shape
        layout = (_int(rows), _int(columns), _TUPLE2, _int(columns or 1), b"K\x01\x86")
    elif rank == 0:
        layout = (_EMPTY_TUPLE, _EMPTY_TUPLE)
    elif rank == 3:
        planes, rows, columns = shape
        row_stride = columns or 1
        layout = (
            *(_int(planes), _int(rows), _int(columns), _TUPLE3),
            *(_int((rows or 1) * row_stride), _int(row_stride), b"K\x01\x87"),
        )
    else:
        layout = (_MARK, *map(_int, shape), _TUPLE, _MARK, *map(_int, contiguous_strides(shape)), _TUPLE)
    return b"".join((before_count, count, _AFTER_COUNT, *layout, after_strides))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous tensor; as in torch, an axis of size 0 counts as 1."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size or 1
    return tuple(reversed(strides))


# ------------------------------------------------------------------------------------------------------------ read

MAX_PICKLE_BYTES = 16 * 1024
"""More than the pickle of a tensor with 64 axes takes."""


def numbers_at(pickle: bytes, position: int) -> tuple[int, ...]:
    """The ints that a pickle pushes from `position` on, up to the first opcode of another kind (or the end)."""
    numbers = []
    stop = len(pickle)
    while position < stop:
        opcode = pickle[position]
        if opcode == 0x4B:  # BININT1
            number_at, position = position + 1, position + 2
        elif opcode == 0x4D:  # BININT2
            number_at, position = position + 1, position + 3
        elif opcode == 0x4A:  # BININT
            number_at, position = position + 1, position + 5
        elif opcode == 0x8A:  # LONG1
            number_at = position + 2
            position = number_at + int.from_bytes(pickle[position + 1 : number_at], "little")
        else:
            break
        numbers.append(int.from_bytes(pickle[number_at:position], "little", signed=position - number_at > 2))
    return tuple(numbers)


class PickledTensor(NamedTuple):
    """A C-contiguous tensor, as its pickle describes it; it lies inside its storage."""

    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]  # sizes, in elements
    storage_key: str  # the bytes are in record `data/<storage_key>`
    storage_bytes: int  # size of that record
    first_byte: int  # where in it the tensor starts
    payload_bytes: int  # size of the tensor


class NotPlainTensorError(WrongArgumentsError):
    """The pickle is of something else than one C-contiguous tensor; the message says of what."""


class MalformedPickleError(Exception):
    """No pickle at all, or a tensor that cannot be; the message says why."""


# A checkpoint has many tensors of the same dtype and shape.
@lru_cache(maxsize=4096)
def read_tensor_pickle(pickle: bytes) -> PickledTensor:
    """The tensor of a pickle, in bounded time and memory.

    Raises `NotPlainTensorError`, where decoding may help, or `MalformedPickleError`.
    """
    if len(pickle) > MAX_PICKLE_BYTES:
        raise NotPlainTensorError(f"it has {len(pickle)} bytes, more than any tensor needs")
    usual = _USUAL.fullmatch(pickle)
    known = _read_usual(usual) if usual is not None else None
    if known is not None:
        return known
    return _run(pickle)


def _plain(
    dtype: str, storage_key: str, storage_bytes: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> PickledTensor:
    """Check a tensor against its storage; `offset` and `strides` are in elements."""
    numbers = (offset, *shape, *strides)
    # Looked at before they are multiplied: ints may have 255 bytes, and a pickle refer to one thousands of times.
    if len(shape) != len(strides) or len(shape) > MAX_AXES or min(numbers) < 0 or max(numbers) > MAX_SIZE:
        raise MalformedPickleError(f"{len(shape)} sizes and {len(strides)} strides, not all from 0 to 2**63 - 1")
    width = DTYPES[dtype].element_bytes
    payload_bytes = math.prod(shape) * width
    if payload_bytes == 0:
        return PickledTensor(dtype, shape, storage_key, storage_bytes, 0, 0)
    contiguous = contiguous_strides(shape)
    if strides != contiguous and any(  # the stride of an axis of one element says nothing
        size != 1 and stride != expected for size, stride, expected in zip(shape, strides, contiguous, strict=True)
    ):
        raise NotPlainTensorError("its strides are not those of a contiguous tensor")
    first_byte = offset * width
    if first_byte + payload_bytes > storage_bytes:
        raise MalformedPickleError(
            f"{payload_bytes} bytes of elements from byte {first_byte} on, in a storage of {storage_bytes}"
        )
    return PickledTensor(dtype, shape, storage_key, storage_bytes, first_byte, payload_bytes)


# ---------------------------------------------------------------------------------------- the program torch.save writes

# A regular expression reads the usual program five times as fast as the stack machine, which keeps loads of many small
# tensors of other writers fast. Every opcode of a number fixes its length, so a match is a parse.
_NUMBER = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_NUMBERS = rb"(?:\)|(?:" + _NUMBER + rb"){1,3}[\x85-\x87]q.|\((?:" + _NUMBER + rb"){4,64}tq.)"
_NAME = rb"(\w{1,40})\n"
_USUAL = re.compile(
    rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v([23])\nq\x00\(\(X\x07\x00\x00\x00storageq\x01"
    rb"ctorch(\.storage|)\n" + _NAME + rb"q\x02X\x01\x00\x00\x00(\d)q\x03"
    rb"X(?:\x03\x00\x00\x00cpu|\x06\x00\x00\x00cuda:\d)q\x04(" + _NUMBER + rb")tq\x05Q"
    rb"(" + _NUMBER + rb")(" + _NUMBERS + rb")(" + _NUMBERS + rb")[\x88\x89]"
    rb"ccollections\nOrderedDict\nq.\)Rq.(?:ctorch\n" + _NAME + rb"q.)?tq.Rq.\.",
    re.DOTALL,
)


def _read_usual(match: re.Match[bytes]) -> PickledTensor | None:
    """The tensor of a program that `_USUAL` matches; None if its parts do not fit each other."""
    version, module, storage_class, key, length, offset, sizes, strides, name = match.groups()
    if (version, module) == (b"2", b"") and name is None:
        dtype = DTYPE_OF_STORAGE.get(storage_class.decode())
    elif (version, module, storage_class) == (b"3", b".storage", b"UntypedStorage") and name is not None:
        dtype = name.decode() if name.decode() in DTYPES else None
    else:
        return None
    if dtype is None:
        return None
    shape, steps = numbers_at(sizes, sizes[0] == 0x28), numbers_at(strides, strides[0] == 0x28)  # after a MARK
    for numbers, program in ((shape, sizes), (steps, strides)):
        if 1 <= len(numbers) <= 3 and program[-3] != 0x84 + len(numbers):
            return None
    (count,), (first,) = numbers_at(length, 0), numbers_at(offset, 0)
    storage_bytes = count * (1 if name else DTYPES[dtype].element_bytes)
    return _plain(dtype, key.decode(), storage_bytes, first, shape, steps)


# ------------------------------------------------------------------------------------------------ any other program


class FileTensor(NamedTuple):
    """A tensor that stays in its file, as its pickle describes it."""

    record: str  # number of its storage, which other tensors may share
    dtype: str  # torch's name without `torch.`
    offset: int  # of the first element, in elements of the storage
    shape: tuple[int, ...]  # sizes, in elements
    strides: tuple[int, ...] = ()  # in elements, where the elements do not follow one another in C order

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].element_bytes

    @property
    def first_byte(self) -> int:
        """Of its elements, in the storage."""
        return self.offset * DTYPES[self.dtype].element_bytes


class StorageKind(NamedTuple):
    """The class of a storage; dtype None: untyped, counted in bytes."""

    dtype: str | None


class StorageReference(NamedTuple):
    """A storage that a pickle refers to."""

    record: str
    dtype: str | None
    nbytes: int


class _DtypeName(str):
    __slots__ = ()


def stored_storage(reference: Any) -> StorageReference:
    """A storage, as torch refers to it; raises `WrongArgumentsError` for anything else."""
    if type(reference) is not tuple or len(reference) not in (5, 6) or reference[0] != "storage":
        raise WrongArgumentsError("a reference to something else than a storage")
    if len(reference) == 6 and reference[5] is not None:
        raise WrongArgumentsError("a storage that is a view of another")
    kind, record, count = reference[1], reference[2], reference[4]
    if type(kind) is not StorageKind or type(record) is not str or type(count) is not int or not 0 <= count <= MAX_SIZE:
        raise WrongArgumentsError("a reference to no storage")
    width = 1 if kind.dtype is None else DTYPES[kind.dtype].element_bytes
    return StorageReference(record, kind.dtype, count * width)


def _described(storage: Any, dtype: str, offset: Any, size: Any, stride: Any, rest: tuple[Any, ...]) -> FileTensor:
    """The tensor of one call; `rest` is whether it requires a gradient, its hooks, and perhaps flags."""
    if type(storage) is not StorageReference or dtype not in DTYPES:
        raise WrongArgumentsError(f"a tensor of {dtype:.40} in a storage")
    if not 2 <= len(rest) <= 3 or type(rest[0]) is not bool or rest[1] or rest[2:] not in ((), (None,), ({},)):
        raise NotPlainTensorError("a tensor with hooks or flags (conjugated, negated)")
    (offset,), size, stride = checked_size((offset,)), checked_size(size), checked_size(stride)
    if len(stride) != len(size):
        raise WrongArgumentsError(f"a tensor of {len(size)} axes in {len(stride)} steps")
    held = storage.nbytes // DTYPES[dtype].element_bytes
    last = -1 if 0 in size else offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= held:
        raise WrongArgumentsError(f"elements up to {last} inside a storage of {held}")
    # The stride of an axis of one element says nothing.
    steps = zip(size, stride, contiguous_strides(size), strict=True)
    strided = last >= 0 and any(n > 1 and step != plain for n, step, plain in steps)
    return FileTensor(storage.record, dtype, offset if last >= 0 else 0, size, stride if strided else ())


def _dtype_name(dtype: Any) -> str:
    # Nothing else is printed: tuples of tuples that share their members would be without end.
    kind = type(dtype)
    known = kind is _DtypeName or (kind.__module__, kind.__name__) == ("torch", "dtype")
    return str(dtype).removeprefix("torch.") if known else f"a {kind.__name__}"


def _rebuild_v2(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> FileTensor:
    dtype = storage.dtype if type(storage) is StorageReference else None
    return _described(storage, dtype or "no dtype", offset, size, stride, rest)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *flags: Any
) -> FileTensor:
    return _described(storage, _dtype_name(dtype), offset, size, stride, (grad, hooks, *flags))


def _parameter(data: Any, *_rest: Any) -> FileTensor:
    if type(data) is not FileTensor:
        raise WrongArgumentsError("a parameter of a tensor")
    return data


def _with_attributes(function: Any, _kind: Any, arguments: Any, _state: Any) -> FileTensor:
    """A tensor with attributes of Megatron's on it (`tensor_model_parallel`, ...), which are dropped."""
    if function not in (_rebuild_v2, _rebuild_v3, _parameter) or type(arguments) is not tuple:
        raise WrongArgumentsError("a tensor with attributes")
    found: FileTensor = function(*arguments)
    return found


STORAGE_KINDS: Final[Mapping[str, tuple[Any, Maker | None]]] = {
    **{f"torch.{name}": (StorageKind(dtype), None) for name, dtype in DTYPE_OF_STORAGE.items()},
    **{f"{module}.UntypedStorage": (StorageKind(None), None) for module in ("torch", "torch.storage")},
}
TENSOR_NAMES: Final[Mapping[str, tuple[Any, Maker | None]]] = {
    **STORAGE_KINDS,
    "torch._utils._rebuild_tensor_v2": (_rebuild_v2, Maker(_rebuild_v2)),
    "torch._utils._rebuild_tensor_v3": (_rebuild_v3, Maker(_rebuild_v3)),
    "torch._utils._rebuild_parameter": (_parameter, Maker(_parameter)),
    "torch._utils._rebuild_parameter_with_state": (_parameter, Maker(_parameter)),
    "torch._tensor._rebuild_from_type_v2": (_with_attributes, Maker(_with_attributes)),
}
"""What makes a `FileTensor` of the pickle of a tensor, for `Rules.named`; `stored_storage` is for `Rules.referred`."""


def _no_hooks() -> dict[str, Any]:
    return {}


_OF_ONE_TENSOR: Final[Mapping[str, tuple[Any, Maker | None]]] = {
    **TENSOR_NAMES,
    **{f"torch.{name}": (_DtypeName(name), None) for name in DTYPES},
    "torch.Tensor": ("torch.Tensor", None),
    "torch.nn.parameter.Parameter": ("torch.nn.parameter.Parameter", None),
    "collections.OrderedDict": (_no_hooks, Maker(_no_hooks)),
}


class _OneTensor:
    """Rules for the pickle of one tensor."""

    def __init__(self) -> None:
        self.storage_bytes = 0

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        try:
            return _OF_ONE_TENSOR[f"{module}.{name}"]
        except KeyError:
            raise NotPlainTensorError(f"call of {module:.100}.{name:.100}") from None

    def referred(self, reference: Any) -> StorageReference:
        storage = stored_storage(reference)
        self.storage_bytes = storage.nbytes
        return storage


def _run(pickle: bytes) -> PickledTensor:
    rules = _OneTensor()
    try:
        tensor = unpickle(pickle, rules, "its pickle")
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, NotPlainTensorError):
            raise cause from None
        if isinstance(error, CorruptCheckpointError) and cause is None:  # an opcode or a call that no tensor needs
            raise NotPlainTensorError(str(error)) from error
        raise MalformedPickleError(str(cause)) from error
    if type(tensor) is not FileTensor:
        raise NotPlainTensorError(f"it holds {type(tensor).__name__}, not a tensor")
    if tensor.strides:
        raise NotPlainTensorError("its strides are not those of a contiguous tensor")
    return PickledTensor(
        tensor.dtype, tensor.shape, tensor.record, rules.storage_bytes, tensor.first_byte, tensor.nbytes
    )
