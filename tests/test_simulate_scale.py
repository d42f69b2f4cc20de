"""The benchmarks of many ranks run: the model of large jobs, and whole calls on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.calls import CALLS, OURS, SAVES, STOCK

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "simulate_scale.py"), "--out", str(out)]
    command += ["--items", "20", "--ranks", "2", "4", "8", "--stock-up-to", "4", "--real", "2", "--busy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [one["items"] for one in results["ours"]] == [40, 80, 160]
    assert [one["ranks"] for one in results["stock"]] == [2, 4]
    assert [one["ranks"] for one in results["real"]] == [2]
    assert all(one["first_s"] > 0 and one["later_s"] > 0 for one in results["real"])
    assert len([line for line in done.stdout.splitlines() if line.startswith("|8|")]) == 2
    assert " *|" in done.stdout  # said of what was not run


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_whole_calls_of_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.calls", "--out", str(out), "--busy"]
    command += ["--items", "3", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    calls = json.loads(out.read_text())["calls"]
    for replicas, names in ((0, CALLS), (2, SAVES)):
        measured = [(one["side"], one["call"]) for one in calls if one["replicas"] == replicas]
        assert measured == [(side, call) for side in (OURS, STOCK) for call in names]
    assert all(one["cpu_s"] > 0 for one in calls)
