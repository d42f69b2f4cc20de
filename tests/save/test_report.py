"""What a save tells: the log line, the trace."""

from __future__ import annotations

import json
import logging
from array import array
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import SaveOptions
from mcore_ckpt.save.buckets import WrittenFile
from mcore_ckpt.save.commit import Span, log_line
from mcore_ckpt.save.trace import write_trace
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
    assert all("in 2 files" in line for line in lines)
    for step in range(2):
        for rank in range(2):
            trace = json.loads((tmp_path / "traces" / f"iter_{step}_rank{rank}.trace.json").read_text())
            spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
            assert {"plan", "stage", "dispatch", "writer", "gather", "commit"} <= set(spans)
            assert spans["plan"]["ts"] + spans["plan"]["dur"] <= spans["commit"]["ts"]
            assert spans["writer"]["args"]["files"][0]["file_name"].startswith(f"__{rank}_")


def test_the_log_line_names_phases_and_the_slowest_file() -> None:
    none: array[int] = array("I")
    files = [
        (rank, WrittenFile(f"__{rank}_0.distcp", 10**9, 0, *[none] * 5, write_s=write_s, fsync_s=fsync_s))
        for rank, write_s, fsync_s in ((0, 0.5, 0.1), (1, 0.9, 0.2))
    ]
    took_s = {"waited": 0.25, "durable": 2.5, "writing": 2.0, "published": 4.0}
    text = log_line("/ckpt/iter_1", {"plan": 0.01, "commit": 0.02, **took_s}, files)
    assert "2.000 GB in 2 files" in text
    assert "plan 0.010 s" in text
    assert "__1_0.distcp of rank 1 (1.100 s: write 0.900 s, fsync 0.200 s)" in text
    assert "training waited 0.250 s, files durable after 2.500 s at 1.00 GB/s, published after 4.000 s" in text
    assert "training waited 0.250 s (a synchronous save), files" in log_line("", {"write": 2.0, **took_s}, files)


def test_a_trace_that_cannot_be_written_is_only_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        write_trace(tmp_path / "file", "/ckpt/x", 0, [Span("plan", 0.0, 1.0)], [])
    assert "trace of a save cannot be written" in caplog.text
