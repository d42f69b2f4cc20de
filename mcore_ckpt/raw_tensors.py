"""Tensors of other formats as the source of a reshard: each one chunk, plain bytes in a file or in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CorruptCheckpointError
from mcore_ckpt.metadata import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.safetensors_files import RawTensor
from mcore_ckpt.stored_payloads import StoredPayload, StoredPayloads, chunk_name

__all__ = ["RawPayloads", "TorchPayloads", "raw_index", "torch_index"]


def raw_index(directory: Path, tensors: Mapping[str, RawTensor]) -> CheckpointIndex:
    """An index of tensors that lie plainly in files."""
    entries = {}
    for key, raw in tensors.items():
        item = StoredItem(raw.file, raw.offset, raw.nbytes)
        entries[key] = TensorEntry(key, raw.dtype, raw.shape, (StoredChunk((0,) * len(raw.shape), raw.shape, item),))
    return CheckpointIndex(str(directory), entries, {})


class RawPayloads(StoredPayloads):
    """Payloads of a `raw_index`: an item is its payload."""

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        item, where = chunk.item, chunk_name(entry, chunk)
        with self.files.reader(item.file) as reader:
            reader.check_range(item.offset, item.length)
        return StoredPayload(where, item.file, item.offset, item.length, None)


def torch_index(directory: Path, file: str, tensors: Mapping[str, Any]) -> CheckpointIndex:
    """An index of torch tensors that `torch.load(mmap=True)` gave for one file."""
    entries = {}
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        item = StoredItem(file, 0, tensor.numel() * tensor.element_size())
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[key] = TensorEntry(key, dtype, shape, (StoredChunk((0,) * len(shape), shape, item),))
    return CheckpointIndex(str(directory), entries, {})


class TorchPayloads(StoredPayloads):
    """Payloads of a `torch_index`; the bytes come from the mapped file as they are touched."""

    def __init__(self, index: CheckpointIndex, tensors: Mapping[str, Any]) -> None:
        super().__init__(index)
        self._tensors = tensors

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        import torch

        tensor = self._tensors[entry.fqn]
        if not isinstance(tensor, torch.Tensor):
            raise CorruptCheckpointError(f"{entry.fqn}: expected a tensor")
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return StoredPayload(chunk_name(entry, chunk), chunk.item.file, 0, len(content), None, content)
