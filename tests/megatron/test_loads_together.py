"""Ranks of a load whose options or fates differ: all are told, and none waits for a rank that does not come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CorruptCheckpointError, OptionError
from tests.megatron.trap_ranks import check, installed, made, state
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks

pytest.importorskip("megatron.core")

RANKS = 3
DEADLINE_S = 60.0
DIFFERENT = {"ON_DAMAGED": "go_back", "PROVE": "always", "VALIDATION": "megatron", "COOPERATIVE": "on"}


def differing(rank: int, run: Path) -> None:
    """Rank 1 has another value of each option in turn."""
    dist_checkpointing = installed()
    name = str(run / "iter_0000001")
    dist_checkpointing.save(state(1), made(Path(name)))
    for option, value in DIFFERENT.items():
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1:
                patched.setenv(f"MCORE_CKPT_{option}", value)
            with pytest.raises(OptionError, match=f"MCORE_CKPT_{option} alike on all hosts"):
                dist_checkpointing.load(state(0), name)
    check(dist_checkpointing.load(state(0), name), 1)


def test_options_that_differ_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Also where Megatron lets ranks load alone: not in a load that it checks, as it does by default."""
    run_ranks(differing, RANKS, tmp_path, deadline_s=DEADLINE_S)


def failing(rank: int, run: Path, fails: int) -> None:
    """One rank cannot read the common state, and none can read damaged tensors."""
    dist_checkpointing = installed()
    from mcore_ckpt.megatron import common_state

    for iteration in (1, 2):
        dist_checkpointing.save(state(iteration), made(run / f"iter_000000{iteration}"))
    name = str(run / "iter_0000002")
    load_common: Any = common_state.load_common

    def cannot_read(*args: Any) -> Any:
        if "iter_0000002" in str(args[0]):
            raise CorruptCheckpointError("common state of iter_0000002: not here")
        return load_common(*args)

    for options in ({}, {"PROVE": "always"}, {"ON_DAMAGED": "go_back"}):
        with pytest.MonkeyPatch.context() as patched:
            for option, value in options.items():
                patched.setenv(f"MCORE_CKPT_{option}", value)
            if rank == fails:
                patched.setattr(common_state, "load_common", cannot_read)
            if "ON_DAMAGED" in options:
                check(dist_checkpointing.load(state(0), name), 1)
                continue
            with pytest.raises(CorruptCheckpointError, match="not here"):
                dist_checkpointing.load(state(0), name)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_cannot_read_the_common_state_tells_the_others(tmp_path: Path, fails: int) -> None:
    """They would wait in the next exchange; where they go back, all do."""
    assert not any(name.startswith("MCORE_CKPT_") for name in os.environ)
    run_ranks(failing, RANKS, tmp_path, fails, deadline_s=DEADLINE_S)
