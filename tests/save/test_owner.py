"""Several saves, one directory: whatever they do to each other, what is published is whole, and of one of them."""

from __future__ import annotations

import os
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from mcore_ckpt.core.errors import CheckpointError, LoadError, SaveError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory import claim, commit
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, METADATA_FILE
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.megatron import common_state
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.save import transaction
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from mcore_ckpt.storage.local import LocalStorage
from tests.support.gloo_ranks import run_ranks

pytestmark = pytest.mark.timeout(180)


def state(value: float) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), value))}


def strategy(**options: Any) -> TorchDistSaveStrategy:
    return TorchDistSaveStrategy(options=SaveOptions(progress=False, **options))


def loaded(directory: Path) -> float:
    """The one value that the tensor holds."""
    tensor = TorchDistLoadStrategy().load(state(0), directory)["w"]
    (value,) = tensor.unique().tolist()
    return float(value)


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def in_child(work: Any) -> int:
    """Exit code of `work` in a process of its own: 0, or 3 if it was refused with an error of ours."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        except SaveError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- two saves of one job ---------------------------------------------------------------------------------------------


def test_a_refused_save_does_not_touch_the_common_state_of_the_one_in_progress(tmp_path: Path) -> None:
    queue = AsyncCallsQueue()
    common_state.save_common({"iteration": 1}, tmp_path)
    queue.schedule_async_request(strategy().async_save(state(1), tmp_path))
    before = names(tmp_path) - {name for name in names(tmp_path) if name.endswith(".distcp")}
    with pytest.raises(SaveError, match="not finalized yet"):
        common_state.save_common({"iteration": 2}, tmp_path)
    assert {name for name in names(tmp_path) if not name.endswith(".distcp")} == before
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert common_state.load_common(tmp_path) == {"iteration": 1}
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_is_skipped_leaves_nothing(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if exists:
        common_state.save_common({"iteration": 1}, tmp_path)
        strategy().save(state(1), tmp_path)
    before = names(tmp_path)
    monkeypatch.setattr(transaction, "is_busy", lambda *_: True)
    common_state.save_common({"iteration": 2}, tmp_path)
    strategy(when_busy="skip").async_save(state(2), tmp_path)
    assert names(tmp_path) - {INCOMPLETE_MARKER} == before


@pytest.mark.parametrize("failing", ["plan", "write"])
def test_a_save_that_fails_leaves_no_common_state(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SaveError("for a test")

    monkeypatch.setattr(transaction, "plan_save" if failing == "plan" else "write_in_line", fail)
    common_state.save_common({"iteration": 2}, tmp_path)
    with pytest.raises(SaveError, match="for a test"):
        strategy().save(state(2), tmp_path)
    assert names(tmp_path) == {INCOMPLETE_MARKER}


def test_an_interrupted_save_lets_the_directory_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy().save(state(1), tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "write_in_line", interrupt)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            strategy().save(state(2), tmp_path)
    strategy().save(state(3), tmp_path)  # while somebody still holds the traceback
    assert interrupted.value is not None
    assert loaded(tmp_path) == 3


@pytest.mark.parametrize("mode", ["in line", "beside training"])
@pytest.mark.parametrize("published", [False, True])
def test_a_failing_save_leaves_a_file_that_it_has_not_written(
    published: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock DCP, which knows of no claims, takes the name that the save has planned for its own file."""
    open_really = transaction.SaveDirectory.open

    def opened(directory: transaction.SaveDirectory) -> Any:
        answer = open_really(directory)
        if published:
            dcp.save({"w": torch.ones(5)}, checkpoint_id=str(tmp_path))
        else:
            (tmp_path / "__0_0.distcp").write_bytes(b"still being written")
        return answer

    monkeypatch.setattr(transaction.SaveDirectory, "open", opened)
    queue = AsyncCallsQueue()

    def fails() -> None:
        if mode == "in line":
            strategy().save(state(1), tmp_path)
        else:
            queue.schedule_async_request(strategy().async_save(state(1), tmp_path))
            queue.maybe_finalize_async_calls(blocking=True)

    with pytest.raises(SaveError, match=r"__0_0\.distcp"):
        fails()
    queue.close(abort=True)
    assert (tmp_path / "__0_0.distcp").exists()
    if published:
        kept = {"w": torch.zeros(5)}
        dcp.load(kept, checkpoint_id=str(tmp_path))
        assert (kept["w"] == 1).all()


