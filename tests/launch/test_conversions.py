"""Conversions and Megatron-LM's own `pretrain_gpt.py`: what it trains goes out, and comes in to be trained.

To Hugging Face and back; from files of `--ckpt-format torch` and into them; from Megatron-FSDP, with the optimizer.
Launches resume from what was converted with losses that are equal to the last bit.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import mcore_ckpt
from mcore_ckpt.format.metadata_read import HF_INDEX
from mcore_ckpt.models.conversions import (
    export_checkpoint,
    import_checkpoint,
    merge_checkpoints,
    verify_weights,
)
from mcore_ckpt.models.logits import check_logits
from mcore_ckpt.tools.diff import diff_checkpoints
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.launch.pretrain import ARGUMENTS, SITE, launch, megatron_lm, tracked_iteration
from tests.launch.variants import ASYNC
from tests.models import test_table as table
from tests.support.hf_models import SMALL, HfCase, hf_logits, make_hf_model, tokens
from tests.support.model_like import assert_same, read_all
from tests.support.models import megatron_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2"
).split()


def test_what_a_launch_has_trained_is_that_model_there_and_back(launches: Path, tmp_path: Path) -> None:
    """Trained, exported, run by `transformers`; imported again, a new launch goes on with the same losses."""
    pytest.importorskip("transformers", reason="transformers runs what was exported: pip install 'mcore-ckpt[dev]'")
    trained = launches / "llama-checkpoints"
    launch("ours", 2, [*_LLAMA, "--save", str(trained), "--save-interval", "6"], launches / "llama")
    assert tracked_iteration(trained) == 6
    report = export_checkpoint(trained, tmp_path / "model", to="hf")
    assert report.family == "llama"
    check = check_logits(trained, tmp_path / "model", report.family)
    assert check.scale > 0.1
    assert check.difference < 1e-5 * check.scale

    # The launch's tokenizer has one token more than it is told, with which documents end: all rows go out and come in.
    export_checkpoint(trained, tmp_path / "all-rows", to="hf", vocab_size=1024)
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


def test_a_launch_starts_from_the_average_of_others(launches: Path, tmp_path: Path) -> None:
    trained, arguments = launches / "averaged-checkpoints", [*_LLAMA, "--bf16", "--use-distributed-optimizer"]
    launch("ours", 2, [*arguments, "--save", str(trained), "--save-interval", "3"], launches / "averaged")
    sources = [trained / f"iter_000000{n}" for n in (3, 6)]
    report = merge_checkpoints(sources, tmp_path / "start" / "release", tp=1, pp=1)
    assert "iteration of the common state" in report.left_out
    merge_checkpoints(sources[1:], tmp_path / "masters", masters=True)  # of flat buckets, by their tables
    difference = diff_checkpoints(tmp_path / "masters", sources[1])
    assert not difference.only_in_a
    assert all(tensor.same for tensor in difference.tensors)
    start = [*arguments, _TP, "1", "--load", str(tmp_path / "start"), "--finetune", "--train-iters", "3"]
    losses = [launch(side, 1, start, launches / f"averaged-{side}").losses for side in ("stock", "ours")]
    assert sorted(losses[0]) == [1, 2, 3]
    assert losses[0] == losses[1]


def test_a_launch_keeps_models_alone_and_exports_them(launches: Path, tmp_path: Path) -> None:
    """Its older checkpoints have a sixth of their bytes, and start other launches; the models are those saved last."""
    trained, models = launches / "less-checkpoints", tmp_path / "models"
    arguments = [*_LLAMA, "--bf16", "--use-distributed-optimizer", "--hidden-size", "256"]
    options = {"MCORE_CKPT_KEEP_OPTIMIZER_LAST": "1", "MCORE_CKPT_EXPORT_TO": str(models)}
    saving = ["--save", str(trained), "--save-interval", "2", *ASYNC]
    launch("ours", 2, [*arguments, *saving], launches / "less", options)
    sizes = {found.checkpoint.name: found.checkpoint for found in mcore_ckpt.list_run(trained).checkpoints}
    old, full = sizes["iter_0000004"], sizes["iter_0000006"]
    assert old.removed is not None
    assert full.removed is None
    assert old.size_bytes <= 0.16 * full.size_bytes
    assert verify_checkpoint(old.path).whole
    assert verify_weights(models / full.name).whole
    export_checkpoint(full.path, tmp_path / "after", to="hf")
    assert (models / full.name / HF_INDEX).read_bytes() == (tmp_path / "after" / HF_INDEX).read_bytes()
    start = [*arguments, "--load", str(trained), "--ckpt-step", "4"]
    refused = launch("ours", 2, start, launches / "less-refused", expected_exit=None)
    assert "was removed on" in refused.log
    assert "by keep_optimizer_last=1" in refused.log
    on = launch("ours", 2, [*start, "--no-load-optim"], launches / "less-on")
    assert sorted(on.losses) == [5, 6]


_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_DISTRIBUTED = "--use-distributed-optimizer"
_EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none"]
_EXPERTS += ["--expert-model-parallel-size", "2", "--disable-bias-linear"]


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "arguments"),
    [
        (2, 1, 1, ["--swiglu", "--bf16", _DISTRIBUTED, "--untie-embeddings-and-output-weights"]),
        (1, 2, 1, []),
        (1, 1, 2, [*_EXPERTS, "--bf16", _DISTRIBUTED]),
    ],
    ids=["tp2-distributed", "pp2-float32", "ep2-distributed"],
)
def test_what_was_imported_is_the_model_that_stock_saves(
    tp: int, pp: int, ep: int, arguments: list[str], launches: Path
) -> None:
    place = launches / f"legacy-{tp}-{pp}-{ep}-{len(arguments)}"
    arguments = [*arguments, _TP, str(tp), _PP, str(pp)]
    old = [*arguments, "--ckpt-format", "torch"]
    launch("stock", 2, [*old, "--save", str(place / "saved"), "--save-interval", "3"], place / "run")
    checkpoint = place / "converted" / "iter_0000003"
    (left_out,) = import_checkpoint(place / "saved" / "iter_0000003", checkpoint, kind="megatron-legacy").left_out
    assert "the optimizer's state" in left_out

    (place / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    converting = ["--load", str(place / "saved"), "--no-load-optim", "--no-save-optim"]
    converting += ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(place / "again")]
    launch("stock", 2, [*old, "--override-opt_param-scheduler", *converting], place / "convert")
    (made,) = (place / "again").rglob("iter_0000003")
    difference = diff_checkpoints(checkpoint, made)
    assert len(difference.tensors) > 10
    assert all(tensor.same for tensor in difference.tensors)
    assert all(key.startswith("rng_state/") for key in difference.only_in_b)
    assert not difference.only_in_a
    resumed = [*arguments, "--load", str(place / "converted"), "--no-load-optim", "--no-load-rng"]
    losses = [launch(side, 2, resumed, place / f"on-{side}").losses for side in ("stock", "ours")]
    assert losses[0] == losses[1]


_ARGUMENTS = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --attention-dropout 0 --hidden-dropout 0"
_BATCH = 8
_OWN_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def _by_module(checkpoint: mcore_ckpt.Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors whose keys begin so, layer by layer, under the names of Megatron's own modules."""
    found = {}
    for key in checkpoint.tensors:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.startswith("optimizer."):
            continue
        tensor = checkpoint[key][...]
        if not name.startswith("decoder.layers."):
            found[name] = tensor
            continue
        rest = name.removeprefix("decoder.layers.")
        for fused, own in _OWN_NAMES:
            rest = own + rest.removeprefix(fused) if rest.startswith(fused) else rest
        for number, layer in enumerate(tensor):
            if ".experts.experts." not in rest:
                found[f"decoder.layers.{number}.{rest}"] = layer.clone()
                continue
            before, after = rest.split(".experts.experts.")
            for expert, own in enumerate(layer):
                found[f"decoder.layers.{number}.{before}.experts.local_experts.{expert}.{after}"] = own.clone()
    return found


