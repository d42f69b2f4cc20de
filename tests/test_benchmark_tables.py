"""The figures in README.md and docs are those of the benchmarks' results, and the benchmarks run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.calls import CALLS, OURS, SAVES, STOCK

ROOT = Path(__file__).resolve().parent.parent
SHORT = {
    "bench": "scripts/bench.py --only dense async phases --gb 0.02 --rounds 1 --python312 /nowhere --dir {dir}",
    "scale": "-m benchmarks.scale --items 20 --ranks 2 4 8",
    "calls": "-m benchmarks.calls --items 3 --ranks 2",
}


def test_tables_are_those_of_the_results() -> None:
    assert tables.changed(ROOT) == [], "run `python scripts/bench.py --tables`"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_measures_and_compares(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = SHORT[name].format(dir=tmp_path).split()
    command = [sys.executable, "-W", "ignore", *words, "--busy", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = json.loads(out.read_text())
    if name == "bench":
        assert {part: about["failed"] for part, about in results["parts"].items()} == {
            part: [] for part in ("dense", "async", "phases")
        }
        own, *_ = (label for label, one in results["contenders"].items() if one["adapter"] == "mcore_ckpt")
        (megatron,) = (label for label, one in results["contenders"].items() if one["adapter"] == "megatron")
        for figure in ("save s", "save cpu s", "cold s", "second s", "warm s"):
            assert len(results["samples"]["dense"][figure][megatron]) == 1
        assert results["samples"]["async dense"]["isolated"][own] == [1.0]
        assert own in tables.one(results, "saves and loads")
    elif name == "scale":
        assert [one["items"] for one in results["ours"]] == [40, 80, 160]
        assert all(one["check_s"] > 0 and one["read_s"] > 0 for one in results["ours"])
    else:
        measured = [(one["replicas"], one["side"], one["call"]) for one in results["calls"] if one["cpu_s"] > 0]
        expected = ((0, CALLS), (2, SAVES))
        assert measured == [(n, side, call) for n, calls in expected for side in (OURS, STOCK) for call in calls]
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "checkpoints are left"
