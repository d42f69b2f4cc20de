"""What a save tells: the log line, the trace."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import SaveOptions
from mcore_ckpt.save.transaction import Span, write_trace
from tests.support.gloo_ranks import run_pretending_ranks as run_ranks
from tests.support.kept_log import kept_log


def saves(rank: int, base: Path, traces: Path) -> list[str]:
    """The line of each save, where this rank logs one."""
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    from megatron.core.dist_checkpointing import ShardedTensor, save

    from mcore_ckpt import AsyncCallsQueue, TorchDistSaveStrategy

    strategy = TorchDistSaveStrategy(options=SaveOptions(trace_path=str(traces)))
    queue = AsyncCallsQueue()
    with kept_log(logging.INFO) as said:
        for step in range(2):
            path = base / f"iter_{step}"
            path.mkdir(exist_ok=True)
            state = {"t": ShardedTensor.from_rank_offsets("t", torch.ones(300_000), (0, rank, dist.get_world_size()))}
            request = save(state, str(path), strategy, async_sharded_save=True)
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return [line for line in said if line.startswith("saved")]


def test_rank_0_logs_each_save_and_every_rank_leaves_a_trace(tmp_path: Path) -> None:
    lines, others = run_ranks(saves, 2, tmp_path, tmp_path / "traces")
    assert others == []
    assert [str(tmp_path / f"iter_{step}") in line for step, line in enumerate(lines)] == [True, True]
    for line in lines:
        assert "in 2 files" in line
        assert re.search(r"plan \d\.\d{3} s.*__\d_1\d*\.distcp of rank \d \(.*: write .* s, fsync .* s\)", line), line
        assert re.search(r"training waited .* s, files durable after .* s at .* GB/s, published after .* s", line), line
    for step in range(2):
        for rank in range(2):
            trace = json.loads((tmp_path / "traces" / f"iter_{step}_rank{rank}.trace.json").read_text())
            spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
            assert {"plan", "stage", "dispatch", "writer", "gather", "commit"} <= set(spans)
            assert spans["plan"]["ts"] + spans["plan"]["dur"] <= spans["commit"]["ts"]
            assert spans["writer"]["args"]["files"][0]["file_name"].startswith(f"__{rank}_")


def test_no_trace_is_written_to_a_path_that_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import TorchDistSaveStrategy

    (tmp_path / "iter_1").mkdir()
    monkeypatch.chdir(tmp_path)
    state = {"t": ShardedTensor.from_rank_offsets("t", torch.ones(3))}
    TorchDistSaveStrategy(options=SaveOptions(trace_path="")).save(state, tmp_path / "iter_1")
    assert not list(tmp_path.rglob("*.trace.json"))


def test_a_trace_that_cannot_be_written_is_only_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        write_trace(tmp_path / "file", "/ckpt/x", 0, [Span("plan", 0.0, 1.0)], [])
    assert "trace of a save cannot be written" in caplog.text
