"""Saves and loads at the end of the interpreter (`atexit`): executors take no work then, and threads are not to be had.

The end is made in a forked child: its main thread has stopped, and no thread can be started, as from Python 3.12 on.
"""

import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from mcore_ckpt import FileSystemReader, FileSystemWriterAsync, SaveOptions
from tests.megatron.trap_ranks import check, installed, state
from tests.support.processes import in_child

pytest.importorskip("megatron.core.dist_checkpointing", reason="half of the saves are Megatron's")


def end_the_interpreter() -> None:
    """As far as that is for threads."""
    shut_down: Any = vars(threading)["_shutdown"]
    shut_down()
    refuse_threads()


def refuse_threads() -> None:
    refuse = mock.Mock(side_effect=RuntimeError("can't create new thread at interpreter shutdown"))
    for name in ("_start_new_thread", "_start_joinable_thread"):
        setattr(threading, name, refuse)


def test_saves_and_loads_need_no_threads_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    def many(value: float) -> dict[str, torch.Tensor]:
        return {f"w{i}": torch.full((3000,), value) for i in range(40)}

    def at_the_end() -> None:
        dist_checkpointing = installed()
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        end_the_interpreter()
        training: Any = mock.Mock()  # a job with TensorBoard: its curves take a thread
        sys.modules["megatron.training.global_vars"] = training
        dcp.save(many(2.0), storage_writer=FileSystemWriterAsync(tmp_path / "plain"))
        for reader in (FileSystemReader, dcp.FileSystemReader):
            found = many(0.0)
            dcp.load(found, storage_reader=reader(tmp_path / "plain"))
            assert all(torch.equal(found[key], tensor) for key, tensor in many(2.0).items())
        directory = str(tmp_path / "megatron")
        for fill in (3, 4):
            dist_checkpointing.save(state(fill), directory)
            check(dist_checkpointing.load(state(0), directory), fill)
        queue = AsyncCallsQueue()
        queue.schedule_async_request(dist_checkpointing.save(state(5), directory, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)
        check(dist_checkpointing.load(state(0), directory), 5)

    (tmp_path / "megatron").mkdir()
    in_child(at_the_end)
    assert {path.name for path in tmp_path.iterdir()} >= {"plain", "megatron"}
    assert not list(tmp_path.rglob(".mcore_ckpt_incomplete*"))


def test_threads_that_the_end_waits_for_save_and_load_to_their_end(tmp_path: Path) -> None:
    """What `dcp.async_save` has in flight when a script ends: its thread is waited for, and gets no others."""

    def many(value: float) -> dict[str, torch.Tensor]:
        return {f"w{i}": torch.full((30_000,), value) for i in range(60)}

    def save_and_load(ended: threading.Event) -> None:
        ended.wait(60)
        options = SaveOptions(thread_count=30)  # so many files that the coordinator looks for them side by side
        dcp.save(many(2.0), storage_writer=FileSystemWriterAsync(tmp_path / "saved", options=options))
        found = many(0.0)
        dcp.load(found, storage_reader=FileSystemReader(tmp_path / "saved"))
        assert all(torch.equal(found[key], tensor) for key, tensor in many(2.0).items())

    def end_meanwhile() -> None:
        ended = threading.Event()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work = ThreadPoolExecutor(1).submit(save_and_load, ended)
            # From here on no pool takes work, and (from Python 3.12 on) no thread is started; the main thread is alive.
            vars(threading)["_register_atexit"](lambda: [refuse_threads(), ended.set()])
            vars(threading)["_shutdown"]()
        work.result(0)

    in_child(end_meanwhile)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) > 16


FIRST_SAVE = """
import atexit, sys, torch, torch.distributed.checkpoint as dcp
from mcore_ckpt import FileSystemWriterAsync, SaveOptions

writer = FileSystemWriterAsync(sys.argv[1], options=SaveOptions(keep_last=1))
atexit.register(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True))
"""


def test_a_first_save_at_the_end_is_published_and_says_what_is_left(tmp_path: Path) -> None:
    line = [sys.executable, "-c", FIRST_SAVE, str(tmp_path / "iter_0000001")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert "The next run removes old checkpoints" in ended.stderr
    assert (tmp_path / "iter_0000001/.metadata").exists()
