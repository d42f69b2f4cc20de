"""A run removes its own old checkpoints: Megatron's async saves on two ranks, and the process that tidies up."""

import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import mcore_ckpt
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import SaveOptions, checkpoint_path, store_url
from mcore_ckpt.directory.iterations import iteration_directories
from mcore_ckpt.format.metadata_read import METADATA_FILE, TRACKER_FILE
from mcore_ckpt.reshard import target_directory
from mcore_ckpt.save import staging, upkeep
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.runs import list_run
from tests.models.test_huggingface import model_tensors, write_hf
from tests.support.gloo_ranks import on_ranks
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.kept_log import kept_log
from tests.support.meanwhile import ahead_of, interrupted_at
from tests.support.object_server import ObjectDirectory
from tests.support.processes import children, until


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "llama", model_tensors())


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """A run of three checkpoints of that model."""
    mcore_ckpt.import_checkpoint(model, tmp_path / "run/iter_0000001", kind="hf", tp=2)
    for number in (2, 3):
        shutil.copytree(tmp_path / "run/iter_0000001", tmp_path / f"run/iter_000000{number}")
    return tmp_path / "run"


def there(run: str) -> list[str]:
    return [path.name for path in iteration_directories(run)]


class Training:
    """One rank of a job that saves as Megatron's training does: the tracker file follows each save."""

    def __init__(self, rank: int, run: str, options: SaveOptions) -> None:
        mcore_ckpt.install()
        self.rank, self.run = rank, run
        self.shared = True
        self.queue = mcore_ckpt.AsyncCallsQueue(options=options)
        self.strategy = mcore_ckpt.TorchDistSaveStrategy(options=options)

    def save(self, iteration: int, *, is_async: bool = True, value: float = 0.0) -> None:
        directory = checkpoint_path(self.run) / f"iter_{iteration:07d}"
        if self.rank == 0 or not self.shared:
            storage_at(directory).ensure()
        torch.distributed.barrier()
        state = {
            "w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), value + iteration), (0, self.rank, 2)),
            "optimizer": ShardedTensor.from_rank_offsets("optimizer.state.m.w", torch.ones(6000), (0, self.rank, 2)),
            "iteration": iteration,
        }
        if store_url(directory) is None:
            request = dist_checkpointing.save(state, str(directory), self.strategy, async_sharded_save=is_async)
        else:  # Megatron-Core's own part needs a client of the store
            state.pop("iteration")
            request = self.strategy.async_save(state, str(directory))
        if is_async:
            request.add_finalize_fn(lambda: self._track(iteration))
            self.queue.schedule_async_request(request)
            self.queue.maybe_finalize_async_calls(blocking=True)
        else:
            self._track(iteration)
        torch.distributed.barrier()

    def _track(self, iteration: int) -> None:
        if self.rank == 0:
            storage_at(self.run).publish(TRACKER_FILE, str(iteration).encode())


def _train(rank: int, run: str, iterations: int, options: SaveOptions) -> list[str]:
    with kept_log(logging.INFO) as said:
        training = Training(rank, run, options)
        for iteration in range(1, iterations + 1):
            training.save(iteration, is_async=iteration % 3 != 0)
        upkeep._finish()  # as at the end of a trainer
        training.queue.close()
    return [text for text in said if "removed" in text]


def test_a_run_keeps_its_newest_checkpoints_and_every_fourth_and_fewer_optimizers(tmp_path: Path) -> None:
    """The second one goes before it has lost its optimizer."""
    options = SaveOptions(keep_last=5, keep_every=4, keep_optimizer_last=2)
    said, of_others = run_ranks(_train, 2, str(tmp_path), 7, options)
    assert of_others == []
    checkpoints = [listed.checkpoint for listed in list_run(tmp_path).checkpoints]
    assert all(checkpoint.whole for checkpoint in checkpoints)
    listed = {checkpoint.iteration: checkpoint.removed for checkpoint in checkpoints}
    assert [iteration for iteration, removed in listed.items() if removed is None] == [4, 6, 7]
    assert all("by keep_optimizer_last=2" in removed.said for removed in listed.values() if removed is not None)
    assert [iteration for iteration, removed in listed.items() if removed is not None] == [3, 5]
    assert re.search("removed the optimizer's state of .*iter_0000005", " ".join(said))


def test_a_run_in_an_object_store_does_so(object_directory: ObjectDirectory) -> None:
    run_ranks(_train, 2, f"{object_directory.url}/run", 2, SaveOptions(keep_last=1))
    assert there(f"{object_directory.url}/run") == ["iter_0000002"]
    assert {name.split("/")[1] for name in object_directory.names()} == {TRACKER_FILE, "iter_0000002"}