def _save_as_megatron_fsdp(source: Path, target: Path, *, with_schedule: bool) -> None:
    """The same training as `--ckpt-format fsdp_dtensor` keeps it; without a schedule, as others leave it."""
    with mcore_ckpt.open_checkpoint(source) as checkpoint:
        common = checkpoint.common_state()
        weights = _by_module(checkpoint, "")
        moments = {name: _by_module(checkpoint, f"optimizer.state.{name}.") for name in ("exp_avg", "exp_avg_sq")}
    settings = common["optimizer"]
    (group, *_) = settings.get(0, settings)["optimizer"]["param_groups"]
    meta = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "wd_mult", "step")}
    arguments = common["args"]
    state: dict[str, Any] = {
        "model": {f"module.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {
            "state": {f"module.module.{name}": {key: moments[key][name] for key in moments} for name in weights},
            "param_to_group_meta": {f"module.module.{name}": dict(meta) for name in weights},
        },
        "args": arguments,
        "checkpoint_version": 3.0,
    }
    if with_schedule:
        state |= {"iteration": common["iteration"], "opt_param_scheduler": common["opt_param_scheduler"]}
        state["num_floating_point_operations_so_far"] = common["num_floating_point_operations_so_far"]
    else:
        for name in ("consumed_train_samples", "global_batch_size"):
            delattr(arguments, name)
    dcp.save(state, checkpoint_id=target)


