"""A rank that is stopped in a save or a load: all others raise when the process group's time is up, and name it."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import LoadError, SaveError
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.megatron.trap_ranks import installed, made, state
from tests.support.gloo_ranks import MEGATRON, rank_outcomes

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.long

RANKS = 4
PATIENCE_S = 4.0
# Where a rank stops: the function that it comes to, and what the others wait for it in.
STOPS = {
    "plan": ("mcore_ckpt.save.planner.lay_out_rank", "prepare the save|plan the save"),
    "results": ("mcore_ckpt.save.commit.check_results", "write the data files"),
    "publish": ("mcore_ckpt.save.commit.publish", "publish the checkpoint"),
    "read": ("mcore_ckpt.megatron.strategy.replace_leaves", "load"),
}


def _stops(rank: int, run: Path, where: str, who: int) -> None:
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    timeout = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    checkpointing = installed()
    checkpointing.save(state(1), made(run / "first"))
    loads = where == "read"
    if rank == who:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(STOPS[where][0], lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP))
            _again(checkpointing, run, loads)
    _again(checkpointing, run, loads)


def _again(checkpointing: Any, run: Path, loads: bool) -> None:
    if loads:
        checkpointing.load(state(0), str(run / "first"))
    else:
        checkpointing.save(state(2), made(run / "second"))


@pytest.mark.parametrize(
    ("where", "who"),
    [("plan", 2), ("plan", 0), ("results", 3), ("results", 0), ("publish", 0), ("read", 2), ("read", 0)],
)
def test_all_others_name_it(where: str, who: int, tmp_path: Path) -> None:
    outcomes = rank_outcomes(_stops, RANKS, tmp_path, where, who, deadline_s=100, grace_s=5, preload=MEGATRON)
    others = [outcome for outcome in outcomes if outcome.rank != who]
    for outcome in others:
        assert isinstance(outcome.error, LoadError if where == "read" else SaveError), outcome.error_text
        named = rf"could not ({STOPS[where][1]}): .* rank {who}(, for which rank \d has waited,)? has ended, hangs"
        assert re.search(named, str(outcome.error)), outcome.error
    assert verify_checkpoint(tmp_path / "first").whole
    assert not (tmp_path / "second" / ".metadata").exists()
