"""ckpt-chaos, a tool that knows nothing of this package, kills a job at the file events of its saves and resumes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ckpt_chaos", reason="the referee; `make test-all` installs it")
pytest.importorskip("megatron.core", reason="the job trains a model of Megatron's")
pytestmark = pytest.mark.long

_ROOT = Path(__file__).resolve().parents[2]
_SOME = 5


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
def test_every_kill_point_passes(how: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(tmp_path / "work"), "--timeout", "300"]
    command += ["--result-file", "{out}/result.txt", "--step-regex", r"resumed from step (\d+)"]
    if not request.config.option.complete:
        command += ["--max-points", str(_SOME)]
    command += ["--", sys.executable, "-W", "ignore", "-m", "tests.save.chaos_job", "{out}", how]
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
