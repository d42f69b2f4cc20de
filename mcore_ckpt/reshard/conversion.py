"""One conversion, whatever it is from and to: from its plan to the moment the target appears.

a source, options -> `Conversion` (nothing is written) -> its rows (`dry_run`), or the target -> `ConversionReport`

`.metadata`, where a format has one, is written last into the folder. The folder gets the target's name when everything
is durable and compared. So what looks like a checkpoint is complete. A source whose files change meanwhile is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError
from mcore_ckpt.directory.iterations import sync_folders
from mcore_ckpt.directory.publish import bind_common_file
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import METADATA_FILE, parse_index
from mcore_ckpt.reshard.copying import check_all, write_all
from mcore_ckpt.reshard.options import ConversionOptions, flag_of
from mcore_ckpt.reshard.plan import TargetPlan, refuse_other_fingerprints, target_dtype
from mcore_ckpt.reshard.target_directory import Target, begun_work, target_folder
from mcore_ckpt.reshard.view import cast_payloads
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import MADE_HERE, StoredPayloads
from mcore_ckpt.tools.runs import Places


class SourceFiles:
    """The index and the files of the tensors with these keys (default: all, and all objects), as they are now. Files
    next to them do not say of which save they are: that the index has not been replaced tells.

    `states`: length, time of change in nanoseconds, and what tells versions apart, by name. Raises
    `CheckpointNotFoundError` if one is missing.
    """

    def __init__(self, index: CheckpointIndex, keys: Collection[str] | None = None) -> None:
        self._index, self._keys = index, keys
        self.states = self._look()

    def _look(self) -> dict[str, list[int]]:
        index, keys = self._index, self._keys
        entries = index.tensors.values() if keys is None else (index.tensors[key] for key in keys)
        files = {chunk.item.file for entry in entries for chunk in entry.chunks}
        if keys is None:
            files |= {entry.item.file for entry in index.objects.values()}
        found, storage = {}, storage_at(index.path, follow_links=True)
        for file in sorted(files - {MADE_HERE}):
            version = storage.version(file)
            if version is None:
                raise CheckpointNotFoundError(
                    f"{storage.path(file)}: the index names this file, but it cannot be found; the checkpoint is "
                    f"incomplete, `mcore-ckpt verify {index.path}` lists what is missing"
                )
            found[file] = [version.size_bytes, version.modified_ns, version.number]
        version = storage.version(METADATA_FILE)
        return found if version is None else {**found, METADATA_FILE: list(version)}

    def refuse_changes(self) -> None:
        """Raise `LoadError` if the files are not as they were: what was read may be of two saves, each part sound."""
        try:
            if self._look() == self.states:
                return
        except CheckpointNotFoundError as error:
            raise replaced_error(self._index.path) from error
        raise replaced_error(self._index.path)


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
_MIN_BUFFER_BYTES = 64 * 1024**2
# Options that a run which resumes may have otherwise.
_OF_A_RUN = ("memory_bytes", "verify", "restart")


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """A tensor of the target, or a part of one, and what it is made of.

    Attributes:
        source: key of the tensor that it comes from; with `*` where many have one row.
        parts: how many of the source's tensors it is put together from, or into how many it is taken apart.
        target: its key; in brackets the index along axes that count layers and experts.
        shape: of the tensor on the side that keeps each parameter by itself.
        decided_by: for a reshard, what tells the axis; `guess` if that is a name or a shape alone.
    """

    source: str
    parts: int
    transform: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    decided_by: str = ""
    guess: bool = False
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


def run_conversion(
    conversion: Conversion, places: Places, options: ConversionOptions, *, dry_run: bool, progress: bool | None
) -> ConversionReport:
    """Write what was planned, or only report it (`dry_run`); closes the payloads. Raises as `reshard_checkpoint`."""
    plan = conversion.plan
    with conversion.payloads:
        if dry_run:
            written: dict[str, Any] = {"keys": tuple(conversion.keys())}
        else:
            written = _write(conversion, places.target, options, progress)
            places.finish()
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


def as_begun(options: _Options, target: Path) -> _Options:
    """Options with the number of workers that an interrupted run has begun `target` with, and so with its files."""
    workers = None if options.restart else begun_work(target).get("--workers")
    return replace(options, workers=workers) if type(workers) is int else options


def _fingerprint(conversion: Conversion, options: ConversionOptions) -> str:
    """Everything that has to be equal for a run to be resumed, by names for the message."""
    source, sums = conversion.payloads.storage.location, json.dumps(conversion.source.states, sort_keys=True)
    given = {flag_of(each): getattr(options, each.name) for each in fields(options) if each.name not in _OF_A_RUN}
    named = {"source": f"{source}, files {crc32(sums.encode()):08x}", "format": conversion.report.format, **given}
    return json.dumps({**named, "plan": conversion.plan.fingerprint()}, default=str)


def _write(conversion: Conversion, target: Path, options: ConversionOptions, progress: bool | None) -> dict[str, Any]:
    """Write, compare and publish a target; what the report says of it."""
    payloads, plan, source = conversion.payloads, conversion.plan, conversion.source
    named = [] if plan.index_file is None else [plan.index_file[0]]
    with target_folder(target, _fingerprint(conversion, options), restart=options.restart) as made:
        resumed = bool(made.journal.written)
        made.note((*plan.sizes, *conversion.carried, *named))
        made.reserve(plan.sizes)
        started, total, workers = time.monotonic(), plan.payload_bytes, options.workers
        try:
            with Progress("copy", total, shown=progress) as bar:
                memory_bytes = max(_MIN_BUFFER_BYTES, (options.memory_bytes - _BASE_BYTES) // 2)
                write_all(plan, payloads, made, workers=workers, memory_bytes=memory_bytes, advance=bar.advance)
            payloads.check_rest()
        except LoadError:
            source.refuse_changes()  # what looks damaged may be of two saves
            raise
        content = plan.metadata(made.journal)
        copied = time.monotonic()
        verified = content is not None and options.verify
        if content is not None:
            written = parse_index(content, str(made.folder))
            refuse_other_fingerprints(plan, payloads.index, written)
            if verified:
                with Progress("verify", total, shown=progress) as bar:
                    check_all(plan, payloads, written, made.journal.crcs, workers=workers, advance=bar.advance)
        checked = time.monotonic()
        try:
            conversion.carry(made)
        finally:
            source.refuse_changes()
        sync_folders(made.folder, (*plan.sizes, *conversion.carried))
        if content is not None:
            made.publish(METADATA_FILE, bind_common_file(content, made.folder))
        elif plan.index_file is not None:
            made.publish(*plan.index_file)
    return {
        "files": tuple(sorted(plan.sizes)),
        "file_bytes": sum(plan.sizes.values()),
        "resumed": resumed,
        "verified": verified,
        "copy_s": copied - started,
        "verify_s": checked - copied,
    }


def arguments_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments in a common state of plain values; empty if it has none."""
    found = common.get("args")
    return found if isinstance(found, dict) else {}


def in_dtype(payloads: StoredPayloads, dtype: str | None) -> StoredPayloads:
    """Payloads in which the model's floating-point tensors have this dtype."""
    return cast_payloads(payloads, lambda entry: target_dtype(entry, dtype))
