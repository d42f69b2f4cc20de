"""Files of `torch.save` as sources: tensors by key, read from where their elements lie, without torch."""

from __future__ import annotations

from typing import Any

from mcore_ckpt.core.errors import CorruptCheckpointError, UnsafePickleError
from mcore_ckpt.format.safe_pickle import Opaque
from mcore_ckpt.format.state_file import StateFile, read_state_file
from mcore_ckpt.format.tensor_pickle import FileTensor
from mcore_ckpt.reshard.view import FileRange, Record
from mcore_ckpt.storage.base import Storage

_MAX_DEPTH = 100
# A tensor may be expanded (a row that stands for many): so far beyond what lies in the file.
_MAX_EXPANDED_BYTES = 1024**3


def read_state(storage: Storage, file: str) -> StateFile:
    """A state file; raises as `read_state_file`."""
    with storage.open_reader(file) as reader:
        return read_state_file(reader.read, reader.size_bytes, str(storage.path(file)))


def file_range(file: str, tensor: FileTensor, state: StateFile, *, strided: bool = False) -> FileRange:
    """Where the elements of one of its tensors lie; raises `CorruptCheckpointError` for unexpected strides."""
    if tensor.strides and not strided:
        raise CorruptCheckpointError(
            f"{file}: a tensor of {list(tensor.shape)} in steps of {list(tensor.strides)} elements; expected elements "
            "that follow one another, as Megatron saves them"
        )
    record = state.records[tensor.record]
    whole = Record(f"record data/{tensor.record}", record.start, record.nbytes, record.crc32)
    at = record.start + tensor.first_byte
    return FileRange(file, at, tensor.nbytes, tensor.dtype, tensor.shape, whole, tensor.strides)


def read_torch_file(storage: Storage, file: str) -> tuple[dict[str, FileRange], list[str]]:
    """The tensors of a torch file by key (nested dicts joined by dots), and the keys of what is none. Raises
    `UnsafePickleError` where it holds more than tensors and plain values.
    """
    path, size_bytes = storage.path(file), storage.size(file)
    state = read_state(storage, file)
    tensors: dict[str, FileRange] = {}
    others: list[str] = []
    # Nested dicts of a hostile file may contain one another: as many values as a file has bytes are enough.
    budget = max(100_000, size_bytes)

    def walk(value: Any, prefix: str, depth: int) -> None:
        nonlocal budget
        budget -= 1 + len(prefix) // 64
        if budget < 0 or depth > _MAX_DEPTH:
            raise CorruptCheckpointError(f"{path}: {prefix[:80]}: dicts are nested in one another without an end")
        if isinstance(value, Opaque) or (isinstance(value, type) and issubclass(value, Opaque)):
            raise UnsafePickleError(
                f"{path}: {prefix}: holds more than tensors and plain values: {value.name:.200}; load the file once "
                "with what has saved it, and save its tensors alone"
            )
        if type(value) is FileTensor:
            if prefix in tensors:
                raise CorruptCheckpointError(
                    f"{path}: two of its tensors would both be called {prefix}: of the keys of nested dicts, joined by "
                    "dots, each has to be another; one would be lost"
                )
            if value.nbytes > size_bytes + _MAX_EXPANDED_BYTES:
                raise CorruptCheckpointError(
                    f"{path}: {prefix}: {value.nbytes} bytes of elements, which are expanded from fewer; store a copy"
                )
            tensors[prefix] = file_range(file, value, state, strided=True)
        elif isinstance(value, dict):
            for key, part in value.items():
                if not isinstance(key, (str, int, float, bool, type(None))):
                    raise CorruptCheckpointError(f"{path}: {prefix}: a key of type {type(key).__name__}; expected text")
                walk(part, f"{prefix}.{key}" if prefix else str(key), depth + 1)
        elif hasattr(value, "element_size"):
            raise CorruptCheckpointError(
                f"{path}: {prefix}: expected a dense tensor of a plain dtype; convert it first"
            )
        else:
            others.append(prefix)

    walk(state.value, "", 0)
    return tensors, others
