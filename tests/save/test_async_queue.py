"""The queue: order, agreement of the ranks, no callback of a failed or skipped save, functions of others."""

import os
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.core.errors import CheckpointError, SaveError, WriterDiedError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import Outcome
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest
from mcore_ckpt.save.jobs import Job
from mcore_ckpt.save.transaction import SaveTransaction
from tests.support.gloo_ranks import on_ranks, rank_outcomes


class _JobOfATest(Job):
    """Work that has ended when the test, or the clock, says so."""

    at_s = float("inf")

    def poll(self) -> bool:
        self.done = self.done or time.monotonic() >= self.at_s
        return self.done

    def wait(self, timeout_s: float | None = None) -> bool:
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll() and time.monotonic() < until_s:
            time.sleep(0.005)
        return self.done


class _Save(SaveTransaction):
    """A save whose course the test decides."""

    def __init__(
        self,
        error: BaseException | None = None,
        *,
        done: bool = True,
        skipped: bool = False,
        seconds: float | None = None,
        on_failure: Any = "raise",
    ) -> None:
        self.job = job = _JobOfATest("writing", error=error)
        self.what, self.skipped, self.on_failure = "the checkpoint of step 7", skipped, on_failure
        self.interrupted, self.waited_s, self._pid = None, 0.0, os.getpid()
        job.done = (done and seconds is None) or error is not None
        job.at_s = float("inf") if seconds is None else time.monotonic() + seconds
        self.aborted = 0
        self.committed = 0

    def commit(self) -> None:
        self.committed += 1

    def abort(self) -> None:
        self.aborted += 1


def _request(save: Any, log: list[str], *names: str) -> AsyncRequest:
    callbacks: list[Callable[..., Any]] = [save.commit] if isinstance(save, SaveTransaction) else []
    return AsyncRequest(save, (), callbacks + [partial(log.append, name) for name in names])


def test_callbacks_run_in_order_when_the_saves_are_done() -> None:
    queue, log = AsyncCallsQueue(), list[str]()
    first, second = _Save(done=False), _Save()
    assert queue.schedule_async_request(_request(first, log, "a", "b")) == 0
    assert queue.schedule_async_request(_request(second, log, "c")) == 1
    assert queue.maybe_finalize_async_calls() == []
    assert log == []
    assert queue.get_num_unfinalized_calls() == 2, "the second waits for the first"
    first.job.done = True
    assert queue.maybe_finalize_async_calls() == [0, 1]
    assert log == ["a", "b", "c"]
    assert (first.committed, first.aborted) == (1, 0)
    assert queue.get_num_unfinalized_calls() == 0


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_callbacks_moved_to_the_next_request_go_with_their_save(outcome: str) -> None:
    # Launch code that writes something else besides moves a save's callbacks to the request behind it.
    queue, log = AsyncCallsQueue(options=SaveOptions(on_failure="warn")), list[str]()
    save = _Save(SaveError("the disk is full") if outcome == "failed" else None, skipped=outcome == "skipped")
    save.on_failure = "warn"
    queue.schedule_async_request(AsyncRequest(save, (), []))
    queue.schedule_async_request(AsyncRequest(None, (), [save.commit, partial(log.append, "tracker")]))
    assert queue.maybe_finalize_async_calls() == []
    assert queue.get_num_unfinalized_calls() == 0
    assert (save.committed, log) == (0, [])
    assert len(queue.failures) == (outcome == "failed"), "one failure is reported once"


def _stage(state: torch.Tensor) -> None:
    try:
        _misbehave("raise")
    except OSError as error:
        raise SaveError(f"{len(state)} elements could not be staged") from error


def test_a_failure_that_is_warned_of_keeps_nothing_of_the_save() -> None:
    queue, state = AsyncCallsQueue(), torch.ones(5)
    queue.schedule_async_request(_request(_Save(Outcome.of(partial(_stage, state)).error, on_failure="warn"), []))
    kept = weakref.ref(state)
    del state
    assert queue.maybe_finalize_async_calls() == []
    assert kept() is None
    (error,) = queue.failures
    assert str(error) == "5 elements could not be staged"
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == 28
    assert "in _misbehave" in str(error.__cause__.__cause__)


