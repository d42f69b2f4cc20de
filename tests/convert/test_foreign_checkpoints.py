"""Checkpoints that other frameworks have saved, as `torch_dist`: FSDP2's, by plain `torch.distributed.checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_ckpt.commands.cli import main
from mcore_ckpt.convert.huggingface import export_huggingface, import_huggingface
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.convert.test_exchange import read_by_definition
from tests.convert.test_huggingface import CONFIG, model_tensors
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
