"""The restricted unpickler of objects: the one of the standard library, in C, behind one pass over the opcodes.

It asks which class a name is, and does as a pickle says: it would set the state of enums and dtypes, which the process
shares, number an object in its memo as asked, at 16 bytes for each number below, and hash a tuple that nests without
end as the key of a dict, until the C stack overflows. So all opcodes are looked at before (`check_opcodes`), in about
the time that unpickling takes, and every name is an inert stand-in (`Opaque`). `Rules` say what the stand-ins become:
constructors that check their arguments, a note of a tensor, or nothing else.
"""

from __future__ import annotations

import io
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from mcore_ckpt.core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadError,
    NewerFormatError,
    UnsafePickleError,
    text_of,
)
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.format.tensor_pickle import WrongArgumentsError

# Tuples inside one another in a key of a dict or a member of a set: each is hashed by the C stack.
MAX_KEY_DEPTH: Final = 2
_DEEP_KEY: Final = f"a key of a dict or set with tuples more than {MAX_KEY_DEPTH} deep in it"


class NotUnderstoodError(Exception):
    """Raised for what only a newer writer can have written; the message says what it is, and what was expected."""


class NotRebuiltError(Exception):
    """Raised for what code that the user allows has raised; the message says what that was."""

    @classmethod
    def of(cls, error: Exception, what: str) -> NotRebuiltError:
        """Text for an error of that code while it rebuilds `what`."""
        return cls(f"this process cannot rebuild {what:.200} ({type(error).__name__}: {text_of(error):.200})")

    def as_load_error(self, where: str) -> LoadError:
        """What is raised to the caller of a load."""
        return LoadError(
            f"{where}: {self}. Nothing shows that the file is damaged. Load it with the code that saved it, or with "
            "one that takes what that code has saved"
        )


@contextmanager
def as_read_errors(where: str, nbytes: int, advice: str = "") -> Iterator[None]:
    """A pickle of `nbytes` bytes is unpickled within: whatever fails becomes one of our errors."""
    try:
        yield
    except CheckpointError:
        raise
    except (WrongArgumentsError, RecursionError) as error:  # the second of what nests deep, which is no damage
        raise UnsafePickleError(
            f"{where}: the pickle makes what is not read: {error}. It holds an object of a kind that checkpoints "
            f"may not hold, or is not what was saved.{advice}"
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


# ------------------------------------------------------------------------------------------------------- what fits to C

# Bytes of the opcodes, with their arguments, that push a value which holds nothing.
_PUSHES = {
    **dict.fromkeys(b"N\x88\x89]}\x8f)", 1),  # NONE, NEWTRUE, NEWFALSE, empty list, dict, set and tuple
    **dict(zip(b"KMJG", (2, 3, 5, 9), strict=True)),  # BININT1, BININT2, BININT, BINFLOAT
}
# Bytes of the length before a LONG1, a SHORT_BINUNICODE, a BINUNICODE and so on.
_TEXTS = dict(zip(b"\x8a\x8cX\x8dCB\x8e\x96", (1, 1, 4, 8, 1, 4, 8, 8), strict=True))
# TUPLE, SETITEMS, APPENDS, ADDITEMS, FROZENSET, POP_MARK
_FROM_MARK = frozenset(b"tue\x90\x911")
# Most opcodes of an index belong to one of these two: an instance that is to get attributes, and a shape.
_GET = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a\x05.{5})"
_INSTANCE = re.compile(_GET + rb"\)\x81\x94}\x94\(", re.DOTALL)
_TUPLE = rb"(?:%(int)b(?:\x85|%(int)b(?:\x86|%(int)b\x87))|\((?:%(int)b){4,64}t)" % {b"int": _INT}
_SHAPE = re.compile(_GET + _TUPLE + rb"\x94\x85\x94R\x94", re.DOTALL)


