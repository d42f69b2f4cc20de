"""The figures in README.md and docs are those of docs/benchmark.json, which `make bench` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.parts import PARTS

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results() -> None:
    assert tables.changed(ROOT) == [], "run `python scripts/bench.py --tables`"


def test_a_figure_that_is_changed_by_hand_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text)
    assert tables.changed(tmp_path) == []
    (block,) = re.findall(r"<!-- benchmark: summary -->.*?<!-- end -->", text, re.DOTALL)
    (tmp_path / "README.md").write_text(text.replace(block, re.sub(r"\|[\d.]+\|", "|0.01|", block)))
    assert tables.changed(tmp_path) == ["README.md"]


def test_the_results_are_complete() -> None:
    """All parts, the machine, and every baseline, or the reason why it was not run."""
    results = json.loads((ROOT / "docs" / "benchmark.json").read_text())
    assert {*PARTS, "tools"} <= results["parts"].keys()
    assert results["commit"]
    assert {"cpu", "cores", "memory GB", "kernel", "file system"} <= results["machine"].keys()
    adapters = {one["adapter"] for one in results["contenders"].values()}
    assert {"raw", "mcore_ckpt", "off", "megatron", "dcp"} <= adapters
    for adapter, name in (("nvrx", "nvidia-resiliency-ext"), ("torch_checkpointing", "torch_checkpointing")):
        assert adapter in adapters or name in results["not run"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_measures_and_compares(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = "--only dense async phases --gb 0.02 --rounds 1 --python312 /nowhere".split()
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
    # This package saves the state at the call. A CPU tensor that Megatron-Core's worker shares goes on changing.
    isolated = results["samples"]["async dense"]["isolated"]
    assert isolated[own] == [1.0]
    assert isolated[megatron] == [0.0]
    assert own in tables.one(results, "saves and loads")
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "checkpoints are left"
