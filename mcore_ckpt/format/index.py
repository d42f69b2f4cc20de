"""What a checkpoint holds, and where: the types that the reader, the writer, the command and verify share."""

from __future__ import annotations

import marshal
import re
from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, islice, repeat
from typing import Any, Final, NamedTuple

from mcore_ckpt.format.manifest import NO_FINGERPRINT, Manifest


# These three are named tuples, not dataclasses: there is one of each for every tensor or chunk, and a tuple is made in
# a third of the time of a frozen dataclass.
class StoredItem(NamedTuple):
    """Bytes `[offset, offset + length)` of `file` (relative to the checkpoint), as one `torch.save` container.

    `transforms` names the stream transforms (DCP's `_extensions`) to undo before the container can be read. `crc32` is
    what the manifest states: of a tensor's payload; of the whole item for objects and what is transformed.
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


class TensorForm(NamedTuple):
    """All that an index says of a tensor but its key and where its chunks lie; many tensors have it in common."""

    dtype: str  # as in `TensorEntry`
    requires_grad: bool  # as in `TensorEntry`
    shape: tuple[int, ...]  # as in `TensorEntry`
    offsets: tuple[tuple[int, ...], ...]  # of each chunk, in elements
    sizes: tuple[tuple[int, ...], ...]  # of each chunk, in elements


class StoredPlaces(NamedTuple):
    """Where items lie, in columns of one entry for each item."""

    files: Sequence[str]  # names; the only member that has another length
    file_numbers: array[int]  # which of them (unsigned int, 4 bytes)
    offsets: array[int]  # in bytes (signed, 8 bytes)
    lengths: array[int]  # in bytes (signed, 8 bytes)
    crcs: array[int]  # as `StoredItem.crc32` (unsigned int, 4 bytes); empty: there are none

    def item(self, number: int) -> StoredItem:
        """One of them."""
        file = self.files[self.file_numbers[number]]
        crc = self.crcs[number] if self.crcs else None
        return StoredItem(file, self.offsets[number], self.lengths[number], (), crc)


class PackedTensors(Mapping[str, TensorEntry]):
    """Tensors of an index by key, in the order of the file; an entry is made when it is asked for, and kept.

    One of many ranks requests few of the chunks that an index names; of the others, only columns of numbers are made.

    Attributes:
        rows: the number of each key.
        names: the keys, by number.
        forms: of each tensor.
        places: of the chunks of all tensors, one after the other.
        firsts: number of the first chunk of each tensor.
    """

    def __init__(self, keys: Sequence[str], forms: Sequence[TensorForm], places: StoredPlaces) -> None:
        self.rows = dict(zip(keys, range(len(keys)), strict=True))
        self.names = keys
        self.forms = forms
        self.places = places
        self.firsts = list(accumulate([len(form.offsets) for form in forms], initial=0))
        self._made: dict[str, TensorEntry] = {}
        self._entries: dict[str, TensorEntry] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry], *, with_sums: bool = True) -> PackedTensors | None:
        """The same tensors in columns; None if an item of theirs goes through transforms, or has no checksum
        (`with_sums`).
        """
        # By their bytes: very many hostile shapes could have one hash.
        forms: dict[bytes, TensorForm] = {}
        files: dict[str, int] = {}
        places = StoredPlaces([], array("I"), array("q"), array("q"), array("I"))
        own = []
        for _, dtype, shape, chunks, requires_grad in tensors.values():
            form = TensorForm(dtype, requires_grad, shape, tuple([c[0] for c in chunks]), tuple([c[1] for c in chunks]))
            own.append(forms.setdefault(marshal.dumps(tuple(form), 2), form))
            for _, _, (file, offset, length, transforms, crc) in chunks:
                if transforms or (crc is None) == with_sums:
                    return None
                places.file_numbers.append(files.setdefault(file, len(files)))
                places.offsets.append(offset)
                places.lengths.append(length)
                if crc is not None:
                    places.crcs.append(crc)
        return cls(list(tensors), own, places._replace(files=list(files)))

    def __getitem__(self, key: str) -> TensorEntry:
        if self._entries is not None:
            return self._entries[key]
        made = self._made.get(key)
        if made is None:
            row = self.rows[key]
            dtype, requires_grad, shape, offsets, sizes = self.forms[row]
            items = map(self.places.item, range(self.firsts[row], self.firsts[row + 1]))
            chunks = tuple(map(StoredChunk, offsets, sizes, items))
            made = self._made[key] = TensorEntry(key, dtype, shape, chunks, requires_grad)
        return made

    def values(self) -> ValuesView[TensorEntry]:
        """All entries, made together, which takes a third of the time."""
        return self._whole().values()

    def items(self) -> ItemsView[str, TensorEntry]:
        """All keys and entries, made together, which takes a third of the time."""
        return self._whole().items()

    def _whole(self) -> dict[str, TensorEntry]:
        if self._entries is None:
            files, numbers, *columns = self.places
            names = map(files.__getitem__, numbers)
            offsets, lengths, crcs = columns
            items = map(_new_item, zip(names, offsets, lengths, repeat(()), crcs or repeat(None), strict=False))
            starts = chain.from_iterable([form.offsets for form in self.forms])
            sizes = chain.from_iterable([form.sizes for form in self.forms])
            chunks = map(_new_chunk, zip(starts, sizes, items, strict=True))
            entries = [
                _new_entry((name, form.dtype, form.shape, tuple(islice(chunks, len(form.offsets))), form.requires_grad))
                for name, form in zip(self.names, self.forms, strict=True)
            ]
            self._entries = dict(zip(self.names, entries, strict=True))
        return self._entries

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._whole()!r})"


# Made of rows without a call of a function of Python's for each.
_new_item = partial(tuple.__new__, StoredItem)
_new_chunk = partial(tuple.__new__, StoredChunk)
_new_entry = partial(tuple.__new__, TensorEntry)


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A stored object (BYTE_IO): `fqn` is the full key, for Megatron `<key>/shard_<offset>_<shape>`."""

    fqn: str
    item: StoredItem


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """What a checkpoint holds."""

    path: str  # the checkpoint's directory, or what the index was parsed from; for messages
    tensors: Mapping[str, TensorEntry]  # global tensors by fqn, in the order of the file
    objects: dict[str, ObjectEntry]  # stored objects by full key
    # What the saving planner left for the loading one (DCP: flattened fqn -> path in the state dict).
    planner_data: Any = None
    # For each fqn, what Megatron-Core 0.12 to 0.15 noted about flattened tensors (`nd_reformulated_orig_global_shape`);
    # empty otherwise.
    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage_meta: dict[str, Any] | None = None  # DCP's `StorageMeta` as a dict, None when there is none
    version: str | None = None  # DCP's version of the format, None when there is none
    has_local_plans: bool = False  # `.metadata` holds `all_local_plans` (which is not read)
    # With `strict=False`, what the index names but cannot be there; such chunks and objects are left out.
    problems: tuple[str, ...] = ()
    manifest: Manifest | None = None  # what `.metadata` says of its files and their bytes, if this package wrote it
    # By file and offset of the item, the cumulative CRCs that the manifest keeps of a payload.
    blocks: dict[tuple[str, int], array[int]] = field(default_factory=dict)
    # The stored fingerprint of tensors by key, of this very index: `replace` gives another one none.
    fingerprints: Mapping[str, int] = field(init=False, default_factory=dict, compare=False, repr=False)

    def with_fingerprints(self, fingerprints: Mapping[str, int]) -> CheckpointIndex:
        """The same, and the fingerprints of its tensors, as far as they are known; of others they do no harm."""
        object.__setattr__(self, "fingerprints", fingerprints)
        return self

    def fingerprint_column(self) -> array[int] | None:
        """The stored fingerprint of each tensor, as a manifest has them; None if none is known."""
        known = self.fingerprints
        return array("q", [known.get(key, NO_FINGERPRINT) for key in self.tensors]) if known else None

    def without_shadow_copies(self) -> CheckpointIndex:
        """The same index without shadow copies (`ShadowKey`): what the model and the optimizer are."""
        if not any(map(_is_shadow_key, self.tensors)):
            return self
        return replace(
            self,
            tensors={key: entry for key, entry in self.tensors.items() if not _is_shadow_key(key)},
            mcore_data={key: note for key, note in self.mcore_data.items() if not _is_shadow_key(key)},
        ).with_fingerprints(self.fingerprints)

    def shadow_copies(self) -> dict[str, ShadowKey]:
        """The keys of shadow copies, and what each is a copy of."""
        return {key: copied for key in self.tensors if (copied := parse_shadow_key(key)) is not None}


