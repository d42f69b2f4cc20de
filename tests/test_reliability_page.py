"""docs/reliability.md names, for each promise, tests that attack it: those tests exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
PROMISES = [
    [cell.strip() for cell in re.split(r"\| | <!-- | --> ", line.strip("|"))[:3]]
    for line in PAGE.partition("## Promises")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| what goes wrong |"))
]


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions in a file, or in all files below a folder."""
    files = [path] if path.is_file() else path.rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)}


TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def named_in(text: str) -> tuple[list[str], list[str]]:
    """Paths below `tests/`, and names of tests, as a text gives them between backticks."""
    spans = re.findall(r"`([^`]+)`", text)
    return [span for span in spans if span.startswith("tests/")], [span for span in spans if span.startswith("test_")]


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0][:40])
def test_each_promise_names_tests_that_exist(row: list[str]) -> None:
    _, promise, attacked_by = row
    assert promise
    paths, names = named_in(attacked_by)
    assert paths or names
    for path in paths:
        place = ROOT / path
        assert place.exists(), f"{path} is not there"
        # What has no tests in it is a command, or what tests run in processes of their own: some test names it.
        assert names_of_tests(place) or any(place.stem in file.read_text() for file in TEST_FILES), (
            f"nobody runs {path}"
        )
    for name in names:
        pattern = re.compile(re.escape(name).replace(r"\.\.\.", r"\w+"))
        assert any(pattern.fullmatch(test) for test in names_of_tests(ROOT / "tests")), f"no test is called {name}"


def test_what_else_the_page_names_is_there() -> None:
    paths, names = named_in(PAGE)
    assert len(paths) > 10
    assert all((ROOT / path).exists() for path in paths)
    assert names
