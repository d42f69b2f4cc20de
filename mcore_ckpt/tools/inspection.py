"""What a checkpoint holds, from its index and the sizes of its files: no payload is read, and no torch is needed.

Each `*_rows` function gives one view, as plain rows for a table, for JSON, or for the report: one self-contained HTML
page with the shard grid of any tensor, size by layer, balance of ranks and files.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mcore_ckpt.core.console import counted, human_bytes, human_count
from mcore_ckpt.core.errors import LoadError, SaveError
from mcore_ckpt.core.options import checkpoint_path, local_path
from mcore_ckpt.core.team import current_team
from mcore_ckpt.directory.in_force import tracked_name
from mcore_ckpt.directory.iterations import common_state_flaw, is_megatrons
from mcore_ckpt.format.index import CheckpointIndex, Removed, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import shown_id
from mcore_ckpt.format.metadata_read import METADATA_FILE, NEMO_WEIGHTS, TRACKER_FILE, read_config, read_index
from mcore_ckpt.format.tensor_pickle import DTYPES
from mcore_ckpt.storage.base import FileVersion
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import (
    ParallelLayout,
    data_file_rank,
    grid_of,
    group_of,
    key_filter,
    layout_of_arguments,
    layout_of_chunks,
    optimizer_layout,
    read_plain_state,
)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A global tensor: sizes in elements, `grid` the number of chunks along each axis, `files` in order."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    chunks: int
    grid: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ItemRow:
    """One stored item: bytes `[start, stop)` of `file`; box of its chunk in elements (None for objects)."""

    file: str
    start: int
    stop: int
    half: Literal["tensor_data", "bytes_data"]
    fqn: str
    dtype: str | None
    shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class FileRow:
    """One data file: how many items and bytes of either half it holds, and where these lie."""

    file: str
    rank: int | None
    size_bytes: int | None  # as found on the disk; None if the file is missing
    tensors: int
    tensor_bytes: int
    tensor_data: tuple[int, int] | None  # `[start, stop)` from the first to the last item
    objects: int
    object_bytes: int
    bytes_data: tuple[int, int] | None
    unused_bytes: int | None  # bytes of the file in no item (padding, footer); None if it is missing


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Tensors of one kind; `dtypes` by number of elements, most first."""

    group: str
    tensors: int
    elements: int
    payload_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint at a glance.

    Attributes:
        written_by: `"mcore_ckpt"` if there is a manifest, else `"megatron"` or `"dcp"`.
        save_id: which save it is, as its manifest says, in hexadecimal digits; None if it has none.
        metadata_bytes: size of `.metadata`.
        file_bytes: size of all data files.
        balance: largest over mean bytes of a rank's files; 1.0 is even.
        optimizer: layout of the optimizer's state; None without one.
        layout: the parallel layout that chunks and files show.
        trained_layout: the one that Megatron's arguments name, if they are stored.
        arguments: Megatron's arguments, as stored.
        problems: what the index names but cannot be there.
        removed: what it had when it was saved, and has no longer.
    """

    path: str
    written_by: str
    backend: str | None
    iteration: int | None
    save_id: str | None
    metadata_bytes: int
    file_bytes: int
    files: int
    ranks: int
    balance: float | None
    tensors: int
    chunks: int
    objects: int
    model_elements: int
    model_bytes: int
    optimizer_bytes: int
    optimizer: str | None
    layout: ParallelLayout
    trained_layout: ParallelLayout | None
    groups: tuple[GroupRow, ...]
    arguments: dict[str, Any]
    problems: tuple[str, ...]
    removed: Removed | None = None

    @property
    def origin(self) -> str:
        """Which package has written it, and whose format it has, in words."""
        is_dcp = self.backend is None and self.written_by != "megatron"
        format_of = "torch.distributed.checkpoint" if is_dcp else "Megatron-Core"
        return f"mcore_ckpt, in the format of {format_of}" if self.written_by == "mcore_ckpt" else format_of

    def facts(self) -> list[tuple[str, str]]:
        """What there is to say, each fact under its name."""
        size = f"{human_bytes(self.file_bytes)} in {counted(self.files, 'file')} of {counted(self.ranks, 'rank')}"
        balance = "" if self.balance is None else f" (largest rank / mean {self.balance:.2f})"
        tensors, objects = counted(self.tensors, "tensor"), counted(self.objects, "object")
        holds = f"{tensors} in {counted(self.chunks, 'chunk')}, {objects}"
        trained = "" if self.trained_layout is None else f"; saved at {self.trained_layout} (args)"
        optimizer = "none" if self.removed is None else f"none: {self.removed.said}"
        if self.optimizer is not None:
            optimizer = f"{self.optimizer}, {human_bytes(self.optimizer_bytes)}"
        return [
            ("checkpoint", self.path),
            ("written by", self.origin),
            ("iteration", "-" if self.iteration is None else str(self.iteration)),
            ("save", "no manifest" if self.save_id is None else self.save_id),
            ("size", f"{size}{balance}, .metadata {human_bytes(self.metadata_bytes)}"),
            ("holds", holds),
            ("model", f"{human_count(self.model_elements)} elements, {human_bytes(self.model_bytes)}"),
            ("optimizer", optimizer),
            ("layout", f"{self.layout} (from its chunks){trained}"),
        ]


def checkpoint_directory(path: str | os.PathLike[str]) -> Path:
    """The directory that holds `.metadata`: `path`, the iteration that its tracker file names, or NeMo's `weights`."""
    directory = checkpoint_path(path)
    if storage_at(directory).exists(METADATA_FILE):
        return directory
    if storage_at(directory / NEMO_WEIGHTS).exists(METADATA_FILE):
        return directory / NEMO_WEIGHTS
    tracked = tracked_name(directory)
    return directory if tracked is None else directory / tracked


