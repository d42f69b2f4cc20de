"""What `.metadata` of a save holds, from its plan and results, and the way back: the plan from a loaded index. Then
what a save took (phases, bytes, the slowest file), for a log line and a trace.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mcore_ckpt.core.console import line_level, logger_of, show_aside
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.fingerprints import products
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, PackedTensors
from mcore_ckpt.format.integrity import (
    NO_FINGERPRINT,
    DataFileName,
    Manifest,
    ManifestFile,
    data_file_name,
    data_file_of,
    id_in_names,
    with_id,
)
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.metadata_write import ChunkFactors, MetadataEncoder
from mcore_ckpt.save.buckets import GlobalPlan, LocalPlan, SavedPlan, WrittenFile
from mcore_ckpt.state.torch_classes import plans_of_index, to_dcp_metadata


def metadata_of_save(
    plan: GlobalPlan,
    encoder: MetadataEncoder,
    objects: Sequence[tuple[ObjectEntry, ...]],
    files: Sequence[tuple[WrittenFile, ...]],
    *,
    save_id: bytes,
    storage_meta: dict[str, Any],
    common: ManifestFile | None = None,
) -> tuple[bytes, Manifest | None]:
    """The content of `.metadata`, and its manifest. Raises `PlanError` if two ranks have written objects of one key.

    `objects` are index entries of each rank's objects, file by file; `files` each rank's files, in the order of its
    plan. Where one has no footer, `.metadata` has no manifest.
    """
    entries: dict[str, ObjectEntry] = {}
    for rank, of_rank in enumerate(objects):
        for entry in of_rank:
            if entry.fqn in entries:
                raise PlanError(f"{entry.fqn}: rank {rank} writes an object that another rank has written, too")
            entries[entry.fqn] = entry
    written = list(chain.from_iterable(files))
    manifest = _manifest(save_id, written, encoder, common) if all(f.has_footer for f in written) else None
    content = encoder.encode(
        entries,
        files={name: with_id(name, save_id) for name, _ in plan.files},
        storage_meta=storage_meta,
        manifest=manifest,
    )
    return content, manifest


def _manifest(
    save_id: bytes, files: Sequence[WrittenFile], encoder: MetadataEncoder, common: ManifestFile | None
) -> Manifest:
    """The manifest of a save."""
    order = encoder.order  # the number of each tensor item among those of all files
    crcs = list(chain.from_iterable(file.crcs for file in files))
    firsts = list(accumulate((len(file.crcs) for file in files), initial=0))
    cumulative: dict[int, array[int]] = {}
    for first, file in zip(firsts, files, strict=False):
        at = 0
        for number, count in zip(file.long_payloads, file.inner_blocks, strict=True):
            cumulative[first + number] = file.blocks[at : at + count]
            at += count
    summed = [(n, cumulative[number]) for n, number in enumerate(order) if number in cumulative] if cumulative else []
    listed = {file.name: ManifestFile(file.size_bytes, file.table_crc32, save_id) for file in files}
    if common is not None:
        listed[COMMON_FILE] = common
    ordered = array("I", [crcs[number] for number in order])
    ordered.extend(chain.from_iterable(file.object_crcs for file in files))
    return Manifest(
        save_id,
        dict(sorted(listed.items())),
        ordered,
        array("Q", [n for n, _ in summed]),
        array("I", [len(sums) for _, sums in summed]),
        array("I", chain.from_iterable(sums for _, sums in summed)),
        fingerprints=None if encoder.factors is None else _fingerprints(encoder.factors, order, crcs, files, firsts),
    )


def _fingerprints(
    factors: ChunkFactors,
    order: Sequence[int],
    crcs: Sequence[int],
    files: Sequence[WrittenFile],
    firsts: Sequence[int],
) -> array[int]:
    """The fingerprint of each tensor; -1 of those without. `firsts`: number of the first item of each file."""
    if not factors.firsts:
        return array("q")
    ordered = np.array(crcs, np.uint32)[np.array(order)]
    multipliers = np.array(factors.factors, np.uint32)
    counts = products(ordered, multipliers)
    unknown = set(factors.without)
    if not multipliers.all():
        parts = {first + n: part for first, file in zip(firsts, files, strict=False) for n, part in file.parts}
        for chunk in np.flatnonzero(multipliers == 0).tolist():
            part = parts.get(order[chunk])
            counts[chunk] = part or 0
            if part is None:  # a rank saves without fingerprints, or a third-party callback has written it
                unknown.add(bisect_right(factors.firsts, chunk) - 1)
    sums = np.bitwise_xor.reduceat(counts, np.array(factors.firsts)).astype(np.int64)
    sums[sorted(unknown)] = NO_FINGERPRINT
    return array("q", sums.tobytes())


class LoadedCheckpoint:
    """What a load has found, for the first save of the same job.

    It has the attributes of DCP's `Metadata`, and every rank's plan as `all_local_plans`, made when one of them is
    asked for: Megatron hands on such an object from the strategy of a load to that of a save.

    Args:
        name: of the checkpoint's directory.
        index: of the checkpoint.
    """

    def __init__(self, name: str, index: CheckpointIndex) -> None:
        self.name = name
        self.index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "all_local_plans":
            self.all_local_plans = plans_of_index(self.index)
            return self.all_local_plans
        if name == "_metadata":
            self._metadata = to_dcp_metadata(self.index)
            return self._metadata
        return getattr(self._metadata, name)


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """What an index says of the layout."""

    plan_id: bytes  # the same on all ranks that have read the same index
    files: Mapping[DataFileName, int]  # length in bytes of each, rank after rank in the order of their numbers
    tensors: PackedTensors
    item_files: np.ndarray[tuple[int], np.dtype[np.int64]]  # of each item, which of `files`

    @classmethod
    def of(cls, index: CheckpointIndex) -> SavedLayout | None:
        """That of a checkpoint; None if its index does not tell all of it, as those of other writers."""
        tensors, manifest = index.tensors, index.manifest
        if manifest is None or not isinstance(tensors, PackedTensors) or index.mcore_data:
            return None
        sizes: dict[DataFileName, int] = {}
        for name, file in manifest.files.items():
            told = data_file_of(name)
            if told is not None and told.save == id_in_names(manifest.save_id):
                sizes[told] = file.size_bytes
            elif name != COMMON_FILE:
                return None
        files = {told: sizes[told] for told in sorted(sizes, key=lambda told: told[:2])}
        numbers: dict[DataFileName | None, int] = {told: number for number, told in enumerate(files)}
        places = tensors.places
        of_file = np.array([numbers.get(data_file_of(name), -1) for name in places.files], dtype=np.int64)
        item_files = of_file[np.frombuffer(places.file_numbers, dtype=np.uint32)]
        if (item_files < 0).any():
            return None
        plan_id = hashlib.blake2b(manifest.save_id, digest_size=16, salt=b"saved layout")
        plan_id.update(f"{len(tensors)} {len(places.lengths)} {sum(places.lengths)}".encode())
        return cls(plan_id.digest(), files, tensors, item_files)

    @property
    def ranks(self) -> int:
        """So many have saved it, at least."""
        return 1 + max((told.rank for told in self.files), default=-1)

    def is_laid_out(self, plan: LocalPlan, rank: int) -> bool:
        """Whether the files of a rank, and the items in them, lie as its plan says."""
        own = [number for number, told in enumerate(self.files) if told.rank == rank]
        found = [(_plain(told), size) for told, size in self.files.items() if told.rank == rank]
        if found != list(zip(plan.files, plan.file_bytes, strict=True)):
            return False
        if not own:
            return not plan.keys
        items = np.flatnonzero((self.item_files >= own[0]) & (self.item_files <= own[-1]))
        places, firsts = self.tensors.places, np.array(self.tensors.firsts, dtype=np.int64)
        starts, lengths = (np.frombuffer(column, dtype=np.int64) for column in (places.offsets, places.lengths))
        items = items[np.lexsort((starts[items], self.item_files[items]))]
        if not (
            np.array_equal(self.item_files[items] - own[0], plan.file_codes)
            and np.array_equal(np.stack((starts[items], lengths[items]), axis=1).reshape(-1), plan.places)
        ):
            return False
        rows = np.searchsorted(firsts, items, side="right") - 1
        forms = [self.tensors.forms[row] for row in rows.tolist()]
        if [self.tensors.names[row] for row in rows.tolist()] != plan.keys:
            return False
        if [form.dtype for form in forms] != [plan.dtypes[code] for code in plan.dtype_codes]:
            return False
        if [len(form.shape) for form in forms] != plan.ndims.tolist():
            return False
        boxes: dict[tuple[int, int], bytes] = {}  # many tensors have them in common
        found_boxes = []
        for form, chunk in zip(forms, (items - firsts[rows]).tolist(), strict=True):
            box = boxes.get((id(form), chunk))
            if box is None:
                box = array("q", (*form.shape, *form.offsets[chunk], *form.sizes[chunk])).tobytes()
                boxes[id(form), chunk] = box
            found_boxes.append(box)
        return b"".join(found_boxes) == plan.boxes.tobytes()

    def plan(self) -> SavedPlan:
        """The plan of all ranks."""
        places = self.tensors.places
        order = np.lexsort((np.frombuffer(places.offsets, dtype=np.int64), self.item_files))
        numbers = np.empty(len(order), dtype=np.uint32)
        numbers[order] = np.arange(len(order), dtype=np.uint32)
        told_of = [data_file_of(name) for name in places.files]
        files = [name if told is None else _plain(told) for name, told in zip(places.files, told_of, strict=True)]
        return SavedPlan(
            (),
            tuple(sorted((_plain(told), size) for told, size in self.files.items())),
            tensors=PackedTensors(self.tensors.names, self.tensors.forms, places._replace(files=files)),
            order=array("I", numbers.tobytes()),
        )


def _plain(told: DataFileName) -> str:
    return data_file_name(told.rank, told.number, told.prefix)


_logger = logger_of(__name__)


# A trace may go to another file system than the checkpoint, which may hang; it is then written when that answers.
_TRACE_PATIENCE_S: Final = 5.0

_GB: Final = 1e9


class Span(NamedTuple):
    """A phase of a save, in seconds on the clock of `time.monotonic()`, which all processes of a host share."""

    name: str
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class FileReport:
    """One data file. Times in seconds; `write_s` is summed over the I/O threads."""

    rank: int
    file_name: str
    size_bytes: int
    write_s: float
    fsync_s: float


@dataclass(frozen=True, slots=True)
class Took:
    """What a save took on one rank, in seconds; or on the slowest, each figure by itself."""

    waited_s: float  # what training waited for: the call, and what was waited for when it was finalized
    durable_s: float  # from the beginning of the call until the last data file was durable
    writing_s: float  # of that, from the first byte that was written

    def slower(self, other: Took) -> Took:
        """The larger of each."""
        return Took(
            max(self.waited_s, other.waited_s),
            max(self.durable_s, other.durable_s),
            max(self.writing_s, other.writing_s),
        )


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save, as the coordinator saw it."""

    directory: str  # of the checkpoint
    took: Took  # of the slowest ranks
    published_s: float  # from the plan's beginning to the commit's end, which comes when training asks for it
    # Seconds of each phase: of the slowest rank for `plan`, `stage`, `dispatch` (to the writer process, or the fork)
    # and `write`; of the coordinator for `gather` (waiting for all ranks' results) and `commit`. `writer` is the work
    # of a writer process.
    phases_s: dict[str, float]
    files: tuple[FileReport, ...]  # every rank's files

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def slowest(self) -> FileReport | None:
        """The file that took longest to write and sync."""
        return max(self.files, key=lambda file: file.write_s + file.fsync_s, default=None)

    @property
    def log_level(self) -> int:
        """Level of the save's log line."""
        return line_level(self.size_bytes)

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        slowest = self.slowest
        straggler = ""
        if slowest is not None:
            took_s = slowest.write_s + slowest.fsync_s
            straggler = (
                f"; slowest file {slowest.file_name} of rank {slowest.rank} "
                f"({took_s:.3f} s: write {slowest.write_s:.3f} s, fsync {slowest.fsync_s:.3f} s)"
            )
        took = self.took
        synchronous = " (a synchronous save)" if "write" in self.phases_s else ""
        rate = f" at {self.size_bytes / _GB / took.writing_s:.2f} GB/s" if took.writing_s else ""
        return (
            f"saved {self.size_bytes / _GB:.3f} GB in {len(self.files)} files to {self.directory}: "
            f"training waited {took.waited_s:.3f} s{synchronous}, files durable after "
            f"{took.durable_s:.3f} s{rate}, published after {self.published_s:.3f} s ({phases}){straggler}"
        )


def write_trace(path: Path, save: str, rank: int, spans: Sequence[Span], files: Sequence[FileReport]) -> None:
    """Write this rank's phases as a trace that Chrome (`chrome://tracing`) and Perfetto show. A trace that cannot be
    written is only warned about: the checkpoint is published.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "trainer"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "writer process"}},
    ]
    for span in spans:
        writes = span.name in ("write", "writer")
        events.append(
            {
                "ph": "X",
                "cat": "save",
                "name": span.name,
                "pid": rank,
                "tid": int(span.name == "writer"),
                "ts": span.start_s * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"files": [asdict(file) for file in files]} if writes else {"checkpoint": save},
            }
        )
    name = f"{Path(save).name or 'save'}_rank{rank}.trace.json"

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may fail its save)
            _logger.warning("%s: the trace of a save cannot be written: %s", path, error)

    show_aside(write, patience_s=_TRACE_PATIENCE_S)
