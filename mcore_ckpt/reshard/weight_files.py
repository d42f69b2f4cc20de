"""Files of other formats: safetensors, and state dicts as `torch.save` writes them; without torch.

Safetensors files are sharded by size, as the Hugging Face libraries name them: `model-00001-of-00004.safetensors`, or
one `model.safetensors`. The format has no checksums, and a header is written before its data. So the index of the
files, `model.safetensors.index.json`, has the CRC-32 of each tensor and header, which those libraries pass over.

    8 bytes    length of the header, little-endian
    header     {"name": {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}, "__metadata__": {...}}
    data       offsets count from here

The pickle of a torch file describes tensors by name, and stands in for classes. It is made first, so sizes and offsets
of all records are known before a byte is written; the elements are written where they belong in the archive. The CRC-32
of each tensor follows its elements, and again in the directory at the end of the file.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from argparse import Namespace
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.boxes import strides_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item import ArchiveLayout, element_bytes
from mcore_ckpt.format.metadata_read import HF_INDEX
from mcore_ckpt.format.safe_pickle import MEGATRON_CLASSES
from mcore_ckpt.format.state_file import StateRecord, read_state_file
from mcore_ckpt.format.tensor_pickle import DTYPES, FileTensor, dtype_entry
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.image.layout import FileImage, WrittenFile
from mcore_ckpt.reshard.plan import Part, TargetFile, TargetPlan, all_in_one
from mcore_ckpt.tools.regrid import as_numbers

METADATA_KEY: Final = "__metadata__"
"""Name that the header keeps for itself."""
SUMS_KEY: Final = "crc32"
"""Of the index's metadata: eight hexadecimal digits for each tensor by name, and for each header by file."""

# Readers that map the file want elements aligned; the header is padded with spaces, as the format provides.
_ALIGNMENT = 64