def test_close_deals_with_every_request_and_raises_the_first_failure() -> None:
    queue, log = AsyncCallsQueue(), list[str]()
    for name, save in {"a": _Save(SaveError("first")), "b": _Save(), "c": _Save(SaveError("second"))}.items():
        queue.schedule_async_request(_request(save, log, name))
    with pytest.raises(SaveError, match="first"):
        queue.close()
    assert log == ["b"]
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(_request(_Save(), log, "again")) == 3


# --- functions of others ----------------------------------------------------------------------------------------------


def _store(path: str, staged: torch.Tensor | None, tensors: list[torch.Tensor], suffix: str = "") -> None:
    torch.save([f"stored{suffix}", os.getpid(), staged, [tensor.detach().clone() for tensor in tensors]], path)


def _misbehave(how: str) -> None:
    if how == "raise":
        raise OSError(28, "No space left on device", "/full")
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_functions_of_others_run_in_another_process_with_the_tensors_of_the_call(tmp_path: Path) -> None:
    """What becomes of it is noticed, and the next function runs."""
    queue, log = AsyncCallsQueue(persistent=True), list[str]()
    live = torch.arange(4)
    tensors = [torch.ones(1000), torch.nn.Parameter(torch.ones(5)), torch.ones(10, 10)[:, 3]]

    def store(name: str) -> None:
        arguments = (str(tmp_path / name), None, tensors)
        callbacks = [partial(log.append, name)]
        queue.schedule_async_request(AsyncRequest(_store, arguments, callbacks, {"suffix": "!"}, preload_fn=live.clone))

    def pid_of(name: str) -> int:
        text, pid, staged, stored = torch.load(tmp_path / name)
        assert (text, staged.tolist()) == ("stored!", [0, 1, 2, 3])
        assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in stored), "a later value was stored"
        return int(pid)

    try:
        for name in "ab":
            store(name)
        live.zero_()
        with torch.no_grad():
            for tensor in tensors:
                assert not tensor.is_shared(), "the trainer's tensor was moved"
                tensor.fill_(7.0)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
        assert log == ["a", "b"]
        pids = {pid_of(name) for name in "ab"}
        assert os.getpid() not in pids
        assert len(pids) == 2
        live.copy_(torch.arange(4))
        tensors = [torch.ones(3)]
        failures: dict[str, tuple[type[CheckpointError], str]] = {
            "raise": (SaveError, r"No space left on device.*/full"),
            "sigkill": (WriterDiedError, "SIGKILL"),
        }
        for how, (kind, text) in failures.items():
            queue.schedule_async_request(AsyncRequest(_misbehave, (how,), [partial(log.append, "final")]))
            with pytest.raises(kind, match=text) as caught:
                queue.maybe_finalize_async_calls(blocking=True)
            assert "_misbehave" in str(caught.value)
            if how == "raise":
                assert isinstance(caught.value.__cause__, OSError)
                assert caught.value.__cause__.errno == 28
                assert "in _misbehave" in str(caught.value.__cause__.__cause__), "the traceback from over there"
            store(f"after {how}")
            queue.maybe_finalize_async_calls(blocking=True)
            pid_of(f"after {how}")
        assert log == ["a", "b", "after raise", "after sigkill"]
        queue.schedule_async_request(AsyncRequest(_misbehave, ("hang",), []))
        assert queue.maybe_finalize_async_calls() == []
        started_s = time.monotonic()
    finally:
        queue.close(abort=True)
    assert time.monotonic() - started_s < 10


# --- under Megatron's own queue ---------------------------------------------------------------------------------------


def test_signature_is_megatrons() -> None:
    megatron = pytest.importorskip("megatron.core.dist_checkpointing.strategies.async_utils")
    assert AsyncRequest._fields == megatron.AsyncRequest._fields
    stock = {name for name in dir(megatron.AsyncCallsQueue) if not name.startswith("_")}
    assert stock <= set(dir(AsyncCallsQueue))
    instance = AsyncCallsQueue(True)
    for name in vars(megatron.AsyncCallsQueue()):
        assert hasattr(instance, name)
    log: list[str] = []
    instance.schedule_async_request(megatron.AsyncRequest(None, (), [partial(log.append, "a")]))
    assert instance.maybe_finalize_async_calls() == [0]
    assert log == ["a"]


