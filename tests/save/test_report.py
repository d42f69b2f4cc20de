"""What a save tells: the log line, the callback on every rank, the trace."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import SaveOptions
from mcore_ckpt.save._report import FileReport, SaveReport, Span, write_trace
from tests.support.gloo_ranks import run_pretending_ranks as run_ranks


def saves(rank: int, base: Path, traces: Path) -> list[dict[str, Any]]:
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    from megatron.core.dist_checkpointing import ShardedTensor, save

    from mcore_ckpt import AsyncCallsQueue, TorchDistSaveStrategy

    heard: list[dict[str, Any]] = []
    strategy = TorchDistSaveStrategy(options=SaveOptions(on_timings=heard.append, trace_path=str(traces)))
    queue = AsyncCallsQueue()
    for step in range(2):
        path = base / f"iter_{step}"
        path.mkdir(exist_ok=True)
        state = {"t": ShardedTensor.from_rank_offsets("t", torch.ones(300_000), (0, rank, 2))}
        request = save(state, str(path), strategy, async_sharded_save=True)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return heard


def test_every_rank_hears_and_leaves_a_trace(tmp_path: Path) -> None:
    by_rank = run_ranks(saves, 2, tmp_path, tmp_path / "traces")
    for rank, heard in enumerate(by_rank):
        assert [report["directory"] for report in heard] == [str(tmp_path / f"iter_{step}") for step in range(2)]
        for report in heard:
            assert report["rank"] == rank
            assert {"plan", "stage", "dispatch", "writer", "gather", "commit"} <= set(report["phases_s"])
            ranks = {file["rank"] for file in report["files"]}
            assert ranks == ({0, 1} if rank == 0 else {1})
            assert report["size_bytes"] >= 1_200_000 * len(ranks)
    for step in range(2):
        for rank in range(2):
            trace = json.loads((tmp_path / "traces" / f"iter_{step}_rank{rank}.trace.json").read_text())
            spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
            assert {"plan", "stage", "dispatch", "writer", "gather", "commit"} <= set(spans)
            assert spans["plan"]["ts"] + spans["plan"]["dur"] <= spans["commit"]["ts"]
            assert spans["writer"]["args"]["files"][0]["file_name"].startswith(f"__{rank}_")


def test_the_log_line_names_phases_and_the_slowest_file() -> None:
    files = (FileReport(0, "__0_0.distcp", 10**9, 0.5, 0.1), FileReport(1, "__1_0.distcp", 10**9, 0.9, 0.2))
    report = SaveReport("/ckpt/iter_1", 2.0, {"plan": 0.01, "commit": 0.02}, files)
    text = str(report)
    assert "2.000 GB in 2 files" in text
    assert "plan 0.010 s" in text
    assert "__1_0.distcp of rank 1 (1.100 s: write 0.900 s, fsync 0.200 s)" in text
    assert "in 2.000 s, 1.00 GB/s" in text
    assert report.as_dict()["gb_per_s"] == 1.0


def test_a_trace_that_cannot_be_written_is_only_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        write_trace(tmp_path / "file", "/ckpt/x", 0, [Span("plan", 0.0, 1.0)], [])
    assert "trace of a save cannot be written" in caplog.text


_WAITS = """
import time
from mcore_ckpt.core.console import WaitingBar
bar = WaitingBar("saving", 1000)
for done in (100, 900):
    with bar:
        bar.show(done)
        time.sleep(0.3)
"""


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    quiet = subprocess.run([sys.executable, "-c", _WAITS], capture_output=True, timeout=60, check=True)
    assert quiet.stderr == b""
    main, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", _WAITS], stderr=terminal, timeout=60, check=True)
    os.close(terminal)
    shown = os.read(main, 65536)
    os.close(main)
    assert b"saving" in shown


@pytest.mark.parametrize(("size_bytes", "level"), [(10_000, logging.DEBUG), (2_000_000, logging.INFO)])
def test_only_saves_that_matter_are_told_unasked(size_bytes: int, level: int) -> None:
    file = FileReport(file_name="__0_0.distcp", rank=0, size_bytes=size_bytes, write_s=0.1, fsync_s=0.1)
    assert SaveReport("/somewhere", 1.0, {}, (file,)).log_level == level
