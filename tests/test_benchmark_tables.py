"""The figures in README.md and docs are those of docs/benchmark.json, which `make bench` writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results() -> None:
    assert tables.changed(ROOT) == [], "run `python scripts/bench.py --tables`"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_measures_and_compares(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = "--only dense async phases --gb 0.02 --rounds 1 --python312 /nowhere --busy".split()
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), *options, "--out", str(out), "--dir", str(tmp_path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results = json.loads(out.read_text())
    assert {part: about["failed"] for part, about in results["parts"].items()} == {
        "dense": [],
        "async": [],
        "phases": [],
    }
    assert "nvidia-resiliency-ext" in results["not run"]
    own, *_ = (label for label, one in results["contenders"].items() if one["adapter"] == "mcore_ckpt")
    (megatron,) = (label for label, one in results["contenders"].items() if one["adapter"] == "megatron")
    for figure in ("save s", "save cpu s", "cold s", "second s", "warm s"):
        assert len(results["samples"]["dense"][figure][megatron]) == 1
    assert results["samples"]["async dense"]["isolated"][own] == [1.0]
    assert own in tables.one(results, "saves and loads")
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "checkpoints are left"
