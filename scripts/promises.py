"""Write docs/promises.md: each promise of README and docs/reliability.md, the tests that hold it, and where they run.

The promises are the list "What it does" of README and the tables below "Promises" of docs/reliability.md. The tests of
a new one are written in a comment behind it, `<!-- `test_name` in `tests/file.py` -->`; this script moves them.
`--check` writes nothing and fails where a promise has no test.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "promises.md"
RELIABILITY: Final = ROOT / "docs" / "reliability.md"
README: Final = ROOT / "README.md"
HEAD: Final = """# Promises

Each promise of README and of [reliability](reliability.md), the tests that hold it, and where they run: `test` in
`make test`, all in `make test-all`. `scripts/promises.py` writes this page; a promise without a test fails the build.

|promise|tests|level|
|---|---|---|
"""
_COMMENT: Final = re.compile(r" *<!-- (.*?) -->")
_WORDS: Final = 6
_LEVELS: Final = ("test", "long", "slow")


def promised() -> Iterator[tuple[str, str]]:
    """Each promise, and the tests in its comment, if any."""
    for item in re.split(r"^- ", _part(README.read_text(), "What it does"), flags=re.MULTILINE)[1:]:
        yield _plain(_COMMENT.sub("", item)), " ".join(_COMMENT.findall(item))
    for line in _part(RELIABILITY.read_text(), "Promises").splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| what goes wrong |")):
            what, _, promise = line.strip("| ").partition(" | ")
            # "..." stands for the row above: what follows may be there twice.
            yield _plain(f"{what} {promise}" if what.startswith("...") else what), " ".join(_COMMENT.findall(line))


def _part(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", _COMMENT.sub("", text)).replace("|", " ").split())


def short_names() -> dict[str, str]:
    """Each promise by as many of its first words as tell it from the others, with the tests of its comment."""
    texts = list(promised())
    found: dict[str, str] = {}
    for text, tests in texts:
        words = text.split()
        count = next(
            (n for n in range(_WORDS, len(words)) if sum(t.split()[:n] == words[:n] for t, _ in texts) == 1), len(words)
        )
        found[" ".join(words[:count]).rstrip(",.:;")] = tests
    return found


def rows() -> dict[str, str]:
    """Tests by promise, as the page has them."""
    lines = PAGE.read_text().partition("|---|---|---|\n")[2].splitlines() if PAGE.exists() else []
    cells = (line.strip("|").split("|") for line in lines)
    return {row[0]: row[1] for row in cells if len(row) == 3}


def named_in(text: str) -> tuple[list[str], list[str]]:
    """Paths below `tests/`, and names of tests and their classes, as a text gives them between backticks."""
    spans = re.findall(r"`([^`]+)`", text)
    return [s for s in spans if s.startswith("tests/")], [s for s in spans if re.match("test_|Test", s)]


@functools.cache
def levels_of(file: Path) -> dict[str, str]:
    """Where each test of a file runs, by its name and by that of its class."""
    tree = ast.parse(file.read_text())
    whole = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and re.match("test_|Test", node.name):
            marks = " ".join(map(ast.unparse, [*node.decorator_list[:], *whole]))
            marked = [level for level in _LEVELS[1:] if re.search(rf"(?<!marks=pytest\.)\bmark\.{level}\b", marks)]
            found[node.name] = marked[-1] if marked else _LEVELS[0]
    return found


def level_of(text: str) -> str | None:
    """The level at which the first of the named tests run; None if one of them is not there."""
    paths, names = named_in(text)
    everywhere = sorted((ROOT / "tests").rglob("test_*.py"))
    found: list[str] = []
    for path in paths:
        place = ROOT / path
        if not place.exists():
            return None
        files = [place] if place.name.startswith("test_") else list(place.rglob("test_*.py"))
        # What has no tests in it is a command, or what tests run in processes of their own: some test names it.
        files = files or [file for file in everywhere if place.stem in file.read_text()]
        levels = [level for file in files for level in levels_of(file).values()]
        if not levels:
            return None
        found.append(min(levels, key=_LEVELS.index))
    for name in names:
        pattern = re.compile(re.escape(name).replace(r"\.\.\.", r"\w+"))
        levels = [levels_of(file)[test] for file in everywhere for test in levels_of(file) if pattern.fullmatch(test)]
        if not levels:
            return None
        found.append(min(levels, key=_LEVELS.index))
    return min(found, key=_LEVELS.index) if found else None


def page() -> str:
    """The page as it should be. Raises `ValueError`: a promise has no test, or one that is not there."""
    known, lines, wrong = rows(), [], []
    for name, commented in short_names().items():
        tests = commented or known.get(name, "")
        level = level_of(tests)
        if level is None:
            wrong.append(f"{name!r}: {tests or 'no test is named'}")
        lines.append(f"|{name}|{tests}|{level}|\n")
    if wrong:
        raise ValueError("promises without a test, or with one that is not there:\n" + "\n".join(wrong))
    return HEAD + "".join(lines)


def main() -> int:
    """Write the page, and take the comments out of the others."""
    try:
        text = page()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        for source in (README, RELIABILITY):
            before = source.read_text()
            title = "What it does" if source == README else "Promises"
            part = _part(before, title)
            source.write_text(before.replace(part, _COMMENT.sub("", part)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
