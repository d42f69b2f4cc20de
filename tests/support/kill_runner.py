"""Saves of a state that depends on a seed alone, in each way that there is, and processes that are waited for."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from mcore_ckpt import AsyncCallsQueue, SaveOptions, TorchDistSaveStrategy
from mcore_ckpt.core.errors import CheckpointError
from tests.support.states import sharded_state_dict

OPTIONS = SaveOptions(thread_count=2)


def save(seed: int, directory: Path, way: str) -> None:
    """In line, or asynchronously by the persistent writer or by a forked one."""
    directory.mkdir(exist_ok=True)
    if way == "in_line":
        dist_checkpointing.save(sharded_state_dict(seed), str(directory), TorchDistSaveStrategy(options=OPTIONS))
    else:
        _save_asynchronously(seed, directory, replace(OPTIONS, writer=way))  # type: ignore[arg-type]


class CallbacksRanError(AssertionError):
    """The save's callbacks have run, and then the queue has raised: right only if it was published before contact to
    another rank was lost.
    """


def _save_asynchronously(seed: int, directory: Path, options: SaveOptions) -> None:
    queue = AsyncCallsQueue(persistent=True)
    strategy = TorchDistSaveStrategy(options=options)
    state = sharded_state_dict(seed)
    request = dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True)
    callbacks: list[int] = []
    request.add_finalize_fn(lambda: callbacks.append(seed))
    queue.schedule_async_request(request)
    for value in state.values():
        if isinstance(value, ShardedTensor):
            value.data.zero_()  # training goes on
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointError as error:
        if callbacks:
            raise CallbacksRanError(f"a finalize callback of a failed save has run: {error}") from error
        raise
    finally:
        queue.close(abort=True)
    if callbacks != [seed]:
        raise AssertionError("the finalize callback of a good save has not run")


def wait_for(pids: list[int], within_s: float) -> dict[int, tuple[int | None, float]]:
    """Of each child its exit code, None if it had to be killed at the deadline, and how long it took, in seconds."""
    began_s = time.monotonic()
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < len(pids):
        took_s = time.monotonic() - began_s
        for pid in set(pids) - set(ended):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = (os.waitstatus_to_exitcode(status), took_s)
            elif took_s > within_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended[pid] = (None, took_s)
        time.sleep(0.002)
    return ended