# --- several ranks ----------------------------------------------------------------------------------------------------


FAILURES = [
    ("save", SaveError, "full", True, False),
    ("save", SaveError, "full", False, True),
    ("raise", SaveError, "No space left", False, False),
    ("sigkill", WriterDiedError, "SIGKILL", True, True),
]


@on_ranks(3, preload=())
def test_a_failure_on_one_rank_is_raised_on_all_at_once(rank: int) -> None:
    for how, kind, text, blocking, no_dist in FAILURES:
        message = _one_rank_fails(rank, how, kind, blocking, no_dist)
        assert "rank 1 of 3" in message
        assert text in message
        messages = [""] * 3
        dist.all_gather_object(messages, message)
        assert len(set(messages)) == 1


def _one_rank_fails(rank: int, how: str, kind: type[SaveError], blocking: bool, no_dist: bool) -> str:
    """The other ranks are still writing; without dist, where none asks for their outcome meanwhile, they have ended."""
    queue, log = AsyncCallsQueue(), list[str]()

    def commit() -> None:
        dist.barrier()  # as a commit does, and Megatron's own callbacks
        log.append("committed")

    work: Any
    if how == "save":
        work = _Save(SaveError("full")) if rank == 1 else _Save(done=no_dist)
    else:
        work = partial(_misbehave, how) if rank == 1 else partial(_nothing) if no_dist else partial(_misbehave, "hang")
    # As in real launches, callbacks differ by rank.
    more = [partial(log.append, "log")] if rank == 0 else []
    queue.schedule_async_request(AsyncRequest(work, (), [commit, partial(log.append, "tracker"), *more]))

    def finalize() -> None:
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=blocking, no_dist=no_dist)
            time.sleep(0.01)

    with pytest.raises(kind) as caught:
        finalize()
    assert type(caught.value) is kind
    assert len(queue.failures) == 1
    assert not isinstance(work, _Save) or work.aborted == 1
    queue.schedule_async_request(_request(_Save(), log, "next"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.close()
    assert log == ["next"], "no callback of the failed save on any rank, all of the next"
    return str(caught.value)


@on_ranks(2, preload=())
def test_ranks_that_are_out_of_step_are_told(rank: int) -> None:
    queue = AsyncCallsQueue()
    for _ in range(rank + 1):
        queue.schedule_async_request(AsyncRequest(None, (), []))
    if rank == 1:
        queue.async_calls.popleft()
    with pytest.raises(SaveError, match="different async requests"):
        queue.maybe_finalize_async_calls()


def _nothing() -> None:
    pass


@on_ranks(2, preload=(), deadline_s=60)
def test_a_callback_that_fails_before_the_commit_is_heard_of_on_all_ranks(rank: int) -> None:
    """Callbacks of others may come first: Megatron moves them from one request to another."""
    for failing in (0, 1):
        log: list[str] = []
        save = _Save()

        class Commit:
            save_call = save

            def __call__(self, log: list[str] = log) -> None:
                dist.barrier()  # as a commit does
                log.append("committed")

        def first(failing: int = failing) -> None:
            if rank == failing:
                raise OSError("for a test")

        # That on rank 0 alone is what writes Megatron's tracker file.
        callbacks = [*([_nothing] if rank == 0 else []), first, Commit(), partial(log.append, "tracker")]
        request = AsyncRequest(save, (), callbacks)

        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        with pytest.raises(SaveError, match=f"rank {failing} of 2"):
            queue.maybe_finalize_async_calls(blocking=True)
        assert log == []
        assert save.aborted == 1 or failing == 1
    dist.barrier()


def _close_when_the_other_is_gone(rank: int) -> tuple[str, float]:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(_request(save := _Save(seconds=0.2), []))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(SaveError) as caught:
        queue.close()
    assert queue.get_num_unfinalized_calls() == 0
    assert save.aborted == 1
    return str(caught.value), time.monotonic() - started_s


def test_close_does_not_hang_when_a_rank_was_killed() -> None:
    alive, _ = rank_outcomes(_close_when_the_other_is_gone, 2, deadline_s=60, grace_s=30)
    assert alive.ok, alive.error_text
    assert "lost contact" in alive.value[0]
    assert alive.value[1] < 5
