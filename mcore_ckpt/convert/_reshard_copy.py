"""Carrying out a reshard plan: each worker takes its tensors one by one from the source's chunks to its own files.

Payloads are streamed through bounded buffers, summed on both ways: what is read is held against the CRC-32 that the
source carries, what is written gets its CRC-32 into the item. After every gibibyte or so, and when it is interrupted, a
worker makes its files durable and notes in the journal how far it has come.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from mcore_ckpt.convert._file_stream import FileStream, Streams, StreamSink, TargetFile, WriteBehind
from mcore_ckpt.convert._read_ahead import AheadSource, ReadAhead
from mcore_ckpt.convert.reshard_plan import ObjectMove, ReshardPlan, TensorMove
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import ChecksumError, OptionError, SaveError
from mcore_ckpt.core.threads import done_by
from mcore_ckpt.format.crc import crc32
from mcore_ckpt.format.index import TensorEntry
from mcore_ckpt.format.item_layout import TensorTemplate, element_bytes
from mcore_ckpt.format.metadata_read import read_small_file
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.tools.dtype_cast import cast_floats
from mcore_ckpt.tools.payloads import PayloadSource, StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import Walk, reads_of
from mcore_ckpt.tools.tilings import Block
from mcore_ckpt.tools.verify import ItemCheck, check_item

__all__ = [
    "JOURNAL_FILE",
    "CastSource",
    "Journal",
    "check_chunks",
    "chunk_sources",
    "copy_all",
    "expected_crcs",
]

JOURNAL_FILE = ".reshard_journal"
_VERSION = 2
# A line for each gibibyte or so, of some bytes for each tensor and MiB.
_MAX_JOURNAL_BYTES: Final = 1024**3
_SYNC_BYTES: Final = 1024**3
_MIN_BUFFER_BYTES: Final = 256 * 1024
_MAX_BUFFER_BYTES: Final = 8 * 1024 * 1024
_PIECE_BYTES: Final = 1024 * 1024
# Below this, a system call of its own costs more than reading and writing the bytes.
_MIN_FILE_COPY_BYTES: Final = 4 * 1024 * 1024
# Of one worker: what is read ahead takes 16 MiB of it, or half of that.
_MUCH_MEMORY_BYTES: Final = 96 * 1024 * 1024
_MAX_PADDING_BYTES: Final = 64 * 1024
# File descriptors for all but the target's data files.
_OTHER_FILES: Final = 256


class Journal:
    """How far an interrupted reshard has come: a file in the target's temporary directory; a context manager.

    One line for each stretch of a worker's tensors that is safe on the disk, written after the bytes that it speaks of
    are durable. The first line names the plan by a fingerprint (layout of the target, and size and time of every source
    file), so that a later run goes on only with the very same work. A torn last line is ignored. The file is locked
    while a run has it.

    Args:
        directory: the temporary directory.
        fingerprint: of the plan.

    Attributes:
        done: for each worker, how many of its tensors are finished.
        crcs: CRC-32s of source chunks, in the target's dtype, that are stored nowhere else: fqn -> by position.
        sums: of the target's chunks: key at the target -> by position, CRC-32 and running sums.
        unproved: some of it the kernel has moved: that is held against its checksum only when the target is read back.

    Raises:
        OptionError: the directory belongs to another reshard.
        SaveError: another process is at it, or it cannot be written.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.done: dict[int, int] = {}
        self.crcs: dict[str, list[int]] = {}
        self.sums: dict[str, list[tuple[int, list[int]]]] = {}
        self.unproved = False
        self._lock = threading.Lock()
        path = directory / JOURNAL_FILE
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise SaveError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._take(path, fingerprint)
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, path: Path, fingerprint: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SaveError(f"{path.parent}: another reshard is writing there; wait for it, or end it") from error
        content = read_small_file(path.parent, path.name, _MAX_JOURNAL_BYTES)
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            done = {int(line["worker"]): int(line["done"]) for line in lines[1:]}
            crcs = {fqn: list(map(int, found)) for line in lines[1:] for fqn, found in line["crcs"].items()}
            sums = {
                fqn: [(int(whole_sum), list(map(int, running))) for whole_sum, running in found]
                for line in lines[1:]
                for fqn, found in line["sums"].items()
            }
            unproved = any(bool(line.get("unproved", True)) for line in lines[1:])
            head = dict(lines[0]) if lines else {}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise OptionError(
                f"{path}: not the journal of a reshard ({type(error).__name__}: {error!s:.200}): it was damaged; "
                f"remove {path.parent} to throw away what it is about (`reshard` has --restart for that)"
            ) from error
        if len(whole) < len(content):
            os.ftruncate(self._fd, len(whole))
        if not lines:
            self._append({"version": _VERSION, "fingerprint": fingerprint})
            return
        if head.get("version") != _VERSION or head.get("fingerprint") != fingerprint:
            raise OptionError(
                f"{path.parent}: left by a reshard of another source, layout or set of options; repeat that command to "
                "finish it, or remove it to throw its work away (`reshard` has --restart for that)"
            )
        self.done, self.crcs, self.sums, self.unproved = done, crcs, sums, unproved

    def record(
        self, worker: int, done: int, crcs: dict[str, list[int]], sums: dict[str, list[tuple[int, list[int]]]]
    ) -> None:
        """The first `done` tensors of a worker are durable."""
        self.done[worker] = done
        self.crcs.update(crcs)
        self.sums.update(sums)
        self._append({"worker": worker, "done": done, "crcs": crcs, "sums": sums, "unproved": self.unproved})

    def forget(self) -> None:
        """Nothing is done: the next run writes everything again."""
        self.done, self.crcs, self.sums, self.unproved = {}, {}, {}, False
        with self._lock:
            first = os.pread(self._fd, 1 << 16, 0)
            os.ftruncate(self._fd, first.index(b"\n") + 1)
            os.fsync(self._fd)

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
            os.fsync(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


def expected_crcs(payloads: StoredPayloads, move: TensorMove, journal: Journal) -> list[int]:
    """The CRC-32 that each source chunk has in the target's dtype; for chunks that carry none, as the copy found it."""
    noted = journal.crcs.get(move.entry.fqn)
    if noted is not None:
        return noted
    return [payloads.locate(move.entry, chunk).crc32 or 0 for chunk in move.entry.chunks]


def cast_within(content: memoryview, dtype: str, to: str, where: str) -> memoryview:
    """Elements in another floating-point dtype; raises `OptionError` where one is too large for it."""
    try:
        return cast_floats(content, dtype, to, overflow="raise")
    except FloatingPointError as error:
        raise OptionError(
            f"{where}: holds elements that are too large for {to}, in which they would be infinite; choose another "
            "dtype (bf16 has the range of fp32)"
        ) from error


class CastSource:
    """A stored chunk as it is in another floating-point dtype; `start` and views count bytes of that.

    Attributes:
        crc32: of what was read so far, as it is stored; of the whole chunk, once it was read from front to back.
    """

    __slots__ = ("_dtype", "_elem_bytes", "_payload", "_payloads", "_summed_elems", "_to", "_to_bytes", "crc32")

    def __init__(self, payloads: StoredPayloads, payload: StoredPayload, dtype: str, to: str) -> None:
        self._payloads, self._payload = payloads, payload
        self._dtype, self._to = dtype, to
        self._elem_bytes, self._to_bytes = element_bytes(dtype), element_bytes(to)
        self._summed_elems = 0
        self.crc32 = 0

    def read_into(self, start: int, view: memoryview) -> None:
        """Bytes from `start` on, converted; a view may begin or end inside an element."""
        first = start // self._to_bytes
        last = -(-(start + len(view)) // self._to_bytes)
        raw = memoryview(bytearray((last - first) * self._elem_bytes))
        self._payloads.read_into(self._payload, first * self._elem_bytes, raw)
        # A view may begin inside the element that the one before has ended in.
        assert first <= self._summed_elems, "chunks are read front to back"
        self.crc32 = crc32(raw[(self._summed_elems - first) * self._elem_bytes :], self.crc32)
        self._summed_elems = max(self._summed_elems, last)
        converted = cast_within(raw, self._dtype, self._to, self._payload.where)
        skip = start - first * self._to_bytes
        view[:] = converted[skip : skip + len(view)]


ChunkSource = CastSource | AheadSource | PayloadSource


def chunk_sources(
    payloads: StoredPayloads,
    found: Sequence[StoredPayload],
    entry: TensorEntry,
    dtype: str,
    ahead: ReadAhead | None = None,
) -> Sequence[ChunkSource]:
    """Chunks of a tensor as they are in another dtype, or as they are."""
    if dtype != entry.dtype:
        return [CastSource(payloads, payload, entry.dtype, dtype) for payload in found]
    if ahead is None:
        return [PayloadSource(payloads, payload) for payload in found]
    return [AheadSource(ahead, payloads, payload) for payload in found]


def check_chunks(
    found: Sequence[StoredPayload],
    sources: Sequence[ChunkSource],
    read: Sequence[int],
    directory: str,
    doing: str,
) -> None:
    """Hold chunks that were read as a whole against the CRC-32 that is stored with them, whatever became of them.

    Args:
        found: the chunks.
        sources: what they were read through.
        read: CRC-32 of what each source gave.
        directory: of the checkpoint, for the message.
        doing: `"reshard"` or `"export"`, for the message.

    Raises:
        ChecksumError: one is damaged.
    """
    for payload, source, given in zip(found, sources, read, strict=True):
        value = source.crc32 if isinstance(source, CastSource) else given
        if payload.crc32 is not None and payload.crc32 != value:
            raise ChecksumError(
                f"{payload.where}: the source is damaged: its elements have CRC-32 {value:#010x}, expected "
                f"{payload.crc32:#010x}. Run `mcore-ckpt verify {directory}`, and {doing} a sound copy"
            )


@dataclass(slots=True)
class _Run:
    """What all workers share."""

    plan: ReshardPlan
    payloads: StoredPayloads
    directory: Path
    journal: Journal
    memory_bytes: int
    advance: Callable[[int], None]
    move_files: bool
    stop: threading.Event = field(default_factory=threading.Event)


def copy_all(
    plan: ReshardPlan,
    payloads: StoredPayloads,
    directory: Path,
    journal: Journal,
    *,
    memory_bytes: int,
    advance: Callable[[int], None],
    move_files: bool = True,
) -> None:
    """Write all data files of the target.

    Args:
        plan: what goes where.
        payloads: the source's tensors.
        directory: where the files go.
        journal: what is done already is not done again.
        memory_bytes: for all buffers together.
        advance: called with payload bytes that have been moved.
        move_files: let the kernel move payloads that stay as they are, from file to file.

    Raises:
        ChecksumError, CorruptCheckpointError: the source is damaged.
        SaveError: the target cannot be written.
    """
    journal.unproved = journal.unproved or move_files
    workers = [w for w in range(len(plan.work)) if plan.work[w] or plan.objects[w]]
    _allow_open_files(2 * len(plan.sizes) + _OTHER_FILES)
    run = _Run(plan, payloads, directory, journal, memory_bytes // max(1, len(workers)), advance, move_files)
    with ThreadPoolExecutor(max(1, len(workers)), thread_name_prefix="mcore-ckpt-reshard") as pool:
        try:
            futures = [done_by(pool, _Worker(run, w).work) for w in workers]
            for future in futures:
                future.result()
        except BaseException:
            run.stop.set()
            raise


def _allow_open_files(count: int) -> None:
    """Raise the process's own limit, where the system allows it: a thousand target ranks are a thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Located(NamedTuple):
    """A block of a tensor, and where its source chunks lie."""

    move: TensorMove
    block: Block
    found: list[StoredPayload]


class _Worker:
    """One worker, in its own thread."""

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self._number = number
        self._tensors = run.plan.work[number]
        self._files: dict[str, TargetFile] = {}
        self._mains: dict[str, FileStream] = {}
        self._walk = Walk()
        self._ahead = ReadAhead(run.payloads.files, 4 if run.memory_bytes >= _MUCH_MEMORY_BYTES else 2)
        self._blocks: Iterator[_Located] = iter(())
        self._crcs: dict[str, list[int]] = {}
        self._sums: dict[str, list[tuple[int, list[int]]]] = {}
        self._unsynced_bytes = 0

    def work(self) -> None:
        """Do all that is not done yet."""
        run = self._run
        done = run.journal.done.get(self._number, 0)
        for move in self._tensors[:done]:
            run.advance(move.payload_bytes)
        names = {file for move in self._tensors for file in move.files}
        names |= {move.file for move in run.plan.objects[self._number]}
        buffer_bytes, count = _buffers(run.memory_bytes, len(names))
        try:
            with WriteBehind() as writes, self._ahead:
                streams = Streams(writes, buffer_bytes, count)
                self._blocks = self._ahead.steps(self._located(done), self._reads)
                try:
                    if self._number not in run.journal.done:
                        self._objects(streams, run.plan.objects[self._number])
                    for position in range(done, len(self._tensors)):
                        if run.stop.is_set():
                            break
                        self._tensor(streams, self._tensors[position])
                        done = position + 1
                        if self._unsynced_bytes >= _SYNC_BYTES:
                            self._sync(streams, done)
                except BaseException:
                    run.stop.set()
                    raise
                self._sync(streams, done)
        finally:
            for file in self._files.values():
                file.close()

    def _sync(self, streams: Streams, done: int) -> None:
        streams.flush()
        streams.writes.drain()
        for file in self._files.values():
            file.sync()
        self._run.journal.record(self._number, done, self._crcs, self._sums)
        self._crcs, self._sums = {}, {}
        self._unsynced_bytes = 0

    def _main(self, streams: Streams, name: str, position: int) -> FileStream:
        """The stream of a file, at a position; short gaps are filled with zeros so that writes stay large."""
        stream = self._mains.get(name)
        if stream is None:
            stream = self._mains[name] = streams.open(self._file(name), position)
        elif 0 <= position - stream.position <= _MAX_PADDING_BYTES:
            stream.pad_to(position)
        else:
            stream.seek(position)
        return stream

    def _file(self, name: str) -> TargetFile:
        if name not in self._files:
            self._files[name] = TargetFile(str(self._run.directory / name), self._run.plan.sizes[name])
        return self._files[name]

    def _objects(self, streams: Streams, moves: Sequence[ObjectMove]) -> None:
        for move in moves:
            stream = self._main(streams, move.file, move.offset)
            item = move.entry.item
            with self._run.payloads.files.reader(item.file) as reader:
                check_item(ItemCheck(move.entry.fqn, item), reader)
                done = 0
                while done < item.length:
                    space = stream.space(min(_PIECE_BYTES, item.length - done))
                    reader.read_into(item.offset + done, space)
                    stream.filled(space)
                    done += len(space)

    def _located(self, first: int) -> Iterator[_Located]:
        """All blocks of the tensors from this one on."""
        locate = self._run.payloads.locate
        for move in self._tensors[first:]:
            for block in move.blocks:
                yield _Located(move, block, [locate(move.entry, move.entry.chunks[n]) for n in block.sources])

    def _reads(self, located: _Located) -> Iterator[tuple[StoredPayload, int, int]]:
        """What is going to be read of a block, in order."""
        move, block, found = located
        if move.dtype != move.entry.dtype or self._moves_as_it_is(move, block, found[0] if found else None):
            return
        source_boxes = [Box(*move.entry.chunks[n][:2]) for n in block.sources]
        target_boxes = [move.boxes[n] for n in block.targets]
        for n, start, nbytes in reads_of(source_boxes, target_boxes, element_bytes(move.dtype)):
            yield found[n], start, nbytes

    def _tensor(self, streams: Streams, move: TensorMove) -> None:
        entry, payloads = move.entry, self._run.payloads
        crcs = [0] * len(entry.chunks)
        sums: list[tuple[int, list[int]]] = [(0, [])] * len(move.boxes)
        source_boxes = move.source_boxes
        self._walk.elem_bytes = element_bytes(move.dtype)
        keep_crcs = move.dtype != entry.dtype
        written = set()
        for block in move.blocks:
            found = next(self._blocks).found
            keep_crcs |= any(payload.crc32 is None for payload in found)
            written.update(block.targets)
            if self._moves_as_it_is(move, block, found[0] if found else None):
                self._move_file_bytes(streams, move, block.targets[0], found[0])
                crcs[block.sources[0]] = found[0].crc32 or 0
                item = entry.chunks[block.sources[0]].item
                running = payloads.index.blocks.get((item.file, item.offset), ())
                sums[block.targets[0]] = (found[0].crc32 or 0, list(running))
                continue
            self._block(streams, move, block, found, source_boxes, crcs, sums)
        for target in sorted(set(range(len(move.boxes))) - written):
            self._item(streams, move, target)
        if keep_crcs:
            self._crcs[entry.fqn] = crcs
        self._sums[move.target_fqn] = sums
        self._run.advance(move.payload_bytes)
        self._unsynced_bytes += move.payload_bytes

    def _moves_as_it_is(self, move: TensorMove, block: Block, payload: StoredPayload | None) -> bool:
        """Whether one chunk of the source is one chunk of the target, and large enough to be left to the kernel."""
        return (
            self._run.move_files
            and payload is not None
            and len(block.sources) == len(block.targets) == 1
            and move.dtype == move.entry.dtype
            and payload.decoded is None
            and payload.crc32 is not None
            and payload.nbytes >= _MIN_FILE_COPY_BYTES
            and move.source_boxes[block.sources[0]] == move.boxes[block.targets[0]]
        )

    def _block(
        self,
        streams: Streams,
        move: TensorMove,
        block: Block,
        found: Sequence[StoredPayload],
        source_boxes: Sequence[Box],
        crcs: list[int],
        sums: list[tuple[int, list[int]]],
    ) -> None:
        sources = chunk_sources(self._run.payloads, found, move.entry, move.dtype, self._ahead)
        sinks = []
        used: set[str] = set()
        for target in block.targets:
            name, offset = move.files[target], move.offsets[target]
            # A file's second chunk in the same block is written beside the first: its stream is for this block only.
            stream = streams.open(self._file(name), offset) if name in used else self._main(streams, name, offset)
            used.add(name)
            stream.write(move.template(target).head)
            sinks.append(StreamSink(stream))
        read = self._walk.move(
            [source_boxes[n] for n in block.sources], sources, [move.boxes[n] for n in block.targets], sinks
        )
        check_chunks(found, sources, read, self._run.payloads.index.path, "reshard")
        for n, source, value in zip(block.sources, sources, read, strict=True):
            crcs[n] = value
            given = source.crc32 if isinstance(source, CastSource) else value
            self._run.payloads.was_read(move.entry, move.entry.chunks[n], given)
        for target, sink in zip(block.targets, sinks, strict=True):
            sums[target] = (sink.sums.crc32, sink.sums.blocks)
            sink.stream.write(_tail(move.template(target), sink.sums.crc32))
            main = self._mains[move.files[target]]
            if sink.stream is not main:
                sink.stream.flush()
                main.seek(sink.stream.position)

    def _item(self, streams: Streams, move: TensorMove, target: int) -> None:
        """A chunk without elements."""
        stream = self._main(streams, move.files[target], move.offsets[target])
        template = move.template(target)
        stream.write(template.head)
        stream.write(_tail(template, 0))

    def _move_file_bytes(self, streams: Streams, move: TensorMove, target: int, payload: StoredPayload) -> None:
        stream = self._main(streams, move.files[target], move.offsets[target])
        template = move.template(target)
        stream.write(template.head)
        at = stream.position
        stream.seek(at + payload.nbytes)
        source, file = self._run.payloads.storage, stream.file
        streams.writes.submit(lambda: copy_file_bytes(source, payload.file, payload.offset, file, at, payload.nbytes))
        stream.write(_tail(template, payload.crc32 or 0))


def _buffers(memory_bytes: int, streams: int) -> tuple[int, int]:
    """Size and number of a worker's buffers: one for each stream and a few in flight, if that can be."""
    wanted = streams + 4
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // wanted // 4096 * 4096))
    return size, max(4, min(wanted, memory_bytes // size))


def _tail(template: TensorTemplate, value: int) -> bytes:
    tail = bytearray(template.tail)
    for position in template.crc_positions:
        tail[position : position + 4] = value.to_bytes(4, "little")
    return bytes(tail)


def copy_file_bytes(source: Storage, name: str, start: int, target: TargetFile, at: int, nbytes: int) -> None:
    """Let the kernel copy bytes from file to file; by reading and writing where it cannot.

    Raises:
        SaveError: it fails.
        CorruptCheckpointError: the source is no regular file of its own (any more).
    """
    try:
        _copy_file_bytes(source, name, start, target, at, nbytes)
    except OSError as error:
        raise SaveError(
            f"copying bytes [{start}, {start + nbytes}) of {source.path(name)} to byte {at} of {target.path} failed: "
            f"{error.strerror or error}; check space and devices, and run the command again"
        ) from error


def _copy_file_bytes(source: Storage, name: str, start: int, target: TargetFile, at: int, nbytes: int) -> None:
    fd = source.open_descriptor(name)
    assert fd is not None  # the files are local ones
    try:
        done = 0
        while done < nbytes:
            try:
                got = os.copy_file_range(fd, target.fd, min(nbytes - done, 1 << 30), start + done, at + done)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                got = 0
            if got == 0:
                piece = os.pread(fd, min(nbytes - done, _MAX_BUFFER_BYTES), start + done)
                if not piece:
                    raise OSError(errno.EIO, f"{source.path(name)} ended at byte {start + done}")
                target.write(at + done, memoryview(piece))
                got = len(piece)
            done += got
    finally:
        os.close(fd)
