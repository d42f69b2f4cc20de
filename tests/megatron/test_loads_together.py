"""Ranks of a load whose options or fates differ: all are told, and none waits for a rank that does not come."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import CorruptCheckpointError, OptionError
from mcore_ckpt.megatron._versions import differences
from tests.megatron.trap_ranks import check, installed, made, state
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks

pytest.importorskip("megatron.core")

RANKS = 3
DEADLINE_S = 60.0
DIFFERENT = {"ON_DAMAGED": "go_back", "CERTIFY": "raise"}


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


FAILING: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"ON_DAMAGED": "go_back"}, {}),
    ({}, {"strict": "raise_all"}),
    ({}, {"strict": "ignore_all"}),
]


def failing(rank: int, run: Path) -> None:
    """One rank in turn cannot read the common state, or asks for what the checkpoint lacks, where Megatron gathers what
    all ask for.
    """
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt.megatron import serialization

    for iteration in (1, 2):
        dist_checkpointing.save(state(iteration), made(run / f"iter_000000{iteration}"))
    name = str(run / "iter_0000002")
    load_common: Any = serialization.load_common

    def cannot_read(*args: Any) -> Any:
        if "iter_0000002" in str(args[0]):
            raise CorruptCheckpointError("common state of iter_0000002: not here")
        return load_common(*args)

    for fails, (options, how) in itertools.product(range(2), FAILING):
        with pytest.MonkeyPatch.context() as patched:
            for option, value in options.items():
                patched.setenv(f"MCORE_CKPT_{option}", value)
            if rank == fails:
                patched.setattr(serialization, "load_common", cannot_read)
            if "ON_DAMAGED" in options:
                check(dist_checkpointing.load(state(0), name), 1)
                continue
            with pytest.raises(CorruptCheckpointError, match="not here"):
                dist_checkpointing.load(state(0), name, **how)
    for odd, (strict, checks) in itertools.product(range(2), (("raise_unexpected", True), ("raise_all", False))):
        wanted = state(0)
        if rank == odd:
            wanted["new"] = ShardedTensor.from_rank_offsets("new", torch.ones(4))
        with pytest.raises(Exception, match="Unexpected keys"):
            dist_checkpointing.load(wanted, name, strict=strict, validate_access_integrity=checks)
    for strict in ("raise_all", "ignore_all"):
        check(dist_checkpointing.load(state(0), name, strict=strict), 2)


def test_what_fails_on_one_rank_ahead_of_the_tensors_is_told_to_all(tmp_path: Path) -> None:
    """They would wait in the next exchange; where they go back, all do."""
    run_ranks(failing, RANKS, tmp_path, deadline_s=DEADLINE_S)


def loading_alone(rank: int, run: Path) -> int:
    dist_checkpointing = installed()
    name = str(run / "iter_0000001")
    dist_checkpointing.save(state(1), made(Path(name)))
    if rank == 1:
        check(dist_checkpointing.load(state(0), name, validate_access_integrity=False), 1)
    return rank


def test_a_rank_that_loads_alone_waits_for_none(tmp_path: Path) -> None:
    if differences().all_ranks_load:
        pytest.skip("this megatron-core lets no rank load alone")
    assert run_ranks(loading_alone, RANKS, tmp_path, deadline_s=DEADLINE_S) == [0, 1, 2]
