"""The pickle (`data.pkl`) with which `torch.save` describes one tensor, written and read without the pickle module.

It is a short program for the pickle machine that calls `_rebuild_tensor_v2` (dtypes that have a legacy storage class)
or `_rebuild_tensor_v3` (all newer ones) with the storage, offset, sizes and strides. To emit it is concatenation. To
read it, a stack machine knows the opcodes which such programs consist of, over plain ints, strings and tuples. Nothing
is imported and nothing is called, whatever the bytes say: the functions that rebuild a tensor are recognized by name,
and their arguments are the result.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mcore_ckpt.format.dtypes import DTYPE_OF_STORAGE, DTYPES, DtypeEntry

__all__ = [
    "MAX_PICKLE_BYTES",
    "MalformedPickleError",
    "NotPlainTensorError",
    "PickledTensor",
    "contiguous_strides",
    "numbers_at",
    "own_dtype_and_shape",
    "read_tensor_pickle",
    "tensor_pickle",
]


# --------------------------------------------------------------------------------------------------------- written

# Opcodes of the pickle machine, protocol 2, as `pickletools` names them.
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
    """The `data.pkl` of a C-contiguous tensor that fills storage `0`.

    Args:
        dtype: a key of `DTYPES`.
        shape: sizes, in elements; `element_count` is their product.
    """
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

# From the start of the pickle to the count: own pickles of legacy dtypes are recognized by it at once.
_OWN_START = {program.before_count: dtype for dtype, program in _PROGRAMS.items() if DTYPES[dtype].storage_class}


def own_dtype_and_shape(pickle: bytes) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape that `tensor_pickle` may have made these bytes from; None if it surely did not.

    Only looks where they would stand: the caller has to make the pickle of them again and compare.
    """
    after_start = pickle.find(b"X\x03\x00\x00\x00cpu") + 8
    dtype = _OWN_START.get(pickle[:after_start])
    if dtype is None:
        dtype_at = pickle.rfind(b"ctorch\n") + 7
        dtype = pickle[dtype_at : pickle.find(b"\n", dtype_at)].decode("latin-1")
        if dtype not in DTYPES:
            return None
    position = pickle.find(_AFTER_COUNT, after_start) + len(_AFTER_COUNT)
    if pickle[position : position + 1] == _MARK:  # before a tuple of more than three
        position += 1
    return dtype, numbers_at(pickle, position)


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
    """A C-contiguous tensor, as its pickle describes it; it lies inside its storage.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: sizes, in elements.
        storage_key: the bytes are in record `data/<storage_key>`.
        storage_bytes: size of that record.
        first_byte: where in it the tensor starts.
        payload_bytes: size of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    storage_key: str
    storage_bytes: int
    first_byte: int
    payload_bytes: int


class NotPlainTensorError(Exception):
    """The pickle is of something else than one C-contiguous tensor; the message says of what."""


class MalformedPickleError(Exception):
    """No pickle at all, or a tensor that cannot be; the message says why."""


# A checkpoint has many tensors of the same dtype and shape.
@lru_cache(maxsize=4096)
def read_tensor_pickle(pickle: bytes) -> PickledTensor:
    """Interpret the pickle of a tensor (or of a Parameter without further state), in bounded time and memory.

    Raises:
        NotPlainTensorError: `safe_pickle.load_object` may be able to make something of it.
        MalformedPickleError: it cannot.
    """
    if len(pickle) > MAX_PICKLE_BYTES:
        raise NotPlainTensorError(f"it has {len(pickle)} bytes, more than any tensor needs")
    usual = _USUAL.fullmatch(pickle)
    known = _read_usual(usual) if usual is not None else None
    if known is not None:
        return known
    try:
        result = _interpret(pickle)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        # Each is what malformed input does to the stack, to the memo, or to a read past the end.
        raise MalformedPickleError(f"{type(error).__name__}: {error}") from error
    if not isinstance(result, PickledTensor):
        raise NotPlainTensorError(f"it holds {type(result).__name__}, not a tensor")
    return result


_MAX_AXES, _MAX_SIZE = 64, 2**63 - 1


def _plain(
    dtype: str, storage_key: str, storage_bytes: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> PickledTensor:
    """Check a tensor against its storage; `offset` and `strides` are in elements."""
    numbers = (offset, *shape, *strides)
    # Looked at before they are multiplied: ints may have 255 bytes, and a pickle refer to one thousands of times.
    if len(shape) != len(strides) or len(shape) > _MAX_AXES or min(numbers) < 0 or max(numbers) > _MAX_SIZE:
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


class _Mark:
    """What MARK leaves on the stack."""


class _Global(str):
    """A name that the pickle would import: only ever compared."""

    __slots__ = ()


class _Storage(NamedTuple):
    storage_class: _Global
    key: str
    length: int  # in elements; in bytes if untyped


_MARKER = _Mark()
_NO_HOOKS = object()  # the empty OrderedDict of backward hooks
_NO_STATE = object()  # an empty dict
_READ_INT = struct.Struct("<i")
_READ_LENGTH = struct.Struct("<I")


def _interpret(pickle: bytes) -> Any:
    """The stack machine. What it can build: ints, bools, None, str, tuples, names, a storage, a tensor."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    push, pop = stack.append, stack.pop
    position, stop = 0, len(pickle)
    while position < stop:
        opcode = pickle[position]
        position += 1
        if opcode == 0x71:  # BINPUT
            memo[pickle[position]] = stack[-1]
            position += 1
        elif opcode == 0x4B:  # BININT1
            push(pickle[position])
            position += 1
        elif opcode == 0x4D:  # BININT2
            push(pickle[position] | pickle[position + 1] << 8)
            position += 2
        elif opcode == 0x4A:  # BININT
            push(_READ_INT.unpack_from(pickle, position)[0])
            position += 4
        elif opcode == 0x63:  # GLOBAL
            end = pickle.index(b"\n", pickle.index(b"\n", position) + 1)
            push(_Global(pickle[position:end], "ascii"))
            position = end + 1
        elif opcode == 0x58:  # BINUNICODE
            start = position + 4
            position = start + _READ_LENGTH.unpack_from(pickle, position)[0]
            if position > stop:
                raise IndexError("text past the end")
            push(pickle[start:position].decode())
        elif opcode == 0x28:  # MARK
            push(_MARKER)
        elif opcode == 0x74:  # TUPLE
            first = len(stack) - 1
            while stack[first] is not _MARKER:
                first -= 1
                if first < 0:
                    raise IndexError("no mark")
            stack[first:] = [tuple(stack[first + 1 :])]
        elif 0x85 <= opcode <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            size = opcode - 0x84
            if len(stack) < size:
                raise IndexError("stack")
            stack[-size:] = [tuple(stack[-size:])]
        elif opcode == 0x29:  # EMPTY_TUPLE
            push(())
        elif opcode == 0x52:  # REDUCE
            arguments = pop()
            push(_call(pop(), arguments))
        elif opcode == 0x51:  # BINPERSID
            push(_storage(pop()))
        elif opcode == 0x88 or opcode == 0x89:  # NEWTRUE, NEWFALSE
            push(opcode == 0x88)
        elif opcode == 0x68:  # BINGET
            push(memo[pickle[position]])
            position += 1
        elif opcode == 0x4E:  # NONE
            push(None)
        elif opcode == 0x7D:  # EMPTY_DICT
            push(_NO_STATE)
        elif opcode == 0x8A:  # LONG1
            start = position + 1
            position = start + pickle[position]
            if position > stop:
                raise IndexError("number past the end")
            push(int.from_bytes(pickle[start:position], "little", signed=True))
        elif opcode == 0x80:  # PROTO
            position += 1
        elif opcode == 0x2E:  # STOP
            (result,) = stack
            return result
        else:
            raise NotPlainTensorError(f"opcode {opcode:#04x} at byte {position - 1}")
    raise IndexError("no STOP")