class Exported(NamedTuple):
    """A tensor on its way out; `joined` is its shape there, where that is another for the same elements in order."""

    name: str
    entry: TensorEntry
    joined: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if self.joined is None else self.joined

    @property
    def nbytes(self) -> int:
        return math.prod(self.entry.shape) * element_bytes(self.entry.dtype)


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The file up to the data, and where each tensor (name, dtype, shape) starts; `OptionError`: it cannot be so."""
    header: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    starts: dict[str, int] = {}
    position = 0
    for name, dtype, shape in tensors:
        if name == METADATA_KEY:
            raise OptionError(f"{name}: safetensors keeps this name for itself; give the tensor another one (--rename)")
        if not name.isascii() and name.encode("utf-8", "replace").decode() != name:
            raise OptionError(
                f"{name!a}: holds a surrogate, which safetensors cannot store in a name; give the tensor another one "
                "(--rename)"
            )
        entry = DTYPES.get(dtype)
        if entry is None or entry.safetensors is None:
            raise OptionError(
                f"{name}: safetensors has no {dtype}; leave it out (--only, --rename), convert it (--dtype), or export "
                "to torch"
            )
        stop = position + math.prod(shape) * entry.element_bytes
        header[name] = {"dtype": entry.safetensors, "shape": list(shape), "data_offsets": [position, stop]}
        starts[name] = position
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + start for name, start in starts.items()}


def shard_names(tensors: Sequence[Exported], most_bytes: int, stem: str, ending: str) -> dict[str, list[Exported]]:
    """Tensors in their order by file, none of which has more than so many bytes, unless one tensor is larger."""
    shards: list[list[Exported]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    count = len(shards)
    names = (
        [f"{stem}.{ending}"] if count == 1 else [f"{stem}-{n:05d}-of-{count:05d}.{ending}" for n in range(1, count + 1)]
    )
    return dict(zip(names, shards, strict=True))


def weight_map(shards: Mapping[str, Sequence[Exported]], sums: Mapping[str, Any]) -> bytes:
    """The index file of shards: the file of each tensor, and further `sums` as metadata."""
    weights = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    document = {"metadata": {"total_size": total, **sums}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def plan_safetensors(tensors: Sequence[Exported], most_bytes: int) -> TargetPlan:
    """Where each tensor goes; no file has more than `most_bytes`, unless one tensor is larger."""
    shards = shard_names(tensors, most_bytes, "model", "safetensors")
    parts, headers = [], {}
    for file, shard in shards.items():
        described = [(tensor.name, tensor.entry.dtype, tensor.shape) for tensor in shard]
        header, starts = safetensors_header(described, {"format": "pt"})
        headers[file] = f"{crc32(header):08x}"
        lengths = array("q", [tensor.nbytes for tensor in shard])
        image = FileImage(len(header) + sum(lengths), array("q", starts.values()), lengths, array("q"))
        moves = [move for tensor in shard for move in all_in_one(tensor.entry, tensor.name, file)]
        parts.append(Part([TargetFile(file, image, [header, *[b""] * len(shard)])], moves))

    def index_of(written: Mapping[str, WrittenFile]) -> bytes:
        crcs = chain.from_iterable(written[file].crcs for file in shards)
        named = zip(chain.from_iterable(shards.values()), crcs, strict=True)
        sums = {"headers": headers, "tensors": {tensor.name: f"{crc:08x}" for tensor, crc in named}}
        return weight_map(shards, {SUMS_KEY: sums})

    return TargetPlan(parts=tuple(parts), tensors=len(tensors), chunks=len(tensors), index_file=(HF_INDEX, index_of))


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
        """How to pickle a value that stands for something else."""
        if isinstance(value, SavedTensor):
            return self._tensor(value)
        if isinstance(value, _Global):
            return value.name
        if isinstance(value, Opaque):
            made = type(value), value.arguments
            return made if value.state is None else (*made, value.state)
        return NotImplemented

    def _tensor(self, tensor: SavedTensor) -> tuple[Any, ...]:
        number, kind = len(self.tensors), dtype_entry(tensor.dtype).storage_class
        self.tensors.append(tensor)
        count = math.prod(tensor.shape)
        hooks: OrderedDict[str, Any] = OrderedDict()
        place = 0, tensor.shape, strides_of(tensor.shape), False, hooks
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
        elif isinstance(value, type) and issubclass(value, Opaque):
            module, _, qualified = value.name.rpartition(".")
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
    """The bytes that `torch.save(value)` would write, with the elements of its tensors. Raises `TypeError`."""
    file, fed = _lay_out_state("", value)
    assert not fed, "elements that are not in memory"
    return file.runs[0]


def decode_state(content: bytes, where: str) -> Any:
    """A state dict in memory: tensors are `SavedTensor`s, known classes have stand-ins; others raise `OptionError`."""

    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    state = read_state_file(read, len(content), where)
    return taken_over(state.value, read, where, state.records)


def taken_over(value: Any, read: Callable[[int, int], bytes], where: str, records: Mapping[str, StateRecord]) -> Any:
    """A part of a state file as `encode_state` takes it. `OptionError`: an unknown class; `LoadError`: too large."""
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
        is_stand_in = isinstance(part, Opaque) or (isinstance(part, type) and issubclass(part, Opaque))
        if is_stand_in and part.name not in MEGATRON_CLASSES:
            raise OptionError(f"{where}: holds a {part.name:.200}, a class that is not known here")
        if isinstance(part, dict):
            return type(part)((take(key) if type(key) is tuple else key, take(item)) for key, item in part.items())
        if type(part) in (list, tuple):
            return type(part)(take(item) for item in part)
        if isinstance(part, Namespace):
            return Namespace(**{name: take(item) for name, item in vars(part).items()})
        if isinstance(part, Opaque):
            part.arguments, part.state = take(part.arguments), take(part.state)
        return part

    return take(value)


def _lay_out_state(name: str, state: Any) -> tuple[TargetFile, list[SavedTensor]]:
    """The file of a state dict, and its tensors whose elements are not in memory, in the order of their payloads."""
    pickled, tensors = pickle_state(state)
    layout = ArchiveLayout(pickled, [tensor.nbytes for tensor in tensors])
    runs, run, fed = [], bytearray(layout.begin), []
    columns = array("q"), array("q"), array("q")  # of the image: offsets and lengths of payloads, places of CRC-32s
    crcs = []
    places = zip(layout.offsets, layout.frames, layout.crc_positions(), strict=True)
    for tensor, (offset, frame, positions) in zip(tensors, places, strict=True):
        run += frame.head
        crcs.append(crc32(tensor.content) if isinstance(tensor.content, bytes) else 0)
        if isinstance(tensor.content, bytes):
            run += tensor.content
        else:
            columns[0].append(offset + len(frame.head))
            columns[1].append(tensor.nbytes)
            columns[2].extend(positions)
            fed.append(tensor)
            runs.append(bytes(run))
            run = bytearray()
        run += frame.tail_with(crcs[-1])
    runs.append(bytes(run + layout.end(crcs)))
    return TargetFile(name, FileImage(layout.size_bytes, *columns), runs), fed


def plan_torch_files(tensors: Sequence[Exported], most_bytes: int) -> TargetPlan:
    """As `plan_safetensors`, in files `pytorch_model...bin`, each with a dict of tensors by name."""
    shards = shard_names(tensors, most_bytes, "pytorch_model", "bin")
    parts = []
    for name, shard in shards.items():
        state = {tensor.name: SavedTensor(tensor.entry.dtype, tensor.shape, tensor.name) for tensor in shard}
        file, _ = _lay_out_state(name, state)
        parts.append(Part([file], [move for tensor in shard for move in all_in_one(tensor.entry, tensor.name, name)]))
    index_file = ("pytorch_model.bin.index.json", lambda _: weight_map(shards, {})) if len(shards) > 1 else None
    return TargetPlan(parts=tuple(parts), tensors=len(tensors), chunks=len(tensors), index_file=index_file)