def check_opcodes(data: bytes) -> None:
    """Follow a pickle, as far as it goes about tuples: how deep each nests. Raises `WrongArgumentsError` for keys that
    nest tuples deep and for opcodes that nothing saved has; any other error where it ends too soon.
    """
    # CPython's unpickler refuses what takes more from the stack than lies above the last mark; so this need not.
    stack: list[int] = []  # of each value, how deep it nests tuples
    marks: list[int] = []  # heights of the stack
    memo: list[int] = []
    at = 0
    while True:
        opcode = data[at]
        if opcode in b"hj":
            if found := _INSTANCE.match(data, at):
                memo += (1, 0)
                stack += (1, 0)
                marks.append(len(stack))
                at = found.end()
            elif found := _SHAPE.match(data, at):
                memo += (1, 2, 1)
                stack.append(1)
                at = found.end()
            else:
                end = at + (2 if opcode == 0x68 else 5)
                stack.append(memo[int.from_bytes(data[at + 1 : end], "little")])
                at = end
            continue
        if opcode == 0x94:
            memo.append(stack[-1])
            at += 1
        elif opcode == 0x71 or opcode == 0x72:  # BINPUT, LONG_BINPUT
            end = at + (2 if opcode == 0x71 else 5)
            number = int.from_bytes(data[at + 1 : end], "little")
            if number > len(memo):
                raise WrongArgumentsError(f"object {number} of {len(memo)}")
            memo[number : number + 1] = (stack[-1],)
            at = end
        elif (nbytes := _PUSHES.get(opcode)) is not None:
            stack.append(0)
            at += nbytes
        elif 0x85 <= opcode <= 0x87:  # TUPLE1 to TUPLE3
            members = stack[0x84 - opcode :]
            stack[0x84 - opcode :] = [1 + max(members)]
            at += 1
        elif opcode in _FROM_MARK:
            _close_mark(opcode, stack, marks)
            at += 1
        elif opcode == 0x28:  # MARK
            marks.append(len(stack))
            at += 1
        elif opcode in b"ab":  # APPEND, BUILD
            stack.pop()
            at += 1
        elif (nbytes := _TEXTS.get(opcode)) is not None:
            at += 1 + nbytes + int.from_bytes(data[at + 1 : at + 1 + nbytes], "little")
            stack.append(0)
        elif opcode in b"R\x81\x93":  # REDUCE, NEWOBJ, STACK_GLOBAL
            stack.pop()
            stack[-1] = 1
            at += 1
        elif opcode == 0x2E:  # STOP
            return
        else:
            at = _follow_rare(opcode, data, at, stack, marks)


def _close_mark(opcode: int, stack: list[int], marks: list[int]) -> None:
    """Follow an opcode that takes all values above the last mark."""
    height = marks.pop()
    members = stack[height:]
    del stack[height:]
    if opcode == 0x74:  # TUPLE
        stack.append(1 + max(members, default=0))
    elif opcode == 0x75:  # SETITEMS
        _check_keys(members[::2])
    elif opcode != 0x65 and opcode != 0x31:  # of a set, neither APPENDS nor POP_MARK
        _check_keys(members)
        stack += [1 + max(members, default=0)] * (opcode == 0x91)  # FROZENSET, hashed and compared as deep


def _follow_rare(opcode: int, data: bytes, at: int, stack: list[int], marks: list[int]) -> int:
    """Follow an opcode of which few pickles have many; returns where the next one is."""
    if opcode == 0x73:  # SETITEM
        _check_keys(stack[-2:-1])
        del stack[-2:]
    elif opcode == 0x63:  # GLOBAL
        stack.append(0)
        return data.index(b"\n", data.index(b"\n", at) + 1) + 1
    elif opcode == 0x30:  # POP
        (marks if marks and marks[-1] == len(stack) else stack).pop()
    elif opcode == 0x80:  # PROTO
        return at + 2
    elif opcode == 0x95:  # FRAME
        return at + 9
    elif opcode == 0x51:  # BINPERSID: its stand-in is a tuple
        stack[-1] += 1
    else:
        what = "an integer of 2**2039 or more" if opcode == 0x8B else "an opcode of no save by protocol 2 or later"
        raise WrongArgumentsError(f"{what} ({opcode:#x})")
    return at + 1


def _check_keys(depths: list[int]) -> None:
    if max(depths, default=0) > MAX_KEY_DEPTH:
        raise WrongArgumentsError(_DEEP_KEY)


def check_hashable(keys: Iterable[Any], depth: int = 0) -> None:
    """Refuse keys of a dict, or members of a set, that nest tuples so deep that to hash them takes long, or crashes."""
    for key in keys:
        if isinstance(key, tuple):
            if depth == MAX_KEY_DEPTH:
                raise WrongArgumentsError(_DEEP_KEY)
            check_hashable(key, depth + 1)


