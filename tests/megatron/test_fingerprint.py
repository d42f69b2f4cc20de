"""One fingerprint of one model: stored, computed again and resharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import checkpoint_fingerprint, diff_checkpoints, reshard_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.diff import model_and_optimizer
from tests.megatron.trap_ranks import installed
from tests.support.gloo_ranks import run_pretending_ranks
from tests.support.models import GATED, Parallel, build_training
from tests.support.shared_groups import share_groups


def train_and_save(rank: int, path: Path) -> None:
    share_groups()
    dist_checkpointing = installed()
    training = build_training(GATED, Parallel(), seed=1)
    training.train(2)
    dist_checkpointing.save(training.sharded_state_dict(), str(path))


def crcs_of(state: Any) -> dict[str, int]:
    return {key: tensor.crc32 for key, tensor in state.tensors.items()}


def test_a_gpt_has_one_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    run_pretending_ranks(train_and_save, 1, saved)
    stored = checkpoint_fingerprint(saved)
    assert read_index(saved).fingerprints == crcs_of(stored)
    assert main(["verify", str(saved), "--state", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    model, optimizer = model_and_optimizer(stored)
    totals = {"total": stored.total, "model": model.total, "optimizer": optimizer.total}
    assert document["state"] == {**totals, "not_as_saved": []}

    resharded = tmp_path / "tp"
    reshard_checkpoint(saved, resharded, tp=2, pp=1)
    assert checkpoint_fingerprint(resharded) == stored
    assert read_index(resharded).fingerprints == crcs_of(stored)  # carried, all of them
    report = diff_checkpoints(saved, resharded, state=True)
    assert report.identical
    assert report.read_bytes == 0
