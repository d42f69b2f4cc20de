"""Some of the kills and races that `make test-crash` makes by the dozen: see `tests.save.kills_and_races`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the saves that are killed are those of Megatron's sharded state")

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_and_races_leave_one_whole_checkpoint() -> None:
    arguments = ["--kills", "14", "--races", "12", "--saves", "5", "--seed", "2024"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.save.kills_and_races", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(r"^seed 2024$", done.stdout, re.MULTILINE)
    assert re.search(r"^14 kills: ", done.stdout, re.MULTILINE)
    assert re.search(r"^12 races: ", done.stdout, re.MULTILINE)