# --------------------------------------------------------------------------------------------------------- stand-ins


class ReadOnly(type):
    """Metaclass whose classes cannot be changed: a pickle's BUILD can set attributes on any object it can name."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__} is read-only")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__} is read-only")


class _OpaqueKind(ReadOnly):
    def __call__(cls, *arguments: Any) -> Any:
        made = super().__call__(*arguments)
        made.is_called = True
        return made


class Opaque(metaclass=_OpaqueKind):
    """Something in a pickle that is not a plain value; inert. Each name in a pickle gets a subclass."""

    name = ""  # module and qualified name
    arguments: tuple[Any, ...]  # what it would have been called with
    state: Any  # its attributes; after `unpickle`, with its items and members
    is_called: bool  # by REDUCE, not by NEWOBJ
    is_built: bool
    items: dict[Any, Any]
    members: list[Any]

    def __new__(cls, *arguments: Any) -> Opaque:
        made = object.__new__(cls)
        made.arguments, made.state, made.items, made.members = arguments, None, {}, []
        made.is_called = made.is_built = False
        return made

    def __setstate__(self, state: Any) -> None:
        if self.is_built:
            raise WrongArgumentsError("an object with two states")
        self.state, self.is_built = state, True

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """A member, if the class is a kind of list."""
        self.members.append(value)

    def __repr__(self) -> str:
        return f"<{self.name}{self.arguments!r}>"


@lru_cache(maxsize=1024)
def opaque_kind(full_name: str) -> type[Opaque]:
    """The stand-in for a name."""
    return cast("type[Opaque]", _OpaqueKind("StandIn", (Opaque,), {"name": full_name}))


class _Reference(NamedTuple):
    persistent_id: Any


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._has_names_of_2 = data[:1] != pickle.PROTO or data[1] < 3
        self.kinds: dict[str, type[Opaque]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; protocols up to 2 have those of Python 2."""
        if self._has_names_of_2:
            module, name = NAME_MAPPING.get((module, name), (module, name))
            module = IMPORT_MAPPING.get(module, module)
        full_name = f"{module}.{name}"
        return self.kinds.setdefault(full_name, opaque_kind(full_name))

    def persistent_load(self, reference: Any) -> _Reference:
        """A stand-in, too."""
        return _Reference(reference)


class Maker(NamedTuple):
    """What a pickle may do with something that it names."""

    make: Callable[..., Any]  # called with the pickled arguments, which it checks
    build: Callable[[Any, Any], Any] | None = None  # called with the object and its state; returns it
    with_state: bool = False  # `make` is called with the state before the arguments; None without one
    takes_members: bool = False  # objects have `append` or `__setitem__`
    new: Callable[..., Any] | None = None  # called instead of `make` for NEWOBJ, if that is something else
    is_vouched: bool = False  # the user has allowed the class: what it raises says nothing of the bytes


class Rules:
    """What names and references in a pickle stand for."""

    advice = ""  # at the end of an error for arguments that nothing saved has

    def named(self, full_name: str) -> tuple[Any, Maker | None] | None:
        """What a name stands for, and what may be done with it; None: it stays a stand-in; `KeyError`: refused."""
        return None

    def referred(self, reference: Any) -> Any:
        """The value of a persistent id."""
        return "<storage>"


def unpickle(data: bytes, rules: Rules, where: str) -> Any:
    """The value of the pickle in `data`. Raises `UnsafePickleError`, `NewerFormatError`, `CorruptCheckpointError`."""
    with as_read_errors(where, len(data), rules.advice), collector_paused():
        check_opcodes(data)
        unpickler = _Unpickler(data)
        try:
            value = unpickler.load()
        finally:  # names that are refused are told, whatever else is wrong
            meanings = _meanings(unpickler.kinds, rules, where)
        return _Realizer(rules, meanings).value_of(value)


_Meanings = dict[type[Opaque], tuple[Any, Maker | None] | None]


def _meanings(kinds: Mapping[str, type[Opaque]], rules: Rules, where: str) -> _Meanings:
    meanings: _Meanings = {}
    refused = []
    for full_name, kind in kinds.items():
        try:
            meanings[kind] = rules.named(full_name)
        except KeyError:
            refused.append(full_name)
    if refused:
        raise _refused_error(where, sorted(refused))
    return meanings


