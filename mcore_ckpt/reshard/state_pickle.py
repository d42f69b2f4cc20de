"""State dicts as `torch.save` writes them, without torch: tensors are described by name, classes are stood in for."""

from __future__ import annotations

import io
import math
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.dtypes import dtype_entry
from mcore_ckpt.format.item_layout import ArchiveLayout
from mcore_ckpt.format.safe_pickle import Opaque, Unavailable
from mcore_ckpt.format.state_file import StateRecord, read_state_file
from mcore_ckpt.format.tensor_pickle import FileTensor, contiguous_strides
from mcore_ckpt.tools.dtype_cast import as_numbers

# Random states, settings and what layers keep for themselves are small; what is larger is no such thing.
_MAX_TAKEN_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """A tensor of a state dict; its content is its elements (C order, little-endian), or the key of its payloads."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_entry(self.dtype).element_bytes

    @property
    def number(self) -> float | None:
        """Its element, if it is one number in memory."""
        numbers = as_numbers(memoryview(self.content), self.dtype) if isinstance(self.content, bytes) else None
        return None if numbers is None or len(numbers) != 1 else float(numbers[0])


class _Global:
    """Something of torch that a pickle names."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Never: pickle asks whether it could."""


_REBUILD_V2 = _Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = _Global("torch._utils", "_rebuild_tensor_v3")
_UNTYPED = _Global("torch.storage", "UntypedStorage")


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    kind: _Global
    number: int
    count: int


# Its pickler in Python, whose way of writing names can be changed.
_Pickler: Any = pickle._Pickler  # noqa: SLF001


class _StatePickler(_Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.tensors: list[SavedTensor] = []
        self._names: dict[str, _Global] = {}

    def reducer_override(self, value: Any) -> Any:
        """What stands for something else."""
        if isinstance(value, SavedTensor):
            return self._tensor(value)
        if isinstance(value, _Global):
            return value.name
        if isinstance(value, Unavailable):
            made = type(value), value.arguments
            return made if value.state is None else (*made, value.state)
        return NotImplemented

    def _tensor(self, tensor: SavedTensor) -> tuple[Any, ...]:
        number, kind = len(self.tensors), dtype_entry(tensor.dtype).storage_class
        self.tensors.append(tensor)
        count = math.prod(tensor.shape)
        hooks: OrderedDict[str, Any] = OrderedDict()
        place = 0, tensor.shape, contiguous_strides(tensor.shape), False, hooks
        if kind is not None:
            return _REBUILD_V2, (_Storage(self._torch(kind), number, count), *place)
        return _REBUILD_V3, (_Storage(_UNTYPED, number, tensor.nbytes), *place, self._torch(tensor.dtype))

    def _torch(self, name: str) -> _Global:
        return self._names.setdefault(name, _Global("torch", name))

    def persistent_id(self, value: Any) -> Any:
        """A storage, as torch refers to it."""
        return ("storage", value.kind, str(value.number), "cpu", value.count) if isinstance(value, _Storage) else None

    def save_global(self, value: Any, name: Any = None) -> None:
        """Write a name, without importing what it stands for."""
        if isinstance(value, _Global):
            module, qualified = value.module, value.name
        elif isinstance(value, type) and issubclass(value, Unavailable):
            module, _, qualified = value.class_name.rpartition(".")
        else:
            super().save_global(value, name)
            return
        self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())
        self.memoize(value)


def pickle_state(value: Any) -> tuple[bytes, list[SavedTensor]]:
    """The pickle of a state dict, and its tensors by the number of their storage; raises `TypeError`."""
    stream = io.BytesIO()
    pickler = _StatePickler(stream)
    pickler.dump(value)
    return stream.getvalue(), pickler.tensors


def encode_state(value: Any) -> bytes:
    """What `torch.save(value)` would write, the elements of its tensors given; raises `TypeError` as `pickle_state`."""
    pickled, tensors = pickle_state(value)
    layout = ArchiveLayout(pickled, [tensor.nbytes for tensor in tensors])
    content = bytearray(layout.begin)
    crcs = []
    for number, tensor in enumerate(tensors):
        assert isinstance(tensor.content, bytes), "its elements are not in memory"
        crcs.append(crc32(tensor.content))
        frame = layout.frame(number)
        content += frame.head + tensor.content + frame.tail_with(crcs[-1])
    return bytes(content + layout.end(crcs))


def decode_state(content: bytes, where: str) -> Any:
    """A state dict in memory: tensors are `SavedTensor`s, classes that are not imported have stand-ins.

    Raises `OptionError` for other classes; otherwise as `read_state_file`.
    """

    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    state = read_state_file(read, len(content), where)
    return taken_over(state.value, read, where, state.records)


def taken_over(value: Any, read: Callable[[int, int], bytes], where: str, records: Mapping[str, StateRecord]) -> Any:
    """`value`, a part of a state file, as `encode_state` takes it: with the elements of its tensors. Raises
    `OptionError` for an unknown class, `CorruptCheckpointError` for tensors larger than what is not a parameter.
    """
    left = _MAX_TAKEN_BYTES

    def tensor(given: FileTensor) -> SavedTensor:
        nonlocal left
        if given.strides:
            raise OptionError(f"{where}: a tensor in steps of {list(given.strides)} elements; save a contiguous copy")
        record = records[given.record]
        left -= record.nbytes
        if left < 0:
            raise CorruptCheckpointError(f"{where}: more than {_MAX_TAKEN_BYTES} bytes of tensors outside the model")
        content = read(record.start, record.nbytes)
        if record.crc32 is not None and crc32(content) != record.crc32:
            raise ChecksumError(
                f"{where}: record data/{given.record} has CRC-32 {crc32(content):#010x}, expected "
                f"{record.crc32:#010x}; take a sound copy"
            )
        return SavedTensor(given.dtype, given.shape, bytes(content[given.first_byte : given.first_byte + given.nbytes]))

    def take(part: Any) -> Any:
        if type(part) is FileTensor:
            return tensor(part)
        if isinstance(part, Opaque) or (isinstance(part, type) and issubclass(part, Opaque)):
            raise OptionError(f"{where}: holds a {part.name:.200}, a class that is not known here")
        if isinstance(part, dict):
            return type(part)((take(key) if type(key) is tuple else key, take(item)) for key, item in part.items())
        if type(part) in (list, tuple):
            return type(part)(take(item) for item in part)
        if isinstance(part, Namespace):
            return Namespace(**{name: take(item) for name, item in vars(part).items()})
        if isinstance(part, Unavailable):
            part.arguments, part.state = take(part.arguments), take(part.state)
        return part

    return take(value)
