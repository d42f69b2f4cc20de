"""Checkpoints of a run that stay without the state of their optimizer: by a person, or by the run itself, in place.

    retention (which)  ->  plan of the model, as it is stored  ->  copy into new files  ->  publish over the old ones

A checkpoint is saved over by its own model: at each moment the old or the new one is there, complete. The common state
stays as it is, and so does the id of the save. The index says what was removed, when, and by which setting.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.core.errors import CheckpointError, LoadError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory.commit import NOTE, Commit, common_file_in_force, discard, identity_in_force
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import RunCheckpoint, flaw_of_files, is_gone
from mcore_ckpt.directory.retention import (
    GONE,
    REMOVAL,
    PruneDecision,
    PruneReport,
    lock_of,
    prune_run,
    reason_to_stay,
)
from mcore_ckpt.format.index import CheckpointIndex, Removed, is_flat_bucket
from mcore_ckpt.format.integrity import SAVE_ID_BYTES, Identity, tells_save, with_id
from mcore_ckpt.format.metadata_read import COMMON_FILE, INTEGRITY_FILE, METADATA_FILE, parse_index, read_index
from mcore_ckpt.reshard.conversion import write_all
from mcore_ckpt.reshard.plan import DividedTensor, TargetPlan, plan_torch_dist, refuse_other_fingerprints
from mcore_ckpt.reshard.target_directory import Journal, Target, bind_common_file
from mcore_ckpt.save.jobs import work_for_trainer
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import data_file_rank, is_optimizer_key
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

FAILED: Final = "its optimizer's state could not be removed"
_SAVED_AGAIN: Final = "it has been saved again"
_WORKERS: Final = 2
_BUFFERS_BYTES: Final = 128 * 1024**2


def remove_optimizers(
    run: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | None = None,
    remove: bool = False,
    saved_last: str | None = None,
) -> PruneReport:
    """Decide which checkpoints of a run can lose their optimizer's state, and with `remove` remove it: none that
    `prune_run`, with these arguments, would keep, nor incomplete ones. `saved_last` is given by jobs.
    """
    found = prune_run(
        run,
        keep_last=keep_last,
        keep_every=keep_every,
        saved_last=saved_last,
        counts=lambda index: any(map(is_optimizer_key, index.tensors)),
    )
    by = f"keep_optimizer_last={keep_last}" if saved_last else f"mcore-ckpt prune --optimizer-last {keep_last}"
    decisions = []
    for decision in found.decisions:
        try:
            decisions.append(decision if decision.keep else _decide(decision.checkpoint, run, by, remove=remove))
        except (LoadError, SaveError, OSError) as error:  # the others do not wait for it
            if is_gone(decision.checkpoint.path):
                decisions.append(PruneDecision(decision.checkpoint, False, GONE))
                continue
            decisions.append(PruneDecision(decision.checkpoint, True, f"{FAILED}: {error}"))
    return PruneReport(str(run), remove, tuple(decisions))


def _decide(checkpoint: RunCheckpoint, run: str | os.PathLike[str], by: str, *, remove: bool) -> PruneDecision:
    keep, storage = partial(PruneDecision, checkpoint, True), storage_at(checkpoint.path)
    if not checkpoint.whole:
        return keep("it is not complete")
    if checkpoint.drain is not None and checkpoint.drain.files is not None:
        return keep("its files lie on several nodes")
    judged, index = identity_in_force(storage), read_index(checkpoint.path)
    if checkpoint.removed is not None:
        left = _left_by_removal(storage, index)
        if not left:
            return keep("it is model-only already")
        if remove and (why := _under_note(storage, judged, checkpoint, run, lambda _: discard(storage, left))):
            return keep(why)
        return PruneDecision(checkpoint, False, "a removal was interrupted", stays_bytes=checkpoint.size_bytes)
    items = list(index.items())
    going = [item.length for key, _, item in items if is_optimizer_key(key)]
    if not going or len(going) == len(items):
        return keep("it has nothing else" if going else "it has no optimizer's state")
    if not remove:
        return PruneDecision(checkpoint, False, "old", stays_bytes=checkpoint.size_bytes - sum(going))
    if (why := flaw_of_files(checkpoint.path) or lock_of(storage)) is not None:
        return keep(why)
    what = f"the optimizer's state ({counted(len(going), 'item')}, {human_bytes(sum(going))})"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    without_id = tuple(name for name in sorted(index_files(index)) if not tells_save(name))
    saved_at_ns = round((checkpoint.saved_at_s or 0.0) * 1e9)
    tensors = sum(is_optimizer_key(key) and not is_flat_bucket(key) for key in index.tensors)
    removed = Removed(f"{what} was removed on {when} by {by}", saved_at_ns, without_id, tensors)
    under_note = partial(_under_note, storage, judged, checkpoint, run)
    try:
        why = _save_over(storage, index, removed, under_note)
    except LoadError:
        if identity_in_force(storage) == judged:
            raise
        why = _SAVED_AGAIN  # and its files are gone
    if why is not None:
        return keep(why)
    return PruneDecision(checkpoint, False, "model only", stays_bytes=sum(storage.sizes().values()))


_Change = Callable[[Commit], None]


def _under_note(
    storage: Storage, judged: Identity | None, checkpoint: RunCheckpoint, run: str | os.PathLike[str], change: _Change
) -> str | None:
    """Change a checkpoint with a note there, which keeps saves out; or why it must stay as it is."""
    with Commit.begin(storage, {REMOVAL: True}) as commit:
        why = _SAVED_AGAIN if commit.base != judged else reason_to_stay(checkpoint, run, commit.id, storage)
        if why is None:
            change(commit)
        return why


def _left_by_removal(storage: Storage, index: CheckpointIndex) -> list[str]:
    """Data files that a removal which was killed has left: not of the index, older than it, and either with the id of a
    save in their names or files of the checkpoint before.
    """
    published, named = storage.version(METADATA_FILE), index_files(index)
    before = () if index.removed is None else index.removed.files
    others = [name for name in storage.list() if name not in named and (tells_save(name) or name in before)]
    found = {name: storage.version(name) for name in others}
    until_ns = 0 if published is None else published.modified_ns
    return [name for name, version in found.items() if version is not None and version.modified_ns <= until_ns]


def _save_over(
    storage: Storage, index: CheckpointIndex, removed: Removed, under_note: Callable[[_Change], str | None]
) -> str | None:
    """Write the model of a checkpoint, and publish it in the place of all its state, under the same save's id; or why
    that must stay. Writing takes long: the note is made behind it, so that a save which begins there comes first.
    """
    path, journal = checkpoint_path(index.path), Journal()
    journal.save_id = journal.save_id if index.manifest is None else index.manifest.save_id
    plan = _plan_of_model(index, partial(with_id, save_id=secrets.token_bytes(SAVE_ID_BYTES)))
    assert plan.index is not None
    plan = replace(plan, index=replace(plan.index, removed=removed))
    made = Target(path, storage, journal, lambda *_: None)
    is_decided = False

    def publish(commit: Commit) -> None:
        nonlocal is_decided
        storage.keep_owner((*plan.sizes, NOTE + commit.id), METADATA_FILE)
        try:
            commit.publish(content, needed=plan.sizes, stale=(INTEGRITY_FILE,), spare=are_read)
        finally:
            is_decided = commit.is_over  # it is published, or may yet be

    try:
        made.reserve(plan.sizes)
        with StoredPayloads(index) as payloads:
            write_all(plan, payloads, made, workers=_WORKERS, memory_bytes=_BUFFERS_BYTES, advance=lambda _: None)
            payloads.check_rest()
        common = common_file_in_force(storage, index) or COMMON_FILE
        content = bind_common_file(plan.metadata(journal) or b"", path, common)
        written = parse_index(content, index.path)
        refuse_other_fingerprints(plan, index, written)
        if written.removed is None:
            return "its index has no place for what was removed; reshard it with --drop-optimizer"
        with storage.readers_of(METADATA_FILE) as are_read:
            return under_note(publish)
    finally:
        if not is_decided:
            discard(storage, plan.sizes)


def _plan_of_model(index: CheckpointIndex, name_of: Callable[[str], str]) -> TargetPlan:
    """Each chunk as it is stored, in a file of the rank that has stored it."""
    tensors = [entry for key, entry in index.tensors.items() if not is_optimizer_key(key)]
    check_tiled(index, [entry.fqn for entry in tensors])
    as_stored = []
    for entry in tensors:
        ranks = [data_file_rank(chunk.item.file) or 0 for chunk in entry.chunks]
        as_stored.append(DividedTensor(entry, entry.fqn, [Box(*chunk[:2]) for chunk in entry.chunks], ranks))
    kept = [entry for key, entry in index.objects.items() if not is_optimizer_key(key)]
    objects = [(entry, data_file_rank(entry.item.file) or 0) for entry in kept]
    return plan_torch_dist(index, as_stored, objects, _WORKERS, name_of)


def main(parent_pid: int, page_fd: int, run: str, keep_last: int, keep_every: int | None, saved_last: str) -> None:
    """In a process that a job has for it (`save.upkeep`): do so, and print as JSON what was done, or the error."""
    work_for_trainer(parent_pid, page_fd)
    try:
        report = remove_optimizers(run, keep_last=keep_last, keep_every=keep_every, remove=True, saved_last=saved_last)
        names = [decision.checkpoint.name for decision in report.decisions if not decision.keep]
        failed = [each for each in report.decisions if each.reason.startswith(FAILED)]
        warnings = [f"{each.checkpoint.path}: {each.reason}" for each in failed]
        answer: dict[str, Any] = {"names": names, "nbytes": report.freed_bytes, "warnings": warnings}
    except CheckpointError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))
