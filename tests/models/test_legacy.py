"""Files of `--ckpt-format torch`, built by hand as Megatron builds them, come out as the tensors that they are of."""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.models.conversions import import_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.models.test_conversions import refused as import_refused
from tests.support.command import output_of
from tests.support.legacy_files import EMBEDDING, HEADS, HIDDEN, LAYER, LAYERS, Model
from tests.support.model_like import assert_same, read_all

refused = partial(import_refused, kind="megatron-legacy")


@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "ep", "dtype", "has_optimizer"),
    [
        (2, 1, 1, 0, torch.float32, True),
        (2, 2, 1, 0, torch.bfloat16, True),
        (1, 2, 2, 0, torch.bfloat16, False),
        (1, 1, 1, 1, torch.bfloat16, False),
        (2, 1, 1, 2, torch.bfloat16, True),
        (1, 2, 2, 2, torch.bfloat16, False),
    ],
)
def test_ranks_files_become_complete_tensors(
    tp: int, pp: int, vpp: int, ep: int, dtype: torch.dtype, has_optimizer: bool, tmp_path: Path
) -> None:
    model = Model(tp, pp, dtype, vpp=vpp, ep=ep)
    source, target = model.save(tmp_path / "iter_0000007", has_optimizer=has_optimizer), tmp_path / "first"
    left_out = import_checkpoint(source, target, kind="megatron-legacy").left_out
    assert ["--ckpt-convert-format torch_dist" in text for text in left_out] == [True] * has_optimizer
    assert_same(read_all(target), model.expected())
    assert verify_checkpoint(target).whole

    common = load_object((target / "common.pt").read_bytes())
    assert common["iteration"] == 7
    assert common["opt_param_scheduler"] == {"num_steps": 3}
    assert (common["args"].num_layers, common["args"].ckpt_format) == (LAYERS, "torch_dist")
    assert common["args"].params_dtype == dtype
    assert "optimizer" not in common
    objects = read_index(target).objects
    assert common["args"].no_save_rng
    assert not any(key.startswith("rng_state") for key in objects)
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4" in objects


def test_another_layout_and_dtype(tmp_path: Path) -> None:
    model = Model(2, 2, torch.bfloat16)
    source = model.save(tmp_path / "iter_0000007")
    arguments = [str(source), str(tmp_path / "target"), "--from", "megatron-legacy"]
    lines = output_of("import", *arguments, "--tp", "4", "--pp", "1", "--dry-run").splitlines()
    assert not (tmp_path / "target").exists()
    row = next(line for line in lines if "  decoder.layers.mlp.linear_fc1.weight " in line)
    assert row.split()[0] == "decoder.layers.*.mlp.linear_fc1.weight"
    assert "joined along axis 0, each half by itself, stacked" in row
    assert main(["import", *arguments, "--tp", "4", "--pp", "1", "--dtype", "fp32", "--quiet"]) == 0
    assert_same(read_all(tmp_path / "target"), {key: tensor.float() for key, tensor in model.expected().items()})
    assert len(read_index(tmp_path / "target").tensors[EMBEDDING].chunks) == 4


def test_a_run_becomes_a_run(tmp_path: Path) -> None:
    """Which a job takes by `--load`: there is a tracker file, and what it names."""
    run = tmp_path / "run"
    Model(1, 1, torch.bfloat16).save(run / "iter_0000007")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    import_checkpoint(run, tmp_path / "again", kind="megatron-legacy")
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert (tmp_path / "again" / "iter_0000007" / ".metadata").exists()


@pytest.mark.parametrize(("name", "tp"), [("mixer.in_proj.weight", 1), ("self_attention.conv1d.weight", 2)])
def test_what_ranks_keep_several_tensors_in_is_refused(
    name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYER, name, ((8 * HEADS, HIDDEN), 0, False))
    source = Model(tp, 1, torch.float32).save(tmp_path / "iter_0000007")
    refused(source, OptionError, rf"{re.escape(name)}: layers of Mamba and of linear attention")


