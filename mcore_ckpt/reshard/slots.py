"""What is going to be written: slots of files, each for a slice of a tensor.

    slot    head | the slice's elements, C order | tail, which may hold their CRC-32

A planner decides all slots before a byte is written: `torch_dist`, `safetensors` and `torch_files` are planners. What
differs between formats is where slots lie and what frames them; the writer is the same for all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.reshard._journal import Journal
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.tilings import Block, blocks


class Frame(Protocol):
    """What stands around the elements in a slot."""

    @property
    def head(self) -> bytes:
        """Before the elements."""

    def tail_with(self, payload_crc32: int, /) -> bytes:
        """Behind elements that have this CRC-32."""


class _Bare:
    head = b""

    def tail_with(self, _: int) -> bytes:
        return b""


BARE: Frame = _Bare()
"""Nothing around the elements."""


class Slot(NamedTuple):
    """Where a slice of a tensor goes: `offset` in the file is that of the slot's head."""

    file: str
    offset: int
    slice: Box


class Blob(NamedTuple):
    """Bytes that are no tensor's: given here, or those of a stored object."""

    file: str
    offset: int
    content: bytes | ObjectEntry


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor: `entry` is that of the payloads, `key` the target's; its slots hold every element once.

    `blocks` are the positions of source chunks and slots that belong together.
    """

    entry: TensorEntry
    key: str
    slots: tuple[Slot, ...]
    blocks: tuple[Block, ...]

    @property
    def source_boxes(self) -> list[Box]:
        """The source's chunks, in the order of its index."""
        return [Box(chunk.offsets, chunk.sizes) for chunk in self.entry.chunks]

    @property
    def payload_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.entry.shape) * element_bytes(self.entry.dtype)


def all_in_one(entry: TensorEntry, key: str, file: str, offset: int) -> TensorMove:
    """A tensor that gets one slot for all of it."""
    everything = Box((0,) * len(entry.shape), entry.shape)
    sources = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return TensorMove(entry, key, (Slot(file, offset, everything),), tuple(blocks(sources, [everything])))


def in_shares(moves: Sequence[TensorMove], workers: int) -> tuple[tuple[TensorMove, ...], ...]:
    """Moves in their order, for workers of about the same number of bytes: one reads while another arranges."""
    total, done = sum(move.payload_bytes for move in moves), 0
    shares: tuple[list[TensorMove], ...] = tuple([] for _ in range(workers))
    for move in moves:
        shares[min(workers - 1, done * workers // max(1, total))].append(move)
        done += move.payload_bytes
    return tuple(map(tuple, shares))


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """Everything that is written; a format is a subclass."""

    work: tuple[tuple[TensorMove, ...], ...]  # `work[w]` are the tensors of worker `w`, in its order
    blobs: tuple[Blob, ...]  # written by the first worker, before its tensors
    sizes: Mapping[str, int]  # length of each file
    files_at_once: int | None = None  # between how many files a worker alternates; None: all
    filled_gaps: bool = False  # the bytes between the slots of a file are unused, and may be filled with zeros
    summed: bool = True  # whether the CRC-32 of each slot is part of the target
    index: CheckpointIndex | None = None  # of the target, for formats that are read back and compared
    index_file: tuple[str, bytes] | None = None  # without `.metadata`: name and content of what is written last

    def frame(self, move: TensorMove, number: int) -> Frame:
        """What is around the elements of one of a tensor's slots."""
        return BARE

    def finish(
        self, files: TargetFiles, journal: Journal, payloads: StoredPayloads, *, is_compared: bool
    ) -> bytes | None:
        """Write durably what depends on checksums; returns the content of `.metadata`, if the format has one.
        `is_compared`: the target is compared with the source before it appears.
        """
        return None

    @property
    def moves(self) -> Iterator[TensorMove]:
        """All tensors."""
        return (move for moves in self.work for move in moves)

    @property
    def payload_bytes(self) -> int:
        """Of all tensors."""
        return sum(move.payload_bytes for move in self.moves)

    def fingerprint(self, payloads: StoredPayloads, source_states: Mapping[str, Sequence[int]]) -> str:
        """Of everything that the target's bytes depend on; `source_states` as in `SourceFiles`."""
        found = hashlib.sha256(os.fsencode(payloads.storage.location))
        found.update(json.dumps([source_states, dict(self.sizes)], sort_keys=True).encode())
        for worker in self.work:
            found.update(b"worker")
            for move in worker:
                found.update(
                    f"{move.entry.fqn} {move.key} {move.entry.dtype} {move.slots}\n".encode("utf-8", "surrogatepass")
                )
        for blob in self.blobs:
            content = blob.content if isinstance(blob.content, bytes) else repr(blob.content).encode()
            found.update(f"{blob.file} {blob.offset}\n".encode("utf-8", "surrogatepass") + content)
        for line in payloads.recipe():
            found.update(line.encode("utf-8", "surrogatepass"))
        return found.hexdigest()