def holds_weights(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has safetensors files, or their index, and is none of a checkpoint or a run."""
    storage = storage_at(checkpoint_path(path), follow_links=True)
    names = storage.list() if storage.is_directory() else []
    has_weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return has_weights and not {METADATA_FILE, TRACKER_FILE} & set(names)


def index_version(directory: Path) -> FileVersion | None:
    """Which `.metadata` lies in a directory now: equal again, if no save has replaced the checkpoint meanwhile."""
    return storage_at(directory).version(METADATA_FILE)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of the elements; 0 for a dtype that this package does not know."""
    entry = DTYPES.get(dtype)
    return math.prod(shape) * entry.element_bytes if entry else 0


def tensor_rows(index: CheckpointIndex, pattern: str | None = None) -> Iterator[TensorRow]:
    """The tensors whose key matches, in the order of the index."""
    wanted = key_filter(pattern)
    for fqn, entry in index.tensors.items():
        if wanted(fqn):
            files = tuple(dict.fromkeys(chunk.item.file for chunk in entry.chunks))
            nbytes = tensor_bytes(entry.dtype, entry.shape)
            yield TensorRow(fqn, entry.dtype, entry.shape, nbytes, len(entry.chunks), grid_of(entry), files)


def describe_items(index: CheckpointIndex, pattern: str | None = None) -> list[ItemRow]:
    """Every stored item whose key matches, by file and offset: the byte-level view of each bucket."""
    wanted = key_filter(pattern)
    rows = [
        ItemRow(*_place(item), "bytes_data", fqn, None, None, None)
        if chunk is None
        else ItemRow(*_place(item), "tensor_data", fqn, index.tensors[fqn].dtype, chunk.sizes, chunk.offsets)
        for fqn, chunk, item in index.items()
        if wanted(fqn)
    ]
    rows.sort(key=lambda row: (_file_order(row.file), row.start))
    return rows


def _place(item: StoredItem) -> tuple[str, int, int]:
    return item.file, item.offset, item.offset + item.length


def _file_order(file: str) -> tuple[int, str]:
    rank = data_file_rank(file)
    return (-1 if rank is None else rank, file)


def _region(items: Sequence[StoredItem]) -> tuple[int, int] | None:
    """From the first to the last byte of some items of a file."""
    return (min(item.offset for item in items), max(item.offset + item.length for item in items)) if items else None


def _covered_bytes(items: Iterable[StoredItem]) -> int:
    """Bytes that lie in at least one item."""
    covered = end = 0
    for start, stop in sorted({(item.offset, item.offset + item.length) for item in items}):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


def file_rows(index: CheckpointIndex) -> list[FileRow]:
    """The data files that the index names, by rank and name."""
    items: dict[str, tuple[list[StoredItem], list[StoredItem]]] = {}  # of tensors, of objects
    for _, chunk, item in index.items():
        items.setdefault(item.file, ([], []))[chunk is None].append(item)
    rows = []
    sizes = _sizes(index.path, items)
    for file in sorted(items, key=_file_order):
        tensors, objects = items[file]
        size_bytes = sizes.get(file)
        unused = None if size_bytes is None else size_bytes - _covered_bytes((*tensors, *objects))
        halves = [(len(own), sum(item.length for item in own), _region(own)) for own in (tensors, objects)]
        rows.append(FileRow(file, data_file_rank(file), size_bytes, *halves[0], *halves[1], unused))
    return rows


def _sizes(path: str | Path, files: Iterable[str]) -> dict[str, int]:
    """Length of each of these files that is there."""
    storage = storage_at(path)
    found: dict[str, int] = {}
    for file in files:
        with contextlib.suppress(LoadError):
            found[file] = storage.size(file)
    return found


def _groups(index: CheckpointIndex) -> tuple[GroupRow, ...]:
    by_group: dict[str, list[TensorEntry]] = {}
    for fqn, entry in index.tensors.items():
        by_group.setdefault(group_of(fqn), []).append(entry)
    rows = []
    for group, entries in by_group.items():
        dtypes: Counter[str] = Counter()
        for entry in entries:
            dtypes[entry.dtype] += math.prod(entry.shape)
        nbytes = sum(tensor_bytes(entry.dtype, entry.shape) for entry in entries)
        by_elements = tuple(dtype for dtype, _ in dtypes.most_common())
        rows.append(GroupRow(group, len(entries), dtypes.total(), nbytes, by_elements))
    return tuple(sorted(rows, key=lambda row: (row.group.startswith("optimizer"), -row.payload_bytes)))


def summarize_checkpoint(path: str | os.PathLike[str]) -> CheckpointSummary:
    """What a checkpoint holds, at a glance: sizes, dtypes, ranks and files, parallel layout, Megatron's arguments.

    Only `.metadata`, the common state and the sizes of the files are looked at.

    Args:
        path: directory of the checkpoint, or one with a tracker file.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, UnsafePickleError: its index cannot be read. What the index names and is not there is in
            `problems` instead.
    """
    directory = checkpoint_directory(path)
    with in_force(directory):
        return summarize(read_index(directory, strict=False))


@contextlib.contextmanager
def in_force(*directories: Path) -> Iterator[None]:
    """Raises `LoadError` behind the block, whatever came of it, if a save has replaced one of the checkpoints; and
    before it, if the ranks of a command see different ones. (Each host may number a file by itself.)
    """
    versions = [index_version(directory) for directory in directories]
    seen = [None if version is None else version[1:] for version in versions]
    current_team().same(f"open {', '.join(map(str, directories))}", seen)
    try:
        yield
    finally:
        for directory, version in zip(directories, versions, strict=True):
            if index_version(directory) != version:
                raise LoadError(
                    f"{directory}: another program has replaced the checkpoint while it was looked at; run the command "
                    "again when nothing saves there"
                )


def summarize(index: CheckpointIndex) -> CheckpointSummary:
    """`summarize_checkpoint` of an index that has been read."""
    directory = checkpoint_path(index.path)
    common = read_plain_state(index)
    config = read_config(directory)
    files = file_rows(index)
    per_rank = Counter[int]()  # bytes on the disk
    for row in files:
        per_rank.update({} if row.rank is None else {row.rank: row.size_bytes or 0})
    mean = sum(per_rank.values()) / len(per_rank) if per_rank else 0
    groups = _groups(index)
    model = [row for row in groups if not row.group.startswith("optimizer")]
    optimizer = [row for row in groups if row.group.startswith("optimizer")]
    arguments = common.get("args")
    iteration = common.get("iteration")
    missing = [f"{row.file}: the index names this file, but it is not there" for row in files if row.size_bytes is None]
    is_of_megatron, flaw = is_megatrons(directory, index)
    lost = common_state_flaw(directory, index) if is_of_megatron else None
    return CheckpointSummary(
        path=str(directory),
        written_by="mcore_ckpt" if index.manifest is not None else "megatron" if is_of_megatron else "dcp",
        backend=None if config is None else f"{config.sharded_backend} {config.sharded_backend_version}",
        iteration=iteration if isinstance(iteration, int) else None,
        save_id=None if index.manifest is None else shown_id(index.manifest.save_id),
        metadata_bytes=_sizes(directory, (METADATA_FILE,)).get(METADATA_FILE, 0),
        file_bytes=sum(row.size_bytes or 0 for row in files),
        files=len(files),
        ranks=len(per_rank),
        balance=max(per_rank.values()) / mean if mean else None,
        tensors=len(index.tensors),
        chunks=sum(len(entry.chunks) for entry in index.tensors.values()),
        objects=len(index.objects),
        model_elements=sum(row.elements for row in model),
        model_bytes=sum(row.payload_bytes for row in model),
        optimizer_bytes=sum(row.payload_bytes for row in optimizer),
        optimizer=optimizer_layout(index, common),
        layout=layout_of_chunks(index),
        trained_layout=layout_of_arguments(common),
        groups=groups,
        arguments=arguments if isinstance(arguments, dict) else {},
        problems=(*index.problems, *missing, *filter(None, (flaw, lost))),
        removed=index.removed,
    )


# Markup, style and script. All of it ends up in the page, which opens from a disk without a network; the script draws
# from the JSON in `#data`, and puts keys and file names into the page as text, never as markup.
_PAGE = Path(__file__).with_name("report.html")


def write_report(index: CheckpointIndex, path: str | Path) -> None:
    """Write the page to `path`; raises `SaveError` if that cannot be done, and `OptionError` for what is no path."""
    file = local_path(path)
    try:
        # Names that are no UTF-8 are shown as far as they are; the page is made before its file is.
        file.write_bytes(render_report(index).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise SaveError(f"{path}: the report cannot be written: {error.strerror}") from error


def render_report(index: CheckpointIndex) -> str:
    """The page."""
    summary = summarize(index)
    facts = [*summary.facts(), *(("problem", problem) for problem in summary.problems)]
    row = '<tr><th scope="row">{}</th><td class="wrap">{}</td></tr>'
    content = json.dumps(_data(index), separators=(",", ":"))
    parts = {
        "title": html.escape(f"Checkpoint {Path(index.path).name}"),
        "path": html.escape(summary.path),
        "facts": "\n".join(row.format(name, html.escape(value)) for name, value in facts),
        # Inside a script element only these could end it, or open a comment in it.
        "data": content.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    return re.sub("{{([a-z]+)}}", lambda found: parts[found[1]], _PAGE.read_text(encoding="utf-8"))


def _data(index: CheckpointIndex) -> dict[str, Any]:
    files = file_rows(index)
    numbers = {row.file: n for n, row in enumerate(files)}
    return {
        "tensors": [_tensor(entry, numbers) for entry in index.tensors.values()],
        "files": [{"file": row.file, "rank": row.rank} for row in files],
    }


def _tensor(entry: TensorEntry, numbers: dict[str, int]) -> dict[str, Any]:
    return {
        "key": entry.fqn,
        "shape": entry.shape,
        "about": f"{entry.dtype} {[*entry.shape]}, {human_bytes(tensor_bytes(entry.dtype, entry.shape))} in "
        + counted(len(entry.chunks), "chunk"),
        "chunks": [
            (chunk.offsets, chunk.sizes, numbers[chunk.item.file], *_place(chunk.item)[1:]) for chunk in entry.chunks
        ],
    }
