"""What pages show can be typed as it stands: command lines, names, options."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

import mcore_ckpt
from mcore_ckpt.commands.cli import make_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.sh")]
)
# A line of its own, or a piece of code within a sentence.
COMMAND = re.compile(r"^(?: {4}|\$ )?(mcore-ckpt [a-z].*)$|`(mcore-ckpt [a-z][^`]*)`", re.MULTILINE)
# Options in brackets, alternatives, what is left out: of such a line only the names of options are checked.
SYNOPSIS = re.compile(r"^\[--?|^\[[A-Z]+\]$|^[a-z-]+\||^\|$|^\.\.\.\]?$")


def command_lines(page: str, *, within_sentences: bool) -> list[list[str]]:
    """The words of each `mcore-ckpt` command that a page shows, without its comment."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    if page == "CHANGELOG.md":
        text = text.split("\n## ")[1]
    found = COMMAND.findall(text)
    lines = [whole for whole, _ in found if whole]
    lines += [" ".join(part.split()) for _, part in found if part and within_sentences]
    return [shlex.split(line, comments=True) for line in lines]


def shown_options(command: str) -> set[str]:
    """The options that a command's `--help` names."""
    parser = make_parser([command])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        (sub,) = (
            action.choices[command] for action in parser._actions if isinstance(action, argparse._SubParsersAction)
        )
        return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", sub.format_help()))


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_pages_show_exist_with_their_options(page: str) -> None:
    commands = set(re.findall(r"^  (\w+) ", make_parser([]).format_help(), re.MULTILINE))
    for words in command_lines(page, within_sentences=True):
        assert words[1] in commands, words
        given = {word.strip("[]").partition("=")[0] for word in words[2:] if re.match(r"\[?--?[a-z]", word)}
        if words[1] != "launch":
            assert given <= shown_options(words[1]), words


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_can_be_parsed(page: str) -> None:
    for words in command_lines(page, within_sentences=False):
        if words[1] == "launch" or any(SYNOPSIS.search(word) for word in words):
            continue
        make_parser([words[1]]).parse_args(["1" if word == "N" else word for word in words[1:]])


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_snippets_compile_and_name_what_there_is(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL):
        compile(block, page, "exec")
        named = set(re.findall(r"\bmcore_ckpt\.(\w+)", block))
        for names in re.findall(r"from mcore_ckpt import ([\w, ]+)", block):
            named |= set(names.replace(" ", "").split(","))
        assert named <= {*mcore_ckpt.__all__, "launch"}, named - set(mcore_ckpt.__all__)
