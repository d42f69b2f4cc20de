"""`export --to fsdp_dtensor`: what Megatron-FSDP loads, and what comes back from it."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.reshard.options import RenameRule
from mcore_ckpt.tools.diff import checkpoint_fingerprint
from tests.models.test_foreign_checkpoints import MEGATRON_ARGUMENTS, SCHEDULE, common_of, layers_of
from tests.support.model_like import assert_same, read_all

_GATED = ("mlp.linear_fc1.weight_w", "mlp.linear_fc1.weight_v", "mlp.linear_fc2.weight")
_MOMENTS = {"exp_avg": 2.0, "exp_avg_sq": 3.0}


def experts(grouped: bool) -> list[str]:
    """Names of three experts' parameters in a layer."""
    return [
        f"mlp.experts.linear_fc{which}.weight{expert}{half}"
        if grouped
        else f"mlp.experts.local_experts.{expert}.linear_fc{which}.weight{half}"
        for expert in range(3)
        for which, half in (("1", "_w"), ("1", "_v"), ("2", ""))
    ]


def torch_dist_of(place: Path, given: dict[str, torch.Tensor], arguments: dict[str, Any], **options: Any) -> Path:
    """A `torch_dist` checkpoint of a model that Megatron-FSDP could have saved under these names."""
    around = "module.module.module." if arguments.get("bf16") else "module.module."
    state: dict[str, Any] = {
        "model": {f"module.{key}": tensor for key, tensor in given.items()},
        "optimizer": {"state": {}, "param_to_group_meta": {}},
        "args": Namespace(**arguments),
        "iteration": 9,
        "opt_param_scheduler": {**SCHEDULE, "num_steps": 72},
        "checkpoint_version": 3.0,
    }
    for key, tensor in given.items():
        state["optimizer"]["state"][around + key] = {name: scale * tensor for name, scale in _MOMENTS.items()}
        meta = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "step": 4}
        state["optimizer"]["param_to_group_meta"][around + key] = meta
    dcp.save(state, checkpoint_id=place / "given")
    import_checkpoint(place / "given", place / "megatron" / "iter_0000009", kind="dcp", **options)
    return place / "megatron" / "iter_0000009"


@pytest.mark.parametrize("grouped", [False, True])
def test_an_export_has_what_megatron_fsdp_saves_of_experts(tmp_path: Path, grouped: bool) -> None:
    given = layers_of(*experts(grouped))
    arguments = {**MEGATRON_ARGUMENTS, "vocab_size": 64, "num_experts": 3, "moe_grouped_gemm": grouped}
    given["embedding.word_embeddings.weight"] = torch.randn(64, 16)
    arguments["transformer_impl"] = "transformer_engine" if grouped else "local"
    if grouped:  # as Transformer Engine has it
        for layer in range(2):
            norm = given.pop(f"decoder.layers.{layer}.input_layernorm.weight")
            given[f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight"] = norm
    source = torch_dist_of(tmp_path, given, arguments, ep=3)
    export_checkpoint(source, tmp_path / "fsdp", to="fsdp_dtensor")
    expected, found = read_all(tmp_path / "given"), read_all(tmp_path / "fsdp")
    steps = {key: found.pop(key) for key in list(found) if key.endswith(".step")}
    assert {float(step) for step in steps.values()} == {4.0}
    assert_same(found, expected)
    import_checkpoint(tmp_path / "fsdp", tmp_path / "back", kind="dcp", ep=3)
    assert checkpoint_fingerprint(tmp_path / "back") == checkpoint_fingerprint(source)
    assert common_of(tmp_path / "back")["optimizer"] == common_of(source)["optimizer"]
    weights = export_checkpoint(source, tmp_path / "weights", to="fsdp_dtensor", drop_optimizer=True)
    assert_same(read_all(tmp_path / "weights"), {key: t for key, t in expected.items() if key.startswith("model.")})
    assert weights.left_out[0].endswith("(a job is given --no-load-optim)")


def test_what_has_no_place_in_megatron_fsdp_is_refused(tmp_path: Path) -> None:
    given = layers_of(*_GATED)
    source = torch_dist_of(tmp_path, given, {**MEGATRON_ARGUMENTS, "transformer_impl": "local"})

    def renamed(pattern: str, new: str, folder: str) -> Path:
        rename = [RenameRule(re.compile(pattern), new)]
        export_checkpoint(source, tmp_path / f"{folder}-files", to="dcp", rename=rename)
        shutil.copyfile(source / "common.pt", tmp_path / "common.pt")
        import_checkpoint(tmp_path / f"{folder}-files", tmp_path / folder, common=tmp_path / "common.pt")
        return tmp_path / folder

    # of the optimizer; of the model
    for pattern, new, error, message in (
        (r"exp_avg\.", "momentum.", OptionError, r"momentum\..* is no state of Adam.*--drop-optimizer"),
        (r"optimizer\.state\.exp_avg\.", "optimizer.distributed.", OptionError, "expected fully_reshardable"),
        (r"exp_avg\.embedding.*", None, CorruptCheckpointError, "does not fit the model.*embedding.word_embeddings"),
        (r"^decoder\.layers\.", "encoder.layers.", OptionError, "known of a decoder's layers"),
        (r"\.mlp\.linear_fc2", ".mixer.in_proj", OptionError, "modules of Mamba and of linear attention"),
        (r"mlp\.linear_fc2", "mlp.experts.linear", OptionError, "experts in this form"),
    ):
        changed = renamed(pattern, new, f"{len(pattern)}")  # type: ignore[arg-type]
        with pytest.raises(error, match=message):
            export_checkpoint(changed, tmp_path / "x", to="fsdp_dtensor", drop_optimizer="exp_avg" not in pattern)
    assert not (tmp_path / "x").exists()
    export_checkpoint(source, tmp_path / "files", to="dcp")
    import_checkpoint(tmp_path / "files", tmp_path / "bare")
    with pytest.raises(OptionError, match="no arguments of Megatron"):
        export_checkpoint(tmp_path / "bare", tmp_path / "x", to="fsdp_dtensor")