def _storage(reference: Any) -> _Storage:
    kind, storage_class, key, _location, count = reference
    if kind != "storage" or type(storage_class) is not _Global or type(key) is not str or type(count) is not int:
        raise TypeError("reference to something else than a storage")  # no repr: a hostile tuple's has no bounds
    return _Storage(storage_class, key, count)


def _call(function: Any, arguments: Any) -> Any:
    if type(arguments) is not tuple or type(function) is not _Global:
        raise TypeError("call of something that is no function")
    if function == "collections\nOrderedDict" and not arguments:
        return _NO_HOOKS
    if function == "torch._utils\n_rebuild_tensor_v2":
        return _tensor(arguments[:6], arguments[6:], typed=True)
    if function == "torch._utils\n_rebuild_tensor_v3":
        return _tensor(arguments[:7], arguments[7:], typed=False)
    if function == "torch._utils\n_rebuild_parameter":
        tensor, _requires_grad, hooks = arguments
        if type(tensor) is PickledTensor and hooks is _NO_HOOKS:
            return tensor
    raise NotPlainTensorError(f"call of {function!r}")


def _tensor(arguments: tuple[Any, ...], further: tuple[Any, ...], *, typed: bool) -> PickledTensor:
    """The tensor that a rebuild function would make; `further` is its metadata (conjugate bit and the like)."""
    storage, offset, shape, strides, _requires_grad, hooks = arguments[:6]
    if type(storage) is not _Storage or hooks is not _NO_HOOKS or any(more is not _NO_STATE for more in further):
        raise NotPlainTensorError("a tensor with hooks or further metadata")
    if any(type(numbers) is not tuple or any(type(n) is not int for n in numbers) for numbers in ((offset,), shape)):
        raise TypeError("sizes or offset")
    if type(strides) is not tuple or any(type(n) is not int for n in strides):
        raise TypeError("strides")
    if typed:
        module, _, storage_class = storage.storage_class.partition("\n")
        dtype = DTYPE_OF_STORAGE.get(storage_class) if module == "torch" else None
    else:
        module, _, name = arguments[6].partition("\n") if type(arguments[6]) is _Global else ("", "", "")
        untyped = storage.storage_class == "torch.storage\nUntypedStorage"
        dtype = name if untyped and module == "torch" and name in DTYPES else None
    if dtype is None:
        raise NotPlainTensorError(f"dtype of {storage.storage_class!r}")
    storage_bytes = storage.length * (DTYPES[dtype].element_bytes if typed else 1)
    return _plain(dtype, storage.key, storage_bytes, offset, shape, strides)
