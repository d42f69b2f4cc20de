"""Several saves, one directory: whatever they do to each other, what is published is whole, and of one of them."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.megatron.strategy import TorchDistSaveStrategy
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from mcore_ckpt.save.writer_process import shared_writer
from tests.support.gloo_ranks import made, on_ranks, run_megatron_ranks
from tests.support.processes import children

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from mcore_ckpt.core.errors import CheckpointError, LoadError, SaveError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory import commit
from mcore_ckpt.format.metadata_read import CONFIG_FILE, METADATA_FILE
from mcore_ckpt.megatron import serialization
from mcore_ckpt.megatron.calls import MegatronSave, in_progress
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy
from mcore_ckpt.save import staging, transaction, writer_process
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools.checkpoint import open_checkpoint
from tests.support.local_files import names
from tests.support.processes import exit_code, fork


def state(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), value))}


def strategy(**options: Any) -> TorchDistSaveStrategy:
    return TorchDistSaveStrategy(options=SaveOptions(**options))


def loaded(directory: Path) -> float:
    """The one value that the tensor holds."""
    tensor = TorchDistLoadStrategy().load(state(0), directory)["w"]
    (value,) = tensor.unique().tolist()
    return float(value)


# --- two saves of one job ---------------------------------------------------------------------------------------------


def test_an_interrupted_save_lets_the_directory_go(tmp_path: Path) -> None:
    strategy().save(state(1), tmp_path)
    stopped = mock.patch.object(transaction, "write_in_process", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt) as interrupted:
        strategy().save(state(2), tmp_path)
    strategy().save(state(3), tmp_path)  # while somebody still holds the traceback
    assert interrupted.value is not None
    assert loaded(tmp_path) == 3


def test_a_request_that_is_lost_is_not_in_the_way_of_the_next_save(tmp_path: Path) -> None:
    request = strategy().async_save(state(1), tmp_path)
    assert exit_code(fork(lambda: strategy().save(state(2), tmp_path))) == 3
    del request  # the trainer has had an exception before the request came into a queue
    gc.collect()
    assert exit_code(fork(lambda: strategy().save(state(2), tmp_path))) == 3, "its writer may be writing"
    strategy().save(state(3), tmp_path)
    assert loaded(tmp_path) == 3
    assert len([name for name in names(tmp_path) if name.endswith(".distcp")]) == 1


def _interrupt_at(line: int, work: Callable[[], object]) -> bool:
    """Do `work`, with a Ctrl-C at a line of the code that begins an async save, counted from where it hands over;
    False if it has come to its end before.
    """
    lines = -1

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("/save/transaction.py", "/save/transaction.py", "/save/staging.py")):
            return None
        if frame.f_code.co_name == "_dispatch":
            lines = max(lines, 0)  # next, it is handed over
        if event == "line" and lines >= 0:
            lines += 1
            if lines == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.long
def test_an_async_save_that_is_interrupted_while_it_begins_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever line Ctrl-C comes at: the directory is free, and nobody writes there any more but who has it."""
    monkeypatch.setattr(writer_process, "_CANCEL_DEADLINE_S", 0.05)  # one that is stopped does not hear of it
    for line in itertools.count(1):
        directory = tmp_path / str(line)
        directory.mkdir()
        writer_process.shared_writer().warm_up()
        stopped = writer_process.shared_writer().pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        interrupted = _interrupt_at(line, partial(strategy().async_save, state(1), directory))
        assert not (interrupted and staging.is_busy()), f"line {line}: the staging buffer is taken for good"
        strategy().save(state(2), directory)
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        # Jobs are done in turn: after this one, there is none before it.
        strategy().async_save(state(3), tmp_path).async_fn()
        assert len(list(directory.glob("*.distcp"))) == 1, f"line {line}: something was written after the interruption"
        assert loaded(directory) == 2
        if not interrupted:
            break
    assert line > 15


def test_a_forked_process_that_cleans_up_does_not_touch_the_trainers_save(tmp_path: Path) -> None:
    queue = AsyncCallsQueue()
    request = strategy().async_save(state(1), tmp_path)
    queue.schedule_async_request(request)
    request.async_fn()
    assert exit_code(fork(lambda: queue.close(abort=True))) == 0
    queue.maybe_finalize_async_calls(blocking=True)
    assert loaded(tmp_path) == 1


# --- jobs that overlap ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """Stands for Megatron's `CheckpointingConfig`."""

    sharded_backend: str


def test_a_job_that_was_stopped_does_not_write_its_config_over_that_of_the_one_after_it(tmp_path: Path) -> None:
    """It has published, and is held up before it writes `metadata.json`."""

    def saves(value: int, said: str, ahead_of_the_config: Callable[[], None]) -> None:
        with in_progress(MegatronSave(location=str(tmp_path))):
            strategy().save(state(value), tmp_path)
            ahead_of_the_config()
            serialization.save_config(Config(said), tmp_path)

    def another() -> None:
        assert exit_code(fork(partial(saves, 2, "of the other", lambda: None))) == 0

    saves(1, "of the one that was held up", another)
    assert loaded(tmp_path) == 2
    assert json.loads((tmp_path / CONFIG_FILE).read_text()) == {"sharded_backend": "of the other"}


