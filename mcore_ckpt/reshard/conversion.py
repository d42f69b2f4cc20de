"""One conversion, whatever it is from and to: from its plan to the moment the target appears.

a source, options -> `Conversion` (nothing is written) -> its rows (`dry_run`), or the target -> `ConversionReport`

The bytes of the plan are read, checked, fed to the images of its files, and compared with the source. A conversion
writes as a save does (`image/writer.py`); its ranks are imaginary, and the source is where they get their payloads
from. A worker takes one part of the plan after the other. It goes through the source once, and feeds all files of the
part in turn. When they are complete and durable, it notes them in the journal: a run that resumes another compares them
with the note, and writes the missing ones.

A tensor passes slab by slab (`tools.regrid`), so every chunk is read front to back, and what is read next is known
before it begins: threads read it into a bounded number of buffers (`read_ahead`). What does not lie plainly in a file
is computed when its turn comes.

The comparison does not read the source again. The target is read back and divided again into the chunks of the source.
Each must have the CRC-32 that is stored with the source's chunk, or where none is stored, the one that the writer
found. So one pass over the target checks data and layout, from the target's own index.

`.metadata`, where a format has one, is written last into the folder. The folder gets the target's name when everything
is durable and compared. So what looks like a checkpoint is complete. A source whose files change meanwhile is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from mcore_ckpt.core.boxes import Box, bounding, intersect, relative, runs
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
)
from mcore_ckpt.core.process import Crew, Task, in_parallel
from mcore_ckpt.core.team import Progress, current_team
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import sync_folders
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.format.metadata_read import METADATA_FILE, parse_index, read_index
from mcore_ckpt.image.layout import PlannedFile, WrittenFile
from mcore_ckpt.image.writer import ImageStream, ImageWriter, WindowPool
from mcore_ckpt.load.records import item_name, padded_range
from mcore_ckpt.reshard.options import ConversionOptions, flag_of
from mcore_ckpt.reshard.plan import Division, Part, TargetPlan, in_shares, refuse_other_fingerprints, target_dtype
from mcore_ckpt.reshard.target_directory import (
    Target,
    begun_work,
    bind_common_file,
    finish_made,
    refuse_target,
    team_target,
)
from mcore_ckpt.reshard.view import cast_payloads
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader, RangeWriter, align_up
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import index_version
from mcore_ckpt.tools.payloads import MADE_HERE, StoredPayload, StoredPayloads, check_sum
from mcore_ckpt.tools.regrid import SLAB_BYTES, assembled, blocks, slabs
from mcore_ckpt.tools.runs import Places

_NBYTES: Final = operator.attrgetter("payload_bytes")
_READS: Final = 2
# Reads of this length and longer are whole pages of the file, and of the buffer.
_MIN_PADDED_BYTES: Final = 256 * 1024
_BUFFER_BYTES: Final = SLAB_BYTES + 3 * ALIGNMENT_BYTES * (SLAB_BYTES // _MIN_PADDED_BYTES)


class Read(NamedTuple):
    """Bytes of a chunk: the chunk's position, and the part of the tensor that they are."""

    number: int
    part: Box
    payload: StoredPayload
    start: int
    nbytes: int

    @property
    def is_plain(self) -> bool:
        """They lie in a file as they are."""
        return self.payload.decoded is None and self.payload.fill is None


class Step(NamedTuple):
    """A slab: what is read of it, and what its targets get."""

    reads: list[Read]
    targets: list[tuple[int, Box]]
    located: dict[int, StoredPayload]  # all chunks of the block
    elem_bytes: int
    is_last: bool  # of its block

    @property
    def is_decoded(self) -> bool:
        """Some of it was decoded, and is in memory already."""
        return any(read.payload.decoded is not None for read in self.reads)


Ahead = Iterator[tuple[Step, list[memoryview]]]
"""All slabs in order, with the bytes of their reads, which are valid until the next one."""


