"""The exception tree: as drawn in the docstring of errors.py, and what each can be caught as besides."""

from __future__ import annotations

import pickle
import re

import pytest

from mcore_ckpt.core import errors

ALSO = {
    "OptionError": ValueError,
    "CheckpointExistsError": RuntimeError,
    "StrategyNotFoundError": LookupError,
    "CheckpointNotFoundError": FileNotFoundError,
    "MissingKeyError": KeyError,
}


def drawn_tree() -> dict[str, str]:
    """Class -> its parent, from the picture in the module's docstring."""
    parents: dict[str, str] = {}
    at_depth: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([| `-]*)(\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            at_depth[depth] = found[2]
            if depth:
                parents[found[2]] = at_depth[depth - 1]
    return parents


def test_the_picture_is_the_tree() -> None:
    tree = drawn_tree()
    assert {*tree, "CheckpointError"} == set(errors.__all__)
    for name, parent in tree.items():
        assert getattr(errors, parent) in getattr(errors, name).__bases__, f"{name} is drawn under {parent}"


@pytest.mark.parametrize("name", errors.__all__)
def test_message_is_shown_as_written_and_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("rank 3, /ckpt/__3_0.distcp: expected 5 bytes, got 4")
    assert str(error) == "rank 3, /ckpt/__3_0.distcp: expected 5 bytes, got 4"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert isinstance(error, ALSO.get(name, Exception))
