"""Is what a load has put into memory what the checkpoint holds, bit for bit? (`LoadOptions.prove`)

Checksums prove what was read. This proves where it went, under another layout and through Megatron's exchange between
ranks, too. Each rank sums up what it holds after the load. The rank that has a tensor's first element adds the
fingerprint that was stored with it, or where there is none, what its chunks come to. Replicas with one `replica_id` are
the tensor again, compared as one of its own, if its fingerprint is stored. One reduction says whether all is equal:
numbers of a fixed size, and 8 bytes for each slice, but for 65,536 at most. Only if it is not, or if the slices of a
tensor do not make it up once (Megatron allows one `replica_id` for all ranks but the first), lists of what ranks hold
are exchanged.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from mcore_ckpt.core.boxes import Box, covers, flat_boxes
from mcore_ckpt.core.console import counted, logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.fingerprints import StateWords, state_words
from mcore_ckpt.core.options import LoadOptions, checkpoint_path
from mcore_ckpt.core.ranks import RankGroup, coordination_group, without_modes
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry, parse_shadow_key
from mcore_ckpt.format.metadata_read import METADATA_FILE
from mcore_ckpt.load.checks import global_shape, part_of_chunk
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest, stored_dtype
from mcore_ckpt.state.shards import is_factory, is_main_replica, is_sharded_tensor, part_of_shard, shards_of
from mcore_ckpt.state.torch_classes import dtype_name
from mcore_ckpt.storage.resolve import storage_at

_logger = logger_of("mcore_ckpt")

_SAMPLE = 16  # one tensor in so many
_SHOWN = 10
_MOST_SLICES = 65_536  # 512 KB
_WHAT = "prove the state that was loaded"


class _Held(NamedTuple):
    """What one rank holds of a tensor, and, where that begins with its first element, the stored CRC-32; `replica`:
    empty of the main one; `piece`: the slice, and which elements of it.
    """

    key: str
    replica: str
    dtype: str
    shape: tuple[int, ...]
    piece: tuple[Box, tuple[int, int]]
    crc: int
    stored: int | None

    @property
    def elements(self) -> int:
        """How many these are."""
        start, stop = self.piece[1]
        return stop - start

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the tensor by itself."""
        return self.elements == math.prod(self.shape)


class _Sums(NamedTuple):
    """What ranks tell of what they hold."""

    compared: int  # tensors
    left: int  # tensors, and slices of replicas, that cannot be
    state: StateWords
    differs: StateWords  # all that is compared against what is stored: zero if it is equal
    missing: int  # elements against those of the tensors, times a hash, modulo 2^64: zero if none is missing or double
    slices: bytes  # 8 for each one that is a part of what several ranks hold together, of `_MOST_SLICES` at most
    empty: frozenset[tuple[str, str, tuple[int, ...]]]  # tensors without elements, of which any rank may tell
    absent: frozenset[str]  # keys of tensors that are requested and not in the checkpoint
    is_told_twice: bool = False  # a slice, or a first element, under one `replica_id`

    def merged(self, other: _Sums) -> _Sums:
        """Of both."""
        return _Sums(
            self.compared + other.compared,
            self.left + other.left,
            self.state ^ other.state,
            self.differs ^ other.differs,
            (self.missing + other.missing) % 2**64,
            _smallest(self.slices + other.slices),
            self.empty | other.empty,
            self.absent | other.absent,
        )

    def concluded(self) -> _Sums:
        """Of all ranks."""
        slices = np.frombuffer(self.slices, np.uint64)
        empty = state_words((*one, 0, True) for one in self.empty)
        return self._replace(
            compared=self.compared + len(self.empty),
            state=self.state ^ empty,
            slices=b"",
            is_told_twice=len(np.unique(slices)) < len(slices),
        )

    @property
    def tells_all(self) -> bool:
        """Whether nothing more needs to be known."""
        return self.differs == StateWords() and not self.missing and not self.is_told_twice


class _Outcome(NamedTuple):
    """What is equal: how many tensors, and their fingerprint; and how many tensors and slices could not be compared."""

    compared: int
    state: StateWords
    left: int = 0


