"""Async saves of ours in Megatron's own queue, which knows nothing of us: forked caller and persistent caller."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.core.options import SaveOptions
from tests.megatron.trap_ranks import check, state
from tests.support.gloo_ranks import made, run_ranks

pytestmark = pytest.mark.long


def _in_a_stock_queue(rank: int, base: Path, persistent: bool) -> dict[str, list[Any]]:
    from tests.support import pretend_main

    sys.modules["__main__"] = pretend_main
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import async_utils

    from mcore_ckpt import TorchDistSaveStrategy
    from mcore_ckpt.save.transaction import SaveTransaction
    from mcore_ckpt.save.writer_process import shared_writer

    queue = async_utils.AsyncCallsQueue(persistent)
    assert "mcore_ckpt" not in type(queue).schedule_async_request.__module__, "it is not Megatron's own"
    log: dict[str, list[Any]] = {"finalized": [], "refused": []}
    try:
        for step, writer in enumerate(("persistent", "fork")):
            strategy = TorchDistSaveStrategy(options=SaveOptions(writer=writer))  # type: ignore[arg-type]
            saved = state(step)
            path = made(base / str(step))
            request = dist_checkpointing.save(saved, path, strategy, async_sharded_save=True)
            assert isinstance(request.async_fn, SaveTransaction)
            request.add_finalize_fn(lambda step=step: log["finalized"].append(step))
            queue.schedule_async_request(request)
            saved["shard"].data.fill_(-1.0)  # training goes on
            while queue.get_num_unfinalized_calls():
                queue.maybe_finalize_async_calls(blocking=False)
                time.sleep(0.01)
        # A writer that dies: supervision is not promised here, but what is not whole must not be published.
        path = made(base / "99")
        strategy = TorchDistSaveStrategy(options=SaveOptions())
        if rank == 1:
            shared_writer().warm_up()
            os.kill(shared_writer().pid or 0, signal.SIGSTOP)
        dist.barrier()
        request = dist_checkpointing.save(state(99), path, strategy, async_sharded_save=True)
        request.add_finalize_fn(lambda: log["finalized"].append(99))
        if rank == 1:
            os.kill(shared_writer().pid or 0, signal.SIGKILL)
        queue.schedule_async_request(request)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            log["refused"].append(str(error))
    finally:
        with contextlib.suppress(Exception):
            queue.close()
    for step in (0, 1):
        check(dist_checkpointing.load(state(-1), str(base / str(step))), step)
    return log


@pytest.mark.parametrize("persistent", [False, True], ids=["forked caller", "persistent caller"])
def test_a_stock_queue_runs_our_requests(persistent: bool, tmp_path: Path) -> None:
    for log in run_ranks(_in_a_stock_queue, 2, tmp_path, persistent, deadline_s=200):
        assert log["finalized"] == [0, 1]
        (refused,) = log["refused"]
        assert "rank 1 of 2" in refused
        assert "SIGKILL" in refused
    assert not (tmp_path / "99" / ".metadata").exists()
    assert not (tmp_path / "99" / "metadata.json").exists()
