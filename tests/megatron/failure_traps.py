"""Traps around saves that fail: what must not run, must not change, and whom the failure must reach.

Faults are injected into the ranks and what they fork, so these need `writer="fork"`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import SaveError
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from tests.megatron.trap_ranks import check, installed, made, names, state

__all__ = ["FAILURES"]


def fail_writing_on(rank: int) -> Any:
    """Let data files fail to be written on one rank, in this process and its forks; returns what undoes it."""
    from mcore_ckpt.storage.resolve import LocalStorage

    original = LocalStorage.open_writer

    def open_writer(self: Any, name: str, **options: Any) -> Any:
        if name.endswith(".distcp") and dist.get_rank() == rank:
            raise OSError(28, "No space left on device (as the test wants it)", name)
        return original(self, name, **options)

    LocalStorage.open_writer = open_writer  # type: ignore[method-assign]
    return lambda: setattr(LocalStorage, "open_writer", original)


def no_callback_runs_after_a_failure(rank: int, directory: Path, persistent: bool = False) -> None:
    """The tracker file must not advance, nor an old checkpoint be deleted, on any rank."""
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    target = made(directory)
    dist_checkpointing.save(state(1), target)
    before = names(target)
    queue = AsyncCallsQueue(persistent)
    called: list[str] = []
    undo = fail_writing_on(1)
    request = dist_checkpointing.save(state(2), target, async_sharded_save=True)
    request.add_finalize_fn(lambda: called.append("tracker"))
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match=r"(?s)rank 1.*No space left"):
        queue.maybe_finalize_async_calls(blocking=True)
    undo()
    assert called == []
    assert queue.get_num_unfinalized_calls() == 0
    check(dist_checkpointing.load(state(0), target), 1)
    # The marker may stay, for the next save to look for what is left: a rank could have been killed.
    assert names(target) - {INCOMPLETE_MARKER} == before
    # Training goes on, and the next save is a good one.
    request = dist_checkpointing.save(state(3), target, async_sharded_save=True)
    request.add_finalize_fn(lambda: called.append("tracker"))
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert called == ["tracker"]
    check(dist_checkpointing.load(state(0), target), 3)


def no_callback_runs_after_a_failure_with_a_persistent_worker(rank: int, directory: Path) -> None:
    """The same with Megatron's `--use-persistent-ckpt-worker`."""
    no_callback_runs_after_a_failure(rank, directory, persistent=True)


def touch(path: str) -> None:
    """Work of somebody else: leaves the number of the process that did it."""
    Path(path).write_text(str(os.getpid()))


def a_moved_commit_of_a_failed_save_runs_nothing(rank: int, directory: Path) -> None:
    """The failure of a save stops the callbacks also where they hang on another request."""
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

    target = made(directory / "checkpoint")
    queue = AsyncCallsQueue()
    called: list[str] = []
    undo = fail_writing_on(0)
    save = dist_checkpointing.save(state(1), target, async_sharded_save=True)
    save.add_finalize_fn(lambda: called.append("tracker"))
    flush = AsyncRequest(
        async_fn=touch, async_fn_args=(str(directory / f"logits-{rank}"),), finalize_fns=save.finalize_fns.copy()
    )
    save.finalize_fns.clear()
    queue.schedule_async_request(save)
    queue.schedule_async_request(flush)
    failures = 0
    while queue.get_num_unfinalized_calls():
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except Exception:  # noqa: BLE001
            failures += 1
    undo()
    queue.close()
    assert failures == 1
    assert called == []
    assert ".metadata" not in names(target)


def common_state_is_replaced_with_the_checkpoint(rank: int, directory: Path) -> None:
    """Megatron writes the common state first; until the new checkpoint is published, the old one must stay whole."""
    dist_checkpointing = installed()
    target = made(directory)
    dist_checkpointing.save(state(1), target)
    request = dist_checkpointing.save(state(2), target, async_sharded_save=True)
    dist.barrier()
    check(dist_checkpointing.load(state(0), target), 1)  # the new one is under way
    request.execute_sync()
    check(dist_checkpointing.load(state(0), target), 2)
    undo = fail_writing_on(0)
    with pytest.raises(SaveError, match="No space left"):
        dist_checkpointing.save(state(3), target)
    undo()
    check(dist_checkpointing.load(state(0), target), 2)
    assert not [name for name in names(target) if "pending" in name]


def a_common_state_that_cannot_be_written_stops_every_rank(rank: int, directory: Path) -> None:
    """Rank 0 alone writes `common.pt`; the others must not wait for it in a later collective."""
    dist_checkpointing = installed()
    from mcore_ckpt.megatron._versions import megatron_version
    from mcore_ckpt.storage.resolve import LocalStorage

    if megatron_version() >= (0, 19):
        return  # there it is in the data files
    original = LocalStorage.create

    def create(self: Any, name: str, content: bytes, **how: Any) -> None:
        if name.startswith("common.pt"):
            raise SaveError(f"{name}: No space left on device (as the test wants it)")
        original(self, name, content, **how)

    LocalStorage.create = create  # type: ignore[method-assign]
    target = made(directory)
    with pytest.raises(SaveError, match=r"(?s)common.*No space left"):
        dist_checkpointing.save(state(1), target)
    LocalStorage.create = original  # type: ignore[method-assign]


def a_config_that_cannot_be_written_is_heard_of_on_every_rank(rank: int, directory: Path) -> None:
    """Rank 0 alone writes `metadata.json`, while the others wait for it in a barrier of Megatron's."""
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from mcore_ckpt.storage.resolve import LocalStorage

    methods = {name: getattr(LocalStorage, name) for name in ("publish",)}

    def failing(really: Any) -> Any:
        def publish(self: Any, name: str, *args: Any, **how: Any) -> Any:
            if name == "metadata.json":
                raise SaveError("No space left on device (as the test wants it)")
            return really(self, name, *args, **how)

        return publish

    for name, really in methods.items():
        setattr(LocalStorage, name, failing(really))
    with pytest.raises(SaveError, match=r"(?s)metadata\.json.*rank 0.*No space left"):
        dist_checkpointing.save(state(1), made(directory / "in line"))
    queue = AsyncCallsQueue()
    called: list[str] = []
    request = dist_checkpointing.save(state(1), made(directory / "beside"), async_sharded_save=True)
    request.add_finalize_fn(lambda: called.append("tracker"))
    queue.schedule_async_request(request)
    with pytest.raises(SaveError, match=r"(?s)metadata\.json.*rank 0.*No space left"):
        queue.maybe_finalize_async_calls(blocking=True)
    for name, really in methods.items():
        setattr(LocalStorage, name, really)
    assert called == []
    dist_checkpointing.save(state(2), str(directory / "beside"))
    check(dist_checkpointing.load(state(0), str(directory / "beside")), 2)


FAILURES = [
    no_callback_runs_after_a_failure,
    no_callback_runs_after_a_failure_with_a_persistent_worker,
    a_moved_commit_of_a_failed_save_runs_nothing,
    common_state_is_replaced_with_the_checkpoint,
    a_common_state_that_cannot_be_written_stops_every_rank,
    a_config_that_cannot_be_written_is_heard_of_on_every_rank,
]
