"""Where the checkpoint lies that a copy or a conversion makes: a run becomes a run, a checkpoint becomes a checkpoint.

    SRC is a checkpoint            ->  DST is the new one
    SRC is a run, iteration 1000   ->  DST/iter_0001000
    SRC is a directory of NeMo     ->  DST/weights, and DST/context

A tracker file next to a checkpoint that is named as a job names them lets the job load it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.iterations import files_below
from mcore_ckpt.format.metadata_read import (
    MAX_TRACKER_BYTES,
    NEMO_CONTEXT,
    NEMO_WEIGHTS,
    TRACKER_FILE,
    read_small_file,
)
from mcore_ckpt.storage.base import RangeReader, RangeWriter
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.inspection import checkpoint_directory

_ITERATION = re.compile(r"iter_(\d{7,19})")
_RELEASE = "release"
_COPY_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Places:
    """The checkpoint that is read and the one that is made, both directories."""

    source: Path
    target: Path
    context: Path | None = None  # NeMo's description of the model in the source, which goes next to the target

    def finish(self) -> None:
        """Add what lies next to the target, which is complete. Raises `LoadError` and `SaveError`."""
        around = storage_at(self.target.parent)
        if self.context is not None and NEMO_CONTEXT not in around.folders():
            _copy_folder(self.context, self.target.parent / NEMO_CONTEXT)
        own = _number_of(self.target.name)
        if own is None:
            return
        if around.exists(TRACKER_FILE):
            content = read_small_file(self.target.parent, TRACKER_FILE, MAX_TRACKER_BYTES)
            named = content.decode(errors="replace").strip()
            if own < 0 or not named.isascii() or not named.isdigit() or len(named) > 19 or int(named) >= own:
                return
        around.publish(TRACKER_FILE, (_RELEASE if own < 0 else str(own)).encode())


def places_of(source: str | os.PathLike[str], target: str | os.PathLike[str], *, same_format: bool) -> Places:
    """Where to read and what to make. What lies next to NeMo's tensors is kept only for a target of `same_format`."""
    given, taken = checkpoint_path(source), checkpoint_path(target)
    found = checkpoint_directory(given)
    if found == given:
        return Places(found, taken)
    if found.name != NEMO_WEIGHTS:
        return Places(found, taken / found.name)
    if not same_format:
        return Places(found, taken)
    context = given / NEMO_CONTEXT if NEMO_CONTEXT in storage_at(given, follow_links=True).folders() else None
    return Places(found, taken / NEMO_WEIGHTS, context)


def copy_stream(given: RangeReader, writer: RangeWriter) -> None:
    """Copy a file of any size, durably."""
    try:
        for at in range(0, given.size_bytes, _COPY_BYTES):
            writer.write(at, memoryview(given.read(at, min(_COPY_BYTES, given.size_bytes - at))))
        writer.finish(given.size_bytes)
    except BaseException:
        writer.abort()
        raise


def _number_of(name: str) -> int | None:
    """The iteration of a checkpoint named so, -1 for `release`; None if jobs name none so."""
    found = _ITERATION.fullmatch(name)
    return int(found[1]) if found else -1 if name == _RELEASE else None


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a directory that is no checkpoint, and what links in it lead to."""
    reads, writes = storage_at(source, follow_links=True), storage_at(target)
    names = sorted(files_below(source, follow_links=True))
    writes.ensure()
    for name in names:
        with reads.open_reader(name, direct="off") as given:
            copy_stream(given, writes.open_writer(name, size_bytes=given.size_bytes, direct="off"))
