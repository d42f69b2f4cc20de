"""The restricted unpickler: it builds plain values, and calls nothing but the constructors that it is given.

Pickles of a checkpoint are run here, or (an index, for its speed) by the machine in C after `_plain_index` has seen
that this one would find nothing to object to. `torch.load` runs only what `run_code_from_checkpoint` hands to it. What
a pickle names is looked up by `Rules`, which hand out a value and, if it may be called, its `Maker`: a constructor that
checks its arguments. What no rule knows is refused. The limits are those below, for every kind of pickle; a pickle that
passes them can take time and memory in proportion to its length only, and leaves nothing behind that walks, hashes or
prints without end.

`pickle.Unpickler` has none of these limits. Nested tuples as a key overflow the C stack; shared ones are hashed without
end; a number in the memo of six bytes takes 64 GB; a list of 125 KB, called `torch.Size` again and again, takes 4 GB;
and BUILD changes objects that belong to the process, as members of enums or dtypes do.
"""

from __future__ import annotations

import itertools
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, Protocol, cast

from mcore_ckpt.core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadError,
    NewerFormatError,
    UnsafePickleError,
)
from mcore_ckpt.core.failures import text_of

MAX_DEPTH: Final = 500
"""Containers inside one another. What recurses over a value in Python ends at about twice that."""

MAX_KEY_VALUES: Final = 1000
"""Values in a key of a dict or a member of a set, tuples inside tuples counted as often as they are referred to."""

MAX_INT_BYTES: Final = 512
"""An int of more has more digits than Python prints."""

MAX_AXES: Final = 64
"""Axes of a shape; torch and numpy have no more."""

MAX_SIZE: Final = 2**63 - 1
"""The largest size, stride or offset."""

_MAX_KEYS_OF_ONE_HASH = 16
_KEY_INTS = range(-(2**63), 2**64)
_GROWTH = 8
_ALLOWANCE = 1024 * 1024


# Comparing two texts of so many bytes takes no longer than making a value.
_CHEAP_TEXT = 256


