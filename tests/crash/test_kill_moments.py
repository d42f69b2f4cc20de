"""Trainers and writers killed at random moments: never a mix, never a hang, never a process left; see `kill_runner`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the saves that are killed are those of Megatron's sharded state")

pytestmark = pytest.mark.crash

REPOSITORY = Path(__file__).resolve().parents[2]
_QUICK_ROUNDS = 10
_MANY_ROUNDS = 70  # each way of each victim; more than 200 kills of the trainer, and of the writer
_ALL = [
    (victim, way)
    for victim in ("trainer", "writer")
    for way in ("persistent", "fork", "cow", "in_line")
    if (victim, way) != ("writer", "in_line")
]
_QUICK = [("trainer", "persistent"), ("trainer", "in_line"), ("writer", "persistent"), ("writer", "cow")]


def _kill(victim: str, way: str, rounds: int, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.kill_runner", victim, way, str(rounds), str(directory)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"{victim} killed, {way}: " in done.stdout


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("victim", "way"), _QUICK)
def test_kills_at_some_moments(victim: str, way: str, tmp_path: Path) -> None:
    _kill(victim, way, _QUICK_ROUNDS, tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("victim", "way"), _ALL)
def test_kills_at_many_moments(victim: str, way: str, tmp_path: Path) -> None:
    _kill(victim, way, _MANY_ROUNDS, tmp_path / "checkpoint")
