"""The simulation of large jobs: what its ranks are made to save is a checkpoint, and its command runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale import Gpt, Job, Layout
from benchmarks.whole_calls import CALLS, OURS, STOCK
from mcore_ckpt.save.buckets import lay_out_rank
from mcore_ckpt.save.plan_check import global_plan

ROOT = Path(__file__).resolve().parent.parent

_DENSE = Gpt(layers=4, hidden=64, ffn=256, vocabulary=512)
_MOE = Gpt(layers=4, hidden=64, ffn=32, vocabulary=512, experts=8)


@pytest.mark.parametrize(
    "job",
    [
        Job(Layout(1, 1, 1, 3), items=5),
        Job(Layout(2, 2, 1, 3), _DENSE),
        Job(Layout(1, 4, 1, 1), _DENSE),
        Job(Layout(2, 2, 2, 4), _MOE),
        Job(Layout(1, 1, 4, 4), _MOE),
    ],
    ids=str,
)
def test_all_ranks_together_save_each_tensor_once(job: Job) -> None:
    specs = [spec for rank in range(job.layout.ranks) for spec in job.specs(rank)]
    plans = [
        lay_out_rank(job.specs(rank), [], [], rank=rank, thread_count=2).plan.encode()
        for rank in range(job.layout.ranks)
    ]
    global_plan([(plan, {}) for plan in plans])  # raises where a tensor has a gap, or an overlap
    sizes = {spec.key: math.prod(spec.shape) for spec in specs}
    assert sum(math.prod(spec.sizes) for spec in specs) == sum(sizes.values())
    if job.gpt is not None:
        weights = {key: size for key, size in sizes.items() if not key.startswith("optimizer.")}
        layers = 4 * 64 * 64 + 2 * 64
        layers += 2 * 64 * 256 if job.gpt is _DENSE else 8 * 64 + 8 * 2 * 64 * 32
        assert sum(weights.values()) == 4 * layers + 2 * 512 * 64 + 64
        assert sum(sizes.values()) == 4 * sum(weights.values())


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "simulate_scale.py"), "--out", str(out)]
    command += ["--items", "20", "--ranks", "2", "4", "8", "--stock-up-to", "4", "--real", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [one["items"] for one in results["ours"]] == [40, 80, 160]
    assert [one["ranks"] for one in results["stock"]] == [2, 4]
    assert [one["ranks"] for one in results["real"]] == [2]
    assert all(one["first_s"] > 0 and one["later_s"] > 0 for one in results["real"])
    assert len([line for line in done.stdout.splitlines() if line.startswith("| 8 |")]) == 2
    assert " * |" in done.stdout  # said of what was not run


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_whole_calls_of_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "bench_ranks.py"), "--out", str(out)]
    command += ["--items", "3", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert {(one["side"], one["call"]) for one in results["calls"]} == {(s, c) for s in (OURS, STOCK) for c in CALLS}
    assert all(one["cpu_s"] > 0 for one in results["calls"])