def test_an_imported_optimizer_goes_on_as_if_it_had_never_stopped(launches: Path) -> None:
    place, arguments = launches / "imported-optimizer", _ARGUMENTS.split()
    whole = launch("stock", 2, [*arguments, "--save", str(place / "saved"), "--save-interval", "3"], place / "run")
    later = {iteration: loss for iteration, loss in whole.losses.items() if iteration > 3}
    assert sorted(later) == [4, 5, 6]
    for name, more in (("known", []), ("unknown", ["--override-opt_param-scheduler"])):
        _save_as_megatron_fsdp(place / "saved" / "iter_0000003", place / name, with_schedule=name == "known")
        report = mcore_ckpt.import_checkpoint(
            place / name,
            place / f"{name}-imported" / "iter_0000003",
            kind="dcp",
            global_batch_size=None if name == "known" else _BATCH,
        )
        assert any("--override-opt_param-scheduler" in note for note in report.notes) is (name == "unknown")
        for side in ("stock", "ours") if name == "known" else ("stock",):
            load = ["--load", str(place / f"{name}-imported"), *more]
            on = launch(side, 2, [*arguments, *load], place / f"{name}-{side}")  # type: ignore[arg-type]
            assert on.losses == later, (name, side)


_HYBRID = ["--hybrid-layer-pattern", "*-*-*-*-", "--spec", "hybrid_stack", "hybrid_stack_spec"]


def test_a_gpt_job_goes_on_as_a_hybrid_model_and_back(launches: Path) -> None:
    """With its optimizer, under the division of the save as if nothing had been; the tensors are those that Megatron's
    own tool makes."""
    place, script = launches / "hybrid", megatron_lm() / "pretrain_hybrid.py"
    if not script.exists():
        pytest.skip("this Megatron-LM has no HybridModel")
    arguments = [*_ARGUMENTS.split(), "--position-embedding-type", "rope", "--save-interval", "1"]
    job = [*ARGUMENTS, *arguments, *_HYBRID]
    saved = ["--save", str(place / "gpt")]
    gpt = launch("ours", 2, [*arguments, _TP, "2", *saved], place / "run")

    def later(iteration: int) -> dict[int, float]:
        return {number: loss for number, loss in gpt.losses.items() if number > iteration}

    source, made = place / "gpt" / "iter_0000003", place / "made" / "iter_0000003"
    mcore_ckpt.reshard_checkpoint(source, made, convert_model="gpt-to-hybrid")
    loading = ["--load", str(place / "made"), "--save", str(place / "hybrid")]
    on = launch("ours", 2, [*job, _TP, "2", *loading], place / "on", tree=script)
    assert on.losses == later(3)

    saved_there = place / "hybrid" / "iter_0000004"
    mcore_ckpt.reshard_checkpoint(saved_there, place / "pp2" / "iter_0000004", tp=1, pp=2)
    loading = ["--load", str(place / "pp2")]
    divided = launch("stock", 2, [*job, _PP, "2", *loading], place / "on-pp2", tree=script)
    assert divided.losses == pytest.approx(later(4), rel=2e-6)  # added in another order

    mcore_ckpt.reshard_checkpoint(saved_there, place / "back" / "iter_0000004", convert_model="hybrid-to-gpt")
    back = launch("stock", 2, [*arguments, _TP, "2", "--load", str(place / "back")], place / "on-back")
    assert back.losses == later(4)

    model = place / "model" / "iter_0000003"
    mcore_ckpt.reshard_checkpoint(made, model, tp=1, pp=2, drop_optimizer=True)
    _convert_by_megatron("hybrid-to-gpt", model.parent, place / "numbered")
    _convert_by_megatron("gpt-to-hybrid", place / "numbered", place / "by-megatron")
    torch.save({}, place / "numbered" / model.name / "common.pt")  # which that tool leaves out
    ours = place / "by-us" / model.name
    mcore_ckpt.reshard_checkpoint(place / "numbered" / model.name, ours, tp=2, convert_model="gpt-to-hybrid")
    for other in (place / "by-megatron" / model.name, model):
        assert_same(read_all(ours), read_all(other))
    mcore_ckpt.reshard_checkpoint(model, place / "gpt-by-us", tp=2, convert_model="hybrid-to-gpt")
    stacked = read_all(place / "gpt-by-us")
    for key, tensor in read_all(place / "numbered" / model.name).items():
        found = re.fullmatch(r"(.*layers\.)(\d+)\.(.*)", key)
        assert torch.equal(tensor, stacked[found[1] + found[3]][int(found[2])] if found else stacked[key]), key