def _steps(payloads: StoredPayloads, divisions: Iterable[Division]) -> Iterator[Step]:
    for entry, targets, block in divisions:
        sources = {n: Box(entry.chunks[n].offsets, entry.chunks[n].sizes) for n in block.sources}
        elem_bytes = element_bytes(entry.dtype)
        located = {n: payloads.locate(entry, entry.chunks[n]) for n in block.sources}
        found = list(slabs(bounding([targets[n] for n in block.targets]), elem_bytes))
        for number, slab in enumerate(found, 1):
            reads = []
            for n, source in sources.items():
                if (part := intersect(source, slab)) is not None:
                    first = runs(source.sizes, relative(part, source.offsets), elem_bytes).first_byte
                    reads.append(Read(n, part, located[n], first, math.prod(part.sizes) * elem_bytes))
            own = [(n, part) for n in block.targets if (part := intersect(targets[n], slab)) is not None]
            yield Step(reads, own, located, elem_bytes, number == len(found))


def _batches(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Steps that are read into one buffer; one that was decoded ends a batch."""
    batch: list[Step] = []
    nbytes = 0
    for step in steps:
        own = sum(read.nbytes for read in step.reads)
        if batch and nbytes + own > SLAB_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(step)
        nbytes += own
        if step.is_decoded:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def read_ahead(payloads: StoredPayloads, divisions: Iterable[Division], crew: Crew, buffers: int) -> Ahead:
    """The slabs of these tensors; while one is in use, the crew reads the next ones into the other buffers."""
    free: list[memoryview] = []
    waiting: deque[tuple[list[Step], memoryview, Task[list[memoryview]]]] = deque()
    batches = _batches(_steps(payloads, divisions))
    while True:
        while len(waiting) < buffers and not (waiting and waiting[-1][0][-1].is_decoded):
            batch = next(batches, None)
            if batch is None:
                break
            buffer = free.pop() if free else direct_io.aligned_buffer(_BUFFER_BYTES)
            waiting.append((batch, buffer, crew.submit(partial(_read_files, payloads, batch, buffer))))
        if not waiting:
            return
        batch, buffer, task = waiting.popleft()
        read_views = crew.result(task)
        views = iter(read_views)
        for step in batch:
            contents = [next(views) for _ in step.reads]
            for read, view in zip(step.reads, contents, strict=True):
                if not read.is_plain:
                    payloads.read_into(read.payload, read.start, view)
            yield step, contents
        free.append(buffer)


def _read_files(payloads: StoredPayloads, batch: Sequence[Step], buffer: memoryview) -> list[memoryview]:
    """Where in a buffer each read goes; what lies plainly in a file is there."""
    views, at = [], 0
    for read in (read for step in batch for read in step.reads):
        start = first = read.payload.offset + read.start
        stop = start + read.nbytes
        if read.is_plain:
            with payloads.files.reader(read.payload.file) as reader:
                if read.nbytes >= _MIN_PADDED_BYTES:
                    at = align_up(at)
                    first, stop = padded_range(start, stop, reader.size_bytes)
                reader.read_into(first, buffer[at : at + stop - first])
        views.append(buffer[at + start - first :][: read.nbytes])
        at += stop - first
    return views


Feeds = Mapping[int, Callable[[memoryview], None]]
"""By position of a target what takes its bytes, front to back."""


def move_block(ahead: Ahead, feeds: Feeds) -> Iterator[tuple[int, StoredPayload, int]]:
    """Give the targets of one block their elements; then position, payload and CRC-32 of each source."""
    crcs: dict[int, int] = {}
    for step, contents in ahead:
        found = list(zip(step.reads, contents, strict=True))
        for read, content in found:
            crcs[read.number] = crc32(content, crcs.get(read.number, 0))
        for number, part in step.targets:
            same = next((content for read, content in found if read.part == part), None)
            if same is None:
                same = assembled(part, step.elem_bytes, [(read.part, content) for read, content in found])
            feeds[number](same)
        if step.is_last:
            return ((n, payload, crcs.get(n, 0)) for n, payload in step.located.items())
    raise AssertionError("a block has a last slab")


# Writes in flight at once.
_WRITES: Final = 2
# Files that have all their bytes and wait to be synced.
_MOST_ENDING: Final = 16
_MIN_BUFFER_BYTES: Final = 256 * 1024
_MAX_BUFFER_BYTES: Final = 8 * 1024 * 1024
# Memory of one worker: data that is read ahead takes 16 MiB of it, or half of that.
_MUCH_MEMORY_BYTES: Final = 96 * 1024 * 1024
# File descriptors for all but the target's data files.
_OTHER_FILES: Final = 256


@dataclass(frozen=True, slots=True)
class _Run:
    """State that all workers share."""

    payloads: StoredPayloads
    target: Target
    memory_bytes: int  # of each worker
    keeps_crcs: bool  # of the source's chunks that have none stored
    advance: Callable[[int], None]  # called with payload bytes that were written
    crew: Crew


def write_all(
    plan: TargetPlan,
    payloads: StoredPayloads,
    target: Target,
    *,
    workers: int,
    memory_bytes: int,
    advance: Callable[[int], None],
) -> None:
    """Write all files of a target that are not there yet; `advance` is called with payload bytes that were written."""
    workers = min(workers, max(1, len(plan.parts)))
    most = max((len(part.files) for part in plan.parts), default=0)
    begun = sum(1 for _ in Path("/proc/self/fd").iterdir())
    count = 2 * workers * most + payloads.open_files + _OTHER_FILES + begun
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:  # a thousand target ranks are a thousand files
        raised = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    with Crew(workers, "mcore_ckpt-target") as crew:
        run = _Run(payloads, target, memory_bytes // workers, plan.index is not None, advance, crew)
        for part in plan.parts:
            crew.submit(partial(_work_on, run, part))


Prepared = tuple[PlannedFile, Callable[[int], bytes]]
"""A file for its writer, and what stands around its payloads."""


def _work_on(run: _Run, part: Part) -> None:
    prepared = [file.prepare(run.payloads, run.target.journal.save_id) for file in part.files]
    if all(_is_there(run.target, file) for file in prepared):
        for entry, _, block in (move.division for move in part.moves):
            for number in block.sources:
                run.payloads.was_read_before(entry, entry.chunks[number])
        run.advance(part.payload_bytes)
    else:
        _write_part(run, part, prepared)


def _write_part(run: _Run, part: Part, prepared: Sequence[Prepared]) -> None:
    """Write the files of a part, each open from its first byte to its last; each byte of the source is read once."""
    payloads = run.payloads
    crcs: list[tuple[str, int, int]] = []
    ahead_buffers = 4 if run.memory_bytes >= _MUCH_MEMORY_BYTES else 2
    wanted = len(prepared) + 4  # a buffer for each stream and a few in flight, if that can be
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, run.memory_bytes // wanted // 4096 * 4096))
    pool = WindowPool(size, max(4, min(wanted, run.memory_bytes // size)))
    with Crew(_READS, "mcore_ckpt-ahead") as readers, ImageWriter(pool, io_threads=_WRITES) as images:
        files = {one[0].name: one for one in prepared}
        left = Counter(file for move in part.moves for file in move.files)
        streams: dict[str, ImageStream] = {}

        def stream_of(file: str) -> ImageStream:
            if file not in streams:
                images.await_finished(_MOST_ENDING)
                planned, around = files[file]
                writer = run.target.new_file(file, planned.image.size_bytes)
                streams[file] = images.open(writer, planned, around)
            return streams[file]

        ahead = read_ahead(payloads, (move.division for move in part.moves), readers, ahead_buffers)
        for move in part.moves:
            if run.crew.failure is not None:
                raise SaveError("another part has failed")  # which has told its error
            entry = move.division.entry
            feeds = {number: stream_of(file).feed for number, file in enumerate(move.files)}
            for n, payload, value in move_block(ahead, feeds):
                check_sum(payload, value)
                payloads.was_read(entry, entry.chunks[n], value)
                if payload.crc32 is None and run.keeps_crcs:
                    crcs.append((move.key, n, value))
            run.advance(move.division.payload_bytes)
            left.subtract(move.files)
            for file in {*move.files}:
                if not left[file]:
                    streams[file].close()
        for file in [file for file in files if file not in streams]:  # without elements
            stream_of(file).close()
    run.target.journal.record(images.results, crcs)


class _Compared(RangeWriter):
    """In place of a file's writer: whatever would be written has to be there."""

    direct = False

    def __init__(self, reader: RangeReader) -> None:
        self.name, self._reader = reader.name, reader

    def write(self, offset: int, view: memoryview) -> None:
        nbytes = min(len(view), self._reader.size_bytes - offset)
        if self._reader.read(offset, nbytes) != view[:nbytes]:
            raise SaveError(f"{self.name}: bytes [{offset}, {offset + nbytes}) are not what was written")

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _is_there(target: Target, prepared: Prepared) -> bool:
    """Whether an earlier run has written a file, and it holds what that run has noted."""
    planned, around = prepared
    known, image = target.journal.written.get(planned.name), planned.image
    if known is None:
        return False
    window = memoryview(bytearray(SLAB_BYTES))
    try:
        with target.storage.open_reader(planned.name) as reader, ImageWriter(WindowPool()) as images:
            if reader.size_bytes != image.size_bytes:
                return False
            stream = images.open(_Compared(reader), planned, around)
            for start, nbytes in zip(image.payload_offsets, image.payload_lengths, strict=True):
                for at in range(0, nbytes, SLAB_BYTES):
                    view = window[: min(SLAB_BYTES, nbytes - at)]
                    reader.read_into(start + at, view)
                    stream.feed(view)
            stream.close()
    except (LoadError, SaveError):
        return False
    return images.results[0].crcs == known.crcs


def check_all(
    plan: TargetPlan,
    payloads: StoredPayloads,
    target: CheckpointIndex,
    crcs: Mapping[tuple[str, int], int],
    *,
    workers: int,
    bar: Progress,
) -> None:
    """Compare a target, where its files lie now, with its source. `crcs`: of source chunks that have none stored."""
    sources = {move.key: move.division.entry for part in plan.parts for move in part.moves}
    divisions = []
    for key, source in sources.items():
        entry = target.tensors[key]
        stored, divided = ([Box(chunk.offsets, chunk.sizes) for chunk in one.chunks] for one in (entry, source))
        divisions += [Division(entry, divided, block) for block in blocks(stored, divided)]
    divisions.sort(key=lambda division: division.entry.chunks[division.block.sources[0]].item[:2])
    team = current_team()
    objects = target.objects.items() if team.rank == 0 else ()

    def expected(key: str, number: int) -> int | None:
        chunk = sources[key].chunks[number]
        return crcs.get((key, number), payloads.locate(sources[key], chunk).crc32)

    with StoredPayloads(target) as written:

        def check(share: Sequence[Division]) -> None:
            with Crew(_READS, "mcore_ckpt-ahead") as crew:
                ahead = read_ahead(written, share, crew, 4)
                for division in share:
                    _check_block(division, ahead, expected)
                    bar.advance(division.payload_bytes)

        def check_own(own: Sequence[Division]) -> None:
            in_parallel(in_shares(own, _NBYTES, min(workers, len(own))), check, workers)
            for fqn, other in objects:  # objects keep their keys
                if written.object_bytes(other) != payloads.object_bytes(payloads.index.objects[fqn]):
                    raise CorruptCheckpointError(
                        f"{item_name(fqn, other.item)}: differs from the source's item; check the device, then run "
                        "the command again"
                    )

        team.divide("compare the target", divisions, _NBYTES, check_own, bar.counter)


def _check_block(division: Division, ahead: Ahead, expected: Callable[[str, int], int | None]) -> None:
    key = division.entry.fqn
    sums = dict.fromkeys(division.block.targets, 0)

    def feed(number: int, view: memoryview) -> None:
        sums[number] = crc32(view, sums[number])

    for _, payload, value in move_block(ahead, {number: partial(feed, number) for number in sums}):
        if payload.crc32 != value:
            raise _wrong(payload.where, payload.crc32, value)
    for number, value in sums.items():
        crc = expected(key, number)
        if value != (crc or 0):
            at = list(division.targets[number].offsets)
            raise _wrong(f"{key}: the source's chunk at {at}, put together from the target", crc, value)


def _wrong(where: str, expected: int | None, got: int) -> ChecksumError:
    shown = "none" if expected is None else f"{expected:#010x}"
    return ChecksumError(
        f"{where}: has CRC-32 {got:#010x}, expected {shown}: what was written is not what is on the disk. Check the "
        "device and the source (`mcore-ckpt verify`), then run the command again"
    )


# --- one conversion


class SourceFiles:
    """The index and files of some tensors (default: all, and all objects) as they are now: `states` by name. `others`:
    sources before this one, which count, too. `CheckpointNotFoundError`: a file is missing.
    """

    def __init__(
        self, index: CheckpointIndex, keys: Collection[str] | None = None, others: Sequence[SourceFiles] = ()
    ) -> None:
        self._index, self._keys, self._others, self.path = index, keys, others, index.path
        self.states = self._look()

    def _look(self) -> dict[str, list[int]]:
        index, keys = self._index, self._keys
        files = index_files(index)
        if keys is not None:
            files = {chunk.item.file for key in keys for chunk in index.tensors[key].chunks}
        found, storage = {}, storage_at(index.path, follow_links=True)
        for file in sorted(files - {MADE_HERE}):
            version = storage.version(file)
            if version is None:
                raise CheckpointNotFoundError(
                    f"{storage.path(file)}: the index names this file, but it cannot be found; the checkpoint is "
                    f"incomplete, `mcore-ckpt verify {index.path}` lists what is missing"
                )
            found[file] = [version.size_bytes, version.modified_ns, version.number]
        for name in (METADATA_FILE, "config.json"):  # the latter says how a model's files are read
            if (version := storage.version(name)) is not None:
                found[name] = list(version)
        return found

    def described(self) -> dict[str, str]:
        """Each source, by its name in messages: where it is, and a sum of the states of its files."""
        found = {"source" if self is one else f"source {n}": one for n, one in enumerate((*self._others, self), 1)}
        sums = {name: crc32(json.dumps(one.states, sort_keys=True).encode()) for name, one in found.items()}
        return {
            name: f"{storage_at(one.path).location}, files {sums[name]:08x}" for name, one in reversed(found.items())
        }

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Tell removals that they are read, as a load does."""
        with contextlib.ExitStack() as held:
            for source in (self, *self._others):
                held.enter_context(storage_at(source.path, follow_links=True).in_use(METADATA_FILE))
            yield

    def refuse_changes(self) -> None:
        """Raise `LoadError` if the files are not as they were: what was read may be of two saves, each part sound."""
        for other in self._others:
            other.refuse_changes()
        try:
            if self._look() == self.states:
                return
        except CheckpointNotFoundError as error:
            raise replaced_error(self._index.path) from error
        raise replaced_error(self._index.path)


@contextlib.contextmanager
def index_of_plan(directory: Path) -> Iterator[CheckpointIndex]:
    """The index of a source, for the plan in the block. Raises `LoadError` if a save has replaced the source, also
    where an error in the block calls it incomplete or damaged for that.
    """
    version = index_version(directory)
    index = read_index(directory)
    try:
        yield index
    except CheckpointError as error:
        if index_version(directory) != version:
            raise replaced_error(index.path) from error
        raise
    if index_version(directory) != version:
        raise replaced_error(index.path)


def replaced_error(source: str) -> LoadError:
    """The error for a source that has been replaced since it was opened."""
    return LoadError(
        f"{source}: another program has replaced the checkpoint, or changed its files, while it was read. What was "
        "read may be of two saves, and the target does not get its name. Run the command again when no job saves "
        "there, with --restart or to a target of another name"
    )


_Options = TypeVar("_Options", bound=ConversionOptions)

# What the interpreter, numpy and the index take before the first buffer.
_BASE_BYTES = 256 * 1024**2
_TORCH_BYTES = 256 * 1024**2  # what it takes where several processes have met
_LEAST_MEMORY_BYTES = 64 * 1024**2
# Options that a run which resumes may have otherwise.
_OF_A_RUN = ("memory_bytes", "verify", "restart")


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """A tensor of the target, or a part of one, and what it is made of."""

    source: str  # key of the tensor that it comes from; with `*` where many have one row
    parts: int  # how many of the source's tensors it is put together from, or into how many it is taken apart
    transform: str
    target: str  # its key; in brackets the index along axes that count layers and experts
    shape: tuple[int, ...]  # of the tensor on the side that keeps each parameter by itself
    dtype: str
    decided_by: str = ""  # for a reshard, what tells the axis
    guess: bool = False  # that is a name or a shape alone
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """The result of a conversion, planned or written.

    Attributes:
        source, target: directories.
        format: of the side that is not `torch_dist`: `safetensors`, `torch`, `dcp`, `hf`, `megatron-legacy`; of a
            reshard `torch_dist`.
        family: of the model, where one was found.
        source_layout, target_layout: parallel sizes, for showing; empty where a side is not divided.
        keys: row by row; with `dry_run` alone.
        config: the model's `config.json`.
        arguments: Megatron's.
        objects: how many objects the target has.
        tensors, payload_bytes, chunks: of the target.
        guesses: how many tensors are divided by a guess.
        notes: what is good to know.
        left_out: what has no place in the target, with the reason where it is not plain.
        files: that were written; none with `dry_run`.
        file_bytes: of them.
        resumed: an earlier run had begun the target.
        verified: the target was read back and compared with the source.
        copy_s, verify_s: seconds.
    """

    source: str = ""
    target: str = ""
    format: str
    family: str = ""
    source_layout: str = ""
    target_layout: str = ""
    keys: tuple[KeyPlan, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    objects: int = 0
    tensors: int = 0
    payload_bytes: int = 0
    chunks: int = 0
    guesses: int = 0
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    file_bytes: int = 0
    resumed: bool = False
    verified: bool = False
    copy_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that has been planned; nothing has been written."""

    payloads: StoredPayloads  # of everything that is written, open
    source: SourceFiles  # the files behind them, as they were at first
    plan: TargetPlan  # of the target
    keys: Callable[[], Iterable[KeyPlan]]  # rows, one after another, for showing
    report: ConversionReport  # what is known before anything is written
    carry: Callable[[Target], None] = lambda _: None  # adds what is no tensor
    carried: Sequence[str] = ()  # names of the files that `carry` may add


def convert(
    plan: Callable[[_Options], Conversion], places: Places, options: _Options, *, dry_run: bool, progress: bool | None
) -> ConversionReport:
    """Plan a conversion and run it, if its target is free and outside the source. Raises as `reshard_checkpoint`."""
    if not dry_run:
        team = current_team()
        team.first("look at the target", partial(refuse_target, places.source, places.target, restart=options.restart))
        team.first("look at context/", lambda: places.add_context(dry_run=True))
        # An interrupted run has begun the files of so many workers.
        begun = {} if options.restart else team.first("look for begun work", lambda: begun_work(places.target))
        workers = begun.get("--workers")
        options = replace(options, workers=workers) if type(workers) is int else options
    return run_conversion(plan(options), places, options, dry_run=dry_run, progress=progress)


def run_conversion(
    conversion: Conversion, places: Places, options: ConversionOptions, *, dry_run: bool, progress: bool | None
) -> ConversionReport:
    """Write what was planned, or only report it (`dry_run`); closes the payloads. Raises as `reshard_checkpoint`."""
    plan = conversion.plan
    with conversion.payloads, conversion.source.in_use():
        if dry_run:
            written: dict[str, Any] = {"keys": tuple(conversion.keys())}
        else:
            written = _write(conversion, places, options, progress)
    return replace(
        conversion.report,
        source=str(places.source),
        target=str(places.target),
        left_out=(*conversion.report.left_out, *(f"{name}, in the run's directory" for name in places.left_out)),
        tensors=plan.tensors,
        payload_bytes=plan.payload_bytes,
        chunks=plan.chunks,
        **written,
    )


def _write(conversion: Conversion, places: Places, options: ConversionOptions, progress: bool | None) -> dict[str, Any]:
    """Write, compare and publish a target, or finish one; what the report says of it."""
    payloads, plan, source = conversion.payloads, conversion.plan, conversion.source
    named = [] if plan.index_file is None else [plan.index_file[0]]
    total, workers = plan.payload_bytes, options.workers
    fingerprint, team = _work_of(conversion, options), current_team()
    team.same("plan the conversion", fingerprint)
    about = {"files": tuple(sorted(plan.sizes)), "file_bytes": sum(plan.sizes.values())}
    finished = partial(finish_made, places.target, fingerprint, places.finish)
    if not options.restart and team.first("look at the target", finished):
        return {**about, "resumed": True}

    def begin(made: Target) -> None:
        places.add_context()
        made.note((*plan.sizes, *conversion.carried, *named))
        made.reserve(plan.sizes)

    with team_target(places.target, fingerprint, begin, places.finish, restart=options.restart) as made:
        journal, started = made.journal, time.monotonic()
        resumed = bool(journal.written)
        base_bytes = _BASE_BYTES if team.size == 1 else _BASE_BYTES + _TORCH_BYTES
        memory_bytes = max(_LEAST_MEMORY_BYTES, (options.memory_bytes - base_bytes) // 2)

        def write(parts: Sequence[Part]) -> tuple[Mapping[str, WrittenFile], Mapping[tuple[str, int], int]]:
            own = replace(plan, parts=tuple(parts))
            write_all(own, payloads, made, workers=workers, memory_bytes=memory_bytes, advance=bar.advance)
            return journal.written, journal.crcs

        try:
            with Progress("copy", total, shown=progress) as bar:
                for files, crcs in team.divide("write the files", plan.parts, _NBYTES, write, bar.counter):
                    journal.add(files, crcs)
            payloads.check_rest()
        except LoadError:
            source.refuse_changes()  # what looks damaged may be of two saves
            raise
        content = plan.metadata(journal)
        copied = time.monotonic()
        verified = content is not None and options.verify
        if content is not None:
            written = parse_index(content, str(made.folder))
            refuse_other_fingerprints(plan, payloads.index, written)
            if verified:
                with Progress("verify", total, shown=progress) as bar:
                    check_all(plan, payloads, written, journal.crcs, workers=workers, bar=bar)
        checked = time.monotonic()
        if team.rank == 0:
            try:
                conversion.carry(made)
            finally:
                source.refuse_changes()
            sync_folders(made.folder, (*plan.sizes, *conversion.carried))
            if content is not None:
                made.publish(METADATA_FILE, bind_common_file(content, made.folder))
            elif plan.index_file is not None:
                name, index_of = plan.index_file
                made.publish(name, index_of(journal.written))
    return {
        **about,
        "resumed": resumed,
        "verified": verified,
        "copy_s": copied - started,
        "verify_s": checked - copied,
    }


def _work_of(conversion: Conversion, options: ConversionOptions) -> str:
    """What has to be equal for a run to be resumed, as JSON, by names for the message."""
    given = {
        flag_of(each): _said(getattr(options, each.name)) for each in fields(options) if each.name not in _OF_A_RUN
    }
    form, plan = conversion.report.format, conversion.plan.fingerprint()
    return json.dumps({**conversion.source.described(), "format": form, **given, "plan": plan}, default=str)


def _said(value: Any) -> Any:
    """The value of an option; of a file, as a table of a family, what is in it, too: it may change between two runs."""
    with contextlib.suppress(OSError):  # a pattern may be too long for a name
        if isinstance(value, str | os.PathLike) and Path(value).is_file():
            return f"{value} (sha256 {hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16]})"
    return value


def arguments_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments in a common state of plain values; empty if it has none."""
    found = common.get("args")
    return found if isinstance(found, dict) else {}


def in_dtype(payloads: StoredPayloads, dtype: str | None) -> StoredPayloads:
    """Payloads in which the model's floating-point tensors have this dtype."""
    return cast_payloads(payloads, lambda entry: target_dtype(entry, dtype))
