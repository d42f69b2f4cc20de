"""Checkpoints that other frameworks have saved: FSDP2 and Megatron-FSDP by plain DCP, NeMo."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.reshard.options import RenameRule
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.models.test_huggingface import CONFIG, FFN, HIDDEN, exported, model_tensors, write_hf
from tests.support.fsdp_ranks import save_fsdp, save_megatron_fsdp
from tests.support.gloo_ranks import run_megatron_ranks, run_ranks
from tests.support.model_like import assert_same, read_all


def common_of(checkpoint: str | Path) -> Any:
    with open_checkpoint(checkpoint) as opened:
        return opened.common_state()


# Sizes that no number of ranks divides: FSDP2 gives the last ranks less, or nothing.
VOCABULARY, RANKS = 50, 3


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, `wrapped` and `trained`: what three ranks have saved of the same model, and its `config.json`."""
    root = tmp_path_factory.mktemp("fsdp")
    (root / "config.json").write_text(json.dumps(CONFIG))
    run_ranks(save_fsdp, RANKS, root, {key: tensor.float() for key, tensor in model_tensors().items()})
    return root


@pytest.mark.parametrize("name", ["plain", "wrapped", "trained"])
def test_a_checkpoint_of_fsdp2_becomes_megatrons(fsdp: Path, tmp_path: Path, name: str) -> None:
    target = str(tmp_path / "c")
    words = ["import", str(fsdp / name), target, "--from", "dcp", "--hf-config", str(fsdp), "--tp", "2", "-q"]
    assert main(words) == 0
    assert verify_checkpoint(target).whole
    assert_same(exported(target, tmp_path / "e", dtype="bf16"), model_tensors())


def test_the_moments_of_adam_become_those_of_megatron(fsdp: Path, tmp_path: Path) -> None:
    report = import_checkpoint(fsdp / "trained", tmp_path / "c", kind="dcp", tp=2, dtype="bf16", hf_config=fsdp)
    assert not [line for line in report.left_out if "state" in line]
    found = read_all(tmp_path / "c")
    given = model_tensors()
    with open_checkpoint(fsdp / "trained") as trained:
        for state, scale in (("exp_avg", 0.1), ("exp_avg_sq", 0.001)):
            gate, up = (
                trained[f"optim.state.model.layers.1.mlp.{name}_proj.weight.{state}"].torch() for name in ("gate", "up")
            )
            assert torch.allclose(gate, torch.full((FFN, HIDDEN), scale))
            stored = found[f"optimizer.state.{state}.decoder.layers.mlp.linear_fc1.weight"]
            assert torch.equal(stored[1], torch.cat([gate, up]))
            assert not found[f"optimizer.state.{state}.embedding.word_embeddings.weight"][VOCABULARY:].any()
    main = found["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"]
    assert main.dtype == torch.float32
    assert torch.equal(main[0], given["model.layers.0.mlp.down_proj.weight"].float())
    assert found["decoder.layers.mlp.linear_fc2.weight"].dtype == torch.bfloat16
    groups = common_of(tmp_path / "c")["optimizer"]["optimizer"]["param_groups"]
    assert [(group["step"], group["betas"], group["eps"]) for group in groups] == [(1, (0.9, 0.999), 1e-8)] * 2
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]


