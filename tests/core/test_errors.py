"""The exception tree: as drawn in the docstring of errors.py, and what each can be caught as besides."""

from __future__ import annotations

import pickle

import pytest

from mcore_ckpt.core import errors

pytestmark = pytest.mark.quick

ALSO = {
    "OptionError": ValueError,
    "CheckpointExistsError": RuntimeError,
    "StrategyNotFoundError": LookupError,
    "CheckpointNotFoundError": FileNotFoundError,
    "MissingKeyError": KeyError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_message_is_shown_as_written_and_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("rank 3, /ckpt/__3_0.distcp: expected 5 bytes, got 4")
    assert str(error) == "rank 3, /ckpt/__3_0.distcp: expected 5 bytes, got 4"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert isinstance(error, ALSO.get(name, Exception))
