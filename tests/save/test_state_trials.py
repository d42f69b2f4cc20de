"""A few of the trials that `make test-state` makes by the thousand: see `tests.save.state_trials`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.save.state_trials import FAULTS, run

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")


@pytest.mark.long
def test_each_fault_is_named_and_nothing_without_one(tmp_path: Path) -> None:
    tally, unexpected = run(2 * len(FAULTS), 2024, tmp_path)
    assert not unexpected, "\n".join(unexpected)
    assert tally == {**{(fault, "named"): 2 for fault in FAULTS[:-1]}, ("none", "nothing said"): 2}
