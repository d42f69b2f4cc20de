"""Writing a plan: each worker takes its tensors one by one from the payloads to the slots of its files.

Payloads pass through bounded buffers and are summed on both sides: what is read is compared with its stored CRC-32,
what is written gets its CRC-32 into its slot. After every gibibyte or so, and when it is interrupted, a worker makes
its files durable and records in the journal how far it has come.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.threads import Crew
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.item_checks import ItemCheck, check_item
from mcore_ckpt.reshard._file_stream import FileStream, LocalFile, Streams, StreamSink, TargetFile
from mcore_ckpt.reshard._journal import Journal, Sums
from mcore_ckpt.reshard._read_ahead import AheadSource, ReadAhead
from mcore_ckpt.reshard.part_sums import check_sum
from mcore_ckpt.reshard.slots import TargetPlan, TensorMove
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads
from mcore_ckpt.tools.regrid import Sink, Walk, reads_of
from mcore_ckpt.tools.tilings import Block

_SYNC_BYTES: Final = 1024**3
# In flight at once.
_WRITES: Final = 2
_MIN_BUFFER_BYTES: Final = 256 * 1024
_MAX_BUFFER_BYTES: Final = 8 * 1024 * 1024
_OBJECT_PART_BYTES: Final = 1024 * 1024
# Below this, a system call of its own costs more than reading and writing the bytes.
_MIN_FILE_COPY_BYTES: Final = 4 * 1024 * 1024
# Of one worker: what is read ahead takes 16 MiB of it, or half of that.
_MUCH_MEMORY_BYTES: Final = 96 * 1024 * 1024
_MAX_PADDING_BYTES: Final = 64 * 1024
# File descriptors for all but the target's data files.
_OTHER_FILES: Final = 256


@dataclass(slots=True)
class _Run:
    """What all workers share."""

    plan: TargetPlan
    payloads: StoredPayloads
    files: TargetFiles
    journal: Journal
    memory_bytes: int
    advance: Callable[[int], None]
    move_files: bool
    crew: Crew
    described: dict[str, bool] = field(default_factory=dict)

    def has_descriptor(self, file: str) -> bool:
        """Whether the kernel can copy from a file of the source."""
        if file not in self.described:
            fd = None
            with contextlib.suppress(OSError):  # reading it says why
                fd = self.payloads.storage.open_descriptor(file)
            self.described[file] = fd is not None
            if fd is not None:
                os.close(fd)
        return self.described[file]


def write_all(
    plan: TargetPlan,
    payloads: StoredPayloads,
    files: TargetFiles,
    journal: Journal,
    *,
    memory_bytes: int,
    advance: Callable[[int], None],
    move_files: bool,
) -> None:
    """Write all slots and blobs that the journal does not have as done; `advance` is called with payload bytes that
    were written. `memory_bytes`: of all buffers; `move_files`: let the kernel copy payloads that stay as they are.
    """
    move_files = move_files and files.take_descriptors
    journal.unverified = journal.unverified or move_files
    workers = [w for w in range(len(plan.work)) if plan.work[w] or (plan.blobs and not w)]
    _allow_open_files(2 * len(plan.sizes) + _OTHER_FILES)
    memory_bytes //= max(1, len(workers))
    with Crew(max(1, len(workers)), "mcore_ckpt-target") as crew:
        run = _Run(plan, payloads, files, journal, memory_bytes, advance, move_files, crew)
        for number in workers:
            crew.submit(_Worker(run, number).work)


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
        self._moves = run.plan.work[number]
        self._files: dict[str, TargetFile] = {}
        self._mains: dict[str, FileStream] = {}
        self._walk = Walk()
        self._ahead = ReadAhead(run.payloads.files, 4 if run.memory_bytes >= _MUCH_MEMORY_BYTES else 2)
        self._blocks: Iterator[_Located] = iter(())
        self._crcs: dict[str, list[int]] = {}
        self._sums: dict[str, list[Sums]] = {}
        self._unsynced_bytes = 0

    def work(self) -> None:
        """Do all that is not done yet."""
        run = self._run
        done = run.journal.done.get(self._number, 0)
        for move in self._moves[:done]:
            run.advance(move.payload_bytes)
        files = run.plan.files_at_once or len({slot.file for move in self._moves for slot in move.slots}) + 1
        buffer_bytes, count = _buffers(run.memory_bytes, files)
        try:
            with Crew(_WRITES, "mcore_ckpt-write") as crew, self._ahead:
                streams = Streams(crew, buffer_bytes, count)
                self._blocks = self._ahead.steps(self._located(done), self._reads)
                if not self._number and self._number not in run.journal.done:
                    self._write_blobs(streams)
                for position in range(done, len(self._moves)):
                    if run.crew.failed:
                        break
                    self._write_tensor(streams, self._moves[position])
                    done = position + 1
                    if self._unsynced_bytes >= _SYNC_BYTES:
                        self._sync(streams, done)
                self._sync(streams, done)
        finally:
            for file in self._files.values():
                file.close()

    def _sync(self, streams: Streams, done: int) -> None:
        streams.flush()
        streams.crew.drain()
        for file in self._files.values():
            file.sync()
        self._run.journal.record(self._number, done, self._crcs, self._sums)
        self._crcs, self._sums = {}, {}
        self._unsynced_bytes = 0

    def _main(self, streams: Streams, name: str, position: int) -> FileStream:
        """The stream of a file, at a position; short gaps are filled, if they may be, so that writes stay large."""
        stream = self._mains.get(name)
        if stream is None:
            stream = self._mains[name] = streams.open(self._file(name), position)
        elif self._run.plan.filled_gaps and 0 <= position - stream.position <= _MAX_PADDING_BYTES:
            stream.pad_to(position)
        else:
            stream.seek(position)
        return stream

    def _file(self, name: str) -> TargetFile:
        if name not in self._files:
            self._files[name] = self._run.files.open(name, self._run.plan.sizes[name])
        return self._files[name]

    def _write_blobs(self, streams: Streams) -> None:
        for blob in self._run.plan.blobs:
            stream = self._main(streams, blob.file, blob.offset)
            if isinstance(blob.content, bytes):
                stream.write(blob.content)
                continue
            item = blob.content.item
            with self._run.payloads.files.reader(item.file) as reader:
                check_item(ItemCheck(blob.content.fqn, item), reader)
                done = 0
                while done < item.length:
                    space = stream.space(min(_OBJECT_PART_BYTES, item.length - done))
                    reader.read_into(item.offset + done, space)
                    stream.filled(space)
                    done += len(space)

    def _located(self, first: int) -> Iterator[_Located]:
        """All blocks of the tensors from this one on."""
        locate = self._run.payloads.locate
        for move in self._moves[first:]:
            for block in move.blocks:
                yield _Located(move, block, [locate(move.entry, move.entry.chunks[n]) for n in block.sources])

    def _reads(self, located: _Located) -> Iterator[tuple[StoredPayload, int, int]]:
        """What is going to be read of a block, in order."""
        move, block, found = located
        if self._moves_as_it_is(move, block, found[0] if found else None):
            return
        source_boxes = [Box(*move.entry.chunks[n][:2]) for n in block.sources]
        target_boxes = [move.slots[n].slice for n in block.targets]
        for n, start, nbytes in reads_of(source_boxes, target_boxes, element_bytes(move.entry.dtype)):
            yield found[n], start, nbytes

    def _write_tensor(self, streams: Streams, move: TensorMove) -> None:
        entry, payloads = move.entry, self._run.payloads
        crcs = [0] * len(entry.chunks)
        sums: list[Sums] = [(0, [])] * len(move.slots)
        source_boxes = move.source_boxes
        self._walk.elem_bytes = element_bytes(entry.dtype)
        keep_crcs = False
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
            self._write_block(streams, move, block, found, source_boxes, crcs, sums)
        for number in sorted(set(range(len(move.slots))) - written):  # slots without elements
            self._write_frame(streams, move, number)
        if keep_crcs and self._run.plan.index is not None:
            self._crcs[entry.fqn] = crcs
        if self._run.plan.summed:
            self._sums[move.key] = sums
        self._run.advance(move.payload_bytes)
        self._unsynced_bytes += move.payload_bytes

    def _moves_as_it_is(self, move: TensorMove, block: Block, payload: StoredPayload | None) -> bool:
        """Whether one chunk of the source is one slot of the target, and large enough to be left to the kernel."""
        return (
            self._run.move_files
            and payload is not None
            and len(block.sources) == len(block.targets) == 1
            and payload.decoded is None
            and payload.crc32 is not None
            and payload.nbytes >= _MIN_FILE_COPY_BYTES
            and move.source_boxes[block.sources[0]] == move.slots[block.targets[0]].slice
            and self._run.has_descriptor(payload.file)
        )

    def _write_block(
        self,
        streams: Streams,
        move: TensorMove,
        block: Block,
        found: Sequence[StoredPayload],
        source_boxes: Sequence[Box],
        crcs: list[int],
        sums: list[Sums],
    ) -> None:
        payloads, plan = self._run.payloads, self._run.plan
        opened: list[FileStream] = []
        sinks: list[Sink] = []
        used: set[str] = set()
        for number in block.targets:
            name, offset, _ = move.slots[number]
            # A file's second slot in the same block is written next to the first: its stream is for this block only.
            stream = streams.open(self._file(name), offset) if name in used else self._main(streams, name, offset)
            used.add(name)
            stream.write(plan.frame(move, number).head)
            opened.append(stream)
            sinks.append(StreamSink(stream) if plan.summed else stream)
        read = self._walk.move(
            [source_boxes[n] for n in block.sources],
            [AheadSource(self._ahead, payloads, payload) for payload in found],
            [move.slots[n].slice for n in block.targets],
            sinks,
        )
        for n, payload, value in zip(block.sources, found, read, strict=True):
            check_sum(payload, value)
            crcs[n] = value
            payloads.was_read(move.entry, move.entry.chunks[n], value)
        for number, stream, sink in zip(block.targets, opened, sinks, strict=True):
            if isinstance(sink, StreamSink):
                sums[number] = (sink.sums.crc32, sink.sums.blocks)
                stream.write(plan.frame(move, number).tail_with(sink.sums.crc32))
            main = self._mains[move.slots[number].file]
            if stream is not main:
                stream.flush()
                main.seek(stream.position)

    def _write_frame(self, streams: Streams, move: TensorMove, number: int) -> None:
        frame = self._run.plan.frame(move, number)
        stream = self._main(streams, move.slots[number].file, move.slots[number].offset)
        stream.write(frame.head)
        stream.write(frame.tail_with(0))

    def _move_file_bytes(self, streams: Streams, move: TensorMove, number: int, payload: StoredPayload) -> None:
        stream = self._main(streams, move.slots[number].file, move.slots[number].offset)
        frame = self._run.plan.frame(move, number)
        stream.write(frame.head)
        at = stream.position
        stream.seek(at + payload.nbytes)
        source, file = self._run.payloads.storage, stream.file
        assert isinstance(file, LocalFile)
        streams.crew.submit(lambda: copy_file_bytes(source, payload.file, payload.offset, file, at, payload.nbytes))
        stream.write(frame.tail_with(payload.crc32 or 0))


def _buffers(memory_bytes: int, streams: int) -> tuple[int, int]:
    """Size and number of a worker's buffers: one for each stream and a few in flight, if that can be."""
    wanted = streams + 4
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // wanted // 4096 * 4096))
    return size, max(4, min(wanted, memory_bytes // size))


def copy_file_bytes(source: Storage, name: str, start: int, target: LocalFile, at: int, nbytes: int) -> None:
    """Let the kernel copy bytes from file to file, or read and write where it cannot; raises `SaveError`."""
    fd = source.open_descriptor(name)
    assert fd is not None  # else nothing is moved
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
                content = os.pread(fd, min(nbytes - done, _MAX_BUFFER_BYTES), start + done)
                if not content:
                    raise OSError(errno.EIO, f"{source.path(name)} ended at byte {start + done}")
                target.write(at + done, memoryview(content))
                got = len(content)
            done += got
    except OSError as error:
        raise SaveError(
            f"copying bytes [{start}, {start + nbytes}) of {source.path(name)} to byte {at} of {target.path} failed: "
            f"{error.strerror or error}; check space and devices, and run the command again"
        ) from error
    finally:
        os.close(fd)
