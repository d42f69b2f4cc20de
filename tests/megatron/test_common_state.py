"""The common state is written for a save that owns the directory, and for no other: nothing of it is left otherwise."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter

import mcore_ckpt
from mcore_ckpt import (
    AsyncCallsQueue,
    CorruptCheckpointError,
    PlanError,
    SaveError,
    SaveOptions,
    TorchDistLoadStrategy,
    TorchDistSaveStrategy,
)
from mcore_ckpt.directory.commit import Commit, pending_name
from mcore_ckpt.directory.iterations import flaw_of_files
from mcore_ckpt.format import safe_pickle
from mcore_ckpt.format.integrity import id_in_names
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.megatron.versions import differences
from mcore_ckpt.save import transaction
from mcore_ckpt.save.async_queue import AsyncRequest
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.gloo_ranks import on_ranks
from tests.support.kept_log import kept_log
from tests.support.processes import forked, in_child

QUIET = SaveOptions()
IN_DATA_FILES = differences().common_state_is_an_object


def state(value: int, size: int = 1000) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((size,), float(value))), "iteration": value}


@contextmanager
def launch() -> Iterator[Path]:
    """A world of one under `install()`, and a new directory."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mcore_ckpt.install()
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def launched(test: Callable[[Path], None]) -> Callable[..., None]:
    def run() -> None:
        with launch() as directory:
            test(directory)

    return forked(run)


def assert_holds(directory: Path, value: int) -> None:
    loaded = dist_checkpointing.load(state(-1), str(directory))
    assert loaded["iteration"] == value
    assert (loaded["w"] == value).all()


def common_files(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("common.pt")]


@launched
def test_a_save_that_is_refused_has_not_touched_the_common_state_of_the_one_in_progress(directory: Path) -> None:
    dist_checkpointing.save(state(7), str(directory))
    queue = AsyncCallsQueue(options=QUIET)
    first = dist_checkpointing.save(state(1), str(directory), async_sharded_save=True)
    queue.schedule_async_request(first)
    before = {name: (directory / name).read_bytes() for name in common_files(directory)}
    with pytest.raises(SaveError, match="not finalized"):
        dist_checkpointing.save(state(2), str(directory), async_sharded_save=True)
    assert {name: (directory / name).read_bytes() for name in common_files(directory)} == before
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert_holds(directory, 1)


class _Later(TorchDistSaveStrategy):
    """A user's, whose saves are finalized by a queue of its own."""

    queue: AsyncCallsQueue

    def save(self, *args: Any, **kwargs: Any) -> None:
        self.queue.schedule_async_request(self.async_save(*args, **kwargs))


@launched
def test_a_save_that_a_strategy_finalizes_later_has_its_common_state_with_its_tensors(directory: Path) -> None:
    dist_checkpointing.save(state(1), str(directory))
    strategy = _Later(options=QUIET)
    strategy.queue = AsyncCallsQueue(options=QUIET)
    dist_checkpointing.save(state(2), str(directory), strategy)
    assert_holds(directory, 1)
    strategy.queue.maybe_finalize_async_calls(blocking=True)
    strategy.queue.close()
    assert_holds(directory, 2)


class _Averaged(TorchDistSaveStrategy):
    """A user's, which saves averaged weights next to each checkpoint, and publishes them first or last."""

    is_first = fails = False

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *others: Any) -> AsyncRequest:
        weights, place = ShardedTensor.from_rank_offsets("w", torch.ones(3)), Path(f"{checkpoint_dir}/averaged")
        averaged = super().async_save({"w": weights}, place, *others)
        if self.fails:
            raise RuntimeError("own error")
        request = super().async_save(sharded_state_dict, checkpoint_dir, *others)
        request.finalize_fns[0 if self.is_first else 1 : 0] = averaged.finalize_fns
        return request


