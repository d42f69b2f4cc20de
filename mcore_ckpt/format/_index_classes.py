"""Stand-ins for the classes that the pickle of an index names: what is allowed, and under which names.

Found by reading the planners and writers of torch 2.1 to 2.15 and of megatron-core 0.12 to 0.19, and by loading what
they wrote (`tests/format`). A stand-in keeps what pickle puts into it and does nothing; it is built in C by pickle's
NEWOBJ and BUILD, so that it costs less than the class it stands for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from mcore_ckpt.format._unpickler import MAX_AXES, NotUnderstoodError
from mcore_ckpt.format.dtypes import DTYPE_NAMES


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
