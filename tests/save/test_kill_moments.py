"""Trainers and writers killed at random moments: never a mix, never a hang, never a process left; see `kill_runner`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the saves that are killed are those of Megatron's sharded state")

pytestmark = pytest.mark.crash

REPOSITORY = Path(__file__).resolve().parents[2]
_QUICK = ("trainer:persistent", "trainer:in_line", "writer:persistent", "writer:fork:2", "trainer:persistent:2")
_ALL = (
    "trainer:in_line",
    *(
        f"{victim}:{way}:{ranks}"
        for victim in ("trainer", "writer")
        for way in ("persistent", "fork")
        for ranks in (1, 2)
    ),
)


def _kill(rounds: int, directory: Path, *pairs: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.kill_runner", str(rounds), str(directory), *pairs],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.count(" killed, ") == len(pairs)


def test_kills_at_some_moments(tmp_path: Path) -> None:
    _kill(5, tmp_path, *_QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", _ALL)
def test_kills_at_many_moments(pair: str, tmp_path: Path) -> None:
    _kill(35, tmp_path, pair)  # more than 200 kills of the trainer, and of the writer, over all ways
