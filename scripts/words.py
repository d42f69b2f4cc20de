#!/usr/bin/env python3
"""Words that the package and its documentation do not use, each with what they say instead; `make lint` runs this.

Code, comments, docstrings and messages are searched alike, and a phrase may run over the end of a line. Of
`CHANGELOG.md` only the newest section counts. Docstrings and comments of the package begin with their subject, and no
sentence of theirs has three relative pronouns. Exit code 1, and a line for each place.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    r"held against|hold(s|ing)? (\S+ ){0,5}against": "compare with, check against",
    r"(go|goes|going|gone|went) on (with|from)": "resume, continue",
    r"(let|lets|letting) go": "release, delete",
    r"anew": "again",
    r"hand-?overs?": "dispatch",
    r"turn(ed|s|ing)? round": "transpose",
    r"(take|takes|taken|taking) ahead": "preallocate",
    r"pickle machines?": "restricted unpickler",
    r"running sums?": "cumulative CRCs",
    r"who(m|so)?ever": "name the component: the caller, another save",
    r"(hear|hears|heard|hearing) of": "is notified of",
    r"mend(s|ed|ing)?": "repair, fix",
    r"prov(ed|ing)": "verify, check, show",
    r"by way of": "through",
    r"(is|are|was|were|be) wanted": "is requested",
    r"(somebody|someone)": "name the component: another save, a third-party callback",
    r"beside": "next to, compared with, during, besides",
    r"in line(?!\[)": "synchronous, in process",
    r"(is|are|was|were|be) not whole": "incomplete",
    r"once more": "again",
    r"past the page cache": "with O_DIRECT",
    r"ought to": "should",
    r"tickets?": "lock, lease",
    r"peers?": "baselines",
    r"other way round": "vice versa",
    r"(read|decoded) (as a )?whole(?! b)": "completely",
    r"(a|the|each|every|one|that) launch(?!ing|ed)": "job, run",
    r"rooms": "layers, packages",
    r"\w*seal(s|ed|ing)?": "integrity footer of a data file, manifest of .metadata",
    r"class _?(Piece|Place|Source|Draft|Made|Fate|Look)": "one name for each thing, see docs/glossary.md",
}

ALLOWED: dict[str, tuple[str, ...]] = {}
"""Where a word is right, as in a name that this project did not choose: file -> what may stand there, in lower case."""

_GAP = r"[ #\n]+"
_PATTERNS = {re.compile(rf"\b({word.replace(' ', _GAP)})\b", re.IGNORECASE): say for word, say in WORDS.items()}


def searched(root: Path) -> Iterator[tuple[str, str]]:
    """Each file below `root` that is searched: its name, and the text that counts."""
    for path in sorted((*root.glob("mcore_ckpt/**/*.py"), root / "README.md", *root.glob("docs/**/*.md"))):
        yield str(path.relative_to(root)), path.read_text()
    changes = (root / "CHANGELOG.md").read_text()
    yield "CHANGELOG.md", "\n## ".join(changes.split("\n## ")[:2])


def problems(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Words in one file: line, and what to say instead."""
    for pattern, say in _PATTERNS.items():
        for found in pattern.finditer(text):
            words = " ".join(found[0].replace("#", " ").split())
            if words.lower() not in ALLOWED.get(name, ()):
                yield text.count("\n", 0, found.start()) + 1, f"{words!r}: say {say}"


def texts(code: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module: first line, and text. Lines of comment that follow each other are one."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
    last, comment = -1, list[tuple[int, str]]()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            line, words = token.start[0], token.string.lstrip("# (")
            is_alone = not token.line[: token.start[1]].strip()
            if is_alone and line == last + 1:
                comment[-1] = (comment[-1][0], f"{comment[-1][1]} {words}")
            else:
                comment.append((line, words))
            last = line if is_alone else -1
    yield from comment


_NO_SUBJECT = re.compile(r"(Of|Those|That|The same)\b")
_RELATIVE = re.compile(r"\b(which|what|that|those|who)\b", re.IGNORECASE)
_SENTENCE_ENDS = re.compile(r"(?<=[.:;])\s+|\n\s*\n|\n(?= {4}|[-*] )")


def hard_to_read(code: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments without a subject, and sentences of relative clauses: line, and what to say instead."""
    for line, text in texts(code):
        if _NO_SUBJECT.match(text):
            yield line, f"{text.splitlines()[0]!r}: begin with the subject"
        for sentence in _SENTENCE_ENDS.split(text):
            if len(_RELATIVE.findall(sentence)) >= 3:
                yield line, f"{' '.join(sentence.split())!r}: say it in two sentences, or with nouns"


def main() -> int:
    """Print all of them, by file and line."""
    found = [f"{name}:{n}: {text}" for name, words in searched(Path.cwd()) for n, text in sorted(problems(name, words))]
    for path in sorted(Path("mcore_ckpt").rglob("*.py")):
        found += [f"{path}:{line}: {text}" for line, text in hard_to_read(path.read_text())]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
