"""The pickle of an index, unpickled with inert stand-ins for all that it names.

What is allowed, and under which names, was found by reading the planners and writers of torch 2.1 to 2.15 and of
megatron-core 0.12 to 0.19, and by loading what they wrote (`tests/format`). A stand-in keeps what pickle puts into it
and does nothing; it is built in C by pickle's NEWOBJ and BUILD, so that it costs less than the class it stands for.

`pickle.Unpickler`, the one in C, does as a pickle says: it would number an object in its memo as asked, at 16 bytes for
each number below, and hash a tuple that nests without end as the key of a dict, until the C stack overflows. So all
opcodes are looked at before (`_check_opcodes`), in about the time that unpickling takes.
"""

from __future__ import annotations

import io
import operator
import pickle
import re
from typing import Any, NoReturn

from mcore_ckpt.core.errors import UnsafePickleError
from mcore_ckpt.format.tensor_pickle import (
    DTYPE_NAMES,
    MAX_AXES,
    MAX_KEY_DEPTH,
    NotUnderstoodError,
    WrongArgumentsError,
    as_read_errors,
    checked_size,
)


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
            self.dtype, self.layout, self.requires_grad, _memory_format, _pin_memory = state[:5]
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
        pass


# What the three below return is as shallow as `_check_opcodes` takes it to be.
class _Size(metaclass=_ReadOnly):
    """`torch.Size`, as a tuple of ints."""

    def __new__(cls, values: Any = ()) -> Any:
        return checked_size(values)


class _Ordered(dict[Any, Any], metaclass=_ReadOnly):
    """`OrderedDict`, which is filled after it was made."""

    def __init__(self, *pairs: Any) -> None:
        if pairs and pairs != ([],):
            raise WrongArgumentsError("expected an empty OrderedDict")

    def __setstate__(self, state: Any) -> None:
        pass


class _Slice(metaclass=_ReadOnly):
    """`slice`, of ints."""

    def __new__(cls, *bounds: Any) -> Any:
        if not all(bound is None or type(bound) is int for bound in bounds):
            raise TypeError("a slice of something else than ints")
        return slice(*bounds)


_INTS = frozenset((int,))
_PLAIN = frozenset((bool, int, float, str, type(None)))


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
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Inert,
    # Python 3.11.0 to 3.11.2 and 3.12 alphas pickle an enum member as getattr(class, name).
    ("builtins", "getattr"): _Inert,
    ("builtins", "slice"): _Slice,
    ("collections", "OrderedDict"): _Ordered,
    **{
        (module, name): PathState
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    },
    # NVIDIA's multi-storage client writes its own paths into the checkpoint id.
    ("multistorageclient.pathlib", "MultiStoragePath"): OtherPathState,
    **{("torch", name): DtypeName(name) for name in DTYPE_NAMES},
}


def unpickle_index(data: bytes, where: str) -> Any:
    """The stand-in for what an index is pickled from; no other name than those of `ALLOWED_GLOBALS` is known. Raises
    `UnsafePickleError`, `NewerFormatError` or `CorruptCheckpointError`.
    """
    with as_read_errors(where, len(data)):
        _check_opcodes(data)
        return _Unpickler(data, where).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        try:
            return ALLOWED_GLOBALS[module, name]
        except KeyError:
            pass
        if _is_newer(module, name):
            known = sorted({name for home, name in ALLOWED_GLOBALS if home == module}) or ["another module"]
            raise NotUnderstoodError(f"it names {module:.200}.{name:.200}; expected {', '.join(known)}")
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for {module:.200}.{name:.200}, which is not among the classes that a "
            "checkpoint index may hold. Nothing was imported or run. The file is damaged, was tampered with, or "
            "was written by something other than Megatron-Core, torch.distributed.checkpoint or this package."
        )

    def persistent_load(self, reference: Any) -> NoReturn:
        """An index refers to nothing outside it."""
        shown = repr(reference)[:80] if type(reference) in (str, int) else type(reference).__name__
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for an external object (persistent id {shown}); an index has none. "
            "The file is damaged or is not a checkpoint index."
        )


# Where classes of an index come from, and how dtypes are called.
_HOMES = re.compile(r"(torch\.distributed\.(checkpoint|tensor|_shard)|megatron\.core\.dist_checkpointing)\b[\w.]*")
_CLASS = re.compile(r"_*[A-Z]\w*", re.ASCII)
_DTYPE = re.compile(r"[a-z]*(complex|float|int|bits)\d\w*", re.ASCII)


