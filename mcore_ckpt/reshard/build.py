"""A target from the first byte to the moment it appears: folder, files, comparison with the source, name.

`.metadata`, where a format has one, is written last into the folder, and the rename to the target's name comes after
everything is durable and compared. So nothing ever looks like a checkpoint and is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.directory.publish import bind_common_file
from mcore_ckpt.format.metadata_read import METADATA_FILE, parse_index
from mcore_ckpt.reshard._slot_writer import write_all
from mcore_ckpt.reshard._written_proof import check_all
from mcore_ckpt.reshard.slots import TargetPlan
from mcore_ckpt.reshard.source_files import SourceFiles
from mcore_ckpt.reshard.target_directory import target_folder
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.tools.payloads import StoredPayloads

# What the interpreter, numpy and the index take before the first buffer.
_BASE_BYTES = 256 * 1024**2
_MIN_BUFFER_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Built:
    """What was written, and how: whether an earlier run had begun it, whether it was compared, seconds."""

    files: tuple[str, ...]
    file_bytes: int
    resumed: bool
    verified: bool
    copy_s: float
    verify_s: float


def build_target(
    payloads: StoredPayloads,
    plan: TargetPlan,
    target: Path,
    *,
    source: SourceFiles,
    workers: int = 2,
    verify: bool = True,
    restart: bool = False,
    move_files: bool = True,
    memory_bytes: int = 1024**3,
    carry: Callable[[TargetFiles], None] = lambda _: None,
    carried: Sequence[str] = (),
    progress: bool | None = False,
) -> Built:
    """Write, check and publish a target.

    Args:
        source: the files that the payloads come from, as they were at first.
        verify: compare the target with the source before it appears, if its format can be read back.
        restart: remove what an earlier run has left.
        move_files: let the kernel copy payloads that stay as they are.
        memory_bytes: for everything.
        carry: adds what is no tensor, before the last file is written.
        carried: names of the files that `carry` may add.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        ChecksumError, CorruptCheckpointError: a damaged source, or a target that is not what was written.
        CheckpointExistsError, OptionError: as `target_folder`.
        SaveError: the target cannot be written; what is done is kept for the next run.
        LoadError: the source cannot be read, or another program has changed its files meanwhile.
    """
    fingerprint = plan.fingerprint(payloads, source.states)
    named = [] if plan.index_file is None else [plan.index_file[0]]
    with target_folder(target, fingerprint, restart=restart) as made:
        files, folder, journal = made.files, made.files.folder, made.journal
        resumed = bool(journal.done)
        made.note((*plan.sizes, *carried, *named))
        files.begin(plan.sizes, resumed=resumed)
        started, total = time.monotonic(), plan.payload_bytes
        try:
            with Progress("copy", total, shown=progress) as bar:
                write_all(
                    plan,
                    payloads,
                    files,
                    journal,
                    memory_bytes=max(_MIN_BUFFER_BYTES, (memory_bytes - _BASE_BYTES) // 2),
                    advance=bar.advance,
                    # What the kernel copies does not pass through here: it is compared when the target is read back.
                    move_files=move_files and verify and plan.index is not None,
                )
            payloads.check_rest()
        except LoadError:
            source.refuse_changes()  # what looks damaged may be of two saves
            raise
        is_compared = verify or journal.unverified
        content = plan.finish(files, journal, payloads, is_compared=is_compared)
        files.finish()
        copied = time.monotonic()
        verified = content is not None and is_compared
        if verified and content is not None:
            written = parse_index(content, str(folder))
            try:
                with Progress("verify", total, shown=progress) as bar:
                    check_all(plan, payloads, written, journal, workers=workers, advance=bar.advance)
            except CorruptCheckpointError:
                journal.forget()  # the next run is not to resume what was written
                raise
        checked = time.monotonic()
        carry(files)
        source.refuse_changes()
        files.sync()
        if content is not None:
            made.publish(METADATA_FILE, bind_common_file(content, folder))
        elif plan.index_file is not None:
            made.publish(*plan.index_file)
    file_bytes = sum(plan.sizes.values())
    return Built(tuple(sorted(plan.sizes)), file_bytes, resumed, verified, copied - started, checked - copied)