@launched
def test_a_save_within_the_same_call_into_another_directory_is_one_of_its_own(directory: Path) -> None:
    queue, strategy = AsyncCallsQueue(options=QUIET), _Averaged(options=QUIET)
    for value in range(4):
        strategy.is_first, strategy.fails = value % 2 == 0, True
        with pytest.raises(RuntimeError, match="own error") as kept:
            dist_checkpointing.save(state(9), str(directory), strategy, async_sharded_save=True)
        strategy.fails = False
        queue.schedule_async_request(
            dist_checkpointing.save(state(value), str(directory), strategy, async_sharded_save=True)
        )
        queue.maybe_finalize_async_calls(blocking=True)
        assert_holds(directory, value)
        assert read_index(directory / "averaged").tensors["w"].shape == (3,)
        assert "own error" in str(kept.value)
    queue.close()


def _undeleted(storage: LocalStorage, name: str, **_: Any) -> None:
    raise SaveError(f"{storage}: {name} cannot be deleted, for a test")


class _Again(TorchDistSaveStrategy):
    """A user's, which saves a second time where that failed: by this package, or by torch's own writer."""

    by_torch = is_undecided = False

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *others: Any) -> None:
        error = SaveError("for a test")
        failing = mock.patch.object(transaction, "write_in_process", side_effect=error)
        if self.is_undecided:  # a file system that is away for a moment
            failing = mock.patch.multiple(LocalStorage, claim=mock.Mock(side_effect=error), delete=_undeleted)
        with failing, pytest.raises(SaveError, match="for a test"):
            super().save(sharded_state_dict, checkpoint_dir, *others)
        if not self.by_torch:
            return super().save(sharded_state_dict, checkpoint_dir, *others)
        own = FileSystemWriter(str(checkpoint_dir))
        return torch.distributed.checkpoint.save({"w": sharded_state_dict["w"].data}, storage_writer=own)


