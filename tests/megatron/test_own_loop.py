"""The loop that docs/guides/loop.md shows, on two ranks, with a Megatron of each kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt.tools.verify import verify_checkpoint

pytest.importorskip("megatron.core", reason="what the loop saves through")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "own_loop.py"


def test_the_loop_of_the_guide_runs(tmp_path: Path) -> None:
    [shown] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/guides/loop.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown == SCRIPT.read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, SCRIPT, tmp_path / "run"], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"rank (\d) resumed at step 30", ended.stdout)) == ["0", "1"]
    for step in (10, 20, 30):
        assert verify_checkpoint(tmp_path / "run" / f"iter_{step:07d}").whole
