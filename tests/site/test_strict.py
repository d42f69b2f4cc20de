"""The site is built strictly: what a reader would stumble over fails the build, and nothing public is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mcore_ckpt
from scripts import site_pages

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

needs_mkdocs = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="needs mkdocs-material and mkdocstrings: make docs",
)


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a copy of the project; what it says on both channels is in `stdout`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(root / "out")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the site is made of, to be spoilt."""
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "mcore_ckpt"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "site_pages.py", tmp_path / "scripts")
    return tmp_path


@needs_mkdocs
def test_the_site_is_built_and_names_all_that_is_public(project: Path) -> None:
    built = build(project)
    assert built.returncode == 0, built.stdout
    pages = "".join(path.read_text() for path in (project / "out" / "reference").glob("*.html"))
    shown = re.findall(r'id="mcore_ckpt\.(\w+)"', pages)
    assert sorted(shown) == sorted(set(mcore_ckpt.__all__) - {"__version__"})


@needs_mkdocs
def test_what_leads_nowhere_fails_the_build(project: Path) -> None:
    for file, text in (
        ("docs/async.md", "[a page that is not there](nowhere.md)"),
        ("docs/async.md", "[an anchor that is not there](tools.md#other-page)"),
        ("docs/async.md", "[an anchor of this page](#this-page)"),
        ("docs/forgotten.md", "# A page that the navigation does not name"),
    ):
        with (project / file).open("a") as page:
            page.write(f"{text}\n")
    built = build(project)
    assert built.returncode != 0, built.stdout
    for complaint in ("nowhere.md", "#other-page", "#this-page", "forgotten.md"):
        assert complaint in built.stdout


@needs_mkdocs
@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("README.md", "[a file of the repository that is no page](Makefile)", "Makefile"),
        ("docs/async.md", "::: mcore_ckpt.no_such_name", "no_such_name"),
    ],
)
def test_what_is_not_there_fails_the_build(project: Path, file: str, text: str, complaint: str) -> None:
    page = project / file
    page.write_text(f"{page.read_text()}\n{text}\n")
    built = build(project)
    assert built.returncode != 0, built.stdout
    assert complaint in built.stdout


def test_each_public_name_stands_on_one_page() -> None:
    pages = site_pages.reference().values()
    shown = [name for page in pages for name in re.findall(r"^::: mcore_ckpt\.(\w+)$", page, re.MULTILINE)]
    assert sorted(shown) == sorted(set(mcore_ckpt.__all__) - {"__version__"})
