"""A few hundred of the trials that `make test-flips` makes by the thousand: see `tests.format.flips`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.format.flips import run

SEED = 2024


@pytest.mark.long
@pytest.mark.timeout(900)
def test_damage_is_noticed_or_harmless_and_never_loaded(tmp_path: Path) -> None:
    tally = run(350, SEED, tmp_path, cuts=False)
    assert tally.trials > 350
    assert tally.of("seen") > 250
    assert not tally.unexpected, "\n".join(tally.unexpected)
