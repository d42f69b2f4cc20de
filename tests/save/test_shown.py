"""Nothing that is shown or logged fails a save or a load, or blocks it: streams, handlers and warnings of all
kinds that a job may have.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import run_pretending_ranks as run_ranks

_ELEMENTS = 300_000  # more than a megabyte: a save of less is not logged at INFO


class _Raising(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError("the log's disk is full")

    def isatty(self) -> bool:
        return True


class _Exiting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit(3)


@contextmanager
def _standard_error(stream: Any) -> Iterator[None]:
    real, sys.stderr = sys.stderr, stream
    try:
        with _handled_by(logging.StreamHandler(stream)):
            yield
    finally:
        sys.stderr = real


@contextmanager
def _handled_by(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("mcore_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _nobody_reads(reading: int, writing: int) -> Iterator[None]:
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 64)
    os.set_blocking(writing, True)
    try:
        with _standard_error(open(writing, "w", buffering=1, closefd=False)):
            yield
    finally:
        os.close(reading)  # what waits there ends


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"(torch|megatron)\..*")
        yield


KINDS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "None": lambda: _standard_error(None),
    "raises": lambda: _standard_error(_Raising()),
    "a full pipe that nobody reads": lambda: _nobody_reads(*os.pipe()),
    "a terminal that nobody reads": lambda: _nobody_reads(*pty.openpty()),
    "a handler that exits": lambda: _handled_by(_Exiting()),
    "warnings are errors": _warnings_are_errors,
}


def _save_and_load(rank: int, kind: str, base: Path) -> list[bool]:
    from megatron.core.dist_checkpointing import ShardedTensor, load, save

    from mcore_ckpt import AsyncCallsQueue, TorchDistLoadStrategy, TorchDistSaveStrategy

    def state(value: float, dtype: torch.dtype) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((_ELEMENTS,), value, dtype=dtype))}

    queue = AsyncCallsQueue()
    with warnings.catch_warnings(), contextlib.ExitStack() as shown:
        warnings.simplefilter("ignore")  # of torch, below megatron-core 0.19's own load of the common state
        shown.enter_context(KINDS[kind]())
        for name in ("sync", "async"):
            (base / name).mkdir()
            is_async = name == "async"
            request = save(
                state(2.0, torch.float32), str(base / name), TorchDistSaveStrategy(), async_sharded_save=is_async
            )
            if is_async:
                queue.schedule_async_request(request)
                assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        # Another dtype, which a load warns of.
        loaded = [
            load(state(0.0, torch.bfloat16), str(base / name), TorchDistLoadStrategy())["w"]
            for name in ("sync", "async")
        ]
    queue.close()
    return [bool((tensor == 2.0).all()) for tensor in loaded]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_fails_and_blocks_nothing(kind: str, tmp_path: Path) -> None:
    assert run_ranks(_save_and_load, 1, kind, tmp_path, deadline_s=60) == [[True, True]]