def test_half_of_an_optimizer_is_left_out_and_named(fsdp: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text(r"state.model.norm.weight.exp_avg_sq -")
    report = import_checkpoint(fsdp / "trained", tmp_path / "c", kind="dcp", hf_config=fsdp, rename=rules)
    assert report.left_out[0].endswith("(1 of 21 parameters have no exp_avg_sq, the first model.norm.weight)")
    assert not any(key.startswith("optimizer") for key in read_index(tmp_path / "c").tensors)
    assert "optimizer" not in common_of(tmp_path / "c")


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as NeMo 2 makes it: keys with `module.`, no arguments of Megatron, an optimizer, `context/`."""
    root = tmp_path_factory.mktemp("nemo")
    write_hf(root / "model", model_tensors())
    import_checkpoint(root / "model", root / "megatron", kind="hf", tp=2, pp=2)
    export_checkpoint(root / "megatron", root / "files")
    write_hf(root / "more", {"optimizer.state.exp_avg.module.output_layer.weight": torch.ones(256, HIDDEN)})
    (root / "files" / "model.safetensors").rename(root / "files" / "first.safetensors")
    (root / "files" / "model.safetensors.index.json").unlink()
    (root / "files" / "more.safetensors").write_bytes((root / "more" / "model.safetensors").read_bytes())
    torch.save({"global_step": 7, "pytorch-lightning_version": "2.4.0"}, root / "common.pt")
    rename = [RenameRule(re.compile("^(?!optimizer)"), "module.")]
    import_checkpoint(root / "files", root / "nemo" / "weights", tp=2, rename=rename, common=root / "common.pt")
    (root / "nemo" / "context").mkdir()
    (root / "nemo" / "context" / "model.yaml").write_text("config: {num_layers: 2}")
    return root / "nemo"


def test_a_nemo_directory_is_taken_where_a_checkpoint_is(nemo: Path, tmp_path: Path) -> None:
    for words in (
        ["inspect", str(nemo)],
        ["verify", str(nemo)],
        ["cat", str(nemo), "module.output_layer.weight"],
        ["diff", str(nemo), str(nemo / "weights")],
        ["reshard", str(nemo), str(tmp_path / "r"), "--tp", "1", "--pp", "1"],
    ):
        assert main([*words, "-q"]) == 0, words
    assert (tmp_path / "r" / "weights" / ".metadata").is_file()
    assert (tmp_path / "r" / "context" / "model.yaml").is_file()
    assert common_of(nemo)["global_step"] == 7
    with pytest.raises(CheckpointNotFoundError, match=r"NeMo keeps the checkpoint in .*/nemo/weights: use that"):
        FileSystemReader(nemo).read_metadata()


def test_a_nemo_directory_becomes_a_hugging_face_model(nemo: Path, tmp_path: Path) -> None:
    assert_same(exported(nemo, tmp_path / "e", hf_config=nemo.parent / "model"), model_tensors())
    with pytest.raises(OptionError, match=r"stores no arguments of Megatron.*--hf-config"):
        export_checkpoint(nemo, tmp_path / "x", to="hf")


def layers_of(*parts: str) -> dict[str, torch.Tensor]:
    """Two layers of a model under the names of Megatron's modules: float32, each element another."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "pre_mlp_layernorm.weight": (HIDDEN,),
        **{part: (FFN, HIDDEN) if "fc1" in part else (HIDDEN, FFN) for part in parts},
    }
    names = {f"decoder.layers.{layer}.{part}": shape for layer in range(2) for part, shape in shapes.items()}
    names |= {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


SCHEDULE = {"max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 8, "lr_decay_steps": 96, "lr_decay_style": "cosine"}
MEGATRON_ARGUMENTS = {"num_layers": 2, "vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 32, "swiglu": True}


def _fc1_of(form: str, half: str, expert: int) -> str:
    """What a module calls the first matrix of an MLP or of an expert, or half of it."""
    if form == "dense":
        return f"mlp.linear_fc1.weight{half}"
    local = f"local_experts.{expert}.linear_fc1.weight" if form == "local" else f"linear_fc1.weight{expert}"
    return f"mlp.experts.{local}{half}"


@pytest.mark.parametrize("form", ["dense", "local", "grouped"])
def test_a_checkpoint_of_megatron_fsdp_becomes_torch_dist(tmp_path: Path, form: str) -> None:
    """Its DTensors have uneven shards, gates and what they let through are apart, layers and experts have numbers."""
    experts = [0] if form == "dense" else [0, 1, 2]
    gates = [_fc1_of(form, half, expert) for expert in experts for half in ("_w", "_v")]
    given = layers_of(*gates, *(_fc1_of(form, "", expert).replace("fc1", "fc2") for expert in experts))
    progress = {"opt_param_scheduler": {**SCHEDULE, "num_steps": 72}, "num_floating_point_operations_so_far": 5e9}
    arguments = {**MEGATRON_ARGUMENTS, **({} if form == "dense" else {"num_experts": 3})}
    run_megatron_ranks(save_megatron_fsdp, 2, tmp_path / "f", given, arguments, progress)
    target = str(tmp_path / "c")
    words = ["--tp", "2"] if form == "dense" else ["--ep", "3"]
    assert main(["import", str(tmp_path / "f"), target, "--from", "dcp", *words, "-q"]) == 0
    assert verify_checkpoint(target).whole
    found = read_all(tmp_path / "c")
    fc1 = "mlp.linear_fc1.weight" if form == "dense" else "mlp.experts.experts.linear_fc1.weight"
    for prefix, scale in (("", 1.0), ("optimizer.state.param.", 1.0), ("optimizer.state.exp_avg.", 2.0)):
        for layer in range(2):
            here, stored = f"{prefix}decoder.layers.", f"decoder.layers.{layer}."
            own = [torch.cat([given[stored + gates[2 * n + half]] for half in (0, 1)]) * scale for n in experts]
            assert torch.equal(found[here + fc1][layer], own[0] if form == "dense" else torch.stack(own))
            for key, name in (
                ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
                ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
                ("self_attention.linear_qkv.weight",) * 2,
            ):
                assert torch.equal(found[here + key][layer], given[stored + name] * scale)
        rows = found[f"{prefix}embedding.word_embeddings.weight"]
        assert rows.shape == (64, HIDDEN)
        assert torch.equal(rows[:VOCABULARY], given["embedding.word_embeddings.weight"] * scale)
    with open_checkpoint(target) as opened:
        common = opened.common_state()
        counts = "_2" if form == "dense" else ".2_2.3"
        assert opened[f"decoder.layers.{fc1.removesuffix('weight')}_extra_state/shard_1{counts}"] in (None, [None])
    assert (common["args"].num_layers, common["args"].swiglu, common["iteration"]) == (2, True, 9)
    assert common["opt_param_scheduler"] == {**SCHEDULE, "num_steps": 72}
    assert common["num_floating_point_operations_so_far"] == 5e9
    optimizers = common["optimizer"] if form != "dense" else {0: common["optimizer"]}
    groups = [optimizers[number]["optimizer"]["param_groups"] for number in sorted(optimizers)]
    assert {group["step"] for own in groups for group in own} == {4}
    # Experts on several ranks have an optimizer of their own.
    assert [[(group["wd_mult"], group["is_expert_parallel"]) for group in own] for own in groups] == [
        [(1.0, False), (0.0, False)],
        *([] if form == "dense" else [[(1.0, True)]]),
    ]


class _Unknown:
    """What a launch may keep among its arguments."""


@pytest.mark.parametrize(
    ("without", "arguments", "message"),
    [
        (r"layers\.1\.", {}, r"expected 2 layers, .* and parameters are there of 1"),
        (r"experts\.3\.", {"num_experts": 4}, r"expected 4 experts, .* and parameters are there of 3"),
        (r"layers\.1.*experts\.3\..*fc1", {"num_experts": 4, "moe_layer_freq": [1, 1]}, r"experts\.3\.linear_fc1"),
        (r"layers\.1.*linear_proj", {}, r"layers\.1\.self_attention\.linear_proj\.weight is not there"),
        (r"nothing", {"untie_embeddings_and_output_weights": True}, r"output_layer\.weight is not there"),
    ],
)
def test_a_model_of_megatrons_that_is_incomplete_is_refused(
    tmp_path: Path, without: str, arguments: dict[str, Any], message: str
) -> None:
    mlp = [f"mlp.experts.local_experts.{n}.linear_fc{which}.weight" for n in range(4) for which in (1, 2)]
    given = layers_of(*(mlp if "num_experts" in arguments else ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]))
    model = {f"module.{key}": tensor for key, tensor in given.items() if not re.search(without, key)}
    stored = Namespace(**{**MEGATRON_ARGUMENTS, **arguments})
    dcp.save({"model": model, "args": stored, "iteration": 9}, checkpoint_id=tmp_path / "f")
    with pytest.raises(CorruptCheckpointError, match=message):
        import_checkpoint(tmp_path / "f", tmp_path / "c", kind="dcp")
    assert not (tmp_path / "c").exists()


def test_arguments_of_every_kind_are_carried_or_named(tmp_path: Path) -> None:
    given = layers_of("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
    kinds = {"window_size": (7, 0), "no_rope_freq": [0, 1], "params_dtype": torch.bfloat16, "moe": {"a": (1, None)}}
    stored = Namespace(**MEGATRON_ARGUMENTS, **kinds, odd=_Unknown())
    dcp.save({"model": given, "args": stored, "iteration": 9, "epoch": 2}, checkpoint_id=tmp_path / "dcp")
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "c", kind="dcp")
    assert report.left_out == ("epoch (no tensor)", "the argument odd (of a class that is not known here)")
    carried = common_of(tmp_path / "c")
    assert kinds.items() <= vars(carried["args"]).items()
    assert carried["iteration"] == 9