def _is_newer(module: str, name: str) -> bool:
    """Whether a later torch or Megatron-Core may write that name; one character off a known name is damage."""
    if not (_DTYPE.fullmatch(name) if module == "torch" else _HOMES.fullmatch(module) and _CLASS.fullmatch(name)):
        return False
    return not any(_differ_in_one(f"{module}.{name}", ".".join(other)) for other in ALLOWED_GLOBALS)


def _differ_in_one(text: str, other: str) -> bool:
    return len(text) == len(other) and sum(map(operator.ne, text, other)) == 1


# ------------------------------------------------------------------------------------------------------- what fits to C


# Bytes of the opcodes, with their arguments, that push a value which holds nothing.
_PUSHES = {
    **dict.fromkeys(b"N\x88\x89]}\x8f)", 1),  # NONE, NEWTRUE, NEWFALSE, empty list, dict, set and tuple
    **dict(zip(b"KMJG", (2, 3, 5, 9), strict=True)),  # BININT1, BININT2, BININT, BINFLOAT
}
# Bytes of the length before a LONG1, a SHORT_BINUNICODE, a BINUNICODE and so on.
_TEXTS = dict(zip(b"\x8a\x8cX\x8dCB\x8e", (1, 1, 4, 8, 1, 4, 8), strict=True))
# TUPLE, SETITEMS, APPENDS, ADDITEMS, FROZENSET, POP_MARK
_FROM_MARK = frozenset(b"tue\x90\x911")
# Most opcodes of an index belong to one of these two: an instance that is to get attributes, and a shape.
_GET = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a\x05.{5})"
_INSTANCE = re.compile(_GET + rb"\)\x81\x94}\x94\(", re.DOTALL)
_TUPLE = rb"(?:%(int)b(?:\x85|%(int)b(?:\x86|%(int)b\x87))|\((?:%(int)b){4,64}t)" % {b"int": _INT}
_SHAPE = re.compile(_GET + _TUPLE + rb"\x94\x85\x94R\x94", re.DOTALL)


def _check_opcodes(data: bytes) -> None:
    """Follow a pickle, as far as it goes about tuples: how deep each nests. Raises `WrongArgumentsError` for keys that
    nest tuples deep and for opcodes that no writer of an index uses; any other error where it ends too soon.
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
        elif (nbytes := _PUSHES.get(opcode)) is not None:
            stack.append(0)
            at += nbytes
        elif 0x85 <= opcode <= 0x87:  # TUPLE1 to TUPLE3
            members = stack[0x84 - opcode :]
            stack[0x84 - opcode :] = [1 + max(members)]
            at += 1
        elif opcode in _FROM_MARK:
            height = marks.pop()
            members = stack[height:]
            del stack[height:]
            if opcode == 0x74:  # TUPLE
                stack.append(1 + max(members, default=0))
            elif opcode == 0x75:  # SETITEMS
                _check_keys(members[::2])
            elif opcode != 0x65 and opcode != 0x31:  # of a set, neither APPENDS nor POP_MARK
                _check_keys(members)
                stack += [0] * (opcode == 0x91)  # FROZENSET
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
        elif opcode == 0x73:  # SETITEM
            _check_keys(stack[-2:-1])
            del stack[-2:]
            at += 1
        elif opcode in b"q" or opcode in b"r":  # BINPUT, LONG_BINPUT
            end = at + (2 if opcode == 0x71 else 5)
            number = int.from_bytes(data[at + 1 : end], "little")
            if number > len(memo):
                raise WrongArgumentsError(f"object {number} of {len(memo)}")
            memo[number : number + 1] = [stack[-1]]
            at = end
        elif opcode == 0x63:  # GLOBAL
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            stack.append(0)
        elif opcode == 0x30:  # POP
            (marks if marks and marks[-1] == len(stack) else stack).pop()
            at += 1
        elif opcode in b"\x80\x95":  # PROTO, FRAME
            at += 2 if opcode == 0x80 else 9
        elif opcode == 0x51:  # BINPERSID
            at += 1
        elif opcode == 0x2E:  # STOP
            return
        else:
            raise WrongArgumentsError(f"something by opcode {opcode:#x}, which no writer of an index uses")


def _check_keys(depths: list[int]) -> None:
    if max(depths, default=0) > MAX_KEY_DEPTH:
        raise WrongArgumentsError(f"a key of a dict or set with tuples more than {MAX_KEY_DEPTH} deep in it")
