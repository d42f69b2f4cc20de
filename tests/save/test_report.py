"""What a save tells: the log line, the trace, the curves; and that nothing that is shown fails a save or a load."""

import io
import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedTensor, save

from mcore_ckpt import AsyncCallsQueue, SaveOptions, TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.megatron.strategy import Curves
from mcore_ckpt.save.transaction import Span, write_trace
from tests.megatron.trap_ranks import check, installed, state
from tests.support.gloo_ranks import made, on_ranks
from tests.support.kept_log import kept_log


def sharded(elements: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    return {"t": ShardedTensor.from_rank_offsets("t", torch.ones(elements), (0, rank, ranks))}


@on_ranks(2)
def test_rank_0_logs_each_save_and_every_rank_leaves_a_trace(rank: int, tmp_path: Path) -> None:
    strategy = TorchDistSaveStrategy(options=SaveOptions(trace_path=str(tmp_path / "traces")))
    queue = AsyncCallsQueue()
    with kept_log(logging.INFO) as said:
        for step in range(2):
            path = made(tmp_path / f"iter_{step}")
            request = save(sharded(300_000, rank, 2), path, strategy, async_sharded_save=True)
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    lines = [line for line in said if line.startswith("saved")]
    assert [str(tmp_path / f"iter_{step}") in line for step, line in enumerate(lines)] == [True, True] * (rank == 0)
    for line in lines:
        assert "in 2 files" in line
        assert re.search(r"plan \d\.\d{3} s.*__\d_1\d*\.distcp of rank \d \(.*: write .* s, fsync .* s\)", line), line
        assert re.search(r"training waited .* s, files durable after .* s at .* GB/s, published after .* s", line), line
    for step in range(2):
        trace = json.loads((tmp_path / "traces" / f"iter_{step}_rank{rank}.trace.json").read_text())
        spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
        assert {"plan", "stage", "dispatch", "writer", "gather", "commit"} <= set(spans)
        assert spans["plan"]["ts"] + spans["plan"]["dur"] <= spans["commit"]["ts"]
        assert spans["writer"]["args"]["files"][0]["file_name"].startswith(f"__{rank}_")


def test_no_trace_is_written_to_a_path_that_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "iter_1").mkdir()
    monkeypatch.chdir(tmp_path)
    TorchDistSaveStrategy(options=SaveOptions(trace_path="")).save(sharded(3), tmp_path / "iter_1")
    assert not list(tmp_path.rglob("*.trace.json"))


def test_a_trace_that_cannot_be_written_is_only_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        write_trace(tmp_path / "file", "/ckpt/x", 0, [Span("plan", 0.0, 1.0)], [])
    assert "trace of a save cannot be written" in caplog.text


# --- curves -----------------------------------------------------------------------------------------------------------


def megatrons_writers(add_scalar: Callable[..., object], log: Callable[..., object] = lambda *_, **__: None) -> object:
    """The writers of a Megatron-LM job, as its training code keeps them on its last rank."""
    board, wandb = SimpleNamespace(add_scalar=add_scalar), SimpleNamespace(log=log)
    module = SimpleNamespace(get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: wandb)
    return mock.patch.dict(sys.modules, {"megatron.training.global_vars": module})


def saved_and_loaded(path: Path, rank: int = 0, ranks: int = 1) -> None:
    path.mkdir(parents=True, exist_ok=True)
    state = sharded(300_000, rank, ranks)
    TorchDistSaveStrategy().save(state, path)
    TorchDistLoadStrategy().load(state, path)


@on_ranks(2)
def test_what_a_save_and_a_load_cost_is_among_the_curves_of_the_rank_that_has_writers(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "iter_0000007"
    found: dict[str, tuple[float, int]] = {}
    has_all = threading.Event()

    def add_scalar(name: str, value: float, step: int) -> None:
        found[name] = value, step
        if name == "mcore_ckpt/load/bytes_per_second":
            has_all.set()

    if rank == 0:
        saved_and_loaded(path, rank, 2)
        return
    with megatrons_writers(add_scalar):
        saved_and_loaded(path, rank, 2)
        assert has_all.wait(60)
    written = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert found["mcore_ckpt/save/bytes"] == (written, 7)  # of both ranks
    assert found["mcore_ckpt/load/bytes"] == (1_200_000, 7)
    assert 0 < found["mcore_ckpt/save/seconds_to_durable"][0] <= found["mcore_ckpt/save/seconds_waited"][0]
    assert found["mcore_ckpt/load/seconds"][0] > 0
    assert "mcore_ckpt/save/replicas_that_differ" not in found


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves that have not warned yet."""
    monkeypatch.setattr("mcore_ckpt.megatron.strategy.show", Curves().show)


@pytest.mark.usefixtures("curves")
def test_a_writer_that_fails_costs_a_save_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    all_have_failed = threading.Event()

    def fails(name: str, *_: object) -> None:
        calls.append(name)
        if len(calls) == 4:
            all_have_failed.set()
        raise OSError("the event file is on a full disk")

    with megatrons_writers(fails):
        for step in range(2):
            saved_and_loaded(tmp_path / f"iter_000000{step}")
        assert all_have_failed.wait(60)
    (warning,) = [record.message for record in caplog.records if "curves" in record.message]
    assert "the event file is on a full disk" in warning


@pytest.mark.usefixtures("curves")
def test_a_writer_that_hangs_keeps_no_save_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    with megatrons_writers(lambda *_: go.wait(60)):
        for step in range(10):  # saves and loads: twenty
            saved_and_loaded(tmp_path / f"iter_000000{step}")
        assert not go.is_set()
        go.set()
    (warning,) = [record.message for record in caplog.records if "curves" in record.message]
    assert "has not taken those of 16 saves and loads" in warning


# --- what is shown fails nothing --------------------------------------------------------------------------------------


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
    """Streams, handlers and warnings of all kinds that a job may have."""
    dist_checkpointing = installed()
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