def _convert_by_megatron(direction: str, source: Path, target: Path) -> None:
    tool = megatron_lm() / "tools" / "checkpoint" / "gpt_hybrid_conversion.py"
    places = ["--load-dir", str(source), "--save-dir", str(target)]
    command = [sys.executable, str(tool), "--direction", direction, *places, *_HYBRID[:2]]
    path = f"{SITE}:{megatron_lm()}:{os.environ.get('MEGATRON_LM_PATH', '')}"
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, timeout=200)


_JOB = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --micro-batch-size 2 "
    "--global-batch-size 2 --lr 1e-3 --train-iters 1 --eval-iters 0 --transformer-impl local --distributed-backend "
    "gloo --attention-backend unfused --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --ckpt-format torch_dist "
    "--use-checkpoint-args --finetune"
).split()
_LATENT = {**SMALL, **table.LATENT_ATTENTION, "first_k_dense_replace": 1, "q_lora_rank": 24}
_LATENT |= {"n_group": 4, "topk_group": 2, "rope_parameters": {**table.YARN, "original_max_position_embeddings": 4096}}
_LINEAR = {**SMALL, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
_LLAMA32 = {**SMALL, "rope_parameters": {**table.LLAMA3, "rope_theta": 500000.0, "factor": 32.0}}


@pytest.mark.parametrize(
    ("config", "settings", "without_effect_up_to"),
    [
        ("Qwen3Config", {**SMALL, "head_dim": 16, "rms_norm_eps": 1e-2}, None),
        ("Starcoder2Config", {**SMALL, "sliding_window": 8, "hidden_act": "gelu"}, None),
        ("DeepseekV3Config", _LATENT, None),
        ("LlamaConfig", _LINEAR, (0, 18)),
        ("LlamaConfig", _LLAMA32, (0, 19)),
    ],
    ids="norms gelu latent linear llama3".split(),
)
def test_a_job_with_the_options_that_a_note_advises_has_the_model(
    config: str, settings: dict[str, Any], without_effect_up_to: tuple[int, int] | None, launches: Path, tmp_path: Path
) -> None:
    """Or the note names the last Megatron-LM that parses such an option, and builds another model."""
    pytest.importorskip("transformers", reason="transformers makes the model: pip install 'mcore-ckpt[dev]'")
    make_hf_model(HfCase("model", config, settings), tmp_path / "hf")
    torch.save(tokens(300), tmp_path / "tokens.pt")
    start = launches / f"advised-{config}-{without_effect_up_to}"
    options, *notes = import_checkpoint(tmp_path / "hf", start / "release", kind="hf", transformer_impl="local").notes
    advised = options.partition("give the job ")[2].partition(", too")[0].split()
    script = megatron_lm() / "pretrain_gpt.py"
    job = [*_JOB, "--load", str(start), *advised]
    launch("stock", 1, job, start / "job", {"LAUNCH_LOGITS": str(tmp_path)}, tree=script)
    expected, logits = hf_logits(tmp_path / "hf", 300), torch.load(tmp_path / "logits.pt")[..., :300]
    same = bool((logits - expected).abs().max() < 1e-5 * expected.abs().max())
    if without_effect_up_to is None:
        assert same
        assert not notes
    else:
        assert same is (megatron_version() > without_effect_up_to)
        assert "Megatron-LM up to {}.{} parses".format(*without_effect_up_to) in notes[0]
