"""What a contributor and a public CI run: the same few targets."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.megatron.versions import TESTED_VERSIONS
from scripts import mutants
from tests.conftest import pytest_configure
from tests.support.shown_launches import shown_launches

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "mcore_ckpt" / "launch.py"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


def targets() -> set[str]:
    """What the Makefile can make, by its own list."""
    (listed,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(listed.split())


def called_by_ci() -> list[str]:
    return re.findall(r"^ *(?:step \S+ )?make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_public_ci_runs_targets_and_nothing_else(workflow: Path) -> None:
    text = workflow.read_text()
    commands = re.findall(r"^ *(?:- )?run: *(.*?) *$", text, re.MULTILINE)
    assert commands
    allowed = {f"make {target}" for target in targets()} | {".ci/run"}
    assert set(commands) <= allowed
    actions = re.findall(r"^ *(?:- )?uses: *(\S+)", text, re.MULTILINE)
    assert {action.partition("@")[0] for action in actions} <= {"actions/checkout", "actions/setup-python"}


def test_what_ci_runs_can_be_made() -> None:
    made = called_by_ci()
    assert {"test", "test-all", "lint", "site"} <= set(made) <= targets()
    assert "run: make dist" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_first_screen_of_the_readme_names_what_ci_runs_first() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    named = re.findall(r"^    make ([\w-]+) .*\d minutes", first, re.MULTILINE)
    assert named == ["demo", "test"]
    assert set(named) <= set(called_by_ci())


def test_ci_runs_the_oldest_and_the_newest_versions() -> None:
    allowed = dict(re.findall(r'"(torch|numpy)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    pinned = re.findall(r"^(torch|numpy)==([\d.]+); python_version (\S+ \S+)$", CONSTRAINTS, re.MULTILINE)
    oldest = {name: version for name, version, python in pinned if python == '< "3.11"'}
    assert {name: version.split(".")[:2] for name, version in oldest.items()} == {
        name: version.split(".") for name, version in allowed.items()
    }
    legs = re.findall(r"^ *leg (3\.\d+) ", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert legs == ["3.13", "3.10"]
    newest = {name: version for name, version, python in pinned if python == '>= "3.12"'}
    assert f"torch {newest['torch']}" in (ROOT / "README.md").read_text()


def test_megatron_versions_are_one_list() -> None:
    script = (ROOT / "scripts" / "test_matrix.sh").read_text().split("\nonly=()")[0]
    script = script.replace('cd "$(dirname "$0")/.."', "")
    script += '\necho "${python311_versions[@]}" "${python312_versions[@]}"'
    read = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert tuple(read) == TESTED_VERSIONS
    heads = re.findall(r"^\| written by \| (.*) \|$", (ROOT / "docs" / "megatron.md").read_text(), re.MULTILINE)
    assert [tuple(head.split(" | ")) for head in heads] == [TESTED_VERSIONS] * 2
    by_ci = re.findall(r"^megatron-core==(\S+);", CONSTRAINTS, re.MULTILINE)
    rest = [version for version in TESTED_VERSIONS if version not in by_ci]
    shown = re.findall(r"^\| megatron-core (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown == [f"{by_ci[0]} on Python 3.11, {by_ci[1]} on 3.13", f"{rest[0]} to {rest[-1]}"]


def test_a_mark_alone_starts_no_long_test() -> None:
    """`-m crash` would run for an hour; `-m "crash and long"` asks for it."""
    for asked, taken in (
        ("crash", "(crash) and not slow and not matrix and not long and not frameworks"),
        ("crash and long",) * 2,
        ("",) * 2,
    ):
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=asked, seed=1))
        pytest_configure(config)
        assert config.option.markexpr == taken


def test_launches_that_pages_show_save_as_they_say() -> None:
    """Megatron-LM switches `--async-save` off where the other flag is missing: it only warns."""
    shown = {path.relative_to(ROOT).as_posix(): shown_launches(path.read_text()) for path in PAGES}
    for page in ("README.md", "docs/index.md", "docs/guides/try.md"):
        assert any("--async-save" in words for words in shown[page]), f"{page}: no launch saves async"
    for page, launches in shown.items():
        for words in launches:
            assert ("--async-save" in words) <= ("--use-persistent-ckpt-worker" in words), f"{page}: {words}"


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.what)
def test_each_mutant_can_be_tried(mutant: mutants.Mutant) -> None:
    assert mutants.problem_of(mutant) is None
