"""A save that is struck at any of its storage operations leaves the old checkpoint or the new one, never a mix.

Each scenario records the operations of a save, and then repeats the save once for each of them, with that operation
failing, or the process ending there. After each: what the directory holds loads whole and is the old or the new state
(old, if the save said that it failed; new, if it said that it succeeded), the next save into the directory works, and
then nothing is left over of either.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the crash scenarios save Megatron's sharded state")

from tests.support.crash_runner import SCENARIOS

pytestmark = [pytest.mark.crash, pytest.mark.long]

REPOSITORY = Path(__file__).resolve().parents[2]

# One of each kind in every run, in few processes, since each takes seconds to import Megatron.
QUICK = {
    "in line": [
        "in_line-exit-fresh",
        "in_line-error-replace",
        "in_line-full_disk-replace",
        "in_line-torn-replace",
    ],
    "async": ["async-exit-replace", "writer-error-replace", "writer-killed-replace"],
    "dcp": ["dcp-exit-replace"],
}


def strike(tmp_path: Path, *names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.crash_runner", str(tmp_path), *names],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    for name, told in zip(names, f"\n{done.stdout}".split("\n== ")[1:], strict=True):
        assert told.startswith(name)
        assert "operations: " in told
        assert " holds 1\n" in told or " holds 100\n" in told, f"{name}: no strike came before the publish"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", QUICK)
def test_no_crash_harms_a_checkpoint(kind: str, tmp_path: Path) -> None:
    strike(tmp_path, *QUICK[kind])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {name for names in QUICK.values() for name in names}))
def test_no_crash_of_any_kind_harms_a_checkpoint(name: str, tmp_path: Path) -> None:
    strike(tmp_path, name)