@pytest.mark.skipif(IN_DATA_FILES, reason="there no save begins ahead of its data")
@launched
def test_a_save_that_has_begun_is_no_other_threads_nor_processes(directory: Path) -> None:
    """A thread that a strategy has given up may come late; a child is another job; the next save may begin early."""
    dist_checkpointing.save(state(1), str(directory))
    next_one: list[Commit] = []

    def refused() -> None:
        with pytest.raises(SaveError, match=r"begun here in another thread|which is running"):
            TorchDistSaveStrategy(options=QUIET).save({"w": state(9)["w"]}, directory)

    class Surrounded(TorchDistSaveStrategy):
        def save(self, *args: Any, **kwargs: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(refused).result(60)
                in_child(refused)
                super().save(*args, **kwargs)
                next_one.append(pool.submit(Commit.begin, LocalStorage(directory), common=b"of the next").result(60))

    dist_checkpointing.save(state(2), str(directory), Surrounded(options=QUIET))
    assert not next_one[0].is_over
    assert_holds(directory, 2)


@launched
def test_a_save_that_is_tried_again_has_the_common_state_of_its_call(directory: Path) -> None:
    again = _Again(options=QUIET)
    for value in range(4):
        again.is_undecided = value % 2 == 1
        dist_checkpointing.save(state(value), str(directory), again)
        assert_holds(directory, value)
    again.is_undecided = False
    again.by_torch = True
    if IN_DATA_FILES:  # of which torch alone knows nothing
        return
    with pytest.raises(SaveError, match="its strategy had published nothing here"):
        dist_checkpointing.save(state(9), str(directory), again)


class _Broken(TorchDistSaveStrategy):
    def save(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("before the sharded part")

    def async_save(self, *_: Any, **__: Any) -> AsyncRequest:
        def ends() -> None:
            raise RuntimeError("at its end")

        return AsyncRequest(int, (), [ends])


def broken_before_the_sharded_part(directory: Path) -> None:
    with pytest.raises(RuntimeError, match="before the sharded part"):
        dist_checkpointing.save(state(2), str(directory), _Broken(options=QUIET))


def broken_at_its_end(directory: Path) -> object:
    queue = AsyncCallsQueue(options=QUIET)
    strategy = _Broken(options=QUIET)
    queue.schedule_async_request(dist_checkpointing.save(state(2), str(directory), strategy, async_sharded_save=True))
    with pytest.raises(SaveError, match="at its end") as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return raised


def skipped(directory: Path) -> None:
    transaction.is_busy = lambda *_: True
    strategy = TorchDistSaveStrategy(options=SaveOptions(when_busy="skip"))
    assert dist_checkpointing.save(state(2), str(directory), strategy, async_sharded_save=True).async_fn.skipped


def skipped_elsewhere(directory: Path) -> object:
    class Elsewhere(TorchDistSaveStrategy):
        def async_save(self, sharded_state_dict: dict[str, Any], _: Any, *others: Any) -> AsyncRequest:
            return super().async_save(sharded_state_dict, directory.with_name(f"{directory.name}-scratch"), *others)

    transaction.is_busy = lambda *_: True
    strategy = Elsewhere(options=SaveOptions(when_busy="skip"))
    return dist_checkpointing.save(state(2), str(directory), strategy, async_sharded_save=True)


def saved_by_nobody(directory: Path) -> None:
    class Silent(TorchDistSaveStrategy):
        def save(self, *_: Any, **__: Any) -> None:
            pass

    said = nullcontext() if IN_DATA_FILES else pytest.raises(SaveError, match="its strategy had published nothing here")
    with said:
        dist_checkpointing.save(state(2), str(directory), Silent(options=QUIET))


def without_files(directory: Path) -> None:
    failing = mock.patch.object(transaction, "write_in_process", side_effect=SaveError("for a test"))
    with failing, pytest.raises(SaveError, match="for a test"):
        dist_checkpointing.save(state(2), str(directory), TorchDistSaveStrategy(options=QUIET))


@pytest.mark.parametrize(
    ("attempt", "existing"),
    [
        (broken_before_the_sharded_part, True),
        (broken_at_its_end, True),
        (skipped, True),
        (skipped_elsewhere, True),
        (saved_by_nobody, True),
        (without_files, False),
    ],
)
@forked
def test_a_save_that_does_not_come_about_leaves_no_common_state(
    attempt: Callable[[Path], object], existing: bool
) -> None:
    with launch() as directory:
        if existing:
            dist_checkpointing.save(state(1), str(directory))
        before = sorted(os.listdir(directory))
        kept = attempt(directory)
        names = sorted(os.listdir(directory))
        assert common_files(directory) == [name for name in before if name.startswith("common.pt")]
        assert [name for name in names if not name.startswith(".mcore_ckpt_incomplete")] == before
        in_child(lambda: Commit.begin(LocalStorage(directory)).give_up())  # it is free, for another job, too
        dist_checkpointing.save(state(3), str(directory))
        assert_holds(directory, 3)
        del kept  # until here, as a job may keep an error with all that this refers to


@pytest.mark.skipif(IN_DATA_FILES, reason="there it is bound as all data is")
@launched
def test_a_common_state_that_stock_has_written_is_bound_to_the_save(directory: Path) -> None:
    mcore_ckpt.uninstall()
    for value in (1, 2):
        (directory / str(value)).mkdir()
        dist_checkpointing.save(state(value), str(directory / str(value)), TorchDistSaveStrategy(options=QUIET))
    assert mcore_ckpt.open_checkpoint(directory / "1").common_state()["iteration"] == 1
    shutil.copy(directory / "2" / "common.pt", directory / "1" / "common.pt")
    with pytest.raises(CorruptCheckpointError, match="expected the common state of save"):
        mcore_ckpt.open_checkpoint(directory / "1").common_state()
    assert "expected the common state" in (flaw_of_files(directory / "1") or "")  # so `prune` does not count it
    strategy, queue = TorchDistSaveStrategy(options=QUIET), AsyncCallsQueue(options=QUIET)
    request = dist_checkpointing.save(state(3), str(directory / "2"), strategy, async_sharded_save=True)
    queue.schedule_async_request(request)
    with pytest.raises(SaveError, match="not finalized"):
        dist_checkpointing.save(state(4), str(directory / "2"), strategy)
    with pytest.raises(SaveError, match=r"another save has replaced common\.pt"):
        queue.close()
    # Megatron-Core reads it by itself here, and the strategy the tensors.
    with pytest.raises(CorruptCheckpointError, match="expected the common state of save"):
        dist_checkpointing.load(state(-1), str(directory / "1"), TorchDistLoadStrategy())


@pytest.mark.skipif(IN_DATA_FILES, reason="there it is bound as all data is")
@launched
def test_a_repair_keeps_the_common_state_that_a_killed_save_has_left_waiting(directory: Path) -> None:
    saved, copy = directory / "saved", directory / "copy"
    saved.mkdir()
    dist_checkpointing.save(state(1), str(saved))
    shutil.copy(saved / "common.pt", directory / "before")
    dist_checkpointing.save(state(2), str(saved))
    shutil.copytree(saved, copy)
    (copy / "common.pt").write_bytes(b"damaged")
    index = read_index(saved)
    assert index.manifest is not None
    (saved / "common.pt").rename(saved / pending_name(id_in_names(index.manifest.save_id)))
    (directory / "before").rename(saved / "common.pt")
    assert_holds(saved, 2)
    os.truncate(saved / ".metadata", 100)
    mcore_ckpt.repair_checkpoint(mcore_ckpt.verify_checkpoint(saved), copy)
    assert_holds(saved, 2)
    assert common_files(saved) == ["common.pt"]


@pytest.mark.timeout(120)
@launched
def test_a_config_that_is_damaged_or_a_pipe_is_refused_by_an_error_that_names_it(directory: Path) -> None:
    dist_checkpointing.save(state(1), str(directory))
    config = directory / "metadata.json"
    sound = config.read_bytes()
    for damaged in (sound[:10], b"\xff" + sound, b"[]", sound.replace(b"sharded_backend_v", b"shardeD_backend_v")):
        config.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.json"):
            dist_checkpointing.load(state(0), str(directory))
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(CorruptCheckpointError, match="a pipe"):
        dist_checkpointing.load(state(0), str(directory))
    config.unlink()
    config.write_bytes(sound)
    assert_holds(directory, 1)


@on_ranks(2)
def test_an_object_named_like_the_common_state_does_not_take_its_place(rank: int, tmp_path: Path) -> None:
    mcore_ckpt.install()
    size = torch.distributed.get_world_size()

    def one(value: int | None) -> dict[str, Any]:
        made = state(-1 if value is None else value)
        made["w"].replica_id = rank
        return {"o": ShardedObject("common_state", value, (size,), (rank,)), **made}

    for value in (1, 2):  # the second replaces the first
        dist_checkpointing.save(one(value), str(tmp_path))
        torch.distributed.barrier()
        loaded = dist_checkpointing.load(one(None), str(tmp_path))
        assert (loaded["o"], loaded["iteration"], float(loaded["w"][0])) == (value, value, value)
        assert dist_checkpointing.load_common_state_dict(str(tmp_path))["iteration"] == value
    assert not mcore_ckpt.verify_checkpoint(tmp_path).problems
    if not IN_DATA_FILES:  # the one object under which later versions store it
        own = ShardedObject("common_state", {"iteration": 777}, (1,), (0,), replica_id=rank)
        with pytest.raises(PlanError, match="give the ShardedObject another key"):
            dist_checkpointing.save({"o": own, "iteration": 3}, str(tmp_path))
        torch.distributed.barrier()
        assert dist_checkpointing.load_common_state_dict(str(tmp_path))["iteration"] == 2


class Custom:
    """A class of a training script."""


@launched
def test_a_class_that_loads_refuse_is_told_when_it_is_saved(directory: Path) -> None:
    safe_pickle._told.clear()  # the class may have been saved by this process before
    with kept_log() as said:
        dist_checkpointing.save({**state(1), "args": {"kind": Custom}}, str(directory))
    assert [text for text in said if f"{__name__}.Custom" in text and "loads refuse it" in text]
