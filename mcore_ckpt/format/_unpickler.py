"""The standard library's unpickler, restricted: it builds plain values, and calls nothing but the constructors that it
is given.

What a pickle names is looked up by `Rules`, which hand out a value and, if it may be called, its `Maker`: a constructor
that checks its arguments. What no rule knows is refused, and so is every opcode that nothing saved under protocol 2 or
later has. State is set, once, on objects that this pickle has made.

This is `pickle._Unpickler`, the one in Python, of which each opcode can be replaced. The one in C, which indexes go
through (`index_pickle.py`), asks `find_class` and nothing else: BUILD would change objects that the process shares, and
a deeply nested tuple as a key would overflow the C stack.
"""

from __future__ import annotations

import io
import itertools
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
