"""One fingerprint of one model: in memory under any layout, stored and resharded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import (
    checkpoint_fingerprint,
    diff_checkpoints,
    reshard_checkpoint,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.diff import model_and_optimizer
from tests.support.gloo_ranks import run_pretending_ranks
from tests.support.models import GATED, Parallel, build_training
from tests.support.shared_groups import share_groups

Found = dict[str, Any]


def _prepared() -> Any:
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    share_groups()
    from megatron.core import dist_checkpointing

    import mcore_ckpt

    mcore_ckpt.install()
    return dist_checkpointing


def _taken(state: Any) -> Any:
    """The fingerprint with names, which is the same without."""
    from mcore_ckpt import fingerprint

    named, total = fingerprint(state, names=True), fingerprint(state)
    assert named.total == total.total
    assert total.tensors is None
    return named


def train_and_save(rank: int, path: Path) -> Any:
    dist_checkpointing = _prepared()
    training = build_training(GATED, Parallel(), seed=1)
    training.train(2)
    before = _taken(training.sharded_state_dict())
    dist_checkpointing.save(training.sharded_state_dict(), str(path))
    assert _taken(training.sharded_state_dict()).total == before.total
    training.train(1)
    assert _taken(training.sharded_state_dict()).total != before.total
    return before


def load_and_take(rank: int, path: Path, layouts: dict[str, Parallel]) -> dict[str, Found]:
    """The fingerprint after a load under each layout; and what is said of a replica that only the last rank has."""
    dist_checkpointing = _prepared()
    last = torch.distributed.get_world_size() - 1
    found = {}
    for name, layout in layouts.items():
        training = build_training(GATED, layout, seed=9)
        training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), str(path)))
        loaded = _taken(training.sharded_state_dict())
        found[name] = {"loaded": loaded}
        parameters = training.model[0].module.named_parameters()
        norm = next(weight for key, weight in parameters if key.endswith("input_layernorm.weight"))
        if layout.pipeline == 1:  # all ranks have a replica
            held = norm.data.clone()
            if rank == last:
                norm.data[0] += 1
            diverged = _taken(training.sharded_state_dict())
            found[name]["diverged"] = diverged.total == loaded.total, [str(one) for one in diverged.diverged]
            norm.data.copy_(held)
        assert _taken(training.sharded_state_dict()) == loaded
    return found


def crcs_of(state: Any) -> dict[str, int]:
    return {key: tensor.crc32 for key, tensor in state.tensors.items()}


def test_a_gpt_has_one_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (trained,) = run_pretending_ranks(train_and_save, 1, saved)
    stored = checkpoint_fingerprint(saved)
    assert stored == trained
    assert main(["verify", str(saved), "--state", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    model, optimizer = model_and_optimizer(stored)
    totals = {"total": stored.total, "model": model.total, "optimizer": optimizer.total}
    assert document["state"] == {**totals, "not_as_saved": []}
    assert main(["verify", str(saved), "--expect-state", model.total.upper()]) == 0
    assert main(["verify", str(saved), "--expect-state", "0" * 32]) == 1

    resharded = tmp_path / "tp"
    reshard_checkpoint(saved, resharded, tp=2, pp=1)
    assert checkpoint_fingerprint(resharded) == stored
    assert read_index(resharded).fingerprints == crcs_of(stored)  # carried, all of them
    report = diff_checkpoints(saved, resharded, state=True)
    assert report.identical
    assert report.read_bytes == 0

    layouts = {"tp": Parallel(tensor=2), "pp": Parallel(pipeline=2)}
    for by_rank in run_pretending_ranks(load_and_take, 2, resharded, layouts, deadline_s=300):
        for name, found in by_rank.items():
            assert found["loaded"] == stored, name
            _check_faults(found)


def _check_faults(found: Found) -> None:
    if "diverged" in found:
        same_total, named = found["diverged"]
        assert same_total
        (said,) = named
        assert "layer_norm_weight: " in said or "layernorm.weight: " in said
        assert ": ranks 1 hold other bits than rank 0 in the slice" in said