class StoredFingerprints(Mapping[str, int]):
    """Fingerprints by key, as a manifest lists them for tensors of these keys; looked up when one is asked for."""

    def __init__(self, keys: Iterable[str], column: Sequence[int]) -> None:
        self._keys, self._column = keys, column
        self._found: dict[str, int] | None = None

    def _known(self) -> dict[str, int]:
        if self._found is None:
            pairs = zip(self._keys, self._column, strict=True)
            self._found = {key: value for key, value in pairs if value != NO_FINGERPRINT}
        return self._found

    def __getitem__(self, key: str) -> int:
        return self._known()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())


class ShadowKey(NamedTuple):
    """What the key of a shadow copy says: the rank that wrote the copy, and the tensor that it copies.

    Megatron-LM's pull requests 4628 and 5556 let a rank store its own replica of a tensor, or the part of it that the
    rank needs, under `__shadow_<rank>__<fqn>` in its own file. A later load on that rank reads no file of others. The
    tensor itself is stored completely under its own key.
    """

    rank: int
    fqn: str


_SHADOW_PREFIX = "__shadow_"
_SHADOW_KEY = re.compile(re.escape(_SHADOW_PREFIX) + r"(\d{1,9})__(.+)", re.ASCII | re.DOTALL)


def shadow_key(rank: int, fqn: str) -> str:
    """The key under which a rank stores its copy of a tensor."""
    return f"{_SHADOW_PREFIX}{rank}__{fqn}"


