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
from tests.support.gloo_ranks import made, on_ranks

pytest.importorskip("megatron.core")


class _Raising(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError("the log's disk is full")

    def isatty(self) -> bool:
        return True


class _Exiting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit(3)


@on_ranks(1, deadline_s=60)
def test_what_is_shown_fails_nothing(rank: int, tmp_path: Path) -> None:
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
            dist_checkpointing.save(state(number), made(tmp_path / f"{number}"))
            check(dist_checkpointing.load(state(9), str(tmp_path / f"{number}")), number)
            request = dist_checkpointing.save(state(number), made(tmp_path / f"{number}a"), async_sharded_save=True)
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [number]
            check(dist_checkpointing.load(state(9), str(tmp_path / f"{number}a")), number)
            narrow = ShardedTensor.from_rank_offsets("shard", torch.zeros(4, 3, dtype=torch.bfloat16))  # warned of
            loaded = dist_checkpointing.load({"shard": narrow}, str(tmp_path / f"{number}"))
            assert torch.equal(loaded["shard"].float(), torch.full((4, 3), float(number)))
    queue.close()
