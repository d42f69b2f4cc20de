"""Some of the kills and races that `make test-crash` makes by the dozen: see `tests.save.kills_and_races`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the saves that are killed are those of Megatron's sharded state")


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_and_races_leave_one_whole_checkpoint() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *"-m tests.save.kills_and_races --kills 14 --races 12 --seed 2024".split()],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "all as promised" in done.stdout