# --- jobs that overlap ------------------------------------------------------------------------------------------------


def test_a_job_that_runs_is_not_robbed_by_one_that_was_started_beside_it(tmp_path: Path) -> None:
    """The first has not committed when the second comes, and gives its save up when the second has ended."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(strategy().async_save(state(1), tmp_path))
    second = in_child(lambda: strategy().save(state(2), tmp_path))
    queue.close(abort=True)
    assert second == 3 or loaded(tmp_path) == 2, "what the second has published, the first has taken away"
    strategy().save(state(3), tmp_path)
    assert loaded(tmp_path) == 3


def _be_cut_off(tmp_path: Path, ending: str, told: int) -> None:
    """A job on another host that is stopped after its files are written, and goes on when its claim is lost."""
    claim.platform = SimpleNamespace(node=lambda: "another-host")  # type: ignore[assignment]
    claim.BEAT_S, claim.LEASE_S = 3600.0, 0.3  # type: ignore[misc]
    real = claim.Owner.encode
    claim.Owner.encode = lambda self: real(self).replace(b'"beat_s": 3600.0', b'"beat_s": 0.05')  # type: ignore[method-assign]
    queue = AsyncCallsQueue()
    request = strategy().async_save(state(1), tmp_path)
    queue.schedule_async_request(request)
    request.async_fn.wait()
    os.write(told, b".")
    until_s = time.monotonic() + 60
    while not (tmp_path / "go on").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    if ending == "commit":
        queue.maybe_finalize_async_calls(blocking=True)  # must be refused
    else:
        queue.close(abort=True)


@pytest.mark.parametrize("ending", ["commit", "abort"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_job_that_was_taken_for_gone_cannot_harm_the_one_after_it(tmp_path: Path, ending: str, exists: bool) -> None:
    if exists:
        strategy().save(state(5), tmp_path)
    told_here, told = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            _be_cut_off(tmp_path, ending, told)
            code = 0
        except SaveError as error:
            code = 3 if "lost the directory" in str(error) else 98
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    os.read(told_here, 1)
    strategy().save(state(2), tmp_path)  # on this host, after a restart
    (tmp_path / "go on").touch()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (3 if ending == "commit" else 0)
    assert loaded(tmp_path) == 2
    strategy().save(state(4), tmp_path)
    assert loaded(tmp_path) == 4


def test_jobs_that_race_leave_a_checkpoint_of_one_of_them(tmp_path: Path) -> None:
    for number in range(10):
        directory = tmp_path / str(number)
        gate, gate_open = os.pipe()
        children = []
        for value in (1, 2, 3):
            child = os.fork()
            if child == 0:
                code = 99
                try:
                    os.close(gate_open)
                    os.read(gate, 1)
                    common_state.save_common({"iteration": value}, directory)
                    strategy().save(state(value), directory)
                    code = 0
                except SaveError as error:
                    code = 3 if "another save holds" in str(error) else 98
                finally:
                    os._exit(code)
            children.append(child)
        os.close(gate)
        os.close(gate_open)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert 0 in codes, codes
        assert set(codes) <= {0, 3}, codes
        value = loaded(directory)
        assert codes[int(value) - 1] == 0
        assert common_state.load_common(directory) == {"iteration": value}
        assert {name for name in names(directory) if name.startswith(INCOMPLETE_MARKER)} == set()


def _refused(rank: int, directory: str) -> str:
    with pytest.raises(SaveError) as refused:
        strategy().save(state_of_rank(2.0), directory)
    return str(refused.value)


def state_of_rank(value: float) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((100,), value), (0, rank, world))}


def test_every_rank_hears_who_holds_the_directory(tmp_path: Path) -> None:
    held = claim.Claim.take(LocalStorage(tmp_path))
    texts = run_ranks(_refused, 2, str(tmp_path))
    held.release()
    for text in texts:
        assert f"process {os.getpid()} on host" in text


# --- directories that are not what they seem --------------------------------------------------------------------------


def _save_to_own_disk(rank: int, directory: str) -> str:
    commit._FILES_APPEAR_WITHIN_S = 0.2
    with pytest.raises(SaveError) as refused:
        strategy().save(state_of_rank(1.0), f"{directory}/of-host-{rank}")
    return str(refused.value)


def test_ranks_that_write_to_disks_of_their_own_are_told_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"of-host-{rank}").mkdir()
    for text in run_ranks(_save_to_own_disk, 2, str(tmp_path)):
        assert "not shared between the hosts" in text
        assert "is not there" in text
    for rank in (0, 1):
        assert METADATA_FILE not in names(tmp_path / f"of-host-{rank}")


def test_files_that_appear_late_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commit._size
    from_s = time.monotonic() + 0.5
    monkeypatch.setattr(
        commit, "_size", lambda storage, name: None if time.monotonic() < from_s else real(storage, name)
    )
    strategy().save(state(1), tmp_path)
    assert loaded(tmp_path) == 1


def test_a_listing_that_lags_behind_costs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a killed save is there, and the published `.metadata` is missing in the listing."""
    strategy().save(state(1), tmp_path)
    (tmp_path / INCOMPLETE_MARKER).write_text('{"first_file": 0, "replaces": []}')
    real = LocalStorage.list
    monkeypatch.setattr(LocalStorage, "list", lambda self: [name for name in real(self) if name != METADATA_FILE])

    def fail(*_: Any, **__: Any) -> None:
        raise SaveError("for a test")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "write_in_line", fail)
        with pytest.raises(SaveError, match="for a test"):
            strategy().save(state(2), tmp_path)
    assert loaded(tmp_path) == 1
    strategy().save(state(3), tmp_path)
    assert loaded(tmp_path) == 3


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy().save(state(1), tmp_path)
    before = names(tmp_path)

    def fail(path: Any) -> Any:
        raise OSError(5, os.strerror(5), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(LoadError, match=r"cannot be listed: .*EIO"):
            LocalStorage(tmp_path).list()
        with pytest.raises(CheckpointError, match="cannot be listed"):
            strategy().save(state(2), tmp_path)
    assert names(tmp_path) == before
    assert loaded(tmp_path) == 1


# --- plain torch.distributed.checkpoint -------------------------------------------------------------------------------


def dcp_writer(path: Path) -> FileSystemWriterAsync:
    return FileSystemWriterAsync(path, options=SaveOptions(progress=False))


def dcp_loaded(path: Path) -> float:
    found = {"w": torch.zeros(1000)}
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    (value,) = found["w"].unique().tolist()
    return float(value)


def test_overlapping_dcp_saves_do_not_take_each_other_for_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has written its files and waits for another rank when the second begins."""
    first = dcp_writer(tmp_path)
    written, go_on = threading.Event(), threading.Event()
    finish = first.finish

    def finish_late(**arguments: Any) -> None:
        written.set()
        go_on.wait(60)
        finish(**arguments)

    monkeypatch.setattr(first, "finish", finish_late)
    errors: list[BaseException] = []

    def save() -> None:
        try:
            dcp.save({"w": torch.full((1000,), 1.0)}, storage_writer=first, no_dist=True)
        except BaseException as error:  # noqa: BLE001  (looked at below)
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert written.wait(60)
    with pytest.raises(BaseException, match="not finalized yet"):
        dcp.save({"w": torch.full((1000,), 2.0)}, storage_writer=dcp_writer(tmp_path), no_dist=True)
    go_on.set()
    thread.join(60)
    assert not errors
    assert dcp_loaded(tmp_path) == 1


def test_a_dcp_save_that_has_failed_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    """DCP tells no writer that another rank has failed; whoever keeps the exception keeps the writer, too."""
    failed = dcp_writer(tmp_path)

    def fail(**_: Any) -> None:
        raise OSError("for a test")

    failed.finish = fail  # type: ignore[method-assign]
    with pytest.raises(BaseException, match="for a test"):
        dcp.save({"w": torch.full((1000,), 1.0)}, storage_writer=failed, no_dist=True)
    dcp.save({"w": torch.full((1000,), 2.0)}, storage_writer=dcp_writer(tmp_path), no_dist=True)
    assert dcp_loaded(tmp_path) == 2
    with pytest.raises(SaveError, match="given up"):
        FileSystemWriterAsync.finish(failed, dcp_metadata(), [])


def dcp_metadata() -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    return Metadata({})
