"""Checkpoints that other frameworks have saved: FSDP2's, by plain `torch.distributed.checkpoint`, and NeMo's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.commands.cli import main
from mcore_ckpt.convert.export import export_checkpoint
from mcore_ckpt.convert.huggingface import export_huggingface, import_huggingface
from mcore_ckpt.convert.import_ import import_checkpoint
from mcore_ckpt.convert.rules import RenameRule
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.convert.test_exchange import read_by_definition
from tests.convert.test_huggingface import CONFIG, FFN, GROUPS, HEAD, HEADS, HIDDEN, LAYERS, model_tensors, write_hf
from tests.support.fsdp_ranks import save_fsdp
from tests.support.gloo_ranks import run_ranks
from tests.support.model_like import assert_same

# Sizes that no number of ranks divides: FSDP2 gives the last ranks less, or nothing.
VOCABULARY, RANKS = 50, 3


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, `wrapped` and `trained`: what three ranks have saved of the same model, and its `config.json`."""
    root = tmp_path_factory.mktemp("fsdp")
    (root / "config.json").write_text(json.dumps(CONFIG))
    run_ranks(save_fsdp, RANKS, root, model_tensors())
    return root


@pytest.mark.parametrize("name", ["plain", "wrapped", "trained"])
def test_a_checkpoint_of_fsdp2_becomes_megatrons(fsdp: Path, tmp_path: Path, name: str) -> None:
    target = str(tmp_path / "c")
    words = ["import", str(fsdp / name), target, "--from", "dcp", "--hf-config", str(fsdp), "--tp", "2", "-q"]
    assert main(words) == 0
    assert verify_checkpoint(target).whole
    export_huggingface(target, tmp_path / "e")
    assert_same(read_by_definition(tmp_path / "e" / "model.safetensors"), model_tensors())


