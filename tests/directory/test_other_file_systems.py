"""Every way of writing a checkpoint, on a file system that loses what was not synced, fails, lags, and refuses.

After each operation of a save (or reshard, import, repair, removal) the processes might be killed, or the power might
go; what would be there then is looked at, from the file system's own record, without a second save. See `fuse_memory`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory.publish import remove_tensors
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, METADATA_FILE, encode_config
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.megatron import serialization
from mcore_ckpt.megatron.strategy import TorchDistSaveStrategy
from mcore_ckpt.models.conversions import import_checkpoint
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from mcore_ckpt.tools.repair import repair_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.fuse_memory import FuseMount, Misbehaviour
from tests.support.moments import check_each_moment, check_never_gone_again, damaged_copy, sync

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

ELEMENTS = 60_000
_REFUSED = None


# --- ways of writing --------------------------------------------------------------------------------------------------


def state(value: float) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    tensors = {"w": torch.full((ELEMENTS,), value), "more": torch.full((10,), value)}
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def save_sync(value: float, path: Path) -> None:
    serialization.save_common({"value": value}, path)
    TorchDistSaveStrategy(options=SaveOptions()).save(state(value), path)


def save_persistent(value: float, path: Path) -> None:
    serialization.save_common({"value": value}, path)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(TorchDistSaveStrategy(options=SaveOptions()).async_save(state(value), path))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close(abort=True)


def save_dcp(value: float, path: Path) -> None:
    tensors = {"w": torch.full((ELEMENTS,), value), "more": torch.full((10,), value)}
    dcp.save(tensors, storage_writer=FileSystemWriterAsync(path, options=SaveOptions()), no_dist=True)


def look(path: Path, *, by_stock: bool = True) -> float | None:
    """The value that all of a checkpoint has, by our reader and by DCP's own; `_REFUSED` if there is none.

    Raises:
        AssertionError: it is a mix, or the readers do not agree.
    """
    found: list[float | None] = []
    for reader in (FileSystemReader, dcp.FileSystemReader) if by_stock else (FileSystemReader,):
        tensors = {"w": torch.zeros(ELEMENTS), "more": torch.zeros(10)}
        try:
            dcp.load(tensors, storage_reader=reader(path), no_dist=True)
        except (Exception, dcp.CheckpointException):  # noqa: BLE001  (stock raises what it comes across)
            found.append(_REFUSED)
            continue
        values = set(torch.cat(list(tensors.values())).tolist())
        assert len(values) == 1, f"{path}: a mix of {values}, by {reader}"
        found.append(values.pop())
    assert len(set(found)) == 1, f"{path}: ours and DCP read {found}"
    if found[0] is not _REFUSED and list(path.glob("common.pt*")):
        assert serialization.load_common(path) in ({"value": found[0]}, {})  # (an import makes an empty one)
    return found[0]


@dataclass
class Case:
    """One way of writing.

    Attributes:
        before: prepares; takes the mounted directory.
        work: what is looked at, moment by moment.
        old: the value before; None: no checkpoint.
        new: the value after.
        by_stock: whether stock is asked, too: it does not see damage.
    """

    before: Callable[[Path], object]
    work: Callable[[Path], object]
    old: float | None
    new: float
    by_stock: bool = True


def _save_case(save: Callable[[float, Path], None], exists: bool) -> Case:
    def before(path: Path) -> None:
        (path / "c").mkdir()
        if exists:
            save(1.0, path / "c")

    return Case(before, lambda path: save(2.0, path / "c"), 1.0 if exists else _REFUSED, 2.0)


def _source(path: Path) -> None:
    (path / "source").mkdir()
    save_sync(2.0, path / "source")
    (path / "source" / "metadata.json").write_bytes(encode_config())


def _damaged(path: Path) -> None:
    _source(path)
    damaged_copy(path / "source", path / "c")


def _without_index(path: Path) -> None:
    """As `_damaged`; `.metadata` is damaged, too, and a file is missing."""
    _damaged(path)
    with (path / "c" / ".metadata").open("r+b") as stream:
        stream.seek(100)
        stream.write(b"\xff" * 8)
    sync(path / "c" / ".metadata")
    min((path / "c").glob("*.distcp"), key=lambda file: file.stat().st_size).unlink()


def _reshard(path: Path) -> None:
    reshard_checkpoint(path / "source", path / "c", tp=2, pp=1)


def _repair(path: Path) -> None:
    report = verify_checkpoint(path / "c")
    assert not report.whole
    assert repair_checkpoint(report, path / "source").whole


def _with_more(path: Path) -> None:
    """A checkpoint with a tensor that is going to be removed."""
    from megatron.core.dist_checkpointing import ShardedTensor

    (path / "c").mkdir()
    serialization.save_common({"value": 2.0}, path / "c")
    extra = {"extra": ShardedTensor.from_rank_offsets("extra", torch.zeros(50_000))}
    TorchDistSaveStrategy(options=SaveOptions()).save({**state(2.0), **extra}, path / "c")


CASES = {
    "in line, new": _save_case(save_sync, False),
    "in line, replacing": _save_case(save_sync, True),
    "persistent, replacing": _save_case(save_persistent, True),
    "DCP, replacing": _save_case(save_dcp, True),
    "reshard": Case(_source, _reshard, _REFUSED, 2.0),
    "import": Case(_source, lambda path: import_checkpoint(path / "source", path / "c"), _REFUSED, 2.0),
    "repair": Case(_damaged, _repair, _REFUSED, 2.0, by_stock=False),
    "repair of an index": Case(_without_index, _repair, _REFUSED, 2.0, by_stock=False),
    "removal": Case(_with_more, lambda path: remove_tensors(path / "c", "extra"), 2.0, 2.0),
}


def check_moments(case: Case, mount: FuseMount, scratch: Path) -> None:
    case.before(mount.path)

    def judge(there: Path, what: str) -> float | None:
        found = look(there, by_stock=case.by_stock)
        assert found in (case.old, case.new), f"{what}: {found}"
        return found

    found = check_each_moment(mount, "c", lambda: case.work(mount.path), judge, scratch)
    check_never_gone_again(found, case.new)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_neither_kill_nor_loss_of_power_harms(case: Case, mount: FuseMount, tmp_path: Path) -> None:
    check_moments(case, mount, tmp_path / "moments")


# --- oddities ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("oddity", [{"short_writes": True}, {"no_direct": True}], ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("save", [save_sync, save_persistent, save_dcp])
def test_what_the_file_system_cannot_do_is_done_without(
    save: Callable[[float, Path], None], oddity: dict[str, bool], mount: FuseMount
) -> None:
    mount.behave(Misbehaviour(**oddity))  # type: ignore[arg-type]
    path = mount.path / "c"
    path.mkdir()
    for value in (1.0, 2.0):
        save(value, path)
        assert look(path) == value
    assert not [name for name in path.iterdir() if name.name.startswith(INCOMPLETE_MARKER)]
    # Megatron would write `metadata.json` now; these saves are made without it.
    assert {problem.file for problem in verify_checkpoint(path).problems} <= {"metadata.json"}


def test_a_listing_that_lags_behind_harms_nothing(mount: FuseMount) -> None:
    """A checkpoint was published, a save into it was killed, and the listing shows neither."""
    path = mount.path / "c"
    path.mkdir()
    save_sync(1.0, path)
    (path / INCOMPLETE_MARKER).write_text('{"first_file": 0, "replaces": []}')
    mount.behave(Misbehaviour(lag_s=3600))
    assert METADATA_FILE not in {file.name for file in path.iterdir()}
    child = os.fork()
    if child == 0:
        try:
            TorchDistSaveStrategy(options=SaveOptions()).async_save(state(2.0), path)  # and no commit
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert look(path) == 1.0
    for value in (3.0, 4.0):
        save_sync(value, path)
        assert look(path) == value
    mount.behave(Misbehaviour(lag_s=0.3))
    until_s = time.monotonic() + 2.0
    value = 5.0
    path = mount.path / "by-dcp"
    while time.monotonic() < until_s:
        save_dcp(value, path)
        assert look(path) == value
        value += 1