@on_ranks(2)
def test_what_a_load_reads_stays_as_long_as_it_does(rank: int, tmp_path: Path) -> None:
    run = str(tmp_path)
    training = Training(rank, run, SaveOptions(keep_last=1))
    training.save(1)
    with storage_at(tmp_path / "iter_0000001").in_use(METADATA_FILE):  # as a load of another job
        for iteration in (2, 3):
            training.save(iteration)
        if rank == 0:
            until(lambda: "iter_0000002" not in there(run))
            assert there(run) == ["iter_0000001", "iter_0000003"]
    training.save(4)
    upkeep._finish()
    assert rank or there(run) == ["iter_0000004"]


@on_ranks(2)
def test_what_fails_is_a_line_in_the_log_and_no_failed_save(rank: int, tmp_path: Path) -> None:
    run = str(tmp_path)
    with kept_log() as said:
        training = Training(rank, run, SaveOptions(keep_last=1))
        training.save(1)
        if rank == 0:
            (process,) = upkeep._started
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: any("was killed by SIGKILL" in text for text in said))
        training.save(2)
        if rank == 0:
            until(lambda: there(run) == ["iter_0000002"])
            (tmp_path / TRACKER_FILE).write_text("half of 1")
            upkeep.checkpoint_published(tmp_path / "iter_0000002", training.strategy.options)
        upkeep._finish()
    if rank == 0:
        assert there(run) == ["iter_0000002"]
        assert "the next save starts another" in said[0]
        assert any("could not be removed after iter_0000002" in text and "half of 1" in text for text in said)


def _export_all(run: Path, *names: str, **options: Any) -> list[str]:
    """What is said where these checkpoints are published one after the other, and the trainer ends."""
    with kept_log(logging.INFO) as said:
        for name in names:
            upkeep.checkpoint_published(run / name, SaveOptions(**options))
        upkeep._finish()
    return said


def test_models_are_exported_beside_training_the_newest_first(
    model: Path, run: Path, object_directory: ObjectDirectory, tmp_path: Path
) -> None:
    models = tmp_path / "\udcff"  # a byte that is no UTF-8
    others = models / "iter_0000009.partial/model.safetensors"  # which another run has begun
    others.parent.mkdir(parents=True)
    others.touch()
    for place in (str(models), f"{object_directory.url}/models"):
        said = _export_all(
            run, "iter_0000001", "iter_0000002", "iter_0000003", export_to=place, export_config=str(model)
        )
        assert any("iter_0000003: exported to" in text for text in said)
        assert not any("iter_0000009" in text for text in said)
        listed = {each.checkpoint.name: each.exported for each in list_run(run).checkpoints}
        assert listed["iter_0000003"]
        skipped = [name for name, exported in listed.items() if not exported]
        assert all(any(f"{name} is not exported, since" in text for text in said) for name in skipped)
        storage = storage_at(f"{place}/iter_0000003")
        found = safetensors.torch.load(storage.read("model.safetensors"))
        assert found.keys() == model_tensors().keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in model_tensors().items())
        storage.delete("model.safetensors.index.json")  # it comes last
        assert not any(each.exported for each in list_run(run).checkpoints if each.checkpoint.name == "iter_0000003")
    assert [path for path in models.iterdir() if path.suffix == ".partial"] == [others.parent]
    assert others.exists()


def test_two_runs_of_one_trainer_are_looked_after_each_by_itself(model: Path, run: Path, tmp_path: Path) -> None:
    other, models = tmp_path / "other", str(tmp_path / "models")
    (run / TRACKER_FILE).unlink()  # the import's
    shutil.copytree(run, other)
    for place, name in ((run, "iter_0000003"), (other, "iter_0000002")):
        options = SaveOptions(export_to=f"{models}/{place.name}", export_config=str(model), keep_last=1)
        upkeep.checkpoint_published(place / name, options)
    upkeep._finish()
    assert (there(str(run)), there(str(tmp_path / "models/run"))) == (["iter_0000003"], ["iter_0000003"])
    assert "iter_0000001" not in there(str(other))
    assert there(str(tmp_path / "models/other")) == ["iter_0000002"]


def test_neither_models_nor_copies_go_into_the_run_itself(run: Path) -> None:
    for options in (SaveOptions(export_to=str(run / "hf")), SaveOptions(drain_to=str(run / "iter_0000001"))):
        with pytest.raises(OptionError, match=r"(export|drain)_to='.*': lies in the run itself"):
            mcore_ckpt.FileSystemWriterAsync(run / "iter_0000004", options=options)
        mcore_ckpt.FileSystemWriterAsync(run / "any name", options=options)  # of which neither is made


