"""`docs/field.md` has a row for each report that a test replays, with what that test asserts, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "field.md").read_text()
ROW = re.compile(r"^\| \[(\S+)\]\((\S+)\) \| (silent: )?[^|]+ \| \*\*(\w+)\*\*: [^|]+ \| `(\w+)` \|$", re.MULTILINE)
VERDICTS = {"absent", "refused", "found", "present"}


def replayed() -> Iterator[tuple[str, bool, str, str]]:
    """Report, whether it is silent without this package, verdict and test: what the marks of the tests say."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.field":
                    report, verdict = map(ast.literal_eval, mark.args)
                    yield report, bool(mark.keywords), verdict, node.name


def test_each_row_has_a_test_with_its_verdict_and_each_test_a_row() -> None:
    rows = [(report, bool(silent), verdict, test) for report, _, silent, verdict, test in ROW.findall(PAGE)]
    assert len(rows) == len(re.findall(r"^\| \[", PAGE, re.MULTILINE)), "a row is not of the form"
    assert sorted(rows) == sorted(replayed())
    assert {verdict for _, _, verdict, _ in rows} == VERDICTS
    assert len({report for report, *_ in rows}) == len(rows) >= 24
    assert sum(silent for _, silent, *_ in rows) >= 10


def test_each_report_is_linked_and_no_row_is_long() -> None:
    for report, link, *_ in ROW.findall(PAGE):
        assert link == "https://github.com/" + report.replace("#", "/issues/")
    for line in PAGE.splitlines():
        assert not line.startswith("| [") or len(line.split()) < 45, line
