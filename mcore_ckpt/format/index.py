"""What a checkpoint holds, and where: the types that the reader, the writer, the command and verify share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mcore_ckpt.format.seal import MetadataSeal

__all__ = [
    "CheckpointIndex",
    "ObjectEntry",
    "ObjectShard",
    "StoredChunk",
    "StoredItem",
    "TensorEntry",
    "object_key",
    "parse_object_key",
]


# These three are named tuples, not dataclasses: there is one of each for every tensor or chunk, and a tuple is made in
# a third of the time of a frozen dataclass.
class StoredItem(NamedTuple):
    """Bytes `[offset, offset + length)` of `file` (relative to the checkpoint), as one `torch.save` container.

    `transforms` names the stream transforms (DCP's `_extensions`) to undo before the container can be read. `crc32` is
    what a sealed `.metadata` states: of a tensor's payload; of the whole item for objects and what is transformed.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    crc32: int | None = None


class StoredChunk(NamedTuple):
    """One stored box of a global tensor: `offsets` and `sizes` in elements, one for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


class TensorEntry(NamedTuple):
    """A global tensor: dtype without `torch.` (`"bfloat16"`), global shape in elements, stored chunks."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A stored object (BYTE_IO): `fqn` is the full key, for Megatron `<key>/shard_<offset>_<shape>`."""

    fqn: str
    item: StoredItem


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """What a checkpoint holds.

    Attributes:
        path: the checkpoint's directory, or what the index was parsed from; for messages.
        tensors: global tensors by fqn, in the order of the file.
        objects: stored objects by full key.
        planner_data: what the saving planner left for the loading one (DCP: flattened fqn -> path in the state dict).
        mcore_data: for each fqn, what Megatron-Core 0.12 to 0.15 noted about flattened tensors
            (`nd_reformulated_orig_global_shape`); empty otherwise.
        storage_meta: DCP's `StorageMeta` as a dict, None when there is none.
        version: DCP's version of the format, None when there is none.
        has_local_plans: `.metadata` holds `all_local_plans` (which is not read).
        problems: with `strict=False`, what the index names but cannot be there; such chunks and objects are left out.
        seal: what `.metadata` says of its files and their bytes, if this package wrote it.
        blocks: by file and offset of the item, the running sums that the seal keeps of a payload.
    """

    path: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    planner_data: Any = None
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage_meta: dict[str, Any] | None = None
    version: str | None = None
    has_local_plans: bool = False
    problems: tuple[str, ...] = ()
    seal: MetadataSeal | None = None
    blocks: dict[tuple[str, int], array[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """One shard of a Megatron `ShardedObject`: its key, and its place in the grid of shards (in shards)."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def object_key(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The full key under which Megatron stores a `ShardedObject`'s shard."""
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


_MAX_AXES = 64


def parse_object_key(fqn: str) -> ObjectShard | None:
    """What `object_key` was made of, or None for a key of another form (plain DCP stores objects under their fqn).

    Old Megatron versions left the last size of the grid out; it is -1 then, as in Megatron.
    """
    key, slash, shard = fqn.rpartition("/")
    parts = shard.split("_")
    if not slash or len(parts) != 3 or parts[0] != "shard":
        return None
    offset_text, shape_text = parts[1].split("."), parts[2].split(".")
    if not all(text.isascii() and text.isdigit() and len(text) < 20 for text in (*offset_text, *shape_text)):
        return None
    offset, shape = tuple(map(int, offset_text)), tuple(map(int, shape_text))
    if len(offset) > _MAX_AXES:  # no grid of shards
        return None
    if len(shape) + 1 == len(offset):
        shape = (*shape, -1)
    return ObjectShard(key, offset, shape) if len(shape) == len(offset) else None