def _changed(source: Path, folder: str, change: Any) -> None:
    file = source / folder / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def test_what_all_ranks_hold_has_to_be_the_same(tmp_path: Path) -> None:
    source = Model(2, 1, torch.float32).save(tmp_path / "iter_0000007")

    def change(state: dict[str, Any]) -> None:
        state["model"]["decoder.layers.2.input_layernorm.weight"][5] += 1

    _changed(source, "mp_rank_01", change)
    refused(source, CorruptCheckpointError, r"layer_norm_weight.*mp_rank_00.*mp_rank_01.*first in the slice at \[0\]")


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


FILE = "mp_rank_01/model_optim_rng.pt"


def _without_a_layer(state: dict[str, Any]) -> None:
    state["model"] = {key: value for key, value in state["model"].items() if ".layers.3." not in key}


def _with(key: str, value: Any, ranks: str = "mp_rank_01") -> Any:
    """These ranks hold this in the model."""
    return _changing(lambda state: state["model"].update({key: value}), ranks)


def _changing(change: Any, ranks: str = "mp_rank_*") -> Any:
    def spoil(source: Path) -> None:
        for folder in source.glob(ranks):
            _changed(source, folder.name, change)

    return spoil


def _counting(**more: int) -> Any:
    """A stranger's file of kilobytes may say that there are billions of something."""

    def change(state: dict[str, Any]) -> None:
        vars(state["args"]).update(more)
        state["model"]["decoder.layers.0.mlp.experts.linear_fc1._extra_state"] = None

    return _changing(change)


@pytest.mark.parametrize(
    "spoil",
    [
        _counting(num_experts=10**9),
        _counting(tensor_model_parallel_size=10**9),
        lambda source: shutil.rmtree(source / "mp_rank_01"),
        lambda source: os.truncate(source / FILE, (source / FILE).stat().st_size - 500),
        _changing(lambda state: state.update(iteration=8), "mp_rank_01"),
        _with(EMBEDDING, torch.zeros(3, HIDDEN)),
        _changing(_without_a_layer, "mp_rank_01"),
        _with("language_model", {"encoder": {}}),  # from before Megatron-Core
    ],
    ids=[
        *("counts experts", "counts ranks"),
        *("no rank", "truncated", "other iteration", "other shape", "no layer", "old"),
    ],
)
def test_files_that_are_not_one_checkpoint_end_in_errors_of_ours(spoil: Any, tmp_path: Path) -> None:
    source = Model(2, 1, torch.float32).save(tmp_path / "iter_0000007")
    spoil(source)
    refused(source, CheckpointError, f"{source}|mp_rank_0")


def test_a_lost_stage_without_layers_is_missed(tmp_path: Path) -> None:
    """It may hold the embedding, or the output layer, alone."""
    source = Model(1, 2, torch.float32).save(tmp_path / "iter_0000007")
    _changing(lambda state: vars(state["args"]).update(pipeline_model_parallel_size=3))(source)
    refused(source, CorruptCheckpointError, "pipeline stage 2 are not there")


def test_nothing_that_a_file_names_is_called_or_carried(tmp_path: Path) -> None:
    source = Model(1, 1, torch.float32).save(tmp_path / "iter_0000007", odd=_Harm(tmp_path / "made"))
    report = import_checkpoint(source, tmp_path / "target", kind="megatron-legacy")
    assert report.left_out == ("the argument odd (of a class that is not known here)",)
    assert not hasattr(load_object((tmp_path / "target" / "common.pt").read_bytes())["args"], "odd")
    _changed(source, "mp_rank_00", lambda state: state.update(opt_param_scheduler=[_Harm(tmp_path / "more")]))
    (tmp_path / "made").rmdir()  # which torch.load has made just now
    (tmp_path / "more").rmdir() if (tmp_path / "more").exists() else None
    refused(source, OptionError, "mkdir")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "more").exists()
