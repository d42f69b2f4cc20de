"""Nothing that is shown or logged fails a save or a load: streams, handlers and warnings of all kinds that a job may
have.
"""

import io
import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.megatron.trap_ranks import check, installed, state
from tests.support.gloo_ranks import made
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks

pytest.importorskip("megatron.core")


class _Raising(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError("the log's disk is full")

    def isatty(self) -> bool:
        return True


class _Exiting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit(3)


def _save_and_load(rank: int, directory: Path) -> None:
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import AsyncCallsQueue

    logger, queue = logging.getLogger("mcore_ckpt"), AsyncCallsQueue()
    logger.setLevel(logging.DEBUG)
    for number, stream in enumerate((None, _Raising())):
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", module=r"(torch|megatron)\..*")
            patched.setattr(sys, "stderr", stream)
            patched.setattr(logger, "handlers", [logging.StreamHandler(stream), _Exiting()])
            dist_checkpointing.save(state(number), made(directory / f"{number}"))
            check(dist_checkpointing.load(state(9), str(directory / f"{number}")), number)
            request = dist_checkpointing.save(state(number), made(directory / f"{number}a"), async_sharded_save=True)
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [number]
            check(dist_checkpointing.load(state(9), str(directory / f"{number}a")), number)
            narrow = ShardedTensor.from_rank_offsets("shard", torch.zeros(4, 3, dtype=torch.bfloat16))  # warned of
            loaded = dist_checkpointing.load({"shard": narrow}, str(directory / f"{number}"))
            assert torch.equal(loaded["shard"].float(), torch.full((4, 3), float(number)))
    queue.close()


def test_what_is_shown_fails_nothing(tmp_path: Path) -> None:
    run_ranks(_save_and_load, 1, tmp_path, deadline_s=60)
