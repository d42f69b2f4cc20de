"""Flat buckets, the layout in which Megatron saves the state of a distributed optimizer unless told otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import made, run_pretending_ranks
from tests.support.models import DENSE, Parallel, build_training
from tests.support.shared_groups import share_groups
from tests.support.state_compare import differing, read_state, write_state

pytest.importorskip("megatron.core.dist_checkpointing", reason="the optimizer is Megatron's")


def prepare() -> Any:
    """Megatron's `dist_checkpointing`, served by this package."""
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    share_groups()
    import mcore_ckpt

    mcore_ckpt.install()
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def save_with_leaked_steps(rank: int, directory: Path) -> None:
    dist_checkpointing = prepare()
    stages = Parallel(pipeline=2)  # which have other numbers of parameters
    training = build_training(DENSE, stages, seed=1)
    training.train(2)
    write_state(directory / "before", rank, training.sharded_state_dict())
    state = training.sharded_state_dict(flat_buckets=True)
    for buckets in state["optimizer"]["param_state"][0].values():
        for parameter in (one for bucket in buckets for one in bucket):
            parameter["step"] = 2  # as Megatron-LM without pull request 2874 left it there
    dist_checkpointing.save(state, made(directory / "checkpoint"))
    again = build_training(DENSE, stages, seed=9)
    wanted = again.sharded_state_dict(is_loading=True, flat_buckets=True)
    again.load(dist_checkpointing.load(wanted, directory / "checkpoint"))
    write_state(directory / "after", rank, again.sharded_state_dict())


def test_steps_that_an_older_job_left_in_the_common_state_do_not_end_a_load(tmp_path: Path) -> None:
    run_pretending_ranks(save_with_leaked_steps, 2, tmp_path)
    assert differing(read_state(tmp_path / "before"), read_state(tmp_path / "after")) == []
