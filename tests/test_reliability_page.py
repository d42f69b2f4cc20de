"""Each promise of README and docs/reliability.md has tests that hold it: docs/promises.md names them."""

from __future__ import annotations

from scripts import promises


def test_each_promise_has_tests_and_the_page_names_them() -> None:
    assert promises.PAGE.read_text() == promises.page(), "run scripts/promises.py"


def test_what_else_the_page_names_is_there() -> None:
    paths, names = promises.named_in(promises.RELIABILITY.read_text())
    assert len(paths) > 5
    for named in (*paths, *names):
        assert promises.level_of(f"`{named}`"), named