def test_a_dry_run_names_the_stored_keys(fsdp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import", str(fsdp / "wrapped"), "unused", "--from", "dcp", "--hf-config", str(fsdp), "--dry-run"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {key["hf"] for key in document["keys"]} == {f"app.model.{key}" for key in model_tensors()}
    assert "app.epoch (no tensor)" in document["left_out"]
    assert not Path("unused").exists()


def test_what_is_not_the_models_is_named(fsdp: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text(r"layers\.0\.input_layernorm  layers.0.renamed")
    with pytest.raises(OptionError, match=r"covers, the first app\.model\.model\.layers\.0\.renamed\.weight; 1 that"):
        import_huggingface(fsdp / "wrapped", tmp_path / "c", hf_config=fsdp, rename=rules)
    assert main(["import", str(fsdp / "plain"), str(tmp_path / "c"), "--from", "dcp"]) == 2
    assert not list(tmp_path.glob("c*"))


# As NeMo 2 writes it: every field of the configuration, callables by their names.
NEMO_CONFIG: dict[str, Any] = {
    "_cpu_offloading_context": None,
    "_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B",
    "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "attention_dropout": 0.0,
    "ffn_hidden_size": FFN,
    "gated_linear_unit": True,
    "hidden_size": HIDDEN,
    "high_freq_factor": 4.0,
    "init_method": {"_partial_": True, "_target_": "megatron.core.utils.init_method_normal", "sigma": 0.02},
    "kv_channels": HEAD,
    "layernorm_epsilon": 1e-06,
    "layernorm_zero_centered_gamma": False,
    "low_freq_factor": 1.0,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "multi_latent_attention": False,
    "normalization": "RMSNorm",
    "num_attention_heads": HEADS,
    "num_layers": LAYERS,
    "num_moe_experts": None,
    "num_query_groups": GROUPS,
    "old_context_len": 8192,
    "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
    "position_embedding_type": "rope",
    "qk_layernorm": False,
    "rotary_base": 500000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "scale_factor": 8.0,
    "seq_len_interpolation_factor": None,
    "seq_length": 64,
    "share_embeddings_and_output_weights": False,
    "vocab_size": None,
    "window_size": None,
}


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as NeMo 2 makes it: keys with `module.`, no arguments of Megatron, an optimizer, `context/`."""
    yaml = pytest.importorskip("yaml", reason="NeMo's configuration is YAML: pip install pyyaml")
    root = tmp_path_factory.mktemp("nemo")
    (root / "hf").mkdir()
    write_hf(root / "hf" / "model", model_tensors(), {**CONFIG, "vocab_size": VOCABULARY})
    import_huggingface(root / "hf" / "model", root / "megatron", tp=2, pp=2)
    export_checkpoint(root / "megatron", root / "files")
    state = {"optimizer.state.exp_avg.module.output_layer.weight": torch.ones(256, HIDDEN)}
    write_hf(root / "more", state)
    (root / "files" / "more.safetensors").write_bytes((root / "more" / "model.safetensors").read_bytes())
    common = {"epoch": 0, "global_step": 7, "pytorch-lightning_version": "2.4.0", "state_dict": {}, "loops": {}}
    torch.save({**common, "hparams_name": "kwargs"}, root / "common.pt")
    rename = [RenameRule(re.compile("^(?!optimizer)"), "module.")]
    import_checkpoint(root / "files", root / "nemo" / "weights", tp=2, rename=rename, common=root / "common.pt")
    (root / "nemo" / "context").mkdir()
    model = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": NEMO_CONFIG, "optim": None}
    (root / "nemo" / "context" / "model.yaml").write_text(yaml.safe_dump(model))
    (root / "nemo" / "context" / "io.json").write_text("{}")
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
    with open_checkpoint(nemo) as opened:
        assert opened.common_state()["global_step"] == 7
    with pytest.raises(CheckpointNotFoundError, match=r"NeMo keeps the checkpoint in .*/nemo/weights: use that"):
        FileSystemReader(nemo).read_metadata()


def test_a_nemo_directory_becomes_a_hugging_face_model(nemo: Path, tmp_path: Path) -> None:
    report = export_huggingface(nemo, tmp_path / "e")
    assert report.family == "llama"
    assert report.left_out == ("1 keys of the optimizer's state",)
    config = json.loads((tmp_path / "e" / "config.json").read_bytes())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert config["rope_scaling"] == {**scaling, "original_max_position_embeddings": 8192}
    assert {
        **CONFIG,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "rope_theta": 500000.0,
    }.items() <= config.items()
    # NeMo does not say how many of the embedding's rows are padding; a config.json does.
    assert "256 rows" in report.notes[0]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    export_huggingface(nemo, tmp_path / "k", hf_config=tmp_path)
    assert_same(read_by_definition(tmp_path / "k" / "model.safetensors"), model_tensors())
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 8, "head_dim": 4}))
    with pytest.raises(OptionError, match="num_attention_heads is 4"):
        export_huggingface(nemo, tmp_path / "x", hf_config=tmp_path)


def test_a_configuration_of_nemo_that_cannot_be_is_refused(nemo: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    shutil.copytree(nemo, tmp_path / "n")
    path = tmp_path / "n" / "context" / "model.yaml"
    for config, error, message in (
        ({**NEMO_CONFIG, "activation_func": "torch.relu"}, OptionError, r"model\.yaml: activation 'torch\.relu'"),
        ({**NEMO_CONFIG, "old_context_len": 4096}, OptionError, "old_context_len=4096: expected 8192"),
        ({}, CorruptCheckpointError, "says how many layers"),
    ):
        path.write_text(yaml.safe_dump({"config": config}))
        with pytest.raises(error, match=message):
            export_huggingface(tmp_path / "n", tmp_path / "e")
    path.write_text("a: !!python/object/apply:os.system ['touch /nowhere']\n[")
    with pytest.raises(CorruptCheckpointError, match="is no YAML"):
        export_huggingface(tmp_path / "n", tmp_path / "e")
    path.unlink()
    with pytest.raises(OptionError, match="stores no arguments of Megatron"):
        export_huggingface(tmp_path / "n", tmp_path / "e")