def _refused_error(where: str, names: list[str]) -> UnsafePickleError:
    for name in names:
        if name.startswith("torch._utils._rebuild_"):
            return UnsafePickleError(
                f"{where}: holds a tensor that {name:.100} makes; sparse, quantized and meta tensors are not read. "
                "Save a dense tensor, or load with LoadOptions(allowed_classes=('*',)) if you trust it"
            )
    shown = ", ".join(f"{name:.200}" for name in names[:5]) + (", ..." if len(names) > 5 else "")
    return UnsafePickleError(
        f"{where}: contains {shown}, which is not among the classes that checkpoints may hold; nothing was loaded. If "
        "you trust the origin of this checkpoint, allow it with "
        f"LoadOptions(allowed_classes=({', '.join(f'{name!r:.200}' for name in names[:5])},)). "
        "Other objects may need more: `mcore-ckpt verify` lists all"
    )


_PLAIN: Final = frozenset((bool, int, float, complex, str, bytes, bytearray, type(None)))


class _Realizer:
    """Puts what the stand-ins mean in their place; lists, dicts and sets stay the same objects."""

    def __init__(self, rules: Rules, meanings: _Meanings) -> None:
        self._rules, self._meanings = rules, meanings
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity: the part, which is kept alive so, and its value

    def value_of(self, part: Any) -> Any:
        kind = type(part)
        if kind in _PLAIN:
            return part
        known = self._done.get(id(part))
        if known is not None:
            return known[1]
        if kind is list:
            self._done[id(part)] = part, part
            part[:] = self._values_of(part)
            return part
        if kind is dict:
            self._done[id(part)] = part, part
            keys, values = self._values_of(part), self._values_of(part.values())
            part.clear()
            part.update(zip(keys, values, strict=True))
            return part
        value: Any
        if kind is tuple:
            value = tuple(self._values_of(part))
        elif kind is set or kind is frozenset:
            value = kind(self._values_of(part))
        elif kind is _Reference:
            value = self._rules.referred(self.value_of(part.persistent_id))
        elif isinstance(part, type):  # a name that is not called
            meaning = self._meanings[part]
            value = part if meaning is None else meaning[0]
        else:
            return self._made(part)
        self._done[id(part)] = part, value
        return value

    def _values_of(self, parts: Iterable[Any]) -> list[Any]:
        return [part if type(part) in _PLAIN else self.value_of(part) for part in parts]

    def _made(self, part: Opaque) -> Any:
        meaning = self._meanings[type(part)]
        if meaning is None:
            self._done[id(part)] = part, part
            part.arguments = self.value_of(part.arguments)
            contents = [self.value_of(each) for each in (part.items, part.members, part.state) if each]
            part.state = contents[0] if len(contents) == 1 else tuple(contents) or part.state
            return part
        _, maker = meaning
        if maker is None:
            raise WrongArgumentsError(f"a call of {part.name:.200}, which is no constructor that loads call")
        arguments = self.value_of(part.arguments)
        if maker.with_state:
            value = maker.make(self.value_of(part.state), *arguments)
        else:
            value = (maker.make if part.is_called or maker.new is None else maker.new)(*arguments)
        self._done[id(part)] = part, value
        if part.items or part.members:
            if not maker.takes_members:
                raise WrongArgumentsError(f"members of {part.name:.200}")
            items, members = self.value_of(part.items), self.value_of(part.members)
            with rebuilding(type(value), maker.is_vouched):
                for key, item in items.items():
                    value[key] = item
                for member in members:
                    value.append(member)
        if part.is_built and not maker.with_state:
            if maker.build is None:
                raise UnsafePickleError(
                    f"the pickle sets the state of {part.name:.200}, which does not belong to the checkpoint alone; "
                    "nothing was changed. The file is damaged or was made to do harm; do not load it."
                )
            maker.build(value, self.value_of(part.state))
        return value


@contextmanager
def rebuilding(cls: Any, is_vouched: bool = True) -> Iterator[None]:
    """Code of a class that the user allows runs within: what it raises becomes a `NotRebuiltError`."""
    try:
        yield
    except Exception as error:
        if not is_vouched:
            raise
        name = f"{cls.__module__}.{getattr(cls, '__qualname__', cls)}"
        raise NotRebuiltError.of(error, f"an object of {name}") from error
