"""Safetensors files, sharded by size, as the Hugging Face libraries name them.

    8 bytes    length of the header, little-endian
    header     {"name": {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}, "__metadata__": {...}}
    data       offsets count from here

`model-00001-of-00004.safetensors` with `model.safetensors.index.json`, or one `model.safetensors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.dtypes import DTYPES
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.reshard.slots import Blob, TargetPlan, TensorMove, all_in_one, in_shares

METADATA_KEY: Final = "__metadata__"
"""Name that the header keeps for itself."""

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
    """The file up to the data, and where each tensor (name, torch's dtype, shape) starts in the file.

    Raises `OptionError` where the format has no such dtype, or reserves the name or cannot hold it.
    """
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


def weight_map(shards: Mapping[str, Sequence[Exported]]) -> bytes:
    """The index file of several shards: which file has which tensor."""
    weights = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"


def plan_safetensors(tensors: Sequence[Exported], most_bytes: int, workers: int) -> TargetPlan:
    """Where each tensor goes; no file has more than `most_bytes`, unless one tensor is larger."""
    shards = shard_names(tensors, most_bytes, "model", "safetensors")
    moves: list[TensorMove] = []
    blobs, sizes = [], {}
    for file, shard in shards.items():
        described = [(tensor.name, tensor.entry.dtype, tensor.shape) for tensor in shard]
        header, starts = safetensors_header(described, {"format": "pt"})
        blobs.append(Blob(file, 0, header))
        sizes[file] = len(header) + sum(tensor.nbytes for tensor in shard)
        moves += [all_in_one(tensor.entry, tensor.name, file, starts[tensor.name]) for tensor in shard]
    return TargetPlan(
        work=in_shares(moves, workers),
        blobs=tuple(blobs),
        sizes=sizes,
        files_at_once=1,
        summed=False,
        index_file=("model.safetensors.index.json", weight_map(shards)) if len(shards) > 1 else None,
    )