def test_an_export_that_was_interrupted_is_finished_behind_the_newest(model: Path, run: Path, tmp_path: Path) -> None:
    """Of two, one is of a checkpoint that was removed meanwhile."""
    for name in ("iter_0000001", "iter_0000002"):
        with interrupted_at(target_directory, "_appear"):
            mcore_ckpt.export_checkpoint(run / name, tmp_path / "models" / name, to="hf")
    shutil.rmtree(run / "iter_0000002")
    said = _export_all(run, "iter_0000003", export_to=str(tmp_path / "models"), export_config=str(model))
    exported = [text.partition(": exported")[0][-12:] for text in said if ": exported to" in text]
    assert exported == ["iter_0000003", "iter_0000001"]
    assert {path.name for path in (tmp_path / "models").iterdir()} == {*exported}


def test_no_error_of_a_client_ends_the_exports(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(upkeep, "_say", lambda level, text: said.append(text))
    with mock.patch.object(upkeep, "storage_at", side_effect=RuntimeError("of a client")):
        assert upkeep._begun_exports({"run": str(run), "export_to": str(tmp_path)}) == []
    assert said == [f"{run}: cannot tell which exports are not finished: RuntimeError: of a client"]


def test_a_model_that_cannot_be_exported_is_one_warning_at_its_save(run: Path, tmp_path: Path) -> None:
    with kept_log() as said:
        dcp.save(
            {"w": torch.ones(3)}, storage_writer=mcore_ckpt.FileSystemWriterAsync(run / "iter_0000009"), no_dist=True
        )
        upkeep.checkpoint_published(run / "iter_0000009", SaveOptions(export_to=str(tmp_path / "models")))
        upkeep._finish()
    (text,) = said
    assert "iter_0000009: could not be exported to" in text
    assert not any((tmp_path / "models").glob("*"))


def test_an_export_writes_nothing_while_training_waits_for_a_save(
    model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is held until the export waits for it; when the save has failed, or ended, the export goes on."""
    options = SaveOptions(keep_last=9)
    upkeep.checkpoint_published(run / "iter_0000001", options)  # starts the process
    write, errors = staging.write_files, [OSError(errno.EIO, "broken")]

    def held(*args: Any, **named: Any) -> Any:
        upkeep.checkpoint_published(run / "iter_0000003", SaveOptions(export_to=str(models)))
        until(lambda: any(models.glob("iter_*/*.safetensors")))
        time.sleep(0.2)  # in which all would be written
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in children(upkeep._started[-1].pid)] == [19]
        assert not any(any(path.read_bytes()) for path in models.glob("iter_*/*.safetensors"))
        if errors:
            raise errors.pop()
        return write(*args, **named)

    monkeypatch.setattr(staging, "write_files", held)
    for models in (tmp_path / "beside a failure", tmp_path / "models"):
        writer = mcore_ckpt.FileSystemWriterAsync(run / "iter_0000004", options=options)
        with pytest.raises(CheckpointException, match="broken") if errors else contextlib.nullcontext():
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
        until((models / "iter_0000003/model.safetensors").exists)
    upkeep._finish()


def test_threads_have_one_process_and_each_counts_its_save(run: Path) -> None:
    started: list[None] = []
    # Long enough for the other thread to come here, too.
    starting = ahead_of(upkeep, "start_interpreter", lambda *_, **__: started.append(time.sleep(0.2)))
    publish = partial(upkeep.checkpoint_published, run / "iter_0000003", SaveOptions(keep_last=9))
    threads = [threading.Thread(target=publish) for _ in range(2)]
    with starting:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (work,) = upkeep._started
    assert len(started) == 1
    with upkeep.training_waits():
        with upkeep.training_waits():
            assert work.page.training_waits
        assert work.page.training_waits
    assert not work.page.training_waits
    upkeep._finish()
    assert work.dead


def test_a_trainer_ends_with_the_process_though_a_fork_holds_its_pipe(run: Path) -> None:
    """A thread that forks while the process is started gives the fork what the process writes to."""
    held = threading.Event()
    with ahead_of(upkeep._UpkeepProcess, "_log_lines", lambda _: held.wait()):
        upkeep.checkpoint_published(run / "iter_0000003", SaveOptions(keep_last=9))
        upkeep._finish()
    (work,) = upkeep._started
    held.set()
    assert work.dead


def test_a_save_after_the_trainers_last_wait_is_published_and_says_what_is_left(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an `atexit` function that was registered before this package was imported, and so is called after its own."""
    monkeypatch.setattr(upkeep, "_is_over", False)
    upkeep._end()
    writer = mcore_ckpt.FileSystemWriterAsync(run / "iter_0000009", options=SaveOptions(keep_last=1))
    with kept_log() as said:
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    (text,) = said
    assert "the trainer ends, and has waited for it already. The next run removes old checkpoints" in text
    assert [each.checkpoint.whole for each in list_run(run).checkpoints] == [True] * 4
    assert all(work.dead for work in upkeep._started)