def parse_shadow_key(key: str) -> ShadowKey | None:
    """What `shadow_key` was made of; None for all other keys."""
    if not key.startswith(_SHADOW_PREFIX):
        return None
    found = _SHADOW_KEY.fullmatch(key)
    return None if found is None else ShadowKey(int(found[1]), found[2])


def _is_shadow_key(key: str) -> bool:
    return parse_shadow_key(key) is not None


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """One shard of a Megatron `ShardedObject`: its key, and its place in the grid of shards (in shards)."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def object_key(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The full key under which Megatron stores a `ShardedObject`'s shard."""
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


COMMON_STATE_KEY: Final = object_key("common_state", (0,), (1,))
"""The object that holds the common state from megatron-core 0.19 on. To 0.18 a file does."""


_MAX_AXES = 64


def is_flat_bucket(fqn: str) -> bool:
    """Whether a tensor is a flat bucket of the distributed optimizer (`dp_reshardable`): many parameters in a row."""
    return ".gbuf_idx_" in fqn and ".bucket_idx_" in fqn


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


def of_different_offsets(chunks: Sequence[StoredChunk]) -> list[int]:
    """Positions of the chunks of one tensor that stay, if not all do: one for each offset, as readers look them up.

    Only an empty chunk can lie where another one begins; it holds nothing that could be missed.
    """
    kept: dict[tuple[int, ...], int] = {}
    for position, chunk in enumerate(chunks):
        if chunk.offsets not in kept or all(chunk.sizes):
            kept[chunk.offsets] = position
    return [] if len(kept) == len(chunks) else list(kept.values())
