"""A checkpoint as something to hold in one's hands: tensors by key, any slice of them, objects, files.

    with mcore_ckpt.open_checkpoint("runs/a/iter_0001000") as ckpt:
        ckpt["decoder.layers.0.mlp.linear_fc1.weight"][0:4, :]       # a torch tensor; only these rows are read
        ckpt["embedding.word_embeddings.weight"].numpy()             # a numpy array
        ckpt.objects["rng_state/shard_0_1"]                          # unpickled under the allow-list
        [file.file for file in ckpt.files]

Nothing is read before it is asked for, whatever sharding it is stored under. torch is imported when the first torch
tensor or object is asked for.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import CorruptCheckpointError, KindMismatchError, LoadError, MissingKeyError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.format.metadata_read import METADATA_FILE, read_index_and_version
from mcore_ckpt.load.records import check_apart, missing_key, of_one_save
from mcore_ckpt.storage.base import FileVersion
from mcore_ckpt.tools.inspection import CheckpointSummary, FileRow, checkpoint_directory, file_rows, summarize
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.regrid import as_numbers, carrier

if TYPE_CHECKING:
    import torch

    from mcore_ckpt.dcp.reader import FileSystemReader


def open_checkpoint(path: str | os.PathLike[str], options: LoadOptions | None = None) -> Checkpoint:
    """Open the checkpoint in directory `path`, or the one that the tracker file in `path` names.

    Args:
        path: the directory.
        options: how to read; by default from the environment.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, UnsafePickleError: its index cannot be right.
    """
    options = LoadOptions.from_environment() if options is None else options
    directory = checkpoint_directory(path)
    index, version = read_index_and_version(directory)
    check_apart(index)
    return Checkpoint(index, options, version)


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint; a mapping from keys to tensors (lazy) and objects, and a context manager.

    Attributes:
        path: its directory.
        index: what it holds, and where.
        tensors: the tensors alone, by key.
        objects: the objects alone, by full key; each is read and unpickled when it is looked up.
    """

    def __init__(self, index: CheckpointIndex, options: LoadOptions, version: FileVersion | None) -> None:
        self._version = version
        self.path = checkpoint_path(index.path)
        self.index = index
        self.tensors: Mapping[str, LazyTensor] = _Stored(
            index.tensors,
            index.objects,
            lambda key: LazyTensor(self, index.tensors[key]),
            "an object is stored under this key, not a tensor; see `objects`",
            self,
        )
        self.objects: Mapping[str, Any] = _Stored(
            index.objects,
            index.tensors,
            self._object,
            "a tensor is stored under this key, not an object; see `tensors`",
            self,
        )
        self.payloads = StoredPayloads(index, page_cache=options.page_cache)
        self._options = options
        self._reader: FileSystemReader | None = None
        self._in_use = ExitStack()
        self._in_use.enter_context(self.payloads.storage.in_use(METADATA_FILE))

    def __getitem__(self, key: str) -> Any:
        """A tensor (not read yet) or an object.

        Raises:
            MissingKeyError: there is nothing under that key; the message names similar ones.
        """
        return self.tensors[key] if key in self.index.tensors else self.objects[key]

    def __iter__(self) -> Iterator[str]:
        yield from self.index.tensors
        yield from self.index.objects

    def __len__(self) -> int:
        return len(self.index.tensors) + len(self.index.objects)

    def __repr__(self) -> str:
        tensors, objects = counted(len(self.index.tensors), "tensor"), counted(len(self.index.objects), "object")
        return f"<Checkpoint {self.path}: {tensors}, {objects}>"

    @property
    def files(self) -> list[FileRow]:
        """The data files: sizes, items, and the two halves of each."""
        return file_rows(self.index)

    @property
    def summary(self) -> CheckpointSummary:
        """What `mcore-ckpt inspect` shows."""
        return summarize(self.index)

    def common_state(self) -> Any:
        """The common state (Megatron's arguments, iteration, optimizer settings), unpickled under the allow-list.

        Raises:
            CheckpointNotFoundError: there is none (plain DCP).
            UnsafePickleError: it contains a class outside the allow-list.
        """
        from mcore_ckpt.megatron.serialization import load_common

        with of_one_save(self.index, self._version, shows=False):
            return load_common(self.path, self._options)

    def reader(self) -> FileSystemReader:
        """A reader of this checkpoint, for many boxes at once or as DCP's storage reader."""
        if self._reader is None:
            from mcore_ckpt.dcp.reader import FileSystemReader

            self._reader = FileSystemReader(self.path, options=self._options)
            self._reader.read_by(self.index, self._version)
        return self._reader

    def _object(self, key: str) -> Any:
        with self.of_one_save():
            return self.reader().read_object(key)

    def of_one_save(self) -> AbstractContextManager[None]:
        """Around a read: raises `LoadError` if a save has replaced the checkpoint since it was opened."""
        return of_one_save(self.index, self._version)

    def missing(self, key: str) -> MissingKeyError:
        """The error for a key that is not there."""
        return missing_key(key, f"the checkpoint {self.path}", self, self.index.removed)

    def close(self) -> None:
        """Close its files; what was read stays valid."""
        self.payloads.close()
        self._in_use.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Stored(Mapping[str, Any]):
    """The tensors or the objects of a checkpoint: `get` gives one by its key; `refusal` is said of the other kind."""

    def __init__(
        self,
        keys: Collection[str],
        others: Collection[str],
        get: Callable[[str], Any],
        refusal: str,
        checkpoint: Checkpoint,
    ) -> None:
        self._keys, self._others, self._get, self._refusal, self._checkpoint = keys, others, get, refusal, checkpoint

    def __getitem__(self, key: str) -> Any:
        if key in self._keys:
            return self._get(key)
        raise KindMismatchError(f"{key}: {self._refusal}") if key in self._others else self._checkpoint.missing(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class LazyTensor:
    """A stored tensor; slicing it reads what the slice needs and nothing else.

    Attributes:
        fqn: its key.
        shape: global shape, in elements.
        dtype: torch's name without `torch.` (`"bfloat16"`).
        chunks: how it is stored.
    """

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self.fqn = entry.fqn
        self.shape: tuple[int, ...] = entry.shape
        self.dtype = entry.dtype
        self.chunks: tuple[StoredChunk, ...] = entry.chunks

    def __repr__(self) -> str:
        return f"<LazyTensor {self.fqn}: {self.dtype} {list(self.shape)} in {counted(len(self.chunks), 'chunk')}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * element_bytes(self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A slice as a torch tensor: ints, slices (any step) and `...`, as numpy has them."""
        import torch

        from mcore_ckpt.core.ranks import without_modes

        content, box, rest = self._read(index)
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise LoadError(f"{self.fqn}: stored as {self.dtype}, which torch {torch.__version__} does not have")
        with without_modes():
            flat = torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
            return flat.view(dtype).reshape(box.sizes)[rest] if box.sizes else flat.view(dtype).reshape(())

    def torch(self) -> torch.Tensor:
        """The whole tensor."""
        return self[...]

    def numpy(self, index: Any = ...) -> np.ndarray[Any, Any]:
        """A slice (by default everything) as a numpy array; bfloat16 and 8-bit floats as float32, exactly.

        Raises:
            LoadError: numpy cannot hold the dtype (packed 4-bit floats, raw bits).
        """
        content, box, rest = self._read(index)
        numbers = as_numbers(content, self.dtype)
        if numbers is None:
            raise LoadError(f"{self.fqn}: numpy has no numbers like {self.dtype}; take raw() or a torch tensor")
        return np.asarray(numbers.reshape(box.sizes)[rest])

    def raw(self, index: Any = ...) -> np.ndarray[Any, Any]:
        """A slice as unsigned integers of the elements' width: their bits."""
        content, box, rest = self._read(index)
        return np.asarray(np.frombuffer(content, carrier(element_bytes(self.dtype))).reshape(box.sizes)[rest])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def _read(self, index: Any) -> tuple[memoryview, Box, tuple[Any, ...]]:
        """The bytes of the box around a slice, and what is left to do on it in memory (steps, dropped axes)."""
        box, rest = _box_of(index, self.shape, self.fqn)
        nbytes = math.prod(box.sizes) * element_bytes(self.dtype)
        if nbytes > sys.maxsize:  # of a shape that cannot have been stored
            raise CorruptCheckpointError(f"{self.fqn}: {nbytes} bytes are more than a machine can address")
        with self._checkpoint.of_one_save():
            content = read_box(self._checkpoint.payloads, self._entry, box.offsets, box.sizes)
        return content, box, rest


def _box_of(index: Any, shape: tuple[int, ...], fqn: str) -> tuple[Box, tuple[Any, ...]]:
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [n for n, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{fqn}: one `...` at most")
    if dots:
        at = dots[0]
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"{fqn}: {len(parts)} indices for a tensor of {len(shape)} axes")
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[slice | int] = []
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, bool) or not isinstance(part, slice | int | np.integer):
            raise IndexError(f"{fqn}: expected ints, slices and `...`, got {type(part).__name__} on axis {axis}")
        if not isinstance(part, slice) and not -size <= part < size:
            raise IndexError(f"{fqn}: index {part} on axis {axis} of size {size}")
        chosen = range(size)[part] if isinstance(part, slice) else range(size)[int(part) :][:1]
        if chosen and chosen.step < 0:
            raise IndexError(f"{fqn}: slices with a negative step are not supported; flip the result")
        offsets.append(chosen[0] if chosen else 0)
        sizes.append(chosen[-1] + 1 - chosen[0] if chosen else 0)
        rest.append(slice(None, None, abs(chosen.step)) if isinstance(part, slice) else 0)
    return Box(tuple(offsets), tuple(sizes)), tuple(rest)
