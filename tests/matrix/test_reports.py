"""What the versions' reports have to say: `scripts/test_matrix.sh` makes them, and runs this with their directory.

MCORE_CKPT_MATRIX=DIRECTORY pytest -m matrix tests/matrix
"""

import json
import os
from pathlib import Path

import pytest

from mcore_ckpt.megatron.versions import TESTED_VERSIONS

pytestmark = pytest.mark.matrix

DIRECTORY = os.environ.get("MCORE_CKPT_MATRIX")
# With torch 2.13 stock 0.12.3 cannot save: a private function of torch that it calls has changed.
CANNOT_WRITE = {"0.12.3-stock-plain", "0.12.3-stock-parallel", "0.12.3-stock-model"}


@pytest.fixture(scope="module")
def directory() -> Path:
    if DIRECTORY is None:
        pytest.skip("MCORE_CKPT_MATRIX is not set; run this by `make test-matrix`")
    return Path(DIRECTORY)


def report(directory: Path, version: str) -> dict[str, dict[str, str]]:
    """What that version read: checkpoint -> side -> "ok" or what went wrong."""
    path = directory / f"read-by-{version}.json"
    if not path.exists():
        pytest.skip(f"{version} was left out of this run")
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_every_checkpoint_was_written_by_the_strategies_asked_for(directory: Path, version: str) -> None:
    report(directory, version)
    outcomes = {path.parent.name: path.read_text() for path in directory.glob(f"{version}-*/outcome.txt")}
    assert len(outcomes) == 6
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "ok"}
    assert set(failed) == {name for name in CANNOT_WRITE if name.startswith(version)}, failed


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_ours_reads_all_that_stock_reads(directory: Path, version: str) -> None:
    """Under each version, everybody's checkpoints, wherever stock's own reader of that version could."""
    found = report(directory, version)
    assert found
    assert {name: sides["ours"] for name, sides in found.items() if sides["stock"] == sides["ours"] == "ok"}
    assert {name: sides["ours"] for name, sides in found.items() if sides["stock"] == "ok" != sides["ours"]} == {}


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_ours_reads_every_tensor_and_object_of_every_version(directory: Path, version: str) -> None:
    """A model's state differs from version to version; that of the other kinds does not, so all of it is read."""
    found = report(directory, version)
    plain = {name: sides["ours"] for name, sides in found.items() if not name.endswith("-model")}
    assert plain
    assert {name: verdict for name, verdict in plain.items() if verdict != "ok"} == {}


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_stock_reads_what_ours_has_written_under_its_version(directory: Path, version: str) -> None:
    found = {name: sides for name, sides in report(directory, version).items() if name.startswith(f"{version}-ours-")}
    assert len(found) == 3
    assert {name: sides for name, sides in found.items() if set(sides.values()) != {"ok"}} == {}


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_ours_is_as_readable_as_stocks(directory: Path, version: str) -> None:
    """Whoever reads what stock has written under some version reads what ours has written under it."""
    found = report(directory, version)
    worse = {
        f"{name} by {reader}": verdict
        for name, sides in found.items()
        for reader, verdict in sides.items()
        if "-ours-" in name and verdict != "ok" and found.get(name.replace("-ours-", "-stock-"), {}).get(reader) == "ok"
    }
    assert worse == {}
