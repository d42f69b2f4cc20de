"""Hugging Face models and Megatron-LM's own `pretrain_gpt.py`: what it trains goes out, and comes in to be trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.models.logits import check_logits
from tests.launch.pretrain import launch, tracked_iteration

pytest.importorskip("transformers", reason="transformers runs what was exported: pip install 'mcore-ckpt[dev]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2"
).split()


def test_what_a_launch_has_trained_is_that_model_there_and_back(launches: Path, tmp_path: Path) -> None:
    """Trained, exported, run by `transformers`; imported again, a new launch goes on with the same losses."""
    trained = launches / "llama-checkpoints"
    launch("ours", 2, [*_LLAMA, "--save", str(trained), "--save-interval", "6"], launches / "llama")
    assert tracked_iteration(trained) == 6
    report = export_checkpoint(trained, tmp_path / "model", to="hf")
    assert report.family == "llama"
    check = check_logits(trained, tmp_path / "model", report.family)
    assert check.scale > 0.1
    assert check.difference < 1e-5 * check.scale

    # The launch's tokenizer has one token more than it is told, with which documents end: all rows go out and come in.
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config, "vocab_size": 1024}))
    export_checkpoint(trained, tmp_path / "all-rows", to="hf", hf_config=tmp_path / "whole")
    start = tmp_path / "start" / "release"
    import_checkpoint(tmp_path / "all-rows", start, kind="hf", tp=2, pp=1, transformer_impl="local")
    again = ["--finetune", "--train-iters", "3", *_LLAMA]
    on = launch("stock", 2, ["--load", str(trained), *again], launches / "llama-on")
    imported = launch("stock", 2, ["--load", str(start.parent), *again], launches / "llama-imported")
    assert sorted(imported.losses) == [1, 2, 3]
    assert imported.losses == on.losses
    by_arguments = ["--use-checkpoint-args", "--finetune", "--train-iters", "3", "--tensor-model-parallel-size", "2"]
    told = launch("ours", 2, ["--load", str(start.parent), *by_arguments], launches / "llama-told")
    assert told.losses == on.losses