# --- directories that are not what they seem --------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_write_to_disks_of_their_own_are_told_so(rank: int, tmp_path: Path) -> None:
    commit._FILES_APPEAR_WITHIN_S = 0.2
    directory = tmp_path / f"of-host-{rank}" / "checkpoint"
    directory.mkdir(parents=True)
    part = ShardedTensor.from_rank_offsets("w", torch.ones(100), (0, rank, 2))
    with pytest.raises(SaveError, match=r"(?s)(?=.*not shared between the hosts).*is not there"):
        strategy().save({"w": part}, directory)
    assert METADATA_FILE not in names(directory)


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    strategy().save(state(1), tmp_path)
    before = names(tmp_path)
    with mock.patch.object(os, "scandir", side_effect=OSError(5, os.strerror(5), str(tmp_path))):
        with pytest.raises(LoadError, match=r"cannot be listed: .*EIO"):
            LocalStorage(tmp_path).list()
        with pytest.raises(CheckpointError, match="cannot be listed"):
            strategy().save(state(2), tmp_path)
    assert names(tmp_path) == before
    assert loaded(tmp_path) == 1


# --- plain torch.distributed.checkpoint -------------------------------------------------------------------------------


def dcp_writer(path: Path) -> FileSystemWriterAsync:
    return FileSystemWriterAsync(path, options=SaveOptions())


def test_a_dcp_save_claims_the_directory_before_the_ranks_write(tmp_path: Path) -> None:
    """Megatron's own saver plans without a coordinator's look at all plans."""
    writer = dcp_writer(tmp_path)
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(dcp.SavePlan([]))
    assert exit_code(fork(writer.reset)) == 0  # which is not the child's
    assert exit_code(fork(lambda: strategy().save(state(2), tmp_path))) == 3
    writer.reset()
    assert exit_code(fork(lambda: strategy().save(state(2), tmp_path))) == 0


def test_a_dcp_save_that_has_failed_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    """DCP tells no writer that another rank has failed; whoever keeps the exception keeps the writer, too."""
    failed = dcp_writer(tmp_path)
    failed.finish = mock.Mock(side_effect=OSError("for a test"))  # type: ignore[method-assign]
    with pytest.raises(BaseException, match="for a test"):
        dcp.save({"w": torch.full((1000,), 1.0)}, storage_writer=failed, no_dist=True)
    dcp.save({"w": torch.full((1000,), 2.0)}, storage_writer=dcp_writer(tmp_path), no_dist=True)
    assert open_checkpoint(tmp_path)["w"][:].unique().tolist() == [2.0]
    with pytest.raises(SaveError, match="given up"):
        FileSystemWriterAsync.finish(failed, Metadata({}), [])


# --- many saves -------------------------------------------------------------------------------------------------------

_WARM_UP_SAVES = 20
_MEMORY_NOISE_KB = 8_000


def _memory_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssShmem")):
            return int(line.split()[1])
    raise AssertionError("no such line")


def _held(pids: list[int]) -> dict[str, Any]:
    """What processes hold that could leak."""
    gc.collect()
    return {
        "children": len(children()),
        "python threads": threading.active_count(),
        **{f"descriptors {n}": len(os.listdir(f"/proc/{pid}/fd")) for n, pid in enumerate(pids)},
        **{f"threads {n}": len(os.listdir(f"/proc/{pid}/task")) for n, pid in enumerate(pids)},
        **{f"shared mappings {n}": Path(f"/proc/{pid}/maps").read_text().count("memfd:") for n, pid in enumerate(pids)},
    }


def _save_often(rank: int, directory: Path, saves: int, options: SaveOptions) -> None:
    queue, strategy = AsyncCallsQueue(options=options), TorchDistSaveStrategy(options=options)
    pids = [os.getpid()]
    before: dict[str, Any] = {}
    memory_kb: list[int] = []
    for number in range(saves):
        values = torch.full((20_000,), float(number))
        state = {
            "w": ShardedTensor.from_rank_offsets("w", values, (0, rank, 2)),
            "o": ShardedObject("o", {"number": number}, (2,), (rank,)),
        }
        queue.schedule_async_request(strategy.async_save(state, made(directory / str(number % 3))))
        values.zero_()
        queue.maybe_finalize_async_calls(blocking=number % 2 == 0)
        if number == _WARM_UP_SAVES:
            queue.maybe_finalize_async_calls(blocking=True)
            pids += [pid for pid in [shared_writer().pid] if pid is not None]
            before = _held(pids)
            memory_kb = [_memory_kb(pid) for pid in pids]
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.failures == []
    assert _held(pids) == before
    for pid, kb in zip(pids, memory_kb, strict=True):
        assert _memory_kb(pid) < kb + _MEMORY_NOISE_KB
    queue.close()


@pytest.mark.parametrize("writer", ["persistent", "fork"])
def test_dozens_of_saves_leave_nothing(writer: Any, tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    options = SaveOptions(writer=writer)
    run_megatron_ranks(_save_often, 2, tmp_path, 36, options, deadline_s=300)
    left = [name for name in set(os.listdir("/dev/shm")) - shared_memory if "mcore" in name]
    assert not [name for name in left if not name.startswith("mcore_ckpt-test-")], "(those are of other tests)"


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_and_races_leave_one_whole_checkpoint() -> None:
    """Some of those that `make test-crash` makes by the dozen."""
    kills = "-m tests.save.kills_and_races --kills 14 --races 12 --seed 2024".split()
    command, root = [sys.executable, "-W", "ignore", *kills], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "all as promised" in done.stdout
