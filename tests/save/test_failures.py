"""What goes wrong on one rank of a save is heard of on all, at once; the earlier checkpoint stays, the next works."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.core.errors import SaveError, WriterDiedError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.save import forked_child
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest
from mcore_ckpt.save.jobs import ChildJob
from mcore_ckpt.save.writer_process import shared_writer
from tests.support.gloo_ranks import on_ranks, run_megatron_ranks
from tests.support.processes import children, is_running

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

_RAISED_WITHIN_S = 5.0
_ELEMS = 300_000
_PERSISTENT = SaveOptions()
_FORKED = SaveOptions(writer="fork")
_WAYS = (_PERSISTENT, _FORKED)


def _state(rank: int, seed: int) -> dict[str, Any]:
    """A tensor that is split over the ranks, and an object."""
    values = torch.arange(_ELEMS, dtype=torch.float32) * (rank + 1) + seed
    return {
        "w": ShardedTensor.from_rank_offsets("w", values, (0, rank, dist.get_world_size())),
        "o": ShardedObject("o", {"seed": seed, "rank": rank}, (dist.get_world_size(),), (rank,)),
    }


def _check(rank: int, directory: str, seed: int) -> None:
    """Load the checkpoint and compare all of it."""
    wanted = _state(rank, 0)
    wanted["w"].data.zero_()
    loaded = TorchDistLoadStrategy().load(wanted, directory)
    assert torch.equal(loaded["w"], _state(rank, seed)["w"].data)
    assert loaded["o"] == {"seed": seed, "rank": rank}


def _save(rank: int, directory: str, seed: int, queue: AsyncCallsQueue, strategy: TorchDistSaveStrategy) -> list[str]:
    """Start an async save; the list that is returned gets an entry when its callbacks run."""
    state = _state(rank, seed)
    Path(directory).mkdir(parents=True, exist_ok=True)
    request = strategy.async_save(state, directory)
    log: list[str] = []
    request.add_finalize_fn(partial(log.append, "tracker"))
    queue.schedule_async_request(request)
    state["w"].data.zero_()  # training goes on
    return log


def _save_whole(rank: int, directory: str, seed: int, queue: AsyncCallsQueue, strategy: TorchDistSaveStrategy) -> None:
    log = _save(rank, directory, seed, queue, strategy)
    queue.maybe_finalize_async_calls(blocking=True)
    assert log == ["tracker"]
    _check(rank, directory, seed)


def _names(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def _expect(kind: type[Exception], queue: AsyncCallsQueue, blocking: bool) -> tuple[str, float]:
    """Finalize until it raises; the message, and how long that took."""

    def finalize() -> None:
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=blocking)
            time.sleep(0.02)

    started_s = time.monotonic()
    with pytest.raises(kind) as caught:
        finalize()
    return str(caught.value), time.monotonic() - started_s


# --- a writer dies ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _children_that_stop() -> Iterator[None]:
    """Forked writers that have begun stop themselves before they write: on a busy machine one is done before it can be
    stopped.
    """
    lower = forked_child.lower_priority

    def stop(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        lower(*args)

    forked_child.lower_priority = stop
    try:
        yield
    finally:
        forked_child.lower_priority = lower


def _writer_dies(rank: int, directory: str, options: SaveOptions, blocking: bool) -> tuple[str, float]:
    queue, strategy = AsyncCallsQueue(options=options), TorchDistSaveStrategy(options=options)
    _save_whole(rank, f"{directory}/1", 1, queue, strategy)
    _save_whole(rank, f"{directory}/2", 2, queue, strategy)
    before = _names(f"{directory}/2")
    if options.writer == "persistent":
        # Stopped first, so that it dies in the middle of the save however fast the disk is.
        writer_pid = shared_writer().pid
        assert writer_pid is not None
        os.kill(writer_pid, signal.SIGSTOP)
        dist.barrier()
        logs = [_save(rank, f"{directory}/2", 3, queue, strategy)]
    else:
        others = children()
        with _children_that_stop():
            logs = [_save(rank, f"{directory}/2", 3, queue, strategy)]
        (writer_pid,) = children() - others
    dist.barrier()
    if rank == 1:
        os.kill(writer_pid, signal.SIGKILL)
    message, took_s = _expect(WriterDiedError, queue, blocking)
    assert logs == [[]], "no callback of a failed save may run: they advance the tracker file"
    assert queue.get_num_unfinalized_calls() == 0
    dist.barrier()
    _check(rank, f"{directory}/2", 2)
    assert [name for name in _names(f"{directory}/2") if "distcp" in name or name == ".metadata"] == [
        name for name in before if "distcp" in name or name == ".metadata"
    ]
    if rank == 0 and is_running(writer_pid):
        os.kill(writer_pid, signal.SIGCONT)
    dist.barrier()
    _save_whole(rank, f"{directory}/2", 4, queue, strategy)
    _check(rank, f"{directory}/1", 1)
    queue.close()
    return message, took_s


def _writers_die(rank: int, directory: str) -> list[tuple[str, float]]:
    # One world for all: most of a test's time is the start of its ranks.
    return [
        _writer_dies(rank, f"{directory}/{number}", options, blocking)
        for number, (options, blocking) in enumerate(itertools.product(_WAYS, (True, False)))
    ]


def test_a_writer_killed_on_one_rank(tmp_path: Path) -> None:
    first, second = run_megatron_ranks(_writers_die, 2, str(tmp_path))
    for number, ((message, took_s), (same_message, also_took_s)) in enumerate(zip(first, second, strict=True)):
        assert message == same_message, "the same error on every rank"
        assert "rank 1 of 2" in message
        assert "SIGKILL" in message
        assert str(tmp_path / str(number) / "2") in message
        assert max(took_s, also_took_s) < _RAISED_WITHIN_S


# --- interrupted while it waits for the others ------------------------------------------------------------------------


@on_ranks(2)
def test_no_rank_waits_for_one_that_is_interrupted_in_a_finalization(rank: int, tmp_path: Path) -> None:
    """Rank 1 gets a Ctrl-C while a blocking finalization waits for its writer, and lives on."""

    def interrupted(job: ChildJob, timeout_s: float | None = None) -> bool:
        if rank == 1 and not calls:
            calls.append("wait")
            os.kill(os.getpid(), signal.SIGINT)
        return wait(job, timeout_s)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = str(tmp_path)
    started_s = time.monotonic()
    strategy, queue = TorchDistSaveStrategy(options=SaveOptions(on_failure="warn")), AsyncCallsQueue()
    _save_whole(rank, directory, 0, queue, strategy)
    before = _names(directory)
    pid = shared_writer().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    log = _save(rank, directory, 7, queue, strategy)
    queue.schedule_async_request(AsyncRequest(None, (), [partial(log.append, "of the next")]))
    calls: list[str] = []
    wait = ChildJob.wait
    ends = pytest.raises(KeyboardInterrupt if rank == 1 else SaveError)
    with mock.patch.object(ChildJob, "wait", interrupted), ends:
        queue.maybe_finalize_async_calls(blocking=True)
    assert len(calls) == rank
    assert queue.get_num_unfinalized_calls() == 1
    queue.close(abort=True)
    assert not log
    dist.barrier()
    _check(rank, directory, 0)
    assert [name for name in _names(directory) if name != INCOMPLETE_MARKER] == before
    assert time.monotonic() - started_s < 20 * _RAISED_WITHIN_S