def prove_load(
    stock: Callable[..., Any],
    options: LoadOptions,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's `load`, and the proof. Raises `LoadError` on all ranks if a tensor differs."""
    noted = _noted(sharded_state_dict)  # Megatron changes what it is given
    directory = checkpoint_path(checkpoint_dir)
    before = storage_at(directory).version(METADATA_FILE)
    result = stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result
    names = list(inspect.signature(stock).parameters)[2:]  # versions have them in another order
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    group = coordination_group(arguments.get("process_group"))
    held: list[_Held] = []

    @without_modes()
    def sums() -> _Sums:
        reader = FileSystemReader(directory, options=options)
        index = reader.index
        if reader.index_version != before:
            raise LoadError(
                f"{directory}: the checkpoint was replaced while it was loaded, and what was loaded cannot be compared "
                "any more: load again"
            )
        leaves, lost = _with_loaded(noted, loaded, index)
        left = sum(
            1 for one in lost if one.key in index.tensors and _is_told(one) and _is_chosen(options, index, one.key)
        )
        for one in _held(leaves, reader, options):
            if one is None:
                left += 1
            else:
                held.append(one)
        absent = frozenset(one.key for one in [*lost, *shards_of(leaves)] if one.key not in index.tensors)
        return _sums_of(held, group.rank, left)._replace(absent=absent)

    found = group.run_merged(_WHAT, sums, _Sums.merged, _Sums.concluded, wrap=LoadError)
    outcome = _Outcome(found.compared, found.state)
    if not found.tells_all:
        gathered = group.gather(_WHAT, lambda: held, wrap=LoadError)
        outcome = group.run_on_coordinator(_WHAT, partial(_differing, gathered, directory), wrap=LoadError)
    if group.is_coordinator:
        _say(group, directory, options, found, outcome)
    return result


def _sums_of(held: list[_Held], rank: int, left: int) -> _Sums:
    some = [one for one in held if one.elements]
    names, wholes = [], Counter[tuple[str, str]]()
    for one in some:
        name = one.key
        if one.replica:  # a fault that is the same in two replicas must not cancel itself
            name += f"\0{one.replica}"
            if one.is_whole:
                name += f"\0{rank}\0{wholes[one.key, one.replica]}"
                wholes[one.key, one.replica] += 1
        names.append(name)
    mains = [one for one in some if not one.replica]
    named = list(zip(names, some, strict=True))
    differs = state_words((name, one.dtype, one.shape, one.crc, one.stored is not None) for name, one in named)
    differs ^= state_words(
        (name, one.dtype, one.shape, one.stored, True) for name, one in named if one.stored is not None
    )
    missing, slices = 0, []
    for name, one in named:
        lacks = one.elements - (0 if one.stored is None else math.prod(one.shape))
        missing += lacks * _hash(name) if lacks else 0
        if not (one.replica and one.is_whole):
            # Two slices with the first element are of two copies, however these are divided.
            slices.append(_hash(f"{name}\0{one.piece if one.stored is None else 'first'}"))
    return _Sums(
        sum(one.stored is not None for one in mains),
        left,
        _words(mains),
        differs,
        missing % 2**64,
        _smallest(np.array(slices, np.uint64).tobytes()),
        frozenset((one.key, one.dtype, one.shape) for one in held if not one.replica and 0 in one.shape),
        frozenset(),
    )


def _smallest(slices: bytes) -> bytes:
    """The smallest of these hashes, so that what ranks tell does not grow with the job. A slice that comes twice is
    among them twice or not at all, but for the last; ranks that share a `replica_id` do so for all slices, as a rule.
    """
    if len(slices) <= 8 * _MOST_SLICES:
        return slices
    return np.sort(np.frombuffer(slices, np.uint64))[:_MOST_SLICES].tobytes()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _words(mains: Iterable[_Held]) -> StateWords:
    return state_words((one.key, one.dtype, one.shape, one.crc, one.stored is not None) for one in mains)


def _say(group: RankGroup, directory: Path, options: LoadOptions, found: _Sums, outcome: _Outcome) -> None:
    sampled = f" (one tensor in {_SAMPLE})" if options.prove == "sample" else ""
    is_proven = outcome.compared > 0
    said = (
        f"state proven: {outcome.state}{sampled}" if is_proven else f"state not proven: no tensor was compared{sampled}"
    )
    said += f" on {counted(group.size, 'rank')}"
    if left := found.left + outcome.left:
        said += (
            f"; not compared: {counted(left, 'tensor')} or slices of replicas (converted, of another shape or class, "
            "loaded in part, not found where requested, or with nothing stored to compare with)"
        )
    if found.absent:
        names = ", ".join(sorted(found.absent)[:_SHOWN]) + (", ..." if len(found.absent) > _SHOWN else "")
        said += f"; not in the checkpoint: {counted(len(found.absent), 'tensor')} ({names})"
    _logger.log(logging.WARNING if found.absent or not is_proven else logging.INFO, "%s: %s", directory, said)


def _noted(tree: Any) -> Any:
    """The same structure with descriptions of sharded tensors alone, without their data."""
    if isinstance(tree, dict):
        return {key: _noted(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_noted(value) for value in tree]
    if not is_sharded_tensor(tree) and not is_factory(tree):
        return None
    noted = copy.copy(tree)
    noted.data = None
    return noted


def _with_loaded(noted: Any, loaded: Any, index: CheckpointIndex) -> tuple[list[Any], list[Any]]:
    """Descriptions with what was loaded for them, and those for which nothing is found."""
    found: list[Any] = []
    lost: list[Any] = []
    _match(noted, loaded, index, found, lost)
    return found, lost


def _match(noted: Any, loaded: Any, index: CheckpointIndex, found: list[Any], lost: list[Any]) -> None:
    if isinstance(noted, dict):
        for key, value in noted.items():
            _match(value, loaded.get(key) if isinstance(loaded, dict) else None, index, found, lost)
    elif isinstance(noted, list):
        values = loaded if isinstance(loaded, (list, tuple)) else ()
        if len(noted) != len(values):
            # Megatron leaves out of a list what the checkpoint lacks.
            noted = [one for one in noted if not is_sharded_tensor(one) or one.key in index.tensors]
        if len(noted) != len(values):
            values = [None] * len(noted)
        for one, value in zip(noted, values, strict=True):
            _match(one, value, index, found, lost)
    elif noted is not None:
        if isinstance(loaded, torch.Tensor):
            noted.data = loaded
        (lost if noted.data is None else found).append(noted)


def _is_told(shard: Any) -> bool:
    """Whether a slice that is not compared counts: any of a replica, and of main replicas the first."""
    return not is_main_replica(shard) or not any(getattr(shard, "global_offset", ()))


def _is_chosen(options: LoadOptions, index: CheckpointIndex, key: str) -> bool:
    """Whether this tensor is compared; of a sample, other ones of each save."""
    if options.prove != "sample":
        return True
    return crc32(key.encode("utf-8", "surrogatepass"), crc32(_save_id(index))) % _SAMPLE == 0


def _save_id(index: CheckpointIndex) -> bytes:
    """By which a save is known; the name of its directory where it has no manifest."""
    return os.fsencode(PurePath(index.path).name) if index.manifest is None else index.manifest.save_id


def _held(leaves: list[Any], reader: FileSystemReader, options: LoadOptions) -> Iterator[_Held | None]:
    """What this rank holds of what is stored in the same dtype and shape; None for each slice that is not compared."""
    index = reader.index
    for shard in shards_of(leaves):
        entry, is_main = index.tensors.get(shard.key), is_main_replica(shard)
        if entry is None or parse_shadow_key(shard.key) is not None or not _is_chosen(options, index, shard.key):
            continue
        shape = global_shape(index, entry)
        # What is converted, quantized or padded otherwise has other bits.
        is_alike = dtype_name(shard.data.dtype) == entry.dtype and shape == tuple(shard.global_shape)
        if not is_alike or type(shard.data) not in (torch.Tensor, torch.nn.Parameter):
            if _is_told(shard):
                yield None
            continue
        if not is_main and entry.fqn not in index.fingerprints:
            yield None
            continue
        part = part_of_shard(shard.key, shard, is_main)
        stored = _stored_crc(reader, index, entry, shape) if part.is_first else None
        replica = "" if is_main else str(shard.replica_id)
        yield _Held(part.key, replica, part.dtype, shape, (part.box, part.stretch), part.crc, stored)


def _stored_crc(reader: FileSystemReader, index: CheckpointIndex, entry: TensorEntry, shape: tuple[int, ...]) -> int:
    stored = index.fingerprints.get(entry.fqn)
    if stored is not None:
        return stored
    total = 0
    for chunk in entry.chunks:
        crc = None if chunk.item.transforms else chunk.item.crc32  # what is transformed has one of its stored form
        total ^= part_of_chunk(entry, chunk, shape, crc, partial(_read, reader, entry, chunk))
    return total


def _read(reader: FileSystemReader, entry: TensorEntry, chunk: StoredChunk, first: int, count: int) -> Any:
    """The bytes of so many elements of a stored chunk."""
    elements = torch.empty(count, dtype=stored_dtype(entry), device="cpu")
    requests, done = [], 0
    for box in flat_boxes(chunk.sizes, first, first + count):
        offsets = tuple(base + at for base, at in zip(chunk.offsets, box.offsets, strict=True))
        part = elements[done : done + math.prod(box.sizes)].view(box.sizes)
        requests.append(ReadRequest(entry.fqn, part, offsets, box.sizes))
        done += part.numel()
    reader.read_items(requests)
    return elements.view(torch.uint8).numpy()


def _differing(gathered: list[list[_Held]] | None, directory: Path) -> _Outcome:
    """What is complete and equal, and what nothing can be said of. `LoadError`: complete tensors differ, or slices from
    those of an equal one.

    Of the ranks that hold one slice under one `replica_id`, the first one belongs to the first copy of the tensor, the
    next one to the next. What makes up no tensor again is compared slice by slice.
    """
    copies: dict[tuple[str, str, int], list[tuple[int, _Held]]] = {}
    holders = Counter[tuple[str, str, tuple[Box, tuple[int, int]]]]()
    for rank, held in enumerate(gathered or []):
        for one in held:
            if one.elements or (not one.replica and 0 in one.shape):
                at = one.key, one.replica, one.piece
                # A replica that a rank holds whole is a copy by itself, whatever slices others have under its id.
                number = ~holders[at] if one.replica and one.is_whole else holders[at]
                copies.setdefault((one.key, one.replica, number), []).append((rank, one))
                holders[at] += 1
    equal: dict[tuple[str, tuple[Box, tuple[int, int]]], int] = {}
    left: list[tuple[str, str, int]] = []
    differing, wrong = [], set()
    for (key, replica, number), parts in copies.items():
        crc = elements = 0
        stored = None
        for _, one in parts:
            crc, elements = crc ^ one.crc, elements + one.elements
            stored = one.stored if one.stored is not None else stored
        if stored is None or elements != math.prod(parts[0][1].shape) or not _is_copy(one for _, one in parts):
            left.append((key, replica, number))
        elif crc == stored:
            equal.update(((key, one.piece), one.crc) for _, one in parts)
        else:
            ranks = ", ".join(str(rank) for rank, _ in parts[:_SHOWN])
            wrong.add(key)
            differing.append(f"{key} ({_which(replica)}CRC-32 {crc:08x} on ranks {ranks}, stored {stored:08x})")
    in_part = replicas = 0
    for key, replica, number in left:
        in_part += not replica and not number
        for rank, one in copies[key, replica, number]:
            crc_of_equal = equal.get((key, one.piece))
            if crc_of_equal is None:
                replicas += bool(replica or number)
            elif crc_of_equal != one.crc:
                wrong.add(key)
                box = one.piece[0]
                differing.append(
                    f"{key} ({_which(replica)}rank {rank}, in the slice at {list(box.offsets)} of sizes "
                    f"{list(box.sizes)}, of which others hold what is stored)"
                )
    if differing:
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise LoadError(
            f"{directory}: {len(wrong)} of {len({key for key, _, _ in copies})} tensors in memory are not what is "
            f"stored: {'; '.join(differing[:_SHOWN])}{more}. Do not train with this state: load again, with another "
            "layout or without wrappers; if it stays, report it with this message"
        )
    mains = [parts for (_, replica, number), parts in copies.items() if not replica and not number]
    return _Outcome(len(mains) - in_part, _words(one for parts in mains for _, one in parts), in_part + replicas)


def _is_copy(parts: Iterable[_Held]) -> bool:
    """Whether these make up their tensor once: elements may add up though some are there twice and others missing."""
    shape: tuple[int, ...] = ()
    boxes: list[Box] = []
    for one in parts:
        shape, (box, (start, stop)) = one.shape, one.piece
        boxes += (
            Box(tuple(map(operator.add, box.offsets, inside.offsets)), inside.sizes)
            for inside in flat_boxes(box.sizes, start, stop)
        )
    return covers(shape, boxes) is None


def _which(replica: str) -> str:
    return f"replica {replica}, " if replica else ""