class Budget:
    """What building may take beyond the bytes that are there already: a multiple of them, in bytes or values."""

    __slots__ = ("_by_hash", "_heavy", "_kept", "_left", "_of", "_where")

    def __init__(self, of_bytes: int, where: str) -> None:
        self._of, self._where = of_bytes, where
        self._left = _GROWTH * of_bytes + _ALLOWANCE
        # By identity; the values are kept alive as well, so that an identity stays theirs.
        self._heavy: dict[int, int] = {}
        self._kept: list[Any] = []
        self._by_hash: dict[int, list[Any]] = {}

    def charge(self, count: int) -> None:
        """Take `count` bytes or values; `UnsafePickleError` if nothing that was saved could need so many."""
        self._left -= count
        if self._left < 0:
            raise UnsafePickleError(
                f"{self._where}: its {self._of} bytes build more than {_GROWTH * self._of + _ALLOWANCE} values. The "
                "file is damaged or was made to do harm; do not load it."
            )

    def weighed(self, members: Any) -> Any:
        """A tuple or frozenset, its weight noted if that is not its length: at most one more than a key may have."""
        weight = length = len(members)
        heavy = self._heavy
        for member in members:
            kind = type(member)
            if kind is tuple or kind is frozenset:
                weight += heavy.get(id(member), len(member))
            elif (kind is str or kind is bytes) and len(member) > _CHEAP_TEXT:
                weight += len(member) // _CHEAP_TEXT
        if weight > length:
            heavy[id(members)] = min(weight, MAX_KEY_VALUES + 1)
            self._kept.append(members)
        return members

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that take long to hash, before they are, and many different ones of one hash."""
        for key in keys:
            kind: Any = type(key)
            if kind is str or kind is bytes:
                if len(key) > _CHEAP_TEXT:  # it may be compared with another one that is the same
                    self.charge(len(key) // _CHEAP_TEXT)
                continue
            if kind is int:
                if key not in _KEY_INTS:
                    raise WrongArgumentsError("a key of a dict or set that is an int of more than 64 bits")
                continue
            if kind is tuple or kind is frozenset:
                weight = self._heavy.get(id(key), len(key))
                if weight > MAX_KEY_VALUES:
                    raise WrongArgumentsError(f"a key of a dict or set with more than {MAX_KEY_VALUES} values in it")
                self.charge(weight)
            elif kind.__hash__ is object.__hash__:
                continue
            same = self._by_hash.setdefault(hash(key), [])
            if key not in same:
                same.append(key)
                if len(same) > _MAX_KEYS_OF_ONE_HASH:
                    raise WrongArgumentsError(f"more than {_MAX_KEYS_OF_ONE_HASH} keys of dicts or sets with one hash")


class Maker(NamedTuple):
    """What a pickle may do with something that it names."""

    # Called with the budget and the pickled arguments, for REDUCE and NEWOBJ; checks the arguments.
    make: Callable[..., Any]
    # Called with the object and its pickled state, once, for BUILD; returns the object that takes its place. Only an
    # object that `make` has returned in this run, and has not shared, is built.
    build: Callable[[Budget, Any, Any], Any] | None = None
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


def inert_maker(cls: type) -> Maker:
    """For a class whose instances only keep what is put into them."""

    def make(_budget: Budget, *arguments: Any) -> Any:
        return cls(*arguments)

    def build(budget: Budget, instance: Any, state: Any) -> Any:
        setter = getattr(instance, "__setstate__", None)
        if setter is not None:
            setter(state)
        elif type(state) is list:  # of a frozen dataclass with slots: the values alone
            raise NotUnderstoodError(f"a {cls.__name__} of {len(state)} values; expected its attributes by name")
        else:
            if type(state) is tuple and len(state) == 2 and state[0] is None:  # of a dataclass with slots
                state = state[1]
            budget.charge(len(state))
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise WrongArgumentsError(f"expected the attributes of a {cls.__name__}")
            instance.__dict__.update(state)
        return instance

    return Maker(make, build, takes_members=hasattr(cls, "append"))


class _MarkType:
    """What MARK leaves on the stack."""


_MARK = _MarkType()
_INT2, _INT4, _UINT4, _UINT8, _FLOAT = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q", ">d"))
_DICTS = (dict, OrderedDict, Counter)
_ATOMS = frozenset((str, int, float, bool, bytes, type(None)))
_CONTAINERS = frozenset((dict, list, tuple, set, frozenset, OrderedDict, Counter))


class _Run:
    """One run of a pickle; bytes after its end are not looked at."""

    def __init__(self, data: bytes, rules: Rules, where: str) -> None:
        self.position = 0
        self.budget = Budget(len(data), where)
        self._data, self._rules, self._where = data, rules, where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        # By identity; the values are kept alive as well, so that an identity stays theirs.
        self._makers: dict[int, Maker] = {}
        self._fresh: dict[int, Maker] = {}
        self._kept: list[Any] = []
        self._containers = 0
        self._protocol = 0

    def load(self) -> Any:
        """Run the pickle to its STOP. Raises as `unpickle`."""
        try:
            value = self._run()
            if self._containers > MAX_DEPTH:
                self._check_depth(value)
            return value
        except CheckpointError:
            raise
        except WrongArgumentsError as error:
            raise UnsafePickleError(
                f"{self._where}: the pickle makes what is not read, at byte {self.position}: {error}. The file is "
                "damaged, was made to do harm, or holds an object of a kind that checkpoints may not hold."
            ) from error
        except NotUnderstoodError as error:
            raise NewerFormatError(
                f"{self._where}: written by a newer torch, Megatron-Core or mcore_ckpt: {error}. Nothing shows that "
                "the file is damaged. Load it with a newer mcore_ckpt, or save it again with an older torch."
            ) from error
        except NotRebuiltError as error:
            raise error.as_load_error(self._where) from error
        # Damaged bytes fail in any way that a stack machine and constructors can.
        except Exception as error:
            raise CorruptCheckpointError(
                f"{self._where}: not a readable pickle of {len(self._data)} bytes ({type(error).__name__}: "
                f"{error!s:.200}). The file is truncated or damaged; restore it from another copy, or load an earlier "
                "checkpoint."
            ) from error

    # ------------------------------------------------------------------------------------------------------- machine

    def _run(self) -> Any:
        data, stack, memo = self._data, self._stack, self._memo
        push, pop, end = stack.append, stack.pop, len(data)
        at = self.position
        try:
            while True:
                op = data[at]
                at += 1
                if op == 0x71:  # BINPUT
                    memo[data[at]] = stack[-1]
                    at += 1
                elif op == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif op == 0x68:  # BINGET
                    push(memo[data[at]])
                    at += 1
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[_UINT4.unpack_from(data, at)[0]])
                    at += 4
                elif op == 0x4B:  # BININT1
                    push(data[at])
                    at += 1
                elif op == 0x8C or op == 0x58 or op == 0x8D:  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                    start, at = self._span(at, 1 if op == 0x8C else 4 if op == 0x58 else 8)
                    push(str(data[start:at], "utf-8", "surrogatepass"))
                elif op == 0x72:  # LONG_BINPUT
                    number = _UINT4.unpack_from(data, at)[0]
                    if number > end:
                        raise WrongArgumentsError(f"an object numbered {number} in {end} bytes")
                    memo[number] = stack[-1]
                    at += 4
                elif op == 0x28:  # MARK
                    push(_MARK)
                elif op == 0x4D:  # BININT2
                    push(_INT2.unpack_from(data, at)[0])
                    at += 2
                elif op == 0x4A:  # BININT
                    push(_INT4.unpack_from(data, at)[0])
                    at += 4
                elif op == 0x74:  # TUPLE
                    self._push_tuple(tuple(self._marked()))
                elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                    items = tuple(stack[0x84 - op :])
                    if len(items) != op - 0x84:
                        raise IndexError("stack")
                    del stack[0x84 - op :]
                    self._push_tuple(items)
                elif op == 0x47:  # BINFLOAT
                    push(_FLOAT.unpack_from(data, at)[0])
                    at += 8
                elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
                    push(op == 0x88)
                elif op == 0x4E:  # NONE
                    push(None)
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x7D:  # EMPTY_DICT
                    self._containers += 1
                    push({})
                elif op == 0x5D:  # EMPTY_LIST
                    self._containers += 1
                    push([])
                elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
                    pairs = self._marked() if op == 0x75 else self._popped(2)
                    self._set_items(stack[-1], pairs)
                elif op == 0x65 or op == 0x61:  # APPENDS, APPEND
                    members = self._marked() if op == 0x65 else self._popped(1)
                    self._append(stack[-1], members)
                elif op == 0x62:  # BUILD
                    self.position = at
                    state = pop()
                    self._build(state)
                elif op == 0x52 or op == 0x81:  # REDUCE, NEWOBJ
                    self.position = at
                    arguments = pop()
                    push(self._made(pop(), arguments, new=op == 0x81))
                elif op == 0x63:  # GLOBAL
                    module, name, at = self._lines(at)
                    push(self._named(module, name))
                elif op == 0x93:  # STACK_GLOBAL
                    name, module = pop(), pop()
                    push(self._named(module, name))
                elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
                    start, at = self._span(at, 1 if op == 0x8A else 4)
                    if at - start > MAX_INT_BYTES:
                        raise WrongArgumentsError(f"an int of {at - start} bytes")
                    push(int.from_bytes(data[start:at], "little", signed=True))
                elif op == 0x51:  # BINPERSID
                    push(self._rules.referred(pop()))
                elif op == 0x80 or op == 0x95:  # PROTO, FRAME
                    at += 1 if op == 0x80 else 8
                    if op == 0x80:
                        self._protocol = data[at - 1]
                        if self._protocol > 5:
                            raise ValueError(f"pickle protocol {self._protocol}")
                elif op == 0x2E:  # STOP
                    (value,) = stack
                    self.position = at
                    return value
                else:
                    at = self._run_rare(op, at)
                if at > end:
                    raise EOFError("ran past the end")
        finally:
            self.position = min(at, end)

    def _run_rare(self, op: int, at: int) -> int:
        data, stack = self._data, self._stack
        if op in (0x43, 0x42, 0x8E, 0x96):  # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
            start, at = self._span(at, {0x43: 1, 0x42: 4}.get(op, 8))
            stack.append(data[start:at] if op != 0x96 else bytearray(data[start:at]))
        elif op == 0x55 or op == 0x54:  # SHORT_BINSTRING, BINSTRING: text of Python 2
            start, at = self._span(at, 1 if op == 0x55 else 4)
            stack.append(data[start:at].decode())
        elif op == 0x8F:  # EMPTY_SET
            stack.append(set())
        elif op == 0x90:  # ADDITEMS
            members = self._marked()
            if type(stack[-1]) is not set:
                raise TypeError("members of something that is no set")
            self.budget.check_keys(members)
            stack[-1].update(members)
        elif op == 0x91:  # FROZENSET
            members = self._marked()
            self.budget.check_keys(members)
            self._containers += 1
            stack.append(self.budget.weighed(frozenset(members)))
        elif op == 0x92:  # NEWOBJ_EX
            keywords, arguments = stack.pop(), stack.pop()
            cls = stack.pop()
            maker = self._makers.get(id(cls))
            if keywords and (maker is None or not maker.takes_members or maker.is_vouched):
                raise WrongArgumentsError("a call with keywords")
            stack.append(self._made(cls, arguments, new=True))
        elif op == 0x30:  # POP
            stack.pop()
        elif op == 0x31:  # POP_MARK
            self._marked()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        else:
            raise UnsafePickleError(
                f"{self._where}: opcode {op:#04x} at byte {at - 1} of the pickle; nothing that is saved under "
                "protocol 2 or later has it. The file is damaged or was made to do harm; do not load it."
            )
        return at

    def _span(self, at: int, length_bytes: int) -> tuple[int, int]:
        """Start and stop of an argument whose length comes first."""
        start = at + length_bytes
        stop = start + int.from_bytes(self._data[at:start], "little")
        if stop > len(self._data):
            raise EOFError(f"{stop - start} bytes at byte {start} of {len(self._data)}")
        return start, stop

    def _lines(self, at: int) -> tuple[str, str, int]:
        middle = self._data.index(b"\n", at)
        stop = self._data.index(b"\n", middle + 1)
        return self._data[at:middle].decode(), self._data[middle + 1 : stop].decode(), stop + 1

    def _marked(self) -> list[Any]:
        """What lies above the last mark, taken off the stack with it."""
        stack = self._stack
        first = len(stack) - 1
        while stack[first] is not _MARK:
            first -= 1
            if first < 0:
                raise IndexError("no mark")
        items = stack[first + 1 :]
        del stack[first:]
        return items

    def _popped(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) != count or any(item is _MARK for item in items):
            raise IndexError("stack")
        del self._stack[-count:]
        return items

    # ---------------------------------------------------------------------------------------------------- containers

    def _push_tuple(self, items: tuple[Any, ...]) -> None:
        self._containers += 1
        self._stack.append(self.budget.weighed(items))

    def _set_items(self, target: Any, pairs: list[Any]) -> None:
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        if type(target) not in _DICTS and not self._takes_members(target):
            raise TypeError(f"items of a {type(target).__name__}")
        keys = pairs[::2]
        self.budget.check_keys(keys)
        with self._rebuilding(target):
            for key, value in zip(keys, pairs[1::2], strict=True):
                target[key] = value

    def _append(self, target: Any, members: list[Any]) -> None:
        if type(target) is list:
            target.extend(members)
        elif self._takes_members(target):
            with self._rebuilding(target):
                for member in members:
                    target.append(member)
        else:
            raise TypeError(f"members of a {type(target).__name__}")

    def _rebuilding(self, instance: Any) -> AbstractContextManager[None]:
        maker = self._fresh.get(id(instance))
        return rebuilding(type(instance)) if maker is not None and maker.is_vouched else nullcontext()

    def _takes_members(self, target: Any) -> bool:
        maker = self._fresh.get(id(target))
        return maker is not None and maker.takes_members

    def _check_depth(self, value: Any) -> None:
        """Measure how deep containers lie inside one another on the longest way (Tarjan: a circle counts as a
        whole).
        """
        heights: dict[int, int] = {}  # by identity; while an object is open: minus its number
        opened: list[int] = []
        numbers, lowest, tallest, parts = [1], [1], [0], [iter((value,))]
        while True:
            for part in parts[-1]:
                inside = self._inside(part)
                if inside is None:
                    continue
                known = heights.get(id(part))
                if known is None:
                    number = len(heights) + 2
                    heights[id(part)] = -number
                    opened.append(id(part))
                    numbers.append(number)
                    lowest.append(number)
                    tallest.append(0)
                    parts.append(iter(inside))
                    break
                if known > 0:
                    tallest[-1] = max(tallest[-1], known)
                else:
                    lowest[-1] = min(lowest[-1], -known)
            else:
                parts.pop()
                if not parts:
                    return
                number, low, height = numbers.pop(), lowest.pop(), tallest.pop()
                if low == number:
                    first = len(opened) - 1
                    while heights[opened[first]] != -number:
                        first -= 1
                    height += len(opened) - first
                    if height > MAX_DEPTH:
                        raise WrongArgumentsError(f"containers more than {MAX_DEPTH} deep inside one another")
                    for identity in opened[first:]:
                        heights[identity] = height
                    del opened[first:]
                lowest[-1] = min(lowest[-1], low)
                tallest[-1] = max(tallest[-1], height)

    def _inside(self, part: Any) -> Iterable[Any] | None:
        kind = type(part)
        if kind in _ATOMS:
            return None
        if isinstance(part, dict):
            return itertools.chain(dict.keys(part), dict.values(part))
        if kind in _CONTAINERS:
            return cast("Iterable[Any]", part)
        attributes = getattr(part, "__dict__", None)
        return attributes.values() if type(attributes) is dict else None

    # --------------------------------------------------------------------------------------------- names and objects

    def _named(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise TypeError("name of something")
        if self._protocol < 3:
            module, name = name_today(module, name)
        value, maker = self._rules.named(module, name)
        if maker is not None:
            self._makers[id(value)] = maker
            self._kept.append(value)
        return value

    def _made(self, function: Any, arguments: Any, *, new: bool) -> Any:
        maker = self._makers.get(id(function))
        if maker is None or type(arguments) is not tuple:
            raise UnsafePickleError(
                f"{self._where}: the pickle calls a {type(function).__name__}, at byte {self.position}, which is not "
                "among the constructors that a checkpoint may use; nothing was called. The file is damaged, was made "
                "to do harm, or was written by something else; do not load it."
            )
        value = (maker.new if new and maker.new is not None else maker.make)(self.budget, *arguments)
        if maker.build is not None or maker.takes_members:
            self._fresh[id(value)] = maker
            self._kept.append(value)
        self._containers += 1  # or something with attributes, as tensors are
        if type(value) is tuple or type(value) is frozenset:
            self.budget.weighed(value)
        return value

    def _build(self, state: Any) -> None:
        instance = self._stack[-1]
        maker = self._fresh.get(id(instance))
        if maker is None or maker.build is None:
            raise UnsafePickleError(
                f"{self._where}: the pickle sets the state of a {type(instance).__name__}, at byte {self.position}, "
                "which does not belong to the checkpoint alone; nothing was changed. The file is damaged or was made "
                "to do harm; do not load it."
            )
        del self._fresh[id(instance)]
        built = maker.build(self.budget, instance, state)
        if built is not instance:
            self._stack[-1] = built
            # It was numbered when it was made, and its state since then.
            for slot in itertools.islice(reversed(self._memo), 64):
                if self._memo[slot] is instance:
                    self._memo[slot] = built
                    break


def unpickle(data: bytes, rules: Rules, where: str) -> Any:
    """The value of the pickle in `data`; bytes after its end are ignored. `UnsafePickleError`: it names what no rule
    allows, or passes a limit. `NewerFormatError`, `CorruptCheckpointError`: a newer writer's, or no pickle.
    """
    return _Run(data, rules, where).load()
